//! Tests of the producer.

use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

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

/// What brokers that came and went have left behind: a client without a connection.
fn without_a_connection(producer: &DurableProducer) {
    let mut current = producer.current();
    let client = ClientConfig::new()
        .set("bootstrap.servers", "127.0.0.1:1")
        .set("delivery.timeout.ms", "500")
        .create_with_context(current.context.clone())
        .expect("the settings are valid");
    current.client = client;
}

const LETTER: Content<'_> = Content {
    partition: None,
    key: None,
    payload: Some(b"letter"),
};

// invariant: dead-letter-lost
#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_connection_is_replaced() {
    let brokers: MockCluster<'_, DefaultProducerContext> = MockCluster::new(1).expect("it starts");
    brokers.create_topic("letters", 1, 1).expect("it is made");
    let producer = DurableProducer::new(&brokers.bootstrap_servers(), Properties::default())
        .expect("the settings are valid");
    without_a_connection(&producer);
    // Those that failed at the same time are sent by the one client that replaces it.
    let sends = (0..3).map(|_| producer.send("letters", LETTER, OwnedHeaders::new()));
    for sent in futures_util::future::join_all(sends).await {
        if let Err(error) = sent {
            assert!(is_over(&error), "{error}");
            let again = producer.send("letters", LETTER, OwnedHeaders::new());
            again.await.expect("it is written");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_is_kept_while_no_broker_answers() {
    let properties = Properties::default();
    let producer = DurableProducer::new("127.0.0.1:1", properties).expect("valid");
    without_a_connection(&producer);
    let number = producer.current().number;
    let sent = producer.send("letters", LETTER, OwnedHeaders::new()).await;
    assert!(sent.is_err_and(|error| is_over(&error)));
    assert_eq!(producer.current().number, number);
}
