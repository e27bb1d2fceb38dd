//! Plausible bugs, each of which the check must find.

mod claims;
mod resolves;

use std::time::Duration;

use oncegate_core::record::{Record, Recovery, State, StoreTime, TAIL};
use oncegate_core::rules::{Operation, ReleaseCause, Reply, Verdict, apply};

use self::claims::{
    claim_ignores_fingerprint, claim_takes_completed, completed_before_fingerprint,
    fencing_token_stands, fencing_token_starts_over, lease_ends_early, lease_ends_late,
    takeover_uncounted, takeover_unflagged,
};
use self::resolves::{
    repeated_resolve_is_lost, resolve_of_completed, resolve_of_running, resolve_without_compare,
};
use crate::Rules;

const HELD: Reply = Reply::Applied { recreated: false };

/// Every mutant with its name.
pub(crate) const ALL: &[(&str, Rules)] = &[
    ("complete without a token compare", complete_without_compare),
    ("complete after a release", complete_after_release),
    ("complete overwrites the first result", complete_overwrites),
    (
        "complete of a lost claim is refused",
        complete_of_lost_claim_is_lost,
    ),
    ("release deletes the record", release_deletes),
    ("release without a token compare", release_without_compare),
    ("an uncounted release counts", uncounted_release_counts),
    ("extend recreates a record that expired", extend_recreates),
    ("extend without a token compare", extend_by_anyone),
    ("extend moves the end back", extend_shortens),
    (
        "claim takes a completed record whose time seems over",
        claim_takes_completed,
    ),
    ("claim ignores the fingerprint", claim_ignores_fingerprint),
    (
        "claim answers before it compares the fingerprint",
        completed_before_fingerprint,
    ),
    ("a lease is over at its last millisecond", lease_ends_early),
    ("a lease is over one millisecond late", lease_ends_late),
    ("a fencing token does not grow", fencing_token_stands),
    (
        "a fencing token is counted in the record alone",
        fencing_token_starts_over,
    ),
    ("the takeover is not flagged", takeover_unflagged),
    ("a release forgets the takeover", release_forgets_takeover),
    (
        "a takeover that was not started is over",
        a_takeover_that_was_not_started_is_over,
    ),
    ("a takeover does not count", takeover_uncounted),
    (
        "an attempt that was thrown away is not flagged",
        discarded_unflagged,
    ),
    ("pending expires with its lease", pending_expires_with_lease),
    ("a repeated claim gets Busy", repeat_is_busy),
    ("fail without a token compare", fail_without_compare),
    (
        "a repeated fail forgets the hand-over",
        fail_forgets_hand_over,
    ),
    ("hand-over without a tag compare", hand_over_without_compare),
    ("reopen does not compare", reopen_without_compare),
    ("a grant does not report a reopen", reopen_untold),
    ("resolve does not compare", resolve_without_compare),
    (
        "resolve takes a running attempt's record",
        resolve_of_running,
    ),
    ("resolve changes a completed record", resolve_of_completed),
    ("a repeated resolve is refused", repeated_resolve_is_lost),
    ("lost changes the record", lost_changes),
];

fn kept(now: StoreTime, record: &Option<Record>) -> Option<&Record> {
    record.as_ref().filter(|record| record.kept(now))
}

/// The record as if the caller owned it, if it is pending.
fn stolen(record: &Option<Record>, operation: &Operation) -> Option<Record> {
    let thief = match operation {
        Operation::Extend { token, .. }
        | Operation::Complete { token, .. }
        | Operation::Release { token, .. }
        | Operation::Fail { token, .. } => *token,
        _ => return record.clone(),
    };
    let mut record = record.clone();
    if let Some(Record {
        state: State::Pending { token, .. },
        ..
    }) = &mut record
    {
        *token = thief;
    }
    record
}

fn complete_without_compare(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    if matches!(op, Operation::Complete { .. }) {
        apply(now, stolen(&record, op), op)
    } else {
        apply(now, record, op)
    }
}

fn release_without_compare(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    if matches!(op, Operation::Release { .. }) {
        apply(now, stolen(&record, op), op)
    } else {
        apply(now, record, op)
    }
}

fn fail_without_compare(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    if matches!(op, Operation::Fail { .. }) {
        apply(now, stolen(&record, op), op)
    } else {
        apply(now, record, op)
    }
}

fn extend_by_anyone(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let Operation::Extend { .. } = op else {
        return apply(now, record, op);
    };
    let (after, reply) = apply(now, stolen(&record, op), op);
    // The owner is unchanged; only its lease was moved.
    match (after, record) {
        (Some(after), Some(before)) => (
            Some(Record {
                expires_at: after.expires_at,
                ..before
            }),
            reply,
        ),
        (after, _) => (after, reply),
    }
}

fn complete_after_release(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    match (op, kept(now, &record)) {
        (
            Operation::Complete { .. },
            Some(Record {
                state: State::Released { .. },
                ..
            }),
        ) => (apply(now, None, op).0, HELD),
        _ => apply(now, record, op),
    }
}

fn complete_overwrites(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    match (op, kept(now, &record)) {
        (
            Operation::Complete { .. },
            Some(Record {
                state: State::Completed { .. },
                ..
            }),
        ) => (apply(now, None, op).0, HELD),
        _ => apply(now, record, op),
    }
}

fn complete_of_lost_claim_is_lost(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    match (op, kept(now, &record)) {
        (Operation::Complete { .. }, None) => (None, Reply::NotOwner),
        _ => apply(now, record, op),
    }
}

fn release_deletes(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let (after, reply) = apply(now, record, op);
    if matches!(op, Operation::Release { .. }) && reply == HELD {
        (None, reply)
    } else {
        (after, reply)
    }
}

fn uncounted_release_counts(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let mut op = op.clone();
    if let Operation::Release { end, .. } = &mut op {
        *end = ReleaseCause::Failed;
    }
    apply(now, record, &op)
}

fn discarded_unflagged(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let mut op = op.clone();
    if let Operation::Release { end, .. } = &mut op {
        *end = match *end {
            ReleaseCause::Discarded => ReleaseCause::Failed,
            ReleaseCause::Abandoned => ReleaseCause::Interrupted,
            other => other,
        };
    }
    apply(now, record, &op)
}

fn extend_recreates(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    match (op, kept(now, &record)) {
        (&Operation::Extend { token, lease }, None) => {
            let claim = Operation::Claim {
                token,
                lease,
                fingerprint: None,
                fenced: false,
                longest_lease: Duration::MAX,
            };
            (apply(now, None, &claim).0, HELD)
        }
        _ => apply(now, record, op),
    }
}

fn extend_shortens(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let (mut after, reply) = apply(now, record, op);
    if let (Operation::Extend { lease, .. }, Some(after), &HELD) = (op, &mut after, &reply)
        && matches!(after.state, State::Pending { .. })
    {
        after.expires_at = now + *lease / 2 + TAIL;
    }
    (after, reply)
}

fn release_forgets_takeover(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let (mut after, reply) = apply(now, record, op);
    if let Some(Record {
        state: State::Released { recovery, .. },
        ..
    }) = &mut after
    {
        *recovery = Recovery::None;
    }
    (after, reply)
}

fn a_takeover_that_was_not_started_is_over(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let (mut after, reply) = apply(now, record, op);
    if let Some(Record {
        state:
            State::Released {
                recovery: recovery @ Recovery::Takeover,
                ..
            },
        ..
    }) = &mut after
    {
        *recovery = Recovery::Earlier;
    }
    (after, reply)
}

fn pending_expires_with_lease(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let over = kept(now, &record).is_some_and(|record| {
        matches!(record.state, State::Pending { .. }) && record.protected_for(now).is_none()
    });
    apply(now, record.filter(|_| !over), op)
}

fn repeat_is_busy(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let (after, reply) = apply(now, record.clone(), op);
    let granted = matches!(
        reply,
        Reply::Verdict {
            verdict: Verdict::Granted(_),
            ..
        }
    );
    if granted && kept(now, &record).is_some() && kept(now, &record) == after.as_ref() {
        let verdict = Verdict::Busy {
            retry_in: Duration::from_millis(1),
        };
        return (
            after,
            Reply::Verdict {
                verdict,
                uncompared: false,
            },
        );
    }
    (after, reply)
}

fn fail_forgets_hand_over(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let (mut after, reply) = apply(now, record, op);
    if let (
        Operation::Fail { .. },
        &HELD,
        Some(Record {
            state: State::Failed { handed_over, .. },
            ..
        }),
    ) = (op, &reply, &mut after)
    {
        *handed_over = false;
    }
    (after, reply)
}

fn hand_over_without_compare(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    match (op, kept(now, &record)) {
        (
            Operation::HandOver { .. },
            Some(Record {
                state: State::Failed { by, .. },
                ..
            }),
        ) => {
            let by = *by;
            apply(now, record, &Operation::HandOver { by })
        }
        _ => apply(now, record, op),
    }
}

fn reopen_without_compare(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    match (op, kept(now, &record)) {
        (Operation::Reopen { .. }, Some(seen)) => {
            let expected = seen.clone();
            apply(now, record, &Operation::Reopen { expected })
        }
        _ => apply(now, record, op),
    }
}

fn reopen_untold(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let (after, mut reply) = apply(now, record, op);
    if let Reply::Verdict {
        verdict: Verdict::Granted(grant),
        ..
    } = &mut reply
    {
        grant.reopened = false;
    }
    (after, reply)
}

fn lost_changes(now: StoreTime, record: Option<Record>, op: &Operation) -> (Option<Record>, Reply) {
    let (mut after, reply) = apply(now, record, op);
    if let (Reply::NotOwner, Some(record)) = (&reply, &mut after) {
        record.expires_at = record.expires_at.max(now + TAIL + Duration::from_millis(9));
    }
    (after, reply)
}
