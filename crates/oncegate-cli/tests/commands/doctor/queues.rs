//! Queues of SQS.

use aws_sdk_sqs::types::QueueAttributeName;
use oncegate_testkit::{Moto, Redis, RedisServer, Sqs};

use super::super::oncegate_with;
use super::{doctor, findings, says};

/// Without credentials no call can be made: the queue cannot be reached.
#[tokio::test]
async fn a_queue_without_credentials_is_unreachable_in_readable_words() {
    let server = RedisServer::start().await;
    let nothing = tempfile::tempdir().unwrap();
    let none = nothing.path().join("none").display().to_string();
    let environment = [
        ("AWS_CONFIG_FILE", none.as_str()),
        ("AWS_SHARED_CREDENTIALS_FILE", &none),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_REGION", "eu-west-1"),
    ];
    let arguments = [
        "doctor",
        "--store",
        server.url(),
        "--queue",
        "orders",
        "--endpoint-url",
        "http://127.0.0.1:1",
    ];
    let answer = oncegate_with(&[&arguments[..], &["--json"]].concat(), &environment, b"").await;
    let found = findings(answer.ended(69), "orders");
    assert!(says(&found, "credentials"), "{found:?}");
    assert!(
        !found
            .iter()
            .any(|text| text.contains("{ ") || text.contains("DispatchFailure(")),
        "{found:?}"
    );
}

/// The profile's role is assumed with the credentials that a program prints.
#[tokio::test]
async fn a_queue_is_reached_with_the_role_of_a_profile() {
    let moto = Moto::shared().await;
    let redis = Redis::shared().await;
    let queue = moto.sqs().new_queue("orders").await;
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config");
    let text = r#"
[profile program]
credential_process = echo '{"Version":1,"AccessKeyId":"AKIAPROGRAM","SecretAccessKey":"secret"}'
[profile billing]
region = eu-west-1
role_arn = arn:aws:iam::123456789012:role/billing
source_profile = program
"#;
    std::fs::write(&config, text).unwrap();
    let config = config.display().to_string();
    let reach = async |sts: &str| {
        let environment = [
            ("AWS_CONFIG_FILE", config.as_str()),
            ("AWS_SHARED_CREDENTIALS_FILE", "/none"),
            ("AWS_PROFILE", "billing"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
            ("AWS_ENDPOINT_URL_STS", sts),
        ];
        let arguments = [
            "doctor",
            "--store",
            redis.url(),
            "--queue",
            queue.url(),
            "--json",
        ];
        oncegate_with(&arguments, &environment, b"").await
    };
    let answer = reach(moto.endpoint()).await;
    assert!(
        matches!(answer.code, Some(0 | 1)),
        "it was asked about its settings: {answer:?}"
    );
    let answer = reach("http://127.0.0.1:1").await;
    let found = findings(answer.ended(69), queue.name());
    assert!(
        says(&found, "credentials"),
        "the role needs the token server: {found:?}"
    );
}

#[tokio::test]
async fn a_queue_that_takes_back_too_early_or_keeps_too_long_is_found() {
    let sqs = Sqs::shared().await;
    let redis = Redis::shared().await;
    let queue = sqs.new_queue("orders").await;
    let dead = sqs.new_queue("dead").await;
    queue.redrive_to(&dead, 2).await;
    queue
        .set_attribute(QueueAttributeName::MessageRetentionPeriod, "1209600")
        .await;
    let answer = doctor(
        redis.url(),
        &["--queue", queue.url(), "--visibility", "10s"],
    )
    .await;
    let found = findings(answer.ended(1), queue.name());
    assert!(
        says(&found, "maxReceiveCount") && says(&found, "visibility"),
        "{found:?}"
    );
    assert!(!says(&found, "max_run"), "{found:?}");
    let arguments = ["--queue", queue.url(), "--max-run", "13h"];
    let found = findings(doctor(redis.url(), &arguments).await.ended(1), queue.name());
    assert!(says(&found, "`max_run` is 46800 s"), "{found:?}");
    let answer = doctor(
        redis.url(),
        &["--queue", &format!("{}-absent", queue.url())],
    )
    .await;
    assert!(
        answer.json()["findings"]
            .as_array()
            .is_some_and(|all| !all.is_empty()),
        "{answer:?}"
    );
}

#[tokio::test]
async fn a_dead_letter_queue_with_a_smaller_size_limit_is_found() {
    let moto = Moto::shared().await;
    let redis = Redis::shared().await;
    let sqs = moto.sqs();
    let queue = sqs.new_queue("orders").await;
    let dead = sqs.new_queue("dead").await;
    let arguments = ["--queue", queue.url(), "--dead-letter-queue", dead.url()];
    let answer = doctor(redis.url(), &arguments).await;
    assert_eq!(findings(&answer, dead.name()), [""; 0], "{answer:?}");
    for (limit, of_queue, is_found) in [
        ("1024", "262144", true),
        ("2048", "2048", true),
        ("4096", "2048", false),
    ] {
        queue
            .set_attribute(QueueAttributeName::MaximumMessageSize, of_queue)
            .await;
        dead.set_attribute(QueueAttributeName::MaximumMessageSize, limit)
            .await;
        let found = findings(&doctor(redis.url(), &arguments).await, dead.name());
        assert_eq!(
            says(&found, "`MaximumMessageSize` to"),
            is_found,
            "{limit} for {of_queue}: {found:?}"
        );
    }
    let absent = format!("{}-absent", dead.url());
    let answer = doctor(
        redis.url(),
        &["--queue", queue.url(), "--dead-letter-queue", &absent],
    )
    .await;
    assert!(
        says(
            &findings(&answer, &format!("{}-absent", dead.name())),
            "does not exist"
        ),
        "{answer:?}"
    );
}
