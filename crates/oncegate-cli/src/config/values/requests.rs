//! Values that say of HTTP requests who has sent them, and where their keys are.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use toml::Value;

use super::{KeySetting, read_by, strings};
use crate::config::read;

/// The place of a rule's key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RuleKeySetting {
    Header(String),
    Parameters(Vec<String>),
    /// Fields of a JSON body, in the form of a consumer's key.
    Json(KeySetting),
}

/// The place of a request's caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PrincipalSetting {
    SingleTenant,
    Header(String),
}

impl JsonSchema for RuleKeySetting {
    fn schema_name() -> Cow<'static, str> {
        "RuleKey".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let names =
            serde_json::json!({ "type": "array", "items": { "type": "string" }, "minItems": 1 });
        let of_consumers = KeySetting::json_schema(generator);
        let fields = of_consumers
            .get("anyOf")
            .and_then(|forms| forms.pointer("/1/properties/json"))
            .cloned()
            .unwrap_or_default();
        json_schema!({
            "title": "key",
            "type": "object",
            "properties": { "header": { "type": "string" }, "parameters": names, "json": fields },
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": false
        })
    }
}

impl JsonSchema for PrincipalSetting {
    fn schema_name() -> Cow<'static, str> {
        "Principal".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "title": "principal",
            "anyOf": [
                { "const": "single-tenant" },
                {
                    "type": "object",
                    "properties": { "header": { "type": "string" } },
                    "required": ["header"],
                    "additionalProperties": false
                }
            ]
        })
    }
}

impl<'de> Deserialize<'de> for RuleKeySetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const FORMS: &str = "a key is { header = \"X-Request-Id\" }, { json = [\"order_id\"] } or { parameters = [\"id\"] }";
        read_by(deserializer, |value| {
            let mut entries = match &value {
                Value::Table(table) => table.iter(),
                _ => return Err(FORMS.to_owned()),
            };
            match (entries.next(), entries.next()) {
                (Some((name, Value::String(header))), None) if name == "header" => {
                    Ok(Self::Header(header.clone()))
                }
                (Some((name, Value::Array(names))), None) if name == "parameters" => {
                    strings(names.clone()).map(Self::Parameters)
                }
                (Some((name, _)), None) if name == "json" => {
                    read::value(&value).map(|key| Self::Json(KeySetting(key)))
                }
                _ => Err(FORMS.to_owned()),
            }
        })
    }
}

impl<'de> Deserialize<'de> for PrincipalSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const FORMS: &str = "it is { header = \"x-user-id\" }, or \"single-tenant\" if all requests come from one caller";
        read_by(deserializer, |value| match value {
            Value::String(text) if text == "single-tenant" => Ok(Self::SingleTenant),
            Value::Table(table) if table.len() == 1 => match table.get("header") {
                Some(Value::String(name)) => Ok(Self::Header(name.clone())),
                _ => Err(FORMS.to_owned()),
            },
            _ => Err(FORMS.to_owned()),
        })
    }
}
