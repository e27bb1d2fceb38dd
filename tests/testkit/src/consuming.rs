//! A consumer in this process that goes through a topic while a test takes something away from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use oncegate::core::store::Store;
use oncegate::kafka::KafkaSource;
use oncegate::{Attempt, Consumer, ConsumerError, Gate, Key, Message};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::{Kafka, Record, Watched, unique};

const PARTITIONS: i32 = 4;
const A_RUN_TAKES: Duration = Duration::from_millis(5);

/// A consumer of as many messages as there are keys.
#[derive(Debug)]
pub struct Consuming {
    /// What it observes.
    pub watched: Arc<Watched>,
    kafka: Kafka,
    topic: String,
    group: String,
    messages: u64,
    runs: Arc<AtomicU64>,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), ConsumerError>>,
}

impl Consuming {
    /// How many handlers run at a time.
    pub const CONCURRENCY: u32 = 16;

    /// Fills a topic and starts. Each run returns `result`; choose a `lease` that outlives the
    /// fault, so that no run is cut short and none is taken over.
    ///
    /// # Panics
    /// When there is no broker.
    pub async fn start(
        store: impl Store + 'static,
        messages: u64,
        lease: Duration,
        result: String,
    ) -> Self {
        Self::start_with(store, messages, lease, result, |consumer| consumer).await
    }

    /// The same with more settings.
    ///
    /// # Panics
    /// When there is no broker.
    pub async fn start_with(
        store: impl Store + 'static,
        messages: u64,
        lease: Duration,
        result: String,
        set: impl FnOnce(Consumer) -> Consumer,
    ) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("consuming", PARTITIONS).await;
        kafka.produce(&topic, (0..messages).map(record)).await;

        let runs = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&runs);
        let handler = move |_: Message, _: Attempt| {
            let counted = Arc::clone(&counted);
            let result = result.clone();
            async move {
                tokio::time::sleep(A_RUN_TAKES).await;
                counted.fetch_add(1, Relaxed);
                Ok(result)
            }
        };
        let group = unique("consuming");
        let watched = Watched::new();
        let gate = Gate::new(unique("consuming"), Key::json(["id"]), store).lease(lease);
        let source = KafkaSource::new(kafka.bootstrap(), group.as_str(), [topic.as_str()]);
        let consumer = Consumer::new(source, gate, handler).concurrency(Self::CONCURRENCY);
        let consumer = set(consumer.observer(Arc::clone(&watched) as _));
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Self {
            watched,
            kafka,
            topic,
            group,
            messages,
            runs,
            stop,
            running,
        }
    }

    /// Puts so many more messages into the topic, with keys of their own.
    ///
    /// # Panics
    /// When there is no broker.
    pub async fn more(&mut self, messages: u64) {
        let before = self.messages;
        self.messages += messages;
        self.kafka
            .produce(&self.topic, (before..self.messages).map(record))
            .await;
    }

    /// Waits until all is acknowledged, stops, and judges: every message ran once, and the whole
    /// topic is committed.
    ///
    /// # Panics
    /// When it is not so.
    pub async fn ends_well(self) {
        let messages = self.messages;
        let watched = Arc::clone(&self.watched);
        assert_eq!(self.ends().await, messages, "every message ran once");
        assert_eq!(watched.total("extra_runs"), 0);
    }

    /// Waits until all is acknowledged, stops, and judges: every message ran, and the whole topic
    /// is committed. Returns how many runs there were.
    ///
    /// # Panics
    /// When it is not so.
    pub async fn ends(self) -> u64 {
        self.watched.until("acks", self.messages).await;
        _ = self.stop.send(());
        self.running
            .await
            .expect("it does not panic")
            .expect("it stops well");
        let runs = self.runs.load(Relaxed);
        assert!(runs >= self.messages, "every message ran");
        let committed: i64 = self
            .kafka
            .committed_offsets(&self.group, &self.topic)
            .await
            .values()
            .sum();
        assert_eq!(committed.unsigned_abs(), self.messages);
        runs
    }
}

fn record(n: u64) -> Record {
    Record::new(format!(r#"{{"id":{n}}}"#)).key(n.to_string())
}
