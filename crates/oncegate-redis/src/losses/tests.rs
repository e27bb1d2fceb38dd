// invariant (all tests): loss-undetected

use std::time::Duration;

use oncegate_core::record::TokenTag;
use redis::Arg;

use super::super::witnesses::EARLIER_WITNESSES;
use super::*;

const A: &str = "aaaa";
const B: &str = "bbbb";
const BEYOND: u64 = IDLE_TALK_BYTES + 1;

fn info(replication: &str, offset: u64, left: Option<(&str, u64)>) -> String {
    let (left, second) = left.unwrap_or(("0000", 0));
    format!(
        "role:master\r\nmaster_replid:{replication}\r\nmaster_replid2:{left}\r\nmaster_repl_offset:{offset}\r\n\
         second_repl_offset:{second}\r\nmaxmemory_policy:noeviction\r\n"
    )
}

fn hear(losses: &Losses, address: &str, info: &str, held: &[Value]) {
    losses.judge(&losses.question(|_| true), address, &Info(info), held);
}

fn losses() -> Losses {
    let losses = Losses::new(false, true);
    hear(&losses, "one", &info(A, 100, None), &[]);
    assert_eq!(losses.loss(), None);
    losses
}

#[test]
fn only_a_history_that_went_back_raises_an_alarm() {
    let losses = losses();
    hear(&losses, "one", &info(A, 100, None), &[]);
    hear(&losses, "one", &info(A, 150, None), &[]);
    assert_eq!((losses.loss(), losses.refusal()), (None, None));
    hear(&losses, "one", &info(A, 150 + BEYOND, None), &[]);
    hear(&losses, "one", &info(A, 150, None), &[]);
    assert!(losses.loss().is_some());
    let why = losses.refusal().unwrap();
    assert!(
        why.contains(&format!("{BEYOND} bytes")) && why.contains("lost records"),
        "{why}"
    );
}

#[test]
fn a_replica_that_takes_over_says_where_it_left() {
    // The server has everything: the first offset that is not shared comes after the last one
    // seen.
    let clean = losses();
    hear(&clean, "two", &info(B, 130, Some((A, 101))), &[]);
    hear(&clean, "two", &info(B, 140, Some((A, 101))), &[]);
    assert_eq!(clean.loss(), None);
    // Pings and messages of sentinels are not records.
    let idle = losses();
    hear(&idle, "two", &info(B, 130, Some((A, 1))), &[]);
    assert_eq!(idle.loss(), None);
    let lossy = losses();
    hear(&lossy, "one", &info(A, 100 + BEYOND, None), &[]);
    hear(&lossy, "two", &info(B, 130, Some((A, 101))), &[]);
    assert!(lossy.loss().is_some());
}

#[test]
fn an_answer_that_was_overtaken_by_another_one_raises_no_alarm() {
    let losses = losses();
    let early = losses.question(|_| true);
    hear(&losses, "one", &info(A, 200 + BEYOND, None), &[]);
    losses.judge(&early, "one", &Info(&info(A, 120, None)), &[]);
    assert_eq!(losses.loss(), None);
    // And the later one still counts.
    hear(&losses, "one", &info(A, 200, None), &[]);
    assert!(losses.loss().is_some());
}

const HOUR: Duration = Duration::from_secs(3_600);

fn bytes(record: &[u8]) -> Value {
    Value::BulkString(record.to_vec())
}

/// The last word of each command of a question: the keys.
fn asked(question: &Question) -> Vec<Vec<u8>> {
    question
        .commands()
        .map(|cmd| match cmd.args_iter().last().unwrap() {
            Arg::Simple(word) => word.to_vec(),
            other => panic!("{other:?}"),
        })
        .collect()
}

fn witness_of(key: &str, retention: Duration) -> Witness {
    Witness::new(
        0,
        vec![b"GET".to_vec(), key.into()],
        TokenTag(*b"0123"),
        retention,
    )
    .unwrap()
}

#[test]
fn a_completion_that_is_gone_raises_an_alarm_once() {
    for (held, lost) in [
        (Value::Nil, true),
        (bytes(b"P0123456789abcdef"), true),
        (bytes(b"P9999999999999999"), false),
        (bytes(b"C0123"), false),
        (
            bytes(b"1700000000000000 1700000000000 P0123456789abcdef"),
            true,
        ),
        (bytes(b"1700000000000000 1700000000000 C0123 P0123"), false),
        (bytes(b"Soooo"), false),
        (Value::Okay, false),
    ] {
        let losses = losses();
        losses.note_completed("one", witness_of("key", HOUR));
        assert_eq!(losses.question(|_| true).commands().count(), 1);
        hear(
            &losses,
            "one",
            &info(B, 1, None),
            std::slice::from_ref(&held),
        );
        assert_eq!(losses.loss().is_some(), lost, "{held:?}");
        assert_eq!(
            losses.question(|_| true).commands().count(),
            usize::from(!lost)
        );
    }
    // An expired record is not a loss.
    let losses = losses();
    losses.note_completed("one", witness_of("key", Duration::ZERO));
    assert_eq!(losses.question(|_| true).commands().count(), 0);
}

#[test]
fn a_busy_server_that_was_emptied_raises_an_alarm_once() {
    let losses = losses();
    let held = Value::BulkString(b"C0123".to_vec());
    losses.note_completed("one", witness_of("before", HOUR));
    hear(
        &losses,
        "one",
        &info(A, 150, None),
        std::slice::from_ref(&held),
    );
    // The server loses everything, and the next message is completed before the next check.
    losses.note_completed("one", witness_of("after", HOUR));
    let question = losses.question(|_| true);
    assert_eq!(asked(&question), [&b"after"[..], b"before"]);
    losses.judge(
        &question,
        "one",
        &Info(&info(A, 200, None)),
        &[held.clone(), Value::Nil],
    );
    assert!(losses.loss().is_some());
    assert_eq!(asked(&losses.question(|_| true)), [b"after"]);
    hear(&losses, "one", &info(A, 250, None), &[held]);
    assert_eq!(
        asked(&losses.question(|_| true)),
        [b"after"],
        "and asked for once"
    );
}

#[test]
fn a_loss_is_noticed_though_the_newest_records_have_run_again() {
    let losses = losses();
    let there = vec![bytes(b"C0123"); EARLIER_WITNESSES + 1];
    for number in 0..2 * EARLIER_WITNESSES {
        losses.note_completed(
            "one",
            witness_of(&number.to_string(), Duration::from_secs(3_600)),
        );
        hear(&losses, "one", &info(A, 150, None), &there);
    }
    assert_eq!(
        losses.question(|_| true).commands().count(),
        EARLIER_WITNESSES
    );
    let again = bytes(b"C9999");
    let running = bytes(b"P9999999999999999");
    hear(
        &losses,
        "one",
        &info(A, 150, None),
        &[again.clone(), running, again],
    );
    assert_eq!(losses.loss(), None);
    let others = [
        bytes(b"C9999"),
        bytes(b"C9999"),
        bytes(b"C9999"),
        Value::Nil,
    ];
    hear(&losses, "one", &info(A, 150, None), &others);
    assert!(losses.loss().is_some());
}

#[test]
fn a_server_without_a_history_is_judged_by_its_witnesses_alone() {
    const HIDDEN: &str = "role:master\r\nmaxmemory_policy:noeviction\r\n";
    let losses = Losses::new(false, true);
    hear(&losses, "one", HIDDEN, &[]);
    losses.note_completed("one", witness_of("key", Duration::from_secs(3_600)));
    hear(
        &losses,
        "one",
        HIDDEN,
        &[Value::BulkString(b"C0123".to_vec())],
    );
    // A proxy in front of several servers may show a history now and then.
    hear(
        &losses,
        "one",
        &info(A, 100 + BEYOND, None),
        &[Value::BulkString(b"C0123".to_vec())],
    );
    hear(
        &losses,
        "one",
        HIDDEN,
        &[Value::BulkString(b"C0123".to_vec())],
    );
    assert_eq!(losses.loss(), None);
    hear(&losses, "one", HIDDEN, &[Value::Nil]);
    assert!(losses.loss().is_some());
}

#[test]
fn an_evicting_policy_refuses_claims_until_it_is_gone() {
    let losses = losses();
    let evicting = info(A, 100, None).replace("noeviction", "allkeys-lru");
    hear(&losses, "one", &evicting, &[]);
    assert!(
        losses
            .refusal()
            .is_some_and(|why| why.contains("allkeys-lru"))
    );
    hear(&losses, "one", &info(A, 100, None), &[]);
    assert_eq!((losses.refusal(), losses.loss()), (None, None));
}

#[test]
fn who_goes_on_after_a_loss_is_not_refused() {
    let losses = Losses::new(false, false);
    hear(&losses, "one", &info(A, 100 + BEYOND, None), &[]);
    hear(&losses, "one", &info(A, 100, None), &[]);
    assert!(losses.loss().is_some() && losses.refusal().is_none());
}
