//! The effects of normalisers: they make different spellings of a field's value equal.

use std::borrow::Cow;
use std::str::FromStr;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::error::KeySpecError;
use super::json::Kind;
use super::normaliser::{NAMES, Normaliser};
use super::number;

impl FromStr for Normaliser {
    type Err = KeySpecError;

    fn from_str(text: &str) -> Result<Self, KeySpecError> {
        let known = NAMES.iter().find(|(name, _)| *name == text);
        known
            .map(|(_, normaliser)| *normaliser)
            .ok_or_else(|| KeySpecError::UnknownNormaliser {
                name: text.to_owned(),
            })
    }
}

impl TryFrom<String> for Normaliser {
    type Error = KeySpecError;

    fn try_from(text: String) -> Result<Self, KeySpecError> {
        text.parse()
    }
}

impl Normaliser {
    /// Returns whether this normaliser takes a value of this kind, which is no string. A number
    /// already is its exact decimal.
    pub(super) fn fits(self, kind: Kind) -> bool {
        match self {
            Self::Decimal => kind == Kind::Number,
            Self::Unordered => kind == Kind::Array,
            _ => false,
        }
    }

    /// Applies a normaliser that converts a string to a string. The final ones return their input.
    pub(super) fn rewrite(self, text: Cow<'_, str>) -> Cow<'_, str> {
        match self {
            Self::Trim => match text {
                Cow::Borrowed(text) => Cow::Borrowed(text.trim()),
                Cow::Owned(text) => Cow::Owned(text.trim().to_owned()),
            },
            Self::Lowercase
                if text
                    .bytes()
                    .all(|b| b.is_ascii() && !b.is_ascii_uppercase()) =>
            {
                text
            }
            Self::Lowercase => Cow::Owned(text.to_lowercase()),
            Self::Nfc if is_nfc_quick(text.chars()) == IsNormalized::Yes => text,
            Self::Nfc => Cow::Owned(text.nfc().collect()),
            Self::Unquote if text.starts_with('"') => {
                serde_json::from_str(&text).map_or(text, Cow::Owned)
            }
            Self::Unquote
            | Self::Decimal
            | Self::Epoch(_)
            | Self::Timestamp(_)
            | Self::Unordered
            | Self::Text
            | Self::Digits => text,
        }
    }
}

/// Returns whether a number of JSON is written as a whole one, in digits. Minus zero is none.
pub(super) fn is_whole(number: &str) -> bool {
    let digits = number.strip_prefix('-').unwrap_or(number);
    number != "-0" && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Writes the canonical decimal of a string; `None` when it is not a decimal.
pub(super) fn write_decimal(text: &str, out: &mut Vec<u8>) -> Option<()> {
    if !number::is_decimal(text.as_bytes()) {
        return None;
    }
    number::write_canonical(text.as_bytes(), out).ok()
}

/// Refuses normalisers that cannot stand in this order. `path` is for the error.
pub(super) fn check_normalisers(
    path: &str,
    normalisers: &[Normaliser],
) -> Result<(), KeySpecError> {
    for (position, normaliser) in normalisers.iter().copied().enumerate() {
        let (earlier, later) = normalisers.split_at(position);
        let next = later.get(1);
        let problem = if earlier.contains(&normaliser) {
            "is given twice; remove one"
        } else if earlier.iter().any(|other| other.is_final()) {
            "comes after `decimal`, `timestamp` or `unordered`, whose result it cannot change; put it before, or remove it"
        } else if matches!(normaliser, Normaliser::Epoch(_))
            && !matches!(next, Some(Normaliser::Timestamp(_)))
        {
            "says the unit of a count; put `timestamp-…` right after it"
        } else {
            continue;
        };
        return Err(KeySpecError::Normalisers {
            path: path.to_owned(),
            normaliser,
            problem,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        for (name, normaliser) in NAMES {
            assert_eq!(name.parse(), Ok(normaliser));
            assert_eq!(normaliser.to_string(), name);
        }
        assert!("timestamp".parse::<Normaliser>().is_err());
    }
}
