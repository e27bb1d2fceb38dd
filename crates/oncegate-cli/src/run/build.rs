//! Builds the gates and consumers that a configuration describes.

use oncegate::consumer::{BadKeys, Breaker, DeadLetterLimit, ReturnedLetters};
use oncegate::core::store::Store;
use oncegate::journal::FileJournal;
use oncegate::results::ObjectResults;
use oncegate::{
    Attempt, Backoff, BatchHandler, BatchLimits, BatchMessage, Batched, Consumer, Documents,
    Failure, Gate, Key, Message, OnStoreLoss, Ordering,
};

use crate::config::format::Deliver;
use crate::config::shape;
use crate::config::values::{KeySetting, Size, Time};
use crate::sources::ConfiguredSource;
use crate::sources::input::{Input, STDIN};

/// The key of a consumer with its format; `None` without a key.
///
/// # Errors
/// When a file or secret of the format cannot be read.
pub(crate) fn key(consumer: &shape::Consumer) -> Result<Option<Key>, String> {
    let Some(KeySetting(key)) = consumer.key.clone() else {
        return Ok(None);
    };
    let key = match &consumer.route {
        Some(route) => route.apply(key),
        None => key,
    };
    match &consumer.format {
        Some(format) => format
            .apply(key)
            .map(Some)
            .map_err(|why| format!("`format`: {why}")),
        None => Ok(Some(key)),
    }
}

/// Makes the documents of a consumer; `None` if its workers get the payloads as they came.
///
/// # Errors
/// When the key or its format cannot be used; the text names the setting.
pub(crate) fn documents(consumer: &shape::Consumer) -> Result<Option<Documents>, String> {
    let deliver = consumer.format.as_ref().and_then(|format| format.deliver);
    if deliver != Some(Deliver::Json) {
        return Ok(None);
    }
    let Some(key) = key(consumer)? else {
        return Ok(None);
    };
    Documents::new(&key)
        .map(Some)
        .map_err(|error| format!("`key`: {error}"))
}

/// The gate of a consumer; `None` without a key. Settings that are not given have the library's
/// defaults.
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
        let results =
            ObjectResults::folder(folder).map_err(|error| format!("`large_results`: {error}"))?;
        gate = gate.large_results(results);
    }
    if let Some(path) = &consumer.journal {
        let journal = FileJournal::open(path);
        gate = gate
            .journal(journal.map_err(|error| format!("`journal`: {}: {error}", path.display()))?);
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
        let bytes = settings
            .in_flight_bytes
            .map_or(Consumer::DEFAULT_IN_FLIGHT_BYTES, |Size(bytes)| bytes);
        let messages = settings
            .in_flight_messages
            .unwrap_or(Consumer::DEFAULT_IN_FLIGHT_MESSAGES);
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
        Some(shape::BreakerLimits {
            on: Some(false), ..
        }) => consumer.without_breaker(),
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
    Backoff::new(
        first.map_or(default.first(), |Time(time)| time),
        most.map_or(default.most(), |Time(time)| time),
    )
}

/// Lets the library check the settings of a consumer. Connects to nothing.
pub(crate) fn check(
    consumer: &shape::Consumer,
    source: Option<Box<dyn ConfiguredSource>>,
    gate: Gate,
) -> Result<(), String> {
    let source = source
        .unwrap_or_else(|| Box::new(Input::standard(STDIN)))
        .into_source();
    let nothing = async |_: Message, _: Attempt| Ok::<(), Failure>(());
    let built = match batch_limits(consumer) {
        None => Consumer::new(source, gate, nothing),
        Some(limits) => Consumer::new(source, gate, Batched::new(limits, Unused)),
    };
    with_settings(built, consumer)
        .check()
        .map_err(|error| error.to_string())
}

/// The batch handler of a consumer that is checked and never runs.
struct Unused;

impl BatchHandler for Unused {
    type Output = ();

    async fn handle(&self, _: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
        Err(Failure::not_run("the consumer is only checked"))
    }
}
