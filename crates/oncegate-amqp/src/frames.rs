//! Makes every frame of the broker readable for the client.
//!
//! Names and short strings are bytes to RabbitMQ, and UTF-8 to the client: one message with another
//! `correlation-id` would end the connection, come back first, and end the next one. So would a
//! header of nested arrays that is deeper than the client's stack. Before the client reads a frame,
//! what it could not read is changed in place, with the same length, and noted: the message is
//! delivered without it, and with the bytes as they were.
//!
//! This module does no I/O.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::{Buf as _, Bytes, BytesMut};
use parking_lot::Mutex;

use super::headers::{
    APP_ID, CONTENT_ENCODING, CONTENT_TYPE, CORRELATION_ID, EXCHANGE, EXPIRATION, MESSAGE_ID,
    REPLY_TO, ROUTING_KEY, TYPE, USER_ID,
};

/// Types of frames.
const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
/// Bytes before a frame's payload: type, channel and size.
const PREFIX_BYTES: usize = 7;
/// Bytes of a frame besides its payload: the prefix, and a byte at the end.
const FRAME_BYTES: usize = PREFIX_BYTES + 1;
/// The bytes that may arrive at once while no message does.
const HEARTBEAT_MOST_BYTES: usize = 2 * FRAME_BYTES;
/// The largest frame that is looked at, in bytes: brokers send up to 128 KiB by default.
const LOOKED_AT_MOST_BYTES: usize = 16 << 20;
/// The class and method of a delivery.
const DELIVER: (u16, u16) = (60, 60);
/// The class and method by which the broker introduces itself.
const START: (u16, u16) = (10, 10);
/// The bytes of a message's header before its properties: class, weight and size of the body.
const BEFORE_PROPERTIES_BYTES: usize = 12;
/// The deepest nesting of arrays and tables in a header that the client reads.
const DEPTH_MOST: usize = 32;
/// Stands for each byte that is not UTF-8: the control character "substitute".
const SUBSTITUTE: u8 = 0x1A;
/// The type of a byte array, as which nested values that are too deep are read.
const BYTE_ARRAY: u8 = b'x';
/// The name of the header table where properties are named.
const HEADERS: &str = "headers";

/// The properties of a message in their order, and how each is written.
const PROPERTIES: [(&str, Form); 14] = [
    (CONTENT_TYPE, Form::Short),
    (CONTENT_ENCODING, Form::Short),
    (HEADERS, Form::Table),
    ("delivery-mode", Form::Bytes(1)),
    ("priority", Form::Bytes(1)),
    (CORRELATION_ID, Form::Short),
    (REPLY_TO, Form::Short),
    (EXPIRATION, Form::Short),
    (MESSAGE_ID, Form::Short),
    ("timestamp", Form::Bytes(8)),
    (TYPE, Form::Short),
    (USER_ID, Form::Short),
    (APP_ID, Form::Short),
    ("cluster-id", Form::Short),
];

#[derive(Clone, Copy)]
enum Form {
    Short,
    Table,
    Bytes(usize),
}

/// The parts of a message that the client could not read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unreadable {
    /// The names of the headers, with what is not UTF-8 replaced.
    pub(crate) names: Vec<String>,
    /// The message's properties as the broker has sent them: their flags, and their values.
    pub(crate) properties: Bytes,
}

/// Notes about the frames of a connection.
#[derive(Debug, Default)]
pub(crate) struct SeenFrames {
    version: Mutex<Option<String>>,
    /// The number of bytes of messages that have arrived.
    received: AtomicU64,
    /// By channel and delivery tag.
    unreadable: Mutex<BTreeMap<(u16, u64), Unreadable>>,
}

impl SeenFrames {
    /// Returns the first number of the broker's version, such as 4; `None` if it has told none.
    pub(crate) fn major_version(&self) -> Option<u32> {
        self.version
            .lock()
            .as_ref()?
            .split('.')
            .next()?
            .parse()
            .ok()
    }

    /// Returns how many bytes of messages have arrived.
    pub(crate) fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Takes what could not be read of a delivery.
    pub(crate) fn take(&self, channel: u16, tag: u64) -> Option<Unreadable> {
        self.unreadable.lock().remove(&(channel, tag))
    }
}

/// The bytes between the broker and the client.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    bytes: BytesMut,
    /// The number of bytes at the beginning that the client may read.
    ready: usize,
    /// The number of bytes after those that belong to a frame that is not looked at.
    passing: usize,
    /// The broker speaks another protocol: everything passes.
    is_foreign: bool,
    /// By channel, the delivery whose header comes next, and which of its names are not UTF-8.
    delivered: BTreeMap<u16, (u64, Vec<String>)>,
}

impl Frames {
    /// Takes bytes of the broker.
    pub(crate) fn receive(&mut self, bytes: &[u8], seen: &SeenFrames) {
        self.bytes.extend_from_slice(bytes);
        if self.passing > 0 || bytes.len() > HEARTBEAT_MOST_BYTES {
            seen.received.fetch_add(bytes.len() as u64, Relaxed);
        }
        self.advance(seen);
    }

    /// Lets everything pass: the broker has closed the connection.
    pub(crate) fn finish(&mut self) {
        self.ready = self.bytes.len();
    }

    /// Gives the client bytes that it may read; returns how many, and 0 when none are there.
    pub(crate) fn give(&mut self, to: &mut [u8]) -> usize {
        let count = self.ready.min(to.len());
        if let (Some(to), Some(from)) = (to.get_mut(..count), self.bytes.get(..count)) {
            to.copy_from_slice(from);
        }
        self.bytes.advance(count);
        self.ready -= count;
        count
    }

    /// Looks at each frame that is complete.
    fn advance(&mut self, seen: &SeenFrames) {
        loop {
            let rest = self.bytes.len() - self.ready;
            if self.is_foreign {
                self.ready = self.bytes.len();
                return;
            }
            if self.passing > 0 {
                let passed = self.passing.min(rest);
                self.passing -= passed;
                self.ready += passed;
                if passed == 0 || self.passing > 0 {
                    return;
                }
                continue;
            }
            let Some(prefix) = Prefix::read(self.bytes.get(self.ready..).unwrap_or_default())
            else {
                return;
            };
            let size = prefix.size.saturating_add(FRAME_BYTES);
            match prefix.kind {
                METHOD | HEADER if size <= LOOKED_AT_MOST_BYTES => {
                    if rest < size {
                        return;
                    }
                    self.look(&prefix, seen);
                    self.ready += size;
                }
                METHOD | HEADER | BODY | HEARTBEAT => self.passing = size,
                _ => self.is_foreign = true,
            }
        }
    }

    /// Looks at the complete frame that comes next.
    fn look(&mut self, prefix: &Prefix, seen: &SeenFrames) {
        let begin = self.ready + PREFIX_BYTES;
        let Some(payload) = self.bytes.get_mut(begin..begin + prefix.size) else {
            return;
        };
        if prefix.kind == HEADER {
            let Some((tag, mut names)) = self.delivered.remove(&prefix.channel) else {
                return;
            };
            let Some(payload) = payload.get_mut(BEFORE_PROPERTIES_BYTES..) else {
                return;
            };
            let properties = Bytes::copy_from_slice(payload);
            // What does not end as it should is left to the client, which refuses it.
            _ = Walk::of(payload).properties(&mut names);
            if !names.is_empty() {
                let unreadable = Unreadable { names, properties };
                let of = (prefix.channel, tag);
                seen.unreadable.lock().insert(of, unreadable);
            }
            return;
        }
        let mut walk = Walk::of(payload);
        let method = walk.u16().zip(walk.u16());
        if method == Some(DELIVER) {
            if let Some(delivered) = walk.delivery() {
                self.delivered.insert(prefix.channel, delivered);
            }
        } else if method == Some(START)
            && let Some(version) = walk.version()
        {
            *seen.version.lock() = Some(version);
        }
    }
}

/// The beginning of a frame.
struct Prefix {
    kind: u8,
    channel: u16,
    size: usize,
}

impl Prefix {
    fn read(bytes: &[u8]) -> Option<Self> {
        let [kind, a, b, c, d, e, f, ..] = *bytes else {
            return None;
        };
        let size = usize::try_from(u32::from_be_bytes([c, d, e, f])).ok()?;
        let channel = u16::from_be_bytes([a, b]);
        Some(Self {
            kind,
            channel,
            size,
        })
    }
}

/// A walk through a frame's payload, which makes readable what it passes. `None` of its functions
/// means that the payload ends too early, or has an unknown type of value.
struct Walk<'a> {
    bytes: &'a mut [u8],
}

/// A short string that was passed, as text.
struct Passed {
    text: String,
    was_readable: bool,
}

impl<'a> Walk<'a> {
    fn of(bytes: &'a mut [u8]) -> Self {
        Self { bytes }
    }

    /// Passes so many bytes.
    fn take(&mut self, count: usize) -> Option<&'a mut [u8]> {
        let bytes = std::mem::take(&mut self.bytes);
        if count > bytes.len() {
            return None;
        }
        let (taken, rest) = bytes.split_at_mut(count);
        self.bytes = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.first_chunk().copied()
    }

    /// Passes a value behind its length of four bytes.
    fn long(&mut self) -> Option<&'a mut [u8]> {
        let length = u32::from_be_bytes(self.array()?);
        self.take(usize::try_from(length).ok()?)
    }

    fn short(&mut self) -> Option<Passed> {
        let length = self.u8()?;
        let bytes = self.take(usize::from(length))?;
        let text = String::from_utf8_lossy(bytes).into_owned();
        let was_readable = mend(bytes);
        Some(Passed { text, was_readable })
    }

    /// Passes what a delivery says before the message: returns its tag, and the names of what is
    /// not readable.
    fn delivery(&mut self) -> Option<(u64, Vec<String>)> {
        self.short()?;
        let tag = u64::from_be_bytes(self.array()?);
        self.u8()?;
        let mut names = Vec::new();
        for name in [EXCHANGE, ROUTING_KEY] {
            if !self.short()?.was_readable {
                names.push(name.to_owned());
            }
        }
        Some((tag, names))
    }

    /// Passes the properties of the broker, and returns its version.
    fn version(&mut self) -> Option<String> {
        self.take(2)?;
        let mut table = Walk::of(self.long()?);
        while !table.bytes.is_empty() {
            let name = table.short()?;
            if name.text == "version" && table.bytes.first() == Some(&b'S') {
                table.u8()?;
                return Some(String::from_utf8_lossy(table.long()?).into_owned());
            }
            table.value(0)?;
        }
        None
    }

    /// Passes the properties of a message, and adds the names of those that are not readable.
    fn properties(&mut self, names: &mut Vec<String>) -> Option<()> {
        let flags = self.u16()?;
        for (n, (name, form)) in PROPERTIES.into_iter().enumerate() {
            if flags & (0x8000 >> n) == 0 {
                continue;
            }
            match form {
                Form::Bytes(count) => {
                    self.take(count)?;
                }
                Form::Short => {
                    if !self.short()?.was_readable {
                        names.push(name.to_owned());
                    }
                }
                Form::Table => Walk::of(self.long()?).headers(names)?,
            }
        }
        Some(())
    }

    fn headers(&mut self, names: &mut Vec<String>) -> Option<()> {
        while !self.bytes.is_empty() {
            let name = self.short()?;
            let value = self.value(1)?;
            if !(name.was_readable && value) {
                names.push(name.text);
            }
        }
        Some(())
    }

    /// Passes a value with its type. Returns whether it was readable.
    fn value(&mut self, depth: usize) -> Option<bool> {
        let kind = self.take(1)?;
        let of = kind.first().copied()?;
        let fixed = match of {
            b'V' => 0,
            b't' | b'b' | b'B' => 1,
            b's' | b'U' | b'u' => 2,
            b'I' | b'i' | b'f' => 4,
            b'D' => 5,
            b'L' | b'l' | b'd' | b'T' => 8,
            b'S' | b'x' => {
                self.long()?;
                return Some(true);
            }
            b'A' | b'F' if depth > DEPTH_MOST => {
                kind.fill(BYTE_ARRAY);
                self.long()?;
                return Some(false);
            }
            b'A' | b'F' => {
                let mut inner = Walk::of(self.long()?);
                let mut is_readable = true;
                while !inner.bytes.is_empty() {
                    is_readable &= of != b'F' || inner.short()?.was_readable;
                    is_readable &= inner.value(depth + 1)?;
                }
                return Some(is_readable);
            }
            _ => return None,
        };
        self.take(fixed)?;
        Some(true)
    }
}

/// Replaces each byte that is not UTF-8. Returns whether there was none.
fn mend(bytes: &mut [u8]) -> bool {
    let mut was_readable = true;
    while let Err(error) = std::str::from_utf8(bytes) {
        was_readable = false;
        let begin = error.valid_up_to();
        let end = error
            .error_len()
            .map_or(bytes.len(), |length| begin + length);
        bytes
            .get_mut(begin..end)
            .unwrap_or_default()
            .fill(SUBSTITUTE);
    }
    was_readable
}

#[cfg(test)]
#[path = "frames_tests.rs"]
mod tests;
