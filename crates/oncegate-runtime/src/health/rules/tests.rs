use super::super::Health;
use super::super::status::StoreOutage;
use super::*;

mod statuses;

use super::super::status::BreakerStatus;
use statuses::{S, failing, failure, outage, parked, pause, run, well};

/// A change to the healthy status, the words of its reasons, whether it is live, and whether it is
/// ready.
type RuleCase = (
    &'static str,
    fn(&mut Status),
    &'static [&'static str],
    bool,
    bool,
);

const TABLE: &[RuleCase] = &[
    ("well", |_| {}, &[], true, true),
    (
        "starting",
        |s| s.phase = Phase::Starting,
        &["starting"],
        true,
        false,
    ),
    (
        "stopping",
        |s| s.phase = Phase::Stopping,
        &["stopping"],
        true,
        false,
    ),
    (
        "stopped",
        |s| s.phase = Phase::Stopped,
        &["stopped"],
        true,
        false,
    ),
    (
        "ended by itself",
        |s| (s.phase, s.error) = (Phase::Stopped, Some("no topic".into())),
        &["stopped"],
        false,
        false,
    ),
    (
        "slow, within the lease",
        |s| s.runs = vec![run(Stage::Running, 30)],
        &[],
        true,
        true,
    ),
    (
        "slower than usual",
        |s| s.runs = vec![run(Stage::Running, 31)],
        &["slow_handler"],
        true,
        true,
    ),
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
    (
        "overdue",
        |s| s.runs = vec![run(Stage::Running, 901)],
        &["overdue_handler"],
        true,
        true,
    ),
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
    (
        "a dead letter being written",
        |s| s.runs = vec![run(Stage::DeadLettering, 30)],
        &[],
        true,
        true,
    ),
    (
        "a dead letter that is not written",
        |s| s.runs = vec![run(Stage::DeadLettering, 31)],
        &["letter_not_written"],
        true,
        true,
    ),
    (
        "one shard away",
        |s| s.scopes[0].outages = vec![outage(1)],
        &["store_away"],
        true,
        true,
    ),
    (
        "the store has lost records",
        |s| {
            s.scopes[0].outages = vec![StoreOutage {
                halted: true,
                ..outage(0)
            }];
        },
        &["halted"],
        true,
        true,
    ),
    (
        "the store away",
        |s| s.scopes[0].outages = vec![outage(0), outage(1)],
        &["store_away"],
        true,
        false,
    ),
    (
        "a source's call failed",
        |s| s.source.failures = vec![failure("receive", 9)],
        &[],
        true,
        true,
    ),
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
    (
        "the handler paused",
        |s| s.scopes[0].handler_paused = true,
        &["handler_paused"],
        true,
        false,
    ),
    (
        "one of two scopes paused by an operator",
        |s| {
            s.scopes.push(s.scopes[0].clone());
            s.scopes[0].pause = Some(pause());
        },
        &["paused_by_operator"],
        true,
        true,
    ),
    (
        "paused by an operator, and nothing is delivered",
        |s| {
            s.scopes[0].pause = Some(pause());
            s.paused = vec![PauseCause::Operator];
            s.source.partitions[0].delivered_ago = Some(S * 31);
        },
        &["paused_by_operator"],
        true,
        false,
    ),
    (
        "a message that has failed a few times",
        |s| s.failing = vec![failing(4)],
        &[],
        true,
        true,
    ),
    (
        "messages that keep failing",
        |s| s.failing = vec![failing(14), failing(5), failing(4)],
        &["keeps_failing", "keeps_failing"],
        true,
        true,
    ),
    (
        "ready for a moment",
        |s| s.nothing_started_for = S * 30,
        &[],
        true,
        true,
    ),
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
    (
        "a long revoke",
        |s| s.source.polled_ago = Some(S * 59),
        &[],
        true,
        true,
    ),
    (
        "not polled",
        |s| s.source.polled_ago = Some(S * 61),
        &["not_polled"],
        false,
        false,
    ),
    (
        "connecting",
        |s| s.source.disconnected_for = Some(S * 30),
        &[],
        true,
        true,
    ),
    (
        "no broker",
        |s| s.source.disconnected_for = Some(S * 31),
        &["not_connected"],
        true,
        false,
    ),
    (
        "no connection",
        |s| (s.source.disconnected_for, s.source.others_connect) = (Some(S * 31), true),
        &["not_connected"],
        false,
        false,
    ),
    (
        "blocked",
        |s| s.looked_ago = S * 11,
        &["blocked"],
        false,
        false,
    ),
    (
        "not committed",
        |s| s.source.partitions[0].uncommitted_for = Some(S * 31),
        &["not_committed"],
        true,
        true,
    ),
    (
        "a transaction stays open",
        |s| s.source.partitions[0].withheld_for = Some(S * 61),
        &["open_transaction"],
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
    (
        "a retry in an hour",
        |s| s.waiting = vec![parked(WaitCause::Retry, 3_600)],
        &[],
        true,
        true,
    ),
    (
        "busy elsewhere",
        |s| s.waiting = vec![parked(WaitCause::Busy, 900)],
        &[],
        true,
        true,
    ),
    (
        "beside handlers that take long",
        |s| s.waiting = vec![parked(WaitCause::Alone, 30)],
        &["waits_alone"],
        true,
        true,
    ),
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
    (
        "some refusals",
        |s| s.refusals.in_a_row = 49,
        &[],
        true,
        true,
    ),
    (
        "many dead letters",
        |s| s.refusals.in_a_row = 50,
        &["many_dead_letters"],
        true,
        true,
    ),
];

// invariant: stall-unreported
#[test]
fn each_sign_has_its_reason_and_its_answer_to_both_probes() {
    for (name, change, words, live, ready) in TABLE {
        let mut status = well();
        change(&mut status);
        let health = Health::of(&status);
        let found: Vec<&str> = health.reasons().iter().map(Reason::as_str).collect();
        assert_eq!(&found, words, "{name}: {health}");
        assert_eq!(
            (health.is_live(), health.is_ready()),
            (*live, *ready),
            "{name}: {health}"
        );
        assert_eq!(
            matches!(health, Health::Stalled { .. }),
            !live,
            "{name}: {health}"
        );
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
fn what_waits_is_said_with_its_reason() {
    assert_eq!(well().waits(), Vec::<String>::new());
    let mut status = well();
    let scope = &mut status.scopes[0];
    scope.pause = Some(pause());
    scope.breaker = Some(BreakerStatus {
        lasts: Some(S * 150),
        reason: Some("connection refused".into()),
        next_probe: Some(S * 12),
    });
    scope.outages = vec![outage(1)];
    status.failing = vec![failing(14)];
    let [orders, idle] = &mut status.source.partitions[..] else {
        panic!("two partitions");
    };
    orders.in_flight = 8;
    orders.first = Some(parked(WaitCause::Busy, 200));
    (idle.withheld, idle.withheld_for) = (Some(40), Some(S * 61));
    // The first message of a partition that is listed already.
    let mut third = PartitionStatus::new("pay", 0);
    third.first = Some(failing(14));
    status.source.partitions.push(third);
    assert_eq!(
        status.waits(),
        [
            "`billing` is paused by ada for 3 min: the bank is away",
            "the handler of `billing` is paused for 2 min, the next message probes in 12 s: connection refused",
            "1 message waits for the store of `billing`, for 3 s: connection refused",
            "pay/0@703 failed 14 times, next try in 23 s: ledger 7 is locked (key billing:eMT5oSC2v1zTz8Nw5IO50A)",
            "orders/0@7, which waits for another worker for 3 min; 7 other messages of its partition are in flight",
            "orders/1: 40 offsets wait behind an open transaction, for 61 s",
        ]
    );
    status.failing = vec![failing(1); 100];
    assert_eq!(status.waits().len(), 64);
}

#[test]
fn a_reason_is_cut_between_characters() {
    let long = "ä".repeat(1_000);
    let cut = super::super::beginning(&format!("x{long}")).to_owned();
    assert!(cut.len() == 499 && cut.ends_with('ä'));
    assert_eq!(super::super::beginning("short"), "short");
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
