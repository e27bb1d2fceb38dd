//! Finds the schema of a message: in front of its payload, or in a header.

use std::fmt;

use oncegate_core::key::{HeaderValue, KeyError, KeySource, foreign_form};

/// The header in which newer serialisers of Confluent put the schema of the payload.
const HEADER: &str = "__value_schema_id";
/// The byte before a schema's id, which has four bytes.
const MAGIC_ID: u8 = 0;
/// The byte before a schema's GUID, which has sixteen bytes.
const MAGIC_GUID: u8 = 1;
/// The most levels of messages inside each other that a payload may name.
const MAX_INDEXES: u64 = 64;

/// The name of a schema in a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SchemaName {
    Id(u32),
    Guid([u8; 16]),
}

impl fmt::Display for SchemaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "{id}"),
            Self::Guid(bytes) => {
                for (position, byte) in bytes.iter().enumerate() {
                    if matches!(position, 4 | 6 | 8 | 10) {
                        f.write_str("-")?;
                    }
                    write!(f, "{byte:02x}")?;
                }
                Ok(())
            }
        }
    }
}

/// A payload with the name of its schema.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Framed<'m> {
    pub(crate) schema: SchemaName,
    /// The bytes after the name: the indexes of Protobuf, in the header or in front of the body.
    after: &'m [u8],
    /// The payload, or its rest.
    rest: &'m [u8],
    is_in_header: bool,
    /// The offset of `rest` in the payload.
    offset: usize,
}

impl<'m> Framed<'m> {
    pub(crate) fn of(message: &'m dyn KeySource, payload: &'m [u8]) -> Result<Self, KeyError> {
        match message.header(HEADER) {
            HeaderValue::One(header) => {
                let (schema, after) = name(header).ok_or(KeyError::MalformedPayload {
                    format: "a message with a schema header",
                    offset: 0,
                    what: "the header __value_schema_id has neither an id nor a GUID",
                })?;
                Ok(Self {
                    schema,
                    after,
                    rest: payload,
                    is_in_header: true,
                    offset: 0,
                })
            }
            HeaderValue::Several => Err(KeyError::RepeatedHeader {
                name: HEADER.to_owned(),
            }),
            HeaderValue::Absent => {
                let found = name(payload);
                let (schema, rest) = found.ok_or_else(|| unframed(payload))?;
                Ok(Self {
                    schema,
                    after: rest,
                    rest,
                    is_in_header: false,
                    offset: payload.len() - rest.len(),
                })
            }
        }
    }

    /// The body of a format without more framing, and its offset in the payload.
    pub(crate) fn body(&self) -> (&'m [u8], usize) {
        (self.rest, self.offset)
    }

    /// The indexes of a Protobuf message, its body, and the body's offset in the payload.
    pub(crate) fn indexed_body(&self) -> Result<(Vec<usize>, &'m [u8], usize), KeyError> {
        let (indexes, after) = indexes(self.after).ok_or(KeyError::MalformedPayload {
            format: "protobuf in Confluent's framing",
            offset: self.offset,
            what: "the indexes of its message cannot be read",
        })?;
        if self.is_in_header {
            return Ok((indexes, self.rest, 0));
        }
        Ok((indexes, after, self.offset + self.rest.len() - after.len()))
    }
}

/// The name of the schema at the beginning of these bytes, and the bytes after it.
fn name(bytes: &[u8]) -> Option<(SchemaName, &[u8])> {
    match bytes.split_first()? {
        (&MAGIC_ID, after) => {
            let (id, after) = after.split_first_chunk()?;
            Some((SchemaName::Id(u32::from_be_bytes(*id)), after))
        }
        (&MAGIC_GUID, after) => {
            let (guid, after) = after.split_first_chunk()?;
            Some((SchemaName::Guid(*guid), after))
        }
        _ => None,
    }
}

/// The indexes of the message in its schema, and the bytes after them: a count, then as many
/// indexes, all as zigzag varints. A count of zero is short for the first message.
fn indexes(bytes: &[u8]) -> Option<(Vec<usize>, &[u8])> {
    let (count, mut rest) = varint(bytes)?;
    if count > MAX_INDEXES {
        return None;
    }
    if count == 0 {
        return Some((vec![0], rest));
    }
    let mut indexes = Vec::new();
    for _ in 0..count {
        let (index, after) = varint(rest)?;
        indexes.push(usize::try_from(index).ok()?);
        rest = after;
    }
    Some((indexes, rest))
}

/// A number that is not negative.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0_u64;
    let mut rest = bytes;
    for shift in (0..35).step_by(7) {
        let (byte, after) = rest.split_first()?;
        value |= u64::from(byte & 0x7F) << shift;
        rest = after;
        if *byte < 0x80 {
            // An odd number is a negative one.
            return (value & 1 == 0).then_some((value >> 1, rest));
        }
    }
    None
}

/// The error of a payload that names no schema.
fn unframed(payload: &[u8]) -> KeyError {
    match foreign_form(payload) {
        // A payload with the magic byte begins as the framing does, and is too short for one.
        Some(what) if payload.first() != Some(&MAGIC_ID) => KeyError::Framed { what },
        _ => KeyError::MalformedPayload {
            format: "in a schema registry's framing",
            offset: 0,
            what: "it begins with no schema id, and has no header __value_schema_id",
        },
    }
}
