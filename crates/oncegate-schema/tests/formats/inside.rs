//! Values of a format inside a string of a JSON document.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use oncegate_core::key::Key;
use oncegate_schema::{Encoding, SchemaFormat};

use crate::common::Under;

const SCHEMA: &str = r#"{"type": "record", "name": "Order", "fields": [
    {"name": "order_id", "type": "string"}, {"name": "lines", "type": "int"}]}"#;

/// The order `A-7` with two lines, in Avro.
const ORDER: &[u8] = &[6, b'A', b'-', b'7', 4];

fn event(value: &[u8]) -> Vec<u8> {
    let text = STANDARD.encode(value);
    format!(r#"{{"shop": "b", "record": {{"seq": 1, "data": "{text}"}}, "n": [1, 2]}}"#)
        .into_bytes()
}

fn avro() -> Under {
    Under::new(
        SchemaFormat::avro(SCHEMA)
            .unwrap()
            .at("record.data")
            .unwrap(),
    )
}

#[test]
fn a_value_inside_a_document_has_the_key_of_its_twin() {
    let plain = Under::new(SchemaFormat::json());
    let twin = br#"{"shop":"b","record":{"seq":1,"data":{"order_id":"A-7","lines":2}},"n":[1,2]}"#;
    for key in [
        Key::json(["record.data.order_id"]),
        Key::json(["record.data.order_id", "shop"]),
        Key::json(["record.data"]),
        Key::json(["record", "n.1"]),
        Key::payload(),
    ] {
        let of_twin = plain.key(&key, twin);
        assert!(of_twin.is_ok(), "{key:?}");
        assert_eq!(avro().key(&key, &event(ORDER)), of_twin, "{key:?}");
    }
    // Escapes in the string, and an encoding of its own.
    let escaped = String::from_utf8(event(ORDER))
        .unwrap()
        .replace('=', "\\u003d");
    let key = Key::json(["record.data.order_id"]);
    assert_eq!(avro().key(&key, escaped.as_bytes()), plain.key(&key, twin));
    let zipped = SchemaFormat::json()
        .encodings([Encoding::Base64, Encoding::Zstd])
        .at("record.data");
    let value = ::zstd::stream::encode_all(&br#"{"order_id":"A-7","lines":2}"#[..], 3).unwrap();
    assert_eq!(
        Under::new(zipped.unwrap()).key(&key, &event(&value)),
        plain.key(&key, twin)
    );
}

#[test]
fn what_a_key_does_not_name_is_not_decoded() {
    let shop = Key::json(["shop"]);
    assert!(avro().key(&shop, &event(b"damaged")).is_ok());
    let data = Key::json(["record.data.order_id"]);
    let errors = [
        (event(b"\xFF"), "malformed_payload"),
        (br#"{"record": {"data": "%%"}}"#.to_vec(), "bad_encoding"),
        (br#"{"record": {"data": 7}}"#.to_vec(), "decode_failed"),
        (
            br#"{"record": {"data": "", "data": ""}}"#.to_vec(),
            "decode_failed",
        ),
        (br#"{"record": {"data": null}}"#.to_vec(), "missing_field"),
        (br#"{"record": 7}"#.to_vec(), "missing_field"),
        (b"{\"record\": {".to_vec(), "decode_failed"),
        ("[".repeat(100_000).into_bytes(), "decode_failed"),
    ];
    for (payload, kind) in errors {
        let error = avro().key(&data, &payload).unwrap_err();
        let shown: String = String::from_utf8_lossy(&payload).chars().take(60).collect();
        assert_eq!(error.kind(), kind, "{shown}: {error}");
    }
}

/// A decoded text must not close the document around it.
#[test]
fn a_value_cannot_write_beside_itself() {
    let json = Under::new(SchemaFormat::json().at("record.data").unwrap());
    let key = Key::json(["shop", "record.data.order_id"]);
    let good = json.key(&key, &event(br#"{"order_id":"A-7"}"#));
    assert!(good.is_ok());
    for value in [
        r#"{"order_id":"A-7"}},"x":{"y":1"#,
        r#"1},"shop":"c","z":{"a":1"#,
        "",
        r#"{"order_id":"A-7"} {}"#,
    ] {
        let error = json.key(&key, &event(value.as_bytes())).unwrap_err();
        assert_eq!(error.kind(), "decode_failed", "{value}");
    }
}

#[test]
fn a_path_that_leads_nowhere_is_refused() {
    for (path, why) in [
        ("", "blank"),
        ("a..b", "blank"),
        ("a\\b", "a dot or another"),
        ("a\\", "a dot or another"),
        (&"a.".repeat(20), "blank"),
        (&["a"; 17].join("."), "16 names"),
    ] {
        let refused = SchemaFormat::json().at(path).unwrap_err();
        assert!(refused.to_string().contains(why), "{path}: {refused}");
    }
    assert!(SchemaFormat::json().at(r"a\.b.c").is_ok());
}
