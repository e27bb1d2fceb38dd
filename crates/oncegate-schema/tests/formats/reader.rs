//! Avro's aliases and defaults of a reader schema, for payloads that were written before it or
//! without it.

use crate::common::{Under, hex};
use oncegate_core::key::Key;
use oncegate_schema::{Registry, SchemaFormat};

const BEFORE: &str = r#"{"type": "record", "name": "Order", "namespace": "shop", "fields": [
    {"name": "order_id", "type": "string"},
    {"name": "customer", "type": {"type": "record", "name": "Customer", "fields": [{"name": "id", "type": "long"}]}},
    {"name": "lines", "type": {"type": "array", "items": ["null", {"type": "record", "name": "Line", "fields": [
        {"name": "sku", "type": "string"}]}]}}]}"#;
/// "A-7", 5, two lines: null and "B".
const OLD: &str = "06412d37 0a 04 00 02 0242 00";

const AFTER: &str = r#"{"type": "record", "name": "Order", "namespace": "shop", "fields": [
    {"name": "currency", "type": ["string", "null"], "default": "EUR"},
    {"name": "orderId", "type": "string", "aliases": ["order_id"]},
    {"name": "customer", "type": {"type": "record", "name": "Buyer", "aliases": ["Customer"], "fields": [
        {"name": "number", "type": "long", "aliases": ["id"]},
        {"name": "tier", "type": {"type": "enum", "name": "Tier", "symbols": ["FREE", "PAID"]}, "default": "PAID"}]}},
    {"name": "lines", "type": {"type": "array", "items": ["null", {"type": "record", "name": "Line", "fields": [
        {"name": "article", "type": "string", "aliases": ["sku"]},
        {"name": "count", "type": "int", "default": 1}]}]}}]}"#;
/// The same order by the new schema, with the values that were defaults.
const NEW: &str = "00 06455552 06412d37 0a 02 04 00 02 0242 02 00";

fn read_as(schema: &str, reader: &str) -> Under {
    Under::new(SchemaFormat::avro(schema).unwrap().reader(reader).unwrap())
}

#[test]
fn payloads_of_both_schemas_have_one_key() {
    let old = read_as(BEFORE, AFTER);
    let new = read_as(AFTER, AFTER);
    let twin = r#"{"currency": "EUR", "orderId": "A-7", "customer": {"number": 5, "tier": "PAID"},
                   "lines": [null, {"article": "B", "count": 1}]}"#;
    let paths = [
        "orderId",
        "currency",
        "customer.number",
        "customer.tier",
        "customer",
        "lines.1.article",
        "lines",
    ];
    old.is_twin_with_defaults(&hex(OLD), twin, &paths);
    new.is_twin(&hex(NEW), twin, &paths);
}

#[test]
fn former_names_stay_names_of_the_field() {
    let plain = Under::avro(BEFORE);
    for path in ["order_id", "customer.id", "lines.1.sku"] {
        let key = Key::json([path]);
        let expected = plain.key(&key, &hex(OLD));
        assert!(expected.is_ok(), "{path}");
        assert_eq!(
            read_as(BEFORE, AFTER).key(&key, &hex(OLD)),
            expected,
            "{path}"
        );
        assert_eq!(
            read_as(AFTER, AFTER).key(&key, &hex(NEW)),
            expected,
            "{path}"
        );
    }
    let error = plain.key(&Key::json(["orderId"]), &hex(OLD)).unwrap_err();
    assert_eq!(error.kind(), "missing_field");
}

#[test]
fn an_alias_is_known_to_the_reader_schema_alone() {
    let unaware = AFTER.replace(r#", "aliases": ["order_id"]"#, "");
    let key = Key::json(["order_id"]);
    assert_eq!(
        Under::avro(&unaware)
            .key(&key, &hex(NEW))
            .unwrap_err()
            .kind(),
        "missing_field"
    );
    assert_eq!(
        read_as(&unaware, AFTER).key(&key, &hex(NEW)),
        Under::avro(BEFORE).key(&key, &hex(OLD))
    );
}

fn record(fields: &str) -> String {
    format!(r#"{{"type": "record", "name": "R", "fields": [{fields}]}}"#)
}

#[test]
fn a_field_with_the_name_goes_before_an_alias() {
    let writer = record(r#"{"name": "a", "type": "int"}, {"name": "b", "type": "int"}"#);
    let reader = record(
        r#"{"name": "b", "type": "int", "aliases": ["a"]}, {"name": "c", "type": "int", "aliases": ["b"], "default": 9}"#,
    );
    let format = read_as(&writer, &reader);
    format.is_twin_with_defaults(
        &hex("02 04"),
        r#"{"a": 1, "b": 2, "c": 9}"#,
        &["a", "b", "c"],
    );
}

#[test]
fn defaults_have_the_keys_of_their_json() {
    let reader = r#"{"type": "record", "name": "R", "fields": [
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, "default": "\u0004\u00d2"},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}, "default": 19844},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 1714557600250},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 3}, "default": "\u00ff\u0000\u0001"},
        {"name": "f", "type": "float", "default": 0.1}, {"name": "d", "type": "double", "default": 2},
        {"name": "yes", "type": "boolean", "default": true}, {"name": "big", "type": "long", "default": -9007199254740993},
        {"name": "tags", "type": {"type": "map", "values": "int"}, "default": {"b": 2, "a": 1}},
        {"name": "list", "type": {"type": "array", "items": "string"}, "default": ["x", "y"]},
        {"name": "none", "type": ["null", "int"], "default": null}, {"name": "late", "type": ["null", "int"], "default": 4},
        {"name": "inner", "type": {"type": "record", "name": "I", "fields": [
            {"name": "x", "type": "int"}, {"name": "y", "type": "int", "default": 8}]}, "default": {"x": 7}},
        {"name": "same", "type": "I", "default": {"x": 1, "y": 2}}]}"#;
    let format = read_as(
        r#"{"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}"#,
        reader,
    );
    let twin = r#"{"id": 1, "amount": 12.34, "day": "2024-05-01", "at": "2024-05-01T10:00:00.250Z", "hash": "/wAB", "f": 0.1,
        "d": 2, "yes": true, "big": -9007199254740993, "tags": {"a": 1, "b": 2}, "list": ["x", "y"], "none": null, "late": 4,
        "inner": {"x": 7, "y": 8}, "same": {"x": 1, "y": 2}}"#;
    let paths = [
        "id", "amount", "day", "at", "hash", "f", "d", "yes", "big", "tags.b", "list.1", "late",
        "inner.y", "same",
    ];
    format.is_twin_with_defaults(&hex("02"), twin, &paths);
    for path in paths.iter().skip(1) {
        let error = format.key(&Key::json([*path]), &hex("02")).unwrap_err();
        assert_eq!(error.kind(), "missing_field", "{path}");
    }
}

#[test]
fn records_of_another_name_are_read_as_written() {
    let refund = r#"{"type": "record", "name": "Refund", "fields": [{"name": "order_id", "type": "string"}]}"#;
    let format = read_as(refund, AFTER);
    format.is_twin(&hex("06412d37"), r#"{"order_id": "A-7"}"#, &["order_id"]);
    let error = format
        .key(&Key::json(["currency"]), &hex("06412d37"))
        .unwrap_err();
    assert_eq!(error.kind(), "missing_field");
    // One reader schema may speak of several records.
    let both = format!(
        r#"[{AFTER}, {{"type": "record", "name": "Refund", "fields": [
            {{"name": "order", "type": "string", "aliases": ["order_id"]}}]}}]"#
    );
    read_as(refund, &both).is_twin(&hex("06412d37"), r#"{"order": "A-7"}"#, &["order"]);
    let key = Key::json(["orderId"]);
    assert_eq!(
        read_as(BEFORE, &both).key(&key, &hex(OLD)),
        read_as(AFTER, &both).key(&key, &hex(NEW))
    );
}

#[test]
fn a_reader_schema_may_refer_to_itself() {
    fn node(field: &str) -> String {
        format!(
            r#"{{"type": "record", "name": "Node", "fields": [{field}, {{"name": "next", "type": ["null", "Node"]}}]}}"#
        )
    }
    let writer = node(r#"{"name": "v", "type": "int"}"#);
    let reader = node(
        r#"{"name": "value", "type": "int", "aliases": ["v"]}, {"name": "w", "type": "int", "default": 3}"#,
    );
    read_as(&writer, &reader).is_twin_with_defaults(
        &hex("02 02 04 00"),
        r#"{"value": 1, "w": 3, "next": {"value": 2, "w": 3, "next": null}}"#,
        &["value", "next.value", "next.w", "next"],
    );
}

#[test]
fn a_reader_schema_that_makes_no_sense_is_refused() {
    let endless = r#"{"name": "next", "type": "R", "default": {}}"#;
    let cases = [
        (
            record(r#"{"name": "a", "type": "int", "default": "x"}"#),
            "the default of `a`",
        ),
        (
            record(r#"{"name": "a", "type": "int", "default": 3000000000}"#),
            "the default of `a`",
        ),
        (
            record(r#"{"name": "a", "type": ["null", "int"], "default": "x"}"#),
            "the default of `a`",
        ),
        (
            record(
                r#"{"name": "a", "type": {"type": "fixed", "name": "F", "size": 2}, "default": "x"}"#,
            ),
            "`a`",
        ),
        (
            record(
                r#"{"name": "a", "type": {"type": "enum", "name": "E", "symbols": []}, "default": "x"}"#,
            ),
            "`a`",
        ),
        (record(endless), "deeper"),
        ("{".to_owned(), "not JSON"),
    ];
    for (reader, what) in cases {
        let error = SchemaFormat::avro(BEFORE)
            .unwrap()
            .reader(&reader)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(what) && error.contains("reader schema"),
            "{reader}: {error}"
        );
    }
    let other = SchemaFormat::json().reader(AFTER).unwrap_err().to_string();
    assert!(other.contains("for Avro"), "{other}");
    let registry = SchemaFormat::registry(Registry::new("http://localhost:8081")).unwrap();
    assert!(registry.reader(AFTER).is_ok());
}
