//! Adds the names and defaults of a reader schema to the schema of a payload.
//!
//! This is all that is done of Avro's schema resolution: the bytes are read as they were written,
//! types are those of the payload's schema, and a field that the reader schema does not have stays.
//! Without that field, messages that differ in it alone would share a key.

use std::collections::{HashMap, HashSet};

use super::AvroSchema;
use super::default;
use super::schema::{MAX_TYPES, MissingField, Record, RecordField, Type, TypeId};

impl AvroSchema {
    /// Reads a reader schema.
    ///
    /// # Errors
    /// When it is no schema, or a default in it is no value of its type.
    pub(crate) fn reader(text: &str) -> Result<Self, String> {
        let schema = Self::parse(text, &[])?;
        for kind in &schema.types {
            let Type::Record(record) = kind else { continue };
            for field in &record.fields {
                let Some(value) = &field.default else {
                    continue;
                };
                let encoded = default::encoded(&schema, field.of, value);
                encoded.map_err(|why| format!("the default of `{}`: {why}", field.name))?;
            }
        }
        Ok(schema)
    }

    /// Returns this schema with the names and defaults of a reader schema.
    ///
    /// # Errors
    /// When the two have too many types together.
    pub(crate) fn resolved(&self, reader: &Self) -> Result<Self, String> {
        let mut resolution = Resolution {
            writer: self,
            reader,
            types: Vec::new(),
            known: HashMap::new(),
            open: Vec::new(),
        };
        let root = resolution.of(Pair {
            of: Origin::Written(self.root),
            read_as: Some(reader.root),
        })?;
        // No recursion: a chain of types may be as long as their number.
        while let Some((pair, id)) = resolution.open.pop() {
            let kind = resolution.kind(pair)?;
            if let Some(slot) = resolution.types.get_mut(id) {
                *slot = kind;
            }
        }
        Ok(Self::of(resolution.types, root))
    }
}

/// A type of one of the two schemas.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Origin {
    Written(TypeId),
    /// The type of a default.
    Defaulted(TypeId),
}

impl Origin {
    /// Returns a type that this one contains.
    fn inner(self, id: TypeId) -> Self {
        match self {
            Self::Written(_) => Self::Written(id),
            Self::Defaulted(_) => Self::Defaulted(id),
        }
    }
}

/// A type, and the type that the reader schema has in its place.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Pair {
    of: Origin,
    read_as: Option<TypeId>,
}

struct Resolution<'a> {
    writer: &'a AvroSchema,
    reader: &'a AvroSchema,
    types: Vec<Type>,
    known: HashMap<Pair, TypeId>,
    open: Vec<(Pair, TypeId)>,
}

impl<'a> Resolution<'a> {
    /// Returns the position of a type that is filled in later.
    fn of(&mut self, pair: Pair) -> Result<TypeId, String> {
        if let Some(id) = self.known.get(&pair) {
            return Ok(*id);
        }
        if self.types.len() == MAX_TYPES {
            return Err(format!(
                "it has more than {MAX_TYPES} types with those of the reader schema"
            ));
        }
        let id = self.types.len();
        self.types.push(Type::Null);
        self.known.insert(pair, id);
        self.open.push((pair, id));
        Ok(id)
    }

    fn original(&self, origin: Origin) -> &'a Type {
        match origin {
            Origin::Written(id) => self.writer.kind(id),
            Origin::Defaulted(id) => self.reader.kind(id),
        }
    }

    fn kind(&mut self, pair: Pair) -> Result<Type, String> {
        let kind = self.original(pair.of);
        let read_as = pair.read_as.and_then(|id| self.counterpart(kind, id));
        Ok(match (kind, read_as) {
            (Type::Union(branches), _) => {
                let branches = branches.iter().map(|id| {
                    self.of(Pair {
                        of: pair.of.inner(*id),
                        read_as: pair.read_as,
                    })
                });
                Type::Union(branches.collect::<Result<_, _>>()?)
            }
            (Type::Array(items), read_as) => {
                let read_as = read_as.and_then(|kind| {
                    if let Type::Array(id) = kind {
                        Some(*id)
                    } else {
                        None
                    }
                });
                Type::Array(self.of(Pair {
                    of: pair.of.inner(*items),
                    read_as,
                })?)
            }
            (Type::Map(values), read_as) => {
                let read_as = read_as.and_then(|kind| {
                    if let Type::Map(id) = kind {
                        Some(*id)
                    } else {
                        None
                    }
                });
                Type::Map(self.of(Pair {
                    of: pair.of.inner(*values),
                    read_as,
                })?)
            }
            (Type::Record(record), Some(Type::Record(read_as))) => {
                Type::Record(self.record(record, read_as, pair.of)?)
            }
            (Type::Record(record), _) => {
                let mut fields = record.fields.clone();
                for field in &mut fields {
                    field.of = self.of(Pair {
                        of: pair.of.inner(field.of),
                        read_as: None,
                    })?;
                }
                Type::Record(Record {
                    fields,
                    ..record.clone()
                })
            }
            (plain, _) => plain.clone(),
        })
    }

    /// The type in the place of `kind`: of a union, the branch that fits.
    fn counterpart(&self, kind: &Type, id: TypeId) -> Option<&'a Type> {
        let reader = self.reader;
        let read_as = reader.kind(id);
        let Type::Union(branches) = read_as else {
            return fits(kind, read_as, false).then_some(read_as);
        };
        let mut branches = branches.iter().map(|id| reader.kind(*id));
        let exact = branches.clone().find(|branch| fits(kind, branch, true));
        exact.or_else(|| branches.find(|branch| fits(kind, branch, false)))
    }

    fn record(
        &mut self,
        record: &Record,
        read_as: &Record,
        origin: Origin,
    ) -> Result<Record, String> {
        let matches = matches(record, read_as);
        let mut resolved = Record {
            fields: self.fields(record, read_as, &matches, origin)?,
            missing: self.missing(read_as, &matches)?,
            name: record.name.clone(),
            aliases: Vec::new(),
        };
        resolved.keep_names_apart();
        Ok(resolved)
    }

    /// Returns the fields of the payload, with the names that the reader schema has for them.
    fn fields(
        &mut self,
        record: &Record,
        read_as: &Record,
        matches: &[Option<usize>],
        origin: Origin,
    ) -> Result<Vec<RecordField>, String> {
        let counterparts: HashMap<usize, &RecordField> = matches
            .iter()
            .zip(&read_as.fields)
            .filter_map(|(found, field)| Some(((*found)?, field)))
            .collect();
        let mut fields = Vec::new();
        for (index, field) in record.fields.iter().enumerate() {
            let counterpart = counterparts.get(&index).copied();
            let of = self.of(Pair {
                of: origin.inner(field.of),
                read_as: counterpart.map(|field| field.of),
            })?;
            let mut resolved = RecordField {
                of,
                ..field.clone()
            };
            if let Some(counterpart) = counterpart {
                resolved.name.clone_from(&counterpart.name);
                resolved.aliases.insert(0, field.name.clone());
                resolved.aliases.extend(counterpart.aliases.iter().cloned());
            }
            fields.push(resolved);
        }
        Ok(fields)
    }

    /// Returns the fields that only the reader schema has, with their defaults.
    fn missing(
        &mut self,
        read_as: &Record,
        matches: &[Option<usize>],
    ) -> Result<Vec<MissingField>, String> {
        let mut missing = Vec::new();
        for (field, found) in read_as.fields.iter().zip(matches) {
            if found.is_some() {
                continue;
            }
            let Some(value) = &field.default else {
                continue;
            };
            missing.push(MissingField {
                name: field.name.clone(),
                aliases: field.aliases.clone(),
                of: self.of(Pair {
                    of: Origin::Defaulted(field.of),
                    read_as: None,
                })?,
                default: default::encoded(self.reader, field.of, value)?,
            });
        }
        Ok(missing)
    }
}

/// Returns the position of the payload's field for each field of the reader schema. A field with
/// the same name goes before one with an alias, and an alias of the reader schema before one that
/// the payload's schema has: without the latter, a reader schema that is older than the payload
/// would have its default in the place of what was sent.
fn matches(record: &Record, read_as: &Record) -> Vec<Option<usize>> {
    let names: HashMap<&str, usize> = record
        .fields
        .iter()
        .zip(0..)
        .map(|(field, index)| (field.name.as_str(), index))
        .collect();
    let mut former_names: HashMap<&str, usize> = HashMap::new();
    for (field, index) in record.fields.iter().zip(0..) {
        for alias in &field.aliases {
            former_names.entry(alias).or_insert(index);
        }
    }
    let mut matches: Vec<Option<usize>> = Vec::new();
    for field in &read_as.fields {
        matches.push(names.get(field.name.as_str()).copied());
    }
    let mut taken: HashSet<usize> = matches.iter().flatten().copied().collect();
    for positions in [&names, &former_names] {
        for (field, slot) in read_as.fields.iter().zip(&mut matches) {
            if slot.is_none() {
                *slot = std::iter::once(&field.name)
                    .chain(&field.aliases)
                    .filter_map(|name| positions.get(name.as_str()).copied())
                    .find(|index| taken.insert(*index));
            }
        }
    }
    matches
}

impl Record {
    /// Removes the aliases that name another field.
    fn keep_names_apart(&mut self) {
        let names = self.fields.iter().map(|field| &field.name);
        let names = names.chain(self.missing.iter().map(|field| &field.name));
        let mut taken: HashSet<String> = names.cloned().collect();
        let aliases = self.fields.iter_mut().map(|field| &mut field.aliases);
        for aliases in aliases.chain(self.missing.iter_mut().map(|field| &mut field.aliases)) {
            aliases.retain(|alias| taken.insert(alias.clone()));
        }
    }
}

/// Returns whether a type of the reader schema stands for this type. Records match by their names,
/// of which Avro compares the last part, or by an alias.
fn fits(kind: &Type, read_as: &Type, is_exact: bool) -> bool {
    match (kind, read_as) {
        (Type::Record(kind), Type::Record(read_as)) if is_exact => kind.name == read_as.name,
        (Type::Record(kind), Type::Record(read_as)) => {
            let mut names = std::iter::once(&read_as.name).chain(&read_as.aliases);
            names.any(|name| last_part(name) == last_part(&kind.name))
        }
        (Type::Array(_), Type::Array(_)) | (Type::Map(_), Type::Map(_)) | (Type::Union(_), _) => {
            true
        }
        _ => false,
    }
}

fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}
