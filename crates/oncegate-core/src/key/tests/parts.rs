//! Keys of several parts: that no two meanings share one, that the forms agree, and that a bomb is
//! refused.

use std::collections::HashMap;
use std::io::Write as _;

use base64::Engine as _;
use fastrand::Rng;

use super::super::*;
use super::{compiled, derive, scope};

#[test]
fn parts_from_rust_and_a_file_are_one() {
    #[track_caller]
    fn check(key: &Key, json: &str) {
        assert_eq!(&json.parse::<Key>().unwrap(), key, "{json}");
        assert_eq!(&key.to_string().parse::<Key>().unwrap(), key, "{key}");
        assert_eq!(
            &serde_json::from_str::<Key>(&serde_json::to_string(key).unwrap()).unwrap(),
            key
        );
    }
    check(
        &Key::parts([
            Part::from("order_id"),
            Place::path("coupon").optional(),
            Place::path("args").blank(Blank::Value),
            Place::header("x-region").then(Normaliser::Lowercase).into(),
            Place::message_key().into(),
            Place::message_id().optional().blank(Blank::Absent),
            Part::first_of([
                Place::path("after.id"),
                Place::path("before.id").then(Normaliser::Decimal),
            ]),
        ]),
        r#"{"parts":["order_id",{"path":"coupon","optional":true},{"path":"args","blank":"value"},
            {"header":"x-region","as":"lowercase"},{"message_key":{}},
            {"message_id":{},"optional":true,"blank":"absent"},
            {"first_of":["after.id",{"path":"before.id","as":["decimal"]}]}]}"#,
    );
    check(
        &Key::cases([
            KeyCase::when(When::is("type", "refund"), ["refund_id"]),
            KeyCase::when(When::is(Place::header("v"), 2), ["id"]),
            KeyCase::when(When::is("ok", true), ["id"]),
            KeyCase::when(When::present("body|json.id"), ["body|json.id"]),
            KeyCase::otherwise(["order_id"]),
        ]),
        r#"{"cases":[{"when":{"path":"type","is":"refund"},"parts":["refund_id"]},
            {"when":{"header":"v","is":2},"parts":["id"]},{"when":{"path":"ok","is":true},"parts":["id"]},
            {"when":{"path":"body|json.id"},"parts":["body|json.id"]},{"parts":["order_id"]}]}"#,
    );
}

#[test]
fn wrong_parts_are_refused_with_the_reason() {
    #[track_caller]
    fn check(spec: &str, expected: &str) {
        let error = spec.parse::<Key>().unwrap_err().to_string();
        assert!(error.contains(expected), "{spec}: {error}");
    }
    check(r#"{"parts":[]}"#, "names no field");
    check(r#"{"parts":["a","a"]}"#, "path `a` is given twice");
    check(
        r#"{"parts":[{"first_of":["a","a"]}]}"#,
        "path `a` is given twice",
    );
    check(r#"{"parts":[{"first_of":[]}]}"#, "names no field");
    check(
        r#"{"parts":[{"path":"a","header":"b"}]}"#,
        "this one names 2",
    );
    check(
        r#"{"parts":[{"first_of":["a"],"as":"trim"}]}"#,
        "has no place, `as` or `default` of its own",
    );
    check(
        r#"{"parts":[{"first_of":[{"path":"a","optional":true}]}]}"#,
        "do not belong here",
    );
    check(r#"{"parts":[{"path":"a","is":1}]}"#, "do not belong here");
    check(
        r#"{"parts":[{"path":"a","optionl":true}]}"#,
        "unknown field `optionl`",
    );
    check(r#"{"parts":["a|xml"]}"#, "only json, base64 and gzip");
    check(r#"{"parts":["a|gzip.b"]}"#, "only `|json` gives a document");
    check(r#"{"parts":["a|json..b"]}"#, "has an empty part");
    check(r#"{"cases":[]}"#, "there is none");
    check(
        r#"{"cases":[{"parts":["a"]},{"parts":["a"]}]}"#,
        "must be the last one",
    );
    check(
        r#"{"cases":[{"when":{"path":"a","is":1.5},"parts":["a"]}]}"#,
        "an integer or a boolean",
    );
    check(r#"{"parts":["a"],"json":["a"]}"#, "names 2");
}

#[test]
fn equal_parts_have_equal_descriptors() {
    let one: Key = r#"{"parts":["b",{"path":"a\\:c","as":"trim"}]}"#.parse().unwrap();
    let two: Key = r#"{"parts":[{"path":"a:c","as":["trim"]},{"path":"b"}]}"#
        .parse()
        .unwrap();
    let descriptor = Descriptor::new(&one, None).unwrap();
    assert_eq!(descriptor, Descriptor::new(&two, None).unwrap());
    let key = r#"{"parts":["b",{"path":"a:c","as":["trim"]}]}"#;
    assert_eq!(
        descriptor.as_str(),
        format!(r#"{{"format":1,"key":{key},"fingerprint":null}}"#)
    );
    let optional: Key = r#"{"parts":[{"path":"a:c","as":"trim","optional":true},"b"]}"#
        .parse()
        .unwrap();
    assert_ne!(descriptor, Descriptor::new(&optional, None).unwrap());
}

/// The value of a part as the specification means it; `None` for absent.
type Meaning = Option<String>;

/// A random message of three places, as a payload with a string of JSON inside and a header, and
/// its meaning.
fn random_message(rng: &mut Rng) -> (String, Option<String>, [Meaning; 3]) {
    const VALUES: [&str; 9] = [
        "1",
        "\"1\"",
        "\"\"",
        "\"a\"",
        "\"a\\u0000\"",
        "[]",
        "[1]",
        "{\"a\":1}",
        "null",
    ];
    let mut members = Vec::new();
    let mut meaning: [Meaning; 3] = [None, None, None];
    if rng.u8(..4) > 0 {
        let value = rng.choice(VALUES).unwrap();
        members.push(format!(r#""a":{value}"#));
        meaning[0] = Some(value.to_owned()).filter(|value| value != "null");
    }
    if rng.u8(..4) > 0 {
        let value = rng.choice(VALUES).unwrap();
        let space = " ".repeat(rng.usize(..3));
        let inner = serde_json::to_string(&format!(r#"{{"x":{space}{value}}}"#)).unwrap();
        members.push(format!(r#""b":{inner}"#));
        meaning[1] = Some(value.to_owned()).filter(|value| value != "null");
    }
    let header = rng.bool().then(|| {
        rng.choice(["1", "", "a", "u\0\0\0\0", "s\0\0\0\u{1}a"])
            .unwrap()
            .to_owned()
    });
    meaning[2] = header.clone().map(|header| format!("header {header}"));
    rng.shuffle(&mut members);
    (format!("{{{}}}", members.join(",")), header, meaning)
}

// invariant: shared-record
#[test]
fn parts_share_a_key_only_with_equal_values() {
    let seed = fastrand::u64(..);
    let rng = &mut Rng::with_seed(seed);
    let all = ["a", "b|json.x", "h"];
    // Specifications with the same places under different conditions, and the old forms beside
    // them.
    let mut keys: Vec<(String, CompiledKey, Vec<usize>)> = Vec::new();
    for mask in 1..8_usize {
        let used: Vec<usize> = (0..3).filter(|at| mask >> at & 1 == 1).collect();
        let parts: Vec<String> = used
            .iter()
            .map(|at| match all[*at] {
                "h" => r#"{"header":"h","optional":true,"blank":"value"}"#.to_owned(),
                path => format!(r#"{{"path":"{path}","optional":true,"blank":"value"}}"#),
            })
            .collect();
        let parts = parts.join(",");
        for spec in [
            format!(r#"{{"parts":[{parts}]}}"#),
            format!(r#"{{"cases":[{{"parts":[{parts}]}}]}}"#),
            format!(r#"{{"cases":[{{"when":{{"path":"a"}},"parts":[{parts}]}}]}}"#),
        ] {
            keys.push((spec.clone(), compiled(&spec), used.clone()));
        }
    }
    for (spec, used) in [
        (r#"{"json":["a"]}"#, vec![0]),
        (r#"{"header":"h"}"#, vec![2]),
    ] {
        keys.push((spec.to_owned(), compiled(spec), used));
    }
    let mut seen: HashMap<Digest, (usize, Vec<Meaning>)> = HashMap::new();
    let mut met: HashMap<(usize, Vec<Meaning>), Digest> = HashMap::new();
    for _ in 0..20_000 {
        let (payload, header, meaning) = random_message(rng);
        let headers: Vec<(&str, &[u8])> =
            header.iter().map(|value| ("h", value.as_bytes())).collect();
        let input = KeyInput::payload(&payload).with_headers(&headers);
        let at = rng.usize(..keys.len());
        let (spec, key, used) = &keys[at];
        let Ok(explanation) = key.explain("orders", &input) else {
            continue;
        };
        let digest = explanation.digest();
        let meaning: Vec<Meaning> = used.iter().map(|place| meaning[*place].clone()).collect();
        let this = (at, meaning);
        if let Some(before) = seen.insert(digest, this.clone()) {
            assert_eq!(before, this, "seed {seed}: {spec} {payload} {header:?}");
        }
        if let Some(before) = met.insert(this, digest) {
            assert_eq!(before, digest, "seed {seed}: {spec} {payload} {header:?}");
        }
    }
    assert!(seen.len() > 500, "seed {seed}: {}", seen.len());
}

// invariant: panic-in-keys
#[test]
fn no_bytes_make_decoders_panic() {
    let keys = [
        r#"{"parts":["|json.a"]}"#,
        r#"{"parts":["a|base64|gzip|json.b"]}"#,
        r#"{"parts":["a|json|json"]}"#,
    ];
    let keys = keys.map(compiled);
    let seed = fastrand::u64(..);
    let rng = &mut Rng::with_seed(seed);
    for _ in 0..20_000 {
        let mut bytes = packed(br#"{"b":1}"#);
        for _ in 0..rng.usize(..4) {
            let at = rng.usize(..bytes.len());
            bytes[at] = rng.u8(..);
        }
        let text = match rng.u8(..3) {
            0 => base64::engine::general_purpose::STANDARD.encode(&bytes),
            1 => String::from_utf8_lossy(&bytes).into_owned(),
            _ => (0..rng.usize(..9))
                .map(|_| {
                    rng.choice(['{', '}', '"', '\\', 'a', ':', '1', '='])
                        .unwrap()
                })
                .collect(),
        };
        let payload = serde_json::json!({ "a": text }).to_string();
        let payload = if rng.bool() {
            payload
        } else {
            serde_json::Value::String(payload).to_string()
        };
        for key in &keys {
            let _ = key.explain("orders", &KeyInput::payload(&payload));
        }
    }
}

#[test]
fn a_gzip_bomb_is_refused_at_the_limit() {
    let zeros = packed(&vec![0; 64 << 20]);
    assert!(zeros.len() < 100_000);
    let text = base64::engine::general_purpose::STANDARD.encode(&zeros);
    let payload = serde_json::json!({ "a": text }).to_string();
    let error = derive(r#"{"parts":["a|base64|gzip|json.b"]}"#, &payload).unwrap_err();
    // No more than one byte over the limit was decoded.
    let limit = DEFAULT_MAX_PAYLOAD_BYTES;
    let what = "`a|base64|gzip|json.b`, decoded,".to_owned();
    assert_eq!(
        error,
        KeyError::TooLarge {
            what,
            bytes: limit + 1,
            limit
        }
    );
}

#[test]
fn errors_of_parts_name_place_and_remedy() {
    #[track_caller]
    fn check(spec: &str, payload: &str, expected: &str) {
        let error = derive(spec, payload).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let first_of = r#"{"parts":[{"first_of":["after.id","before.id"]}]}"#;
    check(
        first_of,
        "{}",
        "key field `after.id or before.id` is missing",
    );
    check(
        r#"{"parts":["a|json.b"]}"#,
        r#"{"a":"x"}"#,
        "`a|json.b`: json cannot be decoded: no JSON value starts",
    );
    check(
        r#"{"parts":["a|base64"]}"#,
        r#"{"a":"?"}"#,
        "base64 cannot be decoded: the text is no base64",
    );
    check(
        r#"{"parts":["a|json"]}"#,
        r#"{"a":{}}"#,
        "the value is no string",
    );
    let cases = r#"{"cases":[{"when":{"path":"type","is":"refund"},"parts":["id"]}]}"#;
    check(
        cases,
        r#"{"type":"order","id":1}"#,
        "no case of the key takes the message; add a case",
    );
}

#[test]
fn an_explanation_shows_cases_and_absent_parts() {
    let spec = r#"{"cases":[{"when":{"path":"type","is":"refund"},"parts":[{"path":"c","optional":true},
        {"first_of":["x",{"header":"h"}]},{"message_key":{}},{"path":"n","as":"unordered"}]}]}"#;
    let key = spec.parse::<Key>().unwrap().compile(&scope()).unwrap();
    let payload = r#"{"type":"refund","x":7,"n":["b","a"]}"#;
    let input = KeyInput::payload(payload).with_message_key("k");
    let text = key.explain("orders", &input).unwrap().to_string();
    let expected = r#"tenant     none
case       type = "refund"
part       first of x, header h = 7
part       c = absent
part       n = unordered ["a", "b"]
part       message key = b"k"
"#;
    assert!(text.contains(expected), "{text}");
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}
