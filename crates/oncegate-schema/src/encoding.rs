//! Undoes the compression or encoding of whole payloads.

use std::borrow::Cow;
use std::io::Read;

use base64::Engine as _;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use flate2::bufread::MultiGzDecoder;
use oncegate_core::key::KeyError;
use serde::{Deserialize, Serialize};

/// The most encodings of one payload.
pub(crate) const MAX_ENCODINGS: usize = 4;

/// The compression or encoding of a whole payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Encoding {
    /// gzip (RFC 1952).
    Gzip,
    /// zstd (RFC 8878).
    Zstd,
    /// Base64, with padding or without, in either alphabet.
    Base64,
}

impl Encoding {
    /// The name in files and headers.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Base64 => "base64",
        }
    }

    /// The encoding of this name, in any case; `None` when there is none.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::Gzip, Self::Zstd, Self::Base64];
        all.into_iter()
            .find(|encoding| encoding.as_str().eq_ignore_ascii_case(name))
    }

    /// Decodes at most `limit` bytes. More is an error, before they take memory.
    fn decode(self, bytes: &[u8], limit: usize) -> Result<Vec<u8>, KeyError> {
        match self {
            Self::Gzip => {
                let damaged = self.refusal("it is no gzip, or is damaged");
                read(MultiGzDecoder::new(bytes), limit, damaged)
            }
            Self::Zstd => {
                let damaged = self.refusal("it is no zstd, or is damaged");
                match zstd::stream::read::Decoder::with_buffer(bytes) {
                    Ok(decoder) => read(decoder, limit, damaged),
                    Err(_) => Err(damaged),
                }
            }
            Self::Base64 => {
                let bytes = bytes.trim_ascii();
                let is_url = bytes.iter().any(|byte| matches!(byte, b'-' | b'_'));
                let config = GeneralPurposeConfig::new()
                    .with_decode_padding_mode(DecodePaddingMode::Indifferent);
                let engine =
                    GeneralPurpose::new(if is_url { &URL_SAFE } else { &STANDARD }, config);
                let decoded = engine
                    .decode(bytes)
                    .map_err(|_| self.refusal("it has other characters, or is cut"))?;
                within(decoded.len(), limit)?;
                Ok(decoded)
            }
        }
    }

    fn refusal(self, what: &'static str) -> KeyError {
        KeyError::BadEncoding {
            encoding: self.as_str(),
            what,
        }
    }
}

fn read(decoder: impl Read, limit: usize, damaged: KeyError) -> Result<Vec<u8>, KeyError> {
    let mut decoded = Vec::new();
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    decoder
        .take(most)
        .read_to_end(&mut decoded)
        .map_err(|_| damaged)?;
    within(decoded.len(), limit)?;
    Ok(decoded)
}

fn within(bytes: usize, limit: usize) -> Result<(), KeyError> {
    if bytes > limit {
        return Err(KeyError::TooLarge {
            what: "decoded payload".to_owned(),
            bytes,
            limit,
        });
    }
    Ok(())
}

/// Undoes these encodings, the first one first.
pub(crate) fn decode<'m>(
    payload: &'m [u8],
    encodings: &[Encoding],
    limit: usize,
) -> Result<Cow<'m, [u8]>, KeyError> {
    let mut payload = Cow::Borrowed(payload);
    for encoding in encodings {
        payload = Cow::Owned(encoding.decode(&payload, limit)?);
    }
    Ok(payload)
}

/// The encodings that a header names, in the order in which they are undone: the last one was
/// applied last.
pub(crate) fn of_header(value: &[u8]) -> Result<Vec<Encoding>, KeyError> {
    let text = std::str::from_utf8(value).map_err(|_| unknown("the header is no text"))?;
    let names = text
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty() && !is_plain(name));
    let encodings: Option<Vec<Encoding>> = names.rev().map(Encoding::named).collect();
    let encodings = encodings
        .ok_or_else(|| unknown("the header names another encoding than gzip, zstd and base64"))?;
    if encodings.len() > MAX_ENCODINGS {
        return Err(unknown("the header names too many encodings"));
    }
    Ok(encodings)
}

/// Returns whether a name of a header says that the payload is as it is. Producers of AMQP put the
/// character set or MIME's transfer encoding into the place of the compression.
fn is_plain(name: &str) -> bool {
    const PLAIN: [&str; 8] = [
        "identity", "utf-8", "utf8", "us-ascii", "7bit", "8bit", "binary", "ascii",
    ];
    PLAIN.iter().any(|plain| plain.eq_ignore_ascii_case(name))
}

fn unknown(what: &'static str) -> KeyError {
    KeyError::BadEncoding {
        encoding: "the header says",
        what,
    }
}
