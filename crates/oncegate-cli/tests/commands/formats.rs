//! Payloads that are not JSON, for every command that makes keys.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use axum::Router;
use axum::http::StatusCode;
use oncegate_testkit::{
    HttpServer, Kafka, Process, Record, SchemaRegistry, process, schema_python, unique, until,
};
use rdkafka::Message as _;

use super::{LIMIT, oncegate};

const SCHEMA: &str =
    r#"{"type": "record", "name": "Order", "fields": [{"name": "order_id", "type": "string"}]}"#;

/// Writes five orders to the topic, by another implementation.
async fn produce(kafka: &Kafka, registry: &str, topic: &str, kind: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/schemas/produce.py");
    let arguments = [kafka.bootstrap(), registry, topic, kind, "0", "5"];
    let mut command =
        tokio::process::Command::from(process::bound_to_parent(schema_python(), "KILL"));
    command
        .arg(script)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    assert!(
        tokio::time::timeout(LIMIT, command.status())
            .await
            .expect("it ends in time")
            .unwrap()
            .success()
    );
}

fn lines(file: &Path) -> usize {
    std::fs::read_to_string(file).map_or(0, |text| text.lines().count())
}

#[tokio::test]
async fn a_key_of_avro_is_that_of_its_json() {
    let dir = tempfile::tempdir().unwrap();
    let schema = dir.path().join("order.avsc");
    std::fs::write(&schema, SCHEMA).unwrap();
    let format = format!("avro:{}", schema.display());
    let key = [
        "key", "--key", "order_id", "--scope", "billing", "--route", "orders", "--json",
    ];
    let json = oncegate(&key, br#"{"order_id": "A-7"}"#)
        .await
        .ended(0)
        .json();
    let avro = oncegate(&[&key[..], &["--format", &format]].concat(), b"\x06A-7")
        .await
        .ended(0)
        .json();
    assert_eq!(avro["store_key"], json["store_key"]);

    let bad = oncegate(&[&key[..], &["--format", &format]].concat(), b"\x08A-7").await;
    bad.ended(65).says("ends in the middle");
    let unset = oncegate(&key, b"\0\0\0\0\x01\x06A-7").await;
    unset.ended(65).says("Confluent");
    let away = ["--format", "registry:http://127.0.0.1:1"];
    let away = oncegate(&[&key[..], &away].concat(), b"\0\0\0\0\x01\x06A-7").await;
    away.ended(69).says("http://127.0.0.1:1");
}

fn configuration(dir: &Path, format: &str, brokers: &str, topic: &str) -> PathBuf {
    configured(dir, format, brokers, topic, "echo >>effects")
}

fn configured(dir: &Path, format: &str, brokers: &str, topic: &str, command: &str) -> PathBuf {
    let path = dir.join("oncegate.toml");
    let text = format!(
        "[store]\nurl = \"sqlite:records.db\"\n[consumer.billing]\nkey = \"order_id\"\nformat = {{ {format} }}\n\
         source.kafka = {{ brokers = \"{brokers}\", topics = \"{topic}\", group = \"{}\" }}\n\
         dead_letters = {{ kafka = \"{topic}-dead\" }}\nhandler.command = [\"sh\", \"-c\", \"{command}\"]\n",
        unique("formats")
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// Starts `oncegate run` in the folder, which gets its log and its effects.
fn start(config: &str, dir: &Path) -> Process {
    let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
    command
        .args(["run", "--config", config, "--listen", "off"])
        .current_dir(dir);
    Process::spawn_logged("oncegate run", command, &dir.join("log"))
}

async fn until_handled(running: &Process, effects: &Path) {
    until("the effects", LIMIT, async || match lines(effects) {
        5 => Ok(()),
        other => Err(format!("{other} effects\n{}", running.log_tail())),
    })
    .await;
}

async fn stop(mut running: Process) {
    running.signal("TERM");
    assert_eq!(
        running.end_within(LIMIT).await.code(),
        Some(0),
        "{}",
        running.log_tail()
    );
}

#[tokio::test]
async fn a_topic_with_a_registry_runs_and_would_not_run_again() {
    let kafka = Kafka::shared().await;
    let registry = SchemaRegistry::start().await;
    let topic = kafka.new_topic("formats", 1).await;
    kafka.create_topic(&format!("{topic}-dead"), 1).await;
    produce(&kafka, &registry.url(), &topic, "avro").await;
    let dir = tempfile::tempdir().unwrap();
    let format = format!("registry = \"{}\"", registry.url());
    let config = configuration(dir.path(), &format, kafka.bootstrap(), &topic);
    let config = config.to_str().unwrap();
    oncegate(&["check", "--config", config], b"").await.ended(0);

    let running = start(config, dir.path());
    let effects = dir.path().join("effects");
    until_handled(&running, &effects).await;
    // Those of the other schema are the same orders.
    produce(&kafka, &registry.url(), &topic, "avro-evolved").await;
    let replay = ["replay", "--config", config, "--json"];
    until("the records", LIMIT, async || {
        let document = oncegate(&replay, b"").await.json();
        if document["completed"] == 10 {
            Ok(())
        } else {
            Err(document.to_string())
        }
    })
    .await;
    stop(running).await;
    assert_eq!(lines(&effects), 5);
    assert!(kafka.read_all(&format!("{topic}-dead")).await.is_empty());

    let store = format!("sqlite:{}", dir.path().join("records.db").display());
    let format = format!("registry:{}", registry.url());
    let by_flags = [
        "--store", &store, "--scope", "billing", "--topic", &topic, "--key", "order_id",
        "--format", &format, "--json",
    ];
    let replay = ["replay", "--brokers", kafka.bootstrap()];
    let replayed = oncegate(&[&replay[..], &by_flags].concat(), b"").await;
    assert_eq!(replayed.ended(0).json()["completed"], 10);

    // One message, whatever schema it was written with, has its record.
    for message in kafka.read_all(&topic).await.iter().step_by(4) {
        let payload = message.payload().unwrap();
        let inspect = ["inspect", "--config", config, "--json"];
        assert_eq!(
            oncegate(&inspect, payload).await.ended(0).json()["state"],
            "completed"
        );
        let inspected = oncegate(&[&["inspect"][..], &by_flags].concat(), payload).await;
        assert_eq!(inspected.ended(0).json()["state"], "completed");
    }
    let audited = oncegate(&["audit", "--config", config, "--json"], b"")
        .await
        .ended(0)
        .json();
    assert_eq!(
        ["messages", "lost", "unreadable"].map(|name| audited[name].as_u64()),
        [Some(10), Some(0), Some(0)]
    );
}

async fn until_acknowledged(running: &Process, config: &str) {
    until("everything is acknowledged", LIMIT, async || {
        let answer = oncegate(&["audit", "--config", config, "--json"], b"").await;
        if answer.out.is_empty() {
            return Err(answer.err);
        }
        let audited = answer.json();
        let counted = ["messages", "in_flight", "lost"].map(|name| audited[name].as_u64());
        if counted == [Some(5), Some(0), Some(0)] {
            Ok(())
        } else {
            Err(format!("{audited}\n{}", running.log_tail()))
        }
    })
    .await;
}

#[tokio::test]
async fn a_topic_that_has_another_name_now_runs_nothing_again() {
    let kafka = Kafka::shared().await;
    let old = kafka.new_topic("orders", 1).await;
    let new = kafka.new_topic("eu-orders", 1).await;
    let orders: Vec<String> = (0..5).map(|n| format!(r#"{{"order_id": {n}}}"#)).collect();
    for topic in [&old, &new] {
        kafka.create_topic(&format!("{topic}-dead"), 1).await;
        kafka
            .produce(topic, orders.iter().map(|order| Record::new(order.clone())))
            .await;
    }
    let dir = tempfile::tempdir().unwrap();
    let effects = dir.path().join("effects");
    for (topic, route) in [(&old, String::new()), (&new, format!("route = \"{old}\""))] {
        // JSON, which may be encoded and is not.
        let config = configuration(
            dir.path(),
            "encoding_header = \"content-encoding\"",
            kafka.bootstrap(),
            topic,
        );
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(
            &config,
            text.replace(
                "[consumer.billing]",
                &format!("[consumer.billing]\n{route}"),
            ),
        )
        .unwrap();
        let config = config.to_str().unwrap();
        let running = start(config, dir.path());
        until_acknowledged(&running, config).await;
        let inspect = oncegate(
            &["inspect", "--config", config, "--json"],
            orders[0].as_bytes(),
        )
        .await;
        assert_eq!(inspect.ended(0).json()["state"], "completed");
        let replayed = oncegate(&["replay", "--config", config, "--json"], b"")
            .await
            .ended(0)
            .json();
        assert_eq!(replayed["completed"], 5);
        stop(running).await;
        assert_eq!(lines(&effects), 5, "{topic}");
    }
    let store = format!("sqlite:{}", dir.path().join("records.db").display());
    let flags = [
        "replay",
        "--brokers",
        kafka.bootstrap(),
        "--topic",
        &new,
        "--store",
        &store,
        "--scope",
        "billing",
    ];
    let flags = [&flags[..], &["--key", "order_id", "--json"]].concat();
    assert_eq!(
        oncegate(&flags, b"").await.json()["completed"],
        0,
        "by its own name, it would run again"
    );
    assert_eq!(
        oncegate(&[&flags[..], &["--route", &old]].concat(), b"")
            .await
            .ended(0)
            .json()["completed"],
        5
    );
}

#[tokio::test]
async fn workers_get_documents_where_that_is_set() {
    let kafka = Kafka::shared().await;
    let registry = SchemaRegistry::start().await;
    let topic = kafka.new_topic("documents", 1).await;
    kafka.create_topic(&format!("{topic}-dead"), 1).await;
    produce(&kafka, &registry.url(), &topic, "avro").await;
    let dir = tempfile::tempdir().unwrap();
    let format = format!("registry = \"{}\", deliver = \"json\"", registry.url());
    // One write for each message: they run side by side.
    let command = "payload=$(cat); echo $payload >>effects";
    let config = configured(
        dir.path(),
        &format,
        kafka.bootstrap(),
        &topic,
        &command.replace('"', "\\\""),
    );
    let config = config.to_str().unwrap();
    oncegate(&["check", "--config", config], b"").await.ended(0);

    let running = start(config, dir.path());
    let effects = dir.path().join("effects");
    until_handled(&running, &effects).await;
    stop(running).await;
    for line in std::fs::read_to_string(&effects).unwrap().lines() {
        let document: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        assert!(document["order_id"].is_string(), "{line}");
    }
}

#[tokio::test]
async fn a_trial_needs_workers_that_get_documents() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("order.avsc"), SCHEMA).unwrap();
    std::fs::write(
        dir.path().join("samples.jsonl"),
        "{\"order_id\": \"A-7\"}\n",
    )
    .unwrap();
    let samples = dir.path().join("samples.jsonl");
    let config = configuration(
        dir.path(),
        "avro = \"order.avsc\"",
        "localhost:9092",
        "orders",
    );
    let prove = [
        "prove",
        "--config",
        config.to_str().unwrap(),
        "--samples",
        samples.to_str().unwrap(),
    ];
    oncegate(&prove, b"").await.ended(78).says("format.deliver");
}

#[tokio::test]
async fn a_format_that_cannot_be_used_is_refused_by_check() {
    let dir = tempfile::tempdir().unwrap();
    for (format, what) in [
        ("avro = \"gone.avsc\"", "gone.avsc"),
        ("registry = \"localhost:8081\"", "http://"),
        (
            "registry = \"http://localhost:8081\", protobuf = \"a.proto\"",
            "only one",
        ),
        (
            "registry = \"http://localhost:8081\", user = \"u\"",
            "`password`",
        ),
        ("encoding = \"brotli\"", "brotli"),
    ] {
        let config = configuration(dir.path(), format, "localhost:9092", "orders");
        oncegate(&["check", "--config", config.to_str().unwrap()], b"")
            .await
            .ended(1)
            .says(what);
    }
}

#[tokio::test]
async fn doctor_asks_the_registry_of_a_format() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("formats", 1).await;
    kafka.create_topic(&format!("{topic}-dead"), 1).await;
    let registry = SchemaRegistry::start().await;
    let refusal = Router::new().fallback(|| async { StatusCode::UNAUTHORIZED });
    let refuses = HttpServer::start(refusal).await;
    let refuses = format!("http://{}", refuses.address());
    let elsewhere = registry.url().replace("/apis/ccompat/v7", "/apis");
    let dir = tempfile::tempdir().unwrap();
    for (url, what) in [
        (registry.url().as_str(), "it answers"),
        (&refuses, "refuses the login"),
        (&elsewhere, "address of Confluent's API"),
        (
            "http://127.0.0.1:1",
            "format: the schema registry http://127.0.0.1:1",
        ),
    ] {
        let format = format!("registry = \"{url}\"");
        let config = configuration(dir.path(), &format, kafka.bootstrap(), &topic);
        let doctor = [
            "doctor",
            "--config",
            config.to_str().unwrap(),
            "--timeout",
            "50s",
        ];
        let answer = oncegate(&doctor, b"").await;
        assert!(answer.out.contains(what), "{what}: {answer:?}");
        assert_eq!(answer.code == Some(69), what != "it answers", "{answer:?}");
    }
}
