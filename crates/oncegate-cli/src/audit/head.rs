//! The beginning of an export of effects: its encoding, its delimiter, the names of its columns.

use std::io;

use oncegate::core::reason::one_line;

/// The bytes at the beginning of a file in which its delimiter is found.
pub(super) const HEAD_BYTES: u64 = 64 * 1024;
/// The characters that may stand between columns: a program writes one by its country.
const DELIMITERS: [u8; 4] = *b",;\t|";
/// The most characters of a first line in an error.
const SHOWN_MAX_CHARS: usize = 200;

/// The facts that the beginning of a file tells of the rest.
pub(super) struct Head {
    /// The bytes of a line that is no data.
    pub(super) skipped: usize,
    pub(super) delimiter: u8,
}

impl Head {
    /// # Errors
    /// When the text is UTF-16, or its first line names no such column.
    pub(super) fn of(head: &[u8], column: Option<&str>) -> io::Result<Self> {
        if head.starts_with(b"\xff\xfe") || head.starts_with(b"\xfe\xff") || head.contains(&0) {
            let text = "it is UTF-16, as Excel's \"Unicode text\" is: save it as \"CSV UTF-8\", or convert it with `iconv -f UTF-16 \
                        -t UTF-8`";
            return Err(invalid(text));
        }
        let Some(name) = column else {
            return Ok(Self {
                skipped: 0,
                delimiter: b',',
            });
        };
        let first = first_line(head);
        // Excel's own hint, which it reads and does not show.
        let without_mark = first.trim_start_matches('\u{feff}');
        if let Some(&[delimiter]) = without_mark.strip_prefix("sep=").map(str::as_bytes) {
            let skipped = head.iter().position(|byte| *byte == b'\n');
            let skipped = skipped.map_or(head.len(), |end| end + 1);
            let rest = head.get(skipped..).unwrap_or_default();
            return Self::with(name, &first_line(rest), &[delimiter], skipped);
        }
        Self::with(name, &first, &DELIMITERS, 0)
    }

    /// Finds the delimiter with which the line names the column.
    fn with(name: &str, line: &str, delimiters: &[u8], skipped: usize) -> io::Result<Self> {
        let found = delimiters.iter().find(|delimiter| {
            columns(line, **delimiter)
                .iter()
                .any(|column| column == name)
        });
        match found {
            Some(delimiter) => Ok(Self {
                skipped,
                delimiter: *delimiter,
            }),
            None => {
                let shown: String = one_line(line).chars().take(SHOWN_MAX_CHARS).collect();
                Err(invalid(format!(
                    "its first line names no column {name:?} (--effects-column), it is: {shown}; the names must be in the first \
                     line, with commas, semicolons, tabs or bars between them"
                )))
            }
        }
    }
}

/// The first line of the text, without its end. A quoted name may have a line feed.
fn first_line(text: &[u8]) -> String {
    let mut is_quoted = false;
    let line = text.iter().take_while(|byte| {
        is_quoted ^= **byte == b'"';
        is_quoted || !matches!(**byte, b'\n' | b'\r')
    });
    let line: Vec<u8> = line.copied().collect();
    String::from_utf8_lossy(&line).into_owned()
}

/// The names of the columns in a line.
fn columns(line: &str, delimiter: u8) -> Vec<String> {
    let mut names = vec![String::new()];
    let mut is_quoted = false;
    for c in line.trim_start_matches('\u{feff}').chars() {
        is_quoted ^= c == '"';
        match c {
            '"' => {}
            c if c == char::from(delimiter) && !is_quoted => names.push(String::new()),
            c => names.last_mut().into_iter().for_each(|name| name.push(c)),
        }
    }
    names
        .into_iter()
        .map(|name| name.trim().to_owned())
        .collect()
}

pub(super) fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}
