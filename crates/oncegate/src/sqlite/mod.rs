//! Records in one SQLite file: no server, several processes, group commit.
//!
//! SQLite runs inside this process, so the rules need no port: a command reads its record, runs
//! [`rules::apply`](oncegate_core::rules::apply) itself, and writes what came out, all inside one
//! `BEGIN IMMEDIATE` transaction. Other processes on the file wait for that lock, in turn. Only the claim of a key that
//! has no record, and the completion of a claim by its owner, are one statement each, without a look before.
//!
//! - `file`: opening, and what is refused; `place`: where it lies; `row`: a record as readable columns; `clock`
//! - `commit`: a record completed inside a transaction of the user's own
//! - `journal`: what happened to a key, written by triggers; `log`: the write-ahead log beside the file
//! - `writer`: group commit; `reader`: looks; `purge`: expired records; `thread` and `queue`: between them and
//!   the callers
//!
//! An operator reads it with any SQLite shell, while it is in use:
//!
//! ```sql
//! SELECT key, state, attempt, reason, datetime(expires_at_ms / 1000, 'unixepoch') FROM records;
//! ```
//!
//! The file must be on a local disk: write-ahead logging shares memory between the processes.

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
use crate::archive::{Archive, SharedArchive};
use crate::journal::Entry;
use crate::purge::Backlog;

mod clock;
mod commit;
mod errors;
mod file;
mod journal;
mod log;
mod place;
mod purge;
mod queue;
mod reader;
mod row;
mod thread;
mod writer;

pub use self::file::Synchronous;
pub use self::writer::SqliteStats;

/// The most commands that are handed to the writer as one job; larger batches are cut.
const MAX_JOB_COMMANDS: usize = 256;

/// The most keys that are looked up in one read transaction; larger batches are cut.
const MAX_LOOK_KEYS: usize = 512;

/// A store in one SQLite file.
///
/// What it has answered survives `kill -9` and a power cut ([`Synchronous::Full`]). Several processes may
/// use one file; each has a store of its own. Cheap to clone: clones share the threads and the file, and the
/// last one that is dropped waits for what is under way.
///
/// Concurrent calls share transactions: whatever has arrived while the disk was busy is committed together.
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
    /// It ends before the writer, through which it removes.
    _purge: Option<Worker<Nothing>>,
    writer: Writer,
    reader: Reader,
    backlog: Arc<Backlog>,
}

/// How to open a [`SqliteStore`]; made by [`SqliteStore::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct SqliteBuilder {
    settings: Settings,
}

impl SqliteStore {
    /// Opens the file with the default settings, and makes it if it does not exist.
    ///
    /// # Errors
    /// See [`SqliteBuilder::open`].
    pub async fn open(path: impl Into<PathBuf>) -> Result<Self, StoreError> {
        Self::builder(path).open().await
    }

    /// Settings for the file at `path`, all at their defaults.
    pub fn builder(path: impl Into<PathBuf>) -> SqliteBuilder {
        SqliteBuilder { settings: Settings::new(path.into()) }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.inner.settings.path
    }

    /// Opens another connection to the file, for effects that are committed together with their completion:
    /// see [`Attempt::blocking_commit_with`](crate::Attempt::blocking_commit_with). It blocks.
    ///
    /// Tables of your own may live in the file beside the store's (`records`, `descriptors`, `clock` and `oncegate_journal`), made by
    /// any migration that leaves `application_id` and `user_version` alone. The connection commits durably
    /// (`synchronous = FULL`) and waits up to the store's busy timeout for others that write.
    ///
    /// # Errors
    /// When the file cannot be opened, or is not the one any more that the store has opened.
    pub fn open_connection(&self) -> Result<rusqlite::Connection, StoreError> {
        file::open_for_effects(&self.inner.settings)
    }

    /// What happened to `key`, the oldest first, at most the last `most` entries; none if the file has no
    /// [journal](SqliteBuilder::journaled).
    ///
    /// An entry is there if and only if the change is that it tells of, also one in a transaction of the caller's own.
    /// The purge of a record takes its entries along.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub async fn journal(&self, key: &StoreKey, most: u32) -> Result<Vec<Entry>, StoreError> {
        let key = key.clone();
        self.inner.reader.ask(move |connection| journal::read(connection, &key, most)).await
    }

    /// What this store has done since it was opened.
    pub fn stats(&self) -> SqliteStats {
        self.inner.writer.stats()
    }

    /// Lets `time` pass for `key`: its record expires so much sooner. For tests.
    ///
    /// # Errors
    /// Like any other write.
    #[cfg(feature = "testing")]
    pub async fn pass(&self, key: &StoreKey, time: Duration) -> Result<(), StoreError> {
        let key = key.clone();
        self.inner.writer.ask(move |connection| row::pass(connection, &key, time)).await
    }
}

impl SqliteBuilder {
    /// How long to wait for other processes that write, before a call is answered with
    /// [`StoreError::Unavailable`]. Default: 5 s.
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.settings.busy_timeout = timeout;
        self
    }

    /// What a committed answer survives. Default: [`Synchronous::Full`].
    pub fn synchronous(mut self, synchronous: Synchronous) -> Self {
        self.settings.synchronous = synchronous;
        self
    }

    /// The longest time between two walks through the file that remove expired records. Default: 60 s.
    ///
    /// Walks come sooner, and pause less, when one record in twenty has expired by then: a purge keeps up with what expires.
    /// A walk goes in small steps, of some 5 ms of writing, between the callers' transactions.
    pub fn purge_every(mut self, rest: Duration) -> Self {
        self.settings.purge_rest = Some(rest);
        self
    }

    /// Leaves expired records in the file, for a purge of the operator's own. They still count as absent.
    pub fn without_purge(mut self) -> Self {
        self.settings.purge_rest = None;
        self
    }

    /// Hands expired records to `archive` before they are removed. They stay in the file as long as it refuses
    /// them. Default: none; they are removed.
    ///
    /// Each process on the file purges by itself: give the archive to one, and set
    /// [`without_purge`](Self::without_purge) for the others, which would remove records without it.
    pub fn archive(mut self, archive: impl Archive + 'static) -> Self {
        self.settings.archive = Some(SharedArchive::new(archive));
        self
    }

    /// Keeps a journal in the file: an entry for each change of state, written in the same transaction, by triggers
    /// on the table; see [`SqliteStore::journal`]. None by default.
    ///
    /// Once it is made, it tells of every change in the file, whoever makes it and however his store is built.
    pub fn journaled(mut self) -> Self {
        self.settings.journaled = true;
        self
    }

    /// Refuses a missing or empty file instead of starting a new one. A new file has forgotten every
    /// message: where that must not happen by a mistyped path, make the file once and set this.
    pub fn must_exist(mut self) -> Self {
        self.settings.must_exist = true;
        self
    }

    /// The largest file, in bytes, that is read through and checked for damage when it is opened.
    /// Default: 256 MiB, which takes a few seconds. A larger file is checked page by page as it is used.
    pub fn check_files_up_to(mut self, bytes: u64) -> Self {
        self.settings.check_up_to_bytes = bytes;
        self
    }

    /// Opens the file, on threads of its own.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the file is damaged, belongs to another application or to a newer
    /// release, cannot be written, or cannot do write-ahead logging (a network file system);
    /// [`StoreError::Unavailable`] when other processes kept it locked, or the disk is full.
    pub async fn open(self) -> Result<SqliteStore, StoreError> {
        let settings = self.settings;
        let writer = Writer::start(settings.clone()).await?;
        let reader = Reader::start(settings.clone()).await?;
        let backlog = Arc::new(Backlog::default());
        let _purge = purge::start(settings.clone(), writer.removals(), Arc::clone(&backlog)).await?;
        Ok(SqliteStore { inner: Arc::new(Inner { settings, _purge, writer, reader, backlog }) })
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.inner.settings.path).finish_non_exhaustive()
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
        answered.map_err(|_| no_answer())?.answers().next().unwrap_or_else(|| Err(no_answer()))
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
        let (scope, proposed) = (scope.clone(), proposed.to_owned());
        let expected = expected.map(str::to_owned);
        let describe = move |connection: &rusqlite::Connection| {
            row::describe(connection, &scope, expected.as_deref(), &proposed)
        };
        self.inner.writer.ask(describe).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        let scope = scope.clone();
        self.inner.reader.ask(move |connection| row::descriptor(connection, &scope)).await
    }

    fn upkeep(&self) -> Upkeep {
        Upkeep { oldest_expired: self.inner.backlog.age(), log_bytes: Some(log::bytes(self.path())) }
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        let path = self.inner.settings.path.clone();
        self.inner.writer.ask(move |connection| place::check(connection, &path)).await
    }
}

/// Cuts a batch into pieces of at most `most`.
fn pieces<T>(mut batch: Vec<T>, most: usize) -> impl Iterator<Item = Vec<T>> {
    std::iter::from_fn(move || {
        if batch.is_empty() {
            return None;
        }
        let rest = batch.split_off(batch.len().min(most));
        Some(std::mem::replace(&mut batch, rest))
    })
}

/// What a thread answers to a piece of `count` commands or keys.
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
