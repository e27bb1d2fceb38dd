//! The status of a consumer, as plain data. Every duration is serialised as a number of seconds,
//! under a name that ends in `_seconds`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::seconds;
use super::stage::{Run, Unfinished};

/// The status of a consumer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The consumer's name: the scope of the gate that it was made with.
    pub name: String,
    /// The phase of its life.
    pub phase: Phase,
    /// The reason that it ended by itself, when it has.
    pub error: Option<String>,
    /// The time since its start.
    #[serde(rename = "up_seconds", with = "seconds")]
    pub up: Duration,
    /// The gates.
    pub scopes: Vec<ScopeStatus>,
    /// The permits of handlers.
    pub permits: Permits,
    /// The messages in flight, between the source and the ack.
    pub messages: Messages,
    /// The causes for which dispatching or fetching is reduced; empty when nothing is held back.
    pub paused: Vec<PauseCause>,
    /// The recent rates of deliveries and acknowledgements.
    pub rates: Rates,
    /// The 99th percentile of the handlers' times; `None` until enough have run.
    #[serde(rename = "handler_p99_seconds", with = "seconds::optional")]
    pub handler_p99: Option<Duration>,
    /// The attempts that have been in their stage for longest, at most 16.
    pub runs: Vec<Run>,
    /// The number of handlers that have run for longer than allowed.
    pub overdue: u32,
    /// The number of dead letters that could not be written for longer than
    /// [`QUIET_LIMIT`](super::QUIET_LIMIT).
    #[serde(default)]
    pub letters_waiting: u32,
    /// The messages given up recently.
    pub refusals: Refusals,
    /// The messages that wait for a cause worth knowing (another worker holds the key, the record
    /// cannot be read), the oldest of each partition.
    pub waiting: Vec<Unfinished>,
    /// The unfinished messages that have failed, the most failures first, at most 16.
    #[serde(default)]
    pub failing: Vec<Unfinished>,
    /// Time since the source last delivered anything, or since the start.
    #[serde(rename = "delivered_seconds_ago", with = "seconds")]
    pub delivered_ago: Duration,
    /// The time that messages have been ready, with permits free, while none has started. Zero when
    /// that is not the case.
    #[serde(rename = "nothing_started_for_seconds", with = "seconds")]
    pub nothing_started_for: Duration,
    /// Time since the consumer's own loop last ran.
    #[serde(rename = "looked_seconds_ago", with = "seconds")]
    pub looked_ago: Duration,
    /// The source's own status.
    pub source: SourceStatus,
    /// The processes of a handler that has its own, as `oncegate run` does; see
    /// [`Consumer::worker_status`](crate::Consumer::worker_status).
    #[serde(default)]
    pub worker: Option<WorkerStatus>,
}

/// The processes of a handler that calls a worker in another process. Created from [`Default`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorkerStatus {
    /// Processes that run.
    pub processes: u32,
    /// Processes that take messages.
    pub ready: u32,
    /// The number of times that a process that has ended was started again.
    pub restarts: u64,
    /// The number of processes that have ended in a row, with no outcome of a message between them.
    pub ends_in_a_row: u32,
    /// The last end of a process.
    pub last_end: Option<String>,
    /// The reason that no process is ready, so that no message can be handled. `None` while one is.
    pub not_ready: Option<String>,
}

impl Status {
    /// The most runs in a status: 16.
    pub(crate) const RUNS_SHOWN: usize = 16;

    /// Returns whether another message could be received now.
    pub fn has_room(&self) -> bool {
        self.messages.in_flight < self.messages.most
            && self.messages.bytes < self.messages.most_bytes
    }
}

/// The phases of a consumer's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// The consumer has not begun to receive.
    #[default]
    Starting,
    /// The consumer receives.
    Running,
    /// The consumer is stopping: handlers that have started may end.
    Stopping,
    /// The consumer has ended.
    Stopped,
}

/// A gate and its store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScopeStatus {
    /// The scope.
    pub scope: String,
    /// The route whose messages it takes; `None` for those that no other takes.
    pub route: Option<String>,
    /// The store in a few words, without a password.
    pub store: String,
    /// The promise in force: its row in `docs/STORES.md`.
    pub promise: String,
    /// The promise of that row for a confirmed completion.
    pub holds: String,
    /// The facts that weaken the promise, from the check at the start.
    pub warnings: Vec<String>,
    /// The lease.
    #[serde(rename = "lease_seconds", with = "seconds")]
    pub lease: Duration,
    /// The least time that is left of one of its running leases; the whole lease when none runs.
    #[serde(rename = "lease_remaining_seconds", with = "seconds")]
    pub lease_remaining: Duration,
    /// The time that it keeps completed records.
    #[serde(rename = "retention_seconds", with = "seconds")]
    pub retention: Duration,
    /// The longest time of one run.
    #[serde(rename = "max_run_seconds", with = "seconds")]
    pub max_run: Duration,
    /// The least time that a running handler has left until `max_run`; the whole of it when none
    /// runs.
    #[serde(rename = "run_remaining_seconds", with = "seconds", default)]
    pub run_remaining: Duration,
    /// The time since the oldest expired record that its store may still hold expired; zero when
    /// there is none, and `None` where the server removes them by itself, or another process does.
    #[serde(rename = "oldest_expired_seconds", with = "seconds::optional", default)]
    pub oldest_expired: Option<Duration>,
    /// The size of the write-ahead log of an embedded store, in bytes.
    #[serde(default)]
    pub log_bytes: Option<u64>,
    /// The memory that the server of its store uses, in bytes; of several servers, of the one with
    /// the least room.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// The limit of that memory, in bytes; `None` when the server has none.
    #[serde(default)]
    pub max_memory_bytes: Option<u64>,
    /// The number of known shards of its store: those that do not answer, and the others that were
    /// asked in the last ten minutes, or since the first outage began. A store that is not sharded
    /// has one.
    pub shards: u32,
    /// The shards that do not answer.
    pub outages: Vec<StoreOutage>,
    /// `true` when its handler fails for all messages alike, and is paused.
    pub handler_paused: bool,
    /// The open circuit breaker of its handler, while it keeps messages from running.
    #[serde(default)]
    pub breaker: Option<BreakerStatus>,
    /// The pause of the scope by an operator.
    #[serde(default)]
    pub pause: Option<ScopePause>,
}

/// An open circuit breaker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BreakerStatus {
    /// The time since it opened; `None` when an earlier process has opened it.
    #[serde(rename = "for_seconds", with = "seconds::optional")]
    pub lasts: Option<Duration>,
    /// The beginning of the reason of the last failure, up to 500 bytes; `None` when an earlier
    /// process has opened it.
    pub reason: Option<String>,
    /// The time until the next message probes; `None` while one does.
    #[serde(rename = "next_probe_seconds", with = "seconds::optional")]
    pub next_probe: Option<Duration>,
}

/// A scope that an operator has paused: its consumers begin no attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScopePause {
    /// The time of the pause, in milliseconds since the Unix epoch, on the clock of the operator.
    pub at_unix_ms: u64,
    /// The time since then.
    #[serde(rename = "for_seconds", with = "seconds")]
    pub lasts: Duration,
    /// The operator's reason.
    pub reason: String,
    /// The operator.
    pub by: String,
}

impl ScopeStatus {
    /// Returns whether every shard of the store that was asked answers.
    pub fn is_store_up(&self) -> bool {
        self.outages.is_empty()
    }

    /// Returns whether no shard of the store is known to answer.
    pub fn is_store_away(&self) -> bool {
        !self.outages.is_empty() && self.outages.len() >= self.shards as usize
    }
}

/// A shard of a store that does not answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StoreOutage {
    /// The shard's number, an opaque identifier; 0 for a store that is not sharded.
    pub shard: u64,
    /// The time since its first error.
    #[serde(rename = "for_seconds", with = "seconds")]
    pub lasts: Duration,
    /// The last error.
    pub error: String,
    /// The number of messages that wait for it.
    pub waiting: usize,
    /// `true` when it has been away for so long that messages run without it, because the consumer
    /// [fails open](crate::Consumer::fail_open_after).
    #[serde(default)]
    pub open: bool,
    /// `true` when the store answers, and has lost records: no claim is granted before an operator
    /// accepts that.
    #[serde(default)]
    pub halted: bool,
}

/// The permits of handlers: the number that may run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Permits {
    /// The number of permits: `Consumer::concurrency`.
    pub total: u32,
    /// Permits that are free.
    pub free: u32,
}

/// The messages in flight, between the source and the ack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Messages {
    /// The number of messages in flight.
    pub in_flight: usize,
    /// The bytes of the messages in flight.
    pub bytes: usize,
    /// The most messages that may be in flight.
    pub most: usize,
    /// The most bytes.
    pub most_bytes: usize,
    /// Messages in progress: claiming, running, being completed.
    pub running: usize,
    /// Messages that wait only for a permit.
    pub ready: usize,
    /// Messages behind another one in their lane.
    pub behind: usize,
    /// Messages that wait: for a retry, a key that another worker holds, a paused handler.
    pub parked: usize,
    /// Messages whose shard of the store is away.
    pub held_back: usize,
}

/// The cause for which dispatching or fetching is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PauseCause {
    /// A store, or a shard of one, does not answer.
    StoreAway,
    /// The limit on messages or bytes in flight is reached.
    Full,
    /// Too much of a partition waits behind its first unfinished message.
    Span,
    /// The first message of a retry topic is not due.
    NotDue,
    /// The circuit breaker of the handlers is open.
    Breaker,
    /// An operator has paused a scope.
    Operator,
    /// The consumer is stopping.
    Stopping,
}

impl PauseCause {
    /// The name in metrics: lower case, one word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StoreAway => "store_away",
            Self::Full => "full",
            Self::Span => "span",
            Self::NotDue => "not_due",
            Self::Breaker => "breaker",
            Self::Operator => "operator",
            Self::Stopping => "stopping",
        }
    }
}

/// Recent rates: moving averages over about five seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Rates {
    /// Messages that the source has delivered.
    pub delivered_per_second: f64,
    /// Messages that were acknowledged.
    pub ended_per_second: f64,
}

/// The number of messages that were given up recently, and the number at which the consumer stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Refusals {
    /// The number of messages in a row that were given up.
    pub in_a_row: u32,
    /// The number in a row at which the consumer stops.
    pub most_in_a_row: u32,
}

/// A source's own status. Created by [`Source::status`](crate::source::Source::status) from
/// [`Default`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// The consumer group, where the broker has groups.
    #[serde(default)]
    pub group: Option<String>,
    /// Time since the broker's client was last polled, or last called; `None` when that does not
    /// apply.
    #[serde(rename = "polled_seconds_ago", with = "seconds::optional")]
    pub polled_ago: Option<Duration>,
    /// The time since the broker's client had a connection to any broker; `None` when it has one,
    /// or that is unknown.
    #[serde(
        default,
        rename = "disconnected_for_seconds",
        with = "seconds::optional"
    )]
    pub disconnected_for: Option<Duration>,
    /// `true` when the brokers have answered another client of this process for so long that this
    /// one should have connected.
    #[serde(default)]
    pub others_connect: bool,
    /// The partitions or the queue that it consumes now. The consumer adds its messages in flight
    /// of each.
    pub partitions: Vec<PartitionStatus>,
    /// Operations that fail now. Empty when each one succeeded the last time, or was never called.
    #[serde(default)]
    pub failures: Vec<SourceFailure>,
}

/// An operation of a source that fails: it has not succeeded since its first failure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SourceFailure {
    /// The operation: `receive`, `delete` or `visibility` of a queue, `broker`, `fetch`, `join`,
    /// `offset` or `read` of Kafka, `dead_letter`, or `open` at the start.
    pub operation: String,
    /// The last error.
    pub error: String,
    /// Time since the first failure.
    #[serde(rename = "for_seconds", with = "seconds")]
    pub lasts: Duration,
    /// Time since the last failure.
    #[serde(rename = "failed_seconds_ago", with = "seconds")]
    pub failed_ago: Duration,
    /// The number of failures in a row.
    pub failures: u64,
    /// `true` when messages are not delivered while it fails, those of some partitions at least.
    pub stops_delivery: bool,
}

/// A partition, or a queue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartitionStatus {
    /// The topic or queue.
    pub topic: String,
    /// The partition; 0 for a queue.
    pub partition: i32,
    /// The number of messages that are not finished, including those still at the broker and those
    /// behind an open transaction; `None` when that is unknown.
    pub lag: Option<u64>,
    /// The number of messages at the broker that were not delivered to this consumer. 0 once
    /// everything deliverable was delivered, not counting transaction markers; `None` when that is
    /// unknown.
    pub undelivered: Option<u64>,
    /// The number of offsets at the broker that no consumer gets before a transaction ends which is
    /// open; `None` when that is unknown. It is part of the lag.
    #[serde(default)]
    pub withheld: Option<u64>,
    /// The time since that transaction has been seen open.
    #[serde(default, rename = "withheld_for_seconds", with = "seconds::optional")]
    pub withheld_for: Option<Duration>,
    /// The last offset that was received.
    pub received: Option<i64>,
    /// The first offset that is not finished: the position of the next commit.
    pub watermark: Option<i64>,
    /// The offset that was last committed to the broker.
    pub committed: Option<i64>,
    /// The time that the watermark has been ahead of the committed offset; `None` while it is not.
    #[serde(rename = "uncommitted_for_seconds", with = "seconds::optional")]
    pub uncommitted_for: Option<Duration>,
    /// Time since its last message was delivered, or since it was assigned.
    #[serde(rename = "delivered_seconds_ago", with = "seconds::optional")]
    pub delivered_ago: Option<Duration>,
    /// Time since the first unfinished message was received. A fact, not a judgement: the message
    /// may wait for a reason.
    #[serde(rename = "oldest_unfinished_seconds", with = "seconds::optional")]
    pub oldest_unfinished: Option<Duration>,
    /// The cause for which its fetching is paused; `None` when it is not.
    pub paused: Option<PauseCause>,
    /// The number of its messages that are held by the source and the consumer.
    pub in_flight: usize,
    /// The first unfinished message among those, from the consumer's view.
    pub first: Option<Unfinished>,
}

impl PartitionStatus {
    /// A partition of which only the name is known.
    pub fn new(topic: impl Into<String>, partition: i32) -> Self {
        Self {
            topic: topic.into(),
            partition,
            ..Self::default()
        }
    }
}
