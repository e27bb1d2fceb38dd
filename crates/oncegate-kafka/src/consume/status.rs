//! The source's status, from state in memory: it waits for neither the poll thread nor the broker.

use std::time::Instant;

use crate::group::member::Member;
use crate::partitions::standing::Standing;
use oncegate_runtime::health::{PartitionStatus, PauseCause, SourceStatus};

pub(crate) fn of(member: &Member) -> SourceStatus {
    let polls = member.polls();
    let partitions = member.assignments.standings();
    SourceStatus {
        group: None,
        disconnected_for: member.connection.lost_for(),
        others_connect: member.connection.others_connect(),
        polled_ago: polls.last.map(|last| last.elapsed()),
        partitions: partitions
            .into_iter()
            .map(|standing| partition(&standing, polls.held))
            .collect(),
        failures: member.failures.at(Instant::now()),
    }
}

/// Returns the status of a partition.
///
/// Log ends, and so lag and the undelivered count, are as old as the client's last statistics: at
/// most 5 s, or `statistics.interval.ms` if that is set. For a paused partition they are from
/// before the pause.
fn partition(standing: &Standing, held: bool) -> PartitionStatus {
    let paused = match (standing.waiting, standing.crowded, held) {
        (1.., _, _) => Some(PauseCause::NotDue),
        (0, true, _) => Some(PauseCause::Span),
        (0, false, true) => Some(PauseCause::Full),
        (0, false, false) => None,
    };
    PartitionStatus {
        lag: standing.lag(),
        undelivered: standing.undelivered(),
        withheld: standing.end.map(|end| end.withheld()),
        withheld_for: standing.withheld_for,
        received: standing.received,
        watermark: standing.watermark,
        committed: standing.committed,
        uncommitted_for: standing.uncommitted_for,
        delivered_ago: Some(standing.delivered_ago),
        oldest_unfinished: standing.oldest_unfinished,
        paused,
        ..PartitionStatus::new(&*standing.partition.topic, standing.partition.number)
    }
}
