//! Instants: the spellings of ISO 8601 that name one, and counts since 1970.
//!
//! This uses no time crate: the accepted grammar is a part of the key format and must not change
//! with the release of a dependency. Nothing is guessed: a time without an offset is refused, and
//! so is a number without its unit.

use std::ops::RangeInclusive;

use super::normaliser::TimeUnit;
use super::number;

/// The reason why a value is no instant, as the end of the sentence "normaliser … needs".
type Needs = &'static str;

const FORM: Needs = "a time of ISO 8601, as 2026-11-21T10:00:00Z or 20261121T100000+0200";
const OFFSET: Needs =
    "an offset at the end of the time, as Z or +02:00: a local time is no instant";
const DATE: Needs = "a date that the calendar has";
const TIME: Needs = "a time from 00:00:00 to 23:59:59; a leap second (:60) and 24:00 are other spellings of a next one";
const FRACTION: Needs = "digits after the decimal mark, which may follow only seconds";
const RANGE: Needs =
    "a time of the years 0000 to 9999; does the `epoch` of the key name the unit of the count?";

const NANOS: i128 = 1_000_000_000;

/// The seconds since 1970 of the years 0000 to 9999.
const SECONDS: RangeInclusive<i128> = -62_167_219_200..=253_402_300_799;

/// Writes the instant of an ISO 8601 string as a count of units since 1970 with the unit's suffix,
/// such as `1700000000s`. The error says what the string lacks.
pub(super) fn write_timestamp(text: &str, unit: TimeUnit, out: &mut Vec<u8>) -> Result<(), Needs> {
    write(parse(text.as_bytes())?, unit, out);
    Ok(())
}

/// Writes the instant of a decimal number that counts `counted` since 1970. `text` conforms to
/// [`number::is_decimal`] or the JSON grammar.
pub(super) fn write_epoch(
    text: &str,
    counted: TimeUnit,
    unit: TimeUnit,
    out: &mut Vec<u8>,
) -> Result<(), Needs> {
    write(count_nanos(text, counted).ok_or(RANGE)?, unit, out);
    Ok(())
}

fn write(nanos: i128, unit: TimeUnit, out: &mut Vec<u8>) {
    let (size, suffix) = match unit {
        TimeUnit::Days => (86_400 * NANOS, "d"),
        TimeUnit::Seconds => (NANOS, "s"),
        TimeUnit::Millis => (1_000_000, "ms"),
        TimeUnit::Micros => (1_000, "us"),
        TimeUnit::Nanos => (1, "ns"),
    };
    out.extend_from_slice(format!("{}{suffix}", nanos.div_euclid(size)).as_bytes());
}

/// Returns the nanoseconds of a count, rounded down; `None` outside of the years 0000 to 9999. The
/// work is bounded whatever the exponent: a number with too many digits before the point is refused
/// by its length.
fn count_nanos(text: &str, counted: TimeUnit) -> Option<i128> {
    let mut canonical = Vec::new();
    number::write_canonical(text.as_bytes(), &mut canonical).ok()?;
    let canonical = std::str::from_utf8(&canonical).ok()?;
    let (negative, canonical) = match canonical.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, canonical),
    };
    let (digits, exponent) = canonical.split_once('e').unwrap_or((canonical, "0"));
    let places = match counted {
        TimeUnit::Days => return None,
        TimeUnit::Seconds => 9,
        TimeUnit::Millis => 6,
        TimeUnit::Micros => 3,
        TimeUnit::Nanos => 0,
    };
    // The value is `0.digits * 10^point` nanoseconds.
    let point = exponent.parse::<i64>().ok()? + places + i64::try_from(digits.len()).ok()?;
    if point > 21 {
        return None;
    }
    let whole = usize::try_from(point).unwrap_or(0);
    let nanos = digits.bytes().chain(std::iter::repeat(b'0')).take(whole);
    let nanos = nanos.fold(0, |value, digit| value * 10 + i128::from(digit - b'0'));
    // Canonical digits end without zeros, so any digit after the point makes the value larger than
    // the whole.
    let inexact = digits.len() > whole && digits != "0";
    let nanos = if negative {
        -nanos - i128::from(inexact)
    } else {
        nanos
    };
    SECONDS.contains(&nanos.div_euclid(NANOS)).then_some(nanos)
}

/// Returns the nanoseconds since 1970 in UTC. Finer digits are dropped, towards the past.
fn parse(text: &[u8]) -> Result<i128, Needs> {
    let mut rest = Rest(text);
    let year = rest.number(4).ok_or(FORM)?;
    let dashed = rest.skip(b"-");
    let month = rest.number(2).ok_or(FORM)?;
    if dashed && !rest.skip(b"-") {
        return Err(FORM);
    }
    let day = rest.number(2).ok_or(FORM)?;
    if rest.0.is_empty() {
        return Err("a time of day and an offset after the date: a date is no instant");
    }
    if !rest.skip(b"Tt ") {
        return Err(FORM);
    }
    let in_day = time_of_day(&mut rest)?;
    let fraction = fraction_nanos(&mut rest)?;
    let offset = offset_seconds(&mut rest)?;
    let days = days_since_1970(year, month, day).ok_or(DATE)?;
    Ok(i128::from(days * 86_400 + in_day - offset) * NANOS + fraction)
}

/// Reads `hh:mm`, `hh:mm:ss` or the same without colons. Returns the seconds.
fn time_of_day(rest: &mut Rest<'_>) -> Result<i64, Needs> {
    let hours = rest.number(2).ok_or(FORM)?;
    let colons = rest.skip(b":");
    let minutes = rest.number(2).ok_or(FORM)?;
    let has_seconds = if colons {
        rest.skip(b":")
    } else {
        rest.0.first().is_some_and(u8::is_ascii_digit)
    };
    let seconds = if has_seconds {
        rest.number(2).ok_or(FORM)?
    } else {
        0
    };
    if !has_seconds && matches!(rest.0.first(), Some(b'.' | b',')) {
        return Err(FRACTION);
    }
    if hours > 23 || minutes > 59 || seconds > 59 {
        return Err(TIME);
    }
    Ok(hours * 3_600 + minutes * 60 + seconds)
}

fn fraction_nanos(rest: &mut Rest<'_>) -> Result<i128, Needs> {
    if !rest.skip(b".,") {
        return Ok(0);
    }
    let end = rest
        .0
        .iter()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(rest.0.len());
    let (digits, after) = rest.0.split_at(end);
    if digits.is_empty() {
        return Err(FRACTION);
    }
    rest.0 = after;
    let padded = digits
        .iter()
        .copied()
        .chain(std::iter::repeat(b'0'))
        .take(9);
    Ok(padded.fold(0, |nanos, digit| nanos * 10 + i128::from(digit - b'0')))
}

/// Reads the offset: `Z`, `UTC`, `+hh`, `+hhmm` or `+hh:mm`, after at most one space. A time zone
/// in brackets after it, as Java writes one, changes no instant.
fn offset_seconds(rest: &mut Rest<'_>) -> Result<i64, Needs> {
    rest.skip(b" ");
    let offset = if rest.0.is_empty() {
        return Err(OFFSET);
    } else if let Some(after) = rest.0.strip_prefix(b"UTC") {
        rest.0 = after;
        0
    } else if rest.skip(b"Zz") {
        0
    } else {
        let negative = rest.0.first() == Some(&b'-');
        if !rest.skip(b"+-") {
            return Err(OFFSET);
        }
        let hours = rest.number(2).ok_or(OFFSET)?;
        let has_minutes = rest.skip(b":") || !matches!(rest.0.first(), None | Some(b'['));
        let minutes = if has_minutes {
            rest.number(2).ok_or(OFFSET)?
        } else {
            0
        };
        if hours > 23 || minutes > 59 {
            return Err("an offset of at most 23:59");
        }
        let seconds = hours * 3_600 + minutes * 60;
        if negative { -seconds } else { seconds }
    };
    match rest.0 {
        [] => Ok(offset),
        [b'[', zone @ .., b']'] if is_zone(zone) => Ok(offset),
        _ => Err("nothing after the offset but a time zone in brackets"),
    }
}

fn is_zone(zone: &[u8]) -> bool {
    !zone.is_empty()
        && zone.iter().all(|b| {
            b.is_ascii_alphanumeric() || matches!(b, b'/' | b'_' | b'-' | b'+' | b':' | b'.')
        })
}

/// The part of a text that is not read yet.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    /// Reads exactly `count` digits.
    fn number(&mut self, count: usize) -> Option<i64> {
        let (digits, after) = self.0.split_at_checked(count)?;
        if !digits.iter().all(u8::is_ascii_digit) {
            return None;
        }
        self.0 = after;
        Some(
            digits
                .iter()
                .fold(0, |value, digit| value * 10 + i64::from(digit - b'0')),
        )
    }

    /// Skips one byte if it is one of these.
    fn skip(&mut self, bytes: &[u8]) -> bool {
        match self.0.split_first() {
            Some((first, after)) if bytes.contains(first) => {
                self.0 = after;
                true
            }
            _ => false,
        }
    }
}

/// Returns the days since 1970-01-01 in the proleptic Gregorian calendar; `None` for an invalid
/// date.
///
/// It counts in years that begin in March, so that the leap day comes last.
fn days_since_1970(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let last_day = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 => 28 + i64::from(leap),
        _ => return None,
    };
    if !(1..=last_day).contains(&day) {
        return None;
    }
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let days = year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    Some(days + day_of_year - 719_468)
}

/// Returns the date of a day counted since 1970-01-01, for people.
pub(super) fn date(days: i64) -> String {
    // The year is one of 0 to 9999 for every instant that a key has.
    let mut year = 1970 + days / 366;
    while days_since_1970(year + 1, 1, 1).is_some_and(|first| first <= days) {
        year += 1;
    }
    while days_since_1970(year, 1, 1).is_some_and(|first| first > days) {
        year -= 1;
    }
    let month = (1..=12)
        .rev()
        .find(|month| days_since_1970(year, *month, 1).is_some_and(|first| first <= days))
        .unwrap_or(1);
    let day = days_since_1970(year, month, 1).map_or(0, |first| days - first) + 1;
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, unit: TimeUnit, expected: &str) {
        let mut out = Vec::new();
        write_timestamp(text, unit, &mut out).unwrap_or_else(|needs| panic!("{text}: {needs}"));
        assert_eq!(String::from_utf8(out).unwrap(), expected, "{text}");
    }

    #[track_caller]
    fn check_count(text: &str, counted: TimeUnit, unit: TimeUnit, expected: Option<&str>) {
        let mut out = Vec::new();
        let written = write_epoch(text, counted, unit, &mut out).ok();
        assert_eq!(
            written.map(|()| String::from_utf8(out).unwrap()).as_deref(),
            expected,
            "{text}"
        );
    }

    #[test]
    fn instants() {
        check("1970-01-01T00:00:00Z", TimeUnit::Seconds, "0s");
        check(
            "2000-02-29T12:34:56.789Z",
            TimeUnit::Millis,
            "951827696789ms",
        );
        check(
            "2000-02-29T14:34:56.7890001+02:00",
            TimeUnit::Millis,
            "951827696789ms",
        );
        check(
            "2000-02-29 07:04:56.789-05:30",
            TimeUnit::Seconds,
            "951827696s",
        );
        check(
            "2024-12-31T23:59:59.999999999z",
            TimeUnit::Nanos,
            "1735689599999999999ns",
        );
        check(
            "2024-12-31t23:59:59.1Z",
            TimeUnit::Micros,
            "1735689599100000us",
        );
        check("1969-12-31T23:59:59.5Z", TimeUnit::Millis, "-500ms");
        check("1969-12-31T23:59:59.5Z", TimeUnit::Seconds, "-1s");
        check("1969-12-31T23:59:59.5Z", TimeUnit::Days, "-1d");
        check("0000-01-01T00:00:00Z", TimeUnit::Days, "-719528d");
        check("9999-12-31T23:59:59Z", TimeUnit::Seconds, "253402300799s");
        check("1900-03-01T00:00:00Z", TimeUnit::Days, "-25508d");
    }

    #[test]
    fn spellings_of_one_instant_are_one() {
        for text in [
            "2024-05-01T10:00:00Z",
            "2024-05-01T10:00:00.000+00:00",
            "2024-05-01T10:00Z",
            "2024-05-01T12:00+02:00",
            "2024-05-01T10:00:00+0000",
            "2024-05-01 10:00:00+00",
            "2024-05-01T12:00+02:00[Europe/Paris]",
            "2024-05-01T12:00+02[Europe/Paris]",
            "2024-05-01T10:00:00,000Z",
            "20240501T100000Z",
            "20240501T1000Z",
            "20240501T153000.000+0530",
            "2024-05-01 10:00:00 UTC",
            "2024-05-01 05:00:00 -0500",
            "2024-05-01T10:00:00-00:00",
        ] {
            check(text, TimeUnit::Nanos, "1714557600000000000ns");
        }
    }

    #[test]
    fn what_is_no_instant_is_refused_with_its_reason() {
        for (text, expected) in [
            ("", FORM),
            ("2024-01-01", "a time of day"),
            ("20240101", "a time of day"),
            ("1714557600", FORM),
            ("2024-01-01T00:00:00", OFFSET),
            ("2024-01-01T00:00", OFFSET),
            ("2024-01-01T00:00:00.Z", FRACTION),
            ("2024-01-01T00:00.5Z", FRACTION),
            ("2024-01-01T00:00:00.5", OFFSET),
            ("2024-01-01T00:00:00 CEST", OFFSET),
            ("2023-02-29T00:00:00Z", DATE),
            ("1900-02-29T00:00:00Z", DATE),
            ("2024-13-01T00:00:00Z", DATE),
            ("2024-00-01T00:00:00Z", DATE),
            ("2024-04-31T00:00:00Z", DATE),
            ("2024-04-00T00:00:00Z", DATE),
            ("2016-12-31T23:59:60Z", TIME),
            ("2024-01-01T24:00:00Z", TIME),
            ("2024-01-01T00:60:00Z", TIME),
            ("2024-01-01T00:00:00+24:00", "at most 23:59"),
            ("2024-01-01T00:00:00+1", OFFSET),
            ("2024-01-01T00:00:00+010", OFFSET),
            ("+2024-01-01T00:00:00Z", FORM),
            ("2024-01-01T00:00:00Zx", "nothing after"),
            ("2024-01-01T00:00:00Z[]", "nothing after"),
            ("2024-01-01T00:00:00Z[!Europe/Paris]", "nothing after"),
            (" 2024-01-01T00:00:00Z", FORM),
            ("2024-1-01T00:00:00Z", FORM),
            ("2024-W05-1T00:00:00Z", FORM),
            ("2024-01-01T00:00:0é", FORM),
            ("２024-01-01T00:00:00Z", FORM),
        ] {
            let error = write_timestamp(text, TimeUnit::Seconds, &mut Vec::new()).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn counts_are_exact_in_their_unit() {
        let expected = Some("1714557600000ms");
        check_count("1714557600", TimeUnit::Seconds, TimeUnit::Millis, expected);
        check_count("1.7145576E9", TimeUnit::Seconds, TimeUnit::Millis, expected);
        check_count(
            "1714557600000",
            TimeUnit::Millis,
            TimeUnit::Millis,
            expected,
        );
        check_count(
            "1714557600000999",
            TimeUnit::Micros,
            TimeUnit::Millis,
            expected,
        );
        check_count(
            "1714557600000000000",
            TimeUnit::Nanos,
            TimeUnit::Millis,
            expected,
        );
        check_count(
            "1764064800.1",
            TimeUnit::Seconds,
            TimeUnit::Micros,
            Some("1764064800100000us"),
        );
        check_count("0", TimeUnit::Seconds, TimeUnit::Seconds, Some("0s"));
        check_count("-0.5", TimeUnit::Seconds, TimeUnit::Seconds, Some("-1s"));
        check_count(
            "-1e-999999999",
            TimeUnit::Seconds,
            TimeUnit::Nanos,
            Some("-1ns"),
        );
        check_count(
            "1e-999999999",
            TimeUnit::Seconds,
            TimeUnit::Nanos,
            Some("0ns"),
        );
        check_count(
            "253402300799.9",
            TimeUnit::Seconds,
            TimeUnit::Seconds,
            Some("253402300799s"),
        );
        check_count(
            "-62167219200",
            TimeUnit::Seconds,
            TimeUnit::Days,
            Some("-719528d"),
        );
        for outside in [
            "1714557600000",
            "253402300800",
            "-62167219200.1",
            "1e999999999",
            "-1e18",
        ] {
            check_count(outside, TimeUnit::Seconds, TimeUnit::Seconds, None);
        }
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let mut expected = -719_528;
        for year in 0..=2400 {
            for month in 1..=12 {
                for day in 1..=31 {
                    if let Some(days) = days_since_1970(year, month, day) {
                        assert_eq!(days, expected, "{year}-{month}-{day}");
                        assert_eq!(date(days), format!("{year:04}-{month:02}-{day:02}"));
                        expected += 1;
                    }
                }
            }
        }
    }
}
