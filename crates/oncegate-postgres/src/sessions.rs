//! The messages that each process has received and not finished, as rows of short digests.
//!
//! These rows must survive a process, not the server, so their commits do not wait for the disk.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::Object;
use oncegate_core::record::whole_millis;
use oncegate_core::store::StoreError;
use oncegate_runtime::transactional::{
    FORGOTTEN_AFTER, ListId, NewList, SessionId, Sessions, SilentList,
};
use tokio_postgres::Error;

use super::PostgresStore;
use super::errors;

/// The table. The statement can be repeated.
pub(super) const TABLE: &str = "\
CREATE TABLE IF NOT EXISTS oncegate_sessions (
    scope        text COLLATE \"C\" NOT NULL,
    session      bigint   NOT NULL,
    list         bigint   NOT NULL,                -- 0: the session itself
    beaten_at_ms bigint   NOT NULL,                -- since 1970
    digests      bigint[] NOT NULL,                -- of keys that were received and not finished
    PRIMARY KEY (scope, session, list)
);
";

/// A lost list costs one attempt that is not counted.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = off";

const ADD: &str = "\
INSERT INTO oncegate_sessions (scope, session, list, beaten_at_ms, digests) \
VALUES ($1, $2, $3, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, $4)";

const REMOVE: &str =
    "DELETE FROM oncegate_sessions WHERE scope = $1 AND session = $2 AND list = ANY($3::bigint[])";

const BEAT: &str = "\
INSERT INTO oncegate_sessions AS s (scope, session, list, beaten_at_ms, digests) \
VALUES ($1, $2, 0, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, '{}') \
ON CONFLICT (scope, session, list) DO UPDATE SET beaten_at_ms = excluded.beaten_at_ms";

/// Rows that another process removes at this moment are left to it.
const FORGET: &str = "\
DELETE FROM oncegate_sessions WHERE (scope, session, list) IN (\
SELECT l.scope, l.session, l.list FROM oncegate_sessions AS l JOIN oncegate_sessions AS s USING (scope, session) \
WHERE scope = $1 AND s.list = 0 \
AND s.beaten_at_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - $2 FOR UPDATE OF l SKIP LOCKED)";

const SUSPECTS: &str = "\
SELECT l.session, l.list, CASE WHEN k.session IS NULL THEN l.digests END \
FROM oncegate_sessions AS l JOIN oncegate_sessions AS s ON s.scope = l.scope AND s.session = l.session \
LEFT JOIN unnest($4::bigint[], $5::bigint[]) AS k(session, list) ON k.session = l.session AND k.list = l.list \
WHERE l.scope = $1 AND l.session <> $2 AND l.list > 0 AND s.list = 0 \
AND s.beaten_at_ms <= floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - $3";

const END: &str = "DELETE FROM oncegate_sessions WHERE scope = $1 AND session = $2";

#[async_trait]
impl Sessions for PostgresStore {
    async fn add(&self, list: NewList) -> Result<(), StoreError> {
        self.inner
            .link
            .run(move |client| async move {
                let added = add(&client, &list)
                    .await
                    .map_err(|error| errors::not_executed(&error));
                (client, added)
            })
            .await
    }

    async fn beat(
        &self,
        session: SessionId,
        silent_for: Duration,
        known: BTreeSet<ListId>,
    ) -> Result<Vec<SilentList>, StoreError> {
        self.inner
            .link
            .run(move |client| async move {
                let silent = beat(&client, &session, silent_for, &known).await;
                (client, silent.map_err(|error| errors::not_executed(&error)))
            })
            .await
    }

    async fn end(&self, session: SessionId) -> Result<(), StoreError> {
        self.inner
            .link
            .run(move |client| async move {
                let ended = client
                    .execute(END, &[&session.scope.as_str(), &session.number])
                    .await;
                (
                    client,
                    ended
                        .map(|_| ())
                        .map_err(|error| errors::not_executed(&error)),
                )
            })
            .await
    }
}

async fn add(client: &Object, list: &NewList) -> Result<(), Error> {
    let NewList {
        session: SessionId {
            scope,
            number: session,
        },
        number,
        digests,
        finished,
    } = list;
    let scope = scope.as_str();
    let add = client.prepare_cached(ADD).await?;
    let remove = client.prepare_cached(REMOVE).await?;
    client.batch_execute(BEGIN).await?;
    client
        .execute(&add, &[&scope, session, number, digests])
        .await?;
    if !finished.is_empty() {
        client
            .execute(&remove, &[&scope, session, finished])
            .await?;
    }
    client.batch_execute("COMMIT").await
}

async fn beat(
    client: &Object,
    session: &SessionId,
    silent_for: Duration,
    known: &BTreeSet<ListId>,
) -> Result<Vec<SilentList>, Error> {
    let scope = session.scope.as_str();
    let number = session.number;
    client.batch_execute(BEGIN).await?;
    client.execute(BEAT, &[&scope, &number]).await?;
    client
        .execute(FORGET, &[&scope, &millis(FORGOTTEN_AFTER)])
        .await?;
    let (sessions, lists): (Vec<i64>, Vec<i64>) =
        known.iter().map(|id| (id.session, id.list)).unzip();
    let silent_for = millis(silent_for);
    let rows = client
        .query(SUSPECTS, &[&scope, &number, &silent_for, &sessions, &lists])
        .await?;
    client.batch_execute("COMMIT").await?;
    let silent = rows.iter().map(|row| SilentList {
        id: ListId {
            session: row.get(0),
            list: row.get(1),
        },
        digests: row.get(2),
    });
    Ok(silent.collect())
}

fn millis(time: Duration) -> i64 {
    i64::try_from(whole_millis(time)).unwrap_or(i64::MAX)
}
