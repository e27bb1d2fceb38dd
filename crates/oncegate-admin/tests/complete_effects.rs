//! Records that are completed by the list of their effects.

// invariant (all tests): complete-effects

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use oncegate::admin::complete::{CompleteEffects, CompletionReport};
use oncegate::core::store::Store;
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Completion, Entry, Gate, Key, Lease, MemoryStore, Message, Origin};
use tokio::time::{advance, sleep};

const LEASE: Duration = Duration::from_secs(1);

fn key() -> Key {
    Key::json(["id"])
}

fn message(id: u64, offset: i64) -> Message {
    let origin = Origin::Kafka {
        topic: "orders".into(),
        partition: 0,
        offset,
    };
    Message::new("orders", origin, Some(format!(r#"{{"id":{id}}}"#).into()))
}

fn gate(store: impl Store + 'static) -> Gate {
    Gate::new("billing", key(), store).lease(LEASE)
}

async fn claim(gate: &Gate, id: u64) -> Lease {
    match gate.enter(&message(id, 0)).await.unwrap() {
        Entry::Granted(lease) => lease,
        other => panic!("{id}: {other:?}"),
    }
}

/// The idempotency keys of these messages: what the bank has of them.
async fn effects(ids: impl IntoIterator<Item = u64>) -> Vec<String> {
    let gate = gate(MemoryStore::new());
    let mut keys = Vec::new();
    for id in ids {
        keys.push(claim(&gate, id).await.attempt().idempotency_key("charge"));
    }
    keys
}

fn completing(store: impl Store + 'static) -> CompleteEffects {
    CompleteEffects::new("billing", key(), store).step("charge")
}

async fn run(
    completing: CompleteEffects,
    effects: &[String],
    messages: Vec<Message>,
) -> CompletionReport {
    let effects = effects.iter().map(String::as_str);
    let mut open = completing.open(effects).await.unwrap();
    open.add(messages).await.unwrap();
    open.finish().await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_replay_runs_what_has_no_effect_and_nothing_else() {
    const ORDERS: u64 = 5_000;
    let happened: BTreeSet<u64> = (0..ORDERS).filter(|id| id % 3 != 0).collect();
    let effects = effects(happened.iter().copied()).await;
    let store = Arc::new(MemoryStore::new());
    // Each order comes twice.
    let window: Vec<Message> = (0..ORDERS * 2)
        .map(|n| message(n % ORDERS, i64::try_from(n).unwrap()))
        .collect();
    let dry = run(
        completing(Arc::clone(&store)).dry_run(),
        &effects,
        window.clone(),
    )
    .await;
    assert_eq!(store.records().len(), 0, "a dry run writes nothing");
    let done = run(completing(Arc::clone(&store)), &effects, window.clone()).await;
    assert_eq!(dry, done, "the dry run told it");
    let wanted = CompletionReport {
        messages: ORDERS * 2,
        effects: happened.len() as u64,
        completed: happened.len() as u64,
        repeated: happened.len() as u64,
        without_effect: (ORDERS - happened.len() as u64) * 2,
        ..CompletionReport::default()
    };
    assert_eq!(done, wanted);
    let gate = gate(Arc::clone(&store));
    for id in 0..ORDERS {
        let runs = match gate.enter(&message(id, 0)).await.unwrap() {
            Entry::Granted(lease) => {
                assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
                true
            }
            Entry::Completed(_) => false,
            other => panic!("{id}: {other:?}"),
        };
        assert_eq!(runs, !happened.contains(&id), "{id}");
    }
    // Started again, as after an interrupt, it finds everything done.
    let again = run(completing(Arc::clone(&store)), &effects, window).await;
    assert_eq!(
        (again.completed, again.completed_before),
        (0, happened.len() as u64)
    );
}

#[tokio::test(start_paused = true)]
async fn each_state_of_a_record_is_treated_as_an_operator_would() {
    // The store's time begins with zero, and "due at once" is a millisecond before now.
    advance(Duration::from_millis(10)).await;
    let store = Arc::new(MemoryStore::new());
    let gate = gate(Arc::clone(&store));
    // 1 has failed, 2 waits for an hour, 3 was abandoned, 4 is completed, 5 runs, 6 has no record.
    let failed = claim(&gate, 1).await.fail("outcome unknown").await;
    assert_eq!(failed, Completion::Applied);
    let waits = claim(&gate, 2).await;
    waits
        .release(Duration::from_secs(3_600), true, "later")
        .await;
    drop(claim(&gate, 3).await);
    let completed = claim(&gate, 4).await.complete(&()).await;
    assert_eq!(completed.unwrap(), Completion::Applied);
    sleep(LEASE * 2).await;
    let runs = claim(&gate, 5).await;
    let bank = effects(1..=6).await;
    // One line twice, one of another system, and one that is no key at all.
    let mut list = bank.clone();
    list.extend([bank.first().unwrap().clone(), "n/a".to_owned()]);
    list.extend(effects([77]).await);
    let mut window: Vec<Message> = (1..=8).map(|id| message(id, 0)).collect();
    let origin = Origin::Other("bad".into());
    window.push(Message::new("orders", origin, Some("{".into())));
    let report = run(completing(Arc::clone(&store)), &list, window).await;
    let wanted = CompletionReport {
        messages: 9,
        effects: 9,
        completed: 4,
        of_records: 3,
        completed_before: 1,
        running: 1,
        without_effect: 2,
        without_key: 1,
        unexplained: 2,
        examples: vec!["orders/0@0".to_owned()],
        ..CompletionReport::default()
    };
    assert_eq!(report, wanted);
    for id in [1, 2, 3, 4, 6] {
        let entered = gate.enter(&message(id, 0)).await.unwrap();
        assert!(matches!(entered, Entry::Completed(_)), "{id}: {entered:?}");
    }
    assert_eq!(runs.complete(&()).await.unwrap(), Completion::Applied);
}

#[tokio::test(start_paused = true)]
async fn answers_that_are_lost_cost_nothing() {
    for seed in 0..10 {
        let store = Arc::new(MemoryStore::new());
        let faults = Faults {
            unavailable: 0.2,
            reply_lost: 0.3,
            request_lost: 0.1,
            ..Faults::default()
        };
        let faulty = FaultStore::new(Arc::clone(&store) as Arc<dyn Store>, faults, seed);
        let faulty = Arc::new(faulty);
        let effects = effects(0..50).await;
        let effects = effects.iter().map(String::as_str);
        let opened = loop {
            let completing = completing(Arc::clone(&faulty) as Arc<dyn Store>);
            if let Ok(opened) = completing.open(effects.clone()).await {
                break opened;
            }
        };
        let mut opened = opened;
        let window = (0..100).map(|id| message(id, 0)).collect();
        // Too many faults in a row end it, and the same command continues.
        if opened.add(window).await.is_ok()
            && let Ok(report) = opened.finish().await
        {
            let known = report.completed + report.completed_before;
            assert_eq!(known, 50, "seed {seed}: {report:?}");
        }
        let gate = gate(Arc::clone(&store));
        for id in 50..100 {
            let entered = gate.enter(&message(id, 0)).await.unwrap();
            assert!(matches!(entered, Entry::Granted(_)), "seed {seed}, {id}");
        }
    }
}
