//! Handlers that are given their transaction: the first attempt makes no claim.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use oncegate::core::record::State;
use oncegate::postgres::{Isolation, PostgresTransaction};
use oncegate::sqlite::SqliteTransaction;
use oncegate::{Attempt, Consumer, Failure, Message, Transactional, TransactionalHandler};
use oncegate_testkit::{Client, Payment, Step, Then, Wire};
use tokio_postgres::NoTls;

use crate::list::{List, Listed};
use crate::place::{Bench, LEASE, Place, key_of};

/// What the handler does after the charge.
#[derive(Clone, Debug, Default)]
pub(crate) enum After {
    /// It returns a receipt.
    #[default]
    Return,
    /// It fails while attempts are below this number.
    FailBefore(u32),
    Panic,
    GiveUp,
    /// It wants the message later, in this many runs.
    Later(u32),
    /// It executes this and ignores the error.
    Execute(&'static str),
    /// It waits, and never returns.
    Hang,
}

/// Charges in the transaction that it is given.
#[derive(Clone, Default)]
pub(crate) struct Pay {
    table: String,
    then: After,
    pub(crate) runs: Arc<AtomicU32>,
    pub(crate) told: Arc<Mutex<Vec<String>>>,
}

impl Pay {
    pub(crate) fn new(place: &Place, then: After) -> Self {
        Self {
            table: place.till.table.clone(),
            then,
            ..Self::default()
        }
    }

    fn insert(&self) -> String {
        format!("INSERT INTO {} (id, attempt) VALUES ($1, $2)", self.table)
    }
}

pub(crate) const ISOLATIONS: [Isolation; 3] = [
    Isolation::ReadCommitted,
    Isolation::RepeatableRead,
    Isolation::Serializable,
];

/// The clients that can be given their transaction.
pub(crate) const GIVEN: [Client; 3] = [Client::TokioPostgres, Client::Sqlx, Client::Sqlite];

impl Place {
    /// The handler in transactions of the place's client.
    pub(crate) async fn transactional(&self, pay: Pay) -> Transactional {
        match self.till.client {
            Client::Sqlite => Transactional::new(self.sqlite().transactions(), pay),
            Client::Sqlx => {
                let pool = sqlx::PgPool::connect(&self.till.url).await.unwrap();
                Transactional::new(self.postgres().sqlx_transactions(pool), pay)
            }
            _ => Transactional::new(self.postgres().transactions().unwrap(), pay),
        }
    }
}

impl Pay {
    /// The SQL that follows the charge.
    fn sql(&self) -> &'static str {
        if let After::Execute(sql) = self.then {
            sql
        } else {
            "SELECT 1"
        }
    }

    /// What follows that.
    async fn end(&self, attempt: u32) -> Result<String, Failure> {
        match self.then {
            After::Return | After::Execute(_) => {}
            After::Later(runs) if self.runs.load(SeqCst) <= runs => {
                return Err(Failure::later(Duration::from_millis(1), "closed"));
            }
            After::Later(_) => {}
            After::FailBefore(attempts) if attempt < attempts => return Err("closed".into()),
            After::FailBefore(_) => {}
            After::Panic => panic!("simulated"),
            After::GiveUp => return Err(Failure::permanent("never")),
            After::Hang => std::future::pending().await,
        }
        Ok(format!("receipt of attempt {attempt}"))
    }

    pub(crate) async fn tell(&self, result: String) -> Result<(), Failure> {
        self.told.lock().unwrap().push(result);
        Ok(())
    }
}

impl TransactionalHandler<PostgresTransaction> for Pay {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut PostgresTransaction,
    ) -> Result<String, Failure> {
        self.runs.fetch_add(1, SeqCst);
        let payment: Payment = message.json()?;
        let number = i32::try_from(attempt.number())?;
        transaction
            .execute(&self.insert(), &[&payment.id, &number])
            .await?;
        drop(transaction.batch_execute(self.sql()).await);
        self.end(attempt.number()).await
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.tell(result).await
    }
}

impl TransactionalHandler<sqlx::Transaction<'static, sqlx::Postgres>> for Pay {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut sqlx::Transaction<'static, sqlx::Postgres>,
    ) -> Result<String, Failure> {
        self.runs.fetch_add(1, SeqCst);
        let payment: Payment = message.json()?;
        let number = i32::try_from(attempt.number())?;
        let insert = sqlx::query(sqlx::AssertSqlSafe(self.insert()))
            .bind(payment.id)
            .bind(number);
        insert.execute(&mut **transaction).await?;
        drop(sqlx::raw_sql(self.sql()).execute(&mut **transaction).await);
        self.end(attempt.number()).await
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.tell(result).await
    }
}

impl TransactionalHandler<SqliteTransaction> for Pay {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut SqliteTransaction,
    ) -> Result<String, Failure> {
        self.runs.fetch_add(1, SeqCst);
        let payment: Payment = message.json()?;
        let number = i32::try_from(attempt.number())?;
        transaction.execute(&self.insert(), (payment.id, number))?;
        drop(transaction.execute_batch(self.sql()));
        self.end(attempt.number()).await
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.tell(result).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_effect_and_its_record_are_one_transaction_without_a_claim() {
    for client in GIVEN {
        let place = Place::journaled(client).await;
        let bench = Bench::of(&[1, 2, 1]);
        let pay = Pay::new(&place, After::Return);
        bench
            .run(place.gate(LEASE), place.transactional(pay.clone()).await, 3)
            .await;
        let charges = place.till.charges().await;
        assert_eq!(
            charges.into_values().collect::<Vec<_>>(),
            [[1], [1]],
            "{client}"
        );
        assert_eq!(
            *pay.told.lock().unwrap(),
            ["receipt of attempt 1"],
            "{client}"
        );
        assert_eq!(
            bench.counters.get("handler_runs", "succeeded"),
            2,
            "{client}"
        );
        assert_eq!(bench.counters.total("completions"), 2, "{client}");
        // No claim was committed before: the journal, which triggers write, has one entry.
        let entries = place.history(&key_of(&place.scope, 1)).await;
        let events: Vec<_> = entries.iter().map(|entry| &*entry.event).collect();
        assert_eq!(events, ["completed"], "{client}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attempt_is_rolled_back_counted_and_then_claimed() {
    for client in GIVEN {
        let place = Place::journaled(client).await;
        let bench = Bench::of(&[1]);
        let pay = Pay::new(&place, After::FailBefore(3));
        bench
            .run(place.gate(LEASE), place.transactional(pay.clone()).await, 1)
            .await;
        assert_eq!(place.till.charges().await[&1], [3], "{client}");
        assert_eq!(pay.runs.load(SeqCst), 3, "{client}");
        assert_eq!(bench.counters.total("retries"), 2, "{client}");
        let entries = place.history(&key_of(&place.scope, 1)).await;
        let events: Vec<_> = entries
            .iter()
            .map(|entry| (&*entry.event, entry.attempt))
            .collect();
        let [first, second, third] = [1, 2, 3].map(Some);
        let expected = [
            ("claimed", first),
            ("released", first),
            ("claimed", second),
            ("released", second),
            ("claimed", third),
            ("completed", third),
        ];
        assert_eq!(events, expected, "{client}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_wanted_later_open_no_breaker() {
    let ids: Vec<i64> = (1..=40).collect();
    for client in GIVEN {
        let place = Place::new(client).await;
        let bench = Bench::of(&ids);
        let pay = Pay::new(&place, After::Later(200));
        bench
            .run(
                place.gate(LEASE),
                place.transactional(pay.clone()).await,
                ids.len(),
            )
            .await;
        assert_eq!(place.till.charges().await.len(), ids.len(), "{client}");
        assert_eq!(bench.counters.total("breaker_changes"), 0, "{client}");
        assert_eq!(bench.counters.total("retries"), 0, "{client}");
    }
}

// invariant: ack-without-commit
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_succeed_is_a_dead_letter_within_its_attempts() {
    let ends = [
        (
            After::FailBefore(u32::MAX),
            "attempts_used_up",
            Bench::MAX_ATTEMPTS,
        ),
        (After::Panic, "attempts_used_up", Bench::MAX_ATTEMPTS),
        (After::GiveUp, "permanent", 1),
        (
            After::Execute("ROLLBACK"),
            "attempts_used_up",
            Bench::MAX_ATTEMPTS,
        ),
        // The error was ignored, and the transaction has failed all the same.
        (
            After::Execute("SELECT 1/0"),
            "attempts_used_up",
            Bench::MAX_ATTEMPTS,
        ),
    ];
    for client in GIVEN {
        // SQLite divides by zero.
        let ends = &ends[..if client == Client::Sqlite { 4 } else { 5 }];
        for (then, cause, runs) in ends {
            let place = Place::new(client).await;
            let bench = Bench::of(&[1]);
            let pay = Pay::new(&place, then.clone());
            bench
                .run(place.gate(LEASE), place.transactional(pay.clone()).await, 1)
                .await;
            assert!(place.till.charges().await.is_empty(), "{client}, {then:?}");
            assert_eq!(bench.letters.causes(), [*cause], "{client}, {then:?}");
            assert_eq!(pay.runs.load(SeqCst), *runs, "{client}, {then:?}");
        }
    }
}

// invariant: ack-without-commit
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_ended_by_its_handler_is_not_acked_as_done() {
    for client in GIVEN {
        let place = Place::new(client).await;
        let then = After::Execute("ROLLBACK; BEGIN; CREATE TEMPORARY TABLE strays (id int)");
        let bench = Bench::of(&[1]);
        let pay = Pay::new(&place, then);
        bench
            .run(place.gate(LEASE), place.transactional(pay).await, 1)
            .await;
        assert!(place.till.charges().await.is_empty(), "{client}");
        assert_eq!(bench.letters.causes(), ["attempts_used_up"], "{client}");
        let looked = place
            .store
            .read(vec![key_of(&place.scope, 1)])
            .await
            .remove(0)
            .unwrap()
            .unwrap();
        let State::Failed { reason, .. } = looked.record.state else {
            panic!("{looked:?}")
        };
        assert!(reason.contains("COMMIT or ROLLBACK"), "{client}: {reason}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_over_its_limit_rolls_back_and_names_a_way_out() {
    let place = Place::new(Client::TokioPostgres).await;
    let bench = Bench::of(&[1]);
    let pay = Pay::new(&place, After::Hang);
    let hanging = place
        .transactional(pay)
        .await
        .limit(Duration::from_millis(200));
    bench.run(place.gate(LEASE), hanging, 1).await;
    assert!(place.till.charges().await.is_empty());
    assert_eq!(bench.counters.get("handler_runs", "cancelled"), 1);
    let looked = place
        .store
        .read(vec![key_of(&place.scope, 1)])
        .await
        .remove(0)
        .unwrap()
        .unwrap();
    let State::Failed { reason, .. } = looked.record.state else {
        panic!("{looked:?}")
    };
    assert!(
        reason.contains("Transactional::limit") && reason.contains("commit_with"),
        "{reason}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_of_another_database_are_refused_at_the_start() {
    let place = Place::new(Client::TokioPostgres).await;
    let other = Place::journaled(Client::TokioPostgres).await;
    let pay = Transactional::new(
        other.postgres().transactions().unwrap(),
        Pay::new(&place, After::Return),
    );
    let list = List::of("payments", [("", r#"{"id":1}"#.to_owned())]);
    let consumer = Consumer::new(Listed(list), place.gate(LEASE), pay);
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("another database"), "{error}");
}

/// A pool of the caller's, through a proxy.
pub(crate) fn pool(url: &str) -> Pool {
    Pool::builder(Manager::new(url.parse().unwrap(), NoTls))
        .max_size(4)
        .build()
        .unwrap()
}

// invariant: ack-without-commit
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_is_lost_is_settled_by_the_record() {
    for cut in ["before", "sent", "answered"] {
        let place = Place::new(Client::TokioPostgres).await;
        let cuts = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&cuts);
        let wire = Wire::before(&place.till.url, move |_, step| {
            let here = match step {
                Step::Asked(_) => cut == "before" && step.is_commit(),
                Step::Sent(bytes) => cut == "sent" && Step::Asked(bytes).is_commit(),
                Step::Answered(_) => cut == "answered" && step.is_committed(),
            };
            if here && count.fetch_add(1, SeqCst) == 0 {
                Then::Cut
            } else {
                Then::Go
            }
        })
        .await;
        let pay = Pay::new(&place, After::Return);
        let bench = Bench::of(&[1, 1]);
        let transactions = place.postgres().transactions_of(pool(wire.url()));
        bench
            .run(
                place.gate(LEASE),
                Transactional::new(transactions, pay.clone()),
                2,
            )
            .await;
        assert!(cuts.load(SeqCst) >= 1, "{cut}");
        assert_eq!(place.till.charges().await[&1].len(), 1, "{cut}");
        assert_eq!(bench.letters.causes(), [""; 0], "{cut}");
        // The second delivery alone is a duplicate.
        assert_eq!(pay.told.lock().unwrap().len(), 1, "{cut}");
    }
}
