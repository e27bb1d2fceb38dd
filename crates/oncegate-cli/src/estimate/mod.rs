//! `oncegate estimate`: estimates what the records of a consumer cost, before it runs.

use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use oncegate::Key;
use oncegate::MemoryStore;
use oncegate::admin::dry_run::DryRun;
use oncegate::core::key::Scope;
use oncegate::kafka::TopicReader;
use serde::Serialize;

use crate::args::{AnswerArgs, KEY_FORMS, KEY_HELP, within};
use crate::config::format::Format;
use crate::examined::formatted;
use crate::exit::{Exit, Problem, not_opened};
use crate::output::{self, Table, counted, grouped, span};
use crate::parse::{duration, pair};

mod redis;

use redis::Memory;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.estimate/1";

/// Server CPU for a claim and a completion, in microseconds, without and with a fencing token:
/// `scripts/bench server_cpu`.
const REDIS_PAIR_MICROS: f64 = 8.7;
const REDIS_PAIR_FENCED_MICROS: f64 = 10.3;
/// Server CPU for a claim that is answered "completed", in microseconds.
const REDIS_CLAIM_MICROS: f64 = 4.0;
/// The size of a row in an SQL table with its index entry, without its result, in bytes.
const SQL_ROW_BYTES: u64 = 180;
/// The most messages in one call to SQS.
const SQS_BATCH: f64 = 10.0;
/// SQS bills a call once for each of these.
const SQS_CALL_BYTES: u64 = 64 * 1024;
const SECONDS_A_MONTH: f64 = 30.0 * 86_400.0;
/// A sample that covers less time than this says little about the load of a day.
const SHORT_SAMPLE: Duration = Duration::from_secs(3_600);
/// The most messages that a sample reads.
const SAMPLE_MOST: u64 = 10_000_000;

/// Estimate what records cost: memory, server CPU, calls to SQS
///
/// The estimate needs a rate, a retention and the size of a result. A sample of a topic can replace
/// the rate and the share of duplicates; it should cover a day, and an hour at least. No store is
/// used.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("how_many").required(true).args(["rate", "keys", "sample"])))]
pub(crate) struct EstimateArgs {
    /// Messages a second
    #[arg(long, value_name = "N")]
    rate: Option<f64>,

    /// The number of records at a time, whatever the rate
    #[arg(long, value_name = "N")]
    keys: Option<u64>,

    /// Take rate and share of duplicates from this topic
    #[arg(long, value_name = "TOPIC", requires_all = ["brokers", "key"])]
    sample: Option<String>,

    /// Kafka's addresses for the sample, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT", env = "ONCEGATE_BROKERS")]
    brokers: Option<String>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair)]
    properties: Vec<(String, String)>,

    #[arg(long, value_name = "SPEC", env = "ONCEGATE_KEY", help = KEY_HELP, long_help = KEY_FORMS)]
    key: Option<Key>,

    /// The format of payloads that are not JSON: registry:URL, avro:FILE, protobuf:FILE#MESSAGE,
    /// gzip, zstd or base64
    #[arg(long, value_name = "FORMAT", requires = "sample")]
    format: Option<Format>,

    /// The share of messages that are no duplicates, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0, value_parser = percent)]
    unique: f64,

    /// How long completed records are kept
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "7d")]
    retention: Duration,

    /// The size of a stored result, encoding included
    #[arg(long, value_name = "BYTES", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=65_536))]
    result_bytes: u64,

    /// The size of a message, for SQS
    #[arg(long, value_name = "BYTES", default_value_t = 1_024, value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    message_bytes: u64,

    /// The scope, which is a part of every key
    #[arg(
        long,
        value_name = "NAME",
        env = "ONCEGATE_SCOPE",
        default_value = "billing"
    )]
    scope: Scope,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Debug, Serialize)]
struct EstimateDocument {
    schema: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<Sample>,
    /// Messages per second; absent when only the number of records is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<f64>,
    unique_percent: f64,
    /// Records at a time.
    keys: u64,
    redis: Memory,
    sql_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    flow: Option<Flow>,
}

/// The results of a sample.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    messages: u64,
    distinct_keys: u64,
    seconds: f64,
    message_bytes: u64,
    /// `true` if it covers so little time that the estimate is a mere extrapolation.
    short: bool,
}

/// The figures that depend on the rate.
#[derive(Clone, Copy, Debug, Serialize)]
struct Flow {
    /// The share of one core of the Redis server, in percent.
    redis_cpu_percent: f64,
    redis_cpu_percent_fenced: f64,
    /// Calls a month when every call is full, and when each has one message.
    sqs_calls_a_month_least: u64,
    sqs_calls_a_month_most: u64,
}

pub(crate) async fn run(args: &EstimateArgs) -> Result<Exit, Problem> {
    let sample = within(args.answer.timeout, sample(args)).await?;
    let document = args.estimate(sample)?;
    if args.answer.json {
        output::answer_json(&document)?;
    } else {
        output::answer(&args.text(&document))?;
    }
    Ok(Exit::Yes)
}

/// Reads the topic, up to a limit.
async fn sample(args: &EstimateArgs) -> Result<Option<Sample>, Problem> {
    let (Some(topic), Some(brokers)) = (&args.sample, &args.brokers) else {
        return Ok(None);
    };
    let Some(key) = formatted(args.key.clone(), args.format.as_ref())? else {
        return Ok(None);
    };
    let store = Arc::new(MemoryStore::new());
    let mut examination = DryRun::new(args.scope.as_str(), key, store).open().await?;
    let reader = TopicReader::open(brokers, topic, args.properties.iter().cloned()).await;
    let mut reader = reader.map_err(|error| not_opened(&error))?;
    let mut messages = 0_u64;
    let mut bytes = 0_u64;
    let mut first = i64::MAX;
    let mut last = i64::MIN;
    while let Some(batch) = reader.next_batch().await? {
        for message in &batch {
            bytes += message.payload().len() as u64;
            // 0 is what producers send that set no timestamp.
            if let Some(at) = message.timestamp_ms().filter(|at| *at > 0) {
                first = first.min(at);
                last = last.max(at);
            }
        }
        messages += batch.len() as u64;
        examination.add(batch).await?;
        if messages >= SAMPLE_MOST {
            break;
        }
    }
    let report = examination.finish().await?;
    let seconds =
        Duration::from_millis(u64::try_from(last.saturating_sub(first)).unwrap_or(0)).as_secs_f64();
    if messages < 2 || seconds <= 0.0 {
        let text = format!(
            "{topic} has {} within {seconds} s: too little for a rate. Set --rate",
            counted(messages, "message")
        );
        return Err(Problem::new(Exit::BadData, text));
    }
    let message_bytes = bytes / messages;
    let short = seconds < SHORT_SAMPLE.as_secs_f64();
    Ok(Some(Sample {
        messages,
        distinct_keys: report.distinct_keys,
        seconds,
        message_bytes,
        short,
    }))
}

impl EstimateArgs {
    fn estimate(&self, sample: Option<Sample>) -> Result<EstimateDocument, Problem> {
        let rate = match sample {
            Some(sample) => Some(sample.messages as f64 / sample.seconds),
            None => self.rate,
        };
        if rate.is_some_and(|rate| !(rate > 0.0 && rate <= 1e9)) {
            return Err(Problem::new(
                Exit::Usage,
                "--rate must be above zero, and at most a thousand million",
            ));
        }
        let unique = match sample {
            Some(sample) => sample.distinct_keys as f64 / sample.messages as f64,
            None => self.unique / 100.0,
        };
        let by_rate = rate.map(|rate| (rate * unique * self.retention.as_secs_f64()).ceil() as u64);
        let keys = self.keys.or(by_rate).unwrap_or(0);
        let bytes = sample.map_or(self.message_bytes, |sample| sample.message_bytes);
        Ok(EstimateDocument {
            schema: SCHEMA,
            sample,
            rate,
            unique_percent: unique * 100.0,
            keys,
            redis: Memory::of(keys, self.scope.as_str().len() as u64, self.result_bytes),
            sql_bytes: keys * (SQL_ROW_BYTES + self.result_bytes),
            flow: rate.map(|rate| Flow::of(rate, unique, bytes)),
        })
    }

    fn tell_sample(&self, sample: &Sample, table: &mut Table) {
        let took = span(Duration::from_secs_f64(sample.seconds));
        table.text(
            "sample",
            format!("{} within {took}", counted(sample.messages, "message")),
        );
        if sample.short {
            let kept = span(self.retention);
            let text = format!(
                "{took} are extrapolated to {kept}: take a topic with more than {} of messages, or set --rate",
                span(SHORT_SAMPLE)
            );
            table.text("warning", text);
        }
    }

    fn text(&self, document: &EstimateDocument) -> String {
        let mut table = Table::default();
        if let Some(sample) = &document.sample {
            self.tell_sample(sample, &mut table);
        }
        if let Some(rate) = document.rate {
            table.text(
                "rate",
                format!(
                    "{rate:.1} messages/s, {:.1} % of them unique",
                    document.unique_percent
                ),
            );
        }
        let kept = format!(
            "{} kept for {}",
            grouped(document.keys),
            span(self.retention)
        );
        table.text("records", kept);
        table.text(
            "redis",
            format!("{} bytes a record", document.redis.bytes_per_key),
        );
        table.text("  steady", size(document.redis.steady_bytes));
        table.text(
            "  peak",
            format!("{}, while its tables grow", size(document.redis.peak_bytes)),
        );
        table.text(
            "  maxmemory",
            format!(
                "{}, with `noeviction`",
                size(document.redis.maxmemory_bytes)
            ),
        );
        table.text(
            "  machine",
            format!(
                "{}, with room to rewrite its file",
                size(document.redis.machine_bytes)
            ),
        );
        if let Some(flow) = &document.flow {
            let plain = flow.redis_cpu_percent;
            let fenced = flow.redis_cpu_percent_fenced;
            table.text(
                "  cpu",
                format!("{plain:.1} % of a core; {fenced:.1} % with fencing tokens"),
            );
        }
        table.text(
            "sql",
            format!(
                "{} on the disk, and as much again written as log",
                size(document.sql_bytes)
            ),
        );
        if let Some(flow) = &document.flow {
            let least = flow.sqs_calls_a_month_least;
            let most = flow.sqs_calls_a_month_most;
            table.text(
                "sqs",
                format!("{} to {} calls a month", grouped(least), grouped(most)),
            );
        }
        table.render()
    }
}

fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

impl Flow {
    fn of(rate: f64, unique: f64, message_bytes: u64) -> Self {
        let cpu =
            |pair: f64| rate * (unique * pair + (1.0 - unique) * REDIS_CLAIM_MICROS) / 10_000.0;
        let month = rate * SECONDS_A_MONTH;
        // Received and deleted; a receive counts by its size.
        let whole = message_bytes.div_ceil(SQS_CALL_BYTES) as f64;
        let full = (SQS_BATCH * message_bytes as f64 / SQS_CALL_BYTES as f64)
            .ceil()
            .max(1.0);
        Self {
            redis_cpu_percent: cpu(REDIS_PAIR_MICROS),
            redis_cpu_percent_fenced: cpu(REDIS_PAIR_FENCED_MICROS),
            sqs_calls_a_month_least: (month / SQS_BATCH * (full + 1.0)) as u64,
            sqs_calls_a_month_most: (month * (whole + 1.0)) as u64,
        }
    }
}

/// More than 0, and at most 100.
fn percent(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "it must be a number".to_owned())?;
    if number > 0.0 && number <= 100.0 {
        Ok(number)
    } else {
        Err("it must be above 0 and at most 100".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_come_in_tens_and_by_size() {
        let flow = Flow::of(100.0, 1.0, 1_024);
        // 259,200,000 messages a month: one receive and one delete for ten of them, or for each.
        assert_eq!(
            (flow.sqs_calls_a_month_least, flow.sqs_calls_a_month_most),
            (51_840_000, 518_400_000)
        );
        let large = Flow::of(100.0, 1.0, 128 * 1024);
        assert_eq!(large.sqs_calls_a_month_most, 777_600_000);
        assert!(large.sqs_calls_a_month_least > flow.sqs_calls_a_month_least);
    }

    #[test]
    fn duplicates_cost_a_claim() {
        let unique = Flow::of(1_000.0, 1.0, 1);
        let half = Flow::of(1_000.0, 0.5, 1);
        assert!(
            (unique.redis_cpu_percent - 0.87).abs() < 1e-9
                && (half.redis_cpu_percent - 0.635).abs() < 1e-9
        );
    }
}
