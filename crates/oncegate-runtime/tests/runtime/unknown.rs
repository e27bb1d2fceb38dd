//! Messages that must not run again after an attempt without an outcome.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use oncegate::admin::{self, Decided, Decision};
use oncegate::running::detached::{ClaimOutcome, ClaimTerms};
use oncegate::running::policy::{AttemptLimit, OUTCOME_UNKNOWN};
use oncegate::{AfterUnknown, Attempt, ConsumerError, Failure, Gate, Handler, Message, Origin};
use tokio::time::sleep;

use super::bench::{Bench, LEASE, numbered};

/// The handler's treatment of its message.
#[derive(Clone, Copy, Debug)]
enum Manner {
    Succeeds,
    /// The handler does not end when it is cancelled.
    Hangs,
    /// The handler reports that its outcome is unknown.
    IsUnsure,
    /// The first attempt fails.
    FailsFirst,
}

/// Counts its runs.
#[derive(Clone, Debug)]
struct Withdraw {
    manner: Manner,
    runs: Arc<AtomicUsize>,
}

impl Withdraw {
    fn new(manner: Manner) -> Self {
        Self {
            manner,
            runs: Arc::default(),
        }
    }

    fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }
}

impl Handler for Withdraw {
    type Output = String;

    async fn handle(&self, _: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let run = self.runs.fetch_add(1, SeqCst) + 1;
        match self.manner {
            Manner::Hangs => std::future::pending().await,
            Manner::IsUnsure => Err(Failure::unknown("the bank did not answer")),
            Manner::FailsFirst if attempt.number() == 1 => Err("no funds yet".into()),
            _ => Ok(format!("run {run}")),
        }
    }
}

fn gate(bench: &Bench) -> Gate {
    bench
        .gate("runtime")
        .max_run(LEASE * 3)
        .after_unknown(AfterUnknown::GiveUp)
}

/// The message of `numbered(1)`, as another process has it.
fn first() -> Message {
    let payload = r#"{"id":0}"#;
    Message::new(
        "orders",
        Origin::Other("earlier".into()),
        Some(payload.into()),
    )
}

/// A process that dies with the first message.
async fn dies_with_it(bench: &Bench) {
    let gate = gate(bench).simulated(99);
    drop(gate.enter(&first()).await.expect("the store answers"));
}

/// The reason of the only dead letter.
fn one_letter(bench: &Bench) -> String {
    assert_eq!(bench.letters.causes(), ["outcome_unknown"]);
    bench.letters.reasons().remove(0)
}

// invariant: outcome-unknown
#[tokio::test(start_paused = true)]
async fn a_message_whose_process_died_is_given_up_and_told_as_it_is() {
    let bench = Bench::of(numbered(2));
    dies_with_it(&bench).await;
    let handler = Withdraw::new(Manner::Succeeds);
    let consumer = bench.consumer_behind(gate(&bench), handler.clone());
    bench.run(consumer, 2).await.unwrap();
    assert_eq!(handler.runs(), 1, "the other message alone");
    let reason = one_letter(&bench);
    assert!(
        reason.starts_with("outcome unknown: attempt 1 ended") && reason.contains("process"),
        "{reason}"
    );
    // What is given up runs no more, so it is no extra run.
    assert_eq!(bench.counters.total("extra_runs"), 0);
    assert_eq!(bench.counters.get("dead_letters", "outcome_unknown"), 1);

    // A later delivery runs nothing, either, and writes no second dead letter.
    bench.list.push("orders", "", r#"{"id":0}"#.to_owned());
    let consumer = bench.consumer_behind(gate(&bench).simulated(8), handler.clone());
    bench.run(consumer, 3).await.unwrap();
    assert_eq!((handler.runs(), bench.letters.causes().len()), (1, 1));
}

// invariant: outcome-unknown
#[tokio::test(start_paused = true)]
async fn a_handler_that_hangs_or_is_unsure_is_not_called_again() {
    for (manner, word) in [
        (Manner::Hangs, "cancelled"),
        (Manner::IsUnsure, "the bank did not answer"),
    ] {
        let bench = Bench::of(numbered(1));
        let handler = Withdraw::new(manner);
        let consumer = bench.consumer_behind(gate(&bench), handler.clone());
        bench.run(consumer, 1).await.unwrap();
        assert_eq!(handler.runs(), 1, "{manner:?}");
        let reason = one_letter(&bench);
        assert!(reason.contains(word), "{manner:?}: {reason}");
    }
}

// invariant: outcome-unknown
#[tokio::test(start_paused = true)]
async fn an_attempt_with_an_outcome_is_tried_again() {
    let bench = Bench::of(numbered(1));
    let handler = Withdraw::new(Manner::FailsFirst);
    let consumer = bench.consumer_behind(gate(&bench), handler.clone());
    bench.run(consumer, 1).await.unwrap();
    assert_eq!(handler.runs(), 2);
    assert_eq!(bench.letters.causes(), [""; 0]);
}

// invariant: outcome-unknown
#[tokio::test(start_paused = true)]
async fn two_dead_processes_lead_to_no_quarantine() {
    let bench = Bench::of(numbered(1));
    // Before the setting was changed, two processes have died with it.
    for seed in [98, 99] {
        let gate = bench.gate("runtime").simulated(seed);
        drop(gate.enter(&first()).await.unwrap());
        sleep(LEASE * 2).await;
    }
    let handler = Withdraw::new(Manner::Succeeds);
    let consumer = bench.consumer_behind(gate(&bench), handler.clone());
    bench.run(consumer, 1).await.unwrap();
    let reason = one_letter(&bench);
    assert!(reason.contains("attempt 2 ended"), "{reason}");
    assert_eq!(
        (handler.runs(), bench.counters.total("quarantined")),
        (0, 0)
    );
}

// invariant: outcome-unknown
#[tokio::test(start_paused = true)]
async fn work_of_another_process_is_not_granted_again() {
    let bench = Bench::of(numbered(1));
    let gate = gate(&bench).simulated(9);
    let terms = ClaimTerms {
        lease: LEASE,
        retention: Duration::from_secs(60),
        fingerprint: None,
        token: None,
        limit: AttemptLimit(10),
    };
    let granted = gate.claim(&first(), &terms).await.unwrap();
    assert!(
        matches!(granted, ClaimOutcome::Granted { .. }),
        "{granted:?}"
    );
    sleep(LEASE * 2).await;
    for _ in 0..2 {
        let undecided = gate.claim(&first(), &terms).await.unwrap();
        let is_given_up = matches!(
            &undecided,
            ClaimOutcome::GivenUp { reason } if reason.starts_with(OUTCOME_UNKNOWN)
        );
        assert!(is_given_up, "{undecided:?}");
    }
}

// invariant: operator-decides
#[tokio::test(start_paused = true)]
async fn duplicates_get_what_a_person_has_found_downstream() {
    let bench = Bench::of(numbered(1));
    dies_with_it(&bench).await;
    let handler = Withdraw::new(Manner::Succeeds);
    let consumer = bench.consumer_behind(gate(&bench), handler.clone());
    bench.run(consumer, 1).await.unwrap();
    one_letter(&bench);

    let [(key, _)] = &bench.store.records()[..] else {
        panic!("one record")
    };
    let seen = admin::read(&*bench.store, key).await.unwrap();
    let stored = oncegate::codec::ToStored::to_stored("paid", Default::default()).unwrap();
    let decision = Decision::with_result(stored);
    let decided = admin::decide(&*bench.store, key, seen.as_ref(), &decision).await;
    assert_eq!(decided.unwrap(), Decided::Done);
    let entered = gate(&bench).simulated(8).enter(&first()).await.unwrap();
    let oncegate::Entry::Completed(stored) = entered else {
        panic!("{entered:?}")
    };
    assert_eq!(stored.decode::<String>().unwrap(), "paid");
    assert_eq!(handler.runs(), 0);
}

// invariant: operator-decides
#[tokio::test(start_paused = true)]
async fn a_message_given_up_by_an_operator_keeps_that_reason() {
    let bench = Bench::of(numbered(1));
    // Its retry is due in an hour.
    let Ok(oncegate::Entry::Granted(lease)) = gate(&bench).simulated(9).enter(&first()).await
    else {
        panic!("it is new")
    };
    lease
        .release(Duration::from_secs(3_600), true, "ledger 7 is locked")
        .await;
    let [(key, _)] = &bench.store.records()[..] else {
        panic!("one record")
    };
    let seen = admin::read(&*bench.store, key).await.unwrap();
    let decision = Decision::give_up("skipped by ada");
    let decided = admin::decide(&*bench.store, key, seen.as_ref(), &decision).await;
    assert_eq!(decided.unwrap(), Decided::Done);
    let handler = Withdraw::new(Manner::Succeeds);
    let consumer = bench.consumer_behind(gate(&bench), handler.clone());
    bench.run(consumer, 1).await.unwrap();
    assert_eq!(handler.runs(), 0);
    assert_eq!(bench.letters.reasons(), ["skipped by ada"]);
}

#[tokio::test(start_paused = true)]
async fn failing_open_and_giving_up_exclude_each_other() {
    let bench = Bench::of(numbered(1));
    let consumer = bench
        .consumer_behind(gate(&bench), Withdraw::new(Manner::Succeeds))
        .fail_open_after(Duration::from_secs(1));
    let refused = bench.run(consumer, 1).await.unwrap_err();
    assert!(
        matches!(&refused, ConsumerError::Settings(why) if why.contains("after_unknown")),
        "{refused}"
    );
}
