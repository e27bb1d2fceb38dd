//! The evidence that a run has left behind, and the judge's report on it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::history::{EffectName, Entry};

/// A message that was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProducedMessage {
    /// The position of the message, as [`Origin`](oncegate_runtime::Origin) writes it:
    /// `orders/3@42`.
    pub origin: String,
    /// The effect that it asks for.
    pub effect: EffectName,
    /// The store key of the message; `None` when none can be derived.
    pub key: Option<String>,
}

/// A commit of an offset, as the broker has written it down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffsetCommit {
    /// The partition.
    pub partition: i32,
    /// The offset of the first message that is not finished.
    pub offset: i64,
    /// The time, in milliseconds since 1970 on the clock that the history is written by.
    pub at_ms: i64,
}

/// The evidence of a run: the history, and what witnesses outside of oncegate's code say.
///
/// Read it when every fault is over and nothing runs any more. What is left out is not judged.
///
/// A field that is at its default leaves out what it is needed for.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// The notes of the processes, in the order of the history's lines.
    pub entries: Vec<Entry>,
    /// Every message that was sent.
    pub produced: Vec<ProducedMessage>,
    /// The number of times that each effect has happened, as the downstream system or a ledger of
    /// the handler says.
    pub effects: BTreeMap<EffectName, u64>,
    /// The origins of the messages that are dead letters, as another client reads them.
    pub dead_letters: BTreeSet<String>,
    /// The topic of [`commits`](Self::commits).
    pub topic: String,
    /// Every commit of the consumer group, in the broker's order. None for a broker without
    /// offsets.
    pub commits: Vec<OffsetCommit>,
    /// The state of every record by its store key, as another client has read it from the store:
    /// `pending`, `released`, `completed` or `failed`. `None`: the store was not read.
    pub records: Option<BTreeMap<String, String>>,
    /// The number of attempts that a message may have; `None`: any number.
    pub max_attempts: Option<u32>,
    /// `true` if the store reports that it has lost records.
    pub notices_losses: bool,
    /// `true` if a claim waits for a transaction that holds its row, and is answered Busy after a
    /// while.
    pub locks_rows: bool,
    /// The things that did not come to an end although every fault was over, one sentence each.
    pub hung: Vec<String>,
}

/// An invariant that does not hold, and what shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenInvariant {
    /// The number of the invariant, such as `S5`; the [module](crate::promise) lists them.
    pub invariant: &'static str,
    /// The fact that shows it.
    pub what: String,
}

impl fmt::Display for BrokenInvariant {
    /// Writes the number and what shows it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}

/// The findings of the judge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PromiseReport {
    /// The invariants that do not hold. Empty: none was seen broken.
    pub broken: Vec<BrokenInvariant>,
    /// The events that the run has met, and how often: a run that did not meet its faults proves
    /// nothing about them.
    pub reached: BTreeMap<String, u64>,
    /// The number of second effects, explained or not.
    pub second_effects: u64,
}

impl PromiseReport {
    pub(super) fn found(&mut self, invariant: &'static str, what: String) {
        self.broken.push(BrokenInvariant { invariant, what });
    }

    pub(super) fn reach(&mut self, what: impl Into<String>) {
        *self.reached.entry(what.into()).or_default() += 1;
    }
}
