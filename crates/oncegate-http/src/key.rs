//! Parses the header `Idempotency-Key`: an sf-string (RFC 9651, section 3.3.3), or the same without
//! quotes.

use ::http::HeaderMap;
use ::http::header::HeaderName;
use sfv::{BareItem, Item, Parser};

/// The longest key, in bytes, without quotes and escapes.
pub(super) const MAX_KEY_BYTES: usize = 255;

const NO_STRING: &str = "a key in quotes is a string of RFC 9651: visible ASCII in double quotes, and behind it \
                         nothing but parameters";

pub(super) const HEADER: HeaderName = HeaderName::from_static("idempotency-key");

/// The key of a request, which may be in any of the headers `named`. `None` when none of them is
/// there.
///
/// The error describes what is wrong, and never contains the value.
pub(super) fn of_any(
    headers: &HeaderMap,
    named: &[HeaderName],
    strict: bool,
) -> Result<Option<String>, &'static str> {
    let mut found = None;
    for name in named {
        let Some(key) = of(headers, name, strict)? else {
            continue;
        };
        if found.as_ref().is_some_and(|found| *found != key) {
            return Err("two headers have different keys");
        }
        found = Some(key);
    }
    Ok(found)
}

/// The key in a header, without quotes: `"abc"` and `abc` are one key. `None` when there is no
/// header.
fn of(
    headers: &HeaderMap,
    name: &HeaderName,
    strict: bool,
) -> Result<Option<String>, &'static str> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => parse(value.as_bytes(), strict).map(Some),
        // Two lines, joined with a comma as in the draft, are not a single item.
        (Some(_), Some(_)) => Err("the header must occur once"),
    }
}

fn parse(value: &[u8], strict: bool) -> Result<String, &'static str> {
    let value = value.trim_ascii();
    let key = match value {
        [] => return Err("the key is empty"),
        [b'"', ..] => match Parser::new(value)
            .parse::<Item>()
            .map(|item| item.bare_item)
        {
            Ok(BareItem::String(key)) => String::from(key).into_bytes(),
            _ => return Err(NO_STRING),
        },
        _ if strict => return Err("the key must stand in double quotes"),
        _ if value.iter().all(|byte| is_bare(*byte)) => value.to_vec(),
        _ => return Err("a key without quotes is visible ASCII without `\"`, `\\`, `,` and `;`"),
    };
    if key.trim_ascii().is_empty() {
        return Err("the key is blank");
    }
    if key.len() > MAX_KEY_BYTES {
        return Err("the key is longer than 255 bytes");
    }
    String::from_utf8(key).map_err(|_| "the key is not ASCII")
}

fn is_bare(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b',' | b';')
}

/// Writes a text as an sf-string; for tests, and for clients that send a key.
#[cfg(test)]
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use ::http::HeaderValue;
    use fastrand::Rng;

    use super::*;

    fn check(value: &str, expected: Result<&str, &str>) {
        let parsed = parse(value.as_bytes(), false);
        match expected {
            Ok(key) => assert_eq!(parsed.as_deref(), Ok(key), "{value:?}"),
            Err(words) => {
                let error = parsed.expect_err(value);
                assert!(error.contains(words), "{value:?}: {error}");
            }
        }
    }

    #[test]
    fn quoted_and_bare_keys_are_one_key() {
        check(
            "\"8e03978e-40d5-43e8-bc93-6894a57f9324\"",
            Ok("8e03978e-40d5-43e8-bc93-6894a57f9324"),
        );
        check(
            "8e03978e-40d5-43e8-bc93-6894a57f9324",
            Ok("8e03978e-40d5-43e8-bc93-6894a57f9324"),
        );
        check(r#" "a \"b\" \\ c" "#, Ok(r#"a "b" \ c"#));
        check("order=7:/#A", Ok("order=7:/#A"));
    }

    #[test]
    fn parameters_must_parse_and_are_ignored() {
        for good in [
            "",
            ";a",
            ";a=1;b",
            "; a=-1.5",
            r#";a="x;y""#,
            ";a=?0;*b=tok/en",
            ";a=:YWI=:",
            ";a=@17",
            r#";a=%"f%c3%bc""#,
        ] {
            check(&format!("\"k\"{good}"), Ok("k"));
        }
        for bad in [
            ";",
            ";A=1",
            ";a=",
            ";a=\"",
            " x",
            ",\"l\"",
            ";a=1.",
            ";a=1234567890123456",
            ";a=?2",
            ";a=:x",
            ";a=@1.5",
            // What a parser of our own took: padding in the middle, and no percent-encoding.
            ";a=:Y=WI:",
            r#";a=%"%zz""#,
        ] {
            check(&format!("\"k\"{bad}"), Err("RFC 9651"));
        }
    }

    #[test]
    fn what_is_no_key_is_refused_in_words() {
        check("", Err("empty"));
        check("\"\"", Err("blank"));
        check("\"  \"", Err("blank"));
        check("\"abc", Err("RFC 9651"));
        check("\"a\\b\"", Err("RFC 9651"));
        check("a,b", Err("without quotes"));
        check("a b", Err("without quotes"));
        check("a;b", Err("without quotes"));
        check("schlüssel", Err("without quotes"));
        check("\"schlüssel\"", Err("RFC 9651"));
        check(&"k".repeat(256), Err("255"));
        check(&"k".repeat(255), Ok(&"k".repeat(255)));
        assert!(parse(b"bare", true).is_err() && parse(b"\"quoted\"", true).is_ok());
    }

    #[test]
    fn two_header_lines_are_no_key() {
        let mut headers = HeaderMap::new();
        let of = |headers: &HeaderMap| of_any(headers, &[HEADER], false);
        assert_eq!(of(&headers), Ok(None));
        headers.append(HEADER, HeaderValue::from_static("a"));
        assert_eq!(of(&headers), Ok(Some("a".to_owned())));
        headers.append(HEADER, HeaderValue::from_static("a"));
        assert!(of(&headers).is_err());
    }

    #[test]
    fn two_headers_may_have_the_key_if_it_is_one() {
        let other = HeaderName::from_static("x-idempotency-key");
        let named = [HEADER, other.clone()];
        let mut headers = HeaderMap::new();
        headers.insert(&other, HeaderValue::from_static("a"));
        assert_eq!(of_any(&headers, &named, false), Ok(Some("a".to_owned())));
        assert_eq!(of_any(&headers, &named[..1], false), Ok(None));
        headers.insert(HEADER, HeaderValue::from_static("\"a\""));
        assert_eq!(of_any(&headers, &named, false), Ok(Some("a".to_owned())));
        headers.insert(HEADER, HeaderValue::from_static("b"));
        assert!(of_any(&headers, &named, false).is_err());
    }

    #[test]
    fn printable_text_survives_quoting_and_no_bytes_cause_a_panic() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut rng = Rng::with_seed(seed);
        for _ in 0..20_000 {
            let length = rng.usize(1..=40);
            let text: String = (0..length)
                .map(|_| char::from(rng.u8(b' '..=b'~')))
                .collect();
            let expected = if text.trim().is_empty() {
                None
            } else {
                Some(text.clone())
            };
            assert_eq!(
                parse(quoted(&text).as_bytes(), true).ok(),
                expected,
                "{text:?}"
            );
            // A bare text is the same key as the quoted one, or none at all.
            if let Ok(bare) = parse(text.as_bytes(), false)
                && !text.trim().starts_with('"')
            {
                assert_eq!(bare, text.trim());
            }
            // Bytes that often form valid keys.
            let bytes: Vec<u8> = (0..length)
                .map(|_| *rng.choice(b"\"\\;=,a1.-@:?%* \xff\x00").unwrap())
                .collect();
            let key = parse(&bytes, false).unwrap_or_default();
            assert!(
                key.len() <= MAX_KEY_BYTES && key.bytes().all(|byte| matches!(byte, b' '..=b'~'))
            );
        }
    }
}
