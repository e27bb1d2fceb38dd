//! `oncegate doctor`, on real servers that are set well and badly.

use aws_sdk_sqs::types::QueueAttributeName;
use oncegate_tests::{Kafka, Moto, Redis, RedisServer, Sqs, unique};

use super::{Answer, oncegate_with};

async fn doctor(store: &str, more: &[&str]) -> Answer {
    let credentials = [("AWS_ACCESS_KEY_ID", "none"), ("AWS_SECRET_ACCESS_KEY", "none")];
    let arguments = [&["doctor", "--store", store, "--json", "--timeout", "50s"][..], more].concat();
    oncegate_with(&arguments, &credentials, b"").await
}

/// What was found of one thing.
fn findings(answer: &Answer, what: &str) -> Vec<String> {
    let json = answer.json();
    let findings = json["findings"].as_array().expect("a list");
    let of = findings.iter().filter(|finding| finding["what"] == what);
    of.map(|finding| format!("{} {}", finding["found"], finding["fix"])).collect()
}

fn says(findings: &[String], words: &str) -> bool {
    findings.iter().any(|finding| finding.contains(words))
}

#[tokio::test]
async fn each_finding_of_a_topic_comes_with_its_fix() {
    let (kafka, redis) = (Kafka::shared().await, Redis::shared().await);
    let (topic, dead, absent) =
        (kafka.new_topic("orders", 1).await, kafka.new_topic("dead", 1).await, unique("absent"));
    let brokers = ["--brokers", kafka.bootstrap(), "--topic", &topic];
    let answer = doctor(redis.url(), &[&brokers[..], &["--dead-letters", &dead]].concat()).await;
    let of_topic = findings(answer.ended(1), &topic);
    assert!(says(&of_topic, "min.insync.replicas=2") && !says(&of_topic, "runs them again"), "{of_topic:?}");
    let of_dead = findings(&answer, &dead);
    assert!(says(&of_dead, "raise its `max.message.bytes`"), "{of_dead:?}");
    assert_eq!(answer.json()["schema"], "oncegate.doctor/1");

    // The broker's default is seven days.
    let more = ["--retention", "1d", "--topic", &absent];
    let answer = doctor(redis.url(), &[&brokers[..], &more].concat()).await;
    let of_topic = findings(answer.ended(1), &topic);
    assert!(says(&of_topic, "raise the gate's `retention` to 7 d 0 h"), "{of_topic:?}");
    assert!(says(&findings(&answer, &absent), "no such topic"), "{answer:?}");
    assert!(says(&findings(&answer, "kafka"), "--dead-letters"), "{answer:?}");
}

#[tokio::test]
async fn a_store_that_evicts_or_forgets_is_found_and_one_that_is_away_hides_nothing_else() {
    let evicting = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let answer = doctor(evicting.url(), &[]).await;
    assert!(says(&findings(answer.ended(1), "store"), "noeviction"), "{answer:?}");
    let forgetful = RedisServer::start_with(&["--appendonly", "no", "--save", ""]).await;
    let answer = doctor(forgetful.url(), &[]).await;
    assert!(says(&findings(answer.ended(1), "store"), "appendonly"), "{answer:?}");

    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("orders", 1).await;
    let answer =
        doctor("redis://:secret@127.0.0.1:1", &["--brokers", kafka.bootstrap(), "--topic", &topic]).await;
    let json = answer.ended(69).json();
    assert_eq!(
        (&json["findings"][0]["what"], &json["findings"][0]["unreachable"]),
        (&"store".into(), &true.into())
    );
    assert!(!findings(&answer, &topic).is_empty() && !answer.out.contains("secret"), "{answer:?}");
}

#[tokio::test]
async fn a_queue_that_takes_messages_too_early_or_keeps_them_too_long_is_found() {
    let (sqs, redis) = (Sqs::shared().await, Redis::shared().await);
    let (queue, dead) = (sqs.new_queue("orders").await, sqs.new_queue("dead").await);
    queue.redrive_to(&dead, 2).await;
    queue.set_attribute(QueueAttributeName::MessageRetentionPeriod, "1209600").await;
    let answer = doctor(redis.url(), &["--queue", queue.url(), "--visibility", "10s"]).await;
    let found = findings(answer.ended(1), queue.name());
    assert!(says(&found, "maxReceiveCount") && says(&found, "visibility"), "{found:?}");
    assert!(!says(&found, "max_run"), "{found:?}");
    let arguments = ["--queue", queue.url(), "--max-run", "13h"];
    let found = findings(doctor(redis.url(), &arguments).await.ended(1), queue.name());
    assert!(says(&found, "`max_run` is 46800 s"), "{found:?}");
    let answer = doctor(redis.url(), &["--queue", &format!("{}-absent", queue.url())]).await;
    assert!(answer.json()["findings"].as_array().is_some_and(|all| !all.is_empty()), "{answer:?}");
}

#[tokio::test]
async fn a_queue_of_dead_letters_that_takes_less_than_the_queue_is_found() {
    let (moto, redis) = (Moto::shared().await, Redis::shared().await);
    let sqs = moto.sqs();
    let (queue, dead) = (sqs.new_queue("orders").await, sqs.new_queue("dead").await);
    let arguments = ["--queue", queue.url(), "--dead-letter-queue", dead.url()];
    let answer = doctor(redis.url(), &arguments).await;
    assert_eq!(findings(&answer, dead.name()), [""; 0], "{answer:?}");
    for (limit, of_queue, is_found) in
        [("1024", "262144", true), ("2048", "2048", true), ("4096", "2048", false)]
    {
        queue.set_attribute(QueueAttributeName::MaximumMessageSize, of_queue).await;
        dead.set_attribute(QueueAttributeName::MaximumMessageSize, limit).await;
        let found = findings(&doctor(redis.url(), &arguments).await, dead.name());
        assert_eq!(says(&found, "`MaximumMessageSize` to"), is_found, "{limit} for {of_queue}: {found:?}");
    }
    let absent = format!("{}-absent", dead.url());
    let answer = doctor(redis.url(), &["--queue", queue.url(), "--dead-letter-queue", &absent]).await;
    assert!(says(&findings(&answer, &format!("{}-absent", dead.name())), "does not exist"), "{answer:?}");
}
