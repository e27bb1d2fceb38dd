//! The JSON schemas of the values.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use super::{
    FingerprintSetting, KeySetting, Names, ProgramSetting, Property, RouteSetting, Secret,
};

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
    Names: "names", { "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] };
    ProgramSetting: "command", {
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
        ("default", serde_json::json!({ "type": "boolean" })),
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
                    "properties": {
                        "path": { "type": "string" },
                        "as": { "anyOf": [{ "type": "string" }, names] },
                        "default": { "type": "boolean" }
                    },
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
                "default": { "type": "boolean" },
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
