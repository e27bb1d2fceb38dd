//! Paths into a payload, and the tree that the scanner matches them with.

use super::error::KeySpecError;
use super::limits::{MAX_DEPTH, MAX_PATH_BYTES, MAX_PATHS};

/// A parsed path: its parts, and the canonical spelling that goes into keys and descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) parts: Vec<String>,
    pub(super) text: String,
}

impl Path {
    /// Parses a path such as `a.b\.c.0`: parts between dots, with `\` as the escape for `.`, `\`,
    /// `,`, `:`, `*`, `$`, `[` and `/`.
    pub(super) fn parse(text: &str) -> Result<Self, KeySpecError> {
        Self::parse_escaped(text, &['.', '\\', ',', ':', '*', '$', '[', '/'], text)
    }

    /// Parses a path in which a backslash may stand before these characters. `whole` is the text
    /// for errors.
    pub(super) fn parse_escaped(
        text: &str,
        escapes: &[char],
        whole: &str,
    ) -> Result<Self, KeySpecError> {
        if text.len() > MAX_PATH_BYTES {
            return Err(too_long(whole));
        }
        let mut parts = Vec::new();
        let mut part = String::new();
        let mut escaped = false;
        let mut chars = text.chars();
        loop {
            match chars.next() {
                Some('\\') => {
                    let next = chars.next().filter(|c| escapes.contains(c));
                    part.push(next.ok_or_else(|| KeySpecError::BadEscape {
                        path: whole.to_owned(),
                    })?);
                    escaped = true;
                }
                end @ (Some('.') | None) => {
                    if part.trim().is_empty() {
                        return Err(KeySpecError::BlankPath {
                            path: whole.to_owned(),
                        });
                    }
                    // Reserved: a meaning that `*` gets later must not change a key.
                    if part == "*" && !escaped {
                        return Err(KeySpecError::Wildcard {
                            path: whole.to_owned(),
                        });
                    }
                    parts.push(std::mem::take(&mut part));
                    escaped = false;
                    if end.is_none() {
                        break;
                    }
                }
                Some(c) => part.push(c),
            }
        }
        if parts.len() > MAX_DEPTH {
            return Err(too_long(whole));
        }
        let spelt: Vec<String> = parts.iter().map(|part| spell(part)).collect();
        Ok(Self {
            text: spelt.join("."),
            parts,
        })
    }
}

/// The canonical spelling of a part: it has escapes only where they are needed.
fn spell(part: &str) -> String {
    if part == "*" {
        return "\\*".to_owned();
    }
    part.replace('\\', "\\\\").replace('.', "\\.")
}

pub(super) fn too_long(text: &str) -> KeySpecError {
    KeySpecError::PathTooLong {
        path: text.chars().take(64).collect(),
        max_bytes: MAX_PATH_BYTES,
        max_parts: MAX_DEPTH,
    }
}

/// Parses a list of paths and sorts it by canonical spelling. Refuses a repeated path.
pub(super) fn parse_all<'a>(
    texts: impl ExactSizeIterator<Item = &'a str>,
) -> Result<Vec<Path>, KeySpecError> {
    let count = texts.len();
    if count > MAX_PATHS {
        return Err(KeySpecError::TooManyPaths {
            count,
            limit: MAX_PATHS,
        });
    }
    let mut paths = texts.map(Path::parse).collect::<Result<Vec<_>, _>>()?;
    paths.sort_by(|a, b| a.text.cmp(&b.text));
    for pair in paths.windows(2) {
        if let [a, b] = pair
            && a.text == b.text
        {
            return Err(KeySpecError::RepeatedPath {
                path: a.text.clone(),
            });
        }
    }
    Ok(paths)
}

/// Splits at a character that is not escaped. The backslashes stay, because the path is parsed
/// later.
pub(super) fn split_unescaped(text: &str, at: char) -> impl Iterator<Item = &str> {
    let mut escaped = false;
    text.split(move |c| {
        let splits = c == at && !escaped;
        escaped = c == '\\' && !escaped;
        splits
    })
}

/// A tree of paths. The scanner follows it in parallel with the document.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    /// The index of the specification's path that ends at this node.
    pub(super) target: Option<usize>,
    /// Sorted by name.
    children: Vec<(Box<[u8]>, Node)>,
    /// The children whose name is an array index, sorted: (index, position in `children`).
    elements: Vec<(usize, usize)>,
}

impl Node {
    /// Builds the tree. The n-th path gets target n.
    pub(super) fn of<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Self {
        let paths = paths.into_iter().enumerate();
        Self::of_targets(paths.map(|(target, path)| (target, path.parts.as_slice())))
    }

    /// Builds the tree of paths that are given by their targets and parts. A path without parts is
    /// the document itself.
    pub(super) fn of_targets<'a>(paths: impl IntoIterator<Item = (usize, &'a [String])>) -> Self {
        let mut root = Self::default();
        for (target, parts) in paths {
            root.insert(parts, target);
        }
        root.index();
        root
    }

    /// Returns whether there is no path in the tree.
    pub(super) fn is_empty(&self) -> bool {
        self.target.is_none() && self.children.is_empty()
    }

    fn insert(&mut self, parts: &[String], target: usize) {
        let Some((first, rest)) = parts.split_first() else {
            self.target = Some(target);
            return;
        };
        let name = first.as_bytes();
        let found = self
            .children
            .binary_search_by(|(child, _)| child.as_ref().cmp(name));
        let at = found.unwrap_or_else(|at| {
            self.children.insert(at, (name.into(), Self::default()));
            at
        });
        if let Some((_, child)) = self.children.get_mut(at) {
            child.insert(rest, target);
        }
    }

    fn index(&mut self) {
        for (at, (name, child)) in self.children.iter_mut().enumerate() {
            if let Some(index) = array_index(name) {
                self.elements.push((index, at));
            }
            child.index();
        }
        self.elements.sort_unstable();
    }

    /// The child for a member of an object, by its unescaped name.
    #[inline]
    pub(super) fn member(&self, name: &[u8]) -> Option<&Self> {
        let at = self
            .children
            .binary_search_by(|(child, _)| child.as_ref().cmp(name))
            .ok()?;
        self.children.get(at).map(|(_, child)| child)
    }

    /// The number of elements of an array that the paths reach, from its beginning.
    pub(super) fn elements_wanted(&self) -> usize {
        self.elements
            .last()
            .map_or(0, |(index, _)| index.saturating_add(1))
    }

    /// The child for an element of an array.
    #[inline]
    pub(super) fn element(&self, index: usize) -> Option<&Self> {
        if self.elements.is_empty() {
            return None;
        }
        let found = self
            .elements
            .binary_search_by_key(&index, |(index, _)| *index)
            .ok()?;
        let (_, at) = self.elements.get(found)?;
        self.children.get(*at).map(|(_, child)| child)
    }
}

/// Parses an array index: `0` or `17`, but not `007`, which can only be a name.
fn array_index(name: &[u8]) -> Option<usize> {
    let plain =
        name.iter().all(u8::is_ascii_digit) && (name.len() == 1 || name.first() != Some(&b'0'));
    if !plain {
        return None;
    }
    std::str::from_utf8(name).ok()?.parse().ok()
}
