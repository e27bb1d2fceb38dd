//! Topics that the serialisers of confluent-kafka-python have written, with their schemas in a real
//! registry.

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::get;
use base64::Engine as _;
use oncegate::core::key::{CompiledKey, Field, Key, KeyInput, KeySource as _, Scope};
use oncegate::schema::{Registry, SchemaFormat};
use oncegate_testkit::{Certificates, HttpServer, Kafka, SchemaRegistry};
use rdkafka::Message as _;

use super::produce;

fn key() -> Key {
    key_below("")
}

/// The key of an order that is at this place of a document.
fn key_below(place: &str) -> Key {
    use oncegate::core::key::TimeUnit::Millis;
    Key::json([
        Field::path(format!("{place}order_id")),
        Field::path(format!("{place}amount")).decimal(),
        Field::path(format!("{place}at")).timestamp(Millis),
    ])
}

fn compiled(key: &Key) -> CompiledKey {
    key.compile(&Scope::new("billing").unwrap()).unwrap()
}

/// Checks that a payload inside a string of JSON has the key of its twin inside that JSON.
async fn has_the_key_of_json_inside(registry: &SchemaRegistry, payload: &[u8], twin: &str) {
    let format = SchemaFormat::registry(Registry::new(&registry.url())).unwrap();
    let format = Arc::new(format.at("event.data").unwrap());
    let key = compiled(&key_below("event.data.").format(format));
    let text = base64::engine::general_purpose::STANDARD.encode(payload);
    let document = format!(r#"{{"event": {{"id": 7, "data": "{text}"}}}}"#);
    let input = KeyInput::payload(&document);
    let unprepared = key.derive("orders", &input).unwrap_err();
    assert_eq!(unprepared.kind(), "not_prepared");
    key.prepare(&input).await.unwrap();
    let twin = format!(r#"{{"event": {{"id": 7, "data": {twin}}}}}"#);
    let expected = compiled(&key_below("event.data.")).derive("orders", &KeyInput::payload(&twin));
    assert_eq!(key.derive("orders", &input), expected, "{twin}");
}

/// Checks that each message of the topic has the key of the JSON that was printed for it.
async fn has_the_keys_of_json(kind: &str, kinds: &[&str]) {
    let kafka = Kafka::shared().await;
    let registry = SchemaRegistry::start().await;
    let topic = kafka.new_topic(kind, 1).await;
    let mut twins = Vec::new();
    for (part, kind) in (0_u32..).zip(kinds) {
        twins.extend(produce(&kafka, &registry.url(), &topic, kind, part * 5, 5).await);
    }
    let format = Arc::new(SchemaFormat::registry(Registry::new(&registry.url())).unwrap());
    format.check().await.unwrap();
    let framed = compiled(&key().format(format));
    let json = compiled(&key());
    let messages = kafka.read_all(&topic).await;
    assert_eq!(messages.len(), twins.len());
    for (message, twin) in messages.iter().zip(&twins) {
        let input = KeyInput::payload(message.payload().unwrap());
        assert!(
            input
                .payload()
                .is_some_and(|payload| payload.starts_with(&[0])),
            "it is not framed"
        );
        framed.prepare(&input).await.unwrap();
        let expected = json.derive(&topic, &KeyInput::payload(twin));
        assert_eq!(framed.derive(&topic, &input), expected, "{twin}");
        has_the_key_of_json_inside(&registry, message.payload().unwrap(), twin).await;
        // Newer serialisers put the same bytes into a header: of Protobuf, with the indexes of the
        // second message.
        let length = if kinds == ["protobuf"] { 7 } else { 5 };
        let (name, rest) = message.payload().unwrap().split_at(length);
        let headers = [("__value_schema_id", name)];
        let input = KeyInput::payload(rest).with_headers(&headers);
        framed.prepare(&input).await.unwrap();
        assert_eq!(
            framed.derive(&topic, &input),
            expected,
            "in a header: {twin}"
        );
    }
}

#[tokio::test]
async fn avro_of_another_implementation_has_the_keys_of_json() {
    has_the_keys_of_json("avro", &["avro", "avro-evolved"]).await;
}

#[tokio::test]
async fn a_reader_schema_counts_for_schemas_of_a_registry() {
    let kafka = Kafka::shared().await;
    let registry = SchemaRegistry::start().await;
    let topic = kafka.new_topic("reader", 1).await;
    produce(&kafka, &registry.url(), &topic, "avro", 0, 5).await;
    produce(&kafka, &registry.url(), &topic, "avro-evolved", 0, 5).await;
    let reader = r#"{"type": "record", "name": "Order", "namespace": "shop", "fields": [
        {"name": "orderId", "type": "string", "aliases": ["order_id"]},
        {"name": "currency", "type": "string", "default": "EUR"}]}"#;
    let format = SchemaFormat::registry(Registry::new(&registry.url()))
        .unwrap()
        .reader(reader)
        .unwrap();
    let fields = [Field::from("orderId"), Field::from("currency").or_default()];
    let key = compiled(&Key::json(fields).format(Arc::new(format)));
    let mut keys = Vec::new();
    for message in kafka.read_all(&topic).await {
        let input = KeyInput::payload(message.payload().unwrap());
        key.prepare(&input).await.unwrap();
        keys.push(key.derive(&topic, &input).unwrap());
    }
    assert_eq!(keys.len(), 10);
    assert_eq!(keys[..5], keys[5..]);
}

#[tokio::test]
async fn protobuf_of_another_implementation_has_the_keys_of_json() {
    has_the_keys_of_json("protobuf", &["protobuf"]).await;
}

#[tokio::test]
async fn json_schema_of_another_implementation_has_the_keys_of_json() {
    has_the_keys_of_json("json", &["json"]).await;
}

#[tokio::test]
async fn a_schema_that_does_not_exist_is_a_bad_payload() {
    let registry = SchemaRegistry::start().await;
    let format = Arc::new(SchemaFormat::registry(Registry::new(&registry.url())).unwrap());
    let key = compiled(&key().format(format));
    let payload = [0, 0, 0, 0x42, 0x42, 1, 2, 3];
    let input = KeyInput::payload(&payload);
    assert_eq!(
        key.derive("orders", &input).unwrap_err().kind(),
        "not_prepared"
    );
    key.prepare(&input).await.unwrap();
    let error = key.derive("orders", &input).unwrap_err();
    assert_eq!(error.kind(), "unknown_schema");
    assert!(error.to_string().contains("16962"), "{error}");
    // What names no schema needs none, and is said at once.
    for (payload, kind) in [
        (&b"{}"[..], "malformed_payload"),
        (b"\x03\x00................", "framed"),
        (b"\0\0", "malformed_payload"),
    ] {
        let input = KeyInput::payload(payload);
        key.prepare(&input).await.unwrap();
        assert_eq!(key.derive("orders", &input).unwrap_err().kind(), kind);
    }
}

#[tokio::test]
async fn a_wrong_address_never_makes_a_bad_payload() {
    let registry = SchemaRegistry::start().await;
    let payload = [0, 0, 0, 0, 1, 2];
    let input = KeyInput::payload(&payload);
    for url in [
        registry.url().replace("/apis/ccompat/v7", ""),
        "http://127.0.0.1:1".to_owned(),
    ] {
        let format = Arc::new(SchemaFormat::registry(Registry::new(&url)).unwrap());
        let key = compiled(&key().format(format));
        let error = key.prepare(&input).await.unwrap_err();
        assert!(error.what.contains(&url), "{error}");
        assert_eq!(
            key.derive("orders", &input).unwrap_err().kind(),
            "not_prepared"
        );
    }
    // Of several addresses, the first that answers counts.
    let urls = format!("http://127.0.0.1:1, {}", registry.url());
    let format = Arc::new(SchemaFormat::registry(Registry::new(&urls)).unwrap());
    let key = compiled(&key().format(format));
    key.prepare(&input).await.unwrap();
    assert_eq!(
        key.derive("orders", &input).unwrap_err().kind(),
        "unknown_schema"
    );
}

#[tokio::test]
async fn a_registry_with_tls_needs_an_authority_that_is_trusted() {
    let registry = SchemaRegistry::start_tls(Certificates::for_names("IP:127.0.0.1")).await;
    let (certificates, url) = registry.tls();
    let payload = [0, 0, 0, 0x42, 0x42, 1, 2, 3];
    let input = KeyInput::payload(&payload);
    let with_root = |root: PathBuf| {
        let format = SchemaFormat::registry(Registry::new(&url).tls_root(root)).unwrap();
        compiled(&key().format(Arc::new(format)))
    };
    let trusted = with_root(certificates.file("ca.pem"));
    trusted.prepare(&input).await.unwrap();
    assert_eq!(
        trusted.derive("orders", &input).unwrap_err().kind(),
        "unknown_schema",
        "it has answered"
    );

    // Another authority, of the same name: an outage in words, and no bad payload.
    let others = Certificates::for_names("IP:127.0.0.1");
    let stranger = with_root(others.file("ca.pem"));
    let error = stranger.prepare(&input).await.unwrap_err();
    assert!(error.what.contains("certificate"), "{error}");
    assert_eq!(
        stranger.derive("orders", &input).unwrap_err().kind(),
        "not_prepared"
    );

    // Without TLS on a port that speaks it.
    let format = SchemaFormat::registry(Registry::new(&url.replace("https:", "http:"))).unwrap();
    let plain = compiled(&key().format(Arc::new(format)));
    plain.prepare(&input).await.unwrap_err();
}

/// A registry that knows GUIDs, which the real one does not, and asks for a login.
async fn guids(login: &'static str) -> HttpServer {
    let answer = move |Path(guid): Path<String>, headers: HeaderMap| async move {
        if headers
            .get("authorization")
            .is_none_or(|given| given != login)
        {
            return (
                StatusCode::UNAUTHORIZED,
                r#"{"error_code": 401}"#.to_owned(),
            );
        }
        if guid != "00112233-4455-6677-8899-aabbccddeeff" {
            return (StatusCode::NOT_FOUND, r#"{"error_code": 40403}"#.to_owned());
        }
        let schema = r#"{"type": "record", "name": "A", "fields": [{"name": "order_id", "type": "string"}]}"#;
        (
            StatusCode::OK,
            serde_json::json!({ "schema": schema }).to_string(),
        )
    };
    HttpServer::start(Router::new().route("/schemas/guids/{guid}", get(answer))).await
}

#[tokio::test]
async fn a_header_may_name_a_schema_by_its_guid() {
    let mut name = vec![1];
    name.extend((0..16_u8).map(|n| n * 0x11));
    let headers = [("__value_schema_id", name.as_slice())];
    let input = KeyInput::payload(b"\x06A-7").with_headers(&headers);
    let by_id = Key::json(["order_id"]);
    let twin = compiled(&by_id).derive("orders", &KeyInput::payload(r#"{"order_id": "A-7"}"#));
    for login in ["Basic dXNlcjpwYXNz", "Bearer secret"] {
        let server = guids(login).await;
        let registry = || Registry::new(&format!("http://{}/", server.address()));
        let logged_in = if login.starts_with("Basic") {
            registry().basic_auth("user", "pass").unwrap()
        } else {
            registry().bearer("secret").unwrap()
        };
        let key = compiled(
            &by_id
                .clone()
                .format(Arc::new(SchemaFormat::registry(logged_in).unwrap())),
        );
        key.prepare(&input).await.unwrap();
        assert_eq!(key.derive("orders", &input), twin);
        // A refused login says nothing about the message.
        let key = compiled(
            &by_id
                .clone()
                .format(Arc::new(SchemaFormat::registry(registry()).unwrap())),
        );
        let error = key.prepare(&input).await.unwrap_err();
        assert!(error.what.contains("401"), "{error}");
        server.stop().await;
    }
}
