//! Payments, and the consumers in this process that handle them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use oncegate::admin::{self, AcceptedLoss};
use oncegate::core::key::Scope;
use oncegate::core::store::{Halt, Store};
use oncegate::kafka::KafkaSource;
use oncegate::{Attempt, Consumer, ConsumerError, Gate, Key, Message, Monitor, OnStoreLoss};
use oncegate_testkit::{Kafka, Record, Watched, unique, until};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{LIMIT, MESSAGES};

const PARTITIONS: i32 = 2;

/// A topic of payments, and the number of runs of handlers.
pub(super) struct Payments {
    pub(super) kafka: Kafka,
    pub(super) topic: String,
    pub(super) scope: Scope,
    pub(super) runs: Arc<AtomicU64>,
}

/// A consumer in this process.
pub(super) struct Process {
    pub(super) watched: Arc<Watched>,
    pub(super) monitor: Monitor,
    pub(super) stop: oneshot::Sender<()>,
    pub(super) running: JoinHandle<Result<(), ConsumerError>>,
}

impl Process {
    pub(super) async fn stop(self) {
        _ = self.stop.send(());
        self.running
            .await
            .expect("it does not panic")
            .expect("it stops well");
    }

    /// Waits until it has been refused because of the loss.
    pub(super) async fn is_refused(&self) {
        until("claims to be refused", LIMIT, async || {
            match self.watched.get("store_errors", "refused") {
                0 => Err(format!(
                    "{} losses noticed",
                    self.watched.total("store_losses")
                )),
                _ => Ok(()),
            }
        })
        .await;
    }
}

impl Process {
    /// Waits until it is not ready because its scope is halted, though it receives no message.
    pub(super) async fn is_not_ready(&self) {
        until(
            "an idle consumer of a halted scope to be unready",
            LIMIT,
            async || {
                let health = self.monitor.health();
                let says_so = health
                    .reasons()
                    .iter()
                    .any(|reason| reason.to_string().contains("accept loss"));
                if says_so && !health.is_ready() {
                    Ok(())
                } else {
                    Err(health.to_string())
                }
            },
        )
        .await;
    }
}

impl Payments {
    pub(super) async fn new() -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("loss", PARTITIONS).await;
        let scope = Scope::new(unique("loss")).unwrap();
        let payments = Self {
            kafka,
            topic,
            scope,
            runs: Arc::default(),
        };
        payments.produce().await;
        payments
    }

    /// The same payments once more.
    pub(super) async fn produce(&self) {
        let records =
            (0..MESSAGES).map(|id| Record::new(format!(r#"{{"id":{id}}}"#)).key(id.to_string()));
        self.kafka.produce(&self.topic, records).await;
    }

    pub(super) fn gate(&self, store: impl Store + 'static, on_loss: OnStoreLoss) -> Gate {
        Gate::new(self.scope.as_str(), Key::json(["id"]), store).on_store_loss(on_loss)
    }

    pub(super) fn start(
        &self,
        group: &str,
        store: impl Store + 'static,
        on_loss: OnStoreLoss,
    ) -> Process {
        let runs = Arc::clone(&self.runs);
        let handler = move |_: Message, _: Attempt| {
            runs.fetch_add(1, Relaxed);
            std::future::ready(Ok(()))
        };
        let watched = Watched::new();
        let source = KafkaSource::new(self.kafka.bootstrap(), group, [self.topic.as_str()]);
        let consumer = Consumer::new(source, self.gate(store, on_loss), handler);
        let consumer = consumer.observer(Arc::clone(&watched) as _);
        let monitor = consumer.monitor();
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Process {
            watched,
            monitor,
            stop,
            running,
        }
    }

    /// Runs every payment once, and commits.
    pub(super) async fn run_all(&self, group: &str, store: impl Store + 'static) {
        let process = self.start(group, store, OnStoreLoss::Halt);
        process.watched.until("acks", MESSAGES).await;
        // What goes with the commits is a sequence number that an earlier look has seen.
        self.is_kept_at_a_sequence(group).await;
        process.stop().await;
        assert_eq!(self.runs(), MESSAGES);
    }

    /// Waits until the broker keeps a position of the store that this process has reached by its
    /// completions.
    pub(super) async fn is_kept_at_a_sequence(&self, group: &str) {
        let is_ahead = |annotation: &String| {
            let position = annotation
                .split(' ')
                .find_map(|word| word.strip_prefix(&format!("{}=", self.scope)));
            position
                .and_then(|position| position.split_once(':'))
                .is_some_and(|(_, sequence)| sequence != "0")
        };
        until(
            "a position of the store to be committed",
            LIMIT,
            async || {
                // A commit needs something to commit.
                self.kafka
                    .produce(&self.topic, [Record::new(r#"{"id":0}"#).key("0")])
                    .await;
                let kept = self.kafka.commit_metadata(group, &self.topic).await;
                kept.iter()
                    .any(is_ahead)
                    .then_some(())
                    .ok_or(format!("{kept:?}"))
            },
        )
        .await;
    }

    pub(super) fn runs(&self) -> u64 {
        self.runs.load(Relaxed)
    }

    /// Waits for the halt: a process refuses claims before it has written it.
    pub(super) async fn halt(&self, store: &dyn Store) -> Halt {
        until("the scope to be halted", LIMIT, async || {
            admin::halt_of(store, &self.scope)
                .await
                .unwrap()
                .ok_or("it is not".to_owned())
        })
        .await
    }

    pub(super) async fn reason(&self, store: &dyn Store) -> String {
        self.halt(store).await.reason
    }

    pub(super) async fn accept(&self, store: &dyn Store) {
        let halt = self.halt(store).await;
        let accepted = admin::accept_loss(store, &self.scope, &halt).await.unwrap();
        assert!(
            matches!(accepted, AcceptedLoss::Accepted(_)),
            "{accepted:?}"
        );
    }

    /// A process that starts now, with nothing but the group's commits and the store, runs nothing
    /// until the loss is accepted; then it runs what was lost, and counts it.
    pub(super) async fn notices_at_the_start<S: Store + Clone + 'static>(
        &self,
        group: &str,
        store: S,
    ) {
        let before = self.runs();
        self.produce().await;
        let process = self.start(group, store.clone(), OnStoreLoss::Halt);
        process.is_refused().await;
        assert_eq!(
            (self.runs(), process.watched.total("acks")),
            (before, 0),
            "it ran again"
        );
        let reason = self.reason(&store).await;
        assert!(reason.contains("consumer group"), "{reason}");

        self.accept(&store).await;
        process.watched.until("acks", MESSAGES).await;
        process.stop().await;
        assert_eq!(admin::halt_of(&store, &self.scope).await.unwrap(), None);
    }
}
