//! The settings of the librdkafka client: what we choose, what a user may change, and what would break the
//! promise.

use std::time::Duration;

use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::KafkaError;

use super::notices::DEBUG_CONTEXT;
use crate::source::SourceError;

/// A setting of librdkafka by name.
pub(crate) type Property = (String, String);

/// Where a group begins that has committed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Beginning,
    End,
}

/// librdkafka's own default, which decides how long a revoke may take.
const MAX_POLL_INTERVAL_DEFAULT: Duration = Duration::from_secs(300);

/// How often the client says where the logs end, for the status; in milliseconds.
const STATISTICS_MS: &str = "5000";

/// Kafka's limit on the names of topics and static members, in bytes.
const NAME_MAX_BYTES: usize = 249;

/// What only oncegate may decide, and what to use instead.
const REFUSED: &[(&str, &str)] = &[
    ("bootstrap.servers", "it is the first argument"),
    ("metadata.broker.list", "the brokers are the first argument"),
    ("group.id", "it is an argument of its own"),
    ("enable.auto.commit", "offsets are committed only behind finished messages"),
    ("auto.commit.enable", "offsets are committed only behind finished messages"),
    ("auto.commit.interval.ms", "use commit_interval"),
    ("enable.auto.offset.store", "offsets are committed only behind finished messages"),
    ("auto.offset.reset", "use from_beginning or from_end; the client's own default skips messages"),
    ("allow.auto.create.topics", "a mistyped topic must be an error, not a new topic"),
    ("offset.store.method", "offsets are kept by the broker"),
    ("enable.partition.eof", "the end of a partition is no event here"),
    ("group.instance.id", "use static_member"),
];

/// Chosen so that small queues are fast and memory is bounded; a user may change them.
const DEFAULTS: &[(&str, &str)] = &[
    ("client.id", "oncegate"),
    // Without it, a fetch that found the queue full is tried again only a second later.
    ("fetch.queue.backoff.ms", "10"),
    ("queued.min.messages", "10000"),
    ("queued.max.messages.kbytes", "16384"),
    ("socket.keepalive.enable", "true"),
    // Idle connections are closed by every broker now and then.
    ("log.connection.close", "false"),
];

/// The configuration of a consumer in `group`, after every check that needs no broker.
pub(crate) fn consumer(
    brokers: &str,
    group: &str,
    start: Start,
    properties: &[Property],
) -> Result<ClientConfig, SourceError> {
    refuse(properties, REFUSED)?;
    if group.is_empty() {
        return Err(SourceError::new("the consumer group has no name"));
    }
    let mut config = client(brokers, properties)?;
    if !new_protocol(&config) && config.get(STRATEGY).is_none() {
        config.set(STRATEGY, "cooperative-sticky");
    }
    if config.get("statistics.interval.ms").is_none() {
        config.set("statistics.interval.ms", STATISTICS_MS);
    }
    let debug = config.get("debug").map(|contexts| format!("{contexts},{DEBUG_CONTEXT}"));
    config.set("debug", debug.as_deref().unwrap_or(DEBUG_CONTEXT));
    config.set("group.id", group);
    config.set("enable.auto.commit", "false");
    config.set("enable.auto.offset.store", "false");
    config.set("auto.offset.reset", if start == Start::Beginning { "earliest" } else { "latest" });
    Ok(config)
}

const STRATEGY: &str = "partition.assignment.strategy";

/// The configuration that every kind of consumer shares.
pub(crate) fn client(brokers: &str, properties: &[Property]) -> Result<ClientConfig, SourceError> {
    if brokers.trim().is_empty() {
        return Err(SourceError::new("no brokers are named: give \"host:port\", several with commas"));
    }
    let uncommitted = |(name, value): &&Property| name == "isolation.level" && value != "read_committed";
    if properties.iter().find(uncommitted).is_some() {
        return Err(SourceError::new(
            "the property isolation.level must stay read_committed: aborted messages never happened",
        ));
    }
    let mut config = ClientConfig::new();
    // What is logged is `tracing`'s to decide, and otherwise would be that of the crate `log`.
    config.set_log_level(RDKafkaLogLevel::Debug);
    config.set("bootstrap.servers", brokers);
    config.set("isolation.level", "read_committed");
    for (name, value) in DEFAULTS {
        config.set(*name, *value);
    }
    for (name, value) in properties {
        config.set(name, value);
    }
    Ok(config)
}

/// Refuses properties that somebody else decides.
pub(crate) fn refuse(properties: &[Property], refused: &[(&str, &str)]) -> Result<(), SourceError> {
    for (name, _) in properties {
        if let Some((_, instead)) = refused.iter().find(|(refused, _)| refused == name) {
            return Err(SourceError::new(format!("the property {name} cannot be set: {instead}")));
        }
    }
    Ok(())
}

/// What Kafka takes for a topic's name.
pub(crate) fn check_topic(topic: &str) -> Result<(), SourceError> {
    check_name("topic", topic)
}

/// What Kafka takes for the name of a topic or of a static member.
pub(crate) fn check_name(what: &str, name: &str) -> Result<(), SourceError> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || name.len() > NAME_MAX_BYTES || !name.bytes().all(legal) {
        return Err(SourceError::new(format!(
            "{name:?} is no {what}: 1 to {NAME_MAX_BYTES} letters, digits, dots, underscores or dashes"
        )));
    }
    Ok(())
}

/// Whether the group uses the new protocol (KIP-848), where the broker assigns.
pub(crate) fn new_protocol(config: &ClientConfig) -> bool {
    config.get("group.protocol").is_some_and(|protocol| protocol.eq_ignore_ascii_case("consumer"))
}

/// How long a consumer with these settings may stay away from `poll`.
pub(crate) fn max_poll_interval(properties: &[Property]) -> Duration {
    let set = properties.iter().rev().find(|(name, _)| name == "max.poll.interval.ms");
    let set = set.and_then(|(_, value)| value.parse().ok()).map(Duration::from_millis);
    set.unwrap_or(MAX_POLL_INTERVAL_DEFAULT)
}

/// A client that cannot be made: which setting is wrong. Its value may be a password, so it is not repeated.
pub(crate) fn unusable(error: KafkaError) -> SourceError {
    match error {
        KafkaError::ClientConfig(_, what, name, _) => {
            SourceError::new(format!("the Kafka property {name} is not usable: {what}"))
        }
        KafkaError::ClientCreation(what) => {
            SourceError::new(format!("the Kafka settings do not fit together: {what}"))
        }
        error => SourceError::caused("the Kafka client cannot be made", error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn property(name: &str, value: &str) -> Property {
        (name.to_owned(), value.to_owned())
    }

    fn refusal(properties: &[Property]) -> String {
        consumer("b:1", "g", Start::Beginning, properties).expect_err("refused").to_string()
    }

    #[test]
    fn what_would_break_the_promise_is_refused_by_name() {
        for (name, _) in REFUSED {
            assert!(refusal(&[property(name, "true")]).contains(name), "{name}");
        }
        assert!(refusal(&[property("isolation.level", "read_uncommitted")]).contains("isolation.level"));
    }

    #[test]
    fn the_promise_is_set_whatever_else_is() {
        let config =
            consumer("b:1", "g", Start::Beginning, &[property("queued.min.messages", "1")]).expect("fine");
        for (name, value) in [
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
            ("auto.offset.reset", "earliest"),
            ("isolation.level", "read_committed"),
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("queued.min.messages", "1"),
        ] {
            assert_eq!(config.get(name), Some(value), "{name}");
        }
    }

    #[test]
    fn the_new_group_protocol_gets_no_client_side_assignor() {
        let config = consumer("b:1", "g", Start::End, &[property("group.protocol", "consumer")]);
        let config = config.expect("fine");
        assert_eq!(config.get("partition.assignment.strategy"), None);
        assert_eq!(config.get("auto.offset.reset"), Some("latest"));
    }

    #[test]
    fn topics_are_names_not_patterns() {
        for topic in ["", "^orders.*", "a b", "a\0b", "ö"] {
            assert!(check_topic(topic).is_err(), "{topic:?}");
        }
        assert!(check_topic("orders.v1_x-y").is_ok());
    }
}
