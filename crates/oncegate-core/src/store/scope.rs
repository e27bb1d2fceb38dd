//! The scope descriptor: what a store holds for a scope besides its records.
//!
//! A descriptor is created once and never silently recreated. If it is missing, has another epoch,
//! or has gone back to an earlier sequence number, the store has lost records.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::StoreError;
use crate::key::{Digest, Scope, StoreKey};

/// The format version of the descriptor's text.
const FORMAT: u8 = 1;

/// The maximum number of accepted epochs in a descriptor. The oldest are dropped first.
const MAX_ACCEPTED_EPOCHS: usize = 64;

/// The maximum size of the reason of a halt, in bytes.
const MAX_REASON_BYTES: usize = 1_024;
/// The longest name of an operator in a descriptor, in bytes.
const MAX_NAME_BYTES: usize = 128;

const MARKER_CONTEXT: &str = "oncegate 2026-11 store marker";

/// A random number that identifies the records of a scope in a store between two losses.
///
/// It is new when the scope is opened for the first time and after every accepted loss.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epoch(u128);

impl Epoch {
    /// Creates an epoch from random bits.
    #[must_use]
    pub fn from_bits(bits: u128) -> Self {
        Self(bits)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Epoch {
    type Err = InvalidEpoch;

    fn from_str(text: &str) -> Result<Self, InvalidEpoch> {
        let is_canonical = text.len() == 32
            && !text
                .bytes()
                .any(|byte| byte.is_ascii_uppercase() || byte == b'+');
        let bits = u128::from_str_radix(text, 16).ok().filter(|_| is_canonical);
        bits.map(Self).ok_or(InvalidEpoch)
    }
}

impl Serialize for Epoch {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Epoch {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The text is not a valid epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an epoch is 32 lower-case hexadecimal digits")]
pub struct InvalidEpoch;

/// The reason why no claim of the scope is granted until an operator accepts the loss.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Halt {
    /// The time at which the loss was detected, in milliseconds since the Unix epoch, on the clock
    /// of the process that detected it.
    pub at_ms: u64,
    /// The detected loss.
    pub reason: String,
    /// Epochs whose records are lost and that the store itself no longer holds.
    pub lost_epochs: Vec<Epoch>,
}

impl Halt {
    /// Creates a halt. The reason is cut to 1 KiB.
    #[must_use]
    pub fn new(at_ms: u64, reason: &str, lost_epochs: Vec<Epoch>) -> Self {
        Self {
            at_ms,
            reason: beginning(reason, MAX_REASON_BYTES),
            lost_epochs,
        }
    }
}

/// A consumer of the scope has stopped, because it would have had to give up more messages than its
/// limit allows.
///
/// It is kept, so that a consumer that is restarted does not give up as many again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetterStop {
    /// The time of the stop, in milliseconds since the Unix epoch, on the clock of the consumer.
    pub at_ms: u64,
    /// The limit that was reached, in words without data.
    pub what: String,
    /// The number of messages in a row that had been given up.
    pub in_a_row: u32,
    /// The number of the last 1,000 messages that had been given up; 0 when that limit was not
    /// reached.
    pub of_window: u32,
}

/// An operator has paused the consumers of a scope, until an operator resumes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// The time of the pause, in milliseconds since the Unix epoch, on the clock of the operator.
    pub at_ms: u64,
    /// The operator's reason, for people.
    pub reason: String,
    /// The operator.
    pub by: String,
}

impl Pause {
    /// Creates a pause. The reason is cut to 1 KiB, and the name to 128 bytes.
    #[must_use]
    pub fn new(at_ms: u64, reason: &str, by: &str) -> Self {
        Self {
            at_ms,
            reason: beginning(reason, MAX_REASON_BYTES),
            by: beginning(by, MAX_NAME_BYTES),
        }
    }
}

/// Returns at most this many of the first bytes, without a part of a character.
fn beginning(text: &str, most: usize) -> String {
    let end = text.floor_char_boundary(most);
    text.get(..end).unwrap_or_default().to_owned()
}

/// The data that a store holds for a scope besides its records: the key specification, the current
/// epoch, and whether the scope is halted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeDescriptor {
    /// The text of the key specification; see [`Descriptor`](crate::key::Descriptor).
    pub keys: String,
    /// The current epoch of the scope.
    pub epoch: Epoch,
    /// The time at which the scope was opened for the first time in this store, in milliseconds
    /// since the Unix epoch, by the clock of the process that did; 0 when it is not known.
    pub begun_at_ms: u64,
    /// Grows while messages are completed. A number smaller than an earlier one means that the
    /// store was restored to an earlier state.
    pub sequence: u64,
    /// The longest lease of any gate that has opened the scope, in milliseconds; 0 when it is not
    /// known. It only grows.
    pub longest_lease_ms: u64,
    /// Numbers of the marker records, at least one in each shard if the store has several.
    pub markers: Vec<u16>,
    /// Earlier epochs whose loss was accepted, the newest first.
    pub accepted_epochs: Vec<Epoch>,
    /// The time at which the last loss was detected, in milliseconds since the Unix epoch.
    pub lost_at_ms: Option<u64>,
    /// Set while the scope is halted: no claim may be granted.
    pub halt: Option<Halt>,
    /// Set after a consumer has stopped at its dead-letter limit, until a message succeeds or an
    /// operator accepts it.
    pub dead_letter_stop: Option<DeadLetterStop>,
    /// `true` while the circuit breaker of a consumer is open, so that one that starts begins with
    /// an open breaker.
    pub breaker_open: bool,
    /// Set while an operator has paused the scope: its consumers begin no attempt.
    pub pause: Option<Pause>,
    /// The brokers that the messages of the scope have come from, the oldest first; empty when they
    /// are not known.
    pub origins: Vec<RecordOrigin>,
}

/// A broker that messages of a scope have come from.
///
/// Two brokers may have a topic of one name, and its messages the same keys. Their records would be
/// taken for each other's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordOrigin {
    /// The broker in words, which no other one has: `Kafka cluster 4L6g3nShT-eMCtK--X86sw`.
    pub broker: String,
    /// The routes of the messages in keys; empty for all routes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<String>,
}

impl RecordOrigin {
    /// Returns whether messages with this route have come from the broker; `None` stands for any
    /// route.
    #[must_use]
    pub fn has_route(&self, route: Option<&str>) -> bool {
        self.routes.is_empty() || route.is_none_or(|route| self.routes.iter().any(|of| of == route))
    }
}

/// The JSON form of a descriptor.
#[derive(Serialize, Deserialize)]
struct DescriptorText<'a> {
    format: u8,
    #[serde(borrow)]
    keys: &'a RawValue,
    epoch: Epoch,
    #[serde(default, skip_serializing_if = "is_default")]
    begun_at_ms: u64,
    sequence: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    longest_lease_ms: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    markers: Vec<u16>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    accepted_epochs: Vec<Epoch>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost_at_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    halt: Option<Halt>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dead_letter_stop: Option<DeadLetterStop>,
    #[serde(default, skip_serializing_if = "is_default")]
    breaker_open: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pause: Option<Pause>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    origins: Vec<RecordOrigin>,
}

/// A descriptor that is compared and set must be written as it was read.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl ScopeDescriptor {
    /// Creates the descriptor of a scope that is opened for the first time.
    pub fn new(keys: impl Into<String>, epoch: Epoch) -> Self {
        Self {
            keys: keys.into(),
            epoch,
            begun_at_ms: 0,
            sequence: 0,
            longest_lease_ms: 0,
            markers: Vec::new(),
            accepted_epochs: Vec::new(),
            lost_at_ms: None,
            halt: None,
            dead_letter_stop: None,
            breaker_open: false,
            pause: None,
            origins: Vec::new(),
        }
    }

    /// Parses the text that a store holds for `scope`.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the text is not a descriptor of a known format.
    pub fn parse(scope: &Scope, text: &str) -> Result<Self, StoreError> {
        let read: DescriptorText<'_> =
            serde_json::from_str(text).map_err(|error| unreadable(scope, &error))?;
        if read.format != FORMAT {
            return Err(unreadable(scope, &format_args!("format {}", read.format)));
        }
        Ok(Self {
            keys: read.keys.get().to_owned(),
            epoch: read.epoch,
            begun_at_ms: read.begun_at_ms,
            sequence: read.sequence,
            longest_lease_ms: read.longest_lease_ms,
            markers: read.markers,
            accepted_epochs: read.accepted_epochs,
            lost_at_ms: read.lost_at_ms,
            halt: read.halt,
            dead_letter_stop: read.dead_letter_stop,
            breaker_open: read.breaker_open,
            pause: read.pause,
            origins: read.origins,
        })
    }

    /// The text that a store keeps: one line of JSON.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when `keys` is not valid JSON.
    pub fn to_text(&self) -> Result<String, StoreError> {
        let text = DescriptorText {
            format: FORMAT,
            keys: serde_json::from_str(&self.keys).map_err(invalid_keys)?,
            epoch: self.epoch,
            begun_at_ms: self.begun_at_ms,
            sequence: self.sequence,
            longest_lease_ms: self.longest_lease_ms,
            markers: self.markers.clone(),
            accepted_epochs: self.accepted_epochs.clone(),
            lost_at_ms: self.lost_at_ms,
            halt: self.halt.clone(),
            dead_letter_stop: self.dead_letter_stop.clone(),
            breaker_open: self.breaker_open,
            pause: self.pause.clone(),
            origins: self.origins.clone(),
        };
        serde_json::to_string(&text).map_err(invalid_keys)
    }

    /// Returns whether `epoch` is the current epoch, or an earlier one whose loss was accepted.
    #[must_use]
    pub fn knows(&self, epoch: Epoch) -> bool {
        self.epoch == epoch || self.accepted_epochs.contains(&epoch)
    }

    /// The descriptor of the next epoch. It accepts the loss of the current epoch and of the epochs
    /// in `lost`.
    #[must_use]
    pub fn succeed(&self, epoch: Epoch, lost: &[Epoch], lost_at_ms: u64) -> Self {
        let of_halt = self.halt.iter().flat_map(|halt| &halt.lost_epochs);
        let mut accepted = vec![self.epoch];
        for earlier in lost.iter().chain(of_halt).chain(&self.accepted_epochs) {
            if !accepted.contains(earlier) {
                accepted.push(*earlier);
            }
        }
        accepted.truncate(MAX_ACCEPTED_EPOCHS);
        Self {
            accepted_epochs: accepted,
            lost_at_ms: Some(lost_at_ms),
            begun_at_ms: self.begun_at_ms,
            longest_lease_ms: self.longest_lease_ms,
            dead_letter_stop: self.dead_letter_stop.clone(),
            breaker_open: self.breaker_open,
            pause: self.pause.clone(),
            origins: self.origins.clone(),
            ..Self::new(self.keys.clone(), epoch)
        }
    }

    /// The key of a marker record of the current epoch.
    #[must_use]
    pub fn marker(&self, scope: &Scope, number: u16) -> StoreKey {
        marker(scope, self.epoch, number)
    }
}

fn marker(scope: &Scope, epoch: Epoch, number: u16) -> StoreKey {
    let mut material = epoch.0.to_be_bytes().to_vec();
    material.extend(number.to_be_bytes());
    let derived = blake3::derive_key(MARKER_CONTEXT, &material);
    let half = derived.first_chunk().expect("a derived key has 32 bytes");
    StoreKey::new(scope, Digest::from_bytes(*half))
}

fn unreadable(scope: &Scope, why: &dyn fmt::Display) -> StoreError {
    StoreError::refused(format!(
        "the descriptor of scope `{scope}` cannot be read ({why}): another program or a newer release wrote it; \
         use another scope, or the release that wrote it"
    ))
}

fn invalid_keys(error: serde_json::Error) -> StoreError {
    StoreError::refused(format!("the key specification is not valid JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope() -> Scope {
        Scope::new("billing").unwrap()
    }

    fn descriptor() -> ScopeDescriptor {
        ScopeDescriptor::new(r#"{"key":["a b",1.0]}"#, Epoch::from_bits(7))
    }

    #[test]
    fn a_descriptor_is_read_back_as_it_was_written() {
        let mut written = descriptor();
        for _ in 0..2 {
            let text = written.to_text().unwrap();
            assert!(!text.contains('\n'));
            assert_eq!(ScopeDescriptor::parse(&scope(), &text).unwrap(), written);
            written = written.succeed(Epoch::from_bits(8), &[Epoch::from_bits(9)], 1_000);
            written.markers = vec![0, 65_535];
            written.halt = Some(Halt::new(5, "gone", vec![Epoch::from_bits(1)]));
            written.sequence = u64::MAX;
            written.longest_lease_ms = 30_000;
            written.begun_at_ms = 1_000;
            written.breaker_open = true;
            written.pause = Some(Pause::new(6, "the bank is away", "ada"));
            written.origins = vec![RecordOrigin {
                broker: "Kafka cluster a".to_owned(),
                routes: vec!["orders".to_owned()],
            }];
        }
    }

    #[test]
    fn what_is_no_descriptor_is_refused_and_never_taken_for_none() {
        let newer = descriptor()
            .to_text()
            .unwrap()
            .replace(r#""format":1"#, r#""format":2"#);
        for text in ["", "{}", "null", r#"{"format":1}"#, newer.as_str()] {
            let refused = ScopeDescriptor::parse(&scope(), text).unwrap_err();
            assert_eq!(refused.class(), "refused", "{text}");
            assert!(refused.to_string().contains("`billing`"), "{refused}");
        }
    }

    #[test]
    fn the_next_life_accepts_each_earlier_epoch_once_up_to_a_limit() {
        let mut life = descriptor();
        life.halt = Some(Halt::new(
            5,
            "gone",
            vec![Epoch::from_bits(1), Epoch::from_bits(2)],
        ));
        life.longest_lease_ms = 30_000;
        life.breaker_open = true;
        life.pause = Some(Pause::new(6, "the bank is away", "ada"));
        life.origins = vec![RecordOrigin {
            broker: "Kafka cluster a".to_owned(),
            routes: Vec::new(),
        }];
        let next = life.succeed(Epoch::from_bits(100), &[Epoch::from_bits(2)], 9);
        let accepted: Vec<Epoch> = [7, 2, 1].map(Epoch::from_bits).into();
        assert_eq!(
            (&next.accepted_epochs, next.lost_at_ms, &next.halt),
            (&accepted, Some(9), &None)
        );
        assert_eq!(
            next.longest_lease_ms, 30_000,
            "leases of the earlier epoch may still run"
        );
        assert!(
            next.breaker_open,
            "a loss of records repairs no dependency of a handler"
        );
        assert_eq!(
            next.pause, life.pause,
            "only an operator ends an operator's pause"
        );
        assert_eq!(
            next.origins, life.origins,
            "a loss of records changes no broker"
        );
        assert!(next.knows(Epoch::from_bits(1)) && !next.knows(Epoch::from_bits(3)));
        let last = (0..200).fold(next, |life, number| {
            life.succeed(Epoch::from_bits(200 + number), &[], 1)
        });
        assert_eq!(last.accepted_epochs.len(), MAX_ACCEPTED_EPOCHS);
        assert!(last.knows(Epoch::from_bits(398)) && !last.knows(Epoch::from_bits(7)));
    }

    #[test]
    fn epochs_are_spelt_in_one_way() {
        let epoch = Epoch::from_bits(0xAB);
        assert_eq!(epoch.to_string().parse(), Ok(epoch));
        for text in [
            "",
            "ab",
            &epoch.to_string().to_uppercase(),
            &format!("+{:031x}", 1),
        ] {
            assert_eq!(text.parse::<Epoch>(), Err(InvalidEpoch), "{text}");
        }
    }

    #[test]
    fn reasons_and_names_are_cut_between_characters() {
        let long = "ä".repeat(1_000);
        let halt = Halt::new(0, &long, Vec::new());
        assert_eq!(halt.reason.len(), MAX_REASON_BYTES);
        let pause = Pause::new(0, &long, &format!("x{long}"));
        assert_eq!(
            (pause.reason.len(), pause.by.len()),
            (MAX_REASON_BYTES, MAX_NAME_BYTES - 1)
        );
    }

    #[test]
    fn markers_differ_by_scope_epoch_and_number() {
        let one = descriptor();
        let other = one.succeed(Epoch::from_bits(8), &[], 0);
        let keys = [
            one.marker(&scope(), 0),
            one.marker(&scope(), 1),
            other.marker(&scope(), 0),
        ];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }
}
