//! The contents of letters, and of the messages that are sent from them.

use oncegate::kafka::KafkaSource;
use oncegate_testkit::{Record, unique};
use rdkafka::Message as _;
use rdkafka::message::{Headers as _, OwnedMessage};

use super::super::shop::order;
use super::{ORDERS, OnKafka, WHY, numbers};

#[tokio::test]
async fn letters_are_listed_with_all_details_but_no_payload() {
    let given_up = OnKafka::new().await;
    let list = given_up.dead_letters("list", &["--json"]).await;
    let json = list.ended(0).json();
    assert_eq!(numbers(&json, ["seen", "matching"]), [10, 10]);
    assert_eq!(
        json["by_cause"],
        serde_json::json!({"permanent": 9, "attempts_used_up": 1})
    );
    assert!(!list.out.contains("visa-of-alice"), "{list:?}");

    let retried = given_up
        .dead_letters("list", &["--json", "--reason", "bank"])
        .await
        .ended(0)
        .json();
    let letter = &retried["letters"][0];
    assert_eq!(
        (&letter["attempts"], &letter["message_key"]),
        (&3.into(), &"0".into())
    );
    assert_eq!(
        (&letter["cause"], &letter["reason"]),
        (&"attempts_used_up".into(), &"the bank is closed".into())
    );
    assert!(
        letter["first_failed_at"].as_str() < letter["failed_at"].as_str(),
        "{letter}"
    );
    assert!(
        letter["key"]
            .as_str()
            .is_some_and(|key| key.starts_with(&given_up.shop.scope)),
        "{letter}"
    );
    let origin = letter["origin"].as_str().expect("an origin");
    assert!(
        origin.starts_with(&format!("{}/", given_up.topic)) && letter["produced_at"].is_string(),
        "{letter}"
    );
    is_shown_as_known(&given_up, letter).await;
    garbage_is_no_position(&given_up).await;

    for (filter, matching) in [
        ("--cause=permanent", 9),
        ("--since=1h", 10),
        ("--until=1h", 0),
        ("--origin=x", 0),
    ] {
        let json = given_up
            .dead_letters("list", &["--json", filter])
            .await
            .ended(0)
            .json();
        assert_eq!(numbers(&json, ["matching"]), [matching], "{filter}");
    }
}

/// `show` has what `list` has; the payload only if it is asked for.
async fn is_shown_as_known(given_up: &OnKafka, letter: &serde_json::Value) {
    let origin = letter["origin"].as_str().expect("an origin");
    let at = letter["at"].as_str().expect("a place");
    let shown = given_up.dead_letters("show", &[at]).await;
    assert_eq!(shown.ended(0).line("message "), format!("message {origin}"));
    assert!(
        !shown.out.contains("visa-of-alice") && !shown.out.contains("kept"),
        "{shown:?}"
    );
    let shown = given_up
        .dead_letters("show", &[at, "--payload", "--json"])
        .await
        .ended(0)
        .json();
    assert_eq!(shown["content"]["payload"], order(0));
    assert_eq!(
        shown["content"]["headers"],
        serde_json::json!([["own", "kept"]])
    );
    given_up
        .dead_letters("show", &["elsewhere/0@1"])
        .await
        .ended(1)
        .says("no letter");
}

async fn garbage_is_no_position(given_up: &OnKafka) {
    for garbage in ["garbage", "elsewhere/0@", "elsewhere@1", "/0@1"] {
        given_up
            .dead_letters("show", &[garbage])
            .await
            .ended(2)
            .says("is not a position of a dead letter");
        given_up
            .dead_letters("list", &["--at", garbage])
            .await
            .ended(2)
            .says("is not a position");
    }
}

#[tokio::test]
async fn after_another_failure_only_the_new_letter_is_redriven() {
    let given_up = OnKafka::new().await;
    let filter = ["--reason", "order 5"];
    let names = ["wanted", "sent", "reopened", "sent_already"];
    assert_eq!(
        numbers(&given_up.redrive(&filter).await, names),
        [1, 1, 1, 0]
    );
    given_up.consume(1).await;
    // The saved progress is past the old dead letter; without it, both are seen, and one is sent.
    let all = [&filter[..], &["--no-progress", "--dry-run"]].concat();
    assert_eq!(numbers(&given_up.redrive(&all).await, names), [2, 1, 1, 1]);
    assert_eq!(
        numbers(&given_up.redrive(&filter).await, names),
        [1, 1, 1, 0]
    );
    // Another filter has a progress of its own.
    assert_eq!(
        numbers(
            &given_up.redrive(&["--cause", "attempts_used_up"]).await,
            names
        ),
        [1, 1, 1, 0]
    );
    given_up.shop.mend();
    given_up.consume(2).await;
    assert_eq!(
        (given_up.shop.sales().get(&5), given_up.shop.sales().get(&0)),
        (Some(&1), Some(&1))
    );
}

#[tokio::test]
async fn a_redrive_to_another_topic_keeps_route_headers_and_key() {
    let given_up = OnKafka::new().await;
    given_up.shop.mend();
    let other = given_up.kafka.new_topic("other", 1).await;
    let to = ["--to", &other, "--cause", "permanent"];
    assert_eq!(numbers(&given_up.redrive(&to).await, ["sent"]), [9]);
    let sent = given_up.kafka.read_all(&other).await;
    let header = |message: &OwnedMessage, name: &str| {
        let headers = message.headers().expect("headers");
        let found = headers.iter().find(|header| header.key == name);
        found
            .and_then(|header| header.value)
            .map(|value| String::from_utf8_lossy(value).into_owned())
    };
    for message in &sent {
        assert_eq!(
            header(message, "oncegate-route").as_deref(),
            Some(given_up.topic.as_str())
        );
        assert_eq!(header(message, "own").as_deref(), Some("kept"));
        assert_eq!(
            header(message, "oncegate-reason"),
            None,
            "it is no letter any more"
        );
    }
    let source = KafkaSource::new(
        given_up.kafka.bootstrap(),
        unique("group"),
        [other.as_str()],
    );
    let dead = source.dead_letters(given_up.dead.as_str());
    let watched = given_up
        .shop
        .consume(source.routes_from_headers(), dead, 9)
        .await;
    assert_eq!(
        watched.get("extra_runs", "reset"),
        9,
        "the keys are those of the first route"
    );
    assert_eq!(
        given_up.shop.sales().len(),
        usize::try_from(ORDERS).expect("small") - 1
    );
}

#[tokio::test]
async fn a_key_of_another_message_stays_with_it_and_is_reported() {
    let given_up = OnKafka::new().await;
    // The order's number again, with other content.
    let other = Record::new(r#"{"order_id":15,"card":"another"}"#).key("15");
    given_up.kafka.produce(&given_up.topic, [other]).await;
    given_up.consume(1).await;
    let arguments = [&WHY[..], &["--json", "--cause", "mismatch"]].concat();
    let answer = given_up.dead_letters("redrive", &arguments).await;
    let json = answer.ended(1).json();
    assert_eq!(numbers(&json, ["wanted", "sent", "mismatched"]), [1, 0, 1]);
    assert!(
        json["troubles"][0]["why"]
            .as_str()
            .is_some_and(|why| why.contains("another message")),
        "{json}"
    );
    // A message that oncegate did not write has no origin headers; it is sent only with an explicit
    // target.
    let stranger =
        Record::new("a \u{202e}stranger\u{1b}[2J").header("na\u{202e}me", "va\u{2066}lue");
    given_up.kafka.produce(&given_up.dead, [stranger]).await;
    let json = given_up
        .dead_letters("redrive", &["--dry-run", "--json"])
        .await
        .ended(1)
        .json();
    assert_eq!(numbers(&json, ["no_way_back"]), [1]);
    // Nothing of it changes what the terminal shows.
    let list = given_up
        .dead_letters("list", &["--json"])
        .await
        .ended(0)
        .json();
    let strange = list["letters"]
        .as_array()
        .expect("letters")
        .iter()
        .find(|letter| letter["cause"].is_null());
    let at = strange
        .and_then(|letter| letter["at"].as_str())
        .expect("the stranger's place");
    let shown = given_up.dead_letters("show", &[at, "--payload"]).await;
    assert!(
        !shown
            .ended(0)
            .out
            .contains(['\u{202e}', '\u{2066}', '\u{1b}']),
        "{shown:?}"
    );
    for escaped in [
        r"a \u{202e}stranger\u{1b}[2J",
        r"na\u{202e}me",
        r"va\u{2066}lue",
    ] {
        assert!(shown.out.contains(escaped), "{escaped}: {shown:?}");
    }
}
