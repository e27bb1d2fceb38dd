//! Decodes canonical bytes into text.
//!
//! The explanation is decoded from the bytes that are hashed, so it shows exactly what the key is
//! made of. Because the bytes can be decoded, two different inputs never have the same bytes.

use std::fmt::{self, Write as _};

use super::encode::{self, DOMAIN_HTTP_KEY, DOMAIN_KEY};
use super::instant;
use super::store_key::{Digest, StoreKey};

/// An explanation of what a key is made of. It contains payload values: do not log it.
#[derive(Clone, PartialEq, Eq)]
pub struct Explanation {
    lines: Vec<String>,
    canonical: Vec<u8>,
    store_key: StoreKey,
}

impl Explanation {
    pub(super) fn new(canonical: Vec<u8>, store_key: StoreKey) -> Self {
        let lines = read(&canonical).expect("canonical bytes can be decoded");
        Self {
            lines,
            canonical,
            store_key,
        }
    }

    /// The canonical form as text, one line per part.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        &self.lines
    }

    /// The bytes that are hashed.
    #[must_use]
    pub fn canonical(&self) -> &[u8] {
        &self.canonical
    }

    /// The digest of those bytes.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.store_key.digest()
    }

    /// The key that the store uses.
    #[must_use]
    pub fn store_key(&self) -> &StoreKey {
        &self.store_key
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(f, "{line}")?;
        }
        writeln!(f, "digest     {}", self.digest())?;
        write!(f, "store key  {}", self.store_key)
    }
}

impl fmt::Debug for Explanation {
    /// Omits the payload's values, so that a log line with `{:?}` leaks none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Explanation")
            .field("store_key", &self.store_key)
            .finish_non_exhaustive()
    }
}

/// Decodes canonical bytes; `None` when they are not in the form that `encode` writes.
fn read(canonical: &[u8]) -> Option<Vec<String>> {
    let mut bytes = Reader { rest: canonical };
    let mut lines = Vec::new();
    let format = bytes.byte()?;
    let domain = bytes.byte()?;
    lines.push(format!("format     {format}"));
    match domain {
        DOMAIN_KEY => {}
        DOMAIN_HTTP_KEY => lines.push("domain     HTTP requests".to_owned()),
        _ => return None,
    }
    lines.push(format!("scope      {}", bytes.text()?));
    lines.push(format!("route      {:?}", bytes.text()?));
    lines.push(match bytes.byte()? {
        0 => "tenant     none".to_owned(),
        1 => format!("tenant     {}", bytes.value()?),
        _ => return None,
    });
    source(&mut bytes, &mut lines)?;
    bytes.rest.is_empty().then_some(lines)
}

fn source(bytes: &mut Reader<'_>, lines: &mut Vec<String>) -> Option<()> {
    match bytes.byte()? {
        encode::SOURCE_JSON => {
            for _ in 0..bytes.len()? {
                let path = bytes.text()?;
                lines.push(format!("field      {path} = {}", bytes.value()?));
            }
        }
        encode::SOURCE_PAYLOAD => lines.push(format!("payload    {}", bytes.value()?)),
        encode::SOURCE_HEADER => {
            let name = bytes.text()?;
            lines.push(format!("header     {name} = {}", bytes.value()?));
        }
        encode::SOURCE_MESSAGE_KEY => lines.push(format!("message key {}", bytes.value()?)),
        encode::SOURCE_MESSAGE_ID => lines.push(format!("message id {}", bytes.value()?)),
        encode::SOURCE_CUSTOM => {
            let name = bytes.text()?;
            let version = u32::from_be_bytes(*bytes.chunk()?);
            lines.push(format!("custom     {name}, version {version}"));
            for _ in 0..bytes.len()? {
                let part = bytes.counted()?;
                lines.push(format!("part       b\"{}\"", part.escape_ascii()));
            }
        }
        encode::SOURCE_PARTS => parts(bytes, lines)?,
        encode::SOURCE_CASES => {
            lines.push(match bytes.byte()? {
                encode::WHEN_OTHERWISE => "case       otherwise".to_owned(),
                encode::WHEN_PRESENT => format!("case       {} is present", bytes.place()?),
                encode::WHEN_EQUAL => format!("case       {} = {}", bytes.place()?, bytes.value()?),
                _ => return None,
            });
            parts(bytes, lines)?;
        }
        _ => return None,
    }
    Some(())
}

fn parts(bytes: &mut Reader<'_>, lines: &mut Vec<String>) -> Option<()> {
    for _ in 0..bytes.len()? {
        let label = if bytes.rest.first() == Some(&encode::LABEL_FIRST_OF) {
            bytes.byte()?;
            let places = (0..bytes.len()?)
                .map(|_| bytes.place())
                .collect::<Option<Vec<_>>>()?;
            format!("first of {}", places.join(", "))
        } else {
            bytes.place()?
        };
        lines.push(format!("part       {label} = {}", bytes.value()?));
    }
    Some(())
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*byte)
    }

    fn chunk<const N: usize>(&mut self) -> Option<&'a [u8; N]> {
        let (chunk, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(chunk)
    }

    fn len(&mut self) -> Option<usize> {
        usize::try_from(u32::from_be_bytes(*self.chunk()?)).ok()
    }

    fn counted(&mut self) -> Option<&'a [u8]> {
        let len = self.len()?;
        let (bytes, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(bytes)
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.counted()?).ok()
    }

    /// The label of a place.
    fn place(&mut self) -> Option<String> {
        match self.byte()? {
            encode::SOURCE_JSON => Some(self.text()?.to_owned()),
            encode::SOURCE_HEADER => Some(format!("header {}", self.text()?)),
            encode::SOURCE_MESSAGE_KEY => Some("message key".to_owned()),
            encode::SOURCE_MESSAGE_ID => Some("message id".to_owned()),
            _ => None,
        }
    }

    fn value(&mut self) -> Option<String> {
        let mut out = String::new();
        self.value_into(&mut out)?;
        Some(out)
    }

    fn value_into(&mut self, out: &mut String) -> Option<()> {
        match self.byte()? {
            encode::TAG_NULL => self.counted()?.is_empty().then(|| out.push_str("null")),
            encode::TAG_ABSENT => self.counted()?.is_empty().then(|| out.push_str("absent")),
            encode::TAG_BOOL => match self.counted()? {
                [0] => {
                    out.push_str("false");
                    Some(())
                }
                [1] => {
                    out.push_str("true");
                    Some(())
                }
                _ => None,
            },
            encode::TAG_NUMBER => {
                out.push_str(self.text()?);
                Some(())
            }
            encode::TAG_STRING => write!(out, "{:?}", self.text()?).ok(),
            encode::TAG_INSTANT => {
                let count = self.text()?;
                match count.strip_suffix('d').and_then(|days| days.parse().ok()) {
                    Some(days) => write!(out, "{} in UTC ({count})", instant::date(days)).ok(),
                    None => write!(out, "instant {count}").ok(),
                }
            }
            encode::TAG_BYTES => write!(out, "b\"{}\"", self.counted()?.escape_ascii()).ok(),
            encode::TAG_ARRAY => self.list(out, '[', ']', false),
            encode::TAG_UNORDERED => {
                out.push_str("unordered ");
                self.list(out, '[', ']', false)
            }
            encode::TAG_OBJECT => self.list(out, '{', '}', true),
            _ => None,
        }
    }

    fn list(&mut self, out: &mut String, open: char, close: char, named: bool) -> Option<()> {
        out.push(open);
        for position in 0..self.len()? {
            if position > 0 {
                out.push_str(", ");
            }
            if named {
                write!(out, "{:?}: ", self.text()?).ok()?;
            }
            self.value_into(out)?;
        }
        out.push(close);
        Some(())
    }
}
