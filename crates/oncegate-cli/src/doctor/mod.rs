//! `oncegate doctor`: checks whether the settings of store and broker can keep the promise.
//!
//! `examine` has the checks; `configured` runs them for the consumers of a configuration.

mod configured;
mod examine;
mod redis;

use std::time::Duration;

use oncegate::core::key::Scope;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::config::values::{Names, Property, Secret};
use crate::config::{Loaded, shape};
use crate::configured::{ConfigArgs, StoreFlag, choose, missing};
use crate::exit::{Exit, Problem};
use crate::output;
use crate::parse::{duration, pair};
use crate::sources::DeadLetters;
use crate::sources::kafka::Kafka;
use crate::stores::StoreUrl;
use examine::{NamedQueue, Questions};

pub(crate) use examine::Report;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.doctor/1";

/// Check whether the settings of store and broker can keep the promise
///
/// Each finding includes its fix.
///
/// With a configuration, store and source of its consumers are checked, or of the one of --scope;
/// what flags say of a consumer goes before it. Its schema registries must answer, and the workers'
/// programs must be on this machine. Without a configuration, it is all by flags.
///
/// Changes nothing. Exit code 1: there are findings; 69: a server cannot be reached.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    config: ConfigArgs,

    #[command(flatten)]
    store: StoreFlag,

    /// The scope of the consumer's gate: tries in Redis whether this user may work there, on a
    /// record that expires after a second [default: all of the configuration]
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Option<Scope>,

    /// Accept a Redis without a replica: if its disk is lost, so are the records
    #[arg(long)]
    allow_no_replica: bool,

    /// How long the gates keep completed records [default: 7d]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    retention: Option<Duration>,

    /// Kafka's addresses, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT", env = "ONCEGATE_BROKERS")]
    brokers: Option<String>,

    /// A topic that is consumed; may be repeated
    #[arg(long = "topic", value_name = "NAME")]
    topics: Vec<String>,

    /// The consumer group: tries whether this user may consume the topics in it
    #[arg(long, value_name = "NAME")]
    group: Option<String>,

    /// The topic of the dead letters
    #[arg(long, value_name = "NAME")]
    dead_letters: Option<String>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair)]
    properties: Vec<(String, String)>,

    /// An SQS queue that is consumed: its URL, or its name
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,

    /// The SQS queue of the dead letters: its URL, or its name
    #[arg(long, value_name = "QUEUE")]
    dead_letter_queue: Option<String>,

    /// The address of another SQS server: http://127.0.0.1:9324 [default: as the AWS SDK finds it]
    #[arg(long, value_name = "URL")]
    endpoint_url: Option<String>,

    /// The visibility timeout that the consumer sets in the queue [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    visibility: Option<Duration>,

    /// The lease of the gates [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    lease: Option<Duration>,

    /// How long one run of a handler may take [default: 15m]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_run: Option<Duration>,

    /// How many attempts a message gets [default: 10]
    #[arg(long, value_name = "N")]
    max_attempts: Option<u32>,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct DoctorDocument<'a> {
    schema: &'static str,
    #[serde(flatten)]
    report: &'a Report,
}

pub(crate) async fn run(args: &DoctorArgs) -> Result<Exit, Problem> {
    let report = within(args.answer.timeout, Box::pin(args.examine())).await?;
    if args.answer.json {
        output::answer_json(&DoctorDocument {
            schema: SCHEMA,
            report: &report,
        })?;
    } else {
        output::answer(&report.text())?;
    }
    Ok(report.exit())
}

/// Examines the store and the sources of all consumers of a configuration.
pub(crate) async fn examine(loaded: &Loaded) -> Report {
    let mut report = Report::default();
    let settings = loaded.config.store.clone().unwrap_or_default();
    let opened = report.configured_store(&settings).await;
    let consumers = loaded
        .consumers()
        .map(|(name, consumer)| (name, consumer.clone()));
    configured::examine_consumers(report, opened.as_ref(), consumers).await
}

impl DoctorArgs {
    async fn examine(&self) -> Result<Report, Problem> {
        match self.config.load(self.has_settings())? {
            Some(loaded) => Box::pin(self.examine_configured(&loaded)).await,
            None => self.examine_flags().await,
        }
    }

    /// Returns whether a flag says anything but which consumer is meant.
    fn has_settings(&self) -> bool {
        self.store.url.is_some() || self.names_source() || self.names_limits()
    }

    fn names_source(&self) -> bool {
        let names = [
            &self.brokers,
            &self.group,
            &self.dead_letters,
            &self.queue,
            &self.dead_letter_queue,
        ];
        names.iter().any(|name| name.is_some())
            || self.endpoint_url.is_some()
            || !self.topics.is_empty()
            || !self.properties.is_empty()
    }

    fn names_limits(&self) -> bool {
        [self.retention, self.visibility, self.lease, self.max_run]
            .iter()
            .any(Option::is_some)
            || self.max_attempts.is_some()
            || self.allow_no_replica
    }

    async fn examine_configured(&self, loaded: &Loaded) -> Result<Report, Problem> {
        let scope = self.scope.as_ref().map(Scope::as_str);
        let consumers: Vec<(&str, &shape::Consumer)> = match scope {
            // Flags about a source are about one consumer.
            None if !self.names_source() => loaded.consumers().collect(),
            _ => vec![choose(loaded, scope)?],
        };
        let consumers = consumers
            .into_iter()
            .map(|(name, consumer)| (name, self.over(consumer.clone())));
        let mut report = Report::default();
        let opened = match &self.store.url {
            Some(url) => {
                let store = StoreUrl { url: url.clone() };
                report
                    .store(store.open_to_examine(self.allow_no_replica).await)
                    .await
            }
            None => {
                let mut settings = loaded.config.store.clone().unwrap_or_default();
                if self.allow_no_replica {
                    settings.redis.allow_no_replica = true;
                }
                report.configured_store(&settings).await
            }
        };
        Ok(Box::pin(configured::examine_consumers(
            report,
            opened.as_ref(),
            consumers,
        ))
        .await)
    }

    /// The settings of a consumer, with those of the flags over them.
    fn over(&self, mut consumer: shape::Consumer) -> shape::Consumer {
        let shape::Consumer { gate, runtime, .. } = &mut consumer;
        gate.retention = self.retention.unwrap_or(gate.retention);
        gate.lease = self.lease.unwrap_or(gate.lease);
        gate.max_run = self.max_run.unwrap_or(gate.max_run);
        runtime.max_attempts = self.max_attempts.unwrap_or(runtime.max_attempts);
        let mut source = consumer.source.take().unwrap_or_default();
        let names_topics = self.brokers.is_some() || !self.topics.is_empty();
        if names_topics != self.queue.is_some() {
            // Topics of a flag replace a queue of the file, and the other way round.
            source.kafka = source.kafka.filter(|_| names_topics);
            source.sqs = source.sqs.filter(|_| !names_topics);
        }
        if names_topics {
            source.kafka.get_or_insert_default();
        }
        if let Some(queue) = &self.queue {
            source.sqs.get_or_insert_default().queue = Some(queue.clone());
        }
        if let Some(kafka) = &mut source.kafka {
            self.over_kafka(kafka);
        }
        if let Some(sqs) = &mut source.sqs {
            sqs.endpoint_url = self.endpoint_url.clone().or(sqs.endpoint_url.take());
            sqs.settings.visibility = self.visibility.unwrap_or(sqs.settings.visibility);
        }
        consumer.source = Some(source);
        if self.dead_letters.is_some() || self.dead_letter_queue.is_some() {
            let kafka = self.dead_letters.clone();
            let sqs = self.dead_letter_queue.clone();
            consumer.dead_letters = Some(DeadLetters {
                kafka,
                sqs,
                ..DeadLetters::default()
            });
        }
        consumer
    }

    fn over_kafka(&self, kafka: &mut Kafka) {
        if let Some(brokers) = &self.brokers {
            kafka.brokers = Some(Names(vec![brokers.clone()]));
        }
        if !self.topics.is_empty() {
            kafka.topics = Some(Names(self.topics.clone()));
        }
        kafka.group = self.group.clone().or(kafka.group.take());
        for (name, value) in &self.properties {
            let value = Property(Secret::Literal(value.clone()));
            kafka.properties.insert(name.clone(), value);
        }
    }

    /// # Errors
    /// When a flag needs another one.
    fn check(&self) -> Result<(), Problem> {
        let of_topics = [
            ("--topic", !self.topics.is_empty()),
            ("--group", self.group.is_some()),
            ("--dead-letters", self.dead_letters.is_some()),
        ];
        let of_queue = [
            ("--dead-letter-queue", self.dead_letter_queue.is_some()),
            ("--endpoint-url", self.endpoint_url.is_some()),
        ];
        if self.brokers.is_none()
            && let Some(flag) = first_given(&of_topics)
        {
            return Err(needs(flag, "--brokers"));
        }
        match first_given(&of_queue) {
            Some(flag) if self.queue.is_none() => Err(needs(flag, "--queue")),
            _ => Ok(()),
        }
    }

    async fn examine_flags(&self) -> Result<Report, Problem> {
        let url = self.store.url.clone().ok_or_else(|| missing("--store"))?;
        self.check()?;
        let mut report = Report::default();
        let store = StoreUrl { url }
            .open_to_examine(self.allow_no_replica)
            .await;
        let opened = report.store(store).await;
        if let (Some(opened), Some(scope)) = (&opened, &self.scope) {
            report.rights(opened, scope).await;
        }
        let redis = opened.as_ref().and_then(|opened| opened.redis.as_ref());
        let first = match redis {
            Some(redis) => report.servers(redis).await,
            None => None,
        };
        let questions = self.questions()?;
        questions.ask(&mut report).await;
        if let (Some(redis), Some(first)) = (redis, first) {
            report.forecast(redis, first, questions.retention).await;
        }
        Ok(report)
    }

    /// The questions about a consumer that the flags alone describe.
    fn questions(&self) -> Result<Questions, Problem> {
        let name = self.scope.as_ref().map(Scope::as_str).unwrap_or_default();
        let questions = configured::questions(name, &self.over(shape::Consumer::default()));
        let mut questions = questions.map_err(Problem::configuration)?;
        if let Some(topics) = &mut questions.kafka {
            topics.group.clone_from(&self.group);
            topics.without_dead_letters =
                Some("give the consumer a dead-letter topic, and name it here with --dead-letters");
        }
        Ok(questions)
    }
}

/// The first of these flags that is given.
fn first_given(flags: &[(&'static str, bool)]) -> Option<&'static str> {
    flags
        .iter()
        .find(|(_, is_given)| *is_given)
        .map(|(flag, _)| *flag)
}

fn needs(flag: &str, other: &str) -> Problem {
    Problem::new(
        Exit::Usage,
        format!("{flag} needs {other}, or a configuration (--config)"),
    )
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};
    use oncegate::sqs::SqsSettings;
    use oncegate::{ConsumerSettings, GateSettings};

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        _args: DoctorArgs,
    }

    #[test]
    fn the_defaults_are_those_of_gate_and_consumer() {
        let help = Cli::command().render_long_help().to_string();
        // Without the breaks of its lines.
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let times = [
            ("--retention", GateSettings::DEFAULT.retention),
            ("--visibility", SqsSettings::DEFAULT.visibility),
            ("--lease", GateSettings::DEFAULT.lease),
            ("--max-run", GateSettings::DEFAULT.max_run),
        ];
        for (flag, default) in times {
            let said = help
                .split(flag)
                .nth(1)
                .and_then(|rest| rest.split("[default: ").nth(1));
            let said = said
                .and_then(|rest| rest.split(']').next())
                .unwrap_or_default();
            assert_eq!(duration(said), Ok(default), "{flag}");
        }
        let attempts = format!("[default: {}]", ConsumerSettings::DEFAULT.max_attempts);
        assert!(
            help.contains(&format!("How many attempts a message gets {attempts}")),
            "{help}"
        );
    }
}
