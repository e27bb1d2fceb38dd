//! The kinds of reply that a run reaches.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::record::{FencingToken, Record, Recovery, State};
use crate::rules::{Grant, Operation, Reply, Verdict};

/// The smallest planted fencing token. It is far ahead of any clock.
pub(super) const PLANTED_FENCING_TOKENS: u64 = 4_000_000_000_000_000;

/// The number of replies of each kind. A run in which a kind is missing proves little.
#[derive(Clone, Debug, Default)]
pub struct Reached(BTreeMap<&'static str, u64>);

/// Every kind of reply that should occur in a run.
const KINDS: &[&str] = &[
    "granted",
    "granted after a release",
    "granted after a reopen",
    "granted by takeover",
    "granted with recovery remembered",
    "granted with a takeover that was not started",
    "granted again to the same token",
    "granted as attempt 255",
    "granted a fencing token of the clock",
    "granted a fencing token ahead of the clock",
    "completed",
    "busy",
    "busy with a lease that was cut",
    "failed",
    "failed, handed over",
    "mismatch",
    "uncompared",
    "extend applied",
    "extend not owner",
    "complete applied",
    "complete recreated",
    "complete not owner",
    "release applied",
    "release not owner",
    "fail applied",
    "fail not owner",
    "hand over applied",
    "hand over not owner",
    "reopen applied",
    "reopen not owner",
    "resolve applied",
    "resolve not owner",
];

impl Reached {
    /// The kinds that never occurred.
    pub fn missing(&self) -> Vec<&'static str> {
        KINDS
            .iter()
            .copied()
            .filter(|kind| !self.0.contains_key(kind))
            .collect()
    }

    pub(super) fn count(&mut self, kind: &'static str) {
        *self.0.entry(kind).or_default() += 1;
    }
}

/// The kinds of reply that occurred in a step.
pub(super) fn kinds(
    before: Option<&Record>,
    operation: &Operation,
    reply: &Reply,
) -> Vec<&'static str> {
    let (applied, not_owner) = match operation {
        Operation::Claim { longest_lease, .. } => {
            let mut kinds = verdict_kinds(before, reply);
            // The model's leases end in odd milliseconds, unless one was cut just now.
            let cut = Verdict::Busy {
                retry_in: longest_lease.saturating_add(Duration::from_millis(1)),
            };
            if matches!(reply, Reply::Verdict { verdict, .. } if *verdict == cut) {
                kinds.push("busy with a lease that was cut");
            }
            return kinds;
        }
        Operation::Extend { .. } => ("extend applied", "extend not owner"),
        Operation::Complete { .. } => ("complete applied", "complete not owner"),
        Operation::Release { .. } => ("release applied", "release not owner"),
        Operation::Fail { .. } => ("fail applied", "fail not owner"),
        Operation::HandOver { .. } => ("hand over applied", "hand over not owner"),
        Operation::Reopen { .. } => ("reopen applied", "reopen not owner"),
        Operation::Resolve { .. } => ("resolve applied", "resolve not owner"),
    };
    vec![match reply {
        Reply::Applied { recreated: true } => "complete recreated",
        Reply::Applied { recreated: false } => applied,
        Reply::NotOwner | Reply::Verdict { .. } => not_owner,
    }]
}

fn verdict_kinds(before: Option<&Record>, reply: &Reply) -> Vec<&'static str> {
    let Reply::Verdict {
        verdict,
        uncompared,
    } = reply
    else {
        return Vec::new();
    };
    let mut kinds = if *uncompared {
        vec!["uncompared"]
    } else {
        Vec::new()
    };
    match verdict {
        Verdict::Granted(Grant {
            attempt,
            recovery,
            fencing_token,
            reopened,
        }) => {
            if *reopened {
                kinds.push("granted after a reopen");
            }
            kinds.push(match (before.map(|record| &record.state), recovery) {
                (
                    Some(State::Pending {
                        attempt: earlier, ..
                    }),
                    _,
                ) if earlier == attempt && *attempt < u8::MAX => "granted again to the same token",
                (Some(State::Released { .. }), Recovery::Takeover) => {
                    "granted with a takeover that was not started"
                }
                (_, Recovery::Takeover) => "granted by takeover",
                (_, Recovery::Earlier) => "granted with recovery remembered",
                (Some(State::Released { .. }), Recovery::None) => "granted after a release",
                (_, Recovery::None) => "granted",
            });
            if *attempt == u8::MAX {
                kinds.push("granted as attempt 255");
            }
            match fencing_token {
                Some(FencingToken(PLANTED_FENCING_TOKENS..)) => {
                    kinds.push("granted a fencing token ahead of the clock");
                }
                Some(_) => kinds.push("granted a fencing token of the clock"),
                None => {}
            }
        }
        Verdict::Completed { .. } => kinds.push("completed"),
        Verdict::Busy { .. } => kinds.push("busy"),
        Verdict::Failed {
            handed_over: false, ..
        } => kinds.push("failed"),
        Verdict::Failed {
            handed_over: true, ..
        } => kinds.push("failed, handed over"),
        Verdict::Mismatch => kinds.push("mismatch"),
    }
    kinds
}
