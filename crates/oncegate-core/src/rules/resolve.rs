//! The end of a record by an operator who knows what has become of its message.

use super::operation::{Reply, Resolution, cut_reason};
use crate::record::{Record, State, StoreTime, Token};

/// The record after an operator has ended it.
///
/// Ports of the rules use it, too: the text of a record does not depend on where it is made.
pub fn resolved(
    expected: &Record,
    token: Token,
    resolution: &Resolution,
    expires_at: StoreTime,
) -> Record {
    let by = token.tag();
    let state = match resolution {
        Resolution::Completed { result } => State::Completed {
            by,
            result: result.clone(),
        },
        Resolution::Failed { reason } => State::Failed {
            by,
            attempt: match expected.state {
                State::Pending { attempt, .. }
                | State::Released { attempt, .. }
                | State::Failed { attempt, .. } => attempt,
                State::Completed { .. } => 0,
            },
            handed_over: false,
            reason: cut_reason(reason),
        },
    };
    Record {
        expires_at,
        fingerprint: expected.fingerprint,
        state,
    }
}

pub(super) fn resolve(
    now: StoreTime,
    record: Option<Record>,
    expected: &Record,
    resolved: Record,
) -> (Option<Record>, Reply) {
    const APPLIED: Reply = Reply::Applied { recreated: false };
    match record {
        Some(record)
            if record.same_content(expected) && is_unresolved(now, &record, &resolved.state) =>
        {
            (Some(resolved), APPLIED)
        }
        // A repeat, whose first reply was lost. Tags of two calls differ.
        Some(record) if is_end_of(&record.state, &resolved.state) => (Some(record), APPLIED),
        other => (other, Reply::NotOwner),
    }
}

/// Returns whether an operator may end the record so: no attempt runs, and it has no final state.
/// A failure may turn out to have succeeded; a completion is final.
fn is_unresolved(now: StoreTime, record: &Record, resolved: &State) -> bool {
    match record.state {
        // Compared at the time of the write: a heartbeat does not change the content.
        State::Pending { .. } => record.protected_for(now).is_none(),
        State::Released { .. } => true,
        State::Failed { .. } => matches!(resolved, State::Completed { .. }),
        State::Completed { .. } => false,
    }
}

fn is_end_of(state: &State, resolved: &State) -> bool {
    match (state, resolved) {
        (State::Completed { by, .. }, State::Completed { by: ours, .. })
        | (State::Failed { by, .. }, State::Failed { by: ours, .. }) => by == ours,
        _ => false,
    }
}
