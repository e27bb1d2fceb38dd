//! Keys of several parts: which places of a message are read, what an absent one means, and which
//! case of messages has which parts.
//!
//! [`Key::json`](super::Key::json) has fields that are all in the payload and always set. What does
//! not fit into it stands here: other places than the payload, parts that may be absent, JSON
//! inside a string, and keys that depend on a field. `docs/WHICH_KEY.md` shows specifications for
//! common messages.

mod case;
mod decode;
mod form;
mod path;
mod plan;
mod read;

pub(super) use self::case::canonical_cases;
pub use self::case::{KeyCase, Literal, When};
pub use self::decode::Decoder;
pub(super) use self::plan::Composed;
pub(super) use self::read::Reading;
use super::encode;
use super::error::KeySpecError;
use super::limits::{MAX_PATHS, checked_name};
use super::normalise::check_normalisers;
use super::normaliser::Normaliser;

/// The maximum number of decoders (`|json`, `|base64`, `|gzip`) in one specification. A prefix that
/// several paths share counts once. It bounds the memory of a message: each decoded text may have
/// as many bytes as the payload.
pub const MAX_DECODERS: usize = 16;

/// A place of a message that a part of a key is read from, with the normalisers of its value.
///
/// In a file `"order_id"`, `{ path = "amount", as = "decimal" }`, `{ header = "x-id" }`, `{
/// message_key = {} }` or `{ message_id = {} }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    source: PlaceSource,
    normalisers: Vec<Normaliser>,
    takes_default: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum PlaceSource {
    Payload(String),
    Header(String),
    MessageKey,
    MessageId,
}

impl Place {
    /// Reads the value at this path of the payload. `body|json.order_id` reads JSON inside the
    /// string `body`; there are `|json`, `|base64` and `|gzip`, and a path that begins with `|`
    /// decodes the payload's own value. A `|` in a name is written `\|`.
    pub fn path(path: impl Into<String>) -> Self {
        Self::of(PlaceSource::Payload(path.into()))
    }

    /// Reads the bytes of a header, or of a message attribute. With a normaliser they are text.
    pub fn header(name: impl Into<String>) -> Self {
        Self::of(PlaceSource::Header(name.into()))
    }

    /// Reads the bytes of the broker's message key. With a normaliser they are text.
    #[must_use]
    pub fn message_key() -> Self {
        Self::of(PlaceSource::MessageKey)
    }

    /// Reads the broker's message id. With a normaliser it is text.
    #[must_use]
    pub fn message_id() -> Self {
        Self::of(PlaceSource::MessageId)
    }

    /// Appends a normaliser.
    #[must_use]
    pub fn then(mut self, normaliser: Normaliser) -> Self {
        self.normalisers.push(normaliser);
        self
    }

    /// Lets the place have the default of its schema in a message that was sent without a value, as
    /// [`Field::or_default`](super::Field::or_default) does. In a file `default = true`.
    #[must_use]
    pub fn or_default(mut self) -> Self {
        self.takes_default = true;
        self
    }

    /// Makes a part that may be absent; see [`Part::optional`].
    #[must_use]
    pub fn optional(self) -> Part {
        Part::from(self).optional()
    }

    /// Makes a part with this meaning of blank values; see [`Part::blank`].
    #[must_use]
    pub fn blank(self, blank: Blank) -> Part {
        Part::from(self).blank(blank)
    }

    fn of(source: PlaceSource) -> Self {
        Self {
            source,
            normalisers: Vec::new(),
            takes_default: false,
        }
    }

    /// The place with its path in canonical spelling.
    fn canonical(&self) -> Result<Self, KeySpecError> {
        let source = match &self.source {
            PlaceSource::Payload(text) => {
                let path = path::PlacePath::parse(text)?;
                if self.takes_default && !path.steps.is_empty() {
                    return Err(KeySpecError::BadDecoder {
                        path: text.clone(),
                        problem: "a decoded value has no default: leave `default` out",
                    });
                }
                PlaceSource::Payload(path.text)
            }
            PlaceSource::Header(name) => PlaceSource::Header(checked_name("header", name)?),
            other => other.clone(),
        };
        let place = Self {
            source,
            normalisers: self.normalisers.clone(),
            takes_default: self.takes_default,
        };
        check_normalisers(&place.name(), &place.normalisers)?;
        Ok(place)
    }

    /// The name of the place in errors.
    fn name(&self) -> String {
        match &self.source {
            PlaceSource::Payload(path) => path.clone(),
            PlaceSource::Header(name) => format!("header {name}"),
            PlaceSource::MessageKey => "message key".to_owned(),
            PlaceSource::MessageId => "message id".to_owned(),
        }
    }

    /// Writes what names the place in canonical bytes. It is a letter and, for two of them, a
    /// counted name, so one label never begins another.
    fn label(&self, out: &mut Vec<u8>) {
        match &self.source {
            PlaceSource::Payload(path) => {
                out.push(encode::SOURCE_JSON);
                encode::put_bytes(path.as_bytes(), out);
            }
            PlaceSource::Header(name) => {
                out.push(encode::SOURCE_HEADER);
                encode::put_bytes(name.as_bytes(), out);
            }
            PlaceSource::MessageKey => out.push(encode::SOURCE_MESSAGE_KEY),
            PlaceSource::MessageId => out.push(encode::SOURCE_MESSAGE_ID),
        }
    }

    fn is_in_payload(&self) -> bool {
        matches!(self.source, PlaceSource::Payload(_))
    }
}

impl<T: Into<String>> From<T> for Place {
    fn from(path: T) -> Self {
        Self::path(path)
    }
}

/// A part of a key: a place, or the first of several that has a value.
///
/// In a file like a [`Place`], with `optional = true` and `blank`; `{ first_of = ["after.id",
/// "before.id"] }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    places: Vec<Place>,
    is_first_of: bool,
    optional: bool,
    blank: Blank,
}

/// The meaning of a blank value: a string without a visible character, an array or object without a
/// value that is not blank.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Blank {
    /// The message has no key. The default: a blank value is nearly always a defect of the
    /// producer.
    #[default]
    Error,
    /// The same as no value.
    Absent,
    /// A value of its own: `""`, `" "`, `[]` and `{}` are four.
    Value,
}

impl Part {
    /// Takes the first of these places that has a value; which of them it is does not count, only
    /// the value.
    pub fn first_of<P: Into<Place>>(places: impl IntoIterator<Item = P>) -> Self {
        let places = places.into_iter().map(Into::into).collect();
        Self {
            places,
            is_first_of: true,
            optional: false,
            blank: Blank::default(),
        }
    }

    /// Allows that no place has a value: a missing field or header, a `null`, no payload. That is a
    /// value of its own, which equals no other. Default: the message has no key.
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    /// Sets what a blank value means. Default: [`Blank::Error`].
    #[must_use]
    pub fn blank(mut self, blank: Blank) -> Self {
        self.blank = blank;
        self
    }

    fn canonical(&self) -> Result<Self, KeySpecError> {
        let places = self
            .places
            .iter()
            .map(Place::canonical)
            .collect::<Result<Vec<_>, _>>()?;
        if places.is_empty() {
            return Err(KeySpecError::NoFields);
        }
        refuse_repeated(
            &places
                .iter()
                .map(|place| (labelled(place), place.name()))
                .collect::<Vec<_>>(),
        )?;
        Ok(Self { places, ..*self })
    }

    /// Leaves out that places take defaults: it changes no key.
    pub(super) fn forget_defaults(&mut self) {
        for place in &mut self.places {
            place.takes_default = false;
        }
    }

    fn label(&self) -> Vec<u8> {
        let mut out = Vec::new();
        if self.is_first_of {
            out.push(encode::LABEL_FIRST_OF);
            encode::put_len(self.places.len(), &mut out);
        }
        for place in &self.places {
            place.label(&mut out);
        }
        out
    }

    /// The name of the part in errors.
    fn name(&self) -> String {
        self.places
            .iter()
            .map(Place::name)
            .collect::<Vec<_>>()
            .join(" or ")
    }
}

impl<T: Into<Place>> From<T> for Part {
    fn from(place: T) -> Self {
        Self {
            places: vec![place.into()],
            is_first_of: false,
            optional: false,
            blank: Blank::default(),
        }
    }
}

/// The places of a part that are in the payload without a decoder, for the exceptions of a
/// fingerprint.
pub(super) fn plain_paths(parts: &[Part]) -> impl Iterator<Item = String> {
    parts
        .iter()
        .flat_map(|part| &part.places)
        .filter_map(|place| match &place.source {
            PlaceSource::Payload(path) => path::PlacePath::plain(path),
            _ => None,
        })
}

/// The parts of a key or a case, sorted by their labels.
pub(super) fn canonical_parts(parts: &[Part]) -> Result<Vec<Part>, KeySpecError> {
    if parts.is_empty() {
        return Err(KeySpecError::NoFields);
    }
    let count = parts.iter().map(|part| part.places.len()).sum();
    if count > MAX_PATHS {
        return Err(KeySpecError::TooManyPaths {
            count,
            limit: MAX_PATHS,
        });
    }
    let mut parts = parts
        .iter()
        .map(Part::canonical)
        .collect::<Result<Vec<_>, _>>()?;
    parts.sort_by_key(Part::label);
    refuse_repeated(
        &parts
            .iter()
            .map(|part| (part.label(), part.name()))
            .collect::<Vec<_>>(),
    )?;
    Ok(parts)
}

/// Returns whether a message without a payload can have no key: each case has a part that only the
/// payload has.
pub(super) fn need_payload(parts: &[Part]) -> bool {
    parts
        .iter()
        .any(|part| !part.optional && part.places.iter().all(Place::is_in_payload))
}

/// Returns whether any place is in the payload.
pub(super) fn read_payload(parts: &[Part]) -> bool {
    parts
        .iter()
        .any(|part| part.places.iter().any(Place::is_in_payload))
}

fn labelled(place: &Place) -> Vec<u8> {
    let mut out = Vec::new();
    place.label(&mut out);
    out
}

fn refuse_repeated(named: &[(Vec<u8>, String)]) -> Result<(), KeySpecError> {
    for (position, (label, name)) in named.iter().enumerate() {
        if named
            .iter()
            .take(position)
            .any(|(earlier, _)| earlier == label)
        {
            return Err(KeySpecError::RepeatedPath { path: name.clone() });
        }
    }
    Ok(())
}
