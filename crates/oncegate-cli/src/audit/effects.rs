//! Reads the idempotency keys of effects from an export of the downstream system: a CSV file, or
//! the output of a command.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use csv_core::{ReadFieldResult, ReaderBuilder};
use tokio::sync::mpsc;

use super::head::{HEAD_BYTES, Head, invalid};
use crate::exit::{Exit, Problem};

/// The number of keys that are handed on at a time.
const BATCH: usize = 4_096;
/// The number of such batches that may wait.
const BATCHES_WAITING: usize = 4;

/// The number of bytes of a field that are kept. A longer field is no idempotency key.
const FIELD_BYTES: usize = 256;

/// The field of each line that is the key.
#[derive(Clone, Debug)]
enum Column {
    First,
    /// The first line has the names of the columns.
    Named(String),
}

impl Column {
    fn name(&self) -> Option<&str> {
        match self {
            Self::First => None,
            Self::Named(name) => Some(name),
        }
    }
}

/// Where the effects of the messages are listed.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("export").args(["effects", "effects_command"])))]
pub(crate) struct EffectsArgs {
    /// A CSV file with a line for each effect that the downstream system has
    #[arg(long, value_name = "FILE", requires = "effects_column")]
    effects: Option<PathBuf>,

    /// A command that writes the idempotency key of each effect to its standard output, one a line;
    /// it is started by a shell when the messages have been read
    #[arg(long, value_name = "COMMAND")]
    effects_command: Option<String>,

    /// The column with the idempotency keys: its name in the first line
    #[arg(long, value_name = "NAME", requires = "export")]
    effects_column: Option<String>,
}

/// The keys of effects, in batches, from a thread that reads them.
pub(crate) struct Effects {
    batches: mpsc::Receiver<Result<Vec<String>, Problem>>,
}

impl EffectsArgs {
    pub(crate) fn are_given(&self) -> bool {
        self.effects.is_some() || self.effects_command.is_some()
    }

    /// Checks that the file can be read, before the messages are.
    pub(crate) fn check(&self) -> Result<(), Problem> {
        match &self.effects {
            Some(path) => File::open(path)
                .map(drop)
                .map_err(|error| unreadable(path, &error)),
            None => Ok(()),
        }
    }

    /// Begins to read.
    pub(crate) fn open(&self) -> Effects {
        let (sender, batches) = mpsc::channel(BATCHES_WAITING);
        let file = self.effects.clone();
        let command = self.effects_command.clone();
        let column = self
            .effects_column
            .clone()
            .map_or(Column::First, Column::Named);
        tokio::task::spawn_blocking(move || {
            let mut batch = Vec::with_capacity(BATCH);
            let mut each = |key: &str| {
                batch.push(key.to_owned());
                // An audit that has ended needs no more.
                batch.len() < BATCH || sender.blocking_send(Ok(std::mem::take(&mut batch))).is_ok()
            };
            let read = match (file, command) {
                (Some(path), _) => read_file(&path, &column, &mut each),
                (None, Some(command)) => read_command(&command, &column, &mut each),
                (None, None) => Ok(()),
            };
            let last = read.map(|()| batch);
            // As above.
            drop(sender.blocking_send(last));
        });
        Effects { batches }
    }
}

impl Effects {
    /// Returns the next keys; `None` at the end.
    pub(crate) async fn next_batch(&mut self) -> Result<Option<Vec<String>>, Problem> {
        self.batches.recv().await.transpose()
    }
}

fn unreadable(path: &std::path::Path, error: &io::Error) -> Problem {
    Problem::new(
        Exit::BadData,
        format!("cannot read the effects from {}: {error}", path.display()),
    )
}

fn read_file(
    path: &std::path::Path,
    column: &Column,
    each: &mut impl FnMut(&str) -> bool,
) -> Result<(), Problem> {
    let file = File::open(path).map_err(|error| unreadable(path, &error))?;
    read(BufReader::new(file), column, each).map_err(|error| unreadable(path, &error))
}

fn read_command(
    command: &str,
    column: &Column,
    each: &mut impl FnMut(&str) -> bool,
) -> Result<(), Problem> {
    let mut program = Command::new("sh");
    program
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = program
        .spawn()
        .map_err(|error| export_failed(&format!("cannot be started: {error}")))?;
    let output = child
        .stdout
        .take()
        .map_or(Ok(()), |output| read(BufReader::new(output), column, each));
    let status = child
        .wait()
        .map_err(|error| export_failed(&format!("has no exit status: {error}")))?;
    if !status.success() {
        return Err(export_failed(&format!("ended with {status}")));
    }
    output.map_err(|error| export_failed(&format!("has an output that cannot be read: {error}")))
}

fn export_failed(why: &str) -> Problem {
    let text = format!("--effects-command {why}, so its list of effects may be incomplete");
    Problem::new(Exit::Unreachable, text)
}

/// Calls `each` with the key of each line that is not empty, until it returns `false`. It keeps one
/// field in memory, however long the lines are. A line without a key gets a text that is none: its
/// effect belongs to no message.
fn read(
    mut input: impl BufRead,
    column: &Column,
    each: &mut impl FnMut(&str) -> bool,
) -> io::Result<()> {
    let mut head = Vec::new();
    Read::take(&mut input, HEAD_BYTES).read_to_end(&mut head)?;
    let Head { skipped, delimiter } = Head::of(&head, column.name())?;
    head.drain(..skipped);
    let mut input = io::Cursor::new(head).chain(input);
    let mut fields = Fields::new(column);
    let mut field = [0; FIELD_BYTES];
    let mut reader = ReaderBuilder::new().delimiter(delimiter).build();
    let mut kept = 0;
    let mut quotes = Quotes::default();
    loop {
        let available = input.fill_buf()?;
        let mut spill = [0; FIELD_BYTES];
        // What does not fit is read and dropped.
        let rest = field
            .get_mut(kept..)
            .filter(|rest| !rest.is_empty())
            .unwrap_or(&mut spill);
        let (result, consumed, written) = reader.read_field(available, rest);
        available
            .get(..consumed)
            .unwrap_or_default()
            .iter()
            .for_each(|byte| quotes.take(*byte, delimiter));
        input.consume(consumed);
        kept = (kept + written).min(FIELD_BYTES);
        match result {
            ReadFieldResult::InputEmpty | ReadFieldResult::OutputFull => {}
            ReadFieldResult::Field { record_end } => {
                let text = String::from_utf8_lossy(field.get(..kept).unwrap_or_default());
                let key = fields.take(&text, record_end)?;
                if key.is_some_and(|key| !each(&key)) {
                    return Ok(());
                }
                kept = 0;
            }
            ReadFieldResult::End if quotes.are_open() => {
                let text = "a quoted field does not end, so the lines after it were not read";
                return Err(invalid(text));
            }
            ReadFieldResult::End => return fields.finish(),
        }
    }
}

/// The position of the reader in or outside of a quoted field. The CSV reader accepts a file that
/// ends inside of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Quotes {
    /// At the beginning of a field.
    #[default]
    Begin,
    Plain,
    Quoted,
    /// After a quote in a quoted field: its end, or the first half of a quote that is meant.
    Ended,
}

impl Quotes {
    fn take(&mut self, byte: u8, delimiter: u8) {
        *self = match (*self, byte) {
            (Self::Quoted, b'"') => Self::Ended,
            (Self::Quoted, _) | (Self::Begin | Self::Ended, b'"') => Self::Quoted,
            (_, b'\n' | b'\r') => Self::Begin,
            (_, byte) if byte == delimiter => Self::Begin,
            _ => Self::Plain,
        };
    }

    fn are_open(self) -> bool {
        self == Self::Quoted
    }
}

/// Finds the field of each line that is the key.
struct Fields<'a> {
    column: &'a Column,
    /// The number of the column, once it is known.
    wanted: Option<usize>,
    /// `true` when the line with the names is over.
    named: bool,
    number: usize,
    /// The number of lines so far.
    line: u64,
    /// `true` when this line has had its key.
    has_key: bool,
}

impl<'a> Fields<'a> {
    fn new(column: &'a Column) -> Self {
        let is_first = matches!(column, Column::First);
        Self {
            column,
            wanted: is_first.then_some(0),
            named: is_first,
            number: 0,
            line: 1,
            has_key: false,
        }
    }

    /// Takes the next field, and returns the key of the line if it is known now.
    ///
    /// # Errors
    /// When the first line names the column twice.
    fn take(&mut self, field: &str, ends_line: bool) -> io::Result<Option<String>> {
        let number = self.number;
        self.number = if ends_line { 0 } else { number + 1 };
        if !self.named {
            self.find_column(field, number)?;
            self.named = ends_line;
            return Ok(None);
        }
        let key = Some(field.trim()).filter(|key| self.wanted == Some(number) && !key.is_empty());
        let mut key = key.map(str::to_owned);
        self.has_key |= key.is_some();
        if ends_line {
            self.line += 1;
            if !std::mem::take(&mut self.has_key) && matches!(self.column, Column::Named(_)) {
                key = Some(format!("(record {} of the effects has no key)", self.line));
            }
        }
        Ok(key)
    }

    /// Notes the column if this field of the first line is its name.
    fn find_column(&mut self, field: &str, number: usize) -> io::Result<()> {
        let Column::Named(name) = self.column else {
            return Ok(());
        };
        if name != field.trim_start_matches('\u{feff}').trim() {
            return Ok(());
        }
        match self.wanted.replace(number) {
            None => Ok(()),
            Some(_) => {
                let text =
                    format!("its first line names the column {name:?} twice (--effects-column)");
                Err(invalid(text))
            }
        }
    }

    fn finish(&self) -> io::Result<()> {
        match (self.wanted, self.column) {
            (None, Column::Named(name)) => {
                let text = format!("its first line names no column {name:?} (--effects-column)");
                Err(invalid(text))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str, column: &Column, buffer: usize) -> io::Result<Vec<String>> {
        let mut found = Vec::new();
        read(
            BufReader::with_capacity(buffer, text.as_bytes()),
            column,
            &mut |key: &str| {
                found.push(key.to_owned());
                true
            },
        )?;
        Ok(found)
    }

    #[test]
    fn the_named_column_is_read_whatever_the_others_hold() {
        let long = "x".repeat(5_000);
        let text = format!(
            "\u{feff}id,\"note\",key\r\n1,\"a, \"\"b\"\"\nc\",k1\r\n2,{long},k2\n\n3,,\"k3\"\n4,short\n5,x,k5"
        );
        for buffer in [1, 7, 8_192] {
            let found = keys(&text, &Column::Named("key".to_owned()), buffer).unwrap();
            let short = "(record 5 of the effects has no key)";
            assert_eq!(
                found,
                ["k1", "k2", "k3", short, "k5"],
                "with a buffer of {buffer}"
            );
            assert_eq!(
                keys(&text, &Column::Named("id".to_owned()), buffer)
                    .unwrap()
                    .len(),
                5
            );
        }
        let error = keys(&text, &Column::Named("none".to_owned()), 64)
            .unwrap_err()
            .to_string();
        assert!(error.contains("none") && error.contains("note"), "{error}");
    }

    #[test]
    fn each_delimiter_is_found_by_the_name_of_the_column() {
        let named = Column::Named("key".to_owned());
        for text in [
            "id;key;amount\r\nch_1;k1;10,50\r\nch_2;k2;20,00\r\n",
            "sep=;\r\nid;key;amount\r\nch_1;k1;10,50\r\nch_2;k2;20,00\r\n",
            "id\t\"key\"\tamount\nch_1\tk1\t10,50\nch_2\t\"k2\"\t20,00\n",
            "\u{feff}key|amount\nk1|10,50\nk2|20,00\n",
            "\"key\",\"amount\"\nk1,\"10;50\"\nk2,\"20;00\"\n",
        ] {
            for buffer in [1, 64] {
                let found =
                    keys(text, &named, buffer).unwrap_or_else(|why| panic!("{text}: {why}"));
                assert_eq!(found, ["k1", "k2"], "{text}");
            }
        }
        let open = keys("key;n\nk1;\"1\nk2;2\n", &named, 64).unwrap_err();
        assert!(open.to_string().contains("does not end"), "{open}");
    }

    #[test]
    fn what_is_no_table_of_effects_is_named() {
        let named = Column::Named("key".to_owned());
        let title = keys("\"Charges of 28 November\"\n\"id\",\"key\"\n", &named, 64);
        let title = title.unwrap_err().to_string();
        assert!(title.contains("Charges of 28 November"), "{title}");
        let utf16: Vec<u8> = "\u{feff}id\tkey\n"
            .encode_utf16()
            .flat_map(u16::to_le_bytes)
            .collect();
        for text in [&utf16[..], &utf16[2..]] {
            let wide = read(text, &named, &mut |_| true).unwrap_err().to_string();
            assert!(wide.contains("UTF-16") && wide.contains("iconv"), "{wide}");
        }
    }

    #[test]
    fn nothing_is_left_out_in_silence() {
        let named = Column::Named("key".to_owned());
        for buffer in [1, 64] {
            let found = keys("key,n\nk1,1\n,2\n \"\" ,3\n", &named, buffer).unwrap();
            assert_eq!(found.len(), 3, "an effect without a key is one: {found:?}");
            let open = keys("key,n\nk1,\"1\nk2,2\nk3,3\n", &named, buffer)
                .unwrap_err()
                .to_string();
            assert!(open.contains("does not end"), "{open}");
            let twice = keys("key,n,key\nk1,1,k2\n", &named, buffer)
                .unwrap_err()
                .to_string();
            assert!(twice.contains("twice"), "{twice}");
            assert_eq!(
                keys("key\n\"a \"\"b\"\"\"\n", &named, buffer).unwrap(),
                ["a \"b\""]
            );
        }
    }

    #[test]
    fn without_a_name_each_line_is_a_key() {
        assert_eq!(
            keys("k1\n\nk2\r\n  k3", &Column::First, 3).unwrap(),
            ["k1", "k2", "k3"]
        );
        assert!(keys("", &Column::First, 3).unwrap().is_empty());
        let long = "y".repeat(FIELD_BYTES * 3);
        let found = keys(&format!("{long}\nk2"), &Column::First, 16).unwrap();
        assert_eq!(
            found.iter().map(String::len).collect::<Vec<_>>(),
            [FIELD_BYTES, 2]
        );
    }
}
