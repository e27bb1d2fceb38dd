//! The errors of a configuration, and how they are shown: with the line of the file and a caret.

use std::fmt::Write as _;
use std::ops::Range;

use serde::Serialize;

use super::layers::{Ambiguous, Layers, Origin, Path};

/// The most characters of an offending line that are shown.
const LINE_MOST: usize = 160;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    Error,
    Warning,
}

/// An error or a warning.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// The setting, with dots between its parts.
    pub(crate) path: String,
    pub(crate) message: String,
    /// `file`, the name of a variable or a flag; none for a setting that is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) origin: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) column: Option<usize>,
    #[serde(skip)]
    at: Option<Range<usize>>,
    /// The bytes of its line that hold the value that it is about.
    #[serde(skip)]
    shown: Option<Range<usize>>,
}

/// The findings so far, with the text that is needed to show them.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) all: Vec<Finding>,
    /// Settings that were wrong and removed: they must not be reported as missing.
    spoilt: Vec<Path>,
}

/// The part of a setting that a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum About {
    Name,
    Value,
}

impl Findings {
    pub(super) fn add(
        &mut self,
        layers: &Layers,
        text: &str,
        (severity, about): (Severity, About),
        path: &[String],
        message: impl Into<String>,
    ) {
        let (origin, at) = match layers.origin(path) {
            None => (None, None),
            Some(Origin::File { name, value }) => {
                let at = if about == About::Name { name } else { value };
                (Some("file".to_owned()), Some(at.clone()))
            }
            Some(Origin::Environment(name) | Origin::Flag(name)) => (Some(name.clone()), None),
        };
        self.push(text, severity, path, message.into(), origin, at);
        if about == About::Value
            && let Some(finding) = self.all.last_mut()
        {
            finding.shown = finding.at.as_ref().map(|at| within_line(text, at));
        }
    }

    /// Adds the finding that the text is not TOML. `is_plain` says whether a setting has values
    /// that may be shown.
    pub(super) fn add_broken(
        &mut self,
        text: &str,
        message: String,
        at: Range<usize>,
        is_plain: impl Fn(&str) -> bool,
    ) {
        let word = bare_word(text, at.start);
        let message = match &word {
            Some(word) => format!(
                "`{}` has a word without quotes: text needs quotes, and a number is written in digits",
                word.setting
            ),
            None => message,
        };
        self.push(
            text,
            Severity::Error,
            &[],
            message,
            Some("file".to_owned()),
            Some(at),
        );
        // A password may stand there without its quotes, too.
        let plain = word.filter(|word| is_plain(word.setting));
        if let (Some(finding), Some(word)) = (self.all.last_mut(), plain) {
            finding.shown = Some(word.within_line);
        }
    }

    /// Adds the finding that a variable fits several tables.
    pub(super) fn add_ambiguous(&mut self, ambiguous: &Ambiguous) {
        let Ambiguous {
            variable,
            section,
            names,
        } = ambiguous;
        let path = [section.clone()];
        let named: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let message = format!(
            "the variable may mean {}, because names have neither dashes nor dots nor cases there: set it in the file, or \
             rename all but one",
            named.join(" and ")
        );
        let origin = Some(variable.clone());
        self.push("", Severity::Error, &path, message, origin, None);
    }

    fn push(
        &mut self,
        text: &str,
        severity: Severity,
        path: &[String],
        message: String,
        origin: Option<String>,
        at: Option<Range<usize>>,
    ) {
        let place = at.as_ref().map(|at| place(text, at.start));
        let line = place.map(|(line, _)| line);
        let column = place.map(|(_, column)| column);
        self.all.push(Finding {
            severity,
            path: dotted(path),
            message,
            origin,
            line,
            column,
            at,
            shown: None,
        });
    }

    pub(super) fn spoil(&mut self, path: Path) {
        self.spoilt.push(path);
    }

    /// Returns whether a setting at, above or below `path` was wrong and has been removed.
    pub(super) fn is_spoilt(&self, path: &[String]) -> bool {
        self.spoilt
            .iter()
            .any(|spoilt| spoilt.starts_with(path) || path.starts_with(spoilt))
    }

    /// Returns whether there is a finding about this setting.
    pub(super) fn has(&self, path: &[String]) -> bool {
        self.all.iter().any(|finding| finding.path == dotted(path))
    }

    /// Sorts the findings by their place in the file; those without one come first.
    pub(super) fn sort(&mut self) {
        self.all
            .sort_by_key(|finding| (finding.line, finding.column, finding.severity));
    }

    pub(crate) fn has_errors(&self) -> bool {
        self.all
            .iter()
            .any(|finding| finding.severity == Severity::Error)
    }

    pub(crate) fn count(&self, severity: Severity) -> usize {
        self.all
            .iter()
            .filter(|finding| finding.severity == severity)
            .count()
    }

    /// The findings as text, each with its line and a caret.
    pub(crate) fn render(&self, file: &str, text: &str) -> String {
        self.all
            .iter()
            .map(|finding| finding.render(file, text))
            .collect::<Vec<_>>()
            .join("\n\n")
    }
}

impl Finding {
    fn render(&self, file: &str, text: &str) -> String {
        let kind = if self.severity == Severity::Error {
            "error"
        } else {
            "warning"
        };
        let whose = if self.path.is_empty() {
            String::new()
        } else {
            format!("{}: ", self.path)
        };
        let (Some(line), Some(column), Some(at)) = (self.line, self.column, &self.at) else {
            let origin = self
                .origin
                .as_deref()
                .map(|origin| format!("{origin}: "))
                .unwrap_or_default();
            return format!("{origin}{kind}: {whose}{}", self.message);
        };
        let mut out = format!("{file}:{line}:{column}: {kind}: {whose}{}\n", self.message);
        let whole = text.lines().nth(line - 1).unwrap_or_default();
        let shown = redacted_line(whole, self.shown.clone())
            .chars()
            .take(LINE_MOST)
            .collect::<String>();
        let gutter = " ".repeat(line.to_string().len());
        let rest = shown.chars().count().saturating_sub(column - 1);
        let width = text
            .get(at.clone())
            .map_or(1, |what| what.lines().next().unwrap_or("").chars().count());
        let carets = "^".repeat(width.min(rest).max(1));
        let indent = " ".repeat(column - 1);
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "{gutter} |\n{line} | {shown}\n{gutter} | {indent}{carets}"
        );
        out
    }
}

/// Masks what may be a secret in a line of the file. Its length stays the same, so that carets
/// point to the right column.
///
/// Only a value that a finding is about is shown, `shown` in bytes of the line, unless the line
/// speaks of a secret: beside a misspelled name may stand a password.
fn redacted_line(line: &str, shown: Option<Range<usize>>) -> String {
    let speaks_of_secrets = SECRETS
        .iter()
        .any(|word| line.to_lowercase().contains(word));
    let shown = shown.filter(|_| !speaks_of_secrets).unwrap_or_default();
    let mut masked = String::with_capacity(line.len());
    let mut is_value = !is_names(line);
    let mut quote = None;
    let end_of_login = line.rfind('@').unwrap_or_default();
    for (at, c) in line.char_indices() {
        match quote {
            None if matches!(c, '"' | '\'') => quote = Some(c),
            Some(open) if c == open => quote = None,
            // The next name of an inline table.
            None if matches!(c, ',' | '{') => {
                is_value = !is_names(line.get(at + 1..).unwrap_or_default());
            }
            None if c == '=' => is_value = true,
            _ => {}
        }
        let is_shape = c.is_whitespace() || "\"'{}[],=".contains(c);
        let is_plain = shown.contains(&at) && (at >= end_of_login || !line.contains('@'));
        masked.push(if !is_value || is_shape || is_plain {
            c
        } else {
            '*'
        });
    }
    masked
}

/// A value without quotes that is no number, date or truth value.
struct BareWord<'a> {
    setting: &'a str,
    /// The bytes of the word, counted from the beginning of its line.
    within_line: Range<usize>,
}

/// Returns the value of the line at this byte, if it is a bare word.
fn bare_word(text: &str, at: usize) -> Option<BareWord<'_>> {
    let begins = text.get(..at)?.rfind('\n').map_or(0, |end| end + 1);
    let line = text.get(begins..)?.lines().next()?;
    let (setting, value) = line.split_once('=')?;
    let value = value.split('#').next().unwrap_or_default();
    let word = value.trim();
    let is_word = word.starts_with(char::is_alphabetic)
        && word
            .chars()
            .all(|c| c.is_alphanumeric() || "_-".contains(c));
    let begins = line.len() - line.split_once('=')?.1.trim_start().len();
    (is_word && !["true", "false", "inf", "nan"].contains(&word)).then_some(BareWord {
        setting: setting.trim(),
        within_line: begins..begins + word.len(),
    })
}

/// Words of settings that hold secrets.
const SECRETS: [&str; 8] = [
    "password",
    "passphrase",
    "secret",
    "token",
    "jaas",
    "sasl.username",
    ".pem",
    "credential",
];

/// Returns whether this text begins with the name of a setting or of a table.
fn is_names(text: &str) -> bool {
    let text = text.trim_start();
    let is_table = text.starts_with('[') && !text.contains('=');
    let name = text.split_once('=').map(|(name, _)| name.trim());
    is_table
        || name.is_some_and(|name| {
            !name.is_empty()
                && name
                    .chars()
                    .all(|c| c.is_alphanumeric() || "_-.\"' ".contains(c))
        })
}

/// Bytes of the text, counted from the beginning of their line.
fn within_line(text: &str, at: &Range<usize>) -> Range<usize> {
    let before = text.get(..at.start.min(text.len())).unwrap_or_default();
    let begins = before.rfind('\n').map_or(0, |end| end + 1);
    at.start - begins..at.end - begins
}

/// Line and column of a byte, from 1; columns are characters.
fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at.min(text.len())).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before
        .rsplit('\n')
        .next()
        .unwrap_or_default()
        .chars()
        .count()
        + 1;
    (line, column)
}

/// A path with dots between its parts.
pub(super) fn dotted(path: &[String]) -> String {
    path.iter()
        .map(|part| {
            if part.contains('.') {
                format!("\"{part}\"")
            } else {
                part.clone()
            }
        })
        .collect::<Vec<_>>()
        .join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_shows_a_password() {
        for (line, shown, expected) in [
            (
                r#"url = "redis://me:hunter2@cache""#,
                Some(6..32),
                r#"url = "******************@cache""#,
            ),
            (
                r#"password = "hunter2""#,
                Some(11..20),
                r#"password = "*******""#,
            ),
            (
                r#""sasl.password" = 'hunter2'"#,
                Some(18..27),
                r#""sasl.password" = '*******'"#,
            ),
            (r#"pasword = "hunter2""#, None, r#"pasword = "*******""#),
            (r#"pasword = "hunter2"#, None, r#"pasword = "*******"#),
            ("pasword hunter2", None, "******* *******"),
            ("hunter2\"\"\"", None, "*******\"\"\""),
            (
                r#"a = { pasword = "hunter2", frm = "end" }"#,
                None,
                r#"a = { pasword = "*******", frm = "***" }"#,
            ),
            (
                r#"a = { pasword = "hunter2", from = "ends" }"#,
                Some(34..40),
                r#"a = { pasword = "*******", from = "ends" }"#,
            ),
            (r#"lease = "30""#, Some(8..12), r#"lease = "30""#),
            ("[consumer.billing]", None, "[consumer.billing]"),
        ] {
            assert_eq!(redacted_line(line, shown), expected, "{line}");
        }
    }

    #[test]
    fn a_bare_word_is_shown_where_no_secret_can_stand() {
        for (line, is_shown) in [
            ("max_attempts = ten", true),
            ("max_attempts = ten # often", true),
            ("password = hunter2", false),
            ("pasword = hunter2", false),
            ("url = hunter2", false),
        ] {
            let text = format!("version = 1\n{line}\n");
            let mut findings = Findings::default();
            findings.add_broken(&text, "invalid boolean".to_owned(), 14..17, |name| {
                name == "max_attempts"
            });
            let shown = findings.render("oncegate.toml", &text);
            assert!(shown.contains("without quotes"), "{shown}");
            let value = line.split_whitespace().nth(2).unwrap_or_default();
            assert_eq!(shown.contains(value), is_shown, "{shown}");
        }
        assert!(bare_word("lease = 10", 0).is_none() && bare_word("a = true", 0).is_none());
    }

    #[test]
    fn places_count_characters_from_one() {
        assert_eq!(place("a\nöb", 0), (1, 1));
        assert_eq!(place("a\nöb", 4), (2, 2));
    }
}
