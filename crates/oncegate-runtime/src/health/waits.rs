//! Sentences for people about everything that waits.

use std::fmt;

use super::PauseCause;
use super::stage::{Stage, Unfinished};
use super::status::{BreakerStatus, PartitionStatus, ScopePause, ScopeStatus, Status};
use super::words::Words;

/// The most sentences of a status.
const SENTENCES_MOST: usize = 64;
/// The youngest first message of a partition that is named, in seconds: most are gone sooner.
const AGE_NAMED_SECONDS: u64 = 5;

impl Status {
    /// Returns a sentence for each thing that waits, with what it waits for, at most 64: paused
    /// scopes, open breakers, stores that are away, messages that have failed, and the first
    /// unfinished message of each partition, the oldest first. Empty when nothing waits for longer
    /// than usual.
    ///
    /// Reasons in them come from handlers: escape them where markup is read.
    pub fn waits(&self) -> Vec<String> {
        let mut waits: Vec<String> = self.scopes.iter().flat_map(of_scope).collect();
        waits.extend(self.failing.iter().map(with_key));
        let mut partitions: Vec<&PartitionStatus> = self.source.partitions.iter().collect();
        partitions.sort_by_key(|partition| std::cmp::Reverse(partition.oldest_unfinished));
        waits.extend(
            partitions
                .into_iter()
                .flat_map(|one| self.of_partition(one)),
        );
        waits.truncate(SENTENCES_MOST);
        waits
    }

    fn of_partition(&self, partition: &PartitionStatus) -> Vec<String> {
        let PartitionStatus {
            topic,
            partition: number,
            ..
        } = partition;
        let first = partition.first.as_ref().filter(|first| {
            let is_known = self.failing.iter().any(|one| one.origin == first.origin);
            !is_known && first.age.as_secs() >= AGE_NAMED_SECONDS && first.stage != Stage::Running
        });
        let mut waits = Vec::new();
        if let Some(first) = first {
            let behind = partition.in_flight.saturating_sub(1);
            let others = match behind {
                0 => String::new(),
                1 => "; 1 other message of its partition is in flight".to_owned(),
                _ => format!("; {behind} other messages of its partition are in flight"),
            };
            waits.push(format!("{}{others}", with_key(first)));
        }
        if let Some(withheld) = partition.withheld.filter(|withheld| *withheld > 0) {
            let lasts = partition.withheld_for.unwrap_or_default();
            waits.push(format!(
                "{topic}/{number}: {withheld} offsets wait behind an open transaction, for {}",
                Words(lasts)
            ));
        }
        if partition.paused == Some(PauseCause::Span) {
            waits.push(format!(
                "{topic}/{number} fetches nothing: too much waits behind its first unfinished message"
            ));
        }
        waits
    }
}

/// Names the message and the key of its record.
fn with_key(message: &Unfinished) -> String {
    match &message.key {
        Some(key) => format!("{message} (key {key})"),
        None => message.to_string(),
    }
}

fn of_scope(scope: &ScopeStatus) -> Vec<String> {
    let name = &scope.scope;
    let mut waits = Vec::new();
    if let Some(pause) = &scope.pause {
        waits.push(format!("`{name}` is {pause}"));
    }
    if let Some(breaker) = &scope.breaker {
        waits.push(format!("the handler of `{name}` is paused{breaker}"));
    }
    for outage in scope.outages.iter().filter(|outage| !outage.open) {
        let waiting = outage.waiting;
        let word = if waiting == 1 {
            "message waits"
        } else {
            "messages wait"
        };
        waits.push(format!(
            "{waiting} {word} for the store of `{name}`, for {}: {}",
            Words(outage.lasts),
            outage.error
        ));
    }
    waits
}

impl fmt::Display for BreakerStatus {
    /// ` for 2 min, the next message probes in 12 s: connection refused`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(lasts) = self.lasts {
            write!(f, " for {}", Words(lasts))?;
        }
        match self.next_probe {
            None => f.write_str(", a message probes now")?,
            Some(next) if next.is_zero() => f.write_str(", the next message probes")?,
            Some(next) => write!(f, ", the next message probes in {}", Words(next))?,
        }
        match &self.reason {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ScopePause {
    /// `paused by ada for 2 min: the bank is away`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { by, reason, .. } = self;
        write!(f, "paused by {by} for {}: {reason}", Words(self.lasts))
    }
}
