//! A handler and the database whose transactions it is given.

use std::sync::Arc;
use std::time::Duration;

use super::route_handler::{ConsumerHandler, RouteHandler, sealed};
use crate::batch::BatchLimits;
use crate::transactional::{TransactionalBatchHandler, TransactionalHandler, Transactions};

mod run;
mod single;

use run::{Erased, Pair};
use single::Single;

/// A [`TransactionalHandler`] with the database that opens its transactions; pass it to
/// [`Consumer::new`](crate::Consumer::new) or [`route`](crate::Consumer::route) in the place of a
/// handler.
///
/// The database is that of the gate's store: `store.transactions()` of `PostgresStore` and
/// `SqliteStore`, or `store.sqlx_transactions(pool)`. The consumer does not start with another one.
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
    /// Erases the types, with this limit.
    make: Box<dyn FnOnce(Duration) -> RouteHandler + Send + Sync>,
}

impl Transactional {
    /// 30 seconds.
    pub const DEFAULT_LIMIT: Duration = Duration::from_secs(30);

    /// The handler, in transactions of this database.
    pub fn new<D: Transactions>(
        database: D,
        handler: impl TransactionalHandler<D::Transaction>,
    ) -> Self {
        Self::of(database, None, Single(handler))
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
        Self::of(database, Some(limits), handler)
    }

    fn of<D: Transactions>(
        database: D,
        limits: Option<BatchLimits>,
        handler: impl TransactionalBatchHandler<D::Transaction>,
    ) -> Self {
        let pair = Arc::new(Pair { database, handler });
        Self {
            limit: Self::DEFAULT_LIMIT,
            make: Box::new(move |limit| {
                let handler = Arc::new(Erased { pair, limit });
                RouteHandler {
                    limits,
                    transactional: Some(Arc::clone(&handler) as _),
                    ..RouteHandler::of(handler)
                }
            }),
        }
    }

    /// The longest time that a transaction is open: 30 s by default, 100 ms to an hour. Then it is
    /// rolled back, on the server too, and the attempt counts as failed; a batch is split.
    ///
    /// Work that takes longer belongs in a [`Handler`](crate::Handler) that ends by
    /// [`Attempt::commit_with`](crate::Attempt::commit_with): its claim is kept by heartbeats, and
    /// no transaction is open while it works.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

impl std::fmt::Debug for Transactional {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transactional")
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

impl ConsumerHandler for Transactional {}

impl sealed::Sealed for Transactional {
    fn erased(self) -> RouteHandler {
        (self.make)(self.limit)
    }
}
