//! Parses, writes and checks a specification. The parent module defines the meaning of each part.

use std::fmt;
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::{Error as _, SerializeMap};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::custom::CustomKey;
use super::error::KeySpecError;
use super::limits::{DEFAULT_MAX_PAYLOAD_BYTES, MAX_PATHS, MAX_PAYLOAD_BYTES_LIMIT, checked_name};
use super::normalise::check_normalisers;
use super::normaliser::Normaliser;
use super::parts::{KeyCase, Part, canonical_cases, canonical_parts};
use super::path::{self, Path, split_unescaped};
use super::{Domain, Field, Key, Source, TenantSource};

impl Key {
    /// Checks the specification like [`compile`](Key::compile).
    ///
    /// # Errors
    /// The first error in the specification.
    pub fn check(&self) -> Result<(), KeySpecError> {
        self.canonical().map(drop)
    }

    /// Returns the specification in its canonical form: with sorted paths in canonical spelling.
    /// Fails if it is not valid.
    pub(super) fn canonical(&self) -> Result<Self, KeySpecError> {
        if !(1..=MAX_PAYLOAD_BYTES_LIMIT).contains(&self.max_payload_bytes) {
            return Err(KeySpecError::LimitOutOfRange {
                bytes: self.max_payload_bytes,
                limit: MAX_PAYLOAD_BYTES_LIMIT,
            });
        }
        if !self.except.is_empty() && self.source != Source::Payload {
            return Err(KeySpecError::ExceptWithoutPayload);
        }
        let tenant = match &self.tenant {
            Some(TenantSource::Json(field)) => Some(TenantSource::Json(field.canonical()?)),
            Some(TenantSource::Header(name)) => {
                Some(TenantSource::Header(checked_name("header", name)?))
            }
            None => None,
        };
        let source = match &self.source {
            Source::Json(fields) => Source::Json(canonical_fields(fields, tenant.as_ref())?),
            Source::Header(name) => Source::Header(checked_name("header", name)?),
            Source::Custom(custom) => {
                checked_name("custom key", &custom.name)?;
                Source::Custom(custom.clone())
            }
            Source::Parts(parts) => Source::Parts(canonical_parts(parts)?),
            Source::Cases(cases) => Source::Cases(canonical_cases(cases)?),
            other => other.clone(),
        };
        let except = canonical_paths(&self.except)?;
        self.routes
            .names()
            .try_for_each(|name| checked_name("route", name).map(drop))?;
        Ok(Self {
            source,
            except,
            tenant,
            format: self.format.clone(),
            routes: self.routes.clone(),
            ..*self
        })
    }
}

/// Sorts paths in canonical spelling. Refuses a repeated path.
pub(super) fn canonical_paths(paths: &[String]) -> Result<Vec<String>, KeySpecError> {
    let paths = path::parse_all(paths.iter().map(String::as_str))?;
    Ok(paths.into_iter().map(|path| path.text).collect())
}

fn canonical_fields(
    fields: &[Field],
    tenant: Option<&TenantSource>,
) -> Result<Vec<Field>, KeySpecError> {
    if fields.is_empty() {
        return Err(KeySpecError::NoFields);
    }
    if fields.len() > MAX_PATHS {
        return Err(KeySpecError::TooManyPaths {
            count: fields.len(),
            limit: MAX_PATHS,
        });
    }
    let mut fields = fields
        .iter()
        .map(Field::canonical)
        .collect::<Result<Vec<_>, _>>()?;
    fields.sort_by(|a, b| a.path.cmp(&b.path));
    let tenant = match tenant {
        Some(TenantSource::Json(field)) => Some(field),
        _ => None,
    };
    let twice = fields
        .iter()
        .zip(fields.iter().skip(1))
        .find(|(a, b)| a.path == b.path)
        .map(|(a, _)| a);
    if let Some(twice) = twice.or_else(|| {
        fields
            .iter()
            .find(|field| tenant.is_some_and(|tenant| tenant.path == field.path))
    }) {
        return Err(KeySpecError::RepeatedPath {
            path: twice.path.clone(),
        });
    }
    Ok(fields)
}

impl Field {
    fn canonical(&self) -> Result<Self, KeySpecError> {
        let path = Path::parse(&self.path)?.text;
        check_normalisers(&path, &self.normalisers)?;
        Ok(Self {
            path,
            normalisers: self.normalisers.clone(),
            takes_default: self.takes_default,
        })
    }
}

/// The form of a key in a file. `custom` is only written, for descriptors, and never read.
#[derive(Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct KeyMap {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    json: Option<Vec<Field>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    payload: Option<Exceptions>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    header: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_key: Option<Nothing>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_id: Option<Nothing>,
    #[serde(skip_deserializing, skip_serializing_if = "Option::is_none")]
    custom: Option<CustomName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parts: Option<Vec<Part>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cases: Option<Vec<KeyCase>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant: Option<TenantSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain: Option<Domain>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_payload_bytes: Option<usize>,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Exceptions {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    except: Vec<String>,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct Nothing {}

#[derive(Serialize)]
struct CustomName {
    name: String,
    version: u32,
}

impl KeyMap {
    fn of(key: &Key) -> Self {
        let domain = Some(key.domain).filter(|domain| *domain != Domain::default());
        let mut map = Self {
            tenant: key.tenant.clone(),
            domain,
            ..Self::default()
        };
        match &key.source {
            Source::Json(fields) => map.json = Some(fields.clone()),
            Source::Payload => {
                map.payload = Some(Exceptions {
                    except: key.except.clone(),
                });
            }
            Source::Header(name) => map.header = Some(name.clone()),
            Source::MessageKey => map.message_key = Some(Nothing {}),
            Source::MessageId => map.message_id = Some(Nothing {}),
            Source::Parts(parts) => map.parts = Some(parts.clone()),
            Source::Cases(cases) => map.cases = Some(cases.clone()),
            Source::Custom(CustomKey { name, version, .. }) => {
                map.custom = Some(CustomName {
                    name: name.clone(),
                    version: *version,
                });
            }
        }
        map
    }

    fn into_key(self) -> Result<Key, KeySpecError> {
        let mut except = Vec::new();
        let sources = [
            self.json.map(Source::Json),
            self.payload.map(|payload| {
                except = payload.except;
                Source::Payload
            }),
            self.header.map(Source::Header),
            self.message_key.map(|Nothing {}| Source::MessageKey),
            self.message_id.map(|Nothing {}| Source::MessageId),
            self.parts.map(Source::Parts),
            self.cases.map(Source::Cases),
        ];
        let mut named: Vec<Source> = sources.into_iter().flatten().collect();
        let count = named.len();
        let (1, Some(source)) = (count, named.pop()) else {
            return Err(KeySpecError::NotOneSource { count });
        };
        let max_payload_bytes = self.max_payload_bytes.unwrap_or(DEFAULT_MAX_PAYLOAD_BYTES);
        let domain = self.domain.unwrap_or_default();
        let key = Key {
            except,
            tenant: self.tenant,
            domain,
            max_payload_bytes,
            ..Key::of(source)
        };
        key.check()?;
        Ok(key)
    }
}

/// The specification as a descriptor holds it: canonical, with the function of a custom key by its
/// name, and without the size limit and the use of defaults, which change no key.
pub(super) fn describe(key: &Key) -> Result<impl Serialize + use<>, KeySpecError> {
    let mut key = key.canonical()?;
    match &mut key.source {
        Source::Json(fields) => {
            for field in fields {
                field.takes_default = false;
            }
        }
        Source::Parts(parts) => parts.iter_mut().for_each(Part::forget_defaults),
        Source::Cases(cases) => cases.iter_mut().for_each(KeyCase::forget_defaults),
        _ => {}
    }
    if let Some(TenantSource::Json(field)) = &mut key.tenant {
        field.takes_default = false;
    }
    Ok(KeyMap::of(&key))
}

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Source::Custom(custom) = &self.source {
            return Err(S::Error::custom(format!(
                "the custom key `{}` is a function and cannot be serialised",
                custom.name
            )));
        }
        let limit =
            Some(self.max_payload_bytes).filter(|bytes| *bytes != DEFAULT_MAX_PAYLOAD_BYTES);
        KeyMap {
            max_payload_bytes: limit,
            ..KeyMap::of(self)
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KeyVisitor)
    }
}

struct KeyVisitor;

impl<'de> Visitor<'de> for KeyVisitor {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key: { json = [...] }, { payload = { except = [...] } }, { header = \"...\" }, { parts = [...] }, { cases = [...] }, \"payload\", \"message_key\" or \"message_id\"")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Key, E> {
        word(text).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Key, A::Error> {
        KeyMap::deserialize(MapAccessDeserializer::new(map))?
            .into_key()
            .map_err(A::Error::custom)
    }
}

/// Parses a specification of a single word. It accepts both spellings, because files use `_` and
/// the command line `-`.
fn word(text: &str) -> Option<Key> {
    match text {
        "payload" => Some(Key::payload()),
        "message_key" | "message-key" => Some(Key::message_key()),
        "message_id" | "message-id" => Some(Key::message_id()),
        _ => None,
    }
}

impl Serialize for Field {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.normalisers.is_empty() && !self.takes_default {
            return serializer.serialize_str(&self.path);
        }
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("path", &self.path)?;
        if !self.normalisers.is_empty() {
            map.serialize_entry("as", &self.normalisers)?;
        }
        if self.takes_default {
            map.serialize_entry("default", &true)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldVisitor)
    }
}

struct FieldVisitor;

impl<'de> Visitor<'de> for FieldVisitor {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a path as \"customer.id\", or { path = \"amount\", as = \"decimal\" }")
    }

    fn visit_str<E>(self, path: &str) -> Result<Field, E> {
        Ok(Field::path(path))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Field, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct FieldMap {
            path: String,
            #[serde(default, rename = "as")]
            normalisers: OneOrMany,
            #[serde(default, rename = "default")]
            takes_default: bool,
        }
        let FieldMap {
            path,
            normalisers,
            takes_default,
        } = FieldMap::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Field {
            path,
            normalisers: normalisers.0,
            takes_default,
        })
    }
}

/// `"decimal"` or `["trim", "lowercase"]`.
#[derive(Default)]
pub(super) struct OneOrMany(pub(super) Vec<Normaliser>);

impl OneOrMany {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for OneOrMany {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OneOrManyVisitor)
    }
}

struct OneOrManyVisitor;

impl<'de> Visitor<'de> for OneOrManyVisitor {
    type Value = OneOrMany;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a normaliser as \"decimal\", or a list as [\"trim\", \"lowercase\"]")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<OneOrMany, E> {
        name.parse()
            .map(|normaliser| OneOrMany(vec![normaliser]))
            .map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<OneOrMany, A::Error> {
        let mut normalisers = Vec::new();
        while let Some(normaliser) = names.next_element()? {
            normalisers.push(normaliser);
        }
        Ok(OneOrMany(normalisers))
    }
}

impl FromStr for Key {
    type Err = KeySpecError;

    /// Parses the command-line form; see [`Key`].
    fn from_str(text: &str) -> Result<Self, KeySpecError> {
        let text = text.trim();
        if text.starts_with(['{', '"']) {
            return serde_json::from_str(text).map_err(|error| KeySpecError::Unreadable {
                reason: error.to_string(),
            });
        }
        let key = if let Some(key) = word(text) {
            key
        } else if let Some(name) = text.strip_prefix("header:") {
            Self::header(name.trim())
        } else if let Some(paths) = text.strip_prefix("payload-except:") {
            Self::payload().except(split_unescaped(paths, ',').map(str::trim))
        } else {
            let fields = text.strip_prefix("json:").unwrap_or(text);
            let fields = split_unescaped(fields, ',')
                .map(field_from_text)
                .collect::<Result<Vec<_>, _>>()?;
            Self::json(fields)
        };
        key.check()?;
        Ok(key)
    }
}

/// Parses a field such as `email:trim:lowercase`.
fn field_from_text(text: &str) -> Result<Field, KeySpecError> {
    let mut parts = split_unescaped(text, ':').map(str::trim);
    let path = parts.next().unwrap_or_default();
    parts.try_fold(Field::path(path), |field, name| {
        Ok(field.then(name.parse()?))
    })
}

impl fmt::Display for Key {
    /// Writes the JSON form, which [`FromStr`] can parse. A custom key is written as its name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit =
            Some(self.max_payload_bytes).filter(|bytes| *bytes != DEFAULT_MAX_PAYLOAD_BYTES);
        let map = KeyMap {
            max_payload_bytes: limit,
            ..KeyMap::of(self)
        };
        f.write_str(&serde_json::to_string(&map).map_err(|_| fmt::Error)?)
    }
}
