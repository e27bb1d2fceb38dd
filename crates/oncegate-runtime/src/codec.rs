//! Encodes a handler's result for its record, and decodes it for duplicates.
//!
//! A stored result is one byte that names its encoding, then the encoded bytes. An empty result
//! (`()`, `None`) is stored as no bytes at all, which keeps a completed record small.
//!
//! | first byte | meaning |
//! |---|---|
//! | none | an empty result: `()` |
//! | 1 | JSON |
//! | 2 | MessagePack |
//! | 3 | raw bytes |
//! | 4 | a reference: the result is in a [`ResultStore`](crate::results::ResultStore) |
//! | 255 | the work is done, but its result was not kept: too large, or it could not be encoded |

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::BoxError;
use crate::results::{self, REFERENCE};

const JSON: u8 = 1;
const MESSAGE_PACK: u8 = 2;
const RAW: u8 = 3;
const NOT_KEPT: u8 = 255;

const JSON_NULL: &[u8] = b"null";
#[cfg(feature = "messagepack")]
const MESSAGE_PACK_NIL: &[u8] = &[0xc0];

/// The encoding of results that are stored. Reading needs no setting: the record names its
/// encoding, so the codec may change at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Codec {
    /// JSON: readable with every tool. The default.
    #[default]
    Json,
    /// MessagePack with named fields: about a third smaller than JSON.
    #[cfg(feature = "messagepack")]
    MessagePack,
}

/// A type that can be stored as a result: anything that serde can serialise, or [`Raw`] bytes.
pub trait ToStored {
    /// Encodes the result.
    ///
    /// # Errors
    /// Returns an error when it cannot be encoded. The effect has happened by then, so the record
    /// is completed without it.
    fn to_stored(&self, codec: Codec) -> Result<Bytes, BoxError>;
}

/// A type that a stored result can be read as: anything that serde can deserialise without
/// borrowing, or [`Raw`] bytes.
pub trait FromStored: Sized {
    /// Decodes a stored result.
    ///
    /// # Errors
    /// Returns an error when the bytes are not of this type, or the result was not kept.
    fn from_stored(stored: &Bytes) -> Result<Self, BoxError>;
}

/// A type that a handler may return: it can be stored, and read back by duplicates on another
/// thread. It is implemented for every such type.
pub trait Output: ToStored + FromStored + Send + 'static {}

impl<T: ToStored + FromStored + Send + 'static> Output for T {}

/// Bytes in the user's own format, stored as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Raw(pub Bytes);

impl ToStored for Raw {
    fn to_stored(&self, _: Codec) -> Result<Bytes, BoxError> {
        Ok(tagged(RAW, &self.0))
    }
}

impl FromStored for Raw {
    fn from_stored(stored: &Bytes) -> Result<Self, BoxError> {
        match stored.first() {
            Some(&RAW) => Ok(Self(stored.slice(1..))),
            first => Err(unreadable(first)),
        }
    }
}

impl<T: Serialize + ?Sized> ToStored for T {
    fn to_stored(&self, codec: Codec) -> Result<Bytes, BoxError> {
        let (tag, encoded, nothing) = match codec {
            Codec::Json => (JSON, serde_json::to_vec(self)?, JSON_NULL),
            #[cfg(feature = "messagepack")]
            Codec::MessagePack => (
                MESSAGE_PACK,
                rmp_serde::to_vec_named(self)?,
                MESSAGE_PACK_NIL,
            ),
        };
        Ok(if encoded == nothing {
            Bytes::new()
        } else {
            tagged(tag, &encoded)
        })
    }
}

impl<T: DeserializeOwned> FromStored for T {
    fn from_stored(stored: &Bytes) -> Result<Self, BoxError> {
        match stored.split_first() {
            None => Ok(serde_json::from_slice(JSON_NULL)?),
            Some((&JSON, encoded)) => Ok(serde_json::from_slice(encoded)?),
            #[cfg(feature = "messagepack")]
            Some((&MESSAGE_PACK, encoded)) => Ok(rmp_serde::from_slice(encoded)?),
            Some((first, _)) => Err(unreadable(Some(first))),
        }
    }
}

/// The stored form of a result that could not be kept, although the work is done.
pub(crate) fn not_kept() -> Bytes {
    Bytes::from_static(&[NOT_KEPT])
}

/// A readable description of the stored result, without its content.
pub fn describe_stored(stored: &[u8]) -> String {
    match stored.first() {
        None => "an empty result".to_owned(),
        Some(&JSON) => format!("{} bytes of JSON", stored.len() - 1),
        Some(&MESSAGE_PACK) => format!("{} bytes of MessagePack", stored.len() - 1),
        Some(&RAW) => format!("{} raw bytes", stored.len() - 1),
        Some(&REFERENCE) => results::describe(stored),
        Some(&NOT_KEPT) => "not kept".to_owned(),
        Some(other) => format!("{} bytes of the unknown encoding {other}", stored.len() - 1),
    }
}

fn tagged(tag: u8, encoded: &[u8]) -> Bytes {
    let mut stored = BytesMut::with_capacity(1 + encoded.len());
    stored.put_u8(tag);
    stored.put_slice(encoded);
    stored.freeze()
}

fn unreadable(first: Option<&u8>) -> BoxError {
    match first {
        None => "the stored result is empty".into(),
        Some(&NOT_KEPT) => {
            "the result was not kept: it was too large or could not be encoded".into()
        }
        Some(&MESSAGE_PACK) => {
            "the result is MessagePack: build with the feature `messagepack`".into()
        }
        Some(&REFERENCE) => {
            "the result is in a result store, and this gate has none: set `Gate::large_results`"
                .into()
        }
        Some(other) => {
            format!("the stored result has the encoding {other}, which does not fit this type")
                .into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_to_say_takes_no_bytes() {
        assert!(().to_stored(Codec::Json).unwrap().is_empty());
        <() as FromStored>::from_stored(&Bytes::new()).unwrap();
        assert_eq!(Option::<u8>::from_stored(&Bytes::new()).unwrap(), None);
    }

    #[test]
    fn what_only_borrows_can_be_stored_and_read_as_what_owns() {
        let stored = "receipt 42".to_stored(Codec::Json).unwrap();
        assert_eq!(String::from_stored(&stored).unwrap(), "receipt 42");
        let stored = ["a", "b"][..].to_stored(Codec::Json).unwrap();
        assert_eq!(Vec::<String>::from_stored(&stored).unwrap(), ["a", "b"]);
    }

    #[cfg(feature = "messagepack")]
    #[test]
    fn message_pack_keeps_the_names_of_fields() {
        #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        struct Receipt {
            id: u64,
            note: Option<String>,
        }
        #[derive(Debug, PartialEq, serde::Deserialize)]
        struct Later {
            note: Option<String>,
            id: u64,
        }
        let receipt = Receipt {
            id: u64::MAX,
            note: None,
        };
        let stored = receipt.to_stored(Codec::MessagePack).unwrap();
        assert_eq!(Receipt::from_stored(&stored).unwrap(), receipt);
        assert_eq!(
            Later::from_stored(&stored).unwrap(),
            Later {
                note: None,
                id: u64::MAX
            }
        );
        assert!(().to_stored(Codec::MessagePack).unwrap().is_empty());
    }

    #[test]
    fn a_result_comes_back_whatever_codec_is_set_now() {
        let receipt = ("charged".to_owned(), 9_007_199_254_740_993_u64);
        let stored = receipt.to_stored(Codec::Json).unwrap();
        assert_eq!(<(String, u64)>::from_stored(&stored).unwrap(), receipt);
        let raw = Raw(Bytes::from_static(&[0, 255, 1]));
        assert_eq!(
            Raw::from_stored(&raw.to_stored(Codec::Json).unwrap()).unwrap(),
            raw
        );
    }

    #[test]
    fn a_result_of_another_kind_is_refused_in_words() {
        assert!(
            u8::from_stored(&not_kept())
                .unwrap_err()
                .to_string()
                .contains("not kept")
        );
        assert!(Raw::from_stored(&7_u8.to_stored(Codec::Json).unwrap()).is_err());
        assert!(u8::from_stored(&Bytes::from_static(&[9, 9])).is_err());
    }
}
