//! A transaction for one message: without a claim, or under one.

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

use crate::attempt::Attempt;
use crate::codec::{Codec, FromStored as _};
use crate::consumer::end::{PANICKED, outcome_of};
use crate::consumer::erased::{ErasedTransactional, TransactionEnd};
use crate::failure::{BoxError, Failure};
use crate::gate::{EXTENDS_PER_LEASE, TransactionRun};
use crate::handler::{BoxFuture, Encoded, ErasedHandler};
use crate::message::Message;
use crate::observe::{Event, RunOutcome};
use crate::transaction::Completing;
use crate::transactional::{
    Begun, CommitError, Excuse, Ground, Sessions, TransactionalHandler, Transactions,
};

pub(super) struct Erased<D, H> {
    pub(super) pair: Arc<Pair<D, H>>,
    pub(super) limit: Duration,
}

pub(super) struct Pair<D, H> {
    pub(super) database: D,
    pub(super) handler: H,
}

impl<D: Transactions, H: TransactionalHandler<D::Transaction>> ErasedTransactional
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

    fn run(&self, run: Arc<TransactionRun>) -> BoxFuture<'_, TransactionEnd> {
        let pair = Arc::clone(&self.pair);
        let limit = self.limit;
        if D::BLOCKS {
            Box::pin(async move {
                let ended = on_a_blocking_thread(async move { pair.run(&run, limit).await }).await;
                ended.unwrap_or_else(|error| TransactionEnd::Unknown(StoreError::unknown(error)))
            })
        } else {
            Box::pin(async move { pair.run(&run, limit).await })
        }
    }
}

impl<D: Transactions, H: TransactionalHandler<D::Transaction>> ErasedHandler for Erased<D, H> {
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
pub(super) async fn on_a_blocking_thread<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, tokio::task::JoinError> {
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || runtime.block_on(work)).await
}

/// The end of a handler's future.
pub(super) enum Handled<T> {
    Returned(Result<T, Failure>),
    Panicked,
    TooLong,
    Discarded,
}

impl<D: Transactions, H: TransactionalHandler<D::Transaction>> Pair<D, H> {
    /// The first attempt of a key without a record.
    async fn run(&self, run: &TransactionRun, limit: Duration) -> TransactionEnd {
        let unit = run.attempt().unit();
        let (mut transaction, hold) = match self
            .database
            .begin(&unit.beginning(), Ground::NoRecord, limit)
            .await
        {
            Ok(Begun::Open(transaction, hold)) => (transaction, hold),
            Ok(Begun::RecordExists) => return TransactionEnd::RecordExists,
            Ok(Begun::Held) => return TransactionEnd::Held,
            Err(error) => return TransactionEnd::NotBegun(error),
        };
        if let Err(refused) = run.granted() {
            self.database.roll_back(transaction).await;
            return TransactionEnd::NotBegun(refused);
        }
        let started = Instant::now();
        let handled = tokio::select! {
            biased;
            handled = self.handle(run.message(), run.attempt(), &mut transaction, limit) => handled,
            () = run.discarded().cancelled() => Handled::Discarded,
        };
        let outcome = outcome_of_run(&handled);
        let gate = run.gate();
        let took = started.elapsed();
        gate.observe(Event::HandlerRan {
            scope: gate.scope(),
            outcome,
            took,
        });
        let failure = match handled {
            Handled::Returned(Ok(output)) => {
                let completing = unit.completing(&output);
                return self.commit(run, (transaction, hold), completing).await;
            }
            Handled::Returned(Err(failure)) => failure,
            Handled::Panicked => Failure::retry(PANICKED),
            Handled::TooLong => too_long(limit),
            Handled::Discarded => {
                self.database.roll_back(transaction).await;
                run.rolled_back("cancelled");
                return TransactionEnd::Discarded;
            }
        };
        self.database.roll_back(transaction).await;
        let reason = failure.reason();
        run.rolled_back(&reason);
        match self.excuse(&failure) {
            Some(excuse) => TransactionEnd::Excused { excuse, reason },
            None => TransactionEnd::Failed { failure, outcome },
        }
    }

    async fn commit(
        &self,
        run: &TransactionRun,
        (transaction, hold): (D::Transaction, D::Hold),
        completing: Completing,
    ) -> TransactionEnd {
        let sent_at = Instant::now();
        let (excuse, error) = match self.database.commit(transaction, hold, &completing).await {
            Ok(()) => {
                run.committed(sent_at.elapsed());
                return TransactionEnd::Committed;
            }
            Err(CommitError::Unknown(error)) => return TransactionEnd::Unknown(error),
            Err(CommitError::Conflict(error)) => (Some(Excuse::Conflict), error),
            Err(CommitError::RolledBack(error)) => (None, error),
        };
        let failure = Failure::retry(error);
        let reason = failure.reason();
        run.rolled_back(&reason);
        match excuse {
            Some(excuse) => TransactionEnd::Excused { excuse, reason },
            None => TransactionEnd::Failed {
                failure,
                outcome: RunOutcome::Failed,
            },
        }
    }

    /// An attempt under a claim. When it returns, the record decides about the ack.
    async fn run_claimed(
        &self,
        message: &Message,
        attempt: &Attempt,
        limit: Duration,
    ) -> Result<(), Failure> {
        let unit = attempt.unit();
        let began = Instant::now();
        let (mut transaction, hold) = match self
            .database
            .begin(&unit.beginning(), Ground::Claimed, limit)
            .await
        {
            Ok(Begun::Open(transaction, hold)) => (transaction, hold),
            Ok(Begun::RecordExists | Begun::Held) => {
                return Err(Failure::not_run("the key is locked"));
            }
            Err(error) => return Err(Failure::not_run(error)),
        };
        let failure = match self.handle(message, attempt, &mut transaction, limit).await {
            Handled::Returned(Ok(output)) => {
                let completing = unit.completing(&output);
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

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut D::Transaction,
        limit: Duration,
    ) -> Handled<H::Output> {
        within(limit, self.handler.handle(message, attempt, transaction)).await
    }

    /// Looks for the database's error in what the handler has returned.
    pub(super) fn excuse(&self, failure: &Failure) -> Option<Excuse> {
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
pub(super) async fn within<T: Send>(
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

pub(super) fn outcome_of_run<T>(handled: &Handled<T>) -> RunOutcome {
    match handled {
        Handled::Returned(Ok(_)) => RunOutcome::Succeeded,
        Handled::Returned(Err(failure)) => outcome_of(failure),
        Handled::Panicked => RunOutcome::Panicked,
        Handled::TooLong | Handled::Discarded => RunOutcome::Cancelled,
    }
}

pub(super) fn too_long(limit: Duration) -> Failure {
    Failure::retry(format!(
        "the transaction was open for {limit:?} and was rolled back: raise `Transactional::limit`, or do work that takes \
         longer in a `Handler` that ends by `Attempt::commit_with`, with no transaction open meanwhile"
    ))
}
