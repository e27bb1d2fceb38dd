//! The promise, judged from a history and from witnesses that are not oncegate's code.
//!
//! The invariants have numbers, which the documentation of the module explains. Each check finds
//! its violations alone.

mod acks;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use oncegate_core::rules::ReleaseCause;

use self::acks::{acks, commits};
use super::calls::{Calls, KeyCall};
use super::evidence::{Evidence, ProducedMessage, PromiseReport};
use super::history::{EffectName, Entry, Occurrence, SUCCEEDED};
use super::linear::{Explanation, explain};
use super::operation::{Op, StoreAnswer};
use crate::effects::judge_effects;

/// Judges what a run has left behind: a pure function of it.
pub fn judge(evidence: &Evidence) -> PromiseReport {
    let mut report = PromiseReport::default();
    let calls = Calls::of(&evidence.entries);
    evidence
        .hung
        .iter()
        .for_each(|what| report.found("L2", what.clone()));
    reached(evidence, &calls, &mut report);
    acks(evidence, &mut report);
    produced(evidence, &mut report);
    owners(&calls, &mut report);
    results(evidence, &calls, &mut report);
    effects(evidence, &calls, &mut report);
    commits(evidence, &mut report);
    kept(evidence, &calls, &mut report);
    attempts(evidence, &mut report);
    losses(evidence, &calls, &mut report);
    counters(evidence, &calls, &mut report);
    linear(evidence, &calls, &mut report);
    report
}

/// Counts what a run has met. A run that did not meet its faults proves nothing about them.
fn reached(evidence: &Evidence, calls: &Calls, report: &mut PromiseReport) {
    for (_, call) in calls.all() {
        report.reach(match &call.answer {
            Some(StoreAnswer::Granted { takeover: true, .. }) => "takeover",
            Some(StoreAnswer::Granted { .. }) => "granted",
            Some(StoreAnswer::Completed { .. }) => "completed",
            Some(StoreAnswer::Busy { .. }) => "busy",
            Some(StoreAnswer::Failed { .. }) => "failed",
            Some(StoreAnswer::Mismatch) => "mismatch",
            Some(StoreAnswer::Held { recreated: true }) => "held after a loss of the claim",
            Some(StoreAnswer::Held { .. }) => "held",
            Some(StoreAnswer::Lost) => "lost lease",
            None if call.op == Op::Forget => continue,
            None => "unknown outcome",
        });
    }
    for entry in &evidence.entries {
        match &entry.what {
            Occurrence::Fail { class, .. } => report.reach(format!("store {class}")),
            Occurrence::Ended { outcome, .. } => report.reach(format!("handler {outcome}")),
            Occurrence::StoredDeadLetter { cause, .. } => {
                report.reach(format!("dead letter {cause}"));
            }
            Occurrence::Duplicate { .. } => report.reach("duplicate"),
            Occurrence::LossNoticed => report.reach("loss noticed"),
            Occurrence::FaultBegins { fault } => report.reach(format!("fault {fault}")),
            _ => {}
        }
    }
}

/// S2: what was produced has had its effect, or is in the dead letters.
fn produced(evidence: &Evidence, report: &mut PromiseReport) {
    let (given_up, others): (Vec<&ProducedMessage>, Vec<_>) = evidence
        .produced
        .iter()
        .partition(|one| evidence.dead_letters.contains(&one.origin));
    let given_up: BTreeSet<&str> = given_up
        .iter()
        .filter_map(|one| one.key.as_deref())
        .collect();
    // A dead letter speaks for every message of its key.
    let must_have_one: Vec<_> = others
        .into_iter()
        .filter(|one| one.key.as_deref().is_none_or(|key| !given_up.contains(key)))
        .collect();
    let wanted: BTreeSet<EffectName> = must_have_one
        .iter()
        .filter(|one| one.key.is_some())
        .map(|one| one.effect.clone())
        .collect();
    let allowed = evidence
        .produced
        .iter()
        .map(|one| one.effect.clone())
        .collect();
    let lost = judge_effects(&wanted, &allowed, &evidence.effects, |_| u64::MAX).lost;
    for one in must_have_one
        .iter()
        .filter(|one| one.key.is_none() || lost.contains(&one.effect))
    {
        report.found(
            "S2",
            format!(
                "{} ({}) has no effect and no dead letter",
                one.origin, one.effect
            ),
        );
    }
}

/// S4, S5 and S6 where the lines leave no doubt about the order; S16 has the rest.
fn owners(calls: &Calls, report: &mut PromiseReport) {
    for (key, of_key) in &calls.by_key {
        let mut first_grants: BTreeMap<&str, &KeyCall> = BTreeMap::new();
        for call in of_key.iter().filter(|call| call.is_granted()) {
            let token = call.op.token().unwrap_or_default();
            first_grants.entry(token).or_insert(call);
        }
        for (mine, grant) in &first_grants {
            let later: Vec<&&KeyCall> = first_grants
                .values()
                .filter(|other| grant.is_before(other))
                .collect();
            for held in of_key
                .iter()
                .filter(|call| call.is_held() && call.op.token() == Some(mine))
            {
                // Once it has ended itself, a repeat is held again: so only the first end counts.
                let first = !of_key.iter().any(|call| {
                    call.op.token() == Some(mine) && ends(call) && call.is_before(held)
                });
                if let Some(other) = later.iter().find(|other| first && other.is_before(held))
                    && !calls.is_forgotten_between(grant.invoked, held.answered.unwrap_or_default())
                {
                    let line = other.invoked;
                    report.found(
                        "S4",
                        format!("{key}: {mine} was answered after another grant (line {line})"),
                    );
                }
            }
            for other in &later {
                if let (
                    Some(StoreAnswer::Granted {
                        fencing_token: Some(one),
                        ..
                    }),
                    Some(StoreAnswer::Granted {
                        fencing_token: Some(two),
                        ..
                    }),
                ) = (&grant.answer, &other.answer)
                    && one >= two
                {
                    report.found(
                        "S6",
                        format!("{key}: fencing token {two} was granted after {one}"),
                    );
                }
            }
        }
        for completed in of_key
            .iter()
            .filter(|call| call.completes() && call.is_held())
        {
            let again = first_grants.values().find(|grant| {
                completed.is_before(grant)
                    && !calls
                        .is_forgotten_between(completed.invoked, grant.answered.unwrap_or_default())
            });
            if let Some(again) = again {
                report.found(
                    "S5",
                    format!(
                        "{key} was granted after its completion (line {})",
                        again.invoked
                    ),
                );
            }
        }
    }
}

/// Returns whether the call may have ended its owner's attempt.
fn ends(call: &KeyCall) -> bool {
    !call.is_granted() && !matches!(call.op, Op::Claim { .. } | Op::Extend { .. })
}

/// S3, S13 and S14: a returned result is that of the message's own event and content, and always
/// the same.
fn results(evidence: &Evidence, calls: &Calls, report: &mut PromiseReport) {
    let by_origin: HashMap<&str, &ProducedMessage> = evidence
        .produced
        .iter()
        .map(|one| (one.origin.as_str(), one))
        .collect();
    // After each loss of the store, a key may be completed once more, with another result.
    let forgets = calls.forgotten.len();
    let mut given: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut contents: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for Entry { what, .. } in &evidence.entries {
        match what {
            Occurrence::Duplicate {
                key,
                origin,
                content,
                result,
                of,
            } => {
                given.entry(key).or_default().insert(readable(result));
                let Some(one) = by_origin.get(origin.as_str()) else {
                    continue;
                };
                if of.event != one.effect.event {
                    report.found(
                        "S3",
                        format!("{origin}, event {}, got {result:?}", one.effect.event),
                    );
                } else if of.content != *content {
                    report.found(
                        "S14",
                        format!("{origin}, content {content}, got {result:?}"),
                    );
                }
            }
            Occurrence::Begun { key, content, .. } => {
                contents.entry(key).or_default().insert(content);
            }
            _ => {}
        }
    }
    for (key, call) in calls.all() {
        if let Some(StoreAnswer::Completed { result }) = &call.answer {
            given.entry(key).or_default().insert(readable(result));
        }
    }
    for (key, results) in given
        .iter()
        .filter(|(_, results)| results.len() > 1 + forgets)
    {
        report.found("S13", format!("duplicates of {key} got {results:?}"));
    }
    for (key, contents) in contents
        .iter()
        .filter(|(_, contents)| contents.len() > 1 + forgets)
    {
        report.found(
            "S14",
            format!("{key} was run with the contents {contents:?}"),
        );
    }
}

/// A stored result without its codec's byte and JSON's quotes, as the handler gets it.
fn readable(stored: &str) -> &str {
    stored.trim_matches(|mark: char| mark == '"' || mark.is_control())
}

/// S8: every effect beyond the first is explained by a takeover or a loss of the store.
fn effects(evidence: &Evidence, calls: &Calls, report: &mut PromiseReport) {
    let keyed = evidence
        .produced
        .iter()
        .filter_map(|one| Some((one.effect.event.as_str(), one.key.as_deref()?)));
    let keys: BTreeMap<&str, &str> = keyed.collect();
    // Effects of one event are of one key, whatever their content.
    let mut of_event: BTreeMap<&str, u64> = BTreeMap::new();
    for (effect, times) in &evidence.effects {
        *of_event.entry(&effect.event).or_default() += times;
    }
    let calls_of = |event: &str| keys.get(event).and_then(|key| calls.by_key.get(*key));
    let asked_for = keys
        .keys()
        .copied()
        .filter(|event| calls_of(event).is_some())
        .collect();
    let found = judge_effects(&BTreeSet::new(), &asked_for, &of_event, |event| {
        let of_key = calls_of(event).into_iter().flatten();
        let takeovers: BTreeSet<_> = of_key
            .filter(|call| {
                matches!(
                    call.answer,
                    Some(StoreAnswer::Granted { takeover: true, .. })
                )
            })
            .filter_map(|call| call.op.token())
            .collect();
        (takeovers.len() + calls.forgotten.len()) as u64
    });
    for event in &found.unasked {
        report.found(
            "S8",
            format!("{event} had an effect, and no message asked for it"),
        );
    }
    for one in found.unexplained() {
        let event = one.effect;
        let times = one.times;
        let explained = one.explained;
        report.found(
            "S8",
            format!("{event} had its effect {times} times, {explained} of them explained"),
        );
    }
    report.second_effects = found.second_effects();
}

/// S17, and that nothing stays claimed for ever (L1): what the store must hold when all is quiet.
fn kept(evidence: &Evidence, calls: &Calls, report: &mut PromiseReport) {
    let Some(records) = &evidence.records else {
        return;
    };
    for (key, of_key) in &calls.by_key {
        let completed = of_key
            .iter()
            .rfind(|call| call.completes() && call.is_held());
        let state = records.get(key).map(String::as_str);
        if let Some(completed) = completed
            && !calls.is_forgotten_between(completed.invoked, usize::MAX)
            && state != Some("completed")
        {
            report.found("S17", format!("{key} was completed, and is {state:?}"));
        }
    }
    for (key, state) in records.iter().filter(|(_, state)| *state == "pending") {
        report.found("L1", format!("{key} is still {state} when all is quiet"));
    }
}

/// S18: the limit holds, and only a handler that has failed uses up an attempt.
fn attempts(evidence: &Evidence, report: &mut PromiseReport) {
    let max_attempts = evidence.max_attempts.unwrap_or(u32::MAX);
    let mut released: BTreeMap<(u32, &str), BTreeSet<&str>> = BTreeMap::new();
    let mut failed: BTreeMap<(u32, &str), usize> = BTreeMap::new();
    for Entry { pid, what, .. } in &evidence.entries {
        match what {
            Occurrence::Begun { key, attempt, .. } if *attempt > max_attempts => {
                report.found(
                    "S18",
                    format!("{key} ran at attempt {attempt} of {max_attempts}"),
                );
            }
            Occurrence::Invoke {
                key,
                op: Op::Release { token, end, .. },
                ..
            } if end == ReleaseCause::Failed.as_str() => {
                released.entry((*pid, key)).or_default().insert(token);
            }
            Occurrence::Ended { key, outcome, .. } if outcome != SUCCEEDED => {
                *failed.entry((*pid, key)).or_default() += 1;
            }
            _ => {}
        }
    }
    // A release that counts must have a failed run of the same process behind it.
    for ((pid, key), tokens) in released {
        let failures = failed.get(&(pid, key)).copied().unwrap_or(0);
        if tokens.len() > failures {
            report.found(
                "S18",
                format!(
                    "process {pid} counted {} attempts of {key}, and {failures} had failed",
                    tokens.len()
                ),
            );
        }
    }
}

/// S19: a loss is noticed, and only a loss.
fn losses(evidence: &Evidence, calls: &Calls, report: &mut PromiseReport) {
    let noticed = evidence
        .entries
        .iter()
        .filter(|entry| entry.what == Occurrence::LossNoticed)
        .count();
    match (calls.forgotten.len(), noticed) {
        (1.., 0) if evidence.notices_losses => {
            report.found(
                "S19",
                "the store lost all records, and no worker noticed".to_owned(),
            );
        }
        (0, 1..) => report.found(
            "S19",
            format!("{noticed} alarms, and the store has lost nothing"),
        ),
        _ => {}
    }
}

/// The counter of claims that were taken over.
const TAKEOVERS: &str = "extra_runs crash_takeover";

/// S20: what a worker that ended as it should has counted is what it has written down.
fn counters(evidence: &Evidence, calls: &Calls, report: &mut PromiseReport) {
    let mut seen: BTreeMap<(u32, &str), u64> = BTreeMap::new();
    for (_, call) in calls.all() {
        let Some(pid) = evidence.entries.get(call.invoked).map(|entry| entry.pid) else {
            continue;
        };
        if let Some(StoreAnswer::Granted { takeover, .. }) = call.answer {
            *seen.entry((pid, "claims granted")).or_default() += 1;
            *seen.entry((pid, TAKEOVERS)).or_default() += u64::from(takeover);
        }
    }
    for Entry { pid, what, .. } in &evidence.entries {
        match what {
            Occurrence::Ack { .. } => *seen.entry((*pid, "acks ")).or_default() += 1,
            Occurrence::StoredDeadLetter { .. } => {
                *seen.entry((*pid, "dead_letters")).or_default() += 1;
            }
            _ => {}
        }
    }
    for Entry { pid, what, .. } in &evidence.entries {
        let Occurrence::Counted { counts } = what else {
            continue;
        };
        // Only a process that has ended as it should has noted its counters.
        for name in ["claims granted", TAKEOVERS, "acks ", "dead_letters"] {
            let counted: u64 = counts
                .iter()
                .filter(|(counted, _)| counted.starts_with(name))
                .map(|(_, count)| count)
                .sum();
            let seen = seen.get(&(*pid, name)).copied().unwrap_or(0);
            if counted != seen {
                report.found(
                    "S20",
                    format!("process {pid} has counted {counted} {name}, and there were {seen}"),
                );
            }
        }
    }
}

/// S16: what the store answered about each key could have come from the rules.
fn linear(evidence: &Evidence, calls: &Calls, report: &mut PromiseReport) {
    for (key, of_key) in &calls.by_key {
        // A call that was kept waiting for the row has seen nothing of it.
        let calls: Vec<KeyCall> = of_key
            .iter()
            .filter(|call| !(evidence.locks_rows && call.was_kept_waiting()))
            .cloned()
            .collect();
        match explain(&calls) {
            Explanation::Order => report.reach("key explained by the rules"),
            Explanation::Undecided => report.reach("key not decided"),
            Explanation::Nothing => {
                let told: Vec<String> = of_key
                    .iter()
                    .map(|call| format!("\n    {call:?}"))
                    .collect();
                report.found(
                    "S16",
                    format!("the rules do not explain {key}:{}", told.concat()),
                );
            }
        }
    }
}
