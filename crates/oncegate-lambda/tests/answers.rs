//! Events of Lambda's sources, and the answers to them.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::lambda::{EventError, Function};
use oncegate::{Attempt, Backoff, Failure, Gate, Key, MemoryStore, Message};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

/// The orders that were handled, in their order.
#[derive(Clone, Default)]
struct Effects(Arc<Mutex<Vec<String>>>);

impl Effects {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

#[derive(serde::Deserialize)]
struct Order {
    id: String,
    #[serde(default)]
    fails: String,
}

async fn handle(effects: Effects, message: Message, attempt: Attempt) -> Result<(), Failure> {
    let order: Order = message.json()?;
    match order.fails.as_str() {
        "always" => return Err(Failure::retry("told to fail")),
        "once" if attempt.number() == 1 => return Err(Failure::retry("told to fail")),
        "for good" => return Err(Failure::permanent("told to give up")),
        "panic" => panic!("told to panic"),
        "slow" => sleep(Duration::from_secs(5)).await,
        "endless" => sleep(Duration::from_secs(100_000)).await,
        _ => {}
    }
    effects.0.lock().unwrap().push(order.id);
    Ok(())
}

fn function(store: &Arc<MemoryStore>) -> (Function<impl oncegate::Handler + use<>>, Effects) {
    let effects = Effects::default();
    let seen = effects.clone();
    let gate = Gate::new("orders", Key::json(["id"]), Arc::clone(store)).simulated(7);
    let function = Function::new(gate, move |message: Message, attempt: Attempt| {
        handle(seen.clone(), message, attempt)
    });
    let at_once = Backoff::new(Duration::from_millis(1), Duration::from_millis(1));
    (function.backoff(at_once), effects)
}

fn minute() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn of_queue(arn: &str, records: &[(&str, &str, Value)]) -> Value {
    let records: Vec<Value> = records
        .iter()
        .map(|(id, group, body)| {
            json!({"messageId": id, "receiptHandle": "h", "body": body.to_string(),
                "attributes": {"ApproximateReceiveCount": "1", "SentTimestamp": "1700000000000", "MessageGroupId": group},
                "messageAttributes": {"trace": {"stringValue": "t", "dataType": "String"}},
                "eventSource": "aws:sqs", "eventSourceARN": arn, "awsRegion": "eu-central-1"})
        })
        .collect();
    json!({ "Records": records })
}

fn of_sqs(records: &[(&str, Value)]) -> Value {
    let records: Vec<_> = records
        .iter()
        .map(|(id, body)| (*id, "", body.clone()))
        .collect();
    of_queue("arn:aws:sqs:eu-central-1:1:orders", &records)
}

fn base64(value: &Value) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(value.to_string())
}

fn failed(answer: &Value) -> Vec<Value> {
    let failures = answer["batchItemFailures"].as_array().unwrap();
    failures
        .iter()
        .map(|failure| failure["itemIdentifier"].clone())
        .collect()
}

#[tokio::test(start_paused = true)]
async fn each_key_runs_once_over_events() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let event = of_sqs(&[
        ("m1", json!({"id": "A"})),
        ("m2", json!({"id": "B"})),
        ("m3", json!({"id": "A"})),
    ]);
    for _ in 0..3 {
        let answer = function.answer(&event, minute()).await.unwrap();
        assert_eq!(answer, json!({"batchItemFailures": []}));
    }
    let mut ran = effects.take();
    ran.sort();
    assert_eq!(ran, ["A", "B"]);
}

#[tokio::test(start_paused = true)]
async fn without_reports_one_failure_fails_the_invocation() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let event = of_sqs(&[
        ("m1", json!({"id": "A"})),
        ("m2", json!({"id": "B", "fails": "once"})),
        ("m3", json!({"id": "C", "fails": "panic"})),
    ]);
    let error = function.answer(&event, minute()).await.unwrap_err();
    assert!(
        matches!(&error, EventError::Failed { failed: 2, messages: 3, reason } if reason.contains("told to fail")),
        "{error}"
    );
    assert_eq!(effects.take(), ["A"]);
    sleep(Duration::from_secs(1)).await;
    let event = of_sqs(&[
        ("m1", json!({"id": "A"})),
        ("m2", json!({"id": "B", "fails": "once"})),
    ]);
    assert!(function.answer(&event, minute()).await.is_ok());
    assert_eq!(effects.take(), ["B"], "only what had failed runs again");
}

#[tokio::test(start_paused = true)]
async fn a_queue_gets_the_ids_of_what_has_failed() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let function = function.reports_item_failures();
    let event = of_sqs(&[
        ("m1", json!({"id": "A", "fails": "always"})),
        ("m2", json!({"id": "B"})),
        ("m3", json!({"id": "C", "fails": "for good"})),
        ("m4", json!({"id": "D", "fails": "panic"})),
        ("m5", json!({"no": "id"})),
    ]);
    for round in 0..3 {
        let answer = function.answer(&event, minute()).await.unwrap();
        assert_eq!(failed(&answer), ["m1", "m3", "m4", "m5"], "round {round}");
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(effects.take(), ["B"]);
}

#[tokio::test(start_paused = true)]
async fn a_group_of_a_fifo_queue_stops_at_its_first_failure() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let function = function.reports_item_failures();
    let event = of_queue(
        "arn:aws:sqs:eu-central-1:1:orders.fifo",
        &[
            ("m1", "a", json!({"id": "A1"})),
            ("m2", "a", json!({"id": "A2", "fails": "once"})),
            ("m3", "b", json!({"id": "B1"})),
            ("m4", "a", json!({"id": "A3"})),
            ("m5", "b", json!({"id": "B2"})),
        ],
    );
    let answer = function.answer(&event, minute()).await.unwrap();
    assert_eq!(failed(&answer), ["m2", "m4"]);
    let mut first = effects.take();
    first.sort();
    assert_eq!(first, ["A1", "B1", "B2"]);
    sleep(Duration::from_secs(1)).await;
    let answer = function.answer(&event, minute()).await.unwrap();
    assert!(failed(&answer).is_empty());
    assert_eq!(effects.take(), ["A2", "A3"], "in their order");
}

#[tokio::test(start_paused = true)]
async fn kinesis_gets_the_lowest_sequence_number() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let function = function.reports_item_failures();
    let record = |sequence: &str, key: &str, data: Value| {
        json!({"kinesis": {"partitionKey": key, "sequenceNumber": sequence, "data": base64(&data),
                "approximateArrivalTimestamp": 1_700_000_000.5}, "eventSource": "aws:kinesis",
            "eventSourceARN": "arn:aws:kinesis:eu-central-1:1:stream/orders"})
    };
    let event = json!({"Records": [
        record("100", "x", json!({"id": "A"})),
        record("101", "y", json!({"id": "B", "fails": "always"})),
        record("102", "x", json!({"id": "C"})),
        record("103", "y", json!({"id": "D"})),
        record("104", "z", json!({"id": "E", "fails": "always"})),
    ]});
    let answer = function.answer(&event, minute()).await.unwrap();
    assert_eq!(failed(&answer), ["101"]);
    let mut ran = effects.take();
    ran.sort();
    assert_eq!(ran, ["A", "C"], "nothing behind a failure of its key");
}

#[tokio::test(start_paused = true)]
async fn kafka_gets_the_first_failed_offset_of_each_partition() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let function = function.reports_item_failures();
    let record = |partition: i32, offset: i64, value: Value| {
        json!({"topic": "orders", "partition": partition, "offset": offset, "timestamp": 1_700_000_000_000_i64,
            "timestampType": "CREATE_TIME", "key": null, "value": base64(&value), "headers": [{"h": [-1, 65]}]})
    };
    for source in ["aws:kafka", "SelfManagedKafka"] {
        let event = json!({"eventSource": source, "bootstrapServers": "b", "records": {
            "orders-0": [record(0, 7, json!({"id": "A"})), record(0, 8, json!({"id": "B", "fails": "always"})), record(0, 9, json!({"id": "C"}))],
            "orders-1": [record(1, 3, json!({"id": "D"}))],
            "orders-2": [record(2, 1, json!({"id": "E", "fails": "always"})), record(2, 2, json!({"id": "F"}))],
        }});
        let answer = function.answer(&event, minute()).await.unwrap();
        assert_eq!(
            failed(&answer),
            [
                json!({"partition": "orders-0", "offset": 8}),
                json!({"partition": "orders-2", "offset": 1})
            ]
        );
    }
    let mut ran = effects.take();
    ran.sort();
    assert_eq!(ran, ["A", "D"]);
}

#[tokio::test(start_paused = true)]
async fn nothing_begins_that_cannot_end_in_time() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let function = function.reports_item_failures().concurrency(1);
    let event = of_queue(
        "arn:aws:sqs:eu-central-1:1:orders.fifo",
        &[
            ("m1", "a", json!({"id": "A", "fails": "slow"})),
            ("m2", "a", json!({"id": "B", "fails": "slow"})),
            ("m3", "a", json!({"id": "C", "fails": "slow"})),
        ],
    );
    // Two runs of five seconds fit into twelve, and a third would not end.
    let deadline = Instant::now() + Duration::from_secs(12);
    let answer = function.answer(&event, deadline).await.unwrap();
    assert_eq!(failed(&answer), ["m3"]);
    assert_eq!(effects.take(), ["A", "B"]);
    let deadline = Instant::now() + Duration::from_secs(1);
    let answer = function.answer(&event, deadline).await.unwrap();
    assert_eq!(failed(&answer), ["m1", "m2", "m3"]);
    assert!(effects.take().is_empty());
    assert!(
        failed(&function.answer(&event, minute()).await.unwrap()).is_empty(),
        "what was not begun was not claimed, so it runs at once"
    );
    assert_eq!(effects.take(), ["C"]);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_never_ends_leaves_the_others_their_answers() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let function = function.reports_item_failures();
    let event = of_sqs(&[
        ("m1", json!({"id": "A", "fails": "endless"})),
        ("m2", json!({"id": "B"})),
    ]);
    let deadline = Instant::now() + Duration::from_secs(20);
    let answer = function.answer(&event, deadline).await.unwrap();
    assert!(Instant::now() < deadline, "the answer comes in time");
    assert_eq!(failed(&answer), ["m1"]);
    assert_eq!(effects.take(), ["B"]);
    // Its outcome is unknown: no other attempt begins before the lease has ended, and that one
    // knows.
    let recovered = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&recovered);
    let gate = Gate::new("orders", Key::json(["id"]), Arc::clone(&store)).simulated(8);
    let other = Function::new(gate, move |_: Message, attempt: Attempt| {
        seen.lock().unwrap().push(attempt.recovered());
        std::future::ready(Ok(()))
    });
    let event = of_sqs(&[("m1", json!({"id": "A"}))]);
    assert!(other.answer(&event, minute()).await.is_err());
    sleep(Duration::from_secs(60)).await;
    assert!(other.answer(&event, minute()).await.is_ok());
    assert_eq!(*recovered.lock().unwrap(), [true]);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_never_counts_as_done() {
    let store = Arc::new(MemoryStore::new());
    let (function, effects) = function(&store);
    let function = function.reports_item_failures();
    let good = of_sqs(&[("m1", json!({"id": "secret-7"}))]);
    let mut without_id = good.clone();
    without_id["Records"][0]
        .as_object_mut()
        .unwrap()
        .remove("messageId");
    let mut of_bytes = good.clone();
    of_bytes["Records"][0]["body"] = json!(["secret-7"]);
    let mut empty_id = good.clone();
    empty_id["Records"][0]["messageId"] = json!("");
    let kinesis = json!({"Records": [{"eventSource": "aws:kinesis", "eventSourceARN": "a:b/c",
        "kinesis": {"partitionKey": "x", "sequenceNumber": "1", "data": "secret-7%"}}]});
    for event in [
        json!(null),
        json!({}),
        json!([]),
        json!({"Records": []}),
        json!({"Records": [{"eventSource": "aws:s3"}]}),
        json!({"eventSource": "aws:kafka"}),
        without_id,
        empty_id,
        of_bytes,
        kinesis,
    ] {
        let error = function.answer(&event, minute()).await.unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    assert!(effects.take().is_empty());
}

/// Random values in the place of every value of an event: no panic, and nothing counts as done.
#[tokio::test(start_paused = true)]
async fn hostile_events_end_in_an_error_or_an_answer() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let store = Arc::new(MemoryStore::new());
    let (function, _effects) = function(&store);
    for _ in 0..2_000 {
        let mut event = of_sqs(&[("m1", json!({"id": "A"})), ("m2", json!({"id": "B"}))]);
        let path = ["Records", "0", "attributes", "messageAttributes", "body"];
        let mut place = &mut event;
        for name in &path[..random.usize(..path.len())] {
            place = match name.parse::<usize>() {
                Ok(index) => &mut place[index],
                Err(_) => &mut place[*name],
            };
            if !place.is_object() && !place.is_array() {
                break;
            }
        }
        *place = match random.u8(..7) {
            0 => json!(null),
            1 => json!(-1),
            2 => json!("\u{0}"),
            3 => json!([[[[]]]]),
            4 => json!({"": {}}),
            5 => json!(1e300),
            _ => json!("x".repeat(random.usize(..5_000))),
        };
        _ = function.answer(&event, minute()).await;
    }
}
