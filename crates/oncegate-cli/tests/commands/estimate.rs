//! `oncegate estimate`, against a real Redis and a real topic.

use std::time::{Duration, SystemTime};

use futures_util::{StreamExt as _, stream};
use oncegate::core::key::{Digest, Scope, StoreKey};
use oncegate::core::record::Token;
use oncegate::core::rules::Operation;
use oncegate::core::store::{Command, Store as _};
use oncegate::redis::RedisStore;
use oncegate_testkit::{Kafka, Record, RedisServer};

use super::oncegate;

/// They fill the server's table as much as a million would: to 0.95 of a power of two.
const KEYS: u64 = 250_000;
const BATCH: u64 = 5_000;
const RESULT_BYTES: usize = 64;

fn completion(scope: &Scope, n: u64) -> Command {
    // Digests look like random numbers, and so do these.
    let digest = (u128::from(n) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    let operation = Operation::Complete {
        token: Token::from_bits(digest),
        fingerprint: None,
        result: vec![b'r'; RESULT_BYTES].into(),
        retention: Duration::from_secs(7 * 86_400),
    };
    Command {
        key: StoreKey::new(scope, Digest::from_bytes(digest.to_be_bytes())),
        operation,
    }
}

async fn used(server: &RedisServer) -> u64 {
    let info = server.info("memory").await;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:"));
    line.and_then(|number| number.trim().parse().ok())
        .expect("Redis reports what it uses")
}

#[tokio::test]
async fn estimates_are_within_a_tenth_of_a_real_redis() {
    let server = RedisServer::start_with(&["--appendonly", "no", "--save", ""]).await;
    let store = RedisStore::connect(server.url()).await.expect("connects");
    let scope = Scope::new("billing").expect("a scope");
    let batches = stream::iter((0..KEYS / BATCH).map(|batch| batch * BATCH));
    batches
        .for_each_concurrent(4, |first| {
            let commands = (first..first + BATCH)
                .map(|n| completion(&scope, n))
                .collect();
            let store = &store;
            async move {
                for answer in store.execute(commands).await {
                    answer.expect("completed");
                }
            }
        })
        .await;
    let used = used(&server).await;

    let keys = KEYS.to_string();
    let result = RESULT_BYTES.to_string();
    let arguments = [
        "estimate",
        "--keys",
        &keys,
        "--result-bytes",
        &result,
        "--scope",
        "billing",
        "--json",
    ];
    let json = oncegate(&arguments, b"").await.ended(0).json();
    let estimated = json["redis"]["steady_bytes"].as_u64().expect("a number");
    assert!(
        used.abs_diff(estimated) * 10 <= used,
        "{used} bytes are used, {estimated} were estimated"
    );
    assert!(json["redis"]["maxmemory_bytes"].as_u64() > Some(used));
}

#[tokio::test]
async fn a_sample_says_rate_and_duplicates() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("sample", 2).await;
    // 101 messages within a hundred seconds, half of them duplicates.
    let first = SystemTime::now() - Duration::from_secs(100);
    let record = |n: u64| {
        let payload = format!(r#"{{"order_id":{}}}"#, n / 2);
        Record::new(payload).produced_at(first + Duration::from_secs(n))
    };
    kafka.produce(&topic, (0..101).map(record)).await;
    let sample = [
        "--sample",
        &topic,
        "--brokers",
        kafka.bootstrap(),
        "--key",
        "order_id",
        "--retention",
        "1d",
    ];
    let json = oncegate(&[&["estimate", "--json"][..], &sample].concat(), b"")
        .await
        .ended(0)
        .json();
    assert_eq!(
        (
            &json["sample"]["messages"],
            &json["sample"]["distinct_keys"]
        ),
        (&101.into(), &51.into())
    );
    let rate = json["rate"].as_f64().expect("a number");
    assert!((rate - 1.01).abs() < 0.001, "{rate}");
    assert_eq!(
        json["keys"], 44_064,
        "51 keys in a hundred seconds, for a day"
    );
    // A hundred seconds say little about a day.
    assert_eq!(json["sample"]["short"], true);
    let text = oncegate(&[&["estimate"][..], &sample].concat(), b"").await;
    let warning = text.ended(0).line("warning");
    assert!(
        warning.contains("extrapolated to 1 d 0 h") && warning.contains("--rate"),
        "{warning}"
    );
    let text = oncegate(&["estimate", "--rate", "500", "--result-bytes", "64"], b"").await;
    assert_eq!(
        text.ended(0).line("records"),
        "records 302,400,000 kept for 7 d 0 h"
    );
    oncegate(&["estimate"], b"").await.ended(2);
}

#[tokio::test]
async fn a_sample_of_another_format_has_its_keys() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("sample", 1).await;
    let first = SystemTime::now() - Duration::from_secs(10);
    // {"order_id":1}, {"order_id":2}, and the first one again.
    let payloads = [
        "eyJvcmRlcl9pZCI6MX0=",
        "eyJvcmRlcl9pZCI6Mn0=",
        "eyJvcmRlcl9pZCI6MX0=",
    ];
    let record = |(payload, n)| Record::new(payload).produced_at(first + Duration::from_secs(n));
    kafka
        .produce(&topic, payloads.into_iter().zip(0..).map(record))
        .await;
    let sample = [
        "estimate",
        "--sample",
        &topic,
        "--brokers",
        kafka.bootstrap(),
        "--key",
        "order_id",
        "--json",
    ];
    let json = oncegate(&[&sample[..], &["--format", "base64"]].concat(), b"")
        .await
        .ended(0)
        .json();
    assert_eq!(
        (
            &json["sample"]["messages"],
            &json["sample"]["distinct_keys"]
        ),
        (&3.into(), &2.into())
    );
}
