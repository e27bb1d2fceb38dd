//! Batch handlers with planted bugs, each of which a trial must find, and right ones, in which it
//! must find nothing.
//!
//! `ONCEGATE_SEEDS=n` runs the right handlers with so many seeds (8 by default), `ONCEGATE_SEED=n`
//! everything with this seed.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{join_all, try_join_all};
use futures_util::stream::FuturesUnordered;
use oncegate::{BatchHandler, BatchLimits, BatchMessage, Failure, Key};
use oncegate_testing::{Defect, Downstream, Fault, Trial, Verdict};
use serde_json::{Value, json};

/// The way in which a handler does its work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Right,
    OneAfterTheOther,
    StopsAtAFailure,
    WholeBatchAgainWithKeys,
    WholeBatchAgainWithoutKeys,
    OneKeyForTheBatch,
    FirstOutcomeForAll,
    OutcomesInOrderOfCompletion,
    IgnoresAMessage,
}

const RIGHT: [Way; 4] = [
    Way::Right,
    Way::OneAfterTheOther,
    Way::StopsAtAFailure,
    Way::WholeBatchAgainWithKeys,
];

struct Billing {
    way: Way,
    bank: Downstream,
}

type Charged = Result<String, Failure>;

impl Billing {
    async fn charge_under(&self, one: &BatchMessage, key: Option<&str>) -> Charged {
        let order: Value = one.message().json()?;
        let body = json!({ "order": order["order_id"], "amount": order["amount"], "currency": order["currency"] });
        let request = self.bank.effect(&body);
        let answer = match key {
            Some(key) => request.idempotency_key(key).send().await?,
            None => request.send().await?,
        };
        Ok(answer["receipt"].to_string())
    }

    async fn charge(&self, one: &BatchMessage) -> Charged {
        self.charge_under(one, Some(&one.attempt().idempotency_key("charge")))
            .await
    }

    async fn until_a_failure(&self, batch: &[BatchMessage]) -> Vec<Charged> {
        let mut outcomes: Vec<Charged> = Vec::new();
        for one in batch {
            outcomes.push(match outcomes.last() {
                Some(Err(_)) => Err(Failure::not_run("a message before it has failed")),
                _ => self.charge(one).await,
            });
        }
        outcomes
    }
}

impl BatchHandler for Billing {
    type Output = String;

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Charged>, Failure> {
        let all = join_all(batch.iter().map(|one| self.charge(one)));
        match self.way {
            Way::Right => Ok(all.await),
            Way::OneAfterTheOther => {
                let mut outcomes = Vec::new();
                for one in batch {
                    outcomes.push(self.charge(one).await);
                }
                Ok(outcomes)
            }
            Way::StopsAtAFailure => Ok(self.until_a_failure(batch).await),
            Way::WholeBatchAgainWithKeys => {
                Ok(try_join_all(batch.iter().map(|one| self.charge(one)))
                    .await?
                    .into_iter()
                    .map(Ok)
                    .collect())
            }
            Way::WholeBatchAgainWithoutKeys => {
                let receipts =
                    try_join_all(batch.iter().map(|one| self.charge_under(one, None))).await?;
                Ok(receipts.into_iter().map(Ok).collect())
            }
            Way::OneKeyForTheBatch => {
                let key = batch
                    .first()
                    .map(|one| one.attempt().idempotency_key("charge"));
                Ok(join_all(
                    batch
                        .iter()
                        .map(|one| self.charge_under(one, key.as_deref())),
                )
                .await)
            }
            Way::FirstOutcomeForAll => match all.await.into_iter().next() {
                Some(Ok(receipt)) => Ok(batch.iter().map(|_| Ok(receipt.clone())).collect()),
                _ => Err(Failure::retry("the first charge of the batch failed")),
            },
            Way::OutcomesInOrderOfCompletion => {
                let charges: FuturesUnordered<_> =
                    batch.iter().map(|one| self.charge(one)).collect();
                Ok(charges.collect().await)
            }
            Way::IgnoresAMessage => {
                let most = batch.len().div_ceil(2);
                let some = join_all(batch.iter().take(most).map(|one| self.charge(one))).await;
                let rest = batch.iter().skip(most).map(|_| Ok("later".to_owned()));
                Ok(some.into_iter().chain(rest).collect())
            }
        }
    }
}

fn samples() -> impl Iterator<Item = Value> {
    (1..=7).map(|id| json!({ "order_id": format!("o-{id:04}"), "amount": 10.5, "currency": "EUR", "sent_at": format!("10:{id:02}") }))
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} must be a number"))
    })
}

/// Runs a trial on paused time.
fn tried(way: Way, seed: u64, faults: &[Fault]) -> Verdict {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let limits = BatchLimits::new(4).wait(Duration::from_millis(20));
    let trial = Trial::in_batches(limits, move |bank| Billing { way, bank })
        .key(Key::json(["order_id"]))
        .messages(samples())
        .volatile(["sent_at"])
        .seed(seed)
        .faults(faults.iter().copied());
    runtime
        .block_on(trial.run())
        .unwrap_or_else(|error| panic!("seed {seed}: {error}"))
}

#[track_caller]
fn finds(way: Way, expected: &[Defect]) {
    let seed = number("ONCEGATE_SEED").unwrap_or_else(oncegate_testing::random_seed);
    println!("seed {seed}");
    let verdict = tried(way, seed, &Fault::ALL);
    let found = verdict.defects();
    let named = expected.iter().any(|defect| found.contains(defect));
    assert!(
        named,
        "seed {seed}: {way:?} must show one of {expected:?}, and showed\n{verdict}"
    );
}

// invariant: planted-bugs-found
#[test]
fn one_downstream_key_for_a_batch_is_found() {
    finds(Way::OneKeyForTheBatch, &[Defect::SharedDownstreamKey]);
}

// invariant: planted-bugs-found
#[test]
fn an_outcome_of_one_message_for_all_of_its_batch_is_found() {
    finds(Way::FirstOutcomeForAll, &[Defect::SwallowedError]);
}

// invariant: planted-bugs-found
#[test]
fn outcomes_in_the_order_of_completion_are_found() {
    finds(
        Way::OutcomesInOrderOfCompletion,
        &[Defect::SwallowedError, Defect::DifferentResults],
    );
}

// invariant: planted-bugs-found
#[test]
fn a_batch_that_is_repeated_without_keys_is_found() {
    finds(Way::WholeBatchAgainWithoutKeys, &[Defect::NoDownstreamKey]);
}

// invariant: planted-bugs-found
#[test]
fn a_message_of_a_batch_without_its_effect_is_found() {
    finds(
        Way::IgnoresAMessage,
        &[
            Defect::LostEffect,
            Defect::MarkedBeforeEffect,
            Defect::AnsweredTooEarly,
        ],
    );
}

// invariant: right-handlers-clean
#[test]
fn nothing_is_found_in_right_batch_handlers() {
    let (first, seeds) = match number("ONCEGATE_SEED") {
        Some(seed) => (seed, 1),
        None => (
            fastrand::u64(..u64::MAX / 2),
            number("ONCEGATE_TRIALS").unwrap_or(3),
        ),
    };
    println!("seeds {first} to {}", first + seeds);
    let mut faults = std::collections::BTreeSet::new();
    for seed in first..first + seeds {
        for way in RIGHT {
            let verdict = tried(way, seed, &Fault::ALL);
            let shown = verdict
                .findings
                .iter()
                .map(|finding| format!("{finding:#?}"))
                .collect::<String>();
            assert!(
                verdict.is_clean(),
                "seed {seed}: {way:?}\n{verdict}\n{shown}"
            );
            assert_eq!(verdict.unassigned, 0, "seed {seed}: {way:?}");
            faults.extend(verdict.faults.into_keys());
        }
    }
    // A trial that did not meet its faults proves nothing about them.
    assert_eq!(faults.len(), Fault::ALL.len());
}
