//! `oncegate audit`, on a real broker and real stores.

mod lists;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use oncegate::core::store::Store;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::{Attempt, Consumer, Failure, Gate, Handler, Key, Message};
use oncegate_testkit::{Kafka, Record, Redis, unique, until};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::{Answer, LIMIT, oncegate};

const ORDERS: u64 = 600;
const PARTITIONS: i32 = 3;

/// What is planted: orders with two effects, without one, and given up; those given up later have
/// one all the same.
const DOUBLED: [u64; 3] = [7, 8, 300];
const SILENT: [u64; 2] = [11, 12];
const GIVEN_UP: [u64; 2] = [20, 21];
const GIVEN_UP_WITH_EFFECT: u64 = 22;

#[derive(serde::Deserialize)]
struct Order {
    order_id: u64,
}

/// The downstream system: the idempotency keys of its effects, by order.
#[derive(Clone, Debug, Default)]
struct Bank(Arc<Mutex<Vec<(u64, String)>>>);

impl Handler for Bank {
    type Output = ();

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        let Order { order_id } = message.json()?;
        let times = match order_id {
            id if DOUBLED.contains(&id) => 2,
            id if SILENT.contains(&id) || GIVEN_UP.contains(&id) => 0,
            _ => 1,
        };
        let key = attempt.idempotency_key("charge");
        self.0
            .lock()
            .unwrap()
            .extend(std::iter::repeat_n((order_id, key), times));
        match order_id {
            id if GIVEN_UP.contains(&id) || id == GIVEN_UP_WITH_EFFECT => {
                Err(Failure::permanent("no account"))
            }
            _ => Ok(()),
        }
    }
}

fn order(id: u64) -> Record {
    Record::new(format!(r#"{{"order_id":{id},"amount":10}}"#)).key(id.to_string())
}

/// A topic that was consumed, with its dead letters and its effects.
struct Consumed {
    kafka: Kafka,
    topic: String,
    dead: String,
    scope: String,
    store: String,
    bank: Bank,
    dir: TempDir,
}

impl Consumed {
    async fn by(store: impl Store + 'static, url: String) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("audit", PARTITIONS).await;
        let dead = kafka.new_topic("audit-dead", 1).await;
        let scope = unique("audit");
        let bank = Bank::default();
        let this = Self {
            kafka,
            topic,
            dead,
            scope,
            store: url,
            bank,
            dir: tempfile::tempdir().unwrap(),
        };
        // A third of the orders come twice.
        this.produce((0..ORDERS).chain(0..ORDERS / 3).map(order))
            .await;
        this.produce([Record::new("{").key("bad")]).await;
        this.consume(store).await;
        this
    }

    async fn in_redis() -> Self {
        let redis = Redis::shared().await;
        let store = RedisStore::connect(redis.url()).await.expect("connects");
        Self::by(store, redis.url().to_owned()).await
    }

    async fn produce(&self, records: impl IntoIterator<Item = Record, IntoIter: Send> + Send) {
        self.kafka.produce(&self.topic, records).await;
    }

    /// Consumes the whole topic, as the group that has the name of the scope.
    async fn consume(&self, store: impl Store + 'static) {
        let source = KafkaSource::new(self.kafka.bootstrap(), &*self.scope, [&*self.topic]);
        let gate = Gate::new(&*self.scope, Key::json(["order_id"]), store);
        let dead_letters = source.dead_letters(&*self.dead);
        let consumer = Consumer::new(source, gate, self.bank.clone()).dead_letters(dead_letters);
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async move { drop(stopped.await) }));
        let wanted = self.kafka.end_offsets(&self.topic).await;
        until("the whole topic to be committed", LIMIT, async || {
            let committed = self.kafka.committed_offsets(&self.scope, &self.topic).await;
            if committed == wanted {
                Ok(())
            } else {
                Err(format!("{committed:?} of {wanted:?}"))
            }
        })
        .await;
        drop(stop);
        running.await.unwrap().expect("the consumer ends well");
    }

    /// Adds messages, and commits past them although no consumer has seen them.
    async fn lose(&self, ids: impl IntoIterator<Item = u64>) {
        self.produce(ids.into_iter().map(order).collect::<Vec<_>>())
            .await;
        for (partition, end) in self.kafka.end_offsets(&self.topic).await {
            self.kafka
                .commit(&self.scope, &self.topic, partition, end)
                .await;
        }
    }

    /// The export of the bank, as a CSV file.
    fn export(&self, more: &[&str]) -> PathBuf {
        let path = self.dir.path().join("effects.csv");
        let mut text = "id,\"note\",key\n".to_owned();
        for (order, key) in &*self.bank.0.lock().unwrap() {
            text.push_str(&format!(
                "{order},\"a \"\"note\"\", of\nvisa-of-alice\",{key}\n"
            ));
        }
        more.iter()
            .for_each(|key| text.push_str(&format!("0,,{key}\n")));
        std::fs::write(&path, text).unwrap();
        path
    }

    async fn audit(&self, more: &[&str]) -> Answer {
        let Self {
            kafka,
            topic,
            scope,
            store,
            dead,
            ..
        } = self;
        let fixed = [
            "audit",
            "--brokers",
            kafka.bootstrap(),
            "--topic",
            topic,
            "--store",
            store,
        ];
        let fixed = [
            &fixed[..],
            &[
                "--scope",
                scope,
                "--key",
                "order_id",
                "--dead-letters",
                dead,
            ],
        ]
        .concat();
        oncegate(&[&fixed, more].concat(), b"").await
    }

    /// With the effects of the bank.
    async fn audit_effects(&self, more_effects: &[&str], more: &[&str]) -> Answer {
        let path = self.export(more_effects);
        let effects = [
            "--effects",
            path.to_str().unwrap(),
            "--effects-column",
            "key",
            "--step",
            "charge",
        ];
        self.audit(&[&effects, more].concat()).await
    }

    /// The origin of the first message of an order.
    async fn origin(&self, id: u64) -> String {
        use rdkafka::Message as _;
        let wanted = id.to_string();
        let messages = self.kafka.read_all(&self.topic).await;
        let of = messages
            .iter()
            .filter(|message| message.key() == Some(wanted.as_bytes()));
        let first = of
            .map(|message| (message.partition(), message.offset()))
            .min()
            .unwrap();
        format!("{}/{}@{}", self.topic, first.0, first.1)
    }
}

fn count(document: &Value, name: &str) -> u64 {
    document[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name}: {document}"))
}

/// The origins of the findings, by their kind.
fn found(document: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for finding in document["findings"].as_array().unwrap() {
        let text = |name: &str| finding[name].as_str().unwrap().to_owned();
        found
            .entry(text("verdict"))
            .or_default()
            .insert(text("origin"));
    }
    found
}

// invariant: audit-finds-what-was-planted
#[tokio::test]
async fn lost_and_doubled_effects_are_found_by_position_and_key() {
    let consumed = Consumed::in_redis().await;
    let lost = [ORDERS, ORDERS + 1, ORDERS + 2];
    consumed.lose(lost).await;
    // Not acknowledged, so not lost.
    consumed.produce([order(ORDERS + 3)]).await;
    let stranger = "8e03978e-40d5-83e8-bc93-6894a57f9324";
    let answer = consumed
        .audit_effects(&[stranger, "visa-of-alice"], &["--json"])
        .await;
    let document = answer.ended(1).json();
    assert_eq!(
        (&document["schema"], &document["passed"]),
        (&"oncegate.audit/1".into(), &false.into())
    );
    let counted = [
        "lost",
        "doubled",
        "without_effect",
        "unexplained",
        "overdue",
        "unreadable",
        "in_flight",
    ];
    assert_eq!(
        counted.map(|name| count(&document, name)),
        [3, 3, 2, 3, 0, 0, 1],
        "{document}"
    );
    assert_eq!(
        count(&document, "messages"),
        ORDERS + ORDERS / 3 + 1 + 3 + 1
    );
    assert_eq!(count(&document, "events"), ORDERS + 1 + 3 + 1);
    // Two that were given up, and the message without a key.
    assert_eq!(
        (
            count(&document, "dead_lettered"),
            count(&document, "dead_letters")
        ),
        (3, 4)
    );
    assert_eq!(count(&document, "ok"), ORDERS - 3 - 2 - 3);

    let found = found(&document);
    let expected = async |ids: &[u64]| {
        let mut origins = BTreeSet::new();
        for id in ids {
            origins.insert(consumed.origin(*id).await);
        }
        origins
    };
    assert_eq!(found["lost"], expected(&lost).await);
    assert_eq!(found["doubled"], expected(&DOUBLED).await);
    assert_eq!(found["without_effect"], expected(&SILENT).await);
    let unexplained = &found["unexplained"];
    assert!(
        unexplained.contains(&consumed.origin(GIVEN_UP_WITH_EFFECT).await)
            && unexplained.len() == 3
    );

    // Keys are those of the store and of the bank.
    let bank: BTreeMap<u64, String> = consumed.bank.0.lock().unwrap().iter().cloned().collect();
    let doubled = document["findings"].as_array().unwrap().iter();
    let doubled = doubled.filter(|finding| finding["verdict"] == "doubled");
    let keys: BTreeSet<&str> = doubled
        .map(|finding| finding["idempotency_key"].as_str().unwrap())
        .collect();
    assert_eq!(keys, DOUBLED.iter().map(|id| bank[id].as_str()).collect());
    assert!(
        !answer.out.contains("visa-of-alice") && !answer.err.contains("visa-of-alice"),
        "nothing of a payload is shown"
    );
}

#[tokio::test]
async fn a_topic_in_which_all_is_well_passes() {
    let consumed = Consumed::in_redis().await;
    let answer = consumed.audit(&[]).await;
    assert_eq!(answer.ended(0).line("ok"), format!("ok {}", ORDERS - 3));
    assert_eq!(answer.line("dead-lettered"), "dead-lettered 4");
    assert_eq!(answer.line("Nothing"), "Nothing was found.");
    assert!(
        !answer.out.contains("doubled"),
        "without a list of effects, none is judged"
    );

    // A window has fewer messages, and then effects of others are unexplained.
    let end = consumed.kafka.end_offsets(&consumed.topic).await[&1];
    let window = [
        "--partition",
        "1",
        "--from-offset",
        "5",
        "--to-offset",
        "15",
    ];
    assert_eq!(
        consumed.audit(&window).await.ended(0).line("messages"),
        "messages 10"
    );
    let later = consumed.audit(&["--since", "2100-01-01T00:00:00Z"]).await;
    assert_eq!(later.ended(0).line("messages"), "messages 0");
    assert!(
        later.line("The window").contains("nothing was compared"),
        "{later:?}"
    );
    let before = consumed
        .audit(&["--until", "2100-01-01T00:00:00Z", "--partition", "1"])
        .await;
    assert_eq!(before.ended(0).line("messages"), format!("messages {end}"));
    let echo = format!("echo {}", "8e03978e-40d5-83e8-bc93-6894a57f9324");
    let none = [
        "--since",
        "2100-01-01T00:00:00Z",
        "--effects-command",
        &echo,
    ];
    consumed.audit(&none).await.ended(1);
    let allowed = consumed
        .audit(&[&none[..], &["--allow-unexplained"]].concat())
        .await;
    assert!(
        allowed
            .ended(0)
            .out
            .contains("1 unexplained, which is allowed"),
        "{allowed:?}"
    );
    assert!(
        allowed
            .out
            .contains("effect 1  8e03978e-40d5-83e8-bc93-6894a57f9324"),
        "{allowed:?}"
    );
}
