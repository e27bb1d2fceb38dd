//! The layer before the keys: a format turns the payload of a message into a document.
//!
//! Without a format, the payload is the document: JSON. Keys know documents only, so a format
//! changes nothing about paths, normalisers and limits, and a message has the key of the JSON
//! document with the same values.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::error::KeyError;
use super::input::{HeaderValue, KeySource};
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
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The wanted parts by name; `None` for all but `except`.
    named: Option<&'a Node>,
    /// The parts that are left out of a value that is wanted as a whole. There are several where a
    /// member has several names.
    except: Vec<&'a Node>,
    takes_defaults: bool,
}

impl<'a> Wanted<'a> {
    /// The whole document.
    #[must_use]
    pub fn all() -> Self {
        Self {
            named: None,
            except: Vec::new(),
            takes_defaults: false,
        }
    }

    /// The whole document without these parts.
    pub(super) fn all_but(except: &'a Node) -> Self {
        let except = if except.is_empty() {
            Vec::new()
        } else {
            vec![except]
        };
        Self {
            except,
            ..Self::all()
        }
    }

    /// The parts that these paths name. None of them may lead into another one: what is wanted as a
    /// whole has the names of the document alone.
    pub(super) fn of(node: &'a Node, takes_defaults: bool) -> Self {
        Self {
            named: node.target.is_none().then_some(node),
            takes_defaults,
            ..Self::all()
        }
    }

    /// Returns whether all of this value is wanted, except members and elements that the lookups
    /// below do not give.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.named.is_none()
    }

    /// Returns whether a path finds the default of a value that the message does not have. Without
    /// it, only what was sent is found: a default would be the same in every message.
    #[must_use]
    pub fn takes_defaults(&self) -> bool {
        self.takes_defaults
    }

    /// Returns the wanted part of a member of this object; `None` for nothing.
    #[must_use]
    pub fn member(&self, name: &[u8]) -> Option<Self> {
        self.member_of([name])
    }

    /// Returns the wanted part of a member that has several names, of an object that is wanted as a
    /// whole: an exception may use each of them.
    #[must_use]
    pub fn member_of<'n>(&self, names: impl IntoIterator<Item = &'n [u8]>) -> Option<Self> {
        match self.named {
            Some(node) => {
                let child = names.into_iter().find_map(|name| node.member(name))?;
                Some(Self::of(child, self.takes_defaults))
            }
            None if self.except.is_empty() => Some(Self::all()),
            None => self.without(
                names
                    .into_iter()
                    .flat_map(|name| self.except.iter().filter_map(move |node| node.member(name))),
            ),
        }
    }

    /// Returns the wanted part of an element of this array; `None` for nothing.
    #[must_use]
    pub fn element(&self, index: usize) -> Option<Self> {
        match self.named {
            Some(node) => Some(Self::of(node.element(index)?, self.takes_defaults)),
            None => self.without(self.except.iter().filter_map(|node| node.element(index))),
        }
    }

    /// The number of elements of this array that are needed, from its beginning.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.named.map_or(usize::MAX, Node::elements_wanted)
    }

    /// All of a value, without what these exceptions name in it; `None` when one of them names the
    /// value itself.
    fn without(&self, exceptions: impl Iterator<Item = &'a Node>) -> Option<Self> {
        let mut except = Vec::new();
        for node in exceptions {
            if node.target.is_some() {
                return None;
            }
            except.push(node);
        }
        Some(Self {
            except,
            ..Self::all()
        })
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

/// The length of the head of Avro's single-object encoding: two bytes, and the fingerprint of the
/// schema.
const AVRO_HEAD_BYTES: usize = 10;
const AVRO_SINGLE_OBJECT: &str = "Avro's single-object encoding, which is not read; send the framing of a schema registry, or the body alone, or use a header or the message key";
const AVRO_FILE: &str = "a file of Avro with a schema of its own, which is not read; send the framing of a schema registry, or the body alone, or use a header or the message key";

/// Recognises Avro in a form that has more than the bytes of a value. It is asked when these could
/// not be read as a value: a value may begin with the same bytes.
pub fn foreign_avro(payload: &[u8]) -> Option<&'static str> {
    match payload {
        [0, _, _, _, _, ..] => Some(
            "the framing of Confluent's schema registry; set `registry` in the place of `avro`",
        ),
        [0xC3, 1, ..] if payload.len() >= AVRO_HEAD_BYTES => Some(AVRO_SINGLE_OBJECT),
        [b'O', b'b', b'j', 1, ..] => Some(AVRO_FILE),
        _ => None,
    }
}

/// Returns whether a message is a batch of CloudEvents, by its type or its content.
pub(super) fn is_batch_of_events(message: &dyn KeySource) -> bool {
    const TYPE: &[u8] = b"application/cloudevents-batch";
    const NAME: &[u8] = b"\"specversion\"";
    /// The beginning of a document in which its first event has said what it is.
    const LOOKED_AT_BYTES: usize = 64 * 1024;
    if let HeaderValue::One(kind) = message.header("content-type")
        && kind.starts_with(TYPE)
    {
        return true;
    }
    let payload = message.payload().unwrap_or_default().trim_ascii_start();
    let looked_at = payload.get(..LOOKED_AT_BYTES).unwrap_or(payload);
    payload.starts_with(b"[") && looked_at.windows(NAME.len()).any(|part| part == NAME)
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
        // A described type whose descriptor is one of the sections of a body in AMQP 1.0.
        [0, 0x53, 0x75..=0x77, ..] | [0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x75..=0x77, ..] => Some(
            "a body with the type code of its section in front (0x53 0x77 is a value), as a message of version 1.0 of its protocol has for a consumer of version 0.9.1; let the producer send data sections, or use a header or the message id",
        ),
        [0, _, _, _, _, ..] => Some(
            "the framing of Confluent's schema registry; set the consumer's `format` to a registry",
        ),
        [3, 0 | 5, ..] if payload.len() >= 18 => Some(
            "the framing of AWS Glue's schema registry, which is not supported; use a header or the message key",
        ),
        [0xC3, 1, ..] if payload.len() >= AVRO_HEAD_BYTES => Some(AVRO_SINGLE_OBJECT),
        [b'O', b'b', b'j', 1, ..] => Some(AVRO_FILE),
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
