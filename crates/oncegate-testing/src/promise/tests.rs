//! Tests of the judge: hand-made histories, a clean one and one for each way to break an invariant.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;

use oncegate_core::rules::ReleaseCause;

use super::{
    Answer, EffectName, Entry, Evidence, History, Occurrence, OffsetCommit, Op, ProducedMessage,
    STORE_LOSS, SUCCEEDED, judge,
};

const KEY: &str = "fire:a-key";
const ORIGIN: &str = "orders/0@0";
const LEASE_MS: u64 = 1_200;
/// The time between two lines.
const LINE_US: u64 = 1_000;

/// A history in the making.
#[derive(Clone)]
struct Tale {
    evidence: Evidence,
    now_us: u64,
    calls: u64,
}

fn token(letter: char) -> String {
    letter.to_string().repeat(32)
}

fn claim(owner: char) -> Op {
    Op::Claim {
        token: token(owner),
        lease_ms: LEASE_MS,
        fingerprint: None,
        fenced: true,
    }
}

fn complete(owner: char) -> Op {
    Op::Complete {
        token: token(owner),
        fingerprint: None,
        result: format!("\"5/1 by {owner}\""),
        retention_ms: 86_400_000,
    }
}

fn granted(attempt: u8, fencing_token: u64) -> Option<Answer> {
    let takeover = attempt > 1;
    Some(Answer::Granted {
        attempt,
        takeover,
        recovered: takeover,
        fencing_token: Some(fencing_token),
    })
}

/// The effect of the message.
fn paid() -> EffectName {
    EffectName::new("5", "1")
}

fn held() -> Option<Answer> {
    Some(Answer::Held { recreated: false })
}

impl Tale {
    /// Order 5 was produced, and nothing has happened to it.
    fn new() -> Self {
        let one = ProducedMessage {
            origin: ORIGIN.to_owned(),
            effect: paid(),
            key: Some(KEY.to_owned()),
        };
        let evidence = Evidence {
            topic: "orders".to_owned(),
            produced: vec![one],
            records: Some(BTreeMap::new()),
            max_attempts: Some(60),
            ..Evidence::default()
        };
        Self {
            evidence,
            now_us: 1_000_000_000,
            calls: 0,
        }
    }

    /// A whole message, as it should be.
    fn clean() -> Self {
        Self::new()
            .run(1, 'a', granted(1, 10_000))
            .call(1, complete('a'), held())
            .ack(1)
            .end(1)
    }

    fn say(mut self, pid: u32, what: Occurrence) -> Self {
        self.now_us += LINE_US;
        self.evidence.entries.push(Entry {
            at_us: self.now_us,
            pid,
            what,
        });
        self
    }

    fn pass(mut self, millis: u64) -> Self {
        self.now_us += millis * 1_000;
        self
    }

    /// A call and its answer; `None` is one that never comes.
    fn call(mut self, pid: u32, op: Op, answer: Option<Answer>) -> Self {
        self.calls += 1;
        let call = self.calls;
        let tale = self.say(
            pid,
            Occurrence::Invoke {
                call,
                key: KEY.to_owned(),
                op,
            },
        );
        match answer {
            Some(answer) => tale.say(pid, Occurrence::Ok { call, answer }),
            None => tale.say(pid, Occurrence::Info { call }),
        }
    }

    /// A claim, and a handler that pays.
    fn run(self, pid: u32, owner: char, answer: Option<Answer>) -> Self {
        let (key, origin, content) = (KEY.to_owned(), ORIGIN.to_owned(), "1".to_owned());
        let begun = Occurrence::Begun {
            key: key.clone(),
            origin: origin.clone(),
            attempt: 1,
            fencing_token: None,
            content,
        };
        let ended = Occurrence::Ended {
            key,
            origin,
            attempt: 1,
            outcome: SUCCEEDED.to_owned(),
        };
        let mut tale = self
            .call(pid, claim(owner), answer)
            .say(pid, begun)
            .say(pid, ended);
        *tale.evidence.effects.entry(paid()).or_default() += 1;
        tale
    }

    fn ack(self, pid: u32) -> Self {
        self.say(
            pid,
            Occurrence::Ack {
                origin: ORIGIN.to_owned(),
                key: Some(KEY.to_owned()),
            },
        )
    }

    fn duplicate(self, result: &str) -> Self {
        let (key, origin, content) = (KEY.to_owned(), ORIGIN.to_owned(), "1".to_owned());
        let name = result
            .split(' ')
            .next()
            .and_then(|name| name.split_once('/'));
        let of = name
            .map(|(event, content)| EffectName::new(event, content))
            .expect("it names an effect");
        self.say(
            1,
            Occurrence::Duplicate {
                key,
                origin,
                content,
                result: result.to_owned(),
                of,
            },
        )
    }

    fn forget(self) -> Self {
        let fault = STORE_LOSS.to_owned();
        self.say(
            0,
            Occurrence::FaultBegins {
                fault: fault.clone(),
            },
        )
        .say(0, Occurrence::FaultEnds { fault })
    }

    /// Everything is committed, and the record is there.
    fn end(mut self, offset: i64) -> Self {
        self.commit(offset);
        self.set_record("completed");
        self
    }

    fn set_record(&mut self, state: &str) {
        self.evidence.records = Some(BTreeMap::from([(KEY.to_owned(), state.to_owned())]));
    }

    fn commit(&mut self, offset: i64) {
        let at_ms = i64::try_from(self.now_us / 1_000).expect("it is soon after 1970") + 1;
        self.evidence.commits.push(OffsetCommit {
            partition: 0,
            offset,
            at_ms,
        });
    }

    fn broken(&self) -> BTreeSet<&'static str> {
        judge(&self.evidence)
            .broken
            .iter()
            .map(|one| one.invariant)
            .collect()
    }
}

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
    tale.call(1, complete('a'), Some(Answer::Lost))
}

// invariant: promise-from-history
#[test]
fn clean_histories_pass() {
    check(Tale::clean(), &[]);
    check(taken_over().ack(2).end(1), &[]);
    let result = Answer::Completed {
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
        .call(1, claim('b'), Some(Answer::Mismatch))
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
    let other = Answer::Completed {
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
    let release = |end: ReleaseCause| Op::Release {
        token: token('a'),
        delay_ms: 0,
        end: end.as_str().to_owned(),
    };
    let again = |tale: Tale, attempt| {
        let answer = Answer::Granted {
            attempt,
            takeover: false,
            recovered: false,
            fencing_token: Some(20_000),
        };
        tale.pass(10)
            .call(1, claim('b'), Some(answer))
            .call(1, complete('b'), held())
            .ack(1)
            .end(1)
    };
    check(
        again(
            tale.clone()
                .call(1, release(ReleaseCause::Interrupted), held()),
            1,
        ),
        &[],
    );
    check(
        again(
            tale.clone().call(1, release(ReleaseCause::Failed), held()),
            2,
        ),
        &["S18"],
    );
    // The store counts a release that was sent as uncounted.
    check(
        again(tale.call(1, release(ReleaseCause::Interrupted), held()), 2),
        &["S16"],
    );
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
    let again = Answer::Granted {
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
fn a_claim_that_waits_longer_than_a_lease_for_a_locked_row_may_be_answered_busy() {
    let asked = |after_ms| {
        let invoke = Occurrence::Invoke {
            call: 99,
            key: KEY.to_owned(),
            op: claim('b'),
        };
        let answer = Occurrence::Ok {
            call: 99,
            answer: Answer::Busy {
                retry_in_ms: LEASE_MS * 2,
            },
        };
        Tale::clean().say(2, invoke).pass(after_ms).say(2, answer)
    };
    let mut waited = asked(LEASE_MS * 2);
    check(waited.clone(), &["S16"]);
    waited.evidence.locks_rows = true;
    check(waited, &[]);
    let mut at_once = asked(LEASE_MS);
    at_once.evidence.locks_rows = true;
    check(at_once, &["S16"]);
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
fn a_history_gives_back_what_was_noted_and_leaves_out_what_is_half_written() {
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
    let counted = |acks| {
        let counts = BTreeMap::from([("claims granted".to_owned(), 1), ("acks ".to_owned(), acks)]);
        Tale::clean().say(1, Occurrence::Counted { counts })
    };
    check(counted(1), &[]);
    check(counted(2), &["S20"]);
}

// invariant: promise-from-history
#[test]
fn what_the_rules_cannot_explain_is_seen() {
    // Completed out of nothing, and busy although it was finished.
    let out_of_nothing = Answer::Completed {
        result: "\"5/1 by z\"".to_owned(),
    };
    check(
        Tale::new().call(1, claim('a'), Some(out_of_nothing)),
        &["S16"],
    );
    let busy = Answer::Busy { retry_in_ms: 5 };
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
            .call(2, claim('b'), Some(Answer::Busy { retry_in_ms: 5 }))
            .run(1, 'a', granted(1, 10_000))
            .call(1, complete('a'), held())
            .ack(1)
            .end(1),
        &[],
    );
}
