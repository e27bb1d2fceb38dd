//! Settings that are accepted, refused and set.

use super::*;

fn property(name: &str, value: &str) -> Property {
    (name.to_owned(), value.to_owned())
}

fn refusal(properties: &[Property]) -> String {
    consumer("b:1", "g", properties)
        .expect_err("refused")
        .to_string()
}

#[test]
fn what_would_break_the_promise_is_refused_by_name() {
    for (name, _) in REFUSED {
        assert!(refusal(&[property(name, "true")]).contains(name), "{name}");
    }
    assert!(
        refusal(&[property("isolation.level", "read_uncommitted")]).contains("isolation.level")
    );
}

#[test]
fn the_promise_is_set_whatever_else_is() {
    let config = consumer("b:1", "g", &[property("queued.min.messages", "1")]).expect("fine");
    for (name, value) in [
        ("enable.auto.commit", "false"),
        ("enable.auto.offset.store", "false"),
        ("auto.offset.reset", "earliest"),
        ("isolation.level", "read_committed"),
        ("partition.assignment.strategy", "cooperative-sticky"),
        ("queued.min.messages", "1"),
        ("reconnect.backoff.max.ms", "1000"),
    ] {
        assert_eq!(config.get(name), Some(value), "{name}");
    }
}

#[test]
fn a_login_in_an_address_is_refused_and_not_repeated() {
    for brokers in [
        "billing:hush@b:9092",
        "b:9092,SASL_SSL://billing:hush@b:9092",
    ] {
        let error = consumer(brokers, "g", &[])
            .expect_err("refused")
            .to_string();
        assert!(
            error.contains("sasl.username") && !error.contains("hush"),
            "{error}"
        );
    }
}

#[test]
fn the_new_group_protocol_gets_no_client_side_assignor() {
    let config = consumer("b:1", "g", &[property("group.protocol", "consumer")]);
    let config = config.expect("fine");
    assert_eq!(config.get("partition.assignment.strategy"), None);
}

#[test]
fn a_password_in_plain_text_to_another_machine_is_noticed() {
    let shows = |brokers: &str, protocol: &str, mechanism: &str| {
        let given = [
            property("security.protocol", protocol),
            property("sasl.mechanism", mechanism),
        ];
        shows_login(brokers, &given)
    };
    assert!(shows("b:9092", "SASL_PLAINTEXT", "PLAIN"));
    assert!(shows(
        "127.0.0.1:9092,b:9092",
        "sasl_plaintext",
        "oauthbearer"
    ));
    for (brokers, protocol, mechanism) in [
        (
            "127.0.0.1:9092, [::1]:9092,localhost",
            "SASL_PLAINTEXT",
            "PLAIN",
        ),
        ("b:9092", "SASL_SSL", "PLAIN"),
        ("b:9092", "SASL_PLAINTEXT", "SCRAM-SHA-256"),
    ] {
        assert!(
            !shows(brokers, protocol, mechanism),
            "{brokers} {protocol} {mechanism}"
        );
    }
}

#[test]
fn what_this_build_cannot_do_is_refused() {
    let mechanism = |value: &str| refusal(&[property("sasl.mechanism", value)]);
    assert!(mechanism("GSSAPI").contains("sasl.mechanism is gssapi"));
    let from_a_file = property("sasl.mechanism", "");
    assert!(consumer("b:1", "g", &[from_a_file]).is_ok());
    if !cfg!(feature = "tls") {
        assert!(refusal(&[property("security.protocol", "SSL")]).contains("kafka-tls"));
    }
}

#[test]
fn topics_are_names_not_patterns() {
    for topic in ["", "^orders.*", "a b", "a\0b", "ö"] {
        assert!(check_topic(topic).is_err(), "{topic:?}");
    }
    assert!(check_topic("orders.v1_x-y").is_ok());
}
