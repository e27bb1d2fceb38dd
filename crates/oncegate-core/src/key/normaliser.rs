//! Normalisers as plain data, with their names.

use std::fmt;

use serde::{Deserialize, Serialize};

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
/// `timestamp-seconds` and so on. Steps run in the order given; `decimal`, `timestamp` and
/// `unordered` come last.
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
    /// Takes the exact decimal value of a number, or of a string that holds one: `10`, `"10.0"`,
    /// `"1e1"`.
    Decimal,
    /// Reads a number, or a string that holds one, as a count of these units since
    /// 1970-01-01T00:00:00Z. The normaliser [`Timestamp`](Self::Timestamp) must follow. Other
    /// strings are left to it, so a field may have both spellings.
    Epoch(TimeUnit),
    /// Takes the instant of an ISO 8601 string with an offset, truncated to the unit: offsets and
    /// finer fractions do not count.
    Timestamp(TimeUnit),
    /// Takes an array without the order of its elements. How often each of them occurs counts.
    Unordered,
    /// Takes bytes (of a header, for example) as UTF-8 text, so that they equal the same string in
    /// JSON.
    Text,
    /// Takes the text inside a JSON string: `"A-7"` with its quotation marks, as some clients write
    /// headers and message keys, equals `A-7`. Other text stays as it is.
    Unquote,
    /// Takes a whole number as the text of its digits, so that an id equals itself whether it is
    /// sent as `42` or as `"42"`. A string stays as it is.
    Digits,
}

pub(super) const NAMES: [(&str, Normaliser); 17] = [
    ("trim", Normaliser::Trim),
    ("lowercase", Normaliser::Lowercase),
    ("nfc", Normaliser::Nfc),
    ("decimal", Normaliser::Decimal),
    ("epoch-seconds", Normaliser::Epoch(TimeUnit::Seconds)),
    ("epoch-millis", Normaliser::Epoch(TimeUnit::Millis)),
    ("epoch-micros", Normaliser::Epoch(TimeUnit::Micros)),
    ("epoch-nanos", Normaliser::Epoch(TimeUnit::Nanos)),
    ("timestamp-days", Normaliser::Timestamp(TimeUnit::Days)),
    (
        "timestamp-seconds",
        Normaliser::Timestamp(TimeUnit::Seconds),
    ),
    ("timestamp-millis", Normaliser::Timestamp(TimeUnit::Millis)),
    ("timestamp-micros", Normaliser::Timestamp(TimeUnit::Micros)),
    ("timestamp-nanos", Normaliser::Timestamp(TimeUnit::Nanos)),
    ("unordered", Normaliser::Unordered),
    ("text", Normaliser::Text),
    ("unquote", Normaliser::Unquote),
    ("digits", Normaliser::Digits),
];

impl fmt::Display for Normaliser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES
            .iter()
            .find(|(_, normaliser)| normaliser == self)
            .map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl From<Normaliser> for String {
    fn from(normaliser: Normaliser) -> Self {
        normaliser.to_string()
    }
}

impl Normaliser {
    /// Returns whether this must be the last normaliser of a field, because its result is not a
    /// string.
    pub(super) fn is_final(self) -> bool {
        matches!(self, Self::Decimal | Self::Timestamp(_) | Self::Unordered)
    }

    /// The kind of value that this normaliser needs, for error texts.
    pub(super) fn needs(self) -> &'static str {
        match self {
            Self::Trim | Self::Lowercase | Self::Nfc | Self::Unquote => "a string",
            Self::Digits => "a string, or a whole number without an exponent",
            Self::Decimal => {
                "a number, or a string that holds one (with an exponent of at most 18 digits)"
            }
            Self::Epoch(_) => "a number, or a string that holds one or a time of ISO 8601",
            Self::Timestamp(_) => {
                "a string, as 2026-11-21T10:00:00Z; for numbers put `epoch-seconds`, -millis, -micros or -nanos before it"
            }
            Self::Unordered => "an array",
            Self::Text => "a string, or bytes that are UTF-8",
        }
    }
}
