//! What these tests stand on: a queue, a store, consumers, and witnesses of what their handlers
//! did.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncegate::amqp::AmqpSource;
use oncegate::consumer::Monitor;
use oncegate::health::{Health, Reason};
use oncegate::redis::RedisStore;
use oncegate::{Attempt, Backoff, Consumer, ConsumerError, Failure, Gate, Handler, Key, Message};
use oncegate_testkit::{QueueKind, RabbitMq, RabbitQueue, Redis, Watched, unique, until};
use tokio::sync::{Semaphore, SemaphorePermit, oneshot, watch};
use tokio::task::JoinHandle;

/// The longest wait for what a handler does.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);
pub(crate) const MAX_ATTEMPTS: u32 = 3;

/// A queue with its dead-letter queue, a scope, and everything that its consumers share.
pub(crate) struct Stage {
    pub(crate) queue: RabbitQueue,
    pub(crate) dead: RabbitQueue,
    pub(crate) uri: String,
    redis: Redis,
    pub(crate) scope: String,
}

impl Stage {
    pub(crate) async fn on(server: &RabbitMq, kind: QueueKind) -> Self {
        Self::of(server, server.new_queue("orders", kind).await).await
    }

    pub(crate) async fn of(server: &RabbitMq, queue: RabbitQueue) -> Self {
        let dead = server.new_queue("dead", QueueKind::Quorum).await;
        Self {
            queue,
            dead,
            uri: server.uri(),
            redis: Redis::shared().await,
            scope: unique("amqp"),
        }
    }

    pub(crate) async fn send(&self, ids: impl IntoIterator<Item = u32, IntoIter: Send> + Send) {
        self.queue.send(ids.into_iter().map(body)).await;
    }

    pub(crate) async fn store(&self) -> RedisStore {
        RedisStore::connect(self.redis.url()).await.unwrap()
    }

    pub(crate) fn source(&self) -> AmqpSource {
        AmqpSource::new(self.uri.as_str(), self.queue.name())
    }

    pub(crate) async fn start(&self, handler: impl Handler) -> Running {
        self.start_with(self.source(), handler, |consumer| consumer)
            .await
    }

    /// A consumer of this source, with further settings.
    pub(crate) async fn start_with(
        &self,
        source: AmqpSource,
        handler: impl Handler,
        tune: impl FnOnce(Consumer) -> Consumer,
    ) -> Running {
        let watched = Watched::new();
        let gate = Gate::new(self.scope.as_str(), Key::json(["id"]), self.store().await);
        let dead_letters = source.dead_letters(self.dead.name());
        let consumer = Consumer::new(source, gate, handler)
            .dead_letters(dead_letters)
            .max_attempts(MAX_ATTEMPTS)
            .backoff(Backoff::new(
                Duration::from_millis(20),
                Duration::from_millis(100),
            ))
            .observer(Arc::clone(&watched) as _);
        let consumer = tune(consumer);
        let monitor = consumer.monitor();
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Running {
            watched,
            monitor,
            stop,
            ended,
        }
    }
}

/// A running consumer, and the events that it reports.
pub(crate) struct Running {
    pub(crate) watched: Arc<Watched>,
    monitor: Monitor,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), ConsumerError>>,
}

impl Running {
    pub(crate) fn monitor(&self) -> Monitor {
        self.monitor.clone()
    }

    pub(crate) async fn stop(self) -> Arc<Watched> {
        self.stop.send(()).expect("it runs");
        self.ended
            .await
            .expect("it does not panic")
            .expect("it ends well");
        self.watched
    }

    /// It ends by itself, with an error.
    pub(crate) async fn fails(self) -> String {
        // Dropping this end asks the consumer to stop.
        let _stop = self.stop;
        let ended = tokio::time::timeout(LIMIT, self.ended)
            .await
            .expect("it ends in time");
        let error = ended.expect("it does not panic").expect_err("it fails");
        format!("{error:#?} {error}")
    }

    pub(crate) async fn until_health(
        &self,
        what: &str,
        so: impl Fn(&Health) -> bool + Send + Sync,
    ) -> Health {
        until(what, LIMIT, async || {
            let status = self.monitor.status();
            let health = Health::of(&status);
            if so(&health) {
                Ok(health)
            } else {
                Err(format!("{health}: {status:?}"))
            }
        })
        .await
    }

    /// Waits until the failure of this operation says this word, and returns its whole text.
    pub(crate) async fn until_failure(&self, operation: &str, word: &str) -> String {
        until(word, LIMIT, async || {
            let status = self.monitor.status();
            let failures = status.source.failures.iter();
            let said = failures
                .filter(|failure| failure.operation == operation)
                .find_map(|failure| failure.error.contains(word).then(|| failure.error.clone()));
            said.ok_or_else(|| format!("{:?}", status.source))
        })
        .await
    }
}

/// The error of the operation that stops deliveries.
pub(crate) fn fails(health: &Health, wanted: &str) -> Option<String> {
    health.reasons().iter().find_map(|reason| match reason {
        Reason::SourceFails {
            operation, error, ..
        } if operation == wanted => Some(error.clone()),
        _ => None,
    })
}

pub(crate) fn body(id: u32) -> String {
    format!(r#"{{"id":{id}}}"#)
}

pub(crate) fn id(message: &Message) -> Result<u32, Failure> {
    #[derive(serde::Deserialize)]
    struct Payload {
        id: u32,
    }
    Ok(message.json::<Payload>()?.id)
}

/// What handlers did, in order; it does not depend on oncegate.
#[derive(Clone)]
pub(crate) struct Book(Arc<watch::Sender<Vec<String>>>);

impl Book {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Vec::new())))
    }

    pub(crate) fn write(&self, line: impl Into<String>) {
        self.0.send_modify(|lines| lines.push(line.into()));
    }

    /// How many lines begin with this word.
    pub(crate) fn count(&self, word: &str) -> usize {
        self.0
            .borrow()
            .iter()
            .filter(|line| line.starts_with(word))
            .count()
    }

    pub(crate) async fn until_count(&self, word: &str, count: usize) {
        let mut lines = self.0.subscribe();
        let reached = lines
            .wait_for(|lines| lines.iter().filter(|line| line.starts_with(word)).count() >= count);
        let reached = tokio::time::timeout(LIMIT, reached).await.is_ok();
        assert!(
            reached,
            "not {count} times `{word}` after {LIMIT:?}: {:?}",
            self.0.borrow()
        );
    }

    /// Waits until so many orders are charged.
    ///
    /// Where connections are lost, a number of acks says less: one that is lost with its connection
    /// counts again for the redelivery, which is a duplicate.
    pub(crate) async fn until_charged(&self, orders: u32) {
        self.until_count("charge ", orders as usize).await;
    }

    /// The charges, in order.
    pub(crate) fn charges(&self) -> Vec<String> {
        self.0
            .borrow()
            .iter()
            .filter(|line| line.starts_with("charge "))
            .cloned()
            .collect()
    }

    /// Requires that each of so many orders was charged once.
    pub(crate) fn charged_once(&self, orders: u32) {
        let lines = self.0.borrow();
        let mut charges = BTreeMap::<&str, usize>::new();
        for line in lines.iter().filter(|line| line.starts_with("charge ")) {
            *charges.entry(line).or_default() += 1;
        }
        assert_eq!(charges.len(), orders as usize, "none is lost: {lines:?}");
        assert!(charges.values().all(|count| *count == 1), "{charges:?}");
    }
}

/// Writes each charge and each answer into the book.
#[derive(Clone)]
pub(crate) struct Clerk {
    pub(crate) book: Book,
    /// Each run waits here before its effect.
    valve: Option<Arc<Semaphore>>,
    /// Its runs do not end when they are cancelled.
    is_stubborn: bool,
}

impl Clerk {
    pub(crate) fn new() -> Self {
        Self {
            book: Book::new(),
            valve: None,
            is_stubborn: false,
        }
    }

    /// One whose runs wait until [`Clerk::open`].
    pub(crate) fn waiting() -> Self {
        Self {
            valve: Some(Arc::new(Semaphore::new(0))),
            ..Self::new()
        }
    }

    /// The same, with runs that go on when they are cancelled.
    pub(crate) fn stubborn() -> Self {
        Self {
            is_stubborn: true,
            ..Self::waiting()
        }
    }

    pub(crate) fn open(&self) {
        self.valve.as_ref().expect("its runs wait").close();
    }

    /// Lets one run that waits, or the next one, have its effect.
    pub(crate) fn let_one_through(&self) {
        self.valve.as_ref().expect("its runs wait").add_permits(1);
    }
}

impl Handler for Clerk {
    type Output = u32;

    /// Writes `start 7` and `charge 7`, or `cancelled 7` in place of the charge.
    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<u32, Failure> {
        let id = id(message)?;
        if let Some(valve) = &self.valve {
            self.book.write(format!("start {id}"));
            tokio::select! {
                biased;
                // It is opened by closing it, for good.
                permit = valve.acquire() => permit.into_iter().for_each(SemaphorePermit::forget),
                () = attempt.cancelled(), if !self.is_stubborn => {
                    self.book.write(format!("cancelled {id}"));
                    return Err(Failure::retry("cancelled"));
                }
            }
        }
        self.book.write(format!("charge {id}"));
        Ok(id)
    }

    /// Writes `answer 7`.
    async fn duplicate(&self, _message: &Message, id: u32) -> Result<(), Failure> {
        self.book.write(format!("answer {id}"));
        Ok(())
    }
}
