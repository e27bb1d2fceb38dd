//! The judgement of programs whose calls of the store are not recorded: by what workers, ledger and
//! broker have seen.
//!
//! A second effect must be explained by a fault that the *first* run met: its worker hung, or it
//! fell into the time of a fault of its member or of the store. A signal to the process group and a
//! fault of the broker explain none.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use oncegate_testing::judge_effects;
use oncegate_testing::promise::{
    BrokenInvariant, EffectName, Entry, Evidence, Occurrence, PromiseReport, SUCCEEDED, judge,
};

use super::faults::{Fault, Place};
use super::stdio::{HUNG, LATE, PROGRAM_LEASE, TIME_LIMIT};
use crate::ledger::Effect;

/// What programs and their workers have left behind.
pub(super) struct Seen<'a> {
    /// As of recorded members; what needs their calls of the store and their acks is not asked of
    /// it.
    pub(super) evidence: &'a Evidence,
    /// The ledger, in its order.
    pub(super) ledger: &'a [Effect],
    /// Which member has started each worker, by their process ids.
    pub(super) members: &'a BTreeMap<u32, u32>,
}

/// How long after its begin a run may be cut off: at its time limit, or when its process is killed
/// as hung.
const RUN_MOST: Duration = TIME_LIMIT.saturating_add(PROGRAM_LEASE);
/// The broker's clock is this machine's, in whole milliseconds.
const LEEWAY_MS: i64 = 5;

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// A fault that hits a member, or all of them.
struct Hit {
    fault: Fault,
    /// The process that it hits, or 0.
    pid: u32,
    from_us: u64,
    to_us: u64,
}

impl Hit {
    /// Whether it can keep a worker's answer from being stored.
    fn concerns(&self, member: Option<u32>) -> bool {
        match self.fault.place() {
            Place::Store | Place::Wire => true,
            Place::Worker => {
                matches!(self.fault, Fault::Kill | Fault::Freeze) && member == Some(self.pid)
            }
            Place::Nowhere | Place::Handler | Place::Broker => false,
        }
    }

    /// Whether it is a fault after which a claim may be left without a run.
    fn leaves_claims(&self) -> bool {
        matches!(self.fault, Fault::Kill | Fault::Freeze)
            || matches!(self.fault.place(), Place::Store | Place::Wire)
    }
}

fn hits(entries: &[Entry]) -> Vec<Hit> {
    let mut hits: Vec<Hit> = Vec::new();
    for Entry { at_us, pid, what } in entries {
        match what {
            Occurrence::FaultBegins { fault } => {
                let Ok(fault) = fault.parse() else { continue };
                hits.push(Hit {
                    fault,
                    pid: *pid,
                    from_us: *at_us,
                    to_us: u64::MAX,
                });
            }
            Occurrence::FaultEnds { fault } => {
                let open = hits
                    .iter_mut()
                    .filter(|hit| hit.fault.name() == fault && hit.to_us == u64::MAX);
                open.for_each(|hit| hit.to_us = *at_us);
            }
            _ => {}
        }
    }
    hits
}

/// A message that a worker was given.
struct GivenRun<'a> {
    pid: u32,
    key: &'a str,
    origin: &'a str,
    attempt: u32,
    begun_us: u64,
    /// When and how it ended; `None` when its process died before.
    ended: Option<(u64, &'a str)>,
}

fn runs(entries: &[Entry]) -> Vec<GivenRun<'_>> {
    let mut runs: Vec<GivenRun<'_>> = Vec::new();
    for Entry { at_us, pid, what } in entries {
        match what {
            Occurrence::Begun {
                key,
                origin,
                attempt,
                ..
            } => {
                let pid = *pid;
                let attempt = *attempt;
                let begun_us = *at_us;
                runs.push(GivenRun {
                    pid,
                    key,
                    origin,
                    attempt,
                    begun_us,
                    ended: None,
                });
            }
            Occurrence::Ended { outcome, .. } => {
                if let Some(run) = runs.iter_mut().rfind(|run| run.pid == *pid) {
                    run.ended = Some((*at_us, outcome));
                }
            }
            _ => {}
        }
    }
    runs
}

impl GivenRun<'_> {
    fn outcome(&self) -> Option<&str> {
        self.ended.map(|(_, outcome)| outcome)
    }

    /// Whether a fault explains that its answer was not stored.
    fn is_excused(&self, hits: &[Hit], members: &BTreeMap<u32, u32>) -> bool {
        let member = members.get(&self.pid).copied();
        // What was on its way when it ended, or when the fault did, arrives within a lease or
        // counts as lost.
        let until_us = self
            .ended
            .map_or(self.begun_us + micros(RUN_MOST), |(at_us, _)| at_us)
            + micros(PROGRAM_LEASE);
        let overlaps = |hit: &Hit| {
            hit.from_us <= until_us
                && self.begun_us <= hit.to_us.saturating_add(micros(PROGRAM_LEASE))
        };
        matches!(self.outcome(), Some(HUNG | LATE))
            || hits.iter().any(|hit| hit.concerns(member) && overlaps(hit))
    }
}

/// Judges programs: what needs no recorded store by the judge of the promise, effects by the judge
/// of effects, and what concerns their workers here.
pub(super) fn judge_programs(seen: &Seen<'_>) -> PromiseReport {
    let Evidence {
        entries,
        records,
        max_attempts,
        hung,
        ..
    } = seen.evidence;
    let mut report = judge(&Evidence {
        entries: entries.clone(),
        records: records.clone(),
        max_attempts: *max_attempts,
        hung: hung.clone(),
        ..Evidence::default()
    });
    let runs = runs(entries);
    let hits = hits(entries);
    lost(seen.evidence, &mut report);
    second_effects(seen, &runs, &hits, &mut report);
    cut_off(seen, &runs, &hits, &mut report);
    commits(seen, &mut report);
    attempts(&runs, &hits, &mut report);
    given_up(seen.evidence, &runs, &mut report);
    let is_signalled = |run: &&GivenRun<'_>| {
        let member = seen.members.get(&run.pid).copied();
        let during = |hit: &Hit| {
            hit.fault == Fault::GroupSignal
                && member == Some(hit.pid)
                && run.begun_us < hit.from_us
                && run
                    .ended
                    .is_some_and(|(at_us, outcome)| at_us > hit.from_us && outcome == SUCCEEDED)
        };
        hits.iter().any(during)
    };
    let finished = runs.iter().filter(is_signalled).count() as u64;
    if finished > 0 {
        report
            .reached
            .insert("run finished after a group signal".to_owned(), finished);
    }
    report
}

fn found(report: &mut PromiseReport, invariant: &'static str, what: String) {
    report.broken.push(BrokenInvariant { invariant, what });
}

/// S2: what was produced has had its effect, or is in the dead letters.
fn lost(evidence: &Evidence, report: &mut PromiseReport) {
    let given_up = keys_in_dead_letters(evidence);
    let is_given_up = |key: &Option<String>| {
        key.as_ref()
            .is_some_and(|key| given_up.contains(key.as_str()))
    };
    let open = || {
        let is_buried = |origin: &String| evidence.dead_letters.contains(origin);
        evidence
            .produced
            .iter()
            .filter(move |one| !is_buried(&one.origin))
    };
    let wanted: BTreeSet<EffectName> = open()
        .filter(|one| one.key.is_some() && !is_given_up(&one.key))
        .map(|one| one.effect.clone())
        .collect();
    let allowed = evidence
        .produced
        .iter()
        .map(|one| one.effect.clone())
        .collect();
    for effect in judge_effects(&wanted, &allowed, &evidence.effects, |_| u64::MAX).lost {
        found(
            report,
            "S2",
            format!("{effect} has no effect and no dead letter"),
        );
    }
    for one in open().filter(|one| one.key.is_none()) {
        found(
            report,
            "S2",
            format!("{} has no key and no dead letter", one.origin),
        );
    }
}

fn keys_in_dead_letters(evidence: &Evidence) -> BTreeSet<&str> {
    let dead_lettered = evidence
        .produced
        .iter()
        .filter(|one| evidence.dead_letters.contains(&one.origin));
    dead_lettered.filter_map(|one| one.key.as_deref()).collect()
}

/// S8: each run that had its effect, but the last one of its event, is one whose answer a fault has
/// kept from being stored.
fn second_effects(
    seen: &Seen<'_>,
    runs: &[GivenRun<'_>],
    hits: &[Hit],
    report: &mut PromiseReport,
) {
    let keyed = seen.evidence.produced.iter();
    let keys: BTreeMap<&str, &str> = keyed
        .filter_map(|one| Some((one.effect.event.as_str(), one.key.as_deref()?)))
        .collect();
    let mut of_event: BTreeMap<&str, Vec<&Effect>> = BTreeMap::new();
    for effect in seen.ledger {
        let event = effect.effect.split('/').next().unwrap_or_default();
        of_event.entry(event).or_default().push(effect);
    }
    let run_of = |event: &str, effect: &Effect| {
        let key = keys.get(event)?;
        let is_it = |run: &&GivenRun<'_>| {
            run.pid == effect.pid && run.key == *key && run.begun_us <= effect.at_us
        };
        runs.iter().rfind(is_it)
    };
    let explanations = |event: &&str| {
        let effects = of_event.get(event).map_or(&[][..], Vec::as_slice);
        let mut runs: Vec<_> = effects
            .iter()
            .filter_map(|effect| run_of(event, effect))
            .collect();
        // A run that was taken over may have its effect after the run that took over.
        runs.sort_by_key(|run| run.begun_us);
        let but_last = runs.split_last().map_or(&[][..], |(_, others)| others);
        but_last
            .iter()
            .filter(|run| run.is_excused(hits, seen.members))
            .count() as u64
    };
    let times = of_event
        .iter()
        .map(|(event, effects)| (*event, effects.len() as u64))
        .collect();
    let judged = judge_effects(
        &BTreeSet::new(),
        &keys.keys().copied().collect(),
        &times,
        explanations,
    );
    for event in &judged.unasked {
        found(
            report,
            "S8",
            format!("{event} had an effect, and no message asked for it"),
        );
    }
    for one in judged.unexplained() {
        let event = one.effect;
        let times = one.times;
        let explained = one.explained;
        found(
            report,
            "S8",
            format!("{event} had its effect {times} times, {explained} of them explained"),
        );
    }
    report.second_effects = judged.second_effects();
}

/// S8: a worker finishes the message that it has, unless it or its member is hit by a fault that
/// ends it.
fn cut_off(seen: &Seen<'_>, runs: &[GivenRun<'_>], hits: &[Hit], report: &mut PromiseReport) {
    for run in runs
        .iter()
        .filter(|run| run.ended.is_none() && !run.is_excused(hits, seen.members))
    {
        let GivenRun { pid, origin, .. } = run;
        found(
            report,
            "S8",
            format!("worker {pid} ended in the middle of {origin}, and no fault explains it"),
        );
    }
}

/// S10 and S11, from the broker's own log of commits: what is below one has had its effect by then,
/// or is a dead letter.
fn commits(seen: &Seen<'_>, report: &mut PromiseReport) {
    let Evidence {
        topic,
        commits,
        produced,
        dead_letters,
        ..
    } = seen.evidence;
    let given_up = keys_in_dead_letters(seen.evidence);
    let mut paid_at: BTreeMap<&str, i64> = BTreeMap::new();
    for Effect { effect, at_us, .. } in seen.ledger {
        paid_at
            .entry(effect)
            .or_insert(i64::try_from(at_us / 1_000).unwrap_or(i64::MAX));
    }
    let by_origin: BTreeMap<&str, _> = produced
        .iter()
        .map(|one| (one.origin.as_str(), one))
        .collect();
    let is_finished = |origin: &str, at_ms: i64| {
        let Some(one) = by_origin.get(origin) else {
            return false;
        };
        let is_paid = || {
            paid_at
                .get(one.effect.to_string().as_str())
                .is_some_and(|paid| *paid <= at_ms)
        };
        dead_letters.contains(origin)
            || one.key.as_deref().is_some_and(|key| given_up.contains(key))
            || is_paid()
    };
    let mut last: BTreeMap<i32, i64> = BTreeMap::new();
    for commit in commits {
        let partition = commit.partition;
        let offset = commit.offset;
        let former = last.insert(partition, offset).unwrap_or(0);
        if former > offset {
            found(
                report,
                "S11",
                format!("partition {partition}: {offset} was committed after {former}"),
            );
        }
        let mut below = (former..offset).map(|one| format!("{topic}/{partition}@{one}"));
        if let Some(unfinished) =
            below.find(|origin| !is_finished(origin, commit.at_ms + LEEWAY_MS))
        {
            found(
                report,
                "S10",
                format!("{offset} was committed before {unfinished} was finished"),
            );
        }
    }
}

/// S22: an attempt is counted only for a message that a worker was given. A member that dies or
/// stands still, and a store that is away, may leave a claim without a run.
fn attempts(runs: &[GivenRun<'_>], hits: &[Hit], report: &mut PromiseReport) {
    let mut given: BTreeMap<&str, usize> = BTreeMap::new();
    for run in runs {
        let before = given.entry(run.key).or_default();
        let claims = hits
            .iter()
            .filter(|hit| hit.leaves_claims() && hit.from_us <= run.begun_us)
            .count();
        if run.attempt as usize > *before + 1 + claims {
            let GivenRun {
                origin, attempt, ..
            } = run;
            let what = format!(
                "{origin} is at attempt {attempt}, and workers had its key {before} times before"
            );
            found(report, "S22", what);
        }
        *before += 1;
    }
}

/// S22: a message with a key is a dead letter only if a worker has given it up, or another content
/// of its key was paid.
fn given_up(evidence: &Evidence, runs: &[GivenRun<'_>], report: &mut PromiseReport) {
    let gave_up = runs.iter().filter(|run| run.outcome() == Some("gave_up"));
    let gave_up: BTreeSet<&str> = gave_up.map(|run| run.key).collect();
    for one in evidence
        .produced
        .iter()
        .filter(|one| evidence.dead_letters.contains(&one.origin))
    {
        let Some(key) = one.key.as_deref() else {
            continue;
        };
        let EffectName { event, content } = &one.effect;
        let other_is_paid = || {
            evidence
                .effects
                .keys()
                .any(|paid| paid.event == *event && paid.content != *content)
        };
        if !gave_up.contains(key) && !other_is_paid() {
            found(
                report,
                "S22",
                format!("{} is a dead letter, and no worker gave it up", one.origin),
            );
        }
    }
}

#[cfg(test)]
#[path = "outside_tests.rs"]
mod tests;
