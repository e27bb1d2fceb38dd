//! Nothing of payloads, keys, headers, results and passwords is in logs, spans, metrics or the
//! page.

use std::time::Duration;

use oncegate::redis::RedisStore;
use oncegate::{Attempt, Failure, FingerprintSpec, Gate, Key, Message};
use oncegate_testkit::{Record, RedisServer};

use crate::seen::seen;
use crate::stage::{Stage, id};

/// Stands in everything that must not get out. The second is a number, as an amount or a card is.
const CANARY: &str = "yellow-bird-7Q";
const NUMBER: &str = "4929871263549001";

/// A message that is nothing but canaries, and an id.
fn order(id: &str) -> Record {
    let payload = format!(
        r#"{{"id":{id},"secret":"{CANARY}","amount":{NUMBER},"name-{CANARY}":"{CANARY}"}}"#
    );
    Record::new(payload)
        .key(format!("key-{CANARY}-{NUMBER}-{id}"))
        .header("secret", CANARY)
        .header(CANARY, NUMBER)
}

/// One message for each outcome. The ids select the outcome in the handler.
fn every_way() -> Vec<Record> {
    let mut records: Vec<_> = (1..=6).map(|id| order(&id.to_string())).collect();
    // A duplicate, and bad keys of several kinds.
    records.push(order("1"));
    records.push(order(&format!("\"{CANARY}\"")));
    records.push(order("{}"));
    records.push(order(&format!(r#"1,"id":"{CANARY}""#)));
    records.push(Record::new(format!("{{{CANARY}")).key(CANARY));
    records.push(Record::new(format!(r#"{{"other":"{CANARY}"}}"#)));
    records.push(Record::tombstone().key(CANARY));
    records
}

/// A store whose user has the canary for a password.
async fn store_with_a_password(redis: &RedisServer) -> RedisStore {
    let mut user = ::redis::cmd("ACL");
    user.arg("SETUSER")
        .arg("billing")
        .arg("on")
        .arg(format!(">{CANARY}"))
        .arg("~*")
        .arg("&*")
        .arg("+@all");
    let () = user
        .query_async(&mut redis.connection().await)
        .await
        .unwrap();
    let url = redis
        .url()
        .replace("redis://", &format!("redis://billing:{CANARY}@"));
    RedisStore::connect(&url).await.unwrap()
}

// invariant: secrets-in-telemetry
#[tokio::test(flavor = "multi_thread")]
async fn no_message_content_or_password_shows_up_in_telemetry() {
    let stage = Stage::new("canary").await;
    let redis = RedisServer::start().await;
    let seen = seen();
    let handler = async |message: Message, attempt: Attempt| {
        let number = if message.payload().starts_with(br#"{"id":""#) {
            0
        } else {
            id(&message)
        };
        match number {
            2 if attempt.number() == 1 => Err(Failure::retry("try again")),
            3 => Err(Failure::permanent("rejected")),
            4 => panic!("it panics"),
            // serde's own errors quote what they have read.
            5 => Err(message.json::<u8>().unwrap_err()),
            6 => {
                tokio::time::sleep(Duration::from_millis(200)).await;
                Ok(CANARY.repeat(20_000))
            }
            _ => Ok(CANARY.to_owned()),
        }
    };
    let records = every_way();
    let messages = records.len() as u64;
    stage.produce(records).await;
    let store = store_with_a_password(&redis).await;
    let key = Key::json(["id"]);
    let gate = Gate::new(stage.scope.as_str(), key, store).fingerprint(FingerprintSpec::payload());
    let running = stage
        .start_with(gate, handler, |consumer| consumer.max_attempts(2))
        .await;
    stage.acked(messages).await;
    let mut shown = String::new();
    for path in ["/", "/metrics", "/healthz", "/readyz", "/status.json"] {
        shown.push_str(&running.get(path).await.1);
    }
    running.stop().await;

    assert!(
        shown.contains(&stage.scope) && shown.contains("rejected"),
        "it shows something: {shown}"
    );
    let log = seen.log();
    let spans = seen.spans_as_text();
    assert!(
        log.contains(&stage.scope) && spans.contains(&stage.scope),
        "there are logs and spans"
    );
    for (place, text) in [("the endpoint", shown), ("the log", log), ("a span", spans)] {
        for secret in [CANARY, NUMBER] {
            if let Some(at) = text.find(secret) {
                let from = text.floor_char_boundary(at.saturating_sub(300));
                panic!(
                    "{secret} is in {place}: {}",
                    &text[from..text.floor_char_boundary(at + 60)]
                );
            }
        }
    }
}
