//! The state of one partition in one epoch.

use super::standing::LogEnd;
use super::watermark::Watermark;

/// The state of a partition from its assignment to its revocation, behind one lock.
#[derive(Debug)]
pub(super) struct Ledger {
    /// `None` once the partition is given up.
    pub(super) epoch: Option<u64>,
    pub(super) watermark: Watermark,
    /// The time at which the last message was received.
    pub(super) delivered_at_ms: u64,
    /// The time since which there has been something to commit.
    pub(super) due_at_ms: Option<u64>,
    /// `true` while fetching is paused because too many messages are unfinished, or not due.
    pub(super) crowded: bool,
    pub(super) end: Option<LogEnd>,
    /// The time since which the client has reported messages behind one open transaction.
    pub(super) withheld_at_ms: Option<u64>,
    /// The time since which the client has reported that it has not begun to read.
    pub(super) unread_at_ms: Option<u64>,
    /// `true` once the client has reported that it reads the partition.
    pub(super) is_read: bool,
    pub(super) begin: Begin,
    /// The position that the client was sought to, if the partition was held.
    pub(super) sought: Option<i64>,
    /// `true` once the client's position in this partition is known to be from this epoch.
    pub(super) is_position_ours: bool,
}

/// The beginning of a partition without a committed offset, if the client must not decide it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Begin {
    /// The partition is being read.
    #[default]
    Begun,
    /// The position is not known yet. Messages are dropped.
    Unresolved,
    /// The partition begins at this offset. Messages are dropped until it is committed and the
    /// client has sought to it.
    At(i64),
}

impl Ledger {
    pub(super) fn new(epoch: u64, watermark: Watermark) -> Self {
        Self {
            epoch: Some(epoch),
            watermark,
            delivered_at_ms: 0,
            due_at_ms: None,
            crowded: false,
            end: None,
            withheld_at_ms: None,
            unread_at_ms: None,
            is_read: false,
            begin: Begin::Begun,
            sought: None,
            is_position_ours: false,
        }
    }

    /// Returns whether the client may have moved past offsets without a message, after everything
    /// received.
    pub(super) fn may_pass(&self) -> bool {
        let next = self.end.filter(|end| end.queued == 0).map(|end| end.next);
        self.begin == Begin::Begun
            && self.watermark.span() == 0
            && next > self.watermark.first_unfinished()
    }

    /// Notes the end of the log, if it is reported.
    pub(super) fn note_end(&mut self, end: Option<LogEnd>, now_ms: u64) {
        let Some(end) = end else { return };
        // A stable offset that moves belongs to transactions that end.
        let is_the_same = self.end.is_some_and(|before| before.stable == end.stable);
        if end.withheld() == 0 || !is_the_same {
            self.withheld_at_ms = None;
        }
        if end.withheld() > 0 {
            self.withheld_at_ms.get_or_insert(now_ms);
        }
        self.end = Some(end);
    }

    /// Updates the time since which a commit is due, after each change of the watermark.
    pub(super) fn mark_due(&mut self, now_ms: u64) {
        self.due_at_ms = match self.watermark.due() {
            Some(_) => self.due_at_ms.or(Some(now_ms)),
            None => None,
        };
    }
}
