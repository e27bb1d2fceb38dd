//! The README's program, as a stranger meets it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use oncegate_testkit::{Kafka, LoopbackPort, Process, Record, RedisServer, process, until};

const LIMIT: Duration = Duration::from_secs(240);

fn program(kafka: &str, redis: &str, topic: &str, dead: &str, output: &Path) -> Process {
    let mut command: Command = process::bound_to_parent(env!("CARGO_BIN_EXE_readme"), "KILL");
    command
        .env("README_KAFKA", kafka)
        .env("README_REDIS", redis);
    command
        .env("README_TOPIC", topic)
        .env("README_DEAD_LETTERS", dead);
    let file = std::fs::File::create(output).unwrap();
    command
        .stdin(Stdio::null())
        .stderr(file.try_clone().unwrap())
        .stdout(file);
    Process::spawn("the README's program", command)
}

#[tokio::test]
async fn the_readme_program_charges_once_names_dead_letters_and_stops() {
    let kafka = Kafka::shared().await;
    let redis = RedisServer::start().await;
    let topic = kafka.new_topic("readme", 1).await;
    let dead = kafka.new_topic("readme-dead", 1).await;
    let payloads = [
        r#"{"order_id":"A-1","amount":10}"#,
        r#"{"order_id":"A-1","amount":10.0}"#,
        r#"{"order":"A-2"}"#,
    ];
    kafka.produce(&topic, payloads.map(Record::new)).await;
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("output");
    let text = || std::fs::read_to_string(&output).unwrap();
    let mut program = program(kafka.bootstrap(), redis.url(), &topic, &dead, &output);
    until("the topic to be committed", LIMIT, async || {
        let committed = kafka.committed_offsets("billing", &topic).await;
        if committed.get(&0) == Some(&3) {
            Ok(())
        } else {
            Err(format!("{committed:?}\n{}", text()))
        }
    })
    .await;
    assert_eq!(
        text().matches("charging 10 for A-1").count(),
        1,
        "{}",
        text()
    );
    let given_up = text()
        .lines()
        .any(|line| line.contains("WARN") && line.contains("is missing in the payload"));
    assert!(given_up, "the log names the missing field: {}", text());
    assert_eq!(kafka.read_all(&dead).await.len(), 1);
    program.signal("INT");
    assert_eq!(
        program.end_within(LIMIT).await.code(),
        Some(0),
        "{}",
        text()
    );
}

#[tokio::test]
async fn a_wrong_port_of_redis_is_named_with_its_server() {
    let port = LoopbackPort::reserve();
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("output");
    let url = format!("redis://127.0.0.1:{}", port.number());
    let mut program = program("127.0.0.1:1", &url, "orders", "orders.dead", &output);
    assert_eq!(program.end_within(LIMIT).await.code(), Some(1));
    let text = std::fs::read_to_string(&output).unwrap();
    assert!(
        text.contains(&format!("127.0.0.1:{}", port.number())) && !text.contains("{ "),
        "{text}"
    );
}

/// Brokers that are away are waited for, so the log must name them; Ctrl-C ends the wait.
#[tokio::test]
async fn a_wrong_port_of_kafka_is_named_while_it_is_waited_for() {
    let port = LoopbackPort::reserve();
    let redis = RedisServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("output");
    let text = || std::fs::read_to_string(&output).unwrap();
    let broker = format!("127.0.0.1:{}", port.number());
    let mut program = program(&broker, redis.url(), "orders", "orders.dead", &output);
    until("the broker to be named", LIMIT, async || {
        let named = |line: &str| line.contains("the server is away") && line.contains(&broker);
        if text().lines().any(named) {
            Ok(())
        } else {
            Err(text())
        }
    })
    .await;
    assert!(!text().contains("{ "), "{}", text());
    program.signal("INT");
    assert_eq!(
        program.end_within(LIMIT).await.code(),
        Some(0),
        "{}",
        text()
    );
}
