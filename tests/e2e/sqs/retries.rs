//! Retries: through the queue, in the lane where that would use up receives, and what is left of a
//! message that was given up.

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_sqs::types::{MessageAttributeValue, QueueAttributeName, SendMessageBatchRequestEntry};
use oncegate::{Attempt, Backoff, Failure, Message};
use oncegate_testkit::{Moto, Queue, Sqs};

use crate::stage::{Book, EXTENDED_VISIBILITY, MAX_ATTEMPTS, Stage, body, id, receives};

/// What a queue takes as a delay: whole seconds.
const SECOND: Duration = Duration::from_secs(1);
/// The largest message of these servers, attributes included.
const MESSAGE_MAX_BYTES: usize = 262_144;

/// Fails until this attempt, and writes "id attempt receives".
fn failing_until(
    number: u32,
    delay: Duration,
    book: &Book,
) -> impl Fn(Message, Attempt) -> Answer + Send + Sync + use<> {
    let book = book.clone();
    move |message: Message, attempt: Attempt| {
        let line =
            id(&message).map(|id| format!("{id} {} {}", attempt.number(), receives(&message)));
        let outcome = line.map(|line| book.write(line));
        let failure = (attempt.number() < number).then(|| Failure::retry_after(delay, "not yet"));
        std::future::ready(outcome.and(failure.map_or(Ok(()), Err)))
    }
}

type Answer = std::future::Ready<Result<(), Failure>>;

async fn a_retry_of_a_second_or_more_goes_through_the_queue(sqs: &Sqs) {
    let stage = Stage::on(sqs).await;
    stage.send([7]).await;
    let book = Book::new();
    let running = stage.start(failing_until(2, SECOND, &book)).await;
    running.watched.until("acks", 1).await;
    let watched = running.stop().await;
    assert_eq!(book.lines(), ["7 1 1", "7 2 2"]);
    assert_eq!(watched.source("sqs_returned"), 1);
    assert_eq!(
        watched.total("extra_runs"),
        0,
        "a retry that was asked for is none"
    );
    assert_eq!(stage.queue.depth().await.total(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_goes_through_the_queue_on_elasticmq() {
    a_retry_of_a_second_or_more_goes_through_the_queue(&Sqs::shared().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_goes_through_the_queue_on_moto() {
    a_retry_of_a_second_or_more_goes_through_the_queue(Moto::shared().await.sqs()).await;
}

async fn arn(sqs: &Sqs, queue: &Queue) -> String {
    let asked = sqs.client().get_queue_attributes().queue_url(queue.url());
    let answer = asked
        .attribute_names(QueueAttributeName::QueueArn)
        .send()
        .await
        .unwrap();
    answer.attributes.unwrap()[&QueueAttributeName::QueueArn].clone()
}

async fn redrive_after(sqs: &Sqs, queue: &Queue, receives: u32, to: &Queue) {
    let policy =
        serde_json::json!({"deadLetterTargetArn": arn(sqs, to).await, "maxReceiveCount": receives});
    let set = sqs.client().set_queue_attributes().queue_url(queue.url());
    set.attributes(QueueAttributeName::RedrivePolicy, policy.to_string())
        .send()
        .await
        .unwrap();
}

/// The policy lets it be received twice, and it needs three attempts: the last ones must not go
/// through the queue.
#[tokio::test(flavor = "multi_thread")]
async fn the_redrive_policy_takes_no_message_with_attempts_left() {
    let sqs = Sqs::shared().await;
    let stage = Stage::on(&sqs).await;
    let redriven = sqs.new_queue("redriven").await;
    redrive_after(&sqs, &stage.queue, 2, &redriven).await;
    stage.send([7]).await;
    let book = Book::new();
    let running = stage.start(failing_until(3, SECOND, &book)).await;
    running.watched.until("acks", 1).await;
    let watched = running.stop().await;
    assert_eq!(book.lines(), ["7 1 1", "7 2 2", "7 3 2"]);
    assert_eq!(
        watched.source("sqs_last_receive"),
        1,
        "and the last receive is reported"
    );
    assert_eq!(
        (
            stage.queue.depth().await.total(),
            redriven.depth().await.total()
        ),
        (0, 0)
    );
}

/// Handing a group back would cost each of its messages a receive, for every retry of the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_waits_for_its_first_without_using_up_receives() {
    let stage = Stage::fifo_on(&Sqs::shared().await)
        .await
        .with_visibility(EXTENDED_VISIBILITY);
    stage.queue.send_to_group("g", [1, 2, 3].map(body)).await;
    let book = Book::new();
    // Longer than the visibility timeout: it is extended meanwhile, for all of them.
    let running = stage
        .start(failing_until(2, EXTENDED_VISIBILITY + SECOND, &book))
        .await;
    running.watched.until("acks", 3).await;
    let watched = running.stop().await;
    assert_eq!(
        book.lines(),
        ["1 1 1", "1 2 1", "2 1 1", "2 2 1", "3 1 1", "3 2 1"]
    );
    assert_eq!(watched.source("sqs_returned"), 0);
    assert!(watched.source("sqs_visibility_extended") > 0);
    assert_eq!(watched.source("sqs_visibility_lost"), 0);
}

/// A message with as many attributes as there may be, and one as large as there may be.
async fn nothing_of_a_message_is_lost_in_its_dead_letter(sqs: &Sqs) {
    let stage = Stage::on(sqs).await;
    let text = |value: &str| {
        MessageAttributeValue::builder()
            .data_type("String")
            .string_value(value)
            .build()
            .unwrap()
    };
    let ten: HashMap<_, _> = (0..10).map(|n| (format!("a{n}"), text("x"))).collect();
    let full = SendMessageBatchRequestEntry::builder()
        .message_body(body(1))
        .set_message_attributes(Some(ten));
    let padding = MESSAGE_MAX_BYTES - r#"{"id":2,"p":""}"#.len();
    let large = format!(r#"{{"id":2,"p":"{}"}}"#, "x".repeat(padding));
    assert_eq!(large.len(), MESSAGE_MAX_BYTES);
    stage.queue.send_in_order(vec![full]).await;
    stage.queue.send([large.clone()]).await;
    let handler = async |_: Message, _: Attempt| Err::<(), _>(Failure::permanent("rejected"));
    let running = stage.start(handler).await;
    running.watched.until("acks", 2).await;
    running.stop().await;

    let mut dead = stage.dead.take_all().await;
    dead.sort_by_key(|letter| letter.body().map(str::len));
    let [full, largest] = &dead[..] else {
        panic!("{} dead letters", dead.len())
    };
    let attributes = full.message_attributes().unwrap();
    let origin: serde_json::Value =
        serde_json::from_str(attributes["oncegate-origin"].string_value().unwrap()).unwrap();
    let beside = origin["attributes"].as_object().unwrap();
    let found = (0..10).filter(|n| {
        let name = format!("a{n}");
        attributes.contains_key(&name) || beside[&name]["value"] == "x"
    });
    assert_eq!((found.count(), attributes.len()), (10, 10));
    assert_eq!(
        largest.body(),
        Some(&*large),
        "whole, although nothing of ours fits beside it"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_message_is_lost_in_its_dead_letter_on_elasticmq() {
    nothing_of_a_message_is_lost_in_its_dead_letter(&Sqs::shared().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_message_is_lost_in_its_dead_letter_on_moto() {
    nothing_of_a_message_is_lost_in_its_dead_letter(Moto::shared().await.sqs()).await;
}

/// The consumer's own back-off, when it grows to whole seconds.
#[tokio::test(flavor = "multi_thread")]
async fn the_back_off_of_the_consumer_is_the_visibility_of_the_retry() {
    let stage = Stage::on(&Sqs::shared().await).await;
    stage.send([1, 2]).await;
    let book = Book::new();
    let lines = book.clone();
    let handler = move |message: Message, attempt: Attempt| {
        let attempt = attempt.number();
        let line = id(&message).map(|id| lines.write(format!("{id} {attempt}")));
        let failure = if attempt == 1 {
            Err(Failure::retry("not yet"))
        } else {
            Ok(())
        };
        std::future::ready(line.and(failure))
    };
    let backoff = Backoff::new(SECOND * 3, SECOND * 3);
    let running = stage
        .start_with(stage.source(), handler, |consumer| {
            consumer.backoff(backoff)
        })
        .await;
    running.watched.until("acks", 2).await;
    let watched = running.stop().await;
    assert_eq!(watched.source("sqs_returned"), 2);
    let mut lines = book.lines();
    lines.sort_unstable();
    assert_eq!(lines, ["1 1", "1 2", "2 1", "2 2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_wanted_later_goes_back_to_the_queue_uncounted() {
    const LATER: u32 = MAX_ATTEMPTS + 2;
    let sqs = Sqs::shared().await;
    let stage = Stage::on(&sqs).await;
    stage.send([7]).await;
    let book = Book::new();
    let handler = {
        let book = book.clone();
        move |message: Message, attempt: Attempt| {
            let runs = book.lines().len();
            let line = id(&message).map(|id| format!("{id}, attempt {}", attempt.number()));
            let outcome = line.map(|line| book.write(line));
            let failure =
                (runs < LATER as usize).then(|| Failure::later(SECOND, "the report is not ready"));
            std::future::ready(outcome.and(failure.map_or(Ok(()), Err)))
        }
    };
    let running = stage.start(handler).await;
    running.watched.until("acks", 1).await;
    let watched = running.stop().await;
    assert_eq!(book.lines(), vec!["7, attempt 1"; LATER as usize + 1]);
    assert_eq!(watched.get("handler_runs", "later"), u64::from(LATER));
    assert_eq!(watched.source("sqs_returned"), u64::from(LATER));
    let counted = ["extra_runs", "retries", "dead_letters", "breaker_changes"]
        .map(|name| watched.total(name));
    assert_eq!(counted, [0; 4]);
    assert_eq!(stage.queue.depth().await.total(), 0);
}
