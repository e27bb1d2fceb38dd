//! A consumer on a real broker and a real store, watched as operators watch it.

use std::time::Duration;

use oncegate::consumer::ConsumerHandler;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::telemetry::Telemetry;
use oncegate::{Backoff, Consumer, ConsumerError, Gate, Key, Message};
use oncegate_testkit::{HttpClient, HttpServer, Kafka, Record, Sent, unique, until};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The longest wait for anything.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

pub(crate) struct Stage {
    pub(crate) kafka: Kafka,
    pub(crate) topic: String,
    pub(crate) scope: String,
    pub(crate) telemetry: Telemetry,
    dead: String,
}

/// A consumer that runs, with its endpoint.
pub(crate) struct Running {
    pub(crate) server: HttpServer,
    client: HttpClient,
    stop: oneshot::Sender<()>,
    consumer: JoinHandle<Result<(), ConsumerError>>,
}

impl Stage {
    pub(crate) async fn new(name: &str) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic(name, 3).await;
        let dead = kafka.new_topic(&format!("{name}-dead"), 1).await;
        let telemetry = Telemetry::prometheus().unwrap();
        Self {
            kafka,
            topic,
            scope: unique(name),
            telemetry,
            dead,
        }
    }

    pub(crate) async fn produce(&self, records: Vec<Record>) {
        self.kafka.produce(&self.topic, records).await;
    }

    /// Consumes through the Redis of this address, with messages that have an `id`.
    pub(crate) async fn start(
        &self,
        redis: &str,
        handler: impl ConsumerHandler,
        set: impl FnOnce(Consumer) -> Consumer,
    ) -> Running {
        let store = RedisStore::connect(redis).await.unwrap();
        self.start_with(
            Gate::new(self.scope.as_str(), Key::json(["id"]), store),
            handler,
            set,
        )
        .await
    }

    pub(crate) async fn start_with(
        &self,
        gate: Gate,
        handler: impl ConsumerHandler,
        set: impl FnOnce(Consumer) -> Consumer,
    ) -> Running {
        let source = KafkaSource::new(
            self.kafka.bootstrap(),
            self.scope.as_str(),
            [self.topic.as_str()],
        );
        let dead_letters = source.dead_letters(self.dead.as_str());
        let backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(50));
        let consumer = Consumer::new(source, gate, handler)
            .dead_letters(dead_letters)
            .backoff(backoff);
        let consumer = self.telemetry.watch(set(consumer));
        let server = HttpServer::start(self.telemetry.router()).await;
        let client = HttpClient::http1(server.address());
        let (stop, stopped) = oneshot::channel::<()>();
        let consumer = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Running {
            server,
            client,
            stop,
            consumer,
        }
    }

    /// Waits until so many messages were acknowledged.
    pub(crate) async fn acked(&self, messages: u64) {
        until("acks", LIMIT, async || {
            let counters = self.telemetry.counters();
            let acks = counters.total("acks");
            if acks >= messages {
                Ok(())
            } else {
                Err(format!("{acks} of {messages}: {:?}", counters.snapshot()))
            }
        })
        .await;
    }
}

impl Running {
    /// The status and the text of what stands at a path.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let answer = self
            .client
            .send(Sent::post(path, "", "").method("GET").unkeyed())
            .await;
        (
            answer.status.as_u16(),
            String::from_utf8(answer.body.to_vec()).unwrap(),
        )
    }

    /// The value of a series of `/metrics`, by its name and labels as they stand there.
    pub(crate) async fn metric(&self, series: &str) -> Option<f64> {
        let (_, text) = self.get("/metrics").await;
        text.lines()
            .find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
    }

    /// Waits for `/readyz` to answer with this status, and returns its body.
    pub(crate) async fn probed(&self, expected: u16) -> String {
        until("/readyz", LIMIT, async || {
            let (status, text) = self.get("/readyz").await;
            if status == expected {
                Ok(text)
            } else {
                Err(format!("{status} {text}"))
            }
        })
        .await
    }

    pub(crate) async fn stop(self) {
        self.stop.send(()).unwrap();
        self.consumer.await.unwrap().unwrap();
    }
}

/// A message with this id.
pub(crate) fn order(id: u32) -> Record {
    Record::new(format!(r#"{{"id":{id}}}"#)).key(id.to_string())
}

/// The id of such a message.
pub(crate) fn id(message: &Message) -> u32 {
    let payload: serde_json::Value = serde_json::from_slice(message.payload()).unwrap();
    u32::try_from(payload["id"].as_u64().unwrap()).unwrap()
}
