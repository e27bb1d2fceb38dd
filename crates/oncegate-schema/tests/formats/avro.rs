//! Keys of Avro's binary encoding.

use crate::common::{Under, hex};
use oncegate_core::key::{Field, Key, TimeUnit};
use oncegate_schema::SchemaFormat;

fn record(fields: &str) -> String {
    format!(r#"{{"type": "record", "name": "Order", "namespace": "shop", "fields": [{fields}]}}"#)
}

#[test]
fn plain_types_have_the_keys_of_json() {
    let avro = Under::avro(&record(
        r#"{"name": "id", "type": "string"}, {"name": "n", "type": "int"}, {"name": "big", "type": "long"},
           {"name": "yes", "type": "boolean"}, {"name": "f", "type": "float"}, {"name": "d", "type": "double"},
           {"name": "raw", "type": "bytes"}, {"name": "none", "type": "null"},
           {"name": "color", "type": {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}},
           {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 3}}"#,
    ));
    // "A", -3, 2^53 + 1, true, 0.1f32, 2.5, [1, 2], null, BLUE, [255, 0, 1]
    let payload = hex("0241 05 82808080808080 20 01 cdcccc3d 0000000000000440 040102 02 ff0001");
    let twin = r#"{"id": "A", "n": -3, "big": 9007199254740993, "yes": true, "f": 0.1, "d": 2.5, "raw": "AQI=",
                   "none": null, "color": "BLUE", "hash": "/wAB"}"#;
    avro.is_twin(
        &payload,
        twin,
        &["id", "n", "big", "yes", "f", "d", "raw", "color", "hash"],
    );
}

#[test]
fn logical_types_have_the_keys_of_json() {
    let avro = Under::avro(&record(
        r#"{"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
           {"name": "day", "type": {"type": "int", "logicalType": "date"}},
           {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
           {"name": "exact", "type": {"type": "long", "logicalType": "timestamp-micros"}},
           {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-millis"}},
           {"name": "time", "type": {"type": "int", "logicalType": "time-millis"}},
           {"name": "id", "type": {"type": "fixed", "name": "Id", "size": 16, "logicalType": "uuid"}},
           {"name": "text_id", "type": {"type": "string", "logicalType": "uuid"}},
           {"name": "rest", "type": {"type": "fixed", "name": "Dec", "size": 4, "logicalType": "decimal", "precision": 6, "scale": 1}},
           {"name": "other", "type": {"type": "long", "logicalType": "unheard-of"}}"#,
    ));
    let payload = hex(
        "0404d2 88b602 f487c6b9e663 a0e2adcbb1d88b06 f487c6b9e663 02 00112233445566778899aabbccddeeff 0261 ffffff85 0e",
    );
    let document = avro.document(&payload).unwrap();
    let value: serde_json::Value = serde_json::from_str(&document).unwrap();
    assert_eq!(value["amount"].to_string(), "12.34", "{document}");
    assert_eq!(value["day"], "2024-05-01");
    assert_eq!(value["at"], "2024-05-01T10:00:00.250Z");
    assert_eq!(value["local"], "2024-05-01T10:00:00.250");
    assert_eq!(value["time"], "00:00:00.001");
    assert_eq!(value["id"], "00112233-4455-6677-8899-aabbccddeeff");
    assert_eq!(value["rest"].to_string(), "-12.3");
    assert_eq!(value["other"], 7);
    avro.is_twin(
        &payload,
        &document,
        &["amount", "day", "at", "exact", "id", "text_id", "rest"],
    );

    let by_instant = Key::json([
        Field::path("at").timestamp(TimeUnit::Seconds),
        Field::path("amount").decimal(),
    ]);
    let twin = br#"{"at": "2024-05-01T12:00:00+02:00", "amount": "12.340"}"#;
    let json = Under::new(SchemaFormat::json());
    assert_eq!(avro.key(&by_instant, &payload), json.key(&by_instant, twin));
}

#[test]
fn unions_arrays_and_maps_have_the_keys_of_json() {
    let avro = Under::avro(&record(
        r#"{"name": "id", "type": ["null", "string", "long"]}, {"name": "gone", "type": ["null", "string"]},
           {"name": "items", "type": {"type": "array", "items": {"type": "record", "name": "Item", "fields": [
               {"name": "sku", "type": "string"}, {"name": "count", "type": "int"}]}}},
           {"name": "tags", "type": {"type": "map", "values": "int"}}"#,
    ));
    // Two blocks of items, the second with its size in bytes; a map in one block.
    let payload = hex("040e 00 02 024102 01 06 024204 00 04 026102 026204 00");
    let twin = r#"{"id": 7, "gone": null, "items": [{"sku": "A", "count": 1}, {"sku": "B", "count": 2}],
                   "tags": {"b": 2, "a": 1}}"#;
    avro.is_twin(
        &payload,
        twin,
        &[
            "id",
            "items",
            "items.0.sku",
            "items.1",
            "items.1.count",
            "tags",
            "tags.b",
        ],
    );
    let error = avro.key(&Key::json(["items.2.sku"]), &payload).unwrap_err();
    assert_eq!(error.kind(), "missing_field");
    assert_eq!(
        avro.key(&Key::json(["gone"]), &payload).unwrap_err().kind(),
        "null_field"
    );
}

#[test]
fn a_renamed_field_keeps_its_key_by_its_alias() {
    let before = Under::avro(&record(r#"{"name": "order_id", "type": "string"}"#));
    let after = Under::avro(&record(
        r#"{"name": "currency", "type": "string", "default": "EUR"},
           {"name": "orderId", "type": "string", "aliases": ["id", "order_id"]}"#,
    ));
    let old = hex("0641 2d37");
    let new = hex("06455552 06412d37");
    for key in [
        Key::json(["order_id"]),
        Key::json([Field::path("order_id").trim()]),
    ] {
        assert_eq!(before.key(&key, &old), after.key(&key, &new));
    }
    // A field that has the name goes before an alias.
    let both = Under::avro(&record(
        r#"{"name": "a", "type": "string", "aliases": ["order_id"]}, {"name": "order_id", "type": "string"}"#,
    ));
    let key = Key::json(["order_id"]);
    assert_eq!(
        both.key(&key, &hex("0278 06412d37")),
        before.key(&key, &old)
    );
}

#[test]
fn types_may_refer_to_themselves() {
    let avro = Under::avro(&record(
        r#"{"name": "v", "type": "int"}, {"name": "next", "type": ["null", "shop.Order"]}"#,
    ));
    avro.is_twin(
        &hex("02 02 04 02 06 00"),
        r#"{"v": 1, "next": {"v": 2, "next": {"v": 3, "next": null}}}"#,
        &["v", "next.v", "next.next"],
    );
    let deep: Vec<u8> = b"\x02\x02".repeat(1_000_000);
    for key in [Key::json(["v"]), Key::json(["next.v"]), Key::payload()] {
        assert_eq!(avro.key(&key, &deep).unwrap_err().kind(), "too_deep");
    }
}

#[test]
fn malformed_bytes_are_bad_payloads() {
    let avro = Under::avro(&record(
        r#"{"name": "id", "type": "string"}, {"name": "e", "type": ["null", {"type": "enum", "name": "E", "symbols": ["A"]}]},
           {"name": "b", "type": "boolean"}, {"name": "n", "type": "int"}"#,
    ));
    let key = Key::json(["id"]);
    assert!(avro.key(&key, &hex("0241 00 01 02")).is_ok());
    for (payload, what) in [
        ("", "ends"),
        ("0641", "ends"),
        ("0141", "negative"),
        ("0241 04 01 02", "branch"),
        ("0241 0204 01 02", "symbol"),
        ("0241 00 02 02", "boolean"),
        ("0241 00 01 8080808010", "32 bits"),
        ("0241 00 01 ffffffffffffffffff7f", "64 bits"),
        ("0241 00 01 02 00", "follows"),
    ] {
        let error = avro.key(&key, &hex(payload)).unwrap_err();
        assert_eq!(error.kind(), "malformed_payload", "{payload}");
        assert!(error.to_string().contains(what), "{payload}: {error}");
    }
    let text = avro.key(&key, &hex("02ff 00 01 02")).unwrap_err();
    assert_eq!(text.kind(), "not_utf8");
}

#[test]
fn small_payloads_never_become_large_documents() {
    let nulls = Under::avro(&record(
        r#"{"name": "id", "type": "string"}, {"name": "nulls", "type": {"type": "array", "items": "null"}}"#,
    ));
    // 2^60 elements that take no bytes.
    let payload = hex("0241 808080808080808020 00");
    let error = nulls.key(&Key::payload(), &payload).unwrap_err();
    assert_eq!(error.kind(), "too_large");
    assert!(nulls.key(&Key::json(["id"]), &payload).is_ok());
    let long =
        Under::avro(r#"{"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}"#);
    let mut digits = hex("80897a");
    digits.resize(3 + 1_000_000, 0x55);
    assert_eq!(
        long.key(&Key::payload(), &digits).unwrap_err().kind(),
        "malformed_payload"
    );
}

#[test]
fn a_schema_that_makes_no_sense_is_refused() {
    for (schema, what) in [
        ("{", "not JSON"),
        (r#""unknown""#, "not defined"),
        (r#"{"type": "record", "name": "A"}"#, "fields"),
        (r#"{"type": "array"}"#, "items"),
        (
            r#"{"type": "record", "name": "A", "fields": [{"name": "a", "type": "int"}, {"name": "a", "type": "int"}]}"#,
            "two fields",
        ),
    ] {
        let error = SchemaFormat::avro(schema).unwrap_err().to_string();
        assert!(error.contains(what), "{schema}: {error}");
    }
}

#[test]
fn records_without_bytes_cost_nothing() {
    // Each record has the one before it twice: 2^60 values in no bytes.
    let mut fields = r#"{"name": "id", "type": "string"}"#.to_owned();
    fields.push_str(r#", {"name": "n0", "type": {"type": "record", "name": "N0", "fields": []}}"#);
    for level in 1..=60 {
        let inner = level - 1;
        fields.push_str(&format!(
            r#", {{"name": "n{level}", "type": {{"type": "record", "name": "N{level}", "fields": [
                {{"name": "a", "type": "N{inner}"}}, {{"name": "b", "type": "N{inner}"}}]}}}}"#
        ));
    }
    let avro = Under::avro(&record(&fields));
    assert!(avro.key(&Key::json(["id"]), &hex("0241")).is_ok());
    assert_eq!(
        avro.key(&Key::payload(), &hex("0241")).unwrap_err().kind(),
        "too_large"
    );
}
