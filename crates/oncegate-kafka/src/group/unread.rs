//! Watches whether the client begins to read the partitions that the group has given it.
//!
//! librdkafka 2.12 asks for committed offsets one assignment after the other, each after all
//! commits and stops of partitions before it. If one of their answers never comes, as after a
//! broker that came and went, the client sends heartbeats and reads nothing, or only the partitions
//! that it had before. It raises no error. So it is replaced. If the next one does not begin
//! either, the cause is elsewhere, and a third one would not mend it.

use std::time::{Duration, Instant};

use super::member::Member;
use crate::client::trouble::{READ, Trouble};
use crate::partitions::standing::ReadState;
use oncegate_runtime::observe::Event;

/// The time after which a partition that is not read is in the status. Shorter ones are in every
/// rebalance.
const REPORT_AFTER: Duration = Duration::from_secs(10);

/// The time that a client may take to begin to read a partition, while it is connected.
pub(crate) const UNREAD_LIMIT: Duration = Duration::from_secs(60);

/// Watches one client, on its poll thread.
#[derive(Debug)]
pub(crate) struct UnreadWatch {
    /// `true` if another client may help: this one does not replace one that failed for the same
    /// reason, or it has read every partition since.
    may_replace: bool,
    /// `true` once the failure was counted.
    is_counted: bool,
}

impl UnreadWatch {
    pub(crate) fn new(may_replace: bool) -> Self {
        Self {
            may_replace,
            is_counted: false,
        }
    }

    /// Returns the reason if the client should be replaced; never waits.
    pub(crate) fn look(&mut self, member: &Member) -> Option<Trouble> {
        let (partition, count, lasts) = match member.assignments.reading()? {
            ReadState::All => {
                *self = Self::new(true);
                member.failures.succeeded(READ);
                return None;
            }
            ReadState::Unread {
                partition,
                count,
                lasts,
            } => (partition, count, lasts),
        };
        // Without a connection, that is the reason.
        if lasts < REPORT_AFTER || member.connection.lost_for().is_some() {
            return None;
        }
        let others = match count {
            1 => String::new(),
            count => format!(" and {} more partitions", count - 1),
        };
        let help = if self.may_replace {
            ""
        } else {
            "; another client did not help: look for transactions that hold the group's offsets, and at the \
             brokers' log"
        };
        let why =
            format!("the client has not begun to read {partition}{others} for {lasts:.0?}{help}");
        member.failures.failed(Instant::now(), READ, &why);
        if !std::mem::replace(&mut self.is_counted, true) {
            tracing::warn!(why, "partitions wait");
            member
                .observer
                .observe(Event::SourceError { operation: READ });
        }
        (self.may_replace && lasts >= UNREAD_LIMIT).then(|| Trouble::unread(lasts))
    }
}
