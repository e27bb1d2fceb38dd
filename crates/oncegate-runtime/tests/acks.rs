//! No message is acknowledged when its completion fails, is lost, or its outcome is unknown.

// invariant (all tests): ack-before-completed

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{Command, Store, StoreError};
use oncegate::observe::Observer;
use oncegate::source::{AckHandle, Delivery, Source, SourceError};
use oncegate::{
    Attempt, Completion, Consumer, Counters, Entry, Gate, Key, MemoryStore, Message, Origin,
};
use tokio::sync::{Notify, watch};

/// What happens to completions.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Completions {
    /// They work.
    Work,
    /// They are not executed, and the store reports so.
    Fail,
    /// They are executed, and the answer never comes back.
    LoseTheAnswer,
    /// They are not executed, and the answer never comes back.
    Vanish,
    /// Another worker has taken over before.
    ComeTooLate,
}

#[derive(Debug)]
struct Scripted {
    inner: MemoryStore,
    completions: Mutex<Completions>,
    tried: watch::Sender<usize>,
}

impl Scripted {
    fn new(completions: Completions) -> Arc<Self> {
        let (tried, _) = watch::channel(0);
        Arc::new(Self {
            inner: MemoryStore::new(),
            completions: Mutex::new(completions),
            tried,
        })
    }

    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        let mode = *self.completions.lock().unwrap();
        let completes = matches!(command.operation, Operation::Complete { .. });
        let inner = async |command| self.inner.execute(vec![command]).await.remove(0);
        if !completes {
            return inner(command).await;
        }
        let answer = match mode {
            Completions::Work => inner(command).await,
            Completions::Fail => Err(StoreError::unavailable("it is down")),
            Completions::LoseTheAnswer => {
                inner(command).await?;
                Err(StoreError::unknown("the connection was cut"))
            }
            Completions::Vanish => Err(StoreError::unknown("the connection was cut")),
            Completions::ComeTooLate => Ok(Reply::NotOwner),
        };
        self.tried.send_modify(|tried| *tried += 1);
        answer
    }
}

#[async_trait]
impl StoreWrapper for Scripted {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let mut replies = Vec::new();
        for command in commands {
            replies.push(self.execute_one(command).await);
        }
        replies
    }
}

/// A source of one message.
#[derive(Debug, Default)]
struct One {
    given: AtomicUsize,
    acks: AtomicUsize,
    acked: Notify,
}

#[derive(Debug)]
struct Shared(Arc<One>);

#[async_trait]
impl Source for Shared {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, _: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        if self.0.given.fetch_add(1, Relaxed) > 0 {
            std::future::pending::<()>().await;
        }
        let payload = Some(br#"{"id":1}"#.as_slice().into());
        let message = Message::new("orders", Origin::Other("the only one".into()), payload);
        Ok(Some(vec![Delivery {
            message,
            ack_handle: Arc::new(Receipt(Arc::clone(&self.0))),
        }]))
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

#[derive(Debug)]
struct Receipt(Arc<One>);

impl AckHandle for Receipt {
    fn start(&self) -> bool {
        true
    }

    fn ack(&self) {
        self.0.acks.fetch_add(1, Relaxed);
        self.0.acked.notify_one();
    }

    fn stop(&self) {}
}

/// Runs one message against a store whose completions go wrong for an hour; then they work. Returns
/// how often the handler ran.
async fn run(trouble: Completions) -> usize {
    let store = Scripted::new(trouble);
    let mut tried = store.tried.subscribe();
    let one = Arc::new(One::default());
    let runs = Arc::new(AtomicUsize::new(0));
    let counters = Arc::new(Counters::default());
    let gate =
        Gate::new("acks", Key::json(["id"]), Arc::clone(&store)).lease(Duration::from_secs(1));
    let gate = gate.max_run(Duration::from_secs(2 * 3600)).simulated(1);
    let counted = Arc::clone(&runs);
    let handler = move |_: Message, _: Attempt| {
        counted.fetch_add(1, Relaxed);
        async { Ok(()) }
    };
    let consumer =
        Consumer::new(Shared(Arc::clone(&one)), gate, handler).observer(Arc::clone(&counters) as _);
    let (stop, mut stopped) = watch::channel(false);
    let shutdown = async move { _ = stopped.wait_for(|stop| *stop).await };
    let running = tokio::spawn(consumer.run_until(shutdown));

    let hour = tokio::time::Instant::now() + Duration::from_secs(3600);
    tokio::time::timeout_at(hour, tried.wait_for(|tried| *tried >= 5))
        .await
        .expect("completions are repeated")
        .unwrap();
    assert_eq!(
        one.acks.load(Relaxed),
        0,
        "{trouble:?}: acknowledged without a completion that is known"
    );

    *store.completions.lock().unwrap() = Completions::Work;
    one.acked.notified().await;
    stop.send(true).unwrap();
    running.await.unwrap().unwrap();
    assert_eq!(one.acks.load(Relaxed), 1, "{trouble:?}");
    runs.load(Relaxed)
}

#[tokio::test(start_paused = true)]
async fn no_ack_while_the_completion_fails() {
    assert_eq!(run(Completions::Fail).await, 1);
}

#[tokio::test(start_paused = true)]
async fn no_ack_while_the_answer_to_the_completion_is_lost() {
    assert_eq!(run(Completions::LoseTheAnswer).await, 1);
}

#[tokio::test(start_paused = true)]
async fn no_ack_while_the_completion_is_unknown() {
    assert_eq!(run(Completions::Vanish).await, 1);
}

#[tokio::test(start_paused = true)]
async fn no_ack_when_the_completion_comes_too_late() {
    assert!(
        run(Completions::ComeTooLate).await > 1,
        "a lost completion asks for the verdict again"
    );
}

/// A loop of its own gets no answer to its completion, which it would take for done.
#[tokio::test(start_paused = true)]
async fn a_lease_repeats_a_completion_that_is_unknown() {
    let store = Scripted::new(Completions::Vanish);
    let mut tried = store.tried.subscribe();
    let gate =
        Gate::new("acks", Key::json(["id"]), Arc::clone(&store)).lease(Duration::from_secs(1));
    let gate = gate.max_run(Duration::from_secs(2 * 3600)).simulated(1);
    let message = Message::new(
        "orders",
        Origin::Other("one".into()),
        Some(r#"{"id":1}"#.into()),
    );
    let Entry::Granted(lease) = gate.enter(&message).await.unwrap() else {
        panic!("the key is new")
    };
    let completing = tokio::spawn(lease.complete(&()));
    let hour = Duration::from_secs(3600);
    tokio::time::timeout(hour, tried.wait_for(|tried| *tried >= 5))
        .await
        .expect("it is repeated")
        .unwrap();
    assert!(!completing.is_finished(), "nothing is known");
    *store.completions.lock().unwrap() = Completions::Work;
    assert_eq!(completing.await.unwrap().unwrap(), Completion::Applied);
}
