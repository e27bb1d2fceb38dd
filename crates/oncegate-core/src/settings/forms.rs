//! The forms that times and sizes have in files: with their units, such as `"30s"` and `"64KiB"`.
//!
//! Each form is a type, and it is also what a field of another type is read with:
//! `#[serde(with = "Time")] lease: Duration`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A time above zero with its unit: `"30s"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time(pub Duration);

/// A time with its unit, or none.
#[derive(Clone, Copy, Debug)]
pub struct OptionalTime;

/// A number of bytes above zero with its unit: `"64KiB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub usize);

/// The units of times, the largest first, in milliseconds.
const TIMES: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];

/// The units in which sizes are written, the largest first, in bytes.
const SIZES: [(&str, usize); 4] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];

/// In the largest unit that needs no fraction.
impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        let unit = TIMES
            .into_iter()
            .find(|(_, unit)| millis >= *unit && millis.is_multiple_of(*unit));
        let (name, unit) = unit.unwrap_or(("ms", 1));
        write!(f, "{}{name}", millis / unit)
    }
}

/// In the largest unit that needs no fraction.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = *self;
        let unit = SIZES
            .into_iter()
            .find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit));
        let (name, unit) = unit.unwrap_or(("B", 1));
        write!(f, "{}{name}", bytes / unit)
    }
}

/// A whole number above zero with its unit: `500ms`, `30s`, `5m`, `2h`, `7d`.
impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, name) = text.split_at(digits);
        let (_, unit) = TIMES
            .into_iter()
            .find(|(unit, _)| *unit == name)
            .ok_or("it must be a number with one of the units ms, s, m, h, d, as in 30s")?;
        let time = number
            .parse()
            .ok()
            .and_then(|number| Duration::from_millis(unit).checked_mul(number))
            .filter(|time| !time.is_zero())
            .ok_or("it must be a whole number above zero")?;
        Ok(Self(time))
    }
}

/// A whole number of bytes with its unit.
impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const SHAPE: &str =
            "it must be a number with a unit, as in 64KiB (B, KiB, MiB, GiB, kB, MB, GB)";
        if text.trim().ends_with(|c: char| c.is_ascii_digit()) {
            return Err(SHAPE.to_owned());
        }
        let size: bytesize::ByteSize = text.parse().map_err(|_| SHAPE.to_owned())?;
        match usize::try_from(size.as_u64()) {
            Ok(bytes) if bytes > 0 => Ok(Self(bytes)),
            _ => Err("it must be above zero".to_owned()),
        }
    }
}

impl Time {
    /// Writes the value of a field.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&Self(*time))
    }

    /// Reads the value of a field.
    ///
    /// # Errors
    /// When it is no time with its unit.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        <Self as Deserialize>::deserialize(deserializer).map(|Self(time)| time)
    }
}

impl OptionalTime {
    /// Writes the value of a field.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(
        time: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        time.map(Time).serialize(serializer)
    }

    /// Reads the value of a field.
    ///
    /// # Errors
    /// When it is no time with its unit.
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let time = Option::<Time>::deserialize(deserializer)?;
        Ok(time.map(|Time(time)| time))
    }
}

impl Size {
    /// Writes the value of a field.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(bytes: &usize, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&Self(*bytes))
    }

    /// Reads the value of a field.
    ///
    /// # Errors
    /// When it is no size with its unit.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
        <Self as Deserialize>::deserialize(deserializer).map(|Self(bytes)| bytes)
    }
}

/// Reads text of one form.
struct Text<T> {
    expected: &'static str,
    parse: fn(&str) -> Result<T, String>,
}

impl<T> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.parse)(text).map_err(E::custom)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text {
            expected: "a time with its unit, as \"30s\" (ms, s, m, h, d),",
            parse: str::parse,
        })
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text {
            expected: "a size with its unit, as \"64KiB\",",
            parse: str::parse,
        })
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Gives forms their JSON schemas; the title is what the documentation calls the value.
macro_rules! described {
    ($($form:ident: $title:literal, $pattern:literal;)+) => {$(
        impl JsonSchema for $form {
            fn schema_name() -> Cow<'static, str> {
                stringify!($form).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": $pattern, "title": $title })
            }
        }
    )+};
}

described! {
    Time: "time", "^[0-9]+(ms|s|m|h|d)$";
    OptionalTime: "time", "^[0-9]+(ms|s|m|h|d)$";
    Size: "size", "^[0-9.]+ *([kKMGT]i?)?[bB]$";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!("500ms".parse(), Ok(Time(Duration::from_millis(500))));
        assert_eq!("2h".parse(), Ok(Time(Duration::from_secs(7_200))));
        for bad in [
            "",
            "5",
            "s",
            "0s",
            "-1s",
            "1.5s",
            "5 s",
            "99999999999999999999d",
            "999999999999d99",
        ] {
            assert!(bad.parse::<Time>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!("64KiB".parse(), Ok(Size(65_536)));
        assert_eq!("1 MB".parse(), Ok(Size(1_000_000)));
        for bad in ["30", "0KiB", "KiB", "true"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }

    #[test]
    fn values_are_written_as_they_are_read() {
        for text in ["1s", "90s", "7d", "15m", "2h", "100ms"] {
            assert_eq!(text.parse::<Time>().unwrap().to_string(), text);
        }
        for text in ["64KiB", "8MiB", "1000B"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }
}
