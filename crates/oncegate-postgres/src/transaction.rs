//! Executes a batch in one transaction: locks the rows, runs the rules, writes the new records,
//! commits.
//!
//! It takes two round trips: the first begins, locks and reads; the second writes and commits. The
//! rules run here, between the two, so they cannot differ from the rules of the other stores.

use std::collections::{BTreeMap, BTreeSet};

use deadpool_postgres::Object;
use futures_util::future::{join, join3, try_join3};
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, State, StoreTime};
use oncegate_core::rules::{Operation, Reply, Verdict, apply};
use oncegate_core::store::{Command, RecordSnapshot, StoreError};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::errors::{self, Trouble};
use super::row::{self, Columns};
use super::shared::{Shared, within};

/// The most tries of a batch after passing errors, before its callers get the error.
const MAX_TRIES: usize = 3;

/// The answer to one command.
pub(super) type CommandResult = Result<Reply, StoreError>;

/// The answer to one read.
pub(super) type ReadAnswer = Result<Option<RecordSnapshot>, StoreError>;

/// Applies the commands. Returns one answer for each.
pub(super) async fn execute(
    shared: &Shared,
    commands: &[Command],
) -> Result<Vec<CommandResult>, StoreError> {
    match execute_together(shared, commands).await {
        // One row that another transaction holds must not delay the other keys of the batch.
        Err(Trouble {
            error,
            row_held: true,
            ..
        }) if commands.len() > 1 => execute_around(shared, commands, error).await,
        Err(Trouble {
            error,
            row_held: true,
            ..
        }) => Ok(commands
            .iter()
            .map(|command| row_held(shared, command, &error))
            .collect()),
        // Nor must one that is damaged.
        Err(Trouble {
            error,
            damaged: true,
            ..
        }) => execute_apart(shared, commands, &error).await,
        executed => executed.map_err(|trouble| trouble.error),
    }
}

/// Applies the commands in two halves, after damaged data has ended the transaction of all: in the
/// end each key that is damaged has its own answer.
async fn execute_apart(
    shared: &Shared,
    commands: &[Command],
    error: &StoreError,
) -> Result<Vec<CommandResult>, StoreError> {
    let first = commands.first().map(|command| &command.key);
    if commands.iter().all(|command| Some(&command.key) == first) {
        let damaged = commands
            .iter()
            .map(|command| Err(StoreError::unreadable(command.key.clone(), error)));
        return Ok(damaged.collect());
    }
    // Stable, so that the commands about one key stay in their order.
    let mut order: Vec<usize> = (0..commands.len()).collect();
    order.sort_by_key(|position| commands.get(*position).map(|command| &command.key));
    let sorted: Vec<Command> = order
        .iter()
        .filter_map(|position| commands.get(*position).cloned())
        .collect();
    let half = between_keys(&sorted);
    let mut answers = Vec::with_capacity(sorted.len());
    for part in [sorted.get(..half), sorted.get(half..)]
        .into_iter()
        .flatten()
    {
        answers.extend(Box::pin(execute(shared, part)).await?);
    }
    let mut placed: Vec<(usize, CommandResult)> = order.into_iter().zip(answers).collect();
    placed.sort_by_key(|(position, _)| *position);
    Ok(placed.into_iter().map(|(_, answer)| answer).collect())
}

/// Returns the position after the middle of sorted commands at which another key begins.
fn between_keys(sorted: &[Command]) -> usize {
    let middle = sorted.len() / 2;
    let key = sorted.get(middle).map(|command| &command.key);
    let first = sorted.partition_point(|command| Some(&command.key) < key);
    if first > 0 {
        return first;
    }
    sorted.partition_point(|command| Some(&command.key) <= key)
}

async fn execute_together(
    shared: &Shared,
    commands: &[Command],
) -> Result<Vec<CommandResult>, Trouble> {
    persist(async || {
        let client = shared.client().await?;
        let outcome = try_execute(&client, shared, commands).await;
        shared.settle(client, outcome)
    })
    .await
}

/// Applies the commands whose rows are not locked; the others get `error`.
pub(super) async fn execute_around(
    shared: &Shared,
    commands: &[Command],
    error: StoreError,
) -> Result<Vec<CommandResult>, StoreError> {
    let keys: Vec<&str> = commands
        .iter()
        .map(|command| command.key.as_str())
        .collect();
    let client = shared.client().await?;
    let query = async {
        client
            .query(row::HELD, &[&keys])
            .await
            .map_err(|e| errors::not_executed(&e))
    };
    let outcome = within(shared.response_timeout, query).await;
    let held = shared
        .settle(client, outcome)
        .map_err(|trouble| trouble.error)?;
    let held: BTreeSet<String> = held.iter().map(|row| row.get(0)).collect();
    let free: Vec<Command> = commands
        .iter()
        .filter(|command| !held.contains(command.key.as_str()))
        .cloned()
        .collect();
    if free.is_empty() {
        return Ok(commands
            .iter()
            .map(|command| row_held(shared, command, &error))
            .collect());
    }
    let executed = execute_together(shared, &free)
        .await
        .map_err(|trouble| trouble.error)?;
    let mut executed = executed.into_iter();
    let answers = commands.iter().map(|command| {
        if held.contains(command.key.as_str()) {
            row_held(shared, command, &error)
        } else {
            executed
                .next()
                .unwrap_or_else(|| Err(StoreError::unknown("no answer")))
        }
    });
    Ok(answers.collect())
}

/// The answer for a row that another transaction holds, such as one in which a handler completes
/// its key.
///
/// A claim gets "busy": with "unavailable", one key would stop a consumer for all keys.
fn row_held(shared: &Shared, command: &Command, error: &StoreError) -> CommandResult {
    match command.operation {
        Operation::Claim { .. } => {
            let verdict = Verdict::Busy {
                retry_in: shared.response_timeout / 2,
            };
            Ok(Reply::Verdict {
                verdict,
                uncompared: false,
            })
        }
        _ => Err(error.clone()),
    }
}

/// Reads records. Returns one answer for each key.
pub(super) async fn read_records(
    shared: &Shared,
    keys: &[StoreKey],
) -> Result<Vec<ReadAnswer>, StoreError> {
    let read = persist(async || {
        let client = shared.client().await?;
        let outcome = try_read_records(&client, shared, keys).await;
        shared.settle(client, outcome)
    });
    match read.await {
        Err(Trouble {
            error,
            damaged: true,
            ..
        }) => match keys {
            [key] => Ok(vec![Err(StoreError::unreadable(key.clone(), error))]),
            // A key that is damaged has an answer of its own.
            _ => {
                let mut answers = Vec::with_capacity(keys.len());
                for part in keys.chunks(keys.len().div_ceil(2).max(1)) {
                    answers.extend(Box::pin(read_records(shared, part)).await?);
                }
                Ok(answers)
            }
        },
        read => read.map_err(|trouble| trouble.error),
    }
}

/// Repeats work that was certainly not executed.
async fn persist<T>(mut attempt: impl AsyncFnMut() -> Result<T, Trouble>) -> Result<T, Trouble> {
    let mut tries = 1;
    loop {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(trouble) if trouble.passing && tries < MAX_TRIES => tries += 1,
            Err(trouble) => return Err(trouble),
        }
    }
}

async fn try_execute(
    client: &Object,
    shared: &Shared,
    commands: &[Command],
) -> Result<Vec<CommandResult>, Trouble> {
    let keys: BTreeSet<&str> = commands
        .iter()
        .map(|command| command.key.as_str())
        .collect();
    let keys: Vec<&str> = keys.into_iter().collect();
    let (inserted, rows) = within(shared.response_timeout, begin(client, shared, &keys)).await?;
    let mut held = Held::new(&rows, &inserted)?;
    let answers = commands.iter().map(|command| held.apply(command)).collect();
    let columns = held.changes(commands);
    if columns.is_empty() {
        // There is nothing to write, and the rollback removes the rows inserted for missing ones. A
        // commit of another transaction is on the disk before it is visible, but its wait for the
        // standbys may have been interrupted.
        let rollback = client.batch_execute("ROLLBACK");
        within(shared.response_timeout, async {
            rollback.await.map_err(|e| errors::not_executed(&e))
        })
        .await?;
        if held.waits {
            shared.confirm(client).await?;
        }
        return Ok(answers);
    }
    let silence = StoreError::unknown("the server did not confirm the commit in time");
    let commit = shared.committed(client, commit(client, &columns));
    let committed = tokio::time::timeout(shared.response_timeout, commit).await;
    committed.unwrap_or_else(|_| Err(silence.into()))?;
    Ok(answers)
}

/// Begins, locks and reads, in one round trip. Returns the keys without a row, and the rows.
async fn begin(
    client: &Object,
    shared: &Shared,
    keys: &[&str],
) -> Result<(Vec<Row>, Vec<Row>), Trouble> {
    let prepared = try_join3(
        client.prepare_cached(row::LOCK),
        client.prepare_cached(row::READ),
        client.prepare_cached(row::WRITE),
    );
    let (lock, read, _) = prepared
        .await
        .map_err(|error| errors::not_executed(&error))?;
    let parameters: [&(dyn ToSql + Sync); 1] = [&keys];
    // In this order on the wire, so that the read sees the changes that the locks have waited for.
    // Without its BEGIN the first one fails, and the second one changes nothing.
    let sent = join3(
        client.batch_execute(&shared.begin),
        client.query(&lock, &parameters),
        client.query(&read, &parameters),
    );
    let (begun, inserted, rows) = sent.await;
    let begun = begun
        .and(inserted)
        .and_then(|inserted| Ok((inserted, rows?)));
    begun.map_err(|error| errors::not_executed(&error))
}

/// Writes and commits, in one round trip.
async fn commit(client: &Object, columns: &Columns) -> Result<(), Trouble> {
    let write = client
        .prepare_cached(row::WRITE)
        .await
        .map_err(|error| errors::not_executed(&error))?;
    let parameters = columns.parameters();
    let (written, committed) = join(
        client.execute(&write, &parameters),
        client.batch_execute("COMMIT"),
    )
    .await;
    // After a failed write the server turns the commit into a rollback.
    let written = written.map_err(|error| errors::in_doubt(&error))?;
    committed.map_err(|error| errors::in_doubt(&error))?;
    if written != columns.updates() {
        return Err(StoreError::unknown(
            "oncegate_records did not take every row: a trigger, rule or policy on it interferes; remove it",
        )
        .into());
    }
    Ok(())
}

/// The records of the locked rows, before and after.
struct Held {
    now: StoreTime,
    before: BTreeMap<String, Result<Option<Record>, String>>,
    after: BTreeMap<String, Option<Record>>,
    inserted: BTreeSet<String>,
    /// `true` if commits wait for standbys.
    waits: bool,
}

impl Held {
    fn new(rows: &[Row], inserted: &[Row]) -> Result<Self, Trouble> {
        let inserted = inserted
            .iter()
            .map(|row| row.get::<_, String>(0))
            .collect::<BTreeSet<_>>();
        let (now, before) = read(rows, &inserted)?;
        Ok(Self {
            now,
            before,
            after: BTreeMap::new(),
            inserted,
            waits: waits(rows),
        })
    }

    fn apply(&mut self, command: &Command) -> CommandResult {
        let key = command.key.as_str();
        let record = match (self.after.get(key), self.before.get(key)) {
            (Some(changed), _) => changed.clone(),
            (None, Some(Ok(record))) => record.clone(),
            (None, Some(Err(reason))) => {
                return Err(StoreError::unreadable(command.key.clone(), reason));
            }
            (None, None) => return Err(StoreError::unavailable("a row was locked, but not shown")),
        };
        let (record, reply) = apply(self.now, record, &command.operation);
        self.after.insert(key.to_owned(), record);
        Ok(reply)
    }

    fn changes(&self, commands: &[Command]) -> Columns {
        let mut columns = Columns::default();
        let mut stand_ins = Vec::new();
        let keys: BTreeMap<&str, &StoreKey> = commands
            .iter()
            .map(|command| (command.key.as_str(), &command.key))
            .collect();
        for (text, key) in keys {
            let Some(after) = self.after.get(text) else {
                continue;
            };
            let changed = !matches!(self.before.get(text), Some(Ok(before)) if before == after);
            match after {
                Some(record) if changed => columns.put(key, record),
                None if self.inserted.contains(text) => stand_ins.push(key),
                None if changed => columns.remove(key),
                _ => {}
            }
        }
        // They need no separate statement when the transaction is rolled back anyway.
        if !columns.is_empty() {
            stand_ins.into_iter().for_each(|key| columns.remove(key));
        }
        columns
    }
}

async fn try_read_records(
    client: &Object,
    shared: &Shared,
    keys: &[StoreKey],
) -> Result<Vec<ReadAnswer>, Trouble> {
    let texts: Vec<&str> = keys.iter().map(StoreKey::as_str).collect();
    let query = async {
        let statement = client
            .prepare_cached(row::READ)
            .await
            .map_err(|e| errors::not_executed(&e))?;
        shared
            .alone(client, &statement, &[&texts], errors::not_executed)
            .await
    };
    let rows = within(shared.response_timeout, query).await?;
    let (now, records) = read(&rows, &BTreeSet::new())?;
    // A message is acknowledged if a read finds its record completed.
    let has_settled = records
        .values()
        .flatten()
        .flatten()
        .any(|record| matches!(record.state, State::Completed { .. } | State::Failed { .. }));
    if has_settled && waits(&rows) {
        shared.confirm(client).await?;
    }
    let answers = keys.iter().map(|key| match records.get(key.as_str()) {
        None | Some(Ok(None)) => Ok(None),
        Some(Ok(Some(record))) if !record.kept(now) => Ok(None),
        Some(Ok(Some(record))) => Ok(Some(RecordSnapshot {
            now,
            record: record.clone(),
        })),
        Some(Err(reason)) => Err(StoreError::unreadable(key.clone(), reason)),
    });
    Ok(answers.collect())
}

/// Returns whether commits wait for standbys, according to [`row::READ`].
fn waits(rows: &[Row]) -> bool {
    rows.first()
        .is_some_and(|row| row.try_get("waits").unwrap_or(true))
}

type Records = BTreeMap<String, Result<Option<Record>, String>>;

/// Decodes the rows of [`row::READ`]; those of the `inserted` keys hold no record.
fn read(rows: &[Row], inserted: &BTreeSet<String>) -> Result<(StoreTime, Records), Trouble> {
    let first = rows
        .first()
        .ok_or_else(|| StoreError::unavailable("the server returned no time"))?;
    if first.try_get("standby").unwrap_or(true) {
        return Err(errors::standby().into());
    }
    let now = row::now(first).map_err(StoreError::unavailable)?;
    let mut records = Records::new();
    for row in rows {
        let Some(key) = row::key(row).map_err(StoreError::unavailable)? else {
            continue;
        };
        let is_absent = inserted.contains(key) || row::is_stand_in(row);
        let record = if is_absent {
            Ok(None)
        } else {
            row::decode(row).map(Some)
        };
        records.insert(key.to_owned(), record);
    }
    Ok((now, records))
}
