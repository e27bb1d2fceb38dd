//! The handler under trial, with its runs written down.

use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use oncegate_runtime::codec::{Codec, ToStored as _};
use oncegate_runtime::{Attempt, BoxError, Failure, Handler, Message};

use super::process::Process;
use super::{CallFault, Round};
use crate::history::{Outcome, What, digest};

/// A handler whose runs are written down.
pub(crate) struct Watched<H> {
    pub(super) inner: H,
    pub(super) round: Arc<Round>,
    pub(super) process: Arc<Process>,
}

/// Writes the end of a run down, also when the run is dropped.
struct RunGuard<'a> {
    run: u64,
    process: u32,
    round: &'a Round,
    ended: Option<(Outcome, Option<String>)>,
}

impl Drop for RunGuard<'_> {
    fn drop(&mut self) {
        let (outcome, result) = self.ended.take().unwrap_or((Outcome::Dropped, None));
        self.round.active.end(self.run);
        self.round.recorder.note(self.process, What::Ended { run: self.run, outcome, result });
    }
}

impl<H: Handler> Handler for Watched<H> {
    type Output = H::Output;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<H::Output, Failure> {
        let (number, process) = (self.round.number_of(message), self.process.number);
        let run = self.round.active.begin(process, self.round.sample_of(number), false);
        let began =
            What::Began { run, message: number, attempt: attempt.number(), recovered: attempt.recovered() };
        self.round.recorder.note(process, began);
        let mut guard = RunGuard { run, process, round: &self.round, ended: None };
        let fault = self.round.run_fault(&self.process, self.round.sample_of(number));
        let ended = {
            let work = self.under_fault(fault, self.inner.handle(message, attempt));
            let mut work = std::pin::pin!(work);
            tokio::select! {
                biased;
                ended = &mut work => ended,
                () = attempt.cancelled() => {
                    self.round.recorder.note(process, What::Cancelled { run });
                    work.await
                }
            }
        };
        guard.ended = Some(match &ended {
            Ok(output) => {
                (Outcome::Completed, output.to_stored(Codec::Json).ok().map(|bytes| result_digest(&bytes)))
            }
            Err(failure) if failure.is_permanent() => (Outcome::GaveUp, None),
            Err(failure) if failure.is_later() => (Outcome::Later, None),
            Err(_) => (Outcome::Failed, None),
        });
        ended
    }

    async fn duplicate(&self, message: &Message, result: H::Output) -> Result<(), Failure> {
        let _told = self.told(message);
        self.inner.duplicate(message, result).await
    }

    async fn undecodable_duplicate(&self, message: &Message, stored: Bytes, error: BoxError) {
        let _told = self.told(message);
        self.inner.undecodable_duplicate(message, stored, error).await;
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
            Some(CallFault::Freeze(time)) => {
                // The handler goes on, and its completion comes when another process has taken over.
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
        let (number, process) = (self.round.number_of(message), self.process.number);
        self.round.recorder.note(process, What::ToldOfDuplicate { message: number });
        let number = self.round.active.begin(process, self.round.sample_of(number), true);
        Told { number, round: &self.round }
    }
}

/// A digest of a stored result, in which the order of members makes no difference.
fn result_digest(stored: &[u8]) -> String {
    let json =
        stored.split_first().and_then(|(_, json)| serde_json::from_slice::<serde_json::Value>(json).ok());
    match json {
        // Objects are sorted maps.
        Some(value) => digest(value.to_string().as_bytes()),
        None => digest(stored),
    }
}
