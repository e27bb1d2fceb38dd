//! Batches in one transaction: all effects and completions are one commit, and a bad payment costs
//! its neighbours nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate::Consumer;
use oncegate::core::rules::Verdict;
use oncegate_testkit::Client;

use crate::list::{List, Listed};
use crate::pay_all::{Bad, POISON, PayAll};
use crate::place::{Bench, LEASE, Place, key_of};
use crate::transactional::GIVEN;
use crate::transactional_rules::{STATES, check_completed, prepare, verdict_of};

/// How long a handler may take before it counts as one that hangs, in seconds. On a busy machine,
/// one that does not hang may take longer: then it is tried with the next.
const HANG_LIMITS: [u64; 4] = [1, 4, 16, 64];

/// The payments of most tests, and how many fit into a batch: all.
const PAYMENTS: usize = 20;

fn payments() -> Vec<i64> {
    (1..).take(PAYMENTS).collect()
}

// invariant: second-committed-effect
#[tokio::test(flavor = "multi_thread")]
async fn the_effects_and_records_of_a_batch_are_one_unclaimed_commit() {
    for client in GIVEN {
        let place = Place::journaled(client).await;
        let twice = [payments(), payments()].concat();
        let bench = Bench::of(&twice);
        let pay = PayAll::new(&place, Bad::No);
        let handler = place.batched(PAYMENTS, pay.clone()).await;
        bench.run(place.gate(LEASE), handler, PAYMENTS * 2).await;
        let once: BTreeMap<i64, Vec<i32>> =
            payments().into_iter().map(|id| (id, vec![1])).collect();
        assert_eq!(place.till.charges().await, once, "{client}");
        assert_eq!(*pay.calls.lock().unwrap(), [payments()], "{client}");
        assert_eq!(
            *pay.told.lock().unwrap(),
            ["receipt of attempt 1"; PAYMENTS],
            "{client}"
        );
        assert_eq!(
            bench.counters.get("handler_runs", "succeeded"),
            PAYMENTS as u64,
            "{client}"
        );
        assert_eq!(
            bench.counters.total("completions"),
            PAYMENTS as u64,
            "{client}"
        );
        assert_eq!(bench.counters.get("batch_calls", "gathered"), 1, "{client}");
        for id in payments() {
            // No claim was committed before: the journal, which triggers write, has one entry.
            let entries = place.history(&key_of(&place.scope, id)).await;
            let events: Vec<_> = entries.iter().map(|entry| &*entry.event).collect();
            assert_eq!(events, ["completed"], "{client}, {id}");
        }
        if client != Client::Sqlite {
            // The server numbers its transactions. With a result, a record is written twice, by the
            // same one.
            let writers = format!(
                "SELECT count(DISTINCT xmin::text) FROM (SELECT xmin FROM {} UNION ALL \
                 SELECT xmin FROM oncegate_records WHERE key LIKE '{}%') AS rows",
                place.till.table, place.scope
            );
            let row = place
                .postgres_client()
                .await
                .query_one(&writers, &[])
                .await
                .unwrap();
            assert_eq!(row.get::<_, i64>(0), 1, "{client}");
        }
    }
}

// invariant: batch-neighbours
#[tokio::test(flavor = "multi_thread")]
async fn a_bad_payment_uses_its_own_attempts_and_costs_no_neighbour() {
    let ends = [
        (Bad::FailsStatement, "attempts_used_up"),
        (Bad::FailsBatch, "permanent"),
        (Bad::Panics, "attempts_used_up"),
        (Bad::Hangs, "attempts_used_up"),
        (Bad::EndsTransaction, "attempts_used_up"),
        (Bad::Miscounted, "attempts_used_up"),
        (Bad::GivenUp, "permanent"),
    ];
    for client in GIVEN {
        for (bad, cause) in ends {
            let what = format!("{client}, {bad:?}");
            let mut hang_limits = HANG_LIMITS.into_iter().map(Duration::from_secs);
            let (place, bench, pay) = loop {
                let place = Place::patient(client).await;
                let bench = Bench::of(&payments());
                let pay = PayAll::new(&place, bad);
                let mut handler = place.batched(PAYMENTS, pay.clone()).await;
                if bad == Bad::Hangs {
                    handler = handler.limit(hang_limits.next().expect("good payments hang"));
                }
                bench.run(place.gate(LEASE), handler, PAYMENTS).await;
                if bad != Bad::Hangs || pay.are_good_ones_returned() {
                    break (place, bench, pay);
                }
            };
            let neighbours = payments().into_iter().filter(|id| *id != POISON);
            let once: BTreeMap<i64, Vec<i32>> = neighbours.map(|id| (id, vec![1])).collect();
            assert_eq!(place.till.charges().await, once, "{what}");
            assert_eq!(bench.letters.causes(), [cause], "{what}");
            let retries = if cause == "permanent" {
                0
            } else {
                u64::from(Bench::MAX_ATTEMPTS) - 1
            };
            assert_eq!(bench.counters.total("retries"), retries, "{what}");
            let calls = pay.calls.lock().unwrap().clone();
            let errors = bench.counters.total("store_errors");
            assert_eq!(
                calls[0],
                payments(),
                "{what}, {errors} errors of the store: {calls:?}"
            );
            if bad == Bad::GivenUp {
                // The handler has told which one it is: nothing is searched.
                let others: Vec<i64> = payments().into_iter().filter(|id| *id != POISON).collect();
                assert_eq!(calls[1..], [others], "{what}");
            }
            // Two halves for each halving, and the attempts of the bad one alone.
            assert!(
                calls.len() <= 1 + 2 * 5 + Bench::MAX_ATTEMPTS as usize,
                "{what}: {calls:?}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payment_that_failed_in_its_batch_retries_alone_and_claimed() {
    for client in GIVEN {
        let place = Place::journaled(client).await;
        let bench = Bench::of(&payments());
        let pay = PayAll::new(&place, Bad::FailsTwice);
        let handler = place.batched(PAYMENTS, pay.clone()).await;
        bench.run(place.gate(LEASE), handler, PAYMENTS).await;
        let charges = place.till.charges().await;
        let attempt = |id: i64| if id == POISON { 3 } else { 1 };
        let expected: BTreeMap<i64, Vec<i32>> = payments()
            .into_iter()
            .map(|id| (id, vec![attempt(id)]))
            .collect();
        assert_eq!(charges, expected, "{client}");
        let entries = place.history(&key_of(&place.scope, POISON)).await;
        let events: Vec<_> = entries
            .iter()
            .map(|entry| (&*entry.event, entry.attempt))
            .collect();
        let [first, second, third] = [1, 2, 3].map(Some);
        let expected = [
            ("claimed", first),
            ("released", first),
            ("claimed", second),
            ("released", second),
            ("claimed", third),
            ("completed", third),
        ];
        assert_eq!(events, expected, "{client}");
        let others: Vec<i64> = payments().into_iter().filter(|id| *id != POISON).collect();
        // The failed one is tried again while the transaction of the others may not have begun.
        let mut calls = pay.calls.lock().unwrap().clone();
        calls.sort_by_key(|call| std::cmp::Reverse(call.len()));
        assert_eq!(
            calls,
            [payments(), others, vec![POISON], vec![POISON]],
            "{client}"
        );
    }
}

/// The rules say whether a claim would be granted, and as which attempt; a batch must do the same
/// with each of its keys.
// invariant: transactional-beside-another
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_treats_each_record_as_the_rules_say() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    for client in GIVEN {
        let place = Place::new(client).await;
        let mut verdicts = Vec::new();
        for id in payments() {
            // Each state, and then any.
            let state = usize::try_from(id - 1).unwrap();
            let state = STATES
                .get(state)
                .unwrap_or_else(|| &STATES[rng.usize(..STATES.len())]);
            prepare(&place, id, state).await;
            verdicts.push((id, *state, verdict_of(&place, id).await));
        }
        let bench = Bench::of(&payments());
        let pay = PayAll::new(&place, Bad::No);
        let handler = place.batched(PAYMENTS, pay.clone()).await;
        bench.run(place.gate(LEASE), handler, PAYMENTS).await;
        let charges = place.till.charges().await;
        let mut charged = 0;
        let mut completed = 0;
        let mut failed = 0;
        for (id, state, verdict) in verdicts {
            let what = format!("seed {seed}, {client}, {id}, {state}");
            match verdict {
                Verdict::Granted(grant) => {
                    assert_eq!(charges[&id], [i32::from(grant.attempt)], "{what}");
                    check_completed(&place, id, grant.attempt, &what).await;
                    charged += 1;
                }
                Verdict::Completed { .. } => completed += 1,
                Verdict::Failed { .. } => failed += 1,
                other => panic!("{what}: {other:?}"),
            }
        }
        assert_eq!(charges.len(), charged, "seed {seed}, {client}");
        assert_eq!(
            *pay.told.lock().unwrap(),
            vec!["receipt of before"; completed],
            "seed {seed}, {client}"
        );
        assert_eq!(
            bench.letters.causes(),
            vec!["not_handed_over"; failed],
            "seed {seed}, {client}"
        );
        assert!(charged > 0 && completed > 0 && failed > 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fenced_gate_is_refused_because_its_keys_must_be_claimed() {
    let place = Place::new(Client::Sqlite).await;
    let handler = place.batched(PAYMENTS, PayAll::new(&place, Bad::No)).await;
    let list = List::of("payments", [("", r#"{"id":1}"#.to_owned())]);
    let consumer = Consumer::new(Listed(list), place.gate(LEASE).fenced(), handler);
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("Gate::fenced") && error.contains("Transactional::new"),
        "{error}"
    );
}

/// The messages are older than records are kept, so that each may have run before.
// invariant: extra-run-once
#[tokio::test(flavor = "multi_thread")]
async fn an_extra_run_is_counted_once_over_all_rollbacks() {
    for client in GIVEN {
        for bad in [Bad::GivenUp, Bad::FailsStatement] {
            let place = Place::new(client).await;
            let bench = Bench::of(&[]);
            let pay = PayAll::new(&place, bad);
            payments()
                .iter()
                .for_each(|id| bench.list.push_old("payments", format!(r#"{{"id":{id}}}"#)));
            bench
                .run(
                    place.gate(LEASE),
                    place.batched(PAYMENTS, pay.clone()).await,
                    PAYMENTS,
                )
                .await;
            let what = format!("{client}, {bad:?}");
            assert_eq!(place.till.charges().await.len(), PAYMENTS - 1, "{what}");
            assert!(
                pay.calls.lock().unwrap().len() > 1,
                "{what}: nothing was rolled back"
            );
            assert_eq!(
                bench.counters.get("extra_runs", "retention"),
                PAYMENTS as u64,
                "{what}"
            );
        }
    }
}
