//! The calls of a history, key by key.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::history::{Entry, Occurrence, STORE_LOSS};
use super::operation::{Op, StoreAnswer};

/// Returns the store keys whose completion the store has confirmed to a process.
pub fn completed_keys(entries: &[Entry]) -> BTreeSet<String> {
    let calls = Calls::of(entries);
    let completed = calls
        .all()
        .filter(|(_, call)| call.completes() && call.is_held());
    completed.map(|(key, _)| key.to_owned()).collect()
}

/// A call on a key.
#[derive(Clone, Debug)]
pub(super) struct KeyCall {
    pub(super) op: Op,
    /// The lines of the call and of its answer.
    pub(super) invoked: usize,
    pub(super) answered: Option<usize>,
    pub(super) invoked_at_us: u64,
    pub(super) answered_at_us: Option<u64>,
    /// `None`: the outcome is unknown, or no worker made the call ([`Op::Forget`]).
    pub(super) answer: Option<StoreAnswer>,
}

/// The calls of every key, and the lines between which the store forgot everything.
pub(super) struct Calls {
    pub(super) by_key: BTreeMap<String, Vec<KeyCall>>,
    pub(super) forgotten: Vec<(usize, usize)>,
}

impl Calls {
    pub(super) fn of(entries: &[Entry]) -> Self {
        let mut all: Vec<(String, KeyCall)> = Vec::new();
        let mut open: HashMap<(u32, u64), usize> = HashMap::new();
        let (mut forgotten, mut forgets): (Vec<(usize, usize)>, Vec<KeyCall>) =
            (Vec::new(), Vec::new());
        for (line, entry) in entries.iter().enumerate() {
            match &entry.what {
                Occurrence::Invoke { call, key, op } => {
                    open.insert((entry.pid, *call), all.len());
                    all.push((key.clone(), KeyCall::begun(op.clone(), line, entry.at_us)));
                }
                Occurrence::Ok { call, answer } => {
                    if let Some(index) = open.remove(&(entry.pid, *call))
                        && let Some((_, call)) = all.get_mut(index)
                    {
                        call.answered = Some(line);
                        call.answered_at_us = Some(entry.at_us);
                        call.answer = Some(answer.clone());
                    }
                }
                Occurrence::Fail { call, .. } => {
                    // Not executed: as if the call had not been made.
                    if let Some(index) = open.remove(&(entry.pid, *call))
                        && let Some((key, _)) = all.get_mut(index)
                    {
                        key.clear();
                    }
                }
                Occurrence::FaultBegins { fault } if fault == STORE_LOSS => {
                    forgotten.push((line, usize::MAX));
                    forgets.push(KeyCall::begun(Op::Forget, line, entry.at_us));
                }
                Occurrence::FaultEnds { fault } if fault == STORE_LOSS => {
                    if let (Some(forget), Some(lines)) = (forgets.last_mut(), forgotten.last_mut())
                    {
                        lines.1 = line;
                        forget.answered = Some(line);
                        forget.answered_at_us = Some(entry.at_us);
                    }
                }
                _ => {}
            }
        }
        let mut by_key: BTreeMap<String, Vec<KeyCall>> = BTreeMap::new();
        for (key, call) in all.into_iter().filter(|(key, _)| !key.is_empty()) {
            by_key.entry(key).or_default().push(call);
        }
        for calls in by_key.values_mut() {
            calls.extend(forgets.iter().cloned());
            calls.sort_by_key(|call| call.invoked);
        }
        Self { by_key, forgotten }
    }

    pub(super) fn is_forgotten_between(&self, from: usize, to: usize) -> bool {
        self.forgotten
            .iter()
            .any(|(begun, ended)| *begun < to && *ended > from)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &KeyCall)> {
        self.by_key
            .iter()
            .flat_map(|(key, calls)| calls.iter().map(move |call| (key.as_str(), call)))
    }
}

impl KeyCall {
    fn begun(op: Op, line: usize, at_us: u64) -> Self {
        Self {
            op,
            invoked: line,
            answered: None,
            invoked_at_us: at_us,
            answered_at_us: None,
            answer: None,
        }
    }

    pub(super) fn is_granted(&self) -> bool {
        matches!(self.answer, Some(StoreAnswer::Granted { .. }))
    }

    pub(super) fn is_held(&self) -> bool {
        self.answer.as_ref().is_some_and(StoreAnswer::is_held)
    }

    pub(super) fn completes(&self) -> bool {
        self.op.completes()
    }

    /// Returns whether the call was answered before the other one was made.
    pub(super) fn is_before(&self, other: &Self) -> bool {
        self.answered.is_some_and(|line| line < other.invoked)
    }

    /// Busy, after a wait for longer than any lease: not because of a claim, which would have been
    /// over.
    pub(super) fn was_kept_waiting(&self) -> bool {
        let (Op::Claim { lease_ms, .. }, Some(StoreAnswer::Busy { retry_in_ms })) =
            (&self.op, &self.answer)
        else {
            return false;
        };
        let waited_us = self
            .answered_at_us
            .map_or(0, |answered| answered.saturating_sub(self.invoked_at_us));
        retry_in_ms > lease_ms && waited_us / 1_000 >= *retry_in_ms
    }
}
