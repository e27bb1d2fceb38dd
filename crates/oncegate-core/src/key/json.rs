//! Scans a JSON payload in one pass: validates the whole document and records the positions of the
//! wanted values.
//!
//! The scanner is stricter than most parsers, because a key must not depend on how a parser
//! resolves what the standard leaves open: repeated names, lone surrogates and trailing content are
//! errors. A byte order mark at the start is skipped. It builds no tree. The content of a wanted
//! array or object (or of the whole document, when the key is the payload) is recorded on a flat
//! tape, from which `encode` writes it in canonical order.

mod document;
mod text;

pub(super) use self::document::{Document, Kind, Span, Value};
use self::document::{Entry, NO_NAME, Name, short};
use self::text::unicode_escape;
pub(super) use self::text::{plain_bytes, unescape};
use super::error::KeyError;
use super::limits::MAX_DEPTH;
use super::path::Node;

/// The byte order mark of UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Up to this many names, an object is searched linearly. With more names, they are sorted once, at
/// its end.
const LINEAR_NAMES: usize = 16;

impl Document {
    /// Validates `payload` and records the values that `wanted` names. With `whole`, records the
    /// document itself as the first entry of the tape.
    pub(super) fn scan(
        &mut self,
        payload: &[u8],
        wanted: &Node,
        targets: usize,
        whole: bool,
    ) -> Result<(), KeyError> {
        self.begin(targets);
        self.scan_more(payload, 0, wanted, whole)
    }

    /// Empties the buffers for the documents of a message.
    pub(super) fn begin(&mut self, targets: usize) {
        for values in [&mut self.found, &mut self.defaults] {
            values.clear();
            values.resize(targets, None);
        }
        self.tape.clear();
        self.arena.clear();
        self.names.clear();
    }

    /// Validates the document that begins at `start` of `text`, and records its values beside those
    /// of the documents before it.
    pub(super) fn scan_more(
        &mut self,
        text: &[u8],
        start: usize,
        wanted: &Node,
        whole: bool,
    ) -> Result<(), KeyError> {
        let payload = text.get(start..).unwrap_or_default();
        // No JSON document begins like this, but all of UTF-16 and UTF-32 do, with a byte order
        // mark or without.
        if matches!(
            payload,
            [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] | [0, ..] | [_, 0, ..]
        ) {
            return Err(KeyError::Utf16);
        }
        if let Err(error) = std::str::from_utf8(payload) {
            return Err(KeyError::NotUtf8 {
                offset: start + error.valid_up_to(),
            });
        }
        // Windows programs write a byte order mark before UTF-8. It is no part of the document,
        // wherever keys come from.
        let mark = if payload.starts_with(BYTE_ORDER_MARK) {
            BYTE_ORDER_MARK.len()
        } else {
            0
        };
        let mut scanner = Scanner {
            bytes: text,
            at: start + mark,
            depth: 0,
            recording: whole,
            doc: self,
        };
        scanner.skip_space();
        scanner.value(Some(wanted), NO_NAME)?;
        scanner.skip_space();
        if scanner.at < text.len() {
            return Err(scanner.malformed("something follows the document"));
        }
        Ok(())
    }
}

struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: usize,
    recording: bool,
    doc: &'a mut Document,
}

impl Scanner<'_> {
    /// Reads one value. `at` is at its first byte, or at the position where it is missing.
    fn value(&mut self, node: Option<&Node>, name: Name) -> Result<(), KeyError> {
        let target = node.and_then(|node| node.target);
        let start = self.at;
        let (kind, span) = match self.peek() {
            Some(b'"') => {
                let (span, escaped) = self.string()?;
                (
                    if escaped {
                        Kind::EscapedText
                    } else {
                        Kind::Text
                    },
                    span,
                )
            }
            Some(b'-' | b'0'..=b'9') => {
                self.number()?;
                (Kind::Number, Span::new(start, self.at))
            }
            Some(b'{' | b'[') => return self.container(node, name, target),
            Some(b't') => (Kind::True, self.literal(b"true")?),
            Some(b'f') => (Kind::False, self.literal(b"false")?),
            Some(b'n') => (Kind::Null, self.literal(b"null")?),
            Some(_) => return Err(self.malformed("no JSON value starts like this")),
            None => return Err(self.malformed("ends where a value is expected")),
        };
        let tape = self.doc.tape.len();
        if self.recording {
            self.doc.tape.push(Entry {
                kind,
                span,
                next: tape + 1,
                name,
            });
        }
        self.note(target, Value { kind, span, tape });
        Ok(())
    }

    fn container(
        &mut self,
        node: Option<&Node>,
        name: Name,
        target: Option<usize>,
    ) -> Result<(), KeyError> {
        let start = self.at;
        let tape = self.doc.tape.len();
        let was_recording = self.recording;
        let kind = if self.peek() == Some(b'{') {
            Kind::Object
        } else {
            Kind::Array
        };
        self.recording |= target.is_some();
        if self.recording {
            // The end is not known yet: the entry gets its span and its successor below.
            self.doc.tape.push(Entry {
                kind,
                span: Span::new(start, start),
                next: tape,
                name,
            });
        }
        if self.depth == MAX_DEPTH {
            return Err(KeyError::TooDeep {
                offset: start,
                limit: MAX_DEPTH,
            });
        }
        self.depth += 1;
        self.at += 1;
        match kind {
            Kind::Object => self.object(node)?,
            _ => self.array(node)?,
        }
        self.depth -= 1;
        let span = Span::new(start, self.at);
        let next = self.doc.tape.len();
        if self.recording
            && let Some(entry) = self.doc.tape.get_mut(tape)
        {
            entry.next = next;
            entry.span = span;
        }
        self.recording = was_recording;
        self.note(target, Value { kind, span, tape });
        Ok(())
    }

    fn note(&mut self, target: Option<usize>, value: Value) {
        if let Some(slot) = target.and_then(|target| self.doc.found.get_mut(target)) {
            *slot = Some(value);
        }
    }

    fn object(&mut self, node: Option<&Node>) -> Result<(), KeyError> {
        let first = self.doc.names.len();
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            let name = self.member_name(first)?;
            self.skip_space();
            self.expect(b':', "a colon must follow the name of a member")?;
            self.skip_space();
            let child = node.and_then(|node| node.member(self.doc.name(name, self.bytes)));
            self.value(child, name)?;
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => break,
                _ => return Err(self.malformed("a comma or `}` must follow a member")),
            }
            self.skip_space();
        }
        self.at += 1;
        self.close_names(first)
    }

    fn array(&mut self, node: Option<&Node>) -> Result<(), KeyError> {
        self.skip_space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        for index in 0.. {
            self.value(node.and_then(|node| node.element(index)), NO_NAME)?;
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => break,
                _ => return Err(self.malformed("a comma or `]` must follow an element")),
            }
            self.skip_space();
        }
        self.at += 1;
        Ok(())
    }

    /// Reads a name, and compares it with the earlier names while there are few.
    fn member_name(&mut self, first: usize) -> Result<Name, KeyError> {
        let at = self.at;
        if self.peek() != Some(b'"') {
            return Err(self.malformed("the name of a member must be a string"));
        }
        let (span, escaped) = self.string()?;
        let name = if escaped {
            let start = self.doc.arena.len();
            unescape(span.of(self.bytes), &mut self.doc.arena);
            Name {
                span: Span::new(start, self.doc.arena.len()),
                unescaped: true,
                at: short(at),
            }
        } else {
            Name {
                span,
                unescaped: false,
                at: short(at),
            }
        };
        let earlier = self.doc.names.get(first..).unwrap_or_default();
        if earlier.len() < LINEAR_NAMES {
            let bytes = self.doc.name(name, self.bytes);
            if earlier
                .iter()
                .any(|other| self.doc.name(*other, self.bytes) == bytes)
            {
                return Err(KeyError::DuplicateJsonKey {
                    offset: at,
                    depth: self.depth,
                });
            }
        }
        self.doc.names.push(name);
        Ok(name)
    }

    /// Ends an object: if it has many names, sorts them and compares neighbours.
    ///
    /// Sorting is never quadratic, and it has no hash function for which a producer could construct
    /// collisions.
    fn close_names(&mut self, first: usize) -> Result<(), KeyError> {
        let Document { names, arena, .. } = &mut *self.doc;
        let names_here = names.get_mut(first..).unwrap_or_default();
        if names_here.len() > LINEAR_NAMES {
            let payload = self.bytes;
            names_here.sort_unstable_by(|a, b| a.of(arena, payload).cmp(b.of(arena, payload)));
            for pair in names_here.windows(2) {
                if let [a, b] = pair
                    && a.of(arena, payload) == b.of(arena, payload)
                {
                    return Err(KeyError::DuplicateJsonKey {
                        offset: a.at.max(b.at) as usize,
                        depth: self.depth,
                    });
                }
            }
        }
        names.truncate(first);
        Ok(())
    }

    /// Reads a string. Returns the span between the quotes, and whether it has escapes.
    fn string(&mut self) -> Result<(Span, bool), KeyError> {
        self.at += 1;
        let start = self.at;
        let mut escaped = false;
        loop {
            self.at += plain_bytes(self.bytes.get(self.at..).unwrap_or_default());
            match self.peek() {
                Some(b'"') => break,
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                Some(_) => {
                    return Err(self.malformed("a control character in a string must be escaped"));
                }
                None => return Err(self.malformed("ends inside a string")),
            }
        }
        let span = Span::new(start, self.at);
        self.at += 1;
        Ok((span, escaped))
    }

    fn escape(&mut self) -> Result<(), KeyError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let len = match rest {
            [
                b'\\',
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't',
                ..,
            ] => 2,
            [b'\\', b'u', ..] => match unicode_escape(rest) {
                Some((_, len)) => len,
                None => {
                    return Err(self.malformed("not four hex digits, or half of a surrogate pair"));
                }
            },
            _ => return Err(self.malformed("no such escape")),
        };
        self.at += len;
        Ok(())
    }

    fn number(&mut self) -> Result<(), KeyError> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        let start = self.at;
        self.digits()?;
        if self.bytes.get(start) == Some(&b'0') && self.at > start + 1 {
            return Err(self.malformed("a number with a leading zero"));
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), KeyError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let len = rest
            .iter()
            .position(|b| !b.is_ascii_digit())
            .unwrap_or(rest.len());
        if len == 0 {
            return Err(self.malformed("a number lacks a digit"));
        }
        self.at += len;
        Ok(())
    }

    fn literal(&mut self, word: &[u8]) -> Result<Span, KeyError> {
        let start = self.at;
        if !self
            .bytes
            .get(start..)
            .unwrap_or_default()
            .starts_with(word)
        {
            return Err(self.malformed("no JSON value starts like this"));
        }
        self.at += word.len();
        Ok(Span::new(start, self.at))
    }

    fn expect(&mut self, byte: u8, what: &'static str) -> Result<(), KeyError> {
        if self.peek() != Some(byte) {
            return Err(self.malformed(what));
        }
        self.at += 1;
        Ok(())
    }

    #[inline]
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    #[inline]
    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    #[cold]
    fn malformed(&self, what: &'static str) -> KeyError {
        KeyError::MalformedJson {
            offset: self.at,
            what,
        }
    }
}
