//! The order of the calls after a part of a batch has failed.
//!
//! A batch that fails as a whole is halved until the message is found that makes it fail: so it
//! gets its own reason, and costs the others no attempt. The algorithm is pure: it has no handler,
//! no store and no clock.

use crate::failure::{Advice, Failure};
use crate::observe::BatchCall;

/// The number of messages that must fail alone, one after another and without a call that succeeds,
/// until the cause is taken to be what all of them need.
const OUTAGE_AFTER: u32 = 3;

/// The number of times that the same messages are tried again together after a conflict with
/// another transaction. Then they are split: a shorter transaction has fewer conflicts.
const MOST_CONFLICTS: u32 = 3;

/// A batch while it runs: its parts that have not run yet.
#[derive(Debug)]
pub(super) struct Split<T> {
    /// The next one is the last.
    parts: Vec<Part<T>>,
    call: BatchCall,
    /// The number of messages that have failed alone since a call succeeded.
    failed_alone: u32,
}

/// The messages of one call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part<T> {
    pub(super) members: Vec<T>,
    /// The number of times that another transaction was in the way of these.
    pub(super) conflicts: u32,
}

/// The cause of a call that did not end its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// A message may be the cause.
    One,
    /// No message is the cause: each fails as if it had been alone.
    None,
    /// Others were, and have left: the rest runs again.
    Others,
    /// Another transaction was in the way of all of them.
    Conflict,
    /// Something that a message needs was in the way, which is no failure of it: a key that is
    /// held, or a lost connection.
    InTheWay,
}

/// The next step after a call that did not end its messages.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextStep<T> {
    /// The next part runs at once.
    GoOn,
    /// The next part runs after a back-off for this many conflicts.
    BackOff(u32),
    /// The failure is that of these messages. `is_cause`: the message was found by splitting its
    /// batch.
    Fail { members: Vec<T>, is_cause: bool },
    /// The same, and what all messages need seems to be down: the rest is not tried.
    Outage {
        members: Vec<T>,
        is_cause: bool,
        rest: Vec<T>,
    },
}

impl<T> Part<T> {
    fn of(members: Vec<T>) -> Self {
        Self {
            members,
            conflicts: 0,
        }
    }
}

impl<T> Split<T> {
    /// A batch of these messages, and of others that are called alone, after it.
    pub(super) fn new(together: Vec<T>, alone: Vec<T>) -> Self {
        let mut parts: Vec<Part<T>> = alone
            .into_iter()
            .rev()
            .map(|member| Part::of(vec![member]))
            .collect();
        if !together.is_empty() {
            parts.push(Part::of(together));
        }
        Self {
            parts,
            call: BatchCall::Gathered,
            failed_alone: 0,
        }
    }

    /// The messages of the next call, and what the call is for.
    pub(super) fn next_part(&mut self) -> Option<(Part<T>, BatchCall)> {
        Some((self.parts.pop()?, self.call))
    }

    /// Notes that a call has succeeded.
    pub(super) fn succeeded(&mut self) {
        self.failed_alone = 0;
    }

    /// Decides what follows after a call that has left these messages without an end.
    pub(super) fn failed(
        &mut self,
        Part {
            mut members,
            conflicts,
        }: Part<T>,
        blame: Blame,
    ) -> NextStep<T> {
        let is_alone = members.len() <= 1;
        match blame {
            Blame::Others => {
                self.call = BatchCall::Split;
                self.parts.push(Part::of(members));
                NextStep::GoOn
            }
            Blame::Conflict if !is_alone && conflicts < MOST_CONFLICTS => {
                let conflicts = conflicts + 1;
                self.parts.push(Part { members, conflicts });
                NextStep::BackOff(conflicts)
            }
            Blame::One | Blame::InTheWay | Blame::Conflict if !is_alone => {
                self.call = BatchCall::Split;
                let second = members.split_off(members.len() / 2);
                self.parts.extend([Part::of(second), Part::of(members)]);
                NextStep::GoOn
            }
            Blame::One | Blame::None | Blame::Conflict | Blame::InTheWay => {
                let is_cause = is_alone && self.call == BatchCall::Split;
                if is_alone && matches!(blame, Blame::One | Blame::None) {
                    self.failed_alone += 1;
                }
                if self.failed_alone < OUTAGE_AFTER {
                    return NextStep::Fail { members, is_cause };
                }
                let rest = self
                    .parts
                    .drain(..)
                    .rev()
                    .flat_map(|part| part.members)
                    .collect();
                NextStep::Outage {
                    members,
                    is_cause,
                    rest,
                }
            }
        }
    }
}

/// Returns what may be the cause of a failure of a whole batch.
pub(super) fn blame(failure: &Failure) -> Blame {
    match failure.advice() {
        Advice::GiveUp | Advice::Retry { after: None } => Blame::One,
        Advice::Retry { after: Some(_) }
        | Advice::Later { .. }
        | Advice::Unknown
        | Advice::NotRun => Blame::None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn next(split: &mut Split<u32>) -> Option<(Vec<u32>, BatchCall)> {
        split.next_part().map(|(part, call)| (part.members, call))
    }

    #[test]
    fn the_message_that_fails_its_batch_is_found_in_log_n_calls() {
        for poison in 0..100 {
            let mut split = Split::new((0..100).collect(), vec![]);
            let mut calls = 0;
            let mut succeeded = 0;
            while let Some((part, _)) = split.next_part() {
                calls += 1;
                if !part.members.contains(&poison) {
                    succeeded += part.members.len();
                    split.succeeded();
                    continue;
                }
                match split.failed(part, Blame::One) {
                    NextStep::GoOn => {}
                    NextStep::Fail { members, is_cause } => {
                        assert_eq!((members, is_cause), (vec![poison], true));
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert!(calls <= 15, "{calls} calls");
            assert_eq!(succeeded, 99);
        }
    }

    #[test]
    fn failures_alone_count_until_they_are_taken_for_an_outage() {
        let mut split = Split::new((0..8).collect(), vec![]);
        let mut failed = Vec::new();
        while let Some((part, _)) = split.next_part() {
            match split.failed(part, Blame::One) {
                NextStep::GoOn => {}
                NextStep::Fail { members, .. } => failed.extend(members),
                NextStep::Outage { members, rest, .. } => {
                    failed.extend(members);
                    assert_eq!(rest, [3, 4, 5, 6, 7], "in the order of the batch");
                }
                NextStep::BackOff(_) => panic!("no transaction was in the way"),
            }
        }
        assert_eq!(failed, [0, 1, 2]);
        assert_eq!(next(&mut split), None);
    }

    #[test]
    fn what_no_message_has_caused_is_not_split() {
        let mut split = Split::new(vec![1, 2], vec![3]);
        let (part, _) = split.next_part().unwrap();
        assert_eq!(
            split.failed(part, Blame::None),
            NextStep::Fail {
                members: vec![1, 2],
                is_cause: false
            }
        );
        assert_eq!(next(&mut split), Some((vec![3], BatchCall::Gathered)));
    }

    #[test]
    fn a_message_that_began_alone_is_not_found_by_a_split() {
        let mut split = Split::new(vec![], vec![3]);
        let (part, _) = split.next_part().unwrap();
        assert_eq!(
            split.failed(part, Blame::One),
            NextStep::Fail {
                members: vec![3],
                is_cause: false
            }
        );
    }

    #[test]
    fn the_rest_runs_again_without_those_that_failed() {
        let mut split = Split::new(vec![1, 2, 3], vec![]);
        let (part, _) = split.next_part().unwrap();
        let rest = Part {
            members: vec![1, 3],
            ..part
        };
        assert_eq!(split.failed(rest, Blame::Others), NextStep::GoOn);
        assert_eq!(next(&mut split), Some((vec![1, 3], BatchCall::Split)));
    }

    #[test]
    fn a_conflict_is_tried_again_together_and_then_split() {
        let mut split = Split::new(vec![1, 2], vec![]);
        for conflicts in 1..=MOST_CONFLICTS {
            let (part, _) = split.next_part().unwrap();
            assert_eq!(
                split.failed(part, Blame::Conflict),
                NextStep::BackOff(conflicts)
            );
        }
        let (part, _) = split.next_part().unwrap();
        assert_eq!(split.failed(part, Blame::Conflict), NextStep::GoOn);
        let halves = [next(&mut split), next(&mut split)];
        assert_eq!(
            halves,
            [
                Some((vec![1], BatchCall::Split)),
                Some((vec![2], BatchCall::Split))
            ]
        );
    }
}
