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
//!
//! An operator's `resolve` leads to COMPLETED or FAILED from PENDING with its lease over and from
//! RELEASED, and from FAILED to COMPLETED.

mod operation;
mod resolve;

use std::time::Duration;

pub use self::operation::{Grant, Operation, ReleaseCause, Reply, Resolution, Verdict, cut_reason};
use self::resolve::resolve;
pub use self::resolve::resolved;
use crate::key::Fingerprint;
use crate::record::{FencingToken, Record, Recovery, State, StoreTime, TAIL, Token, TokenTag};

/// The reason that a reopened record holds.
pub const REOPENED: &str = "reopened";

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
        Operation::Resolve {
            expected,
            token,
            resolution,
            retention,
        } => {
            let resolved = resolved(expected, *token, resolution, now + *retention);
            resolve(now, record, expected, resolved)
        }
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

/// The state that the next attempt takes over from an earlier one.
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
    // Other content under the same key is refused in every state: no answer of the record is for
    // it.
    let differs = record.fingerprint != claimant.fingerprint;
    if differs && are_comparable(record.fingerprint, claimant.fingerprint) {
        return verdict(record, Verdict::Mismatch, false);
    }
    let uncompared = differs;
    // A repeat by the owner: the first reply was lost, or the lease expired and no other owner took
    // over.
    if let Some(grant) = grant_of(&record, claimant.token) {
        return verdict(record, Verdict::Granted(grant), uncompared);
    }
    let found = match (&record.state, record.protected_for(now)) {
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
            let earlier = Earlier {
                attempt,
                recovery,
                fencing_token,
                reopened,
            };
            return grant(now, claimant, &earlier, uncompared);
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
    verdict(record, found, uncompared)
}

/// Returns whether both sides have a fingerprint, and of the same specification. A mark tells that
/// contents differ, and refuses none.
fn are_comparable(theirs: Option<Fingerprint>, ours: Option<Fingerprint>) -> bool {
    theirs.zip(ours).is_some_and(|(theirs, ours)| {
        theirs.specification() == ours.specification() && !ours.is_mark()
    })
}

/// Returns the grant that the record's owner has got, if `token` is its token.
fn grant_of(record: &Record, token: Token) -> Option<Grant> {
    match record.state {
        State::Pending {
            token: owner,
            attempt,
            recovery,
            fencing_token,
        } if owner == token => Some(Grant {
            attempt,
            recovery,
            fencing_token,
            reopened: false,
        }),
        _ => None,
    }
}

/// The reply to a claim that leaves this record.
fn verdict(record: Record, verdict: Verdict, uncompared: bool) -> (Option<Record>, Reply) {
    let reply = Reply::Verdict {
        verdict,
        uncompared,
    };
    (Some(record), reply)
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
    verdict(record, Verdict::Busy { retry_in }, uncompared)
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
    let grant = Grant {
        attempt,
        recovery,
        fencing_token,
        reopened: earlier.reopened,
    };
    verdict(record, Verdict::Granted(grant), uncompared)
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
                // A takeover that was not started stays one: the next attempt must be told of it.
                recovery: match (released.end, recovery) {
                    (end, _) if end.is_without_outcome() => Recovery::Earlier,
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

#[cfg(test)]
mod tests;
