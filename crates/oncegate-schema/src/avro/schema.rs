//! Reads an Avro schema: the types that the reader follows.
//!
//! A reader of keys needs the shape of the bytes, and the names and the aliases of fields. The
//! additions of a reader schema are worked out once for each schema, in `resolution`.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use crate::time::{MICROS, MILLIS, NANOS};

/// The most types of a schema with its references.
pub(super) const MAX_TYPES: usize = 10_000;

/// The most digits of a decimal: reading more would cost time without bound.
const MAX_PRECISION: u64 = 1_000;

/// The position of a type in its schema.
pub(super) type TypeId = usize;

/// A type.
#[derive(Clone, Debug)]
pub(super) enum Type {
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Bytes,
    String,
    Fixed(usize),
    Enum(Vec<String>),
    Array(TypeId),
    Map(TypeId),
    Union(Vec<TypeId>),
    Record(Record),
    /// A decimal. `size` is that of a fixed.
    Decimal {
        scale: usize,
        size: Option<usize>,
    },
    /// A UUID in sixteen bytes. One in a string is a string.
    Uuid,
    /// A date as days.
    Date,
    Time {
        unit: i64,
    },
    Timestamp {
        unit: i64,
        is_local: bool,
    },
    /// Months, days and milliseconds.
    Duration,
}

/// A record.
#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    /// The full name.
    pub(super) name: String,
    pub(super) aliases: Vec<String>,
    pub(super) fields: Vec<RecordField>,
    /// Fields that the reader schema has and the payload has not.
    pub(super) missing: Vec<MissingField>,
}

/// A field of a record.
#[derive(Clone, Debug)]
pub(super) struct RecordField {
    pub(super) name: String,
    /// Other names, without those that another field of the record has.
    pub(super) aliases: Vec<String>,
    pub(super) of: TypeId,
    pub(super) default: Option<Value>,
}

/// A field that is read from its default.
#[derive(Clone, Debug)]
pub(super) struct MissingField {
    pub(super) name: String,
    pub(super) aliases: Vec<String>,
    pub(super) of: TypeId,
    /// The default in Avro's binary encoding.
    pub(super) default: Vec<u8>,
}

/// A schema, with the types of all schemas that it refers to.
#[derive(Debug)]
pub(crate) struct AvroSchema {
    pub(super) types: Vec<Type>,
    /// Marks the types whose values take no bytes: reading over one costs nothing, however many
    /// records it nests.
    empty: Vec<bool>,
    pub(super) root: TypeId,
}

impl AvroSchema {
    /// Reads a schema. `references` are the schemas whose types it uses; each comes after those
    /// that it refers to itself.
    pub(crate) fn parse(text: &str, references: &[&str]) -> Result<Self, String> {
        let mut parser = Parser::default();
        for reference in references {
            parser.schema(reference)?;
        }
        let root = parser.schema(text)?;
        Ok(Self::of(parser.types, root))
    }

    pub(super) fn of(types: Vec<Type>, root: TypeId) -> Self {
        Self {
            empty: empty(&types),
            types,
            root,
        }
    }

    /// Returns whether values of the type take no bytes.
    pub(super) fn takes_no_bytes(&self, id: TypeId) -> bool {
        self.empty.get(id) == Some(&true)
    }
}

/// Finds the types whose values take no bytes. A record that contains itself is not one of them.
fn empty(types: &[Type]) -> Vec<bool> {
    let mut empty = vec![false; types.len()];
    // Of each record, the fields that are not known to be empty; of each type, the records that it
    // is a field of.
    let mut left = vec![0_usize; types.len()];
    let mut users: Vec<Vec<TypeId>> = vec![Vec::new(); types.len()];
    let mut open: Vec<TypeId> = Vec::new();
    for (id, kind) in types.iter().enumerate() {
        let fields = match kind {
            Type::Null | Type::Fixed(0) => &[],
            Type::Record(record) => record.fields.as_slice(),
            _ => continue,
        };
        if let Some(left) = left.get_mut(id) {
            *left = fields.len();
        }
        for field in fields {
            if let Some(users) = users.get_mut(field.of) {
                users.push(id);
            }
        }
        if fields.is_empty() {
            open.push(id);
        }
    }
    while let Some(id) = open.pop() {
        if let Some(is_empty) = empty.get_mut(id) {
            *is_empty = true;
        }
        for user in users.get_mut(id).map(std::mem::take).unwrap_or_default() {
            if let Some(left) = left.get_mut(user) {
                *left -= 1;
                if *left == 0 {
                    open.push(user);
                }
            }
        }
    }
    empty
}

#[derive(Default)]
struct Parser {
    types: Vec<Type>,
    /// The named types, by their full names.
    names: HashMap<String, TypeId>,
}

impl Parser {
    fn schema(&mut self, text: &str) -> Result<TypeId, String> {
        // A registry may hold a primitive type as a bare word.
        let parsed = serde_json::from_str(text).or_else(|error| match primitive(text.trim()) {
            Some(_) => Ok(Value::String(text.trim().to_owned())),
            None => Err(format!("it is not JSON: {error}")),
        });
        self.parse(&parsed?, "")
    }

    fn add(&mut self, kind: Type) -> Result<TypeId, String> {
        if self.types.len() == MAX_TYPES {
            return Err(format!("it has more than {MAX_TYPES} types"));
        }
        self.types.push(kind);
        Ok(self.types.len() - 1)
    }

    fn parse(&mut self, value: &Value, namespace: &str) -> Result<TypeId, String> {
        match value {
            Value::String(name) => self.named(name, namespace),
            Value::Array(branches) => {
                let branches = branches.iter().map(|branch| self.parse(branch, namespace));
                let branches = branches.collect::<Result<_, _>>()?;
                self.add(Type::Union(branches))
            }
            Value::Object(map) => self.object(map, namespace),
            _ => Err("a type is neither a name, nor an object, nor a union".to_owned()),
        }
    }

    /// A primitive type, or one that has been defined before.
    fn named(&mut self, name: &str, namespace: &str) -> Result<TypeId, String> {
        if let Some(kind) = primitive(name) {
            return self.add(kind);
        }
        let full = full_name(name, namespace);
        let found = self.names.get(&full).or_else(|| self.names.get(name));
        found
            .copied()
            .ok_or_else(|| format!("it uses the type `{full}`, which is not defined"))
    }

    fn object(&mut self, map: &Map<String, Value>, namespace: &str) -> Result<TypeId, String> {
        let Some(Value::String(kind)) = map.get("type") else {
            let inner = map.get("type").ok_or("a type has no `type`")?;
            return self.parse(inner, namespace);
        };
        match kind.as_str() {
            "record" | "error" => self.record(map, namespace),
            "enum" => {
                let symbols = list(map, "symbols")?.iter();
                let symbols = symbols.map(|symbol| symbol.as_str().map(str::to_owned));
                let symbols = symbols
                    .collect::<Option<_>>()
                    .ok_or("a symbol is no string")?;
                self.define(map, namespace, Type::Enum(symbols))
            }
            "fixed" => {
                let size = map
                    .get("size")
                    .and_then(Value::as_u64)
                    .ok_or("a fixed has no size")?;
                let size = usize::try_from(size).map_err(|_| "the size of a fixed is too large")?;
                let kind = fixed(map, size);
                self.define(map, namespace, kind)
            }
            "array" => {
                let items = self.parse(
                    map.get("items").ok_or("an array has no `items`")?,
                    namespace,
                )?;
                self.add(Type::Array(items))
            }
            "map" => {
                let values =
                    self.parse(map.get("values").ok_or("a map has no `values`")?, namespace)?;
                self.add(Type::Map(values))
            }
            name => match primitive(name) {
                Some(kind) => self.add(logical(kind, map)),
                None => self.named(name, namespace),
            },
        }
    }

    fn record(&mut self, map: &Map<String, Value>, namespace: &str) -> Result<TypeId, String> {
        // The record is defined before its fields, which may refer to it.
        let id = self.define(map, namespace, Type::Null)?;
        let own = namespace_of(map, namespace)?;
        let mut fields: Vec<RecordField> = Vec::new();
        let mut taken: HashSet<String> = HashSet::new();
        for field in list(map, "fields")? {
            let field = self.field(field, &own)?;
            if !taken.insert(field.name.clone()) {
                return Err(format!("a record has two fields `{}`", field.name));
            }
            fields.push(field);
        }
        for field in &mut fields {
            field.aliases.retain(|alias| taken.insert(alias.clone()));
        }
        let name = full_name(text(map, "name").unwrap_or_default(), &own);
        let record = Record {
            name,
            aliases: aliases(map),
            fields,
            missing: Vec::new(),
        };
        if let Some(slot) = self.types.get_mut(id) {
            *slot = Type::Record(record);
        }
        Ok(id)
    }

    fn field(&mut self, field: &Value, namespace: &str) -> Result<RecordField, String> {
        let field = field.as_object().ok_or("a field is no object")?;
        let name = text(field, "name").ok_or("a field has no name")?.to_owned();
        let of = field
            .get("type")
            .ok_or_else(|| format!("field `{name}` has no type"))?;
        let of = self.parse(of, namespace)?;
        Ok(RecordField {
            name,
            aliases: aliases(field),
            of,
            default: field.get("default").cloned(),
        })
    }

    /// Adds a named type.
    fn define(
        &mut self,
        map: &Map<String, Value>,
        namespace: &str,
        kind: Type,
    ) -> Result<TypeId, String> {
        let name = text(map, "name").ok_or("a named type has no name")?;
        let full = full_name(name, &namespace_of(map, namespace)?);
        let id = self.add(kind)?;
        // A schema and its reference may define the same type; the later one counts, as its text
        // says.
        self.names.insert(full, id);
        Ok(id)
    }
}

fn primitive(name: &str) -> Option<Type> {
    Some(match name {
        "null" => Type::Null,
        "boolean" => Type::Boolean,
        "int" => Type::Int,
        "long" => Type::Long,
        "float" => Type::Float,
        "double" => Type::Double,
        "bytes" => Type::Bytes,
        "string" => Type::String,
        _ => return None,
    })
}

/// The type with its logical type. One that is unknown, or does not fit, is ignored, as Avro says.
fn logical(kind: Type, map: &Map<String, Value>) -> Type {
    match (&kind, text(map, "logicalType").unwrap_or_default()) {
        (Type::Bytes, "decimal") => decimal(map, None).unwrap_or(kind),
        (Type::Int, "date") => Type::Date,
        (Type::Int, "time-millis") => Type::Time { unit: MILLIS },
        (Type::Long, "time-micros") => Type::Time { unit: MICROS },
        (Type::Long, "timestamp-millis") => Type::Timestamp {
            unit: MILLIS,
            is_local: false,
        },
        (Type::Long, "timestamp-micros") => Type::Timestamp {
            unit: MICROS,
            is_local: false,
        },
        (Type::Long, "timestamp-nanos") => Type::Timestamp {
            unit: NANOS,
            is_local: false,
        },
        (Type::Long, "local-timestamp-millis") => Type::Timestamp {
            unit: MILLIS,
            is_local: true,
        },
        (Type::Long, "local-timestamp-micros") => Type::Timestamp {
            unit: MICROS,
            is_local: true,
        },
        (Type::Long, "local-timestamp-nanos") => Type::Timestamp {
            unit: NANOS,
            is_local: true,
        },
        _ => kind,
    }
}

fn fixed(map: &Map<String, Value>, size: usize) -> Type {
    match text(map, "logicalType").unwrap_or_default() {
        "decimal" => decimal(map, Some(size)).unwrap_or(Type::Fixed(size)),
        "uuid" if size == 16 => Type::Uuid,
        "duration" if size == 12 => Type::Duration,
        _ => Type::Fixed(size),
    }
}

/// A decimal, if its precision and scale make sense.
fn decimal(map: &Map<String, Value>, size: Option<usize>) -> Option<Type> {
    let precision = map
        .get("precision")
        .and_then(Value::as_u64)
        .filter(|precision| (1..=MAX_PRECISION).contains(precision))?;
    if size.is_some_and(|size| precision > digits_of(size)) {
        return None;
    }
    let scale = map
        .get("scale")
        .map_or(Some(0), Value::as_u64)
        .filter(|scale| *scale <= precision)?;
    Some(Type::Decimal {
        scale: usize::try_from(scale).ok()?,
        size,
    })
}

/// The digits of which a fixed of this size can hold every number.
fn digits_of(size: usize) -> u64 {
    /// The logarithm of 2 to the base 10, in parts of 10^12: exact for all sizes that have no more
    /// than the most digits.
    const LOG_2: u128 = 301_029_995_663;
    let bits = (size as u128 * 8)
        .saturating_sub(1)
        .min(u128::from(u32::MAX));
    u64::try_from(bits * LOG_2 / 1_000_000_000_000).unwrap_or(u64::MAX)
}

fn aliases(map: &Map<String, Value>) -> Vec<String> {
    let aliases = map
        .get("aliases")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    aliases
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

fn text<'a>(map: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    map.get(name).and_then(Value::as_str)
}

fn list<'a>(map: &'a Map<String, Value>, name: &str) -> Result<&'a Vec<Value>, String> {
    map.get(name)
        .and_then(Value::as_array)
        .ok_or_else(|| format!("a type has no `{name}`"))
}

/// The namespace inside a named type: its own, that of its dotted name, or the one around it.
fn namespace_of(map: &Map<String, Value>, around: &str) -> Result<String, String> {
    let name = text(map, "name").ok_or("a named type has no name")?;
    if let Some((namespace, _)) = name.rsplit_once('.') {
        return Ok(namespace.to_owned());
    }
    Ok(text(map, "namespace").unwrap_or(around).to_owned())
}

fn full_name(name: &str, namespace: &str) -> String {
    if name.contains('.') || namespace.is_empty() {
        name.to_owned()
    } else {
        format!("{namespace}.{name}")
    }
}
