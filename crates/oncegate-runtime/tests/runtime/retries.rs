//! Messages that wait for their retry elsewhere.

// invariant (all tests): retry-topic

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::observe::Observer;
use oncegate::source::{Delivery, RetryQueue, Source, SourceError};
use oncegate::{Attempt, BoxError, Consumer, Failure, Handler, Message, Ordering};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::list::{List, Listed};
use super::{Bench, numbered};

const WAIT: Duration = Duration::from_secs(60);

/// A list whose far retries wait beside it.
#[derive(Debug)]
struct Retrying {
    list: Listed,
    queue: Arc<Beside>,
}

#[derive(Debug)]
struct Beside {
    list: Arc<List>,
    is_away: AtomicBool,
    waiting: Mutex<JoinSet<()>>,
}

#[async_trait]
impl RetryQueue for Beside {
    fn wait(&self, wait: Duration) -> Option<Duration> {
        (wait > Duration::from_secs(10) && wait <= WAIT).then_some(WAIT)
    }

    async fn send(&self, message: &Message, wait: Duration) -> Result<(), BoxError> {
        if self.is_away.load(SeqCst) {
            return Err("no broker answers".into());
        }
        let list = Arc::clone(&self.list);
        let message = message.clone();
        let later = async move {
            sleep(wait).await;
            list.push_again(&message);
        };
        self.waiting.lock().unwrap().spawn(later);
        Ok(())
    }
}

#[async_trait]
impl Source for Retrying {
    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        self.list.open(observer).await
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        self.list.receive(most).await
    }

    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        Some(Arc::clone(&self.queue) as _)
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        self.list.close(deadline).await
    }
}

impl Bench {
    fn retrying(&self, handler: impl Handler) -> (Consumer, Arc<Beside>) {
        let queue = Arc::new(Beside {
            list: Arc::clone(&self.list),
            is_away: AtomicBool::new(false),
            waiting: Mutex::default(),
        });
        let source = Retrying {
            list: Listed(Arc::clone(&self.list)),
            queue: Arc::clone(&queue),
        };
        let consumer = Consumer::new(source, self.gate("runtime"), handler)
            .dead_letters(Arc::clone(&self.letters))
            .observer(Arc::clone(&self.counters) as _);
        (consumer, queue)
    }
}

/// Each attempt, and when it ran.
type Runs = Arc<Mutex<Vec<(u32, Instant)>>>;

/// A handler that fails at first, and wants to be called again a minute later; and its runs.
fn fails_once() -> (impl Handler, Runs) {
    let runs = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&runs);
    let handler = move |_: Message, attempt: Attempt| {
        seen.lock()
            .unwrap()
            .push((attempt.number(), Instant::now()));
        let outcome = match attempt.number() {
            1 => Err(Failure::retry_after(WAIT / 2, "the dependency is down")),
            _ => Ok(()),
        };
        std::future::ready(outcome)
    };
    (handler, runs)
}

// invariant: order-broken-by-retry
#[tokio::test(start_paused = true)]
async fn that_they_are_overtaken_must_be_accepted() {
    for ordering in [Ordering::Key, Ordering::Partition] {
        let (consumer, _) = Bench::of(numbered(1)).retrying(async |_: Message, _: Attempt| Ok(()));
        let error = consumer
            .ordering(ordering)
            .run_until(std::future::pending())
            .await
            .unwrap_err();
        assert!(
            error.to_string().contains("`overtaking_retries`"),
            "{error}"
        );
    }
    let bench = Bench::of(numbered(1));
    let (consumer, _) = bench.retrying(async |_: Message, _: Attempt| Ok(()));
    bench.run(consumer.overtaking_retries(), 1).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn they_are_acknowledged_here_and_run_again_when_due() {
    let bench = Bench::of(numbered(3));
    let (handler, runs) = fails_once();
    let (consumer, _) = bench.retrying(handler);
    let list = Arc::clone(&bench.list);
    let seen = Arc::clone(&runs);
    let watch = async move {
        list.until_acked(3).await;
        assert_eq!(
            seen.lock().unwrap().len(),
            3,
            "all are acknowledged, and none has run twice"
        );
        list.until_acked(6).await;
    };
    consumer
        .ordering(Ordering::Unordered)
        .run_until(watch)
        .await
        .unwrap();
    let runs = runs.lock().unwrap();
    assert_eq!(
        runs.iter().map(|(attempt, _)| *attempt).collect::<Vec<_>>(),
        [1, 1, 1, 2, 2, 2]
    );
    assert!(
        runs[3..].iter().all(|(_, at)| *at - runs[2].1 >= WAIT),
        "{runs:?}"
    );
    assert_eq!(bench.counters.total("extra_runs"), 0);
    assert_eq!(bench.letters.causes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn they_wait_in_their_place_while_there_is_no_other() {
    let bench = Bench::of(numbered(1));
    let (handler, runs) = fails_once();
    let (consumer, queue) = bench.retrying(handler);
    queue.is_away.store(true, SeqCst);
    bench
        .run(consumer.ordering(Ordering::Unordered), 1)
        .await
        .unwrap();
    assert_eq!(runs.lock().unwrap().len(), 2);
    assert_eq!(
        bench.list.acked(),
        [0],
        "acknowledged once, when it was done"
    );
    assert_eq!(bench.counters.get("source_errors", "retry"), 1);
}

#[tokio::test(start_paused = true)]
async fn their_duplicates_do_not_hold_up_anything_either() {
    let bench = Bench::of(numbered(1));
    let (handler, runs) = fails_once();
    let (consumer, _) = bench.retrying(handler);
    let list = Arc::clone(&bench.list);
    let seen = Arc::clone(&runs);
    let watch = async move {
        list.until_acked(1).await;
        list.push("orders", "", r#"{"id":0}"#.to_owned());
        list.until_acked(2).await;
        assert_eq!(seen.lock().unwrap().len(), 1, "the retry is not due");
        list.until_acked(4).await;
    };
    consumer
        .ordering(Ordering::Unordered)
        .run_until(watch)
        .await
        .unwrap();
    assert_eq!(runs.lock().unwrap().len(), 2);
    assert_eq!(
        bench.counters.get("claims", "completed"),
        1,
        "the duplicate is answered"
    );
}
