//! `oncegate replay`, on a real broker and real stores.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use oncegate::core::store::Store;
use oncegate::kafka::KafkaSource;
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{Attempt, Consumer, Failure, FingerprintSpec, Gate, Handler, Key, Message};
use oncegate_testkit::{Kafka, Postgres, Process, Record, Redis, process, unique, until};
use tokio::sync::Notify;

use super::{Answer, LIMIT, oncegate};

const KEYS: usize = 700;
const MESSAGES: usize = 1_000;

fn order(id: usize) -> Record {
    Record::new(format!(r#"{{"order_id":{id},"amount":10}}"#)).key(id.to_string())
}

fn key() -> Key {
    Key::json(["order_id"])
}

/// Counts deliveries, first ones and duplicates.
struct Counting {
    seen: AtomicUsize,
    expected: usize,
    done: Arc<Notify>,
}

impl Counting {
    fn count(&self) {
        if self.seen.fetch_add(1, SeqCst) + 1 == self.expected {
            self.done.notify_one();
        }
    }
}

impl Handler for Counting {
    type Output = ();

    async fn handle(&self, _: &Message, _: &Attempt) -> Result<(), Failure> {
        self.count();
        Ok(())
    }

    async fn duplicate(&self, _: &Message, (): ()) -> Result<(), Failure> {
        self.count();
        Ok(())
    }
}

/// Handles that many messages of the topic, with a real consumer.
async fn consume(kafka: &Kafka, topic: &str, gate: Gate, messages: usize) {
    let done = Arc::new(Notify::new());
    let handler = Counting {
        seen: AtomicUsize::new(0),
        expected: messages,
        done: Arc::clone(&done),
    };
    let source = KafkaSource::new(kafka.bootstrap(), unique("replay"), [topic]);
    let consumer = Consumer::new(source, gate, handler);
    let consumed = consumer.run_until(async move { done.notified().await });
    let consumed = tokio::time::timeout(LIMIT, consumed).await;
    consumed
        .expect("the consumer is done in time")
        .expect("the consumer ends well");
}

/// A topic with duplicates, consumed once, and what `replay` needs to read it.
struct Done {
    kafka: Kafka,
    topic: String,
    scope: String,
    store: String,
}

impl Done {
    async fn with(store: impl Store + 'static, url: String) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("replay", 3).await;
        let done = Self {
            kafka,
            topic,
            scope: unique("replay"),
            store: url,
        };
        done.produce((0..MESSAGES).map(|n| order(n % KEYS))).await;
        consume(&done.kafka, &done.topic, done.gate(store), MESSAGES).await;
        done
    }

    async fn in_redis() -> Self {
        let redis = Redis::shared().await;
        let store = RedisStore::connect(redis.url()).await.expect("connects");
        Self::with(store, redis.url().to_owned()).await
    }

    fn gate(&self, store: impl Store + 'static) -> Gate {
        Gate::new(&*self.scope, key(), store)
    }

    async fn produce(&self, records: impl IntoIterator<Item = Record, IntoIter: Send> + Send) {
        self.kafka.produce(&self.topic, records).await;
    }

    async fn replay(&self, more: &[&str]) -> Answer {
        self.replay_by("order_id", more).await
    }

    async fn replay_by(&self, key: &str, more: &[&str]) -> Answer {
        oncegate(&[&self.arguments(key), more].concat(), b"").await
    }

    fn arguments<'a>(&'a self, key: &'a str) -> Vec<&'a str> {
        let Self {
            kafka,
            topic,
            scope,
            store,
        } = self;
        let fixed = ["replay", "--brokers", kafka.bootstrap(), "--topic", topic];
        [
            &fixed[..],
            &["--store", store, "--scope", scope, "--key", key],
        ]
        .concat()
    }
}

#[tokio::test]
async fn a_consumed_topic_would_run_nothing_and_what_is_added_would() {
    let done = Done::in_redis().await;
    let answer = done.replay(&[]).await;
    assert_eq!(answer.ended(0).line("messages"), "messages 1,000");
    assert_eq!(
        answer.line("distinct keys"),
        "distinct keys 700 counted one by one"
    );
    assert_eq!(answer.line("completed"), "completed 1,000");
    assert_eq!(answer.line("would run again"), "would run again 0");
    assert_eq!(answer.line("A replay"), "A replay would change nothing.");
    let lines: Vec<&str> = answer.err.lines().collect();
    assert!(
        matches!(lines[..], [summary] if summary.contains("messages/s")),
        "{}",
        answer.err
    );

    done.produce([KEYS, KEYS + 1, KEYS].map(order)).await;
    let answer = done.replay(&[]).await;
    assert_eq!(answer.ended(1).line("would run again"), "would run again 3");
    assert_eq!(answer.line("  keys"), "keys 2 counted one by one");
    assert!(
        answer.out.contains(&format!("{}/", done.topic)),
        "examples name their place: {}",
        answer.out
    );

    // It claimed nothing: a second run reports the same.
    let document = done.replay(&["--json"]).await.ended(1).json();
    assert_eq!(document["schema"], "oncegate.replay/1");
    assert_eq!(
        (&document["known"], &document["passed"]),
        (&"same".into(), &false.into())
    );
    let counted = [
        "messages",
        "completed",
        "would_run_again",
        "would_run_again_keys",
        "without_record",
    ];
    assert_eq!(
        counted.map(|name| document[name].as_u64().unwrap()),
        [1_003, 1_000, 3, 2, 3]
    );
    assert_eq!(
        document["examples"]["would_run_again"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
}

#[tokio::test]
async fn what_has_no_key_is_no_proof_unless_it_is_allowed() {
    let done = Done::in_redis().await;
    let bad = [
        "{",
        "{}",
        r#"{"order_id":null,"card":"visa-of-alice"}"#,
        "visa-of-alice \u{1b}[",
    ];
    done.produce(
        bad.map(Record::new)
            .into_iter()
            .chain([Record::tombstone().key("t")]),
    )
    .await;
    let answer = done.replay(&[]).await;
    assert_eq!(
        answer.ended(1).line("undecodable"),
        "undecodable 5 no key can be made"
    );
    assert_eq!(answer.line("  malformed_json"), "malformed_json 2");
    assert_eq!(answer.line("  no_payload"), "no_payload 1");
    assert_eq!(answer.line("would run again"), "would run again 0");
    assert!(!answer.out.contains("visa-of-alice") && !answer.err.contains("visa-of-alice"));

    let answer = done.replay(&["--allow-dead-letters"]).await;
    assert!(
        answer
            .ended(0)
            .line("Of 1,005")
            .ends_with("5 would go to the dead letters, which is allowed.")
    );
    let document = done
        .replay(&["--allow-dead-letters", "--json"])
        .await
        .ended(0)
        .json();
    assert_eq!(
        (&document["undecodable"], &document["passed"]),
        (&5.into(), &true.into())
    );
}

#[tokio::test]
async fn the_same_in_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("once.db");
    let url = file.to_str().unwrap().to_owned();
    let done = Done::with(SqliteStore::open(&file).await.expect("opens"), url).await;
    assert_eq!(
        done.replay(&[]).await.ended(0).line("completed"),
        "completed 1,000"
    );
    done.produce([order(KEYS)]).await;
    assert_eq!(
        done.replay(&[]).await.ended(1).line("would run again"),
        "would run again 1"
    );
}

#[tokio::test]
async fn another_key_is_a_configuration_error_that_shows_both() {
    let done = Done::in_redis().await;
    done.replay_by("amount", &[])
        .await
        .ended(78)
        .says("order_id")
        .says("amount");
    let stranger = Done {
        scope: unique("stranger"),
        ..done
    };
    for _ in 0..2 {
        // Asking has not made the key of the question the scope's.
        let answer = stranger.replay_by("amount", &["--json"]).await;
        answer.ended(1).says("no gate has ever opened this scope");
        assert_eq!(answer.json()["known"], "nothing");
    }
}

#[tokio::test]
async fn a_fingerprint_reveals_other_content_under_the_same_key() {
    let redis = Redis::shared().await;
    let connect = async || RedisStore::connect(redis.url()).await.expect("connects");
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("replay", 1).await;
    let done = Done {
        kafka,
        topic,
        scope: unique("replay"),
        store: redis.url().to_owned(),
    };
    done.produce((0..10).map(order)).await;
    let gate = done
        .gate(connect().await)
        .fingerprint(FingerprintSpec::payload());
    consume(&done.kafka, &done.topic, gate, 10).await;
    done.produce([Record::new(r#"{"order_id":3,"amount":11}"#)])
        .await;

    done.replay(&[])
        .await
        .ended(0)
        .says("mismatches are not seen");
    let answer = done.replay(&["--fingerprint", "payload"]).await;
    assert_eq!(answer.ended(1).line("mismatched"), "mismatched 1");
    done.replay(&["--fingerprint", "raw"]).await.ended(78);
}

#[tokio::test]
async fn servers_and_settings_that_are_wrong() {
    let redis = Redis::shared().await;
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("replay", 1).await;
    let replay = async |brokers: &str, topic: &str, store: &str, more: &[&str]| {
        let fixed = [
            "replay",
            "--brokers",
            brokers,
            "--topic",
            topic,
            "--store",
            store,
        ];
        let fixed = [&fixed[..], &["--scope", "billing", "--key", "id"]].concat();
        oncegate(&[&fixed, more].concat(), b"").await
    };
    let brokers = kafka.bootstrap();
    let store = redis.url();
    replay("127.0.0.1:1", &topic, store, &[])
        .await
        .ended(69)
        .says("127.0.0.1:1");
    replay("127.0.0.1:1", &topic, store, &["--timeout", "100ms"])
        .await
        .ended(75)
        .says("--timeout");
    replay(brokers, &topic, "redis://127.0.0.1:1", &[])
        .await
        .ended(69);
    replay(brokers, &unique("none"), store, &[])
        .await
        .ended(78)
        .says("none-");
    replay(brokers, &topic, "mongo://db", &[])
        .await
        .ended(78)
        .says("`mongo`");
    replay(brokers, &topic, store, &["--property", "no.such=1"])
        .await
        .ended(78)
        .says("no.such");
    replay(brokers, &topic, store, &["--topic", &topic])
        .await
        .ended(2)
        .says("twice");
    // An empty topic has nothing to run.
    replay(brokers, &topic, store, &[]).await.ended(0);
}

/// It changes nothing, so a signal ends it at once, also in the middle of a topic.
#[tokio::test]
async fn a_signal_in_the_middle_of_a_topic_ends_it_without_an_answer() {
    const WAITING: &str = "FROM pg_stat_activity WHERE datname = current_database() \
                           AND wait_event_type = 'Lock' AND query LIKE '%oncegate_records%'";
    let postgres = Postgres::shared().await.database().await;
    let store = PostgresStore::connect(postgres.url())
        .await
        .expect("connects");
    store.create_schema().await.expect("makes its tables");
    let done = Done::with(store, postgres.url().to_owned()).await;
    // It has read messages of the topic when it waits for their records.
    let lock = postgres.connection().await;
    lock.batch_execute("BEGIN; LOCK TABLE oncegate_records IN ACCESS EXCLUSIVE MODE")
        .await
        .expect("locks");
    let watch = postgres.connection().await;
    let waiting = async || {
        let row = watch
            .query_one(&format!("SELECT count(*) {WAITING}"), &[])
            .await
            .expect("an answer");
        row.get::<_, i64>(0)
    };
    let folder = tempfile::tempdir().expect("a folder");
    for signal in ["TERM", "INT"] {
        let log = folder.path().join(signal);
        let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
        command.args(done.arguments("order_id"));
        let mut process = Process::spawn_logged("oncegate replay", command, &log);
        until("it to wait for records", LIMIT, async || {
            match waiting().await {
                0 => Err(std::fs::read_to_string(&log).unwrap_or_default()),
                _ => Ok(()),
            }
        })
        .await;
        process.signal(signal);
        let ended = process.end_within(LIMIT).await;
        let said = std::fs::read_to_string(&log).expect("its output");
        assert_eq!(ended.code(), Some(130), "{signal}: {said}");
        assert!(
            said.contains("interrupted") && !said.contains("messages"),
            "{signal}: {said}"
        );
        // The server would notice the end of its client only when it grants the lock.
        watch
            .batch_execute(&format!("SELECT pg_terminate_backend(pid) {WAITING}"))
            .await
            .expect("an answer");
        until("its connection to end", LIMIT, async || {
            match waiting().await {
                0 => Ok(()),
                left => Err(format!("{left} still wait")),
            }
        })
        .await;
    }
}
