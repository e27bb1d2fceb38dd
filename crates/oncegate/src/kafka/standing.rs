//! Where a partition stands, in numbers that need no question to the broker.

use std::time::Duration;

use super::assignment::Partition;

/// What the client last knew of the end of a partition's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogEnd {
    /// The offset after the last message that may be read.
    pub(crate) stable: i64,
    /// The offset that the client fetches next. It goes past markers of transactions, which are no messages.
    pub(crate) next: i64,
    /// How many messages the client holds that nobody has polled.
    pub(crate) queued: u64,
}

/// Where a partition stands.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    pub(crate) partition: Partition,
    pub(crate) received: Option<i64>,
    /// How many messages have been received from the first unfinished one on.
    pub(crate) span: usize,
    pub(crate) watermark: Option<i64>,
    pub(crate) committed: Option<i64>,
    pub(crate) uncommitted_for: Option<Duration>,
    pub(crate) delivered_ago: Duration,
    pub(crate) oldest_unfinished: Option<Duration>,
    pub(crate) crowded: bool,
    pub(crate) end: Option<LogEnd>,
}

impl Standing {
    /// How many messages are not finished, those at the broker included.
    ///
    /// Offsets that hold no message (markers of transactions, aborted messages) count only until the client has fetched
    /// past them.
    pub(crate) fn lag(&self) -> Option<u64> {
        self.undelivered()?.checked_add(u64::try_from(self.span).ok()?)
    }

    /// How many messages the broker and its client have that have not come. The client tells its part every few
    /// seconds; what has come since counts.
    pub(crate) fn undelivered(&self) -> Option<u64> {
        let end = self.end?;
        let at_broker = u64::try_from(end.stable.saturating_sub(end.next).max(0)).ok()?;
        let known = at_broker.saturating_add(end.queued);
        let left = self.received.map(|last| end.stable.saturating_sub(last + 1).max(0));
        Some(left.and_then(|left| u64::try_from(left).ok()).map_or(known, |left| known.min(left)))
    }
}
