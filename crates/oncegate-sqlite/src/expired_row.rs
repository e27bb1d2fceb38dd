//! The rows of expired records, as the purge finds and removes them.

use rusqlite::Connection;

/// An expired row, with the columns that distinguish it from one that was claimed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpiredRow {
    pub(super) id: i64,
    pub(super) expires_at_ms: i64,
}

/// Removes the rows that have not changed since they were read.
pub(super) fn remove(connection: &Connection, rows: &[ExpiredRow]) -> rusqlite::Result<usize> {
    let mut remove =
        connection.prepare_cached("DELETE FROM records WHERE id = ?1 AND expires_at_ms = ?2")?;
    rows.iter()
        .map(|row| remove.execute([row.id, row.expires_at_ms]))
        .sum()
}
