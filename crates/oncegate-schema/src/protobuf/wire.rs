//! Reads Protobuf's wire format.

use oncegate_core::key::{KeyError, MAX_DEPTH};

pub(super) const PROTOBUF: &str = "protobuf";

/// A range of the content that is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Raw<'a> {
    Varint(u64),
    Fixed32([u8; 4]),
    Fixed64([u8; 8]),
    /// The content of a string, a message, a packed list or a group.
    Bytes(&'a [u8]),
}

/// Reads bytes from the front.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wire<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
    /// The offset of `bytes` in the payload; an approximation inside of merged messages.
    pub(super) offset: usize,
}

impl<'a> Wire<'a> {
    pub(super) fn new(bytes: &'a [u8], offset: usize) -> Self {
        Self {
            bytes,
            at: 0,
            offset,
        }
    }

    /// The next field: its number and its content. `None` at the end.
    pub(super) fn field(&mut self) -> Result<Option<(u32, Raw<'a>)>, KeyError> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let (number, wire_type) = self.tag()?;
        self.content(number, wire_type, 0)
            .map(|raw| Some((number, raw)))
    }

    fn tag(&mut self) -> Result<(u32, u8), KeyError> {
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3)
            .ok()
            .filter(|number| (1..1 << 29).contains(number));
        let number = number.ok_or_else(|| self.malformed("a field has no valid number"))?;
        Ok((number, (tag & 7) as u8))
    }

    fn content(&mut self, number: u32, wire_type: u8, depth: usize) -> Result<Raw<'a>, KeyError> {
        match wire_type {
            0 => self.varint().map(Raw::Varint),
            1 => Ok(Raw::Fixed64(*self.chunk()?)),
            2 => {
                let length = self.varint()?;
                let length =
                    usize::try_from(length).map_err(|_| self.malformed("a length is too large"))?;
                self.take(length).map(Raw::Bytes)
            }
            3 => self.group(number, depth).map(Raw::Bytes),
            5 => Ok(Raw::Fixed32(*self.chunk()?)),
            _ => Err(self.malformed("there is no such wire type")),
        }
    }

    /// The content of a group, which ends with a tag of its own. The recursion is bounded.
    fn group(&mut self, number: u32, depth: usize) -> Result<&'a [u8], KeyError> {
        if depth == MAX_DEPTH {
            return Err(KeyError::TooDeep {
                offset: self.offset + self.at,
                limit: MAX_DEPTH,
            });
        }
        let start = self.at;
        loop {
            let end = self.at;
            let (inner, wire_type) = self.tag()?;
            if wire_type != 4 {
                self.content(inner, wire_type, depth + 1)?;
                continue;
            }
            if inner != number {
                return Err(self.malformed("a group ends with another number"));
            }
            return Ok(self.bytes.get(start..end).unwrap_or_default());
        }
    }

    #[inline]
    pub(super) fn varint(&mut self) -> Result<u64, KeyError> {
        let mut value = 0_u64;
        for shift in (0..70).step_by(7) {
            let [byte] = *self.chunk::<1>()?;
            // The bits over the 64th of a tenth byte do not count, as in Protobuf's own readers.
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.malformed("a number has more than ten bytes"))
    }

    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8], KeyError> {
        let taken = self
            .at
            .checked_add(length)
            .and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| self.malformed("ends in the middle of a value"))?;
        self.at += length;
        Ok(taken)
    }

    pub(super) fn chunk<const N: usize>(&mut self) -> Result<&'a [u8; N], KeyError> {
        let chunk = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk);
        let chunk = chunk.ok_or_else(|| self.malformed("ends in the middle of a value"))?;
        self.at += N;
        Ok(chunk)
    }

    #[cold]
    pub(super) fn malformed(&self, what: &'static str) -> KeyError {
        KeyError::MalformedPayload {
            format: PROTOBUF,
            offset: self.offset + self.at,
            what,
        }
    }
}

/// The signed number that a varint of `sint32` or `sint64` stands for.
pub(super) fn zigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}
