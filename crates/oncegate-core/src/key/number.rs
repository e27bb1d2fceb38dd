//! Numbers as exact decimals: no `f64`, no rounding, and linear time in the length of the text.
//!
//! # Not obvious
//!
//! Implementation notes: facts about numbers that this code depends on.
//!
//! - JSON canonicalisation by RFC 8785 goes through `f64`, and two long ids become one key. Numbers
//!   here are decimals, without any floating point.

/// The exponent of a number has more digits than this module supports.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExponentTooLarge;

/// The maximum number of digits in an exponent. With 18, an exponent adjusted by the number of
/// digits fits an `i64`.
const MAX_EXPONENT_DIGITS: usize = 18;

/// Writes the canonical form of `text`, which must conform to [`is_decimal`] or the JSON grammar.
///
/// The form is `[-]digits[e exponent]`: digits without leading or trailing zeros, and an exponent
/// of ten without `+` or leading zeros, omitted when it is 0. Zero is always `0`. `10`, `10.0` and
/// `1e1` are all `1e1`; `-0.50` is `-5e-1`.
pub(super) fn write_canonical(text: &[u8], out: &mut Vec<u8>) -> Result<(), ExponentTooLarge> {
    let (negative, text) = match text.split_first() {
        Some((b'-', rest)) => (true, rest),
        Some((b'+', rest)) => (false, rest),
        _ => (false, text),
    };
    let (mantissa, exponent) = split_at_byte(text, |b| matches!(b, b'e' | b'E'));
    let (whole, fraction) = split_at_byte(mantissa, |b| b == b'.');

    // Zeros at both ends are dropped. The exponent makes up for those that stood for a power of
    // ten.
    let mut whole = trim_start_zeros(whole);
    let mut fraction = trim_end_zeros(fraction);
    let mut shift = -signed(fraction.len());
    if fraction.is_empty() {
        let kept = trim_end_zeros(whole);
        shift = signed(whole.len() - kept.len());
        whole = kept;
    }
    if whole.is_empty() {
        fraction = trim_start_zeros(fraction);
    }
    if whole.is_empty() && fraction.is_empty() {
        out.push(b'0');
        return Ok(());
    }

    let exponent = read_exponent(exponent)? + shift;
    if negative {
        out.push(b'-');
    }
    out.extend_from_slice(whole);
    out.extend_from_slice(fraction);
    if exponent != 0 {
        out.push(b'e');
        out.extend_from_slice(exponent.to_string().as_bytes());
    }
    Ok(())
}

/// Returns whether the `decimal` normaliser accepts `text`: `[+-]digits[.digits][e[+-]digits]`.
///
/// Unlike JSON, it accepts a plus sign and leading zeros.
pub(super) fn is_decimal(text: &[u8]) -> bool {
    let text = match text.split_first() {
        Some((b'-' | b'+', rest)) => rest,
        _ => text,
    };
    let (text, rest) = split_digits(text);
    if text.is_empty() {
        return false;
    }
    let rest = match rest.split_first() {
        Some((b'.', rest)) => {
            let (digits, rest) = split_digits(rest);
            if digits.is_empty() {
                return false;
            }
            rest
        }
        _ => rest,
    };
    let rest = match rest.split_first() {
        None => return true,
        Some((b'e' | b'E', rest)) => rest,
        Some(_) => return false,
    };
    let rest = match rest.split_first() {
        Some((b'-' | b'+', rest)) => rest,
        _ => rest,
    };
    let (digits, rest) = split_digits(rest);
    !digits.is_empty() && rest.is_empty()
}

fn read_exponent(text: &[u8]) -> Result<i64, ExponentTooLarge> {
    let (negative, digits) = match text.split_first() {
        Some((b'-', rest)) => (true, rest),
        Some((b'+', rest)) => (false, rest),
        _ => (false, text),
    };
    let digits = trim_start_zeros(digits);
    if digits.len() > MAX_EXPONENT_DIGITS {
        return Err(ExponentTooLarge);
    }
    let value = digits
        .iter()
        .fold(0i64, |value, digit| value * 10 + i64::from(digit - b'0'));
    Ok(if negative { -value } else { value })
}

/// Splits at the first matching byte and drops that byte.
fn split_at_byte(text: &[u8], fits: impl Fn(u8) -> bool) -> (&[u8], &[u8]) {
    let mut halves = text.splitn(2, |b| fits(*b));
    (
        halves.next().unwrap_or_default(),
        halves.next().unwrap_or_default(),
    )
}

fn split_digits(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text
        .iter()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(text.len());
    text.split_at(end)
}

fn trim_start_zeros(text: &[u8]) -> &[u8] {
    let start = text.iter().position(|b| *b != b'0').unwrap_or(text.len());
    text.get(start..).unwrap_or_default()
}

fn trim_end_zeros(text: &[u8]) -> &[u8] {
    let end = text
        .iter()
        .rposition(|b| *b != b'0')
        .map_or(0, |last| last + 1);
    text.get(..end).unwrap_or_default()
}

/// Lengths are bounded by the payload limit (1 GiB), so this never saturates.
fn signed(len: usize) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert!(is_decimal(text.as_bytes()), "{text}");
        let mut out = Vec::new();
        write_canonical(text.as_bytes(), &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), expected, "{text}");
    }

    #[test]
    fn one_spelling_for_one_value() {
        for ten in [
            "10",
            "10.0",
            "1e1",
            "1E+1",
            "0.1e2",
            "1000e-2",
            "100.00e-1",
            "+010",
            "1e0000000000000000000001",
        ] {
            check(ten, "1e1");
        }
        for zero in [
            "0",
            "-0",
            "0.000",
            "0e99999999999999999999999",
            "-0.0E-5",
            "000",
        ] {
            check(zero, "0");
        }
        check("7", "7");
        check("-0.50", "-5e-1");
        check("12.5", "125e-1");
        check("100.001", "100001e-3");
        check("0.00012", "12e-5");
        check("9007199254740993", "9007199254740993");
        check("9007199254740992", "9007199254740992");
        check("1e999999999", "1e999999999");
        check("1e-400", "1e-400");
        check("1e999999999999999999", "1e999999999999999999");
        check("-1.5e-999999999999999999", "-15e-1000000000000000000");
    }

    #[test]
    fn exponents_beyond_count_are_refused() {
        for text in ["1e1000000000000000000", "1e-99999999999999999999999999"] {
            assert_eq!(
                write_canonical(text.as_bytes(), &mut Vec::new()),
                Err(ExponentTooLarge),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_no_decimal() {
        for text in [
            "", "-", "+", ".5", "5.", "1e", "1e+", "1.e1", "0x10", "NaN", "Infinity", "1 ", " 1",
            "1,0", "--1", "1e1.5", "١",
        ] {
            assert!(!is_decimal(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn a_million_digits_are_linear() {
        let text = format!("{}.{}", "9".repeat(1_000_000), "0".repeat(1_000_000));
        let mut out = Vec::new();
        write_canonical(text.as_bytes(), &mut out).unwrap();
        assert_eq!(out.len(), 1_000_000);
        let zeros = format!("1{}", "0".repeat(1_000_000));
        check(&zeros, "1e1000000");
    }
}
