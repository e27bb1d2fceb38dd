//! Normalisers: they make different spellings of a field's value equal.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::error::KeySpecError;
use super::number;

/// The precision with which timestamps are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeUnit {
    /// Whole days in UTC.
    Days,
    /// Whole seconds.
    Seconds,
    /// Thousandths of a second.
    Millis,
    /// Millionths of a second.
    Micros,
    /// Billionths of a second; further digits are dropped.
    Nanos,
}

/// A conversion of a field's value before it goes into the key.
///
/// The text form (config, command line) is `trim`, `lowercase`, `nfc`, `decimal`,
/// `timestamp-seconds` and so on. Steps run in the order given; `decimal` and `timestamp` come last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum Normaliser {
    /// Removes white space (Unicode `White_Space`) at both ends of a string.
    Trim,
    /// Converts to lower case by Unicode's default mapping, independent of any locale.
    Lowercase,
    /// Unicode Normalization Form C: `é` as one character and as `e` with an accent are the same.
    Nfc,
    /// Takes the exact decimal value of a number, or of a string that holds one: `10`, `"10.0"`, `"1e1"`.
    Decimal,
    /// Takes the instant of an RFC 3339 string, truncated to the unit: offsets and finer fractions do not count.
    Timestamp(TimeUnit),
}

const NAMES: [(&str, Normaliser); 9] = [
    ("trim", Normaliser::Trim),
    ("lowercase", Normaliser::Lowercase),
    ("nfc", Normaliser::Nfc),
    ("decimal", Normaliser::Decimal),
    ("timestamp-days", Normaliser::Timestamp(TimeUnit::Days)),
    ("timestamp-seconds", Normaliser::Timestamp(TimeUnit::Seconds)),
    ("timestamp-millis", Normaliser::Timestamp(TimeUnit::Millis)),
    ("timestamp-micros", Normaliser::Timestamp(TimeUnit::Micros)),
    ("timestamp-nanos", Normaliser::Timestamp(TimeUnit::Nanos)),
];

impl fmt::Display for Normaliser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, normaliser)| normaliser == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl FromStr for Normaliser {
    type Err = KeySpecError;

    fn from_str(text: &str) -> Result<Self, KeySpecError> {
        let known = NAMES.iter().find(|(name, _)| *name == text);
        known
            .map(|(_, normaliser)| *normaliser)
            .ok_or_else(|| KeySpecError::UnknownNormaliser { name: text.to_owned() })
    }
}

impl TryFrom<String> for Normaliser {
    type Error = KeySpecError;

    fn try_from(text: String) -> Result<Self, KeySpecError> {
        text.parse()
    }
}

impl From<Normaliser> for String {
    fn from(normaliser: Normaliser) -> Self {
        normaliser.to_string()
    }
}

impl Normaliser {
    /// Whether this must be the last normaliser of a field, because its result is not a string.
    pub(super) fn is_final(self) -> bool {
        matches!(self, Self::Decimal | Self::Timestamp(_))
    }

    /// The kind of value that this normaliser needs, for error texts.
    pub(super) fn needs(self) -> &'static str {
        match self {
            Self::Trim | Self::Lowercase | Self::Nfc => "a string",
            Self::Decimal => "a number, or a string that holds one (with an exponent of at most 18 digits)",
            Self::Timestamp(_) => "an RFC 3339 string, as 2026-11-21T10:00:00Z",
        }
    }

    /// Applies a normaliser that converts a string to a string. The final ones return their input.
    pub(super) fn rewrite(self, text: Cow<'_, str>) -> Cow<'_, str> {
        match self {
            Self::Trim => match text {
                Cow::Borrowed(text) => Cow::Borrowed(text.trim()),
                Cow::Owned(text) => Cow::Owned(text.trim().to_owned()),
            },
            Self::Lowercase if text.bytes().all(|b| b.is_ascii() && !b.is_ascii_uppercase()) => text,
            Self::Lowercase => Cow::Owned(text.to_lowercase()),
            Self::Nfc if is_nfc_quick(text.chars()) == IsNormalized::Yes => text,
            Self::Nfc => Cow::Owned(text.nfc().collect()),
            Self::Decimal | Self::Timestamp(_) => text,
        }
    }
}

/// Writes the canonical decimal of a string; `None` when it is not a decimal.
pub(super) fn write_decimal(text: &str, out: &mut Vec<u8>) -> Option<()> {
    if !number::is_decimal(text.as_bytes()) {
        return None;
    }
    number::write_canonical(text.as_bytes(), out).ok()
}

/// Writes the instant of an RFC 3339 string as a count of units since 1970 with the unit's suffix,
/// such as `1700000000s`; `None` when it is not an RFC 3339 string.
///
/// This uses no time crate: the accepted grammar is a part of the key format and must not change with the release of a
/// dependency. Leap seconds (`:60`) are refused, because their count would equal that of another instant.
pub(super) fn write_timestamp(text: &str, unit: TimeUnit, out: &mut Vec<u8>) -> Option<()> {
    let (seconds, fraction) = parse_rfc3339(text.as_bytes())?;
    let (digits, suffix) = match unit {
        TimeUnit::Days => {
            out.extend_from_slice(format!("{}d", seconds.div_euclid(86_400)).as_bytes());
            return Some(());
        }
        TimeUnit::Seconds => (0, "s"),
        TimeUnit::Millis => (3, "ms"),
        TimeUnit::Micros => (6, "us"),
        TimeUnit::Nanos => (9, "ns"),
    };
    let padded = fraction.iter().copied().chain(std::iter::repeat(b'0')).take(digits);
    let count = padded.fold(i128::from(seconds), |count, digit| count * 10 + i128::from(digit - b'0'));
    out.extend_from_slice(format!("{count}{suffix}").as_bytes());
    Some(())
}

/// Returns the seconds since 1970 in UTC (rounded down), and the digits of the fraction.
fn parse_rfc3339(text: &[u8]) -> Option<(i64, &[u8])> {
    let (date_time, rest) = text.split_at_checked(19)?;
    let &[
        y1,
        y2,
        y3,
        y4,
        b'-',
        mo1,
        mo2,
        b'-',
        d1,
        d2,
        b'T' | b't' | b' ',
        h1,
        h2,
        b':',
        mi1,
        mi2,
        b':',
        s1,
        s2,
    ] = date_time
    else {
        return None;
    };
    let year = digits(&[y1, y2, y3, y4])?;
    let month = digits(&[mo1, mo2])?;
    let day = digits(&[d1, d2])?;
    let in_day =
        time_of_day(digits(&[h1, h2])?, digits(&[mi1, mi2])?)? + digits(&[s1, s2]).filter(|s| *s <= 59)?;
    let (fraction, zone) = split_fraction(rest)?;
    let offset = match *zone {
        [b'Z' | b'z'] => 0,
        [sign @ (b'+' | b'-'), h1, h2, b':', m1, m2] => {
            let offset = time_of_day(digits(&[h1, h2])?, digits(&[m1, m2])?)?;
            if sign == b'-' { -offset } else { offset }
        }
        _ => return None,
    };
    let days = days_since_1970(year, month, day)?;
    Some((days * 86_400 + in_day - offset, fraction))
}

fn split_fraction(rest: &[u8]) -> Option<(&[u8], &[u8])> {
    let Some((b'.', rest)) = rest.split_first() else { return Some((&[], rest)) };
    let end = rest.iter().position(|b| !b.is_ascii_digit())?;
    (end > 0).then(|| rest.split_at(end))
}

fn digits(text: &[u8]) -> Option<i64> {
    let mut value = 0;
    for b in text {
        value = value * 10 + i64::from(b.is_ascii_digit().then(|| b - b'0')?);
    }
    Some(value)
}

fn time_of_day(hours: i64, minutes: i64) -> Option<i64> {
    (hours <= 23 && minutes <= 59).then_some(hours * 3_600 + minutes * 60)
}

/// Returns the days since 1970-01-01 in the proleptic Gregorian calendar; `None` for an invalid date.
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
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let days = year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    Some(days + day_of_year - 719_468)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, unit: TimeUnit, expected: Option<&str>) {
        let mut out = Vec::new();
        let written = write_timestamp(text, unit, &mut out).map(|()| String::from_utf8(out).unwrap());
        assert_eq!(written.as_deref(), expected, "{text}");
    }

    #[test]
    fn instants() {
        check("1970-01-01T00:00:00Z", TimeUnit::Seconds, Some("0s"));
        check("2000-02-29T12:34:56.789Z", TimeUnit::Millis, Some("951827696789ms"));
        check("2000-02-29T14:34:56.7890001+02:00", TimeUnit::Millis, Some("951827696789ms"));
        check("2000-02-29 07:04:56.789-05:30", TimeUnit::Seconds, Some("951827696s"));
        check("2024-12-31T23:59:59.999999999z", TimeUnit::Nanos, Some("1735689599999999999ns"));
        check("2024-12-31t23:59:59.1Z", TimeUnit::Micros, Some("1735689599100000us"));
        check("1969-12-31T23:59:59.5Z", TimeUnit::Millis, Some("-500ms"));
        check("1969-12-31T23:59:59.5Z", TimeUnit::Seconds, Some("-1s"));
        check("1969-12-31T23:59:59.5Z", TimeUnit::Days, Some("-1d"));
        check("0000-01-01T00:00:00Z", TimeUnit::Days, Some("-719528d"));
        check("9999-12-31T23:59:59Z", TimeUnit::Seconds, Some("253402300799s"));
        check("1900-03-01T00:00:00Z", TimeUnit::Days, Some("-25508d"));
    }

    #[test]
    fn what_is_no_instant() {
        for text in [
            "",
            "2024-01-01",
            "2024-01-01T00:00:00",
            "2024-01-01T00:00:00.Z",
            "2024-01-01T00:00:00.5",
            "2023-02-29T00:00:00Z",
            "1900-02-29T00:00:00Z",
            "2024-13-01T00:00:00Z",
            "2024-00-01T00:00:00Z",
            "2024-04-31T00:00:00Z",
            "2024-04-00T00:00:00Z",
            "2016-12-31T23:59:60Z",
            "2024-01-01T24:00:00Z",
            "2024-01-01T00:60:00Z",
            "2024-01-01T00:00:00+24:00",
            "2024-01-01T00:00:00+0100",
            "2024-01-01T00:00:00+01",
            "+2024-01-01T00:00:00Z",
            "2024-01-01T00:00:00Zx",
            " 2024-01-01T00:00:00Z",
            "2024-1-01T00:00:00Z",
            "2024-01-01T00:00:0é",
            "２024-01-01T00:00:00Z",
        ] {
            check(text, TimeUnit::Seconds, None);
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
                        expected += 1;
                    }
                }
            }
        }
    }

    #[test]
    fn names_go_there_and_back() {
        for (name, normaliser) in NAMES {
            assert_eq!(name.parse(), Ok(normaliser));
            assert_eq!(normaliser.to_string(), name);
        }
        assert!("timestamp".parse::<Normaliser>().is_err());
    }
}
