//! What a store remembers of the specification that its keys were made with.

use std::fmt;

use serde::Serialize;

use super::error::KeySpecError;
use super::fingerprint::FingerprintSpec;
use super::spec::describe;
use super::{KEY_FORMAT, Key};

/// The text that a scope keeps in the store: key format, key and fingerprint specification.
///
/// However a specification is spelt (order of fields, needless escapes, one normaliser or a list of one), its
/// text is the same, byte for byte; limits do not appear. A gate whose text differs from the store's must
/// not start: a silent change of the key would run everything again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor(String);

impl Descriptor {
    /// Describes a key, and the fingerprint if there is one.
    ///
    /// # Errors
    /// The first thing that is wrong with a specification.
    pub fn new(key: &Key, fingerprint: Option<&FingerprintSpec>) -> Result<Self, KeySpecError> {
        #[derive(Serialize)]
        struct Text<K> {
            format: u8,
            key: K,
            fingerprint: Option<FingerprintSpec>,
        }
        let fingerprint = fingerprint.map(FingerprintSpec::canonical).transpose()?;
        let text = Text { format: KEY_FORMAT, key: describe(key)?, fingerprint };
        let text = serde_json::to_string(&text)
            .map_err(|error| KeySpecError::Unreadable { reason: error.to_string() })?;
        Ok(Self(text))
    }

    /// The text: one line of JSON.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text as bytes, for stores.
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
