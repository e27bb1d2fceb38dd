//! What workers get of messages with large headers, and of tombstones.

use oncegate_testkit::{Record, unique};

use super::Stage;
use super::raw::{Answer, RawWorker};

impl Stage {
    async fn with_records(records: Vec<Record>) -> Self {
        let stage = Self::with([]).await;
        stage.kafka.produce(&stage.topic, records).await;
        stage
    }
}

/// One value that no worker needs, one that Node alone refuses, one that no process can be given.
fn with_large_headers() -> Vec<Record> {
    let sizes = [20_000, 70_000, 200_000];
    let record = |(n, size): (usize, usize)| {
        let record = Record::new(format!(r#"{{"order_id":"A-{n}"}}"#)).key(unique("key"));
        record
            .header("small", "told")
            .header("large", "x".repeat(size))
    };
    sizes.into_iter().enumerate().map(record).collect()
}

#[tokio::test]
async fn large_headers_are_left_out_of_requests_and_counted() {
    let stage = Stage::with_records(with_large_headers()).await;
    let worker = RawWorker::start(|_| Answer::status(200, "", "")).await;
    stage.consume(&["--handler", &worker.url()]).await;
    assert_eq!(worker.asked().len(), 3);
    for asked in worker.asked() {
        assert_eq!(asked.headers["oncegate-attr-small"], "told");
        assert!(!asked.headers.contains_key("oncegate-attr-large"));
        assert_eq!(asked.headers["oncegate-attrs-left-out"], "1");
    }
    assert!(
        stage
            .log()
            .contains("headers were not passed to the worker"),
        "{}",
        stage.log()
    );
    assert!(stage.letters().await.is_empty());
}

#[tokio::test]
async fn large_headers_are_left_out_of_the_environment_and_counted() {
    let stage = Stage::with_records(with_large_headers()).await;
    let script = format!(
        "[ $(wc -c) -eq $ONCEGATE_PAYLOAD_BYTES ] && \\
        printf '%s %s %s\\n' \"$ONCEGATE_HEADER_SMALL\" \"$ONCEGATE_HEADERS_LEFT_OUT\" \"${{ONCEGATE_HEADER_LARGE-none}}\" >>'{}'",
        stage.path("ledger").display()
    );
    let path = stage.path("work.sh");
    std::fs::write(&path, script).unwrap();
    stage
        .consume(&["--handler-command", &format!("sh '{}'", path.display())])
        .await;
    assert_eq!(stage.effects(), [("told 1 none".to_owned(), 3)].into());
    assert!(stage.letters().await.is_empty(), "{}", stage.log());
}

#[tokio::test]
async fn large_headers_are_left_out_of_json_lines_and_counted() {
    let stage = Stage::with_records(with_large_headers()).await;
    let script = r#"
import json, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    names = [name for name, _ in message["headers"]]
    with open(sys.argv[1], "a") as ledger: ledger.write(json.dumps([names, message.get("headers_left_out")]) + "\n")
    print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#;
    let command = stage.python(script);
    stage.consume(&["--handler-exec", &command]).await;
    let told: Vec<(Vec<String>, Option<u32>)> = stage.noted();
    assert_eq!(
        told,
        vec![(vec!["small".to_owned()], Some(1)); 3],
        "{}",
        stage.log()
    );
    assert!(
        stage
            .log()
            .contains("headers were not passed to the worker"),
        "{}",
        stage.log()
    );
}

/// A repeated header has its last value, as it has everywhere else.
#[tokio::test]
async fn headers_that_become_one_variable_are_counted() {
    let record = Record::new(r#"{"order_id":"A-0"}"#)
        .header("x-a", "first")
        .header("x_a", "last");
    let stage = Stage::with_records(vec![record.header("other", "told")]).await;
    let script = format!(
        "echo \"$ONCEGATE_HEADER_X_A $ONCEGATE_HEADER_OTHER $ONCEGATE_HEADERS_LEFT_OUT\" >>'{}'",
        stage.path("ledger").display()
    );
    let path = stage.path("work.sh");
    std::fs::write(&path, script).unwrap();
    stage
        .consume(&["--handler-command", &format!("sh '{}'", path.display())])
        .await;
    assert_eq!(stage.effects(), [("last told 1".to_owned(), 1)].into());
    assert!(
        stage
            .log()
            .contains("headers were not passed to the worker"),
        "{}",
        stage.log()
    );
}

/// A tombstone and an empty payload, and the flags to consume them.
async fn with_tombstone() -> (Stage, [&'static str; 2]) {
    let records = vec![
        Record::new("").key("empty"),
        Record::tombstone().key("tombstone"),
    ];
    (Stage::with_records(records).await, ["--key", "message-key"])
}

#[tokio::test]
async fn a_tombstone_can_be_told_from_an_empty_payload_over_http() {
    let (stage, flags) = with_tombstone().await;
    let worker = RawWorker::start(|_| Answer::status(200, "", "")).await;
    stage
        .consume(&[&["--handler", &worker.url()][..], &flags].concat())
        .await;
    let mut told: Vec<Option<String>> = worker
        .asked()
        .iter()
        .map(|asked| asked.headers.get("oncegate-tombstone").cloned())
        .collect();
    told.sort();
    assert_eq!(told, [None, Some("?1".to_owned())]);
}

#[tokio::test]
async fn a_tombstone_can_be_told_from_an_empty_payload_in_json_lines() {
    let (stage, flags) = with_tombstone().await;
    let script = r#"
import json, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    with open(sys.argv[1], "a") as ledger: ledger.write(json.dumps([message["key"], message["payload"]]) + "\n")
    print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#;
    let command = stage.python(script);
    stage
        .consume(&[&["--handler-exec", &command][..], &flags].concat())
        .await;
    let mut told: Vec<(String, Option<String>)> = stage.noted();
    told.sort();
    assert_eq!(
        told,
        [
            ("empty".to_owned(), Some(String::new())),
            ("tombstone".to_owned(), None)
        ]
    );
}

#[tokio::test]
async fn a_tombstone_can_be_told_from_an_empty_payload_by_a_command() {
    let (stage, flags) = with_tombstone().await;
    let ledger = stage.path("ledger");
    let path = stage.path("work.sh");
    std::fs::write(
        &path,
        format!(
            "echo \"$ONCEGATE_MESSAGE_KEY ${{ONCEGATE_TOMBSTONE-0}} $ONCEGATE_PAYLOAD_BYTES\" >>'{}'",
            ledger.display()
        ),
    )
    .unwrap();
    stage
        .consume(
            &[
                &["--handler-command", &format!("sh '{}'", path.display())][..],
                &flags,
            ]
            .concat(),
        )
        .await;
    assert_eq!(
        stage.effects(),
        [("empty 0 0".to_owned(), 1), ("tombstone 1 0".to_owned(), 1)].into()
    );
}
