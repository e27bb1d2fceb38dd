//! Makes documents of Avro's binary encoding.
//!
//! The bytes are read once, from the front: wanted values are written as JSON, everything else is
//! skipped. No tree is built.

mod decimal;
mod default;
mod resolution;
mod schema;

use oncegate_core::key::{KeyError, MAX_DEPTH, Wanted};

pub(crate) use self::schema::AvroSchema;
use self::schema::{MissingField, Record, Type, TypeId};
use crate::json::Json;
use crate::time;

const AVRO: &str = "avro";

impl AvroSchema {
    /// Writes the document of `bytes`, which begin at `offset` in the payload.
    pub(crate) fn document(
        &self,
        bytes: &[u8],
        offset: usize,
        wanted: Wanted<'_>,
        json: Json<'_>,
    ) -> Result<(), KeyError> {
        let mut reader = AvroReader {
            schema: self,
            bytes,
            at: 0,
            offset,
            depth: 0,
            json,
        };
        reader.write(self.root, &wanted)?;
        if reader.at < bytes.len() {
            return Err(reader.malformed("something follows the value"));
        }
        Ok(())
    }

    fn kind(&self, id: TypeId) -> &Type {
        self.types.get(id).unwrap_or(&Type::Null)
    }
}

struct AvroReader<'a> {
    schema: &'a AvroSchema,
    bytes: &'a [u8],
    at: usize,
    /// The offset of `bytes` in the payload.
    offset: usize,
    depth: usize,
    json: Json<'a>,
}

impl<'a> AvroReader<'a> {
    /// Reads a value and writes the wanted parts of it.
    fn write(&mut self, id: TypeId, wanted: &Wanted<'_>) -> Result<(), KeyError> {
        let schema = self.schema;
        match schema.kind(id) {
            Type::Null => self.json.raw("null"),
            Type::Boolean => {
                let value = self.boolean()?;
                self.json.bool(value)
            }
            Type::Int => {
                let value = self.int()?;
                self.json.integer(value.into())
            }
            Type::Long => {
                let value = self.long()?;
                self.json.integer(value.into())
            }
            Type::Float => {
                let value = f32::from_le_bytes(*self.chunk()?);
                self.json.float(value)
            }
            Type::Double => {
                let value = f64::from_le_bytes(*self.chunk()?);
                self.json.double(value)
            }
            Type::String => {
                let text = self.counted()?;
                self.json.text(text)
            }
            Type::Bytes => {
                let bytes = self.counted()?;
                self.json.bytes(bytes)
            }
            Type::Fixed(size) => {
                let bytes = self.take(*size)?;
                self.json.bytes(bytes)
            }
            Type::Enum(symbols) => {
                let symbol = self.symbol(symbols)?;
                self.json.text(symbol.as_bytes())
            }
            Type::Union(branches) => {
                let branch = self.branch(branches)?;
                self.nested(|reader| reader.write(branch, wanted))
            }
            Type::Record(record) => self.nested(|reader| reader.record(record, wanted)),
            Type::Array(items) => self.nested(|reader| reader.array(*items, wanted)),
            Type::Map(values) => self.nested(|reader| reader.map(*values, wanted)),
            logical => self.logical(logical),
        }
    }

    fn logical(&mut self, kind: &Type) -> Result<(), KeyError> {
        match kind {
            Type::Decimal { scale, size } => {
                let bytes = match size {
                    Some(size) => self.take(*size)?,
                    None => self.counted()?,
                };
                let text = decimal::text(bytes, *scale);
                let text = text.ok_or_else(|| self.malformed("a decimal has too many digits"))?;
                self.json.raw(&text)
            }
            Type::Uuid => {
                let text = hyphenated(self.chunk()?);
                self.json.text(text.as_bytes())
            }
            Type::Date => {
                let text = time::date(self.int()?.into());
                self.json.text(text.as_bytes())
            }
            Type::Time { unit } => {
                let count = if *unit == time::MILLIS {
                    self.int()?.into()
                } else {
                    self.long()?
                };
                if count < 0 {
                    return Err(self.malformed("a time of day is negative"));
                }
                self.json.text(time::time(count, *unit).as_bytes())
            }
            Type::Timestamp { unit, is_local } => {
                let mut text = time::date_time(self.long()?, *unit);
                if !is_local {
                    text.push('Z');
                }
                self.json.text(text.as_bytes())
            }
            _ => {
                let [months, days, millis] = self.duration()?;
                self.json.raw(&format!(
                    "{{\"months\":{months},\"days\":{days},\"millis\":{millis}}}"
                ))
            }
        }
    }

    fn record(&mut self, record: &'a Record, wanted: &Wanted<'_>) -> Result<(), KeyError> {
        self.json.open(b'{');
        for field in &record.fields {
            let start = self.at;
            let mut is_read = false;
            for (name, inner) in wanted_names(&field.name, &field.aliases, wanted) {
                self.at = start;
                self.json.name(name.as_bytes())?;
                self.write(field.of, &inner)?;
                is_read = true;
            }
            if !is_read {
                self.skip(field.of)?;
            }
        }
        // A default is the same in every message, so a path has to ask for it. A whole record has
        // it: both schemas then make one document.
        let defaults = if wanted.is_all() || wanted.takes_defaults() {
            record.missing.as_slice()
        } else {
            &[]
        };
        for field in defaults {
            for (name, inner) in wanted_names(&field.name, &field.aliases, wanted) {
                self.json.name(name.as_bytes())?;
                self.missing(field, &inner)?;
            }
        }
        self.json.close(b'}')
    }

    /// Writes the wanted parts of a default.
    fn missing(&mut self, field: &'a MissingField, wanted: &Wanted<'_>) -> Result<(), KeyError> {
        let bytes = std::mem::replace(&mut self.bytes, &field.default);
        let at = std::mem::take(&mut self.at);
        let result = self.write(field.of, wanted);
        self.bytes = bytes;
        self.at = at;
        result
    }

    fn array(&mut self, items: TypeId, wanted: &Wanted<'_>) -> Result<(), KeyError> {
        self.json.open(b'[');
        let mut index = 0;
        while let Some(block) = self.block()? {
            for left in (1..=block.count).rev() {
                if index >= wanted.elements() {
                    self.skip_items(items, left)?;
                    break;
                }
                self.json.separate();
                match wanted.element(index) {
                    Some(inner) => self.write(items, &inner)?,
                    None => {
                        self.skip(items)?;
                        self.json.raw("null")?;
                    }
                }
                index += 1;
            }
            self.close(block)?;
        }
        self.json.close(b']')
    }

    fn map(&mut self, values: TypeId, wanted: &Wanted<'_>) -> Result<(), KeyError> {
        self.json.open(b'{');
        while let Some(block) = self.block()? {
            for _ in 0..block.count {
                let name = self.counted()?;
                match wanted.member(name) {
                    Some(inner) => {
                        self.json.name(name)?;
                        self.write(values, &inner)?;
                    }
                    None => self.skip(values)?,
                }
            }
            self.close(block)?;
        }
        self.json.close(b'}')
    }

    /// Reads over a value.
    fn skip(&mut self, id: TypeId) -> Result<(), KeyError> {
        let schema = self.schema;
        if schema.takes_no_bytes(id) {
            return Ok(());
        }
        match schema.kind(id) {
            Type::Null => Ok(()),
            Type::Boolean => self.boolean().map(drop),
            Type::Int | Type::Date => self.int().map(drop),
            Type::Time { unit: time::MILLIS } => self.int().map(drop),
            Type::Long | Type::Time { .. } | Type::Timestamp { .. } => self.long().map(drop),
            Type::Float => self.take(4).map(drop),
            Type::Double => self.take(8).map(drop),
            Type::String | Type::Bytes | Type::Decimal { size: None, .. } => {
                self.counted().map(drop)
            }
            Type::Fixed(size)
            | Type::Decimal {
                size: Some(size), ..
            } => self.take(*size).map(drop),
            Type::Uuid => self.take(16).map(drop),
            Type::Duration => self.take(12).map(drop),
            Type::Enum(symbols) => self.symbol(symbols).map(drop),
            Type::Union(branches) => {
                let branch = self.branch(branches)?;
                self.nested(|reader| reader.skip(branch))
            }
            Type::Record(record) => self.nested(|reader| {
                record
                    .fields
                    .iter()
                    .try_for_each(|field| reader.skip(field.of))
            }),
            Type::Array(items) => {
                self.skip_blocks(|reader, count| reader.skip_items(*items, count))
            }
            Type::Map(values) => self.skip_blocks(|reader, count| {
                for _ in 0..count {
                    reader.counted()?;
                    reader.skip(*values)?;
                }
                Ok(())
            }),
        }
    }

    fn skip_blocks(
        &mut self,
        items: impl Fn(&mut Self, usize) -> Result<(), KeyError>,
    ) -> Result<(), KeyError> {
        self.nested(|reader| {
            while let Some(block) = reader.block()? {
                match block.end {
                    Some(end) => reader.at = end,
                    None => items(reader, block.count)?,
                }
            }
            Ok(())
        })
    }

    /// Reads over elements. A count of elements that take no bytes has no limit, so these are not
    /// counted.
    fn skip_items(&mut self, items: TypeId, count: usize) -> Result<(), KeyError> {
        for _ in 0..count {
            let start = self.at;
            self.skip(items)?;
            if self.at == start {
                break;
            }
        }
        Ok(())
    }

    /// Reads the head of the next block of an array or map; `None` at the end.
    fn block(&mut self) -> Result<Option<Block>, KeyError> {
        let count = self.long()?;
        if count == 0 {
            return Ok(None);
        }
        let end = if count < 0 {
            let bytes = usize::try_from(self.long()?).ok();
            let end = bytes
                .and_then(|bytes| self.at.checked_add(bytes))
                .filter(|end| *end <= self.bytes.len());
            Some(end.ok_or_else(|| self.malformed("a block is longer than the payload"))?)
        } else {
            None
        };
        let count = usize::try_from(count.unsigned_abs())
            .map_err(|_| self.malformed("a block is too long"))?;
        Ok(Some(Block { count, end }))
    }

    fn close(&self, block: Block) -> Result<(), KeyError> {
        match block.end {
            Some(end) if end != self.at => {
                Err(self.malformed("a block has another length than it says"))
            }
            _ => Ok(()),
        }
    }

    /// Descends one level. The recursion is bounded, because a schema may refer to itself.
    fn nested(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<(), KeyError>,
    ) -> Result<(), KeyError> {
        // Twice the depth of a document, because a union is a level here and none in JSON.
        if self.depth == 2 * MAX_DEPTH {
            return Err(KeyError::TooDeep {
                offset: self.offset + self.at,
                limit: MAX_DEPTH,
            });
        }
        self.depth += 1;
        let result = read(self);
        self.depth -= 1;
        result
    }

    fn branch(&mut self, branches: &[TypeId]) -> Result<TypeId, KeyError> {
        let index = usize::try_from(self.long()?).ok();
        let branch = index.and_then(|index| branches.get(index)).copied();
        branch.ok_or_else(|| self.malformed("a union has no such branch"))
    }

    fn symbol<'s>(&mut self, symbols: &'s [String]) -> Result<&'s str, KeyError> {
        let index = usize::try_from(self.int()?).ok();
        let symbol = index.and_then(|index| symbols.get(index));
        symbol
            .map(String::as_str)
            .ok_or_else(|| self.malformed("an enum has no such symbol"))
    }

    fn duration(&mut self) -> Result<[u32; 3], KeyError> {
        let months = u32::from_le_bytes(*self.chunk()?);
        let days = u32::from_le_bytes(*self.chunk()?);
        let millis = u32::from_le_bytes(*self.chunk()?);
        Ok([months, days, millis])
    }

    fn boolean(&mut self) -> Result<bool, KeyError> {
        match self.take(1)? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(self.malformed("a boolean is neither 0 nor 1")),
        }
    }

    fn int(&mut self) -> Result<i32, KeyError> {
        i32::try_from(self.long()?).map_err(|_| self.malformed("an int has more than 32 bits"))
    }

    fn long(&mut self) -> Result<i64, KeyError> {
        let mut value = 0_u64;
        for shift in (0..70).step_by(7) {
            let [byte] = *self.chunk::<1>()?;
            let bits = u64::from(byte & 0x7F);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed());
            }
        }
        Err(self.malformed("a number has more than 64 bits"))
    }

    fn counted(&mut self) -> Result<&'a [u8], KeyError> {
        let length = self.long()?;
        let length = usize::try_from(length).map_err(|_| self.malformed("a length is negative"))?;
        self.take(length)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], KeyError> {
        let taken = self
            .at
            .checked_add(length)
            .and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| self.malformed("ends in the middle of a value"))?;
        self.at += length;
        Ok(taken)
    }

    fn chunk<const N: usize>(&mut self) -> Result<&'a [u8; N], KeyError> {
        let chunk = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk);
        let chunk = chunk.ok_or_else(|| self.malformed("ends in the middle of a value"))?;
        self.at += N;
        Ok(chunk)
    }

    #[cold]
    fn malformed(&self, what: &'static str) -> KeyError {
        KeyError::MalformedPayload {
            format: AVRO,
            offset: self.offset + self.at,
            what,
        }
    }
}

/// The names by which a field is wanted, each with the wanted part. A whole document has the first
/// one, without exceptions by any of them; paths may also use a former name of the field.
fn wanted_names<'f, 'w>(
    name: &'f String,
    aliases: &'f [String],
    wanted: &Wanted<'w>,
) -> Vec<(&'f String, Wanted<'w>)> {
    let names = std::iter::once(name).chain(aliases);
    if wanted.is_all() {
        let inner = wanted.member_of(names.map(|name| name.as_bytes()));
        return inner.map(|inner| (name, inner)).into_iter().collect();
    }
    names
        .filter_map(|name| Some((name, wanted.member(name.as_bytes())?)))
        .collect()
}

/// A block of an array or map.
#[derive(Clone, Copy)]
struct Block {
    count: usize,
    /// The end of its bytes, if the block has their number.
    end: Option<usize>,
}

/// A UUID as text.
fn hyphenated(bytes: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (position, byte) in bytes.iter().enumerate() {
        if matches!(position, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
