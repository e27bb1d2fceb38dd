//! A broker with topics: a real one, or librdkafka's mock in this process.

use std::fmt;
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

/// A broker; one that this process started stops when this value is dropped.
pub struct Broker {
    bootstrap: String,
    reader: BaseConsumer,
    mock: Option<MockCluster<'static, DefaultProducerContext>>,
}

/// Sends messages to a topic.
pub struct Sender<'a> {
    producer: ThreadedProducer<DefaultProducerContext>,
    topic: &'a str,
}

impl Broker {
    /// The broker at `bootstrap`, or one in this process.
    ///
    /// # Errors
    /// When there is none.
    pub fn start(bootstrap: Option<&str>) -> Result<Self, BoxError> {
        let (bootstrap, mock) = match bootstrap {
            Some(bootstrap) => (bootstrap.to_owned(), None),
            None => {
                let mock = MockCluster::new(1)?;
                (mock.bootstrap_servers(), Some(mock))
            }
        };
        let reader = ClientConfig::new()
            .set("bootstrap.servers", &bootstrap)
            .set("group.id", "none")
            .create()?;
        Ok(Self {
            bootstrap,
            reader,
            mock,
        })
    }

    /// `host:port`.
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Makes a topic.
    ///
    /// # Errors
    /// When it exists, or the broker refuses.
    pub fn create_topic(&self, topic: &str) -> Result<(), BoxError> {
        match &self.mock {
            Some(mock) => Ok(mock.create_topic(topic, PARTITIONS, 1)?),
            None => create_topic(&self.bootstrap, topic),
        }
    }

    /// Sends messages to `topic`.
    ///
    /// # Errors
    /// When the client cannot be made.
    pub fn sender<'a>(&self, topic: &'a str) -> Result<Sender<'a>, BoxError> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.bootstrap)
            .set("linger.ms", "5");
        Ok(Sender {
            producer: config.create()?,
            topic,
        })
    }

    /// Sends the payloads with broker keys at random: duplicates come on any partition, as after a
    /// change of the partition count.
    ///
    /// # Errors
    /// When the broker does not take them.
    pub fn produce(
        &self,
        topic: &str,
        payloads: &[String],
        bar: &ProgressBar,
    ) -> Result<(), BoxError> {
        let sender = self.sender(topic)?;
        // The same keys for as many messages.
        let mut rng = Rng::with_seed(payloads.len() as u64);
        for payload in payloads {
            sender.send(payload, &rng.u32(..500).to_string())?;
            bar.inc(1);
        }
        sender.flush()
    }

    /// Returns the number of messages in a topic.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub fn count(&self, topic: &str) -> Result<u64, BoxError> {
        let ends = (0..PARTITIONS).map(|partition| self.end(topic, partition));
        Ok(ends.sum::<Result<i64, BoxError>>()?.unsigned_abs())
    }

    fn end(&self, topic: &str, partition: i32) -> Result<i64, BoxError> {
        Ok(self.reader.fetch_watermarks(topic, partition, TIMEOUT)?.1)
    }

    /// A client that can ask what a group has acknowledged, without joining it.
    ///
    /// # Errors
    /// When the client cannot be made.
    pub fn asker(&self, group: &str) -> Result<BaseConsumer, BoxError> {
        let mut config = ClientConfig::new();
        Ok(config
            .set("bootstrap.servers", &self.bootstrap)
            .set("group.id", group)
            .create()?)
    }

    /// Returns whether the asker's group has acknowledged the whole topic.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub fn is_consumed(&self, asker: &BaseConsumer, topic: &str) -> Result<bool, BoxError> {
        Ok(self.lag(asker, topic)? == 0)
    }

    /// Returns the number of messages of the topic that the asker's group has not acknowledged.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub fn lag(&self, asker: &BaseConsumer, topic: &str) -> Result<i64, BoxError> {
        let mut list = TopicPartitionList::new();
        list.add_partition_range(topic, 0, PARTITIONS - 1);
        let mut lag = 0;
        for committed in asker.committed_offsets(list, TIMEOUT)?.elements() {
            let end = self.end(topic, committed.partition())?;
            lag += match committed.offset() {
                Offset::Offset(offset) => end - offset,
                _ => end,
            };
        }
        Ok(lag)
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broker")
            .field("bootstrap", &self.bootstrap)
            .finish_non_exhaustive()
    }
}

impl Sender<'_> {
    /// Sends a message; [`flush`](Self::flush) waits for it.
    ///
    /// # Errors
    /// When the client does not take it.
    pub fn send(&self, payload: &str, key: &str) -> Result<(), BoxError> {
        loop {
            match self
                .producer
                .send(BaseRecord::to(self.topic).payload(payload).key(key))
            {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                    self.flush()?;
                }
                Err((error, _)) => return Err(error.into()),
            }
        }
    }

    /// Waits until the broker has all messages.
    ///
    /// # Errors
    /// When it does not take them in time.
    pub fn flush(&self) -> Result<(), BoxError> {
        Ok(self.producer.flush(TIMEOUT)?)
    }
}

impl fmt::Debug for Sender<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

fn create_topic(bootstrap: &str, topic: &str) -> Result<(), BoxError> {
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .create()?;
    let topics = [NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1))];
    let options = AdminOptions::new()
        .operation_timeout(Some(TIMEOUT))
        .request_timeout(Some(TIMEOUT));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    for created in runtime.block_on(admin.create_topics(&topics, &options))? {
        created.map_err(|(topic, error)| format!("cannot create the topic {topic}: {error}"))?;
    }
    Ok(())
}
