//! Finds the fields of a reader's schema in payloads of other schemas: by its aliases, or as its defaults.

use std::collections::HashSet;

use serde_json::Value;

use super::schema::{AvroSchema, DefaultField, Record, RecordField, Type, TypeId};

/// The most values of one default, and the deepest nesting: a record's default may consist of its fields' defaults.
const MAX_VALUES: usize = 10_000;
const MAX_DEPTH: usize = 64;

impl AvroSchema {
    /// Checks that a schema can be a reader's: that it can be read, and so can its defaults.
    pub(crate) fn check_reader(text: &str) -> Result<(), String> {
        let schema = Self::parse(text, &[])?;
        for kind in &schema.types {
            let Type::Record(record) = kind else { continue };
            for field in &record.fields {
                encoded(&schema.types, record, field)?;
            }
        }
        Ok(())
    }

    /// Lets paths name fields as the reader's schema does. What they find keeps the type that the payload has.
    pub(crate) fn read_as(mut self, reader: &str) -> Result<Self, String> {
        let reader = self.add(reader)?;
        let mut pairs = vec![(self.root, reader)];
        let mut seen: HashSet<(TypeId, TypeId)> = HashSet::new();
        let mut resolved: HashSet<TypeId> = HashSet::new();
        while let Some((written, read)) = pairs.pop() {
            if !seen.insert((written, read)) {
                continue;
            }
            match (self.kind(written), self.kind(read)) {
                (Type::Union(branches), _) => pairs.extend(branches.iter().map(|branch| (*branch, read))),
                (_, Type::Union(branches)) => pairs.extend(branches.iter().map(|branch| (written, *branch))),
                (Type::Array(written), Type::Array(read)) | (Type::Map(written), Type::Map(read)) => {
                    pairs.push((*written, *read));
                }
                (Type::Record(record), Type::Record(reader)) if is_same(record, reader) => {
                    let found = matches(record, reader);
                    pairs.extend(found.iter().map(|(field, reader)| (field.of, reader.of)));
                    // A record that the reader has in two places is resolved as in the first one.
                    if resolved.insert(written) {
                        self.resolve(written, read)?;
                    }
                }
                _ => {}
            }
        }
        Ok(self)
    }

    /// Adds names and defaults of the reader's record to the one that is written.
    fn resolve(&mut self, written: TypeId, read: TypeId) -> Result<(), String> {
        let (Type::Record(record), Type::Record(reader)) = (self.kind(written), self.kind(read)) else {
            return Ok(());
        };
        let mut taken: HashSet<String> = HashSet::new();
        for field in &record.fields {
            taken.extend(names(field).cloned());
        }
        let mut aliases: Vec<(String, Vec<String>)> = Vec::new();
        let mut defaults = Vec::new();
        for field in &reader.fields {
            let free: Vec<String> = names(field).filter(|name| !taken.contains(*name)).cloned().collect();
            let source = source(record, field).map(|source| source.name.clone());
            taken.extend(free.iter().cloned());
            if let Some(source) = source {
                aliases.push((source, free));
            } else if let Some(bytes) = encoded(&self.types, reader, field)? {
                defaults.push(DefaultField { names: free, of: field.of, bytes });
            }
        }
        if let Some(Type::Record(record)) = self.types.get_mut(written) {
            for (source, free) in aliases {
                let fields = record.fields.iter_mut().filter(|field| field.name == source);
                fields.for_each(|field| field.aliases.extend(free.iter().cloned()));
            }
            record.defaults = defaults;
        }
        Ok(())
    }
}

/// Whether a record is the reader's, by its name or a former one.
fn is_same(written: &Record, reader: &Record) -> bool {
    written.name == reader.name || reader.aliases.contains(&written.name)
}

fn names(field: &RecordField) -> impl Iterator<Item = &String> {
    std::iter::once(&field.name).chain(&field.aliases)
}

/// The written field that a field of the reader is read from: by its name, else by its own aliases, else by those of the writer.
fn source<'w>(written: &'w Record, reader: &RecordField) -> Option<&'w RecordField> {
    let by_name = names(reader).find_map(|name| written.fields.iter().find(|field| field.name == *name));
    by_name.or_else(|| written.fields.iter().find(|field| field.aliases.contains(&reader.name)))
}

fn matches<'a>(written: &'a Record, reader: &'a Record) -> Vec<(&'a RecordField, &'a RecordField)> {
    let found = reader.fields.iter().filter_map(|field| Some((source(written, field)?, field)));
    found.collect()
}

/// The default of a field in Avro's binary encoding; `None` if it has none.
fn encoded(types: &[Type], record: &Record, field: &RecordField) -> Result<Option<Vec<u8>>, String> {
    let Some(default) = &field.default else { return Ok(None) };
    let mut encoder = Encoder { types, out: Vec::new(), left: MAX_VALUES };
    match encoder.value(field.of, default, 0) {
        Some(()) => Ok(Some(encoder.out)),
        None => Err(format!("the default of `{}` in `{}` does not fit its type", field.name, record.name)),
    }
}

/// Writes defaults. Every function returns `None` for a value that does not fit.
struct Encoder<'a> {
    types: &'a [Type],
    out: Vec<u8>,
    left: usize,
}

impl Encoder<'_> {
    fn value(&mut self, id: TypeId, value: &Value, depth: usize) -> Option<()> {
        self.left = self.left.checked_sub(1)?;
        if depth > MAX_DEPTH {
            return None;
        }
        match self.types.get(id)? {
            Type::Null => value.as_null()?,
            Type::Boolean => self.out.push(value.as_bool()?.into()),
            Type::Int | Type::Date => self.long(i32::try_from(value.as_i64()?).ok()?.into()),
            Type::Long | Type::Time { .. } | Type::Timestamp { .. } => self.long(value.as_i64()?),
            Type::Float => {
                let text = value.as_number()?.to_string();
                self.out.extend(text.parse::<f32>().ok()?.to_le_bytes());
            }
            Type::Double => {
                let text = value.as_number()?.to_string();
                self.out.extend(text.parse::<f64>().ok()?.to_le_bytes());
            }
            Type::String => self.counted(value.as_str()?.as_bytes()),
            Type::Bytes | Type::Decimal { size: None, .. } => self.counted(&latin(value)?),
            Type::Fixed(size) | Type::Decimal { size: Some(size), .. } => self.fixed(value, *size)?,
            Type::Uuid => self.fixed(value, 16)?,
            Type::Duration => self.fixed(value, 12)?,
            Type::Enum(symbols) => {
                let symbol = value.as_str()?;
                self.count(symbols.iter().position(|known| known == symbol)?);
            }
            Type::Array(items) => {
                let values = value.as_array()?;
                if !values.is_empty() {
                    self.count(values.len());
                }
                values.iter().try_for_each(|value| self.value(*items, value, depth + 1))?;
                self.long(0);
            }
            Type::Map(values) => {
                let members = value.as_object()?;
                if !members.is_empty() {
                    self.count(members.len());
                }
                for (name, value) in members {
                    self.counted(name.as_bytes());
                    self.value(*values, value, depth + 1)?;
                }
                self.long(0);
            }
            Type::Union(branches) => self.union(branches, value, depth)?,
            Type::Record(record) => {
                let members = value.as_object()?;
                for field in &record.fields {
                    let value = members.get(&field.name).or(field.default.as_ref())?;
                    self.value(field.of, value, depth + 1)?;
                }
            }
        }
        Some(())
    }

    /// Writes a value as the first branch that it fits; Avro before 1.12 had only the very first one.
    fn union(&mut self, branches: &[TypeId], value: &Value, depth: usize) -> Option<()> {
        let start = self.out.len();
        for (index, branch) in branches.iter().enumerate() {
            self.count(index);
            if self.value(*branch, value, depth + 1).is_some() {
                return Some(());
            }
            self.out.truncate(start);
        }
        None
    }

    fn fixed(&mut self, value: &Value, size: usize) -> Option<()> {
        let bytes = latin(value).filter(|bytes| bytes.len() == size)?;
        self.out.extend(bytes);
        Some(())
    }

    fn counted(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.out.extend_from_slice(bytes);
    }

    fn count(&mut self, count: usize) {
        self.long(i64::try_from(count).unwrap_or(i64::MAX));
    }

    fn long(&mut self, number: i64) {
        let mut rest = ((number << 1) ^ (number >> 63)).cast_unsigned();
        while rest >= 0x80 {
            self.out.push((rest & 0x7F) as u8 | 0x80);
            rest >>= 7;
        }
        self.out.push(rest as u8);
    }
}

/// The bytes of a default, of which each is a character.
fn latin(value: &Value) -> Option<Vec<u8>> {
    value.as_str()?.chars().map(|character| u8::try_from(character).ok()).collect()
}
