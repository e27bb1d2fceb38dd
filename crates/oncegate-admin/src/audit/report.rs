//! The report of an audit.

use std::collections::{BTreeMap, BTreeSet};

use oncegate_core::key::{Scope, StoreKey};
use serde::Serialize;

use super::row::{RowPlace, What};
use super::topics::Topics;
use super::verdict::{AuditVerdict, AuditedEvent, Given};

/// The findings of an audit, counted by event.
///
/// An event is all messages with one key, or one message without a key of its own. Each event, and
/// each effect that belongs to none, counts in exactly one of `ok`, `dead_lettered`, `in_flight`,
/// `lost`, `doubled`, `unexplained`, `without_effect`, `overdue` and `unreadable`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AuditReport {
    /// Messages of the window.
    pub messages: u64,
    /// Events among them.
    pub events: u64,
    /// Dead letters that were read.
    pub dead_letters: u64,
    /// Effects that were read.
    pub effects: u64,
    /// Events that were handled, with one effect if effects were given.
    pub ok: u64,
    /// Events of `ok` whose record the store has no longer, so that a replay would run them again.
    pub forgotten: u64,
    /// Events that were given up, and are in the dead letters.
    pub dead_lettered: u64,
    /// Events whose handler runs, whose retry waits, or that are not acknowledged yet.
    pub in_flight: u64,
    /// Acknowledged events without record, dead letter or effect; or given up, without a dead
    /// letter.
    pub lost: u64,
    /// Events with more than one effect.
    pub doubled: u64,
    /// Effects of no message of the window, counted by their key, and events that have an effect
    /// although they were given up.
    pub unexplained: u64,
    /// Completed events without an effect.
    pub without_effect: u64,
    /// Acknowledged events whose attempt ended without success, and whose next one is due.
    pub overdue: u64,
    /// Events whose key holds something else than a record.
    pub unreadable: u64,
    /// The first findings of each kind, in the order of their positions.
    pub findings: Vec<AuditFinding>,
}

/// An event, or effect, that an operator must look at. It contains nothing of a payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AuditFinding {
    /// The kind of finding.
    pub verdict: AuditVerdict,
    /// The position of its first message, such as `orders/3@42`; of an effect without one, its
    /// number: `effect 7`.
    pub origin: String,
    /// The store key, if the event has a message with one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The idempotency key of its effects, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// The number of its messages in the window.
    pub messages: u64,
    /// The number of its effects.
    pub effects: u64,
    /// The reason, as text.
    pub why: &'static str,
}

impl AuditReport {
    /// Returns the number of events and effects that an operator must look at.
    #[must_use]
    pub fn found(&self) -> u64 {
        self.lost
            + self.doubled
            + self.unexplained
            + self.without_effect
            + self.overdue
            + self.unreadable
    }
}

/// Counts events, and keeps the first findings of each kind.
#[derive(Debug)]
pub(super) struct Tally {
    report: AuditReport,
    findings: BTreeMap<AuditVerdict, BTreeSet<KeptFinding>>,
    findings_most: usize,
}

/// A finding, ordered by its position.
#[derive(Debug)]
struct KeptFinding {
    /// `true` for an effect without a message. Such effects come last.
    is_stray: bool,
    place: RowPlace,
    event: AuditedEvent,
    why: &'static str,
}

impl Tally {
    pub(super) fn new(report: AuditReport, findings_most: usize) -> Self {
        Self {
            report,
            findings: BTreeMap::new(),
            findings_most,
        }
    }

    pub(super) fn count(&mut self, event: AuditedEvent, given: Given) {
        let Some((verdict, why)) = event.judge(given) else {
            return;
        };
        let report = &mut self.report;
        report.events += u64::from(event.first.is_some());
        let counter = match verdict {
            AuditVerdict::Lost => &mut report.lost,
            AuditVerdict::Doubled => &mut report.doubled,
            AuditVerdict::Unexplained => &mut report.unexplained,
            AuditVerdict::WithoutEffect => &mut report.without_effect,
            AuditVerdict::Overdue => &mut report.overdue,
            AuditVerdict::Unreadable => &mut report.unreadable,
            AuditVerdict::InFlight => &mut report.in_flight,
            AuditVerdict::DeadLettered => &mut report.dead_lettered,
            AuditVerdict::Ok => {
                report.forgotten += u64::from(event.is_forgotten());
                &mut report.ok
            }
        };
        *counter += 1;
        let first = event.first.or(event.first_effect);
        if verdict.is_finding()
            && let Some(first) = first
        {
            let kept = self.findings.entry(verdict).or_default();
            kept.insert(KeptFinding {
                is_stray: event.first.is_none(),
                place: first.place,
                event,
                why,
            });
            if kept.len() > self.findings_most {
                kept.pop_last();
            }
        }
    }

    pub(super) fn finish(self, topics: &Topics, scope: &Scope) -> AuditReport {
        let Self {
            mut report,
            findings,
            ..
        } = self;
        let all = findings
            .into_iter()
            .flat_map(|(verdict, kept)| kept.into_iter().map(move |one| (verdict, one)));
        report.findings = all
            .map(|(verdict, kept)| kept.show(verdict, topics, scope))
            .collect();
        report
    }
}

impl KeptFinding {
    fn show(&self, verdict: AuditVerdict, topics: &Topics, scope: &Scope) -> AuditFinding {
        let AuditedEvent {
            first,
            first_effect,
            messages,
            effects,
            ..
        } = self.event;
        let own = first
            .filter(|row| matches!(row.what, What::Message(found) if found.state.is_of_message()));
        let is_identified =
            own.is_some() || first_effect.is_some_and(|row| row.place.topic == RowPlace::UUID);
        let event = first.or(first_effect).map_or(0, |row| row.event);
        AuditFinding {
            verdict,
            origin: match first {
                Some(row) => topics.show(row.place),
                None => format!("effect {}", self.place.offset),
            },
            key: own.map(|row| StoreKey::new(scope, row.digest).to_string()),
            idempotency_key: is_identified.then(|| oncegate_runtime::attempt::uuid(event)),
            messages,
            effects,
            why: self.why,
        }
    }
}

impl PartialEq for KeptFinding {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for KeptFinding {}

impl PartialOrd for KeptFinding {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for KeptFinding {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.is_stray, self.place).cmp(&(other.is_stray, other.place))
    }
}
