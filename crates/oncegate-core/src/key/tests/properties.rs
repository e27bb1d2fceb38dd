//! Compares the keys of random documents with a model of equality. Every failure prints its seed.

use std::collections::HashMap;
use std::fmt::Write as _;

use fastrand::Rng;

use super::*;

/// The meaning of a document: numbers are `digits * 10^exponent` without trailing zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tree {
    Null,
    Bool(bool),
    Number(i64, i32),
    Text(String),
    Array(Vec<Tree>),
    /// Sorted by name.
    Object(Vec<(String, Tree)>),
}

/// Generates values from small alphabets, so that two documents are often nearly equal.
const TEXTS: [&str; 14] = [
    "a", "b", "ab", "1", "10", ":", "a:b", "\"", "\\", "\u{0}", "é", "e\u{301}", "😀", "null",
];

fn tree(rng: &mut Rng, depth: usize) -> Tree {
    match rng.u8(..if depth == 0 { 5 } else { 8 }) {
        0 => Tree::Null,
        1 => Tree::Bool(rng.bool()),
        2 | 3 => {
            let mut digits = rng.i64(-120..120);
            let mut exponent = rng.i32(-2..3);
            while digits != 0 && digits % 10 == 0 {
                digits /= 10;
                exponent += 1;
            }
            Tree::Number(digits, if digits == 0 { 0 } else { exponent })
        }
        4 => Tree::Text(rng.choice(TEXTS).unwrap().to_owned()),
        5 => Tree::Array((0..rng.usize(..4)).map(|_| tree(rng, depth - 1)).collect()),
        _ => {
            let mut members: Vec<(String, Tree)> = Vec::new();
            let many = if rng.u8(..20) == 0 { 40 } else { 4 };
            for n in 0..rng.usize(..many) {
                let name = if many > 4 {
                    format!("{n}")
                } else {
                    rng.choice(TEXTS).unwrap().to_owned()
                };
                if members.iter().all(|(known, _)| *known != name) {
                    members.push((name, tree(rng, depth - 1)));
                }
            }
            members.sort_by(|a, b| a.0.cmp(&b.0));
            Tree::Object(members)
        }
    }
}

/// Writes a document in a random spelling.
fn spell(tree: &Tree, rng: &mut Rng, out: &mut String) {
    blanks(rng, out);
    match tree {
        Tree::Null => out.push_str("null"),
        Tree::Bool(value) => write!(out, "{value}").unwrap(),
        Tree::Number(digits, exponent) => spell_number(*digits, *exponent, rng, out),
        Tree::Text(text) => spell_text(text, rng, out),
        Tree::Array(elements) => {
            out.push('[');
            for (n, element) in elements.iter().enumerate() {
                out.push_str(if n > 0 { "," } else { "" });
                spell(element, rng, out);
            }
            blanks(rng, out);
            out.push(']');
        }
        Tree::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            rng.shuffle(&mut members);
            out.push('{');
            for (n, (name, member)) in members.into_iter().enumerate() {
                out.push_str(if n > 0 { "," } else { "" });
                blanks(rng, out);
                spell_text(name, rng, out);
                blanks(rng, out);
                out.push(':');
                spell(member, rng, out);
            }
            blanks(rng, out);
            out.push('}');
        }
    }
    blanks(rng, out);
}

fn blanks(rng: &mut Rng, out: &mut String) {
    if rng.u8(..4) == 0 {
        out.push(rng.choice([' ', '\t', '\n', '\r']).unwrap());
    }
}

fn spell_number(digits: i64, exponent: i32, rng: &mut Rng, out: &mut String) {
    if digits < 0 || (digits == 0 && rng.bool()) {
        out.push('-');
    }
    let mut text = digits.unsigned_abs().to_string();
    // Trailing zeros, a random decimal point, and the exponent that compensates for both.
    let zeros = rng.usize(..4);
    text.push_str(&"0".repeat(zeros));
    let fraction = rng.usize(..=text.len() + 2);
    while text.len() <= fraction {
        text.insert(0, '0');
    }
    let shift = exponent - i32::try_from(zeros).unwrap() + i32::try_from(fraction).unwrap();
    if fraction > 0 {
        text.insert(text.len() - fraction, '.');
    }
    let text = if text.trim_start_matches('0').starts_with('.') || digits == 0 {
        format!("0{}", text.trim_start_matches('0'))
    } else {
        text.trim_start_matches('0').to_owned()
    };
    out.push_str(&text);
    if shift != 0 || rng.bool() {
        let plus = if shift >= 0 && rng.bool() { "+" } else { "" };
        let sign = if shift < 0 { "-" } else { plus };
        let e = rng.choice(['e', 'E']).unwrap();
        write!(
            out,
            "{e}{sign}{}{}",
            "0".repeat(rng.usize(..3)),
            shift.abs()
        )
        .unwrap();
    }
}

fn spell_text(text: &str, rng: &mut Rng, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        if matches!(c, '"' | '\\') && rng.bool() {
            out.push('\\');
            out.push(c);
        } else if matches!(c, '"' | '\\' | '\0'..='\x1F') || rng.u8(..6) == 0 {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let hex = if rng.bool() {
                    format!("\\u{unit:04x}")
                } else {
                    format!("\\u{unit:04X}")
                };
                out.push_str(&hex);
            }
        } else {
            out.push(c);
        }
    }
    out.push('"');
}

fn spelt(tree: &Tree, rng: &mut Rng) -> String {
    let mut out = String::new();
    spell(tree, rng, &mut out);
    out
}

// invariant: shared-record
#[test]
fn keys_are_equal_exactly_when_documents_are() {
    let whole = compiled("payload");
    let field = compiled("a");
    let mut derived = 0;
    for seed in 0..30_000 {
        let rng = &mut Rng::with_seed(seed);
        let one = tree(rng, 3);
        let two = if rng.bool() {
            one.clone()
        } else {
            tree(rng, 1)
        };
        let first = spelt(&one, rng);
        let second = spelt(&two, rng);
        for (key, first, second) in [
            (&whole, first.clone(), second.clone()),
            (
                &field,
                format!("{{\"a\":{first}}}"),
                format!("{{\"b\":{first},\"\\u0061\":{second}}}"),
            ),
        ] {
            let keys =
                [&first, &second].map(|payload| key.derive("orders", &KeyInput::payload(payload)));
            let [Ok(a), Ok(b)] = &keys else {
                assert!(
                    keys.iter()
                        .flat_map(|key| key.as_ref().err())
                        .any(|error| matches!(error.kind(), "blank" | "null_field")),
                    "seed {seed}: {first} {second} {keys:?}"
                );
                continue;
            };
            derived += 1;
            assert_eq!(a == b, one == two, "seed {seed}: {first} {second}");
        }
    }
    assert!(derived > 20_000, "{derived}");
}

#[test]
fn numbers_that_a_float_would_merge_have_keys_of_their_own() {
    let key = compiled("a");
    for (one, two) in [
        ("9007199254740993", "9007199254740992"),
        ("18446744073709551616", "18446744073709551615"),
        ("0.1", "0.1000000000000000055511151231257827"),
        ("1e-400", "0"),
        ("1e400", "2e400"),
    ] {
        let keys = [one, two].map(|number| {
            let payload = format!(r#"{{"a":{number}}}"#);
            key.derive("orders", &KeyInput::payload(&payload)).unwrap()
        });
        assert_ne!(keys[0], keys[1], "{one} {two}");
    }
}

#[test]
fn exceptions_are_as_if_they_were_not_there() {
    let except = compiled("payload-except:a,b.a,1");
    let whole = compiled("payload");
    for seed in 0..10_000 {
        let rng = &mut Rng::with_seed(seed);
        let Tree::Object(members) = tree(rng, 3) else {
            continue;
        };
        let mut kept: Vec<_> = members
            .iter()
            .filter(|(name, _)| name != "a" && name != "1")
            .cloned()
            .collect();
        for (name, member) in &mut kept {
            if name == "b"
                && let Tree::Object(inner) = member
            {
                inner.retain(|(name, _)| name != "a");
            }
        }
        let full = spelt(&Tree::Object(members), rng);
        let rest = spelt(&Tree::Object(kept), rng);
        assert_eq!(
            except.derive("orders", &KeyInput::payload(&full)),
            whole.derive("orders", &KeyInput::payload(&rest)),
            "seed {seed}: {full} {rest}"
        );
    }
}

/// Checks all inputs of a key, with separators, prefixes and look-alikes on both sides of every
/// boundary.
// invariant: shared-record
#[test]
fn no_two_inputs_share_a_key() {
    const PARTS: [&str; 7] = ["a", "b", "ab", ":", "a:", "b\u{0}", "\u{0}\u{0}\u{0}\u{1}a"];
    let mut seen: HashMap<StoreKey, String> = HashMap::new();
    let mut digests: HashMap<Digest, String> = HashMap::new();
    let mut add = |key: StoreKey, what: String| {
        let before = digests.insert(key.digest(), what.clone());
        assert!(before.is_none(), "{what} and {before:?}");
        seen.insert(key, what);
    };
    for scope in ["a", "ab", "a.b"].map(|scope| Scope::new(scope).unwrap()) {
        for route in ["", "a", "ab", "b", ":a"] {
            let derive = |key: &Key, input: &KeyInput<'_>| {
                key.compile(&scope).unwrap().derive(route, input).unwrap()
            };
            for one in PARTS {
                let head = [("a", one.as_bytes())];
                let input = KeyInput::empty()
                    .with_headers(&head)
                    .with_message_key(one)
                    .with_message_id(one);
                for key in [Key::header("a"), Key::message_key(), Key::message_id()] {
                    add(
                        derive(&key, &input),
                        format!("{scope} {route} {key} {one:?}"),
                    );
                }
                let json = serde_json::json!({ "a": one, "b": one }).to_string();
                for key in [
                    Key::json(["a"]),
                    Key::json(["b"]),
                    Key::payload(),
                    Key::payload().except(["a"]),
                ] {
                    add(
                        derive(&key, &KeyInput::payload(&json)),
                        format!("{scope} {route} {key} {one:?}"),
                    );
                }
                for two in PARTS {
                    let json = serde_json::json!({ "a": one, "c": two }).to_string();
                    let key = Key::json(["a", "c"]);
                    let what = format!("{scope} {route} {key} {one:?} {two:?}");
                    add(derive(&key, &KeyInput::payload(&json)), what);
                    let key = Key::json(["a"]).tenant(TenantSource::json("c"));
                    let what = format!("{scope} {route} {key} {one:?} {two:?}");
                    add(derive(&key, &KeyInput::payload(&json)), what);
                    let key = Key::json(["c"]).tenant(TenantSource::header("a"));
                    let what = format!("{scope} {route} {key} {one:?} {two:?}");
                    add(
                        derive(&key, &KeyInput::payload(&json).with_headers(&head)),
                        what,
                    );
                }
            }
        }
    }
    assert_eq!(seen.len(), 3 * 5 * (7 * 7 + 49 * 3));
}

// invariant: panic-in-keys
#[test]
fn no_bytes_make_it_panic() {
    let keys = [
        "a",
        "a.b,c:trim:decimal",
        "payload",
        "payload-except:a,b.0",
        "a.0.b:lowercase:nfc,b:timestamp-nanos",
    ];
    let keys = keys.map(compiled);
    let fingerprint = FingerprintSpec::payload()
        .compile(&Key::message_key())
        .unwrap();
    let pieces: [&[u8]; 22] = [
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\"",
        b"\\",
        b"\\u",
        b"\\ud800",
        b"\\udc00",
        b"00",
        b"-",
        b"1.5e",
        b"+3",
        b"\"a\"",
        b"\"b\":",
        b"null",
        b"true",
        b" ",
        b"\xff",
        b"\xef\xbb\xbf",
    ];
    for seed in 0..30_000 {
        let rng = &mut Rng::with_seed(seed);
        let mut payload = if rng.bool() {
            spelt(&tree(rng, 3), rng).into_bytes()
        } else {
            Vec::new()
        };
        for _ in 0..rng.usize(..8) {
            let at = rng.usize(..=payload.len());
            match rng.u8(..4) {
                0 if at < payload.len() => drop(payload.remove(at)),
                1 => payload.truncate(at),
                2 => payload.insert(at, rng.u8(..)),
                _ => drop(payload.splice(at..at, rng.choice(pieces).unwrap().iter().copied())),
            }
        }
        let input = KeyInput::payload(&payload);
        let accepted = keys
            .iter()
            .filter(|key| key.explain("orders", &input).is_ok())
            .count();
        // An independent parser accepts every document that the scanner accepts.
        if accepted > 0 || fingerprint.derive(&input).is_ok() {
            let document = payload.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&payload);
            let value = serde_json::from_slice::<serde::de::IgnoredAny>(document);
            assert!(value.is_ok(), "seed {seed}: {}", payload.escape_ascii());
        }
    }
}

#[test]
fn strings_end_where_a_slow_search_says() {
    for seed in 0..20_000 {
        let rng = &mut Rng::with_seed(seed);
        let mut text: Vec<u8> = (0..rng.usize(..40)).map(|_| rng.u8(0x20..)).collect();
        for _ in 0..rng.usize(..3) {
            if !text.is_empty() {
                let at = rng.usize(..text.len());
                text[at] = rng
                    .choice([
                        b'"', b'\\', 0, 0x1F, 0x20, 0x21, 0x23, 0x5B, 0x5D, 0x7F, 0x80, 0xFF,
                    ])
                    .unwrap();
            }
        }
        let slow = text
            .iter()
            .position(|b| matches!(b, b'"' | b'\\' | 0..=0x1F))
            .unwrap_or(text.len());
        assert_eq!(json::plain_bytes(&text), slow, "seed {seed}: {text:?}");
    }
}
