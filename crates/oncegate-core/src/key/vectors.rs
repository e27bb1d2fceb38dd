//! The published test vectors (`vectors/keys.json`), and their check.
//!
//! They are the contract with other languages and with later releases: an implementation that
//! passes them derives the same keys. `docs/KEY_FORMAT.md` describes both the format and this file.

use serde::{Deserialize, Serialize};

use super::scratch::with_scratch;
use super::{FingerprintSpec, Key, KeyError, KeyInput, KeySpecError, Scope};

/// The content of the file, for tools that print it.
pub const JSON: &str = include_str!("../../vectors/keys.json");

/// Checks this build against all published vectors. Returns their number.
///
/// # Errors
/// One line for each vector with another result.
pub fn check() -> Result<usize, Vec<String>> {
    let file: File =
        serde_json::from_str(JSON).map_err(|error| vec![format!("keys.json: {error}")])?;
    let wrong: Vec<String> = file
        .vectors
        .iter()
        .filter_map(|vector| {
            let answer = vector.answer();
            (answer != vector.expected).then(|| {
                format!(
                    "{}: {answer:?}, published {:?}",
                    vector.name, vector.expected
                )
            })
        })
        .collect();
    if wrong.is_empty() {
        Ok(file.vectors.len())
    } else {
        Err(wrong)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) about: String,
    pub(super) format: u8,
    pub(super) vectors: Vec<Vector>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Vector {
    name: String,
    /// A key specification, as in a file. It is parsed later, because some vectors have an invalid
    /// one on purpose.
    key: serde_json::Value,
    /// If present, the vector is for a fingerprint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fingerprint: Option<FingerprintSpec>,
    scope: String,
    route: String,
    message: Message,
    #[serde(default)]
    pub(super) expected: Expected,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Message {
    /// UTF-8 text, or …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    payload: Option<String>,
    /// … any bytes, or …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    payload_hex: Option<String>,
    /// … pieces of text, each repeated. With none of the three, the message has no payload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    payload_repeat: Option<Vec<(String, usize)>>,
    /// Pairs of name and value, in hex.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    headers_hex: Vec<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_key_hex: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_id: Option<String>,
}

/// The expected result: a key, a fingerprint, the kind of the message's error, or a refusal of the
/// specification.
#[derive(Serialize, Deserialize, Default, Debug, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Expected {
    /// The bytes that are hashed; omitted where they are long.
    #[serde(skip_serializing_if = "Option::is_none")]
    canonical_hex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    store_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint_hex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    specification_refused: bool,
}

/// The maximum number of canonical bytes that are printed.
const CANONICAL_SHOWN_BYTES: usize = 1024;

impl Vector {
    pub(super) fn answer(&self) -> Expected {
        match self.derive() {
            Ok(Ok(expected)) => expected,
            Ok(Err(error)) => Expected {
                error: Some(error.kind().to_owned()),
                ..Expected::default()
            },
            Err(_) => Expected {
                specification_refused: true,
                ..Expected::default()
            },
        }
    }

    fn derive(&self) -> Result<Result<Expected, KeyError>, KeySpecError> {
        let key: Key =
            serde_json::from_value(self.key.clone()).map_err(|error| KeySpecError::Unreadable {
                reason: error.to_string(),
            })?;
        let scope = Scope::new(&self.scope)?;
        let message = &self.message;
        let payload = message.payload();
        let headers: Vec<(&str, Vec<u8>)> = message
            .headers_hex
            .iter()
            .map(|(name, value)| (name.as_str(), from_hex(value)))
            .collect();
        let headers: Vec<(&str, &[u8])> = headers
            .iter()
            .map(|(name, value)| (*name, value.as_slice()))
            .collect();
        let message_key = message.message_key_hex.as_deref().map(from_hex);

        let mut input = payload
            .as_deref()
            .map_or(KeyInput::empty(), KeyInput::payload)
            .with_headers(&headers);
        if let Some(key) = &message_key {
            input = input.with_message_key(key);
        }
        if let Some(id) = &message.message_id {
            input = input.with_message_id(id);
        }
        if let Some(fingerprint) = &self.fingerprint {
            let compiled = fingerprint.compile(&key)?;
            let canonical = with_scratch(|scratch| {
                compiled
                    .write(&input, scratch)
                    .map(|()| shown_hex(&scratch.out))
            });
            return Ok(compiled.derive(&input).and_then(|fingerprint| {
                let fingerprint_hex = Some(to_hex(fingerprint.as_bytes()));
                Ok(Expected {
                    canonical_hex: canonical?,
                    fingerprint_hex,
                    ..Expected::default()
                })
            }));
        }
        let compiled = key.compile(&scope)?;
        Ok(compiled
            .explain(&self.route, &input)
            .map(|explanation| Expected {
                canonical_hex: shown_hex(explanation.canonical()),
                store_key: Some(explanation.store_key().to_string()),
                ..Expected::default()
            }))
    }
}

impl Message {
    fn payload(&self) -> Option<Vec<u8>> {
        if let Some(pieces) = &self.payload_repeat {
            return Some(
                pieces
                    .iter()
                    .flat_map(|(piece, times)| piece.repeat(*times).into_bytes())
                    .collect(),
            );
        }
        self.payload_hex
            .as_deref()
            .map(from_hex)
            .or_else(|| self.payload.clone().map(String::into_bytes))
    }
}

fn shown_hex(canonical: &[u8]) -> Option<String> {
    (canonical.len() <= CANONICAL_SHOWN_BYTES).then(|| to_hex(canonical))
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes hex. An invalid digit counts as 0: the vectors are part of this repository, and an error
/// gives a wrong key.
fn from_hex(text: &str) -> Vec<u8> {
    let (pairs, _) = text.as_bytes().as_chunks();
    pairs
        .iter()
        .map(|[high, low]| hex_digit(*high) << 4 | hex_digit(*low))
        .collect()
}

fn hex_digit(c: u8) -> u8 {
    char::from(c)
        .to_digit(16)
        .and_then(|digit| u8::try_from(digit).ok())
        .unwrap_or_default()
}
