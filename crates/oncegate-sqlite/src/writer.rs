//! The thread that writes, with group commit.

mod transactions;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::key::StoreKey;
use oncegate_core::record::StoreTime;
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, StoreError};
use rusqlite::{Connection, ErrorCode};
use tokio::sync::{oneshot, watch};

use self::transactions::Transactions;
use super::errors::{self, Trouble};
use super::expired_row::{self, ExpiredRow};
use super::file::Settings;
use super::queue::{Job, JobClass, Queue, SoFar, Turn};
use super::row::{self, Claimed, Rows};
use super::thread::{self, Worker};

/// The most commands of one transaction, unless a single job has more.
const MAX_TRANSACTION_COMMANDS: usize = 4_096;

/// The longest wait for more commands in a transaction that has begun, because it blocks other
/// processes' writes.
const GATHER_AT_MOST: Duration = Duration::from_millis(1);

/// The most keys of a transaction that are set aside because they are on damaged pages. Of more,
/// the file as a whole is taken for damaged.
const MAX_DAMAGED_KEYS: usize = 64;

/// The longest sleep of the idle thread; the value has no effect.
const PATIENCE: Duration = Duration::from_secs(3_600);

/// Counters of a store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SqliteStats {
    /// The number of executed commands.
    pub commands: u64,
    /// The number of their transactions; fewer than commands when calls were concurrent.
    pub transactions: u64,
    /// The number of expired records that were removed.
    pub purged: u64,
}

#[derive(Default)]
struct Counters {
    commands: AtomicU64,
    transactions: AtomicU64,
    purged: AtomicU64,
}

/// A caller's commands, each with a slot for its answer.
///
/// It is sent to the writing thread and back, so that the caller frees what it has allocated:
/// freeing memory on another thread takes the allocator's locks.
pub(super) struct Batch {
    asked: Vec<Asked>,
}

impl From<Batch> for Vec<CommandResult> {
    fn from(batch: Batch) -> Self {
        batch.answers().collect()
    }
}

/// A command, and its answer once there is one.
struct Asked {
    command: Command,
    answer: Option<CommandResult>,
}

type CommandResult = Result<Reply, StoreError>;

impl Batch {
    fn of(commands: Vec<Command>) -> Self {
        Self {
            asked: commands
                .into_iter()
                .map(|command| Asked {
                    command,
                    answer: None,
                })
                .collect(),
        }
    }

    /// The answers, in the order of the commands.
    pub(super) fn answers(self) -> impl Iterator<Item = CommandResult> {
        self.asked.into_iter().map(|asked| {
            asked
                .answer
                .unwrap_or_else(|| Err(StoreError::unknown("the SQLite store gave no answer")))
        })
    }
}

/// A job for the writing thread.
enum WriteJob {
    /// Commands that may share a transaction with others.
    Commands {
        batch: Batch,
        caller: oneshot::Sender<Batch>,
    },
    /// Work in a separate transaction.
    Task(Box<dyn FnOnce(&mut Transactions) + Send>),
}

impl Job for WriteJob {
    fn class(&self) -> JobClass {
        match self {
            Self::Commands { batch, .. } => batch.class(),
            Self::Task(_) => JobClass::Early,
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::Commands { batch, .. } => batch.asked.len(),
            Self::Task(_) => 1,
        }
    }

    fn alone(&self) -> bool {
        matches!(self, Self::Task(_))
    }
}

/// The callers' handle on the writing thread.
pub(super) struct Writer {
    worker: Worker<WriteJob>,
    counters: Arc<Counters>,
    /// `true` while the thread waits for the file's lock.
    pub(super) waits: watch::Receiver<bool>,
}

impl Writer {
    pub(super) async fn start(settings: Settings) -> Result<Self, StoreError> {
        let counters = Arc::new(Counters::default());
        let count = Arc::clone(&counters);
        let (waiting, waits) = watch::channel(false);
        let worker = Worker::start(
            "oncegate-sqlite-write",
            move || {
                Ok(WriterThread {
                    transactions: Transactions::open(&settings, waiting)?,
                    expected: 0,
                    claimed: Claimed::default(),
                    counters: count,
                })
            },
            WriterThread::run,
        );
        let worker = worker.await?;
        Ok(Self {
            worker,
            counters,
            waits,
        })
    }

    /// Waits until this thread does not wait for the file's lock any more, or for so long. Another
    /// transaction of this process that begins at once when one has ended, and the next one after
    /// it, would leave it none: it asks for the lock at intervals. Heartbeats would starve.
    pub(super) async fn let_through(&self, most: Duration) {
        let mut waits = self.waits.clone();
        drop(tokio::time::timeout(most, waits.wait_for(|waits| !*waits)).await);
    }

    /// Queues commands. Returns them with their answers when they are committed.
    pub(super) fn execute(
        &self,
        commands: Vec<Command>,
    ) -> Result<oneshot::Receiver<Batch>, StoreError> {
        self.queue(Batch::of(commands))
    }

    /// Queues one command.
    pub(super) fn execute_one(
        &self,
        command: Command,
    ) -> Result<oneshot::Receiver<Batch>, StoreError> {
        self.queue(Batch {
            asked: vec![Asked {
                command,
                answer: None,
            }],
        })
    }

    fn queue(&self, batch: Batch) -> Result<oneshot::Receiver<Batch>, StoreError> {
        let (caller, answered) = oneshot::channel();
        self.worker.push(WriteJob::Commands { batch, caller })?;
        Ok(answered)
    }

    /// Runs `work` in a separate transaction.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnMut(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (work, answered) = task(ask);
        self.worker.push(work)?;
        answered.await.map_err(thread_ended)?
    }

    /// The purge's handle for removing rows.
    pub(super) fn removals(&self) -> Removals {
        Removals {
            queue: Arc::clone(self.worker.queue()),
            counters: Arc::clone(&self.counters),
        }
    }

    pub(super) fn stats(&self) -> SqliteStats {
        SqliteStats {
            commands: self.counters.commands.load(Ordering::Relaxed),
            transactions: self.counters.transactions.load(Ordering::Relaxed),
            purged: self.counters.purged.load(Ordering::Relaxed),
        }
    }
}

/// Work in a separate transaction, and the channel for its answer.
fn task<T: Send + 'static>(
    mut task: impl FnMut(&Connection) -> rusqlite::Result<T> + Send + 'static,
) -> (WriteJob, oneshot::Receiver<Result<T, StoreError>>) {
    let (answer, answered) = oneshot::channel();
    let work = WriteJob::Task(Box::new(move |transactions| {
        // The caller may be gone; then the answer is dropped.
        let _ = answer.send(transactions.write(|connection, _| task(connection)));
    }));
    (work, answered)
}

fn thread_ended(_: oneshot::error::RecvError) -> StoreError {
    StoreError::unknown(thread::ENDED)
}

/// The purge's handle on the writing thread.
pub(super) struct Removals {
    queue: Arc<Queue<WriteJob>>,
    counters: Arc<Counters>,
}

impl Removals {
    /// Removes rows in one transaction, and waits for it. Returns how long it took without its
    /// commit.
    pub(super) fn remove(&self, rows: Vec<ExpiredRow>) -> Result<Duration, StoreError> {
        let (work, answered) = task(move |connection| {
            let began = Instant::now();
            let removed = expired_row::remove(connection, &rows)?;
            Ok((removed, began.elapsed()))
        });
        self.queue.push(work)?;
        let (removed, took) = answered.blocking_recv().map_err(thread_ended)??;
        self.counters
            .purged
            .fetch_add(removed as u64, Ordering::Relaxed);
        Ok(took)
    }
}

/// The state of the writing thread.
struct WriterThread {
    transactions: Transactions,
    /// The expected number of concurrent commands: those that waited at the last answer, and as
    /// many as were answered.
    expected: usize,
    claimed: Claimed,
    counters: Arc<Counters>,
}

impl WriterThread {
    fn run(mut self, queue: &Queue<WriteJob>) {
        loop {
            match queue.take(MAX_TRANSACTION_COMMANDS, PATIENCE) {
                Turn::Jobs(jobs) => self.work(jobs, queue),
                Turn::Idle => {}
                Turn::Closed => return,
            }
        }
    }

    fn work(&mut self, jobs: Vec<WriteJob>, queue: &Queue<WriteJob>) {
        let mut group = Group::new(
            queue,
            self.expected,
            self.transactions.last_commit.min(GATHER_AT_MOST),
        );
        for job in jobs {
            match job {
                WriteJob::Task(task) => task(&mut self.transactions),
                WriteJob::Commands { batch, caller } => group.add(batch, caller),
            }
        }
        if group.batches.is_empty() {
            return;
        }
        let claimed = &mut self.claimed;
        let committed = loop {
            let known = group.damaged.len();
            let committed = self
                .transactions
                .write(|connection, now| group.execute(connection, now, claimed));
            // The other commands go on without the key whose page is damaged.
            let is_one_key = group.damaged.len() > known && known < MAX_DAMAGED_KEYS;
            if committed.is_ok() || !is_one_key {
                break committed;
            }
        };
        match committed {
            Ok(()) => {
                self.counters.transactions.fetch_add(1, Ordering::Relaxed);
                self.counters
                    .commands
                    .fetch_add(group.so_far.size as u64, Ordering::Relaxed);
            }
            Err(error) => group
                .batches
                .iter_mut()
                .for_each(|batch| batch.fail(&error)),
        }
        self.expected = queue.size() + group.so_far.size;
        group.answer();
    }
}

impl Batch {
    /// A heartbeat that waits behind bulk may be too late. Claims come last, and in separate turns
    /// if there are many: each changes an arbitrary page of the index, and the more of them share a
    /// transaction, the fewer pages are written per claim.
    ///
    /// Benchmark: `scripts/bench sqlite`. With claims in the class of the rest, its workload took
    /// 1.05 times the processor time with 256 in flight on a new file, and 1.09 times with 1,024 in
    /// flight and 200,000 records held (medians of eight pairs of runs on a busy machine, 0.99 to
    /// 1.31).
    fn class(&self) -> JobClass {
        let mut operations = self.asked.iter().map(|asked| &asked.command.operation);
        if operations
            .clone()
            .all(|operation| matches!(operation, Operation::Extend { .. }))
        {
            JobClass::Urgent
        } else if operations.all(|operation| matches!(operation, Operation::Claim { .. })) {
            JobClass::Late
        } else {
            JobClass::Early
        }
    }

    /// Gives every command the same answer.
    fn fail(&mut self, error: &StoreError) {
        self.asked
            .iter_mut()
            .for_each(|asked| asked.answer = Some(Err(error.clone())));
    }

    /// Executes the commands. On a repeated try, it replaces the answers of the transaction that
    /// was rolled back.
    ///
    /// An error of one record is that command's answer; an error of the file ends the transaction
    /// for all.
    fn execute(
        &mut self,
        rows: &mut Rows<'_>,
        now: StoreTime,
        claimed: &mut Claimed,
        damaged: &mut BTreeSet<StoreKey>,
    ) -> rusqlite::Result<()> {
        for Asked { command, answer } in &mut self.asked {
            if damaged.contains(&command.key) {
                *answer = Some(Err(errors::of_damaged_page(&command.key)));
                continue;
            }
            *answer = Some(match rows.execute(now, command, claimed) {
                Ok(reply) => Ok(reply),
                Err(Trouble::Sqlite(error)) if errors::is_damage(&error) => {
                    damaged.insert(command.key.clone());
                    return Err(error);
                }
                Err(Trouble::Sqlite(error)) if !is_its_own(&error) => return Err(error),
                Err(trouble) => Err(StoreError::from(trouble)),
            });
        }
        Ok(())
    }
}

/// The callers whose commands share a transaction.
struct Group<'q> {
    queue: &'q Queue<WriteJob>,
    batches: Vec<Batch>,
    callers: Vec<oneshot::Sender<Batch>>,
    so_far: SoFar,
    /// The keys that are on damaged pages.
    damaged: BTreeSet<StoreKey>,
    /// The number of commands to expect soon.
    expected: usize,
    /// The wait for them.
    patience: Duration,
}

impl<'q> Group<'q> {
    fn new(queue: &'q Queue<WriteJob>, expected: usize, patience: Duration) -> Self {
        let so_far = SoFar {
            size: 0,
            class: JobClass::Urgent,
        };
        Self {
            queue,
            batches: Vec::new(),
            callers: Vec::new(),
            so_far,
            damaged: BTreeSet::new(),
            expected,
            patience,
        }
    }

    fn add(&mut self, batch: Batch, caller: oneshot::Sender<Batch>) {
        self.so_far = SoFar {
            size: self.so_far.size + batch.asked.len(),
            class: batch.class(),
        };
        self.batches.push(batch);
        self.callers.push(caller);
    }

    /// Executes all commands of all callers, and of the callers that arrive meanwhile.
    ///
    /// Callers that were answered together tend to send their next commands together. The first
    /// ones are executed while the others arrive: without a short wait for these, two halves would
    /// alternate, each with its own sync of the disk.
    fn execute(
        &mut self,
        connection: &Connection,
        mut now: StoreTime,
        claimed: &mut Claimed,
    ) -> rusqlite::Result<()> {
        let deadline = Instant::now() + self.patience;
        let mut rows = Rows::of(connection)?;
        let mut executed = 0;
        loop {
            for batch in self.batches.iter_mut().skip(executed) {
                batch.execute(&mut rows, now, claimed, &mut self.damaged)?;
            }
            executed = self.batches.len();
            if !self.gather(deadline) {
                return Ok(());
            }
            // No lease may begin before its claim was sent.
            now = row::now(connection, true)?;
        }
    }

    /// Adds the callers that have arrived, or arrive until then; `false` when the transaction must
    /// be committed.
    fn gather(&mut self, deadline: Instant) -> bool {
        let room = MAX_TRANSACTION_COMMANDS.saturating_sub(self.so_far.size);
        let missing = self.expected.saturating_sub(self.so_far.size).min(room);
        if room == 0 {
            return false;
        }
        let patience = if missing == 0 {
            Duration::ZERO
        } else {
            deadline.saturating_duration_since(Instant::now())
        };
        // While a quarter of them is executed, the next may arrive, so few turns and few wake-ups
        // are enough.
        let wanted = missing.min(self.expected.div_ceil(4)).max(1);
        let more = self.queue.take_more(self.so_far, room, wanted, patience);
        let came = !more.is_empty();
        for work in more {
            if let WriteJob::Commands { batch, caller } = work {
                self.add(batch, caller);
            }
        }
        came
    }

    fn answer(self) {
        for (caller, batch) in self.callers.into_iter().zip(self.batches) {
            // The caller may be gone; then the answer is dropped.
            let _ = caller.send(batch);
        }
    }
}

/// Returns whether an error is about one command's data alone.
fn is_its_own(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::TooBig)
}
