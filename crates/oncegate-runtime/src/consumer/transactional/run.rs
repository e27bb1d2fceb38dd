//! Runs a transactional handler in a transaction: with 1 to n messages whose keys are not claimed,
//! or with one message under its claim.

use std::error::Error;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use oncegate_core::key::Scope;
use oncegate_core::store::StoreError;
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};
use tracing::{Instrument as _, Span};

use crate::attempt::Attempt;
use crate::batch::BatchMessage;
use crate::codec::{Codec, FromStored as _};
use crate::consumer::end::PANICKED;
use crate::consumer::erased::{ErasedTransactional, Rest, RunEnd, TransactionEnd};
use crate::consumer::trace;
use crate::failure::{BoxError, Failure};
use crate::gate::{EXTENDS_PER_LEASE, TransactionRun};
use crate::handler::{BoxFuture, Encoded, ErasedHandler};
use crate::message::Message;
use crate::observe::{BatchCall, Event, RunOutcome};
use crate::running::policy::outcome_of;
use crate::transaction::Completing;
use crate::transactional::{
    BatchBegun, Begun, CommitError, Excuse, Ground, Sessions, TransactionalBatchHandler,
    Transactions,
};

pub(super) struct Erased<D, H> {
    pub(super) pair: Arc<Pair<D, H>>,
    pub(super) limit: Duration,
}

pub(super) struct Pair<D, H> {
    pub(super) database: D,
    pub(super) handler: H,
}

impl<D: Transactions, H: TransactionalBatchHandler<D::Transaction>> ErasedTransactional
    for Erased<D, H>
{
    fn limit(&self) -> Duration {
        self.limit
    }

    fn descriptor(&self, scope: Scope) -> BoxFuture<'_, Result<Option<String>, StoreError>> {
        Box::pin(async move { self.pair.database.descriptor(&scope).await })
    }

    fn sessions(&self) -> Arc<dyn Sessions> {
        self.pair.database.sessions()
    }

    fn run(
        &self,
        runs: Vec<Arc<TransactionRun>>,
        call: Option<BatchCall>,
    ) -> BoxFuture<'_, RunEnd> {
        let pair = Arc::clone(&self.pair);
        let limit = self.limit;
        let count = runs.len();
        let work = async move { pair.run(&runs, call, limit).await };
        if D::BLOCKS {
            Box::pin(async move {
                let ended = on_a_blocking_thread(work)
                    .await
                    .map_err(StoreError::unknown);
                ended.unwrap_or_else(|error| {
                    RunEnd::all(count, || TransactionEnd::Unknown(error.clone()))
                })
            })
        } else {
            Box::pin(work)
        }
    }
}

impl<D: Transactions, H: TransactionalBatchHandler<D::Transaction>> ErasedHandler for Erased<D, H> {
    /// Runs under a claim: the transaction completes it, and the record is read back.
    fn handle(
        self: Arc<Self>,
        message: Message,
        attempt: Attempt,
        _: Codec,
    ) -> BoxFuture<'static, Result<Encoded, Failure>> {
        let pair = Arc::clone(&self.pair);
        let limit = self.limit;
        let run = async move { pair.run_claimed(&message, &attempt, limit).await };
        Box::pin(async move {
            let ran = if D::BLOCKS {
                on_a_blocking_thread(run).await?
            } else {
                run.await
            };
            // Its transaction has stored the result, or nothing was stored.
            ran.map(|()| Ok(Bytes::new()))
        })
    }

    fn duplicate(
        &self,
        message: Message,
        stored: Bytes,
        lost: Option<BoxError>,
    ) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async move {
            let handler = &self.pair.handler;
            match lost.map_or_else(|| H::Output::from_stored(&stored), Err) {
                Ok(result) => handler.duplicate(&message, result).await,
                Err(error) => {
                    handler.undecodable_duplicate(&message, stored, error).await;
                    Ok(())
                }
            }
        })
    }
}

/// Runs a future whose steps block on a thread that may block.
///
/// # Errors
/// The runtime ends, or the future has panicked.
async fn on_a_blocking_thread<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, tokio::task::JoinError> {
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || runtime.block_on(work)).await
}

/// The end of a handler's future.
enum Handled<T> {
    Returned(Result<T, Failure>),
    Panicked,
    TooLong,
    Discarded,
}

/// The reason why a run that did not fail is rolled back.
const OTHERS_FAILED: &str = "other messages of the batch have failed; it runs again without them";

impl<D: Transactions, H: TransactionalBatchHandler<D::Transaction>> Pair<D, H> {
    /// Runs the first attempts of keys without a record.
    async fn run(
        &self,
        runs: &[Arc<TransactionRun>],
        call: Option<BatchCall>,
        limit: Duration,
    ) -> RunEnd {
        let count = runs.len();
        let (transaction, holds) = match self.begin(runs, call, limit).await {
            Ok(Begun::Open(transaction, holds)) => (transaction, holds),
            Ok(Begun::RecordExists) => return RunEnd::all(count, || TransactionEnd::RecordExists),
            Ok(Begun::Held) => return RunEnd::none(count, Rest::Held),
            Err(error) => return RunEnd::all(count, || TransactionEnd::NotBegun(error.clone())),
        };
        let is_taken: Vec<bool> = holds.iter().map(Option::is_some).collect();
        let taken = runs
            .iter()
            .zip(holds)
            .filter_map(|(run, hold)| Some((&**run, hold?)));
        let (runs, holds): (Vec<_>, Vec<_>) = taken.unzip();
        let ended = self
            .run_taken(&runs, (transaction, holds), call, limit)
            .await;
        ended.with_left_out(&is_taken)
    }

    /// Begins the transaction. In a batch, many messages wait for a key that is held, so it waits
    /// less long.
    async fn begin(
        &self,
        runs: &[Arc<TransactionRun>],
        call: Option<BatchCall>,
        limit: Duration,
    ) -> Result<BatchBegun<D::Transaction, D::Hold>, StoreError> {
        let keys: Vec<Completing> = runs
            .iter()
            .map(|run| run.attempt().completion().beginning())
            .collect();
        match (&keys[..], call) {
            ([key], None) => {
                let begun = self.database.begin(key, Ground::NoRecord, limit).await?;
                Ok(begun.map_hold(|hold| vec![Some(hold)]))
            }
            _ => self.database.begin_batch(&keys, limit).await,
        }
    }

    /// Runs the handler with the messages whose keys the transaction has taken, and ends the
    /// transaction.
    async fn run_taken(
        &self,
        runs: &[&TransactionRun],
        (mut transaction, holds): (D::Transaction, Vec<D::Hold>),
        call: Option<BatchCall>,
        limit: Duration,
    ) -> RunEnd {
        let count = runs.len();
        if let Some(refused) = runs.iter().find_map(|run| run.granted().err()) {
            self.database.roll_back(transaction).await;
            return RunEnd::all(count, || TransactionEnd::NotBegun(refused.clone()));
        }
        // The consumer has stopped while the transaction began.
        if runs.iter().any(|run| run.attempt().is_stopped()) {
            self.database.roll_back(transaction).await;
            return RunEnd::none(count, Rest::Held);
        }
        let batch: Vec<BatchMessage> = runs
            .iter()
            .map(|run| BatchMessage::new(run.message().clone(), run.attempt().clone()))
            .collect();
        let started = Instant::now();
        let span = call.map_or_else(Span::none, |call| called(&batch, runs, call));
        let work = self
            .handler
            .handle(&batch, &mut transaction)
            .instrument(span.clone());
        let handled = tokio::select! {
            biased;
            handled = within(limit, work) => handled,
            () = all_discarded(runs) => Handled::Discarded,
        };
        let took = started.elapsed();
        trace::ended(&span, outcome_of_run(&handled));
        let ended = match handled {
            Handled::Returned(Ok(outcomes)) if outcomes.len() == count => {
                self.end(runs, outcomes, (transaction, holds)).await
            }
            Handled::Returned(Ok(outcomes)) => {
                let failure = miscounted(outcomes.len(), count);
                drop(outcomes);
                self.roll_back_all(runs, transaction, failure, RunOutcome::Failed)
                    .await
            }
            Handled::Discarded => {
                self.database.roll_back(transaction).await;
                runs.iter().for_each(|run| run.rolled_back("cancelled"));
                RunEnd::all(count, || TransactionEnd::Discarded)
            }
            failed => {
                let outcome = outcome_of_run(&failed);
                let failure = match failed {
                    Handled::Returned(Err(failure)) => failure,
                    Handled::TooLong => too_long(limit),
                    _ => Failure::retry(PANICKED),
                };
                self.roll_back_all(runs, transaction, failure, outcome)
                    .await
            }
        };
        RunEnd { took, ..ended }
    }

    /// Commits if every outcome is a result. Otherwise the others run again without the failed
    /// messages.
    async fn end(
        &self,
        runs: &[&TransactionRun],
        outcomes: Vec<Result<H::Output, Failure>>,
        (transaction, holds): (D::Transaction, Vec<D::Hold>),
    ) -> RunEnd {
        if outcomes.iter().all(Result::is_ok) {
            let outputs = outcomes.iter().flatten();
            let completing = runs
                .iter()
                .zip(outputs)
                .map(|(run, output)| run.attempt().completion().completing(output));
            let batch: Vec<_> = holds.into_iter().zip(completing).collect();
            drop(outcomes);
            return self.commit_all(runs, transaction, batch).await;
        }
        // What was returned is dropped before the wait: it need not be shared between threads.
        let failures: Vec<Option<Failure>> = outcomes.into_iter().map(Result::err).collect();
        self.database.roll_back(transaction).await;
        let excused = failures
            .iter()
            .flatten()
            .find_map(|failure| Some((self.excuse(failure)?, failure.reason())));
        if let Some((excuse, reason)) = excused {
            runs.iter().for_each(|run| run.rolled_back(&reason));
            return RunEnd::none(runs.len(), Rest::Excused { excuse, reason });
        }
        let ends = runs.iter().zip(failures).map(|(run, failure)| {
            let Some(failure) = failure else {
                run.rolled_back(OTHERS_FAILED);
                return None;
            };
            run.rolled_back(&failure.reason());
            let outcome = outcome_of(&failure);
            Some(TransactionEnd::Failed { failure, outcome })
        });
        RunEnd {
            ends: ends.collect(),
            rest: Rest::RunAgain,
            took: Duration::ZERO,
        }
    }

    async fn commit_all(
        &self,
        runs: &[&TransactionRun],
        transaction: D::Transaction,
        batch: Vec<(D::Hold, Completing)>,
    ) -> RunEnd {
        let count = runs.len();
        let sent_at = Instant::now();
        let committed = match <[_; 1]>::try_from(batch) {
            Ok([(hold, completing)]) => self.database.commit(transaction, hold, &completing).await,
            Err(batch) => self.database.commit_batch(transaction, batch).await,
        };
        let (excuse, error) = match committed {
            Ok(()) => {
                runs.iter().for_each(|run| run.committed(sent_at.elapsed()));
                return RunEnd::all(count, || TransactionEnd::Committed);
            }
            Err(CommitError::Unknown(error)) => {
                return RunEnd::all(count, || TransactionEnd::Unknown(error.clone()));
            }
            Err(CommitError::Conflict(error)) => (Some(Excuse::Conflict), error),
            Err(CommitError::RolledBack(error)) => (None, error),
        };
        rolled_back(runs, excuse, Failure::retry(error), RunOutcome::Failed)
    }

    /// Rolls back a transaction that has failed for all its messages.
    async fn roll_back_all(
        &self,
        runs: &[&TransactionRun],
        transaction: D::Transaction,
        failure: Failure,
        outcome: RunOutcome,
    ) -> RunEnd {
        self.database.roll_back(transaction).await;
        rolled_back(runs, self.excuse(&failure), failure, outcome)
    }

    /// An attempt under a claim. When it returns, the record decides about the ack.
    async fn run_claimed(
        &self,
        message: &Message,
        attempt: &Attempt,
        limit: Duration,
    ) -> Result<(), Failure> {
        let completion = attempt.completion();
        let began = Instant::now();
        let (mut transaction, hold) = match self
            .database
            .begin(&completion.beginning(), Ground::Claimed, limit)
            .await
        {
            Ok(Begun::Open(transaction, hold)) => (transaction, hold),
            Ok(Begun::RecordExists | Begun::Held) => {
                return Err(Failure::not_run("the key is locked"));
            }
            Err(error) => return Err(Failure::not_run(error)),
        };
        if attempt.is_stopped() {
            self.database.roll_back(transaction).await;
            return Err(Failure::not_run("the consumer stops"));
        }
        let alone = self.handle_alone(message, attempt, &mut transaction);
        let failure = match within(limit, alone).await {
            Handled::Returned(Ok(output)) => {
                let completing = completion.completing(&output);
                drop(output);
                let committed = self.database.commit(transaction, hold, &completing).await;
                return committed.map_err(|error| match error {
                    CommitError::Conflict(error) => {
                        conflict(error, began.elapsed(), completing.limit())
                    }
                    CommitError::RolledBack(error) => Failure::retry(error),
                    CommitError::Unknown(error) => Failure::retry(error),
                });
            }
            Handled::Returned(Err(failure)) => failure,
            Handled::Panicked | Handled::Discarded => Failure::retry(PANICKED),
            Handled::TooLong => too_long(limit),
        };
        self.database.roll_back(transaction).await;
        Err(match self.excuse(&failure) {
            Some(Excuse::Conflict) => Failure::not_run(failure.into_error()),
            // It may be the message's doing: a statement that ends its session counts.
            Some(Excuse::ConnectionLost) | None => failure,
        })
    }

    async fn handle_alone(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut D::Transaction,
    ) -> Result<H::Output, Failure> {
        let batch = [BatchMessage::new(message.clone(), attempt.clone())];
        let mut outcomes = self.handler.handle(&batch, transaction).await?;
        match (outcomes.len(), outcomes.pop()) {
            (1, Some(outcome)) => outcome,
            (count, _) => Err(miscounted(count, 1)),
        }
    }

    /// Looks for the database's error in what the handler has returned.
    fn excuse(&self, failure: &Failure) -> Option<Excuse> {
        if failure.is_permanent() {
            return None;
        }
        let mut cause: Option<&(dyn Error + 'static)> = Some(failure.error());
        while let Some(error) = cause {
            if let Some(excuse) = self.database.excuse(error) {
                return Some(excuse);
            }
            cause = error.source();
        }
        None
    }
}

/// The failure of a transaction under a claim that was rolled back because of another one. That
/// costs no attempt, except when the other one may have been a heartbeat of the claim: it would be
/// in the way again. The claim is a little older than the transaction.
fn conflict(error: BoxError, took: Duration, lease: Duration) -> Failure {
    let until_heartbeat = lease / EXTENDS_PER_LEASE;
    if took < until_heartbeat * 3 / 4 {
        return Failure::not_run(error);
    }
    Failure::retry(format!(
        "{error}; the transaction took {took:?}, and a claim is extended each {until_heartbeat:?}, which conflicts with \
         REPEATABLE READ and SERIALIZABLE: raise `Gate::lease` to more than {EXTENDS_PER_LEASE} times as long, or use \
         READ COMMITTED"
    ))
}

/// Runs a handler within the limit of its transaction.
async fn within<T: Send>(
    limit: Duration,
    work: impl Future<Output = Result<T, Failure>> + Send,
) -> Handled<T> {
    let began = Instant::now();
    match timeout(limit, AssertUnwindSafe(work).catch_unwind()).await {
        // A handler that blocks its thread notices no timer.
        Ok(Ok(Ok(_))) if began.elapsed() > limit => Handled::TooLong,
        Ok(Ok(returned)) => Handled::Returned(returned),
        Ok(Err(_panic)) => Handled::Panicked,
        Err(_) => Handled::TooLong,
    }
}

fn outcome_of_run<T>(handled: &Handled<T>) -> RunOutcome {
    match handled {
        Handled::Returned(Ok(_)) => RunOutcome::Succeeded,
        Handled::Returned(Err(failure)) => outcome_of(failure),
        Handled::Panicked => RunOutcome::Panicked,
        Handled::TooLong | Handled::Discarded => RunOutcome::Cancelled,
    }
}

fn too_long(limit: Duration) -> Failure {
    Failure::retry(format!(
        "the transaction was open for {limit:?} and was rolled back: raise `Transactional::limit`, or do work that takes \
         longer in a `Handler` that ends by `Attempt::commit_with`, with no transaction open meanwhile"
    ))
}

/// The end of a transaction that is rolled back, and has failed for all its messages.
fn rolled_back(
    runs: &[&TransactionRun],
    excuse: Option<Excuse>,
    failure: Failure,
    outcome: RunOutcome,
) -> RunEnd {
    let reason = failure.reason();
    runs.iter().for_each(|run| run.rolled_back(&reason));
    let rest = match excuse {
        Some(excuse) => Rest::Excused { excuse, reason },
        None => Rest::Failed { failure, outcome },
    };
    RunEnd::none(runs.len(), rest)
}

/// Tells of a call of a batch handler, and makes its span.
fn called(batch: &[BatchMessage], runs: &[&TransactionRun], call: BatchCall) -> Span {
    let Some(gate) = runs.first().map(|run| run.gate()) else {
        return Span::none();
    };
    let scope = gate.scope();
    gate.observe(Event::BatchCalled { scope, call });
    trace::batch(scope, batch)
}

/// Waits until every run is to be ended.
async fn all_discarded(runs: &[&TransactionRun]) {
    for run in runs {
        run.discarded().cancelled().await;
    }
}

/// The failure of a batch handler that returned too few or too many outcomes. It is not known which
/// outcome belongs to which message. The transaction is rolled back, so nothing is done.
fn miscounted(outcomes: usize, messages: usize) -> Failure {
    Failure::retry(format!(
        "the batch handler returned {outcomes} outcomes for {messages} messages"
    ))
}
