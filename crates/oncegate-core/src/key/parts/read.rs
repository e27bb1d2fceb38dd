//! Reads the parts of a message and writes them into the key.

use std::borrow::Cow;

use super::super::encode::{self, Child, Writer};
use super::super::error::KeyError;
use super::super::input::{HeaderValue, KeySource};
use super::super::json::{Document, Kind, Value, unescape};
use super::Blank;
use super::decode::Decoder;
use super::plan::{CasePlan, Composed, PartPlan, PlacePlan, PlannedSource, Slot, TextPlan};

/// The message that is read, with the buffers that are written.
pub(in super::super) struct Reading<'a> {
    pub(in super::super) message: &'a dyn KeySource,
    /// The payload, which `doc` was scanned from; `None` when there is none.
    pub(in super::super) payload: Option<&'a [u8]>,
    pub(in super::super) doc: &'a Document,
    pub(in super::super) order: &'a mut Vec<Child>,
    pub(in super::super) out: &'a mut Vec<u8>,
    /// The limit of each source and of each decoded text, in bytes.
    pub(in super::super) limit: usize,
    /// The decoded texts, as far as they were needed.
    pub(in super::super) decoded: Vec<Option<Decoded>>,
}

/// A decoded text. It has no content when the value that it comes from is missing.
#[derive(Default)]
pub(in super::super) struct Decoded {
    content: Option<Vec<u8>>,
    doc: Document,
}

/// The content of a place. What is there has been written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Missing,
    Null,
    Blank,
    Substance,
}

impl Composed {
    /// Writes the source of the key.
    pub(in super::super) fn write(&self, reading: &mut Reading<'_>) -> Result<(), KeyError> {
        reading.decoded.resize_with(self.texts.len(), || None);
        let case = self.case(reading)?;
        if self.has_cases {
            reading.out.push(encode::SOURCE_CASES);
            reading.out.extend_from_slice(&case.label);
        } else {
            reading.out.push(encode::SOURCE_PARTS);
        }
        encode::put_len(case.parts.len(), reading.out);
        let mut substance = false;
        for part in &case.parts {
            substance |= self.part(part, reading)?;
        }
        if substance {
            Ok(())
        } else {
            Err(KeyError::Blank {
                path: "key".to_owned(),
            })
        }
    }

    /// The first case whose condition holds.
    fn case(&self, reading: &mut Reading<'_>) -> Result<&CasePlan, KeyError> {
        for case in &self.cases {
            let Some(when) = &case.when else {
                return Ok(case);
            };
            let start = reading.out.len();
            let found = self.place(&when.place, reading)?;
            let value = reading.out.get(start..).unwrap_or_default();
            let holds = match &when.is {
                None => !matches!(found, Found::Missing | Found::Null),
                Some(literal) => is_equal(value, literal),
            };
            reading.out.truncate(start);
            if holds {
                return Ok(case);
            }
        }
        Err(KeyError::NoCase)
    }

    /// Writes a part. Returns whether it can identify a message.
    fn part(&self, part: &PartPlan, reading: &mut Reading<'_>) -> Result<bool, KeyError> {
        reading.out.extend_from_slice(&part.label);
        let start = reading.out.len();
        let mut first = None;
        for place in &part.places {
            let found = self.place(place, reading)?;
            match (found, part.blank) {
                (Found::Substance, _) => return Ok(true),
                (Found::Blank, Blank::Value) => return Ok(false),
                (Found::Blank, Blank::Error) => {
                    return Err(KeyError::Blank {
                        path: place.name.clone(),
                    });
                }
                (Found::Blank, Blank::Absent) | (Found::Missing | Found::Null, _) => {}
            }
            reading.out.truncate(start);
            first = first.or(Some((place, found)));
        }
        if part.optional {
            encode::put_value(encode::TAG_ABSENT, b"", reading.out);
            return Ok(false);
        }
        match first {
            Some((place, found)) => Err(absent(part, place, found, reading.payload.is_some())),
            None => Err(KeyError::MissingField {
                path: part.name.clone(),
            }),
        }
    }

    /// Writes the value of a place, if it has one.
    fn place(&self, place: &PlacePlan, reading: &mut Reading<'_>) -> Result<Found, KeyError> {
        let message = reading.message;
        let bytes = match &place.source {
            PlannedSource::Payload(slot) => return self.value(place, *slot, reading),
            PlannedSource::Header(name) => match message.header(name) {
                HeaderValue::One(value) => Some(value),
                HeaderValue::Absent => None,
                HeaderValue::Several => {
                    return Err(KeyError::RepeatedHeader { name: name.clone() });
                }
            },
            PlannedSource::MessageKey => message.message_key(),
            PlannedSource::MessageId => message.message_id().map(str::as_bytes),
        };
        let Some(bytes) = bytes else {
            return Ok(Found::Missing);
        };
        if bytes.len() > reading.limit {
            let what = place.name.clone();
            return Err(KeyError::TooLarge {
                what,
                bytes: bytes.len(),
                limit: reading.limit,
            });
        }
        write_bytes(place, bytes, reading.doc, reading.order, reading.out)
    }

    /// Writes the value at a path of the payload or of a decoded text.
    fn value(
        &self,
        place: &PlacePlan,
        slot: Slot,
        reading: &mut Reading<'_>,
    ) -> Result<Found, KeyError> {
        self.decode(slot.text, reading)?;
        let Reading {
            payload,
            doc,
            order,
            out,
            decoded,
            ..
        } = reading;
        let (content, doc) = match slot
            .text
            .checked_sub(1)
            .and_then(|at| decoded.get(at)?.as_ref())
        {
            Some(decoded) => (decoded.content.as_deref(), &decoded.doc),
            None => (*payload, *doc),
        };
        let Some(content) = content else {
            return Ok(Found::Missing);
        };
        if self
            .text(slot.text)
            .is_some_and(|text| text.decoder != Decoder::Json)
        {
            return write_bytes(place, content, doc, order, out);
        }
        let Some(value) = doc.value(slot.target, place.takes_default) else {
            return Ok(Found::Missing);
        };
        if value.kind == Kind::Null {
            return Ok(Found::Null);
        }
        let mut writer = Writer {
            payload: content,
            doc,
            order,
            out,
            substance: false,
        };
        writer.present(&place.name, &place.normalisers, value, None)?;
        Ok(if writer.substance {
            Found::Substance
        } else {
            Found::Blank
        })
    }

    /// Decodes a text and those that it comes from, once for each message. The recursion is bounded
    /// by the number of decoders.
    fn decode(&self, number: usize, reading: &mut Reading<'_>) -> Result<(), KeyError> {
        let Some(text) = self.text(number) else {
            return Ok(());
        };
        if reading.decoded.get(number - 1).is_some_and(Option::is_some) {
            return Ok(());
        }
        self.decode(text.from.text, reading)?;
        let mut decoded = Decoded::default();
        if let Some(content) = self.content(text, reading)? {
            let content = text
                .decoder
                .decode(content, &text.name, reading.limit)?
                .into_owned();
            if text.decoder == Decoder::Json {
                let scanned =
                    decoded
                        .doc
                        .scan(&content, &text.paths.tree, text.paths.targets, false);
                scanned.map_err(|error| text.decoder.failed(&text.name, inner(&error)))?;
            }
            decoded.content = Some(content);
        }
        if let Some(slot) = reading.decoded.get_mut(number - 1) {
            *slot = Some(decoded);
        }
        Ok(())
    }

    /// The bytes that a text is decoded from: of a string, or of what another decoder gave.
    fn content<'b>(
        &self,
        text: &TextPlan,
        reading: &'b Reading<'_>,
    ) -> Result<Option<Cow<'b, [u8]>>, KeyError> {
        let from = text.from;
        let (content, doc) = match from
            .text
            .checked_sub(1)
            .and_then(|at| reading.decoded.get(at)?.as_ref())
        {
            Some(decoded) => (decoded.content.as_deref(), &decoded.doc),
            None => (reading.payload, reading.doc),
        };
        let Some(content) = content else {
            return Ok(None);
        };
        if self
            .text(from.text)
            .is_some_and(|text| text.decoder != Decoder::Json)
        {
            return Ok(Some(Cow::Borrowed(content)));
        }
        match doc.value(from.target, false) {
            None
            | Some(Value {
                kind: Kind::Null, ..
            }) => Ok(None),
            Some(Value {
                kind: Kind::Text,
                span,
                ..
            }) => Ok(Some(Cow::Borrowed(span.of(content)))),
            Some(Value {
                kind: Kind::EscapedText,
                span,
                ..
            }) => {
                let mut bytes = Vec::new();
                unescape(span.of(content), &mut bytes);
                Ok(Some(Cow::Owned(bytes)))
            }
            Some(_) => Err(text.decoder.failed(&text.name, "the value is no string")),
        }
    }

    /// The plan of a text; `None` for the payload.
    fn text(&self, number: usize) -> Option<&TextPlan> {
        self.texts.get(number.checked_sub(1)?)
    }
}

/// Writes bytes that are no JSON value: as they are, or as text when there are normalisers.
fn write_bytes(
    place: &PlacePlan,
    bytes: &[u8],
    doc: &Document,
    order: &mut Vec<Child>,
    out: &mut Vec<u8>,
) -> Result<Found, KeyError> {
    let Some(first) = place.normalisers.first().copied() else {
        encode::put_value(encode::TAG_BYTES, bytes, out);
        return Ok(if bytes.trim_ascii().is_empty() {
            Found::Blank
        } else {
            Found::Substance
        });
    };
    let text = std::str::from_utf8(bytes).map_err(|_| KeyError::NormaliserFailed {
        path: place.name.clone(),
        normaliser: first,
        needs: "text in UTF-8",
    })?;
    let mut writer = Writer {
        payload: b"",
        doc,
        order,
        out,
        substance: false,
    };
    writer.string(&place.name, &place.normalisers, Cow::Borrowed(text))?;
    Ok(if writer.substance {
        Found::Substance
    } else {
        Found::Blank
    })
}

/// Returns whether a written value equals a literal. Bytes equal a string with these bytes.
fn is_equal(value: &[u8], literal: &[u8]) -> bool {
    match (value.split_first(), literal.split_first()) {
        (Some((&encode::TAG_BYTES, value)), Some((&encode::TAG_STRING, literal))) => {
            value == literal
        }
        _ => value == literal,
    }
}

/// The error of a part that has no value and is not optional.
fn absent(part: &PartPlan, place: &PlacePlan, found: Found, has_payload: bool) -> KeyError {
    let path = part.name.clone();
    match (&place.source, found) {
        (_, Found::Blank) => KeyError::Blank { path },
        (_, Found::Null) => KeyError::NullField { path },
        (PlannedSource::Payload(_), _) if !has_payload => KeyError::NoPayload,
        (PlannedSource::Payload(_), _) => KeyError::MissingField { path },
        (PlannedSource::Header(name), _) => KeyError::MissingHeader { name: name.clone() },
        (PlannedSource::MessageKey, _) => KeyError::MissingMessageKey,
        (PlannedSource::MessageId, _) => KeyError::MissingMessageId,
    }
}

/// The words for an error inside a decoded text: offsets there would be read as offsets of the
/// payload.
fn inner(error: &KeyError) -> &'static str {
    match error {
        KeyError::MalformedJson { what, .. } => what,
        KeyError::DuplicateJsonKey { .. } => "an object in it repeats a name",
        KeyError::TooDeep { .. } => "it nests deeper than 64 levels",
        KeyError::NotUtf8 { .. } | KeyError::Utf16 => "it is not UTF-8",
        _ => "it is no JSON document",
    }
}
