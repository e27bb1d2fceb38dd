//! Topics that take no message: what waits for them holds up no other topic.

use oncegate::kafka::KafkaPublisher;
use oncegate::outbox::{OutboxMessage, Relay, RelaySettings};
use oncegate_testkit::{Certificates, Kafka, On, Right, SecuredKafka, unique, until};

use crate::world::{LIMIT, PARTITIONS, Running, Table, World, firsts};

const USER: &str = "worker";

/// How many messages a relay reads at once.
const BATCH: u64 = RelaySettings::DEFAULT.batch as u64;

/// More orders than a batch, and than the relay holds back one by one after failures of the broker.
const REFUSED: u64 = 750;

// invariant: outbox-refused
#[tokio::test(flavor = "multi_thread")]
async fn many_orders_of_a_denied_topic_starve_no_other() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let broker = SecuredKafka::start_with(&certificates, &[USER], &[]).await;
    let topics = ["granted", "denied"].map(unique);
    for topic in &topics {
        broker.create_topic(topic, PARTITIONS).await;
    }
    let [granted, denied] = &topics;
    let topic = On::Topic(granted);
    broker
        .grant(&[
            (USER, Right::Write, topic),
            (USER, Right::Describe, On::Topic(denied)),
        ])
        .await;
    let table = Table::new().await;
    table
        .write((0..REFUSED).map(|key| OutboxMessage::new(denied, "0").key(key.to_string())))
        .await;
    let running = Running::start(table.relay_as_user(&broker, &certificates));
    let refused = until("a batch to be refused", LIMIT, async || {
        match running.watched.get("outbox_failures", "refused") {
            failures @ BATCH.. => Ok(failures),
            failures => Err(format!("{failures} tries were refused")),
        }
    })
    .await;
    for key in 0..3 {
        table
            .write([OutboxMessage::new(granted, "0").key(format!("customer-{key}"))])
            .await;
        table.until_unsent(REFUSED).await;
    }
    let tried = running.watched.get("outbox_failures", "refused") - refused;
    assert!(
        tried < 50,
        "{tried} messages of the denied topic were tried before those of the other one"
    );
    // One of the waiting messages finds out that the topic is granted now, and the others follow.
    broker
        .grant(&[(USER, Right::Write, On::Topic(denied))])
        .await;
    table.until_sent().await;
    running.stop().await;
    let kafka: &Kafka = &broker;
    assert_eq!(firsts(&kafka.read_all(denied).await).len() as u64, REFUSED);
    assert_eq!(firsts(&kafka.read_all(granted).await).len(), 3);
}

impl Table {
    fn relay_as_user(&self, broker: &SecuredKafka, certificates: &Certificates) -> Relay {
        let authority = certificates.file("ca.pem").display().to_string();
        let publisher = KafkaPublisher::new(broker.sasl())
            .property("security.protocol", "sasl_ssl")
            .property("ssl.ca.location", authority)
            .property("sasl.mechanism", "SCRAM-SHA-256")
            .property("sasl.username", USER)
            .property("sasl.password", SecuredKafka::PASSWORD);
        Relay::new(self.outbox.clone(), publisher)
    }
}

// invariant: outbox-refused
#[tokio::test(flavor = "multi_thread")]
async fn a_message_for_a_missing_topic_holds_up_no_other() {
    let world = World::new().await;
    let missing = unique("outbox-missing");
    // So long that the messages are in flight until the end.
    let publisher = KafkaPublisher::new(world.kafka.bootstrap())
        .property("topic.metadata.propagation.max.ms", "300000")
        .property("delivery.timeout.ms", "300000");
    let running = Running::start(Relay::new(world.outbox.clone(), publisher));
    let message = |number: u32| OutboxMessage::new(&missing, number.to_string()).key("a");
    world
        .write([message(0), world.message("a", 0), message(1)])
        .await;
    world.until_unsent(2).await;
    for number in 1..4 {
        world
            .write([world.message("a", number), world.message("b", number - 1)])
            .await;
        world.until_unsent(2).await;
    }
    assert_eq!(running.watched.total("outbox_failures"), 0);
    // It arrives in order once there is its topic.
    world.kafka.create_topic(&missing, PARTITIONS).await;
    world.until_sent().await;
    running.stop().await;
    assert_eq!(
        firsts(&world.kafka.read_all(&missing).await).get("a"),
        Some(&vec![0, 1])
    );
    assert_eq!(
        firsts(&world.published().await).get("a"),
        Some(&vec![0, 1, 2, 3])
    );
}

// invariant: outbox-refused
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_created_later_is_published() {
    let world = World::new().await;
    let missing = unique("outbox-missing");
    let running = Running::start(world.relay());
    world
        .write((0..REFUSED).map(|key| OutboxMessage::new(&missing, "0").key(key.to_string())))
        .await;
    until("a try that is refused", LIMIT, async || {
        match running.watched.get("outbox_failures", "refused") {
            1.. => Ok(()),
            _ => Err("none was refused".to_owned()),
        }
    })
    .await;
    world.write([world.message("a", 0)]).await;
    world.until_unsent(REFUSED).await;
    world.kafka.create_topic(&missing, PARTITIONS).await;
    world.until_sent().await;
    running.stop().await;
    assert_eq!(
        firsts(&world.kafka.read_all(&missing).await).len() as u64,
        REFUSED
    );
}
