//! A span for each run of a handler and for each answered duplicate, named by OpenTelemetry's
//! conventions for messaging (1.44). It costs nothing without a subscriber, and contains no
//! payloads and no business fields of keys.

use oncegate_core::key::StoreKey;
use tracing::field::{Empty, display};
use tracing::{Span, info_span};

#[cfg(feature = "otel")]
use super::settings::TraceParent;
use crate::batch::BatchMessage;
use crate::gate::Lease;
use crate::message::{Message, Origin};
use crate::observe::RunOutcome;

/// The target of these spans, for filters.
const TARGET: &str = "oncegate::process";

/// The number of hex digits of a key's digest in a span.
const DIGEST_DIGITS: usize = 16;

/// Makes the spans of messages.
#[derive(Debug)]
pub(super) struct Spans {
    /// The source's consumer group.
    pub(super) group: Option<String>,
    #[cfg(feature = "otel")]
    pub(super) trace_parent: TraceParent,
}

impl Spans {
    /// The span of a run.
    pub(super) fn run(&self, lease: &Lease) -> Span {
        let span = self.process(lease.message(), lease.store_key(), "granted");
        if !span.is_disabled() {
            span.record("oncegate.attempt", lease.attempt().number());
            span.record("oncegate.recovered", lease.attempt().recovered());
            if let Some(fencing_token) = lease.attempt().fencing_token() {
                span.record("oncegate.fencing_token", fencing_token);
            }
        }
        span
    }

    /// The span of a run without a claim.
    pub(super) fn unclaimed(&self, message: &Message, key: &StoreKey) -> Span {
        let span = self.process(message, key, "granted");
        if !span.is_disabled() {
            span.record("oncegate.attempt", 1);
            span.record("oncegate.recovered", false);
        }
        span
    }

    /// The span of a duplicate's answer.
    pub(super) fn answer(&self, message: &Message, key: &StoreKey) -> Span {
        self.process(message, key, "completed")
    }

    fn process(&self, message: &Message, key: &StoreKey, verdict: &'static str) -> Span {
        let span = info_span!(
            target: TARGET,
            "process",
            otel.name = format!("process {}", destination(message)),
            otel.kind = "consumer",
            otel.status_code = Empty,
            messaging.operation.name = "process",
            messaging.operation.type = "process",
            messaging.system = system(message),
            messaging.destination.name = destination(message),
            messaging.destination.partition.id = Empty,
            messaging.consumer.group.name = self.group.as_deref(),
            messaging.kafka.offset = Empty,
            messaging.kafka.message.tombstone = Empty,
            messaging.message.id = Empty,
            messaging.message.body.size = message.payload().len(),
            oncegate.scope = key.scope(),
            oncegate.key = Empty,
            oncegate.verdict = verdict,
            oncegate.attempt = Empty,
            oncegate.recovered = Empty,
            oncegate.fencing_token = Empty,
            oncegate.outcome = Empty,
            error.type = Empty,
        );
        if span.is_disabled() {
            return span;
        }
        let digest = key.digest().to_string();
        span.record(
            "oncegate.key",
            digest.get(..DIGEST_DIGITS).unwrap_or(&digest),
        );
        match message.origin() {
            Origin::Kafka {
                partition, offset, ..
            } => {
                span.record("messaging.destination.partition.id", display(partition));
                span.record("messaging.kafka.offset", offset);
                if message.is_tombstone() {
                    span.record("messaging.kafka.message.tombstone", true);
                }
            }
            Origin::Queue { id, .. } => {
                span.record("messaging.message.id", &**id);
            }
            Origin::Other(_) => {}
        }
        #[cfg(feature = "otel")]
        join(&span, message, self.trace_parent);
        span
    }
}

/// The span of one call of a batch handler, linked to the producers of its messages. Each of them
/// has a span of its own.
pub(super) fn batch(scope: &str, batch: &[BatchMessage]) -> Span {
    let first = batch.first().map(BatchMessage::message);
    let destination = first
        .map(destination)
        .filter(|name| has_one_destination(batch, name));
    let span = info_span!(
        target: TARGET,
        "process batch",
        otel.name = destination.map_or("process".to_owned(), |name| format!("process {name}")),
        otel.kind = "consumer",
        otel.status_code = Empty,
        messaging.operation.name = "process",
        messaging.operation.type = "process",
        messaging.system = first.and_then(system),
        messaging.destination.name = destination,
        messaging.batch.message_count = batch.len(),
        oncegate.scope = scope,
        oncegate.outcome = Empty,
        error.type = Empty,
    );
    #[cfg(feature = "otel")]
    if !span.is_disabled() {
        batch
            .iter()
            .for_each(|one| join(&span, one.message(), TraceParent::Link));
    }
    span
}

fn has_one_destination(batch: &[BatchMessage], name: &str) -> bool {
    batch.iter().all(|one| destination(one.message()) == name)
}

/// Records in the span of a run, or of a batch, how its handler ended.
pub(super) fn ended(span: &Span, outcome: RunOutcome) {
    if span.is_disabled() {
        return;
    }
    span.record("oncegate.outcome", outcome.as_str());
    // A message that its handler wants later has not failed.
    if !matches!(outcome, RunOutcome::Succeeded | RunOutcome::Later) {
        span.record("error.type", outcome.as_str());
        span.record("otel.status_code", "ERROR");
    }
}

/// Returns the name of the message's broker in the conventions.
fn system(message: &Message) -> Option<&'static str> {
    match message.origin() {
        Origin::Kafka { .. } => Some("kafka"),
        Origin::Queue { .. } | Origin::Other(_) => message.broker().map(|broker| broker.system),
    }
}

/// Returns the topic or queue; for anything else, the route.
fn destination(message: &Message) -> &str {
    match message.origin() {
        Origin::Kafka { topic, .. } => topic,
        Origin::Queue { queue, .. } => queue,
        Origin::Other(_) => message.route(),
    }
}

#[cfg(feature = "otel")]
fn join(span: &Span, message: &Message, how: TraceParent) {
    use opentelemetry::trace::TraceContextExt as _;
    use opentelemetry::{Context, global};
    use tracing_opentelemetry::OpenTelemetrySpanExt as _;

    let produced = global::get_text_map_propagator(|propagator| {
        propagator.extract_with_context(&Context::new(), &Carrier(message))
    });
    let producer = produced.span().span_context().clone();
    if !producer.is_valid() {
        return;
    }
    match how {
        // It fails only when no OpenTelemetry layer is installed, and then no parent is needed.
        TraceParent::Child => _ = span.set_parent(produced),
        TraceParent::Link => span.add_link(producer),
    }
}

/// A message's headers, for propagators.
#[cfg(feature = "otel")]
struct Carrier<'a>(&'a Message);

#[cfg(feature = "otel")]
impl opentelemetry::propagation::Extractor for Carrier<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0
            .header(key)
            .and_then(|value| std::str::from_utf8(value).ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0
            .headers()
            .iter()
            .map(|header| &*header.name)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Broker;

    fn message(origin: Origin) -> Message {
        Message::new("orders", origin, None)
    }

    #[test]
    fn each_broker_has_its_name_in_the_conventions() {
        static QUEUES: Broker = Broker {
            name: "queues",
            system: "some_queues",
        };
        let queue = message(Origin::Queue {
            queue: "orders".into(),
            id: "1".into(),
        });
        assert_eq!(system(&queue), None);
        assert_eq!(system(&queue.with_broker(&QUEUES)), Some("some_queues"));
        let other = message(Origin::Other("without an id".into()));
        assert_eq!(system(&other.with_broker(&QUEUES)), Some("some_queues"));
        let kafka = message(Origin::Kafka {
            topic: "orders".into(),
            partition: 0,
            offset: 0,
        });
        assert_eq!(system(&kafka), Some("kafka"));
    }
}
