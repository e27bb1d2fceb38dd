//! Decides whether a store's answers about one key could have come from the rules, applied one by
//! one.
//!
//! A search in the manner of Wing and Gong: each call took effect at one moment between its line
//! and that of its answer, or, where no answer came, at any later moment or never. The rules are
//! `apply` itself. What the store's clock showed is not known, so a lease counts as over or
//! not as the answer needs it, but never as over before its time has passed.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use oncegate_core::record::{FencingToken, Record, State, StoreTime, TAIL, Token};
use oncegate_core::rules::{Operation, Reply, apply};

use super::calls::KeyCall;
use super::operation::{Op, StoreAnswer};

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Explanation {
    /// An order of the calls that explains every answer.
    Order,
    /// There is none.
    Nothing,
    /// The search was given up.
    Undecided,
}

/// Maximum number of states that a search visits.
const MOST_STATES: usize = 300_000;
/// A store reads its clock once for several calls, and may do so before it is given the processor.
const CLOCK_LEEWAY_US: u64 = 150_000;
/// The store's time in the model. Time does not pass; the model ends leases itself. The value is
/// early, because a fencing token that no call has seen must be smaller than those that follow.
const NOW: StoreTime = StoreTime::from_millis(1);

/// The state of the store at some moment of an order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Model {
    record: Option<Record>,
    /// No earlier than this can a lease or a delay be over.
    protected_until_us: u64,
}

/// Searches for an order that explains every answer. The calls stand in the order of their lines.
pub(super) fn explain(calls: &[KeyCall]) -> Explanation {
    let mut search = Search {
        calls,
        seen: HashSet::new(),
    };
    search.go(&mut vec![false; calls.len()], &Model::default())
}

struct Search<'a> {
    calls: &'a [KeyCall],
    seen: HashSet<u64>,
}

impl Search<'_> {
    fn go(&mut self, done: &mut Vec<bool>, model: &Model) -> Explanation {
        // A call that was invoked after this line cannot have come first.
        let first_answer = self
            .calls
            .iter()
            .zip(done.iter())
            .filter(|(_, done)| !**done)
            .filter_map(|(call, _)| call.answered)
            .min();
        let Some(first_answer) = first_answer else {
            return Explanation::Order;
        };
        let mut state = DefaultHasher::new();
        (&*done, model).hash(&mut state);
        if !self.seen.insert(state.finish()) {
            return Explanation::Nothing;
        }
        if self.seen.len() > MOST_STATES {
            return Explanation::Undecided;
        }
        let calls = self.calls;
        for (index, call) in calls.iter().enumerate() {
            if done.get(index) != Some(&false) || call.invoked > first_answer {
                continue;
            }
            for next in model.after(call) {
                set(done, index, true);
                let found = self.go(done, &next);
                set(done, index, false);
                if found != Explanation::Nothing {
                    return found;
                }
            }
        }
        Explanation::Nothing
    }
}

fn set(done: &mut [bool], index: usize, value: bool) {
    if let Some(slot) = done.get_mut(index) {
        *slot = value;
    }
}

impl Model {
    /// The states that are possible after the call: none if its answer contradicts the rules.
    fn after(&self, call: &KeyCall) -> Vec<Self> {
        if call.op == Op::Forget {
            return vec![Self::default()];
        }
        if call.op == Op::Reopen {
            return vec![self.clone()];
        }
        if let Op::Resolve { .. } = call.op {
            return self.after_resolve(call);
        }
        // What is no operation explains nothing.
        let Some(operation) = call.op.operation() else {
            return Vec::new();
        };
        let over = self.over(call).into_iter();
        over.chain([self.record.clone()])
            .filter_map(|record| {
                let (after, reply) = apply(NOW, record.clone(), &operation);
                let after = agreed(record.as_ref(), after, &reply, call.answer.as_ref())?;
                let protected_until_us = self.protected_until(&operation, &reply, call);
                // A lease of the model has always just begun.
                Some(Self {
                    record: after.map(fresh),
                    protected_until_us,
                })
            })
            .collect()
    }

    /// The states after an operator's resolve: what the operator had read is not known.
    fn after_resolve(&self, call: &KeyCall) -> Vec<Self> {
        let is_held = call.answer.as_ref().map(StoreAnswer::is_held);
        let unchanged = (is_held != Some(true)).then(|| self.clone());
        let candidates = self.over(call).into_iter().chain([self.record.clone()]);
        let resolved = candidates.flatten().filter_map(|record| {
            let operation = call.op.resolve(&record)?;
            let (after, reply) = apply(NOW, Some(record), &operation);
            let is_applied = matches!(reply, Reply::Applied { .. }) && is_held != Some(false);
            is_applied.then(|| Self {
                record: after.map(fresh),
                protected_until_us: self.protected_until_us,
            })
        });
        unchanged.into_iter().chain(resolved).collect()
    }

    /// The record with its lease or delay over, if it can be by the time of the answer.
    fn over(&self, call: &KeyCall) -> Option<Option<Record>> {
        let record = self.record.as_ref()?;
        let waits = matches!(record.state, State::Pending { .. } | State::Released { .. });
        let latest = call.answered_at_us.unwrap_or(u64::MAX);
        let can_be = latest.saturating_add(CLOCK_LEEWAY_US) > self.protected_until_us;
        let just_over = StoreTime::from_millis((NOW + TAIL).millis() - 1);
        (waits && can_be).then(|| {
            Some(Record {
                expires_at: just_over,
                ..record.clone()
            })
        })
    }

    fn protected_until(&self, operation: &Operation, reply: &Reply, call: &KeyCall) -> u64 {
        let granted = matches!(
            StoreAnswer::of(reply),
            StoreAnswer::Granted { .. } | StoreAnswer::Held { recreated: false }
        );
        match operation {
            // The repeat of a claim renews nothing, so the lease that it reports may have begun
            // before.
            Operation::Claim { lease, token, .. } if granted && !self.is_claimed_by(*token) => {
                in_time(call, *lease)
            }
            // What comes after the end of its own attempt is held, and changes nothing.
            Operation::Extend { lease, token } if granted && self.is_claimed_by(*token) => {
                self.protected_until_us.max(in_time(call, *lease))
            }
            Operation::Release { delay, token, .. } if granted && self.is_claimed_by(*token) => {
                in_time(call, *delay)
            }
            _ => self.protected_until_us,
        }
    }

    fn is_claimed_by(&self, owner: Token) -> bool {
        self.record.as_ref().and_then(token_of) == Some(owner)
    }
}

/// Every record of the same content is the same to the search.
/// The time of the machine's clock that is this long after the call.
fn in_time(call: &KeyCall, time: Duration) -> u64 {
    call.invoked_at_us
        .saturating_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

fn fresh(record: Record) -> Record {
    Record {
        expires_at: NOW + TAIL + Duration::from_secs(1),
        ..record
    }
}

/// The record after the operation, if the rules' reply is the answer that was seen.
fn agreed(
    before: Option<&Record>,
    mut after: Option<Record>,
    reply: &Reply,
    seen: Option<&StoreAnswer>,
) -> Option<Option<Record>> {
    let Some(seen) = seen else { return Some(after) };
    let said = StoreAnswer::of(reply);
    let same = match (&said, seen) {
        (StoreAnswer::Busy { .. }, StoreAnswer::Busy { .. }) => true,
        (
            StoreAnswer::Granted {
                attempt,
                takeover,
                recovered,
                ..
            },
            StoreAnswer::Granted {
                attempt: attempt_seen,
                takeover: takeover_seen,
                recovered: recovered_seen,
                ..
            },
        ) => (attempt, takeover, recovered) == (attempt_seen, takeover_seen, recovered_seen),
        (said, seen) => said == seen,
    };
    if !same {
        return None;
    }
    // Fencing tokens are made of the store's clock: known is only that they grow, and that a repeat
    // has the same.
    if let (
        StoreAnswer::Granted {
            fencing_token: Some(seen),
            ..
        },
        Some(record),
    ) = (seen, &mut after)
    {
        let last = before.and_then(fencing_token_of);
        let repeated = before.and_then(token_of) == token_of(record);
        let State::Pending { fencing_token, .. } = &mut record.state else {
            return None;
        };
        if last.is_some_and(|last| *seen < last || (*seen == last && !repeated)) {
            return None;
        }
        *fencing_token = Some(FencingToken(*seen));
    }
    Some(after)
}

fn fencing_token_of(record: &Record) -> Option<u64> {
    match record.state {
        State::Pending { fencing_token, .. } | State::Released { fencing_token, .. } => {
            fencing_token.map(|FencingToken(number)| number)
        }
        State::Completed { .. } | State::Failed { .. } => None,
    }
}

fn token_of(record: &Record) -> Option<Token> {
    match record.state {
        State::Pending { token, .. } => Some(token),
        _ => None,
    }
}
