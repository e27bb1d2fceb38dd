//! The errors of a configuration, and how they are shown: with the line of the file and a caret.

use std::fmt::Write as _;

use serde::Serialize;

use super::layers::{Layers, Origin, Path};

/// The most characters of an offending line that are shown.
const LINE_MOST: usize = 160;

/// Whether a finding is an error or a warning.
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
    at: Option<std::ops::Range<usize>>,
}

/// The findings so far, with the text that is needed to show them.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) all: Vec<Finding>,
    /// Settings that were wrong and removed: they must not be reported as missing.
    spoilt: Vec<Path>,
}

/// Whether a finding is about a setting's name or its value.
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
    }

    /// Adds the finding that the text is not TOML.
    pub(super) fn add_broken(&mut self, text: &str, message: String, at: std::ops::Range<usize>) {
        self.push(text, Severity::Error, &[], message, Some("file".to_owned()), Some(at));
    }

    fn push(
        &mut self,
        text: &str,
        severity: Severity,
        path: &[String],
        message: String,
        origin: Option<String>,
        at: Option<std::ops::Range<usize>>,
    ) {
        let place = at.as_ref().map(|at| place(text, at.start));
        let (line, column) = (place.map(|(line, _)| line), place.map(|(_, column)| column));
        self.all.push(Finding { severity, path: dotted(path), message, origin, line, column, at });
    }

    pub(super) fn spoil(&mut self, path: Path) {
        self.spoilt.push(path);
    }

    /// Whether a setting at, above or below `path` was wrong and has been removed.
    pub(super) fn is_spoilt(&self, path: &[String]) -> bool {
        self.spoilt.iter().any(|spoilt| spoilt.starts_with(path) || path.starts_with(spoilt))
    }

    /// Sorts the findings by their place in the file; those without one come first.
    pub(super) fn sort(&mut self) {
        self.all.sort_by_key(|finding| (finding.line, finding.column, finding.severity));
    }

    pub(crate) fn has_errors(&self) -> bool {
        self.all.iter().any(|finding| finding.severity == Severity::Error)
    }

    pub(crate) fn count(&self, severity: Severity) -> usize {
        self.all.iter().filter(|finding| finding.severity == severity).count()
    }

    /// The findings as text, each with its line and a caret.
    pub(crate) fn render(&self, file: &str, text: &str) -> String {
        self.all.iter().map(|finding| finding.render(file, text)).collect::<Vec<_>>().join("\n\n")
    }
}

impl Finding {
    fn render(&self, file: &str, text: &str) -> String {
        let kind = if self.severity == Severity::Error { "error" } else { "warning" };
        let whose = if self.path.is_empty() { String::new() } else { format!("{}: ", self.path) };
        let (Some(line), Some(column), Some(at)) = (self.line, self.column, &self.at) else {
            let origin = self.origin.as_deref().map(|origin| format!("{origin}: ")).unwrap_or_default();
            return format!("{origin}{kind}: {whose}{}", self.message);
        };
        let mut out = format!("{file}:{line}:{column}: {kind}: {whose}{}\n", self.message);
        let shown: String = redacted_line(text, line).chars().take(LINE_MOST).collect();
        let gutter = " ".repeat(line.to_string().len());
        let rest = shown.chars().count().saturating_sub(column - 1);
        let width = text.get(at.clone()).map_or(1, |what| what.lines().next().unwrap_or("").chars().count());
        let carets = "^".repeat(width.min(rest).max(1));
        let indent = " ".repeat(column - 1);
        // Writing to a string cannot fail.
        let _ = write!(out, "{gutter} |\n{line} | {shown}\n{gutter} | {indent}{carets}");
        out
    }
}

/// Masks the secrets of a line of the file. Its length stays the same, so that carets point to the right column.
fn redacted_line(text: &str, line: usize) -> String {
    let line = text.lines().nth(line - 1).unwrap_or_default();
    let stars = |secret: &str| "*".repeat(secret.chars().count());
    let lower = line.to_lowercase();
    let secret = ["password", "secret", "token"].iter().any(|word| lower.contains(word));
    if let Some((name, value)) = line.split_once('=')
        && secret
        && !lower.contains("file")
        && !lower.contains("env")
    {
        let shape = |c: char| if c.is_whitespace() || "\"'{}[],".contains(c) { c } else { '*' };
        return format!("{name}={}", value.chars().map(shape).collect::<String>());
    }
    match (line.find("://"), line.rfind('@')) {
        (Some(scheme), Some(at)) if at > scheme + 3 => {
            let (head, tail) =
                (line.get(..scheme + 3).unwrap_or_default(), line.get(at..).unwrap_or_default());
            format!("{head}{}{tail}", stars(line.get(scheme + 3..at).unwrap_or_default()))
        }
        _ => line.to_owned(),
    }
}

/// Line and column of a byte, from 1; columns are characters.
fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at.min(text.len())).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}

/// A path with dots between its parts.
pub(super) fn dotted(path: &[String]) -> String {
    let part = |part: &String| if part.contains('.') { format!("\"{part}\"") } else { part.clone() };
    path.iter().map(part).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_shows_a_password() {
        let text = "url = \"redis://me:hunter2@cache\"\npassword = \"hunter2\"\npassword = { file = \"/x\" }\n\"sasl.password\" = 'hunter2'\n";
        for line in 1..=4 {
            let shown = redacted_line(text, line);
            assert_eq!(shown.chars().count(), text.lines().nth(line - 1).unwrap().chars().count());
        }
        assert!(!redacted_line(text, 1).contains("hunter2") && redacted_line(text, 1).contains("redis://"));
        assert!(!redacted_line(text, 2).contains("hunter2"));
        assert!(!redacted_line(text, 4).contains("hunter2"));
        assert!(redacted_line(text, 3).contains("/x"));
    }

    #[test]
    fn places_count_characters_from_one() {
        assert_eq!(place("a\nöb", 0), (1, 1));
        assert_eq!(place("a\nöb", 4), (2, 2));
    }
}
