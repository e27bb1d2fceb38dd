//! `oncegate complete` and `oncegate give-up`, and positions in the place of payloads.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::core::store::Store;
use oncegate::kafka::KafkaSource;
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{
    AfterUnknown, Attempt, Consumer, Entry, Failure, Gate, Handler, Key, Lease, Message,
    OnStoreLoss, Origin,
};
use oncegate_testkit::{Kafka, Postgres, Record, Redis, Watched, unique};
use tempfile::TempDir;

use super::{Answer, oncegate, oncegate_with};

const WHY: [&str; 3] = ["--yes", "--why", "seen at the bank"];

/// The effects of a bank, by order.
#[derive(Clone, Debug, Default)]
struct Bank(Arc<Mutex<BTreeMap<u64, Vec<String>>>>);

impl Handler for Bank {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let order: serde_json::Value = message.json()?;
        let id = order["order_id"].as_u64().unwrap_or_default();
        let key = attempt.idempotency_key("charge");
        self.0.lock().unwrap().entry(id).or_default().push(key);
        Ok(format!("receipt {id}"))
    }
}

impl Bank {
    fn ids(&self) -> BTreeSet<u64> {
        self.0.lock().unwrap().keys().copied().collect()
    }

    fn keys(&self) -> Vec<String> {
        self.0.lock().unwrap().values().flatten().cloned().collect()
    }
}

/// A topic of orders with its consumer, which gives up after an unknown outcome.
struct Shop {
    kafka: Kafka,
    topic: String,
    dead: String,
    scope: String,
    url: String,
    store: Arc<dyn Store>,
    dir: TempDir,
}

impl Shop {
    async fn by(store: impl Store + 'static, url: String, partitions: i32) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("complete", partitions).await;
        let dead = kafka.new_topic("complete-dead", 1).await;
        let dir = tempfile::tempdir().unwrap();
        let scope = unique("complete");
        let shop = Self {
            kafka,
            topic,
            dead,
            scope,
            url,
            store: Arc::new(store),
            dir,
        };
        let toml = format!(
            r#"
            [store]
            url = "{}"
            [consumer.{}]
            source = {{ kafka = {{ brokers = "{}", topics = ["{}"] }} }}
            key = "order_id"
            lease = "2s"
            retention = "30d"
            after_unknown = "give_up"
            dead_letters = {{ kafka = "{}" }}
            handler = {{ command = "true" }}
            "#,
            shop.url,
            shop.scope,
            shop.kafka.bootstrap(),
            shop.topic,
            shop.dead
        );
        std::fs::write(shop.config(), toml).unwrap();
        shop
    }

    async fn in_redis(partitions: i32) -> Self {
        let redis = Redis::shared().await;
        let store = RedisStore::connect(redis.url()).await.expect("connects");
        Self::by(store, redis.url().to_owned(), partitions).await
    }

    fn config(&self) -> PathBuf {
        self.dir.path().join("shop.toml")
    }

    async fn produce(&self, ids: impl IntoIterator<Item = u64>) {
        let records: Vec<Record> = ids
            .into_iter()
            .map(|id| Record::new(order(id)).key(id.to_string()))
            .collect();
        self.kafka.produce(&self.topic, records).await;
    }

    fn gate(&self) -> Gate {
        Gate::new(
            self.scope.as_str(),
            Key::json(["order_id"]),
            Arc::clone(&self.store),
        )
        .lease(Duration::from_secs(2))
        .after_unknown(AfterUnknown::GiveUp)
        // Records are deleted here as a loss would.
        .on_store_loss(OnStoreLoss::Continue)
    }

    fn message(&self, id: u64) -> Message {
        let origin = Origin::Other("a test".into());
        Message::new(self.topic.as_str(), origin, Some(order(id).into()))
    }

    async fn claim(&self, id: u64) -> Lease {
        match self.gate().enter(&self.message(id)).await.expect("answers") {
            Entry::Granted(lease) => lease,
            other => panic!("{id}: {other:?}"),
        }
    }

    /// Consumes until so many messages are acknowledged.
    async fn consume(&self, bank: &Bank, group: &str, acks: u64) -> Arc<Watched> {
        let source = KafkaSource::new(self.kafka.bootstrap(), group, [self.topic.as_str()]);
        let dead = source.dead_letters(self.dead.as_str());
        let watched = Watched::new();
        let consumer = Consumer::new(source, self.gate(), bank.clone())
            .dead_letters(dead)
            .observer(Arc::clone(&watched) as _);
        let running = consumer.run_until(watched.until("acks", acks));
        running.await.expect("it ends well");
        watched
    }

    async fn oncegate(&self, arguments: &[&str]) -> Answer {
        let journal = self.dir.path().join("journal.jsonl");
        let config = self.config();
        let environment = [
            ("ONCEGATE_JOURNAL", journal.to_str().unwrap()),
            ("ONCEGATE_OPERATOR", "ada"),
            ("ONCEGATE_CONFIG", config.to_str().unwrap()),
        ];
        oncegate_with(arguments, &environment, b"").await
    }

    fn events(&self) -> Vec<(String, String, String)> {
        let text = std::fs::read_to_string(self.dir.path().join("journal.jsonl"));
        let text = text.unwrap_or_default();
        text.lines()
            .map(|line| {
                let entry: serde_json::Value = serde_json::from_str(line).unwrap();
                let word = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
                (word("event"), word("by"), word("reason"))
            })
            .collect()
    }

    /// The position of the order with this number, in a topic of one partition.
    fn at(&self, id: u64) -> String {
        format!("{}/0@{id}", self.topic)
    }
}

fn order(id: u64) -> String {
    format!(r#"{{"order_id":{id}}}"#)
}

// invariant: operator-decides
#[tokio::test]
async fn a_completion_by_hand_closes_the_letter_for_redrives() {
    let shop = Shop::in_redis(1).await;
    shop.produce(0..3).await;
    // Another process dies with order 1, after it has charged.
    drop(shop.claim(1).await);
    let (bank, group) = (Bank::default(), unique("group"));
    let watched = shop.consume(&bank, &group, 3).await;
    assert_eq!(bank.ids(), BTreeSet::from([0, 2]));
    assert_eq!(watched.get("dead_letters", "outcome_unknown"), 1);

    let at = shop.at(1);
    let inspected = shop.oncegate(&["inspect", "--at", &at]).await;
    assert_eq!(inspected.ended(0).line("state"), "state failed: given up");
    assert!(
        inspected
            .line("reason")
            .contains("outcome unknown: attempt 1")
    );
    let dry = shop.oncegate(&["complete", "--at", &at, "--dry-run"]).await;
    dry.ended(0).says("nothing was changed");
    let receipt = shop.dir.path().join("receipt.json");
    std::fs::write(&receipt, "\"receipt 1\"\n").unwrap();
    let arguments = [
        "complete",
        "--at",
        &at,
        "--result",
        receipt.to_str().unwrap(),
    ];
    let done = shop.oncegate(&[&arguments[..], &WHY].concat()).await;
    done.ended(0);
    let again = shop
        .oncegate(&[&arguments[..], &WHY, &["--json"]].concat())
        .await;
    let again = again.ended(1).json();
    assert_eq!(
        (&again["outcome"], &again["done"]),
        (&"final".into(), &false.into())
    );
    let ada = |event: &str| (event.to_owned(), "ada".to_owned(), WHY[2].to_owned());
    assert_eq!(
        shop.events(),
        [
            "complete_begins",
            "complete",
            "complete_begins",
            "complete_refused"
        ]
        .map(ada)
    );

    let redriven = shop
        .oncegate(&[&["dead-letters", "redrive", "--json"], &WHY[..]].concat())
        .await;
    let redriven = redriven.ended(0).json();
    assert_eq!(
        (&redriven["sent"], &redriven["completed"]),
        (&0.into(), &1.into())
    );
    // A later duplicate gets the result.
    let entered = shop.gate().enter(&shop.message(1)).await.expect("answers");
    let Entry::Completed(stored) = entered else {
        panic!("{entered:?}")
    };
    assert_eq!(stored.decode::<String>().expect("JSON"), "receipt 1");
    assert_eq!(bank.ids(), BTreeSet::from([0, 2]));
}

// invariant: operator-decides
#[tokio::test]
async fn a_stuck_message_is_given_up_and_gets_its_letter() {
    let shop = Shop::in_redis(1).await;
    shop.produce(0..2).await;
    let at = shop.at(0);
    // While it runs, it is left alone.
    let runs = shop.claim(0).await;
    let refused = shop
        .oncegate(&[&["give-up", "--at", &at], &WHY[..]].concat())
        .await;
    refused.ended(1).says("an attempt runs now");
    runs.release(Duration::from_secs(3_600), true, "ledger 7 is locked")
        .await;
    let inspected = shop.oncegate(&["inspect", "--at", &at]).await;
    assert!(
        inspected
            .ended(0)
            .line("reason")
            .contains("ledger 7 is locked")
    );
    let given_up = shop
        .oncegate(&[&["give-up", "--at", &at], &WHY[..]].concat())
        .await;
    given_up.ended(0);
    let bank = Bank::default();
    shop.consume(&bank, &unique("group"), 2).await;
    assert_eq!(bank.ids(), BTreeSet::from([1]));
    let letters = shop.oncegate(&["dead-letters", "list", "--json"]).await;
    assert!(
        letters
            .ended(0)
            .out
            .contains("given up by an operator: seen at the bank by ada"),
        "{letters:?}"
    );
    let again = shop
        .oncegate(&[&["give-up", "--at", &at], &WHY[..]].concat())
        .await;
    again.ended(1).says("it is given up already");
}

#[tokio::test]
async fn a_position_that_names_no_message_is_told_as_it_is() {
    let shop = Shop::in_redis(1).await;
    shop.produce(0..5).await;
    let key = shop.oncegate(&["key", "--at", &shop.at(3), "--json"]).await;
    let expected = shop.claim(3).await.store_key().to_string();
    assert_eq!(key.ended(0).json()["store_key"], expected.as_str());

    let late = shop.oncegate(&["inspect", "--at", &shop.at(5)]).await;
    late.ended(65).says("there is no message yet");
    let elsewhere = shop.oncegate(&["inspect", "--at", "other/0@1"]).await;
    elsewhere.ended(78).says("does not consume the topic other");
    let partition = format!("{}/7@0", shop.topic);
    let absent = shop.oncegate(&["inspect", "--at", &partition]).await;
    absent.ended(78).says("no partition 7");
    let queue = shop.oncegate(&["inspect", "--at", "jobs#8c2e"]).await;
    queue.ended(2).says("queue");
    shop.kafka.delete_records(&shop.topic, 0, 2).await;
    let gone = shop
        .oncegate(&["reset", "--at", &shop.at(1), "--dry-run"])
        .await;
    gone.ended(65)
        .says("it is gone: the partition begins at offset 2");
    // By flags alone, without a configuration.
    let flags = [
        "inspect",
        "--at",
        &shop.at(3),
        "--brokers",
        shop.kafka.bootstrap(),
        "--store",
        &shop.url,
        "--scope",
        &shop.scope,
        "--key",
        "order_id",
    ];
    let pending = oncegate(&flags, b"").await;
    assert!(
        pending.ended(0).line("state").contains("pending"),
        "{pending:?}"
    );
}

/// One record in a store, through its whole life by commands.
async fn is_decided_in(store: impl Store + 'static, url: &str) {
    let scope = unique("decided");
    let gate =
        Gate::new(scope.as_str(), Key::message_key(), store).lease(Duration::from_millis(200));
    for (number, first) in ["complete", "give-up"].into_iter().enumerate() {
        let message = Message::keyed("orders", number.to_string());
        let Ok(Entry::Granted(lease)) = gate.enter(&message).await else {
            panic!("it is new")
        };
        let key = lease.store_key().to_string();
        lease.release(Duration::from_secs(60), true, "locked").await;
        let dir = tempfile::tempdir().unwrap();
        let journal = dir.path().join("journal.jsonl");
        let environment = [
            ("ONCEGATE_JOURNAL", journal.to_str().unwrap()),
            ("ONCEGATE_STORE", url),
        ];
        let decide = async |command: &str| {
            let arguments = [command, "--store-key", &key];
            oncegate_with(&[&arguments[..], &WHY].concat(), &environment, b"").await
        };
        decide(first).await.ended(0);
        let then = decide("complete").await;
        let late = decide("give-up").await;
        then.ended(if first == "give-up" { 0 } else { 1 });
        late.ended(1).says("it is completed already");
        assert!(matches!(
            gate.enter(&message).await,
            Ok(Entry::Completed(_))
        ));
    }
}

#[tokio::test]
async fn records_in_sql_are_completed_and_given_up_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("once.db");
    let sqlite = SqliteStore::open(&path).await.expect("opens");
    is_decided_in(sqlite, &format!("sqlite:{}", path.display())).await;
    let postgres = Postgres::shared().await;
    let store = PostgresStore::connect(postgres.url())
        .await
        .expect("connects");
    store.create_schema().await.expect("tables");
    is_decided_in(store, postgres.url()).await;
}

// invariant: complete-effects
#[tokio::test]
async fn after_a_loss_a_replay_runs_only_what_has_no_effect() {
    const ORDERS: u64 = 300;
    let shop = Shop::in_redis(3).await;
    shop.produce(0..ORDERS).await;
    let bank = Bank::default();
    shop.consume(&bank, &unique("group"), ORDERS).await;
    assert_eq!(bank.ids().len() as u64, ORDERS);
    // The bank has lost these. The store has lost all its records.
    let missing = BTreeSet::from([3, 77, 299]);
    bank.0.lock().unwrap().retain(|id, _| !missing.contains(id));
    let redis = Redis::shared().await;
    assert_eq!(redis.delete_records(&shop.scope).await as u64, ORDERS);
    let before = bank.ids();
    let list = shop.dir.path().join("charges.csv");
    let lines: Vec<String> = bank.keys().iter().map(|key| format!("eur,{key}")).collect();
    std::fs::write(
        &list,
        format!("currency,idempotency_key\n{}\n", lines.join("\n")),
    )
    .unwrap();
    let arguments = [
        "complete",
        "--effects",
        list.to_str().unwrap(),
        "--effects-column",
        "idempotency_key",
        "--step",
        "charge",
        "--json",
    ];
    let dry = shop
        .oncegate(&[&arguments[..], &["--dry-run"]].concat())
        .await;
    let dry = dry.ended(0).json();
    assert_eq!(
        (&dry["dry_run"], &dry["completed"]),
        (&true.into(), &(ORDERS - 3).into())
    );
    assert_eq!(dry["without_effect"], 3);
    let done = shop.oncegate(&[&arguments[..], &WHY].concat()).await;
    let done = done.ended(0).json();
    assert_eq!(
        (&done["dry_run"], &done["completed"]),
        (&false.into(), &(ORDERS - 3).into())
    );
    let again = shop.oncegate(&[&arguments[..], &WHY].concat()).await;
    assert_eq!(again.ended(0).json()["completed_before"], ORDERS - 3);
    // The replay: another group reads the topic from its beginning.
    shop.consume(&bank, &unique("replay"), ORDERS).await;
    let after = bank.0.lock().unwrap().clone();
    let run: BTreeSet<u64> = after
        .keys()
        .copied()
        .filter(|id| !before.contains(id))
        .collect();
    assert_eq!(run, missing);
    assert!(
        after.values().all(|keys| keys.len() == 1),
        "nothing ran twice"
    );
}
