//! What must hold, decided from a history and from witnesses that are not oncegate's code.
//!
//! The invariants have numbers, which `RELIABILITY.md` explains. Each check finds its violations alone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use oncegate::core::rules::ReleaseCause;

use super::calls::{Call, Calls};
use super::history::{Answer, Entry, Op, What};
use super::linear::{Found, explain};
use super::work::MAX_ATTEMPTS;

/// What was produced.
#[derive(Clone, Debug)]
pub(super) struct Produced {
    pub(super) origin: String,
    pub(super) order: u64,
    pub(super) amount: u64,
    /// `None`: no key can be made of it.
    pub(super) key: Option<String>,
}

/// One commit as the broker has written it down.
#[derive(Clone, Debug)]
pub(super) struct Commit {
    pub(super) partition: i32,
    pub(super) offset: i64,
    pub(super) at_ms: i64,
}

/// All that a run has left behind.
#[derive(Clone, Debug, Default)]
pub(super) struct Case {
    pub(super) entries: Vec<Entry>,
    pub(super) topic: String,
    pub(super) produced: Vec<Produced>,
    /// The ledger: how often each payment was made, as `order/amount`.
    pub(super) effects: BTreeMap<String, u64>,
    /// The origins of the messages in the dead-letter topic.
    pub(super) letters: BTreeSet<String>,
    /// Every commit of the group, in the broker's order.
    pub(super) commits: Vec<Commit>,
    /// The state of every record of the scope, as another client has read it from the store.
    pub(super) dump: BTreeMap<String, String>,
    /// Whether the store reports that it has lost data.
    pub(super) notices_losses: bool,
    /// Whether a claim waits for the transaction that holds its row, and is answered Busy after a while.
    pub(super) locks_rows: bool,
}

/// An invariant that does not hold, and what shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Violation {
    pub(super) invariant: &'static str,
    pub(super) what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}

/// The violations that were found, and the cases that were reached.
#[derive(Debug, Default)]
pub(super) struct Judgement {
    pub(super) violations: Vec<Violation>,
    pub(super) reached: BTreeMap<String, u64>,
    pub(super) extra_effects: u64,
}

impl Judgement {
    fn found(&mut self, invariant: &'static str, what: String) {
        self.violations.push(Violation { invariant, what });
    }

    fn reach(&mut self, what: impl Into<String>) {
        *self.reached.entry(what.into()).or_default() += 1;
    }
}

pub(super) fn judge(case: &Case) -> Judgement {
    let mut judgement = Judgement::default();
    let calls = Calls::of(&case.entries);
    reached(case, &calls, &mut judgement);
    acks(case, &mut judgement);
    produced(case, &mut judgement);
    owners(&calls, &mut judgement);
    results(case, &calls, &mut judgement);
    effects(case, &calls, &mut judgement);
    commits(case, &mut judgement);
    kept(case, &calls, &mut judgement);
    attempts(case, &mut judgement);
    losses(case, &calls, &mut judgement);
    counters(case, &calls, &mut judgement);
    linear(case, &calls, &mut judgement);
    judgement
}

/// What a run has met. A run that did not meet its faults proves nothing about them.
fn reached(case: &Case, calls: &Calls, judgement: &mut Judgement) {
    for (_, call) in calls.all() {
        judgement.reach(match &call.answer {
            Some(Answer::Granted { takeover: true, .. }) => "takeover",
            Some(Answer::Granted { .. }) => "granted",
            Some(Answer::Completed { .. }) => "completed",
            Some(Answer::Busy { .. }) => "busy",
            Some(Answer::Failed { .. }) => "failed",
            Some(Answer::Mismatch) => "mismatch",
            Some(Answer::Held { recreated: true }) => "held, recreated",
            Some(Answer::Held { .. }) => "held",
            Some(Answer::Lost) => "lost lease",
            None if call.op == Op::Forget => continue,
            None => "unknown outcome",
        });
    }
    for entry in &case.entries {
        match &entry.what {
            What::Fail { class, .. } => judgement.reach(format!("store {class}")),
            What::Ended { outcome, .. } => judgement.reach(format!("handler {outcome}")),
            What::StoredDeadLetter { cause, .. } => judgement.reach(format!("dead letter {cause}")),
            What::Duplicate { .. } => judgement.reach("duplicate"),
            What::LossNoticed => judgement.reach("loss noticed"),
            What::FaultBegins { fault } => judgement.reach(format!("fault {fault}")),
            _ => {}
        }
    }
}

/// S1, S9 and S12: a process acknowledges only what the store's last reply about the key reports as finished.
fn acks(case: &Case, judgement: &mut Judgement) {
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
    for Entry { pid, what, .. } in &case.entries {
        match what {
            What::Invoke { call, key, op } => {
                calls.insert((*pid, *call), (key, op));
            }
            What::Ok { call, answer } => {
                let Some((key, op)) = calls.get(&(*pid, *call)) else { continue };
                let word = match (op, answer) {
                    (Op::Complete { .. }, Answer::Held { .. })
                    | (
                        Op::Claim { .. },
                        Answer::Completed { .. } | Answer::Failed { handed_over: true, .. },
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
            What::Info { call } => {
                if let Some((key, Op::Complete { .. })) = calls.get(&(*pid, *call)) {
                    words.insert((*pid, key), Word::Unknown);
                }
            }
            What::Found { key, .. } => {
                words.insert((*pid, key), Word::Finished);
            }
            What::StoredDeadLetter { origin, .. } => {
                buried.insert((*pid, origin));
            }
            What::Ack { origin, key } => {
                let word = key.as_ref().and_then(|key| words.get(&(*pid, key.as_str())));
                let invariant = match word {
                    Some(Word::Finished) => continue,
                    _ if buried.contains(&(*pid, origin)) => continue,
                    Some(Word::Lost) => "S9",
                    Some(Word::Unknown) => "S12",
                    Some(Word::Other) | None => "S1",
                };
                judgement.found(
                    invariant,
                    format!("process {pid} acknowledged {origin} ({key:?}) without a durable end"),
                );
            }
            _ => {}
        }
    }
}

/// S2: what was produced has had its effect, or is in the dead letters.
fn produced(case: &Case, judgement: &mut Judgement) {
    let given_up: BTreeSet<&str> = case
        .produced
        .iter()
        .filter(|one| case.letters.contains(&one.origin))
        .filter_map(|one| one.key.as_deref())
        .collect();
    for one in &case.produced {
        let payment = format!("{}/{}", one.order, one.amount);
        let key_given_up = one.key.as_deref().is_some_and(|key| given_up.contains(key));
        let has_effect = one.key.is_some() && case.effects.contains_key(&payment);
        if !has_effect && !case.letters.contains(&one.origin) && !key_given_up {
            judgement.found("S2", format!("{} ({payment}) has no effect and no dead letter", one.origin));
        }
    }
}

/// S4, S5 and S6 where the lines leave no doubt about the order; S16 has the rest.
fn owners(calls: &Calls, judgement: &mut Judgement) {
    for (key, of_key) in &calls.by_key {
        let mut first_grants: BTreeMap<&str, &Call> = BTreeMap::new();
        for call in of_key.iter().filter(|call| call.is_granted()) {
            let token = call.op.token().unwrap_or_default();
            first_grants.entry(token).or_insert(call);
        }
        let before = |one: &Call, other: &Call| one.answered.is_some_and(|line| line < other.invoked);
        for (mine, grant) in &first_grants {
            let later: Vec<&&Call> = first_grants.values().filter(|other| before(grant, other)).collect();
            for held in of_key.iter().filter(|call| call.is_held() && call.op.token() == Some(mine)) {
                // Once it has ended itself, a repeat is held again: so only the first end counts.
                let first = !of_key
                    .iter()
                    .any(|call| call.op.token() == Some(mine) && ends(call) && before(call, held));
                if let Some(other) = later.iter().find(|other| first && before(other, held))
                    && !calls.is_forgotten_between(grant.invoked, held.answered.unwrap_or_default())
                {
                    let line = other.invoked;
                    judgement
                        .found("S4", format!("{key}: {mine} was answered after another grant (line {line})"));
                }
            }
            for other in &later {
                if let (
                    Some(Answer::Granted { fencing_token: Some(one), .. }),
                    Some(Answer::Granted { fencing_token: Some(two), .. }),
                ) = (&grant.answer, &other.answer)
                    && one >= two
                {
                    judgement.found("S6", format!("{key}: fencing token {two} was granted after {one}"));
                }
            }
        }
        for completed in of_key.iter().filter(|call| call.completes() && call.is_held()) {
            let again = first_grants.values().find(|grant| {
                before(completed, grant)
                    && !calls.is_forgotten_between(completed.invoked, grant.answered.unwrap_or_default())
            });
            if let Some(again) = again {
                judgement
                    .found("S5", format!("{key} was granted after its completion (line {})", again.invoked));
            }
        }
    }
}

/// Whether the call may have ended its owner's attempt.
fn ends(call: &Call) -> bool {
    !call.is_granted() && !matches!(call.op, Op::Claim { .. } | Op::Extend { .. })
}

/// S3, S13 and S14: a returned result is that of the message's own key and content, and always the same.
fn results(case: &Case, calls: &Calls, judgement: &mut Judgement) {
    let by_origin: HashMap<&str, &Produced> =
        case.produced.iter().map(|one| (one.origin.as_str(), one)).collect();
    let forgets = calls.forgotten.len();
    let mut given: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut contents: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for Entry { what, .. } in &case.entries {
        match what {
            What::Duplicate { key, origin, content, result } => {
                given.entry(key).or_default().insert(result);
                let Some(one) = by_origin.get(origin.as_str()) else { continue };
                let (order, payment) = (result.split('/').next(), result.split(' ').next());
                if order != Some(&one.order.to_string()) {
                    judgement.found("S3", format!("{origin}, order {}, got {result:?}", one.order));
                } else if payment != Some(&format!("{}/{content}", one.order)) {
                    judgement.found("S14", format!("{origin}, content {content}, got {result:?}"));
                }
            }
            What::Begun { key, content, .. } => {
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
    for (key, results) in given.iter().filter(|(_, results)| results.len() > 1 + forgets) {
        judgement.found("S13", format!("duplicates of {key} got {results:?}"));
    }
    for (key, contents) in contents.iter().filter(|(_, contents)| contents.len() > 1 + forgets) {
        judgement.found("S14", format!("{key} was run with the contents {contents:?}"));
    }
}

/// A stored result without its codec's byte and JSON's quotes, as the handler gets it.
fn readable(stored: &str) -> &str {
    stored.trim_matches(|mark: char| mark == '"' || mark.is_control())
}

/// S8: every effect beyond the first is explained by a takeover or a loss of the store.
fn effects(case: &Case, calls: &Calls, judgement: &mut Judgement) {
    let keys: BTreeMap<u64, &str> =
        case.produced.iter().filter_map(|one| Some((one.order, one.key.as_deref()?))).collect();
    let mut of_order: BTreeMap<u64, u64> = BTreeMap::new();
    for (payment, count) in &case.effects {
        let order = payment.split('/').next().and_then(|order| order.parse().ok());
        *of_order.entry(order.unwrap_or(u64::MAX)).or_default() += count;
    }
    for (order, count) in of_order {
        let Some(of_key) = keys.get(&order).and_then(|key| calls.by_key.get(*key)) else {
            judgement.found("S8", format!("order {order} was paid, and no message ordered it"));
            continue;
        };
        let takeovers: BTreeSet<_> = of_key
            .iter()
            .filter(|call| matches!(call.answer, Some(Answer::Granted { takeover: true, .. })))
            .filter_map(|call| call.op.token())
            .collect();
        let explained = takeovers.len() + calls.forgotten.len();
        judgement.extra_effects += count - 1;
        if count - 1 > explained as u64 {
            judgement.found("S8", format!("order {order} was paid {count} times, {explained} explained"));
        }
    }
}

/// S10 and S11, from the broker's own log of commits.
fn commits(case: &Case, judgement: &mut Judgement) {
    /// The broker's clock is this machine's, in whole milliseconds.
    const LEEWAY_MS: i64 = 5;
    let mut acked_at: BTreeMap<i32, BTreeMap<i64, i64>> = BTreeMap::new();
    for Entry { at_us, what, .. } in &case.entries {
        if let What::Ack { origin, .. } = what
            && let Some((partition, offset)) = place(&case.topic, origin)
        {
            let at_ms = i64::try_from(at_us / 1_000).unwrap_or(i64::MAX);
            acked_at.entry(partition).or_default().entry(offset).or_insert(at_ms);
        }
    }
    let mut last: BTreeMap<i32, i64> = BTreeMap::new();
    for Commit { partition, offset, at_ms } in &case.commits {
        let former = last.insert(*partition, *offset);
        if let Some(former) = former.filter(|former| former > offset) {
            judgement.found("S11", format!("partition {partition}: {offset} was committed after {former}"));
        }
        let acked = acked_at.entry(*partition).or_default();
        // What lies below the former commit was looked at with that one.
        let unfinished = (former.unwrap_or(0)..*offset)
            .find(|one| acked.get(one).is_none_or(|acked| *acked > at_ms + LEEWAY_MS));
        if let Some(unfinished) = unfinished {
            judgement.found(
                "S10",
                format!("partition {partition}: {offset} was committed before {unfinished} was finished"),
            );
        }
    }
}

/// Partition and offset of an origin such as `orders/3@42`.
fn place(topic: &str, origin: &str) -> Option<(i32, i64)> {
    let (partition, offset) = origin.strip_prefix(topic)?.strip_prefix('/')?.split_once('@')?;
    Some((partition.parse().ok()?, offset.parse().ok()?))
}

/// S17, and that nothing stays claimed for ever: what a dump of the store must hold when all is quiet.
fn kept(case: &Case, calls: &Calls, judgement: &mut Judgement) {
    for (key, of_key) in &calls.by_key {
        let completed = of_key.iter().rfind(|call| call.completes() && call.is_held());
        let state = case.dump.get(key).map(String::as_str);
        if let Some(completed) = completed
            && !calls.is_forgotten_between(completed.invoked, usize::MAX)
            && state != Some("completed")
        {
            judgement.found("S17", format!("{key} was completed, and is {state:?}"));
        }
    }
    for (key, state) in case.dump.iter().filter(|(_, state)| *state == "pending") {
        judgement.found("L1", format!("{key} is still {state} when all is quiet"));
    }
}

/// S18: the limit holds, and only a handler that has failed uses up an attempt.
fn attempts(case: &Case, judgement: &mut Judgement) {
    let mut released: BTreeMap<(u32, &str), BTreeSet<&str>> = BTreeMap::new();
    let mut failed: BTreeMap<(u32, &str), usize> = BTreeMap::new();
    for Entry { pid, what, .. } in &case.entries {
        match what {
            What::Begun { key, attempt, .. } if *attempt > MAX_ATTEMPTS => {
                judgement.found("S18", format!("{key} ran at attempt {attempt} of {MAX_ATTEMPTS}"));
            }
            What::Invoke { key, op: Op::Release { token, end, .. }, .. }
                if end == ReleaseCause::Failed.as_str() =>
            {
                released.entry((*pid, key)).or_default().insert(token);
            }
            What::Ended { key, outcome, .. } if outcome != "paid" => {
                *failed.entry((*pid, key)).or_default() += 1;
            }
            _ => {}
        }
    }
    for ((pid, key), tokens) in released {
        let failures = failed.get(&(pid, key)).copied().unwrap_or(0);
        if tokens.len() > failures {
            judgement.found(
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
fn losses(case: &Case, calls: &Calls, judgement: &mut Judgement) {
    let noticed = case.entries.iter().filter(|entry| entry.what == What::LossNoticed).count();
    match (calls.forgotten.len(), noticed) {
        (1.., 0) if case.notices_losses => {
            judgement.found("S19", "the store lost all records, and no worker noticed".to_owned());
        }
        (0, 1..) => judgement.found("S19", format!("{noticed} alarms, and the store has lost nothing")),
        _ => {}
    }
}

/// S20: what a worker that ended as it should has counted is what it has written down.
fn counters(case: &Case, calls: &Calls, judgement: &mut Judgement) {
    let claim = |line: usize| case.entries.get(line).map(|entry| entry.pid);
    let mut seen: BTreeMap<(u32, &str), u64> = BTreeMap::new();
    for (_, call) in calls.all() {
        let Some(pid) = claim(call.invoked) else { continue };
        if let Some(Answer::Granted { takeover, .. }) = call.answer {
            *seen.entry((pid, "claims granted")).or_default() += 1;
            *seen.entry((pid, "extra_runs crash_takeover")).or_default() += u64::from(takeover);
        }
    }
    for Entry { pid, what, .. } in &case.entries {
        match what {
            What::Ack { .. } => *seen.entry((*pid, "acks ")).or_default() += 1,
            What::StoredDeadLetter { .. } => *seen.entry((*pid, "dead_letters")).or_default() += 1,
            _ => {}
        }
    }
    for Entry { pid, what, .. } in &case.entries {
        let What::Counted { counts } = what else { continue };
        for name in ["claims granted", "extra_runs crash_takeover", "acks ", "dead_letters"] {
            let counted: u64 =
                counts.iter().filter(|(counted, _)| counted.starts_with(name)).map(|(_, count)| count).sum();
            let seen = seen.get(&(*pid, name)).copied().unwrap_or(0);
            if counted != seen {
                judgement.found(
                    "S20",
                    format!("process {pid} has counted {counted} {name}, and there were {seen}"),
                );
            }
        }
    }
}

/// S16: what the store answered about each key could have come from the rules.
fn linear(case: &Case, calls: &Calls, judgement: &mut Judgement) {
    for (key, of_key) in &calls.by_key {
        // A call that was kept waiting for the row has seen nothing of it.
        let saw = |call: &&Call| !(case.locks_rows && call.was_kept_waiting());
        match explain(&of_key.iter().filter(saw).cloned().collect::<Vec<Call>>()) {
            Found::Order => judgement.reach("key explained by the rules"),
            Found::Undecided => judgement.reach("key not decided"),
            Found::Nothing => {
                let told: Vec<String> = of_key.iter().map(|call| format!("\n    {call:?}")).collect();
                judgement.found("S16", format!("the rules do not explain {key}:{}", told.concat()));
            }
        }
    }
}
