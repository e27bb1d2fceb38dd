//! The values of settings: times and sizes with units, secrets, keys, lists.

mod requests;
mod schema;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

pub(crate) use oncegate::core::settings::{Size, Time};
use oncegate::{FingerprintSpec, Key};
use oncegate_worker::{Program, TokenSource};
pub(crate) use requests::{PrincipalSetting, RuleKeySetting};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use toml::Value;

use super::read;
use crate::parse;

/// The largest secret that a file may hold, in bytes.
const SECRET_MAX_BYTES: u64 = 64 * 1024;

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
        if text.trim().starts_with('{') {
            serde_json::from_str(text)
                .map(Self::Of)
                .map_err(|error| error.to_string())
        } else {
            Ok(Self::All(text.to_owned()))
        }
    }
}

/// A program: a command line for a shell, or a list of arguments that needs no shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProgramSetting(pub(crate) Program);

impl ProgramSetting {
    /// A command line for a shell, as flags have it.
    pub(crate) fn shell(text: String) -> Self {
        Self(Program::Shell(text))
    }
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
                .ok()
                .filter(|value| !value.is_empty())
                .ok_or_else(|| format!("the environment variable {name} is not set, or empty")),
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

impl TokenSource for Secret {
    fn read(&self) -> Result<String, String> {
        self.resolve()
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
fn read_by<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    by: impl FnOnce(Value) -> Result<T, String>,
) -> Result<T, D::Error> {
    by(Value::deserialize(deserializer)?).map_err(D::Error::custom)
}

fn strings(values: Vec<Value>) -> Result<Vec<String>, String> {
    values
        .into_iter()
        .map(|value| {
            value
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| unlike(&value, "text"))
        })
        .collect()
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_by(deserializer, |value| match value {
            Value::String(text) => Ok(Self(
                text.split(',').map(|name| name.trim().to_owned()).collect(),
            )),
            Value::Array(values) => strings(values).map(Self),
            other => Err(unlike(&other, "a name, or a list of names,")),
        })
    }
}

impl<'de> Deserialize<'de> for ProgramSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_by(deserializer, |value| match value {
            Value::String(text) if !text.trim().is_empty() => Ok(Self(Program::Shell(text))),
            Value::Array(values) if !values.is_empty() => {
                strings(values).map(|words| Self(Program::Words(words)))
            }
            Value::String(_) | Value::Array(_) => Err("it names no program".to_owned()),
            other => Err(unlike(&other, "a command, or a list of its words,")),
        })
    }
}

impl<'de> Deserialize<'de> for KeySetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_by(deserializer, |value| match value {
            Value::String(text) => text.parse().map(Self).map_err(|error| format!("{error}")),
            other => read::value(&other).map(Self),
        })
    }
}

impl<'de> Deserialize<'de> for FingerprintSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_by(deserializer, |value| match value {
            Value::String(text) => parse::fingerprint(&text).map(Self),
            other => read::value(&other).map(Self),
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
        read_by(deserializer, secret)
    }
}

impl<'de> Deserialize<'de> for RouteSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const FORMS: &str = "it must be a route, as \"orders\", or a table of routes by topic or queue, as { \"eu.orders\" = \"orders\" }";
        read_by(deserializer, |value| match value {
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
        read_by(deserializer, |value| match value {
            Value::Integer(number) => Ok(Self(Secret::Literal(number.to_string()))),
            Value::Boolean(flag) => Ok(Self(Secret::Literal(flag.to_string()))),
            other => secret(other).map(Self),
        })
    }
}

#[cfg(test)]
mod tests;
