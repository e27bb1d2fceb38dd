//! Kafka as its clients see it: messages in and out, and what a group has committed.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::groups::GroupInfo;
use rdkafka::message::OwnedMessage;
use rdkafka::metadata::{MetadataPartition, MetadataTopic};
use rdkafka::producer::{DeliveryFuture, FutureProducer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};
use tokio::sync::OnceCell;

use crate::broker::{self, KafkaBroker};
use crate::record::Record;

/// Names the Kafka broker of the run: `127.0.0.1:9092`.
pub const VARIABLE: &str = "ONCEGATE_TEST_KAFKA";

/// How long one request may take on a busy machine.
pub(crate) const REQUEST_LIMIT: Duration = Duration::from_secs(30);

/// How long a single answer is waited for when there may be a retry.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How long to wait before asking again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// How many messages [`Kafka::produce`] has in flight at once.
const IN_FLIGHT_MAX: usize = 20_000;

/// The largest message that [`Kafka::produce`] sends and [`Kafka::read_all`] fetches, in bytes; the
/// brokers of [`KafkaBroker`] take as much.
const MESSAGE_BYTES_MAX: &str = "8388608";

/// A Kafka that answers, as its clients see it.
#[derive(Clone, Debug)]
pub struct Kafka {
    bootstrap: String,
}

impl Kafka {
    /// The broker of this run: the one that [`VARIABLE`] names, or else one that this process
    /// starts on first use. Other tests use it at the same time: keep to topics and groups of
    /// [`unique`](crate::unique) names.
    ///
    /// # Panics
    /// When it cannot be reached or started.
    pub async fn shared() -> Self {
        static NAMED: OnceCell<Kafka> = OnceCell::const_new();
        static OWN: OnceCell<KafkaBroker> = OnceCell::const_new();
        match std::env::var(VARIABLE) {
            Ok(bootstrap) => NAMED.get_or_init(|| Self::reached(bootstrap)).await.clone(),
            Err(_) => (**OWN.get_or_init(KafkaBroker::start_for_long).await).clone(),
        }
    }

    async fn reached(bootstrap: String) -> Self {
        let kafka = Self::at(bootstrap);
        let deadline = Instant::now() + REQUEST_LIMIT;
        while let Err(error) = broker::cluster_id_at(kafka.clone()).await {
            assert!(
                Instant::now() < deadline,
                "{VARIABLE} names {}, which does not answer: {error}",
                kafka.bootstrap
            );
        }
        kafka
    }

    /// The Kafka at this address, `host:port`, without a check that it answers.
    #[must_use]
    pub fn at(bootstrap: impl Into<String>) -> Self {
        Self {
            bootstrap: bootstrap.into(),
        }
    }

    /// The address for clients: `host:port`.
    #[must_use]
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Settings for another client, with nothing but the address.
    #[must_use]
    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap);
        config
    }

    /// Produces the records in their order, waits until the broker has them all, and returns where
    /// each is: partition and offset.
    ///
    /// # Panics
    /// When one cannot be delivered.
    pub async fn produce(
        &self,
        topic: &str,
        records: impl IntoIterator<Item = Record, IntoIter: Send> + Send,
    ) -> Vec<(i32, i64)> {
        let mut config = self.config();
        config
            .set("linger.ms", "5")
            .set("enable.idempotence", "true");
        config.set("message.max.bytes", MESSAGE_BYTES_MAX);
        let producer: FutureProducer = config.create().expect("the settings are valid");
        let mut sent = Vec::new();
        let mut waiting = VecDeque::new();
        for record in records {
            while waiting.len() >= IN_FLIGHT_MAX {
                sent.push(delivered(&mut waiting).await);
            }
            loop {
                match producer.send_result(record.to_future_record(topic)) {
                    Ok(delivery) => break waiting.push_back(delivery),
                    Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _))
                        if !waiting.is_empty() =>
                    {
                        sent.push(delivered(&mut waiting).await);
                    }
                    Err((error, _)) => panic!("cannot produce to {topic}: {error}"),
                }
            }
        }
        while !waiting.is_empty() {
            sent.push(delivered(&mut waiting).await);
        }
        sent
    }

    /// Every message of the topic, partition by partition, up to the end it has now.
    ///
    /// # Panics
    /// When the topic does not exist, or the broker does not answer.
    pub async fn read_all(&self, topic: &str) -> Vec<OwnedMessage> {
        let kafka = self.clone();
        let topic = topic.to_owned();
        blocking(move || kafka.read_to_end(&topic)).await
    }

    /// The offset after the last message, for each partition.
    ///
    /// # Panics
    /// When the topic does not exist, or the broker does not answer.
    pub async fn end_offsets(&self, topic: &str) -> BTreeMap<i32, i64> {
        let kafka = self.clone();
        let topic = topic.to_owned();
        blocking(move || {
            let client = kafka.witness("");
            let end = |partition| {
                let marks = || client.fetch_watermarks(&topic, partition, ANSWER_LIMIT);
                (partition, patiently(&format!("end of {topic}"), marks).1)
            };
            partitions(&client, &topic).into_iter().map(end).collect()
        })
        .await
    }

    /// What the group has committed, as the broker reports it to another client; partitions without
    /// a commit are absent.
    ///
    /// # Panics
    /// When the topic does not exist, or the broker does not answer.
    pub async fn committed_offsets(&self, group: &str, topic: &str) -> BTreeMap<i32, i64> {
        let offset = |one: &TopicPartitionListElem<'_>| match one.offset() {
            Offset::Offset(offset) => Some((one.partition(), offset)),
            _ => None,
        };
        self.committed(group, topic, offset)
            .await
            .into_iter()
            .collect()
    }

    /// The texts that the group keeps with its commits.
    ///
    /// # Panics
    /// When the topic does not exist, or the broker does not answer.
    pub async fn commit_metadata(&self, group: &str, topic: &str) -> Vec<String> {
        self.committed(group, topic, |one| Some(one.metadata().to_owned()))
            .await
    }

    /// What `read` finds in the group's commit of each partition.
    async fn committed<T: Send + 'static>(
        &self,
        group: &str,
        topic: &str,
        read: impl Fn(&TopicPartitionListElem<'_>) -> Option<T> + Send + 'static,
    ) -> Vec<T> {
        let kafka = self.clone();
        let group = group.to_owned();
        let topic = topic.to_owned();
        blocking(move || {
            let client = kafka.witness(&group);
            let mut asked = TopicPartitionList::new();
            for partition in partitions(&client, &topic) {
                asked.add_partition(&topic, partition);
            }
            let ask = || client.committed_offsets(asked.clone(), ANSWER_LIMIT);
            let committed = patiently(&format!("offsets of group {group}"), ask);
            committed.elements().iter().filter_map(read).collect()
        })
        .await
    }

    /// Commits a position of a group without members, as a client does that does not use oncegate.
    ///
    /// # Panics
    /// When the broker refuses.
    pub async fn commit(&self, group: &str, topic: &str, partition: i32, offset: i64) {
        let kafka = self.clone();
        let group = group.to_owned();
        let topic = topic.to_owned();
        blocking(move || {
            let client = kafka.witness(&group);
            let mut list = TopicPartitionList::new();
            list.add_partition(&topic, partition)
                .set_offset(Offset::Offset(offset))
                .expect("an offset");
            patiently(&format!("a commit of group {group}"), || {
                client.commit(&list, CommitMode::Sync)
            });
        })
        .await;
    }

    /// How many members a group has.
    ///
    /// # Panics
    /// When the broker does not answer.
    pub async fn members(&self, group: &str) -> usize {
        let kafka = self.clone();
        let group = group.to_owned();
        blocking(move || {
            let client = kafka.witness(&group);
            let ask = || client.fetch_group_list(Some(&group), ANSWER_LIMIT);
            let listed = patiently(&format!("members of group {group}"), ask);
            listed
                .groups()
                .iter()
                .map(|group| group.members().len())
                .sum()
        })
        .await
    }

    /// The topics and consumer groups whose names begin so.
    ///
    /// # Panics
    /// When the broker does not answer.
    pub async fn named(&self, beginning: &'static str) -> Vec<String> {
        let kafka = self.clone();
        blocking(move || {
            let client = kafka.witness("");
            let topics = patiently("all topics", || client.fetch_metadata(None, ANSWER_LIMIT));
            let groups = patiently("all groups", || client.fetch_group_list(None, ANSWER_LIMIT));
            let topics = topics.topics().iter().map(MetadataTopic::name);
            let names = topics.chain(groups.groups().iter().map(GroupInfo::name));
            names
                .filter(|name| name.starts_with(beginning))
                .map(str::to_owned)
                .collect()
        })
        .await
    }

    /// A consumer that never joins its group and commits nothing.
    pub(crate) fn witness(&self, group: &str) -> BaseConsumer {
        let mut config = self.config();
        config
            .set("group.id", if group.is_empty() { "witness" } else { group })
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("fetch.message.max.bytes", MESSAGE_BYTES_MAX);
        config.create().expect("the settings are valid")
    }

    fn read_to_end(&self, topic: &str) -> Vec<OwnedMessage> {
        let client = self.witness("");
        let mut assignment = TopicPartitionList::new();
        let mut open = partitions(&client, topic);
        for partition in &open {
            let added = assignment
                .add_partition(topic, *partition)
                .set_offset(Offset::Beginning);
            added.expect("the beginning is an offset");
        }
        client
            .assign(&assignment)
            .expect("partitions can be assigned");
        let mut messages = Vec::new();
        let mut deadline = Instant::now() + REQUEST_LIMIT;
        while !open.is_empty() {
            match client.poll(ANSWER_LIMIT) {
                Some(Ok(message)) => {
                    messages.push(message.detach());
                    deadline = Instant::now() + REQUEST_LIMIT;
                }
                Some(Err(KafkaError::PartitionEOF(ended))) => open.retain(|one| *one != ended),
                Some(Err(error)) => panic!("cannot read {topic}: {error}"),
                None => assert!(
                    Instant::now() < deadline,
                    "cannot read {topic}: nothing came for {REQUEST_LIMIT:?}"
                ),
            }
        }
        messages.sort_by_key(|message| {
            use rdkafka::Message;
            (message.partition(), message.offset())
        });
        messages
    }
}

/// Runs what librdkafka can only do by blocking, away from the runtime's own threads.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Asks again for a while: leaders and coordinators move, and a new topic is not known to every
/// broker at once.
pub(crate) fn patiently<T, E: Display>(what: &str, ask: impl Fn() -> Result<T, E>) -> T {
    let deadline = Instant::now() + REQUEST_LIMIT;
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error}"),
        }
        std::thread::sleep(ASK_AGAIN_AFTER);
    }
}

fn partitions(client: &BaseConsumer, topic: &str) -> Vec<i32> {
    let metadata = client.fetch_metadata(Some(topic), REQUEST_LIMIT);
    let metadata = metadata.unwrap_or_else(|error| panic!("metadata of {topic}: {error}"));
    let found = metadata.topics().iter().flat_map(MetadataTopic::partitions);
    let ids: Vec<i32> = found.map(MetadataPartition::id).collect();
    assert!(!ids.is_empty(), "topic {topic} does not exist");
    ids
}

/// Waits for the oldest message in flight.
async fn delivered(waiting: &mut VecDeque<DeliveryFuture>) -> (i32, i64) {
    let oldest = waiting.pop_front().expect("callers look first");
    match oldest.await.expect("the producer lives") {
        Ok(delivery) => (delivery.partition, delivery.offset),
        Err((error, _)) => panic!("a message was not delivered: {error}"),
    }
}
