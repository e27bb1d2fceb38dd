//! A PostgreSQL database: one that is there, or one of this process.

use std::fmt;

use oncegate::BoxError;
use oncegate::postgres::PostgresStore;
use oncegate_servers::PostgresServer;
use tokio::runtime::Runtime;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls, Row};

/// A database, and a connection to read it. A server that this process started stops when this
/// value is dropped.
pub struct Database {
    url: String,
    client: Client,
    runtime: Runtime,
    _server: Option<PostgresServer>,
}

impl Database {
    /// The database at `url`, or a new server from the programs that are installed on this machine.
    /// It makes the tables of oncegate, and those of the example.
    ///
    /// # Errors
    /// When it cannot be reached, or takes no tables.
    ///
    /// # Panics
    /// When a server cannot be started; the text names what to install.
    pub fn open(url: Option<&str>, tables: &str) -> Result<Self, BoxError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let (url, server) = match url {
            Some(url) => (url.to_owned(), None),
            None => {
                let server = runtime.block_on(PostgresServer::start());
                (server.url().to_owned(), Some(server))
            }
        };
        let client = runtime.block_on(async {
            PostgresStore::builder(&url).without_purge().connect().await?.create_schema().await?;
            let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
            tokio::spawn(connection);
            // Two programs at once that make the same tables would be in each other's way.
            let alone = format!(
                "BEGIN; SELECT pg_advisory_xact_lock(hashtext('oncegate examples')); {tables}; COMMIT"
            );
            client.batch_execute(&alone).await?;
            Ok::<_, BoxError>(client)
        })?;
        Ok(Self {
            url,
            client,
            runtime,
            _server: server,
        })
    }

    /// The address of the database.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same for connections that the server lists under this name.
    pub fn url_named(&self, name: &str) -> String {
        let separator = if self.url.contains('?') { '&' } else { '?' };
        format!("{}{separator}application_name={name}", self.url)
    }

    /// The one row of an answer.
    ///
    /// # Errors
    /// When there is none.
    pub fn ask(&self, question: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Row, BoxError> {
        Ok(self
            .runtime
            .block_on(self.client.query_one(question, parameters))?)
    }

    /// The one number of an answer.
    ///
    /// # Errors
    /// When there is none.
    pub fn count(
        &self,
        question: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, BoxError> {
        Ok(self
            .ask(question, parameters)?
            .try_get::<_, i64>(0)?
            .unsigned_abs())
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").finish_non_exhaustive()
    }
}
