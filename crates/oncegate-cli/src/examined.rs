//! The arguments of `replay` and `audit` that select a consumer and its messages.

use std::collections::HashSet;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use oncegate::admin::dry_run::{DryRun, Known};
use oncegate::core::key::Scope;
use oncegate::core::store::Store;
use oncegate::kafka::{TopicReader, TopicWindow};
use oncegate::{FingerprintSpec, Key};
use tracing::warn;

use crate::args::{KEY_FORMS, KEY_HELP};
use crate::config::format::Format;
use crate::config::values::RouteSetting;
use crate::config::{Loaded, shape};
use crate::configured::{ConfigArgs, StoreFlag, choose, missing};
use crate::exit::{Exit, Problem, not_opened};
use crate::parse::{Moment, fingerprint, pair};
use crate::sources::kafka::Topics;

/// The consumer whose messages are examined: as its configuration says, or by flags, which go
/// before.
#[derive(Debug, clap::Args)]
pub(crate) struct ExaminedArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,

    /// Kafka's addresses, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT", env = "ONCEGATE_BROKERS")]
    pub(crate) brokers: Option<String>,

    /// A topic to read; may be repeated [default: those of the configuration]
    #[arg(long = "topic", value_name = "NAME")]
    pub(crate) topics: Vec<String>,

    #[command(flatten)]
    pub(crate) store: StoreFlag,

    /// The scope of the consumer's gate
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    pub(crate) scope: Option<Scope>,

    #[arg(long, value_name = "SPEC", env = "ONCEGATE_KEY", help = KEY_HELP, long_help = KEY_FORMS)]
    pub(crate) key: Option<Key>,

    /// The format of payloads that are not JSON: registry:URL, avro:FILE, protobuf:FILE#MESSAGE,
    /// gzip, zstd or base64
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<Format>,

    /// The route in keys, in the place of the topic or queue: orders, or {"eu.orders":"orders"}
    #[arg(long, value_name = "NAME")]
    pub(crate) route: Option<RouteSetting>,

    /// The fingerprint of the consumer's gate: payload, payload-except:sent_at, or raw [default:
    /// contents are not compared]
    #[arg(long, value_name = "SPEC", value_parser = fingerprint)]
    pub(crate) fingerprint: Option<FingerprintSpec>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair)]
    pub(crate) properties: Vec<(String, String)>,

    /// Take routes from the header `oncegate-route`, as the consumer of a topic for redriven
    /// messages does
    #[arg(long)]
    pub(crate) routes_from_headers: bool,

    #[command(flatten)]
    pub(crate) window: WindowArgs,
}

/// Which messages of the topics are read.
#[derive(Debug, clap::Args)]
#[command(
    next_help_heading = "The window [default: all messages that the topics have at the start]"
)]
pub(crate) struct WindowArgs {
    /// Only this partition; may be repeated
    #[arg(long = "partition", value_name = "NUMBER", value_parser = clap::value_parser!(i32).range(0..))]
    partitions: Vec<i32>,

    /// Only messages from this offset on
    #[arg(long, value_name = "OFFSET", value_parser = clap::value_parser!(i64).range(0..))]
    from_offset: Option<i64>,

    /// Only messages before this offset
    #[arg(long, value_name = "OFFSET", value_parser = clap::value_parser!(i64).range(0..))]
    to_offset: Option<i64>,

    /// Only messages of this time or later: 2026-11-21T10:00:00Z, or this long ago: 2h
    #[arg(long, value_name = "TIME")]
    since: Option<Moment>,

    /// Only messages before this time: 2026-11-21T10:00:00Z, or this long ago: 2h
    #[arg(long, value_name = "TIME")]
    until: Option<Moment>,
}

/// The gate of the consumer whose messages are examined.
pub(crate) struct ExaminedGate {
    pub(crate) scope: Scope,
    pub(crate) key: Key,
    pub(crate) fingerprint: Option<FingerprintSpec>,
    /// For people.
    pub(crate) store_name: String,
    pub(crate) store: Arc<dyn Store>,
}

/// The consumer whose messages are examined, and the topics that it reads.
pub(crate) struct Examined {
    pub(crate) gate: ExaminedGate,
    pub(crate) brokers: String,
    pub(crate) topics: Vec<String>,
    pub(crate) properties: Vec<(String, String)>,
    /// `true` if routes are from headers, and not the topics.
    pub(crate) routes_from_headers: bool,
    /// The consumer group.
    pub(crate) group: String,
    /// The dead-letter topic, if the configuration has one.
    pub(crate) dead_letters: Option<String>,
}

impl ExaminedArgs {
    /// Connects to the store.
    pub(crate) async fn open(&self) -> Result<Examined, Problem> {
        let examined = match self.load()? {
            Some(loaded) => self.of_configuration(&loaded).await?,
            None => self.of_flags().await?,
        };
        let mut seen = HashSet::new();
        match examined
            .topics
            .iter()
            .find(|topic| !seen.insert(topic.as_str()))
        {
            Some(twice) => Err(Problem::new(
                Exit::Usage,
                format!("--topic {twice} is given twice"),
            )),
            None => Ok(examined),
        }
    }

    /// Checks that no flag changes what the configuration says of the consumer, because its handler
    /// and its gate are those of the configuration.
    pub(crate) fn check_unaltered(&self) -> Result<(), Problem> {
        match self.given().into_iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                let text = format!(
                    "--run takes everything about the consumer from --config: leave out {flag}"
                );
                Err(Problem::new(Exit::Usage, text))
            }
            None => Ok(()),
        }
    }

    /// The flags about the consumer, and which of them are given.
    fn given(&self) -> [(&'static str, bool); 7] {
        [
            ("--brokers (ONCEGATE_BROKERS)", self.brokers.is_some()),
            ("--store (ONCEGATE_STORE)", self.store.url.is_some()),
            ("--key (ONCEGATE_KEY)", self.key.is_some()),
            ("--format", self.format.is_some()),
            ("--route", self.route.is_some()),
            ("--fingerprint", self.fingerprint.is_some()),
            ("--property", !self.properties.is_empty()),
        ]
    }

    /// Reads the configuration, if there is one.
    pub(crate) fn load(&self) -> Result<Option<Loaded>, Problem> {
        let has_settings =
            self.given().iter().any(|(_, is_given)| *is_given) || !self.topics.is_empty();
        self.config.load(has_settings)
    }

    async fn of_configuration(&self, loaded: &Loaded) -> Result<Examined, Problem> {
        let (name, consumer) = self.choose(loaded)?;
        let kafka = consumer
            .source
            .as_ref()
            .and_then(|source| source.kafka.as_ref());
        let kafka = kafka.ok_or_else(|| {
            Problem::configuration(format!("{name} does not read topics of Kafka"))
        })?;
        let topics = kafka.cluster(name, consumer.dead_letters.as_ref());
        let topics = topics.map_err(|why| Problem::configuration(why).of(name))?;
        let Topics {
            brokers,
            properties,
            consumed,
            dead_letters,
            group,
            ..
        } = topics;
        if let Some(other) = self.topics.iter().find(|topic| !consumed.contains(topic)) {
            let why = format!("{name} does not consume the topic {other}");
            return Err(Problem::configuration(why));
        }
        Ok(Examined {
            brokers: self.brokers.clone().unwrap_or(brokers),
            topics: if self.topics.is_empty() {
                consumed
            } else {
                self.topics.clone()
            },
            properties: if self.properties.is_empty() {
                properties
            } else {
                self.properties.clone()
            },
            routes_from_headers: self.routes_from_headers || kafka.settings.routes_from_headers,
            group: group.unwrap_or_else(|| name.to_owned()),
            dead_letters,
            gate: self.gate(Some(loaded)).await?,
        })
    }

    async fn of_flags(&self) -> Result<Examined, Problem> {
        if self.topics.is_empty() {
            return Err(missing("--topic"));
        }
        let brokers = self.brokers.clone().ok_or_else(|| missing("--brokers"))?;
        let gate = self.gate(None).await?;
        Ok(Examined {
            brokers,
            topics: self.topics.clone(),
            properties: self.properties.clone(),
            routes_from_headers: self.routes_from_headers,
            group: gate.scope.as_str().to_owned(),
            dead_letters: None,
            gate,
        })
    }

    /// Returns the consumer of the configuration that is examined.
    pub(crate) fn choose<'a>(
        &self,
        loaded: &'a Loaded,
    ) -> Result<(&'a str, &'a shape::Consumer), Problem> {
        choose(loaded, self.scope.as_ref().map(Scope::as_str))
    }

    /// Returns the gate of the consumer, and connects to its store.
    pub(crate) async fn gate(&self, loaded: Option<&Loaded>) -> Result<ExaminedGate, Problem> {
        let (scope, consumer) = match loaded {
            Some(loaded) => {
                let (name, consumer) = self.choose(loaded)?;
                (Scope::new(name)?, consumer.clone())
            }
            None => {
                let scope = self.scope.clone().ok_or_else(|| missing("--scope"))?;
                (scope, shape::Consumer::default())
            }
        };
        let store = self.store.or_of(loaded)?;
        let key = self.key.clone().or(consumer.key.map(|key| key.0));
        let key = formatted(key, self.format.as_ref().or(consumer.format.as_ref()))?;
        let key = routed(key, self.route.as_ref().or(consumer.route.as_ref()));
        let key = key.ok_or_else(|| match loaded {
            Some(_) => Problem::configuration(format!("{scope} has no key")),
            None => missing("--key"),
        })?;
        let own = consumer.fingerprint.map(|fingerprint| fingerprint.0);
        Ok(ExaminedGate {
            scope,
            key,
            fingerprint: self.fingerprint.clone().or(own),
            store_name: store.redacted(),
            store: store.open().await?.store,
        })
    }
}

/// The key with its routes.
pub(crate) fn routed(key: Option<Key>, route: Option<&RouteSetting>) -> Option<Key> {
    match route {
        Some(route) => key.map(|key| route.apply(key)),
        None => key,
    }
}

/// The key with its format.
pub(crate) fn formatted(key: Option<Key>, format: Option<&Format>) -> Result<Option<Key>, Problem> {
    match (key, format) {
        (Some(key), Some(format)) => {
            let key = format.apply(key);
            key.map(Some)
                .map_err(|why| Problem::configuration(format!("the format: {why}")))
        }
        (key, _) => Ok(key),
    }
}

impl Examined {
    /// Opens the topics. All ends are taken before the first message is read, so that they belong
    /// to one moment.
    pub(crate) async fn readers(&self, window: &WindowArgs) -> Result<Vec<TopicReader>, Problem> {
        let window = window.of_topic();
        let mut readers = Vec::new();
        for topic in &self.topics {
            readers.push(self.reader(topic, window.clone()).await?);
        }
        Ok(readers)
    }

    pub(crate) async fn reader(
        &self,
        topic: &str,
        window: TopicWindow,
    ) -> Result<TopicReader, Problem> {
        let window = if self.routes_from_headers {
            window.routes_from_headers()
        } else {
            window
        };
        let properties = self.properties.iter().cloned();
        let reader = TopicReader::open_window(&self.brokers, topic, properties, window).await;
        reader.map_err(|error| not_opened(&error))
    }
}

impl ExaminedGate {
    /// Returns the settings of a dry run of the messages of this gate.
    pub(crate) fn dry_run(&self) -> DryRun {
        let dry_run = DryRun::new(
            self.scope.as_str(),
            self.key.clone(),
            Arc::clone(&self.store),
        );
        match &self.fingerprint {
            Some(fingerprint) => dry_run.fingerprint(fingerprint.clone()),
            None => dry_run,
        }
    }

    /// Warns when the scope is not what it should be.
    pub(crate) fn tell(&self, known: Known) {
        let scope = &self.scope;
        match known {
            Known::Same => {}
            Known::OtherFingerprint => warn!(
                %scope,
                "the gate of this scope compares contents; without its --fingerprint, mismatches are not seen here"
            ),
            Known::Nothing => warn!(
                %scope,
                "no gate has ever opened this scope in this store: is it the right scope, and the right store?"
            ),
        }
    }
}

impl WindowArgs {
    fn of_topic(&self) -> TopicWindow {
        let mut window = self
            .partitions
            .iter()
            .fold(TopicWindow::new(), |window, one| window.partition(*one));
        window = self
            .from_offset
            .into_iter()
            .fold(window, TopicWindow::from_offset);
        window = self
            .to_offset
            .into_iter()
            .fold(window, TopicWindow::to_offset);
        let since = self.since.iter().map(|moment| moment.time);
        let until = self.until.iter().map(|moment| moment.time);
        window = since.fold(window, TopicWindow::since);
        until.fold(window, TopicWindow::until)
    }
}

/// A progress bar on standard error; hidden unless that is a terminal.
pub(crate) fn progress(total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{bar:30} {human_pos}/{human_len} offsets  {per_sec}  {eta} left",
    );
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}
