//! Trials on a real broker: what they find there, and that nothing is left of them.

use oncegate_testkit::{Certificates, Kafka, KafkaBroker, RedisServer, SecuredKafka, until};

use super::stores::{interrupt, started};
use super::{LIMIT, RIGHT_KEY, Stage, worker};

/// The faults that need the broker, and a loss of records, after which all is sent again.
const FAULTS: &str = "redelivery,producer-duplicates,reordering,rebalance,two-consumers,kill-after-effect,freeze,store-loss";

/// The rounds with a kill wait for the end of its session.
const SHORT_SESSIONS: [&str; 4] = [
    "--property",
    "session.timeout.ms=6000",
    "--property",
    "heartbeat.interval.ms=500",
];

// invariant: right-handlers-clean, planted-bugs-found
#[tokio::test]
async fn kafka_is_used_in_topics_and_groups_that_are_removed() {
    let stage = Stage::new();
    let broker = KafkaBroker::start().await;
    let store = RedisServer::start().await;
    let kafka = Kafka::at(broker.bootstrap());
    for (bug, faults, rounds, code) in [
        ("right", FAULTS, "8", 0),
        ("no_downstream_key", "kill-after-effect", "2", 1),
    ] {
        let program = worker("worker.py", bug);
        let flags = [
            "--handler-exec",
            &program,
            "--brokers",
            broker.bootstrap(),
            "--store",
            store.url(),
        ];
        let flags = [
            &flags[..],
            &["--faults", faults, "--rounds", rounds],
            &SHORT_SESSIONS,
        ]
        .concat();
        let proved = stage.prove(RIGHT_KEY, &flags).await;
        let found = proved.ended(code).defects().contains(&"no-downstream-key");
        assert_eq!(found, code == 1, "seed {}: {}", stage.seed, proved.out);
        if found {
            assert!(
                proved
                    .err
                    .contains(&format!("--brokers {}", broker.bootstrap())),
                "{}",
                proved.err
            );
        }
        assert!(
            kafka.named("oncegate-prove").await.is_empty(),
            "what is left"
        );
        assert!(store.keys().await.is_empty(), "what is left");
    }
}

#[tokio::test]
async fn an_interrupt_leaves_no_topic() {
    let stage = Stage::new();
    let broker = KafkaBroker::start().await;
    let kafka = Kafka::at(broker.bootstrap());
    let trial = started(
        &stage,
        &["--brokers", broker.bootstrap(), "--seconds", "600"],
        stage.dir.path(),
    );
    until(
        "topics and groups of the trial",
        LIMIT,
        async || match kafka.named("oncegate-prove").await.len() {
            few @ ..3 => Err(format!("{few} of them")),
            _ => Ok(()),
        },
    )
    .await;
    interrupt(trial).await;
    assert!(
        kafka.named("oncegate-prove").await.is_empty(),
        "what is left"
    );
}

#[tokio::test]
async fn mistakes_in_the_brokers_are_named() {
    let stage = Stage::new();
    let program = worker("worker.py", "right");
    let prove = ["--handler-exec", &program, "--brokers", "127.0.0.1:1"];
    let away = stage.prove(RIGHT_KEY, &prove).await;
    assert!(away.ended(69).err.contains("127.0.0.1:1"), "{}", away.err);
    let refused = stage
        .prove(
            RIGHT_KEY,
            &[&prove[..], &["--property", "no.such=1"]].concat(),
        )
        .await;
    assert!(refused.ended(78).err.contains("no.such"), "{}", refused.err);
    let alone = stage
        .prove(
            RIGHT_KEY,
            &["--handler-exec", &program, "--property", "a=b"],
        )
        .await;
    assert!(alone.ended(2).err.contains("--brokers"), "{}", alone.err);
}

#[tokio::test]
async fn the_configured_login_is_used_at_the_brokers_of_the_flag() {
    let stage = Stage::new();
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let kafka = SecuredKafka::start(&certificates).await;
    std::fs::write(stage.dir.path().join("password"), SecuredKafka::PASSWORD).unwrap();
    let configuration = format!(
        r#"
        [store]
        url = "redis://127.0.0.1:1"

        [consumer.billing]
        key = {{ json = ["order_id", "currency"] }}
        handler = {{ exec = {program:?} }}

        [consumer.billing.source.kafka]
        brokers = ["127.0.0.1:1"]
        topics = ["orders"]

        [consumer.billing.source.kafka.properties]
        "security.protocol" = "SASL_SSL"
        "ssl.ca.location" = {authority:?}
        "sasl.mechanism" = "SCRAM-SHA-256"
        "sasl.username" = {user:?}
        "sasl.password" = {{ file = "password" }}
        "#,
        program = worker("worker.py", "of_topic_orders"),
        authority = certificates.file("ca.pem"),
        user = SecuredKafka::USER,
    );
    let of_cluster = ["--brokers", &kafka.sasl()];
    let rounds = ["--faults", "redelivery", "--rounds", "1"];
    stage
        .prove_configured(&configuration, &[&of_cluster[..], &rounds].concat())
        .await
        .ended(0);
    let wrong = ["--property", "sasl.password=wrong"];
    let refused = stage
        .prove_configured(&configuration, &[&of_cluster[..], &rounds, &wrong].concat())
        .await;
    assert!(
        refused.ended(78).err.contains("sasl.password"),
        "{}",
        refused.err
    );
    assert!(
        !refused.err.contains(SecuredKafka::PASSWORD),
        "{}",
        refused.err
    );
}
