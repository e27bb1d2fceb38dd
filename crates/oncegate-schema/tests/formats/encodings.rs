//! Compressed and encoded payloads, and payloads that carry their document in a form that is not
//! set.

use std::io::Write as _;
use std::sync::Arc;

use crate::common::{Under, compiled};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use flate2::Compression;
use flate2::write::GzEncoder;
use oncegate_core::key::{Key, KeyError, KeyInput, StoreKey};
use oncegate_schema::{Encoding, SchemaFormat};

const ORDER: &[u8] = br#"{"order_id": 7, "note": "n"}"#;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ::zstd::stream::encode_all(bytes, 3).unwrap()
}

fn under(encodings: &[Encoding]) -> Under {
    Under::new(SchemaFormat::json().encodings(encodings.iter().copied()))
}

#[test]
fn encoded_payloads_have_the_key_of_their_content() {
    let key = Key::json(["order_id"]);
    let plain = Under::new(SchemaFormat::json()).key(&key, ORDER);
    assert!(plain.is_ok());
    let base64 = |bytes: &[u8]| STANDARD.encode(bytes).into_bytes();
    assert_eq!(under(&[Encoding::Gzip]).key(&key, &gzip(ORDER)), plain);
    assert_eq!(under(&[Encoding::Zstd]).key(&key, &zstd(ORDER)), plain);
    assert_eq!(under(&[Encoding::Base64]).key(&key, &base64(ORDER)), plain);
    assert_eq!(
        under(&[Encoding::Base64]).key(&key, URL_SAFE_NO_PAD.encode(ORDER).as_bytes()),
        plain
    );
    assert_eq!(
        under(&[Encoding::Base64, Encoding::Gzip]).key(&key, &base64(&gzip(ORDER))),
        plain
    );
    let two = [gzip(b"{\"order_id\": 7,"), gzip(b"\"note\": 1}")].concat();
    assert_eq!(under(&[Encoding::Gzip]).key(&key, &two), plain);
}

fn by_header(name: &str, payload: &[u8]) -> Result<StoreKey, KeyError> {
    let format = Arc::new(SchemaFormat::json().encoding_header("content-encoding"));
    let headers = [("content-encoding", name.as_bytes())];
    let input = KeyInput::payload(payload).with_headers(&headers);
    compiled(&Key::json(["order_id"]).format(format)).derive("orders", &input)
}

#[test]
fn a_header_may_name_the_encodings() {
    let plain = by_header("identity", ORDER);
    assert!(plain.is_ok());
    // Celery and Spring name the character set, or the transfer.
    for name in ["utf-8", "UTF-8", "us-ascii", "binary", "8bit"] {
        assert_eq!(by_header(name, ORDER), plain, "{name}");
    }
    assert_eq!(by_header("gzip", &gzip(ORDER)), plain);
    assert_eq!(by_header("ZSTD", &zstd(ORDER)), plain);
    assert_eq!(by_header("gzip, zstd", &zstd(&gzip(ORDER))), plain);
    for (name, payload) in [
        ("br", ORDER),
        ("iso-8859-1", ORDER),
        ("gzip", ORDER),
        ("zstd", ORDER),
        ("base64", b"{"),
        ("gzip,gzip,gzip,gzip,gzip", ORDER),
    ] {
        assert_eq!(
            by_header(name, payload).unwrap_err().kind(),
            "bad_encoding",
            "{name}"
        );
    }
}

#[test]
fn bombs_are_refused_before_they_take_memory() {
    let limit = 64 * 1024;
    let key = Key::json(["order_id"]).max_payload_bytes(limit);
    // 256 MiB of blanks in 256 KiB of gzip would be over the limit as they come; in gzip twice they
    // are not.
    let blanks = vec![b' '; 64 * 1024 * 1024];
    let once = gzip(&blanks);
    for (encodings, payload) in [
        (vec![Encoding::Gzip], gzip(&vec![b' '; limit + 1])),
        (vec![Encoding::Gzip, Encoding::Gzip], gzip(&once)),
        (vec![Encoding::Zstd], zstd(&blanks)),
        (
            vec![Encoding::Base64],
            STANDARD.encode(vec![b' '; limit]).into_bytes(),
        ),
    ] {
        let error = under(&encodings).key(&key, &payload).unwrap_err();
        assert_eq!(error.kind(), "too_large", "{encodings:?}: {error}");
    }
    let just = [vec![b' '; limit - ORDER.len()], ORDER.to_vec()].concat();
    assert!(under(&[Encoding::Gzip]).key(&key, &gzip(&just)).is_ok());
}

#[test]
fn foreign_forms_are_named() {
    let pointer =
        br#"["software.amazon.payloadoffloading.PayloadS3Pointer",{"s3BucketName":"b","s3Key":"k"}]"#;
    let older =
        br#"["com.amazon.sqs.javamessaging.MessageS3Pointer",{"s3BucketName":"b","s3Key":"k"}]"#;
    let glue = [&[3, 0][..], &[7; 16], b"avro"].concat();
    let confluent = [&[0, 0, 0, 0, 17][..], b"\x02A"].concat();
    for (payload, what) in [
        (&pointer[..], "S3"),
        (older, "S3"),
        (&glue, "AWS Glue"),
        (&confluent, "Confluent"),
        (&gzip(ORDER), "gzip"),
        (&zstd(ORDER), "zstd"),
    ] {
        for key in [Key::json(["order_id"]), Key::payload()] {
            let plain = compiled(&key)
                .derive("orders", &KeyInput::payload(payload))
                .unwrap_err();
            assert_eq!(plain.kind(), "framed", "{plain}");
            assert!(plain.to_string().contains(what), "{plain}");
            assert_eq!(
                Under::new(SchemaFormat::json()).key(&key, payload),
                Err(plain)
            );
        }
    }
    for text in ["{\0\"\0a\0", "\0{\0\"\0a", "\0\0\0{\0\0\0\""] {
        let error = compiled(&Key::json(["a"]))
            .derive("orders", &KeyInput::payload(text))
            .unwrap_err();
        assert_eq!(error, KeyError::Utf16);
    }
}
