//! The progress of a partition, in numbers that need no request to the broker.

use std::time::Duration;

use super::partition::Partition;

/// The end of a partition's log, as the client last knew it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogEnd {
    /// The offset after the last message that may be read.
    pub(crate) stable: i64,
    /// The offset after the last message. Those behind the stable offset wait for the end of a
    /// transaction.
    pub(crate) last: i64,
    /// The offset that the client fetches next. It moves past transaction markers, which are not
    /// messages.
    pub(crate) next: i64,
    /// The number of prefetched messages that have not been polled.
    pub(crate) queued: u64,
}

/// A client's report on a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartitionReport {
    /// `None` while it is not known.
    pub(crate) end: Option<LogEnd>,
    /// `true` once the client reads the partition. Before, it asks the group for the committed
    /// offset.
    pub(crate) has_begun: bool,
}

/// A client's report on all partitions that it should read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReadState {
    /// The client reads all of them.
    All,
    /// The client has not begun to read `count` of them.
    Unread {
        /// The partition for which this has lasted longest.
        partition: Partition,
        count: usize,
        lasts: Duration,
    },
}

/// The progress of a partition.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    pub(crate) partition: Partition,
    pub(crate) received: Option<i64>,
    /// The number of received messages, counted from the first unfinished one.
    pub(crate) span: usize,
    pub(crate) watermark: Option<i64>,
    pub(crate) committed: Option<i64>,
    pub(crate) uncommitted_for: Option<Duration>,
    pub(crate) delivered_ago: Duration,
    pub(crate) oldest_unfinished: Option<Duration>,
    pub(crate) crowded: bool,
    /// The number of received messages that are not due.
    pub(crate) waiting: usize,
    pub(crate) end: Option<LogEnd>,
    /// The time since which the same transaction has been open.
    pub(crate) withheld_for: Option<Duration>,
}

impl LogEnd {
    /// Returns how many offsets are behind an open transaction, its own included.
    pub(crate) fn withheld(&self) -> u64 {
        u64::try_from(self.last.saturating_sub(self.stable)).unwrap_or_default()
    }
}

impl Standing {
    /// Returns how many messages are not finished, including those that are still at the broker and
    /// those behind an open transaction.
    ///
    /// Offsets without a message (transaction markers, aborted messages) count only until the
    /// client has fetched past them.
    pub(crate) fn lag(&self) -> Option<u64> {
        let withheld = self.end?.withheld();
        self.undelivered()?
            .checked_add(withheld)?
            .checked_add(u64::try_from(self.span).ok()?)
    }

    /// Returns how many messages the broker and the client have that we have not received. The
    /// client reports its numbers every few seconds, so messages received since then are counted,
    /// too.
    pub(crate) fn undelivered(&self) -> Option<u64> {
        let end = self.end?;
        let at_broker = u64::try_from(end.stable.saturating_sub(end.next).max(0)).ok()?;
        let known = at_broker.saturating_add(end.queued);
        let left = self
            .received
            .map(|last| end.stable.saturating_sub(last + 1).max(0));
        Some(
            left.and_then(|left| u64::try_from(left).ok())
                .map_or(known, |left| known.min(left)),
        )
    }
}
