//! A worker process for the tests that kill it: charges payments, each in its own transaction, and
//! crashes or stops at a given point.

#![allow(clippy::unwrap_used, reason = "a worker that cannot go on has failed")]

#[path = "../../../../crates/oncegate-runtime/tests/runtime/list.rs"]
#[allow(dead_code, reason = "shared with the tests of the runtime")]
mod list;

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use list::{Letters, List, Listed};
use oncegate::consumer::DeadLetterLimit;
use oncegate::core::store::Store;
use oncegate::postgres::{PostgresStore, PostgresTransaction};
use oncegate::sqlite::{SqliteStore, SqliteTransaction};
use oncegate::{
    Attempt, Backoff, BatchLimits, BatchMessage, BoxError, Consumer, Failure, Gate, Handler, Key,
    Message, Transactional, TransactionalBatchHandler, TransactionalHandler,
};
use oncegate_testkit::{Client, End, Payment, Step, Then, Till, Wire};
use tokio_postgres::NoTls;

/// The longest wait for a server that is busy.
const PATIENCE: Duration = Duration::from_secs(120);
/// Short: a payment of a killed worker waits for it.
const LEASE: Duration = Duration::from_millis(600);
/// Kills use up attempts, and none of them may end as a dead letter.
const MAX_ATTEMPTS: u32 = 254;
/// The attempts of a payment that ends its process.
const FEW_ATTEMPTS: u32 = 4;

struct Pay(Till);

impl Handler for Pay {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let receipt = format!("receipt of attempt {}", attempt.number());
        self.0
            .charge(
                message,
                attempt,
                &receipt,
                End::Commit,
                std::future::ready(()),
            )
            .await?;
        Ok(receipt)
    }
}

/// Ends the process with payment 13, always.
struct Poisoned(Till);

/// The payment that ends every process that is given it.
const POISON: i64 = 13;

fn end_at_poison(message: &Message) -> Result<(), Failure> {
    if message.json::<Payment>()?.id == POISON {
        std::process::abort();
    }
    Ok(())
}

impl TransactionalHandler<PostgresTransaction> for Poisoned {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut PostgresTransaction,
    ) -> Result<String, Failure> {
        let receipt = TransactionalHandler::handle(&self.0, message, attempt, transaction).await?;
        end_at_poison(message)?;
        Ok(receipt)
    }
}

impl TransactionalHandler<SqliteTransaction> for Poisoned {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut SqliteTransaction,
    ) -> Result<String, Failure> {
        let receipt = TransactionalHandler::handle(&self.0, message, attempt, transaction).await?;
        end_at_poison(message)?;
        Ok(receipt)
    }
}

impl TransactionalBatchHandler<PostgresTransaction> for Poisoned {
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut PostgresTransaction,
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        let receipts = TransactionalBatchHandler::handle(&self.0, batch, transaction).await?;
        batch
            .iter()
            .try_for_each(|one| end_at_poison(one.message()))?;
        Ok(receipts)
    }
}

impl TransactionalBatchHandler<SqliteTransaction> for Poisoned {
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut SqliteTransaction,
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        let receipts = TransactionalBatchHandler::handle(&self.0, batch, transaction).await?;
        batch
            .iter()
            .try_for_each(|one| end_at_poison(one.message()))?;
        Ok(receipts)
    }
}

/// All payments of a worker fit into one.
const BATCHES: BatchLimits = BatchLimits::new(7).wait(Duration::from_millis(50));

/// The number of times that the point is still passed; at the last one the process ends or stops.
static PASSES: AtomicU64 = AtomicU64::new(0);
/// 1 to stop there instead of dying.
static STOPS: AtomicU64 = AtomicU64::new(0);

/// The point.
fn pass() {
    // From zero it goes down to where it never comes back from.
    if PASSES.fetch_sub(1, SeqCst) != 1 {
        return;
    }
    if STOPS.load(SeqCst) == 0 {
        std::process::abort();
    }
    let id = std::process::id().to_string();
    Command::new("sh")
        .args(["-c", r#"kill -s STOP "$1""#, "kill", &id])
        .status()
        .unwrap();
}

/// Arguments: the client, the URL or path, the table, the scope, the ids as `1,2,3`; then where it
/// crashes: the statement of a connection, the step of that statement, how often that is passed (0:
/// it does not crash), `kill` or `stop`, and whether the handler opens its transaction (`own`), is
/// `given` it, or is given it and ends its process with payment 13 (`poisoned`); or the same for a
/// batch of payments (`batched`, `batched-poisoned`). On an SQLite file the point is every step of
/// every statement.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [
        client,
        url,
        table,
        scope,
        ids,
        statement,
        step,
        passes,
        action,
        transaction,
    ] = arguments.as_slice()
    else {
        return Err(
            "payer CLIENT URL TABLE SCOPE IDS STATEMENT STEP PASSES kill|stop \
             own|given|poisoned|batched|batched-poisoned"
                .into(),
        );
    };
    let client: Client = client.parse()?;
    let statement: usize = statement.parse()?;
    let step: usize = step.parse()?;
    PASSES.store(passes.parse()?, SeqCst);
    STOPS.store(u64::from(action == "stop"), SeqCst);
    let mut till = Till {
        client,
        url: url.clone(),
        table: table.clone(),
        on_statement: None,
    };
    let (store, work, _wire) = if client == Client::Sqlite {
        till.on_statement = Some(pass);
        let store = SqliteStore::open(url).await?;
        let work = on_file(&store, transaction, till);
        (Arc::new(store) as Arc<dyn Store>, work, None)
    } else {
        let wire = passing_wire(url, statement, step).await;
        wire.url().clone_into(&mut till.url);
        let work = on_server(client, transaction, till, url).await?;
        let store = PostgresStore::builder(url)
            .start_patience(PATIENCE)
            .connect()
            .await?;
        (Arc::new(store) as Arc<dyn Store>, work, Some(wire))
    };
    let payments: Vec<_> = ids
        .split(',')
        .map(|id| ("", format!(r#"{{"id":{id}}}"#)))
        .collect();
    let count = payments.len();
    let list = List::of("payments", payments);
    // One at a time on a file, so that the number of the statement identifies the point.
    let concurrency = if client == Client::Sqlite { 1 } else { 3 };
    let gate = Gate::new(scope, Key::json(["id"]), store)
        .lease(LEASE)
        .transactional();
    let consumer = work.consumer(Listed(Arc::clone(&list)), gate);
    let attempts = if transaction.ends_with("poisoned") {
        FEW_ATTEMPTS
    } else {
        MAX_ATTEMPTS
    };
    unhindered(consumer)
        .concurrency(concurrency)
        .max_attempts(attempts)
        .run_until(async move { list.until_acked(count).await })
        .await?;
    Ok(())
}

/// A consumer that retries at once, and that no number of dead letters stops.
fn unhindered(consumer: Consumer) -> Consumer {
    consumer
        .dead_letters(Arc::new(Letters::default()))
        .dead_letter_limit(DeadLetterLimit {
            in_a_row: 1_000_000,
            share: 1.1,
        })
        .backoff(Backoff::new(
            Duration::from_millis(5),
            Duration::from_millis(50),
        ))
}

/// The work of the consumer.
enum Work {
    Own(Pay),
    Given(Transactional),
}

impl Work {
    fn consumer(self, source: Listed, gate: Gate) -> Consumer {
        match self {
            Self::Own(pay) => Consumer::new(source, gate, pay),
            Self::Given(given) => Consumer::new(source, gate, given),
        }
    }
}

/// A proxy before the server, which passes the point at this step of this statement.
async fn passing_wire(url: &str, statement: usize, step: usize) -> Wire {
    Wire::before(url, move |number, at| {
        let here = match at {
            Step::Asked(_) => number == statement && step == 0,
            Step::Sent(_) => number == statement && step == 1,
            Step::Answered(_) => number == statement + 1 && step == 2,
        };
        if here {
            pass();
        }
        Then::Go
    })
    .await
}

/// The work on an SQLite file.
fn on_file(store: &SqliteStore, transaction: &str, till: Till) -> Work {
    let transactions = store.transactions();
    Work::Given(match transaction {
        "given" => Transactional::new(transactions, till),
        "poisoned" => Transactional::new(transactions, Poisoned(till)),
        "batched" => Transactional::batched(transactions, BATCHES, till),
        "batched-poisoned" => Transactional::batched(transactions, BATCHES, Poisoned(till)),
        _ => return Work::Own(Pay(till)),
    })
}

/// The work on a server. The transactions go through the proxy, and so does what the store writes
/// for them. For a batch it does not: it would pass the point before the one transaction.
async fn on_server(
    client: Client,
    transaction: &str,
    till: Till,
    url: &str,
) -> Result<Work, BoxError> {
    if transaction == "own" {
        return Ok(Work::Own(Pay(till)));
    }
    let store = PostgresStore::builder(if transaction == "batched" {
        url
    } else {
        &till.url
    })
    .start_patience(PATIENCE)
    .connect()
    .await?;
    Ok(Work::Given(match (client, transaction) {
        (Client::Sqlx, _) => {
            let transactions = store.sqlx_transactions(sqlx::PgPool::connect(&till.url).await?);
            match transaction {
                "batched" => Transactional::batched(transactions, BATCHES, till),
                _ => Transactional::new(transactions, till),
            }
        }
        (_, "batched") => {
            let pool = Pool::builder(Manager::new(till.url.parse()?, NoTls)).build()?;
            Transactional::batched(store.transactions_of(pool), BATCHES, till)
        }
        (_, "batched-poisoned") => {
            Transactional::batched(store.transactions()?, BATCHES, Poisoned(till))
        }
        (_, "poisoned") => Transactional::new(store.transactions()?, Poisoned(till)),
        _ => Transactional::new(store.transactions()?, till),
    }))
}
