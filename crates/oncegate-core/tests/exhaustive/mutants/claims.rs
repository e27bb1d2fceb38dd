//! Bugs of claims, leases and fencing tokens.

use oncegate_core::record::{FencingToken, Record, Recovery, State, StoreTime, TAIL};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict, apply};

use super::kept;

pub(super) fn claim_takes_completed(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    // A completed record expires sooner than a lease with its tail: read as a lease, it is over.
    match (op, kept(now, &record)) {
        (
            Operation::Claim { .. },
            Some(Record {
                state: State::Completed { .. },
                ..
            }),
        ) => apply(now, None, op),
        _ => apply(now, record, op),
    }
}

pub(super) fn claim_ignores_fingerprint(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let mut op = op.clone();
    if let (Operation::Claim { fingerprint, .. }, Some(record)) = (&mut op, kept(now, &record)) {
        *fingerprint = record.fingerprint;
    }
    apply(now, record, &op)
}

pub(super) fn completed_before_fingerprint(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    match kept(now, &record) {
        Some(Record {
            state: State::Completed { .. },
            ..
        }) => claim_ignores_fingerprint(now, record, op),
        _ => apply(now, record, op),
    }
}

fn later(now: StoreTime, ms: u64) -> StoreTime {
    StoreTime::from_micros(now.micros() + ms * 1_000)
}

/// The rules with another idea of when a lease is over.
fn claim_at(
    now: StoreTime,
    seen: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let pending = matches!(
        kept(now, &record),
        Some(Record {
            state: State::Pending { .. },
            ..
        })
    );
    if !pending || !matches!(op, Operation::Claim { .. }) {
        return apply(now, record, op);
    }
    let moved = apply(seen, record.clone(), op);
    let right = apply(now, record.clone(), op);
    if is_granted(&moved.1) == is_granted(&right.1) {
        return right;
    }
    if !is_granted(&moved.1) {
        return (record, moved.1);
    }
    let mut taken = moved;
    if let (Some(record), Operation::Claim { lease, .. }) = (&mut taken.0, op) {
        record.expires_at = now + *lease + TAIL;
    }
    taken
}

fn is_granted(reply: &Reply) -> bool {
    matches!(
        reply,
        Reply::Verdict {
            verdict: Verdict::Granted(_),
            ..
        }
    )
}

pub(super) fn lease_ends_early(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    claim_at(now, later(now, 1), record, op)
}

pub(super) fn lease_ends_late(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    claim_at(
        now,
        StoreTime::from_micros(now.micros() - 1_000),
        record,
        op,
    )
}

/// The rules with another fencing token in a fresh grant.
fn with_fencing_token(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
    fencing_token: impl Fn(Option<FencingToken>) -> FencingToken,
) -> (Option<Record>, Reply) {
    let last = match kept(now, &record).map(|record| &record.state) {
        Some(State::Pending { fencing_token, .. } | State::Released { fencing_token, .. }) => {
            *fencing_token
        }
        _ => None,
    };
    let (mut after, mut reply) = apply(now, record.clone(), op);
    let fresh = kept(now, &record) != after.as_ref();
    if let (
        Reply::Verdict {
            verdict:
                Verdict::Granted(Grant {
                    fencing_token: Some(given),
                    ..
                }),
            ..
        },
        true,
    ) = (&mut reply, fresh)
    {
        *given = fencing_token(last);
        if let Some(Record {
            state:
                State::Pending {
                    fencing_token: Some(written),
                    ..
                },
            ..
        }) = &mut after
        {
            *written = *given;
        }
    }
    (after, reply)
}

pub(super) fn fencing_token_stands(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    with_fencing_token(now, record, op, |last| {
        last.unwrap_or(FencingToken(now.micros()))
    })
}

pub(super) fn fencing_token_starts_over(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    with_fencing_token(now, record, op, |last| {
        FencingToken(last.map_or(1, |FencingToken(last)| last + 1))
    })
}

/// The rules with another grant after a takeover.
fn regrant(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
    change: impl Fn(&mut u8, &mut Recovery),
) -> (Option<Record>, Reply) {
    let (mut after, mut reply) = apply(now, record.clone(), op);
    let fresh = kept(now, &record) != after.as_ref();
    if let Reply::Verdict {
        verdict: Verdict::Granted(Grant {
            attempt, recovery, ..
        }),
        ..
    } = &mut reply
        && *recovery == Recovery::Takeover
        && fresh
    {
        change(attempt, recovery);
        if let Some(Record {
            state: State::Pending {
                attempt, recovery, ..
            },
            ..
        }) = &mut after
        {
            change(attempt, recovery);
        }
    }
    (after, reply)
}

pub(super) fn takeover_unflagged(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    regrant(now, record, op, |_, recovery| *recovery = Recovery::None)
}

pub(super) fn takeover_uncounted(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    regrant(now, record, op, |attempt, _| *attempt -= 1)
}
