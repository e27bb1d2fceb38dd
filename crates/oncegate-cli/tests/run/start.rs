//! What `oncegate run` says about its servers before its worker is ready.

use oncegate_testkit::{LoopbackPort, RedisServer, unique};

use super::raw::{Answer, RawWorker};
use super::{LIMIT, Stage};

/// A worker that never becomes ready must not hide what else is wrong.
async fn is_reported_though_no_worker_is_ready(setting: &str) {
    let stage = Stage::with_orders(1).await;
    let port = LoopbackPort::reserve();
    let handler = format!("http://127.0.0.1:{}/", port.number());
    let absent = unique("absent");
    let set = format!("consumer.{}.{setting}={absent}", stage.scope);
    let mut running = stage.start(&["--handler", &handler, "--set", &set]);
    assert_eq!(
        running.process.end_within(LIMIT).await.code(),
        Some(78),
        "{}",
        stage.log()
    );
    assert!(
        stage.log().contains(&format!("has no topic {absent}")),
        "{}",
        stage.log()
    );
}

#[tokio::test]
async fn a_missing_topic_is_reported_though_no_worker_is_ready() {
    is_reported_though_no_worker_is_ready("source.kafka.topics").await;
}

#[tokio::test]
async fn a_missing_dead_letter_topic_is_reported_with_no_worker_ready() {
    is_reported_though_no_worker_is_ready("dead_letters.kafka").await;
}

#[tokio::test]
async fn an_unsafe_store_is_reported_though_no_worker_is_ready() {
    let stage = Stage::with_orders(1).await;
    let evicting = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let port = LoopbackPort::reserve();
    let handler = format!("http://127.0.0.1:{}/", port.number());
    let mut running = stage.start(&["--handler", &handler, "--store", evicting.url()]);
    assert_eq!(
        running.process.end_within(LIMIT).await.code(),
        Some(78),
        "{}",
        stage.log()
    );
    assert!(stage.log().contains("noeviction"), "{}", stage.log());
}

#[tokio::test]
async fn the_start_waits_for_an_absent_store_as_long_as_it_is_told() {
    let stage = Stage::with_orders(1).await;
    let worker = RawWorker::start(|_| Answer::status(200, "", "")).await;
    let mut server = RedisServer::start().await;
    server.kill();
    let url = server.url().to_owned();
    let flags = ["--handler", &worker.url(), "--store", &url];
    let mut running = stage.start(&[&flags[..], &["--set", "start_patience=1ms"]].concat());
    assert_eq!(
        running.process.end_within(LIMIT).await.code(),
        Some(69),
        "{}",
        stage.log()
    );
    let running = stage.start(&flags);
    stage.until_logged("the store is away").await;
    server.start_again().await;
    stage.until_consumed(&running.group).await;
    running.stop().await;
}

/// A new user has mistyped the address: the reason is on the screen, and nothing hides it.
#[tokio::test]
async fn brokers_that_do_not_answer_end_an_impatient_start_quietly() {
    let stage = Stage::with_orders(1).await;
    let port = LoopbackPort::reserve();
    let brokers = format!("127.0.0.1:{}", port.number());
    let set = format!("consumer.{}.source.kafka.brokers={brokers}", stage.scope);
    let mut running = stage.start(&[
        "--handler-command",
        "true",
        "--set",
        &set,
        "--set",
        "start_patience=4s",
    ]);
    assert_eq!(
        running.process.end_within(LIMIT).await.code(),
        Some(69),
        "{}",
        stage.log()
    );
    let log = stage.log();
    assert!(
        log.contains(&format!("no Kafka broker answers at {brokers} within 4.0s")),
        "{log}"
    );
    assert!(
        !log.contains("trying again"),
        "the patience was over: {log}"
    );
    assert!(
        log.lines().count() < 20,
        "{} lines: {log}",
        log.lines().count()
    );
}

/// A message key names an entity there: each later change would be a duplicate.
#[tokio::test]
async fn a_message_key_as_the_key_of_a_compacted_topic_is_told() {
    let stage = Stage::with_orders(0).await;
    let compacted = unique("entities");
    stage.kafka.create_compacted_topic(&compacted).await;
    let topics = format!("consumer.{}.source.kafka.topics={compacted}", stage.scope);
    let worker = stage.python("import sys\nfor line in sys.stdin: pass\n");
    let flags = ["--key", "message-key", "--set", &topics];
    let running = stage.start(&[&flags[..], &["--handler-exec", &worker]].concat());
    stage.until_logged("each later change of that entity").await;
    stage.until_logged(&compacted).await;
    running.stop().await;
}
