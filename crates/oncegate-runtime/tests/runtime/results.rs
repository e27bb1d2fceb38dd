//! Results that are too large for a record, and a result store that fails.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::core::record::State;
use oncegate::{Completion, Entry, Message, Origin};
use tokio::time::Instant;

use super::LEASE;

mod scene;

use scene::{Flaky, Scene, Shared, expected};

// invariant: result-not-stored
#[tokio::test(start_paused = true)]
async fn a_large_result_goes_to_the_result_store_and_comes_back() {
    let scene = Scene::of(&[1, 2, 1], Flaky::default());
    scene.run(3, 0).await;
    assert_eq!(scene.duplicates(), [Ok(expected(1))]);
    assert_eq!(scene.results.results().len(), 2, "one object a run");
    for (_, record) in scene.bench.store.records() {
        let State::Completed { result, .. } = record.state else {
            panic!("it is completed")
        };
        assert!(
            result.len() < 120,
            "the record keeps a reference of {} bytes",
            result.len()
        );
        let (name, object) = scene
            .results
            .results()
            .into_iter()
            .find(|(name, _)| result.ends_with(name.as_bytes()))
            .unwrap();
        assert!(name.starts_with("runtime/"), "{name}");
        assert_eq!(result[1..33], *blake3::hash(&object).as_bytes());
    }
    assert_eq!(scene.count("results_not_kept", ""), 0);
}

#[tokio::test(start_paused = true)]
async fn a_failing_result_store_gets_the_result_under_heartbeats() {
    let scene = Scene::of(&[1], Flaky::default());
    scene.run(1, 8).await;
    assert_eq!(scene.count("result_store_errors", "put"), 8);
    assert_eq!(
        scene.count("results_not_kept", "") + scene.count("extra_runs", "lease_lost"),
        0
    );
    scene.again(1);
    scene.run(1, 0).await;
    assert_eq!(scene.duplicates(), [Ok(expected(1))]);
}

// invariant: result-store-decides
#[tokio::test(start_paused = true)]
async fn a_result_store_that_is_down_costs_only_the_result() {
    for hangs in [false, true] {
        let scene = Scene::of(
            &[1],
            Flaky {
                hangs,
                ..Flaky::default()
            },
        );
        let begun = Instant::now();
        scene.run(1, u32::MAX).await;
        let took = begun.elapsed();
        assert!(
            took > 10 * LEASE && took < Duration::from_secs(60),
            "{took:?} is bounded, and outlasts leases"
        );
        assert_eq!(scene.count("results_not_kept", ""), 1, "hangs: {hangs}");
        assert_eq!(scene.count("extra_runs", "lease_lost"), 0, "hangs: {hangs}");
        scene.again(1);
        scene.run(1, 0).await;
        assert_eq!(scene.report.runs.load(SeqCst), 1, "the work is done");
        assert_eq!(scene.bench.letters.causes(), Vec::<&str>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_waits_for_a_result_store_that_does_not_answer() {
    let scene = Scene::of(&[1], Flaky::default());
    scene.run(1, 0).await;
    scene.again(1);
    let begun = Instant::now();
    scene.run(1, 5).await;
    assert!(
        begun.elapsed() >= Duration::from_secs(8),
        "it is not asked without a pause"
    );
    assert_eq!(scene.count("result_store_errors", "get"), 5);
    assert_eq!(scene.duplicates(), [Ok(expected(1))]);
    assert_eq!(scene.report.runs.load(SeqCst), 1);
}

// invariant: result-store-decides
#[tokio::test(start_paused = true)]
async fn a_lost_or_damaged_result_goes_to_the_raw_hook_and_is_acked() {
    type Damage = fn(&Flaky);
    let damages: [(&str, Damage); 4] = [
        ("not in the result store", |results| {
            results.objects.lock().unwrap().clear();
        }),
        ("damaged", |results| results.change(|bytes| bytes[500] ^= 1)),
        ("damaged", |results| {
            results.change(|bytes| bytes.truncate(500));
        }),
        ("not in the result store", |results| {
            results.change(|bytes| bytes.push(0));
        }),
    ];
    for (says, damage) in damages {
        let scene = Scene::of(&[1], Flaky::default());
        scene.run(1, 0).await;
        damage(&scene.results);
        scene.again(1);
        scene.run(1, 0).await;
        let told = scene.duplicates();
        assert!(
            matches!(&told[..], [Err(error)] if error.contains(says)),
            "{told:?} has not `{says}`"
        );
        assert_eq!(scene.count("results_lost", ""), 1);
        assert_eq!(scene.report.runs.load(SeqCst), 1, "never a second run");
        assert_eq!(
            scene.bench.letters.causes(),
            Vec::<&str>::new(),
            "never a dead letter"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_looks_ahead_fetches_the_results() {
    let ids: Vec<u64> = (0..40).collect();
    let scene = Scene::of(&ids, Flaky::default());
    scene.run(40, 0).await;
    // The first ones show that it is a replay, and the later ones are looked up ahead.
    const ROUNDS: usize = 20;
    for _ in 0..ROUNDS {
        ids.iter().for_each(|id| scene.again(*id));
    }
    scene.results.spares.store(700, SeqCst);
    scene.run(ROUNDS * 40, 10).await;
    assert_eq!(scene.count("result_store_errors", "get"), 10);
    assert_eq!(
        scene.duplicates().len(),
        ROUNDS * 40,
        "none is lost whose result could not be had at once"
    );
    let mut told = scene.duplicates();
    told.sort();
    told.dedup();
    assert_eq!(told.len(), 40);
    assert!(told.iter().all(Result::is_ok), "{told:?}");
    assert_eq!(scene.report.runs.load(SeqCst), 40);
}

/// Runs messages with a result store that fails by chance, and returns how often it failed a put, a
/// get, and for good.
async fn survives_chaos(seed: u64) -> [u64; 3] {
    const IDS: u64 = 12;
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut ids: Vec<u64> = (0..IDS)
        .chain((0..3 * IDS).map(|_| rng.u64(..IDS)))
        .collect();
    rng.shuffle(&mut ids);
    let concurrency = rng.u32(1..8);
    let scene = Scene::of(
        &ids,
        Flaky {
            chaos: Mutex::new(Some(rng)),
            ..Flaky::default()
        },
    );
    let consumer = scene
        .bench
        .consumer_behind(scene.gate(), Shared(Arc::clone(&scene.report)));
    scene
        .bench
        .run(consumer.concurrency(concurrency), ids.len())
        .await
        .unwrap();

    assert_eq!(
        u64::from(scene.report.runs.load(SeqCst)),
        IDS,
        "seed {seed}: each runs once"
    );
    assert_eq!(
        scene.bench.letters.causes(),
        Vec::<&str>::new(),
        "seed {seed}"
    );
    assert_eq!(
        scene.count("results_lost", ""),
        0,
        "seed {seed}: what is referred to is there"
    );
    let told = scene.duplicates();
    assert_eq!(
        told.len() as u64,
        3 * IDS,
        "seed {seed}: every duplicate gets the result, once"
    );
    let whole: Vec<String> = (0..IDS).map(expected).collect();
    for told in told {
        match told {
            Ok(result) => assert!(whole.contains(&result), "seed {seed}: {result}"),
            Err(error) => assert!(error.contains("not kept"), "seed {seed}: {error}"),
        }
    }
    [
        ("result_store_errors", "put"),
        ("result_store_errors", "get"),
        ("results_not_kept", ""),
    ]
    .map(|(name, label)| scene.count(name, label))
}

// invariant: result-store-decides
#[tokio::test(start_paused = true)]
async fn whatever_a_result_store_does_messages_run_once_and_are_acked() {
    let mut reached = [0; 3];
    for _ in 0..30 {
        let failed = survives_chaos(fastrand::u64(..)).await;
        reached
            .iter_mut()
            .zip(failed)
            .for_each(|(sum, failed)| *sum += failed);
    }
    assert!(
        reached.iter().all(|reached| *reached > 0),
        "puts, gets, results not kept: {reached:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn limits_decide_where_a_result_goes() {
    let message = |id: u64| {
        Message::new(
            "orders",
            Origin::Other("a test".into()),
            Some(format!(r#"{{"id":{id}}}"#).into()),
        )
    };
    let scene = Scene::of(&[], Flaky::default());
    let gate = scene.gate().max_large_result_bytes(1_000);
    // Stored as JSON: two quotes and a byte that names the encoding.
    for (id, length, objects) in [(1, 97, 0), (2, 98, 1), (3, 997, 2), (4, 998, 2)] {
        let Entry::Granted(lease) = gate.enter(&message(id)).await.unwrap() else {
            panic!("{id} is new")
        };
        let result = "x".repeat(length);
        let completed = lease.complete(&result).await;
        assert_eq!(scene.results.results().len(), objects, "{length}");
        let Entry::Completed(stored) = gate.enter(&message(id)).await.unwrap() else {
            panic!("{id} is done")
        };
        if id < 4 {
            assert_eq!(completed.unwrap(), Completion::Applied);
            assert_eq!(stored.decode::<String>().unwrap(), result);
        } else {
            assert!(
                completed
                    .unwrap_err()
                    .to_string()
                    .contains("max_large_result_bytes")
            );
            assert!(
                stored
                    .decode::<String>()
                    .unwrap_err()
                    .to_string()
                    .contains("not kept")
            );
        }
    }
}

// invariant: result-store-decides
#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_while_a_result_is_stored_loses_it_alone() {
    let scene = Scene::of(
        &[],
        Flaky {
            hangs: true,
            ..Flaky::default()
        },
    );
    let gate = scene.gate();
    let message = Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(r#"{"id":1}"#.into()),
    );
    let Entry::Granted(lease) = gate.enter(&message).await.unwrap() else {
        panic!("it is new")
    };
    scene.results.fails.store(u32::MAX, SeqCst);
    let result = "x".repeat(1_000);
    assert!(
        tokio::time::timeout(LEASE, lease.complete(&result))
            .await
            .is_err(),
        "it hangs"
    );
    let entry = loop {
        match gate.enter(&message).await.unwrap() {
            Entry::Busy { retry_in } => tokio::time::sleep(retry_in.min(LEASE / 10)).await,
            entry => break entry,
        }
    };
    let Entry::Completed(stored) = entry else {
        panic!("the work is recorded as done: {entry:?}")
    };
    assert!(
        stored
            .decode::<String>()
            .unwrap_err()
            .to_string()
            .contains("not kept")
    );
}

#[tokio::test(start_paused = true)]
async fn a_gate_does_not_open_before_its_result_store_answers() {
    let scene = Scene::of(
        &[],
        Flaky {
            fails_at_opening: AtomicU32::new(1),
            ..Flaky::default()
        },
    );
    let gate = scene.gate();
    let refused = gate.open().await.unwrap_err();
    assert!(
        refused.to_string().contains("the test says so"),
        "{refused}"
    );
    gate.open().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_gate_without_its_result_store_says_so() {
    let scene = Scene::of(&[1], Flaky::default());
    scene.run(1, 0).await;
    let gate = scene.bench.gate("runtime");
    let message = Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(r#"{"id":1}"#.into()),
    );
    let Entry::Completed(stored) = gate.enter(&message).await.unwrap() else {
        panic!("it is done")
    };
    assert!(
        stored
            .decode::<String>()
            .unwrap_err()
            .to_string()
            .contains("large_results")
    );
    assert!(
        format!("{stored:?}").contains("in the result store, as runtime/"),
        "{stored:?}"
    );
    assert!(
        gate.sweep_results()
            .await
            .unwrap_err()
            .to_string()
            .contains("large_results")
    );
}
