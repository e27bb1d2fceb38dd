//! Batches on a real broker and a real Redis: what they cost, and that each key has one effect.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::{
    BatchHandler, BatchLimits, BatchMessage, Batched, Completing, Consumer, Counters, Failure,
    Gate, Key, Observer, Ordering,
};
use oncegate_testkit::{Kafka, Postgres, Record, Redis, RedisServer, unique};
use tokio::sync::watch;

/// The longest wait for anything.
const LIMIT: Duration = Duration::from_secs(120);

/// Counts acks and everything else.
#[derive(Debug)]
struct Acks {
    counters: Counters,
    acked: watch::Sender<u64>,
}

impl Acks {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            counters: Counters::default(),
            acked: watch::channel(0).0,
        })
    }

    async fn until(self: Arc<Self>, messages: u64) {
        let mut acked = self.acked.subscribe();
        acked.wait_for(|acked| *acked >= messages).await.unwrap();
    }
}

impl Observer for Acks {
    fn observe(&self, event: oncegate::Event<'_>) {
        self.counters.observe(event);
        if let oncegate::Event::Acked { count, .. } = event {
            self.acked.send_modify(|acked| *acked += count);
        }
    }
}

#[derive(serde::Deserialize)]
struct Order {
    id: u64,
}

/// What a table would have: all rows of a batch, or none of them.
#[derive(Clone, Debug, Default)]
struct Table(Arc<Mutex<BTreeMap<u64, u64>>>);

/// Order 13 cannot be written, and neither can anything with it.
const POISON: u64 = 13;

impl BatchHandler for Table {
    type Output = u64;

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<u64, Failure>>, Failure> {
        let orders: Vec<Order> = batch
            .iter()
            .map(|one| one.message().json())
            .collect::<Result<_, _>>()?;
        if orders.iter().any(|order| order.id == POISON) {
            return Err(Failure::permanent("a constraint is violated"));
        }
        let mut rows = self.0.lock().unwrap();
        orders
            .iter()
            .for_each(|order| *rows.entry(order.id).or_default() += 1);
        Ok(orders.into_iter().map(|order| Ok(order.id)).collect())
    }
}

async fn produce(kafka: &Kafka, topic: &str, orders: impl IntoIterator<Item = u64>) {
    let record = |id: u64| Record::new(format!(r#"{{"id":{id}}}"#)).key(id.to_string());
    kafka
        .produce(
            topic,
            orders.into_iter().map(record).collect::<Vec<Record>>(),
        )
        .await;
}

/// How often the server was asked for something: pieces read from its sockets, and calls of
/// scripts. What a script calls counts as commands of its own, so plain commands are not counted.
async fn asked(redis: &Redis) -> (u64, u64) {
    let number = |text: &str, before: &str| {
        let found = text
            .split(before)
            .nth(1)
            .and_then(|rest| rest.split([',', '\r', '\n']).next());
        found.map_or(0, |digits| digits.parse::<u64>().unwrap())
    };
    let stats = redis.info("stats").await;
    let commands = redis.info("commandstats").await;
    (
        number(&stats, "total_reads_processed:"),
        number(&commands, "cmdstat_evalsha:calls="),
    )
}

/// Claims and completions of a batch travel together. The store halves what waits for its
/// connection, so that the server works on one half while the other is prepared: a few pipelines
/// for each, and not one for each message.
#[tokio::test]
async fn the_claims_and_completions_of_a_batch_travel_together() {
    const BATCHES: u64 = 10;
    const BATCH: u64 = 100;
    let kafka = Kafka::shared().await;
    let redis = RedisServer::start().await;
    let topic = kafka.new_topic("batches", 1).await;
    let acks = Acks::new();
    let table = Table::default();
    produce(&kafka, &topic, (0..BATCHES * BATCH).map(|id| id + 100)).await;
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let source = KafkaSource::new(kafka.bootstrap(), unique("batches"), [topic.as_str()]);
    let gate = Gate::new(unique("batches"), Key::json(["id"]), store);
    gate.open().await.unwrap();
    let before = asked(&redis).await;
    let limits = BatchLimits::new(BATCH as usize).wait(Duration::from_secs(5));
    let consumer = Consumer::new(source, gate, Batched::new(limits, table.clone()))
        .concurrency(1)
        .observer(Arc::clone(&acks) as _);
    let consumed = consumer.run_until(Arc::clone(&acks).until(BATCHES * BATCH));
    tokio::time::timeout(LIMIT, consumed)
        .await
        .expect("it ends in time")
        .unwrap();
    let after = asked(&redis).await;
    assert_eq!(
        acks.counters.get("batch_calls", "gathered"),
        BATCHES,
        "each batch was full"
    );
    assert_eq!(table.0.lock().unwrap().len() as u64, BATCHES * BATCH);
    let reads = after.0 - before.0;
    let scripts = after.1 - before.1;
    println!("{reads} reads and {scripts} calls of scripts for {BATCHES} batches of {BATCH}");
    // One by one there would be two of each for each message. Heartbeats and the watch for losses
    // are in it, too.
    assert!(
        scripts <= BATCHES * BATCH / 2,
        "{scripts} calls for {BATCHES} batches"
    );
    assert!(
        reads <= BATCHES * BATCH / 2,
        "{reads} reads for {BATCHES} batches"
    );
}

// invariant: batch-order
/// Two workers with the same keys: each has the whole topic, as two groups have that share a scope.
#[tokio::test]
async fn two_workers_sharing_keys_write_once_despite_a_bad_order() {
    const ORDERS: u64 = 3_000;
    let kafka = Kafka::shared().await;
    let redis = Redis::shared().await;
    let topic = kafka.new_topic("batches", 4).await;
    let dead = kafka.new_topic("batches-dead", 1).await;
    produce(&kafka, &topic, (0..ORDERS).chain(0..ORDERS)).await;
    let scope = unique("batches");
    let table = Table::default();
    let work = async || {
        let acks = Acks::new();
        let store = RedisStore::connect(redis.url()).await.unwrap();
        let source = KafkaSource::new(kafka.bootstrap(), unique("batches"), [topic.as_str()]);
        let dead_letters = source.dead_letters(dead.clone());
        let gate = Gate::new(scope.as_str(), Key::json(["id"]), store);
        let limits = BatchLimits::new(100).wait(Duration::from_millis(20));
        let consumer = Consumer::new(source, gate, Batched::new(limits, table.clone()))
            .ordering(Ordering::Unordered)
            .concurrency(3)
            .dead_letters(dead_letters)
            .observer(Arc::clone(&acks) as _);
        let consumed = consumer.run_until(Arc::clone(&acks).until(ORDERS * 2));
        tokio::time::timeout(LIMIT, consumed)
            .await
            .expect("it ends in time")
            .unwrap();
        acks
    };
    let (one, other) = tokio::join!(work(), work());
    let rows = table.0.lock().unwrap().clone();
    let expected: BTreeMap<u64, u64> = (0..ORDERS)
        .filter(|id| *id != POISON)
        .map(|id| (id, 1))
        .collect();
    assert_eq!(rows, expected, "each order once, and not the bad one");
    let total = |name| one.counters.total(name) + other.counters.total(name);
    // A worker that finds the order given up, and its dead letter not yet confirmed, writes it as
    // well.
    assert!(
        (1..=4).contains(&total("dead_letters")),
        "{} dead letters",
        total("dead_letters")
    );
    assert_eq!(total("completions"), ORDERS - 1);
    let split =
        one.counters.get("batch_calls", "split") + other.counters.get("batch_calls", "split");
    assert!(
        (1..=14).contains(&split),
        "{split} calls to find the bad one"
    );
    assert_eq!(
        total("retries"),
        0,
        "no order was tried again because of it"
    );
}

/// Writes a batch in one statement, and completes all its messages in the same transaction.
struct InOneTransaction {
    url: String,
    table: String,
    commits: Arc<Mutex<u64>>,
}

impl BatchHandler for InOneTransaction {
    type Output = ();

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
        let (mut client, connection) =
            tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
        // It ends with its client, which gets its errors.
        let connection = tokio::spawn(connection);
        let transaction = client.transaction().await?;
        let ids = batch
            .iter()
            .map(|one| Ok(i64::try_from(one.message().json::<Order>()?.id)?));
        let ids: Vec<i64> = ids.collect::<Result<_, Failure>>()?;
        let insert = format!(
            "INSERT INTO {} (id) SELECT * FROM unnest($1::bigint[])",
            self.table
        );
        transaction.execute(&insert, &[&ids]).await?;
        // In the order in which the store locks records.
        let mut completions: Vec<Completing> = batch
            .iter()
            .map(|one| one.attempt().completing(&()))
            .collect();
        completions.sort_by(|one, other| one.key().as_str().cmp(other.key().as_str()));
        for completing in &completions {
            let retention_ms = i64::try_from(completing.retention().as_millis())?;
            let key = completing.key().as_str();
            let token = completing.token();
            let token = token.as_bytes().as_slice();
            let result = completing.result().as_ref();
            let complete = PostgresStore::complete_sql();
            if transaction
                .execute(complete, &[&key, &token, &result, &retention_ms])
                .await?
                != 1
            {
                return Err("a record is not this attempt's".into());
            }
        }
        transaction.commit().await?;
        drop(client);
        connection.await??;
        *self.commits.lock().unwrap() += 1;
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}

// invariant: second-committed-effect
#[tokio::test]
async fn a_batch_commits_rows_with_completions_and_isolates_a_bad_row() {
    const ORDERS: u64 = 400;
    let kafka = Kafka::shared().await;
    let postgres = Postgres::shared().await;
    let topic = kafka.new_topic("batches", 2).await;
    let dead = kafka.new_topic("batches-dead", 1).await;
    produce(&kafka, &topic, (0..ORDERS).chain(0..ORDERS)).await;
    let table = unique("batches").replace('-', "_");
    let admin = postgres.connection().await;
    // There is no unique constraint: a second effect would be a second row.
    let create = format!("CREATE TABLE {table} (id bigint NOT NULL CHECK (id <> {POISON}))");
    admin.batch_execute(&create).await.unwrap();
    let store = PostgresStore::connect(postgres.url()).await.unwrap();
    store.create_schema().await.unwrap();
    let acks = Acks::new();
    let commits = Arc::default();
    let handler = InOneTransaction {
        url: postgres.url().to_owned(),
        table: table.clone(),
        commits: Arc::clone(&commits),
    };
    let source = KafkaSource::new(kafka.bootstrap(), unique("batches"), [topic.as_str()]);
    let dead_letters = source.dead_letters(dead.clone());
    let gate = Gate::new(unique("batches"), Key::json(["id"]), store).transactional();
    let limits = BatchLimits::new(100).wait(Duration::from_millis(100));
    let consumer = Consumer::new(source, gate, Batched::new(limits, handler))
        .ordering(Ordering::Unordered)
        .concurrency(2)
        .max_attempts(1)
        .dead_letters(dead_letters)
        .observer(Arc::clone(&acks) as _);
    let consumed = consumer.run_until(Arc::clone(&acks).until(ORDERS * 2));
    tokio::time::timeout(LIMIT, consumed)
        .await
        .expect("it ends in time")
        .unwrap();
    let count = format!("SELECT count(*), count(DISTINCT id) FROM {table}");
    let row = admin.query_one(&count, &[]).await.unwrap();
    let expected = i64::try_from(ORDERS - 1).unwrap();
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, i64>(1)),
        (expected, expected),
        "each order once"
    );
    assert_eq!(acks.counters.total("dead_letters"), 1);
    let commits = *commits.lock().unwrap();
    println!("{commits} transactions for {expected} orders");
    assert!(
        commits < ORDERS / 4,
        "{commits} transactions for {ORDERS} orders"
    );
}
