//! Executes a batch with one statement without a read before, which settles nearly every command.
//!
//! A claim nearly always finds no record, and a completion nearly always its own claim. Both
//! statements implement the rules for that case, and do nothing in any other. Commands that they
//! did not settle are then executed by the rules, under a lock. So are commands with an unknown
//! outcome: their token shows what was executed.

use deadpool_postgres::Object;
use oncegate_core::record::{FencingToken, Recovery, TAIL, whole_millis};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::{Command, StoreError};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::errors::{self, Trouble};
use super::row;
use super::shared::Shared;
use super::transaction::{self, CommandResult};

/// Applies the commands. Returns one answer for each.
pub(super) async fn execute(
    shared: &Shared,
    commands: &[Command],
) -> Result<Vec<CommandResult>, StoreError> {
    let has_claims = commands
        .iter()
        .any(|command| matches!(command.operation, Operation::Claim { .. }));
    // Claims have their own batches. If both were sent, an error of the second would leave the
    // first unknown.
    let settled = if has_claims {
        claim_absent(shared, commands).await?
    } else {
        complete_own(shared, commands).await?
    };
    let (mut replies, in_doubt) = match settled {
        Settled::Replies(replies) => (replies, false),
        Settled::InDoubt => (Vec::new(), true),
        Settled::Held(error) => return transaction::execute_around(shared, commands, error).await,
    };
    replies.resize(commands.len(), None);
    let left = commands
        .iter()
        .zip(&replies)
        .filter(|(_, reply)| reply.is_none());
    let left: Vec<Command> = left.map(|(command, _)| command.clone()).collect();
    let by_the_rules = if left.is_empty() {
        Vec::new()
    } else {
        match transaction::execute(shared, &left).await {
            // Commands that were sent before may still be executed.
            Err(error) if in_doubt => return Err(StoreError::unknown(error)),
            Err(error) => left.iter().map(|_| Err(error.clone())).collect(),
            Ok(answers) => answers,
        }
    };
    let mut by_the_rules = by_the_rules.into_iter();
    Ok(replies
        .into_iter()
        .map(|reply| match reply {
            Some(reply) => Ok(reply),
            None => by_the_rules
                .next()
                .unwrap_or_else(|| Err(StoreError::unknown("no answer"))),
        })
        .collect())
}

/// The outcome of a statement.
enum Settled {
    /// A reply for each command that was executed; no other was.
    Replies(Vec<Option<Reply>>),
    /// The executed commands are unknown.
    InDoubt,
    /// Nothing was executed, because another transaction holds one of the rows.
    Held(StoreError),
}

/// Claims the keys that have no record.
async fn claim_absent(shared: &Shared, commands: &[Command]) -> Result<Settled, StoreError> {
    let claims = first_of_each_key(commands, |operation| {
        matches!(operation, Operation::Claim { .. })
    });
    let mut keys = Vec::new();
    let mut tokens = Vec::new();
    let mut expiries_ms = Vec::new();
    let mut fingerprints = Vec::new();
    let mut fencing_tokens = Vec::new();
    for First { key, operation, .. } in &claims {
        let Operation::Claim {
            token,
            lease,
            fingerprint,
            fenced,
            ..
        } = operation
        else {
            continue;
        };
        keys.push(*key);
        tokens.push(token.as_bytes().as_slice());
        expiries_ms.push(millis(
            whole_millis(*lease).saturating_add(whole_millis(TAIL)),
        ));
        fingerprints.push(
            fingerprint
                .as_ref()
                .map(|fingerprint| fingerprint.as_bytes().as_slice()),
        );
        fencing_tokens.push(*fenced);
    }
    let parameters: [&(dyn ToSql + Sync); 5] =
        [&keys, &tokens, &expiries_ms, &fingerprints, &fencing_tokens];
    send(shared, row::CLAIM_ABSENT, &parameters, &claims, granted).await
}

/// The reply to a claim of a key without a record.
fn granted(fencing_token: Option<i64>) -> Reply {
    let fencing_token =
        fencing_token.map(|fencing_token| FencingToken(fencing_token.unsigned_abs()));
    let verdict = Verdict::Granted(Grant {
        attempt: 1,
        recovery: Recovery::None,
        fencing_token,
        reopened: false,
    });
    Reply::Verdict {
        verdict,
        uncompared: false,
    }
}

/// Completes the claims that their owners hold.
async fn complete_own(shared: &Shared, commands: &[Command]) -> Result<Settled, StoreError> {
    let ends = first_of_each_key(commands, |operation| {
        matches!(operation, Operation::Complete { .. })
    });
    let mut keys = Vec::new();
    let mut tokens = Vec::new();
    let mut results = Vec::new();
    let mut retentions_ms = Vec::new();
    for First { key, operation, .. } in &ends {
        let Operation::Complete {
            token,
            result,
            retention,
            ..
        } = operation
        else {
            continue;
        };
        keys.push(*key);
        tokens.push(token.as_bytes().as_slice());
        results.push(&result[..]);
        retentions_ms.push(millis(whole_millis(*retention)));
    }
    let parameters: [&(dyn ToSql + Sync); 4] = [&keys, &tokens, &results, &retentions_ms];
    send(shared, row::COMPLETE_OWN, &parameters, &ends, |_| {
        Reply::Applied { recreated: false }
    })
    .await
}

/// The first command about a key.
struct First<'a> {
    key: &'a str,
    position: usize,
    operation: &'a Operation,
}

/// The first command of each key, if it is such an operation, in the order of the keys. Rows are
/// locked in that order, here and by the rules, so that batches never deadlock.
fn first_of_each_key(commands: &[Command], wanted: impl Fn(&Operation) -> bool) -> Vec<First<'_>> {
    let mut first = Vec::with_capacity(commands.len());
    for (position, Command { key, operation }) in commands.iter().enumerate() {
        first.push(First {
            key: key.as_str(),
            position,
            operation,
        });
    }
    first.sort_unstable_by(|one, other| (one.key, one.position).cmp(&(other.key, other.position)));
    first.dedup_by(|later, first| later.key == first.key);
    first.retain(|command| wanted(command.operation));
    first
}

/// Sends one statement in a separate transaction, in one round trip. Its one row contains the keys
/// that it applied to, and their fencing tokens.
///
/// # Errors
/// When there is no connection, the server does not answer in time, or it refuses.
async fn send(
    shared: &Shared,
    sql: &str,
    parameters: &[&(dyn ToSql + Sync)],
    commands: &[First<'_>],
    reply: impl Fn(Option<i64>) -> Reply,
) -> Result<Settled, StoreError> {
    if commands.is_empty() {
        return Ok(Settled::Replies(Vec::new()));
    }
    let client = shared.client().await?;
    let work = async {
        let statement = client
            .prepare_cached(sql)
            .await
            .map_err(|error| errors::not_executed(&error))?;
        shared
            .committed(
                &client,
                shared.alone(&client, &statement, parameters, errors::in_doubt),
            )
            .await
    };
    let Ok(outcome) = tokio::time::timeout(shared.response_timeout, work).await else {
        drop(Object::take(client));
        return Err(StoreError::unknown("the server did not answer in time"));
    };
    match shared.settle(client, outcome) {
        Ok(rows) => Ok(Settled::Replies(replies(rows.first(), commands, reply))),
        Err(trouble) if trouble.row_held => Ok(Settled::Held(trouble.error)),
        // The rules execute it again, and damaged data apart.
        Err(trouble) if trouble.passing || trouble.damaged => Ok(Settled::Replies(Vec::new())),
        Err(Trouble {
            error: StoreError::Unknown { .. },
            ..
        }) => Ok(Settled::InDoubt),
        Err(trouble) => Err(trouble.error),
    }
}

/// The replies to the commands that a statement applied to, each at the index of its command.
fn replies(
    row: Option<&Row>,
    commands: &[First<'_>],
    reply: impl Fn(Option<i64>) -> Reply,
) -> Vec<Option<Reply>> {
    let last = commands.iter().map(|command| command.position).max();
    let mut replies = vec![None; last.map_or(0, |last| last + 1)];
    let Some(row) = row else { return replies };
    // Null when there are none.
    let keys: Vec<&str> = row.get::<_, Option<_>>("keys").unwrap_or_default();
    let fencing_tokens: Vec<Option<i64>> = row
        .get::<_, Option<_>>("fencing_tokens")
        .unwrap_or_default();
    for (key, fencing_token) in keys
        .into_iter()
        .zip(fencing_tokens.into_iter().chain(std::iter::repeat(None)))
    {
        let found = commands
            .binary_search_by_key(&key, |command| command.key)
            .ok();
        let position = found
            .and_then(|found| commands.get(found))
            .map(|command| command.position);
        if let Some(place) = position.and_then(|position| replies.get_mut(position)) {
            *place = Some(reply(fencing_token));
        }
    }
    replies
}

fn millis(millis: u64) -> i64 {
    i64::try_from(millis).unwrap_or(i64::MAX / 2)
}
