//! A database that holds records and effects, and the client library that a handler uses on it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncegate::core::store::Store;
use oncegate::postgres::PostgresStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{Failure, Gate, Key, Message};
use oncegate_tests::{Postgres, unique};
use rusqlite::TransactionBehavior::Immediate;
use tempfile::TempDir;

/// How a handler talks to its database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Client {
    TokioPostgres,
    Sqlx,
    Sqlite,
    /// The published statement, by tokio-postgres.
    Statement,
}

pub(crate) const CLIENTS: [Client; 4] =
    [Client::TokioPostgres, Client::Sqlx, Client::Sqlite, Client::Statement];

/// What a handler does with its transaction once the effect is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// `commit_with`, or the statement and a commit.
    Commit,
    /// Tells the gate of its completion, and drops the transaction.
    Forget,
}

/// Records and effects in one database.
pub(crate) struct Place {
    pub(crate) client: Client,
    /// Where the handler connects to.
    url: String,
    table: String,
    scope: String,
    pub(crate) store: Arc<dyn Store>,
    sqlite: Option<SqliteStore>,
    postgres: Option<Postgres>,
    _folder: TempDir,
}

impl Place {
    pub(crate) async fn new(client: Client) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let table = unique("effects").replace('-', "_");
        let make = format!("CREATE TABLE {table} (id text NOT NULL, attempt integer NOT NULL)");
        let (scope, _folder) = (unique("transactions"), folder);
        if client == Client::Sqlite {
            let path = _folder.path().join("oncegate.db");
            let store = SqliteStore::open(&path).await.unwrap();
            store.open_connection().unwrap().execute_batch(&make).unwrap();
            let url = path.display().to_string();
            let shared = Arc::new(store.clone());
            return Self {
                client,
                url,
                table,
                scope,
                store: shared,
                sqlite: Some(store),
                postgres: None,
                _folder,
            };
        }
        let postgres = Postgres::shared().await;
        postgres.connection().await.batch_execute(&make).await.unwrap();
        let store = PostgresStore::connect(postgres.url()).await.unwrap();
        store.create_schema().await.unwrap();
        let url = postgres.url().to_owned();
        Self {
            client,
            url,
            table,
            scope,
            store: Arc::new(store),
            sqlite: None,
            postgres: Some(postgres),
            _folder,
        }
    }

    pub(crate) fn gate(&self, lease: Duration) -> Gate {
        Gate::new(&self.scope, Key::json(["id"]), Arc::clone(&self.store)).lease(lease)
    }

    /// Lets the handler connect to another server, or through a proxy.
    pub(crate) fn connect_to(&mut self, url: &str) {
        url.clone_into(&mut self.url);
    }

    /// Opens a transaction, puts the effect into it, and ends it.
    pub(crate) async fn transact(&self, message: &Message, result: &str, end: End) -> Result<(), Failure> {
        let id = message.json::<Payment>()?.id.to_string();
        let attempt = i32::try_from(message.attempt()).unwrap();
        let insert = format!("INSERT INTO {} VALUES ($1, $2)", self.table);
        let result = result.to_owned();
        match self.client {
            Client::TokioPostgres | Client::Statement => {
                let (mut client, connection) =
                    tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
                // It ends with its client.
                tokio::spawn(connection);
                let transaction = client.transaction().await?;
                transaction.execute(&insert, &[&id, &attempt]).await?;
                match (self.client, end) {
                    (_, End::Forget) => drop(message.completing(&result)?),
                    (Client::Statement, End::Commit) => {
                        let completing = message.completing(&result)?;
                        let retention_ms = i64::try_from(completing.retention().as_millis())?;
                        let (key, token) = (completing.key().as_str(), completing.token());
                        let (token, result) = (token.as_bytes().as_slice(), completing.result().as_ref());
                        let sql = PostgresStore::complete_sql();
                        let changed =
                            transaction.execute(sql, &[&key, &token, &result, &retention_ms]).await?;
                        if changed != 1 {
                            return Err("the record is somebody else's".into());
                        }
                        transaction.commit().await?;
                    }
                    (_, End::Commit) => message.commit_with(transaction, &result).await?,
                }
                Ok(())
            }
            Client::Sqlx => {
                use sqlx::Connection as _;
                let mut connection = sqlx::PgConnection::connect(&self.url).await?;
                let mut transaction = connection.begin().await?;
                let insert = sqlx::query(sqlx::AssertSqlSafe(insert)).bind(id).bind(attempt);
                insert.execute(&mut *transaction).await?;
                match end {
                    End::Forget => drop(message.completing(&result)?),
                    End::Commit => message.commit_with(transaction, &result).await?,
                }
                Ok(())
            }
            Client::Sqlite => {
                let (path, message) = (self.url.clone(), message.clone());
                let work = move || {
                    let mut connection = rusqlite::Connection::open(path)?;
                    connection.busy_timeout(Duration::from_secs(30))?;
                    let transaction = connection.transaction_with_behavior(Immediate)?;
                    transaction.execute(&insert, (id, attempt))?;
                    match end {
                        End::Forget => drop(message.completing(&result)?),
                        End::Commit => message.blocking_commit_with(transaction, &result)?,
                    }
                    Ok(())
                };
                tokio::task::spawn_blocking(work).await?
            }
        }
    }

    /// The committed effects: the attempts that made them, by payment.
    pub(crate) async fn effects(&self) -> BTreeMap<String, Vec<i32>> {
        let select = format!("SELECT id, attempt FROM {} ORDER BY attempt", self.table);
        let mut effects: BTreeMap<String, Vec<i32>> = BTreeMap::new();
        if let Some(postgres) = &self.postgres {
            for row in postgres.connection().await.query(&select, &[]).await.unwrap() {
                effects.entry(row.get(0)).or_default().push(row.get(1));
            }
        }
        if let Some(sqlite) = &self.sqlite {
            let connection = sqlite.open_connection().unwrap();
            let mut statement = connection.prepare(&select).unwrap();
            let mut rows = statement.query([]).unwrap();
            while let Some(row) = rows.next().unwrap() {
                effects.entry(row.get_unwrap(0)).or_default().push(row.get_unwrap(1));
            }
        }
        effects
    }
}

#[derive(serde::Deserialize)]
pub(crate) struct Payment {
    pub(crate) id: u64,
}
