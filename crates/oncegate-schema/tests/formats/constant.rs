//! Different messages that must not share a key: what was not sent, or has another name than the
//! document's, is no value that all of them have.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Under, compiled, hex};
use oncegate_core::key::{FingerprintSpec, Key, KeyInput};
use oncegate_schema::SchemaFormat;

/// Parses a specification in the form of files.
fn spec(text: &str) -> Key {
    text.parse().unwrap()
}

fn proto(body: &str) -> Under {
    let imports: String = ["any", "field_mask", "timestamp"]
        .map(|name| format!("import \"google/protobuf/{name}.proto\"; "))
        .concat();
    Under::protobuf(
        &format!("syntax = \"proto3\"; package p; {imports}{body}"),
        "p.M",
    )
}

/// Checks that two payloads have different keys.
#[track_caller]
fn differ(format: &Under, key: &str, one: &str, other: &str) {
    let [one, other] = [one, other].map(|payload| format.key(&spec(key), &hex(payload)).unwrap());
    assert_ne!(one, other, "{key}");
}

/// Checks that two payloads have one key.
#[track_caller]
fn are_one(format: &Under, key: &str, one: &str, other: &str) {
    let [one, other] = [one, other].map(|payload| format.key(&spec(key), &hex(payload)).unwrap());
    assert_eq!(one, other, "{key}");
}

#[track_caller]
fn fails(format: &Under, key: &str, payload: &str, kind: &str) {
    let error = format.key(&spec(key), &hex(payload)).unwrap_err();
    assert_eq!(error.kind(), kind, "{key}");
}

const REFUND: &str = "message Refund { int64 refund_id = 1; int64 no_fee = 2; }
    message M { string customer = 1; Refund refund = 2; int64 order_id = 3; repeated Refund all_of = 4; }";

// invariant: shared-record
#[test]
fn a_place_inside_a_record_that_the_key_also_names_is_found() {
    let by_both = [
        r#"{"cases": [{"when": {"path": "refund"}, "parts": ["customer", {"path": "refund.refund_id", "optional": true}]}, {"parts": ["order_id"]}]}"#,
        r#"{"cases": [{"when": {"path": "refund"}, "parts": ["customer", "refund.refund_id"]}, {"parts": ["order_id"]}]}"#,
        r#"{"parts": ["refund", "refund.refund_id"]}"#,
        r#"{"json": ["customer", "refund.refund_id"], "tenant": {"json": "refund"}}"#,
        r#"{"json": ["refund"], "tenant": {"json": "refund.refund_id"}}"#,
        r#"{"payload": {}, "tenant": {"json": "refund.refund_id"}}"#,
    ];
    let avro = Under::avro(
        r#"{"type": "record", "name": "M", "fields": [{"name": "customer", "type": "string"},
            {"name": "refund", "type": ["null", {"type": "record", "name": "Refund", "fields": [
                {"name": "refundId", "aliases": ["refund_id"], "type": "long"}]}]}]}"#,
    );
    for key in by_both {
        differ(&proto(REFUND), key, "0a02633112020847", "0a02633112020848");
        differ(&avro, key, "046331028e01", "046331029001");
    }
    // The record itself has the names of the document, whatever stands beside it.
    let json = Under::new(SchemaFormat::json());
    let key = spec(r#"{"parts": ["refund", "refund.refundId", "refund.refundId|json"]}"#);
    assert_eq!(
        proto(REFUND).key(&key, &hex("12020847")).unwrap_err(),
        json.key(&key, br#"{"refund": {"refundId": 71}}"#)
            .unwrap_err()
    );
    let key = spec(r#"{"parts": ["refund", "refund.refundId"]}"#);
    assert_eq!(
        proto(REFUND).key(&key, &hex("12020847")),
        json.key(&key, br#"{"refund": {"refundId": 71}}"#)
    );
    let key = r#"{"parts": ["allOf", "allOf.0", "allOf.1.refund_id"]}"#;
    differ(
        &proto(REFUND),
        key,
        "22020801 22020847",
        "22020801 22020848",
    );
    fails(&proto(REFUND), key, "22020801 22021001", "missing_field");
}

#[test]
fn exceptions_know_both_names_of_a_field() {
    let sent = proto("message N { int64 sent_at = 1; string id = 2; }
        message M { int64 order_id = 1; int64 sent_at = 2; N in_it = 3; repeated N all_of = 4; map<string, N> by_id = 5; }");
    for key in ["payload-except:sent_at", "payload-except:sentAt"] {
        are_one(&sent, key, "08071064", "080710c801");
        differ(&sent, key, "08071064", "08081064");
    }
    // The same as without the field, by each way to it.
    for path in [
        "in_it.sent_at",
        "inIt.sent_at",
        "in_it.sentAt",
        "inIt.sentAt",
    ] {
        let key = format!("payload-except:{path}");
        are_one(
            &sent,
            &key,
            "0807 1a05 0864 120141",
            "0807 1a05 0865 120141",
        );
        are_one(&sent, &key, "0807 1a03 120141", "0807 1a05 0865 120141");
        differ(&sent, &key, "0807 1a03 120141", "0807 1a03 120142");
    }
    let two = "payload-except:in_it.sent_at,inIt.id";
    are_one(&sent, two, "0807 1a05 0864 120141", "0807 1a05 0865 120142");
    let lists = "payload-except:all_of.0.sent_at,byId.x.sent_at";
    are_one(
        &sent,
        lists,
        "2205 0864 120141 2a0a 0a0178 1205 0864 120141",
        "2205 0865 120141 2a0a 0a0178 1205 0865 120141",
    );
    differ(
        &sent,
        lists,
        "2205 0864 120141 2205 0864 120141",
        "2205 0864 120141 2205 0865 120141",
    );
    are_one(
        &sent,
        "payload-except:all_of.0",
        "2202 0864 2202 0801",
        "2202 0865 2202 0801",
    );
    differ(
        &sent,
        "payload-except:all_of.0",
        "2202 0864 2202 0801",
        "2202 0864 2202 0802",
    );

    let avro = Under::avro(
        r#"{"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"},
            {"name": "sentAt", "aliases": ["sent_at", "at"], "type": "long"}]}"#,
    );
    for key in [
        "payload-except:sent_at",
        "payload-except:sentAt",
        "payload-except:at",
    ] {
        are_one(&avro, key, "0ec801", "0e9003");
        differ(&avro, key, "0ec801", "10c801");
    }
}

#[test]
fn nothing_of_an_excepted_message_is_read() {
    let format = proto("message N { string id = 1; } message M { N a_b = 1; int32 b = 2; }");
    let json = Under::new(SchemaFormat::json());
    for key in ["payload-except:a_b", "payload-except:aB"] {
        assert_eq!(
            format.key(&spec(key), &hex("0a050a01784801 1001")),
            json.key(&spec(key), br#"{"b": 1}"#)
        );
    }
}

#[test]
fn a_fingerprint_leaves_out_the_field_of_the_key_by_both_names() {
    let source = "syntax = \"proto3\"; message M { int64 order_id = 1; string total_amount = 2; string note = 3; }";
    let format = Arc::new(SchemaFormat::protobuf(source, None).unwrap());
    let key = spec(r#"{"json": ["order_id", {"path": "total_amount", "as": "decimal"}]}"#);
    let key = key.format(format);
    let fingerprint = FingerprintSpec::payload().compile(&key).unwrap();
    let of = |payload: &str| {
        fingerprint
            .derive(&KeyInput::payload(&hex(payload)))
            .unwrap()
    };
    let (tenth, longer) = (hex("0807120431302e35"), hex("0807120531302e3530"));
    let [one, other] =
        [&tenth, &longer].map(|payload| compiled(&key).derive("r", &KeyInput::payload(payload)));
    assert_eq!(one, other);
    assert_eq!(of("0807120431302e35"), of("0807120531302e3530"));
    assert_ne!(of("0807120431302e35"), of("0807120431302e35 1a0141"));
}

// invariant: constant-key
#[test]
fn what_was_not_sent_is_no_value_of_a_key() {
    let first = proto(
        "message M { int64 refund_id = 1; int64 order_id = 2; repeated int32 sizes = 3; string note = 4; }",
    );
    let key = r#"{"parts": [{"first_of": ["refund_id", "order_id"]}]}"#;
    differ(&first, key, "1007", "1008");
    // Sent with the default is the same as not sent.
    are_one(&first, key, "1007", "08001007");
    let cases = r#"{"cases": [{"when": {"path": "refund_id"}, "parts": ["refund_id"]}, {"when": {"path": "sizes"}, "parts": ["sizes"]}, {"parts": ["order_id"]}]}"#;
    differ(&first, cases, "1007", "1008");
    let optional =
        r#"{"parts": ["order_id", {"path": "note", "optional": true, "blank": "value"}]}"#;
    are_one(&first, optional, "1007", "10072200");

    // A schema file with another number for the field.
    let number = proto("message M { int64 order_id = 3; string note = 2; }");
    for payload in ["0807120178", "0808120178"] {
        fails(&number, "order_id", payload, "missing_field");
    }
    // A reader schema with a default for a field that the payload's schema has renamed.
    let reader = r#"{"type": "record", "name": "R", "fields": [{"name": "order_id", "type": "long", "default": 0}]}"#;
    let read_as =
        |schema: &str| Under::new(SchemaFormat::avro(schema).unwrap().reader(reader).unwrap());
    let renamed = read_as(
        r#"{"type": "record", "name": "R", "fields": [{"name": "orderId", "type": "long"}]}"#,
    );
    fails(&renamed, "order_id", "0e", "missing_field");
    differ(
        &renamed,
        r#"{"parts": [{"first_of": ["order_id", "orderId"]}]}"#,
        "0e",
        "10",
    );
    // With the old name as an alias, the field is found.
    let renamed = read_as(
        r#"{"type": "record", "name": "R", "fields": [{"name": "orderId", "aliases": ["order_id"], "type": "long"}]}"#,
    );
    differ(&renamed, "order_id", "0e", "10");
    differ(&renamed, "orderId", "0e", "10");
    differ(&renamed, "payload", "0e", "10");
}

#[test]
fn a_specification_may_take_defaults() {
    let json = Under::new(SchemaFormat::json());
    let lines = proto("enum Kind { ORDER = 0; REFUND = 1; } message In { int32 no = 1; }
        message M { string order_id = 1; int32 line_no = 2; Kind kind = 3; repeated int32 sizes = 4; In in_it = 5; optional int32 maybe = 6; }");
    let plain = spec(r#"{"json": ["order_id", "line_no"]}"#);
    for key in [
        r#"{"json": ["order_id", {"path": "line_no", "default": true}]}"#,
        r#"{"json": ["order_id"], "tenant": {"json": {"path": "line_no", "default": true}}}"#,
        r#"{"parts": ["order_id", {"path": "line_no", "default": true}]}"#,
        r#"{"parts": ["order_id", {"first_of": [{"path": "line_no", "default": true}, "kind"]}]}"#,
        r#"{"cases": [{"when": {"path": "line_no", "default": true}, "parts": ["order_id"]}]}"#,
    ] {
        let twin = json.key(&spec(key), br#"{"order_id": "A", "line_no": 0}"#);
        assert!(twin.is_ok());
        for payload in ["0a0141", "0a01411000"] {
            assert_eq!(lines.key(&spec(key), &hex(payload)), twin, "{key}");
        }
        assert_eq!(
            lines.key(&spec(key), &hex("0a01411001")),
            json.key(&spec(key), br#"{"order_id": "A", "line_no": 1}"#),
            "{key}"
        );
    }
    // It changes no key.
    assert_eq!(
        lines.key(&plain, &hex("0a01411001")),
        lines.key(
            &spec(r#"{"json": ["order_id", {"path": "line_no", "default": true}]}"#),
            &hex("0a01411001")
        )
    );
    // A place inside a record beside the record, and no default of what has none.
    let both = r#"{"parts": ["order_id", "in_it", {"path": "in_it.no", "default": true}]}"#;
    assert_eq!(
        lines
            .key(&spec(both), &hex("0a01412a00"))
            .unwrap_err()
            .kind(),
        "blank"
    );
    let both = both.replace("\"in_it\",", r#"{"path": "in_it", "blank": "value"},"#);
    differ(&lines, &both, "0a01412a00", "0a01412a020801");
    for gone in ["in_it.no", "maybe", "in_it"] {
        let key = format!(r#"{{"json": [{{"path": "{gone}", "default": true}}]}}"#);
        fails(&lines, &key, "0a0141", "missing_field");
    }
    let sizes = r#"{"parts": ["order_id", {"path": "sizes", "default": true, "blank": "value"}]}"#;
    differ(&lines, sizes, "0a0141", "0a014122020101");

    // A value that the specification names may be the default.
    let is = r#"{"cases": [{"when": {"path": "kind", "is": "ORDER"}, "parts": ["order_id"]}, {"parts": [{"path": "kind"}, "order_id"]}]}"#;
    are_one(&lines, is, "0a0141", "0a01411800");
    differ(&lines, is, "0a0141", "0a01411801");
}

#[test]
fn protobuf_values_are_those_of_its_json() {
    let of_enum = proto(
        "enum S { option allow_alias = true; UNKNOWN = 0; PAID = 1; SETTLED = 1; REFUNDED = 2; } message M { S status = 1; }",
    );
    of_enum.is_twin(&hex("0801"), r#"{"status": "PAID"}"#, &["status"]);
    let any = proto("message M { int32 i = 1; google.protobuf.Any a = 2; }");
    any.is_twin(&hex("08051200"), r#"{"i": 5, "a": {}}"#, &["i"]);
    let mask = proto("message M { google.protobuf.FieldMask a = 1; int32 i = 2; }");
    let payload = hex("0a100a07666f6f5f6261720a05622e635f64");
    mask.is_twin(&payload, r#"{"a": "fooBar,b.cD"}"#, &["a"]);
    mask.is_twin(&hex("0a00 1001"), r#"{"a": "", "i": 1}"#, &["i"]);
    for path in ["fooBar", "a__b", "a_", "a_1", "a,b", "", "_"] {
        let mut payload = vec![0x0A, u8::try_from(path.len() + 2).unwrap(), 0x0A];
        payload.push(u8::try_from(path.len()).unwrap());
        payload.extend_from_slice(path.as_bytes());
        payload.extend_from_slice(&hex("1001"));
        assert!(mask.key(&spec("payload"), &payload).is_err(), "{path:?}");
    }
}

#[test]
fn a_decimal_that_its_fixed_cannot_hold_is_no_decimal() {
    fn of(size: usize, precision: usize) -> Under {
        Under::avro(&format!(
            r#"{{"type": "record", "name": "R", "fields": [{{"name": "a", "type": {{"type": "fixed", "name": "F", "size": {size}, "logicalType": "decimal", "precision": {precision}, "scale": 1}}}}]}}"#
        ))
    }
    of(2, 9).is_twin(&hex("d31e"), r#"{"a": "0x4="}"#, &["a"]);
    of(2, 5).is_twin(&hex("d31e"), r#"{"a": "0x4="}"#, &["a"]);
    of(2, 4).is_twin(&hex("d31e"), r#"{"a": -1149.0}"#, &["a"]);
    of(16, 38).is_twin(
        &hex("00000000000000000000000000000001"),
        r#"{"a": 0.1}"#,
        &["a"],
    );
    of(16, 39).is_twin(&[0; 16], r#"{"a": "AAAAAAAAAAAAAAAAAAAAAA=="}"#, &["a"]);
}

#[test]
fn what_carries_avro_is_named() {
    let order = Under::avro(
        r#"{"type": "record", "name": "Order", "fields": [{"name": "order_id", "type": "string"}]}"#,
    );
    for (payload, what) in [
        ("c30164e10036d670726b0a534f452d31", "single-object"),
        ("4f626a0104166176726f2e736368656d61", "file of Avro"),
        ("0000000007 06412d37", "Confluent"),
    ] {
        let error = order.key(&spec("order_id"), &hex(payload)).unwrap_err();
        assert_eq!(error.kind(), "framed", "{payload}");
        assert!(error.to_string().contains(what), "{error}");
    }
    let error = order.key(&spec("order_id"), &hex("c301")).unwrap_err();
    assert_eq!(error.kind(), "malformed_payload");
}

/// Runs something that has taken minutes, or has ended the process.
fn at_once<T>(work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = work();
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    result
}

#[test]
fn a_oneof_is_read_in_linear_time() {
    let format =
        proto("message M { oneof it { string a = 1; string b = 2; int32 c = 3; } string id = 4; }");
    let payload = [hex("0a00").repeat(500_000), hex("1200220141")].concat();
    let key = at_once(|| format.key(&spec("id"), &payload));
    assert!(key.is_ok());
    let mixed = [hex("0a001200").repeat(250_000), hex("120161")].concat();
    let key = at_once(|| format.key(&spec("payload"), &mixed));
    let json = Under::new(SchemaFormat::json());
    assert_eq!(key, json.key(&spec("payload"), br#"{"b": "a"}"#));
}

#[test]
fn many_fields_and_occurrences_are_read_in_linear_time() {
    let fields: String = (1..=5_000)
        .map(|number| format!("int32 f{number} = {number}; "))
        .collect();
    let format = proto(&format!(
        "message N {{ {fields} }} message M {{ repeated N n = 1; {} }}",
        fields.replace("f1 = 1; ", "f0 = 9000; ")
    ));
    let payload = [hex("1001").repeat(400_000), hex("0a00").repeat(100_000)].concat();
    assert!(at_once(|| format.key(&spec("payload"), &payload)).is_ok());
}

// invariant: panic-in-keys
#[test]
fn a_schema_that_nests_deeply_is_refused() {
    let deep = |levels: usize| {
        format!(
            "syntax = \"proto3\"; import \"google/protobuf/descriptor.proto\"; message O {{ O o = 1; }}
             extend google.protobuf.MessageOptions {{ O oo = 50000; }}
             message M {{ string id = 1; option (oo) = {{{}{}}}; }}",
            "o{".repeat(levels),
            "}".repeat(levels)
        )
    };
    assert!(SchemaFormat::protobuf(&deep(40), Some("M")).is_ok());
    for levels in [100, 1_000, 50_000] {
        let error = SchemaFormat::protobuf(&deep(levels), Some("M")).unwrap_err();
        assert!(error.what.contains("nests deeper"), "{error}");
    }
    let messages = format!("{}{}", "message A {".repeat(50_000), "}".repeat(50_000));
    assert!(SchemaFormat::protobuf(&messages, None).is_err());
}

#[test]
fn large_schemas_are_compiled_in_bounded_time() {
    let fields: Vec<String> = (0..50_000)
        .map(|number| format!(r#"{{"name": "f{number}", "aliases": ["a{number}"], "type": "E"}}"#))
        .collect();
    let avro = |fields: &[String]| {
        format!(
            r#"{{"type": "record", "name": "R", "fields": [{{"name": "e", "type": {{"type": "record", "name": "E", "fields": []}}}}, {}]}}"#,
            fields.join(",")
        )
    };
    let schema = avro(&fields);
    let read = at_once(|| SchemaFormat::avro(&schema).and_then(|format| format.reader(&schema)));
    assert!(read.is_ok());
    // A chain of records, each in the one after it.
    let chain: Vec<String> = (1..9_000)
        .map(|number| {
            format!(
                r#"{{"type": "record", "name": "C{number}", "fields": [{{"name": "x", "type": "C{}"}}]}}"#,
                number - 1
            )
        })
        .collect();
    let chain = format!(
        r#"[{{"type": "record", "name": "C0", "fields": []}}, {}]"#,
        chain.join(",")
    );
    assert!(at_once(|| SchemaFormat::avro(&chain)).is_ok());
}
