//! The record that a store holds for a key.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

use bytes::Bytes;

use crate::key::Fingerprint;

/// The time for which a PENDING record is kept after its lease has expired: 30 days.
///
/// The record expires `lease + TAIL` after the last extend. A process that takes over long after a
/// crash still reads the attempt number from it. The tail is a constant of the record format: a
/// store tells a live lease from an expired one by the remaining time to live, and needs neither a
/// clock nor a stored instant.
pub const TAIL: Duration = Duration::from_secs(30 * 86_400);

/// The maximum size of a stored reason, in bytes. A longer reason is cut at a character boundary.
pub const MAX_REASON_BYTES: usize = 256;

/// The highest attempt number that a record stores. Later attempts keep this number.
pub const MAX_ATTEMPTS_COUNTED: u8 = u8::MAX;

/// An instant on the store's clock, in microseconds since an origin that only the store knows.
///
/// Leases are compared in whole milliseconds. Fencing tokens are derived from microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreTime {
    micros: u64,
}

impl StoreTime {
    /// The instant `micros` microseconds after the origin.
    pub const fn from_micros(micros: u64) -> Self {
        Self { micros }
    }

    /// The instant `millis` milliseconds after the origin.
    pub const fn from_millis(millis: u64) -> Self {
        Self {
            micros: millis.saturating_mul(1_000),
        }
    }

    /// Whole milliseconds since the origin.
    pub const fn millis(self) -> u64 {
        self.micros / 1_000
    }

    /// Microseconds since the origin.
    pub const fn micros(self) -> u64 {
        self.micros
    }
}

impl Add<Duration> for StoreTime {
    type Output = Self;

    /// The instant `later` after this one, in whole milliseconds. Saturates instead of overflowing.
    fn add(self, later: Duration) -> Self {
        Self::from_millis(self.millis().saturating_add(whole_millis(later)))
    }
}

/// Converts a duration to whole milliseconds, the unit that stores use. Saturates at `u64::MAX`.
pub fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// An owner token: 128 random bits, new for each attempt. The caller that presents it owns the
/// claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// Creates a token from random bits. They must come from a generator that no other process
    /// shares.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits.to_be_bytes())
    }

    /// The token's bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The part of the token that a record keeps after the attempt has ended.
    pub const fn tag(&self) -> TokenTag {
        let [a, b, c, d, ..] = self.0;
        TokenTag([a, b, c, d])
    }
}

impl From<[u8; 16]> for Token {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Token {
    /// Prints the tag only: a token read from a log must not be enough to complete another owner's
    /// claim.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.tag(), f)
    }
}

/// The first four bytes of an owner token. A record keeps them when the attempt has ended.
///
/// The tag distinguishes a repeated call of the last owner from a call of another caller. It
/// protects nothing: the state is final by then, and a caller whose tag matches by chance (one in
/// 2³²) only gets the reply that nothing is left to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenTag(pub [u8; 4]);

impl TokenTag {
    /// The tag of a record that was not written by the end of an attempt, such as a reopened
    /// record.
    pub const NONE: Self = Self([0; 4]);
}

impl fmt::Debug for TokenTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}…", u32::from_be_bytes(self.0))
    }
}

/// A fencing token: a number that only grows per key. A downstream system can refuse a smaller one
/// than the last.
///
/// The term is from Kleppmann, "How to do distributed locking" (2016).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(pub u64);

/// The record that a store holds for a key. The absence of a record is a state too.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// The instant at which the record expires and counts as absent.
    pub expires_at: StoreTime,
    /// Digest of the rest of the payload, when the gate asked for one.
    pub fingerprint: Option<Fingerprint>,
    /// The state of the key.
    pub state: State,
}

/// The state of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The key is claimed. The lease ends [`TAIL`] before the record expires.
    Pending {
        /// The owner token of the claim.
        token: Token,
        /// The number of this attempt, from 1.
        attempt: u8,
        /// Tells whether an earlier attempt of this key ended without reporting an outcome.
        recovery: Recovery,
        /// The fencing token of this attempt, if the gate is fenced.
        fencing_token: Option<FencingToken>,
    },
    /// An attempt failed or was interrupted. The retry is due [`TAIL`] before the record expires.
    Released {
        /// The tag of the owner that released it.
        by: TokenTag,
        /// The number of attempts that have counted so far.
        attempt: u8,
        /// Tells whether an attempt of this key ended without reporting an outcome: the recovery of
        /// the next attempt.
        recovery: Recovery,
        /// The last fencing token issued, if the gate is fenced.
        fencing_token: Option<FencingToken>,
        /// The reason as text; empty when there is none.
        reason: String,
    },
    /// The handler has succeeded. Final until the retention ends.
    Completed {
        /// The tag of the owner that completed it.
        by: TokenTag,
        /// The encoded result. Duplicates get exactly these bytes.
        result: Bytes,
    },
    /// The message has failed permanently. Final until the retention ends.
    Failed {
        /// The tag of the owner that failed it.
        by: TokenTag,
        /// The number of attempts that were made.
        attempt: u8,
        /// `true` once the message is durably stored as a dead letter.
        handed_over: bool,
        /// The reason as text.
        reason: String,
    },
}

/// Tells whether an earlier attempt of a key ended without reporting an outcome, so that its effect
/// may have happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Every earlier attempt reported its outcome.
    #[default]
    None,
    /// An earlier attempt was taken over, or thrown away; this attempt follows a release.
    Earlier,
    /// The attempt took over a claim whose lease had expired. In a released record: an attempt that
    /// had done so was not started, so the next one takes over.
    Takeover,
}

impl Recovery {
    /// The word for it in tables: `none`, `earlier` or `takeover`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Earlier => "earlier",
            Self::Takeover => "takeover",
        }
    }

    /// Returns whether any earlier attempt ended without reporting an outcome.
    pub const fn recovered(self) -> bool {
        !matches!(self, Self::None)
    }
}

impl Record {
    /// Returns whether the record has not expired at `now`.
    pub fn kept(&self, now: StoreTime) -> bool {
        now.millis() <= self.expires_at.millis()
    }

    /// The time from `now` until the lease expires or the retry is due; `None` when that time has
    /// passed.
    ///
    /// Compared in whole milliseconds: at the very millisecond of the end, the time has not passed
    /// yet.
    pub fn protected_for(&self, now: StoreTime) -> Option<Duration> {
        let end = self.expires_at.millis().saturating_sub(whole_millis(TAIL));
        end.checked_sub(now.millis())
            .map(|left| Duration::from_millis(left + 1))
    }

    /// Returns whether both records have the same content. Their expiry is ignored.
    ///
    /// A reset must hit the record that the operator has read. A heartbeat of the owner in between
    /// changes only the expiry, so the reset still applies.
    pub fn same_content(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint && self.state == other.state
    }
}
