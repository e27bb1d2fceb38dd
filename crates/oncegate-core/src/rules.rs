//! The rules: one pure function that defines what each operation does to a record.
//!
//! Every store is a port of [`apply`]: Lua scripts on Redis, statements in SQL. Tests compare each port with it by
//! applying the same random sequences of operations to both (feature `testing`, `testing::equivalence`).
//!
//! ```text
//!             claim                    complete
//!   (absent) ───────▶ PENDING ─────────────────────▶ COMPLETED ──retention──▶ (absent)
//!                      ▲  │ ▲ └──extend──┐
//!      claim when due  │  │ └────────────┘   fail            hand_over
//!             RELEASED ◀──┘ release      └─────────▶ FAILED ───────────▶ FAILED, handed over
//!                 ▲                                                         │
//!                 └──────────────────────── reopen ◀────────────────────────┘
//! ```

use std::time::Duration;

use bytes::Bytes;

use crate::key::Fingerprint;
use crate::record::{Fence, MAX_REASON_BYTES, Record, Recovery, State, StoreTime, TAIL, Token, TokenTag};

/// The reason that a reopened record holds.
pub const REOPENED: &str = "reopened";

/// A change of a record. Callers pass durations, never instants: only the store's clock counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Requests the right to run the handler. The reply is a [`Verdict`].
    Claim {
        /// The owner token: random, created before the first try. A repeat after a lost reply uses the same token.
        token: Token,
        /// How long the claim protects its owner without an extend (the lease).
        lease: Duration,
        /// Digest of the rest of the payload, if the gate uses fingerprints.
        fingerprint: Option<Fingerprint>,
        /// Whether the attempt needs a fencing token.
        fenced: bool,
    },
    /// Renews the lease (heartbeat): it ends `lease` from now. Never shortens a lease.
    Extend {
        /// The owner token.
        token: Token,
        /// The lease, from now.
        lease: Duration,
    },
    /// Records that the handler has succeeded.
    Complete {
        /// The owner token.
        token: Token,
        /// The fingerprint of the claim. A completion of a claim that the store has lost writes it again.
        fingerprint: Option<Fingerprint>,
        /// The encoded result, which duplicates get.
        result: Bytes,
        /// How long the record is kept.
        retention: Duration,
    },
    /// Records that the handler has not succeeded and another attempt may follow.
    Release {
        /// The owner token.
        token: Token,
        /// How long from now the key cannot be claimed.
        delay: Duration,
        /// Whether the attempt counts: a failure does; a stop, a rebalance or an outage does not.
        counted: bool,
        /// The reason as text.
        reason: String,
    },
    /// Records that the message has failed permanently.
    Fail {
        /// The owner token.
        token: Token,
        /// The reason as text.
        reason: String,
        /// How long the record is kept.
        retention: Duration,
    },
    /// Records that the failed message is durably stored as a dead letter. Needs no owner token and may be repeated.
    HandOver,
    /// Reopens a record for an operator, if its content is still what the operator has read.
    Reopen {
        /// The record that the operator has read.
        expected: Record,
    },
}

impl Operation {
    /// One lower-case word for metrics: `claim`, `extend`, `complete`, `release`, `fail`, `hand_over` or `reopen`.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Claim { .. } => "claim",
            Self::Extend { .. } => "extend",
            Self::Complete { .. } => "complete",
            Self::Release { .. } => "release",
            Self::Fail { .. } => "fail",
            Self::HandOver => "hand_over",
            Self::Reopen { .. } => "reopen",
        }
    }
}

/// The reply to an [`Operation`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The reply to a claim.
    Verdict {
        /// The claim outcome.
        verdict: Verdict,
        /// The fingerprints were not compared, because the record's is of another specification or only one side has
        /// one.
        uncompared: bool,
    },
    /// The change was applied, by this call or an earlier one of the same owner.
    Applied {
        /// The completion found no record: the store had lost the claim.
        recreated: bool,
    },
    /// The caller does not own the record, or the record is not what the caller expected. Nothing changed.
    NotOwner,
}

/// The outcome of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The caller owns the claim and runs the handler.
    Granted(Grant),
    /// The message is completed.
    Completed {
        /// The encoded first result, byte for byte.
        result: Bytes,
    },
    /// Another owner holds the lease, or the retry is not due.
    Busy {
        /// How long to wait before the next claim; never zero.
        retry_in: Duration,
    },
    /// The message has failed permanently.
    Failed {
        /// The reason as text.
        reason: String,
        /// Whether it is durably stored as a dead letter.
        handed_over: bool,
    },
    /// The record's fingerprint differs: the same key came with other content.
    Mismatch,
}

/// The right to run the handler once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The number of this attempt, from 1. It stays at 255.
    pub attempt: u8,
    /// Whether an earlier attempt ended without reporting an outcome, so that its effect may have happened.
    pub recovery: Recovery,
    /// The fencing token, which only grows for this key; present if the claim was fenced.
    pub fence: Option<Fence>,
    /// Whether this attempt is the first after an operator reopened the record: the effect of an earlier attempt may
    /// happen again. Reported once: a repeated claim, whose first reply was lost, returns `false`.
    pub reopened: bool,
}

/// Applies `operation` at `now` to the record of a key. Returns the record afterwards and the reply.
///
/// The function is total, does no I/O and reads no clock. An expired record counts as absent.
pub fn apply(now: StoreTime, record: Option<Record>, operation: &Operation) -> (Option<Record>, Reply) {
    let record = record.filter(|record| record.kept(now));
    match operation {
        Operation::Claim { token, lease, fingerprint, fenced } => claim(
            now,
            record,
            &Claimant { token: *token, lease: *lease, fingerprint: *fingerprint, fenced: *fenced },
        ),
        Operation::Extend { token, lease } => extend(now, record, *token, *lease),
        Operation::Complete { token, fingerprint, result, retention } => {
            let completed = Record {
                expires_at: now + *retention,
                fingerprint: *fingerprint,
                state: State::Completed { by: token.tag(), result: result.clone() },
            };
            complete(record, *token, completed)
        }
        Operation::Release { token, delay, counted, reason } => {
            let released = Release { due: now + *delay, counted: *counted, reason: cut_reason(reason) };
            release(record, *token, released)
        }
        Operation::Fail { token, reason, retention } => {
            fail(record, *token, now + *retention, cut_reason(reason))
        }
        Operation::HandOver => hand_over(record),
        Operation::Reopen { expected } => reopen(now, record, expected),
    }
}

/// The arguments of a claim.
struct Claimant {
    token: Token,
    lease: Duration,
    fingerprint: Option<Fingerprint>,
    fenced: bool,
}

/// The arguments of a release, as the record will hold them.
struct Release {
    due: StoreTime,
    counted: bool,
    reason: String,
}

/// What the next attempt takes over from an earlier one.
#[derive(Default)]
struct Earlier {
    attempt: u8,
    recovery: Recovery,
    fence: Option<Fence>,
    reopened: bool,
}

fn claim(now: StoreTime, record: Option<Record>, claimant: &Claimant) -> (Option<Record>, Reply) {
    let Some(record) = record else {
        return grant(now, claimant, &Earlier::default(), false);
    };
    let uncompared = match (record.fingerprint, claimant.fingerprint) {
        (theirs, ours) if theirs == ours => false,
        (Some(theirs), Some(ours)) if theirs.specification() == ours.specification() => {
            return (Some(record), Reply::Verdict { verdict: Verdict::Mismatch, uncompared: false });
        }
        _ => true,
    };
    let verdict = match (&record.state, record.protected_for(now)) {
        // A repeat by the owner: the first reply was lost, or the lease expired and no other owner took over.
        (&State::Pending { token, attempt, recovery, fence }, _) if token == claimant.token => {
            Verdict::Granted(Grant { attempt, recovery, fence, reopened: false })
        }
        (State::Pending { .. } | State::Released { .. }, Some(retry_in)) => Verdict::Busy { retry_in },
        (&State::Pending { attempt, fence, .. }, None) => {
            let earlier = Earlier { attempt, recovery: Recovery::Takeover, fence, reopened: false };
            return grant(now, claimant, &earlier, uncompared);
        }
        (&State::Released { by, attempt, recovered, fence, .. }, None) => {
            let recovery = if recovered { Recovery::Earlier } else { Recovery::None };
            // A reopen has no owner and resets the recovery.
            let reopened = by == TokenTag::NONE && !recovered;
            return grant(now, claimant, &Earlier { attempt, recovery, fence, reopened }, uncompared);
        }
        (State::Completed { result, .. }, _) => Verdict::Completed { result: result.clone() },
        (State::Failed { reason, handed_over, .. }, _) => {
            Verdict::Failed { reason: reason.clone(), handed_over: *handed_over }
        }
    };
    (Some(record), Reply::Verdict { verdict, uncompared })
}

fn grant(
    now: StoreTime,
    claimant: &Claimant,
    earlier: &Earlier,
    uncompared: bool,
) -> (Option<Record>, Reply) {
    let attempt = earlier.attempt.saturating_add(1);
    let recovery = earlier.recovery;
    let fence = claimant.fenced.then(|| next_fence(now, earlier.fence));
    let record = Record {
        expires_at: now + claimant.lease + TAIL,
        fingerprint: claimant.fingerprint,
        state: State::Pending { token: claimant.token, attempt, recovery, fence },
    };
    let verdict = Verdict::Granted(Grant { attempt, recovery, fence, reopened: earlier.reopened });
    (Some(record), Reply::Verdict { verdict, uncompared })
}

/// The next fencing token: greater than `last`, and at least the clock in microseconds.
///
/// If the store has lost `last`, the clock alone keeps the token growing.
fn next_fence(now: StoreTime, last: Option<Fence>) -> Fence {
    let after_last = last.map_or(0, |Fence(last)| last.saturating_add(1));
    Fence(after_last.max(now.micros()))
}

fn extend(now: StoreTime, record: Option<Record>, token: Token, lease: Duration) -> (Option<Record>, Reply) {
    match record {
        Some(mut record) if owns(&record, token) => {
            record.expires_at = record.expires_at.max(now + lease + TAIL);
            (Some(record), Reply::Applied { recreated: false })
        }
        // A heartbeat that arrives after the end of its own attempt is not a lost lease.
        Some(record) if ended_by(&record, token) => (Some(record), Reply::Applied { recreated: false }),
        other => (other, Reply::NotOwner),
    }
}

fn complete(record: Option<Record>, token: Token, completed: Record) -> (Option<Record>, Reply) {
    match record {
        // The effect has happened. Without a record it would happen again.
        None => (Some(completed), Reply::Applied { recreated: true }),
        Some(record) if owns(&record, token) => {
            let fingerprint = record.fingerprint;
            (Some(Record { fingerprint, ..completed }), Reply::Applied { recreated: false })
        }
        Some(record) if matches!(record.state, State::Completed { by, .. } if by == token.tag()) => {
            (Some(record), Reply::Applied { recreated: false })
        }
        other => (other, Reply::NotOwner),
    }
}

fn release(record: Option<Record>, token: Token, released: Release) -> (Option<Record>, Reply) {
    match record {
        Some(Record {
            fingerprint,
            state: State::Pending { token: owner, attempt, recovery, fence },
            ..
        }) if owner == token => {
            let state = State::Released {
                by: token.tag(),
                attempt: if released.counted { attempt } else { attempt.saturating_sub(1) },
                recovered: recovery.recovered(),
                fence,
                reason: released.reason,
            };
            let expires_at = released.due + TAIL;
            (Some(Record { expires_at, fingerprint, state }), Reply::Applied { recreated: false })
        }
        Some(record) if matches!(record.state, State::Released { by, .. } if by == token.tag()) => {
            (Some(record), Reply::Applied { recreated: false })
        }
        other => (other, Reply::NotOwner),
    }
}

fn fail(
    record: Option<Record>,
    token: Token,
    expires_at: StoreTime,
    reason: String,
) -> (Option<Record>, Reply) {
    match record {
        Some(Record { fingerprint, state: State::Pending { token: owner, attempt, .. }, .. })
            if owner == token =>
        {
            let state = State::Failed { by: token.tag(), attempt, handed_over: false, reason };
            (Some(Record { expires_at, fingerprint, state }), Reply::Applied { recreated: false })
        }
        Some(record) if matches!(record.state, State::Failed { by, .. } if by == token.tag()) => {
            (Some(record), Reply::Applied { recreated: false })
        }
        other => (other, Reply::NotOwner),
    }
}

fn hand_over(record: Option<Record>) -> (Option<Record>, Reply) {
    match record {
        Some(mut record) => {
            let State::Failed { handed_over, .. } = &mut record.state else {
                return (Some(record), Reply::NotOwner);
            };
            *handed_over = true;
            (Some(record), Reply::Applied { recreated: false })
        }
        None => (None, Reply::NotOwner),
    }
}

fn reopen(now: StoreTime, record: Option<Record>, expected: &Record) -> (Option<Record>, Reply) {
    match record {
        Some(record) if record.same_content(expected) => {
            let fence = match record.state {
                State::Pending { fence, .. } | State::Released { fence, .. } => fence,
                State::Completed { .. } | State::Failed { .. } => None,
            };
            let reopened = Record {
                // One millisecond in the past, so the retry is due at once.
                expires_at: StoreTime::from_millis((now + TAIL).millis().saturating_sub(1)),
                fingerprint: None,
                state: State::Released {
                    by: TokenTag::NONE,
                    attempt: 0,
                    recovered: false,
                    fence,
                    reason: REOPENED.to_owned(),
                },
            };
            (Some(reopened), Reply::Applied { recreated: false })
        }
        other => (other, Reply::NotOwner),
    }
}

fn owns(record: &Record, token: Token) -> bool {
    matches!(record.state, State::Pending { token: owner, .. } if owner == token)
}

fn ended_by(record: &Record, token: Token) -> bool {
    match record.state {
        State::Pending { .. } => false,
        State::Released { by, .. } | State::Completed { by, .. } | State::Failed { by, .. } => {
            by == token.tag()
        }
    }
}

/// Cuts a reason to at most [`MAX_REASON_BYTES`] bytes, at a character boundary.
pub fn cut_reason(reason: &str) -> String {
    // `str::floor_char_boundary` needs a newer compiler than this crate's minimum.
    let mut end = reason.len().min(MAX_REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason.get(..end).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: StoreTime = StoreTime::from_millis(1_000_000);

    fn claim_of(bits: u128, lease: Duration) -> Operation {
        Operation::Claim { token: Token::from_bits(bits), lease, fingerprint: None, fenced: true }
    }

    #[test]
    fn a_lease_is_over_after_its_last_millisecond() {
        let (record, _) = apply(NOW, None, &claim_of(1, Duration::from_millis(10)));
        for (later_ms, retry_in_ms) in [(0, Some(11)), (9, Some(2)), (10, Some(1)), (11, None)] {
            let now = NOW + Duration::from_millis(later_ms);
            let (_, reply) = apply(now, record.clone(), &claim_of(2, Duration::from_millis(10)));
            let Reply::Verdict { verdict, .. } = reply else { panic!("{reply:?}") };
            match retry_in_ms {
                Some(ms) => assert_eq!(verdict, Verdict::Busy { retry_in: Duration::from_millis(ms) }),
                None => assert!(matches!(verdict, Verdict::Granted(Grant { attempt: 2, .. })), "{verdict:?}"),
            }
        }
    }

    #[test]
    fn the_end_of_time_is_no_overflow() {
        let token = Token::from_bits(1);
        let complete =
            Operation::Complete { token, fingerprint: None, result: Bytes::new(), retention: Duration::MAX };
        let release =
            Operation::Release { token, delay: Duration::MAX, counted: false, reason: String::new() };
        let fail = Operation::Fail { token, reason: String::new(), retention: Duration::MAX };
        for now in [StoreTime::default(), NOW, StoreTime::from_micros(u64::MAX)] {
            let (claimed, _) = apply(now, None, &claim_of(1, Duration::MAX));
            for operation in [&complete, &release, &fail, &claim_of(2, Duration::MAX)] {
                let (record, _) = apply(now, claimed.clone(), operation);
                let record = record.expect("nothing is forgotten before the end of time");
                assert!(record.kept(now));
            }
        }
    }

    #[test]
    fn a_fence_grows_when_the_clock_goes_back() {
        let lease = Duration::from_millis(10);
        let (claimed, _) = apply(NOW, None, &claim_of(1, lease));
        let expected = claimed.clone().expect("a claim leaves a record");
        let earlier = StoreTime::from_micros(NOW.micros() / 2);
        let (reopened, _) = apply(earlier, claimed, &Operation::Reopen { expected });
        let (_, reply) = apply(earlier, reopened, &claim_of(2, lease));
        let Reply::Verdict { verdict: Verdict::Granted(grant), .. } = reply else { panic!("{reply:?}") };
        assert_eq!(grant.fence, Some(Fence(NOW.micros() + 1)));
    }
}
