//! Handlers whose effects are rows of a table, which a witness lists. `ONCEGATE_SEED=n` repeats a
//! run.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::{Attempt, BoxError, Failure, Handler, Key, Message};
use oncegate_testing::{Defect, Downstream, Trial, TrialError, Verdict, Witness};
use serde_json::{Value, json};

/// The way in which a handler does its work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Right,
    WithoutUniqueKey,
    ChecksThenWrites,
    LeavesTheIdOut,
}

/// Rows, each with the key that makes it unique.
type Table = Vec<(String, Value)>;

/// The tables of all rounds.
#[derive(Clone, Default)]
struct Tables(Arc<Mutex<BTreeMap<String, Table>>>);

#[async_trait]
impl Witness for Tables {
    async fn effects(&self, round: &str) -> Result<Vec<Value>, BoxError> {
        let rows = self
            .0
            .lock()
            .unwrap()
            .get(round)
            .cloned()
            .unwrap_or_default();
        Ok(rows.into_iter().map(|(_, row)| row).collect())
    }

    fn is_shared(&self) -> bool {
        false
    }
}

impl Tables {
    fn has(&self, round: &str, row: &Value) -> bool {
        let tables = self.0.lock().unwrap();
        tables
            .get(round)
            .is_some_and(|table| table.iter().any(|(_, known)| known == row))
    }

    fn insert(&self, round: &str, key: &str, row: Value, is_unique: bool) {
        let mut tables = self.0.lock().unwrap();
        let table = tables.entry(round.to_owned()).or_default();
        if !is_unique || table.iter().all(|(known, _)| known != key) {
            table.push((key.to_owned(), row));
        }
    }
}

struct Ledger {
    way: Way,
    tables: Tables,
    round: String,
}

impl Handler for Ledger {
    type Output = ();

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        let order: Value = message.json()?;
        let id = order["order_id"]
            .as_str()
            .ok_or_else(|| Failure::permanent("no id"))?
            .to_owned();
        let key = attempt.idempotency_key("row");
        let row = match self.way {
            Way::LeavesTheIdOut => json!({ "currency": order["currency"] }),
            _ => json!({ "order": id }),
        };
        if self.way == Way::ChecksThenWrites {
            let is_there = self.tables.has(&self.round, &row);
            tokio::time::sleep(Duration::from_millis(150)).await;
            if !is_there {
                self.tables.insert(&self.round, &key, row, false);
            }
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.tables
            .insert(&self.round, &key, row, self.way != Way::WithoutUniqueKey);
        tokio::time::sleep(Duration::from_millis(20)).await;
        Ok(())
    }
}

fn tried(way: Way, seed: u64) -> Result<Verdict, TrialError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let tables = Tables::default();
    let of_handlers = tables.clone();
    let trial = Trial::new(move |bank: Downstream| Ledger {
        way,
        tables: of_handlers.clone(),
        round: bank.round().to_owned(),
    })
    .key(Key::json(["order_id"]))
    .messages((1..=5).map(|id| json!({ "order_id": format!("o-{id:04}"), "currency": "EUR" })))
    .witness(tables);
    runtime.block_on(trial.seed(seed).run())
}

fn seed() -> u64 {
    let given = std::env::var("ONCEGATE_SEED")
        .ok()
        .map(|seed| seed.parse().unwrap());
    let seed = given.unwrap_or_else(oncegate_testing::random_seed);
    println!("seed {seed}");
    seed
}

// invariant: right-handlers-clean
#[test]
fn nothing_is_found_in_a_right_handler_with_a_table() {
    let first = seed() / 2;
    for seed in first..first + 4 {
        let verdict = tried(Way::Right, seed).unwrap();
        assert!(
            verdict.is_clean(),
            "seed {seed}: {verdict}\n{:#?}",
            verdict.findings
        );
        assert_eq!(verdict.unassigned, 0, "seed {seed}");
        // Faults that other trials begin with a call begin with a run here.
        for fault in [
            "kill-after-effect",
            "freeze",
            "two-consumers",
            "store-outage",
            "rebalance",
        ] {
            assert!(
                verdict.faults.contains_key(&fault.parse().unwrap()),
                "seed {seed}: no {fault}"
            );
        }
    }
}

// invariant: planted-bugs-found
#[test]
fn a_table_without_a_unique_key_is_found() {
    let seed = seed();
    let verdict = tried(Way::WithoutUniqueKey, seed).unwrap();
    assert!(
        verdict.defects().contains(&Defect::RepeatedEffect),
        "seed {seed}: {verdict}"
    );
}

// invariant: planted-bugs-found
#[test]
fn a_look_before_the_write_is_found() {
    for seed in (0..10).map(|n| seed() / 2 + n) {
        let verdict = tried(Way::ChecksThenWrites, seed).unwrap();
        assert!(
            verdict.defects().contains(&Defect::RepeatedEffect),
            "seed {seed}: {verdict}"
        );
    }
}

#[test]
fn effects_that_fit_several_samples_are_refused() {
    let error = tried(Way::LeavesTheIdOut, seed()).unwrap_err();
    let cause = std::error::Error::source(&error)
        .map(ToString::to_string)
        .unwrap_or_default();
    assert!(cause.contains("fits samples 1 and 2"), "{error}: {cause}");
}
