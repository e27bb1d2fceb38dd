//! The input of a key. The core knows no message type; a crate that has one implements
//! [`KeySource`] for it.
//!
//! `Debug` prints sizes and no contents, so that a log line with `{:?}` leaks no data.

use std::fmt;

/// The parts of a message that a key can be made from. Lookups borrow and copy nothing.
pub trait KeySource {
    /// The payload; `None` when there is none (a Kafka tombstone). An empty payload is `Some`.
    fn payload(&self) -> Option<&[u8]>;

    /// The header with this name. See [`HeaderValue::named`].
    fn header(&self, name: &str) -> HeaderValue<'_>;

    /// The broker's message key.
    fn message_key(&self) -> Option<&[u8]>;

    /// The broker's message id.
    fn message_id(&self) -> Option<&str>;
}

/// The result of a header lookup.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum HeaderValue<'a> {
    /// There is no header of this name, or it has no value.
    Absent,
    /// There is one header of this name.
    One(&'a [u8]),
    /// There are several headers of this name, with different values. It is not defined which one
    /// counts, so no key is made from them.
    Several,
}

impl<'a> HeaderValue<'a> {
    /// Looks a name up among the headers of a message. If none has exactly this name, one does that
    /// differs in the case of its ASCII letters: bridges and gateways change it.
    pub fn named<'n, H>(headers: H, name: &str) -> Self
    where
        H: Iterator<Item = (&'n str, &'a [u8])> + Clone,
    {
        let exact = headers.clone().filter(|(known, _)| *known == name);
        match Self::of(exact.map(|(_, value)| value)) {
            Self::Absent => {
                let alike = headers.filter(|(known, _)| known.eq_ignore_ascii_case(name));
                Self::of(alike.map(|(_, value)| value))
            }
            found => found,
        }
    }

    /// Combines the values of all headers of one name. Equal ones are one.
    pub fn of(values: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut values = values.into_iter();
        match values.next() {
            None => Self::Absent,
            Some(value) if values.all(|other| other == value) => Self::One(value),
            Some(_) => Self::Several,
        }
    }
}

/// A [`KeySource`] built from borrowed parts, for tests, tools and small loops.
#[derive(Clone, Copy, Default)]
pub struct KeyInput<'a> {
    payload: Option<&'a [u8]>,
    headers: &'a [(&'a str, &'a [u8])],
    message_key: Option<&'a [u8]>,
    message_id: Option<&'a str>,
}

impl<'a> KeyInput<'a> {
    /// Creates an empty message: no payload, no headers, no key, no id.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// Creates a message with a payload and nothing else.
    #[must_use]
    pub fn payload<P: AsRef<[u8]> + ?Sized>(payload: &'a P) -> Self {
        Self {
            payload: Some(payload.as_ref()),
            ..Self::default()
        }
    }

    /// Sets the headers, as pairs of name and value.
    #[must_use]
    pub fn with_headers(mut self, headers: &'a [(&'a str, &'a [u8])]) -> Self {
        self.headers = headers;
        self
    }

    /// Sets the broker's message key.
    #[must_use]
    pub fn with_message_key<K: AsRef<[u8]> + ?Sized>(mut self, key: &'a K) -> Self {
        self.message_key = Some(key.as_ref());
        self
    }

    /// Sets the broker's message id.
    #[must_use]
    pub fn with_message_id(mut self, id: &'a str) -> Self {
        self.message_id = Some(id);
        self
    }
}

impl KeySource for KeyInput<'_> {
    fn payload(&self) -> Option<&[u8]> {
        self.payload
    }

    fn header(&self, name: &str) -> HeaderValue<'_> {
        HeaderValue::named(self.headers.iter().copied(), name)
    }

    fn message_key(&self) -> Option<&[u8]> {
        self.message_key
    }

    fn message_id(&self) -> Option<&str> {
        self.message_id
    }
}

/// Wraps an unsized source so that it can be used as `&dyn KeySource`.
pub(super) struct ByRef<'a, T: ?Sized>(pub(super) &'a T);

impl<T: KeySource + ?Sized> KeySource for ByRef<'_, T> {
    fn payload(&self) -> Option<&[u8]> {
        self.0.payload()
    }

    fn header(&self, name: &str) -> HeaderValue<'_> {
        self.0.header(name)
    }

    fn message_key(&self) -> Option<&[u8]> {
        self.0.message_key()
    }

    fn message_id(&self) -> Option<&str> {
        self.0.message_id()
    }
}

impl fmt::Debug for HeaderValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("Absent"),
            Self::One(value) => write!(f, "One({} bytes)", value.len()),
            Self::Several => f.write_str("Several"),
        }
    }
}

impl fmt::Debug for KeyInput<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyInput")
            .field("payload_bytes", &self.payload.map(<[u8]>::len))
            .field("headers", &self.headers.len())
            .field("message_key_bytes", &self.message_key.map(<[u8]>::len))
            .field("message_id_bytes", &self.message_id.map(str::len))
            .finish()
    }
}
