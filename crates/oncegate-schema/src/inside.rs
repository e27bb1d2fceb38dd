//! The place of encoded bytes inside a document of JSON: `record.data`.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use oncegate_core::key::{KeyError, Wanted};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::SchemaError;

/// The most names in a path.
const MAX_PARTS: usize = 16;

/// A path to a string in a document: names between dots, with `\` before a dot or backslash that
/// belongs to a name.
#[derive(Debug)]
pub(crate) struct Place {
    text: String,
    parts: Vec<String>,
}

/// The string that a document has at a place.
#[derive(Debug)]
pub(crate) struct StringAt<'d> {
    /// The bytes of the string's literal in the document.
    pub(crate) literal: Range<usize>,
    pub(crate) text: Cow<'d, str>,
}

impl Place {
    /// Parses a path.
    ///
    /// # Errors
    /// When it has a blank name, another escape, or more than 16 names.
    pub(crate) fn parse(text: &str) -> Result<Self, SchemaError> {
        let mut parts = vec![String::new()];
        let mut letters = text.chars();
        while let Some(letter) = letters.next() {
            let letter = match letter {
                '.' => {
                    parts.push(String::new());
                    continue;
                }
                '\\' => letters
                    .next()
                    .filter(|next| matches!(next, '.' | '\\'))
                    .ok_or_else(|| {
                        refused(text, "may have a `\\` before a dot or another `\\` only")
                    })?,
                other => other,
            };
            parts
                .last_mut()
                .into_iter()
                .for_each(|part| part.push(letter));
        }
        if parts.iter().any(|part| part.trim().is_empty()) {
            return Err(refused(text, "has a blank name"));
        }
        if parts.len() > MAX_PARTS {
            return Err(refused(text, "has more than 16 names"));
        }
        Ok(Self {
            text: text.to_owned(),
            parts,
        })
    }

    /// Returns what a key wants of the place; `None` for nothing.
    pub(crate) fn wanted<'w>(&self, whole: &Wanted<'w>) -> Option<Wanted<'w>> {
        let mut wanted = whole.clone();
        for part in &self.parts {
            wanted = wanted.member(part.as_bytes())?;
        }
        Some(wanted)
    }

    /// Finds the string in a document. `None` when the document has nothing there, or null.
    ///
    /// # Errors
    /// When the document is no JSON, has a member of the path twice, or another value there.
    pub(crate) fn find<'d>(&self, document: &'d [u8]) -> Result<Option<StringAt<'d>>, KeyError> {
        let whole: &RawValue =
            serde_json::from_slice(document).map_err(|_| self.failed("json", NO_JSON))?;
        let mut value = whole.get();
        for part in &self.parts {
            let mut reader = serde_json::Deserializer::from_str(value);
            let found = Member(part).deserialize(&mut reader);
            let found = found.map_err(|error| {
                let is_twice = error.to_string().starts_with(TWICE);
                self.failed("json", if is_twice { TWICE } else { NO_JSON })
            })?;
            match found {
                Some(inner) => value = inner.get(),
                None => return Ok(None),
            }
        }
        if value == "null" {
            return Ok(None);
        }
        let text = serde_json::from_str::<Text<'d>>(value)
            .map_err(|_| self.failed("base64", "the value is no string"))?;
        // Both are parts of one slice, so the difference of their addresses is the position.
        let start = value.as_ptr().addr() - document.as_ptr().addr();
        Ok(Some(StringAt {
            literal: start..start + value.len(),
            text: text.0,
        }))
    }

    /// Checks that decoded bytes are one value of JSON.
    ///
    /// # Errors
    /// When they are not.
    pub(crate) fn check_value(&self, bytes: &[u8]) -> Result<(), KeyError> {
        let read = serde_json::from_slice::<IgnoredAny>(bytes);
        read.map(|_| ())
            .map_err(|_| self.failed("base64", "it is not one value of JSON"))
    }

    fn failed(&self, decoder: &'static str, what: &'static str) -> KeyError {
        KeyError::DecodeFailed {
            path: self.text.clone(),
            decoder,
            what,
        }
    }
}

fn refused(path: &str, why: &str) -> SchemaError {
    SchemaError {
        what: format!("`at`: the path `{path}` {why}"),
    }
}

const NO_JSON: &str = "the payload is no JSON";
const TWICE: &str = "a member of the path occurs twice";

/// A string, borrowed unless it has escapes.
#[derive(serde::Deserialize)]
struct Text<'d>(#[serde(borrow)] Cow<'d, str>);

/// The value of the member with this name; `None` for a value that has none.
struct Member<'n>(&'n str);

impl<'d> DeserializeSeed<'d> for Member<'_> {
    type Value = Option<&'d RawValue>;

    fn deserialize<D: Deserializer<'d>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'d> Visitor<'d> for Member<'_> {
    type Value = Option<&'d RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'d>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(Text(name)) = map.next_key()? {
            if name != self.0 {
                map.next_value::<IgnoredAny>()?;
            } else if found.is_some() {
                return Err(A::Error::custom(TWICE));
            } else {
                found = Some(map.next_value()?);
            }
        }
        Ok(found)
    }

    fn visit_seq<A: serde::de::SeqAccess<'d>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}
