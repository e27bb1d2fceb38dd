//! The form of parts and cases in files.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::super::spec::{Nothing, OneOrMany};
use super::{Blank, KeyCase, Literal, Part, Place, PlaceSource, When};

/// Every setting that a table of a place, a part or a condition may have. Each kind of table
/// refuses the settings of the others.
#[derive(Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    header: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_key: Option<Nothing>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_id: Option<Nothing>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    first_of: Option<Vec<Place>>,
    #[serde(default, rename = "as", skip_serializing_if = "OneOrMany::is_empty")]
    normalisers: OneOrMany,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    is: Option<Literal>,
    #[serde(
        default,
        rename = "default",
        skip_serializing_if = "std::ops::Not::not"
    )]
    takes_default: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    optional: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blank: Option<Blank>,
}

impl Table {
    fn of(place: &Place) -> Self {
        let mut table = Self {
            normalisers: OneOrMany(place.normalisers.clone()),
            takes_default: place.takes_default,
            ..Self::default()
        };
        match &place.source {
            PlaceSource::Payload(path) => table.path = Some(path.clone()),
            PlaceSource::Header(name) => table.header = Some(name.clone()),
            PlaceSource::MessageKey => table.message_key = Some(Nothing {}),
            PlaceSource::MessageId => table.message_id = Some(Nothing {}),
        }
        table
    }

    fn into_place(self) -> Result<Place, String> {
        let sources = [
            self.path.map(PlaceSource::Payload),
            self.header.map(PlaceSource::Header),
            self.message_key.map(|Nothing {}| PlaceSource::MessageKey),
            self.message_id.map(|Nothing {}| PlaceSource::MessageId),
        ];
        let mut named: Vec<PlaceSource> = sources.into_iter().flatten().collect();
        let count = named.len();
        let (1, Some(source)) = (count, named.pop()) else {
            return Err(format!(
                "a part must name exactly one of path, header, message_key, message_id and first_of; this one names {count}"
            ));
        };
        if self.first_of.is_some() || self.is.is_some() || self.optional || self.blank.is_some() {
            return Err("`first_of`, `is`, `optional` and `blank` do not belong here".to_owned());
        }
        if self.takes_default && !matches!(source, PlaceSource::Payload(_)) {
            return Err("`default` is for a path: headers and ids have none".to_owned());
        }
        Ok(Place {
            source,
            normalisers: self.normalisers.0,
            takes_default: self.takes_default,
        })
    }

    fn into_part(mut self) -> Result<Part, String> {
        let optional = std::mem::take(&mut self.optional);
        let blank = self.blank.take().unwrap_or_default();
        let part = match self.first_of.take() {
            None => Part::from(self.into_place()?),
            Some(places) => {
                let has_place =
                    self.path.is_some() || self.header.is_some() || self.message_key.is_some();
                if has_place
                    || self.message_id.is_some()
                    || !self.normalisers.is_empty()
                    || self.is.is_some()
                    || self.takes_default
                {
                    return Err(
                        "a part with `first_of` has no place, `as` or `default` of its own"
                            .to_owned(),
                    );
                }
                Part::first_of(places)
            }
        };
        Ok(Part {
            optional,
            blank,
            ..part
        })
    }

    fn into_when(mut self) -> Result<When, String> {
        let is = self.is.take();
        Ok(When {
            place: self.into_place()?,
            is,
        })
    }
}

impl Serialize for Place {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self {
                source: PlaceSource::Payload(path),
                normalisers,
                takes_default: false,
            } if normalisers.is_empty() => serializer.serialize_str(path),
            other => Table::of(other).serialize(serializer),
        }
    }
}

impl Serialize for Part {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let blank = Some(self.blank).filter(|blank| *blank != Blank::default());
        let table = match self.places.as_slice() {
            [place] if !self.is_first_of && !self.optional && blank.is_none() => {
                return place.serialize(serializer);
            }
            [place] if !self.is_first_of => Table::of(place),
            places => Table {
                first_of: Some(places.to_vec()),
                ..Table::default()
            },
        };
        Table {
            optional: self.optional,
            blank,
            ..table
        }
        .serialize(serializer)
    }
}

impl Serialize for When {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Table {
            is: self.is.clone(),
            ..Table::of(&self.place)
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Place {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(TableVisitor)?
            .into_place()
            .map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(TableVisitor)?
            .into_part()
            .map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for When {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(TableVisitor)?
            .into_when()
            .map_err(D::Error::custom)
    }
}

/// Reads a table, or a string as its path.
struct TableVisitor;

impl<'de> Visitor<'de> for TableVisitor {
    type Value = Table;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a path as \"customer.id\", { path = \"...\" }, { header = \"...\" } or { first_of = [...] }",
        )
    }

    fn visit_str<E>(self, path: &str) -> Result<Table, E> {
        Ok(Table {
            path: Some(path.to_owned()),
            ..Table::default()
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Table, A::Error> {
        Table::deserialize(MapAccessDeserializer::new(map))
    }
}

/// The form of a case.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseTable {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    when: Option<When>,
    parts: Vec<Part>,
}

impl Serialize for KeyCase {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        CaseTable {
            when: self.when.clone(),
            parts: self.parts.clone(),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for KeyCase {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let CaseTable { when, parts } = CaseTable::deserialize(deserializer)?;
        Ok(Self { when, parts })
    }
}
