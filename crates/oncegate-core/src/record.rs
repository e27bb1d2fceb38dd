//! What a store holds for a key.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

use bytes::Bytes;

use crate::key::Fingerprint;

/// How long a claim outlives its lease: 30 days.
///
/// A PENDING record expires `lease + TAIL` after it was last extended, so that whoever takes over
/// long after a crash still sees which attempt it is. The tail is a constant of the record format:
/// a store needs no clock and no stored instant to tell a live lease from one that is over.
pub const TAIL: Duration = Duration::from_secs(30 * 86_400);

/// The most bytes of a reason that a record keeps; the rest is cut at a character boundary.
pub const MAX_REASON_BYTES: usize = 256;

/// The most attempts that a record counts; further ones stay at this number.
pub const MAX_ATTEMPTS_COUNTED: u8 = u8::MAX;

/// An instant on the store's clock, in microseconds since an origin that only the store knows.
///
/// Leases are compared in whole milliseconds, fences are made of microseconds.
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
        Self { micros: millis.saturating_mul(1_000) }
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

    /// The instant `later` after this one, in whole milliseconds; it stops at the end of time.
    fn add(self, later: Duration) -> Self {
        Self::from_millis(self.millis().saturating_add(whole_millis(later)))
    }
}

/// A duration in whole milliseconds, as the stores count it.
pub fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// 128 random bits, new for each attempt: whoever shows it owns the claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// A token of these random bits. They must come from a generator that no other process shares.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits.to_be_bytes())
    }

    /// The token's bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// What a record remembers of the token that ended an attempt.
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
    /// Shows the tag alone: whoever reads a log must not be able to complete another's claim.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.tag(), f)
    }
}

/// The first four bytes of a token, kept when an attempt has ended.
///
/// It tells a repeat of the last owner from a stranger. It protects nothing: by then the state is
/// settled, and a stranger who matches by chance (one in 2³²) is told that a settled record is settled.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenTag(pub [u8; 4]);

impl TokenTag {
    /// The tag of a record that no attempt has ended, such as a reopened one.
    pub const NONE: Self = Self([0; 4]);
}

impl fmt::Debug for TokenTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}…", u32::from_be_bytes(self.0))
    }
}

/// A number that only grows per key, for downstream systems that can refuse a smaller one.
///
/// The idea is the fencing token of Kleppmann, "How to do distributed locking" (2016).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(pub u64);

/// What a store holds for a key. Its absence is a state too.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// When the store forgets the record.
    pub expires_at: StoreTime,
    /// Digest of the rest of the payload, when the gate asked for one.
    pub fingerprint: Option<Fingerprint>,
    /// Where the key stands.
    pub state: State,
}

/// Where a key stands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Claimed. The lease ends [`TAIL`] before the record expires.
    Pending {
        /// Who owns the claim.
        token: Token,
        /// Which attempt this is, from 1.
        attempt: u8,
        /// Whether an attempt of this key ever ended without a word.
        recovery: Recovery,
        /// The fence handed to the handler, when the gate is fenced.
        fence: Option<Fence>,
    },
    /// A failed or interrupted attempt waits for its retry, which is due [`TAIL`] before the record expires.
    Released {
        /// Who released it.
        by: TokenTag,
        /// How many attempts count so far.
        attempt: u8,
        /// Whether an attempt of this key ever ended without a word.
        recovered: bool,
        /// The last fence handed out, when the gate is fenced.
        fence: Option<Fence>,
        /// Why, in words; empty when there is nothing to say.
        reason: String,
    },
    /// Done. Final for the retention.
    Completed {
        /// Who completed it.
        by: TokenTag,
        /// The encoded result; duplicates get exactly these bytes.
        result: Bytes,
    },
    /// Given up.
    Failed {
        /// Who gave up.
        by: TokenTag,
        /// How many attempts it took.
        attempt: u8,
        /// Whether the message is durably in the dead letters.
        handed_over: bool,
        /// Why, in words.
        reason: String,
    },
}

/// Whether an attempt of a key ended without a word, so that its effect may have happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Every earlier attempt said how it ended.
    #[default]
    None,
    /// An earlier attempt was taken over, and this one follows a release.
    Earlier,
    /// This attempt took over a claim whose lease was over.
    Takeover,
}

impl Recovery {
    /// Whether any earlier attempt ended without a word.
    pub const fn recovered(self) -> bool {
        !matches!(self, Self::None)
    }
}

impl Record {
    /// Whether the store still keeps the record at `now`.
    pub fn kept(&self, now: StoreTime) -> bool {
        now.millis() <= self.expires_at.millis()
    }

    /// How long from `now` the lease lasts or the retry is put off; `None` when that time is over.
    ///
    /// "Over" means later than the end, in whole milliseconds.
    pub fn protected_for(&self, now: StoreTime) -> Option<Duration> {
        let end = self.expires_at.millis().saturating_sub(whole_millis(TAIL));
        end.checked_sub(now.millis()).map(|left| Duration::from_millis(left + 1))
    }

    /// Whether both records say the same, whatever is left of their time.
    ///
    /// An operator who looked at a record and then resets it must hit the record he saw; that its
    /// owner has sent a heartbeat in between changes nothing.
    pub fn same_content(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint && self.state == other.state
    }
}
