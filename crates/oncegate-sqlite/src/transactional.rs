//! Transactions on the file that the runtime opens for handlers.
//!
//! The file has one writer, so the transactions of a process run one after another.

use std::error::Error as StdError;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::Scope;
use oncegate_core::record::{Record, StoreTime};
use oncegate_core::rules::apply;
use oncegate_core::store::{Store as _, StoreError};
use oncegate_runtime::transaction::Completing;
use oncegate_runtime::transactional::{
    BatchBegun, Begun, CommitError, Excuse, Ground, Sessions, Transactions,
};
use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::commit::complete;
use super::errors::{self, Trouble};
use super::opened_file::OpenedFile;
use super::row::Rows;
use super::{SqliteStore, file, row};

/// A savepoint that exists as long as the handler has not ended the transaction itself.
const GUARD: &str = "SAVEPOINT oncegate_guard";

/// Fails if the guard is gone.
const CHECK_GUARD: &str = "RELEASE oncegate_guard";

/// Adds the result to a row that the same transaction has inserted.
const ADD_RESULT: &str = "UPDATE records SET result = ?3 WHERE id = ?1 AND key = ?2";

/// The transactions of [`TransactionalHandler`](oncegate_runtime::TransactionalHandler)s on the
/// file of a [`SqliteStore`]; made by [`SqliteStore::transactions`].
#[derive(Clone)]
pub struct SqliteTransactions {
    store: SqliteStore,
    /// Has one permit: a second transaction would only wait for the file's lock.
    turn: Arc<Semaphore>,
    idle: Arc<Mutex<Vec<Effects>>>,
}

/// A connection for transactions, and the file that it is on.
struct Effects {
    connection: Connection,
    place: OpenedFile,
}

impl SqliteStore {
    /// Returns the transactions of this file for a
    /// [`TransactionalHandler`](oncegate_runtime::TransactionalHandler).
    ///
    /// The handlers run on threads that may block, one after another in a process. They commit
    /// durably (`synchronous = FULL`).
    pub fn transactions(&self) -> SqliteTransactions {
        SqliteTransactions {
            store: self.clone(),
            turn: Arc::new(Semaphore::new(1)),
            idle: Arc::default(),
        }
    }
}

impl SqliteTransactions {
    fn connection(&self) -> Result<Effects, StoreError> {
        let idle = self.idle.lock().pop();
        let effects = match idle {
            Some(effects) => effects,
            None => {
                let settings = &self.store.inner.settings;
                let place = OpenedFile::of(&settings.path);
                let connection = file::open_for_effects(settings)?;
                // The wait for other writers has jitter, and is not SQLite's own.
                let waits = connection.busy_timeout(Duration::ZERO);
                waits.map_err(|error| errors::not_executed(&error))?;
                Effects { connection, place }
            }
        };
        effects.place.check()?;
        Ok(effects)
    }

    /// Waits for the turn of this process, and opens a connection.
    pub(super) async fn transaction(&self) -> Result<SqliteTransaction, StoreError> {
        let turn = Arc::clone(&self.turn).acquire_owned().await;
        let turn = turn.map_err(|_| StoreError::unavailable("the store was closed"))?;
        let inner = &self.store.inner;
        inner.writer.let_through(inner.settings.busy_timeout).await;
        Ok(SqliteTransaction {
            effects: Some(self.connection()?),
            _turn: turn,
        })
    }

    /// Begins, and returns the store's time.
    fn begin_at(&self, connection: &Connection) -> Result<StoreTime, Trouble> {
        let busy_timeout = self.store.inner.settings.busy_timeout;
        file::patiently(busy_timeout, || connection.execute_batch("BEGIN IMMEDIATE"))?;
        Ok(row::now(connection, true)?)
    }

    fn try_begin(
        &self,
        connection: &Connection,
        completing: &Completing,
        ground: Ground,
    ) -> Result<Option<Hold>, Trouble> {
        let now = self.begin_at(connection)?;
        let hold = match ground {
            Ground::Claimed => Hold::Claim,
            Ground::NoRecord => match row::read(connection, completing.key()) {
                Ok(None) => {
                    row::write(connection, completing.key(), &completed(now, completing))?;
                    Hold::Record {
                        id: connection.last_insert_rowid(),
                    }
                }
                // A claim reads it.
                Ok(Some(_)) | Err(Trouble::Unreadable { .. }) => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        connection.execute_batch(GUARD)?;
        Ok(Some(hold))
    }

    /// Begins, and takes the keys without a row. `None`: there are none.
    fn try_begin_batch(
        &self,
        connection: &Connection,
        batch: &[Completing],
    ) -> Result<Option<Vec<Option<Hold>>>, Trouble> {
        let now = self.begin_at(connection)?;
        let mut rows = Rows::of(connection)?;
        let mut holds = Vec::with_capacity(batch.len());
        for completing in batch {
            let is_new = rows.insert(completing.key(), &completed(now, completing))?;
            holds.push(is_new.then(|| Hold::Record {
                id: connection.last_insert_rowid(),
            }));
        }
        connection.execute_batch(GUARD)?;
        Ok(holds.iter().any(Option::is_some).then_some(holds))
    }

    /// Returns the transaction that has begun; without a hold, nothing stays open.
    async fn begun<H>(
        &self,
        transaction: SqliteTransaction,
        begun: Result<Option<H>, Trouble>,
    ) -> Result<Begun<SqliteTransaction, H>, StoreError> {
        match begun {
            Ok(Some(hold)) => Ok(Begun::Open(transaction, hold)),
            Ok(None) => {
                self.roll_back(transaction).await;
                Ok(Begun::RecordExists)
            }
            Err(trouble) => {
                self.roll_back(transaction).await;
                Err(StoreError::from(trouble))
            }
        }
    }

    /// Commits if this was stored, and rolls back otherwise.
    async fn commit_if(
        &self,
        transaction: SqliteTransaction,
        stored: Result<(), CommitError>,
    ) -> Result<(), CommitError> {
        if let Err(error) = stored {
            self.roll_back(transaction).await;
            return Err(error);
        }
        self.end(transaction, "COMMIT")
            .map_err(|error| match errors::not_committed(&error) {
                unknown @ StoreError::Unknown { .. } => CommitError::Unknown(unknown),
                error => CommitError::RolledBack(error.into()),
            })
    }

    fn end(&self, transaction: SqliteTransaction, sql: &str) -> rusqlite::Result<()> {
        let Some(effects) = transaction.into_inner() else {
            return Ok(());
        };
        let ended = effects.connection.execute_batch(sql);
        if effects.connection.is_autocommit() {
            self.idle.lock().push(effects);
        }
        ended
    }
}

/// The record of a key that is claimed and completed at this instant, by the rules.
fn completed(now: StoreTime, completing: &Completing) -> Record {
    let (claimed, _) = apply(now, None, &completing.claim());
    let (completed, _) = apply(now, claimed, &completing.operation());
    completed.expect("a key without a record is claimed, and its owner completes it")
}

impl fmt::Debug for SqliteTransactions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteTransactions")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// An open transaction, for a [`TransactionalHandler`](oncegate_runtime::TransactionalHandler).
///
/// It is used like a connection of rusqlite, which it dereferences to. Its calls block, on a thread
/// that may. The runtime commits it: a handler that executes `COMMIT` or `ROLLBACK` itself has
/// failed.
#[must_use = "it is rolled back when it is dropped"]
pub struct SqliteTransaction {
    /// `None` once it has ended. A connection that is dropped rolls back.
    effects: Option<Effects>,
    _turn: OwnedSemaphorePermit,
}

impl SqliteTransaction {
    fn into_inner(mut self) -> Option<Effects> {
        self.effects.take()
    }
}

impl Deref for SqliteTransaction {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        let effects = self.effects.as_ref();
        &effects
            .expect("the connection is taken only when the transaction ends")
            .connection
    }
}

impl fmt::Debug for SqliteTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteTransaction").finish_non_exhaustive()
    }
}

/// The hold of a transaction on its key.
#[derive(Debug)]
pub enum Hold {
    /// The transaction has inserted the record.
    Record {
        /// The number of the row.
        id: i64,
    },
    /// The key is claimed.
    Claim,
}

impl Transactions for SqliteTransactions {
    type Transaction = SqliteTransaction;
    type Hold = Hold;

    const BLOCKS: bool = true;

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        self.store.descriptor(scope).await
    }

    fn sessions(&self) -> Arc<dyn Sessions> {
        Arc::new(self.store.clone())
    }

    async fn begin(
        &self,
        completing: &Completing,
        ground: Ground,
        _: Duration,
    ) -> Result<Begun<SqliteTransaction, Hold>, StoreError> {
        let transaction = self.transaction().await?;
        let begun = self.try_begin(&transaction, completing, ground);
        self.begun(transaction, begun).await
    }

    async fn commit(
        &self,
        transaction: SqliteTransaction,
        hold: Hold,
        completing: &Completing,
    ) -> Result<(), CommitError> {
        let stored =
            check_guard(&transaction).and_then(|()| store_result(&transaction, &hold, completing));
        self.commit_if(transaction, stored).await
    }

    async fn begin_batch(
        &self,
        batch: &[Completing],
        _: Duration,
    ) -> Result<BatchBegun<SqliteTransaction, Hold>, StoreError> {
        let transaction = self.transaction().await?;
        let begun = self.try_begin_batch(&transaction, batch);
        self.begun(transaction, begun).await
    }

    async fn commit_batch(
        &self,
        transaction: SqliteTransaction,
        batch: Vec<(Hold, Completing)>,
    ) -> Result<(), CommitError> {
        let stored = check_guard(&transaction).and_then(|()| {
            batch
                .iter()
                .try_for_each(|(hold, completing)| store_result(&transaction, hold, completing))
        });
        self.commit_if(transaction, stored).await
    }

    async fn roll_back(&self, transaction: SqliteTransaction) {
        // After an error the connection is closed, which rolls back.
        drop(self.end(transaction, "ROLLBACK"));
    }

    fn excuse(&self, error: &(dyn StdError + 'static)) -> Option<Excuse> {
        let error = error.downcast_ref::<rusqlite::Error>()?;
        errors::is_busy(error).then_some(Excuse::Conflict)
    }
}

/// Checks that the handler has not ended the transaction.
fn check_guard(connection: &Connection) -> Result<(), CommitError> {
    let ended = "the handler has ended the transaction itself, by COMMIT or ROLLBACK: leave that to the runtime";
    connection
        .execute_batch(CHECK_GUARD)
        .map_err(|_| CommitError::RolledBack(ended.into()))
}

fn store_result(
    connection: &Connection,
    hold: &Hold,
    completing: &Completing,
) -> Result<(), CommitError> {
    match hold {
        Hold::Claim => complete(connection, completing).map_err(CommitError::RolledBack),
        Hold::Record { .. } if completing.result().is_empty() => Ok(()),
        Hold::Record { id } => {
            let result = completing.result().as_ref();
            let added = connection
                .prepare_cached(ADD_RESULT)
                .and_then(|mut add| add.execute((id, completing.key().as_str(), result)))
                .map_err(|error| CommitError::RolledBack(errors::not_executed(&error).into()))?;
            match added {
                1 => Ok(()),
                _ => Err(CommitError::RolledBack(
                    "a trigger on the table `records` interferes; remove it".into(),
                )),
            }
        }
    }
}
