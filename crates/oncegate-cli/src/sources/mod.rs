//! The registry of sources: one file for each kind that a configuration can name.
//!
//! A kind is a table of [`Source`]. Its [`SourceSettings`] say all that the commands ask of one: what is wrong with its
//! settings, which dead letters it can have, the routes of its messages, and the [`ConfiguredSource`] that it opens. A new
//! kind is a file here, a field of [`Source`] and a line of [`Source::tables`].
//!
//! Standard input is the source that needs no broker: `input` reads its lines, `dead_letter_file` has their dead letters.

mod dead_letter_file;
pub(crate) mod input;
pub(crate) mod kafka;
pub(crate) mod sqs;
pub(crate) mod stdin;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::admin::dead_letter_reader::DeadLetterReader;
use oncegate::dead_letters;
use oncegate::source::SourceError;
use schemars::JsonSchema;
use serde::Deserialize;

use self::input::Input;
use crate::config::values::Secret;
use crate::exit::{Exit, Problem};

/// Where messages come from; one of the three.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Source {
    /// Topics of a Kafka cluster.
    pub(crate) kafka: Option<kafka::Kafka>,
    /// An SQS queue.
    pub(crate) sqs: Option<sqs::Sqs>,
    /// The lines of standard input, to its end.
    pub(crate) stdin: Option<stdin::Stdin>,
}

/// Where messages go that are given up; one of the three.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeadLetters {
    /// A topic of the source's cluster.
    pub(crate) kafka: Option<String>,
    /// A queue, by its name or URL.
    pub(crate) sqs: Option<String>,
    /// A file of JSON lines, for messages of standard input.
    pub(crate) file: Option<PathBuf>,
}

impl Source {
    /// Every kind, with its settings if they are given.
    fn tables(&self) -> [(&'static str, Option<&dyn SourceSettings>); 3] {
        [
            (kafka::TABLE, self.kafka.as_ref().map(|kafka| kafka as _)),
            (sqs::TABLE, self.sqs.as_ref().map(|sqs| sqs as _)),
            (stdin::TABLE, self.stdin.as_ref().map(|stdin| stdin as _)),
        ]
    }

    /// Returns the settings of the only kind that is given.
    ///
    /// # Errors
    /// When none is given, or several are.
    pub(crate) fn settings(&self) -> Result<&dyn SourceSettings, String> {
        let mut given = self.tables().into_iter().filter_map(|(_, settings)| settings);
        given.next().filter(|_| given.next().is_none()).ok_or_else(|| {
            let names = self.tables().map(|(name, _)| format!("`{name}`"));
            let [all @ .., last] = &names;
            format!("it must be one of {} and {last}", all.join(", "))
        })
    }

    /// Opens the only kind that is given, for a start that waits for its servers no longer than `patience`.
    ///
    /// # Errors
    /// When the file or variable of a secret cannot be read, or the configuration names no source.
    pub(crate) fn open(&self, name: &str, patience: Duration) -> Result<Box<dyn ConfiguredSource>, String> {
        let settings = self.settings().map_err(|why| format!("the source: {why}"))?;
        settings.open(name, patience)
    }
}

/// What is wrong with a setting of a source, or with one of its consumer.
pub(crate) enum SourceFinding<'a> {
    /// It is missing; the text is an example.
    Missing(&'static str, &'static str),
    Error(&'static str, &'static str),
    Warning(&'static str, String),
    ConsumerWarning(&'static str, &'static str),
    /// It is a secret, which may be in the file itself.
    Secret(Vec<&'a str>, &'a Secret),
}

/// The settings of one kind of source.
pub(crate) trait SourceSettings {
    /// Returns the name of its table.
    fn table(&self) -> &'static str;

    /// Returns what is wrong with them alone.
    fn findings(&self) -> Vec<SourceFinding<'_>>;

    /// Returns where they do not fit to the times of their consumer.
    fn findings_beside(&self, _lease: Duration, _max_run: Duration) -> Vec<SourceFinding<'_>> {
        Vec::new()
    }

    /// Returns why its messages cannot have these dead letters, with the setting that is wrong; `""` means all of them.
    fn refuse_letters(&self, letters: &DeadLetters) -> Option<(&'static str, String)>;

    /// Returns the routes of its messages.
    fn routes(&self) -> Vec<String>;

    /// Returns whether all is given that opening needs.
    fn is_complete(&self) -> bool;

    /// Opens it for the consumer `name`, for a start that waits for its servers no longer than `patience`. Connects to
    /// nothing.
    ///
    /// # Errors
    /// When the file or variable of a secret cannot be read.
    fn open(&self, name: &str, patience: Duration) -> Result<Box<dyn ConfiguredSource>, String>;

    /// The same without its secrets, to check the rest on a machine that does not have them.
    ///
    /// # Errors
    /// When the library refuses a setting.
    fn open_without_secrets(&self, name: &str) -> Result<Box<dyn ConfiguredSource>, String>;
}

/// A source that a configuration has named.
#[async_trait]
pub(crate) trait ConfiguredSource: Send + Sync {
    /// Returns what is dangerous about its settings: the setting, and why.
    fn warning(&self) -> Option<(&'static str, &'static str)> {
        None
    }

    /// Lets the library check the settings. Connects to nothing.
    ///
    /// # Errors
    /// When it refuses one.
    fn check(&self) -> Result<(), String>;

    /// Checks on the servers that the topics or the queue exist, as opening does.
    ///
    /// # Errors
    /// When they do not, or the servers are away.
    async fn check_servers(&self) -> Result<(), SourceError>;

    /// Returns standard input, if that is the source.
    fn input(&self) -> Option<Input> {
        None
    }

    /// Returns the dead-letter topic, queue or file, reached as the source is.
    fn dead_letters(&self, to: &DeadLetters) -> Option<Arc<dyn dead_letters::DeadLetters>>;

    /// Returns the source for a consumer.
    fn into_source(self: Box<Self>) -> Arc<dyn oncegate::source::Source>;
}

/// Where dead letters are that commands list, show and redrive.
#[async_trait]
pub(crate) trait LetterPlace: fmt::Debug + Send + Sync {
    /// Returns the name of the topic or queue.
    fn name(&self) -> &str;

    /// Returns whether the server can store how far a redrive came.
    fn keeps_progress(&self) -> bool {
        false
    }

    /// Returns whether the text is the position of a letter, as a list shows it.
    fn is_position(&self, text: &str) -> bool;

    /// Returns an example of a position.
    fn position_example(&self) -> String;

    /// Returns why only a part of the letters would be seen.
    fn unreadable(&self) -> Option<&'static str> {
        None
    }

    /// Opens it; `progress` names where the server stores how far a redrive came.
    ///
    /// # Errors
    /// When it cannot be opened, or a flag is missing without which reading would change it.
    async fn open(&self, progress: Option<String>) -> Result<Box<dyn DeadLetterReader>, Problem>;
}

/// Checks the form of positions before anything is read.
///
/// # Errors
/// When one has another form.
pub(crate) fn check_positions<'a>(
    place: &dyn LetterPlace,
    positions: impl IntoIterator<Item = &'a str>,
) -> Result<(), Problem> {
    match positions.into_iter().find(|position| !place.is_position(position)) {
        None => Ok(()),
        Some(position) => {
            let text = format!(
                "{position:?} is not a position of a dead letter: write it as `list` shows it, such as {}",
                place.position_example()
            );
            Err(Problem::new(Exit::Usage, text))
        }
    }
}
