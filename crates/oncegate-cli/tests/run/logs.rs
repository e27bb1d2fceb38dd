//! The logs of `oncegate run`, as programs read them.

use serde_json::Value;

use super::{LIMIT, Stage};

#[tokio::test]
async fn values_with_blanks_are_quoted() {
    let stage = Stage::with_orders(1).await;
    stage.consume(&["--handler-command", "true"]).await;
    assert!(
        stage.log().contains("promise=\"moments: "),
        "{}",
        stage.log()
    );
}

#[tokio::test]
async fn every_line_is_json_when_json_is_asked_for() {
    let stage = Stage::with_orders(1).await;
    let lines = |stage: &Stage| -> Vec<Value> {
        let parse = |line: &str| {
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
        };
        stage.log().lines().map(parse).collect()
    };
    stage
        .consume(&["--handler-command", "true", "--log-format", "json"])
        .await;
    let open = lines(&stage)
        .into_iter()
        .find(|line| line["fields"]["message"] == "the gate is open")
        .unwrap();
    assert_eq!(open["fields"]["scope"], stage.scope.as_str());
    assert!(
        open["fields"]["promise"]
            .as_str()
            .unwrap()
            .starts_with("moments: "),
        "{open}"
    );

    let absent = [
        "--store",
        "redis://127.0.0.1:1",
        "--set",
        "start_patience=1ms",
    ];
    let mut running = stage.start(
        &[
            &["--handler-command", "true", "--log-format", "json"],
            &absent[..],
        ]
        .concat(),
    );
    assert_eq!(
        running.process.end_within(LIMIT).await.code(),
        Some(69),
        "{}",
        stage.log()
    );
    let last = lines(&stage).pop().unwrap();
    assert_eq!(
        (&last["level"], &last["fields"]["exit_code"]),
        (&"ERROR".into(), &69.into()),
        "{last}"
    );
}
