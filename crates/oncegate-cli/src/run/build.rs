//! Builds the sources, stores, gates and consumers that a configuration describes.

use std::sync::Arc;
use std::time::Duration;

use oncegate::consumer::{BadKeys, Breaker, DeadLetterLimit, ReturnedLetters};
use oncegate::core::store::Store;
use oncegate::dead_letters::DeadLetters;
use oncegate::journal::FileJournal;
use oncegate::kafka::{KafkaDeadLetters, KafkaRetries, KafkaSource};
use oncegate::results::ObjectResults;
use oncegate::source::{Source, SourceError, Terms};
use oncegate::sqs::{Body, SqsDeadLetters, SqsSource};
use oncegate::{
    Attempt, Backoff, BatchHandler, BatchLimits, BatchMessage, Batched, Consumer, Failure, Gate, Key,
    Message, OnStoreLoss, Ordering,
};

use super::dead_letter_file::DeadLetterFile;
use super::stdin::{Input, STDIN};
use crate::config::shape::{self, StartAt};
use crate::config::values::{KeySetting, Property, Secret, Size, Time};

/// Brokers get this time to answer, however impatient the start is.
const OPEN_TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// A source of any kind.
pub(crate) enum AnySource {
    Kafka(KafkaSource),
    Retries(KafkaRetries),
    Sqs(SqsSource),
    Stdin(Input),
}

impl AnySource {
    /// # Errors
    /// When the file or variable of a secret cannot be read, or the configuration names no source.
    pub(crate) fn of(name: &str, source: &shape::Source) -> Result<Self, String> {
        Self::opened_within(KafkaSource::DEFAULT_OPEN_TIMEOUT, name, source)
    }

    /// The same for a start that waits for its servers no longer than `patience`.
    pub(crate) fn opened_within(
        patience: Duration,
        name: &str,
        source: &shape::Source,
    ) -> Result<Self, String> {
        match source {
            shape::Source { kafka: Some(kafka), .. } => {
                let limit = patience.clamp(OPEN_TIMEOUT_MIN, KafkaSource::DEFAULT_OPEN_TIMEOUT);
                Ok(with_retries(kafka_source(name, kafka)?.open_timeout(limit), kafka))
            }
            shape::Source { sqs: Some(sqs), .. } => Ok(Self::Sqs(sqs_source(sqs))),
            shape::Source { stdin: Some(stdin), .. } => {
                Ok(Self::Stdin(Input::standard(stdin.route.clone().unwrap_or_else(|| STDIN.to_owned()))))
            }
            shape::Source { .. } => Err("the source is none of `kafka`, `sqs` and `stdin`".to_owned()),
        }
    }

    /// Whether a password or token would be sent to another machine in plain text.
    pub(crate) fn shows_login(&self) -> bool {
        match self {
            Self::Kafka(source) => source.shows_login(),
            Self::Retries(source) => source.shows_login(),
            Self::Sqs(_) | Self::Stdin(_) => false,
        }
    }

    fn check(&self) -> Result<(), String> {
        match self {
            Self::Kafka(source) => source.check(),
            Self::Retries(source) => source.check(),
            Self::Sqs(source) => source.check(),
            Self::Stdin(_) => return Ok(()),
        }
        .map_err(|error| error.to_string())
    }

    /// Checks on the servers that the topics or the queue exist, as opening does.
    pub(super) async fn check_servers(&self) -> Result<(), SourceError> {
        match self {
            Self::Kafka(source) => source.check_topics().await,
            Self::Retries(source) => source.check_topics().await,
            Self::Sqs(source) => source.check_queue(&Terms::default()).await.map(drop),
            Self::Stdin(_) => Ok(()),
        }
    }

    /// Standard input, if that is the source.
    pub(super) fn input(&self) -> Option<Input> {
        match self {
            Self::Stdin(input) => Some(input.clone()),
            Self::Kafka(_) | Self::Retries(_) | Self::Sqs(_) => None,
        }
    }

    /// The dead-letter topic, queue or file, reached as the source is.
    pub(crate) fn dead_letters(&self, to: &shape::DeadLetters) -> Option<Arc<dyn DeadLetters>> {
        match (self, to) {
            (Self::Kafka(source), shape::DeadLetters { kafka: Some(topic), .. }) => {
                let letters: KafkaDeadLetters = source.dead_letters(topic.clone());
                Some(Arc::new(letters))
            }
            (Self::Retries(source), shape::DeadLetters { kafka: Some(topic), .. }) => {
                Some(Arc::new(source.dead_letters(topic.clone())))
            }
            (Self::Sqs(source), shape::DeadLetters { sqs: Some(queue), .. }) => {
                Some(Arc::new(source.dead_letters(queue.clone())))
            }
            (Self::Kafka(_) | Self::Retries(_), shape::DeadLetters { sqs: Some(queue), .. }) => {
                Some(Arc::new(SqsDeadLetters::new(queue.clone())))
            }
            (Self::Stdin(_), shape::DeadLetters { file: Some(path), .. }) => {
                Some(Arc::new(DeadLetterFile::new(path)))
            }
            _ => None,
        }
    }

    pub(crate) fn shared(self) -> Arc<dyn Source> {
        match self {
            Self::Kafka(source) => Arc::new(source),
            Self::Retries(source) => Arc::new(source),
            Self::Sqs(source) => Arc::new(source),
            Self::Stdin(input) => Arc::new(input),
        }
    }
}

/// The source as far as it can be checked without its broker; secrets are not read. `None` when the source is
/// incomplete.
pub(crate) fn check_source(name: &str, source: &shape::Source) -> Result<Option<AnySource>, String> {
    let mut source = source.clone();
    if let Some(kafka) = &mut source.kafka {
        if kafka.brokers.is_none() || kafka.topics.is_none() {
            // That is reported already.
            return Ok(None);
        }
        let unread = |Property(value): &mut Property| {
            if let Secret::Env(_) = value {
                *value = Secret::Literal(value.resolve().unwrap_or_default());
            }
        };
        kafka.properties.values_mut().for_each(unread);
    }
    let source = AnySource::of(name, &source)?;
    source.check()?;
    Ok(Some(source))
}

fn kafka_source(name: &str, kafka: &shape::Kafka) -> Result<KafkaSource, String> {
    let names = |names: &Option<crate::config::values::Names>| names.clone().unwrap_or_default().0;
    let group = kafka.group.clone().unwrap_or_else(|| name.to_owned());
    let mut source = KafkaSource::new(names(&kafka.brokers).join(","), group, names(&kafka.topics));
    if let Some(member) = &kafka.static_member {
        source = source.static_member(member);
    }
    if let Some(Time(interval)) = kafka.commit_interval {
        source = source.commit_interval(interval);
    }
    if let Some(Time(timeout)) = kafka.drain_timeout {
        source = source.drain_timeout(timeout);
    }
    if let Some(messages) = kafka.unfinished_messages {
        source = source.unfinished_messages(messages);
    }
    if kafka.from == Some(StartAt::End) {
        source = source.from_end();
    }
    if kafka.routes_from_headers == Some(true) {
        source = source.routes_from_headers();
    }
    if kafka.keep_positions_of_recreated_topics == Some(true) {
        source = source.keep_positions_of_recreated_topics();
    }
    for (property, Property(value)) in &kafka.properties {
        source = match value {
            Secret::File(path) => source.property_file(property, path),
            other => source.property(property, other.resolve().map_err(|why| format!("{property}: {why}"))?),
        };
    }
    Ok(source)
}

fn with_retries(source: KafkaSource, kafka: &shape::Kafka) -> AnySource {
    if kafka.retry_topics.is_empty() {
        return AnySource::Kafka(source);
    }
    let source = source.retry_topics(kafka.retry_topics.iter().map(|(topic, Time(wait))| (*wait, topic)));
    AnySource::Retries(match kafka.retry_beyond {
        Some(Time(limit)) => source.beyond(limit),
        None => source,
    })
}

pub(crate) fn sqs_source(sqs: &shape::Sqs) -> SqsSource {
    let mut source = SqsSource::new(sqs.queue.clone().unwrap_or_default());
    if let Some(region) = &sqs.region {
        source = source.region(region);
    }
    if let Some(url) = &sqs.endpoint_url {
        source = source.endpoint_url(url);
    }
    if let Some(Time(visibility)) = sqs.visibility {
        source = source.visibility(visibility);
    }
    if let Some(Time(wait)) = sqs.wait {
        source = source.wait(wait);
    }
    if sqs.body == Some(shape::SqsBody::Sns) {
        source = source.body(Body::Sns);
    }
    if sqs.routes_from_attributes == Some(true) {
        source = source.routes_from_attributes();
    }
    source
}

/// The key of a consumer with its format; `None` without a key.
///
/// # Errors
/// When a file or secret of the format cannot be read.
pub(crate) fn key(consumer: &shape::Consumer) -> Result<Option<Key>, String> {
    let Some(KeySetting(key)) = consumer.key.clone() else { return Ok(None) };
    match &consumer.format {
        Some(format) => format.apply(key).map(Some).map_err(|why| format!("`format`: {why}")),
        None => Ok(Some(key)),
    }
}

/// The gate of a consumer; `None` without a key. Settings that are not given have the library's defaults.
///
/// # Errors
/// When a file or secret of the format cannot be read.
pub(crate) fn gate(
    name: &str,
    consumer: &shape::Consumer,
    store: impl Store + 'static,
) -> Result<Option<Gate>, String> {
    let key = key(consumer)?;
    Ok(key.map(|key| with_gate_settings(Gate::new(name, key, store), consumer)))
}

/// Applies every setting of a consumer that concerns its gate, without files of its own.
pub(crate) fn with_gate_settings(mut gate: Gate, consumer: &shape::Consumer) -> Gate {
    if let Some(Time(lease)) = consumer.lease {
        gate = gate.lease(lease);
    }
    if let Some(Time(max_run)) = consumer.max_run {
        gate = gate.max_run(max_run);
    }
    if let Some(Time(retention)) = consumer.retention {
        gate = gate.retention(retention);
    }
    if let Some(fingerprint) = &consumer.fingerprint {
        gate = gate.fingerprint(fingerprint.0.clone());
    }
    if consumer.on_store_loss == Some(shape::OnStoreLoss::Continue) {
        gate = gate.on_store_loss(OnStoreLoss::Continue);
    }
    if consumer.fenced == Some(true) {
        gate = gate.fenced();
    }
    if let Some(Size(bytes)) = consumer.max_result {
        gate = gate.max_result_bytes(bytes);
    }
    if let Some(Size(bytes)) = consumer.max_large_result {
        gate = gate.max_large_result_bytes(bytes);
    }
    gate
}

/// The gate with its result store and its journal.
///
/// # Errors
/// When the folder or file cannot be created or opened.
pub(crate) fn with_files(mut gate: Gate, consumer: &shape::Consumer) -> Result<Gate, String> {
    if let Some(folder) = &consumer.large_results {
        let results = ObjectResults::folder(folder).map_err(|error| format!("`large_results`: {error}"))?;
        gate = gate.large_results(results);
    }
    if let Some(path) = &consumer.journal {
        let journal = FileJournal::open(path);
        gate = gate.journal(journal.map_err(|error| format!("`journal`: {}: {error}", path.display()))?);
    }
    Ok(gate)
}

/// Applies every setting of a consumer that does not concern its source, gate or handler.
pub(crate) fn with_settings(mut consumer: Consumer, settings: &shape::Consumer) -> Consumer {
    if let Some(attempts) = settings.max_attempts {
        consumer = consumer.max_attempts(attempts);
    }
    if let Some(concurrency) = settings.concurrency {
        consumer = consumer.concurrency(concurrency);
    }
    if let Some(limit) = settings.tenant_limit {
        consumer = consumer.tenant_limit(limit);
    }
    let ordering = settings.ordering.map(|ordering| match ordering {
        shape::Ordering::Key => Ordering::Key,
        shape::Ordering::Partition => Ordering::Partition,
        shape::Ordering::Unordered => Ordering::Unordered,
    });
    if let Some(ordering) = ordering {
        consumer = consumer.ordering(ordering);
    }
    if settings.overtaking_retries == Some(true) {
        consumer = consumer.overtaking_retries();
    }
    if let Some(Time(patience)) = settings.fail_open_after {
        consumer = consumer.fail_open_after(patience);
    }
    if settings.in_flight_messages.is_some() || settings.in_flight_bytes.is_some() {
        let bytes = settings.in_flight_bytes.map_or(Consumer::DEFAULT_IN_FLIGHT_BYTES, |Size(bytes)| bytes);
        let messages = settings.in_flight_messages.unwrap_or(Consumer::DEFAULT_IN_FLIGHT_MESSAGES);
        consumer = consumer.in_flight(messages, bytes);
    }
    if settings.strictness == Some(shape::Strictness::Refuse) {
        consumer = consumer.bad_keys(BadKeys::Refuse);
    }
    if settings.returned_letters == Some(shape::ReturnedLetters::WriteBack) {
        consumer = consumer.returned_letters(ReturnedLetters::WriteBack);
    }
    if let Some(Time(patience)) = settings.start_patience {
        consumer = consumer.start_patience(patience);
    }
    if let Some(Time(deadline)) = settings.stop_deadline {
        consumer = consumer.stop_deadline(deadline);
    }
    if let Some(flood) = &settings.dead_letter_limit {
        let DeadLetterLimit { in_a_row, share } = DeadLetterLimit::default();
        let limit = DeadLetterLimit {
            in_a_row: flood.in_a_row.unwrap_or(in_a_row),
            share: flood.share.unwrap_or(share),
        };
        consumer = consumer.dead_letter_limit(limit);
    }
    consumer = match &settings.breaker {
        None => consumer,
        Some(shape::BreakerLimits { on: Some(false), .. }) => consumer.without_breaker(),
        Some(limits) => consumer.breaker(breaker(limits)),
    };
    consumer.backoff(backoff(settings))
}

/// The limits of batches; `None` when messages are handled one by one.
pub(crate) fn batch_limits(settings: &shape::Consumer) -> Option<BatchLimits> {
    let given = settings.batch.as_ref()?;
    let mut limits = BatchLimits::new(given.messages.unwrap_or(shape::Batch::DEFAULT_MESSAGES));
    if let Some(Size(bytes)) = given.bytes {
        limits = limits.bytes(bytes);
    }
    if let Some(Time(wait)) = given.wait {
        limits = limits.wait(wait);
    }
    Some(limits)
}

/// The waits between attempts.
pub(crate) fn backoff(settings: &shape::Consumer) -> Backoff {
    let given = settings.backoff.clone().unwrap_or_default();
    waits(given.first, given.most, Consumer::DEFAULT_BACKOFF)
}

fn breaker(limits: &shape::BreakerLimits) -> Breaker {
    let Breaker { keys, share, pause } = Breaker::DEFAULT;
    Breaker {
        keys: limits.keys.unwrap_or(keys),
        share: limits.share.unwrap_or(share),
        pause: waits(limits.first, limits.most, pause),
    }
}

fn waits(first: Option<Time>, most: Option<Time>, default: Backoff) -> Backoff {
    let or = |time: Option<Time>, default: Duration| time.map_or(default, |Time(time)| time);
    Backoff::new(or(first, default.first()), or(most, default.most()))
}

/// Lets the library check the settings of a consumer. Connects to nothing.
pub(crate) fn check(consumer: &shape::Consumer, source: Option<AnySource>, gate: Gate) -> Result<(), String> {
    let none = || AnySource::Kafka(KafkaSource::new("", "", [""]));
    let source = source.unwrap_or_else(none).shared();
    let nothing = async |_: Message, _: Attempt| Ok::<(), Failure>(());
    let built = match batch_limits(consumer) {
        None => Consumer::new(source, gate, nothing),
        Some(limits) => Consumer::new(source, gate, Batched::new(limits, Unused)),
    };
    with_settings(built, consumer).check().map_err(|error| error.to_string())
}

/// The batch handler of a consumer that is checked and never runs.
struct Unused;

impl BatchHandler for Unused {
    type Output = ();

    async fn handle(&self, _: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
        Err(Failure::not_run("the consumer is only checked"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_recreated_topics_are_kept_where_that_is_set() {
        let key = |line: &str| {
            let kafka: shape::Kafka =
                toml::from_str(&format!("brokers = \"b:9092\"\ntopics = [\"orders\"]\n{line}")).unwrap();
            format!("{:?}", kafka_source("billing", &kafka).unwrap())
        };
        assert!(key("").contains("keeps_positions: false"), "{}", key(""));
        let set = key("keep_positions_of_recreated_topics = true");
        assert!(set.contains("keeps_positions: true"), "{set}");
    }
}
