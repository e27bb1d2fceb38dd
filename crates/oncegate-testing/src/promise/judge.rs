//! What must hold, decided from a history and from witnesses that are not oncegate's code.
//!
//! The invariants have numbers, which the documentation of the module explains. Each check finds
//! its violations alone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use oncegate_core::rules::ReleaseCause;

use super::calls::{Call, Calls};
use super::evidence::{Evidence, OffsetCommit, ProducedMessage, PromiseReport};
use super::history::{Answer, EffectName, Entry, Occurrence, Op, SUCCEEDED};
use super::linear::{Explanation, explain};
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

/// What a run has met. A run that did not meet its faults proves nothing about them.
fn reached(evidence: &Evidence, calls: &Calls, report: &mut PromiseReport) {
    for (_, call) in calls.all() {
        report.reach(match &call.answer {
            Some(Answer::Granted { takeover: true, .. }) => "takeover",
            Some(Answer::Granted { .. }) => "granted",
            Some(Answer::Completed { .. }) => "completed",
            Some(Answer::Busy { .. }) => "busy",
            Some(Answer::Failed { .. }) => "failed",
            Some(Answer::Mismatch) => "mismatch",
            Some(Answer::Held { recreated: true }) => "held after a loss of the claim",
            Some(Answer::Held { .. }) => "held",
            Some(Answer::Lost) => "lost lease",
            None if call.op == Op::Forget => continue,
            None => "unknown outcome",
        });
    }
    for entry in &evidence.entries {
        match &entry.what {
            Occurrence::Fail { class, .. } => report.reach(format!("store {class}")),
            Occurrence::Ended { outcome, .. } => report.reach(format!("handler {outcome}")),
            Occurrence::StoredDeadLetter { cause, .. } => {
                report.reach(format!("dead letter {cause}"))
            }
            Occurrence::Duplicate { .. } => report.reach("duplicate"),
            Occurrence::LossNoticed => report.reach("loss noticed"),
            Occurrence::FaultBegins { fault } => report.reach(format!("fault {fault}")),
            _ => {}
        }
    }
}

/// S1, S9 and S12: a process acknowledges only what the store's last reply about the key reports as
/// finished.
fn acks(evidence: &Evidence, report: &mut PromiseReport) {
    /// The store's last reply about a key to a process.
    #[derive(Clone, Copy, PartialEq)]
    enum Word {
        Finished,
        Lost,
        Unknown,
        Other,
    }
    let mut calls: HashMap<(u32, u64), (&str, &Op)> = HashMap::new();
    let mut words: HashMap<(u32, &str), Word> = HashMap::new();
    let mut buried: HashSet<(u32, &str)> = HashSet::new();
    for Entry { pid, what, .. } in &evidence.entries {
        match what {
            Occurrence::Invoke { call, key, op } => {
                calls.insert((*pid, *call), (key, op));
            }
            Occurrence::Ok { call, answer } => {
                let Some((key, op)) = calls.get(&(*pid, *call)) else {
                    continue;
                };
                let word = match (op, answer) {
                    (Op::Complete { .. }, Answer::Held { .. })
                    | (
                        Op::Claim { .. },
                        Answer::Completed { .. }
                        | Answer::Failed {
                            handed_over: true, ..
                        },
                    ) => Word::Finished,
                    (Op::Complete { .. }, Answer::Lost) => Word::Lost,
                    // Of another content than the record's: what was completed is still completed.
                    (Op::Claim { .. }, Answer::Mismatch)
                        if words.get(&(*pid, key)) == Some(&Word::Finished) =>
                    {
                        continue;
                    }
                    (Op::Claim { .. }, _) => Word::Other,
                    _ => continue,
                };
                words.insert((*pid, key), word);
            }
            Occurrence::Info { call } => {
                if let Some((key, Op::Complete { .. })) = calls.get(&(*pid, *call)) {
                    words.insert((*pid, key), Word::Unknown);
                }
            }
            Occurrence::Found { key, .. } => {
                words.insert((*pid, key), Word::Finished);
            }
            Occurrence::StoredDeadLetter { origin, .. } => {
                buried.insert((*pid, origin));
            }
            Occurrence::Ack { origin, key } => {
                let word = key
                    .as_ref()
                    .and_then(|key| words.get(&(*pid, key.as_str())));
                let invariant = match word {
                    Some(Word::Finished) => continue,
                    _ if buried.contains(&(*pid, origin)) => continue,
                    Some(Word::Lost) => "S9",
                    Some(Word::Unknown) => "S12",
                    Some(Word::Other) | None => "S1",
                };
                report.found(
                    invariant,
                    format!("process {pid} acknowledged {origin} ({key:?}) without a durable end"),
                );
            }
            _ => {}
        }
    }
}

/// S2: what was produced has had its effect, or is in the dead letters.
fn produced(evidence: &Evidence, report: &mut PromiseReport) {
    let is_given_up = |one: &&ProducedMessage| evidence.dead_letters.contains(&one.origin);
    let given_up: BTreeSet<&str> = evidence
        .produced
        .iter()
        .filter(is_given_up)
        .filter_map(|one| one.key.as_deref())
        .collect();
    let has_an_end = |one: &&ProducedMessage| {
        is_given_up(one) || one.key.as_deref().is_some_and(|key| given_up.contains(key))
    };
    let must_have_one = || evidence.produced.iter().filter(|one| !has_an_end(one));
    let wanted: BTreeSet<EffectName> = must_have_one()
        .filter(|one| one.key.is_some())
        .map(|one| one.effect.clone())
        .collect();
    let allowed = evidence
        .produced
        .iter()
        .map(|one| one.effect.clone())
        .collect();
    let lost = judge_effects(&wanted, &allowed, &evidence.effects, |_| u64::MAX).lost;
    for one in must_have_one().filter(|one| one.key.is_none() || lost.contains(&one.effect)) {
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
        let mut first_grants: BTreeMap<&str, &Call> = BTreeMap::new();
        for call in of_key.iter().filter(|call| call.is_granted()) {
            let token = call.op.token().unwrap_or_default();
            first_grants.entry(token).or_insert(call);
        }
        let before =
            |one: &Call, other: &Call| one.answered.is_some_and(|line| line < other.invoked);
        for (mine, grant) in &first_grants {
            let later: Vec<&&Call> = first_grants
                .values()
                .filter(|other| before(grant, other))
                .collect();
            for held in of_key
                .iter()
                .filter(|call| call.is_held() && call.op.token() == Some(mine))
            {
                // Once it has ended itself, a repeat is held again: so only the first end counts.
                let first = !of_key
                    .iter()
                    .any(|call| call.op.token() == Some(mine) && ends(call) && before(call, held));
                if let Some(other) = later.iter().find(|other| first && before(other, held))
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
                    Some(Answer::Granted {
                        fencing_token: Some(one),
                        ..
                    }),
                    Some(Answer::Granted {
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
                before(completed, grant)
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

/// Whether the call may have ended its owner's attempt.
fn ends(call: &Call) -> bool {
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
        if let Some(Answer::Completed { result }) = &call.answer {
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
    let explanations = |event: &&str| {
        let takeover =
            |call: &&Call| matches!(call.answer, Some(Answer::Granted { takeover: true, .. }));
        let of_key = calls_of(event).into_iter().flatten();
        let takeovers: BTreeSet<_> = of_key
            .filter(takeover)
            .filter_map(|call| call.op.token())
            .collect();
        (takeovers.len() + calls.forgotten.len()) as u64
    };
    let asked_for = keys
        .keys()
        .copied()
        .filter(|event| calls_of(event).is_some())
        .collect();
    let found = judge_effects(&BTreeSet::new(), &asked_for, &of_event, explanations);
    for event in &found.unasked {
        report.found(
            "S8",
            format!("{event} had an effect, and no message asked for it"),
        );
    }
    for one in found.unexplained() {
        let (event, times, explained) = (one.effect, one.times, one.explained);
        report.found(
            "S8",
            format!("{event} had its effect {times} times, {explained} of them explained"),
        );
    }
    report.second_effects = found.second_effects();
}

/// S10 and S11, from the broker's own log of commits.
fn commits(evidence: &Evidence, report: &mut PromiseReport) {
    /// The broker's clock is this machine's, in whole milliseconds.
    const LEEWAY_MS: i64 = 5;
    let mut acked_at: BTreeMap<i32, BTreeMap<i64, i64>> = BTreeMap::new();
    for Entry { at_us, what, .. } in &evidence.entries {
        if let Occurrence::Ack { origin, .. } = what
            && let Some((partition, offset)) = place(&evidence.topic, origin)
        {
            let at_ms = i64::try_from(at_us / 1_000).unwrap_or(i64::MAX);
            acked_at
                .entry(partition)
                .or_default()
                .entry(offset)
                .or_insert(at_ms);
        }
    }
    let mut last: BTreeMap<i32, i64> = BTreeMap::new();
    for OffsetCommit {
        partition,
        offset,
        at_ms,
    } in &evidence.commits
    {
        let former = last.insert(*partition, *offset);
        if let Some(former) = former.filter(|former| former > offset) {
            report.found(
                "S11",
                format!("partition {partition}: {offset} was committed after {former}"),
            );
        }
        let acked = acked_at.entry(*partition).or_default();
        // Occurrence lies below the former commit was looked at with that one.
        let unfinished = (former.unwrap_or(0)..*offset).find(|one| {
            acked
                .get(one)
                .is_none_or(|acked| *acked > at_ms + LEEWAY_MS)
        });
        if let Some(unfinished) = unfinished {
            report.found(
                "S10",
                format!(
                    "partition {partition}: {offset} was committed before {unfinished} was finished"
                ),
            );
        }
    }
}

/// Partition and offset of an origin such as `orders/3@42`.
fn place(topic: &str, origin: &str) -> Option<(i32, i64)> {
    let (partition, offset) = origin
        .strip_prefix(topic)?
        .strip_prefix('/')?
        .split_once('@')?;
    Some((partition.parse().ok()?, offset.parse().ok()?))
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
    let claim = |line: usize| evidence.entries.get(line).map(|entry| entry.pid);
    let mut seen: BTreeMap<(u32, &str), u64> = BTreeMap::new();
    for (_, call) in calls.all() {
        let Some(pid) = claim(call.invoked) else {
            continue;
        };
        if let Some(Answer::Granted { takeover, .. }) = call.answer {
            *seen.entry((pid, "claims granted")).or_default() += 1;
            *seen.entry((pid, TAKEOVERS)).or_default() += u64::from(takeover);
        }
    }
    for Entry { pid, what, .. } in &evidence.entries {
        match what {
            Occurrence::Ack { .. } => *seen.entry((*pid, "acks ")).or_default() += 1,
            Occurrence::StoredDeadLetter { .. } => {
                *seen.entry((*pid, "dead_letters")).or_default() += 1
            }
            _ => {}
        }
    }
    for Entry { pid, what, .. } in &evidence.entries {
        let Occurrence::Counted { counts } = what else {
            continue;
        };
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
        let saw = |call: &&Call| !(evidence.locks_rows && call.was_kept_waiting());
        match explain(&of_key.iter().filter(saw).cloned().collect::<Vec<Call>>()) {
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
