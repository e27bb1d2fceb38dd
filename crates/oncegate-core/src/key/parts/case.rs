//! Cases: keys whose parts depend on a value of the message.

use super::super::error::KeySpecError;
use super::super::limits::MAX_PATHS;
use super::{Part, Place, canonical_parts, need_payload, read_payload};

/// A case of [`Key::cases`](super::super::Key::cases): the parts of the messages that a condition
/// takes.
///
/// In a file `{ when = { path = "type", is = "refund" }, parts = ["refund_id"] }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyCase {
    pub(super) when: Option<When>,
    pub(super) parts: Vec<Part>,
}

impl KeyCase {
    /// The messages for which the condition holds, and no earlier one.
    pub fn when<P: Into<Part>>(when: When, parts: impl IntoIterator<Item = P>) -> Self {
        Self {
            when: Some(when),
            parts: parts.into_iter().map(Into::into).collect(),
        }
    }

    /// Creates the case of all messages that no earlier case takes. It must be the last one.
    pub fn otherwise<P: Into<Part>>(parts: impl IntoIterator<Item = P>) -> Self {
        Self {
            when: None,
            parts: parts.into_iter().map(Into::into).collect(),
        }
    }
}

/// The condition of a case: a place has a value, or it has this one.
///
/// In a file a [`Place`] as a table, with `is` for a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct When {
    pub(super) place: Place,
    pub(super) is: Option<Literal>,
}

impl When {
    /// The place has a value that is not `null`. A default is none, unless the place
    /// [takes it](Place::or_default).
    pub fn present(place: impl Into<Place>) -> Self {
        Self {
            place: place.into(),
            is: None,
        }
    }

    /// The place has exactly this value, after its normalisers. A default of the schema counts,
    /// because the specification names the value.
    pub fn is(place: impl Into<Place>, literal: impl Into<Literal>) -> Self {
        Self {
            place: place.into(),
            is: Some(literal.into()),
        }
    }
}

/// A value that a condition compares with.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(untagged, expecting = "a string, an integer or a boolean")]
pub enum Literal {
    /// A string, compared with strings of the payload and with bytes of other places.
    Text(String),
    /// A number, compared exactly.
    Integer(i64),
    /// A boolean.
    Bool(bool),
}

impl From<&str> for Literal {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<i64> for Literal {
    fn from(number: i64) -> Self {
        Self::Integer(number)
    }
}

impl From<bool> for Literal {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl KeyCase {
    pub(in super::super) fn needs_payload(&self) -> bool {
        need_payload(&self.parts)
            || self
                .when
                .as_ref()
                .is_some_and(|when| when.place.is_in_payload())
    }

    pub(in super::super) fn reads_payload(&self) -> bool {
        read_payload(&self.parts)
            || self
                .when
                .as_ref()
                .is_some_and(|when| when.place.is_in_payload())
    }

    pub(in super::super) fn forget_defaults(&mut self) {
        if let Some(when) = &mut self.when {
            when.place.takes_default = false;
        }
        self.parts.iter_mut().for_each(Part::forget_defaults);
    }

    pub(in super::super) fn parts(&self) -> &[Part] {
        &self.parts
    }
}

/// The cases in their order, which counts.
pub(in super::super) fn canonical_cases(cases: &[KeyCase]) -> Result<Vec<KeyCase>, KeySpecError> {
    if cases.is_empty() {
        return Err(KeySpecError::BadCases {
            problem: "there is none",
        });
    }
    let count = cases.iter().map(|case| 1 + case.parts.len()).sum();
    if count > MAX_PATHS {
        return Err(KeySpecError::TooManyPaths {
            count,
            limit: MAX_PATHS,
        });
    }
    let mut canonical: Vec<KeyCase> = Vec::with_capacity(cases.len());
    for case in cases {
        let when = match &case.when {
            Some(when) => Some(When {
                place: when.place.canonical()?,
                is: when.is.clone(),
            }),
            None => None,
        };
        // What stands behind a case without a condition would never be used.
        if canonical
            .last()
            .is_some_and(|earlier| earlier.when.is_none())
        {
            return Err(KeySpecError::BadCases {
                problem: "a case without `when` must be the last one",
            });
        }
        // Not even by the use of a default: the condition in the key does not have it.
        if canonical
            .iter()
            .any(|earlier| plain(earlier.when.as_ref()) == plain(when.as_ref()))
        {
            return Err(KeySpecError::BadCases {
                problem: "two of them have the same `when`",
            });
        }
        canonical.push(KeyCase {
            when,
            parts: canonical_parts(&case.parts)?,
        });
    }
    Ok(canonical)
}

fn plain(when: Option<&When>) -> Option<When> {
    let mut when = when?.clone();
    when.place.takes_default = false;
    Some(when)
}
