//! Bugs in the operation of an operator who ends a record.

use oncegate_core::record::{Record, State, StoreTime};
use oncegate_core::rules::{Operation, Reply, apply, resolved};

use super::{HELD, kept};

/// The operation as if its operator had seen the record that there is.
fn with_expected(op: &Operation, seen: &Record) -> Operation {
    let mut op = op.clone();
    if let Operation::Resolve { expected, .. } = &mut op {
        *expected = seen.clone();
    }
    op
}

pub(super) fn resolve_without_compare(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    match kept(now, &record) {
        Some(seen) => {
            let op = with_expected(op, seen);
            apply(now, record, &op)
        }
        None => apply(now, record, op),
    }
}

/// The record that a resolve writes which looks at nothing but the state's kind.
fn resolve_if(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
    is_taken: fn(&State) -> bool,
) -> (Option<Record>, Reply) {
    match (op, kept(now, &record)) {
        (
            Operation::Resolve {
                expected,
                token,
                resolution,
                retention,
            },
            Some(seen),
        ) if is_taken(&seen.state) && seen.same_content(expected) => (
            Some(resolved(expected, *token, resolution, now + *retention)),
            HELD,
        ),
        _ => apply(now, record, op),
    }
}

pub(super) fn resolve_of_running(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    resolve_if(now, record, op, |state| {
        matches!(state, State::Pending { .. })
    })
}

pub(super) fn resolve_of_completed(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    resolve_if(now, record, op, |state| {
        matches!(state, State::Completed { .. })
    })
}

pub(super) fn repeated_resolve_is_lost(
    now: StoreTime,
    record: Option<Record>,
    op: &Operation,
) -> (Option<Record>, Reply) {
    let (after, reply) = apply(now, record.clone(), op);
    let is_resolve = matches!(op, Operation::Resolve { .. });
    if is_resolve && reply == HELD && after == record {
        return (after, Reply::NotOwner);
    }
    (after, reply)
}
