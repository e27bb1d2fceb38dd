//! A span for each run, in the producer's trace.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use oncegate::consumer::TraceParent;
use oncegate::{Attempt, BatchHandler, BatchLimits, BatchMessage, Batched, Failure, Message};
use oncegate_testkit::{Record, Redis, until};
use opentelemetry::trace::{SpanKind, Status};
use opentelemetry_sdk::trace::SpanData;

use crate::seen::seen;
use crate::stage::{LIMIT, Stage, order};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PRODUCER: &str = "b7ad6b7169203331";

/// What a producer that traces sends along.
fn traced(record: Record) -> Record {
    record.header("traceparent", format!("00-{TRACE}-{PRODUCER}-01"))
}

fn attribute(span: &SpanData, name: &str) -> Option<String> {
    let found = span
        .attributes
        .iter()
        .find(|attribute| attribute.key.as_str() == name);
    found.map(|attribute| attribute.value.to_string())
}

/// The spans of the topic, when so many have ended.
async fn spans(stage: &Stage, count: usize) -> Vec<SpanData> {
    let name = format!("process {}", stage.topic);
    let mut spans = until("the spans", LIMIT, async || {
        let spans = seen().spans(&name);
        if spans.len() >= count {
            Ok(spans)
        } else {
            Err(format!("{} of {count}", spans.len()))
        }
    })
    .await;
    spans.sort_by_key(|span| span.start_time);
    assert_eq!(spans.len(), count, "{spans:?}");
    spans
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_and_duplicates_have_spans_in_the_producers_trace() {
    seen();
    let stage = Stage::new("spans").await;
    let redis = Redis::shared().await;
    let calls = AtomicU32::new(0);
    let handler = move |_: Message, _: Attempt| {
        std::future::ready(match calls.fetch_add(1, SeqCst) {
            0 => Err(Failure::later(Duration::from_millis(1), "closed")),
            1 => Err(Failure::retry("not yet")),
            _ => Ok(()),
        })
    };
    let message = || traced(order(1)).partition(2);
    stage.produce(vec![message(), message()]).await;
    let running = stage.start(redis.url(), handler, |consumer| consumer).await;
    stage.acked(2).await;
    running.stop().await;

    let spans = spans(&stage, 4).await;
    let expected = [
        ("granted", Some("1"), Some("later"), None, "0"),
        ("granted", Some("1"), Some("failed"), Some("failed"), "0"),
        ("granted", Some("2"), Some("succeeded"), None, "0"),
        ("completed", None, None, None, "1"),
    ];
    for (span, (verdict, attempt, outcome, error, offset)) in spans.iter().zip(expected) {
        assert_eq!(span.span_context.trace_id().to_string(), TRACE, "{span:?}");
        assert_eq!(span.parent_span_id.to_string(), PRODUCER);
        assert_eq!(span.span_kind, SpanKind::Consumer);
        for (name, value) in [
            ("messaging.system", Some("kafka")),
            ("messaging.operation.name", Some("process")),
            ("messaging.operation.type", Some("process")),
            ("messaging.destination.name", Some(&*stage.topic)),
            ("messaging.destination.partition.id", Some("2")),
            ("messaging.consumer.group.name", Some(&*stage.scope)),
            ("messaging.kafka.offset", Some(offset)),
            ("messaging.message.body.size", Some("8")),
            ("oncegate.scope", Some(&*stage.scope)),
            ("oncegate.verdict", Some(verdict)),
            ("oncegate.attempt", attempt),
            ("oncegate.outcome", outcome),
            ("error.type", error),
        ] {
            assert_eq!(
                attribute(span, name).as_deref(),
                value,
                "{name} of {span:?}"
            );
        }
        assert_eq!(attribute(span, "oncegate.key").unwrap().len(), 16);
        assert_eq!(
            matches!(span.status, Status::Error { .. }),
            error.is_some(),
            "{span:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_linked_span_or_one_without_a_producer_has_its_own_trace() {
    seen();
    let stage = Stage::new("links").await;
    let redis = Redis::shared().await;
    stage.produce(vec![traced(order(1)).partition(0)]).await;
    let running = stage
        .start(
            redis.url(),
            async |_: Message, _: Attempt| Ok(()),
            |consumer| consumer.trace_parent(TraceParent::Link),
        )
        .await;
    stage.acked(1).await;
    stage
        .produce(vec![order(2).header("traceparent", [0xff, 0xfe])])
        .await;
    stage.acked(2).await;
    running.stop().await;

    let spans = spans(&stage, 2).await;
    let linked = &spans[0].links.links[0].span_context;
    assert_eq!(
        (linked.trace_id().to_string(), linked.span_id().to_string()),
        (TRACE.into(), PRODUCER.into())
    );
    assert!(spans[1].links.links.is_empty(), "{:?}", spans[1]);
    for span in &spans {
        assert_ne!(span.span_context.trace_id().to_string(), TRACE);
        assert!(span.span_context.is_valid());
    }
    assert_ne!(
        spans[0].span_context.trace_id(),
        spans[1].span_context.trace_id()
    );
}

/// Fails the first call for all of its messages.
#[derive(Default)]
struct FailsOnce(AtomicU32);

impl BatchHandler for FailsOnce {
    type Output = ();

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
        match self.0.fetch_add(1, SeqCst) {
            0 => Err(Failure::retry_after(Duration::from_millis(1), "closed")),
            _ => Ok(batch.iter().map(|_| Ok(())).collect()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_call_has_a_span_linked_to_its_producers() {
    seen();
    let stage = Stage::new("batch-spans").await;
    let redis = Redis::shared().await;
    stage
        .produce(vec![
            traced(order(1)).partition(0),
            traced(order(2)).partition(0),
        ])
        .await;
    let limits = BatchLimits::new(2).wait(BatchLimits::LONGEST_WAIT);
    let running = stage
        .start(
            redis.url(),
            Batched::new(limits, FailsOnce::default()),
            |one| one,
        )
        .await;
    stage.acked(2).await;
    running.stop().await;

    let spans: Vec<SpanData> = seen()
        .spans(&format!("process {}", stage.topic))
        .into_iter()
        .filter(|span| attribute(span, "messaging.batch.message_count").is_some())
        .collect();
    let expected = [(Some("failed"), Some("failed")), (Some("succeeded"), None)];
    for (outcome, error) in expected {
        let of_outcome =
            |span: &&SpanData| attribute(span, "oncegate.outcome").as_deref() == outcome;
        let span = spans
            .iter()
            .find(of_outcome)
            .unwrap_or_else(|| panic!("{outcome:?} in {spans:?}"));
        for (name, value) in [
            ("messaging.system", Some("kafka")),
            ("messaging.operation.name", Some("process")),
            ("messaging.operation.type", Some("process")),
            ("messaging.destination.name", Some(&*stage.topic)),
            ("oncegate.scope", Some(&*stage.scope)),
            ("error.type", error),
        ] {
            assert_eq!(
                attribute(span, name).as_deref(),
                value,
                "{name} of {span:?}"
            );
        }
        assert_eq!(span.span_kind, SpanKind::Consumer);
        assert_eq!(
            matches!(span.status, Status::Error { .. }),
            error.is_some(),
            "{span:?}"
        );
    }
    let linked = spans
        .iter()
        .flat_map(|span| &span.links.links)
        .map(|link| &link.span_context);
    assert!(
        linked.clone().count() >= 2,
        "each call is linked to the producers of its messages"
    );
    linked.for_each(|linked| assert_eq!(linked.trace_id().to_string(), TRACE));
}
