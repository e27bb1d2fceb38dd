//! `oncegate doctor`: checks whether the settings of store and broker can keep the promise.
//!
//! `examine` has the checks; `configured` runs them for every consumer of a configuration (`oncegate check --online`).

mod configured;
mod examine;
mod redis;

use std::time::Duration;

use oncegate::core::key::Scope;
use oncegate::sqs::SqsSource;
use serde::Serialize;

use crate::args::{AnswerArgs, duration, pair, within};
use crate::exit::{Exit, Problem};
use crate::output;
use crate::store::StoreArgs;
pub(crate) use configured::{examine as examine_configured, topics as configured_topics};
use examine::Questions;
pub(crate) use examine::{LETTER_BYTES, Report, Topics};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.doctor/1";

/// Check whether the settings of store and broker can keep the promise; each finding includes its fix
///
/// Changes nothing. Exit code 1: there are findings; 69: a server cannot be reached.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    store: StoreArgs,

    /// The scope of the consumer's gate: tries in Redis whether this user may work there, on a record that expires
    /// after a second
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Option<Scope>,

    /// Accept a Redis without a replica: if its disk is lost, so are the records
    #[arg(long)]
    allow_no_replica: bool,

    /// How long the gates keep completed records
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "7d")]
    retention: Duration,

    /// Kafka's addresses, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT", env = "ONCEGATE_BROKERS")]
    brokers: Option<String>,

    /// A topic that is consumed; may be repeated
    #[arg(long = "topic", value_name = "NAME", requires = "brokers")]
    topics: Vec<String>,

    /// The consumer group: tries whether this user may consume the topics in it
    #[arg(long, value_name = "NAME", requires = "brokers")]
    group: Option<String>,

    /// The topic of the dead letters
    #[arg(long, value_name = "NAME", requires = "brokers")]
    dead_letters: Option<String>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair)]
    properties: Vec<(String, String)>,

    /// An SQS queue that is consumed: its URL, or its name
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,

    /// The SQS queue of the dead letters: its URL, or its name
    #[arg(long, value_name = "QUEUE", requires = "queue")]
    dead_letter_queue: Option<String>,

    /// The address of another SQS server: http://127.0.0.1:9324 [default: as the AWS SDK finds it]
    #[arg(long, value_name = "URL", requires = "queue")]
    endpoint_url: Option<String>,

    /// The visibility timeout that the consumer sets in the queue
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "60s")]
    visibility: Duration,

    /// The lease of the gates
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "30s")]
    lease: Duration,

    /// How long one run of a handler may take
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "15m")]
    max_run: Duration,

    /// How many attempts a message gets
    #[arg(long, value_name = "N", default_value_t = oncegate::Consumer::DEFAULT_MAX_ATTEMPTS)]
    max_attempts: u32,

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
    let report = within(args.answer.timeout, async { Ok(Box::pin(args.examine()).await) }).await?;
    if args.answer.json {
        output::answer_json(&DoctorDocument { schema: SCHEMA, report: &report })?;
    } else {
        output::answer(&report.text())?;
    }
    Ok(report.exit())
}

impl DoctorArgs {
    async fn examine(&self) -> Report {
        let mut report = Report::default();
        let opened = report.store(self.store.open_to_examine(self.allow_no_replica).await).await;
        if let (Some(opened), Some(scope)) = (&opened, &self.scope) {
            report.rights(opened, scope).await;
        }
        let redis = opened.as_ref().and_then(|opened| opened.redis.as_ref());
        let first = match redis {
            Some(redis) => report.servers(redis).await,
            None => None,
        };
        self.questions().ask(&mut report).await;
        if let (Some(redis), Some(first)) = (redis, first) {
            report.forecast(redis, first, self.retention).await;
        }
        report
    }

    fn questions(&self) -> Questions {
        let queue = self.queue.as_ref().map(|queue| {
            let source = SqsSource::new(queue).visibility(self.visibility);
            match &self.endpoint_url {
                Some(url) => source.endpoint_url(url),
                None => source,
            }
        });
        let kafka = self.brokers.as_ref().map(|brokers| Topics {
            brokers: brokers.clone(),
            group: self.group.clone(),
            properties: self.properties.clone(),
            consumed: self.topics.clone(),
            retries: Vec::new(),
            dead_letters: self.dead_letters.clone(),
            without_dead_letters: Some(
                "give the consumer a dead-letter topic, and name it here with --dead-letters",
            ),
        });
        let letters = queue.as_ref().zip(self.dead_letter_queue.as_ref());
        let letters = letters.map(|(queue, letters)| queue.dead_letters(letters));
        let (retention, lease, max_attempts) = (self.retention, self.lease, self.max_attempts);
        Questions { retention, lease, max_attempts, max_run: self.max_run, kafka, queue, letters }
    }
}

#[cfg(test)]
mod tests {
    use oncegate::Gate;

    use super::*;

    #[test]
    fn the_defaults_are_those_of_gate_and_consumer() {
        use clap::Parser;
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            args: DoctorArgs,
        }
        let args = Cli::try_parse_from(["x", "--store", "redis://x"]).unwrap().args;
        assert_eq!((args.retention, args.lease), (Gate::DEFAULT_RETENTION, Gate::DEFAULT_LEASE));
        assert_eq!((args.max_run, args.visibility), (Gate::DEFAULT_MAX_RUN, SqsSource::DEFAULT_VISIBILITY));
    }
}
