//! Idempotency keys: a specification of which messages are the same, and the key that it derives
//! from a message.
//!
//! A [`Key`] is plain data, with the same meaning in Rust, in a configuration file and on the
//! command line. [`Key::compile`] checks it once, at start-up, and returns a [`CompiledKey`], which
//! derives a [`StoreKey`] from each message in one pass over its payload.
//!
//! ```
//! use oncegate_core::key::{Field, Key, KeyInput, Scope};
//!
//! let key = Key::json([Field::from("order_id"), Field::path("amount").decimal()]);
//! let key = key.compile(&Scope::new("billing")?)?;
//!
//! let first = KeyInput::payload(br#"{"order_id":"A-7","amount":10,"sent_at":1}"#);
//! let again = KeyInput::payload(br#"{"sent_at":2, "amount":"10.0", "order_id":"A-7"}"#);
//! assert_eq!(key.derive("orders", &first)?, key.derive("orders", &again)?);
//!
//! let typo = KeyInput::payload(br#"{"orderId":"A-7","amount":10}"#);
//! assert_eq!(key.derive("orders", &typo).unwrap_err().kind(), "missing_field");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Paths
//!
//! A path names a value in a JSON payload: `order_id`, `customer.id`, `items.0.sku`. Dots separate
//! the parts. A part that is a plain number is an index in an array, or a name in an object. A
//! backslash escapes the next character: `a\.b` is one field with a dot in its name. (`\\`, `\,`,
//! `\:` and `\*` exist too; `*` alone is reserved.)
//!
//! # What is the same, and what is not
//!
//! The order of members, white space, escapes (`"\u0041"` is `"A"`) and the spelling of a number
//! (`10`, `10.0`, `1e1`) do not count. Everything else does: `"10"` and `10` differ unless the
//! field is `decimal`; case, blanks and Unicode forms count unless the field has a normaliser for
//! them. Numbers are exact decimals of any size. A value may be an array or an object; then all of
//! its content counts.
//!
//! A value that cannot identify a message is an error and never becomes a key: a missing, null or
//! blank field, an array or object that holds nothing else, malformed JSON, a repeated name in an
//! object, a lone surrogate escape. `docs/KEY_FORMAT.md` defines the format byte by byte;
//! `vectors/keys.json` holds the test vectors.

mod custom;
mod derive;
mod descriptor;
mod encode;
mod error;
mod explain;
mod fingerprint;
mod format;
mod input;
mod instant;
mod json;
mod limits;
mod normalise;
mod normaliser;
mod number;
mod parts;
mod path;
mod paths;
mod routes;
mod scratch;
mod spec;
mod store_key;
pub mod vectors;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use self::custom::CustomKey;
pub use self::custom::KeyParts;
pub use self::derive::CompiledKey;
pub use self::descriptor::Descriptor;
pub use self::error::{KeyError, KeySpecError};
pub use self::explain::Explanation;
pub use self::fingerprint::{CompiledFingerprint, ContentMark, Fingerprint, FingerprintSpec};
use self::format::SharedFormat;
pub use self::format::{
    DocumentPlace, Format, PrepareError, Wanted, foreign_avro, foreign_form, is_s3_pointer,
};
pub use self::input::{HeaderValue, KeyInput, KeySource};
pub use self::limits::{
    DEFAULT_MAX_PAYLOAD_BYTES, KEY_FORMAT, MAX_DEPTH, MAX_NAME_BYTES, MAX_PATH_BYTES, MAX_PATHS,
    MAX_PAYLOAD_BYTES_LIMIT,
};
pub use self::normaliser::{Normaliser, TimeUnit};
pub use self::parts::{Blank, Decoder, KeyCase, Literal, MAX_DECODERS, Part, Place, When};
use self::routes::Routes;
pub use self::store_key::{Digest, Scope, StoreKey};

/// The specification of what identifies a message, as plain data.
///
/// In a configuration file (TOML or JSON):
///
/// ```toml
/// key = { json = ["order_id", { path = "amount", as = "decimal" }] }
/// key = { json = ["id", { path = "email", as = ["trim", "lowercase"] }], tenant = { header = "x-tenant" } }
/// key = { payload = { except = ["sent_at", "trace.id"] } }
/// key = { header = "x-request-id" }
/// key = { parts = ["order_id", { path = "coupon", optional = true }, { header = "x-region" }] }
/// key = { cases = [{ when = { path = "type", is = "refund" }, parts = ["refund_id"] }, { parts = ["order_id"] }] }
/// key = "message_key"                     # or "message_id", "payload"
/// ```
///
/// On the command line, through [`FromStr`](std::str::FromStr): `order_id,customer.id`,
/// `amount:decimal`, `email:trim:lowercase`, `payload`, `payload-except:sent_at,trace.id`,
/// `header:x-request-id`, `message-key`, `message-id`, or the JSON form (it starts with `{` or
/// a quote).
/// A first field with the name of one of those words needs a prefix: `json:payload`.
///
/// A specification from a file or text is checked when it is parsed. A specification built in Rust
/// is checked by [`compile`](Key::compile) or [`check`](Key::check).
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    source: Source,
    except: Vec<String>,
    tenant: Option<TenantSource>,
    domain: Domain,
    max_payload_bytes: usize,
    format: Option<SharedFormat>,
    routes: Routes,
}

/// The purpose of a key. Keys of two domains are never equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Domain {
    /// Messages of brokers.
    #[default]
    Messages,
    /// HTTP requests.
    Http,
}

#[derive(Clone, Debug, PartialEq)]
enum Source {
    Json(Vec<Field>),
    Payload,
    Header(String),
    MessageKey,
    MessageId,
    Custom(CustomKey),
    Parts(Vec<Part>),
    Cases(Vec<KeyCase>),
}

impl Key {
    /// Makes a key from the values at these paths of a JSON payload. The order of the paths does
    /// not matter.
    pub fn json<F: Into<Field>>(fields: impl IntoIterator<Item = F>) -> Self {
        Self::of(Source::Json(fields.into_iter().map(Into::into).collect()))
    }

    /// Makes a key from the whole JSON payload. Use [`except`](Key::except) for values that change
    /// with every delivery.
    #[must_use]
    pub fn payload() -> Self {
        Self::of(Source::Payload)
    }

    /// Makes a key from the bytes of a header. If the message has none with exactly this name, one
    /// in another case counts. It may occur several times with one value.
    pub fn header(name: impl Into<String>) -> Self {
        Self::of(Source::Header(name.into()))
    }

    /// Makes a key from the bytes of the broker's message key (the record key in Kafka).
    #[must_use]
    pub fn message_key() -> Self {
        Self::of(Source::MessageKey)
    }

    /// Makes a key from the broker's message id. It detects redeliveries, but not a message that a
    /// producer sends twice.
    #[must_use]
    pub fn message_id() -> Self {
        Self::of(Source::MessageId)
    }

    /// Makes a key with a function, for cases that the other sources do not cover, such as another
    /// payload format.
    ///
    /// The function pushes the parts that identify the message; the boundaries between them count.
    /// Its error is constant text, so that no payload data gets into logs. `name` and `version`
    /// represent the function in the scope's [`Descriptor`]: raise the version whenever the
    /// function makes other keys than before. A key with a function cannot be serialised.
    ///
    /// ```
    /// use oncegate_core::key::{Key, KeyInput, KeyParts, KeySource, Scope};
    ///
    /// let key = Key::custom("csv-first-column", 1, |message: &dyn KeySource, key: &mut KeyParts<'_>| {
    ///     let line = message.payload().ok_or("no payload")?;
    ///     key.push(line.split(|b| *b == b',').next().ok_or("no column")?);
    ///     Ok(())
    /// });
    /// let key = key.compile(&Scope::new("billing")?)?;
    /// let one = KeyInput::payload(b"7,x");
    /// let two = KeyInput::payload(b"7,y");
    /// assert_eq!(key.derive("orders", &one)?, key.derive("orders", &two)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn custom<F>(name: impl Into<String>, version: u32, function: F) -> Self
    where
        F: Fn(&dyn KeySource, &mut KeyParts<'_>) -> Result<(), &'static str>
            + Send
            + Sync
            + 'static,
    {
        Self::of(Source::Custom(CustomKey::new(
            name.into(),
            version,
            function,
        )))
    }

    /// Makes a key from several parts of a message: payload, headers, message key and message id,
    /// some of which may be absent. The order of the parts does not matter. At least one of them
    /// must have a value that is not blank.
    ///
    /// ```
    /// use oncegate_core::key::{Key, KeyInput, Part, Place, Scope};
    ///
    /// let key = Key::parts([Part::from("order_id"), Place::path("coupon").optional(), Place::path("body|json.n").optional()]);
    /// let key = key.compile(&Scope::new("billing")?)?;
    /// let none = key.derive("orders", &KeyInput::payload(r#"{"order_id":7}"#))?;
    /// let null = key.derive("orders", &KeyInput::payload(r#"{"order_id":7,"coupon":null}"#))?;
    /// let some = key.derive("orders", &KeyInput::payload(r#"{"order_id":7,"coupon":"SAVE10"}"#))?;
    /// assert_eq!(none, null);
    /// assert_ne!(none, some);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn parts<P: Into<Part>>(parts: impl IntoIterator<Item = P>) -> Self {
        Self::of(Source::Parts(parts.into_iter().map(Into::into).collect()))
    }

    /// Makes a key by cases: the first one whose condition holds names the parts. A message that no
    /// case takes is [`KeyError::NoCase`]. The condition is a part of the key, so messages of two
    /// cases never share one.
    pub fn cases(cases: impl IntoIterator<Item = KeyCase>) -> Self {
        Self::of(Source::Cases(cases.into_iter().collect()))
    }

    /// Excludes these paths from [`Key::payload`]. A path that a message does not have is not an
    /// error.
    #[must_use]
    pub fn except<P: Into<String>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.except.extend(paths.into_iter().map(Into::into));
        self
    }

    /// Makes the tenant a part of the key: equal fields of two tenants give two keys. Default: no
    /// tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: TenantSource) -> Self {
        self.tenant = Some(tenant);
        self
    }

    /// Makes keys of HTTP requests, which differ from the keys of all messages: without this, a
    /// message whose route is named like that of the requests could have a request's key. In a file
    /// `domain = "http"`.
    #[must_use]
    pub fn for_http_requests(mut self) -> Self {
        self.domain = Domain::Http;
        self
    }

    /// Sets the maximum size in bytes of the payload (or header, message key, …) that a key is made
    /// from. A larger one is [`KeyError::TooLarge`]. Default: [`DEFAULT_MAX_PAYLOAD_BYTES`]. Does
    /// not change any key.
    #[must_use]
    pub fn max_payload_bytes(mut self, bytes: usize) -> Self {
        self.max_payload_bytes = bytes;
        self
    }

    /// Sets what turns payloads into documents: Avro, Protobuf, a framing, a compression. Default:
    /// the payload is JSON.
    ///
    /// It is not part of the specification: a message has the key of the JSON document with the
    /// same values, so the format may change and keys stay. A [custom](Self::custom) key is given
    /// the payload as it is.
    #[must_use]
    pub fn format(mut self, format: Arc<dyn Format>) -> Self {
        self.format = Some(SharedFormat(format));
        self
    }

    /// Gives all messages the keys of this route, whatever topic or queue they come from: a
    /// mirrored topic, a renamed queue, a topic for each region. Default: the route of the message.
    ///
    /// Like the format, it is not part of the specification: two names of one stream then share
    /// keys, and the records of the first name answer the messages of the second.
    ///
    /// ```
    /// use oncegate_core::key::{Key, KeyInput, Scope};
    ///
    /// let scope = Scope::new("billing")?;
    /// let order = KeyInput::payload(r#"{"order_id":7}"#);
    /// let before = Key::json(["order_id"]).compile(&scope)?;
    /// let mirrored = Key::json(["order_id"]).route("orders").compile(&scope)?;
    /// assert_eq!(mirrored.derive("eu.orders", &order)?, before.derive("orders", &order)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn route(mut self, name: impl Into<String>) -> Self {
        self.routes.set_all(name.into());
        self
    }

    /// Gives the messages of `route` the keys of the route `name`. It goes before
    /// [`route`](Self::route).
    #[must_use]
    pub fn route_of(mut self, route: impl Into<String>, name: impl Into<String>) -> Self {
        self.routes.set(route.into(), name.into());
        self
    }

    /// Returns the route that keys have for messages of this topic or queue.
    #[must_use]
    pub fn route_in_keys<'a>(&'a self, route: &'a str) -> &'a str {
        self.routes.name(route)
    }

    /// Returns whether the key is the payload as a whole, so that no two contents have one key.
    #[must_use]
    pub fn is_of_payload(&self) -> bool {
        self.source == Source::Payload && self.except.is_empty()
    }

    /// Returns whether the key is the broker's key of the message and nothing else. In a compacted
    /// topic that names an entity, and not one of its changes.
    #[must_use]
    pub fn is_message_key(&self) -> bool {
        self.source == Source::MessageKey
    }

    /// Returns whether every key depends on the payload. If so, a message without a payload (a
    /// Kafka tombstone) always gives [`KeyError::NoPayload`].
    #[must_use]
    pub fn needs_payload(&self) -> bool {
        let source = match &self.source {
            Source::Json(_) | Source::Payload => true,
            Source::Parts(parts) => parts::need_payload(parts),
            Source::Cases(cases) => cases.iter().all(KeyCase::needs_payload),
            _ => false,
        };
        source || matches!(self.tenant, Some(TenantSource::Json(_)))
    }

    /// Returns whether a key may depend on the payload.
    #[must_use]
    pub fn reads_payload(&self) -> bool {
        let source = match &self.source {
            Source::Parts(parts) => parts::read_payload(parts),
            Source::Cases(cases) => cases.iter().any(KeyCase::reads_payload),
            Source::Custom(_) => true,
            _ => false,
        };
        source || self.needs_payload()
    }

    /// Returns whether the tenant is a part of the key.
    #[must_use]
    pub fn has_tenant(&self) -> bool {
        self.tenant.is_some()
    }

    fn of(source: Source) -> Self {
        Self {
            source,
            except: Vec::new(),
            tenant: None,
            domain: Domain::Messages,
            max_payload_bytes: DEFAULT_MAX_PAYLOAD_BYTES,
            format: None,
            routes: Routes::default(),
        }
    }
}

/// A field of a key: a path, and the normalisers that are applied to its value, in order.
///
/// In a file `"order_id"`, or `{ path = "amount", as = "decimal" }`, or `as = ["trim",
/// "lowercase"]`, or `default = true`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    path: String,
    normalisers: Vec<Normaliser>,
    takes_default: bool,
}

impl Field {
    /// Creates a field from a path, without normalisers. The path is checked when the key is
    /// compiled.
    pub fn path(path: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            normalisers: Vec::new(),
            takes_default: false,
        }
    }

    /// Lets the field have the default of its schema in a message that was sent without it: a
    /// Protobuf field without presence, a field that only the reader schema of Avro has. Changes no
    /// key of JSON. Default: the message has no key, because a default is the same in every
    /// message. In a file `default = true`.
    #[must_use]
    pub fn or_default(mut self) -> Self {
        self.takes_default = true;
        self
    }

    /// Removes white space at both ends. The value must be a string.
    #[must_use]
    pub fn trim(self) -> Self {
        self.then(Normaliser::Trim)
    }

    /// Converts to lower case, independent of the locale. The value must be a string.
    #[must_use]
    pub fn lowercase(self) -> Self {
        self.then(Normaliser::Lowercase)
    }

    /// Converts to Unicode Normalization Form C. The value must be a string.
    #[must_use]
    pub fn nfc(self) -> Self {
        self.then(Normaliser::Nfc)
    }

    /// Compares exact decimals: the number `10` and the strings `"10"`, `"10.0"` and `"+1e1"` are
    /// the same.
    #[must_use]
    pub fn decimal(self) -> Self {
        self.then(Normaliser::Decimal)
    }

    /// Reads a number, or a string that holds one, as a count of these units since 1970.
    /// [`timestamp`](Self::timestamp) must follow. A count outside of the years 0000 to 9999 is an
    /// error, so a count in a finer unit does not pass.
    #[must_use]
    pub fn epoch(self, counted: TimeUnit) -> Self {
        self.then(Normaliser::Epoch(counted))
    }

    /// Compares the instant of an ISO 8601 string with an offset, truncated to the unit.
    ///
    /// `2024-05-01T10:00:00Z`, `2024-05-01T12:00+02:00`, `2024-05-01 10:00:00+00` and
    /// `20240501T100000Z` are one instant. Use it for times of the business. A time that changes
    /// with every delivery makes every delivery a new message.
    #[must_use]
    pub fn timestamp(self, unit: TimeUnit) -> Self {
        self.then(Normaliser::Timestamp(unit))
    }

    /// Appends a normaliser.
    #[must_use]
    pub fn then(mut self, normaliser: Normaliser) -> Self {
        self.normalisers.push(normaliser);
        self
    }
}

impl From<&str> for Field {
    fn from(path: &str) -> Self {
        Self::path(path)
    }
}

impl From<String> for Field {
    fn from(path: String) -> Self {
        Self::path(path)
    }
}

/// The source of a message's tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TenantSource {
    /// A field of the JSON payload.
    Json(Field),
    /// A header.
    Header(String),
}

impl TenantSource {
    /// Takes the tenant from this path of a JSON payload.
    pub fn json(field: impl Into<Field>) -> Self {
        Self::Json(field.into())
    }

    /// Takes the tenant from the bytes of this header.
    pub fn header(name: impl Into<String>) -> Self {
        Self::Header(name.into())
    }
}
