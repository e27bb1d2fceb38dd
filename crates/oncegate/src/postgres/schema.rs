//! The tables, in words that a database administrator can read, and the one way to make them.

use deadpool_postgres::Object;
use oncegate_core::store::StoreError;

use super::errors::{self, Trouble};

/// The format of the tables. A release reads a format before any release writes it.
pub(super) const SCHEMA_VERSION: i32 = 1;

/// How to get the tables, for every error that misses them.
pub(super) const REMEDY: &str = "call PostgresStore::create_schema(), or run what PostgresStore::schema_sql() returns, as a role with DDL \
     rights, and grant the consumer's role SELECT, INSERT, UPDATE and DELETE on the tables";

/// Two deployments that make the tables at the same time take turns: `oncegate` in ASCII.
const ADVISORY_LOCK: &str = "SELECT pg_advisory_xact_lock(8029745910187783269)";

/// The statements. They can be repeated.
///
/// There is no index on the expiry: without it an update touches no index at all, and a purge walks the
/// primary key.
pub(super) const SCHEMA: &str = "\
CREATE TABLE IF NOT EXISTS oncegate_schema (
    id      smallint NOT NULL PRIMARY KEY CHECK (id = 1),
    version integer  NOT NULL
);

CREATE TABLE IF NOT EXISTS oncegate_records (
    key           text COLLATE \"C\" NOT NULL PRIMARY KEY,
    state         text     NOT NULL CHECK (state IN ('pending', 'released', 'completed', 'failed')),
    expires_at_ms bigint   NOT NULL,               -- since 1970; a lease or delay ends 30 days before
    owner         bytea    NOT NULL,               -- pending: the token; otherwise the tag of who ended it
    attempt       smallint NOT NULL,               -- 0 for completed: it does not matter any more
    recovery      text     NOT NULL CHECK (recovery IN ('none', 'earlier', 'takeover')),
    fence         bigint,
    fingerprint   bytea,
    handed_over   boolean  NOT NULL,
    reason        text     NOT NULL,
    result        bytea                            -- completed alone
) WITH (fillfactor = 80);

CREATE TABLE IF NOT EXISTS oncegate_descriptors (
    scope      text COLLATE \"C\" NOT NULL PRIMARY KEY,
    descriptor text NOT NULL
);

INSERT INTO oncegate_schema (id, version) VALUES (1, 1) ON CONFLICT (id) DO NOTHING;
";

/// Makes the tables that are missing, and refuses those of another version.
pub(super) async fn create(client: &Object) -> Result<(), Trouble> {
    let create = format!("BEGIN; {ADVISORY_LOCK}; {SCHEMA}");
    client.batch_execute(&create).await.map_err(|error| errors::not_executed(&error))?;
    let version = "SELECT version FROM oncegate_schema";
    let row = client.query_one(version, &[]).await.map_err(|error| errors::not_executed(&error))?;
    check_version(row.get(0))?;
    client.batch_execute("COMMIT").await.map_err(|error| errors::in_doubt(&error))
}

/// Refuses tables of another format.
pub(super) fn check_version(version: i32) -> Result<(), StoreError> {
    if version == SCHEMA_VERSION {
        return Ok(());
    }
    Err(StoreError::refused(format!(
        "the tables have format {version}, and this release of oncegate reads format {SCHEMA_VERSION}; use the \
         release that belongs to them"
    )))
}
