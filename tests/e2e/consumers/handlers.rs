//! Misbehaving handlers on a real broker and a real store.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::consumer::Monitor;
use oncegate::health::Phase;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::{
    Attempt, Backoff, BoxError, Consumer, ConsumerError, Failure, Gate, Handler, Key, Message,
    Ordering,
};
use oncegate_testkit::{Kafka, Record, Redis, Watched, unique, until};
use rdkafka::Message as _;
use rdkafka::message::Headers;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

const LEASE: Duration = Duration::from_secs(2);
/// The longest wait for anything.
const LIMIT: Duration = Duration::from_secs(240);

/// A topic of one partition, a scope, and everything that consumers of it share.
struct Stage {
    kafka: Kafka,
    redis: Redis,
    topic: String,
    dead: String,
    scope: String,
}

/// A running consumer, and the events that it reports.
struct Running {
    group: String,
    watched: Arc<Watched>,
    monitor: Monitor,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), ConsumerError>>,
}

impl Stage {
    async fn with(payloads: impl IntoIterator<Item = String>) -> Self {
        let kafka = Kafka::shared().await;
        let redis = Redis::shared().await;
        let topic = kafka.new_topic("handlers", 1).await;
        let dead = kafka.new_topic("dead", 1).await;
        kafka
            .produce(
                &topic,
                payloads
                    .into_iter()
                    .map(Record::new)
                    .collect::<Vec<Record>>(),
            )
            .await;
        Self {
            kafka,
            redis,
            topic,
            dead,
            scope: unique("handlers"),
        }
    }

    async fn start(&self, handler: impl Handler) -> Running {
        self.start_as(handler, |gate| gate, |consumer| consumer)
            .await
    }

    /// The same with another gate and another consumer than usual.
    async fn start_as(
        &self,
        handler: impl Handler,
        gate_as: impl FnOnce(Gate) -> Gate,
        consumer_as: impl FnOnce(Consumer) -> Consumer,
    ) -> Running {
        let group = unique("handlers");
        let watched = Watched::new();
        let store = RedisStore::connect(self.redis.url()).await.unwrap();
        let gate = Gate::new(self.scope.as_str(), Key::json(["id"]), store).lease(LEASE);
        let source = KafkaSource::new(
            self.kafka.bootstrap(),
            group.as_str(),
            [self.topic.as_str()],
        )
        .commit_interval(Duration::from_millis(50));
        let consumer = Consumer::new(Arc::new(source), gate_as(gate), handler)
            .dead_letters(oncegate::kafka::KafkaDeadLetters::new(
                self.kafka.bootstrap(),
                self.dead.as_str(),
            ))
            .max_attempts(3)
            .ordering(Ordering::Unordered)
            .backoff(Backoff::new(
                Duration::from_millis(20),
                Duration::from_millis(100),
            ))
            .stop_deadline(Duration::from_secs(5))
            // That all fail alike is what some of these tests are about.
            .without_breaker()
            .observer(Arc::clone(&watched) as _);
        let consumer = consumer_as(consumer);
        let monitor = consumer.monitor();
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Running {
            group,
            watched,
            monitor,
            stop,
            ended,
        }
    }

    async fn committed(&self, group: &str) -> Option<i64> {
        self.kafka
            .committed_offsets(group, &self.topic)
            .await
            .get(&0)
            .copied()
    }

    /// The reasons in the dead letters.
    async fn dead_letter_causes(&self) -> Vec<String> {
        let letters = self.kafka.read_all(&self.dead).await;
        let cause = |letter: &rdkafka::message::OwnedMessage| {
            let headers = letter.headers().expect("a dead letter has headers");
            let header = headers
                .iter()
                .find(|header| header.key == "oncegate-cause")
                .expect("a cause");
            String::from_utf8(header.value.expect("a value").to_vec()).expect("text")
        };
        letters.iter().map(cause).collect()
    }
}

impl Running {
    async fn stop(self) -> Arc<Watched> {
        self.stop.send(()).expect("it runs");
        self.ended
            .await
            .expect("it does not panic")
            .expect("it ends well");
        self.watched
    }
}

fn numbered(count: u64) -> impl Iterator<Item = String> {
    (0..count).map(|id| format!(r#"{{"id":{id}}}"#))
}

fn id(message: &Message) -> Result<u64, Failure> {
    #[derive(serde::Deserialize)]
    struct Payload {
        id: u64,
    }
    Ok(message.json::<Payload>()?.id)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_fails_once_runs_again() {
    let stage = Stage::with(numbered(20)).await;
    let handler = async |_: Message, attempt: Attempt| match attempt.number() {
        1 => Err(Failure::retry("not yet")),
        attempt => Ok(attempt),
    };
    let running = stage.start(handler).await;
    running.watched.until("acks", 20).await;
    let group = running.group.clone();
    let watched = running.stop().await;
    assert_eq!(
        (
            watched.get("handler_runs", "failed"),
            watched.get("handler_runs", "succeeded")
        ),
        (20, 20)
    );
    assert_eq!(
        watched.total("extra_runs") + watched.total("dead_letters"),
        0
    );
    assert_eq!(stage.committed(&group).await, Some(20));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_always_fails_is_buried_and_stays_buried() {
    let stage = Stage::with(numbered(3)).await;
    let always = async |message: Message, _: Attempt| match id(&message)? {
        1 => Err(Failure::retry("never")),
        id => Ok(id),
    };
    let running = stage.start(always).await;
    running.watched.until("acks", 3).await;
    let watched = running.stop().await;
    assert_eq!(
        watched.get("handler_runs", "failed"),
        3,
        "as many attempts as allowed"
    );
    assert_eq!(stage.dead_letter_causes().await, ["attempts_used_up"]);

    let running = stage.start(always).await;
    running.watched.until("acks", 3).await;
    let watched = running.stop().await;
    assert_eq!(watched.total("handler_runs"), 0, "a replay runs nothing");
    assert_eq!(
        stage.dead_letter_causes().await.len(),
        1,
        "a replay buries nothing again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_gives_up_or_cannot_decode_buries_at_once() {
    let stage = Stage::with(["{\"id\":1}".to_owned(), "{\"id\":\"text\"}".to_owned()]).await;
    let handler = async |message: Message, _: Attempt| match id(&message)? {
        1 => Err(Failure::permanent("rejected")),
        id => Ok(id),
    };
    let running = stage.start(handler).await;
    running.watched.until("acks", 2).await;
    let watched = running.stop().await;
    assert_eq!(watched.get("handler_runs", "gave_up"), 2);
    assert_eq!(stage.dead_letter_causes().await, ["permanent", "permanent"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_a_failed_attempt() {
    let stage = Stage::with(numbered(2)).await;
    let handler = async |message: Message, attempt: Attempt| {
        assert!(attempt.number() > 1, "simulated");
        id(&message)
    };
    let running = stage.start(handler).await;
    running.watched.until("acks", 2).await;
    let watched = running.stop().await;
    assert_eq!(
        (
            watched.get("handler_runs", "panicked"),
            watched.get("handler_runs", "succeeded")
        ),
        (2, 2)
    );
}

/// Two consumers of one scope: the one without the lease must not get it while the handler runs.
async fn no_other_takes_over(handler: impl Handler + Clone, runs: Arc<AtomicU64>) {
    let stage = Stage::with(numbered(1)).await;
    let one = stage.start(handler.clone()).await;
    let two = stage.start(handler).await;
    one.watched.until("acks", 1).await;
    two.watched.until("acks", 1).await;
    let one = one.stop().await;
    let two = two.stop().await;
    assert_eq!(runs.load(Relaxed), 1, "the handler ran once");
    assert_eq!(one.total("extra_runs") + two.total("extra_runs"), 0);
    assert!(
        one.get("claims", "busy") + two.get("claims", "busy") > 0,
        "the other one has asked meanwhile"
    );
}

// invariant: lease-lost-to-handler
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_takes_longer_than_the_lease_keeps_it() {
    let runs = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&runs);
    let handler = move |_: Message, _: Attempt| {
        counted.fetch_add(1, Relaxed);
        async {
            tokio::time::sleep(LEASE * 4).await;
            Ok(())
        }
    };
    no_other_takes_over(handler, runs).await;
}

// invariant: lease-lost-to-handler
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_blocks_its_thread_keeps_its_lease() {
    let runs = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&runs);
    let handler = move |_: Message, _: Attempt| {
        counted.fetch_add(1, Relaxed);
        // The fault itself: a thread of the runtime does nothing else for four leases.
        async {
            std::thread::sleep(LEASE * 4);
            Ok(())
        }
    };
    no_other_takes_over(handler, runs).await;
}

// invariant: commit-past-unfinished
#[tokio::test(flavor = "multi_thread")]
async fn no_offset_is_committed_past_a_message_that_is_not_finished() {
    let stage = Stage::with(numbered(50)).await;
    let go_on = Arc::new(Notify::new());
    let gate = Arc::clone(&go_on);
    let handler = move |message: Message, _: Attempt| {
        let gate = Arc::clone(&gate);
        async move {
            if id(&message)? == 20 {
                gate.notified().await;
            }
            Ok::<(), Failure>(())
        }
    };
    let running = stage.start(handler).await;
    running.watched.until("acks", 49).await;
    // Committed by time: wait until the first unfinished message is reached, and see that it is the
    // end.
    committed_reaches(&stage, &running.group, 20).await.unwrap();
    let commits = running.watched.total("commits");
    assert_eq!(
        stage.committed(&running.group).await,
        Some(20),
        "49 are finished, and 20 is not"
    );
    go_on.notify_one();
    running.watched.until("acks", 50).await;
    let group = running.group.clone();
    let watched = running.stop().await;
    assert_eq!(stage.committed(&group).await, Some(50));
    assert!(watched.total("commits") > commits);
}

async fn committed_reaches(stage: &Stage, group: &str, offset: i64) -> Result<(), BoxError> {
    let reached = async {
        while stage.committed(group).await < Some(offset) {
            tokio::task::yield_now().await;
        }
    };
    Ok(tokio::time::timeout(Duration::from_secs(30), reached).await?)
}

/// What a handler can leave behind: its message, and a task that never ends and has it too.
type LeftBehind = Arc<Mutex<Vec<(Message, JoinHandle<()>)>>>;

// invariant: stop-waits-for-leak
#[tokio::test(flavor = "multi_thread")]
async fn messages_and_tasks_that_handlers_leak_hold_up_nothing() {
    const LEAKS: u64 = 200;
    let stage = Stage::with(numbered(LEAKS)).await;
    let left = LeftBehind::default();
    let leaking = Arc::clone(&left);
    let handler = move |message: Message, _: Attempt| {
        let kept = message.clone();
        let leaking = Arc::clone(&leaking);
        async move {
            let task = tokio::spawn(async move {
                std::future::pending::<()>().await;
                drop(kept);
            });
            leaking.lock().unwrap().push((message, task));
            Ok(())
        }
    };
    // The limit in flight is far below the leaked count: an ended message no longer counts, even if
    // a handler keeps it.
    let running = stage
        .start_as(
            handler,
            |gate| gate,
            |consumer| consumer.in_flight(16, 1 << 20),
        )
        .await;
    running.watched.until("acks", LEAKS).await;
    let group = running.group.clone();
    let watched = running.stop().await;
    assert_eq!(stage.committed(&group).await, i64::try_from(LEAKS).ok());
    assert_eq!(
        (
            watched.get("handler_runs", "succeeded"),
            watched.total("extra_runs")
        ),
        (LEAKS, 0)
    );
    let left = left.lock().unwrap();
    assert_eq!(
        left.iter().filter(|(_, task)| !task.is_finished()).count(),
        left.len(),
        "they are not ours to end"
    );
    left.iter().for_each(|(_, task)| task.abort());
}

/// Waits until the status of a stop names the run of this message.
async fn until_stop_names(monitor: &Monitor, origin: &str) {
    until(
        "the stop to name the handler that does not end",
        LIMIT,
        async || {
            let status = monitor.status();
            let named = status.runs.iter().any(|run| run.origin == origin);
            if status.phase == Phase::Stopping && named {
                Ok(())
            } else {
                Err(format!("{status:?}"))
            }
        },
    )
    .await;
}

// invariant: stop-waits-for-leak
#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_wait_for_ever_hold_up_no_others_and_no_stop() {
    let stage = Stage::with(numbered(40)).await;
    let began = Arc::new(Notify::new());
    let begin = Arc::clone(&began);
    let handler = move |message: Message, attempt: Attempt| {
        let begin = Arc::clone(&begin);
        async move {
            let never = match id(&message)? {
                0 => attempt.number() == 1,
                id => id >= 40,
            };
            if never {
                begin.notify_one();
                // A task of its own that never ends: the handler cannot be woken by anything.
                _ = tokio::spawn(std::future::pending::<()>()).await;
            }
            Ok(attempt.recovered())
        }
    };
    let deadline = |consumer: Consumer| consumer.stop_deadline(Duration::from_millis(500));
    let running = stage
        .start_as(handler, |gate| gate.max_run(LEASE * 4), deadline)
        .await;
    began.notified().await;
    running.watched.until("acks", 39).await;
    assert!(
        stage.committed(&running.group).await.unwrap_or_default() == 0,
        "the first one has not ended"
    );
    // It is cancelled, ignores that, is dropped, and its next attempt is marked.
    running.watched.until("acks", 40).await;
    assert_eq!(running.watched.get("handler_runs", "cancelled"), 1);
    assert_eq!(running.watched.get("extra_runs", "discarded"), 1);
    committed_reaches(&stage, &running.group, 40).await.unwrap();
    assert_eq!(
        running.watched.total("rebalances"),
        1,
        "the group never missed it"
    );

    stage
        .kafka
        .produce(&stage.topic, [Record::new(r#"{"id":40}"#)])
        .await;
    began.notified().await;
    let Running {
        group,
        watched,
        monitor,
        stop,
        ended,
    } = running;
    stop.send(()).expect("it runs");
    let stuck = format!("{}/0@40", stage.topic);
    until_stop_names(&monitor, &stuck).await;
    let ended = tokio::time::timeout(LIMIT, ended)
        .await
        .expect("the deadline holds");
    ended.expect("it does not panic").expect("it ends well");
    assert_eq!(
        stage.committed(&group).await,
        Some(40),
        "what has not ended is not acknowledged"
    );
    assert_eq!(watched.total("acks"), 40);
    assert_eq!(
        watched.get("extra_runs", "discarded"),
        2,
        "the next process sees no crash"
    );
}
