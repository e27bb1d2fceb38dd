//! A worker in any language as a handler, of messages and of batches: maps its replies to the
//! handler's results.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::reason::one_line;
use oncegate_runtime::{Attempt, BatchHandler, BatchMessage, Documents, Failure, Handler, Message};
use tokio_util::sync::CancellationToken;

use crate::protocol::call::{AttemptInfo, Call, Order, WithdrawOnDrop};
use crate::protocol::reply::{BatchReply, Reply, WorkerResult};
use crate::worker::{Called, Worker};

/// The longest reason that is kept, in bytes.
const REASON_MAX_BYTES: usize = 1024;

/// A worker with the limits on each of its runs.
#[derive(Debug)]
pub struct WorkerHandler {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The longest time for which the worker may have a message; without it, the run's.
    pub timeout: Option<Duration>,
    /// The longest retry delay that a worker may request, and the delay of a message that it wants
    /// later without saying when.
    pub longest_delay: Duration,
    /// Called before each run. When it fails, the worker does not get the message.
    pub before: Option<BeforeRun>,
    /// Makes the documents that the worker gets in the place of payloads.
    pub documents: Option<Documents>,
}

/// A function that is called before a worker gets a message.
#[derive(Clone)]
pub struct BeforeRun(Arc<RunHook>);

/// Returns why a run must not happen.
type RunHook = dyn Fn(&Message, &Attempt) -> Result<(), String> + Send + Sync;

impl BeforeRun {
    /// Calls this function before each run. Its error says why the run must not happen.
    pub fn new(
        before: impl Fn(&Message, &Attempt) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(before))
    }
}

impl fmt::Debug for BeforeRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BeforeRun").finish_non_exhaustive()
    }
}

impl Handler for WorkerHandler {
    type Output = WorkerResult;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<WorkerResult, Failure> {
        self.begin(message, attempt)?;
        let message = self.delivered(message).await?;
        self.outcome(self.call(&message, attempt).await)
    }
}

impl WorkerHandler {
    /// Does what is to be done before the run.
    fn begin(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        match &self.before {
            Some(BeforeRun(before)) => before(message, attempt).map_err(Failure::not_run),
            None => Ok(()),
        }
    }

    /// The message as the worker gets it.
    async fn delivered(&self, message: &Message) -> Result<Message, Failure> {
        match &self.documents {
            Some(documents) => documents.of(message).await,
            None => Ok(message.clone()),
        }
    }

    /// Waits for the worker's answer, within the limits.
    async fn call(&self, message: &Message, attempt: &Attempt) -> Reply {
        let told = AttemptInfo::of(attempt);
        let call = Call::default();
        let _withdrawn = WithdrawOnDrop(call.clone());
        let work = async {
            match &self.worker.called {
                Called::Http(caller) => caller.call(message, &told, &call).await,
                Called::Exec(crew) => crew.hand_out(message, &told, &call).await,
                Called::Command(commands) => commands.run(message, &told, &call).await,
            }
        };
        let mut work = std::pin::pin!(work);
        let why = tokio::select! {
            biased;
            reply = &mut work => return reply,
            () = attempt.discarded() => cancelled(attempt),
            why = self.too_late(&call) => why,
        };
        if !call.withdraw() {
            return Reply::not_run(format!("{why} before the worker had the message"));
        }
        // With a worker on standard streams, the message stays in flight and keeps its permit until
        // the worker answers or has been replaced. Calls of other workers are dropped: the
        // connection is closed, the process killed.
        if let Called::Exec(_) = &self.worker.called
            && let Reply::NotRun { reason } = work.await
        {
            return Reply::NotRun { reason };
        }
        Reply::unknown(why)
    }

    /// Resolves when the timeout of a call that has begun is over, with words for that.
    async fn too_late(&self, call: &Call) -> String {
        call.begins().await;
        let Some(timeout) = self.timeout else {
            return std::future::pending().await;
        };
        tokio::time::sleep(timeout).await;
        format!("no answer within {timeout:?} (`timeout`)")
    }

    fn outcome(&self, reply: Reply) -> Result<WorkerResult, Failure> {
        match reply {
            Reply::Complete(work) => Ok(work),
            Reply::Retry {
                delay: Some(delay),
                reason,
            } => Err(Failure::retry_after(
                delay.min(self.longest_delay),
                shortened(reason),
            )),
            Reply::Retry {
                delay: None,
                reason,
            }
            | Reply::TooLong { reason } => Err(Failure::retry(shortened(reason))),
            // It asks for a time that the message needs, so the longest back-off is no limit, only
            // the default.
            Reply::Later { delay, reason } => Err(Failure::later(
                delay.unwrap_or(self.longest_delay),
                shortened(reason),
            )),
            Reply::DeadLetter { reason } => Err(Failure::permanent(shortened(reason))),
            Reply::Unknown { reason } => Err(Failure::unknown(shortened(reason))),
            Reply::NotRun { reason } => Err(Failure::not_run(shortened(reason))),
        }
    }
}

impl BatchHandler for WorkerHandler {
    type Output = WorkerResult;

    async fn handle(
        &self,
        batch: &[BatchMessage],
    ) -> Result<Vec<Result<WorkerResult, Failure>>, Failure> {
        batch
            .iter()
            .try_for_each(|one| self.begin(one.message(), one.attempt()))?;
        let mut delivered = Vec::with_capacity(batch.len());
        for one in batch {
            delivered.push(self.delivered(one.message()).await);
        }
        if delivered.iter().any(Result::is_err) {
            return Ok(delivered
                .into_iter()
                .map(|message| {
                    Err(message.err().unwrap_or_else(|| {
                        Failure::not_run("another message of its batch has no document")
                    }))
                })
                .collect());
        }
        let delivered = delivered.into_iter().flatten();
        let attempts = batch.iter().map(|one| AttemptInfo::of(one.attempt()));
        let orders = delivered
            .zip(attempts)
            .map(|(message, attempt)| Order { message, attempt })
            .collect();
        match self.call_batch(batch, orders).await {
            BatchReply::Each(replies) => Ok(replies
                .into_iter()
                .map(|reply| self.outcome(reply))
                .collect()),
            BatchReply::Whole(reply) => {
                // Nothing but a failure concerns the batch as a whole.
                self.outcome(reply).map(|_| Vec::new())
            }
        }
    }
}

impl WorkerHandler {
    /// Waits for the worker's answer to the batch, within the limits.
    async fn call_batch(&self, batch: &[BatchMessage], orders: Vec<Order>) -> BatchReply {
        let call = Call::default();
        let _withdrawn = WithdrawOnDrop(call.clone());
        let answered: Vec<CancellationToken> =
            batch.iter().map(|_| CancellationToken::new()).collect();
        let work = async {
            match &self.worker.called {
                Called::Http(caller) => caller.call_batch(&orders, &call).await,
                Called::Exec(crew) => {
                    crew.hand_out_batch(orders, &call, |place, reply| {
                        self.answer_early(batch, &answered, place, reply);
                    })
                    .await
                }
                Called::Command(_) => {
                    BatchReply::Whole(Reply::not_run("a command takes no batches: remove `batch`"))
                }
            }
        };
        // Those that are answered need no cancellation.
        let discarded = async {
            for (one, answered) in batch.iter().zip(&answered) {
                tokio::select! {
                    () = one.attempt().discarded() => {}
                    () = answered.cancelled() => {}
                }
            }
        };
        let mut work = std::pin::pin!(work);
        let why = tokio::select! {
            biased;
            reply = &mut work => return reply,
            () = discarded => batch
                .first()
                .map_or_else(String::new, |one| cancelled(one.attempt())),
            why = self.too_late(&call) => why,
        };
        if !call.withdraw() {
            return BatchReply::Whole(Reply::not_run(format!(
                "{why} before the worker had the batch"
            )));
        }
        // As for a single message: the batch keeps its permit until the worker has answered, or was
        // replaced.
        if let Called::Exec(_) = &self.worker.called {
            drop(work.await);
        }
        BatchReply::Whole(Reply::unknown(why))
    }

    /// Ends a message whose outcome the worker has said before those of the others.
    fn answer_early(
        &self,
        batch: &[BatchMessage],
        answered: &[CancellationToken],
        place: usize,
        reply: Reply,
    ) {
        if let (Some(one), Some(answered)) = (batch.get(place), answered.get(place)) {
            one.answer(self.outcome(reply));
            answered.cancel();
        }
    }
}

/// Returns why a run was cancelled.
fn cancelled(attempt: &Attempt) -> String {
    let why = if attempt.is_overrun() {
        "it ran for longer than `max_run`"
    } else {
        "the run was cancelled"
    };
    why.to_owned()
}

/// The reason on one line, cut to the longest that is kept.
fn shortened(mut reason: String) -> String {
    let end = (0..=REASON_MAX_BYTES.min(reason.len()))
        .rev()
        .find(|end| reason.is_char_boundary(*end));
    reason.truncate(end.unwrap_or_default());
    one_line(&reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_short_and_have_no_control_characters() {
        assert_eq!(shortened("a\u{1b}[b".to_owned()), "a[b");
        assert_eq!(
            shortened("no\nsuch\taccount\u{2028}7".to_owned()),
            "no such account 7"
        );
        assert_eq!(
            shortened("user\u{202e}gpj.exe\u{2066}".to_owned()),
            "usergpj.exe"
        );
        assert_eq!(shortened("ö".repeat(600)).len(), 1024);
    }
}
