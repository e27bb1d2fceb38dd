//! PostgreSQL as its clients see it, and the shared server.

use std::time::Duration;

use tokio::sync::OnceCell;
use tokio_postgres::{Client, NoTls};

use crate::postgres_server::PostgresServer;

/// Names the PostgreSQL server of the run, as a URL of a role that may make tables and roles:
/// `postgres://postgres@127.0.0.1:5432/postgres`.
pub const VARIABLE: &str = "ONCEGATE_TEST_POSTGRES";

/// How long one question of the readiness probe may take.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// A PostgreSQL that answers, as its clients see it.
#[derive(Clone, Debug)]
pub struct Postgres {
    url: String,
}

impl Postgres {
    /// The server of this run: the one that [`VARIABLE`] names, or else one that this process
    /// starts on first use. Other tests use it at the same time: keep to a
    /// [`unique`](crate::unique) scope, and never stop or reconfigure it.
    ///
    /// # Panics
    /// When it cannot be reached or started.
    pub async fn shared() -> Self {
        static NAMED: OnceCell<Postgres> = OnceCell::const_new();
        static OWN: OnceCell<PostgresServer> = OnceCell::const_new();
        match std::env::var(VARIABLE) {
            Ok(url) => NAMED.get_or_init(|| Self::reached(url)).await.clone(),
            Err(_) => (**OWN.get_or_init(PostgresServer::start).await).clone(),
        }
    }

    async fn reached(url: String) -> Self {
        let postgres = Self { url };
        if let Err(error) = postgres.data_directory().await {
            panic!("{VARIABLE} names a server that does not answer: {error}");
        }
        postgres
    }

    /// One that another program serves.
    pub(crate) fn at(url: String) -> Self {
        Self { url }
    }

    /// Whether it answers.
    pub(crate) async fn answers(&self) -> Result<(), String> {
        let question = async { self.connect().await?.simple_query("SELECT 1").await };
        match tokio::time::timeout(PROBE_LIMIT, question).await {
            Err(_) => Err(format!("no answer within {PROBE_LIMIT:?}")),
            Ok(answer) => answer.map(drop).map_err(|error| error.to_string()),
        }
    }

    /// The URL for clients: `postgres://user@host:port/database`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The URL for another role.
    ///
    /// # Panics
    /// When the server's own URL names no user.
    #[must_use]
    pub fn url_as(&self, role: &str) -> String {
        let (_, place) = self.url.split_once('@').expect("the URL names a user");
        format!("postgres://{role}@{place}")
    }

    /// A new and empty database of the same server, for a test that changes more than its own rows.
    ///
    /// # Panics
    /// When it cannot be made.
    pub async fn database(&self) -> Self {
        let name = crate::unique("test").replace('-', "_");
        let made = self
            .connection()
            .await
            .batch_execute(&format!("CREATE DATABASE {name}"))
            .await;
        made.expect("a role that may make databases");
        let (server, _) = self.url.rsplit_once('/').expect("the URL names a database");
        Self {
            url: format!("{server}/{name}"),
        }
    }

    /// Opens a connection, to inspect what oncegate has done. It lives as long as the runtime.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn connection(&self) -> Client {
        self.connect()
            .await
            .unwrap_or_else(|error| panic!("cannot connect to {}: {error}", self.url))
    }

    async fn connect(&self) -> Result<Client, tokio_postgres::Error> {
        let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await?;
        // It ends with its client, which gets its errors.
        tokio::spawn(async { drop(connection.await) });
        Ok(client)
    }

    pub(crate) async fn data_directory(&self) -> Result<String, String> {
        let question = async {
            self.connect()
                .await?
                .query_one("SHOW data_directory", &[])
                .await
        };
        match tokio::time::timeout(PROBE_LIMIT, question).await {
            Err(_) => Err(format!("no answer within {PROBE_LIMIT:?}")),
            Ok(Err(error)) => Err(error.to_string()),
            Ok(Ok(row)) => Ok(row.get(0)),
        }
    }
}
