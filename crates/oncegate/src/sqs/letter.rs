//! What a dead letter looks like as a message of SQS: what it may hold, and what does not fit.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::convert::{FIRST_RECEIVE_HEADER, GROUP_HEADER, TYPES_HEADER, is_system};
use super::sns::ENVELOPE_HEADER;
use super::{ORIGIN_ATTRIBUTE, REASON_ATTRIBUTE};
use crate::dead_letters::{DeadLetter, millis_since_1970};
use crate::message::{Header, Message};

/// The most attributes that SQS takes.
const ATTRIBUTES_MOST: usize = 10;
/// How many of them are ours.
const OURS: usize = 2;
/// The longest `oncegate-reason`, in bytes.
const REASON_MAX_BYTES: usize = 1024;
/// A reason that would be cut shorter than this says nothing.
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
    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }
}

/// Attributes by name, each with its data type.
pub(crate) type Attributes = BTreeMap<String, (String, Value)>;

/// A letter before it is known what fits.
#[derive(Debug)]
pub(crate) struct Letter {
    body: String,
    attributes: Attributes,
    reason: String,
    origin: String,
    /// Some attributes are in `origin` alone.
    origin_is_needed: bool,
}

/// A letter as it can be sent.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) body: String,
    pub(crate) attributes: Attributes,
    /// Something of ours did not fit.
    pub(crate) shortened: bool,
}

/// Where a letter came from.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Provenance {
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
    /// How the body is written, when it is not the payload as it was: `base64`, `empty` or `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) encoding: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) attributes: BTreeMap<String, Kept>,
}

/// An attribute that has no place of its own.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Kept {
    pub(crate) r#type: String,
    pub(crate) value: String,
}

impl Letter {
    pub(crate) fn of(letter: &DeadLetter) -> Self {
        let (message, cause) = (&letter.message, letter.cause.as_str());
        let (body, encoding) = body(message);
        let (attributes, kept) = attributes(message, ATTRIBUTES_MOST - OURS);
        let origin_is_needed = !kept.is_empty() || encoding.is_some();
        let provenance = Provenance {
            route: message.route().to_owned(),
            origin: message.origin().to_string(),
            scope: letter.scope.clone(),
            key: letter.key.clone(),
            cause: cause.to_owned(),
            attempts: letter.attempts,
            first_failed_at_ms: letter.first_failed_at.map(millis_since_1970),
            failed_at_ms: millis_since_1970(letter.failed_at),
            timestamp_ms: message.timestamp_ms(),
            first_received_at_ms: word(message, FIRST_RECEIVE_HEADER).and_then(|millis| millis.parse().ok()),
            group: word(message, GROUP_HEADER).map(str::to_owned),
            encoding: encoding.map(str::to_owned),
            attributes: kept,
        };
        // Text and numbers under names that are text: nothing in it cannot be written.
        let origin = serde_json::to_string(&provenance).unwrap_or_default();
        let reason: String =
            letter.reason.chars().map(|c| if is_allowed(c) { c } else { '\u{fffd}' }).collect();
        let reason = cut(&format!("{cause}: {reason}"), REASON_MAX_BYTES).to_owned();
        Self { body, attributes, reason, origin, origin_is_needed }
    }

    /// As much of ours as fits into `limit` bytes, and all of the message's own. An error says how many bytes
    /// that would be.
    pub(crate) fn fit(self, limit: usize) -> Result<Written, usize> {
        let Self { body, mut attributes, reason, origin, origin_is_needed } = self;
        let size = |name: &str, value: &str| name.len() + STRING.len() + value.len();
        let own = body.len()
            + attributes
                .iter()
                .map(|(name, (kind, value))| name.len() + kind.len() + value.len())
                .sum::<usize>();
        let with_origin = own + size(ORIGIN_ATTRIBUTE, &origin);
        let text = |text: &str| (STRING.to_owned(), Value::Text(text.to_owned()));
        if with_origin > limit {
            if origin_is_needed || own > limit {
                return Err(with_origin);
            }
            return Ok(Written { body, attributes, shortened: true });
        }
        attributes.insert(ORIGIN_ATTRIBUTE.to_owned(), text(&origin));
        let room = limit.saturating_sub(with_origin + size(REASON_ATTRIBUTE, ""));
        let cut = cut(&reason, room);
        let shortened = cut.len() < reason.len();
        if !shortened || cut.len() >= REASON_MIN_BYTES {
            attributes.insert(REASON_ATTRIBUTE.to_owned(), text(cut));
        }
        Ok(Written { body, attributes, shortened })
    }
}

fn word<'a>(message: &'a Message, header: &str) -> Option<&'a str> {
    std::str::from_utf8(message.header(header)?).ok()
}

pub(crate) const STRING: &str = "String";
pub(crate) const BINARY: &str = "Binary";

/// The body, and how it is written when SQS does not take it as it is.
fn body(message: &Message) -> (String, Option<&'static str>) {
    if let Some(envelope) = message.header(ENVELOPE_HEADER).and_then(|body| std::str::from_utf8(body).ok()) {
        return (envelope.to_owned(), None);
    }
    match std::str::from_utf8(message.payload()) {
        // SQS takes no message without a body.
        _ if message.is_tombstone() => ("null".to_owned(), Some("null")),
        Ok("") => ("empty".to_owned(), Some("empty")),
        Ok(text) if text.chars().all(is_allowed) => (text.to_owned(), None),
        Ok(_) | Err(_) => (STANDARD.encode(message.payload()), Some("base64")),
    }
}

/// The message's attributes, and those for which there is no room or which SQS would refuse.
fn attributes(message: &Message, most: usize) -> (Attributes, BTreeMap<String, Kept>) {
    let types = types(message);
    let (mut attributes, mut kept) = (Attributes::new(), BTreeMap::new());
    let foreign = |header: &&Header| {
        !is_system(&header.name) && ![REASON_ATTRIBUTE, ORIGIN_ATTRIBUTE].contains(&&*header.name)
    };
    for header in message.headers().iter().filter(foreign) {
        let bytes = header.value.as_deref().unwrap_or_default();
        let known = types.get(&*header.name).map(String::as_str);
        let text = std::str::from_utf8(bytes).ok().filter(|text| text.chars().all(is_allowed));
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
            kept.insert(header.name.to_string(), Kept { r#type: kind.to_owned(), value });
        }
    }
    (attributes, kept)
}

/// The types of those attributes that are no plain strings.
pub(crate) fn types(message: &Message) -> BTreeMap<String, String> {
    let types = message.header(TYPES_HEADER).and_then(|types| serde_json::from_slice(types).ok());
    types.unwrap_or_default()
}

/// A message that was given up, as it goes back to a queue.
#[derive(Debug)]
pub(crate) struct Redriven {
    pub(crate) body: String,
    pub(crate) attributes: Attributes,
}

impl Redriven {
    /// The message as it was, with its route where the queue's name is not that already. An error says why SQS would
    /// not take it.
    pub(crate) fn of(message: &Message, route: Option<&str>, queue: &str) -> Result<Self, String> {
        let (body, None) = body(message) else {
            return Err("its payload cannot be the body of a message of SQS".to_owned());
        };
        let (mut attributes, kept) = attributes(message, ATTRIBUTES_MOST);
        if let Some(route) = route.filter(|route| *route != queue) {
            if attributes.len() == ATTRIBUTES_MOST {
                return Err("it has ten attributes, and no room for its route".to_owned());
            }
            let route = serde_json::json!({ "route": route }).to_string();
            attributes.insert(ORIGIN_ATTRIBUTE.to_owned(), (STRING.to_owned(), Value::Text(route)));
        }
        match kept.keys().next() {
            Some(name) => Err(format!("its attribute {name:?} cannot be one of SQS")),
            None => Ok(Self { body, attributes }),
        }
    }
}

/// Whether SQS takes this name of an attribute.
fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    (1..=NAME_MAX_BYTES).contains(&name.len())
        && name.bytes().all(allowed)
        && !name.starts_with('.')
        && !name.ends_with('.')
        && !name.contains("..")
        && !name.to_ascii_lowercase().starts_with("amazon.")
}

/// Whether SQS takes this character in a text.
fn is_allowed(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | ' '..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
}

/// The beginning of a text, cut between characters.
fn cut(text: &str, most_bytes: usize) -> &str {
    let end = (0..=most_bytes.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    end.and_then(|end| text.get(..end)).unwrap_or_default()
}

#[cfg(test)]
#[path = "letter_tests.rs"]
mod tests;
