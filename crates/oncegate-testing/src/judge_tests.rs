//! The judge on histories that are written by hand.

use super::*;
use crate::history::{CallAnswer, Form, What};

/// A history that grows, with a round's usual events.
#[derive(Default)]
struct HistoryBuilder {
    events: Vec<Event>,
    calls: u64,
}

impl HistoryBuilder {
    fn note(mut self, what: What) -> Self {
        let at_ms = self.events.len() as u64;
        self.events.push(Event {
            at_ms,
            process: Some(1),
            what,
        });
        self
    }

    /// Message n is sample n, with this key.
    fn sent(self, message: usize, sample: usize, key: &str) -> Self {
        let key = Some(key.to_owned());
        self.note(What::Produced {
            message,
            sample,
            form: Form::Original,
            key,
        })
    }

    fn began(self, run: u64, message: usize) -> Self {
        self.note(What::Began {
            run,
            message,
            attempt: 1,
            recovered: false,
            batch: None,
        })
    }

    fn ended(self, run: u64, outcome: Outcome) -> Self {
        let result = (outcome == Outcome::Completed).then(|| "result".to_owned());
        self.note(What::Ended {
            run,
            outcome,
            result,
        })
    }

    fn fault(self, fault: Fault, sample: usize) -> Self {
        self.note(What::FaultBegan {
            fault,
            sample: Some(sample),
        })
    }

    fn called(mut self, sample: usize, key: Option<&str>, run: Option<u64>) -> Self {
        self.calls += 1;
        let call = self.calls;
        let idempotency_key = key.map(str::to_owned);
        let step = String::new();
        self.note(What::Called {
            call,
            sample: Some(sample),
            step,
            idempotency_key,
            run,
            in_duplicate: false,
        })
    }

    fn performed(self) -> Self {
        let call = self.calls;
        self.note(What::Performed { call })
    }

    fn repeated(self, first: u64) -> Self {
        let call = self.calls;
        self.note(What::Repeated {
            call,
            first,
            other_body: false,
        })
    }

    fn returned(self, answer: CallAnswer) -> Self {
        let call = self.calls;
        self.note(What::Returned { call, answer })
    }

    #[track_caller]
    fn shows(self, expected: &[Defect]) -> Vec<Violation> {
        let violations = judge(&self.events, &BTreeMap::new());
        let defects: Vec<Defect> = violations
            .iter()
            .map(|violation| violation.defect)
            .collect();
        assert_eq!(defects, expected, "{violations:#?}");
        violations
    }
}

/// Sample 1 has its effect in run 1.
fn charged(key: Option<&str>) -> HistoryBuilder {
    HistoryBuilder::default()
        .sent(1, 1, "k1")
        .began(1, 1)
        .called(1, key, Some(1))
        .performed()
}

// invariant: verdict-from-history
#[test]
fn an_effect_that_happens_once_is_no_defect() {
    charged(None)
        .returned(CallAnswer::Answered)
        .ended(1, Outcome::Completed)
        .shows(&[]);
}

// invariant: verdict-from-history
#[test]
fn a_repetition_under_one_key_is_no_second_effect() {
    let again = charged(Some("d1"))
        .fault(Fault::KillAfterEffect, 1)
        .ended(1, Outcome::Dropped);
    let again = again
        .began(2, 1)
        .called(1, Some("d1"), Some(2))
        .repeated(1)
        .returned(CallAnswer::Answered);
    again.ended(2, Outcome::Completed).shows(&[]);
}

// invariant: verdict-from-history
#[test]
fn a_repetition_with_another_body_is_named() {
    let again = charged(Some("d1"))
        .fault(Fault::KillAfterEffect, 1)
        .ended(1, Outcome::Dropped);
    let again = again.began(2, 1).called(1, Some("d1"), Some(2));
    let again = again.note(What::Repeated {
        call: 2,
        first: 1,
        other_body: true,
    });
    let found = again
        .ended(2, Outcome::Completed)
        .shows(&[Defect::ChangingBody]);
    assert_eq!(
        (found[0].sample, found[0].after.as_slice()),
        (Some(1), &[Fault::KillAfterEffect][..])
    );
}

// invariant: verdict-from-history
#[test]
fn second_effects_are_named_by_key_and_explained_by_fault() {
    let violations = charged_again(None, None).shows(&[Defect::NoDownstreamKey]);
    assert_eq!(violations[0].after, [Fault::AnswerLost]);
    assert_eq!(violations[0].events.len(), 2, "{violations:?}");
    assert_eq!(violations[0].unexplained, 0, "{violations:?}");
    charged_again(Some("d1"), Some("d2")).shows(&[Defect::ChangingDownstreamKey]);
}

/// An order that is charged under the first key, and, after a lost answer, under the second.
fn charged_again(first: Option<&str>, second: Option<&str>) -> HistoryBuilder {
    let told = charged(first)
        .fault(Fault::AnswerLost, 1)
        .returned(CallAnswer::Lost)
        .ended(1, Outcome::Failed);
    told.began(2, 1)
        .called(1, second, Some(2))
        .performed()
        .ended(2, Outcome::Completed)
}

// invariant: verdict-from-history
#[test]
fn a_second_effect_that_no_fault_explains_is_told_apart() {
    let twice = charged(None)
        .called(1, None, Some(1))
        .performed()
        .ended(1, Outcome::Completed);
    let found = twice.shows(&[Defect::NoDownstreamKey]);
    assert_eq!(
        (found[0].unexplained, found[0].after.as_slice()),
        (1, [].as_slice())
    );
    assert!(
        found[0]
            .what
            .contains("happened 2 times though no fault explains it"),
        "{}",
        found[0].what
    );
    let explained = charged(None)
        .fault(Fault::AnswerLost, 1)
        .called(1, None, Some(1))
        .performed();
    let again = explained
        .called(1, None, Some(1))
        .performed()
        .ended(1, Outcome::Completed);
    assert_eq!(
        again.shows(&[Defect::NoDownstreamKey])[0].unexplained,
        1,
        "one fault explains one repetition"
    );
    let all_round = charged(None).note(What::FaultBegan {
        fault: Fault::LostReplies,
        sample: None,
    });
    let again = all_round
        .called(1, None, Some(1))
        .performed()
        .ended(1, Outcome::Completed);
    assert_eq!(
        again.shows(&[Defect::NoDownstreamKey])[0].unexplained,
        0,
        "replies are lost again and again"
    );
}

// invariant: verdict-from-history
#[test]
fn a_second_effect_after_a_cancellation_is_named_so() {
    let told = charged(None)
        .ended(1, Outcome::Completed)
        .began(2, 1)
        .note(What::Cancelled { run: 2 });
    told.called(1, None, Some(2))
        .performed()
        .ended(2, Outcome::Dropped)
        .shows(&[Defect::EffectAfterCancel]);
}

// invariant: verdict-from-history
#[test]
fn a_lost_effect_is_named_by_what_the_runs_did() {
    let begun = || HistoryBuilder::default().sent(1, 1, "k1").began(1, 1);
    begun()
        .ended(1, Outcome::Completed)
        .shows(&[Defect::LostEffect]);
    let refused = begun()
        .fault(Fault::Refused, 1)
        .called(1, Some("d1"), Some(1))
        .returned(CallAnswer::Refused);
    refused
        .ended(1, Outcome::Completed)
        .shows(&[Defect::SwallowedError]);
    let failed = begun()
        .called(1, Some("d1"), Some(1))
        .returned(CallAnswer::Refused)
        .ended(1, Outcome::Failed);
    failed
        .began(2, 1)
        .ended(2, Outcome::Completed)
        .shows(&[Defect::MarkedBeforeEffect]);
    let killed = begun()
        .ended(1, Outcome::Completed)
        .fault(Fault::KillAfterCompleted, 1);
    killed.shows(&[Defect::AnsweredTooEarly]);
    let late = begun()
        .ended(1, Outcome::Completed)
        .called(1, Some("d1"), None)
        .performed();
    late.shows(&[Defect::AnsweredTooEarly]);
}

// invariant: verdict-from-history
#[test]
fn a_missing_step_is_a_lost_effect() {
    let told = charged(Some("d1"))
        .returned(CallAnswer::Answered)
        .ended(1, Outcome::Completed);
    let expected = BTreeMap::from([(1, BTreeSet::from([String::new(), "mail".to_owned()]))]);
    let violations = judge(&told.events, &expected);
    assert_eq!(violations.len(), 1);
    assert_eq!(violations[0].defect, Defect::LostEffect);
    assert!(violations[0].what.contains("\"mail\""), "{violations:?}");
}

// invariant: verdict-from-history
#[test]
fn keys_that_merge_or_split_events_are_named_once() {
    let merged = charged(Some("d1"))
        .ended(1, Outcome::Completed)
        .sent(2, 2, "k1");
    merged.shows(&[Defect::KeyTooNarrow]);
    let split = charged(Some("d1"))
        .ended(1, Outcome::Completed)
        .sent(2, 1, "k2")
        .began(2, 2);
    split
        .called(1, Some("d2"), Some(2))
        .performed()
        .ended(2, Outcome::Completed)
        .shows(&[Defect::KeyTooWide]);
}

// invariant: verdict-from-history
#[test]
fn an_effect_under_the_key_of_another_is_named() {
    let told = charged(Some("d"))
        .ended(1, Outcome::Completed)
        .sent(2, 2, "k2")
        .began(2, 2);
    told.called(2, Some("d"), Some(2))
        .repeated(1)
        .ended(2, Outcome::Completed)
        .shows(&[Defect::SharedDownstreamKey]);
}

// invariant: verdict-from-history
#[test]
fn dead_letters_and_unfinished_messages_are_named_unless_poison() {
    let gave_up = HistoryBuilder::default()
        .sent(1, 1, "k1")
        .began(1, 1)
        .ended(1, Outcome::GaveUp);
    let gave_up = gave_up.note(What::DeadLettered {
        message: 1,
        cause: "permanent",
    });
    gave_up.shows(&[Defect::GaveUp]);
    HistoryBuilder::default()
        .sent(1, 1, "k1")
        .note(What::Unfinished { message: 1 })
        .shows(&[Defect::Unfinished]);
    let poison = What::Produced {
        message: 2,
        sample: 1,
        form: Form::Poison,
        key: Some("k9".to_owned()),
    };
    let told = charged(None)
        .ended(1, Outcome::Completed)
        .note(poison)
        .note(What::Unfinished { message: 2 });
    told.note(What::DeadLettered {
        message: 2,
        cause: "attempts_used_up",
    })
    .shows(&[]);
}

/// A process may end before it has written the dead letter.
// invariant: verdict-from-history
#[test]
fn a_handler_that_gave_up_is_the_cause_of_a_late_dead_letter() {
    let found = HistoryBuilder::default()
        .sent(1, 1, "k1")
        .began(1, 1)
        .ended(1, Outcome::GaveUp)
        .note(What::DeadLettered {
            message: 1,
            cause: "not_handed_over",
        })
        .shows(&[Defect::GaveUp]);
    assert!(found[0].what.contains("(permanent)"), "{}", found[0].what);
}

// invariant: verdict-from-history
#[test]
fn a_run_that_does_not_stop_is_named_and_a_lost_lease_is_not() {
    stopped(1_000).shows(&[]);
    stopped(STOP_DEADLINE_MS).shows(&[Defect::DoesNotStop]);
    charged(None)
        .ended(1, Outcome::Completed)
        .note(What::Hung)
        .shows(&[Defect::DoesNotStop]);
}

/// A run that is dropped this long after the stop.
fn stopped(after_ms: u64) -> HistoryBuilder {
    let mut told = charged(Some("d1")).note(What::Stopping);
    let at_ms = told.events.len() as u64 + after_ms;
    let what = What::Ended {
        run: 1,
        outcome: Outcome::Dropped,
        result: None,
    };
    told.events.push(Event {
        at_ms,
        process: Some(1),
        what,
    });
    told
}

// invariant: verdict-from-history
#[test]
fn results_that_differ_are_named() {
    let told = charged(Some("d1")).ended(1, Outcome::Completed).began(2, 1);
    let other = What::Ended {
        run: 2,
        outcome: Outcome::Completed,
        result: Some("other".to_owned()),
    };
    told.called(1, Some("d1"), Some(2))
        .repeated(1)
        .note(other)
        .shows(&[Defect::DifferentResults]);
}

fn listed(effect: usize, sample: usize) -> What {
    What::Listed {
        effect,
        sample: Some(sample),
        step: String::new(),
    }
}

/// Two samples that are handled.
fn handled() -> HistoryBuilder {
    let history = HistoryBuilder::default()
        .sent(1, 1, "k1")
        .sent(2, 2, "k2")
        .began(1, 1)
        .began(2, 2);
    history
        .ended(1, Outcome::Completed)
        .ended(2, Outcome::Completed)
}

// invariant: verdict-from-history
#[test]
fn an_effect_that_the_witness_lists_happens_once() {
    handled().note(listed(1, 1)).note(listed(2, 2)).shows(&[]);
    let found = handled()
        .fault(Fault::Freeze, 1)
        .note(listed(1, 1))
        .note(listed(2, 1))
        .shows(&[Defect::RepeatedEffect, Defect::LostEffect]);
    assert_eq!((found[0].sample, found[1].sample), (Some(1), Some(2)));
    assert_eq!(found[0].after, [Fault::Freeze]);
    assert!(
        found[0]
            .what
            .contains("lists the effect of sample 1 2 times after freeze"),
        "{}",
        found[0].what
    );
}
