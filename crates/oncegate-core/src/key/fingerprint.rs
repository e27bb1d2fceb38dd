//! The fingerprint: detects a message that has the same key as another message but other content.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::encode::{self, Writer};
use super::error::{KeyError, KeySpecError};
use super::format::{PrepareError, SharedFormat};
use super::input::{ByRef, KeySource};
use super::limits::KEY_FORMAT;
use super::parts::plain_paths;
use super::path::{self, Node, Path};
use super::paths::PathTrees;
use super::scratch::{Scanning, Scratch, with_scratch, within};
use super::spec::canonical_paths;
use super::{Key, Source, StoreKey, TenantSource};

const CONTEXT: &str = "oncegate 2026-11-21 fingerprint v1";
const MARK_CONTEXT: &str = "oncegate 2026-12-01 content mark v1";
const SPECIFICATION_CONTEXT: &str = "oncegate 2026-11-21 fingerprint specification v1";

/// A digest of a message's content: one byte that names the specification, and six of the content's
/// BLAKE3 hash.
///
/// The first byte is 0 in a [mark](ContentMark) alone, and the others are never all 0, so a store
/// writes seven zeros for "no fingerprint". Two contents have the same six bytes with a probability
/// of 1 in 2.8 * 10^14.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; Fingerprint::BYTES]);

impl Fingerprint {
    /// The length in bytes.
    pub const BYTES: usize = 7;

    /// Creates a fingerprint from the bytes of a record.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes that a record holds.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// The byte that names the specification, 1 to 255, or 0 for a mark. Fingerprints of different
    /// specifications must not be compared.
    #[must_use]
    pub fn specification(&self) -> u8 {
        let [specification, ..] = self.0;
        specification
    }

    /// Returns whether it is a [mark](ContentMark), which refuses nothing.
    #[must_use]
    pub fn is_mark(&self) -> bool {
        self.specification() == ContentMark::SPECIFICATION
    }
}

/// Marks one key in sixteen with a digest of its payload, where no fingerprint is wanted.
///
/// Ids that are used again for something else are dropped as duplicates. A mark finds that out
/// while nothing refuses it, at half a byte a record. Which keys have one depends on the key alone,
/// so all messages of a key agree.
#[derive(Clone, Debug)]
pub struct ContentMark {
    hasher: blake3::Hasher,
}

impl Default for ContentMark {
    fn default() -> Self {
        Self {
            hasher: blake3::Hasher::new_derive_key(MARK_CONTEXT),
        }
    }
}

impl ContentMark {
    const SPECIFICATION: u8 = 0;

    /// Returns the mark of a message with this key, if the key has one.
    pub fn of(&self, key: &StoreKey, message: &(impl KeySource + ?Sized)) -> Option<Fingerprint> {
        let [.., last] = *key.digest().as_bytes();
        if !last.is_multiple_of(16) {
            return None;
        }
        let mut hasher = self.hasher.clone();
        if let Some(payload) = message.payload() {
            hasher.update(&[1]).update(payload);
        }
        let hash = hasher.finalize();
        let [a, b, c, d, e, f, ..] = *hash.as_bytes();
        // Zeros alone would be no fingerprint.
        Some(Fingerprint([Self::SPECIFICATION, a, b, c, d, e, f.max(1)]))
    }
}

/// The specification of what a fingerprint covers, as plain data.
///
/// In a file: `"payload"`, `{ except = ["sent_at"] }`, or `"raw"`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "Repr")]
pub struct FingerprintSpec {
    raw: bool,
    except: Vec<String>,
}

impl FingerprintSpec {
    /// Covers a JSON payload except the paths of the key and of its tenant, which the key already
    /// compares.
    ///
    /// Values are compared as in a key: the order of members and the spelling of numbers do not
    /// count.
    #[must_use]
    pub fn payload() -> Self {
        Self {
            raw: false,
            except: Vec::new(),
        }
    }

    /// Covers the raw bytes of the payload, for formats other than JSON.
    #[must_use]
    pub fn raw() -> Self {
        Self {
            raw: true,
            except: Vec::new(),
        }
    }

    /// Excludes these paths from [`payload`](Self::payload): the values that a producer changes
    /// when it sends again.
    #[must_use]
    pub fn except<P: Into<String>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.except.extend(paths.into_iter().map(Into::into));
        self
    }

    /// Checks the specification and compiles it for the messages of a key.
    ///
    /// # Errors
    /// The first error in this specification or in the key's.
    pub fn compile(&self, key: &Key) -> Result<CompiledFingerprint, KeySpecError> {
        let spec = self.canonical()?;
        let key = key.canonical()?;
        let mut left_out = spec.except.clone();
        match &key.source {
            Source::Json(fields) => left_out.extend(fields.iter().map(|field| field.path.clone())),
            Source::Parts(parts) => left_out.extend(plain_paths(parts)),
            Source::Cases(cases) => {
                let paths = cases.iter().flat_map(|case| plain_paths(case.parts()));
                left_out.extend(paths);
            }
            _ => {}
        }
        if let Some(TenantSource::Json(field)) = &key.tenant {
            left_out.push(field.path.clone());
        }
        left_out.sort();
        left_out.dedup();
        let paths = left_out
            .iter()
            .map(|path| Path::parse(path))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(CompiledFingerprint {
            specification: specification_byte(spec.raw, &paths),
            raw: spec.raw,
            except: Node::of(&paths),
            max_payload_bytes: key.max_payload_bytes,
            format: key.format,
            hasher: blake3::Hasher::new_derive_key(CONTEXT),
        })
    }

    pub(super) fn canonical(&self) -> Result<Self, KeySpecError> {
        if self.raw && !self.except.is_empty() {
            return Err(KeySpecError::ExceptWithoutPayload);
        }
        Ok(Self {
            raw: self.raw,
            except: canonical_paths(&self.except)?,
        })
    }
}

/// Computes the specification's byte, 1 to 255, from the excluded paths. Raw bytes exclude nothing,
/// so the key's paths do not count.
fn specification_byte(raw: bool, paths: &[Path]) -> u8 {
    let mut out = vec![
        KEY_FORMAT,
        if raw {
            encode::SOURCE_RAW
        } else {
            encode::SOURCE_PAYLOAD
        },
    ];
    let paths = if raw { &[] } else { paths };
    encode::put_len(paths.len(), &mut out);
    for path in paths {
        encode::put_bytes(path.text.as_bytes(), &mut out);
    }
    let [first, ..] = blake3::derive_key(SPECIFICATION_CONTEXT, &out);
    first % 255 + 1
}

/// A checked fingerprint specification that computes the fingerprints of messages.
#[derive(Clone, Debug)]
pub struct CompiledFingerprint {
    specification: u8,
    raw: bool,
    except: Node,
    max_payload_bytes: usize,
    format: Option<SharedFormat>,
    hasher: blake3::Hasher,
}

impl CompiledFingerprint {
    /// Computes the fingerprint of a message. A message without a payload has a fingerprint too.
    ///
    /// # Errors
    /// The payload is too large, or (unless [`FingerprintSpec::raw`]) not JSON that a key accepts.
    pub fn derive(&self, message: &(impl KeySource + ?Sized)) -> Result<Fingerprint, KeyError> {
        with_scratch(|scratch| {
            self.write(&ByRef(message), scratch)?;
            let hash = self.hasher.clone().update(&scratch.out).finalize();
            let [a, b, c, d, e, f, ..] = *hash.as_bytes();
            Ok(Fingerprint([self.specification, a, b, c, d, e, f]))
        })
    }

    /// Gets what the format needs for this message, as
    /// [`CompiledKey::prepare`](super::CompiledKey::prepare) does.
    ///
    /// # Errors
    /// When it cannot be got now: call it again later.
    pub async fn prepare(&self, message: &(impl KeySource + Sync)) -> Result<(), PrepareError> {
        match &self.format {
            Some(SharedFormat(format)) if !self.raw => {
                format.prepare(message, self.max_payload_bytes).await
            }
            _ => Ok(()),
        }
    }

    pub(super) fn write(
        &self,
        message: &dyn KeySource,
        scratch: &mut Scratch,
    ) -> Result<(), KeyError> {
        scratch
            .out
            .extend_from_slice(&[KEY_FORMAT, encode::DOMAIN_FINGERPRINT]);
        let Some(payload) = message.payload() else {
            scratch.out.push(encode::SOURCE_NONE);
            return Ok(());
        };
        within("payload", payload.len(), self.max_payload_bytes)?;
        if self.raw {
            scratch.out.push(encode::SOURCE_RAW);
            encode::put_value(encode::TAG_BYTES, payload, &mut scratch.out);
            return Ok(());
        }
        scratch.out.push(encode::SOURCE_PAYLOAD);
        let reading = Scanning {
            format: self.format.as_ref(),
            paths: &PathTrees::default(),
            all_but: Some(&self.except),
            limit: self.max_payload_bytes,
        };
        let in_message = scratch.scan(message, payload, reading)?;
        let Scratch {
            doc,
            order,
            out,
            text,
        } = scratch;
        let payload = in_message.unwrap_or(text);
        match doc.root() {
            Some(root) => Writer {
                payload,
                doc,
                order,
                out,
                substance: false,
            }
            .value(root, Some(&self.except)),
            None => Ok(()),
        }
    }
}

/// The serialised form of the specification.
#[derive(Serialize)]
#[serde(untagged)]
enum Repr {
    Word(&'static str),
    Except { except: Vec<String> },
}

impl From<FingerprintSpec> for Repr {
    fn from(spec: FingerprintSpec) -> Self {
        match spec {
            FingerprintSpec { raw: true, .. } => Self::Word("raw"),
            FingerprintSpec { except, .. } if except.is_empty() => Self::Word("payload"),
            FingerprintSpec { except, .. } => Self::Except { except },
        }
    }
}

impl<'de> Deserialize<'de> for FingerprintSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SpecVisitor)
    }
}

struct SpecVisitor;

impl<'de> Visitor<'de> for SpecVisitor {
    type Value = FingerprintSpec;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a fingerprint: \"payload\", { except = [...] } or \"raw\"")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<FingerprintSpec, E> {
        match text {
            "payload" => Ok(FingerprintSpec::payload()),
            "raw" => Ok(FingerprintSpec::raw()),
            _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<FingerprintSpec, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Map {
            except: Vec<String>,
        }
        let Map { except } = Map::deserialize(MapAccessDeserializer::new(map))?;
        path::parse_all(except.iter().map(String::as_str)).map_err(A::Error::custom)?;
        Ok(FingerprintSpec::payload().except(except))
    }
}
