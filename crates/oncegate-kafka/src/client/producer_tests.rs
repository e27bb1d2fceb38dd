//! Tests of the producer.

use super::*;
use crate::KafkaSource;

#[test]
fn a_producer_takes_over_exactly_the_connection_properties() {
    for name in [
        "security.protocol",
        "sasl.mechanism",
        "ssl.ca.location",
        "enable.ssl.certificate.verification",
        "https.ca.location",
        "client.dns.lookup",
        "reconnect.backoff.ms",
        "reconnect.backoff.max.ms",
    ] {
        assert!(is_connection(name), "{name}");
    }
    for name in [
        "group.protocol",
        "session.timeout.ms",
        "fetch.queue.backoff.ms",
        "enable.auto.commit",
    ] {
        assert!(!is_connection(name), "{name}");
    }
}

#[test]
fn a_producer_reconnects_like_its_consumer_unless_set_otherwise() {
    let (name, value) = settings::RECONNECT;
    let of_producer = |properties: &Properties| {
        let config = config("b:1", &properties.read().expect("no file"))?;
        Ok::<_, SourceError>(config.get(name).map(str::to_owned))
    };
    let source = KafkaSource::new("b:1", "g", ["orders"]);
    assert_eq!(
        of_producer(&source.connection().1)
            .expect("valid")
            .as_deref(),
        Some(value)
    );
    let source = source.property(name, "250");
    assert_eq!(
        of_producer(&source.connection().1)
            .expect("valid")
            .as_deref(),
        Some("250")
    );
}
