//! The thread that writes: group commit, and the purge between.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::record::StoreTime;
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, StoreError};
use rusqlite::{Connection, ErrorCode, params};
use tokio::sync::oneshot;

use super::errors::{self, Trouble};
use super::file::{self, Place, Settings};
use super::queue::{Gather, Job, Queue, Turn};
use super::row::{self, Rows};
use super::thread::Worker;

/// The most commands of one transaction, unless a single job has more.
const MAX_TRANSACTION_COMMANDS: usize = 1_024;

/// Which part of the time of a transaction may be spent on gathering the next one: a fourth. So a fast disk
/// is not slowed down by it.
const GATHER_PART: u32 = 4;

/// The longest time to gather.
const GATHER_AT_MOST: Duration = Duration::from_millis(1);

/// The most rows that one step of the purge looks at.
const PURGE_STEP_ROWS: i64 = 1_000;

/// How long a walk rests between two steps, so that it takes a small part of the thread's time.
const PURGE_STEP_PAUSE: Duration = Duration::from_millis(20);

/// How long a thread without a purge sleeps when nothing comes; any time would do.
const NO_PURGE: Duration = Duration::from_secs(3_600);

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

type Answers = Vec<Result<Reply, StoreError>>;

/// Something for the writing thread.
enum Work {
    /// Commands that may share a transaction with others.
    Commands { commands: Vec<Command>, answer: oneshot::Sender<Answers> },
    /// A transaction of its own.
    Task(Box<dyn FnOnce(&mut Transactions) + Send>),
}

impl Job for Work {
    /// A heartbeat that waits behind bulk may come too late.
    fn urgent(&self) -> bool {
        let extends = |command: &Command| matches!(command.operation, Operation::Extend { .. });
        matches!(self, Self::Commands { commands, .. } if commands.iter().all(extends))
    }

    fn size(&self) -> usize {
        match self {
            Self::Commands { commands, .. } => commands.len(),
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
            let transactions = Transactions { connection, place, busy_timeout: settings.busy_timeout };
            let purge = settings.purge_rest.map(Purge::new);
            Ok(Thread { transactions, purge, gather: Gather::default(), counters: count })
        };
        let worker = Worker::start("oncegate-sqlite-write", open, Thread::run).await?;
        Ok(Self { worker, counters })
    }

    /// Queues commands. The answers come when they are committed.
    pub(super) fn execute(&self, commands: Vec<Command>) -> Result<oneshot::Receiver<Answers>, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.worker.push(Work::Commands { commands, answer })?;
        Ok(answered)
    }

    /// Runs something in a transaction of its own.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        mut ask: impl FnMut(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        let task = move |transactions: &mut Transactions| {
            // A caller who has gone away wants no answer.
            let _ = answer.send(transactions.write(|connection, _| ask(connection)));
        };
        self.worker.push(Work::Task(Box::new(task)))?;
        let lost = |_| StoreError::unknown("the thread of the SQLite store ended before it answered");
        answered.await.map_err(lost)?
    }

    pub(super) fn stats(&self) -> SqliteStats {
        SqliteStats {
            commands: self.counters.commands.load(Ordering::Relaxed),
            transactions: self.counters.transactions.load(Ordering::Relaxed),
            purged: self.counters.purged.load(Ordering::Relaxed),
        }
    }
}

/// The writing thread, as it sees itself.
struct Thread {
    transactions: Transactions,
    purge: Option<Purge>,
    gather: Gather,
    counters: Arc<Counters>,
}

impl Thread {
    fn run(mut self, queue: &Queue<Work>) {
        loop {
            let patience = self.purge.as_ref().map_or(NO_PURGE, Purge::due_in);
            match queue.take(MAX_TRANSACTION_COMMANDS, patience, self.gather) {
                Turn::Jobs(jobs) => self.work(jobs),
                Turn::Idle => {}
                Turn::Closed => return,
            }
            if let Some(purge) = self.purge.as_mut().filter(|purge| purge.due_in().is_zero()) {
                let purged = purge.step(&mut self.transactions);
                self.counters.purged.fetch_add(purged, Ordering::Relaxed);
            }
        }
    }

    fn work(&mut self, jobs: Vec<Work>) {
        let mut batches = Vec::new();
        let mut callers = Vec::new();
        for job in jobs {
            match job {
                Work::Task(task) => task(&mut self.transactions),
                Work::Commands { commands, answer } => {
                    batches.push(commands);
                    callers.push(answer);
                }
            }
        }
        if batches.is_empty() {
            return;
        }
        let began = Instant::now();
        let committed = self.transactions.write(|connection, now| execute(connection, now, &batches));
        let commands = batches.iter().map(Vec::len);
        let total = commands.clone().sum::<usize>();
        self.gather = Gather { more: total, at_most: (began.elapsed() / GATHER_PART).min(GATHER_AT_MOST) };
        if committed.is_ok() {
            self.counters.transactions.fetch_add(1, Ordering::Relaxed);
            self.counters.commands.fetch_add(total as u64, Ordering::Relaxed);
        }
        let answers = committed.unwrap_or_else(|error| {
            commands.map(|count| (0..count).map(|_| Err(error.clone())).collect()).collect()
        });
        for (caller, answers) in callers.into_iter().zip(answers) {
            // A caller who has gone away wants no answer.
            let _ = caller.send(answers);
        }
    }
}

/// Executes all commands of all callers.
///
/// An error of one record is that command's answer; an error of the file ends the transaction for all.
fn execute(
    connection: &Connection,
    now: StoreTime,
    batches: &[Vec<Command>],
) -> rusqlite::Result<Vec<Answers>> {
    let mut rows = Rows::of(connection)?;
    let mut answer = |command| match rows.execute(now, command) {
        Ok(reply) => Ok(Ok(reply)),
        Err(Trouble::Sqlite(error)) if !is_its_own(&error) => Err(error),
        Err(trouble) => Ok(Err(StoreError::from(trouble))),
    };
    batches.iter().map(|commands| commands.iter().map(&mut answer).collect()).collect()
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
}

impl Transactions {
    /// Runs `work` in one transaction; `work` may run again when another process was in the way.
    fn write<T>(
        &mut self,
        mut work: impl FnMut(&Connection, StoreTime) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        self.place.check()?;
        let mut committing = false;
        let connection = &self.connection;
        let done = file::patiently(self.busy_timeout, || {
            committing = false;
            let settled = transaction(connection, &mut work, &mut committing);
            if !connection.is_autocommit() {
                // It cannot be worse than it is: what is not rolled back here, the next BEGIN refuses.
                let _ = connection.execute_batch("ROLLBACK");
            }
            settled
        });
        done.map_err(
            |error| {
                if committing { errors::not_committed(&error) } else { errors::not_executed(&error) }
            },
        )
    }
}

fn transaction<T>(
    connection: &Connection,
    work: &mut impl FnMut(&Connection, StoreTime) -> rusqlite::Result<T>,
    committing: &mut bool,
) -> rusqlite::Result<T> {
    connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
    let now = row::now(connection, true)?;
    let done = work(connection, now)?;
    *committing = true;
    connection.prepare_cached("COMMIT")?.execute([])?;
    Ok(done)
}

/// The walk through the file that removes expired records.
struct Purge {
    rest: Duration,
    next: Option<Instant>,
    after: String,
}

impl Purge {
    fn new(rest: Duration) -> Self {
        Self { rest, next: Instant::now().checked_add(rest), after: String::new() }
    }

    fn due_in(&self) -> Duration {
        self.next.map_or(NO_PURGE, |next| next.saturating_duration_since(Instant::now()))
    }

    /// Looks at the next rows and removes what has expired; returns how many rows that were.
    ///
    /// What goes wrong here is not told: the next caller meets it too, and hears of it.
    fn step(&mut self, transactions: &mut Transactions) -> u64 {
        let (removed, last) = self.try_step(transactions).unwrap_or_default();
        let pause = if last.is_empty() { self.rest } else { PURGE_STEP_PAUSE };
        self.after = last;
        self.next = Instant::now().checked_add(pause);
        removed
    }

    /// Returns how many rows were removed, and the last key that was looked at: empty at the end.
    fn try_step(&self, transactions: &mut Transactions) -> Result<(u64, String), StoreError> {
        let looked = self.look(&transactions.connection).map_err(|error| errors::not_executed(&error))?;
        let Some((last, expired, more)) = looked else { return Ok((0, String::new())) };
        let mut removed = 0;
        if expired {
            removed = transactions.write(|connection, now| {
                let remove = "DELETE FROM records WHERE key > ?1 AND key <= ?2 AND expires_at_ms < ?3";
                let now_ms = i64::try_from(now.millis()).unwrap_or(i64::MAX);
                connection.prepare_cached(remove)?.execute(params![self.after, last, now_ms])
            })?;
        }
        Ok((removed as u64, if more { last } else { String::new() }))
    }

    /// The last key of the next rows, whether any of them has expired, and whether more may follow.
    fn look(&self, connection: &Connection) -> rusqlite::Result<Option<(String, bool, bool)>> {
        let now_ms = i64::try_from(row::now(connection, false)?.millis()).unwrap_or(i64::MAX);
        let look = "SELECT max(key), min(expires_at_ms), count(*) FROM \
                    (SELECT key, expires_at_ms FROM records WHERE key > ?1 ORDER BY key LIMIT ?2)";
        let mut statement = connection.prepare_cached(look)?;
        statement.query_row(params![self.after, PURGE_STEP_ROWS], |row| {
            let last: Option<String> = row.get(0)?;
            let first_end_ms: Option<i64> = row.get(1)?;
            let rows: i64 = row.get(2)?;
            let expired = first_end_ms.is_some_and(|end_ms| end_ms < now_ms);
            Ok(last.map(|last| (last, expired, rows == PURGE_STEP_ROWS)))
        })
    }
}
