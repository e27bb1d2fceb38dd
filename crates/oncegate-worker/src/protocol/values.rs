//! The output of a worker, as JSON values.
//!
//! A value usually has a line of its own. Several values may share a line, as when two threads
//! write at the same time, and a value may take several lines, as `jq` writes it. Blank lines and
//! byte order marks are nothing. Anything else that is no object and no array is passed on as the
//! line that it is.

use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::sync::mpsc;

use super::lines::{LINE_MAX_BYTES, Line, parse};

/// UTF-8's byte order mark, which .NET and PowerShell write before the first line.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// The most bytes that are read at a time.
const CHUNK_BYTES: usize = 64 * 1024;

/// Passes values on until the end, each with the number of the line on which it begins. One that is
/// too long is passed on in part, and is invalid. A value that the end cuts off is nothing: its
/// process has ended before it answered.
pub(crate) async fn read_values(stdout: impl AsyncRead + Unpin, values: mpsc::Sender<Line>) {
    let mut stdout = BufReader::with_capacity(CHUNK_BYTES, stdout);
    let mut splitter = Splitter {
        number: 1,
        ..Splitter::default()
    };
    loop {
        let Ok(chunk) = stdout.fill_buf().await else {
            return;
        };
        let ended: Vec<Line> = if chunk.is_empty() {
            splitter.line().into_iter().collect()
        } else {
            chunk
                .split_inclusive(|byte| *byte == b'\n')
                .flat_map(|part| splitter.take(part))
                .collect()
        };
        let bytes = chunk.len();
        stdout.consume(bytes);
        for value in ended {
            if values.send(value).await.is_err() {
                return;
            }
        }
        if bytes == 0 {
            return;
        }
    }
}

/// Finds the ends of values without parsing them.
#[derive(Debug, Default)]
struct Splitter {
    /// The line that is read.
    number: u64,
    /// A part of it was read.
    is_in_line: bool,
    /// The beginning of a line that is no value.
    line: Vec<u8>,
    /// The value that has begun, and the line on which it did; empty between values.
    begun: Vec<u8>,
    begun_at: u64,
    depth: u64,
    is_in_string: bool,
    is_escaped: bool,
    /// The rest of the line belongs to something that was too long.
    skips: bool,
}

/// The reach of a value.
enum Reach {
    /// The value ends before this place.
    To(usize),
    Further,
    /// A line feed is in a string, where JSON allows none.
    Broken,
}

impl Splitter {
    /// Takes a part of a line; with its line feed, the line ends. Returns what has ended.
    fn take(&mut self, part: &[u8]) -> Vec<Line> {
        let mut ended = Vec::new();
        let is_at_begin = !std::mem::replace(&mut self.is_in_line, true);
        if !self.skips {
            // The value that has begun was cut off: an answer that is whole is not a part of
            // another.
            if is_at_begin && self.begun.starts_with(b"{") && is_whole(part) {
                ended.push(self.value());
            }
            self.split(part, &mut ended);
        }
        if part.ends_with(b"\n") {
            ended.extend(self.line());
            self.number += 1;
            self.is_in_line = false;
            self.skips = false;
        }
        ended
    }

    fn split(&mut self, mut rest: &[u8], ended: &mut Vec<Line>) {
        while !rest.is_empty() {
            if self.begun.is_empty() {
                if self.line.is_empty() {
                    rest = without_blanks(rest);
                }
                match rest.first() {
                    Some(b'{' | b'[') if self.line.is_empty() => self.begun_at = self.number,
                    // No object and no array: it is passed on as the line that it is.
                    _ => {
                        self.line.extend_from_slice(rest);
                        self.skips = self.line.len() as u64 >= LINE_MAX_BYTES;
                        return;
                    }
                }
            }
            let reach = self.reach(rest);
            let place = if let Reach::To(place) = reach {
                place
            } else {
                rest.len()
            };
            let (part, behind) = rest.split_at(place);
            self.begun.extend_from_slice(part);
            rest = behind;
            self.skips = self.begun.len() as u64 >= LINE_MAX_BYTES && rest.is_empty();
            if self.skips || !matches!(reach, Reach::Further) {
                ended.push(self.value());
            }
        }
    }

    /// Looks for the end of the value that has begun or begins here.
    fn reach(&mut self, bytes: &[u8]) -> Reach {
        for (place, byte) in bytes.iter().enumerate() {
            match byte {
                b'\n' if self.is_in_string => return Reach::Broken,
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_in_string => self.is_escaped = true,
                b'"' => self.is_in_string = !self.is_in_string,
                b'{' | b'[' if !self.is_in_string => self.depth += 1,
                b'}' | b']' if !self.is_in_string => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Reach::To(place + 1);
                    }
                }
                _ => {}
            }
        }
        Reach::Further
    }

    /// Ends the value, whole or not.
    fn value(&mut self) -> Line {
        self.depth = 0;
        self.is_in_string = false;
        self.is_escaped = false;
        Line {
            number: self.begun_at,
            text: std::mem::take(&mut self.begun),
        }
    }

    /// Ends the line that is no value, if there is one.
    fn line(&mut self) -> Option<Line> {
        let text = std::mem::take(&mut self.line);
        (!text.is_empty()).then_some(Line {
            number: self.number,
            text,
        })
    }
}

/// Returns whether the line is a value of the protocol by itself.
fn is_whole(line: &[u8]) -> bool {
    line.starts_with(b"{")
        && parse(&Line {
            number: 0,
            text: line.to_vec(),
        })
        .is_ok()
}

/// The text behind what separates values.
fn without_blanks(mut text: &[u8]) -> &[u8] {
    loop {
        let behind = text.trim_ascii_start();
        let Some(behind_mark) = behind.strip_prefix(BYTE_ORDER_MARK) else {
            return behind;
        };
        text = behind_mark;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn splitter() -> Splitter {
        Splitter {
            number: 1,
            ..Splitter::default()
        }
    }

    /// What is written comes in parts of this size, and these values are read, each with the number
    /// of its line.
    fn check_in_parts(size: usize, written: &str, expected: &[(u64, &str)]) {
        let mut splitter = splitter();
        let lines = written.as_bytes().split_inclusive(|byte| *byte == b'\n');
        let parts = lines.flat_map(|line| line.chunks(size));
        let mut values: Vec<Line> = parts.flat_map(|part| splitter.take(part)).collect();
        values.extend(splitter.line());
        let values: Vec<(u64, String)> = values
            .into_iter()
            .map(|Line { number, text }| (number, String::from_utf8(text).unwrap()))
            .collect();
        let expected: Vec<(u64, String)> = expected
            .iter()
            .map(|(number, text)| (*number, (*text).to_owned()))
            .collect();
        assert_eq!(values, expected, "{written:?} in parts of {size}");
    }

    fn check(written: &str, expected: &[(u64, &str)]) {
        check_in_parts(usize::MAX, written, expected);
    }

    const ONE: &str = r#"{"id":"1","outcome":"complete"}"#;
    const TWO: &str = r#"{"id":"2","outcome":"retry","reason":"}{ \" ][ \\"}"#;

    #[test]
    fn values_need_no_line_of_their_own() {
        check(&format!("{ONE}\n{TWO}\n"), &[(1, ONE), (2, TWO)]);
        check(
            &format!("{ONE}{TWO}\n\n{ONE}\r\n \n"),
            &[(1, ONE), (1, TWO), (3, ONE)],
        );
        check(
            &format!("\u{feff}{ONE}\n\u{feff}\n{TWO}"),
            &[(1, ONE), (3, TWO)],
        );
        check(
            "{\n  \"id\": \"1\",\n  \"outcome\": \"complete\"\n}\n",
            &[(1, "{\n  \"id\": \"1\",\n  \"outcome\": \"complete\"\n}")],
        );
        check(
            &format!("[\n{ONE},\n{ONE}\n]{TWO}\n"),
            &[(1, &format!("[\n{ONE},\n{ONE}\n]")), (4, TWO)],
        );
    }

    #[test]
    fn what_is_no_value_is_the_line_that_it_is() {
        check(
            &format!("charging\n{ONE}\n"),
            &[(1, "charging\n"), (2, ONE)],
        );
        check(
            &format!("charging {ONE}\n{TWO}\n"),
            &[(1, &format!("charging {ONE}\n")), (2, TWO)],
        );
        check(
            &format!("{ONE} charged\n{TWO}\n"),
            &[(1, ONE), (1, "charged\n"), (2, TWO)],
        );
        check("}\n\"{\"\n17\n", &[(1, "}\n"), (2, "\"{\"\n"), (3, "17\n")]);
    }

    #[test]
    fn values_come_in_parts() {
        for size in [1, 2, 7] {
            check_in_parts(
                size,
                &format!("{ONE}{TWO} charged\nno {ONE}\n\n{TWO}"),
                &[
                    (1, ONE),
                    (1, TWO),
                    (1, "charged\n"),
                    (2, &format!("no {ONE}\n")),
                    (4, TWO),
                ],
            );
        }
        check_in_parts(4, "no line feed", &[(1, "no line feed")]);
    }

    #[test]
    fn a_value_that_is_cut_off_costs_no_other() {
        check(
            &format!("{{\"id\":\"1\",\"outc\n{TWO}\n"),
            &[(1, "{\"id\":\"1\",\"outc\n"), (2, TWO)],
        );
        check(
            &format!("{{\"id\":\"1\",\"outcome\":\n{TWO}\n"),
            &[(1, "{\"id\":\"1\",\"outcome\":\n"), (2, TWO)],
        );
        check("{\"id\":\"1\"", &[]);
    }

    #[test]
    fn what_is_too_long_is_passed_on_once() {
        let most = usize::try_from(LINE_MAX_BYTES).unwrap();
        for begin in ["{\"id\":\"", "x"] {
            let mut splitter = splitter();
            let part = format!("{begin}{}", "x".repeat(most - begin.len()));
            let values: Vec<Line> = [part, format!("{ONE}{ONE}\n"), format!("{TWO}\n")]
                .iter()
                .flat_map(|part| splitter.take(part.as_bytes()))
                .collect();
            let [long, two] = &values[..] else {
                panic!("{begin}: {} values", values.len())
            };
            assert!(
                parse(long).unwrap_err().why.contains("is longer than"),
                "{begin}"
            );
            assert_eq!(
                (two.number, two.text.as_slice()),
                (2, TWO.as_bytes()),
                "{begin}"
            );
        }
    }
}
