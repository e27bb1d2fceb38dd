//! The history of batches, in whole rounds with one fault.

use futures_util::future::join_all;
use oncegate_core::key::Key;
use oncegate_runtime::{BatchHandler, BatchLimits, BatchMessage, Failure};
use serde_json::{Value, json};

use crate::fault::Fault;
use crate::history::{CallAnswer, Event, Outcome, What};
use crate::round::Downstream;
use crate::trial::{Trial, random_seed};

/// More rounds than it takes until a fault meets a batch of several messages.
const ROUNDS: u64 = 30;

struct Billing {
    bank: Downstream,
}

impl BatchHandler for Billing {
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        Ok(join_all(batch.iter().map(async |one| {
            let (order, key): (Value, _) = (
                one.message().json()?,
                one.attempt().idempotency_key("charge"),
            );
            let answer = self
                .bank
                .effect(&order)
                .idempotency_key(&key)
                .send()
                .await?;
            Ok(answer["receipt"].to_string())
        }))
        .await)
    }
}

/// The histories of rounds with this fault.
fn histories(fault: Fault) -> Vec<Vec<Event>> {
    let seed = random_seed();
    println!("seed {seed}");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let trial = Trial::in_batches(BatchLimits::new(4), |bank| Billing { bank })
        .key(Key::json(["order_id"]))
        .messages((1..=6).map(|id| json!({ "order_id": format!("o-{id:04}") })))
        .seed(seed)
        .faults([fault]);
    let (rounds, _) = trial.prepared().unwrap();

    (1..=ROUNDS)
        .map(|round| runtime.block_on(rounds.play(round)).unwrap().events)
        .collect()
}

/// The runs that began in a batch of several messages, with their processes.
fn runs_in_batches(history: &[Event]) -> impl Iterator<Item = (u64, Option<u32>)> {
    history.iter().filter_map(|event| match event.what {
        What::Began {
            run,
            batch: Some(2..),
            ..
        } => Some((run, event.process)),
        _ => None,
    })
}

/// Returns how a run ended, and checks that it ended once.
fn outcome_of(begun: u64, history: &[Event]) -> Outcome {
    let ends: Vec<Outcome> = history
        .iter()
        .filter_map(|event| match event.what {
            What::Ended { run, outcome, .. } if run == begun => Some(outcome),
            _ => None,
        })
        .collect();
    let [outcome] = ends[..] else {
        panic!("run {begun} ended {} times: {history:#?}", ends.len())
    };
    outcome
}

#[test]
fn each_message_of_a_batch_has_its_own_outcome() {
    let mut completed = 0;
    let mut failed = 0;
    for history in histories(Fault::Refused) {
        for (begun, _) in runs_in_batches(&history) {
            let call = history.iter().find_map(|event| match event.what {
                What::Called {
                    call,
                    run: Some(run),
                    ..
                } if run == begun => Some(call),
                _ => None,
            });
            let answer = history.iter().find_map(|event| match event.what {
                What::Returned { call: of, answer } if Some(of) == call => Some(answer),
                _ => None,
            });
            let expected = match answer {
                Some(CallAnswer::Answered) => Outcome::Completed,
                Some(CallAnswer::Refused) => Outcome::Failed,
                other => panic!("{other:?} in a round that only refuses: {history:#?}"),
            };
            assert_eq!(
                outcome_of(begun, &history),
                expected,
                "run {begun}: {history:#?}"
            );
            completed += u32::from(expected == Outcome::Completed);
            failed += u32::from(expected == Outcome::Failed);
        }
    }
    assert!(
        completed > failed && failed > 0,
        "{completed} completed and {failed} failed"
    );
}

#[test]
fn a_freeze_cancels_the_messages_of_a_batch() {
    let mut cancelled = 0;
    for history in histories(Fault::Freeze) {
        for (run, _) in runs_in_batches(&history) {
            let times = history
                .iter()
                .filter(|event| event.what == What::Cancelled { run })
                .count();
            assert!(times <= 1, "run {run}: {history:#?}");
            cancelled += times;
            outcome_of(run, &history);
        }
    }
    assert!(cancelled >= 2, "{cancelled} runs were cancelled");
}

#[test]
fn a_kill_drops_every_message_of_a_batch() {
    let mut dropped = 0;
    for history in histories(Fault::KillAfterEffect) {
        for (begun, process) in runs_in_batches(&history) {
            let killed = history
                .iter()
                .position(|event| event.what == What::Killed && event.process == process);
            let ended = history
                .iter()
                .position(|event| matches!(event.what, What::Ended { run, .. } if run == begun));
            let was_killed = killed.is_some() && ended > killed;
            assert_eq!(
                outcome_of(begun, &history) == Outcome::Dropped,
                was_killed,
                "run {begun}: {history:#?}"
            );
            dropped += u32::from(was_killed);
        }
    }
    assert!(dropped >= 2, "{dropped} runs were dropped");
}
