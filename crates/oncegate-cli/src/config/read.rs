//! Reads a table of settings into a structure. What cannot be read has its path.
//!
//! A field whose name begins with [`SHARED`] stands for the table itself: it is a structure whose
//! settings stand among the others of the table. (`#[serde(flatten)]` would lose the path of what
//! is wrong in it, and the names that are known.)

use std::fmt;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{
    DeserializeSeed, Deserializer, Error, Expected, IntoDeserializer as _, MapAccess, SeqAccess,
    Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;
use toml::{Table, Value};

use super::Path;

/// The first character of the name of a field that stands for the table itself.
pub(super) const SHARED: char = '*';

/// A setting that cannot be read.
#[derive(Debug)]
pub(super) struct Unreadable {
    pub(super) path: Path,
    pub(super) why: Why,
}

/// The reason that a setting cannot be read.
#[derive(Debug)]
pub(super) enum Why {
    /// There is no such setting: its name, and those that there are.
    Name(String, Vec<&'static str>),
    /// A wrong value; the text says what is wrong.
    Value(String),
}

/// Reads the table.
///
/// # Errors
/// The first setting that cannot be read.
pub(super) fn read<'de, T: Deserialize<'de>>(table: &'de Table) -> Result<T, Unreadable> {
    T::deserialize(Entries::of(table))
}

/// Reads a value of a table.
///
/// # Errors
/// The text says what is wrong.
pub(super) fn value<'de, T: Deserialize<'de>>(value: &'de Value) -> Result<T, String> {
    T::deserialize(Node(value)).map_err(|error| error.to_string())
}

impl Unreadable {
    /// The same error in an entry of a table.
    fn under(mut self, name: &str) -> Self {
        self.path.insert(0, name.to_owned());
        self
    }

    /// The same error in an item of a list, which is wrong as a whole.
    fn in_list(mut self) -> Self {
        self.path.clear();
        self
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(unknown, known) => f.write_str(&unlike(unknown, known, "setting")),
            Self::Value(what) => f.write_str(what),
        }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl std::error::Error for Unreadable {}

impl Error for Unreadable {
    fn custom<T: fmt::Display>(what: T) -> Self {
        Self {
            path: Path::new(),
            why: Why::Value(what.to_string()),
        }
    }

    /// Without the value: a URL with a password may stand in the wrong place.
    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match found {
            Unexpected::Str(_) => "text",
            Unexpected::Signed(_) | Unexpected::Unsigned(_) | Unexpected::Float(_) => {
                "a bare number"
            }
            Unexpected::Bool(_) => "true or false",
            Unexpected::Seq => "a list",
            Unexpected::Map => "a table",
            _ => "another value",
        };
        let expected = match expected.to_string().as_str() {
            "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => "a whole number".to_owned(),
            "f64" => "a number".to_owned(),
            "a boolean" => "true or false".to_owned(),
            "a string" => "text".to_owned(),
            expected => expected.to_owned(),
        };
        Self::custom(format!("{found} where {expected} is expected"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::custom(unlike(variant, expected, "choice"))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self {
            path: Path::new(),
            why: Why::Name(field.to_owned(), expected.to_vec()),
        }
    }
}

/// Says that there is no such name, with the nearest one that there is.
fn unlike(unknown: &str, known: &[&str], kind: &str) -> String {
    let nearest = known
        .iter()
        .map(|name| (strsim::damerau_levenshtein(unknown, name), name))
        .min_by_key(|(distance, _)| *distance);
    match nearest.filter(|(distance, name)| *distance <= 1 + name.len() / 3) {
        Some((_, near)) => format!("`{unknown}` is no {kind}; did you mean `{near}`?"),
        None => format!("`{unknown}` is no {kind}; known are {}", known.join(", ")),
    }
}

/// A table, as it is read.
struct Entries<'de> {
    table: &'de Table,
    /// The settings that are not read yet, the next one last.
    left: Vec<(&'de str, &'de Value)>,
    /// The shared structures that are not read yet.
    shared: Vec<&'static str>,
    /// The settings of the shared structures that were read.
    taken: Vec<&'static str>,
    /// The value to read next.
    next: Option<Item<'de>>,
}

/// The value of an entry.
enum Item<'de> {
    Value(&'de str, &'de Value),
    Shared,
}

impl<'de> Entries<'de> {
    fn of(table: &'de Table) -> Self {
        let entries = table.iter().map(|(name, value)| (name.as_str(), value));
        Self {
            table,
            left: entries.rev().collect(),
            shared: Vec::new(),
            taken: Vec::new(),
            next: None,
        }
    }

    /// The same error, with all names that are known here if a name is unknown.
    fn explained(&self, mut error: Unreadable) -> Unreadable {
        if let Why::Name(_, known) = &mut error.why
            && error.path.is_empty()
        {
            known.retain(|name| !name.starts_with(SHARED));
            known.extend(&self.taken);
        }
        error
    }
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = Unreadable;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Unreadable> {
        // What shared structures take is left out of the others.
        if let Some(name) = self.shared.pop() {
            self.next = Some(Item::Shared);
            let key: StrDeserializer<'_, Unreadable> = name.into_deserializer();
            return seed.deserialize(key).map(Some);
        }
        let Some((name, value)) = self.left.pop() else {
            return Ok(None);
        };
        self.next = Some(Item::Value(name, value));
        let key: StrDeserializer<'_, Unreadable> = name.into_deserializer();
        let read = if name.starts_with(SHARED) {
            Err(Unreadable::unknown_field(name, &[]))
        } else {
            seed.deserialize(key)
        };
        read.map(Some)
            .map_err(|error| self.explained(error).under(name))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, Unreadable> {
        match self.next.take() {
            Some(Item::Value(name, value)) => seed
                .deserialize(Node(value))
                .map_err(|error| error.under(name)),
            Some(Item::Shared) => seed.deserialize(Shared(self)),
            None => Err(Unreadable::custom("a value is read before its name")),
        }
    }
}

impl<'de> Deserializer<'de> for Entries<'de> {
    type Error = Unreadable;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unreadable> {
        visitor.visit_map(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unreadable> {
        let shared = fields.iter().filter(|name| name.starts_with(SHARED));
        self.shared.extend(shared);
        visitor.visit_map(self)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unreadable> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unreadable> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// A structure that shares a table: it takes the entries that it has names for.
struct Shared<'a, 'de>(&'a mut Entries<'de>);

impl<'de> Deserializer<'de> for Shared<'_, 'de> {
    type Error = Unreadable;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Unreadable> {
        Err(Unreadable::custom("only a structure can share a table"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unreadable> {
        let Self(entries) = self;
        entries.left.retain(|(name, _)| !fields.contains(name));
        for name in fields {
            // Another structure may have a setting of the same name.
            if !entries.taken.contains(name) {
                entries.taken.push(name);
            }
        }
        let mut own = Entries::of(entries.table);
        own.left.retain(|(name, _)| fields.contains(name));
        own.deserialize_struct(name, fields, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// A value of a table or a list.
#[derive(Clone, Copy)]
struct Node<'de>(&'de Value);

impl Node<'_> {
    fn unexpected(self) -> Unexpected<'static> {
        match self.0 {
            Value::String(_) => Unexpected::Str(""),
            Value::Integer(number) => Unexpected::Signed(*number),
            Value::Float(number) => Unexpected::Float(*number),
            Value::Boolean(is_set) => Unexpected::Bool(*is_set),
            Value::Datetime(_) => Unexpected::Other("a date"),
            Value::Array(_) => Unexpected::Seq,
            Value::Table(_) => Unexpected::Map,
        }
    }
}

impl<'de> Deserializer<'de> for Node<'de> {
    type Error = Unreadable;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unreadable> {
        match self.0 {
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Integer(number) => visitor.visit_i64(*number),
            Value::Float(number) => visitor.visit_f64(*number),
            Value::Boolean(is_set) => visitor.visit_bool(*is_set),
            Value::Datetime(_) => self
                .0
                .clone()
                .deserialize_any(visitor)
                .map_err(|error| Unreadable::custom(error.message())),
            Value::Array(values) => visitor.visit_seq(Items(values.iter())),
            Value::Table(table) => Entries::of(table).deserialize_any(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unreadable> {
        match self.0 {
            Value::Table(table) => Entries::of(table).deserialize_struct(name, fields, visitor),
            _ => Err(Unreadable::invalid_type(self.unexpected(), &"a table")),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        choices: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unreadable> {
        match self.0 {
            Value::String(choice) => visitor.visit_enum(choice.as_str().into_deserializer()),
            Value::Table(table) => {
                visitor.visit_enum(MapAccessDeserializer::new(Entries::of(table)))
            }
            _ => {
                let expected = format!("one of {}", choices.join(", "));
                Err(Unreadable::invalid_type(
                    self.unexpected(),
                    &expected.as_str(),
                ))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unreadable> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unreadable> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

/// The values of a list.
struct Items<'de>(std::slice::Iter<'de, Value>);

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = Unreadable;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Unreadable> {
        let item = self.0.next().map(|value| seed.deserialize(Node(value)));
        item.transpose().map_err(Unreadable::in_list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Outer {
        name: Option<String>,
        inner: Option<Inner>,
        #[serde(rename = "*inner")]
        shared: Inner,
    }

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Inner {
        size: u32,
        turns: Option<Turns>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Turns {
        Left,
        Right,
    }

    fn outer(text: &str) -> Result<Outer, (String, String)> {
        let table: Table = toml::from_str(text).unwrap();
        read(&table).map_err(|error| (error.path.join("."), error.to_string()))
    }

    #[test]
    fn a_shared_structure_takes_its_settings_out_of_the_table() {
        let expected = Outer {
            name: Some("one".to_owned()),
            inner: None,
            shared: Inner {
                size: 3,
                turns: Some(Turns::Left),
            },
        };
        assert_eq!(
            outer("name = \"one\"\nsize = 3\nturns = \"left\""),
            Ok(expected)
        );
    }

    #[test]
    fn what_is_wrong_has_its_path() {
        for (text, path, what) in [
            ("size = \"3\"", "size", "text where a whole number is"),
            ("inner.size = true", "inner.size", "true or false where"),
            ("inner = 3", "inner", "a bare number where a table is"),
            ("turns = \"lft\"", "turns", "did you mean `left`?"),
            ("turns = 3", "turns", "one of left, right is expected"),
            ("sise = 3", "sise", "did you mean `size`?"),
            ("nam = 3", "nam", "did you mean `name`?"),
            ("xxxxx = 3", "xxxxx", "known are name, inner, size, turns"),
            ("inner.name = 3", "inner.name", "known are size, turns"),
            ("\"*inner\" = {}", "*inner", "no setting"),
        ] {
            let (found, why) = outer(text).unwrap_err();
            assert_eq!(found, path, "{text}");
            assert!(why.contains(what), "{text}: {why}");
        }
    }
}
