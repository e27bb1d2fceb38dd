//! Converts a request to a message for the gate.

use std::borrow::Cow;
use std::sync::Arc;

use ::http::header::{CONTENT_TYPE, HOST};
use ::http::request::Parts;
use ::http::uri::Authority;
use ::http::{HeaderMap, Method, Uri};
use bytes::Bytes;
use oncegate_core::key::{FingerprintSpec, Key, TenantSource};
use serde::Serialize;
use serde_json::value::RawValue;

use super::rules::{RequestPart, Rule, sent_uri};
use oncegate_runtime::gate::Gate;
use oncegate_runtime::message::{Header, Message, Origin};

/// The route of all requests: a key that is reused on another path is a mistake of the client, not
/// another key.
const ROUTE: &str = "http";
const KEY: &str = "idempotency-key";
const PRINCIPAL: &str = "principal";

/// The largest request as a message: more than [`super::IdempotencyLayer::max_request_bytes`]
/// allows.
const MAX_DOCUMENT_BYTES: usize = 2 * super::MAX_REQUEST_BYTES_LIMIT;

/// A gate for requests: the key is the caller and the header `Idempotency-Key`, the fingerprint is
/// the rest of the request.
///
/// The fingerprint is computed from a JSON document `{"method", "host", "path", "query", "body"}`.
/// The host has no port. The path is the one that the client sent, also in a nested router of axum.
/// The body is the request's own JSON, independent of its formatting, or a hash of its bytes if it
/// is not JSON. Leave out fields that a client may change when it repeats a request with
/// `.fingerprint(FingerprintSpec::payload().except(["body.sent_at"]))`.
pub fn request_gate(
    scope: impl Into<String>,
    store: impl oncegate_core::store::Store + 'static,
) -> Gate {
    Gate::new(scope, key(), store).fingerprint(FingerprintSpec::payload())
}

/// A gate for requests that their key alone identifies, such as the events of a provider: like
/// [`request_gate`], and the rest of the request is not compared.
pub fn event_gate(
    scope: impl Into<String>,
    store: impl oncegate_core::store::Store + 'static,
) -> Gate {
    Gate::new(scope, key(), store)
}

/// The key specification of every request, as plain data, which `oncegate` commands understand.
pub(super) fn key() -> Key {
    Key::header(KEY)
        .tenant(TenantSource::header(PRINCIPAL))
        .for_http_requests()
        .max_payload_bytes(MAX_DOCUMENT_BYTES)
}

/// The principal and the key of a request.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) principal: String,
    pub(super) key: String,
    /// The rule of the request; `None` in a layer without rules.
    pub(super) rule: Option<Arc<Rule>>,
}

impl Caller {
    /// Returns whether a repetition may change this part.
    fn ignores(&self, part: RequestPart) -> bool {
        self.rule
            .as_ref()
            .is_some_and(|rule| rule.ignored.contains(&part))
    }
}

/// The form of the body in the fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As JSON, if its content type is JSON.
    Json,
    /// As bytes.
    Bytes,
}

/// The document that the fingerprint is computed from.
#[derive(Serialize)]
struct Document<'a> {
    method: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    query: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body_hash: Option<String>,
}

/// The request as a message.
pub(super) fn message(request: &Parts, caller: &Caller, body: &Bytes, form: Form) -> Message {
    let json = if form == Form::Json && is_json(&request.headers) {
        serde_json::from_slice::<&RawValue>(body).ok()
    } else {
        None
    };
    let uri = sent_uri(request);
    let has_body = !caller.ignores(RequestPart::Body);
    let json = json.filter(|_| has_body);
    let document = Document {
        method: request.method.as_str(),
        host: host(uri, &request.headers).filter(|_| !caller.ignores(RequestPart::Host)),
        path: uri.path(),
        query: uri
            .query()
            .filter(|_| !caller.ignores(RequestPart::Query))
            .map(|query| match caller.rule {
                // Without rules, the query counts as it was sent: records were made so.
                None => Cow::Borrowed(query),
                Some(_) => Cow::Owned(by_name(query)),
            }),
        body: json,
        body_hash: (has_body && json.is_none())
            .then(|| match caller.rule {
                Some(_) if is_form(&request.headers) => {
                    let mut fields: Vec<&[u8]> = body.split(|byte| *byte == b'&').collect();
                    fields.sort_by_key(|field| {
                        field.split(|byte| *byte == b'=').next().unwrap_or_default()
                    });
                    blake3::hash(&fields.join(&b'&'))
                }
                _ => blake3::hash(body),
            })
            .map(|hash| hash.to_hex().to_string()),
    };
    // Strings and parsed JSON can always be serialized.
    let document = serde_json::to_vec(&document).unwrap_or_default();
    Message::new(
        ROUTE,
        Origin::Other("an HTTP request".into()),
        Some(document.into()),
    )
    .with_headers(vec![
        header(KEY, &caller.key),
        header(PRINCIPAL, &caller.principal),
    ])
}

fn header(name: &str, value: &str) -> Header {
    Header {
        name: name.into(),
        value: Some(Bytes::copy_from_slice(value.as_bytes())),
    }
}

/// The host that the client named, in lower case and without a port: in the URI (HTTP/2), or in its
/// header.
fn host(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let named = headers
        .get(HOST)
        .and_then(|value| Authority::try_from(value.as_bytes()).ok());
    let host = uri.host().or_else(|| named.as_ref().map(Authority::host))?;
    Some(host.to_ascii_lowercase())
}

/// Returns the fields of a query or form by their names. Those of one name keep their order.
fn by_name(fields: &str) -> String {
    let mut fields: Vec<&str> = fields.split('&').collect();
    fields.sort_by_key(|field| field.split('=').next().unwrap_or_default());
    fields.join("&")
}

/// Returns whether the content type is `application/json` or ends with `+json`.
fn is_json(headers: &HeaderMap) -> bool {
    let essence = essence(headers);
    essence == "application/json" || essence.ends_with("+json")
}

/// Returns whether the body is a form in the form of a query.
fn is_form(headers: &HeaderMap) -> bool {
    essence(headers) == "application/x-www-form-urlencoded"
}

/// The content type without its parameters, in lower case.
fn essence(headers: &HeaderMap) -> String {
    let value = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let essence = value.and_then(|value| value.split(';').next());
    essence.unwrap_or_default().trim().to_ascii_lowercase()
}

/// The meaning of a method for the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Duty {
    /// The method changes nothing: the request passes, with or without a key.
    Safe,
    /// The method may change something, but repeating it does no harm by itself: a key is used, but
    /// not required.
    Honour,
    /// Repeating the method may do harm: a key is required.
    Enforce,
}

impl Duty {
    pub(super) fn of(method: &Method) -> Self {
        match *method {
            Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE => Self::Safe,
            Method::POST | Method::PATCH => Self::Enforce,
            _ => Self::Honour,
        }
    }
}

#[cfg(test)]
mod tests {
    use ::http::Request;
    use oncegate_core::key::{CompiledFingerprint, Fingerprint};

    use super::*;

    fn fingerprint(method: &str, uri: &str, content_type: &str, body: &'static str) -> Fingerprint {
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header("content-type", content_type);
        fingerprint_of(&request.body(()).unwrap().into_parts().0, body)
    }

    fn fingerprint_of(parts: &Parts, body: &'static str) -> Fingerprint {
        fingerprint_by(parts, body, None)
    }

    fn fingerprint_by(parts: &Parts, body: &'static str, rule: Option<Rule>) -> Fingerprint {
        let caller = Caller {
            principal: "p".to_owned(),
            key: "k".to_owned(),
            rule: rule.map(Arc::new),
        };
        let spec: CompiledFingerprint = FingerprintSpec::payload()
            .except(["body.sent_at"])
            .compile(&key())
            .unwrap();
        let of = |form| {
            spec.derive(&message(
                parts,
                &caller,
                &Bytes::from_static(body.as_bytes()),
                form,
            ))
        };
        of(Form::Json).or_else(|_| of(Form::Bytes)).unwrap()
    }

    #[test]
    fn the_spelling_of_json_does_not_count_and_its_content_does() {
        let of = |body| fingerprint("POST", "/c", "application/json; charset=utf-8", body);
        assert_eq!(
            of(r#"{"a":10,"b":"x","sent_at":1}"#),
            of(r#"{ "b":"x", "sent_at":2, "a":1e1 }"#)
        );
        assert_ne!(of(r#"{"a":10}"#), of(r#"{"a":11}"#));
        assert_ne!(
            of(r#"{"a":9007199254740993}"#),
            of(r#"{"a":9007199254740992}"#)
        );
        assert_eq!(of("{}"), of(" {} "));
        assert_ne!(
            fingerprint("POST", "/c", "text/plain", r#"{"a":1}"#),
            fingerprint("POST", "/c", "text/plain", r#"{ "a":1}"#)
        );
    }

    #[test]
    fn what_only_claims_to_be_json_counts_by_its_bytes() {
        let of = |body| fingerprint("POST", "/c", "application/json", body);
        for body in [
            "",
            "{",
            r#"{"a":1,"a":2}"#,
            r#"1,"path":"/d""#,
            "[1]]",
            "\u{feff}{}",
        ] {
            assert_eq!(of(body), of(body), "{body:?}");
            assert_ne!(of(body), of(r#"{"a":1}"#), "{body:?}");
        }
        assert_ne!(of(r#"{"a":1,"a":2}"#), of(r#"{"a":2,"a":1}"#));
    }

    #[test]
    fn the_host_counts_without_its_port_and_wherever_it_stands() {
        let of = |uri: &str, host: &str| {
            let request = Request::post(uri).header("host", host).body(()).unwrap();
            fingerprint_of(&request.into_parts().0, "{}")
        };
        let one = of("/c", "api.example.com");
        for same in ["API.example.com", "api.example.com:8443"] {
            assert_eq!(of("/c", same), one, "{same}");
        }
        assert_eq!(of("https://api.example.com/c", ""), one);
        assert_ne!(of("/c", "[::1]:80"), one);
        assert_eq!(of("/c", "[::1]:80"), of("/c", "[::1]"));
    }

    #[test]
    fn method_path_and_query_count() {
        let of = |method, uri| fingerprint(method, uri, "application/json", r#"{"a":1}"#);
        let all = [
            of("POST", "/c"),
            of("PATCH", "/c"),
            of("POST", "/d"),
            of("POST", "/c?x=1"),
            of("POST", "/c?x=2"),
            of("POST", "/c?"),
        ];
        for (n, one) in all.iter().enumerate() {
            assert!(all.iter().skip(n + 1).all(|other| other != one), "{n}");
        }
    }

    #[test]
    fn under_a_rule_order_and_ignored_parts_do_not_count() {
        let form = "application/x-www-form-urlencoded";
        let of = |uri: &str, body: &'static str, rule: Option<Rule>| {
            let request = Request::post(uri).header("content-type", form);
            fingerprint_by(&request.body(()).unwrap().into_parts().0, body, rule)
        };
        let rule = || Rule::new("POST", "/c").unwrap();
        let one = of("/c?a=1&b=2&b=3", "x=1&y=2", Some(rule()));
        assert_eq!(of("/c?b=2&b=3&a=1", "y=2&x=1", Some(rule())), one);
        assert_ne!(of("/c?b=3&b=2&a=1", "y=2&x=1", Some(rule())), one);
        assert_ne!(of("/c?a=1&b=2&b=3", "x=1&y=3", Some(rule())), one);
        // Without rules, records were made with what was sent.
        assert_ne!(of("/c?a=1&b=2", "x=1", None), of("/c?b=2&a=1", "x=1", None));
        assert_ne!(of("/c", "x=1&y=2", None), of("/c", "y=2&x=1", None));
        let loose = || Some(rule().ignore(RequestPart::Query).ignore(RequestPart::Body));
        assert_eq!(of("/c?a=1", "x=1", loose()), of("/c", "x=2", loose()));
        let any_host = || Some(rule().ignore(RequestPart::Host));
        assert_eq!(
            of("http://one/c", "x=1", any_host()),
            of("http://two/c", "x=1", any_host())
        );
        assert_ne!(
            of("http://one/c", "x=1", Some(rule())),
            of("http://two/c", "x=1", Some(rule()))
        );
    }
}
