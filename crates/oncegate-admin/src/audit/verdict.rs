//! The verdict on one event: a pure function of its rows.

use serde::Serialize;

use super::row::{Found, RecordState, Row, What};

/// The rows of one event: a business event with all its deliveries, or one message without a usable
/// key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AuditedEvent {
    /// The first message.
    pub(super) first: Option<Row>,
    /// The first effect.
    pub(super) first_effect: Option<Row>,
    pub(super) messages: u64,
    pub(super) dead_letters: u64,
    pub(super) effects: u64,
    /// The latest state of the record, and whether any of the messages is acknowledged.
    found: Option<Found>,
}

/// The inputs of the audit besides messages and records.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Given {
    pub(super) dead_letters: bool,
    pub(super) effects: bool,
}

/// The verdict on an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AuditVerdict {
    /// The event was acknowledged, and there is no record, no dead letter and no effect of it; or
    /// it was given up, and there is no dead letter of it.
    Lost,
    /// The event has more than one effect.
    Doubled,
    /// An effect that belongs to no message of the window, or to one that was given up.
    Unexplained,
    /// The record says completed, and there is no effect.
    WithoutEffect,
    /// The event was acknowledged, an attempt of it ended without success, and no other has begun
    /// although one is due.
    Overdue,
    /// The store holds data under the event's key that is not a record.
    Unreadable,
    /// A handler runs, a retry waits, or it is not acknowledged yet.
    InFlight,
    /// The event was given up, and is in the dead letters.
    DeadLettered,
    /// The event was handled once.
    Ok,
}

impl AuditVerdict {
    /// Returns whether an operator must look at it.
    pub fn is_finding(self) -> bool {
        self < Self::InFlight
    }
}

impl AuditedEvent {
    pub(super) fn add(&mut self, row: Row) {
        match row.what {
            What::Message(found) => {
                self.first.get_or_insert(row);
                self.messages += 1;
                let before = self.found.unwrap_or(found);
                self.found = Some(Found {
                    state: before.state.max(found.state),
                    acknowledged: before.acknowledged || found.acknowledged,
                });
            }
            What::DeadLetter => self.dead_letters += 1,
            What::Effect => {
                self.first_effect.get_or_insert(row);
                self.effects += 1;
            }
        }
    }

    /// Returns whether it has an effect, and no record that would stop a second one.
    pub(super) fn is_forgotten(&self) -> bool {
        self.effects > 0
            && self
                .found
                .is_some_and(|found| found.state == RecordState::Missing)
    }

    /// The verdict, with the reason of a finding. `None` when there is neither a message nor an
    /// effect.
    pub(super) fn judge(&self, given: Given) -> Option<(AuditVerdict, &'static str)> {
        use AuditVerdict as V;
        let Some(Found {
            state,
            acknowledged,
        }) = self.found
        else {
            let stray = "its key belongs to no message of the window";
            return (self.effects > 0).then_some((V::Unexplained, stray));
        };
        if self.effects > 1 {
            return Some((V::Doubled, "it has more than one effect"));
        }
        Some(match state {
            RecordState::Unreadable => (
                V::Unreadable,
                "the store holds something else under its key",
            ),
            RecordState::Completed if given.effects && self.effects == 0 => (
                V::WithoutEffect,
                "its record says completed, and it has no effect",
            ),
            RecordState::Completed => (V::Ok, ""),
            RecordState::InProgress | RecordState::Waiting => (V::InFlight, ""),
            RecordState::Failed | RecordState::HandedOver if self.effects > 0 => (
                V::Unexplained,
                "it has an effect, although its record says failed",
            ),
            RecordState::HandedOver if !given.dead_letters => (V::DeadLettered, ""),
            _ if self.dead_letters > 0 && self.effects > 0 => (
                V::Unexplained,
                "it has an effect, although it is in the dead letters",
            ),
            _ if self.dead_letters > 0 => (V::DeadLettered, ""),
            RecordState::HandedOver => (
                V::Lost,
                "its record says that it is in the dead letters, and it is not there",
            ),
            RecordState::Missing if self.effects > 0 => (V::Ok, ""),
            _ if !acknowledged => (V::InFlight, ""),
            RecordState::Missing => (
                V::Lost,
                "there is no record, no dead letter and no effect of it",
            ),
            RecordState::Failed => (
                V::Lost,
                "its record says failed, and there is no dead letter of it",
            ),
            RecordState::Mismatched => (
                V::Lost,
                "its key belongs to a message with other content, and there is no dead letter of it",
            ),
            RecordState::NoKey => (
                V::Lost,
                "no key can be derived, and there is no dead letter of it",
            ),
            RecordState::Abandoned => (
                V::Overdue,
                "an attempt ended without an outcome, and its lease is over",
            ),
            RecordState::RetryDue => (
                V::Overdue,
                "an attempt failed or was interrupted, and its retry is due",
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::key::Digest;

    use super::super::row::RowPlace;
    use super::*;
    use AuditVerdict as V;

    const ALL: Given = Given {
        dead_letters: true,
        effects: true,
    };

    fn row(what: What) -> Row {
        Row {
            event: 1,
            what,
            place: RowPlace::default(),
            digest: Digest::from_bytes([0; 16]),
        }
    }

    fn event(
        states: &[RecordState],
        acknowledged: bool,
        dead_letters: u64,
        effects: u64,
    ) -> AuditedEvent {
        let mut event = AuditedEvent::default();
        for state in states {
            event.add(row(What::Message(Found {
                state: *state,
                acknowledged,
            })));
        }
        (0..dead_letters).for_each(|_| event.add(row(What::DeadLetter)));
        (0..effects).for_each(|_| event.add(row(What::Effect)));
        event
    }

    /// Every state that a record may have, with and without acknowledgement, dead letter and
    /// effect.
    #[test]
    fn each_combination_has_the_verdict_that_the_document_gives_it() {
        use RecordState as S;
        let [yes, no] = [true, false];
        for (state, acknowledged, letters, effects, expected) in [
            (S::Completed, yes, 0, 1, V::Ok),
            (S::Completed, no, 0, 1, V::Ok),
            (S::Completed, yes, 1, 1, V::Ok),
            (S::Completed, yes, 0, 0, V::WithoutEffect),
            (S::Completed, yes, 0, 2, V::Doubled),
            (S::Missing, yes, 0, 0, V::Lost),
            (S::Missing, no, 0, 0, V::InFlight),
            (S::Missing, yes, 1, 0, V::DeadLettered),
            (S::Missing, yes, 1, 1, V::Unexplained),
            (S::Missing, yes, 0, 1, V::Ok),
            (S::Missing, yes, 0, 2, V::Doubled),
            (S::HandedOver, yes, 1, 0, V::DeadLettered),
            (S::HandedOver, yes, 0, 0, V::Lost),
            (S::HandedOver, no, 0, 0, V::Lost),
            (S::HandedOver, yes, 1, 1, V::Unexplained),
            (S::Failed, yes, 1, 0, V::DeadLettered),
            (S::Failed, yes, 0, 0, V::Lost),
            (S::Failed, no, 0, 0, V::InFlight),
            (S::Failed, yes, 0, 1, V::Unexplained),
            (S::InProgress, yes, 0, 0, V::InFlight),
            (S::InProgress, yes, 0, 1, V::InFlight),
            (S::InProgress, yes, 1, 0, V::InFlight),
            (S::InProgress, no, 0, 2, V::Doubled),
            (S::Waiting, yes, 0, 0, V::InFlight),
            (S::Abandoned, yes, 0, 0, V::Overdue),
            (S::Abandoned, yes, 0, 1, V::Overdue),
            (S::Abandoned, no, 0, 1, V::InFlight),
            (S::RetryDue, yes, 0, 0, V::Overdue),
            (S::RetryDue, yes, 1, 0, V::DeadLettered),
            (S::RetryDue, no, 0, 0, V::InFlight),
            (S::NoKey, yes, 1, 0, V::DeadLettered),
            (S::NoKey, yes, 0, 0, V::Lost),
            (S::NoKey, no, 0, 0, V::InFlight),
            (S::Mismatched, yes, 1, 0, V::DeadLettered),
            (S::Mismatched, yes, 0, 0, V::Lost),
            (S::Unreadable, yes, 0, 1, V::Unreadable),
        ] {
            let judged = event(&[state], acknowledged, letters, effects).judge(ALL);
            let (verdict, why) = judged.unwrap();
            let case = format!(
                "{state:?}, acknowledged {acknowledged}, {letters} letters, {effects} effects"
            );
            assert_eq!(verdict, expected, "{case}");
            assert_eq!(verdict.is_finding(), !why.is_empty(), "{case}");
        }
    }

    #[test]
    fn what_was_not_given_is_not_missed() {
        use RecordState as S;
        let nothing = Given::default();
        assert_eq!(
            event(&[S::Completed], true, 0, 0).judge(nothing).unwrap().0,
            V::Ok
        );
        assert_eq!(
            event(&[S::HandedOver], true, 0, 0)
                .judge(nothing)
                .unwrap()
                .0,
            V::DeadLettered
        );
    }

    #[test]
    fn several_deliveries_are_one_event_with_the_latest_state() {
        use RecordState as S;
        let event = event(&[S::Missing, S::InProgress, S::Completed], true, 0, 1);
        assert_eq!((event.judge(ALL).unwrap().0, event.messages), (V::Ok, 3));
    }

    #[test]
    fn effects_and_dead_letters_of_other_messages() {
        assert_eq!(event(&[], true, 0, 3).judge(ALL).unwrap().0, V::Unexplained);
        assert!(
            event(&[], true, 1, 0).judge(ALL).is_none(),
            "it may be of a message before the window"
        );
    }
}
