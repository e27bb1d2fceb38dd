//! What a handler that blocks, computes, panics or never ends costs the other members of its unit:
//! nothing.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::consumer::Monitor;
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{Command, Store};
use oncegate::{Attempt, Failure, Gate, Key, MemoryStore, Message};
use tokio::sync::watch;

use super::list::List;
use super::{Bench, numbered};

/// The members of the unit.
const MEMBERS: usize = 16;
/// The messages before them. Of handlers that end at once, many are claimed for one permit.
const WARM_UP: usize = 64;
/// The permits: one for the first member, one for the others.
const CONCURRENCY: usize = 2;
/// A handler that waits for its neighbours goes on after this time, and the test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// The most tries to have all messages in one unit.
const TRIES: u32 = 50;

/// What the first member does until all others are acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// Holds its thread, waiting.
    Blocks,
    /// The same, after its first wait.
    BlocksAfterAWait,
    /// Holds its thread, computing.
    Computes,
    /// Panics at its first attempt.
    Panics,
    NeverEnds,
}

/// A store that records how many keys each call claims, and holds claims up while it is closed.
#[derive(Debug)]
struct ClaimSizes {
    inner: Arc<MemoryStore>,
    sizes: Mutex<Vec<usize>>,
    is_open: watch::Sender<bool>,
    /// The calls that it holds up.
    held_up: watch::Sender<usize>,
}

impl ClaimSizes {
    fn over(inner: &Arc<MemoryStore>) -> Arc<Self> {
        Arc::new(Self {
            inner: Arc::clone(inner),
            sizes: Mutex::default(),
            is_open: watch::channel(true).0,
            held_up: watch::channel(0).0,
        })
    }

    async fn until_held_up(&self, calls: usize) {
        let mut held_up = self.held_up.subscribe();
        held_up.wait_for(|held_up| *held_up == calls).await.unwrap();
    }
}

#[async_trait]
impl StoreWrapper for ClaimSizes {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    async fn execute(
        &self,
        commands: Vec<Command>,
    ) -> Vec<Result<Reply, oncegate::core::store::StoreError>> {
        let claims = commands
            .iter()
            .filter(|one| matches!(one.operation, Operation::Claim { .. }))
            .count();
        self.sizes.lock().unwrap().push(claims);
        if claims > 0 && !*self.is_open.borrow() {
            self.held_up.send_modify(|held_up| *held_up += 1);
            let mut is_open = self.is_open.subscribe();
            is_open.wait_for(|is_open| *is_open).await.unwrap();
        }
        self.inner.execute(commands).await
    }
}

/// Runs messages of which the first behaves so. Returns when all others are acknowledged, and
/// whether all of them were one unit: how many are claimed at once follows from how long handlers
/// have taken, and a machine that stands still in one makes the next units small.
async fn others_end_beside(manner: Manner) -> bool {
    let quick = (1_000..).take(WARM_UP);
    let bench = Bench::of(quick.map(|id| ("", format!(r#"{{"id":{id}}}"#))));
    let (others_have_ended, ended) = mpsc::channel::<()>();
    let ended = Arc::new(Mutex::new(ended));
    let others_wait = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&others_wait);
    let handler = move |message: Message, attempt: Attempt| {
        let ended = Arc::clone(&ended);
        let waits = Arc::clone(&noted);
        let is_first = message.payload() == br#"{"id":0}"#;
        async move {
            if !is_first {
                return Ok(());
            }
            match manner {
                Manner::Panics if attempt.number() == 1 => panic!("a handler panics"),
                Manner::Panics => {}
                Manner::NeverEnds => std::future::pending().await,
                Manner::Blocks | Manner::BlocksAfterAWait => {
                    if manner == Manner::BlocksAfterAWait {
                        tokio::task::yield_now().await;
                    }
                    let waited = ended.lock().unwrap().recv_timeout(PATIENCE);
                    waits.store(waited.is_err(), SeqCst);
                }
                Manner::Computes => {
                    let began = std::time::Instant::now();
                    while ended.lock().unwrap().try_recv().is_err() && began.elapsed() < PATIENCE {
                        std::hint::spin_loop();
                    }
                    waits.store(began.elapsed() >= PATIENCE, SeqCst);
                }
            }
            Ok(())
        }
    };
    let store = ClaimSizes::over(&bench.store);
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store));
    let consumer = bench
        .consumer_behind(gate, handler)
        .concurrency(CONCURRENCY as u32)
        .stop_deadline(Duration::from_millis(100));
    let list = Arc::clone(&bench.list);
    let monitor = consumer.monitor();
    let closed = Arc::clone(&store);
    let stop = async move {
        gather(&list, &closed, &monitor).await;
        let before = WARM_UP + CONCURRENCY;
        list.until_acked(before + MEMBERS - 1).await;
        if manner == Manner::NeverEnds {
            let first = i64::try_from(before).unwrap();
            assert!(!list.acked().contains(&first), "it has not ended");
            return;
        }
        // A handler that panics does not wait for the others.
        _ = others_have_ended.send(());
        list.until_acked(before + MEMBERS).await;
    };
    consumer.run_until(stop).await.unwrap();
    assert!(
        !others_wait.load(SeqCst),
        "{manner:?}: the others have waited for the first"
    );
    store.sizes.lock().unwrap().contains(&MEMBERS)
}

/// Lets handlers run that end at once, and then delivers the members while every permit is in use,
/// so that they start as one unit.
async fn gather(list: &List, store: &ClaimSizes, monitor: &Monitor) {
    list.until_acked(WARM_UP).await;
    store.is_open.send_replace(false);
    for held_up in 1..=CONCURRENCY {
        list.push("orders", "", format!(r#"{{"id":{}}}"#, 2_000 + held_up));
        store.until_held_up(held_up).await;
    }
    for (_, payload) in numbered(MEMBERS) {
        list.push("orders", "", payload);
    }
    while monitor.status().messages.in_flight < CONCURRENCY + MEMBERS {
        tokio::task::yield_now().await;
    }
    store.is_open.send_replace(true);
}

// invariant: neighbour-held-up
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_slow_handler_does_not_delay_its_unit() {
    use Manner::{Blocks, BlocksAfterAWait, Computes, NeverEnds, Panics};
    for manner in [Blocks, BlocksAfterAWait, Computes, Panics, NeverEnds] {
        let mut tries = 1;
        while !others_end_beside(manner).await {
            tries += 1;
            assert!(tries <= TRIES, "{manner:?}: no unit had all messages");
        }
    }
}

/// Handlers that hold their threads are claimed one by one, each when a thread can begin it. The
/// one that is claimed next must not be left to a thread that is held.
// invariant: neighbour-held-up
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_claimed_next_waits_for_no_thread_that_is_held() {
    let bench = Bench::of((1_000..1_008).map(|id| ("", format!(r#"{{"id":{id}}}"#))));
    let (others_have_ended, ended) = mpsc::channel::<()>();
    let ended = Arc::new(Mutex::new(ended));
    let others_wait = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&others_wait);
    let handler = move |message: Message, _: Attempt| {
        if message.payload() == br#"{"id":0}"# {
            let waited = ended.lock().unwrap().recv_timeout(PATIENCE);
            noted.store(waited.is_err(), SeqCst);
        } else {
            // The fault itself: its thread is held.
            std::thread::sleep(Duration::from_millis(10));
        }
        std::future::ready(Ok::<(), Failure>(()))
    };
    let consumer = bench.consumer(handler).concurrency(64);
    let list = Arc::clone(&bench.list);
    let stop = async move {
        list.until_acked(8).await;
        for (_, payload) in numbered(MEMBERS) {
            list.push("orders", "", payload);
        }
        list.until_acked(8 + MEMBERS - 1).await;
        _ = others_have_ended.send(());
        list.until_acked(8 + MEMBERS).await;
    };
    consumer.run_until(stop).await.unwrap();
    assert!(!others_wait.load(SeqCst), "one has waited for the first");
}
