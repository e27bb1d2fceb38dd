//! Tests of the judge: hand-made histories, a clean one and one for each way to break an invariant.

mod tale;

use std::collections::BTreeMap;
use std::io::Write as _;

use oncegate_core::rules::ReleaseCause;

use self::tale::{KEY, LEASE_MS, ORIGIN, Tale, claim, complete, granted, held, paid, token};
use super::{History, Occurrence, Op, STORE_LOSS, StoreAnswer, judge};

#[track_caller]
fn check(tale: Tale, invariants: &[&str]) {
    let found = judge(&tale.evidence).broken;
    let told: Vec<String> = found.iter().map(ToString::to_string).collect();
    for invariant in invariants {
        assert!(
            tale.broken().contains(invariant),
            "{invariant} is not seen; found: {told:#?}"
        );
    }
    assert!(!invariants.is_empty() || found.is_empty(), "{told:#?}");
}

/// The second worker takes over when the first one's lease is over, which then is too late.
fn taken_over() -> Tale {
    let tale = Tale::new().run(1, 'a', granted(1, 10_000)).pass(LEASE_MS);
    let tale = tale
        .run(2, 'b', granted(2, 20_000))
        .call(2, complete('b'), held());
    tale.call(1, complete('a'), Some(StoreAnswer::Lost))
}

// invariant: promise-from-history
#[test]
fn clean_histories_pass() {
    check(Tale::clean(), &[]);
    check(taken_over().ack(2).end(1), &[]);
    let result = StoreAnswer::Completed {
        result: "\"5/1 by b\"".to_owned(),
    };
    check(
        taken_over().call(1, claim('c'), Some(result)).ack(1).end(1),
        &[],
    );
    // A completion whose answer was lost, and its repeat.
    let lost = Tale::new()
        .run(1, 'a', granted(1, 10_000))
        .call(1, complete('a'), None);
    check(lost.call(1, complete('a'), held()).ack(1).end(1), &[]);
}

// invariant: promise-from-history
#[test]
fn an_ack_without_a_durable_end_is_seen() {
    check(
        Tale::new()
            .run(1, 'a', granted(1, 10_000))
            .ack(1)
            .call(1, complete('a'), held())
            .end(1),
        &["S1"],
    );
    check(taken_over().ack(1).end(1), &["S9"]);
    check(
        Tale::new()
            .run(1, 'a', granted(1, 10_000))
            .call(1, complete('a'), None)
            .ack(1)
            .end(1),
        &["S12"],
    );
}

// invariant: promise-from-history
#[test]
fn another_content_does_not_undo_a_completion() {
    let completed = Tale::new()
        .run(1, 'a', granted(1, 10_000))
        .call(1, complete('a'), held());
    let tale = completed
        .call(1, claim('b'), Some(StoreAnswer::Mismatch))
        .ack(1)
        .end(1);
    assert!(
        !tale.broken().contains("S1"),
        "what was completed may be acknowledged"
    );
}

// invariant: promise-from-history
#[test]
fn a_lost_message_is_seen() {
    let mut tale = Tale::clean();
    tale.evidence.effects.clear();
    check(tale.clone(), &["S2"]);
    tale.evidence.dead_letters.insert(ORIGIN.to_owned());
    check(tale, &[]);
}

// invariant: promise-from-history
#[test]
fn the_result_of_another_event_is_seen() {
    check(Tale::clean().duplicate("5/1 by a"), &[]);
    check(Tale::clean().duplicate("6/1 by a"), &["S3"]);
    check(Tale::clean().duplicate("5/2 by a"), &["S14"]);
    let other = StoreAnswer::Completed {
        result: "\"5/1 by b\"".to_owned(),
    };
    check(
        Tale::clean()
            .duplicate("5/1 by a")
            .call(2, claim('b'), Some(other)),
        &["S13", "S16"],
    );
}

// invariant: promise-from-history
#[test]
fn a_stale_owner_that_is_heard_is_seen() {
    let tale = Tale::new()
        .run(1, 'a', granted(1, 10_000))
        .pass(LEASE_MS)
        .run(2, 'b', granted(2, 20_000));
    check(
        tale.clone().call(1, complete('a'), held()).ack(1).end(1),
        &["S4", "S16"],
    );
    let extend = Op::Extend {
        token: token('a'),
        lease_ms: LEASE_MS,
    };
    check(
        tale.call(1, extend, held())
            .call(2, complete('b'), held())
            .ack(2)
            .end(1),
        &["S4", "S16"],
    );
}

// invariant: promise-from-history
#[test]
fn a_second_run_is_seen() {
    check(
        Tale::clean()
            .run(2, 'b', granted(1, 20_000))
            .call(2, complete('b'), held()),
        &["S5", "S8", "S16"],
    );
    // Two at a time, and nothing was over.
    check(
        Tale::new()
            .run(1, 'a', granted(1, 10_000))
            .run(2, 'b', granted(2, 20_000))
            .call(2, complete('b'), held())
            .ack(2)
            .end(1),
        &["S16"],
    );
    let mut twice = Tale::clean();
    twice.evidence.effects.insert(paid(), 2);
    check(twice, &["S8"]);
}

// invariant: promise-from-history
#[test]
fn a_fencing_token_that_does_not_grow_is_seen() {
    let tale = Tale::new()
        .run(1, 'a', granted(1, 10_000))
        .pass(LEASE_MS)
        .run(2, 'b', granted(2, 10_000));
    check(
        tale.call(2, complete('b'), held()).ack(2).end(1),
        &["S6", "S16"],
    );
}

// invariant: promise-from-history
#[test]
fn a_commit_that_runs_ahead_or_back_is_seen() {
    let mut ahead = Tale::new();
    ahead.commit(1);
    let ahead = ahead
        .pass(100)
        .run(1, 'a', granted(1, 10_000))
        .call(1, complete('a'), held())
        .ack(1);
    check(ahead.end(1), &["S10"]);
    let mut back = Tale::clean();
    back.commit(0);
    check(back, &["S11"]);
}

// invariant: promise-from-history
#[test]
fn a_record_that_is_gone_or_stays_claimed_is_seen() {
    let mut gone = Tale::clean();
    gone.evidence.records = Some(BTreeMap::new());
    check(gone.clone(), &["S17"]);
    gone.set_record("pending");
    check(gone, &["S17", "L1"]);
}

// invariant: promise-from-history
#[test]
fn an_attempt_that_no_handler_has_failed_is_seen() {
    let tale = Tale::new().run(1, 'a', granted(1, 10_000));
    let interrupted = tale
        .clone()
        .call(1, release(ReleaseCause::Interrupted), held());
    check(interrupted.clone().completed_as(1), &[]);
    let failed = tale.call(1, release(ReleaseCause::Failed), held());
    check(failed.completed_as(2), &["S18"]);
    // The store counts a release that was sent as uncounted.
    check(interrupted.completed_as(2), &["S16"]);
}

fn release(end: ReleaseCause) -> Op {
    Op::Release {
        token: token('a'),
        delay_ms: 0,
        end: end.as_str().to_owned(),
    }
}

// invariant: promise-from-history
#[test]
fn an_extension_that_crossed_the_release_protects_nothing() {
    let end = ReleaseCause::Interrupted.as_str().to_owned();
    let release = Op::Release {
        token: token('a'),
        delay_ms: 0,
        end,
    };
    let extend = Op::Extend {
        token: token('a'),
        lease_ms: LEASE_MS,
    };
    let again = StoreAnswer::Granted {
        attempt: 1,
        takeover: false,
        recovered: false,
        fencing_token: Some(20_000),
    };
    let tale = Tale::new()
        .run(1, 'a', granted(1, 10_000))
        .call(1, release, held())
        .call(1, extend, held());
    let tale = tale
        .pass(1)
        .call(1, claim('b'), Some(again))
        .call(1, complete('b'), held());
    check(tale.ack(1).end(1), &[]);
}

// invariant: promise-from-history
#[test]
fn a_claim_that_outwaits_a_lease_for_a_locked_row_may_be_busy() {
    let mut waited = asked(LEASE_MS * 2);
    check(waited.clone(), &["S16"]);
    waited.evidence.locks_rows = true;
    check(waited, &[]);
    let mut at_once = asked(LEASE_MS);
    at_once.evidence.locks_rows = true;
    check(at_once, &["S16"]);
}

/// A claim of a final key that is answered Busy after this time.
fn asked(after_ms: u64) -> Tale {
    let invoke = Occurrence::Invoke {
        call: 99,
        key: KEY.to_owned(),
        op: claim('b'),
    };
    let answer = Occurrence::Ok {
        call: 99,
        answer: StoreAnswer::Busy {
            retry_in_ms: LEASE_MS * 2,
        },
    };
    Tale::clean().say(2, invoke).pass(after_ms).say(2, answer)
}

// invariant: promise-from-history
#[test]
fn a_loss_in_silence_and_an_alarm_without_one_are_seen() {
    let mut lost = Tale::clean().forget();
    lost.evidence.notices_losses = true;
    lost.evidence.records = Some(BTreeMap::new());
    check(lost.clone(), &["S19"]);
    check(lost.say(1, Occurrence::LossNoticed), &[]);
    check(Tale::clean().say(1, Occurrence::LossNoticed), &["S19"]);
}

// invariant: promise-from-history
#[test]
fn what_does_not_come_to_its_end_is_seen() {
    let mut stuck = Tale::clean();
    stuck
        .evidence
        .hung
        .push("a worker that was asked to stop still runs".to_owned());
    check(stuck, &["L2"]);
}

// invariant: promise-from-history
#[test]
fn a_store_that_was_not_read_is_not_judged() {
    let mut unread = Tale::clean();
    unread.evidence.records = None;
    check(unread, &[]);
}

// invariant: promise-from-history
#[test]
fn an_attempt_beyond_the_limit_is_seen() {
    let mut strict = taken_over().ack(2).end(1);
    strict.evidence.max_attempts = Some(0);
    check(strict.clone(), &["S18"]);
    strict.evidence.max_attempts = None;
    check(strict, &[]);
}

// invariant: promise-from-history
#[test]
fn an_operation_that_is_none_is_explained_by_nothing() {
    let op = Op::Extend {
        token: "no token".to_owned(),
        lease_ms: LEASE_MS,
    };
    check(Tale::clean().call(1, op, held()), &["S16"]);
}

// invariant: promise-from-history
#[test]
fn a_history_returns_what_was_noted_and_omits_torn_entries() {
    let folder = std::env::temp_dir().join(format!("oncegate-history-{}", std::process::id()));
    let history = History::open(&folder).unwrap().as_process(7);
    history.note(Occurrence::LossNoticed);
    let half = std::fs::OpenOptions::new()
        .append(true)
        .open(history.path())
        .unwrap();
    (&half).write_all(b"{\"at_us\":1,\"pid\":8,").unwrap();
    History::open(&folder).unwrap().note_of(
        0,
        Occurrence::FaultEnds {
            fault: STORE_LOSS.to_owned(),
        },
    );
    let read = history.read().unwrap();
    std::fs::remove_file(&folder).unwrap();
    let noted: Vec<(u32, &Occurrence)> =
        read.iter().map(|entry| (entry.pid, &entry.what)).collect();
    let ended = Occurrence::FaultEnds {
        fault: STORE_LOSS.to_owned(),
    };
    assert_eq!(noted, [(7, &Occurrence::LossNoticed), (0, &ended)]);
}

// invariant: promise-from-history
#[test]
fn a_counter_that_differs_is_seen() {
    for (acks, broken) in [(1, &[][..]), (2, &["S20"])] {
        let counts = BTreeMap::from([("claims granted".to_owned(), 1), ("acks ".to_owned(), acks)]);
        check(Tale::clean().say(1, Occurrence::Counted { counts }), broken);
    }
}

// invariant: promise-from-history
#[test]
fn what_the_rules_cannot_explain_is_seen() {
    // Completed out of nothing, and busy although it was finished.
    let out_of_nothing = StoreAnswer::Completed {
        result: "\"5/1 by z\"".to_owned(),
    };
    check(
        Tale::new().call(1, claim('a'), Some(out_of_nothing)),
        &["S16"],
    );
    let busy = StoreAnswer::Busy { retry_in_ms: 5 };
    check(Tale::clean().call(2, claim('b'), Some(busy)), &["S16"]);
    // An unknown claim may have been executed, or not.
    let unknown = Tale::new().call(1, claim('a'), None);
    check(
        unknown
            .clone()
            .run(1, 'a', granted(1, 10_000))
            .call(1, complete('a'), held())
            .ack(1)
            .end(1),
        &[],
    );
    check(
        unknown
            .call(2, claim('b'), Some(StoreAnswer::Busy { retry_in_ms: 5 }))
            .run(1, 'a', granted(1, 10_000))
            .call(1, complete('a'), held())
            .ack(1)
            .end(1),
        &[],
    );
}
