//! A handler that charges a batch of payments in the transaction that it is given.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::postgres::PostgresTransaction;
use oncegate::sqlite::SqliteTransaction;
use oncegate::{
    BatchLimits, BatchMessage, Failure, Message, Transactional, TransactionalBatchHandler,
};
use oncegate_testkit::{Client, Payment};

use crate::place::Place;

/// The payment that is bad.
pub(crate) const POISON: i64 = 13;

/// How it is bad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Bad {
    /// It is like the others.
    #[default]
    No,
    /// A statement fails with it, and with that the transaction.
    FailsStatement,
    /// The handler gives up all payments because of it.
    FailsBatch,
    /// The handler panics.
    Panics,
    /// The handler never returns.
    Hangs,
    /// The handler rolls back.
    EndsTransaction,
    /// The handler returns one outcome too many.
    Miscounted,
    /// The handler tells which one it is, and gives it up.
    GivenUp,
    /// The handler tells which one it is, until its third attempt.
    FailsTwice,
}

/// Charges in the transaction that it is given, with one statement.
#[derive(Clone, Debug, Default)]
pub(crate) struct PayAll {
    table: String,
    bad: Bad,
    /// The payments of each call.
    pub(crate) calls: Arc<Mutex<Vec<Vec<i64>>>>,
    /// How many calls have returned outcomes.
    returned: Arc<AtomicUsize>,
    /// The results that duplicates got.
    pub(crate) told: Arc<Mutex<Vec<String>>>,
}

/// What a call works on.
struct Rows {
    ids: Vec<i64>,
    attempts: Vec<i32>,
}

impl PayAll {
    pub(crate) fn new(place: &Place, bad: Bad) -> Self {
        Self {
            table: place.till.table.clone(),
            bad,
            ..Self::default()
        }
    }

    fn rows(&self, batch: &[BatchMessage]) -> Result<Rows, Failure> {
        let ids = batch
            .iter()
            .map(|one| Ok(one.message().json::<Payment>()?.id));
        let ids: Vec<i64> = ids.collect::<Result<_, Failure>>()?;
        self.calls.lock().unwrap().push(ids.clone());
        let attempts = batch
            .iter()
            .map(|one| i32::try_from(one.attempt().number()));
        Ok(Rows {
            ids,
            attempts: attempts.collect::<Result<_, _>>()?,
        })
    }

    fn insert(&self) -> String {
        format!(
            "INSERT INTO {} (id, attempt) SELECT * FROM unnest($1::bigint[], $2::int[])",
            self.table
        )
    }

    /// The SQL that follows the charges.
    fn sql(&self, rows: &Rows) -> &'static str {
        match self.bad {
            Bad::FailsStatement if rows.ids.contains(&POISON) => "SELECT no_such_column",
            Bad::EndsTransaction if rows.ids.contains(&POISON) => "ROLLBACK",
            _ => "SELECT 1",
        }
    }

    /// What follows that.
    async fn outcomes(&self, rows: &Rows) -> Result<Vec<Result<String, Failure>>, Failure> {
        let has_poison = rows.ids.contains(&POISON);
        let outcome = |(id, attempt): (&i64, &i32)| match self.bad {
            Bad::GivenUp if *id == POISON => Err(Failure::permanent("never")),
            Bad::FailsTwice if *id == POISON && *attempt < 3 => Err(Failure::retry("not yet")),
            _ => Ok(format!("receipt of attempt {attempt}")),
        };
        let mut outcomes: Vec<_> = rows.ids.iter().zip(&rows.attempts).map(outcome).collect();
        match self.bad {
            Bad::FailsBatch if has_poison => return Err(Failure::permanent("one of them")),
            Bad::Panics if has_poison => panic!("simulated"),
            Bad::Hangs if has_poison => std::future::pending().await,
            Bad::Miscounted if has_poison => outcomes.push(Ok("one too many".to_owned())),
            _ => {}
        }
        self.returned.fetch_add(1, Relaxed);
        Ok(outcomes)
    }

    /// Whether every call without the bad payment has returned, where those with it do not.
    pub(crate) fn are_good_ones_returned(&self) -> bool {
        let calls = self.calls.lock().unwrap();
        let good = calls.iter().filter(|ids| !ids.contains(&POISON)).count();
        good == self.returned.load(Relaxed)
    }

    fn tell(&self, result: String) -> Result<(), Failure> {
        self.told.lock().unwrap().push(result);
        Ok(())
    }
}

impl Place {
    /// The handler with batches of up to so many payments, in transactions of the place's client.
    pub(crate) async fn batched(&self, most: usize, pay: PayAll) -> Transactional {
        let limits = BatchLimits::new(most).wait(Duration::from_millis(20));
        match self.till.client {
            Client::Sqlite => Transactional::batched(self.sqlite().transactions(), limits, pay),
            Client::Sqlx => {
                let pool = sqlx::PgPool::connect(&self.till.url).await.unwrap();
                Transactional::batched(self.postgres().sqlx_transactions(pool), limits, pay)
            }
            _ => Transactional::batched(self.postgres().transactions().unwrap(), limits, pay),
        }
    }
}

impl TransactionalBatchHandler<PostgresTransaction> for PayAll {
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut PostgresTransaction,
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        let rows = self.rows(batch)?;
        transaction
            .execute(&self.insert(), &[&rows.ids, &rows.attempts])
            .await?;
        transaction.batch_execute(self.sql(&rows)).await?;
        self.outcomes(&rows).await
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.tell(result)
    }
}

impl TransactionalBatchHandler<sqlx::Transaction<'static, sqlx::Postgres>> for PayAll {
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut sqlx::Transaction<'static, sqlx::Postgres>,
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        let rows = self.rows(batch)?;
        let insert = sqlx::query(sqlx::AssertSqlSafe(self.insert()))
            .bind(&rows.ids)
            .bind(&rows.attempts);
        insert.execute(&mut **transaction).await?;
        sqlx::raw_sql(self.sql(&rows))
            .execute(&mut **transaction)
            .await?;
        self.outcomes(&rows).await
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.tell(result)
    }
}

impl TransactionalBatchHandler<SqliteTransaction> for PayAll {
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut SqliteTransaction,
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        let rows = self.rows(batch)?;
        let insert = format!("INSERT INTO {} (id, attempt) VALUES ($1, $2)", self.table);
        for row in rows.ids.iter().zip(&rows.attempts) {
            transaction.execute(&insert, row)?;
        }
        transaction.execute_batch(self.sql(&rows))?;
        self.outcomes(&rows).await
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.tell(result)
    }
}
