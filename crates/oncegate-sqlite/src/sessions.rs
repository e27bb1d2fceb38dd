//! The messages that each process has received and not finished, as rows of short digests.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::record::whole_millis;
use oncegate_core::store::StoreError;
use oncegate_runtime::transactional::{
    FORGOTTEN_AFTER, ListId, NewList, SessionId, Sessions, SilentList,
};
use rusqlite::{Connection, params};

use super::SqliteStore;

/// Files of earlier releases have no such table. The digests are those of a list, 8 bytes each.
const TABLE: &str = "\
CREATE TABLE IF NOT EXISTS oncegate_sessions (
    scope        TEXT    NOT NULL,
    session      INTEGER NOT NULL,
    list         INTEGER NOT NULL,              -- 0: the session itself
    beaten_at_ms INTEGER NOT NULL,              -- since 1970, on the machine's clock
    digests      BLOB    NOT NULL,              -- of keys that were received and not finished
    PRIMARY KEY (scope, session, list)
) STRICT";

/// The machine's clock: all processes on a file are on one machine.
pub(super) const NOW_MS: &str = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)";

#[async_trait]
impl Sessions for SqliteStore {
    async fn add(&self, list: NewList) -> Result<(), StoreError> {
        let digests: Vec<u8> = list
            .digests
            .iter()
            .flat_map(|digest| digest.to_be_bytes())
            .collect();
        let add = self.inner.writer.ask(move |connection| {
            let NewList {
                session:
                    SessionId {
                        scope,
                        number: session,
                    },
                number,
                finished,
                ..
            } = &list;
            let insert = format!("INSERT INTO oncegate_sessions VALUES (?1, ?2, ?3, {NOW_MS}, ?4)");
            connection.prepare_cached(&insert)?.execute(params![
                scope.as_str(),
                session,
                number,
                digests
            ])?;
            let mut remove = connection.prepare_cached(
                "DELETE FROM oncegate_sessions WHERE scope = ?1 AND session = ?2 AND list = ?3",
            )?;
            for finished in finished {
                remove.execute(params![scope.as_str(), session, finished])?;
            }
            Ok(())
        });
        add.await
    }

    async fn beat(
        &self,
        session: SessionId,
        silent_for: Duration,
        known: BTreeSet<ListId>,
    ) -> Result<Vec<SilentList>, StoreError> {
        self.inner
            .writer
            .ask(move |connection| beat(connection, &session, silent_for, &known))
            .await
    }

    async fn end(&self, session: SessionId) -> Result<(), StoreError> {
        let end = self.inner.writer.ask(move |connection| {
            let scope = session.scope.as_str();
            let number = session.number;
            connection.execute_batch(TABLE)?;
            connection.execute(
                "DELETE FROM oncegate_sessions WHERE scope = ?1 AND session = ?2",
                (scope, number),
            )
        });
        end.await.map(|_| ())
    }
}

fn beat(
    connection: &Connection,
    session: &SessionId,
    silent_for: Duration,
    known: &BTreeSet<ListId>,
) -> rusqlite::Result<Vec<SilentList>> {
    let scope = session.scope.as_str();
    let number = session.number;
    connection.execute_batch(TABLE)?;
    let beaten =
        format!("INSERT OR REPLACE INTO oncegate_sessions VALUES (?1, ?2, 0, {NOW_MS}, x'')");
    connection.execute(&beaten, (scope, number))?;
    let forget = format!("DELETE FROM oncegate_sessions WHERE {}", silent("?2"));
    connection.execute(&forget, (scope, millis(FORGOTTEN_AFTER)))?;
    let select = format!(
        "SELECT session, list FROM oncegate_sessions WHERE session <> ?2 AND list > 0 AND {}",
        silent("?3")
    );
    let mut select = connection.prepare(&select)?;
    let ids = select.query_map((scope, number, millis(silent_for)), |row| {
        Ok(ListId {
            session: row.get(0)?,
            list: row.get(1)?,
        })
    })?;
    let mut read = connection.prepare(
        "SELECT digests FROM oncegate_sessions WHERE scope = ?1 AND session = ?2 AND list = ?3",
    )?;
    let mut silent = Vec::new();
    for id in ids {
        let id = id?;
        let digests = if known.contains(&id) {
            None
        } else {
            let bytes: Vec<u8> = read.query_row((scope, id.session, id.list), |row| row.get(0))?;
            Some(numbers(&bytes))
        };
        silent.push(SilentList { id, digests });
    }
    Ok(silent)
}

/// Returns the digests of a row.
fn numbers(bytes: &[u8]) -> Vec<i64> {
    let digests = bytes.as_chunks::<8>().0;
    digests
        .iter()
        .map(|digest| i64::from_be_bytes(*digest))
        .collect()
}

/// The condition for rows of sessions that have been silent for longer than `than`.
fn silent(than: &str) -> String {
    format!(
        "scope = ?1 AND session IN (SELECT session FROM oncegate_sessions WHERE scope = ?1 AND list = 0 \
         AND beaten_at_ms <= {NOW_MS} - {than})"
    )
}

fn millis(time: Duration) -> i64 {
    i64::try_from(whole_millis(time)).unwrap_or(i64::MAX)
}
