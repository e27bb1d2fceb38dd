//! Writes single values.

use std::borrow::Cow;

use oncegate_core::key::KeyError;

use super::MessageReader;
use super::schema::Kind;
use super::wire::{Raw, Wire, zigzag};

impl Kind {
    /// Returns whether a list of values of this kind may be packed.
    pub(super) fn is_packable(self) -> bool {
        !matches!(self, Self::Text | Self::Bytes | Self::Message(_))
    }
}

/// Returns whether a value is the one that its absence stands for, in a field without presence.
pub(super) fn is_default(raw: Raw<'_>) -> bool {
    match raw {
        Raw::Varint(value) => value == 0,
        Raw::Fixed32(bytes) => bytes == [0; 4],
        Raw::Fixed64(bytes) => bytes == [0; 8],
        Raw::Bytes(bytes) => bytes.is_empty(),
    }
}

/// The next value of a packed list.
pub(super) fn unpack<'b>(kind: Kind, wire: &mut Wire<'b>) -> Result<Raw<'b>, KeyError> {
    match kind {
        Kind::Fixed32 | Kind::Sfixed32 | Kind::Float => {
            wire.chunk().map(|bytes| Raw::Fixed32(*bytes))
        }
        Kind::Fixed64 | Kind::Sfixed64 | Kind::Double => {
            wire.chunk().map(|bytes| Raw::Fixed64(*bytes))
        }
        _ => wire.varint().map(Raw::Varint),
    }
}

/// The integer of a value; `None` when it is none.
#[expect(
    clippy::cast_possible_truncation,
    reason = "Protobuf takes the low bits of a longer number"
)]
fn integer(kind: Kind, raw: Raw<'_>) -> Option<i128> {
    Some(match (kind, raw) {
        (Kind::Int32 | Kind::Enum(_), Raw::Varint(value)) => i128::from(value as i32),
        (Kind::Int64, Raw::Varint(value)) => i128::from(value.cast_signed()),
        (Kind::Uint32, Raw::Varint(value)) => i128::from(value as u32),
        (Kind::Uint64, Raw::Varint(value)) => i128::from(value),
        (Kind::Sint32, Raw::Varint(value)) => i128::from(zigzag(u64::from(value as u32)) as i32),
        (Kind::Sint64, Raw::Varint(value)) => i128::from(zigzag(value)),
        (Kind::Fixed32, Raw::Fixed32(bytes)) => i128::from(u32::from_le_bytes(bytes)),
        (Kind::Fixed64, Raw::Fixed64(bytes)) => i128::from(u64::from_le_bytes(bytes)),
        (Kind::Sfixed32, Raw::Fixed32(bytes)) => i128::from(i32::from_le_bytes(bytes)),
        (Kind::Sfixed64, Raw::Fixed64(bytes)) => i128::from(i64::from_le_bytes(bytes)),
        _ => return None,
    })
}

impl MessageReader<'_> {
    /// Writes a value that is no message.
    pub(super) fn scalar(&mut self, kind: Kind, raw: Raw<'_>) -> Result<(), KeyError> {
        match (kind, raw) {
            (Kind::Bool, Raw::Varint(value)) => self.json.bool(value != 0),
            (Kind::Float, Raw::Fixed32(bytes)) => self.json.float(f32::from_le_bytes(bytes)),
            (Kind::Double, Raw::Fixed64(bytes)) => self.json.double(f64::from_le_bytes(bytes)),
            (Kind::Text, Raw::Bytes(text)) => self.json.text(text),
            (Kind::Bytes, Raw::Bytes(bytes)) => self.json.bytes(bytes),
            (Kind::Enum(id), raw) => {
                let number = integer(kind, raw).ok_or_else(|| self.mismatch())?;
                self.symbol(id, number)
            }
            (kind, raw) => {
                let number = integer(kind, raw).ok_or_else(|| self.mismatch())?;
                self.json.integer(number)
            }
        }
    }

    /// Writes the name of an enum's value, or its number when the schema has no name for it.
    fn symbol(&mut self, id: usize, number: i128) -> Result<(), KeyError> {
        let schema = self.schema;
        let names = schema.enums.get(id);
        let name = i32::try_from(number)
            .ok()
            .and_then(|number| names?.get(&number));
        match name {
            Some(name) => self.json.text(name.as_bytes()),
            None => self.json.integer(number),
        }
    }

    /// Writes the value of a field that was not sent.
    pub(super) fn default(&mut self, kind: Kind) -> Result<(), KeyError> {
        match kind {
            Kind::Bool => self.json.bool(false),
            Kind::Text | Kind::Bytes => self.json.text(b""),
            Kind::Enum(id) => self.symbol(id, 0),
            Kind::Message(_) => self.json.raw("{}"),
            _ => self.json.raw("0"),
        }
    }

    /// The key of a map as the name of a member.
    pub(super) fn map_key<'b>(
        &self,
        kind: Kind,
        raw: Option<Raw<'b>>,
    ) -> Result<Cow<'b, [u8]>, KeyError> {
        match (kind, raw) {
            (Kind::Text, Some(Raw::Bytes(text))) => Ok(Cow::Borrowed(text)),
            (Kind::Text, None) => Ok(Cow::Borrowed(b"")),
            (Kind::Bool, None | Some(Raw::Varint(0))) => Ok(Cow::Borrowed(b"false")),
            (Kind::Bool, Some(Raw::Varint(_))) => Ok(Cow::Borrowed(b"true")),
            (_, None) => Ok(Cow::Borrowed(b"0")),
            (kind, Some(raw)) => {
                let number = integer(kind, raw).ok_or_else(|| self.mismatch())?;
                Ok(Cow::Owned(number.to_string().into_bytes()))
            }
        }
    }
}
