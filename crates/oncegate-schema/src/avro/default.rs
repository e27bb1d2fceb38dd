//! Writes the default of a field in Avro's binary encoding, so that it is read as a payload is.

use serde_json::Value;

use super::schema::{Record, Type, TypeId};
use super::{AvroSchema, time};

/// The most values of a default. Those of nested records can be many more than their schema has
/// words.
const MAX_VALUES: usize = 10_000;
/// The deepest default: a record whose default holds itself has no end.
const MAX_DEPTH: usize = 64;

/// Encodes the default of a field of this type, given in the form of a schema.
///
/// # Errors
/// When it is no value of the type.
pub(super) fn encoded(schema: &AvroSchema, of: TypeId, default: &Value) -> Result<Vec<u8>, String> {
    let mut writer = DefaultWriter {
        schema,
        values: 0,
        out: Vec::new(),
    };
    writer.write(of, default, 0)?;
    Ok(writer.out)
}

struct DefaultWriter<'a> {
    schema: &'a AvroSchema,
    values: usize,
    out: Vec<u8>,
}

impl DefaultWriter<'_> {
    fn write(&mut self, of: TypeId, value: &Value, depth: usize) -> Result<(), String> {
        self.values += 1;
        if depth > MAX_DEPTH || self.values > MAX_VALUES {
            return Err(format!(
                "it is deeper than {MAX_DEPTH} levels or has more than {MAX_VALUES} values"
            ));
        }
        let schema = self.schema;
        match schema.kind(of) {
            Type::Union(branches) => self.union(branches, value, depth),
            Type::Record(record) => self.record(record, value, depth),
            Type::Array(items) => {
                let values = value.as_array().ok_or_else(|| misfit(value))?;
                self.block(values.len());
                for value in values {
                    self.write(*items, value, depth + 1)?;
                }
                self.out.push(0);
                Ok(())
            }
            Type::Map(of) => {
                let members = value.as_object().ok_or_else(|| misfit(value))?;
                self.block(members.len());
                for (name, value) in members {
                    counted(name.as_bytes(), &mut self.out);
                    self.write(*of, value, depth + 1)?;
                }
                self.out.push(0);
                Ok(())
            }
            plain => plain_value(plain, value, &mut self.out).ok_or_else(|| misfit(value)),
        }
    }

    /// Writes the first branch that takes the value: old versions of Avro know only the first one,
    /// new ones any.
    fn union(&mut self, branches: &[TypeId], value: &Value, depth: usize) -> Result<(), String> {
        let start = self.out.len();
        for (index, branch) in branches.iter().enumerate() {
            count(index, &mut self.out);
            if self.write(*branch, value, depth + 1).is_ok() {
                return Ok(());
            }
            self.out.truncate(start);
        }
        Err(misfit(value))
    }

    /// Writes a record. A field that the value does not have has its own default.
    fn record(&mut self, record: &Record, value: &Value, depth: usize) -> Result<(), String> {
        let members = value.as_object().ok_or_else(|| misfit(value))?;
        for field in &record.fields {
            let member = members.get(&field.name).or(field.default.as_ref());
            let member = member.ok_or_else(|| format!("{value} lacks `{}`", field.name))?;
            self.write(field.of, member, depth + 1)?;
        }
        Ok(())
    }

    /// Begins the only block of an array or map; an empty one has none.
    fn block(&mut self, length: usize) {
        if length > 0 {
            count(length, &mut self.out);
        }
    }
}

#[cold]
fn misfit(value: &Value) -> String {
    format!("{value} is no value of its type")
}

/// Writes a value that holds no others; `None` when it is none of the type.
fn plain_value(kind: &Type, value: &Value, out: &mut Vec<u8>) -> Option<()> {
    match kind {
        Type::Null => value.as_null()?,
        Type::Boolean => out.push(value.as_bool()?.into()),
        Type::Int | Type::Date | Type::Time { unit: time::MILLIS } => {
            long(i32::try_from(value.as_i64()?).ok()?.into(), out);
        }
        Type::Long | Type::Time { .. } | Type::Timestamp { .. } => long(value.as_i64()?, out),
        #[allow(
            clippy::cast_possible_truncation,
            reason = "the nearest of the smaller type is the value"
        )]
        Type::Float => out.extend_from_slice(&(value.as_f64()? as f32).to_le_bytes()),
        Type::Double => out.extend_from_slice(&value.as_f64()?.to_le_bytes()),
        Type::String => counted(value.as_str()?.as_bytes(), out),
        Type::Bytes | Type::Decimal { size: None, .. } => counted(&bytes(value)?, out),
        Type::Fixed(size)
        | Type::Decimal {
            size: Some(size), ..
        } => {
            out.extend_from_slice(&fixed(value, *size)?);
        }
        Type::Uuid => out.extend_from_slice(&fixed(value, 16)?),
        Type::Duration => out.extend_from_slice(&fixed(value, 12)?),
        Type::Enum(symbols) => {
            let symbol = value.as_str()?;
            count(symbols.iter().position(|known| known == symbol)?, out);
        }
        Type::Union(_) | Type::Record(_) | Type::Array(_) | Type::Map(_) => return None,
    }
    Some(())
}

/// The bytes of a text in which a schema writes each byte as the character of its number.
fn bytes(value: &Value) -> Option<Vec<u8>> {
    value
        .as_str()?
        .chars()
        .map(|letter| u8::try_from(u32::from(letter)).ok())
        .collect()
}

fn fixed(value: &Value, size: usize) -> Option<Vec<u8>> {
    bytes(value).filter(|bytes| bytes.len() == size)
}

fn counted(bytes: &[u8], out: &mut Vec<u8>) {
    count(bytes.len(), out);
    out.extend_from_slice(bytes);
}

fn count(number: usize, out: &mut Vec<u8>) {
    long(i64::try_from(number).unwrap_or(i64::MAX), out);
}

/// Writes an int or long: seven bits a byte, the sign in the lowest one.
fn long(number: i64, out: &mut Vec<u8>) {
    let mut rest = ((number << 1) ^ (number >> 63)).cast_unsigned();
    while rest >= 0x80 {
        out.push(rest.to_le_bytes()[0] | 0x80);
        rest >>= 7;
    }
    out.push(rest.to_le_bytes()[0]);
}
