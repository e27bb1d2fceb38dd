//! The OpenAPI document. Its bodies come from the types that read and write them, and its paths
//! from the table that requests are found by, so it cannot say anything else than the code does.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

use super::forms::{
    ClaimAnswer, ClaimRequest, CompleteRequest, ExtendAnswer, ExtendRequest, FailRequest,
    LookRequest, ProblemDocument, ReleaseRequest,
};
use super::paths::{Operation, PATHS};

/// Returns the document.
pub(super) fn document() -> Vec<u8> {
    let mut schemas = SchemaSettings::openapi3().into_generator();
    let paths: Map<String, Value> = PATHS
        .iter()
        .map(|(path, operation)| ((*path).to_owned(), described(*operation, &mut schemas)))
        .collect();
    let document = json!({
        "openapi": "3.0.3",
        "info": {
            "title": "oncegate: claims for functions",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A claim decides which process does the work of a key. docs/FUNCTIONS.md is the manual.",
        },
        "paths": paths,
        "security": [{ "token": [] }],
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "schemas": schemas.take_definitions(true),
        },
    });
    // Strings and numbers can always be serialized.
    serde_json::to_vec_pretty(&document).unwrap_or_default()
}

fn described(operation: Operation, schemas: &mut SchemaGenerator) -> Value {
    let problem = schemas.subschema_for::<ProblemDocument>();
    let (request, summary) = match operation {
        Operation::Claim => (
            schemas.subschema_for::<ClaimRequest<'_>>(),
            "Claims a key: 201 grants it, 200 has the result of work that is done.",
        ),
        Operation::Extend => (
            schemas.subschema_for::<ExtendRequest>(),
            "Extends claims: the heartbeat, at a third of the lease.",
        ),
        Operation::Complete => (
            schemas.subschema_for::<CompleteRequest<'_>>(),
            "Records that the work is done. Repeat it until it is answered.",
        ),
        Operation::Release => (
            schemas.subschema_for::<ReleaseRequest>(),
            "Ends an attempt that has failed: another one may follow.",
        ),
        Operation::Fail => (
            schemas.subschema_for::<FailRequest>(),
            "Gives the work up: no attempt follows.",
        ),
        Operation::Look => (
            schemas.subschema_for::<LookRequest<'_>>(),
            "Reads the state of a key, and claims nothing.",
        ),
    };
    let answer = if operation == Operation::Extend {
        schemas.subschema_for::<ExtendAnswer>()
    } else {
        schemas.subschema_for::<ClaimAnswer>()
    };
    let mut responses = json!({
        "200": { "description": "Done.", "content": { "application/json": { "schema": answer } } },
        "default": {
            "description": "Not done; `state` names the problem.",
            "content": { "application/problem+json": { "schema": problem } },
        },
    });
    if operation == Operation::Claim
        && let Some(responses) = responses.as_object_mut()
        && let Some(ok) = responses.get("200").cloned()
    {
        responses.insert("201".to_owned(), ok);
    }
    json!({ "post": {
        "operationId": format!("{operation:?}").to_lowercase(),
        "summary": summary,
        "requestBody": {
            "required": true,
            "content": { "application/json": { "schema": request } },
        },
        "responses": responses,
    } })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn the_document_has_every_path_and_every_body_that_it_refers_to() {
        let text = String::from_utf8(document()).unwrap();
        let document: Value = serde_json::from_str(&text).unwrap();
        let paths = document["paths"].as_object().unwrap();
        assert_eq!(paths.len(), PATHS.len());
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for reference in text.split("\"#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
        }
        let claim = &schemas["ClaimRequest"]["properties"];
        for field in [
            "scope",
            "function",
            "key",
            "arguments",
            "nonce",
            "lease_ms",
            "wait_ms",
        ] {
            assert!(claim[field]["description"].is_string(), "{field}");
        }
    }
}
