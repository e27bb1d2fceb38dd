//! The properties of a client, some of which are kept in files that change: passwords, keys and
//! certificates.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use oncegate_runtime::source::SourceError;

/// A setting of librdkafka by name.
pub(crate) type Property = (String, String);

/// Properties whose value is the name of a file that the client reads when it is made.
const LOCATIONS: &[&str] = &[
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.crl.location",
    "ssl.key.location",
    "ssl.keystore.location",
];

/// The most bytes of a file that is a property's value.
const VALUE_MAX_BYTES: usize = 64 * 1024;

/// Properties of librdkafka by name; of several with one name, the last counts.
#[derive(Clone, Default)]
pub(crate) struct Properties(Vec<(String, Value)>);

#[derive(Clone)]
enum Value {
    Text(String),
    /// The value is the content of this file, without a line feed at its end.
    File(PathBuf),
}

/// Stands for what was in all files of some properties at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileContents(u64);

impl Properties {
    pub(crate) fn set(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push((name.into(), Value::Text(value.into())));
    }

    pub(crate) fn set_file(&mut self, name: impl Into<String>, path: impl Into<PathBuf>) {
        self.0.push((name.into(), Value::File(path.into())));
    }

    /// Adds those of `others` that `take`, by their name, wants.
    pub(crate) fn extend(&mut self, others: &Self, take: impl Fn(&str) -> bool) {
        self.0
            .extend(others.0.iter().filter(|(name, _)| take(name)).cloned());
    }

    /// Returns those that `take`, by their name, wants.
    pub(crate) fn only(&self, take: impl Fn(&str) -> bool) -> Self {
        let mut some = Self::default();
        some.extend(self, take);
        some
    }

    /// Returns the value of a property that is in no file, if it is set.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        let named = self.0.iter().rev().find(|(own, _)| own == name);
        match named {
            Some((_, Value::Text(text))) => Some(text),
            _ => None,
        }
    }

    /// The properties without reading a file: what a file contains is left empty.
    pub(crate) fn unread(&self) -> Vec<Property> {
        self.0
            .iter()
            .map(|(name, value)| {
                let value = match value {
                    Value::Text(text) => text.clone(),
                    Value::File(_) => String::new(),
                };
                (name.clone(), value)
            })
            .collect()
    }

    /// The properties with what their files contain now.
    ///
    /// # Errors
    /// When a file cannot be read. The text names the property and the file.
    pub(crate) fn read(&self) -> Result<Vec<Property>, SourceError> {
        self.0
            .iter()
            .map(|(name, value)| {
                let value = match value {
                    Value::Text(text) => text.clone(),
                    Value::File(path) => content(name, path)?,
                };
                Ok((name.clone(), value))
            })
            .collect()
    }

    /// Returns whether a file decides about any of them.
    pub(crate) fn has_files(&self) -> bool {
        self.files().next().is_some()
    }

    /// Returns what is in the files now. A file that cannot be read is as good as an empty one
    /// here.
    pub(crate) fn contents(&self) -> FileContents {
        let mut hasher = DefaultHasher::new();
        for path in self.files() {
            std::fs::read(path).unwrap_or_default().hash(&mut hasher);
        }
        FileContents(hasher.finish())
    }

    fn files(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().filter_map(|(name, value)| match value {
            Value::File(path) => Some(path.as_path()),
            Value::Text(path) if LOCATIONS.contains(&name.as_str()) => Some(Path::new(path)),
            Value::Text(_) => None,
        })
    }
}

fn content(name: &str, path: &Path) -> Result<String, SourceError> {
    let text = std::fs::read_to_string(path).map_err(|error| unreadable(name, path, error))?;
    if text.len() > VALUE_MAX_BYTES {
        let why = format_args!("{} bytes are too many for a property", text.len());
        return Err(unreadable(name, path, why));
    }
    // Editors end a file with a line feed.
    Ok(text
        .strip_suffix('\n')
        .map_or(text.as_str(), |text| text.trim_end_matches('\r'))
        .to_owned())
}

fn unreadable(name: &str, path: &Path, why: impl fmt::Display) -> SourceError {
    SourceError::new(format!(
        "the property {name} cannot be read from {}: {why}",
        path.display()
    ))
}

impl From<Vec<Property>> for Properties {
    fn from(properties: Vec<Property>) -> Self {
        Self(
            properties
                .into_iter()
                .map(|(name, value)| (name, Value::Text(value)))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_a_file_is_read_again_and_a_change_is_seen() {
        let dir = std::env::temp_dir().join(format!("oncegate-properties-{}", fastrand::u64(..)));
        std::fs::create_dir(&dir).unwrap();
        let password = dir.join("password");
        let authority = dir.join("ca.pem");
        std::fs::write(&password, "one\n").unwrap();
        let mut properties = Properties::default();
        properties.set("sasl.password", "none");
        properties.set_file("sasl.password", &password);
        properties.set("ssl.ca.location", authority.display().to_string());
        let read = || {
            properties
                .read()
                .unwrap()
                .get(1)
                .map(|(_, value)| value.clone())
        };
        assert_eq!(read().as_deref(), Some("one"));
        let before = properties.contents();
        assert_eq!(before, properties.contents());
        std::fs::write(&password, "two\r\n").unwrap();
        let after = properties.contents();
        assert_ne!(before, after);
        assert_eq!(read().as_deref(), Some("two"));
        std::fs::write(&authority, "a certificate").unwrap();
        assert_ne!(after, properties.contents(), "a certificate has changed");
        std::fs::remove_file(&password).unwrap();
        let error = properties.read().unwrap_err().to_string();
        assert!(
            error.contains("sasl.password") && error.contains("password: "),
            "{error}"
        );
        assert!(
            properties.unread().iter().all(|(_, value)| value != "two"),
            "nothing is read"
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
