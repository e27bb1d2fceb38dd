//! The operations on a record and their replies.

use std::time::Duration;

use bytes::Bytes;

use crate::key::Fingerprint;
use crate::record::{FencingToken, MAX_REASON_BYTES, Record, Recovery, Token, TokenTag};

/// A change of a record. Callers pass durations, never instants: only the store's clock counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Requests the right to run the handler. The reply is a [`Verdict`].
    Claim {
        /// The owner token: random, created before the first try. A repeat after a lost reply uses
        /// the same token.
        token: Token,
        /// The time for which the claim protects its owner without an extend (the lease).
        lease: Duration,
        /// Digest of the rest of the payload, if the gate uses fingerprints.
        fingerprint: Option<Fingerprint>,
        /// `true` if the attempt needs a fencing token.
        fenced: bool,
        /// The longest lease of any owner in the scope. What is left of another owner's lease is
        /// cut to it: if more is left, the store's clock has gone back. `Duration::MAX` cuts
        /// nothing.
        longest_lease: Duration,
    },
    /// Renews the lease (heartbeat): it ends `lease` from now. Never shortens a lease.
    Extend {
        /// The owner token.
        token: Token,
        /// The lease, from now.
        lease: Duration,
    },
    /// Records that the handler has succeeded.
    Complete {
        /// The owner token.
        token: Token,
        /// The fingerprint of the claim. A completion of a claim that the store has lost writes it
        /// again.
        fingerprint: Option<Fingerprint>,
        /// The encoded result, which duplicates get.
        result: Bytes,
        /// The time for which the record is kept.
        retention: Duration,
    },
    /// Records that the handler has not succeeded and another attempt may follow.
    Release {
        /// The owner token.
        token: Token,
        /// The time from now for which the key cannot be claimed.
        delay: Duration,
        /// The kind of end of the attempt, which decides whether it counts.
        end: ReleaseCause,
        /// The reason as text.
        reason: String,
    },
    /// Records that the message has failed permanently.
    Fail {
        /// The owner token.
        token: Token,
        /// The reason as text.
        reason: String,
        /// The time for which the record is kept.
        retention: Duration,
    },
    /// Records that the failed message is durably stored as a dead letter. Any process may do that,
    /// for the failure whose dead letter it has written, and may repeat it.
    HandOver {
        /// The tag of the owner that failed the record. Another failure, after a reopen, has a dead
        /// letter of its own.
        by: TokenTag,
    },
    /// Reopens a record for an operator, if its content is still what the operator has read.
    Reopen {
        /// The record that the operator has read.
        expected: Record,
    },
    /// Ends a record for an operator who knows what has become of its message, if its content is
    /// still what the operator has read, no attempt runs, and it is not completed.
    Resolve {
        /// The record that the operator has read.
        expected: Record,
        /// Random, and new for each resolve: the record keeps its tag. A repeat after a lost reply
        /// uses the same token.
        token: Token,
        /// The state that the record gets.
        resolution: Resolution,
        /// The time for which the record is kept.
        retention: Duration,
    },
}

/// The end of a record that an operator knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The effect has happened.
    Completed {
        /// The encoded result, which duplicates get.
        result: Bytes,
    },
    /// No further attempt is to be made. A record that has failed stays as it is.
    Failed {
        /// The reason as text.
        reason: String,
    },
}

impl Operation {
    /// Returns one lower-case word for metrics: `claim`, `extend`, `complete`, `release`, `fail`,
    /// `hand_over`, `reopen` or `resolve`.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Claim { .. } => "claim",
            Self::Extend { .. } => "extend",
            Self::Complete { .. } => "complete",
            Self::Release { .. } => "release",
            Self::Fail { .. } => "fail",
            Self::HandOver { .. } => "hand_over",
            Self::Reopen { .. } => "reopen",
            Self::Resolve { .. } => "resolve",
        }
    }
}

/// The way in which an attempt ended whose claim is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReleaseCause {
    /// The attempt has failed. It counts.
    Failed,
    /// A stop, a rebalance or an outage has interrupted it. It does not count.
    Interrupted,
    /// The handler was not started, and nothing was told of the grant: the caller gave up before it
    /// had the reply. The attempt does not count, and what it has taken over is left to the next
    /// attempt to take over.
    NotStarted,
    /// The process has thrown the attempt away because it took too long. The attempt counts, and
    /// its effect may have happened.
    Discarded,
    /// The process has thrown the attempt away for a reason that is not the attempt's: a stop or a
    /// rebalance did not wait for it. It does not count, and its effect may have happened.
    Abandoned,
}

impl ReleaseCause {
    /// Every cause.
    pub const ALL: [Self; 5] = [
        Self::Failed,
        Self::Interrupted,
        Self::NotStarted,
        Self::Discarded,
        Self::Abandoned,
    ];

    /// Returns one word or two: `failed`, `interrupted`, `not started`, `discarded` or
    /// `abandoned`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
            Self::NotStarted => "not started",
            Self::Discarded => "discarded",
            Self::Abandoned => "abandoned",
        }
    }

    /// Returns whether the attempt counts.
    pub const fn counts(self) -> bool {
        matches!(self, Self::Failed | Self::Discarded)
    }

    /// Returns whether the attempt may have had its effect although it has reported no outcome.
    pub const fn is_without_outcome(self) -> bool {
        matches!(self, Self::Discarded | Self::Abandoned)
    }
}

/// The reply to an [`Operation`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The reply to a claim.
    Verdict {
        /// The claim outcome.
        verdict: Verdict,
        /// The fingerprints were not compared, because the record's is of another specification or
        /// only one side has one.
        uncompared: bool,
    },
    /// The change was applied, by this call or an earlier one of the same owner.
    Applied {
        /// The completion found no record: the store had lost the claim.
        recreated: bool,
    },
    /// The caller does not own the record, or the record is not what the caller expected. Nothing
    /// changed.
    NotOwner,
}

/// The outcome of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The caller owns the claim and runs the handler.
    Granted(Grant),
    /// The message is completed.
    Completed {
        /// The encoded first result, byte for byte.
        result: Bytes,
    },
    /// Another owner holds the lease, or the retry is not due.
    Busy {
        /// The time to wait before the next claim; never zero.
        retry_in: Duration,
    },
    /// The message has failed permanently.
    Failed {
        /// The reason as text.
        reason: String,
        /// `true` once the message is durably stored as a dead letter.
        handed_over: bool,
        /// The tag of the owner that failed it, for [`Operation::HandOver`].
        by: TokenTag,
    },
    /// The record's fingerprint differs: the same key came with other content.
    Mismatch,
}

/// The right to run the handler once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The number of this attempt, from 1. It stays at 255.
    pub attempt: u8,
    /// Tells whether an earlier attempt ended without reporting an outcome, so that its effect may
    /// have happened.
    pub recovery: Recovery,
    /// The fencing token, which only grows for this key; present if the claim was fenced.
    pub fencing_token: Option<FencingToken>,
    /// `true` if this attempt is the first after an operator reopened the record: the effect of an
    /// earlier attempt may happen again. Reported once: a repeated claim, whose first reply was
    /// lost, returns `false`.
    pub reopened: bool,
}

/// Cuts a reason to at most [`MAX_REASON_BYTES`] bytes, at a character boundary.
pub fn cut_reason(reason: &str) -> String {
    // `str::floor_char_boundary` needs a newer compiler than this crate's minimum.
    let mut end = reason.len().min(MAX_REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason.get(..end).unwrap_or_default().to_owned()
}
