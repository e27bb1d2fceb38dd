//! A handler and the database whose transactions it is given, and one run of both.

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

use super::shared::{BatchCaller, Batches};
use super::work::{ConsumerHandler, Work, sealed};
use crate::attempt::Attempt;
use crate::batch::BatchLimits;
use crate::codec::{Codec, FromStored as _};
use crate::failure::{BoxError, Failure};
use crate::gate::TransactionRun;
use crate::handler::{BoxFuture, Encoded, ErasedHandler};
use crate::message::Message;
use crate::observe::{Event, RunOutcome};
use crate::transaction::Completing;
use crate::transactional::{
    Begun, CommitError, Excuse, Ground, Sessions, TransactionalBatchHandler, TransactionalHandler,
    Transactions,
};

mod batches;

use batches::OfOne;
pub(super) use batches::{BatchEnd, ErasedTransactionalBatches, Rest};

/// A [`TransactionalHandler`] with the database that opens its transactions; pass it to
/// [`Consumer::new`](crate::Consumer::new) or [`route`](crate::Consumer::route) in the place of a handler.
///
/// The database is that of the gate's store: `store.transactions()` of `PostgresStore` and `SqliteStore`, or
/// `store.sqlx_transactions(pool)`. The consumer does not start with another one.
///
/// ```no_run
/// # #[cfg(all(feature = "postgres", feature = "kafka"))] mod example {
/// use oncegate::postgres::{PostgresStore, PostgresTransaction};
/// use oncegate::prelude::*;
///
/// struct Billing;
///
/// impl TransactionalHandler<PostgresTransaction> for Billing {
///     type Output = String;
///
///     async fn handle(
///         &self,
///         _: &Message,
///         _: &Attempt,
///         transaction: &mut PostgresTransaction,
///     ) -> Result<String, Failure> {
///         transaction.execute("UPDATE accounts SET balance = balance - 10 WHERE id = 4711", &[]).await?;
///         Ok("charged 4711".to_owned())
///     }
/// }
///
/// async fn run() -> Result<(), BoxError> {
///     let store = PostgresStore::connect("postgres://billing@localhost/billing").await?;
///     let billing = Transactional::new(store.transactions()?, Billing);
///     let gate = Gate::new("billing", Key::json(["order_id"]), store);
///     let source = KafkaSource::new("localhost:9092", "billing", ["orders"]);
///     Consumer::new(source, gate, billing).run_until(shutdown_signal()).await?;
///     Ok(())
/// }
/// # }
/// ```
pub struct Transactional {
    limit: Duration,
    /// Makes the work of a handler, with this limit.
    make: Box<dyn FnOnce(Duration) -> Work + Send + Sync>,
}

impl Transactional {
    /// 30 seconds.
    pub const DEFAULT_LIMIT: Duration = Duration::from_secs(30);

    /// The handler, in transactions of this database.
    pub fn new<D: Transactions>(database: D, handler: impl TransactionalHandler<D::Transaction>) -> Self {
        Self::of(move |limit| {
            let work = Arc::new(Erased { pair: Arc::new(Pair { database, handler }), limit });
            Work { handler: Arc::clone(&work) as _, transactional: Some(work), batches: None }
        })
    }

    /// The handler, in transactions of this database that have a batch within these limits each.
    ///
    /// ```no_run
    /// # #[cfg(feature = "postgres")] mod example {
    /// use oncegate::postgres::{PostgresStore, PostgresTransaction};
    /// use oncegate::prelude::*;
    ///
    /// struct Ledger;
    ///
    /// impl TransactionalBatchHandler<PostgresTransaction> for Ledger {
    ///     type Output = ();
    ///
    ///     async fn handle(
    ///         &self,
    ///         batch: &[BatchMessage],
    ///         transaction: &mut PostgresTransaction,
    ///     ) -> Result<Vec<Result<(), Failure>>, Failure> {
    ///         let bodies: Vec<&[u8]> = batch.iter().map(|one| one.message().payload()).collect();
    ///         let insert = "INSERT INTO ledger SELECT * FROM unnest($1::bytea[])";
    ///         transaction.execute(insert, &[&bodies]).await?;
    ///         Ok(batch.iter().map(|_| Ok(())).collect())
    ///     }
    /// }
    ///
    /// fn ledger(store: &PostgresStore) -> Result<Transactional, BoxError> {
    ///     Ok(Transactional::batched(store.transactions()?, BatchLimits::new(100), Ledger))
    /// }
    /// # }
    /// ```
    pub fn batched<D: Transactions>(
        database: D,
        limits: BatchLimits,
        handler: impl TransactionalBatchHandler<D::Transaction>,
    ) -> Self {
        Self::of(move |limit| {
            let pair = Arc::new(Pair { database, handler: OfOne(handler) });
            let work = Arc::new(Erased { pair, limit });
            let caller = BatchCaller::InTransaction(Arc::clone(&work) as _);
            let batches = Some(Batches { caller, limits });
            Work { handler: Arc::clone(&work) as _, transactional: Some(work), batches }
        })
    }

    fn of(make: impl FnOnce(Duration) -> Work + Send + Sync + 'static) -> Self {
        Self { limit: Self::DEFAULT_LIMIT, make: Box::new(make) }
    }

    /// The longest time that a transaction is open: 30 s by default, 100 ms to an hour. Then it is rolled back, on the
    /// server too, and the attempt counts as failed; a batch is split.
    ///
    /// Work that takes longer belongs in a [`Handler`](crate::Handler) that ends by
    /// [`Attempt::commit_with`](crate::Attempt::commit_with): its claim is kept by heartbeats, and no transaction is open
    /// while it works.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

impl std::fmt::Debug for Transactional {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transactional").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl ConsumerHandler for Transactional {}

impl sealed::Sealed for Transactional {
    fn into_work(self) -> Work {
        (self.make)(self.limit)
    }
}

/// A [`Transactional`] with its types erased.
pub(super) trait ErasedTransactional: ErasedHandler {
    fn limit(&self) -> Duration;

    fn descriptor(&self, scope: Scope) -> BoxFuture<'_, Result<Option<String>, StoreError>>;

    fn sessions(&self) -> Arc<dyn Sessions>;

    /// Runs the key's first attempt, which makes no claim.
    fn run(&self, run: TransactionRun) -> BoxFuture<'_, RunEnd>;
}

/// How a run without a claim ended.
#[derive(Debug)]
pub(super) enum RunEnd {
    /// Effect and COMPLETED are committed.
    Committed,
    /// There is a record of the key. The handler has not run.
    RecordExists,
    /// Another transaction holds the key. The handler has not run.
    Held,
    /// No transaction could be opened. The handler has not run.
    NotBegun(StoreError),
    /// It was rolled back because of another transaction, or because its connection was lost.
    Excused { excuse: Excuse, reason: String },
    /// The handler has failed, and its transaction is rolled back.
    Failed { failure: Failure, outcome: RunOutcome },
    /// The run was ended from outside, and its transaction is rolled back.
    Discarded,
    /// The commit was sent and not answered.
    Unknown(StoreError),
}

struct Erased<D, H> {
    pair: Arc<Pair<D, H>>,
    limit: Duration,
}

struct Pair<D, H> {
    database: D,
    handler: H,
}

impl<D: Transactions, H: TransactionalHandler<D::Transaction>> ErasedTransactional for Erased<D, H> {
    fn limit(&self) -> Duration {
        self.limit
    }

    fn descriptor(&self, scope: Scope) -> BoxFuture<'_, Result<Option<String>, StoreError>> {
        Box::pin(async move { self.pair.database.descriptor(&scope).await })
    }

    fn sessions(&self) -> Arc<dyn Sessions> {
        self.pair.database.sessions()
    }

    fn run(&self, run: TransactionRun) -> BoxFuture<'_, RunEnd> {
        let (pair, limit) = (Arc::clone(&self.pair), self.limit);
        if D::BLOCKS {
            Box::pin(async move {
                let ended = on_a_blocking_thread(async move { pair.run(&run, limit).await }).await;
                ended.unwrap_or_else(|error| RunEnd::Unknown(StoreError::unknown(error)))
            })
        } else {
            Box::pin(async move { pair.run(&run, limit).await })
        }
    }
}

impl<D: Transactions, H: TransactionalHandler<D::Transaction>> ErasedHandler for Erased<D, H> {
    /// Runs under a claim: the transaction completes it, and the record is read back.
    fn handle(
        &self,
        message: Message,
        attempt: Attempt,
        _: Codec,
    ) -> BoxFuture<'_, Result<Encoded, Failure>> {
        let (pair, limit) = (Arc::clone(&self.pair), self.limit);
        let run = async move { pair.run_claimed(&message, &attempt, limit).await };
        Box::pin(async move {
            let ran = if D::BLOCKS { on_a_blocking_thread(run).await? } else { run.await };
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

/// How the handler's future ended.
enum Handled<T> {
    Returned(Result<T, Failure>),
    Panicked,
    TooLong,
    Discarded,
}

impl<D: Transactions, H: TransactionalHandler<D::Transaction>> Pair<D, H> {
    /// The first attempt of a key without a record.
    async fn run(&self, run: &TransactionRun, limit: Duration) -> RunEnd {
        let unit = run.attempt().unit();
        let (mut transaction, hold) =
            match self.database.begin(&unit.beginning(), Ground::NoRecord, limit).await {
                Ok(Begun::Open(transaction, hold)) => (transaction, hold),
                Ok(Begun::RecordExists) => return RunEnd::RecordExists,
                Ok(Begun::Held) => return RunEnd::Held,
                Err(error) => return RunEnd::NotBegun(error),
            };
        if let Err(refused) = run.granted() {
            self.database.roll_back(transaction).await;
            return RunEnd::NotBegun(refused);
        }
        let started = Instant::now();
        let handled = tokio::select! {
            biased;
            handled = self.handle(run.message(), run.attempt(), &mut transaction, limit) => handled,
            () = run.discarded().cancelled() => Handled::Discarded,
        };
        let outcome = outcome_of(&handled);
        let (gate, took) = (run.gate(), started.elapsed());
        gate.observe(Event::HandlerRan { scope: gate.scope(), outcome, took });
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
                return RunEnd::Discarded;
            }
        };
        self.database.roll_back(transaction).await;
        let reason = failure.reason();
        run.rolled_back(&reason);
        match self.excuse(&failure) {
            Some(excuse) => RunEnd::Excused { excuse, reason },
            None => RunEnd::Failed { failure, outcome },
        }
    }

    async fn commit(
        &self,
        run: &TransactionRun,
        (transaction, hold): (D::Transaction, D::Hold),
        completing: Completing,
    ) -> RunEnd {
        let sent_at = Instant::now();
        let (excuse, error) = match self.database.commit(transaction, hold, &completing).await {
            Ok(()) => {
                run.committed(sent_at.elapsed());
                return RunEnd::Committed;
            }
            Err(CommitError::Unknown(error)) => return RunEnd::Unknown(error),
            Err(CommitError::Conflict(error)) => (Some(Excuse::Conflict), error),
            Err(CommitError::RolledBack(error)) => (None, error),
        };
        let failure = Failure::retry(error);
        let reason = failure.reason();
        run.rolled_back(&reason);
        match excuse {
            Some(excuse) => RunEnd::Excused { excuse, reason },
            None => RunEnd::Failed { failure, outcome: RunOutcome::Failed },
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
        let (mut transaction, hold) =
            match self.database.begin(&unit.beginning(), Ground::Claimed, limit).await {
                Ok(Begun::Open(transaction, hold)) => (transaction, hold),
                Ok(Begun::RecordExists | Begun::Held) => return Err(Failure::not_run("the key is locked")),
                Err(error) => return Err(Failure::not_run(error)),
            };
        let failure = match self.handle(message, attempt, &mut transaction, limit).await {
            Handled::Returned(Ok(output)) => {
                let completing = unit.completing(&output);
                drop(output);
                let committed = self.database.commit(transaction, hold, &completing).await;
                return committed.map_err(|error| match error {
                    CommitError::Conflict(error) => Failure::not_run(error),
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

const PANICKED: &str = "the handler panicked";

fn outcome_of<T>(handled: &Handled<T>) -> RunOutcome {
    match handled {
        Handled::Returned(Ok(_)) => RunOutcome::Succeeded,
        Handled::Returned(Err(failure)) => outcome_of_failure(failure),
        Handled::Panicked => RunOutcome::Panicked,
        Handled::TooLong | Handled::Discarded => RunOutcome::Cancelled,
    }
}

pub(super) fn outcome_of_failure(failure: &Failure) -> RunOutcome {
    if failure.is_permanent() {
        RunOutcome::GaveUp
    } else if failure.is_later() {
        RunOutcome::Later
    } else {
        RunOutcome::Failed
    }
}

fn too_long(limit: Duration) -> Failure {
    Failure::retry(format!(
        "the transaction was open for {limit:?} and was rolled back: raise `Transactional::limit`, or do work that takes \
         longer in a `Handler` that ends by `Attempt::commit_with`, with no transaction open meanwhile"
    ))
}
