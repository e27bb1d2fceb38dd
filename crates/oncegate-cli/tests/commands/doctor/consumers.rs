//! `oncegate doctor`, of all consumers of a configuration.

use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::{Gate, Key};
use oncegate_testkit::{
    Certificates, Kafka, LoopbackPort, Moto, PostgresServer, RedisServer, unique,
};

use super::super::check::file;
use super::super::{Answer, oncegate, oncegate_with};

/// A consumer of `topic` on these servers.
fn consumer(brokers: &str, store: &str, topic: &str, key: &str, more: &str) -> String {
    format!(
        "version = 1\n[store]\nurl = \"{store}\"\n[consumer.{topic}]\nkey = \"{key}\"\nhandler = {{ command = \"true\" }}\n{more}\n\
         [consumer.{topic}.source.kafka]\nbrokers = \"{brokers}\"\ntopics = [\"{topic}\"]\n"
    )
}

#[tokio::test]
async fn stores_and_topics_of_all_consumers_are_asked_and_unchanged() {
    let kafka = Kafka::shared().await;
    let server = RedisServer::start().await;
    let topic = kafka.new_topic("orders", 1).await;
    let later = unique("later");
    let letters =
        format!("dead_letters = {{ kafka = \"{topic}-dead\" }}\nordering = \"unordered\"");
    let retries = format!("retry_topics = {{ \"{later}\" = \"30s\" }}\n");
    let text =
        |url: &str, key: &str| consumer(kafka.bootstrap(), url, &topic, key, &letters) + &retries;
    let doctor = async |text: &str| {
        let file = file(text);
        oncegate(
            &[
                "doctor",
                "--config",
                &file.path,
                "--json",
                "--timeout",
                "50s",
            ],
            b"",
        )
        .await
    };
    let found = |answer: &Answer, what: &str| -> Vec<String> {
        let document = answer.json();
        let findings = document["findings"].as_array().expect("a list").clone();
        let of = findings.iter().filter(|finding| finding["what"] == what);
        of.map(|finding| format!("{} {}", finding["consumer"], finding["found"]))
            .collect()
    };

    let answer = doctor(&text(server.url(), "order_id")).await;
    for absent in [&format!("{topic}-dead"), &later] {
        let found = found(answer.ended(1), absent);
        assert!(
            found[0].contains("no such topic") && found[0].contains(&topic),
            "{found:?}"
        );
    }
    assert!(
        found(&answer, &topic)
            .iter()
            .any(|found| found.contains("it has one replica"))
    );
    assert_eq!(found(&answer, "key"), [""; 0]);

    // Only now does the store know the scope, and by another key.
    let store = RedisStore::connect(server.url()).await.unwrap();
    Gate::new(&topic, Key::json(["id"]), store)
        .open()
        .await
        .unwrap();
    let answer = doctor(&text(server.url(), "order_id")).await;
    assert!(
        found(answer.ended(1), "key")[0].contains("another key specification"),
        "{answer:?}"
    );

    let answer = doctor(&text("redis://:hunter2@127.0.0.1:1", "order_id")).await;
    assert!(!answer.ended(69).out.contains("hunter2"), "{answer:?}");
    assert!(
        !found(&answer, &topic).is_empty(),
        "an unreachable part hides no other finding: {answer:?}"
    );

    // Mistakes in the file are reported first.
    let answer = doctor(&text(server.url(), "order_id").replace("handler", "handlr")).await;
    assert_eq!(answer.ended(78).says("handlr").out, "", "{answer:?}");
}

#[tokio::test]
async fn one_redis_passes_when_a_missing_replica_is_accepted() {
    let server = RedisServer::start().await;
    let moto = Moto::shared().await;
    let sqs = moto.sqs();
    let queue = sqs.new_queue("orders").await;
    let dead = sqs.new_queue("dead").await;
    let text = |more: &str| {
        format!(
            "[store]\nurl = \"{}\"\n{more}\n[consumer.orders]\nkey = \"order_id\"\nhandler = {{ command = \"true\" }}\n\
             source = {{ sqs = {{ queue = \"{}\", endpoint_url = \"{}\" }} }}\n\
             dead_letters = {{ sqs = \"{}\" }}\n",
            server.url(),
            queue.url(),
            sqs.endpoint(),
            dead.url()
        )
    };
    let credentials = [
        ("AWS_ACCESS_KEY_ID", "none"),
        ("AWS_SECRET_ACCESS_KEY", "none"),
    ];
    for (more, code) in [("", 1), ("allow_no_replica = true", 0)] {
        let file = file(&text(more));
        let arguments = ["doctor", "--config", &file.path, "--timeout", "50s"];
        let answer = oncegate_with(&arguments, &credentials, b"").await;
        assert_eq!(
            answer.ended(code).out.contains("allow_no_replica"),
            code == 1,
            "{answer:?}"
        );
    }
}

#[tokio::test]
async fn an_sqlite_file_that_is_not_there_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("once.db");
    let store = format!("sqlite:{}", path.display());
    let text = consumer("127.0.0.1:1", &store, "orders", "order_id", "").replace(
        "[consumer.orders.source.kafka]\nbrokers = \"127.0.0.1:1\"\ntopics = [\"orders\"]\n",
        "",
    );
    let queue =
        "[consumer.orders.source.sqs]\nqueue = \"http://127.0.0.1:1/q\"\nregion = \"eu-west-1\"\n";
    let file = file(&(text + queue));
    let credentials = [
        ("AWS_ACCESS_KEY_ID", "none"),
        ("AWS_SECRET_ACCESS_KEY", "none"),
    ];
    let answer = oncegate_with(
        &["doctor", "--config", &file.path, "--timeout", "50s"],
        &credentials,
        b"",
    )
    .await;
    assert!(
        answer.ended(69).out.contains("the first consumer makes it"),
        "{answer:?}"
    );
    assert!(
        answer
            .out
            .contains("no server answers `sqs:GetQueueAttributes`"),
        "{answer:?}"
    );
    assert!(!path.exists());
}

/// The findings about a store with these settings.
async fn found_of_store(store: &str) -> Vec<String> {
    let queue =
        "[consumer.orders.source.sqs]\nqueue = \"http://127.0.0.1:1/q\"\nregion = \"eu-west-1\"\n";
    let consumer = "[consumer.orders]\nkey = \"order_id\"\nhandler = { command = \"true\" }\n";
    let file = file(&format!("version = 1\n[store]\n{store}\n{consumer}{queue}"));
    let arguments = [
        "doctor",
        "--config",
        &file.path,
        "--json",
        "--timeout",
        "50s",
    ];
    let credentials = [
        ("AWS_ACCESS_KEY_ID", "none"),
        ("AWS_SECRET_ACCESS_KEY", "none"),
    ];
    let document = oncegate_with(&arguments, &credentials, b"").await.json();
    let findings = document["findings"].as_array().expect("a list");
    findings
        .iter()
        .filter(|finding| finding["what"] == "store")
        .map(|finding| finding["found"].as_str().unwrap().to_owned())
        .collect()
}

/// What a library calls a method is called a setting here.
#[tokio::test]
async fn an_error_of_the_store_names_the_setting_that_mends_it() {
    let certificates = Certificates::for_names("DNS:localhost");
    let port = LoopbackPort::reserve();
    let arguments = certificates.redis_arguments(&port.number().to_string());
    let redis =
        RedisServer::start_with(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).await;
    redis
        .command(&["ACL", "SETUSER", "billing", "on", ">right", "~*", "+@all"])
        .await;
    let risky = PostgresServer::start_with(&["fsync=off", "synchronous_commit=off"]).await;
    PostgresStore::connect(risky.url())
        .await
        .unwrap()
        .create_schema()
        .await
        .unwrap();
    let tls = format!(
        "url = \"rediss://localhost:{}\"\nconnect_timeout = \"30s\"",
        port.number()
    );
    let root = format!(
        "{tls}\ntls_root = \"{}\"",
        certificates.file("ca.pem").display()
    );
    let plain = format!("url = \"redis://billing:wrong@127.0.0.1:{}\"", redis.port());
    let postgres = format!("url = \"{}\"", risky.url());
    for (store, named) in [
        (tls, "`tls_root`"),
        (root.replace("ca.pem", "none.pem"), "`tls_root`"),
        (plain, "`password`"),
        (postgres.clone(), "`allow_asynchronous_commit`"),
        (
            format!("{postgres}\nallow_asynchronous_commit = true"),
            "`allow_fsync_off`",
        ),
    ] {
        let found = found_of_store(&store).await;
        assert!(
            found.len() == 1 && found[0].contains(named),
            "{store}: {found:?}"
        );
        assert!(!found[0].contains("::"), "a name of the library: {found:?}");
    }
    // With the settings, what remains are warnings.
    let found = found_of_store(&format!(
        "{postgres}\nallow_asynchronous_commit = true\nallow_fsync_off = true"
    ))
    .await;
    assert!(
        found.len() == 2 && found.iter().all(|found| found.contains("is off")),
        "{found:?}"
    );
}
