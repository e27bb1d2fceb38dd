//! Random and damaged schemas: errors, and never a panic or an end of the process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::compiled;
use oncegate_core::key::{Key, KeyInput};
use oncegate_schema::SchemaFormat;

const ROUNDS: usize = 1_500;
/// The longest time for a schema of a few hundred bytes, in a build without optimisation.
const LONGEST: Duration = Duration::from_secs(5);

const PROTO: &str = r#"syntax = "proto3"; package p; import "google/protobuf/any.proto"; import "google/protobuf/descriptor.proto";
import public "confluent/meta.proto";
/* a comment { */ option java_package = "a'\x41{"; // }
message O { O o = 1; repeated O list = 2; } extend google.protobuf.MessageOptions { O oo = 50000; }
message M { option (oo) = { o { list { } list < > o: { } } }; string id = 1 [deprecated = true, json_name = "Id"];
  oneof it { int32 a = 2; M m = 3; } map<string, M> by_id = 4; enum E { option allow_alias = true; A = 0; B = 0; }
  repeated E es = 5; google.protobuf.Any any = 6; reserved 7, 9 to 11; reserved "x"; optional sint64 s = 12; }"#;

const AVRO: &str = r#"{"type": "record", "name": "M", "namespace": "p", "aliases": ["N"], "fields": [
    {"name": "id", "aliases": ["key"], "type": ["null", "string"], "default": null},
    {"name": "m", "type": {"type": "array", "items": ["null", "M", {"type": "map", "values": "p.M"}]}, "default": []},
    {"name": "f", "type": {"type": "fixed", "name": "F", "size": 3, "logicalType": "decimal", "precision": 6, "scale": 2}, "default": "abc"},
    {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}, "default": "A"},
    {"name": "g", "type": "F"}, {"name": "t", "type": {"type": "long", "logicalType": "timestamp-micros"}}]}"#;

fn mutant(text: &str, random: &mut fastrand::Rng) -> String {
    const PIECES: [&str; 24] = [
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        "(",
        ")",
        "\"",
        "'",
        "\\",
        "/*",
        "*/",
        "//",
        "#",
        "\n",
        "0",
        "-1",
        "99999999999",
        ".",
        ",",
        "o",
        "M",
        "\u{e9}",
    ];
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..random.usize(1..5) {
        let at = random.usize(..=bytes.len());
        let end = (at + random.usize(..20)).min(bytes.len());
        match random.u8(..4) {
            0 => drop(bytes.drain(at..end)),
            1 => {
                let copied = bytes[at..end].to_vec();
                let to = random.usize(..=bytes.len());
                bytes.splice(to..to, copied);
            }
            _ => {
                let piece = PIECES[random.usize(..PIECES.len())].repeat(random.usize(1..4));
                bytes.splice(at..at, piece.into_bytes());
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Compiles mutants of a schema, and derives from random bytes with those that are schemas.
fn fuzz(text: &str, compile: impl Fn(&str) -> Option<SchemaFormat>) {
    let seed = fastrand::u64(..);
    // Shown when the test fails, by a panic too.
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    assert!(
        compile(text).is_some(),
        "it is a schema before it is damaged"
    );
    let mut schemas = 0;
    for _ in 0..ROUNDS {
        let mutant = mutant(text, &mut random);
        let begun = Instant::now();
        if let Some(format) = compile(&mutant) {
            schemas += 1;
            let format = Arc::new(format);
            for key in [
                r#"{"parts": ["id", "m", {"path": "m.id", "optional": true, "default": true}]}"#,
                r#"{"payload": {"except": ["m.id", "by_id.x", "key"]}}"#,
            ] {
                let key: Key = key.parse().unwrap();
                let key = compiled(&key.format(Arc::clone(&format) as Arc<_>));
                for _ in 0..20 {
                    let length = random.usize(..40);
                    let payload: Vec<u8> = std::iter::repeat_with(|| random.u8(..24))
                        .take(length)
                        .collect();
                    _ = key.derive("orders", &KeyInput::payload(&payload));
                }
            }
        }
        assert!(begun.elapsed() < LONGEST, "seed {seed}: {mutant}");
    }
    assert!(schemas > 0, "seed {seed}: nothing but errors");
}

// invariant: panic-in-keys
#[test]
fn no_schema_breaks_the_protobuf_compiler() {
    fuzz(PROTO, |text| SchemaFormat::protobuf(text, Some("p.M")).ok());
}

// invariant: panic-in-keys
#[test]
fn no_schema_breaks_the_avro_parser() {
    let reader = AVRO.replace("\"id\"", "\"number\"");
    fuzz(AVRO, |text| {
        let format = SchemaFormat::avro(text).ok()?;
        format.reader(&reader).ok()
    });
    fuzz(AVRO, |text| {
        SchemaFormat::avro(AVRO).ok()?.reader(text).ok()
    });
}
