//! What these tests stand on: a queue, a store, consumers, and witnesses of what their handlers
//! did.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncegate::redis::RedisStore;
use oncegate::sqs::SqsSource;
use oncegate::{Attempt, Backoff, Consumer, ConsumerError, Failure, Gate, Handler, Key, Message};
use oncegate_testkit::{Queue, Redis, Sqs, SqsProxy, Watched, unique};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinHandle;

/// How long a queue hides a message: so long that none comes again because a machine stands still.
const VISIBILITY: Duration = Duration::from_secs(30);
/// The same where a test waits for extensions, which must come in time on a busy machine.
pub(crate) const EXTENDED_VISIBILITY: Duration = Duration::from_secs(15);
/// The same where a test waits for its end.
pub(crate) const SHORT_VISIBILITY: Duration = Duration::from_secs(6);
/// How long a receive waits for messages.
const WAIT: Duration = Duration::from_secs(2);
/// The lease of a claim: so long that none is lost because a machine stands still.
const LEASE: Duration = Duration::from_secs(30);
/// The longest wait for what a handler does.
const LIMIT: Duration = Duration::from_secs(240);
pub(crate) const MAX_ATTEMPTS: u32 = 3;

/// A queue with its dead-letter queue, a scope, and everything that its consumers share.
pub(crate) struct Stage {
    /// As the tests see it.
    pub(crate) queue: Queue,
    pub(crate) dead: Queue,
    /// As the consumers see it.
    sqs: Sqs,
    redis: Redis,
    scope: String,
    visibility: Duration,
    lease: Duration,
}

impl Stage {
    /// A standard queue.
    pub(crate) async fn on(sqs: &Sqs) -> Self {
        Self::of(
            sqs,
            sqs.new_queue("orders").await,
            sqs.new_queue("dead").await,
        )
        .await
    }

    pub(crate) async fn fifo_on(sqs: &Sqs) -> Self {
        Self::of(
            sqs,
            sqs.new_fifo_queue("orders").await,
            sqs.new_fifo_queue("dead").await,
        )
        .await
    }

    async fn of(sqs: &Sqs, queue: Queue, dead: Queue) -> Self {
        Self {
            queue,
            dead,
            sqs: sqs.clone(),
            redis: Redis::shared().await,
            scope: unique("sqs"),
            visibility: VISIBILITY,
            lease: LEASE,
        }
    }

    /// The same, with sources that hide a message for so long.
    pub(crate) fn with_visibility(self, visibility: Duration) -> Self {
        Self { visibility, ..self }
    }

    /// The same, with claims that are lost after so long without a heartbeat.
    pub(crate) fn with_lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// The same, with another store.
    pub(crate) fn with_redis(self, redis: &Redis) -> Self {
        Self {
            redis: redis.clone(),
            ..self
        }
    }

    /// The same, with consumers that reach the queue through the proxy. The tests see it as it is.
    pub(crate) fn through(self, proxy: &SqsProxy) -> Self {
        Self {
            sqs: proxy.sqs(),
            ..self
        }
    }

    /// The same queue and scope, reached directly.
    pub(crate) fn beside(&self, sqs: &Sqs) -> Self {
        Self {
            queue: self.queue.clone(),
            dead: self.dead.clone(),
            sqs: sqs.clone(),
            redis: self.redis.clone(),
            scope: self.scope.clone(),
            visibility: self.visibility,
            lease: self.lease,
        }
    }

    pub(crate) async fn send(&self, ids: impl IntoIterator<Item = u32, IntoIter: Send> + Send) {
        self.queue.send(ids.into_iter().map(body)).await;
    }

    pub(crate) async fn store(&self) -> RedisStore {
        RedisStore::connect(self.redis.url()).await.unwrap()
    }

    pub(crate) fn source(&self) -> SqsSource {
        let source = SqsSource::from_client(self.sqs.client().clone(), self.queue.url());
        source.visibility(self.visibility).wait(WAIT)
    }

    pub(crate) async fn start(&self, handler: impl Handler) -> Running {
        self.start_with(self.source(), handler, |consumer| consumer)
            .await
    }

    /// A consumer of this source, with further settings.
    pub(crate) async fn start_with(
        &self,
        source: SqsSource,
        handler: impl Handler,
        tune: impl FnOnce(Consumer) -> Consumer,
    ) -> Running {
        let watched = Watched::new();
        let gate =
            Gate::new(self.scope.as_str(), Key::json(["id"]), self.store().await).lease(self.lease);
        let dead_letters = source.dead_letters(self.dead.url());
        let consumer = Consumer::new(source, gate, handler)
            .dead_letters(dead_letters)
            .max_attempts(MAX_ATTEMPTS)
            .backoff(Backoff::new(
                Duration::from_millis(20),
                Duration::from_millis(100),
            ))
            .observer(Arc::clone(&watched) as _);
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(tune(consumer).run_until(async { _ = stopped.await }));
        Running {
            watched,
            stop,
            ended,
        }
    }
}

/// A running consumer, and the events that it reports.
pub(crate) struct Running {
    pub(crate) watched: Arc<Watched>,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), ConsumerError>>,
}

impl Running {
    pub(crate) async fn stop(self) -> Arc<Watched> {
        self.stop.send(()).expect("it runs");
        self.ended
            .await
            .expect("it does not panic")
            .expect("it ends well");
        self.watched
    }

    /// It ends by itself, with an error.
    pub(crate) async fn fails(self) -> ConsumerError {
        // Dropping this end asks the consumer to stop.
        let _stop = self.stop;
        let ended = tokio::time::timeout(LIMIT, self.ended)
            .await
            .expect("it ends in time");
        ended.expect("it does not panic").expect_err("it fails")
    }
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

/// How often the queue has handed out this message, this time included.
pub(crate) fn receives(message: &Message) -> u32 {
    let count = message
        .header("AWS.ApproximateReceiveCount")
        .expect("the queue counts");
    std::str::from_utf8(count).unwrap().parse().unwrap()
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

    pub(crate) fn lines(&self) -> Vec<String> {
        self.0.borrow().clone()
    }

    /// How often each line stands there.
    pub(crate) fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        self.lines()
            .into_iter()
            .for_each(|line| *counts.entry(line).or_default() += 1);
        counts
    }

    pub(crate) async fn until(&self, what: &str, so: impl Fn(&[String]) -> bool + Send + Sync) {
        let mut lines = self.0.subscribe();
        let reached = tokio::time::timeout(LIMIT, lines.wait_for(|lines| so(lines)))
            .await
            .is_ok();
        assert!(reached, "not {what} after {LIMIT:?}: {:?}", self.lines());
    }

    pub(crate) async fn until_line(&self, line: &str) {
        self.until(&format!("written: {line}"), |lines| {
            lines.iter().any(|known| known == line)
        })
        .await;
    }
}

/// Writes each charge and each answer into the book.
#[derive(Clone)]
pub(crate) struct Clerk {
    pub(crate) book: Book,
    /// Each run waits here before its effect.
    valve: Option<Arc<Semaphore>>,
}

impl Clerk {
    pub(crate) fn new() -> Self {
        Self {
            book: Book::new(),
            valve: None,
        }
    }

    /// One whose runs wait until [`Clerk::open`].
    pub(crate) fn waiting() -> Self {
        Self {
            book: Book::new(),
            valve: Some(Arc::new(Semaphore::new(0))),
        }
    }

    pub(crate) fn open(&self) {
        self.valve.as_ref().expect("its runs wait").close();
    }

    /// How often each message was charged.
    pub(crate) fn charges(&self) -> BTreeMap<String, usize> {
        self.book
            .counts()
            .into_iter()
            .filter(|(line, _)| line.starts_with("charge "))
            .collect()
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
                _ = valve.acquire() => {}
                () = attempt.cancelled() => {
                    self.book.write(format!("cancelled {id}"));
                    return Err(Failure::retry("cancelled"));
                }
            }
        }
        self.book.write(format!("charge {id}"));
        Ok(id)
    }

    /// Writes `answer 7, receive 2`.
    async fn duplicate(&self, message: &Message, id: u32) -> Result<(), Failure> {
        self.book
            .write(format!("answer {id}, receive {}", receives(message)));
        Ok(())
    }
}
