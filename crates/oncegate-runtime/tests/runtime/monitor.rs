//! What a consumer reports while something is wrong.

// invariant (all tests): stall-unreported

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::health::{PartitionStatus, PauseCause, Phase, Reason, Stage, WaitCause};
use oncegate::{
    Attempt, Consumer, Failure, Gate, Health, Key, MemoryStore, Message, Monitor, Origin, Status,
};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::{Bench, LEASE, numbered};

/// Asks until it is so; time is paused, so this costs none.
async fn until(
    monitor: &Monitor,
    what: &str,
    is_so: impl Fn(&Status, &Health) -> bool + Send + Sync,
) -> (Status, Health) {
    let asked = async {
        loop {
            let status = monitor.status();
            let health = monitor.health();
            if is_so(&status, &health) {
                return (status, health);
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    let limit = Duration::from_secs(3_600);
    timeout(limit, asked)
        .await
        .unwrap_or_else(|_| panic!("never {what}: {:#?}", monitor.status()))
}

fn has(health: &Health, word: &str) -> bool {
    health
        .reasons()
        .iter()
        .any(|reason| reason.as_str() == word)
}

/// A handler that waits for this, and then returns.
fn waiting_for(go_on: &Arc<Notify>) -> impl oncegate::Handler {
    let go_on = Arc::clone(go_on);
    move |_: Message, _: Attempt| {
        let go_on = Arc::clone(&go_on);
        async move {
            go_on.notified().await;
            Ok(())
        }
    }
}

/// Runs the consumer until `asked` is through.
async fn run_while(consumer: Consumer, asked: impl Future<Output = ()> + Send) {
    consumer.run_until(asked).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn it_says_where_it_is_in_its_life_and_what_it_has_in_hand() {
    let bench = Bench::of(numbered(3));
    let go_on = Arc::new(Notify::new());
    let consumer = bench.consumer(waiting_for(&go_on)).concurrency(2);
    let monitor = consumer.monitor();
    assert_eq!(
        (monitor.status().phase, monitor.health().is_ready()),
        (Phase::Starting, false)
    );
    let asked = async {
        let (status, health) = until(&monitor, "two run", |status, _| {
            status.messages.running == 2 && status.messages.ready == 1
        })
        .await;
        assert_eq!((status.phase, &health), (Phase::Running, &Health::Healthy));
        assert_eq!(
            (
                status.permits.total,
                status.permits.free,
                status.messages.in_flight
            ),
            (2, 0, 3)
        );
        assert_eq!(status.scopes[0].promise, "process");
        let partition = &status.source.partitions[0];
        assert_eq!(
            (&*partition.topic, partition.partition, partition.in_flight),
            ("orders", 0, 3)
        );
        let first = partition.first.as_ref().unwrap();
        assert_eq!(
            (&*first.origin, first.stage),
            ("orders/0@0", Stage::Running)
        );
        go_on.notify_waiters();
        until(&monitor, "the third runs", |status, _| {
            status.messages.running == 1
        })
        .await;
        go_on.notify_waiters();
        bench.list.until_acked(3).await;
        let (status, _) = until(&monitor, "empty", |status, _| {
            status.source.partitions.is_empty() && status.messages.in_flight == 0
        })
        .await;
        assert_eq!(
            (
                status.messages.in_flight,
                status.permits.free,
                status.runs.len()
            ),
            (0, 2, 0)
        );
        assert!(status.rates.ended_per_second > 0.0, "{:?}", status.rates);
    };
    run_while(consumer, asked).await;
    assert_eq!(monitor.status().phase, Phase::Stopped);
    assert!(monitor.health().is_live() && !monitor.health().is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_ends_by_itself_says_why() {
    let bench = Bench::of([("", "{not json".to_owned())]);
    let source = super::list::Listed(Arc::clone(&bench.list));
    let consumer = Consumer::new(
        source,
        bench.gate("runtime"),
        async |_: Message, _: Attempt| Ok(()),
    );
    let monitor = consumer.monitor();
    consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(!monitor.health().is_live());
    assert!(
        monitor.health().to_string().contains("`dead_letters`"),
        "{}",
        monitor.health()
    );
}

#[tokio::test(start_paused = true)]
async fn a_consumer_whose_future_was_dropped_has_ended() {
    let bench = Bench::of(numbered(1));
    let consumer = bench.consumer(waiting_for(&Arc::default()));
    let monitor = consumer.monitor();
    let running = consumer.run_until(std::future::pending());
    let begun = until(&monitor, "it runs", |status, _| {
        status.phase == Phase::Running
    });
    tokio::select! {
        ended = running => ended.unwrap(),
        _ = begun => {}
    }
    // Its tasks end at their next turn.
    let (_, health) = until(&monitor, "ended", |status, _| {
        status.phase == Phase::Stopped
    })
    .await;
    assert!(health.to_string().contains("dropped"), "{health}");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_makes_it_unready_and_keeps_it_live() {
    let bench = Bench::of(numbered(2));
    let store = Arc::new(FaultStore::new(
        Arc::clone(&bench.store) as _,
        Faults::default(),
        1,
    ));
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE * 60)
        .simulated(7);
    let consumer = bench.consumer_behind(gate, async |_: Message, _: Attempt| Ok(()));
    let monitor = consumer.monitor();
    let asked = async {
        bench.list.until_acked(2).await;
        store.begin_outage();
        bench.list.push("orders", "", r#"{"id":7}"#.to_owned());
        let (status, health) = until(&monitor, "away", |_, health| has(health, "store_away")).await;
        assert!(health.is_live() && !health.is_ready(), "{health}");
        assert!(status.paused.contains(&PauseCause::StoreAway) && status.scopes[0].is_store_away());
        let later = |status: &Status, _: &Health| {
            status.scopes[0]
                .outages
                .first()
                .is_some_and(|outage| outage.lasts > Duration::from_secs(60))
        };
        until(&monitor, "away for a minute", later).await;
        store.end_outage();
        bench.list.until_acked(3).await;
        until(&monitor, "well", |_, health| *health == Health::Healthy).await;
    };
    run_while(consumer, asked).await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_over_with_its_completion_unknown_is_no_lost_lease() {
    for ends_before in [true, false] {
        let bench = Bench::of(numbered(1));
        let store = Arc::new(FaultStore::new(
            Arc::clone(&bench.store) as _,
            Faults::default(),
            1,
        ));
        let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
            .lease(LEASE)
            .simulated(7);
        let outage = Arc::clone(&store);
        let handler = move |_: Message, attempt: Attempt| {
            outage.begin_outage();
            async move {
                if !ends_before {
                    attempt.cancelled().await;
                }
                Ok(())
            }
        };
        let consumer = bench.consumer_behind(gate, handler);
        let monitor = consumer.monitor();
        let asked = async {
            until(&monitor, "over", |status, _| {
                status.scopes[0].lease_remaining.is_zero()
            })
            .await;
            bench.complete_elsewhere().await;
            store.end_outage();
            bench.list.until_acked(1).await;
            until(&monitor, "idle", |status, _| {
                status.scopes[0].lease_remaining == LEASE
            })
            .await;
        };
        run_while(consumer, asked).await;
        let count = |name, label| bench.counters.get(name, label);
        let unknown = count("extra_runs", "complete_unknown");
        let lost = count("extra_runs", "lease_lost");
        assert_eq!(
            (unknown, lost),
            (u64::from(ends_before), u64::from(!ends_before))
        );
        assert_eq!(
            (count("completions", ""), count("complete_lost", "")),
            (0, 1)
        );
    }
}

// invariant: other-routes-store
#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_holds_back_only_the_routes_that_use_it() {
    let bench = Bench::of(numbered(3));
    (0..3).for_each(|id| bench.list.push("refunds", "", format!(r#"{{"id":{id}}}"#)));
    let down = Arc::new(FaultStore::new(
        Arc::new(MemoryStore::new()),
        Faults::default(),
        1,
    ));
    let gate = |scope: &str| {
        Gate::new(scope, Key::json(["id"]), Arc::clone(&down))
            .lease(LEASE)
            .simulated(7)
    };
    let refunds = gate("refunds");
    refunds.open().await.unwrap();
    let outage = Arc::clone(&down);
    // The handler of the first order sees the store of the refunds go.
    let order = move |_: Message, _: Attempt| {
        outage.begin_outage();
        std::future::ready(Ok(()))
    };
    let consumer = bench.consumer(order).concurrency(1).route(
        "refunds",
        refunds,
        async |_: Message, _: Attempt| Ok(()),
    );
    let monitor = consumer.monitor();
    let asked = async {
        let (status, health) = until(&monitor, "away", |_, health| has(health, "store_away")).await;
        assert!(health.is_ready(), "the other route goes on: {health}");
        assert!(status.scopes[0].is_store_up() && status.scopes[1].is_store_away());
        (10..50).for_each(|id| bench.list.push("orders", "", format!(r#"{{"id":{id}}}"#)));
        bench.list.until_acked(43).await;
        assert_eq!(
            bench.counters.get("store_paused", "resumed"),
            0,
            "an answer of the other store does not resume this one"
        );
        down.end_outage();
        bench.list.until_acked(46).await;
    };
    run_while(consumer, asked).await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_is_paused_makes_it_unready_and_is_no_stall() {
    let bench = Bench::of(numbered(60));
    let is_up = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_up);
    let handler = move |_: Message, _: Attempt| {
        let outcome = if seen.load(SeqCst) {
            Ok(())
        } else {
            Err(Failure::retry("the dependency is down"))
        };
        std::future::ready(outcome)
    };
    let consumer = bench.consumer(handler);
    let monitor = consumer.monitor();
    let asked = async {
        until(&monitor, "paused", |_, health| {
            has(health, "handler_paused")
        })
        .await;
        sleep(Duration::from_secs(300)).await;
        let status = monitor.status();
        let health = monitor.health();
        assert!(health.is_live() && !health.is_ready(), "{health}");
        assert!(
            status.paused.contains(&PauseCause::Breaker) && status.messages.ready <= 1,
            "{status:#?}"
        );
        let breaker = status.scopes[0].breaker.as_ref().expect("it is open");
        assert_eq!(breaker.reason.as_deref(), Some("the dependency is down"));
        assert!(
            breaker
                .lasts
                .is_some_and(|lasts| lasts >= Duration::from_secs(300))
        );
        let waits = status.waits();
        assert!(
            waits[0].starts_with("the handler of `runtime` is paused for 5 min, ")
                && waits[0].ends_with(": the dependency is down"),
            "{waits:?}"
        );
        let failed = status.failing[0].failed.as_ref().expect("it has failed");
        assert_eq!(failed.reason, "the dependency is down");
        assert!(status.failing.len() <= 16, "{status:#?}");
        is_up.store(true, SeqCst);
        bench.list.until_acked(60).await;
        let (status, _) = until(&monitor, "well", |_, health| *health == Health::Healthy).await;
        assert_eq!(
            (&status.scopes[0].breaker, status.failing.len()),
            (&None, 0)
        );
    };
    run_while(consumer, asked).await;
    assert_eq!(bench.letters.causes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_runs_for_too_long_is_named() {
    let bench = Bench::of(numbered(1));
    let max_run = LEASE * 20;
    let handler = |_: Message, _: Attempt| std::future::pending::<Result<(), oncegate::Failure>>();
    let gate = bench.gate("runtime").max_run(max_run);
    let consumer = bench
        .consumer_behind(gate, handler)
        .concurrency(1)
        .stop_deadline(Duration::ZERO);
    let monitor = consumer.monitor();
    let asked = async {
        let (status, health) = until(&monitor, "overdue", |_, health| {
            has(health, "overdue_handler")
        })
        .await;
        assert_eq!(status.overdue, 1);
        assert!(
            health.to_string().contains("orders/0@0") && health.to_string().contains("`runtime`"),
            "{health}"
        );
        assert!(!health.is_live(), "it has the only permit: {health}");
        // Its future is dropped a little later, and its permit is free again.
        until(&monitor, "given up", |_, health| *health == Health::Healthy).await;
    };
    run_while(consumer, asked).await;
}

#[tokio::test(start_paused = true)]
async fn a_message_kept_for_ever_elsewhere_is_named_and_is_no_stall() {
    let bench = Bench::of(numbered(1));
    let gate = || bench.gate("runtime").max_run(LEASE * 4);
    let elsewhere = Message::new(
        "orders",
        Origin::Other("elsewhere".into()),
        Some(r#"{"id":0}"#.into()),
    );
    let consumer = bench.consumer_behind(gate(), async |_: Message, _: Attempt| Ok(()));
    let other = bench.gate("runtime").simulated(8);
    let lease = other.enter(&elsewhere).await.unwrap();
    let monitor = consumer.monitor();
    let asked = async {
        let parked = |status: &Status, _: &Health| {
            status
                .waiting
                .first()
                .is_some_and(|first| first.stage == Stage::Parked(WaitCause::Busy))
        };
        let (_, health) = until(&monitor, "parked", parked).await;
        assert_eq!(health, Health::Healthy, "a run may take that long");
        let (_, health) = until(&monitor, "busy for ever", |_, health| {
            has(health, "busy_elsewhere")
        })
        .await;
        assert!(
            health.is_ready() && health.to_string().contains("orders/0@0"),
            "{health}"
        );
        drop(lease);
        bench.list.until_acked(1).await;
        until(&monitor, "well", |_, health| *health == Health::Healthy).await;
    };
    run_while(consumer, asked).await;
}

#[tokio::test(start_paused = true)]
async fn a_source_that_delivers_none_of_its_messages_is_a_named_stall() {
    let bench = Bench::of(numbered(1));
    let consumer = bench.consumer(async |_: Message, _: Attempt| Ok(()));
    let monitor = consumer.monitor();
    let asked = async {
        bench.list.until_acked(1).await;
        let mut partition = PartitionStatus::new("orders", 5);
        partition.undelivered = Some(12);
        partition.delivered_ago = Some(Duration::from_secs(45));
        bench.list.status.lock().unwrap().partitions = vec![partition];
        let health = monitor.health();
        assert!(
            matches!(health, Health::Stalled { .. }) && !health.is_live(),
            "{health}"
        );
        assert!(
            health.to_string().contains("orders/5 has 12 messages"),
            "{health}"
        );
        assert!(health.reasons().iter().any(Reason::is_stall));
    };
    run_while(consumer, asked).await;
}

#[tokio::test(start_paused = true)]
async fn a_long_stop_is_live() {
    let bench = Bench::of(numbered(1));
    let go_on = Arc::new(Notify::new());
    let consumer = bench
        .consumer(waiting_for(&go_on))
        .stop_deadline(Duration::from_secs(60));
    let monitor = consumer.monitor();
    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let running = tokio::spawn(consumer.run_until(async move { stopped.notified().await }));
    until(&monitor, "it runs", |status, _| {
        status.messages.running == 1
    })
    .await;
    stop.notify_one();
    let (status, _) = until(&monitor, "it stops", |status, _| {
        status.phase == Phase::Stopping
    })
    .await;
    assert_eq!(status.messages.running, 1);
    sleep(3 * oncegate::health::LOOP_LIMIT).await;
    assert!(monitor.health().is_live(), "{}", monitor.health());
    go_on.notify_one();
    running.await.unwrap().unwrap();
}
