//! The main job: a topic with duplicates, consumed through the gate and replayed, on real servers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use oncegate::core::store::Store;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{Attempt, Consumer, Counters, Failure, Field, Gate, Handler, Key, Message};
use oncegate_testkit::{Kafka, Record, Redis, unique};
use tokio::sync::watch;

const MESSAGES: u64 = 10_000;
const PARTITIONS: i32 = 6;

/// Counts the effects of each payment, and what its duplicates got.
#[derive(Debug, Default)]
struct Bank {
    charges: Mutex<BTreeMap<u64, u64>>,
    answers: AtomicU64,
}

struct Billing {
    bank: Arc<Bank>,
}

#[derive(serde::Deserialize)]
struct Payment {
    order: u64,
}

impl Handler for Billing {
    type Output = u64;

    async fn handle(&self, message: &Message, _: &Attempt) -> Result<u64, Failure> {
        let payment: Payment = message.json()?;
        *self
            .bank
            .charges
            .lock()
            .unwrap()
            .entry(payment.order)
            .or_default() += 1;
        Ok(payment.order)
    }

    async fn duplicate(&self, message: &Message, order: u64) -> Result<(), Failure> {
        assert_eq!(
            message.json::<Payment>()?.order,
            order,
            "a duplicate gets the result of its own key"
        );
        self.bank.answers.fetch_add(1, Relaxed);
        Ok(())
    }
}

/// Counts acks, to know when everything is finished.
#[derive(Debug)]
struct Acks {
    counters: Counters,
    acked: watch::Sender<u64>,
}

impl oncegate::Observer for Acks {
    fn observe(&self, event: oncegate::Event<'_>) {
        self.counters.observe(event);
        if let oncegate::Event::Acked { count, .. } = event {
            self.acked.send_modify(|acked| *acked += count);
        }
    }
}

/// Consumes `messages` messages of the topic as a new group, and returns what was counted.
async fn consume(
    kafka: &Kafka,
    topic: &str,
    store: Arc<dyn Store>,
    scope: &str,
    bank: &Arc<Bank>,
) -> Arc<Acks> {
    let (acked, mut acks) = watch::channel(0);
    let observer = Arc::new(Acks {
        counters: Counters::default(),
        acked,
    });
    let group = unique("replay");
    let source = KafkaSource::new(kafka.bootstrap(), group.as_str(), [topic]);
    let gate = Gate::new(
        scope,
        Key::json([Field::from("order"), Field::path("amount").decimal()]),
        store,
    );
    let handler = Billing {
        bank: Arc::clone(bank),
    };
    let consumer = Consumer::new(source, gate, handler)
        .concurrency(64)
        .observer(Arc::clone(&observer) as _);
    let all = async move { _ = acks.wait_for(|acked| *acked >= MESSAGES).await };
    let limit = Duration::from_secs(60);
    tokio::time::timeout(limit, consumer.run_until(all))
        .await
        .expect("it ends in time")
        .expect("it ends well");
    let committed: i64 = kafka.committed_offsets(&group, topic).await.values().sum();
    assert_eq!(
        committed,
        i64::try_from(MESSAGES).unwrap(),
        "everything is committed at the end"
    );
    observer
}

/// Payments of which three in ten come again: with another id and time, other order of the fields,
/// `10` as `10.0`.
fn payments(rng: &mut Rng) -> (Vec<Record>, u64) {
    let mut orders = 0;
    let record = |n: u64| {
        let again = orders > 0 && rng.u32(..10) < 3;
        let order = if again { rng.u64(..orders) } else { orders };
        orders += u64::from(!again);
        let amount = order % 100;
        let payload = if again {
            format!(r#"{{"at":{n},"amount":{amount}.0,"order":{order}}}"#)
        } else {
            format!(r#"{{"order":{order},"amount":{amount},"at":{n}}}"#)
        };
        Record::new(payload).key(rng.u32(..200).to_string())
    };
    ((0..MESSAGES).map(record).collect(), orders)
}

async fn replay_has_no_effect(store: Arc<dyn Store>) {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("replay", PARTITIONS).await;
    let (records, orders) = payments(&mut Rng::with_seed(seed));
    kafka.produce(&topic, records).await;

    let scope = unique("replay");
    let bank = Arc::new(Bank::default());
    let first = consume(&kafka, &topic, Arc::clone(&store), &scope, &bank).await;
    let charges = bank.charges.lock().unwrap().clone();
    assert_eq!(charges.len() as u64, orders, "every payment is charged");
    assert!(
        charges.values().all(|charges| *charges == 1),
        "no payment is charged twice"
    );
    assert_eq!(
        bank.answers.load(Relaxed),
        MESSAGES - orders,
        "duplicates are answered"
    );
    assert_eq!(first.counters.total("extra_runs"), 0);

    let second = consume(&kafka, &topic, store, &scope, &bank).await;
    assert_eq!(
        *bank.charges.lock().unwrap(),
        charges,
        "a replay charges nothing"
    );
    assert_eq!(
        bank.answers.load(Relaxed),
        MESSAGES - orders + MESSAGES,
        "a replay answers everything"
    );
    assert_eq!(second.counters.get("claims", "granted"), 0);
}

// invariant: second-run-of-completed
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_through_redis_has_no_effect() {
    let redis = Redis::shared().await;
    let store = RedisStore::connect(redis.url())
        .await
        .expect("Redis is there");
    replay_has_no_effect(Arc::new(store)).await;
}

// invariant: second-run-of-completed
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_through_sqlite_has_no_effect() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("records.sqlite"))
        .await
        .expect("a new file");
    replay_has_no_effect(Arc::new(store)).await;
}
