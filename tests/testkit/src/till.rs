//! A till: where payments are charged inside a transaction, by each of the clients that oncegate
//! has adapters for.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::str::FromStr;
use std::time::Duration;

use oncegate::postgres::{PostgresStore, PostgresTransaction};
use oncegate::sqlite::SqliteTransaction;
use oncegate::{
    Attempt, BatchMessage, Failure, Message, TransactionalBatchHandler, TransactionalHandler,
};
use rusqlite::TransactionBehavior::Immediate;
use rusqlite::trace::{TraceEvent, TraceEventCodes};
use sqlx::Connection as _;

/// How long a transaction may wait for others on an SQLite file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

/// What a handler talks to its database with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// `commit_with` a transaction of tokio-postgres.
    TokioPostgres,
    /// `commit_with` a transaction of sqlx.
    Sqlx,
    /// `blocking_commit_with` a transaction of rusqlite.
    Sqlite,
    /// The published statement and a commit by the caller.
    Statement,
}

/// Every client.
pub const CLIENTS: [Client; 4] = [
    Client::TokioPostgres,
    Client::Sqlx,
    Client::Sqlite,
    Client::Statement,
];

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl FromStr for Client {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = CLIENTS
            .into_iter()
            .find(|client| client.to_string() == name);
        found.ok_or_else(|| format!("there is no client {name}"))
    }
}

/// What a handler does with its transaction once the effect is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It commits with the completion.
    Commit,
    /// It announces the completion, drops the transaction, and does not wait for its end.
    Forget,
}

/// A table of charges in some database: a row for each committed effect, and nothing that keeps it
/// from having two for one payment.
#[derive(Clone, Debug)]
pub struct Till {
    /// How it is charged.
    pub client: Client,
    /// The URL of the server, or the path of the file.
    pub url: String,
    /// The table.
    pub table: String,
    /// Called before and after each statement on an SQLite file.
    pub on_statement: Option<fn()>,
}

/// What a message asks for: `{"id":7}`.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub struct Payment {
    /// The payment's id.
    pub id: i64,
}

impl Till {
    /// Makes the table.
    ///
    /// # Panics
    /// When it cannot be made.
    pub async fn open(client: Client, url: &str) -> Self {
        let table = crate::unique("charges").replace('-', "_");
        let make = format!("CREATE TABLE {table} (id bigint NOT NULL, attempt integer NOT NULL)");
        let till = Self {
            client,
            url: url.to_owned(),
            table,
            on_statement: None,
        };
        if client == Client::Sqlite {
            till.connect_to_file()
                .expect("it opens")
                .execute_batch(&make)
                .expect("a table");
        } else {
            connect(url)
                .await
                .expect("it connects")
                .batch_execute(&make)
                .await
                .expect("a table");
        }
        till
    }

    /// Charges the message's payment in a transaction of its own. Between the effect and the end
    /// `meanwhile` happens (on an SQLite file before both: its transaction keeps all others away).
    ///
    /// # Errors
    /// When anything fails.
    pub async fn charge(
        &self,
        message: &Message,
        attempt: &Attempt,
        result: &String,
        end: End,
        meanwhile: impl Future<Output = ()> + Send,
    ) -> Result<(), Failure> {
        let Payment { id } = message.json()?;
        let number = i32::try_from(attempt.number())?;
        let insert = self.insert();
        match self.client {
            Client::TokioPostgres | Client::Statement => {
                let mut client = connect(&self.url).await?;
                let transaction = client.transaction().await?;
                transaction.execute(&insert, &[&id, &number]).await?;
                meanwhile.await;
                match (end, self.client) {
                    (End::Forget, _) => {
                        drop(attempt.completing(result));
                        Ok(())
                    }
                    (End::Commit, Client::Statement) => {
                        by_statement(attempt, transaction, result).await
                    }
                    (End::Commit, _) => attempt.commit_with(transaction, result).await,
                }
            }
            Client::Sqlx => {
                let mut connection = sqlx::PgConnection::connect(&self.url).await?;
                let mut transaction = connection.begin().await?;
                let insert = sqlx::query(sqlx::AssertSqlSafe(insert))
                    .bind(id)
                    .bind(number);
                insert.execute(&mut *transaction).await?;
                meanwhile.await;
                match end {
                    End::Forget => {
                        drop(attempt.completing(result));
                        Ok(())
                    }
                    End::Commit => attempt.commit_with(transaction, result).await,
                }
            }
            Client::Sqlite => {
                meanwhile.await;
                let till = self.clone();
                let attempt = attempt.clone();
                let result = result.clone();
                let work = move || {
                    let mut connection = till.connect_to_file()?;
                    let transaction = connection.transaction_with_behavior(Immediate)?;
                    transaction.execute(&insert, (id, number))?;
                    match end {
                        End::Forget => {
                            drop(attempt.completing(&result));
                            Ok(())
                        }
                        End::Commit => attempt.blocking_commit_with(transaction, &result),
                    }
                };
                tokio::task::spawn_blocking(work).await?
            }
        }
    }

    /// The statement that charges.
    fn insert(&self) -> String {
        format!("INSERT INTO {} (id, attempt) VALUES ($1, $2)", self.table)
    }

    /// The committed charges: the attempts that made them, by payment.
    ///
    /// # Panics
    /// When they cannot be read.
    pub async fn charges(&self) -> BTreeMap<i64, Vec<i32>> {
        let select = format!("SELECT id, attempt FROM {} ORDER BY attempt", self.table);
        let mut charges: BTreeMap<i64, Vec<i32>> = BTreeMap::new();
        if self.client == Client::Sqlite {
            let connection = rusqlite::Connection::open(&self.url).expect("it opens");
            let mut statement = connection.prepare(&select).expect("it reads");
            let rows = statement
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
                .expect("it reads");
            for (id, attempt) in rows.map(|row| row.expect("a charge")) {
                charges.entry(id).or_default().push(attempt);
            }
            return charges;
        }
        let rows = connect(&self.url)
            .await
            .expect("it connects")
            .query(&select, &[])
            .await
            .expect("it reads");
        for row in rows {
            charges.entry(row.get(0)).or_default().push(row.get(1));
        }
        charges
    }

    fn connect_to_file(&self) -> rusqlite::Result<rusqlite::Connection> {
        let mut connection = rusqlite::Connection::open(&self.url)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        if let Some(on_statement) = self.on_statement {
            let codes = TraceEventCodes::SQLITE_TRACE_STMT | TraceEventCodes::SQLITE_TRACE_PROFILE;
            connection.trace_v2(codes, Some(move |_: TraceEvent<'_>| on_statement()))?;
        }
        Ok(connection)
    }
}

/// The published statement, by hand.
async fn by_statement(
    attempt: &Attempt,
    transaction: tokio_postgres::Transaction<'_>,
    result: &String,
) -> Result<(), Failure> {
    let completing = attempt.completing(result);
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
        return Err("the record is not this attempt's".into());
    }
    Ok(transaction.commit().await?)
}

/// Charges in the transaction that it is given.
impl TransactionalHandler<PostgresTransaction> for Till {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut PostgresTransaction,
    ) -> Result<String, Failure> {
        let Payment { id } = message.json()?;
        let number = i32::try_from(attempt.number())?;
        transaction.execute(&self.insert(), &[&id, &number]).await?;
        Ok(receipt(attempt))
    }
}

impl TransactionalHandler<sqlx::Transaction<'static, sqlx::Postgres>> for Till {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut sqlx::Transaction<'static, sqlx::Postgres>,
    ) -> Result<String, Failure> {
        let Payment { id } = message.json()?;
        let number = i32::try_from(attempt.number())?;
        let insert = sqlx::query(sqlx::AssertSqlSafe(self.insert()))
            .bind(id)
            .bind(number);
        insert.execute(&mut **transaction).await?;
        Ok(receipt(attempt))
    }
}

impl TransactionalHandler<SqliteTransaction> for Till {
    type Output = String;

    /// Around its statement, `on_statement` is called.
    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut SqliteTransaction,
    ) -> Result<String, Failure> {
        let Payment { id } = message.json()?;
        let number = i32::try_from(attempt.number())?;
        self.on_statement
            .iter()
            .for_each(|on_statement| on_statement());
        transaction.execute(&self.insert(), (id, number))?;
        self.on_statement
            .iter()
            .for_each(|on_statement| on_statement());
        Ok(receipt(attempt))
    }
}

/// Charges a batch, one statement after another.
impl<Tx: Send + 'static> TransactionalBatchHandler<Tx> for Till
where
    Self: TransactionalHandler<Tx, Output = String>,
{
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut Tx,
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        let mut receipts = Vec::new();
        for one in batch {
            let receipt =
                TransactionalHandler::handle(self, one.message(), one.attempt(), transaction);
            receipts.push(Ok(receipt.await?));
        }
        Ok(receipts)
    }
}

fn receipt(attempt: &Attempt) -> String {
    format!("receipt of attempt {}", attempt.number())
}

async fn connect(url: &str) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    // It ends with its client, which gets its errors.
    tokio::spawn(async { drop(connection.await) });
    Ok(client)
}
