//! Consume, change, publish: an order is shipped and its notice is published. Each listener sees
//! each exactly once.
//!
//! The handler writes the shipment and its notice (a message of the outbox) in one transaction of
//! PostgreSQL, together with the mark that the order is done. A relay publishes the outbox to
//! Kafka, at least once and in order for each customer; each message carries its id. The next
//! consumer's key is that id, so that its gate answers what the relay has published twice.
//!
//! `cargo run --example outbox` starts a Kafka-speaking broker in this process, and a PostgreSQL
//! server from the programs that are installed on this machine; `--bootstrap` and `--postgres` name
//! others. During the run the relay crashes several times between publishing messages and marking
//! them as sent. It prints what happened as a table, and exits with 1 when the proof fails.

mod consumers;
mod proof;
mod relay;

use std::process::ExitCode;

use clap::Parser;
use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_examples::broker::Broker;
use oncegate_examples::crew::Crew;
use oncegate_examples::database::Database;
use oncegate_examples::show::{Show, exit_code};

use proof::Proof;

/// The number of customers. An order's customer is its broker key.
const CUSTOMERS: u32 = 50;
/// The crashes of the relay, each after it has published something.
const CRASHES: u32 = 5;

const TABLES: &str = "\
CREATE TABLE IF NOT EXISTS shipments (
    run      text   NOT NULL,
    order_id text   NOT NULL,
    sequence bigint GENERATED ALWAYS AS IDENTITY
);
CREATE TABLE IF NOT EXISTS notices (
    run      text   NOT NULL,
    order_id text   NOT NULL,
    customer text   NOT NULL,
    sequence bigint NOT NULL,                -- of its shipment
    made     bigint GENERATED ALWAYS AS IDENTITY
)";

#[derive(Debug, Parser)]
#[command(
    about = "Ships orders and publishes notices through an outbox, crashes its relay, and proves that each arrives once"
)]
struct Args {
    /// The number of orders to produce; each comes once or twice.
    #[arg(long, default_value_t = 3_000)]
    orders: u32,
    /// A Kafka broker, `host:port`; without it one is started in this process.
    #[arg(long)]
    bootstrap: Option<String>,
    /// A PostgreSQL database, `postgres://user@host:port/database`; without it a server is started.
    #[arg(long)]
    postgres: Option<String>,
    #[command(flatten)]
    show: Show,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, clap::Subcommand)]
enum Role {
    /// The relay; started by the main process.
    #[command(hide = true)]
    Relay(relay::Relay),
    /// Both consumers; started by the main process.
    #[command(hide = true)]
    Consumers(consumers::Consumers),
}

fn main() -> ExitCode {
    let args = Args::parse();
    exit_code(match args.role {
        Some(Role::Relay(relay)) => relay.run().map(|()| true),
        Some(Role::Consumers(consumers)) => consumers.run().map(|()| true),
        None => run(&args),
    })
}

/// Produces, ships, publishes, crashes, and returns whether the proof holds.
fn run(args: &Args) -> Result<bool, BoxError> {
    let run = format!("outbox-{:x}", fastrand::u32(..));
    let orders = format!("{run}-orders");
    let shipments = format!("{run}-shipments");
    let stages = args.show.stages();
    let bar = stages.begin("shipping; the relay crashes on the way", args.orders.into());

    let database = Database::open(args.postgres.as_deref(), TABLES)?;
    let broker = Broker::start(args.bootstrap.as_deref())?;
    broker.create_topic(&orders)?;
    broker.create_topic(&shipments)?;
    let messages = produce(&broker, &orders, args.orders)?;

    let shared = [
        "--bootstrap",
        broker.bootstrap(),
        "--postgres",
        database.url(),
        "--run",
        &run,
    ];
    let shared = shared.map(str::to_owned);
    let mut consumers = Crew::start(1, &[&["consumers".to_owned()], &shared[..]].concat())?;
    let crashes = crash_relays(&shared, &database, &run, bar)?;
    let mut relay = Crew::start(1, &[&["relay".to_owned()], &shared[..]].concat())?;

    let asker = broker.asker(&format!("{run}-notices"))?;
    consumers.wait_for(
        bar,
        || proof::progress(&database, &run),
        |progress| {
            Ok(progress.answers == u64::from(args.orders)
                && broker.is_consumed(&asker, &shipments)?)
        },
    )?;
    relay.stop()?;
    consumers.stop()?;
    stages.end();

    let proof = Proof::new(
        &database,
        &broker,
        &run,
        messages,
        args.orders.into(),
        crashes,
    )?;
    args.show.proof(&proof)?;
    Ok(proof.holds())
}

/// Produces orders, every third of them twice, and returns how many messages that were.
fn produce(broker: &Broker, topic: &str, orders: u32) -> Result<u64, BoxError> {
    let sender = broker.sender(topic)?;
    let mut messages = 0;
    for order in 0..orders {
        let customer = format!("customer-{}", order % CUSTOMERS);
        for copy in 0..if order % 3 == 0 { 2 } else { 1 } {
            let payload = format!(
                r#"{{"order_id":"order-{order}","customer":"{customer}","message_id":"{order}-{copy}"}}"#
            );
            sender.send(&payload, &customer)?;
            messages += 1;
        }
    }
    sender.flush()?;
    Ok(messages)
}

/// Starts one relay after another. Each publishes some messages, and crashes before it marks them.
fn crash_relays(
    shared: &[String],
    database: &Database,
    run: &str,
    bar: &ProgressBar,
) -> Result<u32, BoxError> {
    for _ in 0..CRASHES {
        let mut relay = std::process::Command::new(std::env::current_exe()?)
            .arg("relay")
            .args(shared)
            .arg("--crash")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()?;
        // Held, because its end would ask the relay to stop.
        let _input = relay.stdin.take();
        let status = relay.wait()?;
        if status.success() {
            return Err("a relay that should crash has ended well".into());
        }
        bar.set_position(proof::progress(database, run)?.charges);
    }
    Ok(CRASHES)
}
