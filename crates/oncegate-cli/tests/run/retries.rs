//! Messages that wait for their retry in a topic.

use oncegate_testkit::until;

use super::raw::{Answer, RawWorker};
use super::{LIMIT, Stage};

/// The order that the bank does not take at first.
const LATER: &str = r#"{"order_id":"A-0","amount":10}"#;

#[tokio::test]
async fn a_far_off_retry_waits_in_its_topic_and_holds_up_nothing() {
    let stage = Stage::with_orders(20).await;
    let later = stage.kafka.new_topic("run-later", 1).await;
    let worker = RawWorker::start(|asked| match (asked.body.as_str(), asked.attempt()) {
        (LATER, 1) => Answer::status(
            503,
            "oncegate-outcome: retry\r\nretry-after: 3\r\n",
            "the bank is closed",
        ),
        _ => Answer::status(200, "", "done"),
    })
    .await;
    let topic = format!("{later}=3s");
    let beyond = format!("consumer.{}.source.kafka.retry_beyond=1s", stage.scope);
    let flags = [
        "--retry-topic",
        &topic,
        "--set",
        &beyond,
        "--set",
        "ordering=unordered",
    ];
    let running = stage.start(&[&["--handler", &worker.url()][..], &flags].concat());
    stage.until_consumed(&running.group).await;
    until("the second attempt", LIMIT, async || {
        let asked = worker
            .asked()
            .into_iter()
            .filter(|asked| asked.body == LATER);
        let attempts: Vec<u32> = asked.map(|asked| asked.attempt()).collect();
        if attempts == [1, 2] {
            Ok(())
        } else {
            Err(format!("{attempts:?}\n{}", stage.log()))
        }
    })
    .await;
    assert_eq!(
        stage.kafka.read_all(&later).await.len(),
        1,
        "it waited elsewhere"
    );
    running.stop().await;
    let keys: std::collections::BTreeSet<_> = worker
        .asked()
        .into_iter()
        .filter(|asked| asked.body == LATER)
        .map(|asked| {
            (
                asked.headers["idempotency-key"].clone(),
                asked.headers["oncegate-origin"].clone(),
            )
        })
        .collect();
    assert_eq!(keys.len(), 1, "it keeps its key and its origin: {keys:?}");
    assert!(stage.letters().await.is_empty());
}

#[tokio::test]
async fn order_and_retry_topics_exclude_each_other_unless_accepted() {
    let stage = Stage::with_orders(1).await;
    let later = stage.kafka.new_topic("run-later", 1).await;
    let topic = format!("{later}=30s");
    let mut running = stage.start(&["--handler-command", "true", "--retry-topic", &topic]);
    assert_eq!(
        running.process.end_within(LIMIT).await.code(),
        Some(78),
        "{}",
        stage.log()
    );
    assert!(
        stage.log().contains("`overtaking_retries`"),
        "{}",
        stage.log()
    );
    stage
        .consume(&[
            "--handler-command",
            "true",
            "--retry-topic",
            &topic,
            "--set",
            "overtaking_retries=true",
        ])
        .await;
}
