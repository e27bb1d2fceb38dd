//! The thread that writes: group commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::record::StoreTime;
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, StoreError};
use rusqlite::{Connection, ErrorCode};
use tokio::sync::oneshot;

use super::errors::{self, Trouble};
use super::file::{self, Settings};
use super::place::Place;
use super::purge::{self, ExpiredRow};
use super::queue::{Gather, Job, Queue, Turn};
use super::row::{self, Rows};
use super::thread::Worker;

/// The most commands of one transaction, unless a single job has more. Where more wait, callers and thread work at the
/// same time.
const MAX_TRANSACTION_COMMANDS: usize = 512;

/// The longest time to gather commands for a transaction.
const GATHER_AT_MOST: Duration = Duration::from_millis(1);

/// How long the thread sleeps when nothing comes; any time would do.
const PATIENCE: Duration = Duration::from_secs(3_600);

/// What a store has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SqliteStats {
    /// Commands that were executed.
    pub commands: u64,
    /// Transactions that executed them; fewer than commands when calls were concurrent.
    pub transactions: u64,
    /// Expired records that were removed.
    pub purged: u64,
}

#[derive(Default)]
struct Counters {
    commands: AtomicU64,
    transactions: AtomicU64,
    purged: AtomicU64,
}

/// A caller's commands, and room for their answers.
///
/// It travels to the writing thread and back, so that what the caller has allocated is freed by the caller: memory
/// that goes from thread to thread takes the allocator's locks.
pub(super) struct Batch {
    commands: Vec<Command>,
    answers: Vec<Result<Reply, StoreError>>,
}

impl From<Batch> for Vec<Result<Reply, StoreError>> {
    fn from(batch: Batch) -> Self {
        batch.answers
    }
}

/// Something for the writing thread.
enum Work {
    /// Commands that may share a transaction with others.
    Commands { batch: Batch, caller: oneshot::Sender<Batch> },
    /// A transaction of its own.
    Task(Box<dyn FnOnce(&mut Transactions) + Send>),
}

impl Job for Work {
    /// A heartbeat that waits behind bulk may come too late.
    fn urgent(&self) -> bool {
        let extends = |command: &Command| matches!(command.operation, Operation::Extend { .. });
        matches!(self, Self::Commands { batch, .. } if batch.commands.iter().all(extends))
    }

    fn size(&self) -> usize {
        match self {
            Self::Commands { batch, .. } => batch.commands.len(),
            Self::Task(_) => 1,
        }
    }

    fn alone(&self) -> bool {
        matches!(self, Self::Task(_))
    }
}

/// The writing thread, as the callers see it.
pub(super) struct Writer {
    worker: Worker<Work>,
    counters: Arc<Counters>,
}

impl Writer {
    pub(super) async fn start(settings: Settings) -> Result<Self, StoreError> {
        let counters = Arc::new(Counters::default());
        let count = Arc::clone(&counters);
        let open = move || {
            let connection = file::open(&settings)?;
            let place = Place::of(&settings.path);
            let (busy_timeout, gathering_pays) = (settings.busy_timeout, Duration::ZERO);
            let transactions = Transactions { connection, place, busy_timeout, gathering_pays };
            Ok(Thread { transactions, gather: Gather::default(), counters: count })
        };
        let worker = Worker::start("oncegate-sqlite-write", open, Thread::run).await?;
        Ok(Self { worker, counters })
    }

    /// Queues commands. They come back with their answers when they are committed.
    pub(super) fn execute(&self, commands: Vec<Command>) -> Result<oneshot::Receiver<Batch>, StoreError> {
        let (caller, answered) = oneshot::channel();
        let answers = Vec::with_capacity(commands.len());
        self.worker.push(Work::Commands { batch: Batch { commands, answers }, caller })?;
        Ok(answered)
    }

    /// Runs something in a transaction of its own.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnMut(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (work, answered) = task(ask);
        self.worker.push(work)?;
        answered.await.map_err(thread_ended)?
    }

    /// How the purge removes rows.
    pub(super) fn removals(&self) -> Removals {
        Removals { queue: Arc::clone(self.worker.queue()), counters: Arc::clone(&self.counters) }
    }

    pub(super) fn stats(&self) -> SqliteStats {
        SqliteStats {
            commands: self.counters.commands.load(Ordering::Relaxed),
            transactions: self.counters.transactions.load(Ordering::Relaxed),
            purged: self.counters.purged.load(Ordering::Relaxed),
        }
    }
}

/// Something in a transaction of its own, and where its answer comes.
fn task<T: Send + 'static>(
    mut task: impl FnMut(&Connection) -> rusqlite::Result<T> + Send + 'static,
) -> (Work, oneshot::Receiver<Result<T, StoreError>>) {
    let (answer, answered) = oneshot::channel();
    let run = move |transactions: &mut Transactions| {
        // A caller who has gone away wants no answer.
        let _ = answer.send(transactions.write(|connection, _| task(connection)));
    };
    (Work::Task(Box::new(run)), answered)
}

fn thread_ended(_: oneshot::error::RecvError) -> StoreError {
    StoreError::unknown("the thread of the SQLite store ended before it answered")
}

/// The writing thread, as the purge sees it.
pub(super) struct Removals {
    queue: Arc<Queue<Work>>,
    counters: Arc<Counters>,
}

impl Removals {
    /// Removes rows in one transaction, and waits for it.
    pub(super) fn remove(&self, rows: Vec<ExpiredRow>) -> Result<(), StoreError> {
        let (work, answered) = task(move |connection| purge::remove(connection, &rows));
        self.queue.push(work)?;
        let removed = answered.blocking_recv().map_err(thread_ended)??;
        self.counters.purged.fetch_add(removed as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// The writing thread, as it sees itself.
struct Thread {
    transactions: Transactions,
    gather: Gather,
    counters: Arc<Counters>,
}

impl Thread {
    fn run(mut self, queue: &Queue<Work>) {
        loop {
            match queue.take(MAX_TRANSACTION_COMMANDS, PATIENCE, self.gather) {
                Turn::Jobs(jobs) => self.work(jobs),
                Turn::Idle => {}
                Turn::Closed => return,
            }
        }
    }

    fn work(&mut self, jobs: Vec<Work>) {
        let mut batches = Vec::new();
        let mut callers = Vec::new();
        for job in jobs {
            match job {
                Work::Task(task) => task(&mut self.transactions),
                Work::Commands { batch, caller } => {
                    batches.push(batch);
                    callers.push(caller);
                }
            }
        }
        if batches.is_empty() {
            return;
        }
        let committed = self.transactions.write(|connection, now| execute(connection, now, &mut batches));
        let total = batches.iter().map(|batch| batch.commands.len()).sum::<usize>();
        self.gather = Gather { more: total, at_most: self.transactions.gathering_pays.min(GATHER_AT_MOST) };
        match committed {
            Ok(()) => {
                self.counters.transactions.fetch_add(1, Ordering::Relaxed);
                self.counters.commands.fetch_add(total as u64, Ordering::Relaxed);
            }
            Err(error) => batches.iter_mut().for_each(|batch| batch.fail(&error)),
        }
        for (caller, batch) in callers.into_iter().zip(batches) {
            // A caller who has gone away wants no answer.
            let _ = caller.send(batch);
        }
    }
}

impl Batch {
    /// Gives every command the same answer.
    fn fail(&mut self, error: &StoreError) {
        self.answers.clear();
        self.answers.extend(self.commands.iter().map(|_| Err(error.clone())));
    }
}

/// Executes all commands of all callers.
///
/// An error of one record is that command's answer; an error of the file ends the transaction for all.
fn execute(connection: &Connection, now: StoreTime, batches: &mut [Batch]) -> rusqlite::Result<()> {
    let mut rows = Rows::of(connection)?;
    for batch in batches {
        // There are answers of a transaction that was rolled back, if this is not the first try.
        batch.answers.clear();
        for command in &batch.commands {
            batch.answers.push(match rows.execute(now, command) {
                Ok(reply) => Ok(reply),
                Err(Trouble::Sqlite(error)) if !is_its_own(&error) => return Err(error),
                Err(trouble) => Err(StoreError::from(trouble)),
            });
        }
    }
    Ok(())
}

/// Whether an error is about one command's data alone.
fn is_its_own(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::TooBig)
}

/// The connection that writes, and how a transaction on it begins and ends.
struct Transactions {
    connection: Connection,
    place: Place,
    busy_timeout: Duration,
    /// By how much the last commit took longer than its rows. While the disk's sync is most of a transaction, it
    /// pays to wait for more that will share it; otherwise callers and thread had better work at the same time.
    gathering_pays: Duration,
}

impl Transactions {
    /// Runs `work` in one transaction; `work` may run again when another process was in the way.
    fn write<T>(
        &mut self,
        mut work: impl FnMut(&Connection, StoreTime) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        self.place.check()?;
        let (mut began, mut committing_since) = (Instant::now(), None);
        let connection = &self.connection;
        let done = file::patiently(self.busy_timeout, || {
            (began, committing_since) = (Instant::now(), None);
            let settled = transaction(connection, &mut work, &mut committing_since);
            if !connection.is_autocommit() {
                // It cannot be worse than it is: what is not rolled back here, the next BEGIN refuses.
                let _ = connection.execute_batch("ROLLBACK");
            }
            settled
        });
        if let Some(since) = committing_since {
            self.gathering_pays = since.elapsed().saturating_sub(since - began);
        }
        done.map_err(|error| {
            let committing = committing_since.is_some();
            let classify = if committing { errors::not_committed } else { errors::not_executed };
            self.place.name(classify(&error))
        })
    }
}

fn transaction<T>(
    connection: &Connection,
    work: &mut impl FnMut(&Connection, StoreTime) -> rusqlite::Result<T>,
    committing_since: &mut Option<Instant>,
) -> rusqlite::Result<T> {
    connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
    let now = row::now(connection, true)?;
    let done = work(connection, now)?;
    *committing_since = Some(Instant::now());
    connection.prepare_cached("COMMIT")?.execute([])?;
    Ok(done)
}
