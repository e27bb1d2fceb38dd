//! Duplicates whose hooks wait, never end, or are many.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::health::Stage;
use oncegate::{
    Attempt, BatchHandler, BatchLimits, BatchMessage, Batched, Consumer, Failure, Handler, Message,
};
use tokio::time::{Instant, sleep, timeout};

use super::list::Listed;
use super::{Bench, numbered};

/// Answers every message as a duplicate with this hook.
struct Hooked<F>(F);

impl<F, W> Handler for Hooked<F>
where
    F: Fn() -> W + Send + Sync + 'static,
    W: Future<Output = ()> + Send,
{
    type Output = ();

    async fn handle(&self, _: &Message, _: &Attempt) -> Result<(), Failure> {
        Ok(())
    }

    async fn duplicate(&self, _: &Message, (): ()) -> Result<(), Failure> {
        (self.0)().await;
        Ok(())
    }
}

/// Completes these messages once, and returns them as a second delivery.
async fn delivered_again(count: usize) -> Bench {
    let first = Bench::of(numbered(count));
    let consumer = first.consumer(Hooked(|| std::future::ready(())));
    first.run(consumer, count).await.unwrap();
    Bench {
        store: Arc::clone(&first.store),
        ..Bench::of(numbered(count))
    }
}

// invariant: duplicate-without-limit
#[tokio::test(start_paused = true)]
async fn a_duplicate_hook_that_never_ends_is_dropped() {
    let bench = delivered_again(200).await;
    let monitor = Arc::new(Mutex::new(None::<oncegate::consumer::Monitor>));
    let gate = bench.gate("runtime").max_run(Duration::from_secs(10));
    let consumer = bench
        .consumer_behind(gate, Hooked(std::future::pending::<()>))
        .concurrency(8);
    *monitor.lock().unwrap() = Some(consumer.monitor());
    let list = Arc::clone(&bench.list);
    let stop = async move {
        loop {
            let status = monitor.lock().unwrap().as_ref().unwrap().status();
            if status.runs.iter().any(|run| run.stage == Stage::Answering) {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
        list.until_acked(200).await;
    };
    consumer.run_until(stop).await.unwrap();
    assert_eq!(bench.counters.total("duplicate_hooks_failed"), 200);
}

// invariant: duplicate-without-limit
#[tokio::test(start_paused = true)]
async fn duplicate_hooks_that_wait_need_a_permit_each() {
    let bench = delivered_again(200).await;
    let running = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let (now, peak) = (Arc::clone(&running), Arc::clone(&most));
    let consumer = bench
        .consumer(Hooked(move || {
            let (now, peak) = (Arc::clone(&now), Arc::clone(&peak));
            async move {
                peak.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                sleep(Duration::from_secs(1)).await;
                now.fetch_sub(1, SeqCst);
            }
        }))
        .concurrency(8);
    let began = Instant::now();
    bench.run(consumer, 200).await.unwrap();
    assert_eq!(most.load(SeqCst), 8, "as many as there are permits");
    // 25 rounds of eight: none waits behind the other 63 of its unit.
    assert!(began.elapsed() < Duration::from_secs(30));
}

/// In a replay, the prefetch finds most of them completed. Of a unit of 64, one has a permit.
// invariant: schedule-loses-message
#[tokio::test(start_paused = true)]
async fn what_was_found_completed_is_answered_when_permits_are_free() {
    const MESSAGES: usize = 3_000;
    let bench = delivered_again(MESSAGES).await;
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    let consumer = bench
        .consumer(Hooked(move || {
            count.fetch_add(1, SeqCst);
            sleep(Duration::from_millis(20))
        }))
        .in_flight(256, 1 << 20)
        .concurrency(8);
    let run = bench.run(consumer, MESSAGES);
    let ended = timeout(Duration::from_secs(3_600), run).await;
    ended.expect("none is lost in the engine").unwrap();
    assert_eq!(told.load(SeqCst), MESSAGES);
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 0);
}

/// A duplicate that was looked up waits behind a message of its order, and is then in a batch with
/// messages that are new.
// invariant: schedule-loses-message
#[tokio::test(start_paused = true)]
async fn what_was_found_completed_is_in_batches_with_what_is_new() {
    const KNOWN: usize = 600;
    const GROUPS: usize = 100;
    let known = delivered_again(KNOWN).await;
    let order = |id: usize| format!(r#"{{"id":{id}}}"#);
    let groups = (0..GROUPS).flat_map(|n| {
        let group: &'static str = Box::leak(format!("g{n}").into_boxed_str());
        [
            (group, order(10_000 + n)),
            (group, order(n)),
            ("", order(20_000 + n)),
        ]
    });
    let messages: Vec<_> = numbered(KNOWN).into_iter().chain(groups).collect();
    let count = messages.len();
    let bench = Bench {
        store: Arc::clone(&known.store),
        ..Bench::of(messages)
    };
    let source = Listed(Arc::clone(&bench.list));
    let batched = Batched::new(BatchLimits::new(8), Slow);
    let consumer = Consumer::new(source, bench.gate("runtime"), batched)
        .observer(Arc::clone(&bench.counters) as _)
        .in_flight(48, 1 << 20)
        .concurrency(4);
    let run = bench.run(consumer, count);
    let ended = timeout(Duration::from_secs(3_600), run).await;
    ended.expect("none is lost in the engine").unwrap();
    let handled = bench.counters.get("handler_runs", "succeeded");
    assert_eq!(handled, 2 * GROUPS as u64);
}

/// Takes a moment for what is new.
struct Slow;

impl BatchHandler for Slow {
    type Output = ();

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
        sleep(Duration::from_millis(10)).await;
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}

#[tokio::test(start_paused = true)]
async fn an_id_that_is_used_again_shows_in_the_status() {
    fn orders(amount: u32) -> impl Iterator<Item = (&'static str, String)> {
        let order = move |id| ("orders", format!(r#"{{"id":{id},"amount":{amount}}}"#));
        (0..400).map(order)
    }
    let first = Bench::of(orders(1));
    let consumer = first.consumer(Hooked(|| std::future::ready(())));
    first.run(consumer, 400).await.unwrap();
    let is_marked = |record: &oncegate::core::record::Record| record.fingerprint.is_some();
    let records = first.store.records();
    let marked = records.iter().filter(|(_, record)| is_marked(record));
    let marked = marked.count() as u64;
    assert!((5..60).contains(&marked), "one key in sixteen: {marked}");

    for (amount, expected) in [(1, 0), (2, marked)] {
        let again = Bench {
            store: Arc::clone(&first.store),
            ..Bench::of(orders(amount))
        };
        let consumer = again.consumer(Hooked(|| std::future::ready(())));
        let monitor = consumer.monitor();
        let list = Arc::clone(&again.list);
        let watched = async {
            list.until_acked(400).await;
            let warnings = monitor.status().scopes[0].warnings.concat();
            assert_eq!(
                warnings.contains("duplicates had another content"),
                expected > 0,
                "{warnings}"
            );
        };
        consumer.run_until(watched).await.unwrap();
        assert_eq!(again.counters.total("other_contents"), expected);
        assert_eq!(again.counters.total("fingerprints_uncompared"), 0);
    }
}
