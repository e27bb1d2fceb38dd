//! The format of a dead letter as an SQS message, and what is left out when it is too large.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::headers::{FIRST_RECEIVE_HEADER, GROUP_HEADER, TYPES_HEADER, is_system};
use super::sns::ENVELOPE_HEADER;
use super::{ORIGIN_ATTRIBUTE, POINTER_HEADER, REASON_ATTRIBUTE};
use oncegate_core::reason::one_line;
use oncegate_runtime::dead_letters::{DeadLetter, millis_since_1970};
use oncegate_runtime::message::Message;

/// The most attributes that SQS accepts.
pub(crate) const ATTRIBUTES_MOST: usize = 10;
/// The number of attributes that a dead letter has of ours.
const OURS: usize = 2;
/// The longest `oncegate-reason`, in bytes.
const REASON_MAX_BYTES: usize = 1024;
/// The shortest useful `oncegate-reason`, in bytes. A reason that would be cut shorter is left out.
const REASON_MIN_BYTES: usize = 32;
/// The longest name of an attribute, in bytes.
const NAME_MAX_BYTES: usize = 256;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Text(String),
    Bytes(Vec<u8>),
}

impl Value {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }
}

/// Attributes by name, each with its data type.
pub(crate) type Attributes = BTreeMap<String, (String, Value)>;

/// A dead letter before it is fitted to a size.
#[derive(Debug)]
pub(crate) struct Letter {
    body: String,
    attributes: Attributes,
    reason: String,
    provenance: Provenance,
}

/// A dead letter that can be sent.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) body: String,
    pub(crate) attributes: Attributes,
    /// `true` if our attributes were shortened to fit.
    pub(crate) shortened: bool,
    /// The names of the message's own attributes that did not fit.
    pub(crate) left_out: Vec<String>,
}

/// The origin of a dead letter.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Provenance {
    /// Equal for copies of one dead letter.
    pub(crate) id: String,
    pub(crate) route: String,
    pub(crate) origin: String,
    pub(crate) scope: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
    pub(crate) cause: String,
    pub(crate) attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_failed_at_ms: Option<u64>,
    pub(crate) failed_at_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timestamp_ms: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_received_at_ms: Option<i64>,
    /// The group of a FIFO queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
    /// The encoding of the body, if it is not the unchanged payload: `base64`, `empty` or `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) encoding: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) attributes: BTreeMap<String, SavedAttribute>,
    /// The names of the message's attributes that were dropped because they did not fit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) left_out: Vec<String>,
}

/// An attribute of the message that is stored in `oncegate-origin`.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct SavedAttribute {
    pub(crate) r#type: String,
    pub(crate) value: String,
}

impl Letter {
    pub(crate) fn of(letter: &DeadLetter) -> Self {
        let message = &letter.message;
        let cause = letter.cause.as_str();
        let (body, encoding) = body(message);
        let (attributes, kept) = attributes(message, ATTRIBUTES_MOST - OURS);
        let provenance = Provenance {
            id: letter.id(),
            route: message.route().to_owned(),
            origin: message.origin().to_string(),
            scope: letter.scope.clone(),
            key: letter.key.clone(),
            cause: cause.to_owned(),
            attempts: letter.attempts,
            first_failed_at_ms: letter.first_failed_at.map(millis_since_1970),
            failed_at_ms: millis_since_1970(letter.failed_at),
            timestamp_ms: message.timestamp_ms(),
            first_received_at_ms: word(message, FIRST_RECEIVE_HEADER)
                .and_then(|millis| millis.parse().ok()),
            group: word(message, GROUP_HEADER).map(str::to_owned),
            encoding: encoding.map(str::to_owned),
            attributes: kept,
            left_out: Vec::new(),
        };
        let reason: String = one_line(&letter.reason)
            .chars()
            .map(|c| if is_allowed(c) { c } else { '\u{fffd}' })
            .collect();
        let reason = cut(&format!("{cause}: {reason}"), REASON_MAX_BYTES).to_owned();
        Self {
            body,
            attributes,
            reason,
            provenance,
        }
    }

    /// Fits the dead letter into `limit` bytes: unchanged, or with our attributes shortened, or
    /// else with only those of the message's attributes that fit and the names of the others. The
    /// error is how many bytes the body alone needs.
    pub(crate) fn fit(mut self, limit: usize) -> Result<Written, usize> {
        loop {
            let own = self.own_bytes();
            let origin = self.origin();
            let with_origin = own + size(ORIGIN_ATTRIBUTE, &origin);
            if with_origin <= limit {
                return Ok(self.written(origin, limit - with_origin));
            }
            if own <= limit && self.provenance.is_whole() {
                return Ok(self.bare());
            }
            if self.leave_out_largest() {
                continue;
            }
            // Only the body and the origin are left.
            let is_encoded = self.provenance.encoding.is_some();
            if own <= limit && !is_encoded {
                return Ok(self.bare());
            }
            return Err(if is_encoded { with_origin } else { own });
        }
    }

    /// Returns the size of the message's own parts, in bytes, without those stored in the origin.
    fn own_bytes(&self) -> usize {
        self.body.len() + bytes(&self.attributes)
    }

    fn origin(&self) -> String {
        // It has only text and numbers with text as keys, so it can always be serialized.
        serde_json::to_string(&self.provenance).unwrap_or_default()
    }

    /// Leaves out the largest of the message's attributes; `false` when none is left.
    fn leave_out_largest(&mut self) -> bool {
        let own = self
            .attributes
            .iter()
            .map(|(name, (_, value))| (value.len(), name));
        let kept = self
            .provenance
            .attributes
            .iter()
            .map(|(name, kept)| (kept.value.len(), name));
        let Some((_, name)) = own.chain(kept).max() else {
            return false;
        };
        let name = name.clone();
        self.attributes.remove(&name);
        self.provenance.attributes.remove(&name);
        self.provenance.left_out.push(name);
        true
    }

    /// Returns the dead letter with the origin, and as much of the reason as fits into `room`
    /// bytes.
    fn written(self, origin: String, room: usize) -> Written {
        let Self {
            body,
            mut attributes,
            reason,
            provenance,
        } = self;
        attributes.insert(ORIGIN_ATTRIBUTE.to_owned(), string(&origin));
        let cut = cut(&reason, room.saturating_sub(size(REASON_ATTRIBUTE, "")));
        let shortened = cut.len() < reason.len();
        if !shortened || cut.len() >= REASON_MIN_BYTES {
            attributes.insert(REASON_ATTRIBUTE.to_owned(), string(cut));
        }
        Written {
            body,
            attributes,
            shortened,
            left_out: provenance.left_out,
        }
    }

    /// Returns the dead letter without our attributes.
    fn bare(self) -> Written {
        let Self {
            body,
            attributes,
            provenance,
            ..
        } = self;
        Written {
            body,
            attributes,
            shortened: true,
            left_out: provenance.left_out,
        }
    }
}

impl Provenance {
    /// Returns whether the message can be restored without the origin.
    fn is_whole(&self) -> bool {
        self.attributes.is_empty() && self.encoding.is_none() && self.left_out.is_empty()
    }
}

/// Returns the size of attributes, in bytes.
pub(crate) fn bytes(attributes: &Attributes) -> usize {
    attributes
        .iter()
        .map(|(name, (kind, value))| name.len() + kind.len() + value.len())
        .sum()
}

/// Returns a text with its data type.
fn string(text: &str) -> (String, Value) {
    (STRING.to_owned(), Value::Text(text.to_owned()))
}

/// Returns the size of a text attribute, in bytes.
fn size(name: &str, value: &str) -> usize {
    name.len() + STRING.len() + value.len()
}

fn word<'a>(message: &'a Message, header: &str) -> Option<&'a str> {
    std::str::from_utf8(message.header(header)?).ok()
}

pub(crate) const STRING: &str = "String";
pub(crate) const BINARY: &str = "Binary";

/// Returns the body, and its encoding if SQS does not accept the unchanged payload.
pub(crate) fn body(message: &Message) -> (String, Option<&'static str>) {
    // What came in the body, where the payload is another: the envelope of a topic goes around a
    // pointer.
    let came = message
        .header(ENVELOPE_HEADER)
        .or_else(|| message.header(POINTER_HEADER));
    if let Some(body) = came.and_then(|body| std::str::from_utf8(body).ok()) {
        return (body.to_owned(), None);
    }
    match std::str::from_utf8(message.payload()) {
        // SQS accepts no message without a body.
        _ if message.is_tombstone() => ("null".to_owned(), Some("null")),
        Ok("") => ("empty".to_owned(), Some("empty")),
        Ok(text) if text.chars().all(is_allowed) => (text.to_owned(), None),
        Ok(_) | Err(_) => (STANDARD.encode(message.payload()), Some("base64")),
    }
}

/// Returns the message's attributes, and those beyond `most` or that SQS would reject.
pub(crate) fn attributes(
    message: &Message,
    most: usize,
) -> (Attributes, BTreeMap<String, SavedAttribute>) {
    let types = types(message);
    let mut attributes = Attributes::new();
    let mut kept = BTreeMap::new();
    for header in message
        .headers()
        .iter()
        .filter(|header| !is_ours(&header.name))
    {
        let bytes = header.value.as_deref().unwrap_or_default();
        let known = types.get(&*header.name).map(String::as_str);
        let text = std::str::from_utf8(bytes)
            .ok()
            .filter(|text| text.chars().all(is_allowed));
        let (kind, value) = match text {
            Some(text) if !known.is_some_and(|kind| kind.starts_with(BINARY)) => {
                (known.unwrap_or(STRING), Value::Text(text.to_owned()))
            }
            _ => (known.unwrap_or(BINARY), Value::Bytes(bytes.to_vec())),
        };
        let fits = attributes.len() < most || attributes.contains_key(&*header.name);
        if fits && !bytes.is_empty() && is_name(&header.name) {
            attributes.insert(header.name.to_string(), (kind.to_owned(), value));
        } else {
            let value = match value {
                Value::Text(text) => text,
                Value::Bytes(bytes) => STANDARD.encode(bytes),
            };
            kept.insert(
                header.name.to_string(),
                SavedAttribute {
                    r#type: kind.to_owned(),
                    value,
                },
            );
        }
    }
    (attributes, kept)
}

/// Returns whether an attribute of this name is SQS's or oncegate's, and not the sender's.
pub(crate) fn is_ours(name: &str) -> bool {
    is_system(name) || [REASON_ATTRIBUTE, ORIGIN_ATTRIBUTE].contains(&name)
}

/// Returns the types of attributes that are not plain strings.
pub(crate) fn types(message: &Message) -> BTreeMap<String, String> {
    let types = message
        .header(TYPES_HEADER)
        .and_then(|types| serde_json::from_slice(types).ok());
    types.unwrap_or_default()
}

/// A dead-lettered message as it is sent back to a queue.
#[derive(Debug)]
pub(crate) struct Redriven {
    pub(crate) body: String,
    pub(crate) attributes: Attributes,
}

impl Redriven {
    /// Restores the message, and adds its route if that is not the queue's name. The error says why
    /// SQS would reject it.
    pub(crate) fn of(message: &Message, route: Option<&str>, queue: &str) -> Result<Self, String> {
        let (body, None) = body(message) else {
            return Err("its payload cannot be the body of an SQS message".to_owned());
        };
        let (mut attributes, kept) = attributes(message, ATTRIBUTES_MOST);
        if let Some(route) = route.filter(|route| *route != queue) {
            if attributes.len() == ATTRIBUTES_MOST {
                return Err(
                    "it already has ten attributes, so its route cannot be added".to_owned(),
                );
            }
            let route = serde_json::json!({ "route": route }).to_string();
            attributes.insert(ORIGIN_ATTRIBUTE.to_owned(), string(&route));
        }
        match kept.keys().next() {
            Some(name) => Err(format!(
                "SQS does not allow the name of its attribute {name:?}"
            )),
            None => Ok(Self { body, attributes }),
        }
    }
}

/// Returns whether SQS accepts this attribute name.
pub(crate) fn is_name(name: &str) -> bool {
    (1..=NAME_MAX_BYTES).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
        && !name.starts_with('.')
        && !name.ends_with('.')
        && !name.contains("..")
        && !name.to_ascii_lowercase().starts_with("amazon.")
}

/// Returns whether SQS accepts this character in a text.
fn is_allowed(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | ' '..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
}

/// Returns the beginning of a text, cut between characters.
fn cut(text: &str, most_bytes: usize) -> &str {
    let end = (0..=most_bytes.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    end.and_then(|end| text.get(..end)).unwrap_or_default()
}

#[cfg(test)]
#[path = "letter_tests.rs"]
mod tests;
