//! Messages that Protobuf's JSON writes in a form of their own: an instant is a string, a wrapper
//! its value.

use oncegate_core::key::{KeyError, Wanted};

use super::schema::{Kind, Message, Shape, WellKnown};
use super::wire::{PROTOBUF, Raw};
use super::{Content, MessageReader};
use crate::time;

/// The position of the only member of `Struct` and `ListValue`.
const ONLY: usize = 0;

impl Content<'_> {
    /// The seconds and nanoseconds of an instant or a duration.
    fn count(&self) -> (i64, i64) {
        (self.number(0), self.number(1))
    }

    fn number(&self, position: usize) -> i64 {
        match self.of(position).raws().next_back() {
            Some(Raw::Varint(value)) => value.cast_signed(),
            _ => 0,
        }
    }
}

impl<'a> MessageReader<'a> {
    pub(super) fn well_known(
        &mut self,
        message: &'a Message,
        bytes: &[u8],
        wanted: &Wanted<'_>,
    ) -> Result<(), KeyError> {
        match message.well_known {
            WellKnown::Any => return self.any(message, bytes, wanted),
            // The members stand in no object of their own, so their values decide which parts are
            // wanted.
            _ if wanted.is_all() => {}
            WellKnown::Struct | WellKnown::Value | WellKnown::ListValue => {}
            // The value has no members: a path that goes on finds nothing.
            _ => return self.json.raw("null"),
        }
        let content = self.content(message, bytes, &Wanted::all())?;
        match message.well_known {
            WellKnown::Timestamp => {
                let (seconds, nanos) = content.count();
                let nanos_of = time::fraction(nanos.rem_euclid(time::NANOS));
                let whole =
                    time::date_time(seconds.saturating_add(nanos.div_euclid(time::NANOS)), 1);
                self.json.text(format!("{whole}{nanos_of}Z").as_bytes())
            }
            WellKnown::Duration => {
                let (seconds, nanos) = content.count();
                let sign = if seconds < 0 || nanos < 0 { "-" } else { "" };
                let fraction = time::fraction((nanos % time::NANOS).abs());
                self.json
                    .text(format!("{sign}{}{fraction}s", seconds.unsigned_abs()).as_bytes())
            }
            WellKnown::Wrapper => self.wrapped(message, &content),
            WellKnown::FieldMask => self.field_mask(&content),
            WellKnown::Struct => {
                let kind = message
                    .fields
                    .first()
                    .map_or(Kind::Bool, |field| field.kind);
                self.map(kind, content.of(ONLY), wanted)
            }
            WellKnown::ListValue => {
                let kind = message
                    .fields
                    .first()
                    .map_or(Kind::Bool, |field| field.kind);
                self.list(kind, content.of(ONLY), wanted)
            }
            _ => self.any_value(message, &content, wanted),
        }
    }

    /// The value of a wrapper. A wrapper without a value has the default: it is there.
    fn wrapped(&mut self, message: &Message, content: &Content<'_>) -> Result<(), KeyError> {
        let Some(field) = message.fields.first() else {
            return self.json.raw("null");
        };
        match content.of(ONLY).raws().next_back() {
            Some(raw) => self.scalar(field.kind, raw),
            None => self.default(field.kind),
        }
    }

    /// The paths of a mask in one string, in camel case.
    fn field_mask(&mut self, content: &Content<'_>) -> Result<(), KeyError> {
        let mut text: Vec<u8> = Vec::new();
        for (position, raw) in content.of(ONLY).raws().enumerate() {
            if position > 0 {
                text.push(b',');
            }
            let mut is_upper = false;
            let path = self.bytes(raw)?;
            if path.is_empty() {
                return Err(self.no_mask());
            }
            for byte in path {
                match byte {
                    b'_' if !is_upper => is_upper = true,
                    b'a'..=b'z' if is_upper => {
                        text.push(byte.to_ascii_uppercase());
                        is_upper = false;
                    }
                    // Another path would have the same string, so Protobuf's JSON refuses it too.
                    b'_' | b',' | b'A'..=b'Z' => return Err(self.no_mask()),
                    _ if is_upper => return Err(self.no_mask()),
                    byte => text.push(*byte),
                }
            }
            if is_upper {
                return Err(self.no_mask());
            }
        }
        self.json.text(&text)
    }

    #[cold]
    fn no_mask(&self) -> KeyError {
        KeyError::MalformedPayload {
            format: PROTOBUF,
            offset: self.offset,
            what: "a path of a FieldMask has no form in JSON: it must be in snake case",
        }
    }

    /// A JSON value in a `google.protobuf.Value`: the member of its `oneof` that is set.
    fn any_value(
        &mut self,
        message: &Message,
        content: &Content<'_>,
        wanted: &Wanted<'_>,
    ) -> Result<(), KeyError> {
        let Some(last) = content.0.last() else {
            return self.json.raw("null");
        };
        let Some(field) = message.fields.get(last.position) else {
            return self.json.raw("null");
        };
        match field.kind {
            Kind::Enum(_) => self.json.raw("null"),
            Kind::Message(id) if field.shape == Shape::Single => {
                let merged = self.merged(content.of(last.position))?;
                self.message(id, &merged, wanted)
            }
            kind => self.scalar(kind, last.raw),
        }
    }

    /// A message of any type. One that the schema does not have is its bytes.
    fn any(
        &mut self,
        message: &'a Message,
        bytes: &[u8],
        wanted: &Wanted<'_>,
    ) -> Result<(), KeyError> {
        let content = self.content(message, bytes, &Wanted::all())?;
        let url = match content.of(0).raws().next_back() {
            Some(raw) => self.bytes(raw)?,
            None => b"",
        };
        let value = match content.of(1).raws().next_back() {
            Some(raw) => self.bytes(raw)?,
            None => b"",
        };
        if url.is_empty() && value.is_empty() {
            return self.json.raw("{}");
        }
        self.json.open(b'{');
        if wanted.member(b"@type").is_some() {
            self.json.name(b"@type")?;
            self.json.text(url)?;
        }
        let known = std::str::from_utf8(url)
            .ok()
            .and_then(|url| self.schema.of_url(url));
        match known {
            Some(id) if self.plan(id)?.well_known == WellKnown::No => {
                let inner = self.plan(id)?;
                self.members(inner, value, wanted)?;
            }
            Some(id) => {
                if let Some(inner) = wanted.member(b"value") {
                    self.json.name(b"value")?;
                    self.message(id, value, &inner)?;
                }
            }
            None => {
                if wanted.member(b"value").is_some() {
                    self.json.name(b"value")?;
                    self.json.bytes(value)?;
                }
            }
        }
        self.json.close(b'}')
    }
}
