//! Standard input as a source: each line is a message.
//!
//! Not obvious: standard input delivers nothing twice, and has no position that could be committed.
//! A line that was read and not finished when the process ends is therefore lost to this process,
//! and not to the user, who still has the input: the records say which lines are finished, so the
//! same input can be fed again, and only the rest runs. What is unfinished at the end is reported
//! with its line numbers, see [`Input::progress`].

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal as _};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use oncegate::dead_letters::millis_since_1970;
use oncegate::observe::Observer;
use oncegate::source::{AckHandle, Delivery, Source, SourceError};
use oncegate::{Message, Origin};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::sync::Mutex as AsyncMutex;

use crate::parse::BYTE_ORDER_MARK;

/// The route of the lines, and the word before their numbers in origins.
pub(crate) const STDIN: &str = "stdin";
/// The most bytes that are read at a time, unless a line is longer.
const CHUNK_BYTES: usize = 64 * 1024;
/// The longest line, in bytes: as long as one that a worker on standard streams may get.
const LINE_MAX_BYTES: usize = 16 * 1024 * 1024;

/// Reads messages from standard input, one a line, until its end. Clones read the same input.
#[derive(Clone)]
pub(crate) struct Input {
    route: Arc<str>,
    unread: Arc<AsyncMutex<Unread>>,
    lines: Arc<Lines>,
}

impl Input {
    /// Standard input, whose messages have this route. Nothing is read before the first receive.
    pub(crate) fn standard(route: impl Into<Arc<str>>) -> Self {
        Self::of(route, tokio::io::stdin())
    }

    /// Says to a person at a terminal that messages are read from there. A command that reads
    /// nothing would look like one that hangs.
    pub(crate) fn prompt() {
        if io::stdin().is_terminal() {
            eprintln!(
                "oncegate: reading messages from standard input, one a line, to its end (Ctrl-D)"
            );
        }
    }

    fn of(route: impl Into<Arc<str>>, reader: impl AsyncRead + Send + Unpin + 'static) -> Self {
        let unread = Unread {
            reader: Box::new(reader),
            buffer: BytesMut::new(),
            searched: 0,
            has_ended: false,
            encoding_is_known: false,
        };
        Self {
            route: route.into(),
            unread: Arc::new(AsyncMutex::new(unread)),
            lines: Arc::default(),
        }
    }

    /// Returns what was read so far, and which lines of it are unfinished.
    pub(crate) fn progress(&self) -> Progress {
        let state = self.lines.lock();
        Progress {
            read: state.read,
            messages: state.messages,
            unfinished: ranges(&state.unfinished),
            is_at_end: state.is_at_end,
        }
    }

    fn delivery(&self, number: u64, payload: Bytes, read_at: SystemTime) -> Delivery {
        let origin = Origin::Other(format!("{STDIN}:{number}").into());
        // The time tells line 7 of one input from line 7 of another: the id of a dead letter has
        // both.
        let read_at_ms = i64::try_from(millis_since_1970(read_at)).unwrap_or(i64::MAX);
        Delivery {
            message: Message::new(Arc::clone(&self.route), origin, Some(payload))
                .with_timestamp_ms(read_at_ms),
            ack_handle: Arc::new(LineHandle {
                number,
                lines: Arc::clone(&self.lines),
            }),
        }
    }

    /// Takes the next lines that are not empty; `None` at the end.
    async fn next_lines(&self, most: usize) -> Result<Option<Vec<(u64, Bytes)>>, SourceError> {
        let mut unread = self.unread.lock().await;
        loop {
            unread.check_encoding()?;
            let mut taken = Vec::new();
            while taken.len() < most
                && let Some(line) = unread.take_line()
            {
                let number = self.lines.note_line(!line.is_empty());
                if !line.is_empty() {
                    taken.push((number, line));
                }
            }
            if !taken.is_empty() {
                return Ok(Some(taken));
            }
            let after = self.lines.lock().read;
            if unread.has_ended {
                self.lines.lock().is_at_end = true;
                return Ok(None);
            }
            if unread.buffer.len() > LINE_MAX_BYTES {
                let what = format!(
                    "line {} has more than {LINE_MAX_BYTES} bytes; remove it from the input",
                    after + 1
                );
                return Err(unreadable(what));
            }
            let read = unread.read_more().await;
            read.map_err(|error| {
                unreadable(format!("reading after line {after} failed: {error}"))
            })?;
        }
    }
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Input")
            .field("route", &self.route)
            .finish_non_exhaustive()
    }
}

/// The reason why an input cannot be read to its end.
#[derive(Debug)]
pub(crate) struct BadInput(String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for BadInput {}

fn unreadable(what: String) -> SourceError {
    SourceError::caused("standard input cannot be read to its end", BadInput(what))
}

#[async_trait]
impl Source for Input {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let Some(lines) = self.next_lines(most).await? else {
            return Ok(None);
        };
        let now = SystemTime::now();
        Ok(Some(
            lines
                .into_iter()
                .map(|(number, line)| self.delivery(number, line, now))
                .collect(),
        ))
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

/// The part of the input that was not yet taken.
struct Unread {
    reader: Box<dyn AsyncRead + Send + Unpin>,
    buffer: BytesMut,
    /// The number of bytes of the buffer that are known to have no line feed.
    searched: usize,
    has_ended: bool,
    /// The beginning of the input was looked at.
    encoding_is_known: bool,
}

impl Unread {
    /// Skips a byte order mark at the beginning of the input, once that much of it was read.
    ///
    /// # Errors
    /// When the input is UTF-16, in which a line feed has another byte beside it.
    fn check_encoding(&mut self) -> Result<(), SourceError> {
        if self.encoding_is_known || (self.buffer.len() < BYTE_ORDER_MARK.len() && !self.has_ended)
        {
            return Ok(());
        }
        self.encoding_is_known = true;
        match self.buffer.get(..) {
            Some(
                [0xff, 0xfe, ..]
                | [0xfe, 0xff, ..]
                | [b'{' | b'[' | b'"', 0, ..]
                | [0, b'{' | b'[' | b'"', ..],
            ) => Err(unreadable(
                "it is UTF-16; convert it, for example by `iconv -f UTF-16 -t UTF-8`".to_owned(),
            )),
            Some(begin) if begin.starts_with(BYTE_ORDER_MARK) => {
                drop(self.buffer.split_to(BYTE_ORDER_MARK.len()));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Takes the next line of the buffer, without its end. The last line of the input needs no line
    /// feed.
    fn take_line(&mut self) -> Option<Bytes> {
        if !self.encoding_is_known {
            return None;
        }
        let rest = self.buffer.get(self.searched..).unwrap_or_default();
        let mut line = match rest.iter().position(|byte| *byte == b'\n') {
            Some(at) => {
                let mut line = self.buffer.split_to(self.searched + at + 1);
                line.truncate(line.len() - 1);
                line
            }
            None if self.has_ended && !self.buffer.is_empty() => self.buffer.split(),
            None => {
                self.searched = self.buffer.len();
                return None;
            }
        };
        self.searched = 0;
        if line.ends_with(b"\r") {
            line.truncate(line.len() - 1);
        }
        Some(line.freeze())
    }

    /// Reads more, or notes the end. Dropping the future loses nothing.
    async fn read_more(&mut self) -> io::Result<()> {
        self.buffer.reserve(CHUNK_BYTES);
        self.has_ended = self.reader.read_buf(&mut self.buffer).await? == 0;
        Ok(())
    }
}

/// The lines that were read.
#[derive(Debug, Default)]
struct Lines(Mutex<LinesState>);

#[derive(Debug, Default)]
struct LinesState {
    read: u64,
    messages: u64,
    /// At most as many as the consumer has in flight.
    unfinished: BTreeSet<u64>,
    is_at_end: bool,
}

impl Lines {
    fn lock(&self) -> parking_lot::MutexGuard<'_, LinesState> {
        self.0.lock()
    }

    /// Returns the number of the line.
    fn note_line(&self, is_message: bool) -> u64 {
        let mut state = self.lock();
        state.read += 1;
        let number = state.read;
        if is_message {
            state.messages += 1;
            state.unfinished.insert(number);
        }
        number
    }
}

/// Notes that a line is finished.
#[derive(Debug)]
struct LineHandle {
    number: u64,
    lines: Arc<Lines>,
}

impl AckHandle for LineHandle {
    fn start(&self) -> bool {
        true
    }

    fn ack(&self) {
        self.lines.lock().unfinished.remove(&self.number);
    }

    fn stop(&self) {}
}

/// The progress of an input: what was read, and what of it is finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The number of lines that were read, empty ones among them.
    pub(crate) read: u64,
    /// The number of them that are messages.
    pub(crate) messages: u64,
    /// The lines that were read and are not finished.
    pub(crate) unfinished: Vec<RangeInclusive<u64>>,
    /// `true` if the input was read to its end.
    pub(crate) is_at_end: bool,
}

impl Progress {
    /// Returns whether the whole input is finished.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_at_end && self.unfinished.is_empty()
    }

    /// Returns the number of messages that are not finished.
    pub(crate) fn unfinished_messages(&self) -> u64 {
        self.unfinished
            .iter()
            .map(|range| range.end() - range.start() + 1)
            .sum()
    }
}

fn ranges(numbers: &BTreeSet<u64>) -> Vec<RangeInclusive<u64>> {
    let mut ranges: Vec<RangeInclusive<u64>> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some(last) if last.end() + 1 == *number => *last = *last.start()..=*number,
            _ => ranges.push(*number..=*number),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn received(input: &Input, most: usize) -> Option<Vec<(String, Vec<u8>)>> {
        let deliveries = input.receive(most).await.unwrap()?;
        let shown = deliveries.iter().map(|Delivery { message, .. }| {
            (message.origin().to_string(), message.payload().to_vec())
        });
        Some(shown.collect())
    }

    fn line(number: u64, payload: &str) -> (String, Vec<u8>) {
        (format!("stdin:{number}"), payload.as_bytes().to_vec())
    }

    #[tokio::test]
    async fn each_line_is_a_message_and_empty_ones_only_count() {
        let input = Input::of("orders", &b"a\r\n\n\r\nb\xff\nlast"[..]);
        assert_eq!(received(&input, 1).await, Some(vec![line(1, "a")]));
        let rest = received(&input, 10).await.unwrap();
        assert_eq!(
            rest,
            [("stdin:4".to_owned(), b"b\xff".to_vec())],
            "the end of the last line is not known yet"
        );
        assert_eq!(received(&input, 10).await, Some(vec![line(5, "last")]));
        assert!(
            !input.progress().is_at_end,
            "the end is known only when it was read"
        );
        assert_eq!(received(&input, 10).await, None);
        let progress = input.progress();
        assert_eq!(
            (progress.read, progress.messages, progress.is_at_end),
            (5, 3, true)
        );
    }

    #[tokio::test]
    async fn a_byte_order_mark_is_skipped_and_utf_16_is_an_error() {
        for (begin, expected) in [
            ("\u{feff}a\nb", ["a", "b"]),
            ("a\n\u{feff}b", ["a", "\u{feff}b"]),
        ] {
            let input = Input::of("orders", io::Cursor::new(begin.as_bytes().to_vec()));
            let first = received(&input, 1).await;
            let second = received(&input, 1).await;
            assert_eq!(first, Some(vec![line(1, expected[0])]), "{begin:?}");
            assert_eq!(second, Some(vec![line(2, expected[1])]), "{begin:?}");
        }
        assert_eq!(
            received(&Input::of("orders", &b"\xef\xbb\xbf"[..]), 1).await,
            None
        );
        assert_eq!(
            received(&Input::of("orders", &b"1"[..]), 1).await,
            Some(vec![line(1, "1")])
        );
        for utf_16 in [
            &b"\xff\xfe{\0}\0\n\0"[..],
            b"\xfe\xff\0{\0}\0\n",
            b"{\0}\0\n\0",
        ] {
            let error = Input::of("orders", utf_16).receive(1).await.unwrap_err();
            let cause = error
                .source()
                .unwrap()
                .downcast_ref::<BadInput>()
                .unwrap()
                .to_string();
            assert!(
                cause.contains("UTF-16") && cause.contains("iconv"),
                "{cause}"
            );
        }
    }

    #[tokio::test]
    async fn what_is_acknowledged_is_finished_and_nothing_else() {
        let input = Input::of("orders", &b"1\n2\n3\n4\n5\n"[..]);
        let deliveries = input.receive(5).await.unwrap().unwrap();
        deliveries[1].ack_handle.ack();
        deliveries[1].ack_handle.ack();
        drop(deliveries);
        assert!(input.receive(1).await.unwrap().is_none());
        let progress = input.progress();
        assert_eq!(progress.unfinished, [1..=1, 3..=5]);
        assert_eq!(progress.unfinished_messages(), 4);
        assert!(progress.is_at_end && !progress.is_complete());
    }

    // invariant: line-of-standard-input
    #[tokio::test]
    async fn a_dropped_receive_loses_nothing() {
        let (mut writer, reader) = tokio::io::duplex(64);
        let input = Input::of("orders", reader);
        tokio::io::AsyncWriteExt::write_all(&mut writer, b"half ")
            .await
            .unwrap();
        // The first poll reads the half, and the future is dropped while it waits for more.
        assert!(futures_util::FutureExt::now_or_never(input.receive(1)).is_none());
        tokio::io::AsyncWriteExt::write_all(&mut writer, b"and half\n")
            .await
            .unwrap();
        assert_eq!(
            received(&input, 1).await,
            Some(vec![line(1, "half and half")])
        );
    }

    #[tokio::test]
    async fn a_line_over_the_limit_is_an_error_that_names_it() {
        let long = io::Cursor::new([b"{}\n".to_vec(), vec![b'x'; LINE_MAX_BYTES + 1]].concat());
        let input = Input::of("orders", long);
        assert_eq!(received(&input, 10).await, Some(vec![line(1, "{}")]));
        let error = input.receive(10).await.unwrap_err();
        let cause = error
            .source()
            .unwrap()
            .downcast_ref::<BadInput>()
            .unwrap()
            .to_string();
        assert!(cause.starts_with("line 2 has more than"), "{cause}");
    }
}
