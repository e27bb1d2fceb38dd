//! Makes documents of Protobuf's binary encoding.
//!
//! A message is read once, from the front: its fields are noted, and the wanted ones are written as
//! JSON. Only wanted fields are looked into, so the rest costs no more than its length.
//!
//! # Not obvious
//!
//! Implementation notes: facts about Protobuf that this code depends on.
//!
//! - Fields may come in any order and more than once. Of a single value the last one counts; a
//!   message that comes twice is merged, which is the same as reading its contents one after the
//!   other; the last member of a `oneof` removes the others.
//! - A field without presence is not sent with its default, and one that is sent nevertheless means
//!   the same. So neither is there, for a whole document as for a path: a default is the same in
//!   every message. Only a path that takes defaults finds it.

mod built_in;
mod scalar;
mod schema;
mod source;
mod well_known;
mod wire;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use oncegate_core::key::{KeyError, MAX_DEPTH, Wanted};

use self::schema::{Kind, Message, MessageField, MessageId, Shape, WellKnown};
pub(crate) use self::schema::{ProtoFile, ProtobufSchema};
use self::wire::{PROTOBUF, Raw, Wire};
use crate::json::Json;

impl ProtobufSchema {
    /// Writes the document of `bytes`, a message that begins at `offset` in the payload.
    pub(crate) fn document(
        &self,
        message: MessageId,
        bytes: &[u8],
        offset: usize,
        wanted: Wanted<'_>,
        json: Json<'_>,
    ) -> Result<(), KeyError> {
        MessageReader {
            schema: self,
            offset,
            depth: 0,
            json,
        }
        .message(message, bytes, &wanted)
    }
}

struct MessageReader<'a> {
    schema: &'a ProtobufSchema,
    /// The offset of the message in the payload.
    offset: usize,
    depth: usize,
    json: Json<'a>,
}

/// A field of a message as it was found: its position in the message's schema, and its content.
#[derive(Clone, Copy)]
struct Found<'b> {
    position: usize,
    raw: Raw<'b>,
}

impl<'a> MessageReader<'a> {
    /// Writes a message.
    fn message(
        &mut self,
        id: MessageId,
        bytes: &[u8],
        wanted: &Wanted<'_>,
    ) -> Result<(), KeyError> {
        if self.depth == MAX_DEPTH {
            return Err(KeyError::TooDeep {
                offset: self.offset,
                limit: MAX_DEPTH,
            });
        }
        self.depth += 1;
        let message = self.plan(id)?;
        if message.well_known == WellKnown::No {
            self.json.open(b'{');
            self.members(message, bytes, wanted)?;
            self.json.close(b'}')?;
        } else {
            self.well_known(message, bytes, wanted)?;
        }
        self.depth -= 1;
        Ok(())
    }

    fn plan(&self, id: MessageId) -> Result<&'a Message, KeyError> {
        self.schema
            .messages
            .get(id)
            .ok_or(KeyError::MalformedPayload {
                format: PROTOBUF,
                offset: self.offset,
                what: "its schema has no such message",
            })
    }

    /// Writes the members of a message.
    fn members(
        &mut self,
        message: &'a Message,
        bytes: &[u8],
        wanted: &Wanted<'_>,
    ) -> Result<(), KeyError> {
        let content = self.content(message, bytes, wanted)?;
        if wanted.is_all() {
            return self.sent_members(message, &content, wanted);
        }
        for (position, field) in message.fields.iter().enumerate() {
            // Paths may name a field as its source does, or as JSON does.
            for name in field.names() {
                if let Some(inner) = wanted.member(name.as_bytes()) {
                    let own = content.of(position);
                    self.member(field, name, own, &inner, wanted.takes_defaults())?;
                }
            }
        }
        Ok(())
    }

    /// Writes the members that were sent, by their names in JSON.
    fn sent_members(
        &mut self,
        message: &'a Message,
        content: &Content<'_>,
        wanted: &Wanted<'_>,
    ) -> Result<(), KeyError> {
        for own in content.all() {
            let Some(field) = own
                .first()
                .and_then(|found| message.fields.get(found.position))
            else {
                continue;
            };
            if let Some(inner) = wanted.member_of(field.names().map(str::as_bytes)) {
                self.member(field, &field.json_name, Own(own), &inner, false)?;
            }
        }
        Ok(())
    }

    /// Reads over a message and notes the fields that are wanted.
    fn content<'b>(
        &self,
        message: &Message,
        bytes: &'b [u8],
        wanted: &Wanted<'_>,
    ) -> Result<Content<'b>, KeyError> {
        let mut wire = Wire::new(bytes, self.offset);
        let mut found: Vec<Found<'b>> = Vec::new();
        // Of each `oneof`, the member that came last, and how much was found when it first came
        // after another one.
        let mut last_members: HashMap<usize, (usize, usize)> = HashMap::new();
        while let Some((number, raw)) = wire.field()? {
            let Ok(position) = message
                .fields
                .binary_search_by_key(&number, |field| field.number)
            else {
                if wanted.is_all() {
                    // Without the field, two messages that differ in it alone would have one key.
                    let what = "a field that the schema does not have, and the whole payload is in the key";
                    return Err(wire.malformed(what));
                }
                continue;
            };
            let Some(field) = message.fields.get(position) else {
                continue;
            };
            if let Some(oneof) = field.oneof {
                let last = last_members.entry(oneof).or_insert((position, found.len()));
                if last.0 != position {
                    *last = (position, found.len());
                }
            }
            let is_wanted = wanted.is_all()
                || field
                    .names()
                    .any(|name| wanted.member(name.as_bytes()).is_some());
            if is_wanted {
                found.push(Found { position, raw });
            }
        }
        Ok(Content::new(message, found, &last_members))
    }

    /// Writes a member, if it is there.
    fn member(
        &mut self,
        field: &MessageField,
        name: &str,
        own: Own<'_, '_>,
        wanted: &Wanted<'_>,
        takes_default: bool,
    ) -> Result<(), KeyError> {
        let last = own.raws().next_back();
        let is_sent = match (field.shape, last) {
            (_, None) => false,
            (Shape::Single, Some(raw)) => field.has_presence || !scalar::is_default(raw),
            (Shape::List, Some(_)) => !own
                .raws()
                .all(|raw| matches!(raw, Raw::Bytes([])) && field.kind.is_packable()),
            (Shape::Map, Some(_)) => true,
        };
        let has_default = field.shape != Shape::Single || !field.has_presence;
        let is_there = is_sent || (takes_default && has_default);
        if !is_there {
            return Ok(());
        }
        self.json.name(name.as_bytes())?;
        match (field.shape, last, field.kind) {
            (Shape::List, _, kind) => self.list(kind, own, wanted),
            (Shape::Map, _, kind) => self.map(kind, own, wanted),
            (Shape::Single, None, kind) => self.default(kind),
            (Shape::Single, Some(_), Kind::Message(id)) => {
                let merged = self.merged(own)?;
                self.message(id, &merged, wanted)
            }
            (Shape::Single, Some(last), kind) => self.scalar(kind, last),
        }
    }

    /// The contents of a message that was sent in several pieces.
    fn merged<'b>(&self, own: Own<'_, 'b>) -> Result<Cow<'b, [u8]>, KeyError> {
        let mut merged = Cow::Borrowed(&[][..]);
        for (count, raw) in own.raws().enumerate() {
            let bytes = self.bytes(raw)?;
            if count == 0 {
                merged = Cow::Borrowed(bytes);
            } else {
                merged.to_mut().extend_from_slice(bytes);
            }
        }
        Ok(merged)
    }

    /// Writes a repeated field. Numbers may be packed, several in one piece, or not.
    fn list(&mut self, kind: Kind, own: Own<'_, '_>, wanted: &Wanted<'_>) -> Result<(), KeyError> {
        self.json.open(b'[');
        let mut index = 0;
        for raw in own.raws() {
            match raw {
                Raw::Bytes(packed) if kind.is_packable() => {
                    let mut wire = Wire::new(packed, self.offset);
                    while wire.at < packed.len() {
                        let raw = scalar::unpack(kind, &mut wire)?;
                        self.element(kind, raw, index, wanted)?;
                        index += 1;
                    }
                }
                raw => {
                    self.element(kind, raw, index, wanted)?;
                    index += 1;
                }
            }
        }
        self.json.close(b']')
    }

    fn element(
        &mut self,
        kind: Kind,
        raw: Raw<'_>,
        index: usize,
        wanted: &Wanted<'_>,
    ) -> Result<(), KeyError> {
        if index >= wanted.elements() {
            return Ok(());
        }
        self.json.separate();
        match wanted.element(index) {
            None => self.json.raw("null"),
            Some(inner) => self.value(kind, raw, &inner),
        }
    }

    /// Writes a map. Of a key that comes several times, the last value counts.
    fn map(&mut self, kind: Kind, own: Own<'_, '_>, wanted: &Wanted<'_>) -> Result<(), KeyError> {
        let Kind::Message(entry) = kind else {
            return self.json.raw("{}");
        };
        let entry = self.plan(entry)?;
        let (Some(key), Some(value)) = (entry.fields.first(), entry.fields.get(1)) else {
            return self.json.raw("{}");
        };
        let mut seen: HashSet<Cow<'_, [u8]>> = HashSet::new();
        self.json.open(b'{');
        for raw in own.raws().rev() {
            let content = self.content(entry, self.bytes(raw)?, &Wanted::all())?;
            let name = self.map_key(key.kind, content.of(0).raws().next_back())?;
            let Some(inner) = wanted.member(&name) else {
                continue;
            };
            if seen.contains(&name) {
                continue;
            }
            self.json.name(&name)?;
            seen.insert(name);
            let own = content.of(1);
            match (own.raws().next_back(), value.kind) {
                (_, Kind::Message(id)) => {
                    let merged = self.merged(own)?;
                    self.message(id, &merged, &inner)?;
                }
                (None, kind) => self.default(kind)?,
                (Some(last), kind) => self.scalar(kind, last)?,
            }
        }
        self.json.close(b'}')
    }

    /// Writes an element or another value of its own.
    fn value(&mut self, kind: Kind, raw: Raw<'_>, wanted: &Wanted<'_>) -> Result<(), KeyError> {
        match kind {
            Kind::Message(id) => {
                let bytes = self.bytes(raw)?;
                self.message(id, bytes, wanted)
            }
            kind => self.scalar(kind, raw),
        }
    }

    fn bytes<'b>(&self, raw: Raw<'b>) -> Result<&'b [u8], KeyError> {
        match raw {
            Raw::Bytes(bytes) => Ok(bytes),
            _ => Err(self.mismatch()),
        }
    }

    #[cold]
    fn mismatch(&self) -> KeyError {
        let what = "a field has another wire type than its schema says";
        KeyError::MalformedPayload {
            format: PROTOBUF,
            offset: self.offset,
            what,
        }
    }
}

/// The fields of a message that are wanted, those of one field together.
struct Content<'b>(Vec<Found<'b>>);

impl<'b> Content<'b> {
    /// Sorts what was found, and leaves out the members of each `oneof` that a later one has
    /// removed.
    fn new(
        message: &Message,
        found: Vec<Found<'b>>,
        last_members: &HashMap<usize, (usize, usize)>,
    ) -> Self {
        let mut kept = found;
        if !last_members.is_empty() {
            let mut at = 0..;
            kept.retain(|found| {
                let at = at.next().unwrap_or_default();
                let oneof = message
                    .fields
                    .get(found.position)
                    .and_then(|field| field.oneof);
                let last = oneof.and_then(|oneof| last_members.get(&oneof));
                last.is_none_or(|(position, since)| *position == found.position && at >= *since)
            });
        }
        // A stable sort: the occurrences of a field stay in their order.
        kept.sort_by_key(|found| found.position);
        Self(kept)
    }

    fn of(&self, position: usize) -> Own<'_, 'b> {
        let start = self.0.partition_point(|found| found.position < position);
        let rest = self.0.get(start..).unwrap_or_default();
        let end = rest.partition_point(|found| found.position == position);
        Own(rest.get(..end).unwrap_or_default())
    }

    /// The occurrences of each field that came.
    fn all(&self) -> impl Iterator<Item = &[Found<'b>]> {
        self.0.chunk_by(|a, b| a.position == b.position)
    }
}

/// The occurrences of one field.
#[derive(Clone, Copy)]
struct Own<'f, 'b>(&'f [Found<'b>]);

impl<'f, 'b> Own<'f, 'b> {
    fn raws(self) -> impl DoubleEndedIterator<Item = Raw<'b>> + use<'f, 'b> {
        self.0.iter().map(|found| found.raw)
    }
}
