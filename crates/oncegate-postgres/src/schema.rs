//! The tables, as SQL that a database administrator can read, and the function that creates them.

use std::time::Duration;

use deadpool_postgres::Object;
use oncegate_core::store::StoreError;

use super::errors::{self, REMEDY, Trouble};
use super::outbox::tables::{CONTRACT as OUTBOX_CONTRACT, TABLES as OUTBOX_TABLES};
use super::{journal, sessions};

/// Key of the advisory lock under which one process at a time creates the tables: `oncegate` in
/// ASCII.
const ADVISORY_LOCK: &str = "SELECT pg_advisory_xact_lock(8029745910187783269)";

/// Time limit for the wait for other processes that create the tables, and for each of the
/// statements.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time limit for all of it.
pub(super) const LIMIT: Duration = Duration::from_secs(180);

/// The migrations from each format to the next one, beginning with no tables. A step ends by
/// writing its number, and each release reads the format that the next one writes.
const STEPS: [&str; 1] = [FORMAT_1];

/// The statements can be repeated.
///
/// There is no index on the expiry: without it, an update changes no index at all, and a purge
/// reads the table in the order on the disk. The space of deleted rows can be reused after a
/// vacuum.
const FORMAT_1: &str = "\
CREATE TABLE IF NOT EXISTS oncegate_schema (
    id           smallint NOT NULL PRIMARY KEY CHECK (id = 1),
    version      integer  NOT NULL,
    purged_at_ms bigint   NOT NULL DEFAULT 0        -- since 1970; when a process last began to purge
);

CREATE TABLE IF NOT EXISTS oncegate_records (
    key           text COLLATE \"C\" NOT NULL PRIMARY KEY,
    state         text     NOT NULL CHECK (state IN ('pending', 'released', 'completed', 'failed')),
    expires_at_ms bigint   NOT NULL,               -- since 1970; a lease or delay ends 30 days before
    owner         bytea    NOT NULL,               -- pending: the token; otherwise the tag of who ended it
    attempt       smallint NOT NULL,               -- 0 for completed: it does not matter any more
    recovery      text     NOT NULL CHECK (recovery IN ('none', 'earlier', 'takeover')),
    fencing_token bigint,
    fingerprint   bytea,
    handed_over   boolean  NOT NULL,
    reason        text     NOT NULL,
    result        bytea                            -- completed alone
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.1);

CREATE TABLE IF NOT EXISTS oncegate_descriptors (
    scope      text COLLATE \"C\" NOT NULL PRIMARY KEY,
    descriptor text NOT NULL
);

INSERT INTO oncegate_schema (id, version) VALUES (1, 1) ON CONFLICT (id) DO NOTHING;
";

/// The work of [`PostgresStore::create_schema`](super::PostgresStore::create_schema).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchemaChange {
    /// The format of the existing tables; `None` when there are none.
    pub from: Option<u32>,
    /// The format of this release.
    pub to: u32,
    /// The statements of the migration; empty when there is nothing to do.
    pub sql: String,
}

/// The statements from no tables to the format of this release.
pub(super) fn sql() -> String {
    STEPS.concat() + sessions::TABLE + OUTBOX_TABLES
}

/// The statements that grant a role the rights to run consumers. It needs no others.
pub(super) fn grants(role: &str) -> String {
    let role = quoted(role);
    format!(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON oncegate_records, oncegate_descriptors, oncegate_sessions, \
         oncegate_outbox, oncegate_outbox_leaders TO {role};\n\
         GRANT SELECT, UPDATE ON oncegate_schema TO {role};\n"
    )
}

/// A name as an identifier.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Creates the tables, or migrates them to this release's format, in one transaction, with separate
/// time limits.
pub(super) async fn create(client: &Object, journaled: bool) -> Result<(), Trouble> {
    let patience_ms = PATIENCE.as_millis();
    let begin = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = {patience_ms}; \
         SET LOCAL lock_timeout = {patience_ms}"
    );
    run(client, &begin).await?;
    if !change(client, journaled).await?.sql.is_empty() {
        // The wait for a lock on a table is shorter, because writers queue behind it.
        let lock = format!("{ADVISORY_LOCK}; SET LOCAL lock_timeout TO DEFAULT");
        run(client, &lock).await?;
        // Another process may have done it meanwhile.
        let SchemaChange { sql, .. } = change(client, journaled).await?;
        run(client, &sql).await?;
    }
    client
        .batch_execute("COMMIT")
        .await
        .map_err(|error| errors::in_doubt(&error))
}

async fn run(client: &Object, sql: &str) -> Result<(), Trouble> {
    client
        .batch_execute(sql)
        .await
        .map_err(|error| errors::not_executed(&error))
}

/// The work to do for tables of this format.
pub(super) async fn change(client: &Object, journaled: bool) -> Result<SchemaChange, Trouble> {
    let mut change = needed(client, journaled).await?;
    if !exists(client, "oncegate_sessions").await? {
        change.sql += sessions::TABLE;
    }
    if !exists(client, "oncegate_outbox").await? {
        change.sql += OUTBOX_TABLES;
    } else if !has_outbox_contract(client).await? {
        change.sql += OUTBOX_CONTRACT;
    }
    Ok(change)
}

/// Returns whether the outbox refuses rows that are no messages.
async fn has_outbox_contract(client: &Object) -> Result<bool, Trouble> {
    let found = "SELECT EXISTS (SELECT FROM pg_constraint WHERE conname = 'oncegate_outbox_message' \
                 AND conrelid = to_regclass('oncegate_outbox'))";
    let found = client.query_one(found, &[]).await;
    Ok(found.map_err(|error| errors::not_executed(&error))?.get(0))
}

/// The work without which a store cannot be used. Only transactional handlers need the table of
/// sessions, and only outboxes theirs.
async fn needed(client: &Object, journaled: bool) -> Result<SchemaChange, Trouble> {
    let mut change = plan(version(client).await?)?;
    if journaled && !journal::is_made(client).await? {
        change.sql += &journal::sql();
    }
    Ok(change)
}

/// Refuses tables of another format, and a missing journal.
pub(super) async fn check(client: &Object, journaled: bool) -> Result<(), Trouble> {
    let SchemaChange { from, to, sql } = needed(client, journaled).await?;
    match from {
        _ if sql.is_empty() => Ok(()),
        Some(from) if from == to => {
            Err(StoreError::refused(format!("the journal is missing: {}", journal::REMEDY)).into())
        }
        None => Err(StoreError::refused(format!("the tables are missing: {REMEDY}")).into()),
        Some(from) => Err(StoreError::refused(format!(
            "the tables have format {from}, and this release of oncegate needs format {to}: run `oncegate \
             migrate`, or call PostgresStore::create_schema(), as a role with DDL rights"
        ))
        .into()),
    }
}

async fn version(client: &Object) -> Result<Option<i32>, Trouble> {
    if !exists(client, "oncegate_schema").await? {
        return Ok(None);
    }
    let version = client
        .query_opt("SELECT version FROM oncegate_schema", &[])
        .await;
    Ok(version
        .map_err(|error| errors::not_executed(&error))?
        .map(|row| row.get(0)))
}

pub(super) async fn exists(client: &Object, table: &str) -> Result<bool, Trouble> {
    let exists = client
        .query_one("SELECT to_regclass($1::text) IS NOT NULL", &[&table])
        .await;
    Ok(exists.map_err(|error| errors::not_executed(&error))?.get(0))
}

fn plan(version: Option<i32>) -> Result<SchemaChange, StoreError> {
    let from = version.map(|version| u32::try_from(version).unwrap_or(u32::MAX));
    let to = STEPS.len() as u32;
    let done = from.unwrap_or(0);
    if done > to {
        return Err(StoreError::refused(format!(
            "the tables have format {done}, and this release of oncegate knows formats up to {to}; use the release \
             that belongs to them"
        )));
    }
    let sql = STEPS.iter().skip(done as usize).copied().collect();
    Ok(SchemaChange { from, to, sql })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_leads_to_this_releases() {
        assert_eq!(
            plan(None).unwrap(),
            SchemaChange {
                from: None,
                to: 1,
                sql: FORMAT_1.to_owned()
            }
        );
        assert_eq!(
            plan(Some(1)).unwrap(),
            SchemaChange {
                from: Some(1),
                to: 1,
                sql: String::new()
            }
        );
        for unknown in [2, -1] {
            assert_eq!(plan(Some(unknown)).unwrap_err().class(), "refused");
        }
    }

    #[test]
    fn a_role_is_an_identifier_whatever_it_is_called() {
        let grants = grants("a\"; DROP TABLE x; --");
        assert_eq!(
            grants.matches("TO \"a\"\"; DROP TABLE x; --\";").count(),
            2,
            "{grants}"
        );
    }
}
