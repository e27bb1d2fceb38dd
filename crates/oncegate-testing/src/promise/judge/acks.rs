//! The acknowledgements and the commits of offsets.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::super::evidence::{Evidence, OffsetCommit, PromiseReport};
use super::super::history::{Entry, Occurrence};
use super::super::operation::{Op, StoreAnswer};

/// S1, S9 and S12: a process acknowledges only what the store's last reply about the key reports as
/// finished.
pub(super) fn acks(evidence: &Evidence, report: &mut PromiseReport) {
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
    let mut dead_lettered: HashSet<(u32, &str)> = HashSet::new();
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
                    (Op::Complete { .. }, StoreAnswer::Held { .. })
                    | (
                        Op::Claim { .. },
                        StoreAnswer::Completed { .. }
                        | StoreAnswer::Failed {
                            handed_over: true, ..
                        },
                    ) => Word::Finished,
                    (Op::Complete { .. }, StoreAnswer::Lost) => Word::Lost,
                    // Of another content than the record's: what was completed is still completed.
                    (Op::Claim { .. }, StoreAnswer::Mismatch)
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
                dead_lettered.insert((*pid, origin));
            }
            Occurrence::Ack { origin, key } => {
                let word = key
                    .as_ref()
                    .and_then(|key| words.get(&(*pid, key.as_str())));
                let invariant = match word {
                    Some(Word::Finished) => continue,
                    _ if dead_lettered.contains(&(*pid, origin)) => continue,
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

/// S10 and S11, from the broker's own log of commits.
pub(super) fn commits(evidence: &Evidence, report: &mut PromiseReport) {
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
        // What lies below the former commit was looked at with that one.
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
