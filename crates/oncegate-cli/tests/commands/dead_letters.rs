//! `oncegate dead-letters`, on a real broker, a real queue and a real store, with real consumers.

mod contents;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::sqlite::SqliteStore;
use oncegate::sqs::SqsSource;
use oncegate::{FingerprintSpec, Gate, Key};
use oncegate_testkit::{Kafka, Process, Queue, Record, Sqs, Watched, process, unique, until};
use rdkafka::Message as _;
use rdkafka::message::Headers as _;

use super::shop::{BAD, Shop, order};
use super::{Answer, LIMIT};

pub(crate) const ORDERS: u32 = 20;
const WHY: [&str; 3] = ["--yes", "--why", "the bank is back"];

/// A topic of orders, half of which were given up.
pub(crate) struct OnKafka {
    pub(crate) shop: Shop,
    pub(crate) kafka: Kafka,
    pub(crate) topic: String,
    pub(crate) dead: String,
    group: String,
}

impl OnKafka {
    pub(crate) async fn new() -> Self {
        let shop = Shop::new().await;
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("orders", 2).await;
        let dead = kafka.new_topic("dead", 2).await;
        let given_up = Self {
            shop,
            kafka,
            topic,
            dead,
            group: unique("group"),
        };
        given_up.produce(0..ORDERS).await;
        given_up.consume(ORDERS.into()).await;
        given_up
    }

    async fn produce(&self, ids: impl IntoIterator<Item = u32, IntoIter: Send> + Send) {
        let records = ids.into_iter().map(|id| {
            Record::new(order(id))
                .key(id.to_string())
                .header("own", "kept")
        });
        self.kafka.produce(&self.topic, records).await;
    }

    pub(crate) async fn consume(&self, acks: u64) -> Arc<Watched> {
        let source = KafkaSource::new(
            self.kafka.bootstrap(),
            self.group.as_str(),
            [self.topic.as_str()],
        );
        let dead = source.dead_letters(self.dead.as_str());
        self.shop.consume(source, dead, acks).await
    }

    async fn dead_letters(&self, verb: &str, more: &[&str]) -> Answer {
        let fixed = [
            "dead-letters",
            verb,
            "--brokers",
            self.kafka.bootstrap(),
            "--topic",
            &self.dead,
        ];
        self.shop.oncegate(&[&fixed[..], more].concat()).await
    }

    async fn redrive(&self, more: &[&str]) -> serde_json::Value {
        let arguments = [&WHY[..], &["--json"], more].concat();
        self.dead_letters("redrive", &arguments)
            .await
            .ended(0)
            .json()
    }

    /// How often each order is in its topic.
    async fn delivered(&self) -> BTreeMap<String, usize> {
        let mut delivered = BTreeMap::new();
        for message in self.kafka.read_all(&self.topic).await {
            let key = String::from_utf8(message.key().expect("a key").to_vec()).expect("a number");
            *delivered.entry(key).or_default() += 1;
        }
        delivered
    }
}

pub(crate) fn numbers<'a>(
    answer: &serde_json::Value,
    names: impl IntoIterator<Item = &'a str>,
) -> Vec<u64> {
    names
        .into_iter()
        .map(|name| {
            answer[name]
                .as_u64()
                .unwrap_or_else(|| panic!("{name}: {answer}"))
        })
        .collect()
}

/// Repairs one order by hand: it is reset, delivered again, and completed. Returns its key.
async fn repaired_by_hand(given_up: &OnKafka) -> String {
    given_up.shop.mend();
    let list = given_up
        .dead_letters("list", &["--json", "--reason", "order 3"])
        .await
        .ended(0)
        .json();
    let key = list["letters"][0]["key"].as_str().expect("a key");
    given_up
        .shop
        .oncegate(&[&["reset", "--store-key", key][..], &WHY].concat())
        .await
        .ended(0);
    given_up.produce([3]).await;
    let watched = given_up.consume(1).await;
    assert_eq!(watched.get("extra_runs", "reset"), 1);
    key.to_owned()
}

// invariant: redrive
#[tokio::test]
async fn redriven_messages_run_once_and_completed_ones_not_again() {
    let given_up = OnKafka::new().await;
    let key = repaired_by_hand(&given_up).await;

    let before = given_up.delivered().await;
    let dry = given_up
        .dead_letters("redrive", &["--dry-run", "--json"])
        .await
        .ended(0)
        .json();
    let names = ["wanted", "sent", "reopened", "completed"];
    assert_eq!(numbers(&dry, names), [10, 9, 9, 1]);
    given_up
        .dead_letters("redrive", &["--why", "x"])
        .await
        .ended(2)
        .says("--yes");
    given_up
        .dead_letters("redrive", &["--yes"])
        .await
        .ended(2)
        .says("--why");
    assert_eq!(given_up.delivered().await, before, "nothing was sent");

    assert_eq!(
        numbers(&given_up.redrive(&["--rate", "200"]).await, names),
        [10, 9, 9, 1]
    );
    assert_eq!(
        numbers(&given_up.redrive(&["--rate", "200"]).await, names),
        [0, 0, 0, 0],
        "it goes on where it was"
    );
    // As after an interrupt that has lost the progress: all are sent a second time.
    assert_eq!(
        numbers(&given_up.redrive(&["--no-progress"]).await, names),
        [10, 9, 0, 1]
    );

    let watched = given_up.consume(18).await;
    let once: BTreeMap<u32, u32> = (0..ORDERS).map(|id| (id, 1)).collect();
    assert_eq!(given_up.shop.sales(), once);
    assert_eq!(
        (
            watched.get("claims", "completed"),
            watched.get("extra_runs", "reset")
        ),
        (9, 9)
    );
    assert_eq!(
        numbers(&given_up.redrive(&["--no-progress"]).await, names),
        [10, 0, 0, 10]
    );

    let redriven = given_up.shop.journal("redriven");
    assert_eq!(redriven.len(), 18);
    assert!(
        redriven
            .iter()
            .all(|entry| entry["by"] == "ada" && entry["reason"] == "the bank is back")
    );
    assert_eq!(given_up.shop.journal("reset")[0]["key"], key);
}

/// A store without the records would have the messages acknowledged as known failures, and lost.
// invariant: redrive-that-loses
#[tokio::test]
async fn a_redrive_with_another_store_sends_nothing() {
    let given_up = OnKafka::new().await;
    given_up.shop.mend();
    let folder = tempfile::tempdir().expect("a folder");
    let other = folder.path().join("other.db");
    let url = format!("sqlite:{}", other.display());
    let redrive = ["--store", &url, "--yes", "--why", "x", "--json"];

    let store = SqliteStore::open(&other).await.expect("it opens");
    given_up
        .dead_letters("redrive", &redrive)
        .await
        .ended(78)
        .says(&given_up.shop.scope);

    let gate = Gate::new(given_up.shop.scope.as_str(), Key::json(["order_id"]), store);
    let open = gate
        .fingerprint(FingerprintSpec::payload())
        .open()
        .await
        .expect("it opens");
    let names = ["wanted", "sent", "record_missing"];
    let json = given_up
        .dead_letters("redrive", &redrive)
        .await
        .ended(1)
        .json();
    assert_eq!(
        numbers(&json, names),
        [10, 0, 10],
        "the scope is known, its records are elsewhere"
    );
    drop(open);

    assert_eq!(
        numbers(&given_up.redrive(&[]).await, names),
        [10, 10, 0],
        "the progress has not moved"
    );
    given_up.consume(10).await;
    assert_eq!(
        given_up.shop.sales(),
        (0..ORDERS).map(|id| (id, 1)).collect()
    );
}

// invariant: redrive-that-loses
#[tokio::test]
async fn letters_that_are_copied_back_run_again() {
    let given_up = OnKafka::new().await;
    given_up.shop.mend();
    let letters = given_up.kafka.read_all(&given_up.dead).await;
    let copies = letters.iter().map(|letter| {
        let text =
            |bytes: Option<&[u8]>| String::from_utf8(bytes.expect("bytes").to_vec()).expect("text");
        let record = Record::new(text(letter.payload())).key(text(letter.key()));
        let headers = letter.headers().expect("it has headers");
        headers.iter().fold(record, |record, header| {
            record.header(header.key, text(header.value))
        })
    });
    given_up.kafka.produce(&given_up.topic, copies).await;
    let watched = given_up.consume(10).await;
    assert_eq!(
        given_up.shop.sales(),
        (0..ORDERS).map(|id| (id, 1)).collect()
    );
    assert_eq!(watched.get("extra_runs", "reset"), 10);
}

// invariant: redrive
#[tokio::test]
async fn an_interrupted_redrive_goes_on_and_loses_nothing() {
    let given_up = OnKafka::new().await;
    let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
    command.args([
        "dead-letters",
        "redrive",
        "--brokers",
        given_up.kafka.bootstrap(),
        "--topic",
        &given_up.dead,
    ]);
    command
        .args(["--rate", "2", "--store", given_up.shop.redis.url()])
        .args(WHY);
    command.arg("--journal").arg(given_up.shop.journal_path());
    let mut process = Process::spawn("oncegate dead-letters redrive", command);
    let sent = async || given_up.delivered().await.values().sum::<usize>() - ORDERS as usize;
    until("the first messages", LIMIT, async || match sent().await {
        0..2 => Err("not yet".to_owned()),
        _ => Ok(()),
    })
    .await;
    process.signal("INT");
    assert_eq!(process.end_within(LIMIT).await.code(), Some(130));
    let first = sent().await;
    assert!(first < BAD as usize, "it was interrupted: {first}");

    assert_eq!(numbers(&given_up.redrive(&[]).await, ["sent"]).len(), 1);
    let all = sent().await;
    // A batch of this rate is two messages: so many may have been sent before their progress was
    // saved.
    assert!(
        (BAD as usize..=BAD as usize + 2).contains(&all),
        "{first} and then {all}"
    );
    let delivered = given_up.delivered().await;
    assert!(
        (0..BAD).all(|id| delivered[&id.to_string()] >= 2),
        "{delivered:?}"
    );
    given_up.shop.mend();
    given_up.consume(all as u64).await;
    assert_eq!(
        given_up.shop.sales(),
        (0..ORDERS).map(|id| (id, 1)).collect()
    );
}

/// A queue of orders, half of which were given up.
pub(crate) struct OnSqs {
    pub(crate) shop: Shop,
    pub(crate) sqs: Sqs,
    pub(crate) queue: Queue,
    pub(crate) dead: Queue,
}

impl OnSqs {
    pub(crate) async fn new() -> Self {
        let shop = Shop::new().await;
        let sqs = Sqs::shared().await;
        let queue = sqs.new_queue("orders").await;
        let dead = sqs.new_queue("dead").await;
        let given_up = Self {
            shop,
            sqs,
            queue,
            dead,
        };
        given_up.queue.send((0..ORDERS).map(order)).await;
        given_up.consume(ORDERS.into()).await;
        given_up
    }

    async fn consume(&self, acks: u64) -> Arc<Watched> {
        let source = SqsSource::from_client(self.sqs.client().clone(), self.queue.url());
        let dead = source.dead_letters(self.dead.url());
        self.shop
            .consume(source.wait(Duration::from_secs(1)), dead, acks)
            .await
    }

    async fn dead_letters(&self, verb: &str, more: &[&str]) -> Answer {
        let fixed = ["dead-letters", verb, "--queue", self.dead.url()];
        self.shop.oncegate(&[&fixed[..], more].concat()).await
    }
}

// invariant: redrive
#[tokio::test]
async fn redriven_letters_of_a_queue_are_deleted_and_the_others_stay() {
    let given_up = OnSqs::new().await;
    given_up
        .dead_letters("list", &[])
        .await
        .ended(2)
        .says("--use-up-a-receive");
    let look = ["--use-up-a-receive", "--json"];
    let list = given_up.dead_letters("list", &look).await.ended(0).json();
    assert_eq!(numbers(&list, ["seen", "matching"]), [10, 10]);
    assert_eq!(
        list["by_cause"],
        serde_json::json!({"permanent": 9, "attempts_used_up": 1})
    );
    let letter = &list["letters"][0];
    let origin = letter["origin"].as_str().expect("an origin");
    assert!(
        origin.starts_with(&format!("{}#", given_up.queue.name())) && letter["key"].is_string(),
        "{letter}"
    );
    given_up
        .dead
        .until("given back", |depth| depth.visible == 10)
        .await;

    given_up.shop.mend();
    let filter = [&look[..], &WHY, &["--cause", "permanent"]].concat();
    let json = given_up
        .dead_letters("redrive", &filter)
        .await
        .ended(0)
        .json();
    assert_eq!(
        numbers(&json, ["seen", "wanted", "sent", "reopened"]),
        [10, 9, 9, 9]
    );
    given_up
        .dead
        .until("left to the other one", |depth| {
            depth.visible == 1 && depth.total() == 1
        })
        .await;
    let watched = given_up.consume(9).await;
    assert_eq!(watched.get("extra_runs", "reset"), 9);

    let json = given_up
        .dead_letters("redrive", &[&look[..], &WHY].concat())
        .await
        .ended(0)
        .json();
    assert_eq!(numbers(&json, ["seen", "sent", "reopened"]), [1, 1, 1]);
    given_up.consume(1).await;
    assert_eq!(
        given_up.shop.sales(),
        (0..ORDERS).map(|id| (id, 1)).collect()
    );
    given_up.dead.until_empty().await;
}

#[tokio::test]
async fn letters_of_a_fifo_queue_are_redriven_in_their_groups() {
    let shop = Shop::new().await;
    let sqs = Sqs::shared().await;
    let queue = sqs.new_fifo_queue("orders").await;
    let dead = sqs.new_fifo_queue("dead").await;
    let given_up = OnSqs {
        shop,
        sqs,
        queue,
        dead,
    };
    for group in ["a", "b"] {
        let ids = if group == "a" { 1..4 } else { 4..7 };
        given_up.queue.send_to_group(group, ids.map(order)).await;
    }
    given_up.consume(6).await;
    given_up
        .dead_letters("list", &["--use-up-a-receive"])
        .await
        .ended(2)
        .says("FIFO");

    given_up.shop.mend();
    let arguments = [&["--use-up-a-receive", "--json"][..], &WHY].concat();
    let json = given_up
        .dead_letters("redrive", &arguments)
        .await
        .ended(0)
        .json();
    assert_eq!(numbers(&json, ["seen", "sent", "reopened"]), [6, 6, 6]);
    let received = given_up.queue.receive(Duration::from_secs(1)).await;
    for message in &received {
        let first = (1..4).any(|id| message.body.as_deref() == Some(order(id).as_str()));
        assert_eq!(group(message), if first { "a" } else { "b" });
    }
    assert!(!received.is_empty());
    given_up
        .queue
        .until("visible again", |depth| depth.visible == 6)
        .await;
    given_up.consume(6).await;
    assert_eq!(given_up.shop.sales(), (1..7).map(|id| (id, 1)).collect());
    given_up.dead.until_empty().await;
}

fn group(message: &aws_sdk_sqs::types::Message) -> String {
    let name = aws_sdk_sqs::types::MessageSystemAttributeName::MessageGroupId;
    let attributes = message.attributes.as_ref();
    attributes
        .and_then(|attributes| attributes.get(&name))
        .cloned()
        .unwrap_or_default()
}
