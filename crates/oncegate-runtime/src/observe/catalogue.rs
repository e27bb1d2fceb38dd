//! The metrics that oncegate publishes, with their names: no other module names a metric.
//!
//! The table in `docs/OBSERVABILITY.md`, the dashboard and the alert rules in `monitoring/` are
//! compared with it by tests.

/// A metric that oncegate publishes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// The middle of its name: `claims` of `oncegate_claims_total`.
    pub name: &'static str,
    /// The kind of number.
    pub kind: Kind,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// Every value of the last label, where there are no others; of a counter, each is there from
    /// the start, as zero.
    pub values: &'static [&'static str],
    /// The description.
    pub help: &'static str,
}

/// The kind of number that a metric is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A count that only grows while the process lives.
    Counter,
    /// A current value.
    Gauge,
    /// Durations in seconds, counted by these upper bounds.
    Seconds(&'static [f64]),
    /// Sizes in bytes, counted by these upper bounds.
    Bytes(&'static [f64]),
}

impl Metric {
    const fn counter(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self {
            name,
            kind: Kind::Counter,
            labels,
            values: &[],
            help,
        }
    }

    const fn gauge(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self {
            name,
            kind: Kind::Gauge,
            labels,
            values: &[],
            help,
        }
    }

    const fn seconds(
        name: &'static str,
        labels: &'static [&'static str],
        bounds: &'static [f64],
        help: &'static str,
    ) -> Self {
        Self {
            name,
            kind: Kind::Seconds(bounds),
            labels,
            values: &[],
            help,
        }
    }

    const fn bytes(
        name: &'static str,
        labels: &'static [&'static str],
        bounds: &'static [f64],
        help: &'static str,
    ) -> Self {
        Self {
            name,
            kind: Kind::Bytes(bounds),
            labels,
            values: &[],
            help,
        }
    }

    const fn of(self, values: &'static [&'static str]) -> Self {
        Self { values, ..self }
    }

    /// The whole name: with the prefix `oncegate_`, and with `_total` if it is a counter.
    pub fn full_name(&self) -> String {
        match self.kind {
            Kind::Counter => format!("oncegate_{}_total", self.name),
            Kind::Gauge | Kind::Seconds(_) | Kind::Bytes(_) => format!("oncegate_{}", self.name),
        }
    }

    /// The upper bounds of a histogram.
    pub fn bounds(&self) -> Option<&'static [f64]> {
        match self.kind {
            Kind::Seconds(bounds) | Kind::Bytes(bounds) => Some(bounds),
            Kind::Counter | Kind::Gauge => None,
        }
    }

    /// Returns whether each gate has its own.
    pub fn is_scoped(&self) -> bool {
        self.labels.first() == Some(&"scope")
    }

    /// The metric of this short name.
    pub fn named(name: &str) -> Option<&'static Self> {
        CATALOGUE.iter().find(|metric| metric.name == name)
    }
}

/// The bounds of handlers' durations: a millisecond to a minute.
const HANDLER_BOUNDS: &[f64] = &[
    0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];
/// The bounds of store calls' durations: 50 microseconds to a second.
const STORE_BOUNDS: &[f64] = &[
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0,
];
/// The bounds of messages' ages: ten milliseconds to an hour. The alert rules count those up to 60
/// seconds.
const AGE_BOUNDS: &[f64] = &[
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3_600.0,
];

/// The bounds of results: from 64 bytes to a mebibyte.
const RESULT_BOUNDS: &[f64] = &[
    64.0,
    256.0,
    1_024.0,
    4_096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
];

/// The operations of a store.
const OPERATIONS: &[&str] = &[
    "claim",
    "extend",
    "complete",
    "release",
    "fail",
    "hand_over",
    "reopen",
    "resolve",
];

const SCOPE: &[&str] = &["scope"];
const OPERATION: &[&str] = &["operation"];
const CONSUMER: &[&str] = &["consumer"];
const OUTBOX: &[&str] = &["outbox"];
const PARTITION: &[&str] = &["consumer", "topic", "partition"];

/// Every metric. Durations are in seconds, sizes in bytes.
///
/// Gauges have the values at the last request of the status. Those of a partition that was given
/// away are zero.
pub const CATALOGUE: &[Metric] = &[
    // The promise.
    Metric::counter("extra_runs", &["scope", "cause"], "handler runs beyond the first, by what caused them")
        .of(&[
            "crash_takeover",
            "discarded",
            "lease_lost",
            "complete_unknown",
            "store_loss",
            "retention",
            "reset",
            "fail_open",
        ]),
    Metric::counter(
        "complete_lost",
        SCOPE,
        "completions of an owner who had been replaced; nothing was acknowledged",
    ),
    Metric::counter("store_losses", SCOPE, "times that the store noticed that it has forgotten records"),
    // The way of a message.
    Metric::counter("claims", &["scope", "verdict"], "answers to claims, those of prefetches included")
        .of(&["granted", "completed", "busy", "failed", "mismatch"]),
    Metric::counter("handler_runs", &["scope", "outcome"], "ends of handlers").of(&[
        "succeeded",
        "failed",
        "later",
        "gave_up",
        "panicked",
        "cancelled",
    ]),
    Metric::counter(
        "batch_calls",
        &["scope", "call"],
        "calls of batch handlers: for a new batch, or a part of one that failed",
    )
    .of(&["gathered", "split"]),
    Metric::counter("completions", SCOPE, "completions that the store has confirmed"),
    Metric::counter("acks", SCOPE, "messages acknowledged to their source"),
    Metric::counter("retries", SCOPE, "failed messages that wait for their next attempt"),
    Metric::counter("dead_letters", &["scope", "cause"], "messages put with the dead letters").of(&[
        "bad_key",
        "permanent",
        "attempts_used_up",
        "mismatch",
        "not_handed_over",
        "outcome_unknown",
    ]),
    Metric::counter(
        "breaker_changes",
        &["scope", "state"],
        "changes of the handler's breaker: it is paused, probed, and goes on; `open` also when a process starts with a breaker that an earlier one left open",
    )
    .of(&["open", "half_open", "closed"]),
    Metric::counter(
        "quarantined",
        SCOPE,
        "messages that run alone, because earlier attempts ended without an outcome",
    ),
    Metric::counter(
        "fingerprints_uncompared",
        SCOPE,
        "records whose fingerprint has another specification, so that it was not compared",
    ),
    Metric::counter(
        "other_contents",
        SCOPE,
        "duplicates with another content than the message that was handled; one key in 16 is looked at, in scopes without a fingerprint",
    ),
    Metric::counter(
        "duplicate_hooks_failed",
        SCOPE,
        "messages acknowledged although `Handler::duplicate` has failed every time",
    ),
    Metric::counter(
        "answers",
        &["scope", "answer"],
        "answers to HTTP requests under a key: `handled`, `replayed`, `released`, `given-up`, `fail_open` or the name of a problem",
    ),
    // Results.
    Metric::counter(
        "results_not_kept",
        SCOPE,
        "results too large, not encodable, or not taken by the result store",
    ),
    Metric::counter("results_lost", SCOPE, "duplicates whose large result is missing or damaged"),
    Metric::counter(
        "result_store_errors",
        &["scope", "operation"],
        "calls that the result store gave no answer to",
    )
    .of(&["put", "get"]),
    Metric::counter(
        "journal_dropped",
        SCOPE,
        "entries that the gate's journal has not written down: too many came at once, or it takes none",
    ),
    // The store.
    Metric::counter(
        "store_calls",
        &["scope", "operation"],
        "calls of the store; an `extend` is for many leases",
    )
    .of(OPERATIONS),
    Metric::counter("store_errors", &["scope", "class"], "calls that the store gave no answer to").of(&[
        "unavailable",
        "unknown",
        "unreadable",
        "refused",
    ]),
    Metric::counter(
        "store_paused",
        &["change"],
        "outages of the store, or of a part of it, that began or ended",
    )
    .of(&["paused", "resumed"]),
    // The source.
    Metric::counter("commits", &[], "rounds of commits"),
    Metric::counter("rebalances", &[], "changes of the assignment"),
    Metric::counter(
        "source_pauses",
        &["cause"],
        "times that fetching stopped: messages were not received, or too much of a partition was unfinished",
    )
    .of(&["full", "span"]),
    Metric::counter(
        "members_replaced",
        &["cause"],
        "clients that were members, connected or reading no more, and that another one replaced",
    )
    .of(&["poll_interval", "dropped", "disconnected", "unread", "login", "static_member"]),
    Metric::counter("topics_made_again", &[], "topics that were deleted and made again"),
    Metric::counter("messages_gone", &[], "offsets whose messages were deleted before they were received"),
    Metric::counter(
        "source_errors",
        OPERATION,
        "failed operations of the source, which it repeats by itself",
    )
    .of(&[
        "commit",
        "fetch",
        "broker",
        "login",
        "token",
        "receive",
        "delete",
        "visibility",
        "dead_letter",
        "retry",
        "open",
    ]),
    Metric::counter(
        "source_events",
        &["event"],
        "what happens at the broker of one kind of source, by its name: `sqs_receive` for example; its page lists them",
    ),
    // The outbox.
    Metric::counter("outbox_published", &[], "messages of outboxes that a broker has confirmed"),
    Metric::counter("outbox_failures", &["class"], "tries of a relay that failed and are repeated").of(&[
        "refused",
        "unconfirmed",
        "store",
    ]),
    Metric::counter("outbox_purged", &[], "sent messages that were removed from outboxes"),
    Metric::counter(
        "outbox_leader_changes",
        &["change"],
        "times that a relay took, lost or gave away the lead",
    )
    .of(&["took", "lost", "resigned"]),
    // How long things take.
    Metric::seconds("handler_seconds", SCOPE, HANDLER_BOUNDS, "how long handlers run"),
    Metric::seconds(
        "gate_seconds",
        &["scope", "operation"],
        STORE_BOUNDS,
        "how long calls of the store take, the wait for their batch included",
    )
    .of(OPERATIONS),
    Metric::seconds(
        "message_age_seconds",
        SCOPE,
        AGE_BOUNDS,
        "how old messages are when their first success is acknowledged, by the broker's timestamp; not of messages whose timestamp is 0",
    ),
    Metric::seconds(
        "outbox_age_seconds",
        &[],
        AGE_BOUNDS,
        "how old messages of outboxes are when their broker has confirmed them",
    ),
    // How large things are.
    Metric::bytes(
        "result_bytes",
        SCOPE,
        RESULT_BOUNDS,
        "how large stored results are; of one that went to the result store, its reference",
    ),
    // How things are.
    Metric::gauge("live", CONSUMER, "1, or 0 when a restart would help: what `/healthz` says"),
    Metric::gauge("ready", CONSUMER, "1 while messages are taken and handled, else 0: what `/readyz` says"),
    Metric::gauge(
        "unwell",
        &["consumer", "reason"],
        "1 for each thing that is wrong, such as `store_away` or `nothing_ends`; see `health::Reason`",
    ),
    Metric::gauge(
        "paused",
        &["consumer", "cause"],
        "1 for each reason why less than everything is dispatched or fetched, such as `store_away` or `breaker`; see `health::PauseCause`",
    ),
    Metric::gauge(
        "store_up",
        SCOPE,
        "1, or 0 while the store, or a part of it, does not answer: at once when a message has asked it, and after 10 s \
         without messages",
    ),
    Metric::gauge(
        "lease_remaining_seconds",
        SCOPE,
        "the least that is left of a running lease; the whole lease when none runs",
    ),
    Metric::gauge("lease_seconds", SCOPE, "the lease"),
    Metric::gauge(
        "run_remaining_seconds",
        SCOPE,
        "the least that a running handler has left until `max_run`; the whole of it when none runs",
    ),
    Metric::gauge("max_run_seconds", SCOPE, "how long one run may take"),
    Metric::gauge("record_retention_seconds", SCOPE, "how long completed records are kept"),
    Metric::gauge(
        "oldest_expired_seconds",
        SCOPE,
        "how long ago the oldest expired record has expired that the store may still hold; SQLite and PostgreSQL, in the process that removes them",
    ),
    Metric::gauge("store_log_bytes", SCOPE, "size of the write-ahead log; SQLite"),
    Metric::gauge(
        "store_memory_bytes",
        SCOPE,
        "memory that the store's server uses; Redis, of several the one with the least room",
    ),
    Metric::gauge("store_memory_max_bytes", SCOPE, "limit of that memory (`maxmemory`), if there is one"),
    Metric::gauge("permits", CONSUMER, "how many handlers may run"),
    Metric::gauge("permits_free", CONSUMER, "how many more could run now"),
    Metric::gauge("in_flight", CONSUMER, "messages between the source and their acks"),
    Metric::gauge("in_flight_bytes", CONSUMER, "the bytes of those"),
    Metric::gauge(
        "messages",
        &["consumer", "stage"],
        "what those messages do: run, wait for a permit, behind another, for a time, or for the store",
    )
    .of(&["running", "ready", "behind", "parked", "held_back"]),
    Metric::gauge("poll_age_seconds", CONSUMER, "since the broker's client was last polled"),
    Metric::gauge(
        "worker_processes",
        CONSUMER,
        "processes of the worker that run; of `oncegate run` with `exec`",
    ),
    Metric::gauge("worker_processes_ready", CONSUMER, "those of them that take messages"),
    Metric::gauge(
        "worker_restarts",
        CONSUMER,
        "how often a process that has ended was started again, since oncegate was started",
    ),
    Metric::gauge(
        "lag",
        PARTITION,
        "messages that are not finished, the broker's included, and those behind an open transaction, \
         which no consumer gets before it ends",
    ),
    Metric::gauge(
        "oldest_incomplete_age_seconds",
        PARTITION,
        "since the first unfinished message was received; 0 when there is none",
    ),
    Metric::gauge("watermark", PARTITION, "the first offset that is not finished"),
    Metric::gauge("committed_offset", PARTITION, "the offset that the broker has from us"),
    Metric::gauge(
        "outbox_waiting",
        OUTBOX,
        "messages of an outbox that are not sent, up to 10,000; in every process that runs a relay of it",
    ),
    Metric::gauge(
        "outbox_oldest_seconds",
        OUTBOX,
        "how long the oldest of them has waited; 0 when none waits",
    ),
    Metric::gauge("build_info", &["version"], "always 1; the label is the version of oncegate"),
];
