//! Random documents, compared with an independent implementation of formats and keys.

use std::path::Path;
use std::sync::Arc;

use oncegate::core::key::{Key, KeyInput, Scope};
use oncegate::schema::{Encoding, SchemaFormat};
use serde::Deserialize;

use super::python;

const COUNT: usize = 10_000;

#[derive(Deserialize)]
struct Line {
    schema: String,
    documents: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    payload: String,
    key: serde_json::Value,
    result: String,
}

fn bytes(digits: &str) -> Vec<u8> {
    let pairs = digits
        .as_bytes()
        .chunks(2)
        .map(|pair| std::str::from_utf8(pair).unwrap());
    pairs
        .map(|pair| u8::from_str_radix(pair, 16).unwrap())
        .collect()
}

async fn compare(format: &str, read: impl Fn(&str) -> SchemaFormat) {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/oncegate-core/vectors");
    let folder = tempfile::tempdir().unwrap();
    let seed = fastrand::u32(..).to_string();
    let count = COUNT.to_string();
    let vectors = vectors.to_str().unwrap();
    let folder = folder.path().to_str().unwrap();
    let lines = python("documents.py", &[format, &count, &seed, vectors, folder]).await;
    let scope = Scope::new("billing").unwrap();
    let mut compared = 0;
    for line in lines {
        let line: Line = serde_json::from_str(&line).unwrap();
        let format = Arc::new(read(&line.schema));
        for case in line.documents {
            let key: Key = serde_json::from_value(case.key.clone()).unwrap();
            let key = key
                .format(Arc::clone(&format) as Arc<_>)
                .compile(&scope)
                .unwrap();
            let payload = bytes(&case.payload);
            let ours = match key.derive("orders", &KeyInput::payload(&payload)) {
                Ok(key) => key.to_string(),
                Err(error) => error.kind().to_owned(),
            };
            assert_eq!(
                ours,
                case.result,
                "seed {seed}: {} of {} by {}: {:?}",
                case.key,
                case.payload,
                line.schema,
                key.document(&KeyInput::payload(&payload))
                    .map(|text| String::from_utf8_lossy(&text).into_owned())
            );
            compared += 1;
        }
    }
    assert_eq!(compared, COUNT);
}

// invariant: shared-record
#[tokio::test]
async fn avro_documents_have_the_keys_of_their_json() {
    compare("avro", |schema| SchemaFormat::avro(schema).unwrap()).await;
}

// invariant: shared-record
#[tokio::test]
async fn protobuf_documents_have_the_keys_of_their_json() {
    compare("protobuf", |source| {
        SchemaFormat::protobuf(source, Some("shop.Order")).unwrap()
    })
    .await;
}

#[tokio::test]
async fn compressed_documents_have_the_keys_of_their_json() {
    compare("json", |_| SchemaFormat::json().encodings([Encoding::Gzip])).await;
}
