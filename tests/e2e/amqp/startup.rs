//! What a consumer refuses at its start, and in which words.

use std::time::Duration;

use oncegate::amqp::AmqpSource;
use oncegate::dead_letters::DeadLetters as _;
use oncegate::source::Terms;
use oncegate_testkit::{QueueKind, RabbitMq, RabbitQueue, unique};
use serde_json::json;

use crate::stage::{Clerk, Stage};

/// Requires that a consumer of this queue does not start, and that the error has these words.
async fn refuses(stage: &Stage, source: AmqpSource, words: &[&str]) {
    let error = stage
        .start_with(source, Clerk::new(), |consumer| consumer)
        .await
        .fails()
        .await;
    for word in words {
        assert!(error.contains(word), "no `{word}` in: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_queue_says_how_to_make_it() {
    let server = RabbitMq::shared().await;
    let mut stage = Stage::on(&server, QueueKind::Classic).await;
    let missing = unique("missing");
    let words = [
        missing.as_str(),
        "does not exist",
        "rabbitmqadmin declare queue",
    ];
    refuses(
        &stage,
        AmqpSource::new(server.uri(), missing.as_str()),
        &words,
    )
    .await;
    stage.dead = RabbitQueue::of(server.uri(), missing.clone());
    refuses(&stage, stage.source(), &words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_named() {
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Classic).await;
    let queue = stage.queue.name();
    let dead = stage.dead.name();
    let writer = server.new_user("", ".*", "").await;
    let source = AmqpSource::new(server.uri_as(&writer), queue);
    let checked = source.check_queue(&terms()).await.unwrap_err().to_string();
    assert!(
        checked.contains("permission `read`") && checked.contains(queue),
        "{checked}"
    );
    refuses(&stage, source, &["permission `read`", queue]).await;
    let reader = server.new_user("", "", ".*").await;
    let source = AmqpSource::new(server.uri_as(&reader), queue);
    refuses(
        &stage,
        source,
        &["permission `write` on `amq.default`", dead],
    )
    .await;
    // No right to configure is needed.
    let both = server.new_user("", "^amq.default$", ".*").await;
    let source = AmqpSource::new(server.uri_as(&both), queue);
    let clerk = Clerk::new();
    let running = stage
        .start_with(source, clerk.clone(), |consumer| consumer)
        .await;
    stage
        .queue
        .send([r#"{"id":1}"#.to_owned(), "bad".to_owned()])
        .await;
    running.watched.until("acks", 2).await;
    running.stop().await;
    assert_eq!(
        (clerk.book.count("charge"), stage.dead.ready().await),
        (1, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_and_hosts_are_named_without_the_password() {
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Classic).await;
    let uri = |credentials: &str, vhost: &str| {
        format!("amqp://{credentials}@{}/{vhost}", server.address())
    };
    for (uri, word) in [
        (
            uri("guest:secret-word", "%2f"),
            "credentials of the user `guest`",
        ),
        (uri("guest:guest", "nowhere"), "virtual host `nowhere`"),
        (
            "http://guest:secret-word@localhost".to_owned(),
            "amqp://user:password@host",
        ),
    ] {
        let source = AmqpSource::new(uri, stage.queue.name());
        let error = stage
            .start_with(source, Clerk::new(), |consumer| consumer)
            .await
            .fails()
            .await;
        assert!(
            error.contains(word) && !error.contains("secret-word"),
            "no `{word}` in: {error}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_refused() {
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Stream).await;
    refuses(&stage, stage.source(), &["stream"]).await;
    let checked = stage.source().check_queue(&terms()).await;
    let error = checked.unwrap_err().to_string();
    assert!(error.contains("the queue is a stream"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_queue_that_is_consumed_is_refused() {
    let server = RabbitMq::shared().await;
    let mut stage = Stage::on(&server, QueueKind::Classic).await;
    stage.dead = stage.queue.clone();
    refuses(
        &stage,
        stage.source(),
        &["is consumed by the same consumer"],
    )
    .await;
}

fn terms() -> Terms {
    let second = Duration::from_secs(1);
    Terms {
        max_attempts: 5,
        lease: second,
        retention: second,
        stop_deadline: second,
        max_run: second,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_the_queue_are_compared() {
    let server = RabbitMq::shared().await;
    let arguments = [
        ("x-delivery-limit", json!(3)),
        ("x-dead-letter-exchange", json!("dlx")),
    ];
    let queue = server
        .new_queue_with("orders", QueueKind::Quorum, &arguments)
        .await;
    let stage = Stage::of(&server, queue).await;
    let source = stage.source().management(server.management_url());
    let warnings = source.check_queue(&terms()).await.unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for word in [
        stage.queue.name(),
        "`delivery-limit`",
        "is 3 (`max_attempts` is 5)",
        "`dlx`",
    ] {
        assert!(warnings[0].contains(word), "no `{word}` in: {warnings:?}");
    }
    // No right to ask is a warning, too.
    let source = AmqpSource::new(
        server.uri_as(&server.new_user("", "", ".*").await),
        stage.queue.name(),
    );
    let warnings = source
        .management(server.management_url())
        .check_queue(&terms())
        .await
        .unwrap();
    assert!(
        warnings[0].contains("401") && warnings[0].contains("`management`"),
        "{warnings:?}"
    );
}

// invariant: amqp-order
#[tokio::test(flavor = "multi_thread")]
async fn a_check_leaves_the_queue_as_it_was() {
    let server = RabbitMq::shared().await;
    // A message that comes back once would be dropped.
    let limit = [("x-delivery-limit", json!(0))];
    let queue = server
        .new_queue_with("orders", QueueKind::Quorum, &limit)
        .await;
    let stage = Stage::of(&server, queue).await;
    stage.send(0..3).await;
    for _ in 0..3 {
        assert_eq!(
            stage.source().check_queue(&terms()).await.unwrap(),
            Vec::<String>::new()
        );
    }
    stage.queue.until_ready(3).await;
    let clerk = Clerk::new();
    let running = stage
        .start_with(stage.source().in_order(), clerk.clone(), |consumer| {
            consumer.concurrency(1)
        })
        .await;
    running.watched.until("acks", 3).await;
    running.stop().await;
    assert_eq!(clerk.book.charges(), ["charge 0", "charge 1", "charge 2"]);
    let letters = stage.source().dead_letters(stage.dead.name());
    letters.check_queue().await.unwrap();
    letters.open().await.unwrap();
    assert_eq!(
        stage.dead.ready().await,
        0,
        "the check of the right to write writes nothing"
    );
}
