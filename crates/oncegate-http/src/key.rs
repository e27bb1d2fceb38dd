//! Parses the header `Idempotency-Key`: an sf-string (RFC 9651, section 3.3.3), or the same without
//! quotes.

use ::http::HeaderMap;
use ::http::header::HeaderName;

/// The longest key, in bytes, without quotes and escapes.
pub(super) const MAX_KEY_BYTES: usize = 255;

pub(super) const HEADER: HeaderName = HeaderName::from_static("idempotency-key");

/// The key of a request, without quotes: `"abc"` and `abc` are one key. `None` when there is no
/// header.
///
/// The error describes what is wrong, and never contains the value.
pub(super) fn of(headers: &HeaderMap, strict: bool) -> Result<Option<String>, &'static str> {
    let mut lines = headers.get_all(HEADER).iter();
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
        [b'"', ..] => {
            let (key, rest) = string(value).ok_or(
                "the quoted string does not end, or has other characters than visible ASCII",
            )?;
            parameters(rest).ok_or("something follows the quoted string that is no parameter")?;
            key
        }
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

/// The content of a leading sf-string, and the rest.
fn string(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut rest = text.strip_prefix(b"\"")?;
    let mut content = Vec::new();
    loop {
        rest = match rest {
            [b'"', rest @ ..] => return Some((content, rest)),
            [b'\\', escaped @ (b'"' | b'\\'), rest @ ..] => {
                content.push(*escaped);
                rest
            }
            [b'\\', ..] => return None,
            [plain @ b' '..=b'~', rest @ ..] => {
                content.push(*plain);
                rest
            }
            _ => return None,
        };
    }
}

/// Checks that parameters are well-formed; their values are ignored.
fn parameters(mut rest: &[u8]) -> Option<()> {
    while let [b';', after @ ..] = rest {
        let after = from_first_not(after, |byte| byte == b' ');
        let (b'a'..=b'z' | b'*') = after.first()? else {
            return None;
        };
        rest = from_first_not(
            after,
            |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'*'),
        );
        if let [b'=', value @ ..] = rest {
            rest = bare_item(value)?;
        }
    }
    rest.is_empty().then_some(())
}

/// The rest after a leading bare item.
fn bare_item(text: &[u8]) -> Option<&[u8]> {
    match text {
        [b'"', ..] => string(text).map(|(_, rest)| rest),
        [b'?', b'0' | b'1', rest @ ..] => Some(rest),
        [b'@', date @ ..] => number(date, false),
        [b':', bytes @ ..] => from_first_not(bytes, is_base64).strip_prefix(b":"),
        [b'%', b'"', display @ ..] => {
            from_first_not(display, |byte| matches!(byte, b' '..=b'~') && byte != b'"')
                .strip_prefix(b"\"")
        }
        [b'-' | b'0'..=b'9', ..] => number(text, true),
        [b'A'..=b'Z' | b'a'..=b'z' | b'*', ..] => Some(from_first_not(text, is_token)),
        _ => None,
    }
}

fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=')
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte)
}

/// The rest after a leading integer of up to 15 digits, or a decimal of up to 12 and 3 digits.
fn number(text: &[u8], may_have_point: bool) -> Option<&[u8]> {
    let text = text.strip_prefix(b"-").unwrap_or(text);
    let rest = from_first_not(text, |byte| byte.is_ascii_digit());
    let whole = text.len() - rest.len();
    match rest {
        [b'.', fraction @ ..] if may_have_point => {
            let rest = from_first_not(fraction, |byte| byte.is_ascii_digit());
            let digits = fraction.len() - rest.len();
            ((1..=12).contains(&whole) && (1..=3).contains(&digits)).then_some(rest)
        }
        _ => (1..=15).contains(&whole).then_some(rest),
    }
}

fn from_first_not(text: &[u8], belongs: impl Fn(u8) -> bool) -> &[u8] {
    let end = text
        .iter()
        .position(|byte| !belongs(*byte))
        .unwrap_or(text.len());
    text.get(end..).unwrap_or_default()
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
            r#";a=%"f%c3""#,
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
        ] {
            check(&format!("\"k\"{bad}"), Err("no parameter"));
        }
    }

    #[test]
    fn what_is_no_key_is_refused_in_words() {
        check("", Err("empty"));
        check("\"\"", Err("blank"));
        check("\"  \"", Err("blank"));
        check("\"abc", Err("does not end"));
        check("\"a\\b\"", Err("does not end"));
        check("a,b", Err("without quotes"));
        check("a b", Err("without quotes"));
        check("a;b", Err("without quotes"));
        check("schlüssel", Err("without quotes"));
        check("\"schlüssel\"", Err("does not end"));
        check(&"k".repeat(256), Err("255"));
        check(&"k".repeat(255), Ok(&"k".repeat(255)));
        assert!(parse(b"bare", true).is_err() && parse(b"\"quoted\"", true).is_ok());
    }

    #[test]
    fn two_header_lines_are_no_key() {
        let mut headers = HeaderMap::new();
        assert_eq!(of(&headers, false), Ok(None));
        headers.append(HEADER, HeaderValue::from_static("a"));
        assert_eq!(of(&headers, false), Ok(Some("a".to_owned())));
        headers.append(HEADER, HeaderValue::from_static("a"));
        assert!(of(&headers, false).is_err());
    }

    #[test]
    fn every_printable_text_survives_its_quotes_and_no_bytes_make_it_panic() {
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
