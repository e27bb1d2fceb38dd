//! Formats and prints the answer.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::{Duration, SystemTime};

use oncegate::core::reason::{changes_direction, noun_for};
use serde::Serialize;

use crate::exit::{Exit, Problem};

/// Writes the answer to standard output, with a line feed at its end.
pub(crate) fn answer(text: &str) -> Result<(), Problem> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
        // The reader, `head` for example, closed the pipe because it needs no more.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Problem::new(
            Exit::Bug,
            format!("cannot write the answer: {error}"),
        )),
        _ => Ok(()),
    }
}

/// Writes the answer as one JSON document.
pub(crate) fn answer_json(document: &impl Serialize) -> Result<(), Problem> {
    let text = serde_json::to_string_pretty(document);
    let text =
        text.map_err(|error| Problem::new(Exit::Bug, format!("cannot write the answer: {error}")))?;
    answer(&text)
}

/// Lines of a name and a value, with the values in one column; numbers are aligned at their end.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<FactRow>,
}

#[derive(Debug)]
struct FactRow {
    name: String,
    value: String,
    numeric: bool,
    note: String,
}

impl Table {
    pub(crate) fn text(&mut self, name: &str, value: impl AsRef<str>) {
        let name = plain(name);
        let value = plain(value.as_ref());
        self.rows.push(FactRow {
            name,
            value,
            numeric: false,
            note: String::new(),
        });
    }

    /// Adds the fact, if there is a value.
    pub(crate) fn optional(&mut self, name: &str, value: Option<impl AsRef<str>>) {
        if let Some(value) = value {
            self.text(name, value);
        }
    }

    pub(crate) fn number(&mut self, name: &str, value: u64) {
        self.noted(name, value, "");
    }

    pub(crate) fn noted(&mut self, name: &str, value: u64, note: &str) {
        let name = name.to_owned();
        let note = note.to_owned();
        self.rows.push(FactRow {
            name,
            value: grouped(value),
            numeric: true,
            note,
        });
    }

    pub(crate) fn render(&self) -> String {
        let names = self
            .rows
            .iter()
            .map(|row| row.name.chars().count())
            .max()
            .unwrap_or(0);
        let numeric = self.rows.iter().filter(|row| row.numeric);
        let numbers = numeric
            .map(|row| row.value.chars().count())
            .max()
            .unwrap_or(0);
        let mut out = String::new();
        for FactRow {
            name,
            value,
            numeric,
            note,
        } in &self.rows
        {
            let numbers = if *numeric { numbers } else { 0 };
            let line = format!("{name:names$}  {value:>numbers$}  {note}");
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

/// `1 message`, `1,234 messages`
pub(crate) fn counted(count: u64, noun: &str) -> String {
    format!("{} {}", grouped(count), noun_for(count, noun))
}

/// `1,234,567`
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A duration in its two largest units: `6 d 23 h`, `29.5 s`.
pub(crate) fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{}.{} s", seconds, duration.subsec_millis() / 100),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// A time as 2026-11-21T10:00:00.000Z. A year outside of four digits, from garbage in a header, is
/// limited to them.
pub(crate) fn time(time: SystemTime) -> String {
    let last = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    humantime::format_rfc3339_millis(time.clamp(SystemTime::UNIX_EPOCH, last)).to_string()
}

/// The text with escapes for characters that could move a terminal's cursor, change its colours, or
/// change the order in which it shows other characters.
pub(crate) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || changes_direction(c) {
            // Writing to a string cannot fail.
            let _ = write!(out, "{}", c.escape_debug());
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_end_in_one_column() {
        let mut table = Table::default();
        table.text("scope", "billing");
        table.number("messages", 1_234_567);
        table.noted("  of them", 12, "exact");
        assert_eq!(
            table.render(),
            "scope      billing\nmessages   1,234,567\n  of them         12  exact\n"
        );
    }

    #[test]
    fn spans_have_two_units() {
        let spans = [0, 59, 60, 3_599, 3_600, 86_399, 86_400, 604_799]
            .map(Duration::from_secs)
            .map(span);
        let expected = [
            "0.0 s",
            "59.0 s",
            "1 min 0 s",
            "59 min 59 s",
            "1 h 0 min",
            "23 h 59 min",
            "1 d 0 h",
            "6 d 23 h",
        ];
        assert_eq!(spans, expected);
    }

    fn after(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn no_time_is_too_strange_to_be_shown() {
        assert_eq!(time(after(1_795_284_000)), "2026-11-21T18:00:00.000Z");
        assert_eq!(time(after(1 << 60)), "9999-12-31T23:59:59.000Z");
        assert_eq!(
            time(SystemTime::UNIX_EPOCH - Duration::from_secs(1)),
            "1970-01-01T00:00:00.000Z"
        );
    }

    #[test]
    fn a_reason_cannot_drive_the_terminal() {
        assert_eq!(plain("a\u{1b}[2J\nb é"), "a\\u{1b}[2J\\nb é");
        assert_eq!(
            plain("user\u{202e}gpj.exe\u{2066}\u{61c}"),
            "user\\u{202e}gpj.exe\\u{2066}\\u{61c}"
        );
        assert_eq!(plain("\u{200f}שלום"), "\\u{200f}שלום");
    }
}
