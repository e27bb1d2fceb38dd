//! The rules: one pure function that defines what each operation does to a record.
//!
//! Every store is a port of [`apply`]: Lua scripts on Redis, statements in SQL. Tests compare each
//! port with it by applying the same random sequences of operations to both (feature `testing`,
//! `testing::equivalence`).
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
use crate::record::{
    FencingToken, MAX_REASON_BYTES, Record, Recovery, State, StoreTime, TAIL, Token, TokenTag,
};

/// The reason that a reopened record holds.
pub const REOPENED: &str = "reopened";

/// A change of a record. Callers pass durations, never instants: only the store's clock counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Requests the right to run the handler. The reply is a [`Verdict`].
    Claim {
        /// The owner token: random, created before the first try. A repeat after a lost reply uses
        /// the same token.
        token: Token,
        /// How long the claim protects its owner without an extend (the lease).
        lease: Duration,
        /// Digest of the rest of the payload, if the gate uses fingerprints.
        fingerprint: Option<Fingerprint>,
        /// Whether the attempt needs a fencing token.
        fenced: bool,
        /// The longest lease of any owner in the scope. What is left of another owner's lease is
        /// cut to it: if more is left, the store's clock has gone back. `Duration::MAX` cuts
        /// nothing.
        longest_lease: Duration,
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
        /// The fingerprint of the claim. A completion of a claim that the store has lost writes it
        /// again.
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
        /// How the attempt has ended, which decides whether it counts.
        end: ReleaseCause,
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
    /// Records that the failed message is durably stored as a dead letter. Any process may do that,
    /// for the failure whose dead letter it has written, and may repeat it.
    HandOver {
        /// The tag of the owner that failed the record. Another failure, after a reopen, has a dead
        /// letter of its own.
        by: TokenTag,
    },
    /// Reopens a record for an operator, if its content is still what the operator has read.
    Reopen {
        /// The record that the operator has read.
        expected: Record,
    },
}

impl Operation {
    /// One lower-case word for metrics: `claim`, `extend`, `complete`, `release`, `fail`,
    /// `hand_over` or `reopen`.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Claim { .. } => "claim",
            Self::Extend { .. } => "extend",
            Self::Complete { .. } => "complete",
            Self::Release { .. } => "release",
            Self::Fail { .. } => "fail",
            Self::HandOver { .. } => "hand_over",
            Self::Reopen { .. } => "reopen",
        }
    }
}

/// How an attempt has ended whose claim is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReleaseCause {
    /// It has failed. It counts.
    Failed,
    /// A stop, a rebalance or an outage has interrupted it. It does not count.
    Interrupted,
    /// Its handler was not started, and nothing was told of the grant: the caller gave up before it
    /// had the reply. It does not count, and what it has taken over is left to the next attempt to
    /// take over.
    NotStarted,
    /// Its process has thrown it away: it took too long, or a stop or a rebalance did not wait for
    /// it. It counts, and its effect may have happened.
    Discarded,
}

impl ReleaseCause {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Failed,
        Self::Interrupted,
        Self::NotStarted,
        Self::Discarded,
    ];

    /// One word or two: `failed`, `interrupted`, `not started` or `discarded`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
            Self::NotStarted => "not started",
            Self::Discarded => "discarded",
        }
    }

    /// Whether the attempt counts.
    pub const fn counts(self) -> bool {
        matches!(self, Self::Failed | Self::Discarded)
    }
}

/// The reply to an [`Operation`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The reply to a claim.
    Verdict {
        /// The claim outcome.
        verdict: Verdict,
        /// The fingerprints were not compared, because the record's is of another specification or
        /// only one side has one.
        uncompared: bool,
    },
    /// The change was applied, by this call or an earlier one of the same owner.
    Applied {
        /// The completion found no record: the store had lost the claim.
        recreated: bool,
    },
    /// The caller does not own the record, or the record is not what the caller expected. Nothing
    /// changed.
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
        /// The tag of the owner that failed it, for [`Operation::HandOver`].
        by: TokenTag,
    },
    /// The record's fingerprint differs: the same key came with other content.
    Mismatch,
}

/// The right to run the handler once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The number of this attempt, from 1. It stays at 255.
    pub attempt: u8,
    /// Whether an earlier attempt ended without reporting an outcome, so that its effect may have
    /// happened.
    pub recovery: Recovery,
    /// The fencing token, which only grows for this key; present if the claim was fenced.
    pub fencing_token: Option<FencingToken>,
    /// Whether this attempt is the first after an operator reopened the record: the effect of an
    /// earlier attempt may happen again. Reported once: a repeated claim, whose first reply was
    /// lost, returns `false`.
    pub reopened: bool,
}

/// Applies `operation` at `now` to the record of a key. Returns the record afterwards and the
/// reply.
///
/// The function is total, does no I/O and reads no clock. An expired record counts as absent.
pub fn apply(
    now: StoreTime,
    record: Option<Record>,
    operation: &Operation,
) -> (Option<Record>, Reply) {
    let record = record.filter(|record| record.kept(now));
    match operation {
        Operation::Claim {
            token,
            lease,
            fingerprint,
            fenced,
            longest_lease,
        } => {
            let claimant = Claimant {
                token: *token,
                lease: *lease,
                fingerprint: *fingerprint,
                fenced: *fenced,
                longest_lease: *longest_lease,
            };
            claim(now, record, &claimant)
        }
        Operation::Extend { token, lease } => extend(now, record, *token, *lease),
        Operation::Complete {
            token,
            fingerprint,
            result,
            retention,
        } => {
            let completed = Record {
                expires_at: now + *retention,
                fingerprint: *fingerprint,
                state: State::Completed {
                    by: token.tag(),
                    result: result.clone(),
                },
            };
            complete(record, *token, completed)
        }
        Operation::Release {
            token,
            delay,
            end,
            reason,
        } => {
            let released = Release {
                due: now + *delay,
                end: *end,
                reason: cut_reason(reason),
            };
            release(record, *token, released)
        }
        Operation::Fail {
            token,
            reason,
            retention,
        } => fail(record, *token, now + *retention, cut_reason(reason)),
        Operation::HandOver { by } => hand_over(record, *by),
        Operation::Reopen { expected } => reopen(now, record, expected),
    }
}

/// The arguments of a claim.
struct Claimant {
    token: Token,
    lease: Duration,
    fingerprint: Option<Fingerprint>,
    fenced: bool,
    longest_lease: Duration,
}

/// The arguments of a release, as the record will hold them.
struct Release {
    due: StoreTime,
    end: ReleaseCause,
    reason: String,
}

/// What the next attempt takes over from an earlier one.
#[derive(Default)]
struct Earlier {
    attempt: u8,
    recovery: Recovery,
    fencing_token: Option<FencingToken>,
    reopened: bool,
}

fn claim(now: StoreTime, record: Option<Record>, claimant: &Claimant) -> (Option<Record>, Reply) {
    let Some(record) = record else {
        return grant(now, claimant, &Earlier::default(), false);
    };
    let uncompared = match (record.fingerprint, claimant.fingerprint) {
        (theirs, ours) if theirs == ours => false,
        (Some(theirs), Some(ours)) if theirs.specification() == ours.specification() => {
            return (
                Some(record),
                Reply::Verdict {
                    verdict: Verdict::Mismatch,
                    uncompared: false,
                },
            );
        }
        _ => true,
    };
    let verdict = match (&record.state, record.protected_for(now)) {
        // A repeat by the owner: the first reply was lost, or the lease expired and no other owner
        // took over.
        (
            &State::Pending {
                token,
                attempt,
                recovery,
                fencing_token,
            },
            _,
        ) if token == claimant.token => Verdict::Granted(Grant {
            attempt,
            recovery,
            fencing_token,
            reopened: false,
        }),
        (State::Pending { .. }, Some(_)) => {
            return busy(now, record, claimant.longest_lease, uncompared);
        }
        (State::Released { .. }, Some(retry_in)) => Verdict::Busy { retry_in },
        (
            &State::Pending {
                attempt,
                fencing_token,
                ..
            },
            None,
        ) => {
            let earlier = Earlier {
                attempt,
                recovery: Recovery::Takeover,
                fencing_token,
                reopened: false,
            };
            return grant(now, claimant, &earlier, uncompared);
        }
        (
            &State::Released {
                by,
                attempt,
                recovery,
                fencing_token,
                ..
            },
            None,
        ) => {
            // A reopen has no owner and resets the recovery.
            let reopened = by == TokenTag::NONE && !recovery.recovered();
            return grant(
                now,
                claimant,
                &Earlier {
                    attempt,
                    recovery,
                    fencing_token,
                    reopened,
                },
                uncompared,
            );
        }
        (State::Completed { result, .. }, _) => Verdict::Completed {
            result: result.clone(),
        },
        (
            State::Failed {
                reason,
                handed_over,
                by,
                ..
            },
            _,
        ) => Verdict::Failed {
            reason: reason.clone(),
            handed_over: *handed_over,
            by: *by,
        },
    };
    (
        Some(record),
        Reply::Verdict {
            verdict,
            uncompared,
        },
    )
}

/// The reply while another owner holds the lease.
///
/// What is left of a lease is never more than the longest lease of the scope, unless the store's
/// clock has gone back. Then the rest is cut, because a dead owner would keep the key until the
/// clock has caught up. An owner that is alive loses nothing: it measures its lease on its own
/// clock, and its next heartbeat extends what is left.
fn busy(
    now: StoreTime,
    mut record: Record,
    longest_lease: Duration,
    uncompared: bool,
) -> (Option<Record>, Reply) {
    record.expires_at = record
        .expires_at
        .min(now + longest_lease.saturating_add(TAIL));
    // At the end of time, nothing is left to wait for.
    let retry_in = record
        .protected_for(now)
        .unwrap_or(Duration::from_millis(1));
    (
        Some(record),
        Reply::Verdict {
            verdict: Verdict::Busy { retry_in },
            uncompared,
        },
    )
}

fn grant(
    now: StoreTime,
    claimant: &Claimant,
    earlier: &Earlier,
    uncompared: bool,
) -> (Option<Record>, Reply) {
    let attempt = earlier.attempt.saturating_add(1);
    let recovery = earlier.recovery;
    let fencing_token = claimant
        .fenced
        .then(|| next_fencing_token(now, earlier.fencing_token));
    let record = Record {
        expires_at: now + claimant.lease + TAIL,
        fingerprint: claimant.fingerprint,
        state: State::Pending {
            token: claimant.token,
            attempt,
            recovery,
            fencing_token,
        },
    };
    let verdict = Verdict::Granted(Grant {
        attempt,
        recovery,
        fencing_token,
        reopened: earlier.reopened,
    });
    (
        Some(record),
        Reply::Verdict {
            verdict,
            uncompared,
        },
    )
}

/// The next fencing token: greater than `last`, and at least the clock in microseconds.
///
/// If the store has lost `last`, the clock alone keeps the token growing.
fn next_fencing_token(now: StoreTime, last: Option<FencingToken>) -> FencingToken {
    let after_last = last.map_or(0, |FencingToken(last)| last.saturating_add(1));
    FencingToken(after_last.max(now.micros()))
}

fn extend(
    now: StoreTime,
    record: Option<Record>,
    token: Token,
    lease: Duration,
) -> (Option<Record>, Reply) {
    match record {
        Some(mut record) if owns(&record, token) => {
            record.expires_at = record.expires_at.max(now + lease + TAIL);
            (Some(record), Reply::Applied { recreated: false })
        }
        // A heartbeat that arrives after the end of its own attempt is not a lost lease.
        Some(record) if ended_by(&record, token) => {
            (Some(record), Reply::Applied { recreated: false })
        }
        other => (other, Reply::NotOwner),
    }
}

fn complete(record: Option<Record>, token: Token, completed: Record) -> (Option<Record>, Reply) {
    match record {
        // The effect has happened. Without a record it would happen again.
        None => (Some(completed), Reply::Applied { recreated: true }),
        Some(record) if owns(&record, token) => {
            let fingerprint = record.fingerprint;
            (
                Some(Record {
                    fingerprint,
                    ..completed
                }),
                Reply::Applied { recreated: false },
            )
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
            state:
                State::Pending {
                    token: owner,
                    attempt,
                    recovery,
                    fencing_token,
                },
            ..
        }) if owner == token => {
            let state = State::Released {
                by: token.tag(),
                attempt: if released.end.counts() {
                    attempt
                } else {
                    attempt.saturating_sub(1)
                },
                recovery: match (released.end, recovery) {
                    (ReleaseCause::Discarded, _) => Recovery::Earlier,
                    (ReleaseCause::Failed | ReleaseCause::Interrupted, Recovery::Takeover) => {
                        Recovery::Earlier
                    }
                    (_, recovery) => recovery,
                },
                fencing_token,
                reason: released.reason,
            };
            let expires_at = released.due + TAIL;
            (
                Some(Record {
                    expires_at,
                    fingerprint,
                    state,
                }),
                Reply::Applied { recreated: false },
            )
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
        Some(Record {
            fingerprint,
            state:
                State::Pending {
                    token: owner,
                    attempt,
                    ..
                },
            ..
        }) if owner == token => {
            let state = State::Failed {
                by: token.tag(),
                attempt,
                handed_over: false,
                reason,
            };
            (
                Some(Record {
                    expires_at,
                    fingerprint,
                    state,
                }),
                Reply::Applied { recreated: false },
            )
        }
        Some(record) if matches!(record.state, State::Failed { by, .. } if by == token.tag()) => {
            (Some(record), Reply::Applied { recreated: false })
        }
        other => (other, Reply::NotOwner),
    }
}

fn hand_over(mut record: Option<Record>, of: TokenTag) -> (Option<Record>, Reply) {
    let reply = match record.as_mut().map(|record| &mut record.state) {
        Some(State::Failed {
            by, handed_over, ..
        }) if *by == of => {
            *handed_over = true;
            Reply::Applied { recreated: false }
        }
        _ => Reply::NotOwner,
    };
    (record, reply)
}

fn reopen(now: StoreTime, record: Option<Record>, expected: &Record) -> (Option<Record>, Reply) {
    match record {
        Some(record) if record.same_content(expected) => {
            let fencing_token = match record.state {
                State::Pending { fencing_token, .. } | State::Released { fencing_token, .. } => {
                    fencing_token
                }
                State::Completed { .. } | State::Failed { .. } => None,
            };
            let reopened = Record {
                // One millisecond in the past, so the retry is due at once.
                expires_at: StoreTime::from_millis((now + TAIL).millis().saturating_sub(1)),
                fingerprint: None,
                state: State::Released {
                    by: TokenTag::NONE,
                    attempt: 0,
                    recovery: Recovery::None,
                    fencing_token,
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
mod tests;
