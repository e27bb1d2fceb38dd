//! The registry of sources: one file for each kind that a configuration can name.
//!
//! A kind is a table of [`Source`]. Its [`SourceSettings`] say all that the commands ask of one:
//! what is wrong with its settings, which dead letters it can have, the routes of its messages, the
//! topics or queues that they name, and the [`ConfiguredSource`] that it opens. Its flags and its
//! part of what `init` writes are in its file, too. A new kind is a file here, and in this file a
//! field of [`Source`], one of [`DeadLetters`], and a line of each list.
//!
//! Standard input is the source that needs no broker: `input` reads its lines, `dead_letter_file`
//! has their dead letters.

pub(crate) mod amqp;
mod dead_letter_file;
pub(crate) mod input;
pub(crate) mod kafka;
pub(crate) mod sqs;
pub(crate) mod stdin;
pub(crate) mod topology;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use clap::ValueEnum;
use oncegate::Ordering;
use oncegate::admin::dead_letter_reader::DeadLetterReader;
use oncegate::core::settings::Finding;
use oncegate::dead_letters;
use oncegate::source::{SourceError, Terms};
use schemars::JsonSchema;
use serde::Deserialize;

use self::input::Input;
use self::topology::{Topology, Wanted};
use crate::config::values::Secret;
use crate::exit::{Exit, Problem};

/// Where messages come from; one of the four.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Source {
    /// Topics of a Kafka cluster.
    pub(crate) kafka: Option<kafka::Kafka>,
    /// An SQS queue.
    pub(crate) sqs: Option<sqs::Sqs>,
    /// A queue of RabbitMQ.
    pub(crate) amqp: Option<amqp::Amqp>,
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
    /// A queue of the source's RabbitMQ.
    pub(crate) amqp: Option<String>,
    /// A file of JSON lines, for messages of standard input.
    pub(crate) file: Option<PathBuf>,
}

/// The kind of a source, as flags name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SourceKind {
    /// The lines of standard input
    Stdin,
    /// Topics of Kafka
    Kafka,
    /// An SQS queue
    Sqs,
    /// A queue of RabbitMQ
    Amqp,
}

/// What `init` has to know of a source.
#[derive(Debug, clap::Args)]
pub(crate) struct InitFlags {
    #[command(flatten)]
    kafka: kafka::InitTopics,

    #[command(flatten)]
    queues: QueueFlags,

    #[command(flatten)]
    sqs: sqs::InitSqs,

    #[command(flatten)]
    amqp: amqp::InitAmqp,
}

/// The queues of every broker that has some.
#[derive(Debug, clap::Args)]
struct QueueFlags {
    /// The queue, by its name; one of SQS also by its URL
    #[arg(long, value_name = "QUEUE", default_value = "orders")]
    queue: String,

    /// The queue of the dead letters, by its name; one of SQS also by its URL
    #[arg(long, value_name = "QUEUE", default_value = "orders-dead")]
    dead_letter_queue: String,
}

/// The lines that `init` writes about a source.
pub(crate) struct Template {
    /// The setting `source`, in TOML.
    pub(crate) source: String,
    /// The setting `dead_letters`, in TOML.
    pub(crate) dead_letters: String,
    /// A description of the source, as a comment.
    pub(crate) about: &'static str,
    /// The URL of a store for as many machines as read such a source.
    pub(crate) store: &'static str,
    /// The commands to continue with, in the folder.
    pub(crate) next: Vec<String>,
}

impl SourceKind {
    /// The table of its settings.
    pub(crate) const fn table(self) -> &'static str {
        match self {
            Self::Stdin => stdin::TABLE,
            Self::Kafka => kafka::TABLE,
            Self::Sqs => sqs::TABLE,
            Self::Amqp => amqp::TABLE,
        }
    }

    /// The setting of the dead letters that its messages have with one flag.
    pub(crate) const fn letters(self) -> &'static str {
        match self {
            Self::Stdin => FILE,
            broker => broker.table(),
        }
    }

    /// Returns what `init` writes; `messages` is the file of messages to try it with.
    pub(crate) fn template(self, flags: &InitFlags, messages: &str) -> Template {
        match self {
            Self::Stdin => stdin::template(messages),
            Self::Kafka => flags.kafka.template(),
            Self::Sqs => flags.sqs.template(&flags.queues),
            Self::Amqp => flags.amqp.template(&flags.queues),
        }
    }
}

/// The commands to continue with, in the folder of the configuration that `init` writes.
mod next {
    pub(super) const CHECK: &str = "oncegate check";
    pub(super) const CREATE_TOPICS: &str = "oncegate topics create";
    pub(super) const DOCTOR: &str = "oncegate doctor";
    pub(super) const RUN: &str = "oncegate run --config oncegate.toml";
}

/// A text as TOML writes it.
pub(crate) fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// The broker of a queue that is looked into (`replay --queue`).
#[derive(Debug, clap::Args)]
pub(crate) struct QueueBrokerFlags {
    #[command(flatten)]
    sqs: sqs::SqsFlags,

    #[command(flatten)]
    amqp: amqp::AmqpFlags,
}

impl QueueBrokerFlags {
    /// Returns a source that holds up to `most` messages of the queue until it is closed. What no
    /// flag says of the broker, the configured source does.
    ///
    /// # Errors
    /// When a flag does not fit, or a secret of the configuration cannot be read.
    pub(crate) fn source(
        &self,
        queue: &str,
        most: u32,
        configured: Option<&Source>,
    ) -> Result<Box<dyn oncegate::source::Source>, Problem> {
        let configured_amqp = configured
            .and_then(|source| source.amqp.as_ref())
            .filter(|_| !self.sqs.are_given());
        match self.amqp.source(queue, most, configured_amqp)? {
            Some(source) => Ok(source),
            None => {
                let configured = configured.and_then(|source| source.sqs.as_ref());
                Ok(self.sqs.source(queue, configured))
            }
        }
    }
}

/// A library that logs what it also returns.
pub(crate) struct ChattyLibrary {
    /// The target of its lines, which are logged only if the user names it.
    pub(crate) target: &'static str,
    /// The directives that hold even then, because the lines contain payloads.
    pub(crate) never: &'static [&'static str],
}

/// The libraries of brokers that log too much.
pub(crate) const CHATTY: [ChattyLibrary; 1] = [amqp::CHATTY];

impl DeadLetters {
    /// Every kind: whether it is given, and why messages of other sources cannot have it.
    fn kinds(&self) -> [(&'static str, bool, Option<&'static str>); 4] {
        [
            (
                kafka::TABLE,
                self.kafka.is_some(),
                Some(kafka::LETTERS_NEED_CLUSTER),
            ),
            (sqs::TABLE, self.sqs.is_some(), None),
            (
                amqp::TABLE,
                self.amqp.is_some(),
                Some(amqp::LETTERS_NEED_BROKER),
            ),
            (FILE, self.file.is_some(), Some(stdin::LETTERS_NEED_STDIN)),
        ]
    }

    /// Checks that one kind is given.
    ///
    /// # Errors
    /// When none is, or several are.
    pub(crate) fn check(&self) -> Result<(), String> {
        let kinds = self.kinds();
        if kinds.iter().filter(|(_, is_given, _)| *is_given).count() == 1 {
            return Ok(());
        }
        let names = kinds.map(|(name, ..)| format!("`{name}`"));
        let [all @ .., last] = &names;
        Err(format!("it must be one of {} and {last}", all.join(", ")))
    }

    /// Returns the kind that messages of the source `own` cannot have, with the reason.
    fn refused_for(&self, own: &str) -> Option<(&'static str, String)> {
        let mut kinds = self.kinds().into_iter();
        kinds.find_map(|(name, is_given, why)| {
            Some((name, why.filter(|_| is_given && name != own)?.to_owned()))
        })
    }

    /// Returns whether they are in a queue, and in no topic or file.
    pub(crate) fn is_queue(&self) -> bool {
        self.kafka.is_none() && self.file.is_none()
    }
}

/// The name of the dead letters in a file.
const FILE: &str = "file";

impl Source {
    /// Every kind, with its settings if they are given.
    fn tables(&self) -> [(&'static str, Option<&dyn SourceSettings>); 4] {
        [
            (kafka::TABLE, self.kafka.as_ref().map(|kafka| kafka as _)),
            (sqs::TABLE, self.sqs.as_ref().map(|sqs| sqs as _)),
            (amqp::TABLE, self.amqp.as_ref().map(|amqp| amqp as _)),
            (stdin::TABLE, self.stdin.as_ref().map(|stdin| stdin as _)),
        ]
    }

    /// Returns the settings of the only kind that is given.
    ///
    /// # Errors
    /// When none is given, or several are.
    pub(crate) fn settings(&self) -> Result<&dyn SourceSettings, String> {
        let mut given = self
            .tables()
            .into_iter()
            .filter_map(|(_, settings)| settings);
        given
            .next()
            .filter(|_| given.next().is_none())
            .ok_or_else(|| {
                let names = self.tables().map(|(name, _)| format!("`{name}`"));
                let [all @ .., last] = &names;
                format!("it must be one of {} and {last}", all.join(", "))
            })
    }

    /// Opens the only kind that is given, for a start that waits for its servers no longer than
    /// `patience`.
    ///
    /// # Errors
    /// When the file or variable of a secret cannot be read, or the configuration names no source.
    pub(crate) fn open(
        &self,
        name: &str,
        patience: Duration,
    ) -> Result<Box<dyn ConfiguredSource>, String> {
        let settings = self
            .settings()
            .map_err(|why| format!("the source: {why}"))?;
        settings.open(name, patience)
    }
}

/// An error in a setting of a source, or in one of its consumer.
pub(crate) enum SourceFinding<'a> {
    /// The setting is missing; the text is an example.
    Missing(&'static str, &'static str),
    Error(&'static str, &'static str),
    /// What the library says of its settings.
    Wrong(Finding),
    Warning(&'static str, String),
    ConsumerWarning(&'static str, &'static str),
    /// The setting is a secret, which may be in the file itself.
    Secret(Vec<&'a str>, &'a Secret),
    /// The setting is a URL with a password, which has a setting of its own.
    SecretInUrl(&'static str),
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

    /// Returns where they do not fit to the ordering of their consumer.
    fn findings_of_order(&self, _: Ordering) -> Option<Finding> {
        None
    }

    /// Returns why its messages cannot have these dead letters, with the setting that is wrong;
    /// `""` means all of them.
    fn refuse_letters(&self, letters: &DeadLetters) -> Option<(&'static str, String)>;

    /// Returns the name of the queue, if the source is one whose own checks say all about it.
    fn queue(&self) -> Option<&str> {
        None
    }

    /// Returns the topics or queues that these settings of the consumer `name` name, if a command
    /// can create them.
    fn topology(
        &self,
        _name: &str,
        _letters: &DeadLetters,
        _wanted: &Wanted,
    ) -> Option<Result<Box<dyn Topology>, String>> {
        None
    }

    /// Returns the place of these dead letters, if commands find it by these settings alone.
    fn letters(&self, _: &DeadLetters) -> Option<Result<Box<dyn LetterPlace>, String>> {
        None
    }

    /// Returns the routes of its messages.
    fn routes(&self) -> Vec<String>;

    /// Returns whether all is given that opening needs.
    fn is_complete(&self) -> bool;

    /// Opens it for the consumer `name`, for a start that waits for its servers no longer than
    /// `patience`. Connects to nothing.
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

    /// Asks the servers whether the topics or the queue exist, as opening does. Returns warnings of
    /// what does not fit to a consumer with these terms.
    ///
    /// # Errors
    /// When they do not exist, or the servers are away.
    async fn examine(&self, terms: &Terms) -> Result<Vec<String>, SourceError>;

    /// Returns a sentence for each topic of which the group has committed nothing, although it has
    /// messages: all of them would run.
    ///
    /// # Errors
    /// When the servers are away, or refuse.
    async fn history(&self) -> Result<Vec<String>, SourceError> {
        Ok(Vec::new())
    }

    /// Returns standard input, if that is the source.
    fn input(&self) -> Option<Input> {
        None
    }

    /// Returns the dead-letter topic, queue or file, reached as the source is.
    fn dead_letters(&self, to: &DeadLetters) -> Option<Arc<dyn dead_letters::DeadLetters>>;

    /// Returns the queue of these dead letters, reached as the source is, if they are in one that
    /// can be examined.
    fn letter_queue(&self, _: &DeadLetters) -> Option<Box<dyn LetterQueue>> {
        None
    }

    /// Returns the source for a consumer.
    fn into_source(self: Box<Self>) -> Arc<dyn oncegate::source::Source>;
}

/// A queue of dead letters, as `doctor` examines it.
#[async_trait]
pub(crate) trait LetterQueue: Send + Sync {
    /// Returns its name.
    fn name(&self) -> &str;

    /// Asks the broker whether it exists. Returns warnings of what may lose letters.
    ///
    /// # Errors
    /// When it does not exist, or the broker is away.
    async fn examine(&self) -> Result<Vec<String>, SourceError>;
}

/// A place of dead letters that commands list, show and redrive.
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

    /// Returns what reading it changes, if it changes anything.
    fn cost(&self) -> Option<&'static str> {
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
    match positions
        .into_iter()
        .find(|position| !place.is_position(position))
    {
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
