//! What the consumer runtime does with a source that gives messages on demand and takes them back,
//! as queues do. On paused time, a queue and a store in memory.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{
    Attempt, Consumer, ConsumerError, ConsumerSettings, Counters, Entry, Failure, Gate,
    GateSettings, Key, MemoryStore, Message, Ordering, Origin,
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

#[path = "on_demand/queue.rs"]
mod queue;

use queue::{Queue, Reader, payload};

const LEASE: Duration = Duration::from_secs(10);

fn gate(store: &Arc<MemoryStore>) -> Gate {
    Gate::new("on-demand", Key::json(["id"]), Arc::clone(store))
        .lease(LEASE)
        .simulated(7)
}

fn number(message: &Message) -> usize {
    let Origin::Queue { id, .. } = message.origin() else {
        panic!("from a queue")
    };
    id.parse().unwrap()
}

// invariant: receive-without-handler
#[tokio::test(start_paused = true)]
async fn no_more_is_asked_for_than_can_run() {
    let queue = Queue::of(50);
    let store = Arc::new(MemoryStore::new());
    let handler = async |message: Message, _: Attempt| {
        sleep(Duration::from_millis(10 + number(&message) as u64)).await;
        Ok(())
    };
    let consumer = Consumer::new(Reader(Arc::clone(&queue)), gate(&store), handler)
        .concurrency(4)
        .max_attempts(3);
    let stop = Arc::clone(&queue);
    consumer
        .run_until(async move { stop.until_acked(50).await })
        .await
        .unwrap();
    assert_eq!(
        queue.look(|state| state.most_wanted),
        4,
        "all permits are used, and no more is asked for"
    );
    let terms = queue
        .look(|state| state.terms)
        .expect("the source was opened");
    assert_eq!(
        (terms.max_attempts, terms.lease, terms.retention),
        (3, LEASE, GateSettings::DEFAULT.retention)
    );
    assert_eq!(terms.stop_deadline, ConsumerSettings::DEFAULT.stop_deadline);
}

// invariant: busy-returned-to-queue
#[tokio::test(start_paused = true)]
async fn a_message_busy_elsewhere_is_kept_and_gives_up_its_permit() {
    let queue = Queue::of(20);
    let store = Arc::new(MemoryStore::new());
    // Another seed: equal tokens would be the same worker.
    let elsewhere = gate(&store).simulated(8);
    let origin = Origin::Other("another worker".into());
    let busy = Message::new("orders", origin, Some(payload(0).into()));
    let Entry::Granted(lease) = elsewhere.enter(&busy).await.unwrap() else {
        panic!("it is new")
    };
    let handler = async |message: Message, _: Attempt| {
        assert_ne!(number(&message), 0, "another worker has it");
        Ok(())
    };
    let consumer = Consumer::new(Reader(Arc::clone(&queue)), gate(&store), handler).concurrency(1);
    let stop = Arc::clone(&queue);
    let others = async move {
        stop.until_acked(19).await;
        assert!(stop.look(|state| state.held.contains_key(&0)), "kept");
        assert_eq!(
            lease.complete(&()).await.unwrap(),
            oncegate::Completion::Applied
        );
        stop.until_acked(20).await;
    };
    consumer.run_until(others).await.unwrap();
    assert_eq!(
        queue.look(|state| state.handed_back.clone()),
        [],
        "returning it would use up its receives"
    );
}

#[tokio::test(start_paused = true)]
async fn the_groups_of_a_queue_are_its_partitions() {
    for ordering in [Ordering::Partition, Ordering::Key] {
        let queue = Queue::of(9);
        let store = Arc::new(MemoryStore::new());
        queue.look(|state| state.groups = 3);
        let ended = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&ended);
        // The first of each group takes longest, and the first of all longer than two whole groups.
        let handler = move |message: Message, _: Attempt| {
            let n = number(&message);
            let seen = Arc::clone(&seen);
            async move {
                sleep(Duration::from_millis(
                    [1_000, 100, 10][n % 3] * if n < 3 { 10 } else { 1 },
                ))
                .await;
                seen.lock().unwrap().push(n);
                Ok(())
            }
        };
        let consumer =
            Consumer::new(Reader(Arc::clone(&queue)), gate(&store), handler).ordering(ordering);
        let stop = Arc::clone(&queue);
        consumer
            .run_until(async move { stop.until_acked(9).await })
            .await
            .unwrap();
        assert_eq!(
            *ended.lock().unwrap(),
            [2, 5, 8, 1, 4, 7, 0, 3, 6],
            "{ordering:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_goes_back_to_the_queue_for_as_long_as_it_must_wait() {
    let queue = Queue::of(3);
    let store = Arc::new(MemoryStore::new());
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&attempts);
    let handler = move |message: Message, attempt: Attempt| {
        let n = number(&message);
        seen.lock().unwrap().push((n, attempt.number()));
        let fails = n == 1 && attempt.number() == 1;
        std::future::ready(if fails {
            Err(Failure::retry_after(LEASE, "not yet"))
        } else {
            Ok(())
        })
    };
    let consumer = Consumer::new(Reader(Arc::clone(&queue)), gate(&store), handler).concurrency(1);
    let stop = Arc::clone(&queue);
    consumer
        .run_until(async move { stop.until_acked(3).await })
        .await
        .unwrap();
    assert_eq!(queue.look(|state| state.handed_back.clone()), [(1, LEASE)]);
    assert_eq!(*attempts.lock().unwrap(), [(0, 1), (1, 1), (2, 1), (1, 2)]);
}

/// Nothing of a message stays here while the queue has it, and before the first success no record
/// counts its failures.
#[tokio::test(start_paused = true)]
async fn a_bad_message_uses_up_its_attempts_across_queue_returns() {
    let queue = Queue::of(1);
    let store = Arc::new(MemoryStore::new());
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&attempts);
    let handler = move |_: Message, attempt: Attempt| {
        seen.lock().unwrap().push(attempt.number());
        std::future::ready(Err::<(), _>(Failure::retry_after(LEASE, "a bad order")))
    };
    let consumer = Consumer::new(Reader(Arc::clone(&queue)), gate(&store), handler).max_attempts(3);
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(
        matches!(error, ConsumerError::NoDeadLetters { .. }),
        "it is given up: {error}"
    );
    assert_eq!(
        queue.look(|state| state.handed_back[..2].to_vec()),
        [(0, LEASE); 2]
    );
    assert_eq!(*attempts.lock().unwrap(), [1, 2, 3]);
}

// invariant: delete-after-loss
#[tokio::test(start_paused = true)]
async fn a_message_wanted_later_stays_hidden_and_uses_no_attempt() {
    let queue = Queue::of(1);
    let store = Arc::new(MemoryStore::new());
    let runs = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&runs);
    let handler = move |_: Message, attempt: Attempt| {
        let mut runs = seen.lock().unwrap();
        runs.push(attempt.number());
        let outcome = if runs.len() < 4 {
            Err(Failure::later(LEASE, "not ready"))
        } else {
            Ok(())
        };
        std::future::ready(outcome)
    };
    let consumer = Consumer::new(Reader(Arc::clone(&queue)), gate(&store), handler).max_attempts(1);
    let stop = Arc::clone(&queue);
    consumer
        .run_until(async move { stop.until_acked(1).await })
        .await
        .unwrap();
    assert_eq!(
        queue.look(|state| state.handed_back.clone()),
        [(0, LEASE); 3]
    );
    assert_eq!(*runs.lock().unwrap(), [1; 4]);
}

#[tokio::test(start_paused = true)]
async fn what_the_queue_takes_away_ends_under_its_lease() {
    let queue = Queue::of(1);
    let store = Arc::new(MemoryStore::new());
    let counters = Arc::new(Counters::default());
    let taken = Arc::clone(&queue);
    let handler = move |_: Message, attempt: Attempt| {
        let queue = Arc::clone(&taken);
        async move {
            queue.look(|state| state.held[&0].cancel());
            tokio::select! {
                () = attempt.cancelled() => return Err("cancelled".into()),
                () = sleep(LEASE * 2) => {}
            }
            Ok(())
        }
    };
    let consumer = Consumer::new(Reader(Arc::clone(&queue)), gate(&store), handler).concurrency(1);
    let stop = Arc::clone(&queue);
    let consumer = consumer.observer(Arc::clone(&counters) as _);
    consumer
        .run_until(async move { stop.until_acked(1).await })
        .await
        .unwrap();
    assert_eq!(counters.get("handler_runs", "succeeded"), 1);
    assert_eq!(
        counters.total("handler_runs"),
        1,
        "it comes again as a duplicate"
    );
    assert_eq!(counters.get("claims", "completed"), 1);
    assert_eq!(counters.total("extra_runs"), 0);
}

// invariant: receive-without-handler
#[tokio::test(start_paused = true)]
async fn nothing_is_asked_for_while_the_store_is_away() {
    let queue = Queue::of(8);
    let memory = Arc::new(MemoryStore::new());
    let store = Arc::new(FaultStore::new(memory as _, Faults::default(), 1));
    let gate = Gate::new("on-demand", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE)
        .simulated(7);
    let handler = async |_: Message, _: Attempt| Ok(());
    let counters = Arc::new(Counters::default());
    let consumer = Consumer::new(Reader(Arc::clone(&queue)), gate, handler).concurrency(4);
    let consumer = consumer.observer(Arc::clone(&counters) as _);
    let stop = Arc::clone(&queue);
    let outage = async move {
        stop.until_acked(8).await;
        store.begin_outage();
        let now = Instant::now();
        stop.change(|state| state.visible_from.extend((8..50).map(|n| (n, now))));
        while counters.get("store_paused", "paused") == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        let receives = stop.look(|state| state.receives);
        sleep(LEASE * 10).await;
        assert_eq!(
            stop.look(|state| state.receives),
            receives,
            "nothing is received"
        );
        assert_eq!(
            stop.look(|state| state.handed_back.clone()),
            [],
            "and what is held stays here"
        );
        store.end_outage();
        stop.until_acked(50).await;
    };
    consumer.run_until(outage).await.unwrap();
}

// invariant: outage-continues
#[tokio::test(start_paused = true)]
async fn an_outage_ends_though_the_queue_took_back_all_that_could_ask() {
    let queue = Queue::of(0);
    let memory = Arc::new(MemoryStore::new());
    let store = Arc::new(FaultStore::new(memory as _, Faults::default(), 1));
    let gate = Gate::new("on-demand", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE)
        .simulated(7);
    let counters = Arc::new(Counters::default());
    let consumer = Consumer::new(
        Reader(Arc::clone(&queue)),
        gate,
        async |_: Message, _: Attempt| Ok(()),
    )
    .concurrency(2);
    let consumer = consumer.observer(Arc::clone(&counters) as _);
    let stop = Arc::clone(&queue);
    let outage = async move {
        while stop.look(|state| state.receives) == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        store.begin_outage();
        let now = Instant::now();
        stop.change(|state| state.visible_from = (0..3).map(|n| (n, now)).collect());
        while counters.get("store_paused", "paused") == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        stop.look(|state| state.held.values().for_each(CancellationToken::cancel));
        stop.until(|state| state.handed_back.len() == 2).await;
        store.end_outage();
        stop.until_acked(3).await;
    };
    consumer.run_until(outage).await.unwrap();
}
