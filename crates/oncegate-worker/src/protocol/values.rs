//! The output of a worker: finds the answers in it, wherever they stand.
//!
//! An answer usually has a line of its own. Several may share a line, as when two threads write at
//! the same time, and one may take several lines, as `jq` writes it. Text may stand around it that
//! something else has written: a progress bar, a log, a child process. So an answer is found by the
//! `id` of a message that the worker has, which is nowhere else by chance. What remains of a line
//! is noise, or an answer that is damaged.

use std::borrow::Cow;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::sync::mpsc;

use super::json::{Object, Step};
use super::said::{Answer, LINE_MAX_BYTES, ObjectKind, Ready, mistake, shown};

/// UTF-8's byte order mark, which .NET and PowerShell write before the first line.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// The most bytes that are read at a time.
const CHUNK_BYTES: usize = 64 * 1024;
/// The largest text that is searched again for what is within it, in bytes. An answer within
/// something larger that is none is not found.
const SEARCHED_AGAIN_MOST: usize = 64 * 1024;
/// The beginning of what is too long that is searched for the message that it answers, in bytes.
const HEAD_BYTES: usize = 4096;

/// Passes the output on in parts until its end.
pub(crate) async fn read_chunks(stdout: impl AsyncRead + Unpin, chunks: mpsc::Sender<Vec<u8>>) {
    let mut stdout = BufReader::with_capacity(CHUNK_BYTES, stdout);
    while let Ok(chunk) = stdout.fill_buf().await {
        let bytes = chunk.len();
        if bytes == 0 || chunks.send(chunk.to_vec()).await.is_err() {
            return;
        }
        stdout.consume(bytes);
    }
}

/// Something that a worker has written.
#[derive(Debug)]
pub(crate) enum Written {
    Ready(Ready),
    /// An answer, which begins on this line. Its message may be one that the worker does not have.
    Answer {
        answer: Answer,
        line: u64,
    },
    /// A wrong or damaged answer, to this message if it names one that the worker has.
    Wrong {
        id: Option<String>,
        why: String,
    },
    /// Something that is no attempt at the protocol, as what a `print` writes.
    Noise {
        why: String,
    },
}

/// Returns whether the worker has a message with this id.
pub(crate) type Known<'a> = &'a dyn Fn(&str) -> bool;

/// Finds what a worker has written.
#[derive(Debug)]
pub(crate) struct Finder {
    /// The line that is read.
    number: u64,
    /// The part of the line that belongs to no answer, and the line on which it begins.
    noise: Vec<u8>,
    noise_at: u64,
    /// The part of it that is outside of whole objects: a damaged answer is in it.
    loose: Vec<u8>,
    /// The object that has begun.
    object: Option<Begun>,
    /// The rest of the line belongs to something that was too long.
    skips: bool,
    is_ready: bool,
}

#[derive(Debug)]
struct Begun {
    text: Vec<u8>,
    /// The line on which it begins.
    line: u64,
    extent: Object,
}

impl Default for Finder {
    fn default() -> Self {
        Self {
            number: 1,
            noise: Vec::new(),
            noise_at: 1,
            loose: Vec::new(),
            object: None,
            skips: false,
            is_ready: false,
        }
    }
}

impl Finder {
    /// Takes a part of the output. Returns what it completes.
    pub(crate) fn take(&mut self, chunk: &[u8], known: Known<'_>) -> Vec<Written> {
        let mut found = Vec::new();
        let mut rest = Cow::Borrowed(chunk);
        loop {
            let again = self.read(&rest, known, &mut found);
            let Some(again) = again.or_else(|| self.reopened(known)) else {
                return found;
            };
            rest = Cow::Owned(again);
        }
    }

    /// The text of an object that was cut off, to be read again without its beginning.
    fn reopened(&mut self, known: Known<'_>) -> Option<Vec<u8>> {
        let begun = self.object.take_if(|begun| begun.ends_with_answer(known))?;
        Some(self.without_begin(&begun, &[]))
    }

    /// Takes the end of the output. An object that it cuts off is nothing: its process has ended
    /// before it answered.
    pub(crate) fn end(&mut self, known: Known<'_>) -> Vec<Written> {
        let mut found = Vec::new();
        self.object = None;
        self.end_line(known, &mut found);
        found
    }

    /// Reads until the end, or until a text must be read again: that text, with the rest.
    fn read(
        &mut self,
        bytes: &[u8],
        known: Known<'_>,
        found: &mut Vec<Written>,
    ) -> Option<Vec<u8>> {
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.skips {
                let end = rest.iter().position(|byte| *byte == b'\n')?;
                rest = rest.get(end..).unwrap_or_default();
                self.skips = false;
            }
            match self.object.take() {
                None => rest = self.read_noise(rest, known, found),
                Some(begun) => match self.read_object(begun, rest, known, found) {
                    Progress::Read(behind) => rest = behind,
                    Progress::Again(text) => return Some(text),
                },
            }
        }
        None
    }

    /// Reads up to the beginning of an object, or to the end of a line. Returns what is behind.
    fn read_noise<'a>(
        &mut self,
        bytes: &'a [u8],
        known: Known<'_>,
        found: &mut Vec<Written>,
    ) -> &'a [u8] {
        let place = bytes.iter().position(|byte| matches!(byte, b'{' | b'\n'));
        let mut parts = bytes.split_at(place.unwrap_or(bytes.len()));
        self.note_loose(parts.0);
        if self.noise.len() as u64 >= LINE_MAX_BYTES {
            let noise = std::mem::take(&mut self.noise);
            self.loose.clear();
            self.skip(&noise, self.number, known, found);
            return parts.1;
        }
        if let Some((byte, behind)) = parts.1.split_first() {
            parts.1 = behind;
            if *byte == b'\n' {
                self.note_loose(b"\n");
                self.end_line(known, found);
                self.number += 1;
            } else {
                self.object = Some(Begun {
                    text: vec![*byte],
                    line: self.number,
                    extent: Object::begun(),
                });
            }
        }
        parts.1
    }

    /// Reads up to the end of the object, or of the line.
    fn read_object<'a>(
        &mut self,
        mut begun: Begun,
        bytes: &'a [u8],
        known: Known<'_>,
        found: &mut Vec<Written>,
    ) -> Progress<'a> {
        let step_at =
            bytes
                .iter()
                .enumerate()
                .find_map(|(place, byte)| match begun.extent.step(*byte) {
                    Step::GoesOn if *byte != b'\n' => None,
                    step => Some((step, place)),
                });
        let Some((step, place)) = step_at else {
            begun.text.extend_from_slice(bytes);
            if begun.text.len() as u64 >= LINE_MAX_BYTES {
                self.skip(&begun.text, begun.line, known, found);
            } else {
                self.object = Some(begun);
            }
            return Progress::Read(&[]);
        };
        let end = if step == Step::Breaks {
            place
        } else {
            place + 1
        };
        let parts = bytes.split_at(end);
        begun.text.extend_from_slice(parts.0);
        match step {
            Step::GoesOn => {
                if begun.ends_with_answer(known) {
                    return Progress::Again(self.without_begin(&begun, parts.1));
                }
                self.number += 1;
                self.object = Some(begun);
                Progress::Read(parts.1)
            }
            Step::Ends => match self.meaning(&begun, known) {
                Some(written) => {
                    found.push(written);
                    Progress::Read(parts.1)
                }
                None => {
                    let line = begun.line;
                    let within = answers_within(&begun.text, known);
                    found.extend(
                        within
                            .into_iter()
                            .map(|answer| Written::Answer { answer, line }),
                    );
                    self.note_whole(&begun);
                    Progress::Read(parts.1)
                }
            },
            Step::Breaks => self.again(&begun, parts.1, known, found),
        }
    }

    /// Returns what a whole object is; `None` when it is noise.
    fn meaning(&mut self, begun: &Begun, known: Known<'_>) -> Option<Written> {
        let line = begun.line;
        // What stands in other text answers only a message that the worker has: it may be a log's.
        let is_alone = is_blank(&self.noise);
        match ObjectKind::of(&begun.text) {
            ObjectKind::Ready(ready) if is_alone || !self.is_ready => {
                self.is_ready = true;
                Some(Written::Ready(ready))
            }
            ObjectKind::Answer(answer) if known(&answer.id) || is_alone && answer.is_plain => {
                Some(Written::Answer { answer, line })
            }
            ObjectKind::Wrong { id } if is_alone => Some(Written::Wrong {
                id: id.filter(|id| known(id)),
                why: described(line, &begun.text),
            }),
            _ => None,
        }
    }

    /// Takes the beginning of an object for noise, and returns the rest of its text to be read
    /// again: an answer may be within it.
    fn again<'a>(
        &mut self,
        begun: &Begun,
        behind: &'a [u8],
        known: Known<'_>,
        found: &mut Vec<Written>,
    ) -> Progress<'a> {
        if begun.text.len() > SEARCHED_AGAIN_MOST {
            self.number = begun.line;
            self.note_noise(&begun.text, known, found);
            return Progress::Read(behind);
        }
        Progress::Again(self.without_begin(begun, behind))
    }

    /// Takes the first byte of an object for noise. Returns the rest, with what is behind it.
    fn without_begin(&mut self, begun: &Begun, behind: &[u8]) -> Vec<u8> {
        self.number = begun.line;
        self.note_loose(b"{");
        [begun.text.get(1..).unwrap_or_default(), behind].concat()
    }

    /// Notes a whole object that is noise.
    fn note_whole(&mut self, begun: &Begun) {
        if self.noise.is_empty() {
            self.noise_at = begun.line;
        }
        self.noise.extend_from_slice(&begun.text);
    }

    /// Notes text of one line that is in no whole object.
    fn note_loose(&mut self, text: &[u8]) {
        if self.noise.is_empty() {
            self.noise_at = self.number;
        }
        self.noise.extend_from_slice(text);
        self.loose.extend_from_slice(text);
    }

    /// Takes text in which there is no answer.
    fn note_noise(&mut self, text: &[u8], known: Known<'_>, found: &mut Vec<Written>) {
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            self.note_loose(line);
            if line.ends_with(b"\n") {
                self.end_line(known, found);
                self.number += 1;
            }
        }
    }

    /// Judges what remains of the line.
    fn end_line(&mut self, known: Known<'_>, found: &mut Vec<Written>) {
        let noise = std::mem::take(&mut self.noise);
        let loose = std::mem::take(&mut self.loose);
        if is_blank(&noise) {
            return;
        }
        let line = self.noise_at;
        // In all of it: a string may have whole objects within.
        let quoted = quoted_answers(&noise, known);
        if !quoted.is_empty() {
            found.extend(
                quoted
                    .into_iter()
                    .map(|answer| Written::Answer { answer, line }),
            );
            return;
        }
        let why = described(line, &noise);
        found.push(if is_damaged(&loose) {
            let id = known_id(&loose, known);
            Written::Wrong { id, why }
        } else {
            Written::Noise { why }
        });
    }

    /// Skips the rest of a line that is too long.
    fn skip(&mut self, text: &[u8], line: u64, known: Known<'_>, found: &mut Vec<Written>) {
        self.skips = true;
        let head = text.get(..text.len().min(HEAD_BYTES)).unwrap_or_default();
        let why = described(line, text);
        found.push(if contains(head, b"\"outcome\"") {
            let id = known_id(head, known);
            Written::Wrong { id, why }
        } else {
            Written::Noise { why }
        });
    }
}

impl Begun {
    /// Returns whether the object ends with a whole answer within it: then it was cut off. A worker
    /// that waits for its next message writes nothing more, so nothing is waited for.
    fn ends_with_answer(&self, known: Known<'_>) -> bool {
        let mut lines = self.text.rsplit(|byte| *byte == b'\n');
        if lines.next().is_some_and(<[u8]>::is_empty)
            && let Some(line) = lines.next()
            && !quoted_answers(line, known).is_empty()
        {
            return true;
        }
        let Some((begin, end)) = self.extent.last_within() else {
            return false;
        };
        let within = self.text.get(begin..end).unwrap_or_default();
        let behind = self.text.get(end..).unwrap_or_default();
        // The result of an answer whose rest is still to come is none. All that is open holds the
        // object, because only blanks are behind it.
        let mut around = self.extent.open_from().chain([begin]);
        is_blank(behind)
            && !around.any(|place| self.is_result_at(place))
            && contains(within, b"outcome")
            && matches!(ObjectKind::of(within), ObjectKind::Answer(answer) if known(&answer.id))
    }

    /// Returns whether the value that begins at this place is named `result`.
    fn is_result_at(&self, place: usize) -> bool {
        let before = self.text.get(..place).unwrap_or_default();
        before
            .trim_ascii_end()
            .strip_suffix(b":")
            .is_some_and(|name| name.trim_ascii_end().ends_with(b"\"result\""))
    }
}

/// The text that is left after a part was read.
enum Progress<'a> {
    /// The part behind what was read.
    Read(&'a [u8]),
    /// The text to read next.
    Again(Vec<u8>),
}

/// Names the line, what is wrong with it, and its beginning.
fn described(line: u64, text: &[u8]) -> String {
    format!(
        "line {line} of its standard output {}: {:?}",
        mistake(text),
        shown(text)
    )
}

/// Returns whether nothing but what may separate answers is there.
fn is_blank(mut text: &[u8]) -> bool {
    while let Some((first, behind)) = text.split_first() {
        text = match first {
            b'[' | b']' | b',' | b'\0' => behind,
            first if first.is_ascii_whitespace() => behind,
            _ => match text.strip_prefix(BYTE_ORDER_MARK) {
                Some(behind) => behind,
                None => return false,
            },
        };
    }
    true
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Returns whether text outside of objects may be a part of an answer: it begins as one does, or
/// names an outcome.
fn is_damaged(text: &[u8]) -> bool {
    const WORDS: [&str; 4] = ["\"complete\"", "\"retry\"", "\"later\"", "\"dead-letter\""];
    contains(text, b"\"outcome\"")
        && (text.trim_ascii_start().starts_with(b"{")
            || WORDS.iter().any(|word| contains(text, word.as_bytes())))
}

/// The first id in a text that is one of a message that the worker has.
fn known_id(text: &[u8], known: Known<'_>) -> Option<String> {
    text.split(|byte| !byte.is_ascii_digit())
        .filter_map(|digits| std::str::from_utf8(digits).ok())
        .find(|digits| !digits.is_empty() && known(digits))
        .map(str::to_owned)
}

/// The answers that are objects within an object that is none.
fn answers_within(text: &[u8], known: Known<'_>) -> Vec<Answer> {
    let mut answers = Vec::new();
    if text.len() > SEARCHED_AGAIN_MOST || !contains(text, b"outcome") {
        return answers;
    }
    let mut rest = text.get(1..).unwrap_or_default();
    while let Some(begin) = rest.iter().position(|byte| *byte == b'{') {
        let object = rest.get(begin..).unwrap_or_default();
        let end = Object::end_of(object).unwrap_or_default();
        let whole = object.get(..end).unwrap_or_default();
        let read = match ObjectKind::of(whole) {
            ObjectKind::Answer(answer) if known(&answer.id) => {
                answers.push(answer);
                end
            }
            _ => 1,
        };
        rest = object.get(read..).unwrap_or_default();
    }
    answers
}

/// The answers that stand in a text as strings of JSON.
fn quoted_answers(text: &[u8], known: Known<'_>) -> Vec<Answer> {
    const BEGIN: &[u8] = b"\"{";
    if !contains(text, b"outcome\\\"") {
        return Vec::new();
    }
    let mut answers = Vec::new();
    for (place, _) in text
        .windows(BEGIN.len())
        .enumerate()
        .filter(|(_, window)| *window == BEGIN)
    {
        let string = text.get(place..).unwrap_or_default();
        let mut strings = serde_json::Deserializer::from_slice(string).into_iter::<String>();
        if let Some(Ok(string)) = strings.next()
            && let ObjectKind::Answer(answer) = ObjectKind::of(string.as_bytes())
            && known(&answer.id)
        {
            answers.push(answer);
        }
    }
    answers
}

#[cfg(test)]
mod tests;
