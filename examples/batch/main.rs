//! Orders are booked a hundred at a time: one write for each batch, and each order is booked once.
//!
//! `cargo run --example batch` starts a Kafka-speaking broker in this process and keeps records in
//! SQLite; `--bootstrap` and `--redis` name servers instead. Every third order comes twice, and
//! some orders cannot be booked: each of them makes its whole batch fail. With `--one-transaction`
//! the book is a table in the file of the records, and the orders of a batch and their records are
//! one commit. It prints what happened as a table, and exits with 1 when the proof fails.

mod ledger;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use oncegate::core::store::Store;
use oncegate::kafka::{KafkaDeadLetters, KafkaSource};
use oncegate::prelude::*;
use oncegate::{Counters, Observer};
use oncegate_examples::broker::Broker;
use oncegate_examples::show::{Show, exit_code};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

/// An order with an amount of zero cannot be booked; one of so many has it.
const UNBOOKABLE: u32 = 400;

#[derive(Debug, Parser)]
#[command(about = "Books orders in batches, with duplicates and orders that make their batch fail")]
struct Args {
    /// The number of orders to produce; every third of them twice.
    #[arg(long, default_value_t = 3_000)]
    orders: u32,
    /// The most orders of a batch.
    #[arg(long, default_value_t = 100)]
    batch: usize,
    /// A Kafka broker, `host:port`; without it one is started in this process.
    #[arg(long)]
    bootstrap: Option<String>,
    /// A Redis, `redis://host:port`; without it the records are in a file of SQLite.
    #[arg(long)]
    redis: Option<String>,
    /// Book in the file of the records: the orders of a batch and their records are one
    /// transaction.
    #[arg(long, conflicts_with = "redis")]
    one_transaction: bool,
    #[command(flatten)]
    show: Show,
}

#[derive(Deserialize)]
struct Order {
    order_id: String,
    amount: u32,
}

/// A book to which orders are written, a batch at a time.
struct Bookkeeper {
    book: PathBuf,
}

impl BatchHandler for Bookkeeper {
    type Output = ();

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
        let mut rows = String::new();
        for one in batch {
            let Order { order_id, amount } = one.message().json()?;
            // As a constraint of a table does, it refuses the whole statement.
            if amount == 0 {
                return Err(Failure::permanent("an amount is zero"));
            }
            rows += &format!("{order_id}\n");
        }
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.book)?
            .write_all(rows.as_bytes())?;
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}

/// The proof, in numbers.
#[derive(Debug, Serialize)]
struct Proof {
    schema: &'static str,
    messages: u64,
    orders: u64,
    unbookable: u64,
    booked: u64,
    booked_twice: u64,
    dead_letters: u64,
    calls: u64,
    calls_for_parts_of_failed_batches: u64,
    retries: u64,
}

impl Proof {
    /// Returns whether every order that can be booked was booked once, and the others are dead
    /// letters at their first attempt.
    fn holds(&self) -> bool {
        self.booked == self.orders - self.unbookable
            && self.booked_twice == 0
            && self.dead_letters == self.unbookable
            && self.retries == 0
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>8}  messages for {} orders",
            self.messages, self.orders
        )?;
        writeln!(
            f,
            "{:>8}  orders booked, {} of them twice",
            self.booked, self.booked_twice
        )?;
        writeln!(
            f,
            "{:>8}  dead letters, for {} orders that cannot be booked",
            self.dead_letters, self.unbookable
        )?;
        let calls = self.calls;
        let parts = self.calls_for_parts_of_failed_batches;
        write!(
            f,
            "{calls:>8}  calls of the handler, {parts} of them for parts of batches that failed"
        )
    }
}

fn main() -> ExitCode {
    exit_code(prepare_and_run(&Args::parse()))
}

/// Produces, books, and returns whether the proof holds.
fn prepare_and_run(args: &Args) -> Result<bool, BoxError> {
    let name = format!("batch-{:x}", fastrand::u32(..));
    let topic = format!("{name}-orders");
    let dead = format!("{name}-dead");
    let broker = Broker::start(args.bootstrap.as_deref())?;
    broker.create_topic(&topic)?;
    broker.create_topic(&dead)?;
    let messages = produce(&broker, &topic, args.orders)?;
    let source = KafkaSource::new(broker.bootstrap(), &name, [&topic]);
    let dead_letters = source.dead_letters(&dead);
    tokio::runtime::Runtime::new()?.block_on(book(args, &name, messages, source, dead_letters))
}

/// Books every order.
async fn book(
    args: &Args,
    name: &str,
    messages: u64,
    source: KafkaSource,
    dead_letters: KafkaDeadLetters,
) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let book = folder.path().join("book");
    let limits = BatchLimits::new(args.batch).wait(Duration::from_millis(50));
    let gate = |store: Arc<dyn Store>| Gate::new(name, Key::json(["order_id"]), store);
    let sqlite = SqliteStore::open(folder.path().join("records.db")).await?;
    let consumer = match &args.redis {
        _ if args.one_transaction => {
            let ledger = ledger::open(&sqlite)?;
            let work = Transactional::batched(sqlite.transactions(), limits, ledger);
            Consumer::new(source, gate(Arc::new(sqlite.clone())), work)
        }
        Some(url) => {
            let store = RedisStore::connect(url).await?;
            Consumer::new(
                source,
                gate(Arc::new(store)),
                Batched::new(limits, Bookkeeper { book: book.clone() }),
            )
        }
        None => {
            let work = Batched::new(limits, Bookkeeper { book: book.clone() });
            Consumer::new(source, gate(Arc::new(sqlite.clone())), work)
        }
    };
    let counters = Arc::new(UntilAcked::new(messages));
    consumer
        .ordering(Ordering::Unordered)
        .concurrency(4)
        .dead_letters(dead_letters)
        .observer(Arc::clone(&counters) as Arc<dyn Observer>)
        .run_until(Arc::clone(&counters).over())
        .await?;
    let booked = if args.one_transaction {
        ledger::booked(&sqlite)?
    } else {
        std::fs::read_to_string(&book)?
            .lines()
            .map(str::to_owned)
            .collect()
    };
    let proof = proof(args.orders.into(), messages, &booked, &counters.counters);
    args.show.proof(&proof)?;
    Ok(proof.holds())
}

/// Produces orders, every third of them twice, and returns how many messages that were.
fn produce(broker: &Broker, topic: &str, orders: u32) -> Result<u64, BoxError> {
    let sender = broker.sender(topic)?;
    let mut messages = 0;
    for order in 0..orders {
        let amount = if order % UNBOOKABLE == UNBOOKABLE / 2 {
            0
        } else {
            10
        };
        for _ in 0..if order % 3 == 0 { 2 } else { 1 } {
            let payload = format!(r#"{{"order_id":"order-{order}","amount":{amount}}}"#);
            sender.send(&payload, &order.to_string())?;
            messages += 1;
        }
    }
    sender.flush()?;
    Ok(messages)
}

fn proof(orders: u64, messages: u64, booked: &[String], counters: &Counters) -> Proof {
    let mut times: BTreeMap<&str, u64> = BTreeMap::new();
    booked
        .iter()
        .for_each(|order| *times.entry(order).or_default() += 1);
    let unbookable =
        (0..orders).filter(|order| order % u64::from(UNBOOKABLE) == u64::from(UNBOOKABLE / 2));
    Proof {
        schema: "oncegate.example.batch.v1",
        messages,
        orders,
        unbookable: unbookable.count() as u64,
        booked: times.len() as u64,
        booked_twice: times.values().filter(|times| **times > 1).count() as u64,
        dead_letters: counters.total("dead_letters"),
        calls: counters.total("batch_calls"),
        calls_for_parts_of_failed_batches: counters.get("batch_calls", "split"),
        retries: counters.total("retries"),
    }
}

/// Counts events, and notices when every message is acknowledged.
#[derive(Debug)]
struct UntilAcked {
    counters: Counters,
    messages: u64,
    all: Notify,
}

impl UntilAcked {
    fn new(messages: u64) -> Self {
        Self {
            counters: Counters::default(),
            messages,
            all: Notify::new(),
        }
    }

    async fn over(self: Arc<Self>) {
        self.all.notified().await;
    }
}

impl Observer for UntilAcked {
    fn observe(&self, event: oncegate::Event<'_>) {
        self.counters.observe(event);
        if let oncegate::Event::Acked { .. } = event
            && self.counters.total("acks") >= self.messages
        {
            self.all.notify_one();
        }
    }
}
