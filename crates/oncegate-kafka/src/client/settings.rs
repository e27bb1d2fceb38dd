//! The settings of a source and of its librdkafka client: our defaults, what a user may change, and
//! what would break oncegate's guarantees.

use std::time::Duration;

use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::KafkaError;

use super::java_names;
use super::notices::DEBUG_CONTEXT;
pub(crate) use super::properties::Property;
use super::properties::{FileContents, Properties};
use super::source_settings::KafkaSettings;
use super::tokens;
use oncegate_core::settings::Finding;
use oncegate_runtime::source::SourceError;

/// The settings of a member of a group, as its source was given them.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) brokers: String,
    pub(crate) group: String,
    pub(crate) topics: Vec<String>,
    pub(crate) properties: Properties,
    pub(crate) source: KafkaSettings,
}

/// librdkafka's default of `max.poll.interval.ms`, which limits how long a revoke may take.
const MAX_POLL_INTERVAL_DEFAULT: Duration = Duration::from_secs(300);

/// Interval at which the client reports the end offsets, for the status; in milliseconds.
const STATISTICS_MS: &str = "5000";

/// Kafka's limit on the names of topics and static members, in bytes.
const NAME_MAX_BYTES: usize = 249;

/// Properties that only oncegate may set, and what to use instead.
const REFUSED: &[(&str, &str)] = &[
    ("bootstrap.servers", "it is the first argument"),
    ("metadata.broker.list", "the brokers are the first argument"),
    ("group.id", "it is a separate argument"),
    (
        "enable.auto.commit",
        "offsets are committed only after their messages are finished",
    ),
    (
        "auto.commit.enable",
        "offsets are committed only after their messages are finished",
    ),
    ("auto.commit.interval.ms", "use commit_interval"),
    (
        "enable.auto.offset.store",
        "offsets are committed only after their messages are finished",
    ),
    (
        "auto.offset.reset",
        "use from_beginning or from_end; the client's own default skips messages",
    ),
    (
        "allow.auto.create.topics",
        "a mistyped topic must be an error, not a new topic",
    ),
    ("offset.store.method", "the broker stores the offsets"),
    (
        "enable.partition.eof",
        "this source does not use end-of-partition events",
    ),
    ("group.instance.id", "use static_member"),
    // A source produces nothing, and its dead letters and retries take only what connects to the
    // brokers.
    ("acks", FOR_PRODUCERS),
    ("batch.num.messages", FOR_PRODUCERS),
    ("batch.size", FOR_PRODUCERS),
    ("compression.codec", FOR_PRODUCERS),
    ("compression.level", FOR_PRODUCERS),
    ("compression.type", FOR_PRODUCERS),
    ("enable.idempotence", FOR_PRODUCERS),
    ("linger.ms", FOR_PRODUCERS),
    ("partitioner", FOR_PRODUCERS),
    ("queue.buffering.max.ms", FOR_PRODUCERS),
    ("request.required.acks", FOR_PRODUCERS),
    ("transactional.id", FOR_PRODUCERS),
];

const FOR_PRODUCERS: &str = "it has no effect on a consumer; dead letters and retries are written with acks=all and compressed by zstd";

/// The longest wait between two attempts to connect while no broker answers, in milliseconds; the
/// waits double up to it. With the client's default of 10 s, a broker that is back for only a few
/// seconds may be missed.
pub(crate) const RECONNECT: (&str, &str) = ("reconnect.backoff.max.ms", "1000");

/// Defaults that keep small queues fast and bound memory; a user may change them.
const DEFAULTS: &[(&str, &str)] = &[
    ("client.id", "oncegate"),
    // Without it, a fetch that found the queue full is retried only after a second.
    ("fetch.queue.backoff.ms", "10"),
    ("queued.min.messages", "10000"),
    ("queued.max.messages.kbytes", "16384"),
    ("socket.keepalive.enable", "true"),
    RECONNECT,
    // Every broker closes idle connections from time to time.
    ("log.connection.close", "false"),
];

impl Settings {
    /// Runs every check that needs neither a broker nor what is in files.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        check_known(self.checked(&self.properties.unread())?)
    }

    /// Returns the configuration of a client, and what was in the files when it was made.
    pub(crate) fn config(&self) -> Result<(ClientConfig, FileContents), SourceError> {
        // First, so that a change in between is detected later.
        let contents = self.properties.contents();
        Ok((self.checked(&self.properties.read()?)?, contents))
    }

    fn checked(&self, properties: &[Property]) -> Result<ClientConfig, SourceError> {
        if self.topics.is_empty() {
            return Err(SourceError::new("no topic is given; name at least one"));
        }
        for topic in &self.topics {
            check_topic(topic)?;
        }
        if let Some(Finding { what, .. }) = self.source.check().into_iter().next() {
            return Err(SourceError::new(what));
        }
        let max_poll_interval = max_poll_interval(properties);
        if self.source.drain_timeout > max_poll_interval / 2 {
            return Err(SourceError::new(format!(
                "drain_timeout is {:?}, more than half of max.poll.interval.ms ({max_poll_interval:?}): \
                 a slow handler could make the group remove this member",
                self.source.drain_timeout
            )));
        }
        let mut config = consumer(&self.brokers, &self.group, properties)?;
        if let Some(id) = &self.source.static_member {
            check_name("static_member", id)?;
            config.set("group.instance.id", id);
        }
        Ok(config)
    }
}

/// Returns the configuration of a consumer in `group`, after every check that needs no broker.
pub(crate) fn consumer(
    brokers: &str,
    group: &str,
    properties: &[Property],
) -> Result<ClientConfig, SourceError> {
    refuse(properties, REFUSED)?;
    if group.is_empty() {
        return Err(SourceError::new("the name of the consumer group is empty"));
    }
    let mut config = client(brokers, properties)?;
    if !new_protocol(&config) && config.get(STRATEGY).is_none() {
        config.set(STRATEGY, "cooperative-sticky");
    }
    if config.get("statistics.interval.ms").is_none() {
        config.set("statistics.interval.ms", STATISTICS_MS);
    }
    let debug = config
        .get("debug")
        .map(|contexts| format!("{contexts},{DEBUG_CONTEXT}"));
    config.set("debug", debug.as_deref().unwrap_or(DEBUG_CONTEXT));
    config.set("group.id", group);
    config.set("enable.auto.commit", "false");
    config.set("enable.auto.offset.store", "false");
    // For a source that begins at the end, too: see `begin`.
    config.set("auto.offset.reset", "earliest");
    Ok(config)
}

/// The ways to log in.
const MECHANISMS: [&str; 4] = ["plain", "scram-sha-256", "scram-sha-512", "oauthbearer"];

const STRATEGY: &str = "partition.assignment.strategy";

/// Returns the configuration that all consumers share.
pub(crate) fn client(brokers: &str, properties: &[Property]) -> Result<ClientConfig, SourceError> {
    if brokers.trim().is_empty() {
        return Err(SourceError::new(
            "no broker is given: use \"host:port\", separated by commas",
        ));
    }
    check_brokers(brokers)?;
    let is_uncommitted = properties
        .iter()
        .any(|(name, value)| name == "isolation.level" && value != "read_committed");
    if is_uncommitted {
        return Err(SourceError::new(
            "the property isolation.level must stay read_committed: aborted messages must not be handled",
        ));
    }
    check_security(properties)?;
    let mut config = ClientConfig::new();
    // `tracing` filters the log lines. Without this, the level of the crate `log` would apply.
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

/// Refuses a login in the address of a broker, which errors and logs name.
pub(crate) fn check_brokers(brokers: &str) -> Result<(), SourceError> {
    if brokers.contains('@') {
        return Err(SourceError::new(
            "a broker is given with a user or a password: set sasl.username and sasl.password instead",
        ));
    }
    Ok(())
}

/// Returns an error for a kind of protection that this build does not have.
fn check_security(properties: &[Property]) -> Result<(), SourceError> {
    for (name, value) in properties {
        let value = value.to_ascii_lowercase();
        match name.as_str() {
            // What a file contains is not read for this.
            _ if value.is_empty() => {}
            "security.protocol" if value != "plaintext" && !cfg!(feature = "tls") => {
                return Err(SourceError::new(format!(
                    "security.protocol is {value}, and this build has neither TLS nor SASL: enable the feature kafka-tls"
                )));
            }
            "sasl.mechanism" | "sasl.mechanisms" if !MECHANISMS.contains(&value.as_str()) => {
                return Err(SourceError::new(format!(
                    "{name} is {value}, and this build has {} only",
                    MECHANISMS.join(", ").to_ascii_uppercase()
                )));
            }
            _ => {}
        }
    }
    tokens::check(properties)
}

/// Returns whether a password or token would be sent to another machine in plain text.
pub(crate) fn shows_login(brokers: &str, properties: &[Property]) -> bool {
    // SCRAM proves that the client knows the password, and does not send it.
    is_set(properties, &["security.protocol"], &["SASL_PLAINTEXT"])
        && is_set(
            properties,
            &["sasl.mechanism", "sasl.mechanisms"],
            &["PLAIN", "OAUTHBEARER"],
        )
        && !brokers.split(',').all(is_here)
}

/// Returns whether the last property with one of these names has one of these values.
fn is_set(properties: &[Property], names: &[&str], values: &[&str]) -> bool {
    properties
        .iter()
        .rev()
        .find(|(name, _)| names.contains(&name.as_str()))
        .is_some_and(|(_, given)| values.iter().any(|value| given.eq_ignore_ascii_case(value)))
}

/// Returns whether the broker runs on this machine, by its address.
fn is_here(broker: &str) -> bool {
    let address = broker
        .rsplit_once("://")
        .map_or(broker, |(_, address)| address)
        .trim();
    tokens::is_this_machine(
        address
            .rsplit_once(':')
            .map_or(address, |(host, _)| host)
            .trim_matches(['[', ']']),
    )
}

/// Returns an error for a property that only oncegate may set.
pub(crate) fn refuse(properties: &[Property], refused: &[(&str, &str)]) -> Result<(), SourceError> {
    for (name, _) in properties {
        if let Some((_, instead)) = refused.iter().find(|(refused, _)| refused == name) {
            return Err(SourceError::new(format!(
                "the property {name} cannot be set: {instead}"
            )));
        }
    }
    Ok(())
}

/// Checks that Kafka accepts `topic` as the name of a topic.
pub(crate) fn check_topic(topic: &str) -> Result<(), SourceError> {
    // What librdkafka and the Java client take for a pattern.
    let is_pattern = topic.starts_with('^') || topic.contains(['*', '|', '(', '[', '\\', '$']);
    check_name("topic", topic).map_err(|error| {
        if is_pattern {
            SourceError::new(format!(
                "{topic:?} is a pattern, and patterns of topics are not supported: list each topic, because a topic that \
                 joins by itself has a route, and so keys, that nothing was planned for"
            ))
        } else {
            error
        }
    })
}

/// Checks that Kafka accepts `name` for a topic or a static member.
pub(crate) fn check_name(what: &str, name: &str) -> Result<(), SourceError> {
    if name.is_empty() || name.len() > NAME_MAX_BYTES || !name.bytes().all(is_legal) {
        return Err(SourceError::new(format!(
            "{name:?} is no {what}: 1 to {NAME_MAX_BYTES} letters, digits, dots, underscores or dashes"
        )));
    }
    Ok(())
}

fn is_legal(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte)
}

/// Returns whether the group uses the new protocol (KIP-848), in which the broker assigns
/// partitions.
pub(crate) fn new_protocol(config: &ClientConfig) -> bool {
    config
        .get("group.protocol")
        .is_some_and(|protocol| protocol.eq_ignore_ascii_case("consumer"))
}

/// The longest time between two calls of `poll` that these settings allow.
pub(crate) fn max_poll_interval(properties: &[Property]) -> Duration {
    let set = properties
        .iter()
        .rev()
        .find(|(name, _)| name == "max.poll.interval.ms");
    let set = set
        .and_then(|(_, value)| value.parse().ok())
        .map(Duration::from_millis);
    set.unwrap_or(MAX_POLL_INTERVAL_DEFAULT)
}

/// Lets the client library check the names and values of the properties, as far as they are known
/// without their files.
pub(crate) fn check_known(mut config: ClientConfig) -> Result<(), SourceError> {
    tokens::remove(&mut config);
    // The map hides the values that are secret; `get` does not.
    let names: Vec<String> = config
        .config_map()
        .keys()
        .map(|name| (*name).to_owned())
        .collect();
    for name in &names {
        if config.get(name) == Some("") {
            config.remove(name);
        }
    }
    config.create_native_config().map(drop).map_err(unusable)
}

/// Returns the error for a client that cannot be created. It names the setting, but not the value,
/// which may be a password.
pub(crate) fn unusable(error: KafkaError) -> SourceError {
    match error {
        KafkaError::ClientConfig(_, what, name, _) => {
            let instead = java_names::instead(&name).map(|instead| format!("; {instead}"));
            SourceError::new(format!(
                "the Kafka property {name} is not valid: {what}{}",
                instead.unwrap_or_default()
            ))
        }
        KafkaError::ClientCreation(what) => {
            SourceError::new(format!("the Kafka settings contradict each other: {what}"))
        }
        error => SourceError::caused("cannot create the Kafka client", error),
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
