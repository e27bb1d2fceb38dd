//! Encodes values as canonical bytes. This is the only module that does; `docs/KEY_FORMAT.md` is
//! its specification.
//!
//! Every value is a tag, a length and content, so the bytes can be decoded unambiguously (`explain`
//! does so). Different values therefore never give the same bytes.

use std::borrow::Cow;

use super::error::KeyError;
use super::instant;
use super::json::{Document, Kind, Span, Value, unescape};
use super::normalise;
use super::normaliser::Normaliser;
use super::number;
use super::path::Node;

/// Separates the hash input of keys from that of other purposes.
pub(super) const DOMAIN_KEY: u8 = b'K';
pub(super) const DOMAIN_HTTP_KEY: u8 = b'H';
pub(super) const DOMAIN_FINGERPRINT: u8 = b'F';

pub(super) const SOURCE_JSON: u8 = b'j';
pub(super) const SOURCE_PAYLOAD: u8 = b'p';
pub(super) const SOURCE_HEADER: u8 = b'h';
pub(super) const SOURCE_MESSAGE_KEY: u8 = b'k';
pub(super) const SOURCE_MESSAGE_ID: u8 = b'i';
pub(super) const SOURCE_CUSTOM: u8 = b'c';
pub(super) const SOURCE_PARTS: u8 = b'm';
pub(super) const SOURCE_CASES: u8 = b'w';
/// The label of a part that is the first of several places; those of places are their sources.
pub(super) const LABEL_FIRST_OF: u8 = b'f';
pub(super) const WHEN_PRESENT: u8 = b'p';
pub(super) const WHEN_EQUAL: u8 = b'e';
pub(super) const WHEN_OTHERWISE: u8 = b'0';
/// Only in fingerprints: the payload's bytes as they are.
pub(super) const SOURCE_RAW: u8 = b'r';
/// Only in fingerprints: there is no payload.
pub(super) const SOURCE_NONE: u8 = b'0';

pub(super) const TAG_NULL: u8 = b'z';
pub(super) const TAG_BOOL: u8 = b'b';
pub(super) const TAG_NUMBER: u8 = b'n';
pub(super) const TAG_STRING: u8 = b's';
pub(super) const TAG_INSTANT: u8 = b't';
pub(super) const TAG_BYTES: u8 = b'x';
pub(super) const TAG_ARRAY: u8 = b'a';
pub(super) const TAG_OBJECT: u8 = b'o';
/// A part without a value, which its specification allows.
pub(super) const TAG_ABSENT: u8 = b'u';
/// An array without the order of its elements.
pub(super) const TAG_UNORDERED: u8 = b'm';

/// Writes a length or count: four bytes, big-endian.
pub(super) fn put_len(len: usize, out: &mut Vec<u8>) {
    out.extend_from_slice(&len_bytes(len));
}

/// Overwrites the placeholder of a length.
pub(super) fn patch_len(len: usize, at: usize, out: &mut [u8]) {
    if let Some(slot) = out.get_mut(at..at + 4) {
        slot.copy_from_slice(&len_bytes(len));
    }
}

fn len_bytes(len: usize) -> [u8; 4] {
    u32::try_from(len)
        .expect("every input of a key is at most 1 GiB")
        .to_be_bytes()
}

pub(super) fn put_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    put_len(bytes.len(), out);
    out.extend_from_slice(bytes);
}

pub(super) fn put_value(tag: u8, content: &[u8], out: &mut Vec<u8>) {
    out.push(tag);
    put_bytes(content, out);
}

pub(super) fn put_integer(number: i64, out: &mut Vec<u8>) {
    let text = number.to_string();
    put_measured(TAG_NUMBER, out, |out| {
        number::write_canonical(text.as_bytes(), out)
    })
    .expect("an integer has no exponent");
}

/// Writes a value whose length is known only afterwards. If `write` fails, the content of the
/// buffer is unspecified.
fn put_measured<T>(tag: u8, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> T) -> T {
    out.push(tag);
    let len_at = out.len();
    put_len(0, out);
    let result = write(out);
    patch_len(out.len() - len_at - 4, len_at, out);
    result
}

fn misfit(path: &str, normaliser: Normaliser, needs: &'static str) -> KeyError {
    KeyError::NormaliserFailed {
        path: path.to_owned(),
        normaliser,
        needs,
    }
}

/// A member or element that is still to be written: its position on the tape, and its index in its
/// array.
#[derive(Clone, Copy, Debug)]
pub(super) struct Child {
    tape: usize,
    index: usize,
}

/// Writes values of a scanned payload.
pub(super) struct Writer<'a> {
    pub(super) payload: &'a [u8],
    pub(super) doc: &'a Document,
    /// The pending members or elements of all open arrays and objects. The buffer is reused.
    pub(super) order: &'a mut Vec<Child>,
    pub(super) out: &'a mut Vec<u8>,
    /// `true` once a value was written that can distinguish messages: a number, a boolean or a
    /// non-blank string.
    pub(super) substance: bool,
}

impl<'a> Writer<'a> {
    /// Writes a field of a key: applies the normalisers, and refuses a value that cannot identify a
    /// message.
    pub(super) fn field(
        &mut self,
        path: &str,
        normalisers: &[Normaliser],
        value: Option<Value>,
        except: Option<&Node>,
    ) -> Result<(), KeyError> {
        let value = value.ok_or_else(|| KeyError::MissingField {
            path: path.to_owned(),
        })?;
        if value.kind == Kind::Null {
            return Err(KeyError::NullField {
                path: path.to_owned(),
            });
        }
        self.present(path, normalisers, value, except)?;
        if self.substance {
            Ok(())
        } else {
            Err(KeyError::Blank {
                path: path.to_owned(),
            })
        }
    }

    /// Writes a value that is not null, after its normalisers. `substance` says whether it can
    /// identify a message; a blank string is written as a string, whatever its normalisers.
    pub(super) fn present(
        &mut self,
        path: &str,
        normalisers: &[Normaliser],
        value: Value,
        except: Option<&Node>,
    ) -> Result<(), KeyError> {
        self.substance = false;
        if matches!(value.kind, Kind::Text | Kind::EscapedText) {
            return self.string(path, normalisers, self.text(value));
        }
        if value.kind == Kind::Number && normalisers.first() == Some(&Normaliser::Digits) {
            let digits = self.number(value);
            return if normalise::is_whole(digits) {
                self.string(path, normalisers, Cow::Borrowed(digits))
            } else {
                let digits = Normaliser::Digits;
                Err(misfit(path, digits, digits.needs()))
            };
        }
        if let (Kind::Number, [Normaliser::Epoch(counted), Normaliser::Timestamp(unit)]) =
            (value.kind, normalisers)
        {
            let text = self.number(value);
            self.substance = true;
            return put_measured(TAG_INSTANT, self.out, |out| {
                instant::write_epoch(text, *counted, *unit, out)
            })
            .map_err(|needs| misfit(path, Normaliser::Epoch(*counted), needs));
        }
        let unfit = normalisers
            .iter()
            .find(|normaliser| !normaliser.fits(value.kind));
        if let Some(normaliser) = unfit {
            return Err(misfit(path, *normaliser, normaliser.needs()));
        }
        if normalisers.contains(&Normaliser::Unordered) {
            return self.unordered(value, except);
        }
        self.value(value, except)
    }

    /// Returns a number as it is spelled.
    fn number(&self, value: Value) -> &'a str {
        std::str::from_utf8(value.span.of(self.payload)).expect("the scanner has checked UTF-8")
    }

    /// Writes a text after its normalisers.
    pub(super) fn string(
        &mut self,
        path: &str,
        normalisers: &[Normaliser],
        text: Cow<'_, str>,
    ) -> Result<(), KeyError> {
        let text = normalisers
            .iter()
            .fold(text, |text, normaliser| normaliser.rewrite(text));
        self.substance = !text.trim().is_empty();
        let last = normalisers
            .last()
            .copied()
            .filter(|last| self.substance && last.is_final());
        let Some(last) = last else {
            put_value(TAG_STRING, text.as_bytes(), self.out);
            return Ok(());
        };
        match last {
            Normaliser::Timestamp(unit) => {
                put_measured(TAG_INSTANT, self.out, |out| match normalisers {
                    [.., Normaliser::Epoch(counted), _] if number::is_decimal(text.as_bytes()) => {
                        instant::write_epoch(&text, *counted, unit, out)
                    }
                    _ => instant::write_timestamp(&text, unit, out),
                })
            }
            Normaliser::Decimal => put_measured(TAG_NUMBER, self.out, |out| {
                normalise::write_decimal(&text, out)
            })
            .ok_or_else(|| last.needs()),
            other => Err(other.needs()),
        }
        .map_err(|needs| misfit(path, last, needs))
    }

    /// Writes an array without the order of its elements: sorted by their bytes. None is left out,
    /// so how often an element occurs counts.
    fn unordered(&mut self, value: Value, except: Option<&Node>) -> Result<(), KeyError> {
        let first = self.order.len();
        self.collect(value.tape, value.kind, except);
        let count = self.order.len() - first;
        let mut elements = Vec::with_capacity(count);
        let start = self.out.len();
        for position in first..first + count {
            let Some(child) = self.order.get(position).copied() else {
                break;
            };
            let Some(entry) = self.doc.tape.get(child.tape) else {
                break;
            };
            let node = except.and_then(|except| except.element(child.index));
            self.value(
                Value {
                    kind: entry.kind,
                    span: entry.span,
                    tape: child.tape,
                },
                node,
            )?;
            elements.push(self.out.split_off(start));
        }
        self.order.truncate(first);
        elements.sort_unstable();
        self.out.push(TAG_UNORDERED);
        put_len(elements.len(), self.out);
        self.out.extend(elements.into_iter().flatten());
        Ok(())
    }

    /// Writes a value without normalising it. Skips the paths of `except`.
    pub(super) fn value(&mut self, value: Value, except: Option<&Node>) -> Result<(), KeyError> {
        match value.kind {
            Kind::Array | Kind::Object => self.container(value.tape, value.kind, except),
            kind => self.scalar(kind, value.span),
        }
    }

    fn scalar(&mut self, kind: Kind, span: Span) -> Result<(), KeyError> {
        let text = span.of(self.payload);
        let start = self.out.len();
        match kind {
            Kind::Null => put_value(TAG_NULL, b"", self.out),
            Kind::False => put_value(TAG_BOOL, &[0], self.out),
            Kind::True => put_value(TAG_BOOL, &[1], self.out),
            Kind::Number => {
                let offset = span.start as usize;
                put_measured(TAG_NUMBER, self.out, |out| {
                    number::write_canonical(text, out)
                })
                .map_err(|number::ExponentTooLarge| KeyError::ExponentTooLarge { offset })?;
            }
            Kind::EscapedText => put_measured(TAG_STRING, self.out, |out| unescape(text, out)),
            Kind::Text | Kind::Array | Kind::Object => put_value(TAG_STRING, text, self.out),
        }
        if !self.substance {
            let content = self.out.get(start + 5..).unwrap_or_default();
            self.substance = match kind {
                Kind::Text | Kind::EscapedText => {
                    std::str::from_utf8(content).is_ok_and(|text| !text.trim().is_empty())
                }
                kind => kind != Kind::Null,
            };
        }
        Ok(())
    }

    /// The recursion is bounded, because the scanner refuses documents deeper than `MAX_DEPTH`.
    fn container(&mut self, at: usize, kind: Kind, except: Option<&Node>) -> Result<(), KeyError> {
        let first = self.order.len();
        self.collect(at, kind, except);
        let count = self.order.len() - first;
        self.out.push(if kind == Kind::Object {
            TAG_OBJECT
        } else {
            TAG_ARRAY
        });
        put_len(count, self.out);
        for position in first..first + count {
            let Some(child) = self.order.get(position).copied() else {
                break;
            };
            let Some(entry) = self.doc.tape.get(child.tape) else {
                break;
            };
            let node = if kind == Kind::Object {
                let name = self.doc.name(entry.name, self.payload);
                put_bytes(name, self.out);
                except.and_then(|except| except.member(name))
            } else {
                except.and_then(|except| except.element(child.index))
            };
            self.value(
                Value {
                    kind: entry.kind,
                    span: entry.span,
                    tape: child.tape,
                },
                node,
            )?;
        }
        self.order.truncate(first);
        Ok(())
    }

    /// Queues the members (sorted by name) or elements of a container, without the excepted ones.
    fn collect(&mut self, at: usize, kind: Kind, except: Option<&Node>) {
        let first = self.order.len();
        let end = self.doc.tape.get(at).map_or(0, |entry| entry.next);
        let mut child = Child {
            tape: at + 1,
            index: 0,
        };
        while child.tape < end
            && let Some(entry) = self.doc.tape.get(child.tape)
        {
            let node = match kind {
                Kind::Object => {
                    except.and_then(|except| except.member(self.doc.name(entry.name, self.payload)))
                }
                _ => except.and_then(|except| except.element(child.index)),
            };
            if node.is_none_or(|node| node.target.is_none()) {
                self.order.push(child);
            }
            child = Child {
                tape: entry.next,
                index: child.index + 1,
            };
        }
        if kind == Kind::Object {
            let name = |child: &Child| {
                self.doc
                    .tape
                    .get(child.tape)
                    .map(|entry| self.doc.name(entry.name, self.payload))
            };
            self.order
                .get_mut(first..)
                .unwrap_or_default()
                .sort_unstable_by(|a, b| name(a).cmp(&name(b)));
        }
    }

    fn text(&self, value: Value) -> Cow<'a, str> {
        let raw = value.span.of(self.payload);
        let proof = "the scanner has checked UTF-8 and escapes";
        if value.kind == Kind::Text {
            return Cow::Borrowed(std::str::from_utf8(raw).expect(proof));
        }
        let mut bytes = Vec::with_capacity(raw.len());
        unescape(raw, &mut bytes);
        Cow::Owned(String::from_utf8(bytes).expect(proof))
    }
}
