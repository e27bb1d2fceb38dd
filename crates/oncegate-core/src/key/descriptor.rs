//! The descriptor: the text of a key specification that a store keeps for a scope.

use std::fmt;

use serde::Serialize;

use super::Key;
use super::error::KeySpecError;
use super::fingerprint::FingerprintSpec;
use super::limits::KEY_FORMAT;
use super::spec::describe;

/// The text of a key specification that a store keeps for a scope: key format, key, and fingerprint
/// specification.
///
/// Equivalent specifications (another order of fields, needless escapes, one normaliser or a list
/// of one) have the same text, byte for byte. Limits are not part of it. A gate whose text differs
/// from the store's must not start: after a silent change of the key, every message would be
/// processed again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor(String);

impl Descriptor {
    /// Creates the descriptor of a key and of its fingerprint specification, if there is one.
    ///
    /// # Errors
    /// The first error in a specification.
    pub fn new(key: &Key, fingerprint: Option<&FingerprintSpec>) -> Result<Self, KeySpecError> {
        #[derive(Serialize)]
        struct SpecificationText<K> {
            format: u8,
            key: K,
            fingerprint: Option<FingerprintSpec>,
        }
        let fingerprint = fingerprint.map(FingerprintSpec::canonical).transpose()?;
        let text = SpecificationText {
            format: KEY_FORMAT,
            key: describe(key)?,
            fingerprint,
        };
        let text = serde_json::to_string(&text).map_err(|error| KeySpecError::Unreadable {
            reason: error.to_string(),
        })?;
        Ok(Self(text))
    }

    /// The text: one line of JSON.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text as bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
