//! Decoders: what stands between a string of a payload and the document in it.

use std::borrow::Cow;
use std::io::Read as _;
use std::str::FromStr;

use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::{DecodePaddingMode, Engine as _, GeneralPurpose, GeneralPurposeConfig};
use flate2::read::MultiGzDecoder;

use super::super::error::KeyError;

/// A step of a path that decodes a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decoder {
    /// JSON inside a string, read by the rules for payloads.
    Json,
    /// Base64 with the alphabet of MIME or of URLs, with padding or without.
    Base64,
    /// Gzip, of one or more members.
    Gzip,
}

/// Padding may be absent, as URLs have it; bits after the last byte must be zero, so that a text
/// has one spelling.
const LENIENT: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
const MIME: GeneralPurpose = GeneralPurpose::new(&STANDARD, LENIENT);
const URL: GeneralPurpose = GeneralPurpose::new(&URL_SAFE, LENIENT);

impl Decoder {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Base64 => "base64",
            Self::Gzip => "gzip",
        }
    }

    /// Decodes a text. JSON remains as it is, to be scanned. `path` and `limit` in bytes are for
    /// the errors.
    pub(super) fn decode<'a>(
        self,
        text: Cow<'a, [u8]>,
        path: &str,
        limit: usize,
    ) -> Result<Cow<'a, [u8]>, KeyError> {
        let decoded = match self {
            Self::Json => text,
            Self::Base64 => {
                let engine = if text.iter().any(|b| matches!(b, b'-' | b'_')) {
                    URL
                } else {
                    MIME
                };
                let decoded = engine.decode(&text);
                Cow::Owned(decoded.map_err(|_| self.failed(path, "the text is no base64"))?)
            }
            Self::Gzip => {
                let mut decoded = Vec::new();
                // One byte over the limit tells a text that is too large from one that just fits.
                let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
                let read = MultiGzDecoder::new(&*text)
                    .take(most)
                    .read_to_end(&mut decoded);
                read.map_err(|_| self.failed(path, "the bytes are no gzip, or are cut"))?;
                Cow::Owned(decoded)
            }
        };
        if decoded.len() > limit {
            return Err(KeyError::TooLarge {
                what: format!("`{path}`, decoded,"),
                bytes: decoded.len(),
                limit,
            });
        }
        Ok(decoded)
    }

    pub(super) fn failed(self, path: &str, what: &'static str) -> KeyError {
        KeyError::DecodeFailed {
            path: path.to_owned(),
            decoder: self.name(),
            what,
        }
    }
}

impl FromStr for Decoder {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        [Self::Json, Self::Base64, Self::Gzip]
            .into_iter()
            .find(|decoder| decoder.name() == name)
            .ok_or(())
    }
}
