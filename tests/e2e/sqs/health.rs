//! Health while a queue, or its dead-letter queue, cannot be used. moto enforces a queue's limit of
//! bytes; `ElasticMQ` has none.

// invariant (all tests): stall-unreported

use std::collections::BTreeMap;
use std::time::Duration;

use aws_sdk_sqs::types::QueueAttributeName;
use oncegate::admin::dead_letter_reader::DeadLetterReader as _;
use oncegate::admin::{Redrive, Wanted};
use oncegate::consumer::Monitor;
use oncegate::health::{Health, Reason, Status};
use oncegate::sqs::SqsDeadLetterReader;
use oncegate::{Attempt, Consumer, Failure, Handler, MemoryStore, Message};
use oncegate_testkit::{ElasticmqServer, Fault, Moto, Sqs, SqsProxy, until};

use crate::stage::{Book, Clerk, MAX_ATTEMPTS, Running, SHORT_VISIBILITY, Stage, body, id};

/// The longest wait for a judgement. The limits are 10 s and 30 s, and one call may take 12 s.
const LIMIT: Duration = Duration::from_secs(240);

async fn start(
    stage: &Stage,
    handler: impl Handler,
    tune: impl FnOnce(Consumer) -> Consumer,
) -> (Running, Monitor) {
    let mut monitor = None;
    let watched = |consumer: Consumer| {
        let consumer = tune(consumer);
        monitor = Some(consumer.monitor());
        consumer
    };
    let running = stage.start_with(stage.source(), handler, watched).await;
    (running, monitor.expect("it was tuned"))
}

async fn until_status(
    monitor: &Monitor,
    what: &str,
    so: impl Fn(&Status, &Health) -> bool + Send + Sync,
) -> Health {
    until(what, LIMIT, async || {
        let status = monitor.status();
        let health = Health::of(&status);
        if so(&status, &health) {
            Ok(health)
        } else {
            Err(format!("{health}: {status:?}"))
        }
    })
    .await
}

fn fails(health: &Health, wanted: &str) -> Option<(String, bool)> {
    health.reasons().iter().find_map(|reason| match reason {
        Reason::SourceFails {
            operation,
            error,
            stops_delivery,
            ..
        } if operation == wanted => Some((error.clone(), *stops_delivery)),
        _ => None,
    })
}

fn says(health: &Health, word: &str) -> bool {
    health
        .reasons()
        .iter()
        .any(|reason| reason.as_str() == word)
}

/// Live, because a restart would not help, and not ready.
fn brings_nothing(health: &Health) -> bool {
    fails(health, "receive").is_some() && health.is_live() && !health.is_ready()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_or_stalled_server_makes_it_unready_until_it_is_back() {
    let mut server = ElasticmqServer::start_durable().await;
    // What a lost answer has hidden comes again.
    let stage = Stage::on(&server).await.with_visibility(SHORT_VISIBILITY);
    let clerk = Clerk::new();
    let (running, monitor) = start(&stage, clerk.clone(), |consumer| consumer).await;
    stage.send([1]).await;
    running.watched.until("acks", 1).await;
    until_status(&monitor, "ready", |_, health| health.is_ready()).await;

    stage.send([2]).await;
    server.kill();
    let health = until_status(&monitor, "unready: killed", |_, health| {
        brings_nothing(health)
    })
    .await;
    let (error, _) = fails(&health, "receive").unwrap();
    assert!(!error.is_empty(), "{health}");
    let status = monitor.status();
    let failure = status
        .source
        .failures
        .iter()
        .find(|failure| failure.operation == "receive")
        .unwrap();
    assert!(
        failure.failures >= 2 && failure.lasts > failure.failed_ago,
        "{failure:?}"
    );
    server.start_again().await;
    until_status(&monitor, "ready again", |status, health| {
        health.is_ready() && status.source.failures.is_empty()
    })
    .await;
    running.watched.until("acks", 2).await;

    server.process().signal("STOP");
    until_status(&monitor, "unready: stalled", |_, health| {
        brings_nothing(health)
    })
    .await;
    server.process().signal("CONT");
    until_status(&monitor, "ready once more", |status, health| {
        health.is_ready() && status.source.failures.is_empty()
    })
    .await;
    stage.send([3]).await;
    running.watched.until("acks", 3).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_rights_are_a_reason_in_the_servers_words() {
    let sqs = Sqs::shared().await;
    let proxy = SqsProxy::before(&sqs).await;
    let stage = Stage::on(&sqs).await.through(&proxy);
    let (running, monitor) = start(&stage, Clerk::new(), |consumer| consumer).await;
    for (number, code) in [(1, "AccessDenied"), (2, "ExpiredToken")] {
        proxy.every("ReceiveMessage", Fault::Deny(code));
        let health = until_status(&monitor, code, |_, health| {
            brings_nothing(health)
                && fails(health, "receive").is_some_and(|(error, _)| error.contains(code))
        })
        .await;
        assert!(
            health.to_string().contains("`receive` has failed for"),
            "{health}"
        );
        proxy.heal();
        until_status(&monitor, "ready again", |_, health| {
            health.is_ready() && health.reasons().is_empty()
        })
        .await;
        stage.send([number]).await;
        running.watched.until("acks", number.into()).await;
    }
    // A finished message that cannot be deleted keeps its place, and comes again: reported, but
    // consuming goes on.
    proxy.every("DeleteMessageBatch", Fault::Deny("AccessDenied"));
    stage.send([3]).await;
    let health = until_status(&monitor, "a report of deletes", |_, health| {
        fails(health, "delete").is_some()
    })
    .await;
    assert!(health.is_ready() && health.is_live(), "{health}");
    proxy.heal();
    until_status(&monitor, "deleted", |status, _| {
        status.source.failures.is_empty()
    })
    .await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_at_the_start_is_waited_for() {
    let mut server = ElasticmqServer::start_durable().await;
    let stage = Stage::on(&server).await;
    stage.send([1]).await;
    server.kill();
    let (stopped, monitor) = start(&stage, Clerk::new(), |consumer| consumer).await;
    let health = until_status(&monitor, "a reason at the start", |_, health| {
        fails(health, "open").is_some()
    })
    .await;
    assert!(
        says(&health, "starting") && health.is_live() && !health.is_ready(),
        "{health}"
    );
    // Asked to stop while it waits, it ends well.
    stopped.stop().await;

    let (running, monitor) = start(&stage, Clerk::new(), |consumer| consumer).await;
    until_status(&monitor, "a reason at the start", |_, health| {
        fails(health, "open").is_some()
    })
    .await;
    server.start_again().await;
    running.watched.until("acks", 1).await;
    assert!(monitor.health().is_ready(), "{}", monitor.health());
    running.stop().await;

    server.kill();
    let impatient = |consumer: Consumer| consumer.start_patience(Duration::ZERO);
    let (running, _) = start(&stage, Clerk::new(), impatient).await;
    let error = running.fails().await.to_string();
    assert!(error.contains("no server answers"), "{error}");
}

/// A handler that gives up what is large.
fn picky(book: &Book) -> impl Handler + use<> {
    let book = book.clone();
    move |message: Message, _: Attempt| {
        let book = book.clone();
        async move {
            if message.payload().len() > 100 {
                return Err(Failure::permanent("it is large"));
            }
            book.write(format!("handled {}", id(&message)?));
            Ok::<(), Failure>(())
        }
    }
}

fn large(id: u32, bytes: usize) -> String {
    format!(r#"{{"id":{id},"filler":"{}"}}"#, "x".repeat(bytes))
}

#[tokio::test(flavor = "multi_thread")]
async fn too_large_letters_delay_no_others_and_a_raised_limit_counts() {
    const GOOD: u32 = 40;
    let sqs = Moto::shared().await.sqs().clone();
    let stage = Stage::on(&sqs).await;
    stage
        .dead
        .set_attribute(QueueAttributeName::MaximumMessageSize, "1024")
        .await;
    let book = Book::new();
    let (running, monitor) = start(&stage, picky(&book), |consumer| consumer.concurrency(2)).await;
    // More than there are permits.
    stage
        .queue
        .send((100..104).map(|id| large(id, 1_500)))
        .await;
    until_status(&monitor, "four letters wait", |status, _| {
        status.runs.len() == 4
            && status
                .source
                .failures
                .iter()
                .any(|failure| failure.operation == "dead_letter")
    })
    .await;
    stage.send(0..GOOD).await;
    running.watched.until("acks", GOOD.into()).await;
    assert!(
        monitor.health().is_ready(),
        "the others go on: {}",
        monitor.health()
    );
    assert_eq!(stage.dead.depth().await.total(), 0);
    let error = monitor
        .status()
        .source
        .failures
        .pop()
        .expect("letters fail")
        .error;
    assert!(
        error.contains("takes 1024") && error.contains("MaximumMessageSize"),
        "{error}"
    );

    stage
        .dead
        .set_attribute(QueueAttributeName::MaximumMessageSize, "4096")
        .await;
    running.watched.until("dead_letters", 4).await;
    stage.queue.until_empty().await;
    until_status(&monitor, "nothing fails", |status, _| {
        status.source.failures.is_empty()
    })
    .await;
    let watched = running.stop().await;
    assert_eq!(watched.total("acks"), u64::from(GOOD) + 4);
    assert_eq!(stage.dead.take_all().await.len(), 4);

    // And a limit that is lowered while it runs: what would not fit any more is left out.
    let (running, _) = start(&stage, picky(&book), |consumer| consumer).await;
    stage
        .dead
        .set_attribute(QueueAttributeName::MaximumMessageSize, "1024")
        .await;
    stage.queue.send([large(200, 900)]).await;
    running.watched.until("dead_letters", 1).await;
    running.stop().await;
    let letter = stage.dead.take_all().await.pop().expect("it is there");
    assert_eq!(letter.body.as_deref(), Some(large(200, 900).as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn when_only_letters_are_left_the_consumer_is_not_ready() {
    let sqs = Moto::shared().await.sqs().clone();
    let stage = Stage::fifo_on(&sqs).await;
    stage
        .dead
        .set_attribute(QueueAttributeName::MaximumMessageSize, "1024")
        .await;
    let bodies = std::iter::once(large(0, 1_500)).chain((1..4).map(body));
    stage.queue.send_to_group("g", bodies).await;
    let book = Book::new();
    let (running, monitor) = start(&stage, picky(&book), |consumer| consumer).await;
    let health = until_status(&monitor, "a standstill", |_, health| {
        says(health, "only_letters_left")
    })
    .await;
    assert!(health.is_live() && !health.is_ready(), "{health}");
    assert_eq!(book.lines(), [""; 0], "nothing overtakes");
    stage
        .dead
        .set_attribute(QueueAttributeName::MaximumMessageSize, "4096")
        .await;
    stage.queue.until_empty().await;
    assert_eq!(book.lines(), ["handled 1", "handled 2", "handled 3"]);
    until_status(&monitor, "ready again", |_, health| health.is_ready()).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_that_had_to_omit_attributes_is_not_redriven() {
    let sqs = Moto::shared().await.sqs().clone();
    let stage = Stage::on(&sqs).await;
    stage
        .dead
        .set_attribute(QueueAttributeName::MaximumMessageSize, "2048")
        .await;
    let attribute = |bytes: usize| {
        let attribute = aws_sdk_sqs::types::MessageAttributeValue::builder().data_type("String");
        attribute.string_value("y".repeat(bytes)).build().unwrap()
    };
    let entry =
        aws_sdk_sqs::types::SendMessageBatchRequestEntry::builder().message_body(large(1, 1_200));
    let entry = entry
        .message_attributes("tenant", attribute(9))
        .message_attributes("trace", attribute(900));
    stage.queue.send_in_order(vec![entry]).await;
    let (running, _) = start(&stage, picky(&Book::new()), |consumer| consumer).await;
    running.watched.until("dead_letters", 1).await;
    running.stop().await;

    let mut letters = SqsDeadLetterReader::from_client(sqs.client().clone(), stage.dead.url());
    letters.open().await.unwrap();
    let mut actions = Vec::new();
    let redrive = Redrive::new(std::sync::Arc::new(stage.store().await));
    let tell = |step: oncegate::admin::Step<'_>| actions.push(format!("{:?}", step.action));
    let redriven = redrive
        .run(&mut letters, |_| Wanted::Yes, tell)
        .await
        .unwrap();
    letters.close().await.unwrap();
    assert_eq!((redriven.sent, redriven.no_way_back), (0, 1));
    assert!(
        actions[0].contains("no room for its attributes trace"),
        "{actions:?}"
    );

    stage
        .dead
        .until("visible again", |depth| depth.visible == 1)
        .await;
    let letter = stage.dead.take_all().await.pop().expect("it is there");
    assert_eq!(letter.body.as_deref(), Some(large(1, 1_200).as_str()));
    let attributes = letter.message_attributes.expect("it has some");
    assert!(
        attributes.contains_key("tenant") && !attributes.contains_key("trace"),
        "{attributes:?}"
    );
    let origin = attributes["oncegate-origin"].string_value().expect("text");
    let origin: serde_json::Value = serde_json::from_str(origin).unwrap();
    assert_eq!(origin["left_out"], serde_json::json!(["trace"]));
    assert_eq!(
        MAX_ATTEMPTS, 3,
        "a permanent failure needs none of the others"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redrive_keeps_the_order_of_each_group() {
    const GROUPS: u32 = 6;
    const EACH: u32 = 10;
    let sqs = Sqs::shared().await;
    let stage = Stage::fifo_on(&sqs).await;
    for group in 0..GROUPS {
        stage
            .dead
            .send_to_group(&format!("g{group}"), (0..EACH).map(body))
            .await;
    }
    let mut letters = SqsDeadLetterReader::from_client(sqs.client().clone(), stage.dead.url());
    letters.open().await.unwrap();
    let redrive = Redrive::new(std::sync::Arc::new(MemoryStore::new())).to(stage.queue.url());
    let redriven = redrive
        .run(&mut letters, |_| Wanted::Yes, |_| {})
        .await
        .unwrap();
    letters.close().await.unwrap();
    assert_eq!(redriven.sent, u64::from(GROUPS * EACH));

    let mut sent: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for message in stage.queue.take_all().await {
        let system = message.attributes.expect("the server returns them");
        let group = system[&aws_sdk_sqs::types::MessageSystemAttributeName::MessageGroupId].clone();
        sent.entry(group)
            .or_default()
            .push(message.body.expect("a body"));
    }
    assert_eq!(sent.len(), GROUPS as usize);
    for (group, bodies) in sent {
        assert_eq!(bodies, (0..EACH).map(body).collect::<Vec<_>>(), "{group}");
    }
}
