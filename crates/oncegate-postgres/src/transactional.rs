//! Transactions that the runtime opens for handlers.
//!
//! The first round trip begins, sets the limits and writes the record; the last one stores the
//! result and commits. So a transaction has as many round trips as one without a record.
//!
//! # Not obvious
//!
//! Implementation notes: facts about PostgreSQL that this code depends on.
//!
//! - The server answers COMMIT in a failed transaction by a rollback, without an error. So a
//!   statement goes before it and fails if the transaction has failed, or is not the one that has
//!   written the record.
//! - Three `SET LOCAL` cost half as much as writing the record. So sessions are opened with the
//!   limits, where no pooler takes them away.
//! - What is sent behind a BEGIN that fails is executed, and commits by itself. So transactions
//!   begin with a property that others have not (`DEFERRABLE`), and the statement behind it fails
//!   where it is missing.
//! - `ON CONFLICT DO NOTHING` waits for another transaction that has inserted the key, and inserts
//!   if that is rolled back. In REPEATABLE READ and SERIALIZABLE it fails (40001) if the other one
//!   commits meanwhile.
//! - The result is added by the row's place (`ctid`): a statement prepared for a small table would
//!   read all of it.

use std::error::Error;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime};
use oncegate_core::key::Scope;
use oncegate_core::store::StoreError;
use oncegate_runtime::Transactional;
use oncegate_runtime::transaction::Completing;
use oncegate_runtime::transactional::{
    BatchBegun, Begun, CommitError, Excuse, Ground, Sessions, Transactions,
};
use tokio::time::error::Elapsed;
use tokio_postgres::Config;

use super::PostgresStore;
use super::errors::{self, Trouble};
use super::notices::Notices;
use super::session::Sessions as SessionSettings;

mod batch;
mod begin;
mod commit;
mod confirm;
mod open;
#[cfg(feature = "sqlx")]
mod sqlx;

pub use self::begin::Isolation;
pub use self::open::PostgresTransaction;
#[cfg(feature = "sqlx")]
pub use self::sqlx::SqlxTransactions;

use self::begin::{Hold, begin_sql, limits, try_begin};
use self::commit::commit;
use self::confirm::{Waits, read_back};
use self::open::ROLLBACK_LIMIT;

/// The most tries to begin a transaction after passing errors, such as a connection that was closed
/// meanwhile.
const MAX_TRIES: usize = 3;

/// The tries to begin one transaction.
struct Tries {
    made: usize,
    until: Instant,
}

impl Tries {
    /// Limits the tries together to the time for which the transaction may be open.
    fn within(limit: Duration) -> Self {
        Self {
            made: 0,
            until: Instant::now() + limit,
        }
    }

    /// Notes a try that has failed. Returns what the tries lead to, if there is not another one.
    ///
    /// Another transaction in the way is no outage: the message waits as for one that holds its
    /// key, without a connection, and begins again.
    fn after<Tx, H>(&mut self, trouble: Trouble) -> ControlFlow<Result<Begun<Tx, H>, StoreError>> {
        self.made += 1;
        if trouble.passing && self.made < MAX_TRIES && Instant::now() < self.until {
            return ControlFlow::Continue(());
        }
        ControlFlow::Break(if trouble.crossed {
            Ok(Begun::Held)
        } else {
            Err(trouble.error)
        })
    }
}

/// Default of the number of connections.
const DEFAULT_CONNECTIONS: usize = 16;

/// The transactions of [`TransactionalHandler`](oncegate_runtime::TransactionalHandler)s in the
/// database of a [`PostgresStore`]; made by [`PostgresStore::transactions`].
///
/// Its connections are its own, beside those of the store, and are opened when they are needed.
#[derive(Clone)]
pub struct PostgresTransactions {
    store: PostgresStore,
    origin: PoolOrigin,
    isolation: Isolation,
    connections: usize,
    pool: Arc<OnceLock<Pool>>,
}

#[derive(Clone)]
enum PoolOrigin {
    /// Connections of our own.
    Own(Box<Connecting>),
    Pool(Pool),
}

/// The means to open the connections of a store.
#[derive(Clone)]
pub(super) struct Connecting {
    pub(super) config: Config,
    pub(super) notices: Notices,
    /// The place where limits are set: sessions may keep settings that they were opened with.
    pub(super) sessions: SessionSettings,
}

impl PostgresStore {
    /// Returns the transactions of this database for a
    /// [`TransactionalHandler`](oncegate_runtime::TransactionalHandler), with the address and TLS
    /// of this store.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the store was made [from a pool](Self::from_pool): use
    /// [`transactions_of`](Self::transactions_of).
    pub fn transactions(&self) -> Result<PostgresTransactions, StoreError> {
        let connecting = self.inner.connecting.clone().ok_or_else(|| {
            StoreError::refused(
                "the store was made from a pool: use PostgresStore::transactions_of(pool)",
            )
        })?;
        Ok(PostgresTransactions::new(
            self,
            PoolOrigin::Own(Box::new(connecting)),
        ))
    }

    /// Returns the transactions of a pool of the caller's, on the same database. The pool may be in
    /// use elsewhere.
    pub fn transactions_of(&self, pool: Pool) -> PostgresTransactions {
        PostgresTransactions::new(self, PoolOrigin::Pool(pool))
    }
}

impl PostgresTransactions {
    fn new(store: &PostgresStore, origin: PoolOrigin) -> Self {
        Self {
            store: store.clone(),
            origin,
            isolation: Isolation::default(),
            connections: DEFAULT_CONNECTIONS,
            pool: Arc::default(),
        }
    }

    /// The most connections: 16 by default. A handler beyond that waits for one. A pool of the
    /// caller's has its own limit.
    #[must_use]
    pub fn connections(self, connections: usize) -> Self {
        Self {
            connections: connections.max(1),
            pool: Arc::default(),
            ..self
        }
    }

    /// The isolation of the transactions: READ COMMITTED by default. Serialisation failures are
    /// repeated, and cost no attempt.
    ///
    /// A transaction under a claim (after a failed attempt, or in a fenced gate) must be shorter
    /// than a third of the lease in REPEATABLE READ and SERIALIZABLE: a heartbeat changes the
    /// record, and the commit fails.
    #[must_use]
    pub fn isolation(self, isolation: Isolation) -> Self {
        Self { isolation, ..self }
    }

    fn pool(&self) -> Result<&Pool, StoreError> {
        let connecting = match &self.origin {
            PoolOrigin::Pool(pool) => return Ok(pool),
            PoolOrigin::Own(connecting) => connecting,
        };
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let mut config = connecting.config.clone();
        if connecting.sessions == SessionSettings::Ours {
            let options = config.get_options().unwrap_or_default().to_owned();
            let limits = limits(Transactional::DEFAULT_LIMIT);
            config.options(options + &limits.map(|(name, ms)| format!(" -c {name}={ms}")).concat());
        }
        let recycling = ManagerConfig {
            recycling_method: RecyclingMethod::Fast,
        };
        let manager = Manager::from_connect(config, connecting.notices.clone(), recycling);
        let pool = Pool::builder(manager)
            .max_size(self.connections)
            .runtime(Runtime::Tokio1)
            .build();
        let pool = pool.map_err(|error| StoreError::refused(format!("no pool: {error}")))?;
        Ok(self.pool.get_or_init(|| pool))
    }

    async fn client(&self) -> Result<Object, StoreError> {
        self.pool()?
            .get()
            .await
            .map_err(|error| errors::no_connection(&error))
    }

    /// Returns whether sessions were opened with this limit.
    fn sessions_have(&self, limit: Duration) -> bool {
        let is_kept = match &self.origin {
            PoolOrigin::Own(connecting) => connecting.sessions == SessionSettings::Ours,
            PoolOrigin::Pool(_) => false,
        };
        is_kept && limit == Transactional::DEFAULT_LIMIT
    }

    async fn begin_once(
        &self,
        completing: &Completing,
        ground: Ground,
        limit: Duration,
    ) -> Result<Begun<PostgresTransaction, Hold>, Trouble> {
        let transaction = PostgresTransaction::on(self.client().await?);
        let begin = begin_sql(
            self.isolation,
            (!self.sessions_have(limit)).then_some(limit),
        );
        let begun =
            tokio::time::timeout(limit, try_begin(&transaction, completing, ground, &begin)).await;
        transaction.begun(begun).await
    }

    /// The number of commits that did not wait for the standbys, as far as notices have said it. On
    /// connections that were not opened here, notices cannot be read.
    fn cut_waits(&self) -> Option<u64> {
        match &self.origin {
            PoolOrigin::Own(connecting) => Some(connecting.notices.cut_waits()),
            PoolOrigin::Pool(_) => None,
        }
    }

    /// Ends a transaction whose commit was sent, and returns its connection to its pool. Before the
    /// commit, `cut_waits` had not waited for the standbys. `written` is a record that the
    /// transaction has written.
    async fn finish(
        &self,
        transaction: PostgresTransaction,
        cut_waits: Option<u64>,
        committed: Result<Result<Waits, CommitError>, Elapsed>,
        written: Option<&Completing>,
    ) -> Result<(), CommitError> {
        let waits = match committed {
            Ok(Ok(waits)) => waits,
            Err(_) => {
                let silence = "the server did not answer the commit in time";
                return Err(CommitError::Unknown(StoreError::unknown(silence)));
            }
            Ok(Err(unknown @ CommitError::Unknown(_))) => return Err(unknown),
            Ok(Err(error)) => {
                // The server has answered, and the transaction may still be open.
                transaction.roll_back().await;
                return Err(error);
            }
        };
        transaction.release();
        let has_waited = match cut_waits {
            Some(_) => self.cut_waits() == cut_waits,
            None => waits == Waits::ForNothing,
        };
        match written {
            Some(written) if !has_waited => read_back(&self.store, written).await,
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for PostgresTransactions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresTransactions")
            .field("isolation", &self.isolation)
            .finish_non_exhaustive()
    }
}

impl Transactions for PostgresTransactions {
    type Transaction = PostgresTransaction;
    type Hold = Hold;

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        let client = self.client().await?;
        super::held_descriptor(&client, scope.as_str())
            .await
            .map_err(|trouble| trouble.error)
    }

    fn sessions(&self) -> Arc<dyn Sessions> {
        Arc::new(self.store.clone())
    }

    async fn begin(
        &self,
        completing: &Completing,
        ground: Ground,
        limit: Duration,
    ) -> Result<Begun<PostgresTransaction, Hold>, StoreError> {
        let mut tries = Tries::within(limit);
        loop {
            match self.begin_once(completing, ground, limit).await {
                Ok(begun) => return Ok(begun),
                Err(trouble) => {
                    if let ControlFlow::Break(ended) = tries.after(trouble) {
                        return ended;
                    }
                }
            }
        }
    }

    async fn commit(
        &self,
        transaction: PostgresTransaction,
        hold: Hold,
        completing: &Completing,
    ) -> Result<(), CommitError> {
        let cut_waits = self.cut_waits();
        let committing = commit(&transaction, &hold, completing);
        let committed = tokio::time::timeout(completing.limit(), committing).await;
        self.finish(transaction, cut_waits, committed, hold.written(completing))
            .await
    }

    async fn begin_batch(
        &self,
        batch: &[Completing],
        limit: Duration,
    ) -> Result<BatchBegun<PostgresTransaction, Hold>, StoreError> {
        let mut tries = Tries::within(limit);
        loop {
            match self.begin_batch_once(batch, limit).await {
                Ok(begun) => return Ok(begun),
                Err(trouble) => {
                    if let ControlFlow::Break(ended) = tries.after(trouble) {
                        return ended;
                    }
                }
            }
        }
    }

    async fn commit_batch(
        &self,
        transaction: PostgresTransaction,
        batch: Vec<(Hold, Completing)>,
    ) -> Result<(), CommitError> {
        let limit = batch
            .first()
            .map_or(ROLLBACK_LIMIT, |(_, completing)| completing.limit());
        let cut_waits = self.cut_waits();
        let committed = tokio::time::timeout(limit, batch::commit(&transaction, &batch)).await;
        self.finish(transaction, cut_waits, committed, batch::written(&batch))
            .await
    }

    async fn roll_back(&self, transaction: PostgresTransaction) {
        transaction.roll_back().await;
    }

    fn excuse(&self, error: &(dyn Error + 'static)) -> Option<Excuse> {
        let error = error.downcast_ref::<tokio_postgres::Error>()?;
        match error.code() {
            Some(state) => errors::excuse(state.code()),
            None => error.is_closed().then_some(Excuse::ConnectionLost),
        }
    }
}
