//! What payments are sent to: a system that remembers the largest fencing token of each, and one
//! that does not.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension as _, params};

const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

/// A downstream system in a file of its own, shared by processes.
#[derive(Debug)]
pub struct Sink {
    file: std::path::PathBuf,
    checks: bool,
}

impl Sink {
    /// The one in this file; it checks fencing tokens if the file is called `checks…`.
    #[must_use]
    pub fn open(file: impl AsRef<Path>) -> Self {
        let file = file.as_ref().to_owned();
        let name = file
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Self {
            file,
            checks: name.starts_with("checks"),
        }
    }

    fn connection(&self) -> Connection {
        let connection = Connection::open(&self.file).expect("the sink's file can be opened");
        connection
            .busy_timeout(BUSY_TIMEOUT)
            .expect("a time limit is a number");
        let tables = "CREATE TABLE IF NOT EXISTS fencing_tokens (
                          payment TEXT PRIMARY KEY, fencing_token INTEGER NOT NULL
                      );
                      CREATE TABLE IF NOT EXISTS calls (
                          id INTEGER PRIMARY KEY, payment TEXT NOT NULL, fencing_token INTEGER NOT NULL, accepted INTEGER NOT NULL
                      );";
        connection
            .execute_batch(tables)
            .expect("the sink's tables can be made");
        connection
    }

    /// Pays, and returns whether the sink has accepted it. One that checks refuses a fencing token
    /// that is smaller than one it has seen, and remembers the payment of a fencing token, so that
    /// a repeat of it pays nothing.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn pay(&self, payment: &str, fencing_token: Option<u64>) -> bool {
        let fencing_token = i64::try_from(fencing_token.unwrap_or_default())
            .expect("a fencing token is a time in microseconds");
        let mut connection = self.connection();
        let transaction =
            connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate);
        let transaction = transaction.expect("the sink can be locked");
        let known: Option<i64> = transaction
            .query_row(
                "SELECT fencing_token FROM fencing_tokens WHERE payment = ?1",
                [payment],
                |row| row.get(0),
            )
            .optional()
            .expect("the sink can be read");
        let accepted = !self.checks || known.is_none_or(|known| known <= fencing_token);
        let written = transaction
            .execute(
                "INSERT INTO calls (payment, fencing_token, accepted) VALUES (?1, ?2, ?3)",
                params![payment, fencing_token, accepted],
            )
            .and_then(|_| {
                if !accepted {
                    return Ok(0);
                }
                transaction.execute(
                    "INSERT INTO fencing_tokens VALUES (?1, ?2) \
                     ON CONFLICT (payment) DO UPDATE SET fencing_token = max(fencing_token, ?2)",
                    params![payment, fencing_token],
                )
            });
        written.expect("the sink can be written");
        transaction.commit().expect("the sink can commit");
        accepted
    }

    /// The fencing tokens of all calls for this payment in their order, and whether each was
    /// accepted.
    ///
    /// # Panics
    /// When the file cannot be read.
    #[must_use]
    pub fn calls(&self, payment: &str) -> Vec<(i64, bool)> {
        let connection = self.connection();
        let mut calls = connection
            .prepare("SELECT fencing_token, accepted FROM calls WHERE payment = ?1 ORDER BY id")
            .expect("the sink can be read");
        let rows = calls.query_map([payment], |row| Ok((row.get(0)?, row.get(1)?)));
        rows.and_then(Iterator::collect)
            .expect("the sink can be read")
    }
}
