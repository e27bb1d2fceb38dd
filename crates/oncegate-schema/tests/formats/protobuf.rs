//! Keys of Protobuf's binary encoding.

use crate::common::{Under, hex};
use oncegate_core::key::{Field, Key};
use oncegate_schema::SchemaFormat;

const SHOP: &str = r#"
syntax = "proto3";
package shop;
import "google/protobuf/any.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
message Order {
  string order_id = 1;
  int64 amount = 2;
  optional string coupon = 3;
  Customer customer = 4;
  repeated int32 sizes = 5;
  map<string, int32> tags = 6;
  Color color = 7;
  oneof payment { string card = 8; string iban = 9; Customer payer = 10; }
  google.protobuf.Timestamp at = 11;
  google.protobuf.Duration took = 12;
  google.protobuf.StringValue note = 13;
  google.protobuf.Struct extra = 14;
  google.protobuf.Any any = 15;
  sint32 delta = 16;
  double rate = 17;
  bytes raw = 18;
  repeated Customer others = 19;
}
message Customer { string id = 1; int32 level = 2; }
enum Color { COLOR_NONE = 0; COLOR_RED = 1; }
"#;

fn order() -> Under {
    Under::protobuf(SHOP, "shop.Order")
}

#[test]
fn scalars_have_the_keys_of_json() {
    let payload = hex(
        "0a03412d37 10c0843d 1a0158 2206 0a0243311005 38 01 8001 05 8901 0000000000000440 9201 020102",
    );
    let twin = r#"{"orderId": "A-7", "amount": 1000000, "coupon": "X", "customer": {"id": "C1", "level": 5},
                   "color": "COLOR_RED", "delta": -3, "rate": 2.5, "raw": "AQI="}"#;
    order().is_twin(
        &payload,
        twin,
        &[
            "amount",
            "coupon",
            "customer.id",
            "customer",
            "color",
            "delta",
            "rate",
            "raw",
        ],
    );
}

#[test]
fn fields_are_found_by_both_their_names() {
    let payload = hex("0a03412d37");
    let json = Under::new(SchemaFormat::json());
    let by_json = Key::json(["orderId"]);
    assert_eq!(
        order().key(&by_json, &payload),
        json.key(&by_json, br#"{"orderId": "A-7"}"#)
    );
    let by_source = Key::json(["order_id"]);
    assert_eq!(
        order().key(&by_source, &payload),
        json.key(&by_source, br#"{"order_id": "A-7"}"#)
    );
}

#[test]
fn fields_without_presence_have_a_default_if_asked_for_it() {
    let key = Key::json([Field::from("order_id"), Field::path("amount").or_default()]);
    let json = Under::new(SchemaFormat::json());
    let payload = hex("0a03412d37");
    assert_eq!(
        order().key(&key, &payload),
        json.key(&key, br#"{"order_id": "A-7", "amount": 0}"#)
    );
    let key = Key::json(["order_id", "amount"]);
    for payload in ["0a03412d37", "0a03412d37 1000"] {
        let error = order().key(&key, &hex(payload)).unwrap_err();
        assert_eq!(error.kind(), "missing_field");
    }
    // Sent with the default, and not sent: one message, so one key of the whole payload.
    assert_eq!(
        order().key(&Key::payload(), &payload),
        order().key(&Key::payload(), &hex("0a03412d37 1000 2a00"))
    );
    assert_eq!(
        order()
            .key(&Key::json(["coupon"]), &payload)
            .unwrap_err()
            .kind(),
        "missing_field"
    );
    assert_eq!(
        order()
            .key(&Key::json(["customer.id"]), &payload)
            .unwrap_err()
            .kind(),
        "missing_field"
    );
    assert_eq!(
        order()
            .key(&Key::json(["coupon"]), &hex("1a00"))
            .unwrap_err()
            .kind(),
        "blank"
    );
}

#[test]
fn lists_and_maps_have_the_keys_of_json() {
    // Packed and not packed, in pieces.
    let payload = hex(
        "2a020102 2803 3205 0a016110 01 3205 0a01621002 3205 0a01611003 9a01 03 0a0143 9a01 021002",
    );
    let twin =
        r#"{"sizes": [1, 2, 3], "tags": {"a": 3, "b": 2}, "others": [{"id": "C"}, {"level": 2}]}"#;
    order().is_twin(
        &payload,
        twin,
        &[
            "sizes",
            "sizes.2",
            "tags",
            "tags.a",
            "others.1",
            "others.0.id",
        ],
    );
}

#[test]
fn the_last_of_a_field_counts_and_messages_are_merged() {
    let json = Under::new(SchemaFormat::json());
    let payload = hex("1001 1002 2203 0a0143 22021005 2203 0a0144");
    let key = Key::json(["amount", "customer.id", "customer.level"]);
    let twin = br#"{"amount": 2, "customer": {"id": "D", "level": 5}}"#;
    assert_eq!(order().key(&key, &payload), json.key(&key, twin));
}

#[test]
fn of_a_oneof_the_last_member_counts() {
    // card, then iban; and a payer before both.
    let payload = hex("5203 0a0143 42 03313131 4a03 444531");
    let json = Under::new(SchemaFormat::json());
    let key = Key::json(["iban"]);
    assert_eq!(
        order().key(&key, &payload),
        json.key(&key, br#"{"iban": "DE1"}"#)
    );
    for gone in ["card", "payer", "payer.id"] {
        assert_eq!(
            order()
                .key(&Key::json([gone]), &payload)
                .unwrap_err()
                .kind(),
            "missing_field",
            "{gone}"
        );
    }
    order().is_twin(&payload, r#"{"iban": "DE1"}"#, &["iban"]);
}

#[test]
fn well_known_types_have_the_keys_of_their_json() {
    let at = hex("5a0b 08a0a5c8b106 1080e59a77");
    order().is_twin(&at, r#"{"at": "2024-05-01T10:00:00.250Z"}"#, &["at"]);
    let took = hex("6208 0801 1080cab5ee01");
    order().is_twin(&took, r#"{"took": "1.500s"}"#, &["took"]);
    order().is_twin(&hex("6a03 0a016e"), r#"{"note": "n"}"#, &["note"]);
    order().is_twin(&hex("6a00 0a0141"), r#"{"note": "", "orderId": "A"}"#, &[]);
    // {"a": 2.5, "l": [true, null]}
    let extra = hex("721f 0a0e 0a0161 1209 110000000000000440 0a0d 0a016c 1208 3206 0a022001 0a00");
    order().is_twin(
        &extra,
        r#"{"extra": {"a": 2.5, "l": [true, null]}}"#,
        &["extra.a", "extra.l", "extra.l.0"],
    );
}

#[test]
fn any_of_a_known_type_is_that_message() {
    let url = b"type.googleapis.com/shop.Customer";
    let mut any = vec![0x0A, u8::try_from(url.len()).unwrap()];
    any.extend_from_slice(url);
    any.extend_from_slice(&hex("1204 0a024331"));
    let mut payload = vec![0x7A, u8::try_from(any.len()).unwrap()];
    payload.extend_from_slice(&any);
    let twin = r#"{"any": {"@type": "type.googleapis.com/shop.Customer", "id": "C1"}}"#;
    order().is_twin(&payload, twin, &["any.id", "any.@type", "any"]);
    let unknown = hex("7a08 0a03782f79 12 0101");
    order().is_twin(
        &unknown,
        r#"{"any": {"@type": "x/y", "value": "AQ=="}}"#,
        &["any.value"],
    );
}

#[test]
fn unknown_fields_count_only_for_whole_payloads() {
    let payload = hex("0a03412d37 a20601 78");
    let key = Key::json(["order_id"]);
    assert_eq!(
        order().key(&key, &payload),
        order().key(&key, &hex("0a03412d37"))
    );
    let error = order().key(&Key::payload(), &payload).unwrap_err();
    assert!(
        error.to_string().contains("the schema does not have"),
        "{error}"
    );
}

#[test]
fn malformed_messages_are_bad_payloads() {
    let key = Key::json([Field::path("order_id")]);
    for payload in [
        "0a",
        "0a0541",
        "00",
        "0e",
        "0f",
        "08",
        "0801",
        "0a0141 ffffffffffffffffffffff",
        "2b 1001",
        "2b 34",
    ] {
        let error = order().key(&key, &hex(payload)).unwrap_err();
        assert_eq!(error.kind(), "malformed_payload", "{payload}: {error}");
    }
    assert_eq!(
        order().key(&key, &hex("0a01ff")).unwrap_err().kind(),
        "not_utf8"
    );
    let groups = hex("2b").repeat(1_000_000);
    assert_eq!(order().key(&key, &groups).unwrap_err().kind(), "too_deep");
}

#[test]
fn a_schema_that_makes_no_sense_is_refused() {
    fn error(source: &str, message: Option<&str>) -> String {
        SchemaFormat::protobuf(source, message)
            .unwrap_err()
            .to_string()
    }
    assert!(error("message {", None).contains("compile"));
    assert!(error(SHOP, None).contains("name the one"));
    assert!(error(SHOP, Some("Order")).contains("full name"));
    assert!(
        SchemaFormat::protobuf("syntax = \"proto3\"; message A { int32 a = 1; }", None).is_ok()
    );
    assert!(
        error(
            "syntax = \"proto3\"; import \"gone.proto\"; message A {}",
            None
        )
        .contains("gone.proto")
    );
}
