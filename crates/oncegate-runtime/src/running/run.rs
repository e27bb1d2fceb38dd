//! Runs a closure once for a key: for a loop, a job, a cron tick, a tool of an agent.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep, timeout};

use super::policy::{AttemptLimit, Consequence, GiveUp, after_failure, outcome_of};
use crate::attempt::{Attempt, CANCELLATION_GRACE};
use crate::backoff::Backoff;
use crate::codec::{FromStored, ToStored};
use crate::failure::{BoxError, Failure};
use crate::gate::{Committed, Completion, Entry, Gate, GateError, Lease};
use crate::message::Message;
use crate::observe::{Event, RunOutcome};

/// The delays before a key that runs elsewhere is asked about again.
const BUSY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(2));

/// Runs closures under a gate's claims; [`Gate::runner`] makes one.
#[derive(Clone, Copy, Debug)]
#[must_use = "it runs nothing by itself"]
pub struct Runner<'a> {
    gate: &'a Gate,
    limit: AttemptLimit,
    backoff: Backoff,
    wait: Duration,
}

/// The result of work that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done<T> {
    /// Run by this call.
    Now(T),
    /// Run before, by another call or process: the stored result.
    Before(T),
}

impl<T> Done<T> {
    /// Returns the result, of this call or of another one.
    pub fn into_result(self) -> T {
        match self {
            Self::Now(result) | Self::Before(result) => result,
        }
    }
}

/// The reason for which work has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The work runs elsewhere, or its next attempt is not due: call again.
    #[error("the work runs elsewhere, or its next attempt is not due: call again in {retry_in:?}")]
    Busy {
        /// The time after which it is worth calling again.
        retry_in: Duration,
    },
    /// The attempt has failed, and another one may follow: call again.
    #[error("attempt {attempt} has no result: {reason}")]
    Failed {
        /// The number of the attempt.
        attempt: u32,
        /// The reason.
        reason: String,
        /// The time after which the next attempt is due.
        retry_in: Duration,
    },
    /// No attempt follows: one has failed for good, or all are used up.
    #[error("the work was given up: {reason}")]
    GivenUp {
        /// The reason.
        reason: String,
    },
    /// The key is known with other content.
    #[error("the key is known with other content: the fingerprints differ")]
    Mismatch,
    /// The work is done, and its result cannot be had.
    #[error("the work is done, and its result cannot be read: {0}")]
    Result(BoxError),
    /// Nothing was claimed.
    #[error(transparent)]
    Gate(#[from] GateError),
}

impl Gate {
    /// Runs `work` once for the key of `message`, and returns its result. A later call with the
    /// same key, in whatever process, gets the first result, and runs nothing.
    ///
    /// The rules are those of a [`Handler`](crate::Handler): heartbeats extend the claim while
    /// `work` runs, `?` on any error means "try again", and [`Failure::permanent`] gives up.
    /// Nothing is tried again by itself: the error says when the next attempt is due, and the call
    /// that comes then makes it. [`runner`](Self::runner) has the settings: at most 10 attempts,
    /// and no wait for work that runs elsewhere.
    ///
    /// If the returned future is dropped while `work` runs, that ends like a crash: the lease
    /// lapses, and the next attempt is marked as [recovered](Attempt::recovered). A panic counts as
    /// a failed attempt, and goes on.
    ///
    /// ```
    /// use oncegate::running::Done;
    /// use oncegate::{Attempt, Gate, Key, MemoryStore, Message};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), oncegate::BoxError> {
    /// let gate = Gate::new("reports", Key::message_key(), MemoryStore::new());
    /// let report = Message::keyed("nightly", "2026-11-29");
    /// let work = async |_: Attempt| Ok::<_, oncegate::Failure>("12 pages".to_owned());
    ///
    /// assert_eq!(gate.run(&report, work).await?, Done::Now("12 pages".to_owned()));
    /// assert_eq!(gate.run(&report, work).await?, Done::Before("12 pages".to_owned()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`RunError`]. What is not known to have happened is an error.
    pub async fn run<T, W>(
        &self,
        message: &Message,
        work: impl FnOnce(Attempt) -> W,
    ) -> Result<Done<T>, RunError>
    where
        T: ToStored + FromStored,
        W: Future<Output = Result<T, Failure>>,
    {
        self.runner().run(message, work).await
    }

    /// Returns a runner, for settings of [`run`](Self::run).
    pub fn runner(&self) -> Runner<'_> {
        Runner {
            gate: self,
            limit: AttemptLimit(10),
            backoff: Backoff::DEFAULT,
            wait: Duration::ZERO,
        }
    }
}

impl Runner<'_> {
    /// Gives up after so many attempts, 10 by default. Those that end their process count.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.limit = AttemptLimit(attempts);
        self
    }

    /// The delays between attempts, [`Backoff::DEFAULT`] by default.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Waits for up to so long for the result of work that runs elsewhere, or until an attempt is
    /// due. By default it does not wait, and the error is [`RunError::Busy`].
    pub fn wait(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// Runs `work` once for the key of `message`, as [`Gate::run`] does.
    ///
    /// # Errors
    /// As of [`Gate::run`].
    pub async fn run<T, W>(
        self,
        message: &Message,
        work: impl FnOnce(Attempt) -> W,
    ) -> Result<Done<T>, RunError>
    where
        T: ToStored + FromStored,
        W: Future<Output = Result<T, Failure>>,
    {
        let give_up_at = Instant::now() + self.wait;
        let mut asked = 0;
        let mut work = Some(work);
        loop {
            let retry_in = match self.gate.enter(message).await? {
                Entry::Granted(lease) => match work.take() {
                    Some(work) => match self.attempt(lease, work).await? {
                        Some(result) => return Ok(Done::Now(result)),
                        // Another owner has taken over: its result counts.
                        None => continue,
                    },
                    None => {
                        let reason = "its work was called before, and another owner is gone";
                        lease.release(Duration::ZERO, false, reason).await;
                        return Err(RunError::Busy {
                            retry_in: Duration::ZERO,
                        });
                    }
                },
                Entry::Completed(stored) => {
                    return stored.decode().map(Done::Before).map_err(RunError::Result);
                }
                Entry::Failed { reason, .. } => return Err(RunError::GivenUp { reason }),
                Entry::Mismatch => return Err(RunError::Mismatch),
                Entry::Busy { retry_in } => retry_in,
            };
            asked += 1;
            let pause = retry_in.min(BUSY_BACKOFF.wait(asked, self.gate.fraction()));
            if Instant::now() + pause > give_up_at {
                return Err(RunError::Busy { retry_in });
            }
            sleep(pause).await;
        }
    }

    /// Makes one attempt. `None`: another owner has taken over.
    async fn attempt<T, W>(
        &self,
        lease: Lease,
        work: impl FnOnce(Attempt) -> W,
    ) -> Result<Option<T>, RunError>
    where
        T: ToStored,
        W: Future<Output = Result<T, Failure>>,
    {
        let number = lease.attempt().number();
        if self.limit.is_over(number) {
            return self.give_up(lease, AttemptLimit::used_up(number)).await;
        }
        let began = Instant::now();
        let attempt = lease.attempt().clone();
        // The call itself may panic, too.
        let work = AssertUnwindSafe(async move { work(attempt).await }).catch_unwind();
        let ended = self.until_cancelled(&lease, work).await;
        let outcome = match &ended {
            None => RunOutcome::Cancelled,
            Some(Err(_panic)) => RunOutcome::Panicked,
            Some(Ok(Ok(_))) => RunOutcome::Succeeded,
            Some(Ok(Err(failure))) => outcome_of(failure),
        };
        let scope = self.gate.scope();
        self.gate.observe(Event::HandlerRan {
            scope,
            outcome,
            took: began.elapsed(),
        });
        let committed = if lease.is_attempted() {
            Some(lease.read_back().await)
        } else {
            None
        };
        match (committed, ended) {
            (Some(Committed::NotOwner), _) => Ok(None),
            (Some(Committed::Yes), Some(Ok(Ok(result)))) => Ok(Some(result)),
            (Some(Committed::Yes), _) => Ok(None),
            (_, None) => {
                let reason = "the work was cancelled, and did not end in time";
                let retry_in = lease.remaining();
                lease.discard(reason).await;
                Err(failed(number, reason.to_owned(), retry_in))
            }
            (_, Some(Err(panic))) => {
                let failure = Failure::retry("the work panicked");
                // Whatever becomes of that, the panic is what the caller must see.
                _ = self.failed::<T>(lease, &failure).await;
                resume_unwind(panic)
            }
            (_, Some(Ok(Err(failure)))) => self.failed(lease, &failure).await,
            (Some(Committed::No), Some(Ok(Ok(_)))) => {
                let failure = lease.not_committed();
                self.failed(lease, &failure).await
            }
            (None, Some(Ok(Ok(_)))) if self.gate.settings.transactional => {
                let failure = Failure::retry(
                    "the work has returned without `Attempt::commit_with`, and its gate is `transactional()`",
                );
                self.failed(lease, &failure).await
            }
            (None, Some(Ok(Ok(result)))) => match lease.complete(&result).await {
                Ok(Completion::NotOwner) => Ok(None),
                Ok(Completion::Applied) => Ok(Some(result)),
                Err(not_kept) => {
                    tracing::warn!(scope, error = %not_kept, "the work is recorded without its result");
                    self.gate.observe(Event::ResultNotKept { scope });
                    Ok(Some(result))
                }
            },
        }
    }

    /// Waits for the end of the work; `None` if it is cancelled, and does not end in time.
    async fn until_cancelled<R>(&self, lease: &Lease, work: impl Future<Output = R>) -> Option<R> {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            ended = &mut work => Some(ended),
            () = lease.discarded().cancelled() => {
                let grace = self.gate.settings.lease.min(CANCELLATION_GRACE);
                timeout(grace, work).await.ok()
            }
        }
    }

    /// Ends an attempt that has failed.
    async fn failed<T>(&self, lease: Lease, failure: &Failure) -> Result<Option<T>, RunError> {
        let attempt = lease.attempt().number();
        let reason = failure.reason();
        let counted = !lease.was_cut_short();
        let (delay, counted) = match after_failure(failure.advice(), attempt, counted, self.limit) {
            Consequence::GiveUp(
                GiveUp::Permanent | GiveUp::AttemptsUsedUp | GiveUp::OutcomeUnknown,
            ) => {
                return self.give_up(lease, reason).await;
            }
            Consequence::Retry { after, counted } => {
                let delay =
                    after.unwrap_or_else(|| self.backoff.wait(attempt, self.gate.fraction()));
                (delay, counted)
            }
            Consequence::Later { after } => (after, false),
            Consequence::Unknown => {
                let retry_in = lease.remaining();
                // Nothing is written: it lapses, and the next attempt is marked as recovered.
                drop(lease);
                return Err(failed(attempt, reason, retry_in));
            }
        };
        lease.release(delay, counted, &reason).await;
        Err(failed(attempt, reason, delay))
    }

    async fn give_up<T>(&self, lease: Lease, reason: String) -> Result<Option<T>, RunError> {
        match lease.fail(&reason).await {
            Completion::Applied => Err(RunError::GivenUp { reason }),
            Completion::NotOwner => Ok(None),
        }
    }
}

fn failed(attempt: u32, reason: String, retry_in: Duration) -> RunError {
    RunError::Failed {
        attempt,
        reason,
        retry_in,
    }
}
