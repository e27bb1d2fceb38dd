//! The configuration: a file, the environment over it, and flags over both.
//!
//! `layers` merges them and records where each value came from, `paths` makes the paths of the file
//! absolute, `shape` defines the settings that the library does not, `values` parses values, `read`
//! makes structures of the table, `check` checks that they fit together, `notation` finds paths of
//! other notations, `findings` shows errors,
//! and `table` makes the documentation's table, the JSON schema and the answer of `oncegate check
//! --explain`.

mod check;
mod doors;
mod findings;
pub(crate) mod format;
mod layers;
mod notation;
mod outboxes;
mod paths;
mod read;
pub(crate) mod shape;
mod source;
pub(crate) mod table;
pub(crate) mod values;

use std::path::Path as FilePath;

pub(crate) use findings::{Finding, Findings, Severity};
pub(crate) use layers::{Layers, Origin, Path};

use crate::exit::Problem;
use findings::About;
use read::{Unreadable, Why};
use shape::{Config, Consumer};

/// The largest file that is read, in bytes.
const FILE_MAX_BYTES: u64 = 1024 * 1024;
/// The most errors that are collected; reading stops after them.
const FINDINGS_MOST: usize = 200;

/// A setting from the command line.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// The flag's name, such as `--lease`.
    pub(crate) flag: String,
    pub(crate) path: Path,
    pub(crate) value: String,
}

impl Setting {
    /// Returns the setting of a consumer, if the flag was given.
    pub(crate) fn of_consumer(
        consumer: &str,
        flag: &str,
        path: &[&str],
        value: Option<&String>,
    ) -> Option<Self> {
        let above = ["consumer", consumer];
        let path = above.iter().chain(path);
        Some(Self {
            flag: flag.to_owned(),
            path: path.map(|part| (*part).to_owned()).collect(),
            value: value?.clone(),
        })
    }
}

/// A configuration that was read, with all its findings.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) config: Config,
    pub(crate) findings: Findings,
    layers: Layers,
    file: String,
    text: String,
}

/// The treatment of literal secrets: an error or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Secrets {
    MayBeLiteral,
    MustBeElsewhere,
}

/// Reads a configuration: the file, if there is one, this process's environment, and `flags`, which
/// are given the layers below them.
///
/// # Errors
/// When the file cannot be read. Errors in its content are in the findings.
pub(crate) fn load(
    file: Option<&FilePath>,
    flags: impl FnOnce(&Layers) -> Vec<Setting>,
    secrets: Secrets,
) -> Result<Loaded, Problem> {
    let text = file.map(read_file).transpose()?.unwrap_or_default();
    let source = Text {
        name: file
            .map(|file| file.display().to_string())
            .unwrap_or_default(),
        text,
        folder: file.and_then(paths::folder),
    };
    Ok(Loaded::of(
        source,
        std::env::vars_os().filter_map(unicode),
        flags,
        secrets,
    ))
}

/// The text of a file of settings.
struct Text {
    name: String,
    text: String,
    /// The folder that relative paths begin in, if it is not the working directory.
    folder: Option<std::path::PathBuf>,
}

fn unicode((name, value): (std::ffi::OsString, std::ffi::OsString)) -> Option<(String, String)> {
    Some((name.into_string().ok()?, value.into_string().ok()?))
}

fn read_file(file: &FilePath) -> Result<String, Problem> {
    read_limited(file)
        .map_err(|why| Problem::configuration(format!("cannot read {}: {why}", file.display())))
}

fn read_limited(file: &FilePath) -> Result<String, String> {
    let size = std::fs::metadata(file)
        .map_err(|error| error.to_string())?
        .len();
    if size > FILE_MAX_BYTES {
        return Err(format!("it has {size} bytes, more than {FILE_MAX_BYTES}"));
    }
    std::fs::read_to_string(file).map_err(|error| error.to_string())
}

impl Loaded {
    fn of(
        Text {
            name: file,
            text,
            folder,
        }: Text,
        variables: impl IntoIterator<Item = (String, String)>,
        flags: impl FnOnce(&Layers) -> Vec<Setting>,
        secrets: Secrets,
    ) -> Self {
        let mut findings = Findings::default();
        let mut layers = Layers::of_file(&text).unwrap_or_else(|broken| {
            findings.add_broken(&text, broken.what, broken.at, table::is_plain);
            Layers::default()
        });
        if findings.has_errors() {
            // Any further finding would only be a consequence.
            return Self {
                config: Config::default(),
                findings,
                layers,
                file,
                text,
            };
        }
        if let Some(folder) = folder {
            paths::resolve(&mut layers.table, &folder);
        }
        layers.add_environment(variables);
        for Setting { flag, path, value } in flags(&layers) {
            layers.set(path, value, Origin::Flag(flag));
        }
        for ambiguous in std::mem::take(&mut layers.ambiguous) {
            findings.add_ambiguous(&ambiguous);
        }
        let config = read(&mut layers, &text, &mut findings);
        let mut loaded = Self {
            config,
            findings,
            layers,
            file,
            text,
        };
        loaded.check(secrets);
        loaded.findings.sort();
        loaded
    }

    /// The consumers with what they inherit.
    pub(crate) fn consumers(&self) -> impl Iterator<Item = (&str, &Consumer)> {
        let consumers = self.config.consumer.iter();
        consumers.map(|(name, consumer)| (name.as_str(), consumer))
    }

    /// Returns whether a consumer has a setting, of its own or inherited.
    pub(crate) fn is_given(&self, consumer: &str, setting: &str) -> bool {
        let path = ["consumer", consumer, setting].map(str::to_owned);
        self.layers.value(&self.layers.inherited(&path)).is_some()
    }

    /// The variables of this process's environment that have settings and secrets of oncegate
    /// itself.
    pub(crate) fn variables(&self) -> Vec<String> {
        self.layers.variables()
    }

    /// Returns all findings as text.
    pub(crate) fn render(&self) -> String {
        self.findings.render(&self.file, &self.text)
    }

    /// The line of the file that a byte is in, for origins.
    fn line(&self, at: usize) -> usize {
        self.text
            .get(..at)
            .unwrap_or_default()
            .matches('\n')
            .count()
            + 1
    }

    /// Returns where a setting came from, as text; `None` when it has its default.
    fn origin(&self, path: &[String]) -> Option<String> {
        self.layers
            .exact_origin(path)
            .map(|origin| self.named(origin))
    }

    fn named(&self, origin: &Origin) -> String {
        match origin {
            Origin::File { name, .. } => format!("{}:{}", self.file, self.line(name.start)),
            Origin::Environment(name) | Origin::Flag(name) => name.clone(),
        }
    }
}

/// Reads the table. A value that cannot be read is reported and removed until the rest can be read,
/// so that all errors are found.
fn read(layers: &mut Layers, text: &str, findings: &mut Findings) -> Config {
    while findings.all.len() < FINDINGS_MOST {
        let Unreadable { path, why } = match read::read(&layers.with_inheritance()) {
            Ok(config) => return config,
            Err(unreadable) => unreadable,
        };
        let path = layers.inherited(&path);
        if layers.reinterpret(&path) {
            continue;
        }
        let about = match why {
            Why::Name(..) => About::Name,
            Why::Value(_) => About::Value,
        };
        let what = dotted_property(layers, &path).unwrap_or_else(|| why.to_string());
        findings.add(layers, text, (Severity::Error, about), &path, what);
        // Without the wrong setting, the next pass finds the next mistake.
        if !layers.remove(&path) {
            break;
        }
        findings.spoil(path);
    }
    Config::default()
}

/// The message about a property of librdkafka whose name was written without quotes, so that its
/// dots have made tables.
fn dotted_property(layers: &Layers, path: &[String]) -> Option<String> {
    let [.., table, first] = path else {
        return None;
    };
    let mut value = layers.value(path).filter(|_| table == "properties")?;
    let mut name = first.clone();
    while let Some((part, inner)) = value.as_table().and_then(|table| table.iter().next()) {
        // A secret, of which something else is wrong.
        if matches!(part.as_str(), "file" | "env") {
            return None;
        }
        name = format!("{name}.{part}");
        value = inner;
    }
    (name != *first).then(|| format!("the name has dots, so it needs quotes: \"{name}\" = …"))
}

#[cfg(test)]
mod tests;
