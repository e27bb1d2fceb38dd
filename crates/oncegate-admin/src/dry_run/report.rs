//! The report of a dry run.

use std::collections::BTreeMap;

use serde::Serialize;

/// The number of examples of each kind in a [`ReplayReport`]: the first ones.
const EXAMPLES_MAX: usize = 10;

/// The effect of a replay, counted by message.
///
/// Each message counts in exactly one of `completed`, `would_run_again`, `in_progress`, `waiting`,
/// `failed_handed_over`, `failed_not_handed_over`, `mismatched`, `unreadable` and `undecodable`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ReplayReport {
    /// Messages examined.
    pub messages: u64,
    /// Distinct keys among them.
    pub distinct_keys: u64,
    /// `true` when `distinct_keys` is exact. Otherwise it is an estimate with a standard error of
    /// 0.81 %.
    pub distinct_keys_exact: bool,
    /// Completed messages: they would get the stored result.
    pub completed: u64,
    /// Messages for which a handler would run.
    pub would_run_again: u64,
    /// Distinct keys among those that would run again: a handler would run about as often.
    pub would_run_again_keys: u64,
    /// `true` when `would_run_again_keys` is exact.
    pub would_run_again_keys_exact: bool,
    /// Messages that would run again because the store has no record: none was ever made, or its
    /// retention is over.
    pub without_record: u64,
    /// Messages that would run again because an attempt ended without a report, and its lease is
    /// over.
    pub abandoned: u64,
    /// Messages that would run again because an attempt failed or was interrupted, and its retry is
    /// due.
    pub retry_due: u64,
    /// Messages for which a handler runs now.
    pub in_progress: u64,
    /// Messages whose attempt failed, and whose retry is not due yet.
    pub waiting: u64,
    /// Messages that were given up, and are durably in the dead letters.
    pub failed_handed_over: u64,
    /// Messages that were given up, and are not known to be in the dead letters: a replay would put
    /// them there.
    pub failed_not_handed_over: u64,
    /// Messages whose key is known with other content: a replay would put them into the dead
    /// letters. Only with a fingerprint.
    pub mismatched: u64,
    /// Messages whose key holds data that is not a record: they would wait until an operator acts.
    pub unreadable: u64,
    /// Messages without a valid key: a replay would put them into the dead letters.
    pub undecodable: u64,
    /// The undecodable ones by [kind](oncegate_core::key::KeyError::kind).
    pub undecodable_by_kind: BTreeMap<&'static str, u64>,
    /// Messages whose content was not compared, because record and message have no fingerprint of
    /// one specification. They are also counted in another field.
    pub uncompared: u64,
    /// The first messages of each unexpected kind.
    pub examples: Examples,
}

/// The first messages of each unexpected kind, at most ten of each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Examples {
    /// Messages of `would_run_again`.
    pub would_run_again: Vec<Example>,
    /// Messages of `failed_not_handed_over`.
    pub failed_not_handed_over: Vec<Example>,
    /// Messages of `mismatched`.
    pub mismatched: Vec<Example>,
    /// Messages of `unreadable`.
    pub unreadable: Vec<Example>,
    /// Messages of `undecodable`.
    pub undecodable: Vec<Example>,
}

/// A message, without anything of its payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Example {
    /// The position of the message, such as `orders/3@42`.
    pub origin: String,
    /// The store key, if one could be derived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The reason, as text.
    pub why: String,
}

impl ReplayReport {
    /// Messages for which a handler would run, runs now, or will run.
    #[must_use]
    pub fn handler_runs(&self) -> u64 {
        self.would_run_again + self.in_progress + self.waiting
    }

    /// Messages that a replay would put into the dead letters. Those that are there already are not
    /// included, except for the undecodable ones, which have no record.
    #[must_use]
    pub fn dead_letters(&self) -> u64 {
        self.failed_not_handed_over + self.mismatched + self.undecodable
    }

    /// Returns whether a replay would change nothing: no handler would run, no message would go to
    /// the dead letters, and the store can answer for every message.
    #[must_use]
    pub fn changes_nothing(&self) -> bool {
        self.handler_runs() + self.dead_letters() + self.unreadable == 0
    }

    /// The sum of the fields; always the number of examined messages.
    fn accounted(&self) -> u64 {
        self.completed
            + self.handler_runs()
            + self.dead_letters()
            + self.failed_handed_over
            + self.unreadable
    }
}

/// The result for one message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Completed,
    WithoutRecord,
    Abandoned,
    RetryDue,
    InProgress,
    Waiting,
    Failed { handed_over: bool },
    Mismatched,
    Unreadable(String),
    Undecodable { kind: &'static str, why: String },
}

impl Standing {
    /// The reason for which a message is unexpected; empty for an expected one.
    fn why(&self) -> &str {
        match self {
            Self::Completed
            | Self::InProgress
            | Self::Waiting
            | Self::Failed { handed_over: true } => "",
            Self::WithoutRecord => "the store has no record of it",
            Self::Abandoned => "an attempt ended without an outcome, and its lease is over",
            Self::RetryDue => "an attempt failed or was interrupted, and its retry is due",
            Self::Failed { handed_over: false } => {
                "it was given up, and is not known to be in the dead letters"
            }
            Self::Mismatched => "its key is known with other content",
            Self::Unreadable(why) | Self::Undecodable { why, .. } => why,
        }
    }
}

impl ReplayReport {
    /// Counts a message; `example` is only called when it is worth keeping.
    pub(super) fn count(&mut self, standing: &Standing, example: impl Fn(&str) -> Example) {
        self.messages += 1;
        let examples = &mut self.examples;
        let again = Some(&mut examples.would_run_again);
        let (counter, kept) = match standing {
            Standing::Completed => (&mut self.completed, None),
            Standing::WithoutRecord => (&mut self.without_record, again),
            Standing::Abandoned => (&mut self.abandoned, again),
            Standing::RetryDue => (&mut self.retry_due, again),
            Standing::InProgress => (&mut self.in_progress, None),
            Standing::Waiting => (&mut self.waiting, None),
            Standing::Failed { handed_over: true } => (&mut self.failed_handed_over, None),
            Standing::Failed { handed_over: false } => (
                &mut self.failed_not_handed_over,
                Some(&mut examples.failed_not_handed_over),
            ),
            Standing::Mismatched => (&mut self.mismatched, Some(&mut examples.mismatched)),
            Standing::Unreadable(_) => (&mut self.unreadable, Some(&mut examples.unreadable)),
            Standing::Undecodable { kind, .. } => {
                *self.undecodable_by_kind.entry(kind).or_default() += 1;
                (&mut self.undecodable, Some(&mut examples.undecodable))
            }
        };
        *counter += 1;
        if matches!(
            standing,
            Standing::WithoutRecord | Standing::Abandoned | Standing::RetryDue
        ) {
            self.would_run_again += 1;
        }
        if let Some(kept) = kept
            && kept.len() < EXAMPLES_MAX
        {
            kept.push(example(standing.why()));
        }
        debug_assert_eq!(
            self.accounted(),
            self.messages,
            "every message ends in one place"
        );
    }
}
