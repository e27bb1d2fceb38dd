//! The checks of `oncegate doctor` for the consumers of a configuration.

use std::sync::Arc;
use std::time::Duration;

use oncegate::core::key::{Descriptor, Scope};
use oncegate::core::store::{ScopeDescriptor, Store};
use oncegate::dead_letters::DeadLetters;
use oncegate::sqs::SqsDeadLetters;
use oncegate::{Consumer, Gate, GateError};

use super::{Questions, Report, Topics};
use crate::config::Loaded;
use crate::config::shape;
use crate::config::values::{Property, Time};
use crate::exit::{Exit, Problem};
use crate::sources::kafka::Kafka;
use crate::sources::{ConfiguredSource, Source};
use crate::store::{self, Opened};

/// Examines the store and every source. Changes nothing: no consumer is started, no scope is created.
pub(crate) async fn examine(loaded: &Loaded) -> Report {
    let mut report = Report::default();
    let settings = loaded.config.store.clone().unwrap_or_default();
    let opened = report.configured_store(&settings).await;
    Box::pin(examine_consumers(report, opened.as_ref(), loaded.consumers())).await
}

impl Report {
    /// Examines the store of a configuration. A file that no consumer has made yet is none of the findings.
    pub(super) async fn configured_store(&mut self, settings: &shape::Store) -> Option<Opened> {
        match store::file_to_be_made(settings) {
            Some(file) => {
                self.saw(format!(
                    "store: there is no file {} yet; the first consumer makes it",
                    file.display()
                ));
                None
            }
            None => self.store(store::open_to_read(settings).await).await,
        }
    }
}

/// Examines the scopes and sources of these consumers, and the servers of their store.
pub(super) async fn examine_consumers<'a>(
    mut report: Report,
    opened: Option<&Opened>,
    consumers: impl Iterator<Item = (&'a str, shape::Consumer)> + Send,
) -> Report {
    let redis = opened.and_then(|opened| opened.redis.as_ref());
    let first = match redis {
        Some(redis) => report.servers(redis).await,
        None => None,
    };
    let mut longest = Duration::ZERO;
    for (name, consumer) in consumers {
        longest = longest.max(retention(&consumer));
        report.about(name);
        if let (Some(opened), Ok(scope)) = (opened, Scope::new(name)) {
            same_key(&scope, &consumer, &opened.store, &mut report).await;
            report.rights(opened, &scope).await;
        }
        match questions(name, &consumer) {
            Ok(questions) => questions.ask(&mut report).await,
            Err(why) => report.problem("source", &Problem::new(Exit::Configuration, why)),
        }
    }
    if let (Some(redis), Some(first)) = (redis, first) {
        report.about_all();
        report.forecast(redis, first, longest).await;
    }
    report
}

/// A gate does not open if the scope's records were made with another key.
async fn same_key(scope: &Scope, consumer: &shape::Consumer, store: &Arc<dyn Store>, report: &mut Report) {
    let Some(key) = &consumer.key else { return };
    let fingerprint = consumer.fingerprint.as_ref().map(|fingerprint| &fingerprint.0);
    let Ok(ours) = Descriptor::new(&key.0, fingerprint) else { return };
    let held = match store.descriptor(scope).await {
        Ok(held) => held.map(|held| ScopeDescriptor::parse(scope, &held)).transpose(),
        Err(error) => Err(error),
    };
    let held = match held {
        Ok(Some(held)) => held,
        Ok(None) => return,
        Err(error) => return report.problem("store", &error.into()),
    };
    let name = scope.as_str();
    if let Some(halt) = &held.halt {
        let what = format!("scope `{name}` is halted, because the store has lost records: {}", halt.reason);
        let fix = format!(
            "find out what would run again (oncegate replay), then run: oncegate accept-loss --scope {name}"
        );
        report.finding("store_loss", what, &fix);
    }
    if held.keys != ours.as_str() {
        let (scope, ours) = (name.to_owned(), ours.as_str().to_owned());
        let refused = GateError::OtherDescriptor { scope, held: held.keys, ours };
        report.finding("key", refused.to_string(), "");
    }
}

/// What to ask about the consumer `name`.
///
/// # Errors
/// When the file or variable of a secret cannot be read.
pub(super) fn questions(name: &str, consumer: &shape::Consumer) -> Result<Questions, String> {
    let source = consumer.source.clone().unwrap_or_default();
    let kafka = source.kafka.as_ref().map(|kafka| topics(name, kafka, consumer)).transpose()?;
    Ok(Questions {
        retention: retention(consumer),
        lease: consumer.lease.map_or(Gate::DEFAULT_LEASE, |Time(time)| time),
        max_attempts: consumer.max_attempts.unwrap_or(Consumer::DEFAULT_MAX_ATTEMPTS),
        max_run: consumer.max_run.map_or(Gate::DEFAULT_MAX_RUN, |Time(time)| time),
        kafka,
        queue: queue(name, &source)?,
        letters: letters(&source, consumer),
        other_letters: other_letters(name, &source, consumer)?,
    })
}

fn retention(consumer: &shape::Consumer) -> Duration {
    consumer.retention.map_or(Gate::DEFAULT_RETENTION, |Time(time)| time)
}

/// What is reached, with its name.
type Reached<T> = Option<(String, T)>;

/// The queue of a source that is no cluster of Kafka.
fn queue(name: &str, source: &Source) -> Result<Reached<Box<dyn ConfiguredSource>>, String> {
    let Ok(settings) = source.settings() else { return Ok(None) };
    if source.kafka.is_some() || source.stdin.is_some() {
        return Ok(None);
    }
    let route = settings.routes().join(", ");
    Ok(Some((route, settings.open(name, Gate::DEFAULT_LEASE)?)))
}

/// The dead-letter queue of RabbitMQ.
fn other_letters(
    name: &str,
    source: &Source,
    consumer: &shape::Consumer,
) -> Result<Reached<Arc<dyn DeadLetters>>, String> {
    let Some((to, queue)) = consumer.dead_letters.as_ref().and_then(|to| Some((to, to.amqp.clone()?))) else {
        return Ok(None);
    };
    let source = source.open(name, Gate::DEFAULT_LEASE)?;
    Ok(source.dead_letters(to).map(|letters| (queue, letters)))
}

/// The dead-letter queue, reached as a consumer reaches it.
fn letters(source: &Source, consumer: &shape::Consumer) -> Option<SqsDeadLetters> {
    let queue = consumer.dead_letters.as_ref()?.sqs.as_ref()?;
    Some(match &source.sqs {
        Some(sqs) => sqs.source().dead_letters(queue),
        None => SqsDeadLetters::new(queue),
    })
}

/// The topics of the consumer `name`, and how their cluster is reached.
///
/// # Errors
/// When the file or variable of a secret cannot be read.
pub(crate) fn topics(name: &str, kafka: &Kafka, consumer: &shape::Consumer) -> Result<Topics, String> {
    let property = |(name, Property(value)): (&String, &Property)| match value.resolve() {
        Ok(value) => Ok((name.clone(), value)),
        Err(why) => Err(format!("{name}: {why}")),
    };
    let letters = consumer.dead_letters.clone();
    Ok(Topics {
        brokers: kafka.brokers.clone().unwrap_or_default().0.join(","),
        group: Some(kafka.group.clone().unwrap_or_else(|| name.to_owned())),
        properties: kafka.properties.iter().map(property).collect::<Result<_, _>>()?,
        consumed: kafka.topics.clone().unwrap_or_default().0,
        retries: kafka.retry_topics.iter().map(|(topic, Time(wait))| (topic.clone(), *wait)).collect(),
        // A missing dead-letter queue is reported without asking a server.
        without_dead_letters: None,
        dead_letters: letters.and_then(|letters| letters.kafka),
    })
}
