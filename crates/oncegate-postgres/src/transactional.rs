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

use deadpool_postgres::{
    ClientWrapper, Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime,
};
use futures_util::future::{join, join3};
use oncegate_core::key::Scope;
use oncegate_core::store::StoreError;
use oncegate_runtime::Transactional;
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::transaction::Completing;
use oncegate_runtime::transactional::{
    BatchBegun, Begun, CommitError, Excuse, Ground, Sessions, Transactions,
};
use tokio::time::error::Elapsed;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Config, Row};

use super::PostgresStore;
use super::commit::complete;
use super::errors::{self, Trouble};
use super::link::{Sessions as SessionSettings, limit_ms};
use super::notices::Notices;
use super::row;

mod batch;
mod confirm;
mod open;
#[cfg(feature = "sqlx")]
mod sqlx;

pub use self::open::PostgresTransaction;
#[cfg(feature = "sqlx")]
pub use self::sqlx::SqlxTransactions;

use self::confirm::{GUARD, Waits, read_back};
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
    /// All of them together take no longer than the transaction may be open.
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

/// The isolation of a transaction, as in SQL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// The default of PostgreSQL.
    #[default]
    ReadCommitted,
    /// Every statement sees the same snapshot.
    RepeatableRead,
    /// As if the transactions ran one after another.
    Serializable,
}

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

/// How the connections of a store are opened.
#[derive(Clone)]
pub(super) struct Connecting {
    pub(super) config: Config,
    pub(super) notices: Notices,
    /// Whether sessions keep settings that they were opened with.
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

    /// Whether sessions were opened with this limit.
    fn sessions_have(&self, limit: Duration) -> bool {
        let keeps = |connecting: &Connecting| connecting.sessions == SessionSettings::Ours;
        let is_kept = matches!(&self.origin, PoolOrigin::Own(connecting) if keeps(connecting));
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

    /// How many commits did not wait for the standbys, as far as notices have said it. On
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
        let silence = || StoreError::unknown("the server did not answer the commit in time");
        let waits = match committed.unwrap_or_else(|_| Err(CommitError::Unknown(silence()))) {
            Ok(waits) => waits,
            Err(unknown @ CommitError::Unknown(_)) => return Err(unknown),
            Err(error) => {
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

/// Begins, and takes the key. `None`: there is a record of the key.
async fn try_begin(
    client: &ClientWrapper,
    completing: &Completing,
    ground: Ground,
    begin: &str,
) -> Result<Option<Hold>, Trouble> {
    let not_executed = |error: tokio_postgres::Error| errors::not_executed(&error);
    if ground == Ground::Claimed {
        client.batch_execute(begin).await.map_err(not_executed)?;
        let number = client.query_one(ASSIGN_NUMBER, &[]).await;
        return Ok(Some(Hold::Claim {
            xid: number.map_err(not_executed)?.get(0),
        }));
    }
    let insert = client
        .prepare_cached(row::COMPLETE_ABSENT)
        .await
        .map_err(not_executed)?;
    let (key, tag) = (completing.key().as_str(), completing.token().tag());
    let fingerprint = completing.fingerprint();
    let fingerprint = fingerprint
        .as_ref()
        .map(|fingerprint| fingerprint.as_bytes().as_slice());
    let retention_ms = row::retention_ms(completing);
    let parameters: [&(dyn ToSql + Sync); 4] =
        [&key, &retention_ms, &tag.0.as_slice(), &fingerprint];
    // In this order on the wire, and in one round trip. Without its BEGIN the other one fails.
    let (begun, inserted) = join(
        client.batch_execute(begin),
        client.query_opt(&insert, &parameters),
    )
    .await;
    let Some(row) = begun.and(inserted).map_err(not_executed)? else {
        return Ok(None);
    };
    let hold = Hold::of(&row).map_err(StoreError::refused)?;
    if row.try_get("asynchronous").unwrap_or(true) {
        client
            .batch_execute("SET LOCAL synchronous_commit = on")
            .await
            .map_err(not_executed)?;
    }
    Ok(Some(hold))
}

impl fmt::Debug for PostgresTransactions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresTransactions")
            .field("isolation", &self.isolation)
            .finish_non_exhaustive()
    }
}

/// The limits of a transaction, by the server's names, in milliseconds.
fn limits(limit: Duration) -> [(&'static str, u128); 3] {
    let limit_ms = limit_ms(limit);
    [
        ("lock_timeout", limit_ms / 2),
        ("statement_timeout", limit_ms),
        ("idle_in_transaction_session_timeout", limit_ms),
    ]
}

/// The statement that begins a transaction, with limits unless its session has them.
fn begin_sql(isolation: Isolation, limit: Option<Duration>) -> String {
    let isolation = match isolation {
        Isolation::ReadCommitted => "READ COMMITTED",
        Isolation::RepeatableRead => "REPEATABLE READ",
        Isolation::Serializable => "SERIALIZABLE",
    };
    let set = |(name, limit_ms)| format!("; SET LOCAL {name} = {limit_ms}");
    let limits = limit
        .map(|limit| limits(limit).map(set).concat())
        .unwrap_or_default();
    format!("BEGIN ISOLATION LEVEL {isolation}, {}{limits}", row::MARK)
}

/// The statement that limits how long the rest of a transaction waits for each row.
fn set_lock_timeout(limit: Duration) -> String {
    format!("SET LOCAL lock_timeout = {}", limit_ms(limit))
}

/// Gives a transaction its number, and returns it.
const ASSIGN_NUMBER: &str = "SELECT pg_current_xact_id()::text";

/// How a transaction holds its key.
#[derive(Debug)]
pub enum Hold {
    /// It has inserted the record.
    Record {
        /// The number of the transaction.
        xid: String,
        /// Where the record is.
        ctid: String,
    },
    /// Its key is claimed.
    Claim {
        /// The number of the transaction.
        xid: String,
    },
}

impl Hold {
    fn of(row: &Row) -> Result<Self, String> {
        let text = |name| {
            row.try_get::<_, String>(name)
                .map_err(|_| format!("no column {name}"))
        };
        Ok(Self::Record {
            xid: text("xid")?,
            ctid: text("ctid")?,
        })
    }

    /// The completion, if its record depends on this transaction alone. The runtime reads back what
    /// completes a claim.
    fn written<'a>(&self, completing: &'a Completing) -> Option<&'a Completing> {
        matches!(self, Self::Record { .. }).then_some(completing)
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

/// Stores the result and commits, in one round trip.
async fn commit(
    client: &ClientWrapper,
    hold: &Hold,
    completing: &Completing,
) -> Result<Waits, CommitError> {
    let (Hold::Record { xid, .. } | Hold::Claim { xid }) = hold;
    let failed = |error: tokio_postgres::Error| not_committed(&error);
    let guard = client.prepare_cached(GUARD).await.map_err(failed)?;
    let numbers: [&(dyn ToSql + Sync); 1] = [xid];
    // Of each of these, in this order on the wire. After a failed statement the server rolls back
    // instead of committing.
    let (guarded, added, committed) = match hold {
        Hold::Claim { .. } => {
            let guarded = client.query_one(&guard, &numbers).await;
            let guarded = guarded.map_err(failed)?;
            complete(&**client, completing)
                .await
                .map_err(CommitError::RolledBack)?;
            (Ok(guarded), Ok(1), client.batch_execute("COMMIT").await)
        }
        Hold::Record { .. } if completing.result().is_empty() => {
            let sent = join(
                client.query_one(&guard, &numbers),
                client.batch_execute("COMMIT"),
            )
            .await;
            (sent.0, Ok(1), sent.1)
        }
        Hold::Record { ctid, .. } => {
            let add = client
                .prepare_cached(row::ADD_RESULT)
                .await
                .map_err(failed)?;
            let (key, result) = (completing.key().as_str(), completing.result().as_ref());
            let row: [&(dyn ToSql + Sync); 3] = [ctid, &key, &result];
            let guarding = client.query_one(&guard, &numbers);
            join3(
                guarding,
                client.execute(&add, &row),
                client.batch_execute("COMMIT"),
            )
            .await
        }
    };
    let guarded = guarded.map_err(failed)?;
    let added = added.map_err(failed)?;
    committed.map_err(failed)?;
    match added {
        1 => Ok(Waits::of(guarded.try_get("waits").unwrap_or(true))),
        _ => Err(CommitError::Unknown(StoreError::unknown(INTERFERES))),
    }
}

/// The error of [`GUARD`] in a transaction that the handler has ended.
const ENDED_BY_HANDLER: &str = "the handler has ended the transaction itself, by COMMIT or ROLLBACK: leave that to the runtime";

/// The error of a statement that did not change the rows that the transaction has inserted.
const INTERFERES: &str = "oncegate_records did not take the result: a trigger, rule or policy on it interferes; remove it";

/// Converts an error of the last message, which commits if nothing before it has failed.
fn not_committed(error: &tokio_postgres::Error) -> CommitError {
    const DIVISION_BY_ZERO: &str = "22012";
    let state = error.code().map(tokio_postgres::error::SqlState::code);
    match state {
        Some(DIVISION_BY_ZERO) => CommitError::RolledBack(ENDED_BY_HANDLER.into()),
        Some(state) if errors::excuse(state) == Some(Excuse::Conflict) => {
            CommitError::Conflict(errors::not_executed(error).error.into())
        }
        _ => match errors::in_doubt(error).error {
            unknown @ StoreError::Unknown { .. } => CommitError::Unknown(unknown),
            error => CommitError::RolledBack(BoxError::from(error)),
        },
    }
}
