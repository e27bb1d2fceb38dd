//! The rules on an item: decided here, written under a condition.
//!
//! DynamoDB runs no program of ours beside an item. So a command is decided on the item as it is
//! believed to be, by [`apply`], and its record is written on the condition that the item still is
//! so. If it is not, the refusal brings the item as it is, and the command is decided again: a
//! write that is refused costs no read.
//!
//! What the item is believed to be: for a claim, absent, which it nearly always is. For the owner's
//! own operations, the claim that this process has written itself (`Claims`). For all others the
//! item is read. So a message needs two writes and no read: its claim and its completion.

use std::collections::HashMap;

use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, State, StoreTime, Token};
use oncegate_core::rules::{Operation, Reply, Verdict, apply};
use oncegate_core::store::StoreError;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::api::{Api, Expected, Lane, Written};
use super::clock::{DISAGREEMENT_MOST, Now};
use super::item::{Found, ITEM_MOST_BYTES, Item, Revision, decode, encode, size_of};

/// The most decisions of one command, because others have written meanwhile. Each time, one of them
/// has got on.
const DECISIONS_MOST: u32 = 32;

/// The item that is read for the time of its answer. There is none: a scope has no such name.
const CLOCK: &str = ":clock";

/// A cut of another owner's lease that is not worth a write, in milliseconds: the processes' bounds
/// of the service's time differ by so much.
const CUT_LEAST_MS: u64 = 5_000;

/// The claims of this process, as it has written them.
///
/// They are hints: each write compares the token. Claims that are never ended leave their hints
/// behind; at [`Claims::MOST`] all are dropped, and the items are read instead.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    records: Mutex<HashMap<Token, Record>>,
}

impl Claims {
    const MOST: usize = 65_536;

    fn get(&self, token: Token) -> Option<Record> {
        self.records.lock().get(&token).cloned()
    }

    /// Notes what an operation with this token has left behind.
    fn note(&self, token: Token, record: &Record) {
        let mut records = self.records.lock();
        if !matches!(record.state, State::Pending { token: owner, .. } if owner == token) {
            records.remove(&token);
            return;
        }
        if records.len() >= Self::MOST && !records.contains_key(&token) {
            records.clear();
        }
        records.insert(token, record.clone());
    }

    /// Notes what was found there, so that a claim that is not this token's any more is forgotten.
    fn note_found(&self, token: Token, record: Option<&Record>) {
        match record {
            Some(record) => self.note(token, record),
            None => drop(self.records.lock().remove(&token)),
        }
    }
}

/// The item as it is believed to be.
enum Seen {
    /// Nothing is there, as a claim believes.
    Nothing,
    /// The claim that this process has written.
    Own(Token, Record),
    /// The item was read, or a refused write has brought it.
    Read(Option<Found>),
}

impl Seen {
    fn record(&self) -> Option<&Record> {
        match self {
            Self::Nothing => None,
            Self::Own(_, record) => Some(record),
            Self::Read(found) => found.as_ref().map(|found| &found.record),
        }
    }

    /// The condition under which `after` may replace what was seen.
    fn expected(&self, now: Now, after: &Record) -> Expected<'static> {
        match self {
            Self::Nothing | Self::Read(None) => Expected::AbsentOrExpired(now.earliest),
            Self::Own(token, _) => Expected::OwnedBy {
                token: *token,
                kept_at: now.latest,
                // A heartbeat never moves a lease back; every other end of a claim does.
                ends_by: match after.state {
                    State::Pending { .. } => after.expires_at,
                    _ => StoreTime::from_micros(u64::MAX),
                },
            },
            Self::Read(Some(found)) => Expected::MadeBy(found.revision),
        }
    }
}

/// Applies a command to the item of its key.
pub(crate) async fn execute(
    api: &Api,
    claims: &Claims,
    key: &StoreKey,
    operation: &Operation,
) -> Result<Reply, StoreError> {
    let deadline = api.deadline();
    let lane = match operation {
        Operation::Extend { .. } => Lane::Heartbeat,
        _ => Lane::Call,
    };
    let token = token_of(operation);
    let mut seen = match (operation, token.and_then(|token| claims.get(token))) {
        (Operation::Claim { .. }, None) => Seen::Nothing,
        (_, Some(own)) if !matches!(operation, Operation::Claim { .. }) => {
            token.map_or(Seen::Nothing, |token| Seen::Own(token, own))
        }
        _ => read(api, key, lane, deadline).await?,
    };
    if matches!(operation, Operation::Claim { .. }) {
        check_clocks(api, deadline).await?;
    }
    for _ in 0..DECISIONS_MOST {
        let now = api
            .clock
            .now()
            .ok_or_else(|| StoreError::unavailable("DynamoDB has not told its time yet"))?;
        let (after, reply) = decide(now, seen.record(), operation);
        let Some(after) = after.filter(|after| is_worth_a_write(seen.record(), after, operation))
        else {
            if matches!(seen, Seen::Read(_)) {
                if let Some(token) = token {
                    claims.note_found(token, seen.record());
                }
                return Ok(reply);
            }
            // A belief is no answer.
            seen = read(api, key, lane, deadline).await?;
            continue;
        };
        let revision = Revision::random();
        let item = item_of(key, &after, revision)?;
        let expected = seen.expected(now, &after);
        match api.put(item, revision, expected, lane, deadline).await? {
            Written::Done => {
                if let Some(token) = token {
                    claims.note(token, &after);
                }
                return Ok(reply);
            }
            Written::Other(item) => seen = Seen::Read(found(key, item)?),
        }
    }
    Err(StoreError::unavailable(format_args!(
        "{key} was written by others {DECISIONS_MOST} times meanwhile"
    )))
}

/// Refuses claims while it is not known what time it is.
async fn check_clocks(api: &Api, deadline: Instant) -> Result<(), StoreError> {
    if api.clock.wall_error() <= DISAGREEMENT_MOST {
        return Ok(());
    }
    // Without a request no answer would ever tell that the clocks agree again.
    api.get(CLOCK, Lane::Call, deadline).await?;
    let error = api.clock.wall_error();
    if error <= DISAGREEMENT_MOST {
        return Ok(());
    }
    Err(StoreError::refused(format_args!(
        "this machine's clock and the time in DynamoDB's answers differ by {} s: set the clock, or look for a proxy that \
         changes the header `Date`",
        error.as_secs()
    )))
}

/// The rules, by both ends of what is known of the time.
///
/// They are applied at the latest instant, so that what is written lasts long enough. A takeover
/// also needs the earliest instant to allow it: no lease is over because this process knows the
/// time badly.
fn decide(now: Now, record: Option<&Record>, operation: &Operation) -> (Option<Record>, Reply) {
    let latest = apply(now.latest, record.cloned(), operation);
    // No handler runs behind a delay, so a second too early does no harm.
    let protects = record.is_some_and(|record| !matches!(record.state, State::Released { .. }));
    if !protects || !ends_lease(operation, &latest.1) {
        return latest;
    }
    let (_, earliest) = apply(now.earliest, record.cloned(), operation);
    if ends_lease(operation, &earliest) {
        latest
    } else {
        // The reply alone: a cut of the lease by this end could end one that is alive.
        (record.cloned(), earliest)
    }
}

/// Returns whether the operation, with this reply, ends what protects another attempt: a grant
/// does, and so does an operator who resolves a record that no attempt works on.
fn ends_lease(operation: &Operation, reply: &Reply) -> bool {
    match reply {
        Reply::Verdict { verdict, .. } => matches!(verdict, Verdict::Granted(_)),
        Reply::Applied { .. } => matches!(operation, Operation::Resolve { .. }),
        Reply::NotOwner => false,
    }
}

/// Returns whether the record has changed in a way that others must see.
fn is_worth_a_write(before: Option<&Record>, after: &Record, operation: &Operation) -> bool {
    let Some(before) = before else { return true };
    if !before.same_content(after) {
        return true;
    }
    let before_ms = before.expires_at.millis();
    let after_ms = after.expires_at.millis();
    match operation {
        // A grant to the same token, whose record had expired, is a new one.
        Operation::Claim { .. } => {
            after_ms > before_ms || before_ms > after_ms.saturating_add(CUT_LEAST_MS)
        }
        _ => before_ms != after_ms,
    }
}

fn token_of(operation: &Operation) -> Option<Token> {
    match operation {
        Operation::Claim { token, .. }
        | Operation::Extend { token, .. }
        | Operation::Complete { token, .. }
        | Operation::Release { token, .. }
        | Operation::Fail { token, .. } => Some(*token),
        Operation::HandOver { .. } | Operation::Reopen { .. } | Operation::Resolve { .. } => None,
    }
}

async fn read(
    api: &Api,
    key: &StoreKey,
    lane: Lane,
    deadline: Instant,
) -> Result<Seen, StoreError> {
    let item = api.get(key.as_str(), lane, deadline).await?;
    Ok(Seen::Read(found(key, item)?))
}

fn found(key: &StoreKey, item: Option<Item>) -> Result<Option<Found>, StoreError> {
    item.map(|item| decode(&item).map_err(|reason| StoreError::unreadable(key.clone(), reason)))
        .transpose()
}

fn item_of(key: &StoreKey, record: &Record, revision: Revision) -> Result<Item, StoreError> {
    let size = size_of(key.as_str(), record);
    if size > ITEM_MOST_BYTES {
        return Err(StoreError::refused(format_args!(
            "the record of {key} would have {size} bytes, and an item of DynamoDB has at most {ITEM_MOST_BYTES}: keep \
             large results elsewhere (`large_results`), or lower the gate's limit of results in records"
        )));
    }
    Ok(encode(key.as_str(), record, revision))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use oncegate_core::record::TAIL;

    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    fn claim(token: u128) -> Operation {
        Operation::Claim {
            token: Token::from_bits(token),
            lease: LEASE,
            fingerprint: None,
            fenced: false,
            longest_lease: LEASE,
        }
    }

    /// An interval of two seconds.
    fn between(earliest_s: u64) -> Now {
        Now {
            earliest: StoreTime::from_millis(earliest_s * 1_000),
            latest: StoreTime::from_millis(earliest_s * 1_000 + 2_000),
        }
    }

    // invariant: store-time-bounds
    #[test]
    fn a_lease_that_may_be_alive_is_not_taken_over() {
        let (owned, _) = decide(between(100), None, &claim(1));
        let owned = owned.unwrap();
        assert_eq!(
            owned.expires_at,
            between(100).latest + LEASE + TAIL,
            "it is written from the latest instant"
        );
        for (earliest_s, granted) in [(101, false), (130, false), (131, false), (133, true)] {
            let (after, reply) = decide(between(earliest_s), Some(&owned), &claim(2));
            assert_eq!(
                ends_lease(&claim(2), &reply),
                granted,
                "{earliest_s}: {reply:?}"
            );
            if !granted {
                assert!(!is_worth_a_write(Some(&owned), &after.unwrap(), &claim(2)));
            }
        }
    }

    #[test]
    fn a_small_cut_of_a_lease_is_not_written_and_a_large_one_is() {
        let (owned, _) = decide(between(100), None, &claim(1));
        let owned = owned.unwrap();
        // Another process knows the time by 1.5 s less.
        let less = Now {
            earliest: StoreTime::from_millis(99_900),
            latest: StoreTime::from_millis(100_500),
        };
        let (after, _) = decide(less, Some(&owned), &claim(2));
        assert!(!is_worth_a_write(Some(&owned), &after.unwrap(), &claim(2)));
        let (after, _) = decide(between(10), Some(&owned), &claim(2));
        assert!(is_worth_a_write(Some(&owned), &after.unwrap(), &claim(2)));
    }

    #[test]
    fn hints_are_those_of_running_claims() {
        let claims = Claims::default();
        let token = Token::from_bits(1);
        let (owned, _) = decide(between(100), None, &claim(1));
        let owned = owned.unwrap();
        claims.note(token, &owned);
        assert_eq!(claims.get(token), Some(owned.clone()));
        let release = Operation::Release {
            token,
            delay: Duration::ZERO,
            end: oncegate_core::rules::ReleaseCause::Failed,
            reason: String::new(),
        };
        let (released, _) = decide(between(101), Some(&owned), &release);
        claims.note(token, &released.unwrap());
        assert_eq!(claims.get(token), None);
    }
}
