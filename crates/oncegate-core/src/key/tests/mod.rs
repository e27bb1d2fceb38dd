//! Tests that the table of test vectors in `vectors/keys.json` cannot express.

mod parts;
mod presets;
mod properties;
mod specification;

use std::sync::Arc;

use super::*;

fn scope() -> Scope {
    Scope::new("billing").unwrap()
}

fn compiled(spec: &str) -> CompiledKey {
    spec.parse::<Key>().unwrap().compile(&scope()).unwrap()
}

fn derive(spec: &str, payload: impl AsRef<[u8]>) -> Result<StoreKey, KeyError> {
    compiled(spec).derive("orders", &KeyInput::payload(&payload))
}

/// With `ONCEGATE_BLESS_VECTORS=1`, rewrites the file. Use it only after a change of the format.
// invariant: shared-record
#[test]
fn published_vectors_hold() {
    if std::env::var_os("ONCEGATE_BLESS_VECTORS").is_some() {
        bless();
    } else {
        let count = vectors::check().unwrap_or_else(|wrong| panic!("{}", wrong.join("\n")));
        assert!(count > 200, "{count}");
    }
}

fn bless() {
    let mut file: vectors::File = serde_json::from_str(vectors::JSON).unwrap();
    for vector in &mut file.vectors {
        vector.expected = vector.answer();
    }
    let lines: Vec<String> = file
        .vectors
        .iter()
        .map(|vector| serde_json::to_string(vector).unwrap())
        .collect();
    let about = serde_json::to_string(&file.about).unwrap();
    let text = format!(
        "{{\"about\":{about},\n\"format\":{},\n\"vectors\":[\n{}\n]}}\n",
        file.format,
        lines.join(",\n")
    );
    std::fs::write(
        concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/keys.json"),
        text,
    )
    .unwrap();
}

#[test]
fn the_readme_key_is_within_thirty_bytes() {
    let key = derive("id", r#"{"id":1}"#).unwrap();
    assert_eq!(key.as_str().len(), 30, "{key}");
    assert_eq!(key.scope(), "billing");
}

#[test]
fn errors_say_where_and_what_to_change() {
    #[track_caller]
    fn check(spec: &str, payload: &str, expected: &str) {
        let error = derive(spec, payload).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    check(
        "customer.id",
        r#"{"customer":{}}"#,
        "`customer.id` is missing in the payload; correct the path",
    );
    check("a.b", r#"{"a":{"b":null}}"#, "`a.b` is null");
    check(
        "id:trim",
        r#"{"id":7}"#,
        "`id`: normaliser `trim` needs a string",
    );
    check(
        "id",
        r#"{"id":1,}"#,
        "byte 8: the name of a member must be a string",
    );
    check("id", r#"{"id":1 "x":2}"#, "byte 8: a comma or `}`");
    check(
        "id",
        r#"{"id":1,"x":{"y":0,"\u0079":0}}"#,
        "byte 19, nesting level 2",
    );
    check(
        "id",
        &"[".repeat(10_000),
        "deeper than 64 levels at byte 64",
    );
    check(
        "id",
        r#"{"id":"\ud800"}"#,
        "byte 7: not four hex digits, or half of a surrogate pair",
    );
    check("id", "{\u{feff}}", "byte 1: the name of a member");
    check("id", "{\0\"\0}\0", "payload is UTF-16");
    check(
        "at:timestamp-seconds",
        r#"{"at":"2024-05-01T10:00"}"#,
        "a local time is no instant",
    );
    check(
        "at:timestamp-seconds",
        r#"{"at":1714557600}"#,
        "for numbers put `epoch-seconds`",
    );
    check(
        "at:epoch-seconds:timestamp-seconds",
        r#"{"at":1714557600000}"#,
        "the unit of the count?",
    );
    let error = compiled("id")
        .derive("orders", &KeyInput::empty())
        .unwrap_err()
        .to_string();
    assert!(error.contains("tombstone"), "{error}");
}

// invariant: payload-in-keys
#[test]
fn nothing_of_a_payload_gets_into_errors_or_debug() {
    const CANARY: &str = "c4n4ry";
    let payloads = [
        format!(r#"{{"id":"{CANARY}","id":"{CANARY}"}}"#),
        format!(r#"{{"{CANARY}":1,"{CANARY}":2}}"#),
        format!(r#"{{"id":"{CANARY}""#),
        format!(r#"{{"id":{CANARY}}}"#),
        format!(r#"{{"x":"{CANARY}"}}"#),
        format!(r#"{{"id":"{CANARY}"}}"#),
        format!(r#"{{"id":["{CANARY}"]}}"#),
        format!("\"{CANARY}\u{1}\""),
        CANARY.to_owned(),
    ];
    for payload in &payloads {
        for spec in [
            "id:decimal",
            "id:timestamp-days",
            "id:trim",
            "id",
            "payload",
        ] {
            let headers = [("h", CANARY.as_bytes()), ("h", CANARY.as_bytes())];
            let input = KeyInput::payload(payload)
                .with_headers(&headers)
                .with_message_id(CANARY);
            let derived = compiled(spec).derive("orders", &input);
            let explained = compiled(spec).explain("orders", &input);
            let display = derived
                .as_ref()
                .map_or_else(ToString::to_string, ToString::to_string);
            let shown = format!(
                "{derived:?} {display} {explained:?} {input:?} {:?}",
                input.header("h")
            );
            assert!(!shown.contains(CANARY), "{shown}");
        }
    }
}

#[test]
fn a_payload_may_be_large_wide_and_deep_within_limits() {
    let megabyte = format!(r#"{{"text":"{}","id":1}}"#, "x".repeat(1 << 20));
    assert!(derive("id", &megabyte).is_ok());
    assert!(derive("payload", &megabyte).is_ok());

    let mut wide = String::from("{");
    for n in 0..1_000_000 {
        wide.push_str(&format!("\"k{n}\":0,"));
    }
    let roomy = r#"{"json":["id"],"max_payload_bytes":100000000}"#;
    assert!(derive(roomy, format!("{wide}\"id\":1}}")).is_ok());
    let twice = derive(roomy, format!("{wide}\"id\":1,\"k500000\":1}}")).unwrap_err();
    assert_eq!(twice.kind(), "duplicate_json_key");

    let limit = DEFAULT_MAX_PAYLOAD_BYTES;
    let text = String::from(r#"{"id":1}"#);
    let text = text.clone() + &" ".repeat(limit - text.len());
    assert!(derive("id", &text).is_ok());
    let error = derive("id", text + " ").unwrap_err();
    assert_eq!(
        error,
        KeyError::TooLarge {
            what: "payload".to_owned(),
            bytes: limit + 1,
            limit
        }
    );
}

// invariant: panic-in-keys
#[test]
fn nesting_of_ten_thousand_is_an_error_on_a_small_stack() {
    std::thread::Builder::new()
        .stack_size(256 * 1024)
        .spawn(|| {
            for piece in ["[", "{\"a\":", "[{\"a\":"] {
                for spec in ["id", "payload", "a.a"] {
                    let error = derive(spec, piece.repeat(10_000)).unwrap_err();
                    assert_eq!(error.kind(), "too_deep");
                }
            }
            let deep = format!("{}1{}", "[{\"a\":".repeat(32), "}]".repeat(32));
            assert!(derive("payload", &deep).is_ok());
            assert!(
                compiled("payload")
                    .explain("orders", &KeyInput::payload(&deep))
                    .is_ok()
            );
        })
        .unwrap()
        .join()
        .unwrap();
}

#[test]
fn an_explanation_is_decoded_from_what_is_hashed() {
    let key: Key =
        r#"{"json":["id",{"path":"at","as":"timestamp-days"},"tags"],"tenant":{"header":"org"}}"#
            .parse()
            .unwrap();
    let key = key.compile(&scope()).unwrap();
    let headers = [("org", b"acme\xff".as_slice())];
    let payload = r#"{"tags":{"b":[1.50,null],"a":"x\ty"},"id":"A-7","at":"2026-11-21T10:00:00Z"}"#;
    let input = KeyInput::payload(payload).with_headers(&headers);
    let explanation = key.explain("orders", &input).unwrap();
    assert_eq!(
        explanation.store_key(),
        &key.derive("orders", &input).unwrap()
    );
    let expected = r#"format     1
scope      billing
route      "orders"
tenant     b"acme\xff"
field      at = 2026-11-21 in UTC (20778d)
field      id = "A-7"
field      tags = {"a": "x\ty", "b": [15e-1, null]}
"#;
    let text = explanation.to_string();
    assert!(text.starts_with(expected), "{text}");
    assert!(
        text.ends_with(&format!("store key  {}", explanation.store_key())),
        "{text}"
    );
}

#[test]
fn a_custom_key_counts_the_boundaries_of_its_parts() {
    fn parts(parts: &'static [&'static str]) -> Result<StoreKey, KeyError> {
        let key = Key::custom(
            "parts",
            1,
            move |_: &dyn KeySource, key: &mut KeyParts<'_>| {
                for part in parts {
                    key.push(part);
                }
                Ok(())
            },
        );
        key.max_payload_bytes(64)
            .compile(&scope())
            .unwrap()
            .derive("orders", &KeyInput::empty())
    }
    let keys = [
        parts(&["ab", "c"]),
        parts(&["a", "bc"]),
        parts(&["abc"]),
        parts(&["abc", ""]),
    ];
    for (n, key) in keys.iter().enumerate() {
        assert!(
            keys.iter()
                .skip(n + 1)
                .all(|other| other.as_ref().unwrap() != key.as_ref().unwrap())
        );
    }
    assert_eq!(parts(&[]).unwrap_err().kind(), "blank");
    assert_eq!(parts(&["", " "]).unwrap_err().kind(), "blank");
    assert_eq!(parts(&["x"; 100]).unwrap_err().kind(), "too_large");
    assert_eq!(
        parts(&["0123456789012345678901234567890123456789012345678901234567890"])
            .unwrap_err()
            .kind(),
        "too_large"
    );

    let refusing = Key::custom("no", 1, |_: &dyn KeySource, _: &mut KeyParts<'_>| {
        Err("there is no column 3")
    });
    let error = refusing
        .compile(&scope())
        .unwrap()
        .derive("orders", &KeyInput::empty())
        .unwrap_err();
    assert_eq!(error.to_string(), "custom key `no`: there is no column 3");
}

#[test]
fn a_custom_key_may_derive_another_one_inside() {
    let inner = Arc::new(compiled("id"));
    let same = Arc::clone(&inner);
    let key = Key::custom(
        "outer",
        1,
        move |message: &dyn KeySource, key: &mut KeyParts<'_>| {
            key.push("before");
            key.push(
                same.derive("orders", message)
                    .map_err(|_| "no id")?
                    .as_str(),
            );
            Ok(())
        },
    );
    let key = key
        .tenant(TenantSource::json("org"))
        .compile(&scope())
        .unwrap();
    let one = key
        .derive("orders", &KeyInput::payload(r#"{"id":1,"org":"a"}"#))
        .unwrap();
    let other = key
        .derive("orders", &KeyInput::payload(r#"{"id":2,"org":"a"}"#))
        .unwrap();
    assert_ne!(one, other);
    assert_eq!(
        one,
        key.derive("orders", &KeyInput::payload(r#"{"org":"a","id":1.0}"#))
            .unwrap()
    );
}

#[test]
fn store_keys_and_digests_have_one_text_each() {
    let key = derive("id", r#"{"id":1}"#).unwrap();
    assert_eq!(key.to_string().parse(), Ok(key.clone()));
    assert_eq!(
        serde_json::from_str::<StoreKey>(&serde_json::to_string(&key).unwrap()).unwrap(),
        key
    );
    for bytes in [[0; 16], [0xFF; 16], *key.digest().as_bytes()] {
        let digest = Digest::from_bytes(bytes);
        assert_eq!(digest.to_string().len(), Digest::TEXT_LEN);
        assert_eq!(digest.to_string().parse(), Ok(digest));
    }
    assert_eq!(
        Digest::from_bytes([0xFF; 16]).to_string(),
        "_____________________w"
    );
    let longest = StoreKey::new(&Scope::new("s".repeat(64)).unwrap(), key.digest());
    assert_eq!(longest.as_str().len(), StoreKey::MAX_BYTES);
    for wrong in [
        "",
        "billing",
        "billing:",
        "billing:AAAAAAAAAAAAAAAAAAAAAB",
        "billing:AAAAAAAAAAAAAAAAAAAAA",
        "billing:AAAAAAAAAAAAAAAAAAAAA==",
        "bil ling:AAAAAAAAAAAAAAAAAAAAAA",
        "billing:AAAAAAAAAAAAAAAAAAAA+A",
    ] {
        assert!(wrong.parse::<StoreKey>().is_err(), "{wrong}");
    }
}

#[test]
fn a_fingerprint_sees_all_but_the_key_and_the_exceptions() {
    let key: Key = r#"{"json":["id",{"path":"email","as":"lowercase"}],"tenant":{"json":"org"}}"#
        .parse()
        .unwrap();
    let spec = FingerprintSpec::payload()
        .except(["sent_at"])
        .compile(&key)
        .unwrap();
    let of = |payload: &str| spec.derive(&KeyInput::payload(payload)).unwrap();
    let first = of(r#"{"id":1,"email":"A@x","org":1,"sent_at":1,"amount":10}"#);
    assert_eq!(
        first,
        of(r#"{"amount":1e1,"sent_at":2,"org":1,"email":"a@X","id":1.0}"#)
    );
    assert_ne!(
        first,
        of(r#"{"id":1,"email":"A@x","org":1,"sent_at":1,"amount":11}"#)
    );
    assert_ne!(
        first,
        of(r#"{"id":1,"email":"A@x","org":1,"sent_at":1,"amount":"10"}"#)
    );
    assert_ne!(first.specification(), 0);
    let other = FingerprintSpec::payload().compile(&key).unwrap();
    let other = other.derive(&KeyInput::payload("{}")).unwrap();
    assert_ne!(first.specification(), other.specification());
    assert_eq!(Fingerprint::from_bytes(*first.as_bytes()), first);

    let raw = FingerprintSpec::raw().compile(&Key::message_key()).unwrap();
    let no_text = KeyInput::payload(b"\xff");
    assert_eq!(raw.derive(&no_text).unwrap(), raw.derive(&no_text).unwrap());
    assert_ne!(
        raw.derive(&KeyInput::payload(b"")).unwrap(),
        raw.derive(&KeyInput::empty()).unwrap()
    );
}
