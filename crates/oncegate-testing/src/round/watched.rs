//! The handler under trial, with its runs written down.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use oncegate_runtime::codec::{Codec, ToStored};
use oncegate_runtime::source::Source;
use oncegate_runtime::{
    Attempt, BatchHandler, BatchLimits, BatchMessage, Batched, BoxError, Consumer, Failure, Gate,
    Handler, Message,
};

use super::Round;
use super::faults::CallFault;
use super::process::Process;
use crate::history::{Outcome, What, digest};

/// The parts from which a process starts its consumer.
pub(crate) struct Start {
    pub(crate) round: Arc<Round>,
    pub(crate) process: Arc<Process>,
    pub(crate) member: Arc<dyn Source>,
    pub(crate) gate: Gate,
}

/// A handler whose runs are written down.
pub(crate) struct Watched<H> {
    pub(super) inner: H,
    pub(super) round: Arc<Round>,
    pub(super) process: Arc<Process>,
}

/// A run whose end is written down once.
#[derive(Clone)]
struct OpenRun {
    run: u64,
    process: Arc<Process>,
    round: Arc<Round>,
    is_over: Arc<AtomicBool>,
}

impl OpenRun {
    fn end(&self, ended: Option<(Outcome, Option<String>)>) {
        if self.is_over.swap(true, Relaxed) {
            return;
        }
        // A process that was killed in the middle of a call reports nothing any more.
        let ended = ended.filter(|_| !self.process.is_killed());
        let (outcome, result) = ended.unwrap_or((Outcome::Dropped, None));
        self.round.active.end(self.run);
        self.round.recorder.note(
            self.process.number,
            What::Ended {
                run: self.run,
                outcome,
                result,
            },
        );
    }
}

/// Writes the end of a run down, also when the run is dropped.
struct RunGuard {
    open: OpenRun,
    /// `None` when the message stands for no event.
    sample: Option<usize>,
    ended: Option<(Outcome, Option<String>)>,
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.open.end(self.ended.take());
    }
}

impl RunGuard {
    fn end<T: ToStored>(&mut self, ended: &Result<T, Failure>) {
        self.ended = Some(match ended {
            Ok(output) => (
                Outcome::Completed,
                output
                    .to_stored(Codec::Json)
                    .ok()
                    .map(|bytes| result_digest(&bytes)),
            ),
            Err(failure) => (outcome_of(failure), None),
        });
    }
}

/// The message of a batch, whose run ends when it is answered before the others.
fn ending_early(one: &BatchMessage, open: &OpenRun) -> BatchMessage {
    let open = open.clone();
    one.clone().listened(move |outcome| {
        open.end(Some(match outcome {
            Ok(stored) => (
                Outcome::Completed,
                stored.as_ref().ok().map(|bytes| result_digest(bytes)),
            ),
            Err(failure) => (outcome_of(failure), None),
        }));
    })
}

fn outcome_of(failure: &Failure) -> Outcome {
    match failure {
        failure if failure.is_permanent() => Outcome::GaveUp,
        failure if failure.is_later() => Outcome::Later,
        _ => Outcome::Failed,
    }
}

impl<H: Handler> Handler for Watched<H> {
    type Output = H::Output;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<H::Output, Failure> {
        let mut guard = self.begun(message, attempt, None);
        let fault = self.round.run_fault(&self.process, guard.sample);
        let ended = {
            let work = self.under_fault(fault, self.inner.handle(message, attempt));
            let mut work = std::pin::pin!(work);
            tokio::select! {
                biased;
                ended = &mut work => ended,
                () = attempt.cancelled() => {
                    self.round.recorder.note(self.process.number, What::Cancelled { run: guard.open.run });
                    work.await
                }
            }
        };
        guard.end(&ended);
        ended
    }

    async fn duplicate(&self, message: &Message, result: H::Output) -> Result<(), Failure> {
        let _told = self.told(message);
        self.inner.duplicate(message, result).await
    }

    async fn undecodable_duplicate(&self, message: &Message, stored: Bytes, error: BoxError) {
        let _told = self.told(message);
        self.inner
            .undecodable_duplicate(message, stored, error)
            .await;
    }
}

/// Gives each message of a batch a run of its own.
impl<H: BatchHandler> BatchHandler for Watched<H> {
    type Output = H::Output;

    async fn handle(
        &self,
        batch: &[BatchMessage],
    ) -> Result<Vec<Result<H::Output, Failure>>, Failure> {
        let mut guards: Vec<RunGuard> = batch
            .iter()
            .map(|one| self.begun(one.message(), one.attempt(), Some(batch.len())))
            .collect();
        let batch: Vec<BatchMessage> = batch
            .iter()
            .zip(&guards)
            .map(|(one, guard)| ending_early(one, &guard.open))
            .collect();
        // Those of the other messages begin with their next runs.
        let fault = guards
            .iter()
            .find_map(|guard| self.round.run_fault(&self.process, guard.sample));
        let ended = {
            let work = self.under_fault(fault, self.inner.handle(&batch));
            let mut work = std::pin::pin!(work);
            let mut cancelled: FuturesUnordered<_> = batch
                .iter()
                .zip(&guards)
                .map(|(one, guard)| async move {
                    one.attempt().cancelled().await;
                    guard.open.run
                })
                .collect();
            loop {
                tokio::select! {
                    biased;
                    ended = &mut work => break ended,
                    Some(run) = cancelled.next() => {
                        self.round.recorder.note(self.process.number, What::Cancelled { run });
                    }
                }
            }
        };
        match &ended {
            Ok(outcomes) if outcomes.len() == guards.len() => {
                guards
                    .iter_mut()
                    .zip(outcomes)
                    .for_each(|(guard, outcome)| guard.end(outcome));
            }
            // A batch that is given up as a whole is split: nothing is said about a message of it,
            // unless it is alone.
            Err(failure) if guards.len() == 1 || !failure.is_permanent() => {
                guards
                    .iter_mut()
                    .for_each(|guard| guard.ended = Some((outcome_of(failure), None)));
            }
            _ => guards
                .iter_mut()
                .for_each(|guard| guard.ended = Some((Outcome::Failed, None))),
        }
        ended
    }

    async fn duplicate(&self, message: &Message, result: H::Output) -> Result<(), Failure> {
        let _told = self.told(message);
        self.inner.duplicate(message, result).await
    }

    async fn undecodable_duplicate(&self, message: &Message, stored: Bytes, error: BoxError) {
        let _told = self.told(message);
        self.inner
            .undecodable_duplicate(message, stored, error)
            .await;
    }
}

/// Ends the notice of a duplicate.
struct Told<'a> {
    number: u64,
    round: &'a Round,
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.round.active.end(self.number);
    }
}

impl<H: Handler> Watched<H> {
    /// The handler, watched, as a consumer of the process.
    pub(crate) fn consumer(handler: H, start: Start) -> Consumer {
        let Start {
            round,
            process,
            member,
            gate,
        } = start;
        Consumer::new(
            member,
            gate,
            Self {
                inner: handler,
                round,
                process,
            },
        )
    }
}

impl<H: BatchHandler> Watched<H> {
    /// The handler of batches, watched, as a consumer of the process.
    pub(crate) fn batch_consumer(limits: BatchLimits, handler: H, start: Start) -> Consumer {
        let Start {
            round,
            process,
            member,
            gate,
        } = start;
        Consumer::new(
            member,
            gate,
            Batched::new(
                limits,
                Self {
                    inner: handler,
                    round,
                    process,
                },
            ),
        )
    }
}

impl<H: Send + Sync> Watched<H> {
    /// Writes the beginning of a run down; `batch` is the number of messages in its batch.
    fn begun(&self, message: &Message, attempt: &Attempt, batch: Option<usize>) -> RunGuard {
        let number = self.round.number_of(message);
        let process = self.process.number;
        let sample = self.round.sample_of(number);
        let run = self.round.active.begin(process, number, sample, false);
        let recovered = attempt.recovered();
        let attempt = attempt.number();
        self.round.recorder.note(
            process,
            What::Began {
                run,
                message: number,
                attempt,
                recovered,
                batch,
            },
        );
        let open = OpenRun {
            run,
            process: Arc::clone(&self.process),
            round: Arc::clone(&self.round),
            is_over: Arc::default(),
        };
        RunGuard {
            open,
            sample,
            ended: None,
        }
    }

    /// Runs the handler under a fault that begins with its run.
    async fn under_fault<T: Send>(
        &self,
        fault: Option<CallFault>,
        work: impl Future<Output = T> + Send,
    ) -> T {
        let Self { round, process, .. } = self;
        match fault {
            Some(CallFault::KillBefore) => self.killed().await,
            Some(CallFault::KillAfter(time)) => {
                // Whichever comes first: the effect may be complete, or not.
                tokio::select! {
                    () = tokio::time::sleep(time) => {}
                    _ = work => {}
                }
                self.killed().await
            }
            Some(CallFault::Late(time)) => {
                round.hold(time).await;
                work.await
            }
            Some(CallFault::Overlap { sample, at_most }) => {
                round.overlapped(process, sample, at_most).await;
                work.await
            }
            Some(CallFault::Freeze(time)) => {
                // The handler goes on, and its completion comes when another process has taken
                // over.
                let (ended, ()) = tokio::join!(work, round.freeze(process, time));
                ended
            }
            _ => work.await,
        }
    }

    /// Kills the process, which drops the run.
    async fn killed<T: Send>(&self) -> T {
        self.round.kill(&self.process);
        std::future::pending().await
    }

    fn told(&self, message: &Message) -> Told<'_> {
        let number = self.round.number_of(message);
        let process = self.process.number;
        self.round
            .recorder
            .note(process, What::ToldOfDuplicate { message: number });
        let number = self
            .round
            .active
            .begin(process, number, self.round.sample_of(number), true);
        Told {
            number,
            round: &self.round,
        }
    }
}

/// A digest of a stored result, in which the order of members makes no difference.
fn result_digest(stored: &[u8]) -> String {
    let json = stored
        .split_first()
        .and_then(|(_, json)| serde_json::from_slice::<serde_json::Value>(json).ok());
    match json {
        // Objects are sorted maps.
        Some(value) => digest(value.to_string().as_bytes()),
        None => digest(stored),
    }
}

#[cfg(test)]
#[path = "watched_tests.rs"]
mod tests;
