//! The actions of a redrive on dead letters, and their counts.

use oncegate_runtime::dead_letter_reader::StoredDeadLetter;

/// The action for a dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RedriveAction {
    /// Reopen its record, then send its message to this topic or queue.
    Reopen {
        /// The topic or queue.
        to: String,
    },
    /// Send its message to this topic or queue without a reopen: it has no record of its own, or
    /// the record was already reopened by a redrive that did not finish.
    Send {
        /// The topic or queue.
        to: String,
    },
    /// Nothing: the message has been completed since.
    Completed,
    /// Nothing: an attempt runs or a retry waits, so a consumer holds a delivery.
    UnderWay,
    /// Nothing: this redrive has sent another dead letter of the same message.
    SentAlready,
    /// Nothing: the record belongs to a message with other content, and this one would fail again
    /// with a mismatch.
    Mismatched,
    /// Nothing: the store has no record of it, though it has failed there. It has expired, or this
    /// is another store, whose records say nothing of the message; see
    /// [`Redrive::without_records`](crate::Redrive::without_records).
    RecordMissing,
    /// Nothing: its record cannot be read, for this reason.
    Unreadable(String),
    /// Nothing: its message cannot be sent anywhere, for this reason.
    NoWayBack(String),
}

impl RedriveAction {
    /// Returns the lower-case name of the action.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Reopen { .. } => "reopen",
            Self::Send { .. } => "send",
            Self::Completed => "completed",
            Self::UnderWay => "under_way",
            Self::SentAlready => "sent_already",
            Self::Mismatched => "mismatched",
            Self::RecordMissing => "record_missing",
            Self::Unreadable(_) => "unreadable",
            Self::NoWayBack(_) => "no_way_back",
        }
    }

    /// Returns the topic or queue to which the message is sent, if it is sent.
    pub fn to(&self) -> Option<&str> {
        match self {
            Self::Reopen { to } | Self::Send { to } => Some(to),
            _ => None,
        }
    }

    /// Returns whether an operator must handle the dead letter.
    pub const fn is_trouble(&self) -> bool {
        matches!(
            self,
            Self::Mismatched | Self::RecordMissing | Self::Unreadable(_) | Self::NoWayBack(_)
        )
    }
}

/// The action that a redrive took, or would take, on one dead letter.
#[derive(Debug)]
pub struct Step<'a> {
    /// The dead letter.
    pub letter: &'a StoredDeadLetter,
    /// The action for it.
    pub action: &'a RedriveAction,
}

/// The number of dead letters with each outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Redriven {
    /// Dead letters that were read.
    pub seen: u64,
    /// Dead letters that were wanted.
    pub wanted: u64,
    /// Messages that were sent, or would be.
    pub sent: u64,
    /// Sent messages whose records were reopened first.
    pub reopened: u64,
    /// Messages that have been completed since.
    pub completed: u64,
    /// Messages that run, or wait for a retry.
    pub under_way: u64,
    /// Dead letters of messages that were already sent.
    pub sent_already: u64,
    /// Records of messages with other content.
    pub mismatched: u64,
    /// Dead letters whose records should be in the store and are not.
    pub record_missing: u64,
    /// Records that cannot be read.
    pub unreadable: u64,
    /// Messages that cannot be sent anywhere.
    pub no_way_back: u64,
}

impl Redriven {
    /// Returns the number of dead letters that an operator must handle.
    pub const fn troubles(&self) -> u64 {
        self.mismatched + self.record_missing + self.unreadable + self.no_way_back
    }

    pub(super) fn count(&mut self, action: &RedriveAction) {
        let counter = match action {
            RedriveAction::Reopen { .. } => {
                self.reopened += 1;
                &mut self.sent
            }
            RedriveAction::Send { .. } => &mut self.sent,
            RedriveAction::Completed => &mut self.completed,
            RedriveAction::UnderWay => &mut self.under_way,
            RedriveAction::SentAlready => &mut self.sent_already,
            RedriveAction::Mismatched => &mut self.mismatched,
            RedriveAction::RecordMissing => &mut self.record_missing,
            RedriveAction::Unreadable(_) => &mut self.unreadable,
            RedriveAction::NoWayBack(_) => &mut self.no_way_back,
        };
        *counter += 1;
    }
}
