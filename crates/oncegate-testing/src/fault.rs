//! The faults that a trial can inject.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::Serialize;

/// A fault that a trial injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Fault {
    /// The broker delivers every message again, after all were acknowledged.
    Redelivery,
    /// The producer sends an event again: with other volatile fields, another order of members, and
    /// trailing zeros.
    ProducerDuplicates,
    /// Messages of different partitions, duplicates among them, arrive in another order than they
    /// were sent.
    Reordering,
    /// Another consumer joins while a handler runs, and partitions move to it.
    Rebalance,
    /// Two consumers get the same message at the same time.
    TwoConsumers,
    /// The process is killed when the downstream service receives the call, before the effect.
    KillBeforeEffect,
    /// The process is killed after the effect, before it gets the answer.
    KillAfterEffect,
    /// The process is killed after the handler has returned, before the store has the completion.
    KillBeforeCompleted,
    /// The process is killed when the store has the completion, before the message is acknowledged.
    KillAfterCompleted,
    /// The process is killed after the effect, and the same event at another position is handled
    /// before the message comes again.
    KillThenDuplicate,
    /// The process stands still for longer than its lease, in the middle of a call, and then goes
    /// on.
    Freeze,
    /// The store loses all records while a handler runs, and another process runs the same message
    /// beside it.
    OverlappingRuns,
    /// The downstream service answers later than the lease would end without heartbeats.
    LateAnswer,
    /// The downstream service answers with status 500, and has no effect.
    Refused,
    /// The downstream service has no effect and does not answer, until the connection ends.
    NoAnswer,
    /// The downstream service has the effect, and its answer is lost.
    AnswerLost,
    /// The store is unavailable for a while.
    StoreOutage,
    /// Requests to the store and replies of it are lost, or arrive late.
    LostReplies,
    /// The store loses all records after a completion, and the broker delivers every message again.
    StoreLoss,
    /// The stored result of a message no longer decodes, as after an incompatible release of the
    /// handler, and the broker delivers every message again.
    UndecodableResults,
    /// A message that is JSON, whose values no handler expects.
    Poison,
    /// A message that is not JSON.
    Malformed,
}

impl Fault {
    /// Every fault, in the order in which a trial tries each by itself.
    pub const ALL: [Self; 22] = [
        Self::KillAfterEffect,
        Self::AnswerLost,
        Self::Refused,
        Self::Redelivery,
        Self::KillAfterCompleted,
        Self::KillBeforeEffect,
        Self::KillBeforeCompleted,
        Self::NoAnswer,
        Self::Freeze,
        Self::ProducerDuplicates,
        Self::KillThenDuplicate,
        Self::OverlappingRuns,
        Self::TwoConsumers,
        Self::StoreOutage,
        Self::LateAnswer,
        Self::StoreLoss,
        Self::UndecodableResults,
        Self::Rebalance,
        Self::Reordering,
        Self::LostReplies,
        Self::Poison,
        Self::Malformed,
    ];

    /// Returns the lower-case name for flags and reports: `kill-after-effect`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Redelivery => "redelivery",
            Self::ProducerDuplicates => "producer-duplicates",
            Self::Reordering => "reordering",
            Self::Rebalance => "rebalance",
            Self::TwoConsumers => "two-consumers",
            Self::KillBeforeEffect => "kill-before-effect",
            Self::KillAfterEffect => "kill-after-effect",
            Self::KillBeforeCompleted => "kill-before-completed",
            Self::KillAfterCompleted => "kill-after-completed",
            Self::KillThenDuplicate => "kill-then-duplicate",
            Self::Freeze => "freeze",
            Self::OverlappingRuns => "overlapping-runs",
            Self::LateAnswer => "late-answer",
            Self::Refused => "refused",
            Self::NoAnswer => "no-answer",
            Self::AnswerLost => "answer-lost",
            Self::StoreOutage => "store-outage",
            Self::LostReplies => "lost-replies",
            Self::StoreLoss => "store-loss",
            Self::UndecodableResults => "undecodable-results",
            Self::Poison => "poison",
            Self::Malformed => "malformed",
        }
    }

    /// Returns whether the fault begins with a call of the downstream service.
    pub(crate) const fn strikes_a_call(self) -> bool {
        matches!(
            self,
            Self::Rebalance
                | Self::TwoConsumers
                | Self::KillBeforeEffect
                | Self::KillAfterEffect
                | Self::KillThenDuplicate
                | Self::Freeze
                | Self::OverlappingRuns
                | Self::LateAnswer
                | Self::Refused
                | Self::NoAnswer
                | Self::AnswerLost
                | Self::StoreOutage
        )
    }

    /// Returns whether the fault is about what the downstream service answers, so that it needs a
    /// call of it.
    pub(crate) const fn concerns_the_answer(self) -> bool {
        matches!(
            self,
            Self::LateAnswer | Self::Refused | Self::NoAnswer | Self::AnswerLost
        )
    }

    /// Returns whether the fault begins with a completion in the store.
    pub(crate) const fn strikes_a_completion(self) -> bool {
        matches!(
            self,
            Self::KillBeforeCompleted
                | Self::KillAfterCompleted
                | Self::StoreLoss
                | Self::UndecodableResults
        )
    }

    /// Returns whether the fault has no beginning of its own, and happens again and again while a
    /// round lasts.
    pub(crate) const fn lasts_all_round(self) -> bool {
        !self.strikes_a_call() && !self.strikes_a_completion() && !matches!(self, Self::Redelivery)
    }

    /// Returns whether the fault concerns only the sample with whose call it begins. Others concern
    /// a process, or all of them.
    pub(crate) const fn concerns_one_sample(self) -> bool {
        matches!(
            self,
            Self::TwoConsumers
                | Self::LateAnswer
                | Self::Refused
                | Self::NoAnswer
                | Self::AnswerLost
                | Self::UndecodableResults
        )
    }

    /// Returns whether the fault needs a second consumer, which takes over.
    pub(crate) const fn needs_two_consumers(self) -> bool {
        matches!(
            self,
            Self::Freeze | Self::TwoConsumers | Self::OverlappingRuns
        )
    }

    /// Returns whether oncegate calls a handler again because of the fault, or another program does
    /// something twice.
    pub(crate) const fn explains_a_repetition(self) -> bool {
        !matches!(
            self,
            Self::ProducerDuplicates | Self::Reordering | Self::Poison | Self::Malformed
        )
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Fault {
    type Err = UnknownFault;

    /// Parses the name from [`as_str`](Self::as_str).
    fn from_str(name: &str) -> Result<Self, UnknownFault> {
        Self::ALL
            .into_iter()
            .find(|fault| fault.as_str() == name)
            .ok_or_else(UnknownFault::new)
    }
}

/// The error for a text that names no fault. Its text lists the names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it must be one of {names}")]
pub struct UnknownFault {
    names: String,
}

impl UnknownFault {
    fn new() -> Self {
        Self {
            names: Fault::ALL.map(Fault::as_str).join(", "),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_back() {
        for fault in Fault::ALL {
            assert_eq!(fault.to_string().parse(), Ok(fault));
            assert_eq!(serde_json::json!(fault), fault.as_str());
        }
        let error = "kill".parse::<Fault>().unwrap_err().to_string();
        assert!(error.contains("kill-after-effect"), "{error}");
    }

    #[test]
    fn each_fault_stands_once_in_the_list() {
        let distinct: std::collections::BTreeSet<Fault> = Fault::ALL.into_iter().collect();
        assert_eq!(distinct.len(), Fault::ALL.len());
    }
}
