//! What a store holds for a scope besides its records.
//!
//! It is written once and never silently remade: a scope whose descriptor is gone, has another epoch, or went back to an
//! earlier sequence number lives in a store that has lost records.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::StoreError;
use crate::key::{Digest, Scope, StoreKey};

/// The format of the text.
const FORMAT: u8 = 1;

/// The most accepted epochs that a descriptor remembers. Older ones are forgotten first.
const MAX_ACCEPTED_EPOCHS: usize = 64;

/// The most bytes of the reason of a halt.
const MAX_REASON_BYTES: usize = 1_024;

const MARKER_CONTEXT: &str = "oncegate 2026-11 store marker";

/// One life of a scope in a store: random, new when the scope is opened for the first time and after every accepted loss.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epoch(u128);

impl Epoch {
    /// An epoch of these random bits.
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
        let is_canonical =
            text.len() == 32 && !text.bytes().any(|byte| byte.is_ascii_uppercase() || byte == b'+');
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

/// The text is no epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an epoch is 32 lower-case hexadecimal digits")]
pub struct InvalidEpoch;

/// Why no claim of the scope is granted until an operator accepts the loss.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Halt {
    /// When the loss was noticed, in milliseconds since the Unix epoch, on the clock of the process that noticed it.
    pub at_ms: u64,
    /// What was noticed.
    pub reason: String,
    /// Epochs whose records are lost, as far as the store does not hold them any more.
    pub lost_epochs: Vec<Epoch>,
}

impl Halt {
    /// A halt with a reason of at most 1 KiB.
    #[must_use]
    pub fn new(at_ms: u64, reason: &str, lost_epochs: Vec<Epoch>) -> Self {
        let end = (0..=MAX_REASON_BYTES.min(reason.len())).rev().find(|end| reason.is_char_boundary(*end));
        let reason = reason.get(..end.unwrap_or_default()).unwrap_or_default().to_owned();
        Self { at_ms, reason, lost_epochs }
    }
}

/// What a store holds for a scope besides its records: how keys are made, which life of the store this is, and whether
/// the scope is halted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeDescriptor {
    /// The text of the key specification, [`Descriptor`](crate::key::Descriptor).
    pub keys: String,
    /// Which life of the scope this is.
    pub epoch: Epoch,
    /// Grows while messages are completed. A store that shows a smaller number than before was put back to an earlier state.
    pub sequence: u64,
    /// Numbers of the marker records, at least one in each shard of a store that has several.
    pub markers: Vec<u16>,
    /// Earlier epochs, the newest first, whose loss was accepted.
    pub accepted_epochs: Vec<Epoch>,
    /// When the last loss was noticed, in milliseconds since the Unix epoch.
    pub lost_at_ms: Option<u64>,
    /// Set while no claim may be granted.
    pub halt: Option<Halt>,
}

/// The JSON of a descriptor.
#[derive(Serialize, Deserialize)]
struct Text<'a> {
    format: u8,
    #[serde(borrow)]
    keys: &'a RawValue,
    epoch: Epoch,
    sequence: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    markers: Vec<u16>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    accepted_epochs: Vec<Epoch>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost_at_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    halt: Option<Halt>,
}

impl ScopeDescriptor {
    /// The descriptor of a scope that is opened for the first time.
    pub fn new(keys: impl Into<String>, epoch: Epoch) -> Self {
        Self {
            keys: keys.into(),
            epoch,
            sequence: 0,
            markers: Vec::new(),
            accepted_epochs: Vec::new(),
            lost_at_ms: None,
            halt: None,
        }
    }

    /// Reads the text that a store holds for `scope`.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the text is no descriptor of a known format.
    pub fn parse(scope: &Scope, text: &str) -> Result<Self, StoreError> {
        let unreadable = |why: &dyn fmt::Display| {
            StoreError::refused(format!(
                "the descriptor of scope `{scope}` cannot be read ({why}): another program or a newer release wrote it; \
                 use another scope, or the release that wrote it"
            ))
        };
        let read: Text<'_> = serde_json::from_str(text).map_err(|error| unreadable(&error))?;
        if read.format != FORMAT {
            return Err(unreadable(&format_args!("format {}", read.format)));
        }
        Ok(Self {
            keys: read.keys.get().to_owned(),
            epoch: read.epoch,
            sequence: read.sequence,
            markers: read.markers,
            accepted_epochs: read.accepted_epochs,
            lost_at_ms: read.lost_at_ms,
            halt: read.halt,
        })
    }

    /// The text for a store: one line of JSON.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when `keys` is no JSON.
    pub fn to_text(&self) -> Result<String, StoreError> {
        let invalid = |error: serde_json::Error| {
            StoreError::refused(format!("the key specification is no JSON: {error}"))
        };
        let text = Text {
            format: FORMAT,
            keys: serde_json::from_str(&self.keys).map_err(invalid)?,
            epoch: self.epoch,
            sequence: self.sequence,
            markers: self.markers.clone(),
            accepted_epochs: self.accepted_epochs.clone(),
            lost_at_ms: self.lost_at_ms,
            halt: self.halt.clone(),
        };
        serde_json::to_string(&text).map_err(invalid)
    }

    /// Whether `epoch` is this life of the scope, or one whose loss was accepted.
    #[must_use]
    pub fn knows(&self, epoch: Epoch) -> bool {
        self.epoch == epoch || self.accepted_epochs.contains(&epoch)
    }

    /// The descriptor of the next life, in which the loss of this one and of `lost` is accepted.
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
            ..Self::new(self.keys.clone(), epoch)
        }
    }

    /// The key of a marker record of this life.
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
        }
    }

    #[test]
    fn what_is_no_descriptor_is_refused_and_never_taken_for_none() {
        let newer = descriptor().to_text().unwrap().replace(r#""format":1"#, r#""format":2"#);
        for text in ["", "{}", "null", r#"{"format":1}"#, newer.as_str()] {
            let refused = ScopeDescriptor::parse(&scope(), text).unwrap_err();
            assert_eq!(refused.class(), "refused", "{text}");
            assert!(refused.to_string().contains("`billing`"), "{refused}");
        }
    }

    #[test]
    fn the_next_life_accepts_every_epoch_before_it_once_and_a_bounded_number_of_them() {
        let mut life = descriptor();
        life.halt = Some(Halt::new(5, "gone", vec![Epoch::from_bits(1), Epoch::from_bits(2)]));
        let next = life.succeed(Epoch::from_bits(100), &[Epoch::from_bits(2)], 9);
        let accepted: Vec<Epoch> = [7, 2, 1].map(Epoch::from_bits).into();
        assert_eq!((&next.accepted_epochs, next.lost_at_ms, &next.halt), (&accepted, Some(9), &None));
        assert!(next.knows(Epoch::from_bits(1)) && !next.knows(Epoch::from_bits(3)));
        let last = (0..200).fold(next, |life, number| life.succeed(Epoch::from_bits(200 + number), &[], 1));
        assert_eq!(last.accepted_epochs.len(), MAX_ACCEPTED_EPOCHS);
        assert!(last.knows(Epoch::from_bits(398)) && !last.knows(Epoch::from_bits(7)));
    }

    #[test]
    fn epochs_are_spelt_in_one_way() {
        let epoch = Epoch::from_bits(0xAB);
        assert_eq!(epoch.to_string().parse(), Ok(epoch));
        for text in ["", "ab", &epoch.to_string().to_uppercase(), &format!("+{:031x}", 1)] {
            assert_eq!(text.parse::<Epoch>(), Err(InvalidEpoch), "{text}");
        }
    }

    #[test]
    fn the_reason_of_a_halt_is_cut_between_characters() {
        let halt = Halt::new(0, &"ä".repeat(1_000), Vec::new());
        assert_eq!(halt.reason.len(), MAX_REASON_BYTES);
    }

    #[test]
    fn markers_differ_by_scope_epoch_and_number() {
        let one = descriptor();
        let other = one.succeed(Epoch::from_bits(8), &[], 0);
        let keys = [one.marker(&scope(), 0), one.marker(&scope(), 1), other.marker(&scope(), 0)];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }
}
