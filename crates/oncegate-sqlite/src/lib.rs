//! Records in one SQLite file: no server, several processes, group commit.
//!
//! SQLite runs inside this process, so the rules need no port: a command reads its record, runs
//! [`rules::apply`](oncegate_core::rules::apply) itself, and writes the new record, all inside one
//! `BEGIN IMMEDIATE` transaction. Other processes on the file wait for that lock, in turn. Only the
//! claim of a key that has no record, and the completion of a claim by its owner, are one statement
//! each, without a read before.
//!
//! - `file`: opens the file, or refuses it; `opened_file`: whether it still is the one that was
//!   opened; `row`: a record as readable columns; `clock`
//! - `commit`: completes a record inside the user's transaction; `transactional`: transactions that
//!   the runtime opens, and `sessions`: what each process has received for them
//! - `outbox`: messages that are written in the user's transaction and published by a relay
//! - `journal`: the history of a key, written by triggers; `log`: the write-ahead log beside the
//!   file
//! - `writer`: group commit; `reader`: reads; `purge` and `expired_row`: expired records; `thread`
//!   and `queue`: between them and the callers
//!
//! An operator can read the file with any SQLite shell while it is in use:
//!
//! ```sql
//! SELECT key, state, attempt, reason, datetime(expires_at_ms / 1000, 'unixepoch') FROM records;
//! ```
//!
//! The file must be on a local disk: write-ahead logging shares memory between the processes.
//!
//! # Not obvious
//!
//! Implementation notes: facts about SQLite that this code depends on.
//!
//! - Digests have no order, so rows are not stored in the order of their keys: a batch would
//!   rewrite a page for each row. `IN` in a CHECK, and an upsert on a table without rowids, make a
//!   temporary table for each row that is written.
//! - Callers that were answered together send their next commands together. The writing thread
//!   begins a transaction with the first of these and executes what is there while the others
//!   arrive. It waits for them as long as the last commit took, at most 1 ms. Gathering first and
//!   executing afterwards would add the two times.
//! - A claim changes an arbitrary page of the index, a completion one that was just written. So
//!   when many commands wait, claims get transactions of their own (`queue::JobClass`): 256 of them
//!   change fewer pages than twice 128.
//! - The writing thread remembers the row that a claim has made (`row::Claimed`), so that its
//!   completion needs no index. It is a hint: other processes add and delete rows, so key and token
//!   are compared.
//! - Notifying a condition variable is a system call even when no thread waits on it. So the queue
//!   records whether the thread sleeps (`Queue::push`).
//! - SQLite's own busy wait starves one of several busy processes. The store waits by itself, with
//!   jitter.
//! - SQLite continues with a file that was deleted or replaced while it was open. Every transaction
//!   checks that the file is still there.
//! - SQLite would delete the log beside an empty file, and the records with it: that combination is
//!   refused.
//! - `quick_check` does not compare an index with its table: a flipped bit there made a completed
//!   key look new.
//! - A power cut is simulated by shutting down a file system under running programs. Linux may then
//!   confirm an `fsync` that the shutdown has overtaken; a real cut leaves no program to receive
//!   it. So only answers from before the cut count.
//! - A COMMIT that fails with an I/O error may have reached the disk: its outcome is unknown, not
//!   refused.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::rules::Reply;
use oncegate_core::store::{Checkup, Command, RecordSnapshot, Store, StoreError, Upkeep};
use tokio::sync::oneshot;

use self::file::Settings;
use self::purge::Nothing;
use self::reader::Reader;
use self::thread::Worker;
use self::writer::Writer;
use oncegate_runtime::journal::JournalEntry;
use oncegate_store_toolkit::archive::{Archive, SharedArchive};
use oncegate_store_toolkit::purge::Backlog;

mod clock;
mod commit;
mod errors;
mod expired_row;
mod file;
mod journal;
mod log;
mod opened_file;
mod outbox;
mod purge;
mod queue;
mod reader;
mod row;
mod sessions;
mod settings;
mod thread;
mod transactional;
mod writer;

pub use self::file::Synchronous;
pub use self::outbox::SqliteOutbox;
pub use self::settings::SqliteSettings;
pub use self::transactional::{SqliteTransaction, SqliteTransactions};
pub use self::writer::SqliteStats;

/// The most commands in one job for the writer; larger batches are split.
const MAX_JOB_COMMANDS: usize = 256;

/// The most keys in one read transaction; larger batches are split.
const MAX_LOOK_KEYS: usize = 512;

/// A store in one SQLite file.
///
/// Confirmed writes survive `kill -9` and a power cut ([`Synchronous::Full`]). Several processes
/// may use one file, each through its own store. Cheap to clone: clones share the threads and the
/// file. Dropping the last clone waits for the commands in flight.
///
/// Concurrent calls share transactions: commands that arrive while the disk is busy are committed
/// together.
///
/// ```
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("oncegate.db");
/// use oncegate::sqlite::SqliteStore;
///
/// let store = SqliteStore::open(path).await?;
/// # drop(store);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    /// Declared before the writer, so that it ends first: it removes rows through the writer.
    _purge: Option<Worker<Nothing>>,
    writer: Writer,
    reader: Reader,
    backlog: Arc<Backlog>,
}

/// Options for a [`SqliteStore`]; made by [`SqliteStore::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct SqliteBuilder {
    settings: Settings,
}

impl SqliteStore {
    /// Opens the file with the default settings, and creates it if it does not exist.
    ///
    /// # Errors
    /// See [`SqliteBuilder::open`].
    pub async fn open(path: impl Into<PathBuf>) -> Result<Self, StoreError> {
        Self::builder(path).open().await
    }

    /// Settings for the file at `path`, all at their defaults.
    pub fn builder(path: impl Into<PathBuf>) -> SqliteBuilder {
        SqliteBuilder {
            settings: Settings::new(path.into()),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.inner.settings.path
    }

    /// Opens another connection to the file, for effects that are committed together with their
    /// completion.
    ///
    /// See [`Attempt::blocking_commit_with`](oncegate_runtime::Attempt::blocking_commit_with). This
    /// call blocks.
    ///
    /// The file may contain tables of your own beside the store's (`records`, `descriptors`,
    /// `clock`, and those whose names begin with `oncegate_`). Any migration may create them that
    /// does not change `application_id` and `user_version`. The connection commits durably
    /// (`synchronous = FULL`) and waits up to the store's busy timeout for other writers.
    ///
    /// # Errors
    /// When the file cannot be opened, or is no longer the file that the store has opened.
    pub fn open_connection(&self) -> Result<rusqlite::Connection, StoreError> {
        file::open_for_effects(&self.inner.settings)
    }

    /// Returns the last journal entries of `key`, at most `most` of them, the oldest first.
    ///
    /// Empty if the file has no [journal](SqliteBuilder::journaled). An entry exists if and only if
    /// its change was committed, also one in the caller's own transaction. The purge of a record
    /// removes its entries too.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub async fn journal(
        &self,
        key: &StoreKey,
        most: u32,
    ) -> Result<Vec<JournalEntry>, StoreError> {
        let key = key.clone();
        self.inner
            .reader
            .ask(move |connection| journal::read(connection, &key, most))
            .await
    }

    /// Counters of this store since it was opened.
    pub fn stats(&self) -> SqliteStats {
        self.inner.writer.stats()
    }

    /// Moves the expiry of the record of `key` earlier by `time`, as if that time had passed. For
    /// tests.
    ///
    /// # Errors
    /// Like any other write.
    #[cfg(feature = "testing")]
    pub async fn pass(&self, key: &StoreKey, time: Duration) -> Result<(), StoreError> {
        let key = key.clone();
        self.inner
            .writer
            .ask(move |connection| row::pass(connection, &key, time))
            .await
    }
}

impl SqliteBuilder {
    /// The longest wait for other processes that write, before a call fails with
    /// [`StoreError::Unavailable`]. Default: 5 s.
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.settings.busy_timeout = timeout;
        self
    }

    /// The failures that a confirmed write survives. Default: [`Synchronous::Full`].
    pub fn synchronous(mut self, synchronous: Synchronous) -> Self {
        self.settings.synchronous = synchronous;
        self
    }

    /// The longest time between the starts of two purges, which remove expired records. Default: 60
    /// s.
    ///
    /// Purges run more often, and pause less, when one record in twenty has expired by then, so
    /// that they keep up. A purge goes in small steps, of some 5 ms of writing, between the
    /// callers' transactions.
    pub fn purge_every(mut self, rest: Duration) -> Self {
        self.settings.purge_rest = Some(rest);
        self
    }

    /// Leaves expired records in the file, for the operator's own purge. They still count as
    /// absent.
    pub fn without_purge(mut self) -> Self {
        self.settings.purge_rest = None;
        self
    }

    /// Passes expired records to `archive` before they are removed. They stay in the file while the
    /// archive refuses them. Default: no archive; they are removed.
    ///
    /// Each process on the file purges by itself. Give the archive to one process, and set
    /// [`without_purge`](Self::without_purge) for the others, which would remove records without
    /// archiving them.
    pub fn archive(mut self, archive: impl Archive + 'static) -> Self {
        self.settings.archive = Some(SharedArchive::new(archive));
        self
    }

    /// Sets the settings that other stores have, too, such as those of a file.
    pub fn settings(mut self, settings: SqliteSettings) -> Self {
        self.settings.chosen = settings;
        self
    }

    /// Keeps a [journal](SqliteSettings::journal) in the file.
    pub fn journaled(mut self) -> Self {
        self.settings.chosen.journal = true;
        self
    }

    /// Refuses a missing or empty file instead of creating a new one.
    ///
    /// A new file knows no message, so every redelivery runs again. To prevent that after a
    /// mistyped path, create the file once and set this.
    pub fn must_exist(mut self) -> Self {
        self.settings.must_exist = true;
        self
    }

    /// The largest file, in bytes, that is completely checked for damage when it is opened.
    /// Default: 256 MiB, which takes a few seconds. A larger file is checked page by page as it is
    /// used.
    pub fn check_files_up_to(mut self, bytes: u64) -> Self {
        self.settings.check_up_to_bytes = bytes;
        self
    }

    /// Opens the file, and starts the threads of the store.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the file is damaged, belongs to another application or to a
    /// newer release, cannot be written, or cannot do write-ahead logging (a network file system);
    /// [`StoreError::Unavailable`] when other processes kept it locked, or the disk is full.
    pub async fn open(self) -> Result<SqliteStore, StoreError> {
        let mut settings = self.settings;
        settings.path = file::absolute(settings.path);
        let writer = Writer::start(settings.clone()).await?;
        let reader = Reader::start(settings.clone()).await?;
        let backlog = Arc::new(Backlog::default());
        let _purge =
            purge::start(settings.clone(), writer.removals(), Arc::clone(&backlog)).await?;
        Ok(SqliteStore {
            inner: Arc::new(Inner {
                settings,
                _purge,
                writer,
                reader,
                backlog,
            }),
        })
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("path", &self.inner.settings.path)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        if commands.len() <= MAX_JOB_COMMANDS {
            let count = commands.len();
            return answered(self.inner.writer.execute(commands), count).await;
        }
        // All jobs are queued before the first answer is awaited, so that they share transactions.
        let jobs = pieces(commands, MAX_JOB_COMMANDS).map(|piece| {
            let count = piece.len();
            (count, self.inner.writer.execute(piece))
        });
        let jobs: Vec<_> = jobs.collect();
        let mut answers = Vec::new();
        for (count, job) in jobs {
            answers.extend(answered(job, count).await);
        }
        answers
    }

    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        let answered = self.inner.writer.execute_one(command)?.await;
        answered
            .map_err(|_| no_answer())?
            .answers()
            .next()
            .unwrap_or_else(|| Err(no_answer()))
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let mut answers = Vec::with_capacity(keys.len());
        for piece in pieces(keys, MAX_LOOK_KEYS) {
            let count = piece.len();
            answers.extend(answered(self.inner.reader.read(piece), count).await);
        }
        answers
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        let scope = scope.clone();
        let proposed = proposed.to_owned();
        let expected = expected.map(str::to_owned);
        self.inner
            .writer
            .ask(move |connection| {
                row::describe(connection, &scope, expected.as_deref(), &proposed)
            })
            .await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        let scope = scope.clone();
        self.inner
            .reader
            .ask(move |connection| row::descriptor(connection, &scope))
            .await
    }

    fn upkeep(&self) -> Upkeep {
        let log_bytes = Some(log::bytes(self.path()));
        Upkeep {
            oldest_expired: self.inner.backlog.age(),
            log_bytes,
            memory: None,
        }
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        let path = self.inner.settings.path.clone();
        self.inner
            .writer
            .ask(move |connection| opened_file::check(connection, &path))
            .await
    }
}

/// Splits a batch into pieces of at most `most`.
fn pieces<T>(mut batch: Vec<T>, most: usize) -> impl Iterator<Item = Vec<T>> {
    std::iter::from_fn(move || {
        if batch.is_empty() {
            return None;
        }
        let rest = batch.split_off(batch.len().min(most));
        Some(std::mem::replace(&mut batch, rest))
    })
}

/// The answers of a thread to a piece of `count` commands or keys.
async fn answered<T, A: Into<Vec<Result<T, StoreError>>>>(
    job: Result<oneshot::Receiver<A>, StoreError>,
    count: usize,
) -> Vec<Result<T, StoreError>> {
    let error = match job {
        Ok(answer) => match answer.await {
            Ok(answers) => return answers.into(),
            Err(_) => no_answer(),
        },
        Err(error) => error,
    };
    (0..count).map(|_| Err(error.clone())).collect()
}

fn no_answer() -> StoreError {
    StoreError::unknown(thread::ENDED)
}

#[cfg(feature = "testing")]
#[cfg(test)]
mod tests;
