//! Topics of Kafka.

mod topology;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::admin::dead_letter_reader::DeadLetterReader;
use oncegate::dead_letters;
use oncegate::kafka::{KafkaDeadLetterReader, KafkaRetries, KafkaSettings, KafkaSource};
use oncegate::source::{Source, SourceError, Terms};
use oncegate::sqs::SqsDeadLetters;
use schemars::JsonSchema;
use serde::Deserialize;

use self::topology::Cluster;
pub(crate) use self::topology::{ENTITY_KEYS, LETTER_BYTES, Topics, VERSIONED_KEYS};
use super::topology::{Topology, Wanted};
use super::{
    ConfiguredSource, DeadLetters, LetterPlace, LetterQueue, SourceFinding, SourceSettings,
    Template, next, quoted, sqs,
};
use crate::config::values::{Names, Property, Secret, Time};
use crate::exit::{Problem, not_opened};

/// The name of the table.
pub(super) const TABLE: &str = "kafka";
/// A password or token would be sent to another machine in plain text.
const SHOWS_LOGIN: (&str, &str) = (
    "properties",
    "the login is sent to another machine in plain text; set \"security.protocol\" to \"SASL_SSL\"",
);
/// The reason that messages of another source cannot have dead letters in a topic.
pub(super) const LETTERS_NEED_CLUSTER: &str =
    "only a Kafka source can have dead letters in Kafka, because the source names the cluster";
/// Brokers get this time to answer, however impatient the start is.
const OPEN_TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// What `init` has to know of topics.
#[derive(Debug, clap::Args)]
pub(super) struct InitTopics {
    /// Addresses of Kafka, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT", default_value = "localhost:9092")]
    brokers: String,

    /// The topic; dead letters go to the same name with `.dead` behind it
    #[arg(long, value_name = "NAME", default_value = "orders")]
    topic: String,
}

impl InitTopics {
    /// Returns what `init` writes.
    pub(super) fn template(&self) -> Template {
        let brokers: Vec<String> = self
            .brokers
            .split(',')
            .map(|broker| quoted(broker.trim()))
            .collect();
        let topic = quoted(&self.topic);
        Template {
            source: format!(
                "{{ kafka = {{ brokers = [{}], topics = [{topic}] }} }}",
                brokers.join(", ")
            ),
            dead_letters: format!("{{ kafka = {} }}", quoted(&format!("{}.dead", self.topic))),
            about: "The consumer group has the consumer's name, unless `group` sets another one.",
            store: "redis://localhost:6379",
            next: [next::CHECK, next::CREATE_TOPICS, next::RUN]
                .map(str::to_owned)
                .into(),
        }
    }
}

/// Topics of a Kafka cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kafka {
    /// Addresses of the cluster, `host:port`.
    pub(crate) brokers: Option<Names>,
    /// The topics.
    pub(crate) topics: Option<Names>,
    /// The consumer group.
    #[schemars(extend("default" = "the consumer's name"))]
    pub(crate) group: Option<String>,
    /// Topics in which messages wait whose retry is far off, each with how long: `{
    /// "orders.retry.30s" = "30s" }`. Messages overtake those that wait, so `ordering` must be
    /// `unordered`, or `overtaking_retries` accept it.
    #[serde(default)]
    pub(crate) retry_topics: BTreeMap<String, Time>,
    /// Retries that are due before this wait in memory.
    #[schemars(extend("default" = Time(oncegate::kafka::KafkaRetries::DEFAULT_BEYOND).to_string()))]
    pub(crate) retry_beyond: Option<Time>,
    /// Properties of librdkafka, such as `"security.protocol" = "SSL"`. What comes from a file, or
    /// is a file's name, is read again when the file changes.
    #[serde(default)]
    pub(crate) properties: BTreeMap<String, Property>,
    #[serde(default, rename = "*settings")]
    #[schemars(flatten)]
    pub(crate) settings: KafkaSettings,
}

impl Kafka {
    /// Returns the source without its retry topics.
    fn source(&self, name: &str) -> Result<KafkaSource, String> {
        let group = self.group.clone().unwrap_or_else(|| name.to_owned());
        let brokers = self.brokers.clone().unwrap_or_default().0.join(",");
        let mut source =
            KafkaSource::new(brokers, group, self.topics.clone().unwrap_or_default().0)
                .settings(self.settings.clone());
        for (property, Property(value)) in &self.properties {
            source = match value {
                Secret::File(path) => source.property_file(property, path),
                other => {
                    let value = other
                        .resolve()
                        .map_err(|why| format!("{property}: {why}"))?;
                    source.property(property, value)
                }
            };
        }
        Ok(source)
    }
}

impl Kafka {
    /// Returns the topics of the consumer `name` with these dead letters, and how their cluster is
    /// reached.
    ///
    /// # Errors
    /// When the file or variable of a secret cannot be read.
    pub(crate) fn cluster(
        &self,
        name: &str,
        letters: Option<&DeadLetters>,
    ) -> Result<Topics, String> {
        let mut properties = Vec::with_capacity(self.properties.len());
        for (property, Property(value)) in &self.properties {
            let value = value
                .resolve()
                .map_err(|why| format!("{property}: {why}"))?;
            properties.push((property.clone(), value));
        }
        Ok(Topics {
            brokers: self.brokers.clone().unwrap_or_default().0.join(","),
            group: Some(self.group.clone().unwrap_or_else(|| name.to_owned())),
            properties,
            consumed: self.topics.clone().unwrap_or_default().0,
            retries: self
                .retry_topics
                .iter()
                .map(|(topic, Time(wait))| (topic.clone(), *wait))
                .collect(),
            // A missing dead-letter queue is reported without asking a server.
            without_dead_letters: None,
            dead_letters: letters.and_then(|letters| letters.kafka.clone()),
        })
    }
}

impl SourceSettings for Kafka {
    fn table(&self) -> &'static str {
        TABLE
    }

    fn findings(&self) -> Vec<SourceFinding<'_>> {
        let mut findings = Vec::new();
        if is_missing(self.brokers.as_ref()) {
            findings.push(SourceFinding::Missing("brokers", "[\"host:9092\"]"));
        }
        if is_missing(self.topics.as_ref()) {
            findings.push(SourceFinding::Missing("topics", "[\"orders\"]"));
        }
        if self.retry_beyond.is_some() && self.retry_topics.is_empty() {
            findings.push(SourceFinding::Error(
                "retry_beyond",
                "it belongs to `retry_topics`, and there are none",
            ));
        }
        for (property, Property(value)) in &self.properties {
            if Property::is_secret(property) {
                findings.push(SourceFinding::Secret(vec!["properties", property], value));
            }
        }
        findings.extend(self.settings.check().into_iter().map(SourceFinding::Wrong));
        findings
    }

    fn refuse_letters(&self, letters: &DeadLetters) -> Option<(&'static str, String)> {
        if let Some(refused) = letters.refused_for(TABLE) {
            return Some(refused);
        }
        let topic = letters.kafka.as_ref()?;
        let topics = self.topics.clone().unwrap_or_default().0;
        (topics.contains(topic) || self.retry_topics.contains_key(topic)).then(|| {
            (
                "kafka",
                format!("the topic {topic} is consumed: every letter would come back"),
            )
        })
    }

    fn topology(
        &self,
        name: &str,
        letters: &DeadLetters,
        wanted: &Wanted,
    ) -> Option<Result<Box<dyn Topology>, String>> {
        let topics = self.cluster(name, Some(letters));
        Some(topics.map(|topics| Box::new(Cluster::new(topics, name, wanted)) as _))
    }

    fn routes(&self) -> Vec<String> {
        self.topics.clone().unwrap_or_default().0
    }

    fn is_complete(&self) -> bool {
        self.brokers.is_some() && self.topics.is_some()
    }

    fn open(&self, name: &str, patience: Duration) -> Result<Box<dyn ConfiguredSource>, String> {
        let limit = patience.clamp(OPEN_TIMEOUT_MIN, KafkaSource::DEFAULT_OPEN_TIMEOUT);
        let source = self.source(name)?.open_timeout(limit);
        if self.retry_topics.is_empty() {
            return Ok(Box::new(source));
        }
        let source = source.retry_topics(
            self.retry_topics
                .iter()
                .map(|(topic, Time(wait))| (*wait, topic)),
        );
        Ok(Box::new(match self.retry_beyond {
            Some(Time(limit)) => source.beyond(limit),
            None => source,
        }))
    }

    fn open_without_secrets(&self, name: &str) -> Result<Box<dyn ConfiguredSource>, String> {
        let mut settings = self.clone();
        for Property(value) in settings.properties.values_mut() {
            if let Secret::Env(_) = value {
                *value = Secret::Literal(value.resolve().unwrap_or_default());
            }
        }
        settings.open(name, KafkaSource::DEFAULT_OPEN_TIMEOUT)
    }
}

#[async_trait]
impl ConfiguredSource for KafkaSource {
    fn warning(&self) -> Option<(&'static str, &'static str)> {
        self.shows_login().then_some(SHOWS_LOGIN)
    }

    fn check(&self) -> Result<(), String> {
        Self::check(self).map_err(|error| error.to_string())
    }

    async fn examine(&self, _: &Terms) -> Result<Vec<String>, SourceError> {
        self.check_topics().await?;
        Self::history(self).await
    }

    async fn history(&self) -> Result<Vec<String>, SourceError> {
        Self::history(self).await
    }

    fn dead_letters(&self, to: &DeadLetters) -> Option<Arc<dyn dead_letters::DeadLetters>> {
        match &to.kafka {
            Some(topic) => Some(Arc::new(Self::dead_letters(self, topic.clone()))),
            None => queue(to),
        }
    }

    fn letter_queue(&self, to: &DeadLetters) -> Option<Box<dyn LetterQueue>> {
        sqs::letter_queue(to)
    }

    fn into_source(self: Box<Self>) -> Arc<dyn Source> {
        Arc::from(self as Box<dyn Source>)
    }
}

#[async_trait]
impl ConfiguredSource for KafkaRetries {
    fn warning(&self) -> Option<(&'static str, &'static str)> {
        self.shows_login().then_some(SHOWS_LOGIN)
    }

    fn check(&self) -> Result<(), String> {
        Self::check(self).map_err(|error| error.to_string())
    }

    async fn examine(&self, _: &Terms) -> Result<Vec<String>, SourceError> {
        self.check_topics().await?;
        Self::history(self).await
    }

    async fn history(&self) -> Result<Vec<String>, SourceError> {
        Self::history(self).await
    }

    fn dead_letters(&self, to: &DeadLetters) -> Option<Arc<dyn dead_letters::DeadLetters>> {
        match &to.kafka {
            Some(topic) => Some(Arc::new(Self::dead_letters(self, topic.clone()))),
            None => queue(to),
        }
    }

    fn letter_queue(&self, to: &DeadLetters) -> Option<Box<dyn LetterQueue>> {
        sqs::letter_queue(to)
    }

    fn into_source(self: Box<Self>) -> Arc<dyn Source> {
        Arc::from(self as Box<dyn Source>)
    }
}

/// The dead-letter queue of messages of Kafka.
fn queue(to: &DeadLetters) -> Option<Arc<dyn dead_letters::DeadLetters>> {
    Some(Arc::new(SqsDeadLetters::new(to.sqs.clone()?)))
}

fn is_missing(names: Option<&Names>) -> bool {
    names.is_none_or(|names| names.0.iter().all(String::is_empty))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A topic of dead letters.
#[derive(Debug)]
pub(crate) struct KafkaLetters {
    pub(crate) topic: String,
    pub(crate) brokers: String,
    pub(crate) properties: Vec<(String, String)>,
}

#[async_trait]
impl LetterPlace for KafkaLetters {
    fn name(&self) -> &str {
        &self.topic
    }

    fn keeps_progress(&self) -> bool {
        true
    }

    fn is_position(&self, text: &str) -> bool {
        text.rsplit_once('@').is_some_and(|(at, offset)| {
            let place = at.rsplit_once('/');
            is_number(offset)
                && place.is_some_and(|(topic, partition)| !topic.is_empty() && is_number(partition))
        })
    }

    fn position_example(&self) -> String {
        format!("{}/0@42", self.topic)
    }

    async fn open(&self, progress: Option<String>) -> Result<Box<dyn DeadLetterReader>, Problem> {
        let mut letters = KafkaDeadLetterReader::new(self.brokers.as_str(), self.topic.as_str());
        for (name, value) in &self.properties {
            letters = letters.property(name, value);
        }
        if let Some(group) = progress {
            letters = letters.progress(group);
        }
        letters.open().await.map_err(|error| not_opened(&error))?;
        Ok(Box::new(letters))
    }
}
