//! `oncegate doctor`: asks store and broker whether they can keep the promise as they are set.

use std::time::Duration;

use oncegate::core::store::StoreError;
use oncegate::kafka::{self, TopicFacts};
use oncegate::source::{SourceError, Terms};
use oncegate::sqs::SqsSource;
use serde::Serialize;

use crate::args::{AnswerArgs, duration, pair, within};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table, plain, span};
use crate::store::StoreArgs;

/// Names the form of the document that `--json` prints.
const SCHEMA: &str = "oncegate.doctor/1";

/// What headers add to a dead letter, at the most: a reason of 1 KiB, and words.
const LETTER_BYTES: u64 = 4 * 1024;

/// Ask store and broker whether they can keep the promise as they are set; each finding comes with its fix
///
/// Changes nothing. Exit code 1: there are findings; 69: something cannot be reached.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,

    /// How long the gates keep completed records
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "7d")]
    retention: Duration,

    /// Kafka's addresses, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT", env = "ONCEGATE_BROKERS")]
    brokers: Option<String>,

    /// A topic that is consumed; may be repeated
    #[arg(long = "topic", value_name = "NAME", requires = "brokers")]
    topics: Vec<String>,

    /// The topic of the dead letters
    #[arg(long, value_name = "NAME", requires = "brokers")]
    dead_letters: Option<String>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair)]
    properties: Vec<(String, String)>,

    /// An SQS queue that is consumed: its URL, or its name
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,

    /// Where SQS is, for a server of one's own: http://127.0.0.1:9324 [default: as the AWS SDK finds it]
    #[arg(long, value_name = "URL", requires = "queue")]
    endpoint_url: Option<String>,

    /// The visibility timeout that the consumer sets in the queue
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "60s")]
    visibility: Duration,

    /// The lease of the gates
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "30s")]
    lease: Duration,

    /// How many attempts a message gets
    #[arg(long, value_name = "N", default_value_t = oncegate::Consumer::DEFAULT_MAX_ATTEMPTS)]
    max_attempts: u32,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// Something that weakens the promise.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// `store`, a topic or a queue.
    what: String,
    found: String,
    /// What to change; empty where the finding says it.
    #[serde(skip_serializing_if = "String::is_empty")]
    fix: String,
    /// It could not even be asked.
    unreachable: bool,
}

/// The answer of `--json`.
#[derive(Debug, Default, Serialize)]
struct Document {
    schema: &'static str,
    /// What was looked at, as it was found.
    looked_at: Vec<String>,
    findings: Vec<Finding>,
}

pub(crate) async fn run(args: &Args) -> Result<Exit, Problem> {
    let document = within(args.answer.timeout, async { Ok(Box::pin(examine(args)).await) }).await?;
    if args.answer.json {
        output::answer_json(&document)?;
    } else {
        output::answer(&text(&document))?;
    }
    Ok(match document.findings.as_slice() {
        [] => Exit::Yes,
        findings if findings.iter().any(|finding| finding.unreachable) => Exit::Unreachable,
        _ => Exit::No,
    })
}

/// Goes on whatever is found: one thing that is away says nothing about the others.
async fn examine(args: &Args) -> Document {
    let mut document = Document { schema: SCHEMA, ..Document::default() };
    args.store(&mut document).await;
    if let Some(brokers) = &args.brokers {
        args.kafka(brokers, &mut document).await;
    }
    if let Some(queue) = &args.queue {
        args.sqs(queue, &mut document).await;
    }
    document
}

impl Document {
    fn finding(&mut self, what: &str, found: impl Into<String>, fix: impl Into<String>) {
        let (what, found, fix) = (what.to_owned(), found.into(), fix.into());
        self.findings.push(Finding { what, found, fix, unreachable: false });
    }

    fn unreachable(&mut self, what: &str, found: impl Into<String>) {
        let (what, found) = (what.to_owned(), found.into());
        self.findings.push(Finding { what, found, fix: String::new(), unreachable: true });
    }

    fn source(&mut self, what: &str, error: &SourceError) {
        let text = Problem::caused(Exit::Unreachable, error).to_string();
        match std::error::Error::source(error) {
            Some(_) => self.unreachable(what, text),
            None => self.finding(what, text, ""),
        }
    }
}

impl Args {
    async fn store(&self, document: &mut Document) {
        let store = match self.store.open().await {
            Ok(store) => store,
            // It names what to change, or that nobody answers.
            Err(problem) => {
                let away = problem.exit() == Exit::Unreachable;
                return if away {
                    document.unreachable("store", problem.to_string());
                } else {
                    document.finding("store", problem.to_string(), "");
                };
            }
        };
        match store.check().await {
            Ok(checkup) => {
                let promise = checkup.survives.promise();
                document.looked_at.push(format!("{}: {promise}", checkup.store));
                checkup.warnings.into_iter().for_each(|warning| document.finding("store", warning, ""));
            }
            Err(StoreError::Refused { reason }) => document.finding("store", &*reason, ""),
            Err(error) => document.unreachable("store", error.to_string()),
        }
    }

    async fn kafka(&self, brokers: &str, document: &mut Document) {
        let topics: Vec<String> = self.topics.iter().chain(&self.dead_letters).cloned().collect();
        let facts = match kafka::describe_topics(brokers, &topics, &self.properties).await {
            Ok(facts) => facts,
            Err(error) => return document.source("kafka", &error),
        };
        let dead = self.dead_letters.as_deref();
        let largest = facts
            .iter()
            .filter(|fact| Some(&*fact.name) != dead)
            .filter_map(|fact| fact.max_message_bytes)
            .max();
        for fact in &facts {
            if fact.partitions == 0 {
                document.finding(&fact.name, "there is no such topic", "create it, or correct its name");
                continue;
            }
            document.looked_at.push(format!(
                "topic {}: {} partitions, {} replicas, kept {}",
                fact.name,
                fact.partitions,
                fact.replicas,
                fact.retention.map_or("for ever".to_owned(), |retention| format!("for {}", span(retention))),
            ));
            durability(fact, document);
            if Some(&*fact.name) == dead {
                self.dead_letters(fact, largest, document);
            } else {
                self.replayable(fact, document);
            }
        }
        if dead.is_none() && !self.topics.is_empty() {
            let fix = "give the consumer a topic of dead letters, and name it here with --dead-letters";
            document.finding(
                "kafka",
                "no topic of dead letters is named: a consumer without one stops at the first message that it must give up",
                fix,
            );
        }
    }

    /// Messages must not outlive their records.
    fn replayable(&self, fact: &TopicFacts, document: &mut Document) {
        let records = span(self.retention);
        let fix = |at_least: &str| {
            format!("raise the gate's `retention` to {at_least}, or lower the topic's `retention.ms`")
        };
        match fact.retention {
            _ if fact.settings_unknown.is_some() => {}
            _ if fact.compacted => document.finding(
                &fact.name,
                format!("it is compacted: the last message of each key stays for ever, and its record for {records}. A replay after that runs it again"),
                "use a new scope for a replay after that time, or replay only what is younger",
            ),
            None => document.finding(
                &fact.name,
                format!("it keeps messages for ever, and records are kept for {records}: a replay of older ones runs them again"),
                fix("the longest replay"),
            ),
            Some(topic) if topic > self.retention => document.finding(
                &fact.name,
                format!(
                    "it keeps messages for {}, and records are kept for {records}: a replay of older ones runs them again",
                    span(topic)
                ),
                fix(&span(topic)),
            ),
            Some(_) => {}
        }
    }

    fn dead_letters(&self, fact: &TopicFacts, largest: Option<u64>, document: &mut Document) {
        let short = fact.retention.is_some_and(|retention| retention < self.retention);
        if short {
            document.finding(
                &fact.name,
                format!(
                    "it keeps dead letters for less than the records of their messages ({})",
                    span(self.retention)
                ),
                "raise its `retention.ms`: what is gone cannot be redriven",
            );
        }
        if fact.compacted {
            document.finding(
                &fact.name,
                "it is compacted: of two dead letters with one key the first is lost",
                "set `cleanup.policy=delete`",
            );
        }
        if let (Some(own), Some(largest)) = (fact.max_message_bytes, largest)
            && own < largest + LETTER_BYTES
        {
            let fix = format!("raise its `max.message.bytes` to {} or more", largest + LETTER_BYTES);
            document.finding(
                &fact.name,
                format!("a dead letter is a little larger than its message: the topics take {largest} bytes, it takes {own}"),
                fix,
            );
        }
    }

    async fn sqs(&self, queue: &str, document: &mut Document) {
        let source = SqsSource::new(queue).visibility(self.visibility);
        let source = match &self.endpoint_url {
            Some(url) => source.endpoint_url(url),
            None => source,
        };
        let mut terms = Terms::default();
        terms.max_attempts = self.max_attempts;
        terms.lease = self.lease;
        terms.retention = self.retention;
        match source.check_queue(&terms).await {
            Ok(warnings) => {
                document.looked_at.push(format!("queue {}", source.queue()));
                warnings.into_iter().for_each(|warning| document.finding(source.queue(), warning, ""));
            }
            Err(error) => document.source(source.queue(), &error),
        }
    }
}

/// Messages, and dead letters, must survive a broker.
fn durability(fact: &TopicFacts, document: &mut Document) {
    if let Some(why) = &fact.settings_unknown {
        let found = format!("its settings cannot be read: {why}");
        document.finding(
            &fact.name,
            found,
            "grant DESCRIBE_CONFIGS on the topic to whoever runs this command",
        );
    }
    match (fact.replicas, fact.min_insync_replicas) {
        (1, _) => document.finding(
            &fact.name,
            "one broker holds it: what it loses, nobody has",
            "three replicas and `min.insync.replicas=2`",
        ),
        (_, Some(1)) => document.finding(
            &fact.name,
            "a message counts as written when one broker has it, whatever the number of replicas",
            "set `min.insync.replicas=2`",
        ),
        _ => {}
    }
}

fn text(document: &Document) -> String {
    let mut table = Table::default();
    document.looked_at.iter().for_each(|what| table.text("found", what));
    table.number("findings", document.findings.len() as u64);
    let mut text = table.render();
    for Finding { what, found, fix, .. } in &document.findings {
        text.push_str(&format!("\n{}: {}\n", plain(what), plain(found)));
        if !fix.is_empty() {
            text.push_str(&format!("  fix: {}\n", plain(fix)));
        }
    }
    text
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
            args: Args,
        }
        let args = Cli::try_parse_from(["x", "--store", "redis://x"]).unwrap().args;
        assert_eq!((args.retention, args.lease), (Gate::DEFAULT_RETENTION, Gate::DEFAULT_LEASE));
    }
}
