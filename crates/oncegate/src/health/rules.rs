//! Decides what a status means. Pure: one status in, reasons out.

use std::time::Duration;

use super::status::{
    PartitionStatus, PauseCause, Phase, Run, ScopeStatus, Stage, Status, Unfinished, WaitCause,
};
use super::{COMMIT_LIMIT, CONNECTION_LIMIT, LOOP_LIMIT, POLL_LIMIT, QUIET_LIMIT, Reason, failures};

/// A handler is slow when it takes this many times the 99th percentile …
const SLOW_FACTOR: u32 = 3;
/// A reason is reported from the dead-letter limit divided by this on.
const REPORT_DIVISOR: u32 = 2;
/// The most reasons of one kind: a hundred slow handlers are one fact.
const MOST_OF_A_KIND: usize = 3;

/// Everything that is wrong, the worst first.
pub(super) fn reasons(status: &Status) -> Vec<Reason> {
    let mut reasons: Vec<Reason> = life(status).into_iter().collect();
    if status.phase == Phase::Stopped {
        return reasons;
    }
    reasons.extend(failures::reasons(status));
    if status.phase != Phase::Starting {
        reasons.extend(stalls(status));
        reasons.extend(stores(status));
        reasons.extend(only_letters_left(status));
        reasons.extend(breakers(status));
        reasons.extend(runs(status));
        reasons.extend(status.source.partitions.iter().flat_map(partition).take(MOST_OF_A_KIND * 2));
        reasons
            .extend(status.waiting.iter().filter_map(|message| waits(status, message)).take(MOST_OF_A_KIND));
        let refusals = status.refusals;
        if refusals.in_a_row > 0 && refusals.in_a_row >= refusals.most_in_a_row / REPORT_DIVISOR {
            reasons.push(Reason::Flood(refusals));
        }
    }
    reasons.sort_by_key(|reason| !reason.is_stall());
    reasons
}

fn life(status: &Status) -> Option<Reason> {
    match status.phase {
        Phase::Starting => Some(Reason::Starting),
        Phase::Running => None,
        Phase::Stopping => Some(Reason::Stopping),
        Phase::Stopped => Some(Reason::Stopped { error: status.error.clone() }),
    }
}

/// There is work, and none of it is done.
fn stalls(status: &Status) -> Vec<Reason> {
    let mut stalls = Vec::new();
    let permits = status.permits.total;
    if permits > 0 && status.overdue >= permits {
        stalls.push(Reason::NoPermitLeft { permits });
    }
    if status.looked_ago > LOOP_LIMIT {
        stalls.push(Reason::Blocked { lasts: status.looked_ago });
    }
    if let Some(lasts) = status.source.polled_ago.filter(|ago| *ago > POLL_LIMIT) {
        stalls.push(Reason::NotPolled { lasts });
    }
    if let Some(lasts) = status.source.disconnected_for.filter(|lasts| *lasts > CONNECTION_LIMIT) {
        stalls.push(Reason::NotConnected { lasts, others_connect: status.source.others_connect });
    }
    if status.phase != Phase::Running {
        return stalls;
    }
    if status.nothing_started_for > QUIET_LIMIT {
        let (ready, lasts) = (status.messages.ready, status.nothing_started_for);
        stalls.push(Reason::NothingStarts { ready, lasts });
    }
    // While the consumer is at its limits, or its store is away, the source is not the cause of missing deliveries.
    if status.has_room() && !status.paused.contains(&PauseCause::StoreAway) {
        stalls.extend(status.source.partitions.iter().filter_map(delivers_nothing).take(MOST_OF_A_KIND));
    }
    stalls
}

fn delivers_nothing(partition: &PartitionStatus) -> Option<Reason> {
    let undelivered = partition.undelivered.filter(|undelivered| *undelivered > 0)?;
    let lasts = partition.delivered_ago.filter(|ago| *ago > QUIET_LIMIT)?;
    let reason = Reason::NothingDelivered {
        topic: partition.topic.clone(),
        partition: partition.partition,
        undelivered,
        lasts,
    };
    partition.paused.is_none().then_some(reason)
}

fn stores(status: &Status) -> Vec<Reason> {
    let mut reasons = Vec::new();
    // A scope that runs without its store is not held up by it.
    let waits =
        |scope: &ScopeStatus| scope.is_store_away() && scope.outages.iter().all(|outage| !outage.open);
    let all = !status.scopes.is_empty() && status.scopes.iter().all(waits);
    for scope in &status.scopes {
        // Of a cluster with many shards down, only the one that has been down for longest is reported.
        if let Some(outage) = scope.outages.iter().max_by_key(|outage| outage.lasts) {
            let (scope, error) = (scope.scope.clone(), outage.error.clone());
            reasons.push(Reason::StoreAway { scope, error, lasts: outage.lasts, all });
        }
    }
    reasons
}

/// Only messages whose dead letters cannot be written are in progress, ready or waiting, and no other message can be
/// received or start before they are written.
fn only_letters_left(status: &Status) -> Option<Reason> {
    let (letters, messages) = (status.letters_waiting, status.messages);
    let waiting = letters as usize;
    let others = messages.running.saturating_sub(waiting) + messages.ready + messages.parked;
    let fills_permits = letters >= status.permits.total && status.delivered_ago > QUIET_LIMIT;
    let holds_up = !status.has_room() || messages.behind > 0 || fills_permits;
    (letters > 0 && others == 0 && holds_up).then_some(Reason::OnlyLettersLeft { letters })
}

fn breakers(status: &Status) -> impl Iterator<Item = Reason> {
    let all = status.scopes.iter().all(|scope| scope.handler_paused);
    let paused = status.scopes.iter().filter(|scope| scope.handler_paused);
    paused.map(move |scope| Reason::HandlerPaused { scope: scope.scope.clone(), all })
}

fn runs(status: &Status) -> impl Iterator<Item = Reason> {
    status.runs.iter().filter_map(|run| judge_run(status, run)).take(MOST_OF_A_KIND)
}

fn judge_run(status: &Status, run: &Run) -> Option<Reason> {
    let lease = lease_of(status, &run.scope);
    let run_clone = || run.clone();
    match run.stage {
        Stage::Running if run.is_overdue() => Some(Reason::OverdueHandler { run: run_clone() }),
        Stage::Running => {
            let usual = status.handler_p99?;
            let slow = run.in_stage_for > lease.max(usual * SLOW_FACTOR);
            slow.then(|| Reason::SlowHandler { run: run_clone(), usual })
        }
        Stage::Ending if run.in_stage_for > lease => Some(Reason::NotStored { run: run_clone() }),
        Stage::Burying if run.in_stage_for > QUIET_LIMIT => {
            Some(Reason::LetterNotWritten { run: run_clone() })
        }
        _ => None,
    }
}

fn partition(partition: &PartitionStatus) -> Vec<Reason> {
    let (topic, number) = (|| partition.topic.clone(), partition.partition);
    let mut reasons = Vec::new();
    if let Some(lasts) = partition.uncommitted_for.filter(|lasts| *lasts > COMMIT_LIMIT) {
        reasons.push(Reason::NotCommitted { topic: topic(), partition: number, lasts });
    }
    if partition.paused == Some(PauseCause::Span) {
        reasons.push(Reason::SpanFull { topic: topic(), partition: number, first: partition.first.clone() });
    }
    reasons
}

fn waits(status: &Status, message: &Unfinished) -> Option<Reason> {
    match message.stage {
        Stage::Parked(WaitCause::Unreadable) => Some(Reason::Unreadable { message: message.clone() }),
        Stage::Parked(WaitCause::Busy) => {
            let lasts = message.in_stage_for;
            let longest = status.scopes.iter().find(|scope| scope.scope == message.scope)?.max_run;
            (lasts > longest).then(|| Reason::BusyElsewhere { message: message.clone(), lasts })
        }
        _ => None,
    }
}

fn lease_of(status: &Status, scope: &str) -> Duration {
    let of_scope = status.scopes.iter().find(|one| one.scope == scope);
    of_scope.map_or(QUIET_LIMIT, |scope| scope.lease)
}

#[cfg(test)]
mod tests {
    use super::super::status::{Permits, Refusals, SourceFailure, StoreOutage};
    use super::super::{Health, Messages};
    use super::*;

    const S: Duration = Duration::from_secs(1);

    /// A consumer with nothing wrong: two partitions, one of them with a backlog that is hours old.
    fn well() -> Status {
        let mut orders = PartitionStatus::new("orders", 0);
        orders.undelivered = Some(1_000_000);
        orders.delivered_ago = Some(S);
        orders.oldest_unfinished = Some(S * 7_200);
        let mut idle = PartitionStatus::new("orders", 1);
        (idle.undelivered, idle.delivered_ago) = (Some(0), Some(S * 9_000));
        let scope = ScopeStatus {
            scope: "billing".into(),
            route: None,
            store: "memory".into(),
            promise: "process".into(),
            holds: String::new(),
            warnings: Vec::new(),
            lease: S * 30,
            lease_remaining: S * 20,
            retention: S * 604_800,
            max_run: S * 900,
            oldest_expired: None,
            log_bytes: None,
            shards: 2,
            outages: Vec::new(),
            handler_paused: false,
        };
        Status {
            phase: Phase::Running,
            scopes: vec![scope],
            permits: Permits { total: 4, free: 2 },
            messages: Messages { in_flight: 10, most: 100, most_bytes: 1, ..Messages::default() },
            handler_p99: Some(S * 2),
            runs: vec![run(Stage::Running, 20), run(Stage::Claiming, 1)],
            refusals: Refusals { in_a_row: 0, most_in_a_row: 100 },
            delivered_ago: S * 9_000,
            source: super::super::SourceStatus {
                polled_ago: Some(S),
                partitions: vec![orders, idle],
                ..super::super::SourceStatus::default()
            },
            ..Status::default()
        }
    }

    fn run(stage: Stage, seconds: u32) -> Run {
        Run {
            scope: "billing".into(),
            origin: "orders/0@42".into(),
            stage,
            in_stage_for: S * seconds,
            max_run: S * 900,
        }
    }

    fn parked(cause: WaitCause, seconds: u32) -> Unfinished {
        let (scope, origin) = ("billing".into(), "orders/0@7".into());
        Unfinished { scope, origin, stage: Stage::Parked(cause), in_stage_for: S * seconds, age: S * seconds }
    }

    fn outage(shard: u64) -> StoreOutage {
        StoreOutage { shard, lasts: S * 3, error: "connection refused".into(), waiting: 1, open: false }
    }

    fn failure(operation: &str, seconds: u32) -> SourceFailure {
        SourceFailure {
            operation: operation.to_owned(),
            error: "AccessDenied".to_owned(),
            lasts: S * seconds,
            stops_delivery: operation != "delete",
            ..SourceFailure::default()
        }
    }

    /// A change to the healthy status, the words of its reasons, whether it is live, and whether it is ready.
    type Row = (&'static str, fn(&mut Status), &'static [&'static str], bool, bool);

    const TABLE: &[Row] = &[
        ("well", |_| {}, &[], true, true),
        ("starting", |s| s.phase = Phase::Starting, &["starting"], true, false),
        ("stopping", |s| s.phase = Phase::Stopping, &["stopping"], true, false),
        ("stopped", |s| s.phase = Phase::Stopped, &["stopped"], true, false),
        (
            "ended by itself",
            |s| (s.phase, s.error) = (Phase::Stopped, Some("no topic".into())),
            &["stopped"],
            false,
            false,
        ),
        ("slow, within the lease", |s| s.runs = vec![run(Stage::Running, 30)], &[], true, true),
        ("slower than usual", |s| s.runs = vec![run(Stage::Running, 31)], &["slow_handler"], true, true),
        (
            "slow, as usual",
            |s| (s.handler_p99, s.runs) = (Some(S * 300), vec![run(Stage::Running, 800)]),
            &[],
            true,
            true,
        ),
        (
            "slow, but the usual time is unknown",
            |s| (s.handler_p99, s.runs) = (None, vec![run(Stage::Running, 800)]),
            &[],
            true,
            true,
        ),
        ("overdue", |s| s.runs = vec![run(Stage::Running, 901)], &["overdue_handler"], true, true),
        (
            "no permit left",
            |s| (s.overdue, s.runs) = (4, vec![run(Stage::Running, 901)]),
            &["no_permit_left", "overdue_handler"],
            false,
            false,
        ),
        (
            "a result that is not stored",
            |s| s.runs = vec![run(Stage::Ending, 31)],
            &["not_stored"],
            true,
            true,
        ),
        ("a dead letter being written", |s| s.runs = vec![run(Stage::Burying, 30)], &[], true, true),
        (
            "a dead letter that is not written",
            |s| s.runs = vec![run(Stage::Burying, 31)],
            &["letter_not_written"],
            true,
            true,
        ),
        ("one shard away", |s| s.scopes[0].outages = vec![outage(1)], &["store_away"], true, true),
        (
            "the store away",
            |s| s.scopes[0].outages = vec![outage(0), outage(1)],
            &["store_away"],
            true,
            false,
        ),
        ("a source's call failed", |s| s.source.failures = vec![failure("receive", 9)], &[], true, true),
        (
            "the source brings nothing",
            |s| s.source.failures = vec![failure("receive", 10)],
            &["source_fails"],
            true,
            false,
        ),
        (
            "finished messages cannot be deleted",
            |s| s.source.failures = vec![failure("delete", 10)],
            &["source_fails"],
            true,
            true,
        ),
        (
            "the source is away at the start",
            |s| (s.phase, s.source.failures) = (Phase::Starting, vec![failure("open", 0)]),
            &["starting", "source_fails"],
            true,
            false,
        ),
        (
            "dead letters hold up nothing else",
            |s| (s.letters_waiting, s.messages.running, s.messages.behind) = (1, 2, 7),
            &[],
            true,
            true,
        ),
        (
            "everything is behind a dead letter",
            |s| (s.letters_waiting, s.messages.running, s.messages.behind) = (1, 1, 7),
            &["only_letters_left"],
            true,
            false,
        ),
        (
            "dead letters use up the limit in flight",
            |s| (s.letters_waiting, s.messages.running, s.messages.in_flight) = (100, 100, 100),
            &["only_letters_left"],
            true,
            false,
        ),
        (
            "as many dead letters as permits, and no delivery",
            |s| (s.letters_waiting, s.messages.running) = (4, 4),
            &["only_letters_left"],
            true,
            false,
        ),
        (
            "as many dead letters as permits, and other deliveries",
            |s| (s.letters_waiting, s.messages.running, s.delivered_ago) = (4, 4, S),
            &[],
            true,
            true,
        ),
        (
            "one of two handlers paused",
            |s| {
                s.scopes.push(s.scopes[0].clone());
                s.scopes[0].handler_paused = true;
            },
            &["handler_paused"],
            true,
            true,
        ),
        ("the handler paused", |s| s.scopes[0].handler_paused = true, &["handler_paused"], true, false),
        ("ready for a moment", |s| s.nothing_started_for = S * 30, &[], true, true),
        (
            "nothing starts",
            |s| (s.messages.ready, s.nothing_started_for) = (3, S * 31),
            &["nothing_starts"],
            false,
            false,
        ),
        (
            "nothing is delivered",
            |s| s.source.partitions[0].delivered_ago = Some(S * 31),
            &["nothing_delivered"],
            false,
            false,
        ),
        (
            "nothing is delivered, for it is paused",
            |s| {
                s.source.partitions[0].delivered_ago = Some(S * 31);
                s.source.partitions[0].paused = Some(PauseCause::Full);
            },
            &[],
            true,
            true,
        ),
        (
            "nothing is delivered, because a limit is reached",
            |s| (s.source.partitions[0].delivered_ago, s.messages.in_flight) = (Some(S * 31), 100),
            &[],
            true,
            true,
        ),
        (
            "nothing is delivered, for the store is away",
            |s| {
                s.source.partitions[0].delivered_ago = Some(S * 31);
                s.paused = vec![PauseCause::StoreAway];
            },
            &[],
            true,
            true,
        ),
        ("a long revoke", |s| s.source.polled_ago = Some(S * 59), &[], true, true),
        ("not polled", |s| s.source.polled_ago = Some(S * 61), &["not_polled"], false, false),
        ("connecting", |s| s.source.disconnected_for = Some(S * 30), &[], true, true),
        ("no broker", |s| s.source.disconnected_for = Some(S * 31), &["not_connected"], true, false),
        (
            "no connection",
            |s| (s.source.disconnected_for, s.source.others_connect) = (Some(S * 31), true),
            &["not_connected"],
            false,
            false,
        ),
        ("blocked", |s| s.looked_ago = S * 11, &["blocked"], false, false),
        (
            "not committed",
            |s| s.source.partitions[0].uncommitted_for = Some(S * 31),
            &["not_committed"],
            true,
            true,
        ),
        (
            "the span is full",
            |s| s.source.partitions[0].paused = Some(PauseCause::Span),
            &["span_full"],
            true,
            true,
        ),
        ("a retry in an hour", |s| s.waiting = vec![parked(WaitCause::Retry, 3_600)], &[], true, true),
        ("busy elsewhere", |s| s.waiting = vec![parked(WaitCause::Busy, 900)], &[], true, true),
        (
            "busy elsewhere for ever",
            |s| s.waiting = vec![parked(WaitCause::Busy, 901)],
            &["busy_elsewhere"],
            true,
            true,
        ),
        (
            "a key held by another worker",
            |s| s.waiting = vec![parked(WaitCause::Unreadable, 1)],
            &["unreadable"],
            true,
            true,
        ),
        ("some refusals", |s| s.refusals.in_a_row = 49, &[], true, true),
        ("many dead letters", |s| s.refusals.in_a_row = 50, &["flood"], true, true),
    ];

    #[test]
    fn each_sign_has_its_reason_and_its_answer_to_both_probes() {
        for (name, change, words, live, ready) in TABLE {
            let mut status = well();
            change(&mut status);
            let health = Health::of(&status);
            let found: Vec<&str> = health.reasons().iter().map(Reason::as_str).collect();
            assert_eq!(&found, words, "{name}: {health}");
            assert_eq!((health.is_live(), health.is_ready()), (*live, *ready), "{name}: {health}");
            assert_eq!(matches!(health, Health::Stalled { .. }), !live, "{name}: {health}");
        }
    }

    #[test]
    fn a_status_and_its_health_survive_json() {
        for (name, change, ..) in TABLE {
            let mut status = well();
            change(&mut status);
            let health = Health::of(&status);
            let text = serde_json::to_string(&(&status, &health)).unwrap();
            let (again, health_again): (Status, Health) = serde_json::from_str(&text).unwrap();
            assert_eq!((again, health_again), (status, health), "{name}: {text}");
        }
    }

    #[test]
    fn reasons_are_said_in_words() {
        let mut status = well();
        status.runs = vec![run(Stage::Running, 1_000)];
        let said = Health::of(&status).to_string();
        let expected = "degraded: the handler of orders/0@42 in `billing` has run for 16 min, longer than `max_run` \
                        (15 min), and does not return";
        assert_eq!(said, expected);
    }
}
