//! The layer before the keys: a format turns the payload of a message into a document.
//!
//! Without a format, the payload is the document: JSON. Keys know documents only, so a format
//! changes nothing about paths, normalisers and limits, and a message has the key of the JSON
//! document with the same values.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::error::KeyError;
use super::input::KeySource;
use super::path::Node;

/// Turns payloads into documents. [`Key::format`](super::Key::format) sets it.
#[async_trait]
pub trait Format: Send + Sync + fmt::Debug {
    /// Makes the document of a message: JSON text. Pure and quick; it waits for nothing.
    ///
    /// Writes at least what is `wanted`, and no more than `limit` bytes. What is not wanted may be
    /// left out, or be `null` in an array.
    ///
    /// # Errors
    /// Why the message has no document. [`KeyError::NotPrepared`] when [`prepare`](Self::prepare)
    /// has not been called.
    fn document<'m>(
        &self,
        message: &'m dyn KeySource,
        wanted: Wanted<'_>,
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<DocumentPlace<'m>, KeyError>;

    /// Gets what the document of this message needs from elsewhere, such as its schema. Returns at
    /// once when there is nothing to get. `limit` is that of [`document`](Self::document).
    ///
    /// # Errors
    /// When it cannot be got now. Call it again later; the message itself may be good.
    async fn prepare(
        &self,
        message: &(dyn KeySource + Sync),
        limit: usize,
    ) -> Result<(), PrepareError>;
}

/// The place where a format has put the document.
#[derive(Clone, Copy)]
pub enum DocumentPlace<'m> {
    /// A part of the message is the document.
    Borrowed(&'m [u8]),
    /// The document was written.
    Written,
}

impl fmt::Debug for DocumentPlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Borrowed(document) => write!(f, "Borrowed({} bytes)", document.len()),
            Self::Written => f.write_str("Written"),
        }
    }
}

/// The error of a format that cannot get now what it needs from elsewhere: an outage, not a fault
/// of the message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct PrepareError {
    /// The thing that does not answer, and why.
    pub what: String,
}

/// The parts of a document that a key reads.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a>(Option<&'a Node>);

impl<'a> Wanted<'a> {
    /// The whole document.
    #[must_use]
    pub fn all() -> Self {
        Self(None)
    }

    pub(super) fn of(node: &'a Node) -> Self {
        Self(node.target.is_none().then_some(node))
    }

    /// Returns whether all of this value is wanted.
    #[must_use]
    pub fn is_all(self) -> bool {
        self.0.is_none()
    }

    /// Returns the wanted part of a member of this object; `None` for nothing.
    #[must_use]
    pub fn member(self, name: &[u8]) -> Option<Self> {
        match self.0 {
            None => Some(self),
            Some(node) => node.member(name).map(Wanted::of),
        }
    }

    /// Returns the wanted part of an element of this array; `None` for nothing.
    #[must_use]
    pub fn element(self, index: usize) -> Option<Self> {
        match self.0 {
            None => Some(self),
            Some(node) => node.element(index).map(Wanted::of),
        }
    }

    /// The number of elements of this array that are needed, from its beginning.
    #[must_use]
    pub fn elements(self) -> usize {
        self.0.map_or(usize::MAX, Node::elements_wanted)
    }
}

/// A format of a key. Two of them are equal when they are the same one.
#[derive(Clone, Debug)]
pub(super) struct SharedFormat(pub(super) Arc<dyn Format>);

impl PartialEq for SharedFormat {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Recognises a payload that is no JSON document, but something that carries one: the error of a
/// parser would not say what to change. `None` for everything else.
pub fn foreign_form(payload: &[u8]) -> Option<&'static str> {
    match payload {
        [b'[', ..] if is_s3_pointer(payload) => Some(
            "a pointer to an object in S3, as Amazon's extended clients write for large payloads, and another one for each send; name its bucket in `s3_payloads` of the SQS source, or use a message attribute for the key",
        ),
        // UTF-16 and UTF-32 begin with a zero too, and then have a character of JSON.
        [0, 0, 0, _, 0, 0, 0, ..] | [0, 0x20..=0x7E, 0, _, ..] => None,
        [0, _, _, _, _, ..] => Some(
            "the framing of Confluent's schema registry; set the consumer's `format` to a registry",
        ),
        [3, 0 | 5, ..] if payload.len() >= 18 => Some(
            "the framing of AWS Glue's schema registry, which is not supported; use a header or the message key",
        ),
        [0x1F, 0x8B, ..] => {
            Some("compressed with gzip; set the `encoding` of the consumer's `format`")
        }
        [0x28, 0xB5, 0x2F, 0xFD, ..] => {
            Some("compressed with zstd; set the `encoding` of the consumer's `format`")
        }
        _ => None,
    }
}

/// Returns whether a payload is a pointer to the real one in S3, as Amazon's extended clients for
/// SQS and SNS write it.
#[must_use]
pub fn is_s3_pointer(payload: &[u8]) -> bool {
    const BEGINNINGS: [&[u8]; 2] = [
        b"[\"software.amazon.payloadoffloading.PayloadS3Pointer\"",
        b"[\"com.amazon.sqs.javamessaging.MessageS3Pointer\"",
    ];
    BEGINNINGS
        .iter()
        .any(|beginning| payload.starts_with(beginning))
}
