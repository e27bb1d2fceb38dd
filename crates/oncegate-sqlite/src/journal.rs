//! A journal in the file: triggers write each entry in the transaction of its change.
//!
//! Only triggers see the changes of all processes and of the user's own transactions. A file
//! without a journal has no extra cost.

use oncegate_core::key::StoreKey;
use rusqlite::{Connection, TransactionBehavior, params};

use oncegate_runtime::journal::JournalEntry;

/// SQL condition: the old row belongs to the same attempt, so it still has columns that the
/// completed row lacks.
const SAME_RUN: &str =
    "OLD.state = 'pending' AND substr(OLD.owner, 1, 4) = substr(NEW.owner, 1, 4)";

/// The values written for a row; `$before` are those known only if there was a row before.
fn insert(attempt_before: &str, fencing_token_before: &str, reopened_before: &str) -> String {
    format!(
        "INSERT INTO oncegate_journal (at_ms, key, event, attempt, fencing_token, run, reason) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER),
        NEW.key,
        CASE NEW.state WHEN 'pending' THEN 'claimed' WHEN 'completed' THEN 'completed'
            WHEN 'released' THEN iif(NEW.owner = x'00000000', 'reopened', 'released')
            ELSE iif(NEW.handed_over, 'handed_over', 'failed') END,
        nullif(coalesce({attempt_before}, NEW.attempt), 0),
        coalesce(NEW.fencing_token, {fencing_token_before}),
        nullif(lower(hex(substr(NEW.owner, 1, 4))), '00000000'),
        CASE WHEN NEW.state <> 'pending' THEN nullif(NEW.reason, '')
            WHEN NEW.recovery = 'takeover' THEN 'takeover' WHEN {reopened_before} THEN 'reopened' END)"
    )
}

/// The table and its triggers. A heartbeat changes only the end of a lease, and makes no entry.
fn schema() -> String {
    let made = insert("NULL", "NULL", "0");
    let changed = insert(
        &format!("iif({SAME_RUN}, OLD.attempt, NULL)"),
        &format!("iif({SAME_RUN}, OLD.fencing_token, NULL)"),
        "OLD.state = 'released' AND OLD.owner = x'00000000'",
    );
    format!(
        "CREATE TABLE IF NOT EXISTS oncegate_journal (
    id            INTEGER NOT NULL PRIMARY KEY,   -- the order of the changes
    at_ms         INTEGER NOT NULL,               -- since 1970, on the machine's clock
    key           TEXT    NOT NULL,
    event         TEXT    NOT NULL,
    attempt       INTEGER,
    fencing_token INTEGER,
    run           TEXT,                           -- the same for a claim and its end
    reason        TEXT
) STRICT;

CREATE INDEX IF NOT EXISTS oncegate_journal_keys ON oncegate_journal (key);

CREATE TRIGGER IF NOT EXISTS oncegate_journal_insert AFTER INSERT ON records BEGIN
    {made};
END;

CREATE TRIGGER IF NOT EXISTS oncegate_journal_update AFTER UPDATE ON records
WHEN NEW.state <> OLD.state OR NEW.owner <> OLD.owner OR NEW.handed_over <> OLD.handed_over BEGIN
    {changed};
END;

CREATE TRIGGER IF NOT EXISTS oncegate_journal_delete AFTER DELETE ON records BEGIN
    DELETE FROM oncegate_journal WHERE key = OLD.key;
END;
"
    )
}

/// Creates the journal, unless it exists.
pub(super) fn create(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(&schema())?;
    transaction.commit()
}

/// The last `most` entries about a key, the oldest first; empty if there is no journal.
pub(super) fn read(
    connection: &Connection,
    key: &StoreKey,
    most: u32,
) -> rusqlite::Result<Vec<JournalEntry>> {
    let made = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'oncegate_journal')";
    if !connection.query_row(made, [], |row| row.get::<_, bool>(0))? {
        return Ok(Vec::new());
    }
    let read = "SELECT at_ms, event, attempt, fencing_token, run, reason FROM oncegate_journal WHERE key = ?1 \
                ORDER BY id DESC LIMIT ?2";
    let mut statement = connection.prepare_cached(read)?;
    let mut entries: Vec<JournalEntry> = statement
        .query_map(params![key.as_str(), most], |row| {
            Ok(JournalEntry {
                at_ms: row.get::<_, i64>(0)?.unsigned_abs(),
                event: row.get(1)?,
                key: Some(key.to_string()),
                attempt: row.get(2)?,
                fencing_token: row.get::<_, Option<i64>>(3)?.map(i64::unsigned_abs),
                run: row.get(4)?,
                reason: row.get(5)?,
                ..JournalEntry::default()
            })
        })?
        .collect::<Result<_, _>>()?;
    entries.reverse();
    Ok(entries)
}
