//! Store keys: a scope, a digest, and both joined as the store uses them.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::error::KeySpecError;

/// The namespace of keys, one per logical consumer: 1 to 64 of `A-Z a-z 0-9 . _ -`.
///
/// The scope is readable in every store key. With up to seven characters, a key has at most 30
/// bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Scope(Arc<str>);

impl Scope {
    /// The maximum length of a scope, in bytes.
    pub const MAX_BYTES: usize = 64;

    /// Creates a scope from a name.
    ///
    /// # Errors
    /// [`KeySpecError::BadScope`] when the length or a character is not allowed.
    pub fn new(name: impl AsRef<str>) -> Result<Self, KeySpecError> {
        let name = name.as_ref();
        let fits = (1..=Self::MAX_BYTES).contains(&name.len());
        let plain = name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
        if fits && plain {
            Ok(Self(name.into()))
        } else {
            Err(KeySpecError::BadScope {
                scope: name.chars().take(64).collect(),
            })
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The first 128 bits of the BLAKE3 hash of a key's canonical bytes. Its text form is 22 characters
/// of base64url.
///
/// Among 10^12 keys of one scope, the probability of any collision is below 10^-14.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 16]);

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

impl Digest {
    /// The length of the text form, in characters.
    pub(crate) const TEXT_LEN: usize = 22;

    /// Creates a digest from the bytes that a store or a log holds.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Encodes as base64url without padding: 21 characters of six bits, and one with the last two
    /// bits at its top.
    fn text(self) -> [u8; Self::TEXT_LEN] {
        let bits = u128::from_be_bytes(self.0);
        let mut shift = 128;
        [(); Self::TEXT_LEN].map(|()| {
            let six = if shift >= 6 {
                bits >> (shift - 6)
            } else {
                bits << (6 - shift)
            };
            shift = u32::saturating_sub(shift, 6);
            ALPHABET
                .get(usize::from((six & 63) as u8))
                .copied()
                .unwrap_or_default()
        })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text()
            .iter()
            .try_for_each(|c| fmt::Write::write_char(f, char::from(*c)))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = KeySpecError;

    /// Parses exactly the output of `Display`: each digest has one text form.
    fn from_str(text: &str) -> Result<Self, KeySpecError> {
        let mut bits = 0u128;
        let (head, last) = text
            .as_bytes()
            .split_at_checked(Self::TEXT_LEN - 1)
            .ok_or(KeySpecError::BadStoreKey)?;
        for c in head {
            bits = bits << 6 | six_bits(*c)? as u128;
        }
        let &[last] = last else {
            return Err(KeySpecError::BadStoreKey);
        };
        let last = six_bits(last)?;
        // The last character has two bits of the digest: other texts of it are refused.
        if last & 15 != 0 {
            return Err(KeySpecError::BadStoreKey);
        }
        Ok(Self((bits << 2 | (last >> 4) as u128).to_be_bytes()))
    }
}

/// Returns the value of a character of a digest's text, from 0 to 63.
fn six_bits(c: u8) -> Result<usize, KeySpecError> {
    ALPHABET
        .iter()
        .position(|known| *known == c)
        .ok_or(KeySpecError::BadStoreKey)
}

/// The key of a record in a store: `<scope>:<digest>`, for example
/// `billing:eMT5oSC2v1zTz8Nw5IO50A`.
///
/// Contains no payload data and may be logged. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StoreKey {
    text: Arc<str>,
    digest: Digest,
}

impl StoreKey {
    /// The maximum length of a store key, in bytes.
    pub const MAX_BYTES: usize = Scope::MAX_BYTES + 1 + Digest::TEXT_LEN;

    /// Joins a scope and a digest.
    #[must_use]
    pub fn new(scope: &Scope, digest: Digest) -> Self {
        let mut text = [0; Self::MAX_BYTES];
        let mut len = 0;
        for part in [scope.as_str().as_bytes(), b":", &digest.text()] {
            let slot = text
                .get_mut(len..len + part.len())
                .expect("the buffer fits the longest scope");
            slot.copy_from_slice(part);
            len += part.len();
        }
        let text = text
            .get(..len)
            .and_then(|text| std::str::from_utf8(text).ok());
        Self {
            text: text.expect("scope and digest are ASCII").into(),
            digest,
        }
    }

    /// The whole key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The part before the colon.
    #[must_use]
    pub fn scope(&self) -> &str {
        self.text.split_once(':').map_or("", |(scope, _)| scope)
    }

    /// The part after the colon.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

impl AsRef<str> for StoreKey {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreKey({self})")
    }
}

impl FromStr for StoreKey {
    type Err = KeySpecError;

    fn from_str(text: &str) -> Result<Self, KeySpecError> {
        let (scope, digest) = text.split_once(':').ok_or(KeySpecError::BadStoreKey)?;
        Ok(Self::new(&Scope::new(scope)?, digest.parse()?))
    }
}

impl FromStr for Scope {
    type Err = KeySpecError;

    fn from_str(text: &str) -> Result<Self, KeySpecError> {
        Self::new(text)
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Serialises each type as its text form.
macro_rules! through_text {
    ($($name:ident),*) => {$(
        impl TryFrom<String> for $name {
            type Error = KeySpecError;

            fn try_from(text: String) -> Result<Self, KeySpecError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }
    )*};
}

through_text!(Scope, Digest, StoreKey);
