//! Redis becomes unavailable at each step of a request, and comes back with its data.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::http::IdempotencyLayer;
use oncegate::redis::RedisStore;
use oncegate::{Gate, MemoryStore};
use oncegate_testkit::{HttpAnswer, RedisServer};
use tokio::task::JoinHandle;

use crate::world::{ORDER, World, headers, told};

/// Longer than every outage here, so that no other request takes over.
const LEASE: Duration = Duration::from_secs(120);
/// How long requests wait for a store that is away.
const PATIENCE: Duration = Duration::from_millis(300);

/// What it has answered survives its kill: with `everysec`, a write may wait for a sync in
/// progress.
async fn durable_redis() -> RedisServer {
    RedisServer::synced().await
}

async fn world(
    redis: &RedisServer,
    settings: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
) -> World {
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let patient =
        |layer: IdempotencyLayer| settings(layer.claim_timeout(PATIENCE).settle_timeout(PATIENCE));
    let world = World::over(
        Arc::new(MemoryStore::new()),
        store,
        |gate: Gate| gate.lease(LEASE),
        patient,
    )
    .await;
    world.layer.open().await.unwrap();
    world
}

/// A request whose handler has begun, and holds.
async fn held(world: &World) -> JoinHandle<HttpAnswer> {
    let client = world.http1();
    let sent = tokio::spawn(async move { client.send(told("k", &headers("hold"))).await });
    world.work.started(1).await;
    sent
}

#[tokio::test]
async fn nothing_runs_while_the_store_is_away() {
    let mut redis = durable_redis().await;
    // Only the claim runs during the outage. A completion that took too long on a busy machine
    // would be reported as unknown, and then the first answer would be a replay.
    let world = world(&redis, |layer| layer.settle_timeout(LEASE)).await;
    redis.kill();
    let answer = world.post("k", ORDER).await;
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str()),
        (503, "store-unavailable")
    );
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(world.runs().len(), 0);
    redis.start_again().await;
    let answer = world.settled("k").await;
    assert_eq!((answer.status.as_u16(), answer.is_replayed()), (201, false));
    assert_eq!(world.runs(), [(1, false)]);
}

#[tokio::test]
async fn a_claim_whose_answer_comes_too_late_is_given_back() {
    let mut redis = durable_redis().await;
    let world = world(&redis, |layer| layer).await;
    redis.process().signal("STOP");
    assert_eq!(world.post("k", ORDER).await.problem(), "store-unavailable");
    redis.process().signal("CONT");
    // An orphaned claim would keep its lease for two minutes.
    assert_eq!(world.settled("k").await.status, 201);
    assert_eq!(world.runs(), [(1, false)]);
}

// invariant: response-before-completed
#[tokio::test]
async fn a_store_lost_under_the_handler_means_unknown_and_no_rerun() {
    let mut redis = durable_redis().await;
    let world = world(&redis, |layer| layer).await;
    let sent = held(&world).await;
    redis.kill();
    world.work.open();
    let answer = sent.await.unwrap();
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str()),
        (503, "outcome-unknown")
    );
    redis.start_again().await;
    let answer = world.settled("k").await;
    assert_eq!((answer.status.as_u16(), answer.is_replayed()), (201, true));
    assert_eq!(world.runs(), [(1, false)]);
}

#[tokio::test]
async fn a_store_stalled_under_completion_means_unknown_and_no_rerun() {
    let mut redis = durable_redis().await;
    let world = world(&redis, |layer| layer).await;
    let sent = held(&world).await;
    redis.process().signal("STOP");
    world.work.open();
    assert_eq!(sent.await.unwrap().problem(), "outcome-unknown");
    redis.process().signal("CONT");
    assert!(world.settled("k").await.is_replayed());
    assert_eq!(world.runs(), [(1, false)]);
}

#[tokio::test]
async fn a_completed_request_waits_for_the_store_and_is_not_run_again() {
    let mut redis = durable_redis().await;
    let world = world(&redis, |layer| layer).await;
    let first = world.post("k", ORDER).await;
    redis.kill();
    assert_eq!(world.post("k", ORDER).await.problem(), "store-unavailable");
    redis.start_again().await;
    let again = world.settled("k").await;
    assert_eq!((again.is_replayed(), again.body), (true, first.body));
    assert_eq!(world.runs().len(), 1);
}

/// A request that asks a store that is frozen either waits until its time limit, or meets an error
/// of the store, which is counted. A request that the breaker refuses does neither.
#[tokio::test]
async fn not_each_request_in_turn_waits_for_a_frozen_store() {
    const REQUESTS: usize = 20;
    // More than a refusal takes on any machine, so that the two can be told from each other.
    const CLAIM_TIMEOUT: Duration = Duration::from_secs(2);
    let mut redis = durable_redis().await;
    let world = world(&redis, |layer| layer.claim_timeout(CLAIM_TIMEOUT)).await;
    redis.process().signal("STOP");
    let errors = || {
        ["unavailable", "unknown"]
            .map(|class| world.watched.get("store_errors", class))
            .iter()
            .sum::<u64>()
    };
    let mut asked = Vec::new();
    for number in 0..REQUESTS {
        let sent = Instant::now();
        let before = errors();
        assert_eq!(
            world.post(&format!("k{number}"), ORDER).await.problem(),
            "store-unavailable"
        );
        asked.push(sent.elapsed() >= CLAIM_TIMEOUT || errors() > before);
    }
    // The first five open the breaker; from then on one request a second asks.
    let count = asked.iter().filter(|asked| **asked).count();
    assert!(
        (5..=REQUESTS / 2).contains(&count),
        "these of {REQUESTS} requests have asked the store: {asked:?}"
    );
    assert_eq!(world.runs().len(), 0);
    redis.process().signal("CONT");
    for number in 0..REQUESTS {
        assert_eq!(world.settled(&format!("k{number}")).await.status, 201);
    }
    assert_eq!(world.runs(), [(1, false); REQUESTS]);
}

#[tokio::test]
async fn running_without_the_store_is_a_choice_and_counted() {
    let mut redis = durable_redis().await;
    let world = world(&redis, |layer| layer.fail_open()).await;
    redis.kill();
    for run in 1..=2 {
        assert_eq!(world.post("k", ORDER).await.status, 201);
        let counted = ["answers", "extra_runs"].map(|name| world.watched.get(name, "fail_open"));
        assert_eq!((world.runs().len(), counted), (run, [run as u64; 2]));
    }
    redis.start_again().await;
}
