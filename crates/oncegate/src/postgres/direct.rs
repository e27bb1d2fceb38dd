//! A batch, the straight way first: what nearly every command meets is one statement that looks at no row before.
//!
//! A claim nearly always meets no record, and a completion its own claim. Both statements do what the rules say
//! for that case, and nothing in any other; whatever they did not do goes by the rules afterwards, under a lock,
//! and so does what nobody knows about: its token finds out what became of it.

use std::collections::BTreeMap;

use deadpool_postgres::Object;
use futures_util::future::join3;
use oncegate_core::record::{Fence, Recovery, TAIL, whole_millis};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::{Command, StoreError};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::errors::{self, Trouble};
use super::link::Shared;
use super::row;
use super::transaction::{self, Answer};

/// Applies the commands; there is one answer for each.
pub(super) async fn execute(shared: &Shared, commands: &[Command]) -> Result<Vec<Answer>, StoreError> {
    let is_claim = |command: &Command| matches!(command.operation, Operation::Claim { .. });
    // Claims travel by themselves. Were both sent, an error of the second would say nothing about the first.
    let settled = match commands.iter().any(is_claim) {
        true => claim_absent(shared, commands).await?,
        false => complete_own(shared, commands).await?,
    };
    let (mut replies, in_doubt) = match settled {
        Settled::Replies(replies) => (replies, false),
        Settled::InDoubt => (BTreeMap::new(), true),
        Settled::Held(error) => return transaction::execute_around(shared, commands, error).await,
    };
    let is_left = |(position, _): &(usize, &Command)| !replies.contains_key(position);
    let left: Vec<Command> =
        commands.iter().enumerate().filter(is_left).map(|(_, command)| command.clone()).collect();
    let by_the_rules = match left.is_empty() {
        true => Vec::new(),
        false => match transaction::execute(shared, &left).await {
            // What was on its way before may still be executed.
            Err(error) if in_doubt => return Err(StoreError::unknown(error)),
            Err(error) => left.iter().map(|_| Err(error.clone())).collect(),
            Ok(answers) => answers,
        },
    };
    let mut by_the_rules = by_the_rules.into_iter();
    let mut next = || by_the_rules.next().unwrap_or_else(|| Err(StoreError::unknown("no answer")));
    Ok((0..commands.len()).map(|position| replies.remove(&position).map_or_else(&mut next, Ok)).collect())
}

/// What a statement has settled.
enum Settled {
    /// Replies by the positions of their commands; nothing else was done.
    Replies(BTreeMap<usize, Reply>),
    /// Nobody knows what was done.
    InDoubt,
    /// Nothing was done, because somebody holds one of the rows.
    Held(StoreError),
}

/// Claims the keys that have no record.
async fn claim_absent(shared: &Shared, commands: &[Command]) -> Result<Settled, StoreError> {
    let claims = first_of_each_key(commands, |operation| matches!(operation, Operation::Claim { .. }));
    let (mut keys, mut tokens, mut expiries_ms) = (Vec::new(), Vec::new(), Vec::new());
    let (mut fingerprints, mut fences) = (Vec::new(), Vec::new());
    for (key, (_, operation)) in &claims {
        let Operation::Claim { token, lease, fingerprint, fenced } = operation else { continue };
        keys.push(*key);
        tokens.push(token.as_bytes().as_slice());
        expiries_ms.push(millis(whole_millis(*lease).saturating_add(whole_millis(TAIL))));
        fingerprints.push(fingerprint.as_ref().map(|fingerprint| fingerprint.as_bytes().as_slice()));
        fences.push(*fenced);
    }
    if keys.is_empty() {
        return Ok(Settled::Replies(BTreeMap::new()));
    }
    let reply = |row: &Row| {
        let fence: Option<i64> = row.get("fence");
        let fence = fence.map(|fence| Fence(fence.unsigned_abs()));
        let verdict =
            Verdict::Granted(Grant { attempt: 1, recovery: Recovery::None, fence, reopened: false });
        Reply::Verdict { verdict, uncompared: false }
    };
    let parameters: [&(dyn ToSql + Sync); 5] = [&keys, &tokens, &expiries_ms, &fingerprints, &fences];
    Ok(settled(send(shared, row::CLAIM_ABSENT, &parameters).await?, &claims, reply))
}

/// Completes the claims that their owners hold.
async fn complete_own(shared: &Shared, commands: &[Command]) -> Result<Settled, StoreError> {
    let ends = first_of_each_key(commands, |operation| matches!(operation, Operation::Complete { .. }));
    let (mut keys, mut tokens) = (Vec::new(), Vec::new());
    let (mut results, mut retentions_ms) = (Vec::new(), Vec::new());
    for (key, (_, operation)) in &ends {
        let Operation::Complete { token, result, retention, .. } = operation else { continue };
        keys.push(*key);
        tokens.push(token.as_bytes().as_slice());
        results.push(&result[..]);
        retentions_ms.push(millis(whole_millis(*retention)));
    }
    if keys.is_empty() {
        return Ok(Settled::Replies(BTreeMap::new()));
    }
    let parameters: [&(dyn ToSql + Sync); 4] = [&keys, &tokens, &results, &retentions_ms];
    let reply = |_: &Row| Reply::Held { recreated: false };
    Ok(settled(send(shared, row::COMPLETE_OWN, &parameters).await?, &ends, reply))
}

/// The first command about each key, if it is such an operation, in the order of the keys: in that order rows are
/// locked, here and by the rules, so that batches never wait for each other in turns.
fn first_of_each_key(
    commands: &[Command],
    wanted: impl Fn(&Operation) -> bool,
) -> BTreeMap<&str, (usize, &Operation)> {
    let mut first = BTreeMap::new();
    for (position, Command { key, operation }) in commands.iter().enumerate() {
        first.entry(key.as_str()).or_insert((position, operation));
    }
    first.retain(|_, (_, operation)| wanted(operation));
    first
}

fn settled(
    sent: Sent,
    commands: &BTreeMap<&str, (usize, &Operation)>,
    reply: impl Fn(&Row) -> Reply,
) -> Settled {
    let position = |row: &Row| commands.get(row.get::<_, &str>("key")).map(|(position, _)| *position);
    match sent {
        Sent::Done(rows) => {
            Settled::Replies(rows.iter().filter_map(|row| Some((position(row)?, reply(row)))).collect())
        }
        Sent::InDoubt => Settled::InDoubt,
        Sent::Held(error) => Settled::Held(error),
    }
}

/// What became of a statement.
enum Sent {
    /// The rows of what it did; none when it should be tried again by the rules.
    Done(Vec<Row>),
    InDoubt,
    Held(StoreError),
}

/// Sends one statement in a transaction of its own, in one round trip.
///
/// # Errors
/// When there is no connection, the server does not answer in time, or it refuses.
async fn send(shared: &Shared, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Sent, StoreError> {
    let client = shared.client().await?;
    let work = async {
        let statement = client.prepare_cached(sql).await.map_err(|error| errors::not_executed(&error))?;
        let sent = join3(
            client.batch_execute(&shared.begin),
            client.query(&statement, parameters),
            client.batch_execute("COMMIT"),
        );
        let (begun, rows, committed) = sent.await;
        match (begun.and(rows), committed) {
            (Ok(rows), Ok(())) => Ok(rows),
            // The server is there, and has turned the commit into a rollback.
            (Err(error), Ok(())) => Err(errors::not_executed(&error)),
            (_, Err(error)) => Err(errors::in_doubt(&error)),
        }
    };
    let Ok(outcome) = tokio::time::timeout(shared.response_timeout, work).await else {
        drop(Object::take(client));
        return Err(StoreError::unknown("the server did not answer in time"));
    };
    match shared.settle(client, outcome) {
        Ok(rows) => Ok(Sent::Done(rows)),
        Err(trouble) if trouble.row_held => Ok(Sent::Held(trouble.error)),
        Err(trouble) if trouble.passing => Ok(Sent::Done(Vec::new())),
        Err(Trouble { error: StoreError::Unknown { .. }, .. }) => Ok(Sent::InDoubt),
        Err(trouble) => Err(trouble.error),
    }
}

fn millis(millis: u64) -> i64 {
    i64::try_from(millis).unwrap_or(i64::MAX / 2)
}
