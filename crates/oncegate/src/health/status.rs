//! What a consumer does now: plain data. Every duration serialises as a number of seconds, under a name that ends in
//! `_seconds`.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Words;

/// What a consumer does now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The consumer's name: the scope of the gate that it was made with.
    pub name: String,
    /// Where it is in its life.
    pub phase: Phase,
    /// Why it ended by itself, when it has.
    pub error: Option<String>,
    /// How long it has been running.
    #[serde(rename = "up_seconds", with = "seconds")]
    pub up: Duration,
    /// Its gates.
    pub scopes: Vec<ScopeStatus>,
    /// How many handlers may run.
    pub permits: Permits,
    /// What is between the source and the ack.
    pub messages: Messages,
    /// Why less than everything is dispatched or fetched; empty when nothing is held back.
    pub paused: Vec<PauseCause>,
    /// What came and ended of late.
    pub rates: Rates,
    /// What 99 of 100 handlers take at the most; `None` until enough have run.
    #[serde(rename = "handler_p99_seconds", with = "optional_seconds")]
    pub handler_p99: Option<Duration>,
    /// The attempts that have been in their stage for longest, at most [`RUNS_SHOWN`](Self::RUNS_SHOWN).
    pub runs: Vec<Run>,
    /// How many handlers have run for longer than they may.
    pub overdue: u32,
    /// How many dead letters could not be written for longer than [`QUIET_LIMIT`](super::QUIET_LIMIT).
    #[serde(default)]
    pub letters_waiting: u32,
    /// What was given up of late.
    pub refusals: Refusals,
    /// The messages that wait with a cause worth knowing (another worker has them, their record cannot be read), the oldest
    /// of each partition.
    pub waiting: Vec<Unfinished>,
    /// Since the source last delivered anything, or since the start.
    #[serde(rename = "delivered_seconds_ago", with = "seconds")]
    pub delivered_ago: Duration,
    /// How long messages have been ready, with permits free, and none has started. Zero when it is not so.
    #[serde(rename = "nothing_started_for_seconds", with = "seconds")]
    pub nothing_started_for: Duration,
    /// Since the consumer's own loop last had a turn.
    #[serde(rename = "looked_seconds_ago", with = "seconds")]
    pub looked_ago: Duration,
    /// What the source says.
    pub source: SourceStatus,
}

impl Status {
    /// 16.
    pub const RUNS_SHOWN: usize = 16;

    /// Whether a message that the source has could come in now.
    pub fn has_room(&self) -> bool {
        self.messages.in_flight < self.messages.most && self.messages.bytes < self.messages.most_bytes
    }
}

/// Where a consumer is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// It has not begun to receive.
    #[default]
    Starting,
    /// It receives.
    Running,
    /// What has started may end.
    Stopping,
    /// It has ended.
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
    /// Its store in a few words, without a password.
    pub store: String,
    /// The promise in force: its row in `docs/STORES.md`.
    pub promise: String,
    /// What that row says of a completion that was answered.
    pub holds: String,
    /// What weakens the promise, from the check at the start.
    pub warnings: Vec<String>,
    /// Its lease.
    #[serde(rename = "lease_seconds", with = "seconds")]
    pub lease: Duration,
    /// The least that is left of one of its running leases; the whole lease when none runs.
    #[serde(rename = "lease_remaining_seconds", with = "seconds")]
    pub lease_remaining: Duration,
    /// How long it keeps completed records.
    #[serde(rename = "retention_seconds", with = "seconds")]
    pub retention: Duration,
    /// How long one run may take.
    #[serde(rename = "max_run_seconds", with = "seconds")]
    pub max_run: Duration,
    /// How long ago the oldest expired record that its store may still hold has expired; zero when there is none, and
    /// `None` where the server removes them by itself, or another process does.
    #[serde(rename = "oldest_expired_seconds", with = "optional_seconds", default)]
    pub oldest_expired: Option<Duration>,
    /// The size of the write-ahead log of an embedded store, in bytes.
    #[serde(default)]
    pub log_bytes: Option<u64>,
    /// How many shards of its store were asked so far; a store that is one whole has one.
    pub shards: u32,
    /// Those of them that do not answer.
    pub outages: Vec<StoreOutage>,
    /// Whether its handler fails for all alike, and is paused.
    pub handler_paused: bool,
}

impl ScopeStatus {
    /// Whether every shard of the store answers, as far as it was asked.
    pub fn is_store_up(&self) -> bool {
        self.outages.is_empty()
    }

    /// Whether no shard of the store that was asked answers.
    pub fn is_store_away(&self) -> bool {
        !self.outages.is_empty() && self.outages.len() >= self.shards as usize
    }
}

/// A shard of a store that does not answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StoreOutage {
    /// The shard's number, which means nothing else; 0 for a store that is one whole.
    pub shard: u64,
    /// For how long.
    #[serde(rename = "for_seconds", with = "seconds")]
    pub lasts: Duration,
    /// What it said last.
    pub error: String,
    /// How many messages wait for it.
    pub waiting: usize,
    /// Whether it has been away for so long that messages run without it, because the consumer
    /// [fails open](crate::Consumer::fail_open_after).
    #[serde(default)]
    pub open: bool,
}

/// How many handlers may run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Permits {
    /// `Consumer::concurrency`.
    pub total: u32,
    /// Those that nobody has.
    pub free: u32,
}

/// What is between the source and the ack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Messages {
    /// All of them.
    pub in_flight: usize,
    /// Their bytes.
    pub bytes: usize,
    /// The most messages that may be in flight.
    pub most: usize,
    /// The most bytes.
    pub most_bytes: usize,
    /// Those under way: claiming, running, being completed.
    pub running: usize,
    /// Those that wait for a permit alone.
    pub ready: usize,
    /// Those behind another in their lane.
    pub behind: usize,
    /// Those that wait for their time: a retry, a claim of somebody else's, a handler that is paused.
    pub parked: usize,
    /// Those whose shard of the store is away.
    pub held_back: usize,
}

/// Why less than everything is dispatched or fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PauseCause {
    /// A store, or a part of one, does not answer.
    StoreAway,
    /// As many messages or bytes are in flight as may be.
    Full,
    /// Too much of a partition waits behind its first unfinished message.
    Span,
    /// The first message of a retry topic is not due.
    NotDue,
    /// The circuit breaker of the handlers is open.
    Breaker,
    /// It is stopping.
    Stopping,
}

impl PauseCause {
    /// One lower-case word for metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StoreAway => "store_away",
            Self::Full => "full",
            Self::Span => "span",
            Self::NotDue => "not_due",
            Self::Breaker => "breaker",
            Self::Stopping => "stopping",
        }
    }
}

/// What came and ended of late: moving averages over about five seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Rates {
    /// Messages that the source has delivered.
    pub delivered_per_second: f64,
    /// Messages that were acknowledged.
    pub ended_per_second: f64,
}

/// What was given up of late, and where the consumer stops because of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Refusals {
    /// How many messages in a row were given up.
    pub in_a_row: u32,
    /// At how many it stops.
    pub most_in_a_row: u32,
}

/// An attempt that is under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Run {
    /// The gate's scope.
    pub scope: String,
    /// Where the message came from.
    pub origin: String,
    /// What is done with it.
    pub stage: Stage,
    /// For how long that has been done.
    #[serde(rename = "in_stage_for_seconds", with = "seconds")]
    pub in_stage_for: Duration,
    /// How long a handler may run.
    #[serde(rename = "max_run_seconds", with = "seconds")]
    pub max_run: Duration,
}

impl Run {
    /// Whether its handler has run for longer than it may.
    pub fn is_overdue(&self) -> bool {
        self.stage == Stage::Running && self.in_stage_for > self.max_run
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, origin, .. } = self;
        write!(f, "the handler of {origin} in `{scope}` has run for {}", Words(self.in_stage_for))
    }
}

/// Where a message is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Stage {
    /// Behind another in its lane.
    Behind,
    /// First in its lanes, waiting for a permit.
    Ready,
    /// Waiting for its time.
    Parked(WaitCause),
    /// Its shard of the store is away.
    HeldBack,
    /// Asking the store for the right to run.
    Claiming,
    /// Waiting until nothing else runs in this process.
    Quarantined,
    /// Its handler runs.
    Running,
    /// Its outcome is being stored.
    Ending,
    /// Its dead letter is being written.
    Burying,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Behind => "waits behind another",
            Self::Ready => "waits for a permit",
            Self::Parked(WaitCause::Retry) => "waits for its retry",
            Self::Parked(WaitCause::Busy) => "waits for another worker",
            Self::Parked(WaitCause::Lapse) => "waits until its own lease is over",
            Self::Parked(WaitCause::Unreadable) => "waits, for its record cannot be read",
            Self::Parked(WaitCause::Result) => "waits for the result store",
            Self::Parked(WaitCause::Breaker) => "waits for its handler, which is paused",
            Self::Parked(WaitCause::Tenant) => "waits for another of its tenant",
            Self::HeldBack => "waits for its store",
            Self::Claiming => "is being claimed",
            Self::Quarantined => "waits to run alone",
            Self::Running => "is running",
            Self::Ending => "is being completed",
            Self::Burying => "goes to the dead letters",
        })
    }
}

/// For what a message waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WaitCause {
    /// Its next attempt is not due.
    Retry,
    /// Another worker has its key, or its record's retry is not due.
    Busy,
    /// Its own lease must be over first: its handler was cancelled and has not said a word.
    Lapse,
    /// Its record cannot be read.
    Unreadable,
    /// The result store does not answer.
    Result,
    /// Its handler's circuit breaker is open.
    Breaker,
    /// Its tenant has as many running as it may.
    Tenant,
}

/// A message that is not finished.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Unfinished {
    /// The gate's scope.
    pub scope: String,
    /// Where it came from.
    pub origin: String,
    /// Where it is on its way.
    pub stage: Stage,
    /// How long it has been there; for a message that is parked, since it first was for this cause.
    #[serde(rename = "in_stage_for_seconds", with = "seconds")]
    pub in_stage_for: Duration,
    /// Since it was received.
    #[serde(rename = "age_seconds", with = "seconds")]
    pub age: Duration,
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, which {} for {}", self.origin, self.stage, Words(self.in_stage_for))
    }
}

/// What a source says of itself. Made by [`Source::status`](crate::source::Source::status) from [`Default`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SourceStatus {
    /// The consumer group, where the broker has groups.
    #[serde(default)]
    pub group: Option<String>,
    /// Since the broker's client was last polled, or last called; `None` when that says nothing.
    #[serde(rename = "polled_seconds_ago", with = "optional_seconds")]
    pub polled_ago: Option<Duration>,
    /// For how long the broker's client has had no connection to any broker; `None` when it has one, or that is not known.
    #[serde(default, rename = "disconnected_for_seconds", with = "optional_seconds")]
    pub disconnected_for: Option<Duration>,
    /// Whether the brokers have answered another client of this process for so long that this one should have connected.
    #[serde(default)]
    pub others_connect: bool,
    /// What it is consuming now: partitions, or a queue. The consumer adds what it has in flight of each.
    pub partitions: Vec<PartitionStatus>,
    /// Operations that fail now. Empty when each has succeeded the last time, or was never called.
    #[serde(default)]
    pub failures: Vec<SourceFailure>,
}

/// An operation of a source that fails: it has not succeeded since its first failure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SourceFailure {
    /// Which: `receive`, `delete` or `visibility` of a queue, `broker` or `fetch` of Kafka, `dead_letter`, or `open` at the
    /// start.
    pub operation: String,
    /// The last error.
    pub error: String,
    /// Since the first failure.
    #[serde(rename = "for_seconds", with = "seconds")]
    pub lasts: Duration,
    /// Since the last failure.
    #[serde(rename = "failed_seconds_ago", with = "seconds")]
    pub failed_ago: Duration,
    /// How often it has failed in a row.
    pub failures: u64,
    /// Whether no message comes while it fails.
    pub stops_delivery: bool,
}

/// A partition, or a queue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PartitionStatus {
    /// The topic or queue.
    pub topic: String,
    /// The partition; 0 for a queue.
    pub partition: i32,
    /// How many messages are not finished, the broker's included; `None` when that is not known.
    pub lag: Option<u64>,
    /// How many messages the broker has that were not delivered to us. 0 once everything has come that can come,
    /// transaction markers left aside; `None` when that is not known.
    pub undelivered: Option<u64>,
    /// The last offset that was received.
    pub received: Option<i64>,
    /// The first offset that is not finished: where the next commit will stand.
    pub watermark: Option<i64>,
    /// The offset that the broker has from us.
    pub committed: Option<i64>,
    /// How long the watermark has been ahead of what is committed; `None` while it is not.
    #[serde(rename = "uncommitted_for_seconds", with = "optional_seconds")]
    pub uncommitted_for: Option<Duration>,
    /// Since its last message came, or since it was assigned.
    #[serde(rename = "delivered_seconds_ago", with = "optional_seconds")]
    pub delivered_ago: Option<Duration>,
    /// Since the first unfinished message was received. A fact, not a judgement: it may wait with a reason.
    #[serde(rename = "oldest_unfinished_seconds", with = "optional_seconds")]
    pub oldest_unfinished: Option<Duration>,
    /// Why nothing is fetched of it, if so.
    pub paused: Option<PauseCause>,
    /// How many of its messages are held by the source and the consumer.
    pub in_flight: usize,
    /// Its first unfinished message among those, as the consumer sees it.
    pub first: Option<Unfinished>,
}

impl PartitionStatus {
    /// Nothing is known of it but its name.
    pub fn new(topic: impl Into<String>, partition: i32) -> Self {
        Self { topic: topic.into(), partition, ..Self::default() }
    }
}

/// A duration as a number of seconds.
pub(super) mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
        duration.as_secs_f64().serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        Duration::try_from_secs_f64(f64::deserialize(from)?).map_err(serde::de::Error::custom)
    }
}

/// The same, or null.
mod optional_seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        duration.map(|duration| duration.as_secs_f64()).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        let seconds = Option::<f64>::deserialize(from)?;
        seconds.map(Duration::try_from_secs_f64).transpose().map_err(serde::de::Error::custom)
    }
}
