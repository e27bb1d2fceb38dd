//! A journal in the database: triggers write each entry in the transaction of its change.
//!
//! Only triggers see the changes of all processes and of the user's own transactions through any
//! client. The store's statements are the same with and without it, so a database without a journal
//! has no extra cost.

use deadpool_postgres::Object;
use oncegate_core::key::StoreKey;
use oncegate_core::store::StoreError;
use tokio_postgres::Row;

use super::errors::{self, Trouble};
use oncegate_runtime::journal::JournalEntry;

/// Advice to create the journal, for the error when it is missing.
pub(super) const REMEDY: &str = "run `oncegate migrate --journal`, or call PostgresStore::create_schema() of a store that is \
     `journaled()`, as a role with DDL rights";

/// SQL expression: the change of a row `n`, in one word.
const EVENT: &str = "CASE n.state WHEN 'pending' THEN 'claimed' WHEN 'completed' THEN 'completed' \
    WHEN 'released' THEN CASE n.owner WHEN '\\x00000000' THEN 'reopened' ELSE 'released' END \
    ELSE CASE WHEN n.handed_over THEN 'handed_over' ELSE 'failed' END END";

/// SQL expression: the attempt that a row `n` belongs to, if any.
const RUN: &str = "nullif(encode(substring(n.owner FOR 4), 'hex'), '00000000')";

/// The table, and the triggers that write into it. The statements can be repeated.
///
/// Each change of state or owner makes one entry, with one statement per statement of the store; a
/// heartbeat makes none. Rows without an owner are locks without a record.
///
/// A session plans the function's statements once, for the number of rows at that time, and keeps
/// the plans for batches of any size. So rows are always joined by hashes, entries are found by
/// their index, and JIT compilation is off. The function runs with its owner's rights, so a role
/// that runs consumers needs none on the journal, and cannot change it.
pub(super) fn sql() -> String {
    format!(
        "\
CREATE TABLE IF NOT EXISTS oncegate_journal (
    key           text COLLATE \"C\" NOT NULL,
    id            bigint   NOT NULL GENERATED ALWAYS AS IDENTITY,   -- the order of the changes of a key
    at_ms         bigint   NOT NULL,                                -- since 1970
    event         text     NOT NULL,
    attempt       smallint,
    fencing_token bigint,
    run           text,                                             -- the same for a claim and its end
    worker        text,                                             -- application_name of the connection
    reason        text,
    PRIMARY KEY (key, id)
);

CREATE OR REPLACE FUNCTION oncegate_note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $note$
DECLARE
    now_ms bigint := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    worker_name text := nullif(current_setting('application_name'), '');
BEGIN
    IF TG_OP = 'DELETE' THEN
        DELETE FROM oncegate_journal WHERE key = ANY(ARRAY(SELECT key FROM was));
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO oncegate_journal (key, at_ms, event, attempt, fencing_token, run, worker, reason)
        SELECT n.key, now_ms, {EVENT}, nullif(n.attempt, 0), n.fencing_token, {RUN}, worker_name,
            CASE WHEN n.state <> 'pending' THEN nullif(n.reason, '') WHEN n.recovery = 'takeover' THEN 'takeover' END
        FROM became AS n WHERE n.owner <> ''::bytea;
    ELSE
        INSERT INTO oncegate_journal (key, at_ms, event, attempt, fencing_token, run, worker, reason)
        SELECT n.key, now_ms, {EVENT}, nullif(coalesce(r.attempt, n.attempt), 0),
            coalesce(n.fencing_token, r.fencing_token), {RUN},
            worker_name,
            CASE WHEN n.state <> 'pending' THEN nullif(n.reason, '') WHEN n.recovery = 'takeover' THEN 'takeover'
                WHEN o.state = 'released' AND o.owner = '\\x00000000' THEN 'reopened' END
        FROM became AS n JOIN was AS o ON o.key = n.key
        -- A completed record has forgotten the attempt and the fencing token of its run.
        LEFT JOIN was AS r ON r.key = n.key AND r.state = 'pending' AND r.owner <> ''::bytea
            AND substring(r.owner FOR 4) = substring(n.owner FOR 4)
        WHERE n.owner <> ''::bytea AND (n.state, n.owner, n.handed_over) <> (o.state, o.owner, o.handed_over);
    END IF;
    RETURN NULL;
END
$note$;

DO $path$ BEGIN
    EXECUTE format('ALTER FUNCTION oncegate_note() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END $path$;
ALTER FUNCTION oncegate_note() SET enable_nestloop = off SET enable_seqscan = off SET jit = off;

REVOKE EXECUTE ON FUNCTION oncegate_note() FROM PUBLIC;

CREATE OR REPLACE TRIGGER oncegate_journal_insert AFTER INSERT ON oncegate_records
    REFERENCING NEW TABLE AS became FOR EACH STATEMENT EXECUTE FUNCTION oncegate_note();
CREATE OR REPLACE TRIGGER oncegate_journal_update AFTER UPDATE ON oncegate_records
    REFERENCING OLD TABLE AS was NEW TABLE AS became FOR EACH STATEMENT EXECUTE FUNCTION oncegate_note();
CREATE OR REPLACE TRIGGER oncegate_journal_delete AFTER DELETE ON oncegate_records
    REFERENCING OLD TABLE AS was FOR EACH STATEMENT EXECUTE FUNCTION oncegate_note();
"
    )
}

/// Asks whether the journal exists, and whether this role may read it.
const STATE: &str = "\
SELECT count(*) = 3 AS made, coalesce(has_table_privilege(to_regclass('oncegate_journal'), 'SELECT'), false) AS readable \
FROM pg_trigger WHERE tgrelid = to_regclass('oncegate_records') AND tgenabled IN ('O', 'A') \
AND tgname IN ('oncegate_journal_insert', 'oncegate_journal_update', 'oncegate_journal_delete')";

const READ: &str = "\
SELECT at_ms, event, attempt, fencing_token, run, worker, reason FROM oncegate_journal \
WHERE key = $1 ORDER BY id DESC LIMIT $2";

/// Returns whether the journal exists.
pub(super) async fn is_made(client: &Object) -> Result<bool, Trouble> {
    Ok(state(client).await?.get("made"))
}

/// The last `most` entries about a key, the oldest first; empty if there is no journal.
pub(super) async fn read(
    client: &Object,
    key: &StoreKey,
    most: u32,
) -> Result<Vec<JournalEntry>, Trouble> {
    let state = state(client).await?;
    if !state.get::<_, bool>("made") {
        return Ok(Vec::new());
    }
    if !state.get::<_, bool>("readable") {
        let refused = "this role may not read the journal: GRANT SELECT ON oncegate_journal to it";
        return Err(StoreError::refused(refused).into());
    }
    let rows = client.query(READ, &[&key.as_str(), &i64::from(most)]).await;
    let rows = rows.map_err(|error| errors::not_executed(&error))?;
    Ok(rows.iter().rev().map(|row| entry(key, row)).collect())
}

async fn state(client: &Object) -> Result<Row, Trouble> {
    client
        .query_one(STATE, &[])
        .await
        .map_err(|error| errors::not_executed(&error))
}

fn entry(key: &StoreKey, row: &Row) -> JournalEntry {
    JournalEntry {
        at_ms: row.get::<_, i64>("at_ms").unsigned_abs(),
        event: row.get("event"),
        key: Some(key.to_string()),
        attempt: row
            .get::<_, Option<i16>>("attempt")
            .map(|attempt| u32::from(attempt.unsigned_abs())),
        fencing_token: row
            .get::<_, Option<i64>>("fencing_token")
            .map(i64::unsigned_abs),
        run: row.get("run"),
        by: row.get("worker"),
        reason: row.get("reason"),
        ..JournalEntry::default()
    }
}
