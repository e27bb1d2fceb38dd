//! Compares deriving a key from a payload with only parsing the payload, and payloads of Avro and
//! Protobuf with JSON.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use oncegate::schema::SchemaFormat;
use oncegate_core::key::{CompiledKey, Key, KeyInput, Scope, StoreKey};
use serde_json::Value;

use crate::Benchmark;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::messages::{PAYLOAD_BYTES, ROUTE, key, payload};
use crate::rounds::Plan;

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "key",
    question: "a key of two fields out of 200 bytes of JSON, Avro and Protobuf, against serde_json's Value",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

const AVRO: &str = r#"{"type": "record", "name": "Order", "fields": [
    {"name": "order_id", "type": "string"},
    {"name": "customer", "type": {"type": "record", "name": "Customer", "fields": [
        {"name": "id", "type": "int"}, {"name": "country", "type": "string"}]}},
    {"name": "amount", "type": "string"},
    {"name": "currency", "type": "string"},
    {"name": "items", "type": {"type": "array", "items": {"type": "record", "name": "Item", "fields": [
        {"name": "sku", "type": "string"}, {"name": "count", "type": "int"}]}}},
    {"name": "sent_at", "type": "long"},
    {"name": "note", "type": "string"}]}"#;

const PROTOBUF: &str = r#"
syntax = "proto3";
message Order {
  message Customer { int32 id = 1; string country = 2; }
  message Item { string sku = 1; int32 count = 2; }
  string order_id = 1;
  Customer customer = 2;
  string amount = 3;
  string currency = 4;
  repeated Item items = 5;
  int64 sent_at = 6;
  string note = 7;
}
"#;

async fn run(plan: &Plan) -> Vec<Figure> {
    let json = compiled(key());
    let avro = SchemaFormat::avro(AVRO).expect("a valid schema");
    let avro = compiled(key().format(Arc::new(avro)));
    let protobuf = SchemaFormat::protobuf(PROTOBUF, Some("Order")).expect("a valid schema");
    let protobuf = compiled(key().format(Arc::new(protobuf)));
    let payloads: Vec<Bytes> = (0..1_000).map(payload).collect();
    let of_avro: Vec<Bytes> = (0..1_000).map(|n| in_avro(n).into()).collect();
    let of_protobuf: Vec<Bytes> = (0..1_000).map(|n| in_protobuf(n).into()).collect();
    for ((twin, in_avro), in_protobuf) in payloads.iter().zip(&of_avro).zip(&of_protobuf) {
        let wanted = derived(&json, twin);
        assert_eq!(
            (derived(&avro, in_avro), derived(&protobuf, in_protobuf)),
            (wanted.clone(), wanted)
        );
    }
    let times = plan.size(500, 5);
    let mut rounds = plan.rounds(
        "key",
        &[
            "two fields",
            "serde_json::Value",
            "two fields, Avro",
            "two fields, Protobuf",
        ],
    );
    while rounds.next() {
        rounds
            .measure("two fields", async {
                nanos(&payloads, times, |payload| derive(&json, payload))
            })
            .await;
        rounds
            .measure("serde_json::Value", async {
                nanos(&payloads, times, parse)
            })
            .await;
        rounds
            .measure("two fields, Avro", async {
                nanos(&of_avro, times, |payload| derive(&avro, payload))
            })
            .await;
        let of_protobuf =
            async { nanos(&of_protobuf, times, |payload| derive(&protobuf, payload)) };
        rounds.measure("two fields, Protobuf", of_protobuf).await;
    }
    let unit = Unit::NanosPerMessage;
    vec![
        rounds.against("two fields", unit, "serde_json::Value"),
        rounds
            .against("two fields, Avro", unit, "two fields")
            .target(Bound::RatioAtMost, 1.5),
        rounds
            .against("two fields, Protobuf", unit, "two fields")
            .target(Bound::RatioAtMost, 1.5),
    ]
}

fn compiled(key: Key) -> CompiledKey {
    key.compile(&Scope::new("billing").expect("a valid scope"))
        .expect("a valid key")
}

fn derived(key: &CompiledKey, payload: &Bytes) -> StoreKey {
    key.derive(ROUTE, &KeyInput::payload(payload))
        .expect("a key")
}

/// The texts of the `n`th payload: order, customer's country, amount, currency and article.
fn texts(n: usize) -> [String; 5] {
    let of_customer = format!("K-{:06}", n % 1_000);
    [
        format!("A-{n:012}"),
        "SE".to_owned(),
        format!("{}.50", n % 500),
        "EUR".to_owned(),
        of_customer,
    ]
}

const SENT_AT: u64 = 1_767_225_600;

/// The `n`th payload in Avro's binary encoding, with a note that fills it up.
fn in_avro(n: usize) -> Vec<u8> {
    let [order, country, amount, currency, article] = texts(n);
    let mut bytes = Vec::new();
    avro_text(&mut bytes, &order);
    varint(&mut bytes, 2 * (n as u64 % 1_000));
    for part in [&country, &amount, &currency] {
        avro_text(&mut bytes, part);
    }
    // One block of one item, and the end.
    varint(&mut bytes, 2);
    avro_text(&mut bytes, &article);
    varint(&mut bytes, 2 * 2);
    varint(&mut bytes, 0);
    varint(&mut bytes, 2 * SENT_AT);
    let rest = PAYLOAD_BYTES - bytes.len() - 2;
    avro_text(&mut bytes, &".".repeat(rest));
    bytes
}

fn avro_text(bytes: &mut Vec<u8>, text: &str) {
    varint(bytes, 2 * text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
}

/// The same in Protobuf.
fn in_protobuf(n: usize) -> Vec<u8> {
    let [order, country, amount, currency, article] = texts(n);
    let mut customer = Vec::new();
    let mut item = Vec::new();
    let mut bytes = Vec::new();
    number(&mut customer, 1, n as u64 % 1_000);
    sized(&mut customer, 2, country.as_bytes());
    sized(&mut item, 1, article.as_bytes());
    number(&mut item, 2, 2);
    sized(&mut bytes, 1, order.as_bytes());
    sized(&mut bytes, 2, &customer);
    sized(&mut bytes, 3, amount.as_bytes());
    sized(&mut bytes, 4, currency.as_bytes());
    sized(&mut bytes, 5, &item);
    number(&mut bytes, 6, SENT_AT);
    let rest = PAYLOAD_BYTES - bytes.len() - 3;
    sized(&mut bytes, 7, &vec![b'.'; rest]);
    bytes
}

fn number(bytes: &mut Vec<u8>, field: u64, value: u64) {
    varint(bytes, field << 3);
    varint(bytes, value);
}

fn sized(bytes: &mut Vec<u8>, field: u64, content: &[u8]) {
    varint(bytes, field << 3 | 2);
    varint(bytes, content.len() as u64);
    bytes.extend_from_slice(content);
}

fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn derive(key: &CompiledKey, payload: &Bytes) {
    black_box(derived(key, payload));
}

fn parse(payload: &Bytes) {
    black_box(serde_json::from_slice::<Value>(payload).expect("valid JSON"));
}

fn nanos(payloads: &[Bytes], times: usize, work: impl Fn(&Bytes)) -> f64 {
    let started = Instant::now();
    for _ in 0..times {
        payloads.iter().for_each(&work);
    }
    started.elapsed().as_secs_f64() * 1e9 / (times * payloads.len()) as f64
}
