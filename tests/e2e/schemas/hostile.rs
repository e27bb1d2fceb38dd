//! Random and damaged bytes: errors, in bounded memory, and never a panic.

use std::path::Path;
use std::sync::Arc;

use oncegate::core::key::{CompiledKey, Key, KeyInput, Scope};
use oncegate::schema::{Encoding, Registry, SchemaFormat};
use oncegate_testkit::{Kafka, SchemaRegistry};
use rdkafka::Message as _;

use super::produce;

const ROUNDS: usize = 20_000;

const RECURSIVE: &str = r#"{"type": "record", "name": "Node", "fields": [
    {"name": "order_id", "type": ["null", "string", "long"]},
    {"name": "nodes", "type": {"type": "array", "items": "Node"}},
    {"name": "by_name", "type": {"type": "map", "values": ["null", "Node", {"type": "array", "items": "null"}]}},
    {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 1000, "scale": 500}}]}"#;

fn keys(format: &Arc<SchemaFormat>) -> [CompiledKey; 3] {
    let scope = Scope::new("billing").unwrap();
    let limit = 64 * 1024;
    [
        Key::json(["order_id"]),
        Key::json(["nodes.0.order_id", "by_name"]),
        Key::payload(),
    ]
    .map(|key| {
        key.max_payload_bytes(limit)
            .format(Arc::clone(format) as Arc<_>)
            .compile(&scope)
            .unwrap()
    })
}

/// Derives from random bytes, and from mutants of what has had a key.
fn fuzz(format: SchemaFormat, seeds: &[Vec<u8>]) {
    fuzz_prepared(&Arc::new(format), seeds);
}

/// The same with a format that knows the schemas of the seeds. They may be named in a header too.
fn fuzz_prepared(format: &Arc<SchemaFormat>, seeds: &[Vec<u8>]) {
    let keys = keys(format);
    let seed = fastrand::u64(..);
    // Shown when the test fails, by a panic in the decoder too.
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut corpus = seeds.to_vec();
    for _ in 0..ROUNDS {
        let mut payload = if random.u8(..4) == 0 || corpus.is_empty() {
            let length = random.usize(..64);
            std::iter::repeat_with(|| random.u8(..))
                .take(length)
                .collect()
        } else {
            corpus[random.usize(..corpus.len())].clone()
        };
        for _ in 0..random.usize(..4) {
            mutate(&mut payload, &mut random);
        }
        let mut has_key = false;
        for key in &keys {
            has_key |= key.derive("orders", &KeyInput::payload(&payload)).is_ok();
            let (name, rest) = payload.split_at(random.usize(..=payload.len().min(20)));
            let headers = [("__value_schema_id", name)];
            _ = key.derive("orders", &KeyInput::payload(rest).with_headers(&headers));
        }
        if has_key && corpus.len() < 500 {
            corpus.push(payload);
        }
    }
    assert!(
        corpus.len() > seeds.len(),
        "seed {seed}: nothing but errors"
    );
}

fn mutate(payload: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let at = random.usize(..=payload.len());
    match random.u8(..5) {
        0 => payload.truncate(at),
        1 => payload.insert(at, random.u8(..)),
        2 if at < payload.len() => payload[at] = random.u8(..),
        3 if at < payload.len() => payload[at] ^= 1 << random.u8(..8),
        _ => {
            let tail = payload[at..].to_vec();
            payload.extend(tail);
            payload.truncate(4_096);
        }
    }
}

#[test]
fn no_bytes_break_the_avro_decoder() {
    let order = b"\x02\x06A-7\x00\x00\x04\x04\xd2".to_vec();
    fuzz(SchemaFormat::avro(RECURSIVE).unwrap(), &[order]);
}

#[test]
fn no_bytes_break_the_protobuf_decoder() {
    let source =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas/shop.proto"));
    let order = b"\x0a\x03A-7\x10\x05\x2a\x03\x01\x02\x03\x32\x05\x0a\x01a\x10\x01\x5a\x02\x08\x01"
        .to_vec();
    fuzz(
        SchemaFormat::protobuf(&source.unwrap(), Some("shop.Order")).unwrap(),
        &[order],
    );
}

#[tokio::test]
async fn no_bytes_break_the_framings_of_a_registry() {
    let kafka = Kafka::shared().await;
    let registry = SchemaRegistry::start().await;
    let format = Arc::new(SchemaFormat::registry(Registry::new(&registry.url())).unwrap());
    let key = Key::payload().format(Arc::clone(&format) as Arc<_>);
    let key = key.compile(&Scope::new("billing").unwrap()).unwrap();
    let mut seeds = Vec::new();
    for kind in ["avro", "avro-evolved", "protobuf", "json"] {
        let topic = kafka.new_topic("hostile", 1).await;
        produce(&kafka, &registry.url(), &topic, kind, 0, 2).await;
        for message in kafka.read_all(&topic).await {
            let payload = message.payload().unwrap().to_vec();
            key.prepare(&KeyInput::payload(&payload)).await.unwrap();
            key.derive("orders", &KeyInput::payload(&payload)).unwrap();
            seeds.push(payload);
        }
    }
    fuzz_prepared(&format, &seeds);
}

#[test]
fn no_bytes_break_the_encodings() {
    let order = br#"{"order_id": 7}"#.to_vec();
    fuzz(SchemaFormat::json(), &[order]);
    fuzz(
        SchemaFormat::json().encodings([Encoding::Base64]),
        &[b"eyJvcmRlcl9pZCI6IDd9".to_vec()],
    );
    let zstd = b"\x28\xb5\x2f\xfd\x20\x0f\x79\0\0{\"order_id\": 7}".to_vec();
    fuzz(SchemaFormat::json().encodings([Encoding::Zstd]), &[zstd]);
    let gzip = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xabV\xca/JI-\x8a\xcfLQ\xb2R0\xaf\x05\x00\xf981h\x0f\x00\x00\x00";
    fuzz(
        SchemaFormat::json().encodings([Encoding::Gzip]),
        &[gzip.to_vec()],
    );
}
