//! A broker with a topic full of payments: a real one, or librdkafka's mock in this process.

use std::collections::BTreeSet;
use std::time::Duration;

use fastrand::Rng;
use indicatif::ProgressBar;
use oncegate::BoxError;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};

const PARTITIONS: i32 = 6;
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Broker {
    bootstrap: String,
    topic: String,
    reader: BaseConsumer,
    /// The broker lives as long as this.
    _mock: Option<MockCluster<'static, DefaultProducerContext>>,
}

/// What was produced: an expectation that no worker knows.
#[derive(Debug)]
pub(crate) struct Produced {
    pub(crate) messages: u64,
    pub(crate) payments: u64,
    pub(crate) orders: BTreeSet<String>,
}

impl Broker {
    pub(crate) fn start(bootstrap: Option<&str>, run: &str) -> Result<Self, BoxError> {
        let topic = format!("{run}-topic");
        let (bootstrap, mock) = match bootstrap {
            Some(bootstrap) => {
                create_topic(bootstrap, &topic)?;
                (bootstrap.to_owned(), None)
            }
            None => {
                let mock = MockCluster::new(1)?;
                mock.create_topic(&topic, PARTITIONS, 1)?;
                (mock.bootstrap_servers(), Some(mock))
            }
        };
        let reader =
            ClientConfig::new().set("bootstrap.servers", &bootstrap).set("group.id", "none").create()?;
        Ok(Self { bootstrap, topic, reader, _mock: mock })
    }

    pub(crate) fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    pub(crate) fn topic(&self) -> &str {
        &self.topic
    }

    /// Produces payments, about a third of them again: with another message id and time, another order of the
    /// fields, and `10` spelt `10.0`.
    pub(crate) fn produce(&self, messages: u32, seed: u64, bar: &ProgressBar) -> Result<Produced, BoxError> {
        let mut rng = Rng::with_seed(seed);
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap).set("linger.ms", "5");
        let producer: ThreadedProducer<DefaultProducerContext> = config.create()?;
        let mut orders: Vec<(String, u32)> = Vec::new();
        for n in 0..messages {
            let again = !orders.is_empty() && rng.u32(..3) == 0;
            let payload = if again {
                let (order, amount) = rng.choice(&orders).ok_or("no orders")?;
                format!(r#"{{"sent_at":{n},"amount":{amount}.0,"message_id":"m-{n}","order_id":"{order}"}}"#)
            } else {
                let (order, amount) = (format!("order-{}", orders.len()), rng.u32(1..1_000));
                orders.push((order.clone(), amount));
                format!(r#"{{"message_id":"m-{n}","order_id":"{order}","amount":{amount},"sent_at":{n}}}"#)
            };
            send(&producer, &self.topic, &payload, &rng.u32(..500).to_string())?;
            bar.inc(1);
        }
        producer.flush(TIMEOUT)?;
        let orders: BTreeSet<String> = orders.into_iter().map(|(order, _)| order).collect();
        Ok(Produced { messages: messages.into(), payments: orders.len() as u64, orders })
    }

    /// A client that can ask what a group has acknowledged, without joining it.
    pub(crate) fn asker(&self, group: &str) -> Result<BaseConsumer, BoxError> {
        let mut config = ClientConfig::new();
        Ok(config.set("bootstrap.servers", &self.bootstrap).set("group.id", group).create()?)
    }

    /// Whether the asker's group has acknowledged the whole topic.
    pub(crate) fn is_consumed(&self, asker: &BaseConsumer) -> Result<bool, BoxError> {
        let mut list = TopicPartitionList::new();
        list.add_partition_range(&self.topic, 0, PARTITIONS - 1);
        let committed = asker.committed_offsets(list, TIMEOUT)?;
        for partition in 0..PARTITIONS {
            let (_, end) = self.reader.fetch_watermarks(&self.topic, partition, TIMEOUT)?;
            let offset = committed.find_partition(&self.topic, partition).map(|found| found.offset());
            if end > 0 && offset != Some(Offset::Offset(end)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The broker key is at random: duplicates come on any partition, as after a change of the partition count.
fn send(
    producer: &ThreadedProducer<DefaultProducerContext>,
    topic: &str,
    payload: &str,
    key: &str,
) -> Result<(), BoxError> {
    loop {
        match producer.send(BaseRecord::to(topic).payload(payload).key(key)) {
            Ok(()) => return Ok(()),
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                producer.flush(TIMEOUT)?;
            }
            Err((error, _)) => return Err(error.into()),
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn create_topic(bootstrap: &str, topic: &str) -> Result<(), BoxError> {
    let admin: AdminClient<DefaultClientContext> =
        ClientConfig::new().set("bootstrap.servers", bootstrap).create()?;
    let topics = [NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1))];
    let options = AdminOptions::new().operation_timeout(Some(TIMEOUT)).request_timeout(Some(TIMEOUT));
    for created in admin.create_topics(&topics, &options).await? {
        created.map_err(|(topic, error)| format!("cannot create the topic {topic}: {error}"))?;
    }
    Ok(())
}
