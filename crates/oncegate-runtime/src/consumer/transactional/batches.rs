//! A transaction for many messages.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::store::StoreError;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::single::{
    Erased, Handled, Pair, on_a_blocking_thread, outcome_of_run, too_long, within,
};
use crate::attempt::Attempt;
use crate::batch::BatchMessage;
use crate::consumer::end::{PANICKED, outcome_of};
use crate::consumer::erased::{BatchEnd, ErasedTransactionalBatches, Rest, TransactionEnd};
use crate::consumer::trace;
use crate::failure::{BoxError, Failure};
use crate::gate::TransactionRun;
use crate::handler::BoxFuture;
use crate::message::Message;
use crate::observe::{BatchCall, Event, RunOutcome};
use crate::transaction::Completing;
use crate::transactional::{
    Begun, CommitError, Excuse, TransactionalBatchHandler, TransactionalHandler, Transactions,
};

/// A batch handler as one for single messages: a message that runs alone is a batch of one.
pub(super) struct OfOne<H>(pub(super) H);

impl<Tx: Send + 'static, H: TransactionalBatchHandler<Tx>> TransactionalHandler<Tx> for OfOne<H> {
    type Output = H::Output;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut Tx,
    ) -> Result<H::Output, Failure> {
        let batch = [BatchMessage::new(message.clone(), attempt.clone())];
        let mut outcomes = self.0.handle(&batch, transaction).await?;
        match (outcomes.len(), outcomes.pop()) {
            (1, Some(outcome)) => outcome,
            (count, _) => Err(miscounted(count, 1)),
        }
    }

    fn duplicate(
        &self,
        message: &Message,
        result: H::Output,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        self.0.duplicate(message, result)
    }

    fn undecodable_duplicate(
        &self,
        message: &Message,
        stored: Bytes,
        error: BoxError,
    ) -> impl Future<Output = ()> + Send {
        self.0.undecodable_duplicate(message, stored, error)
    }
}

/// The failure of a batch handler that returned too few or too many outcomes. It is not known which
/// outcome belongs to which message. The transaction is rolled back, so nothing is done.
fn miscounted(outcomes: usize, messages: usize) -> Failure {
    Failure::retry(format!(
        "the batch handler returned {outcomes} outcomes for {messages} messages"
    ))
}

impl<D: Transactions, H: TransactionalBatchHandler<D::Transaction>> ErasedTransactionalBatches
    for Erased<D, OfOne<H>>
{
    fn run_batch(
        &self,
        runs: Vec<Arc<TransactionRun>>,
        call: BatchCall,
    ) -> BoxFuture<'_, BatchEnd> {
        let pair = Arc::clone(&self.pair);
        let limit = self.limit;
        let count = runs.len();
        if D::BLOCKS {
            Box::pin(async move {
                let work = async move { pair.run_batch(&runs, call, limit).await };
                let ended = on_a_blocking_thread(work)
                    .await
                    .map_err(StoreError::unknown);
                ended.unwrap_or_else(|error| {
                    BatchEnd::all(count, || TransactionEnd::Unknown(error.clone()))
                })
            })
        } else {
            Box::pin(async move { pair.run_batch(&runs, call, limit).await })
        }
    }
}

/// The reason why a run that did not fail is rolled back.
const OTHERS_FAILED: &str = "other messages of the batch have failed; it runs again without them";

impl<D: Transactions, H: TransactionalBatchHandler<D::Transaction>> Pair<D, OfOne<H>> {
    /// Runs first attempts of keys without a record.
    async fn run_batch(
        &self,
        runs: &[Arc<TransactionRun>],
        call: BatchCall,
        limit: Duration,
    ) -> BatchEnd {
        let count = runs.len();
        let keys: Vec<Completing> = runs
            .iter()
            .map(|run| run.attempt().unit().beginning())
            .collect();
        let (transaction, holds) = match self.database.begin_batch(&keys, limit).await {
            Ok(Begun::Open(transaction, holds)) => (transaction, holds),
            Ok(Begun::RecordExists) => {
                return BatchEnd::all(count, || TransactionEnd::RecordExists);
            }
            Ok(Begun::Held) => return BatchEnd::none(count, Rest::Held),
            Err(error) => return BatchEnd::all(count, || TransactionEnd::NotBegun(error.clone())),
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

    /// Runs the handler with the messages whose keys the transaction has taken, and ends the
    /// transaction.
    async fn run_taken(
        &self,
        runs: &[&TransactionRun],
        (mut transaction, holds): (D::Transaction, Vec<D::Hold>),
        call: BatchCall,
        limit: Duration,
    ) -> BatchEnd {
        let count = runs.len();
        if let Some(refused) = runs.iter().find_map(|run| run.granted().err()) {
            self.database.roll_back(transaction).await;
            return BatchEnd::all(count, || TransactionEnd::NotBegun(refused.clone()));
        }
        let batch: Vec<BatchMessage> = runs
            .iter()
            .map(|run| BatchMessage::new(run.message().clone(), run.attempt().clone()))
            .collect();
        let scope = runs
            .first()
            .map(|run| run.gate().scope())
            .unwrap_or_default();
        runs.iter()
            .take(1)
            .for_each(|run| run.gate().observe(Event::BatchCalled { scope, call }));
        let started = Instant::now();
        let span = trace::batch(scope, &batch);
        let work = self
            .handler
            .0
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
                BatchEnd::all(count, || TransactionEnd::Discarded)
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
        BatchEnd { took, ..ended }
    }

    /// Commits if every outcome is a result. Otherwise the others run again without the failed
    /// messages.
    async fn end(
        &self,
        runs: &[&TransactionRun],
        outcomes: Vec<Result<H::Output, Failure>>,
        (transaction, holds): (D::Transaction, Vec<D::Hold>),
    ) -> BatchEnd {
        if outcomes.iter().all(Result::is_ok) {
            let outputs = outcomes.iter().flatten();
            let completing = runs
                .iter()
                .zip(outputs)
                .map(|(run, output)| run.attempt().unit().completing(output));
            let batch = holds.into_iter().zip(completing).collect();
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
            return BatchEnd::none(runs.len(), Rest::Excused { excuse, reason });
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
        BatchEnd {
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
    ) -> BatchEnd {
        let count = runs.len();
        let sent_at = Instant::now();
        let (excuse, error) = match self.database.commit_batch(transaction, batch).await {
            Ok(()) => {
                runs.iter().for_each(|run| run.committed(sent_at.elapsed()));
                return BatchEnd::all(count, || TransactionEnd::Committed);
            }
            Err(CommitError::Unknown(error)) => {
                return BatchEnd::all(count, || TransactionEnd::Unknown(error.clone()));
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
    ) -> BatchEnd {
        self.database.roll_back(transaction).await;
        rolled_back(runs, self.excuse(&failure), failure, outcome)
    }
}

/// The end of a transaction that is rolled back, and has failed for all its messages.
fn rolled_back(
    runs: &[&TransactionRun],
    excuse: Option<Excuse>,
    failure: Failure,
    outcome: RunOutcome,
) -> BatchEnd {
    let reason = failure.reason();
    runs.iter().for_each(|run| run.rolled_back(&reason));
    let rest = match excuse {
        Some(excuse) => Rest::Excused { excuse, reason },
        None => Rest::Failed { failure, outcome },
    };
    BatchEnd::none(runs.len(), rest)
}

/// Waits until every run is to be ended.
async fn all_discarded(runs: &[&TransactionRun]) {
    for run in runs {
        run.discarded().cancelled().await;
    }
}
