//! The values of settings: times and sizes with units, secrets, keys, lists.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use oncegate::{FingerprintSpec, Key};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use toml::Value;

use crate::parse;

/// The largest secret that a file may hold, in bytes.
const SECRET_MAX_BYTES: u64 = 64 * 1024;

/// A duration with its unit: `"30s"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Time(pub(crate) Duration);

/// A number of bytes with its unit: `"64KiB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) usize);

/// A list of names; a single string is split at commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names(pub(crate) Vec<String>);

/// A key in the form of a file or of the command line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeySetting(pub(crate) Key);

/// A fingerprint in the form of a file or of the command line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FingerprintSetting(pub(crate) FingerprintSpec);

/// The routes of keys: one of all messages, or one for each name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RouteSetting {
    All(String),
    Of(BTreeMap<String, String>),
}

impl RouteSetting {
    /// The key with these routes.
    pub(crate) fn apply(&self, key: Key) -> Key {
        match self {
            Self::All(name) => key.route(name),
            Self::Of(names) => names
                .iter()
                .fold(key, |key, (route, name)| key.route_of(route, name)),
        }
    }

    /// The route that messages of this topic or queue have in keys.
    pub(crate) fn name<'a>(&'a self, route: &'a str) -> &'a str {
        match self {
            Self::All(name) => name,
            Self::Of(names) => names.get(route).map_or(route, String::as_str),
        }
    }
}

/// `orders`, or `{"eu.orders": "orders"}`.
impl FromStr for RouteSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().starts_with('{') {
            true => serde_json::from_str(text)
                .map(Self::Of)
                .map_err(|error| error.to_string()),
            false => Ok(Self::All(text.to_owned())),
        }
    }
}

/// A program: a command line for a shell, or a list of arguments that needs no shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Shell(String),
    Words(Vec<String>),
}

/// A secret, which never appears in a log: in a file, in the environment, or, with a warning, in
/// the configuration.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Secret {
    Literal(String),
    File(PathBuf),
    Env(String),
}

/// The value of a librdkafka property; some of them are secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Property(pub(crate) Secret);

impl Secret {
    /// The secret itself, without the line feed that editors leave at the end of a file.
    ///
    /// # Errors
    /// When the file or variable cannot be read; the text says why.
    pub(crate) fn resolve(&self) -> Result<String, String> {
        match self {
            Self::Literal(text) => Ok(text.clone()),
            Self::Env(name) => std::env::var(name)
                .map_err(|_| format!("the environment variable {name} is not set")),
            Self::File(path) => {
                let size = std::fs::metadata(path).map(|file| file.len());
                let text = match size {
                    Ok(bytes) if bytes > SECRET_MAX_BYTES => {
                        return Err(format!(
                            "{} has {bytes} bytes, more than a secret may have",
                            path.display()
                        ));
                    }
                    Ok(_) => std::fs::read_to_string(path),
                    Err(error) => Err(error),
                };
                let text =
                    text.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
                Ok(text
                    .strip_suffix('\n')
                    .map_or(text.as_str(), |text| text.trim_end_matches('\r'))
                    .to_owned())
            }
        }
    }
}

impl Secret {
    /// The time of the last change of the file that holds it; `None` for a secret that is
    /// elsewhere.
    pub(crate) fn changed_at(&self) -> Option<SystemTime> {
        let Self::File(path) = self else { return None };
        std::fs::metadata(path)
            .and_then(|file| file.modified())
            .ok()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Literal(_) => f.write_str("***"),
            Self::File(path) => write!(f, "{{ file = {path:?} }}"),
            Self::Env(name) => write!(f, "{{ env = {name:?} }}"),
        }
    }
}

impl Property {
    /// Returns whether a property of this name is secret.
    pub(crate) fn is_secret(name: &str) -> bool {
        [
            "password",
            "secret",
            "sasl.username",
            ".pem",
            "oauthbearer.config",
        ]
        .iter()
        .any(|part| name.contains(part))
    }
}

/// Describes the value that was found instead of the expected one.
fn unlike(found: &Value, expected: &str) -> String {
    format!(
        "{} where {expected} is expected",
        match found {
            Value::String(_) => "text",
            Value::Integer(_) | Value::Float(_) => "a bare number",
            Value::Boolean(_) => "true or false",
            Value::Datetime(_) => "a date",
            Value::Array(_) => "a list",
            Value::Table(_) => "a table",
        }
    )
}

/// Reads a value that may have one of several forms.
fn read<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    by: impl FnOnce(Value) -> Result<T, String>,
) -> Result<T, D::Error> {
    by(Value::deserialize(deserializer)?).map_err(D::Error::custom)
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, |value| match value {
            Value::String(text) => parse::duration(&text).map(Self),
            other => Err(unlike(
                &other,
                "a time with its unit, as \"30s\" (ms, s, m, h, d),",
            )),
        })
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, |value| match value {
            Value::String(text) => size(&text).map(Self),
            other => Err(unlike(&other, "a size with its unit, as \"64KiB\",")),
        })
    }
}

/// A whole number of bytes with its unit.
fn size(text: &str) -> Result<usize, String> {
    let refuse =
        || "it must be a number with a unit, as in 64KiB (B, KiB, MiB, GiB, kB, MB, GB)".to_owned();
    if text.trim().ends_with(|c: char| c.is_ascii_digit()) {
        return Err(refuse());
    }
    let size: bytesize::ByteSize = text.parse().map_err(|_| refuse())?;
    match usize::try_from(size.as_u64()) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err("it must be above zero".to_owned()),
    }
}

fn strings(values: Vec<Value>) -> Result<Vec<String>, String> {
    let text = |value: Value| {
        value
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| unlike(&value, "text"))
    };
    values.into_iter().map(text).collect()
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, |value| match value {
            Value::String(text) => Ok(Self(
                text.split(',').map(|name| name.trim().to_owned()).collect(),
            )),
            Value::Array(values) => strings(values).map(Self),
            other => Err(unlike(&other, "a name, or a list of names,")),
        })
    }
}

impl<'de> Deserialize<'de> for Program {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, |value| match value {
            Value::String(text) if !text.trim().is_empty() => Ok(Self::Shell(text)),
            Value::Array(values) if !values.is_empty() => strings(values).map(Self::Words),
            Value::String(_) | Value::Array(_) => Err("it names no program".to_owned()),
            other => Err(unlike(&other, "a command, or a list of its words,")),
        })
    }
}

impl<'de> Deserialize<'de> for KeySetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, |value| match value {
            Value::String(text) => text.parse().map(Self).map_err(|error| format!("{error}")),
            other => Key::deserialize(other)
                .map(Self)
                .map_err(|error| error.message().to_owned()),
        })
    }
}

impl<'de> Deserialize<'de> for FingerprintSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, |value| match value {
            Value::String(text) => parse::fingerprint(&text).map(Self),
            other => FingerprintSpec::deserialize(other)
                .map(Self)
                .map_err(|error| error.message().to_owned()),
        })
    }
}

fn secret(value: Value) -> Result<Secret, String> {
    const FORMS: &str = "a secret is { file = \"/run/secrets/name\" } or { env = \"NAME\" }";
    let Value::Table(table) = value else {
        return match value {
            Value::String(text) => Ok(Secret::Literal(text)),
            _ => Err(FORMS.to_owned()),
        };
    };
    let mut entries = table.into_iter();
    match (entries.next(), entries.next()) {
        (Some((name, Value::String(path))), None) if name == "file" => {
            Ok(Secret::File(path.into()))
        }
        (Some((name, Value::String(variable))), None) if name == "env" => Ok(Secret::Env(variable)),
        _ => Err(FORMS.to_owned()),
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, secret)
    }
}

impl<'de> Deserialize<'de> for RouteSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const FORMS: &str = "it must be a route, as \"orders\", or a table of routes by topic or queue, as { \"eu.orders\" = \"orders\" }";
        read(deserializer, |value| match value {
            Value::String(name) => name.parse(),
            Value::Table(table) => {
                let names = table.into_iter().map(|(route, name)| match name {
                    Value::String(name) => Ok((route, name)),
                    _ => Err(FORMS.to_owned()),
                });
                Ok(Self::Of(names.collect::<Result<_, String>>()?))
            }
            _ => Err(FORMS.to_owned()),
        })
    }
}

impl<'de> Deserialize<'de> for Property {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, |value| match value {
            Value::Integer(number) => Ok(Self(Secret::Literal(number.to_string()))),
            Value::Boolean(flag) => Ok(Self(Secret::Literal(flag.to_string()))),
            other => secret(other).map(Self),
        })
    }
}

/// Gives a type its place in the JSON schema; the title is what the documentation calls it.
macro_rules! described {
    ($($type:ident: $title:literal, { $($schema:tt)* };)+) => {$(
        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                let mut schema = json_schema!({ $($schema)* });
                schema.insert("title".to_owned(), $title.into());
                schema
            }
        }
    )+};
}

described! {
    Time: "time", { "type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$" };
    Size: "size", { "type": "string", "pattern": "^[0-9.]+ *([kKMGT]i?)?[bB]$" };
    Names: "names", { "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] };
    Program: "command", {
        "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" }, "minItems": 1 }]
    };
    RouteSetting: "route", {
        "anyOf": [{ "type": "string" }, { "type": "object", "additionalProperties": { "type": "string" } }]
    };
    Secret: "secret", {
        "anyOf": [
            { "type": "string" },
            { "type": "object", "properties": { "file": { "type": "string" } }, "required": ["file"], "additionalProperties": false },
            { "type": "object", "properties": { "env": { "type": "string" } }, "required": ["env"], "additionalProperties": false }
        ]
    };
    Property: "text or secret", {
        "anyOf": [
            { "type": ["string", "integer", "boolean"] },
            { "type": "object", "properties": { "file": { "type": "string" } }, "required": ["file"], "additionalProperties": false },
            { "type": "object", "properties": { "env": { "type": "string" } }, "required": ["env"], "additionalProperties": false }
        ]
    };
    FingerprintSetting: "fingerprint", {
        "anyOf": [
            { "type": "string" },
            {
                "type": "object",
                "properties": { "except": { "type": "array", "items": { "type": "string" } } },
                "required": ["except"],
                "additionalProperties": false
            }
        ]
    };
}

/// The schema of the parts of a key.
fn key_parts() -> serde_json::Value {
    let normalisers = serde_json::json!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] });
    let places = [
        ("path", serde_json::json!({ "type": "string" })),
        ("header", serde_json::json!({ "type": "string" })),
        (
            "message_key",
            serde_json::json!({ "type": "object", "additionalProperties": false }),
        ),
        (
            "message_id",
            serde_json::json!({ "type": "object", "additionalProperties": false }),
        ),
        ("as", normalisers),
    ];
    let mut part: serde_json::Map<String, serde_json::Value> = places
        .into_iter()
        .map(|(name, schema)| (name.to_owned(), schema))
        .collect();
    let one_place =
        serde_json::json!({ "type": "object", "properties": part, "additionalProperties": false });
    let first_of = serde_json::json!({
        "type": "array",
        "items": { "anyOf": [{ "type": "string" }, one_place] },
        "minItems": 1
    });
    part.insert("first_of".to_owned(), first_of);
    part.insert(
        "optional".to_owned(),
        serde_json::json!({ "type": "boolean" }),
    );
    part.insert(
        "blank".to_owned(),
        serde_json::json!({ "enum": ["error", "absent", "value"] }),
    );
    let part =
        serde_json::json!({ "type": "object", "properties": part, "additionalProperties": false });
    serde_json::json!({ "type": "array", "items": { "anyOf": [{ "type": "string" }, part] }, "minItems": 1 })
}

impl JsonSchema for KeySetting {
    fn schema_name() -> Cow<'static, str> {
        "Key".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let names = serde_json::json!({ "type": "array", "items": { "type": "string" } });
        let field = serde_json::json!({
            "anyOf": [
                { "type": "string" },
                {
                    "type": "object",
                    "properties": { "path": { "type": "string" }, "as": { "anyOf": [{ "type": "string" }, names] } },
                    "required": ["path"],
                    "additionalProperties": false
                }
            ]
        });
        let parts = key_parts();
        let when = serde_json::json!({
            "type": "object",
            "properties": {
                "path": { "type": "string" },
                "header": { "type": "string" },
                "message_key": { "type": "object", "additionalProperties": false },
                "message_id": { "type": "object", "additionalProperties": false },
                "as": { "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] },
                "is": { "type": ["string", "integer", "boolean"] }
            },
            "additionalProperties": false
        });
        json_schema!({
            "title": "key",
            "anyOf": [
                { "type": "string" },
                {
                    "type": "object",
                    "properties": {
                        "json": { "type": "array", "items": field, "minItems": 1 },
                        "payload": { "type": "object", "properties": { "except": names }, "additionalProperties": false },
                        "header": { "type": "string" },
                        "message_key": { "type": "object", "additionalProperties": false },
                        "message_id": { "type": "object", "additionalProperties": false },
                        "parts": parts,
                        "cases": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "properties": { "when": when, "parts": parts },
                                "required": ["parts"],
                                "additionalProperties": false
                            },
                            "minItems": 1
                        },
                        "tenant": {
                            "type": "object",
                            "properties": { "json": field, "header": { "type": "string" } },
                            "minProperties": 1,
                            "maxProperties": 1,
                            "additionalProperties": false
                        },
                        "max_payload_bytes": { "type": "integer", "minimum": 1 }
                    },
                    "additionalProperties": false
                }
            ]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed<T: serde::de::DeserializeOwned>(value: &str) -> Result<T, String> {
        #[derive(Deserialize)]
        struct Holder<T> {
            x: T,
        }
        let holder: Result<Holder<T>, _> = toml::from_str(&format!("x = {value}"));
        holder
            .map(|holder| holder.x)
            .map_err(|error| error.message().to_owned())
    }

    #[test]
    fn numbers_need_units() {
        assert_eq!(parsed::<Time>("\"30s\""), Ok(Time(Duration::from_secs(30))));
        assert_eq!(parsed::<Size>("\"64KiB\""), Ok(Size(65_536)));
        assert_eq!(parsed::<Size>("\"1 MB\""), Ok(Size(1_000_000)));
        for bad in ["30", "\"30\"", "\"0KiB\"", "\"KiB\"", "true"] {
            assert!(parsed::<Time>(bad).is_err(), "{bad}");
            assert!(parsed::<Size>(bad).is_err(), "{bad}");
        }
        assert!(parsed::<Time>("30").unwrap_err().contains("as \"30s\""));
    }

    #[test]
    fn a_key_has_the_forms_of_files_and_of_the_command_line() {
        let key: Key = "order_id,amount:decimal".parse().unwrap();
        assert_eq!(
            parsed(r#"{ json = ["order_id", { path = "amount", as = "decimal" }] }"#),
            Ok(KeySetting(key.clone()))
        );
        assert_eq!(parsed(r#""order_id,amount:decimal""#), Ok(KeySetting(key)));
        assert!(
            parsed::<KeySetting>(r#"{ json = ["a", "a"] }"#)
                .unwrap_err()
                .contains("given twice")
        );
    }

    #[test]
    fn secrets_are_elsewhere_and_nobody_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        std::fs::write(&path, "hunter2\n").unwrap();
        let secret: Secret = parsed(&format!("{{ file = {path:?} }}")).unwrap();
        assert_eq!(secret.resolve(), Ok("hunter2".to_owned()));
        assert_eq!(
            format!("{:?}", Secret::Literal("hunter2".to_owned())),
            "***"
        );
        let unset = Secret::Env("ONCEGATE_NO_SUCH_VARIABLE".to_owned()).resolve();
        assert!(unset.unwrap_err().contains("ONCEGATE_NO_SUCH_VARIABLE"));
        assert!(
            parsed::<Secret>("{ path = \"x\" }")
                .unwrap_err()
                .contains("{ env =")
        );
    }
}
