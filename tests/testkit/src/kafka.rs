//! Kafka as its clients see it: topics, messages in and out, and what a group has committed.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::time::{Duration, Instant};

use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier,
    TopicReplication,
};
use rdkafka::client::DefaultClientContext;
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
const REQUEST_LIMIT: Duration = Duration::from_secs(30);

/// How long a single answer is waited for when there may be a retry.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
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

    /// Makes a topic of a new name that starts with `prefix`, and returns the name.
    ///
    /// # Panics
    /// As [`Kafka::create_topic`].
    pub async fn new_topic(&self, prefix: &str, partitions: i32) -> String {
        let name = crate::unique(prefix);
        self.create_topic(&name, partitions).await;
        name
    }

    /// Makes a topic with one replica, and waits until every partition has a leader.
    ///
    /// # Panics
    /// When it exists, or the broker refuses or does not answer.
    pub async fn create_topic(&self, name: &str, partitions: i32) {
        self.create_replicated_topic(name, partitions, 1).await;
    }

    /// Makes a topic with so many replicas, and waits until every partition has a leader.
    ///
    /// # Panics
    /// As [`Kafka::create_topic`].
    pub async fn create_replicated_topic(&self, name: &str, partitions: i32, replicas: i32) {
        self.create(NewTopic::new(
            name,
            partitions,
            TopicReplication::Fixed(replicas),
        ))
        .await;
    }

    /// Makes a topic with one partition that is compacted as soon as its broker's cleaner runs
    /// (every 15 s, unless `log.cleaner.backoff.ms` is set). What comes a tenth of a second later
    /// begins another segment; the last one is not compacted.
    ///
    /// # Panics
    /// As [`Kafka::create_topic`].
    pub async fn create_compacted_topic(&self, name: &str) {
        let topic = NewTopic::new(name, 1, TopicReplication::Fixed(1))
            .set("cleanup.policy", "compact")
            .set("min.cleanable.dirty.ratio", "0.001")
            .set("segment.ms", "100");
        self.create(topic).await;
    }

    /// Makes a topic with one partition and these settings.
    ///
    /// # Panics
    /// As [`Kafka::create_topic`].
    pub async fn create_topic_with(&self, name: &str, settings: &[(&str, &str)]) {
        let topic = NewTopic::new(name, 1, TopicReplication::Fixed(1));
        self.create(
            settings
                .iter()
                .fold(topic, |topic, (name, value)| topic.set(name, value)),
        )
        .await;
    }

    async fn create(&self, topic: NewTopic<'_>) {
        let answer = self.admin().create_topics([&topic], &options()).await;
        check(&answer.map(|mut all| all.remove(0)), "create", topic.name);
        let (kafka, name, partitions) = (self.clone(), topic.name.to_owned(), topic.num_partitions);
        blocking(move || kafka.await_leaders(&name, partitions)).await;
    }

    /// The broker that leads a partition now.
    ///
    /// # Panics
    /// When there is no such partition, or it has no leader within the limit of a request.
    pub async fn leader(&self, topic: &str, partition: i32) -> i32 {
        let (kafka, topic) = (self.clone(), topic.to_owned());
        blocking(move || {
            let client = kafka.witness("");
            patiently(&format!("the leader of {topic}/{partition}"), || {
                let metadata = client.fetch_metadata(Some(&topic), ANSWER_LIMIT);
                let metadata = metadata.map_err(|error| error.to_string())?;
                let mut partitions = metadata.topics().iter().flat_map(MetadataTopic::partitions);
                let leader = partitions
                    .find(|found| found.id() == partition)
                    .map(MetadataPartition::leader);
                leader
                    .filter(|leader| *leader >= 0)
                    .ok_or_else(|| "it has none".to_owned())
            })
        })
        .await
    }

    /// Sets the session timeout of a group of the new protocol, and a heartbeat interval of a tenth
    /// of it.
    ///
    /// # Panics
    /// When the broker refuses or does not answer.
    pub async fn set_session(&self, group: &str, session: Duration) {
        let (session, heartbeat) = (
            session.as_millis().to_string(),
            (session / 10).as_millis().to_string(),
        );
        let change = AlterConfig::new(ResourceSpecifier::Group(group))
            .set("consumer.session.timeout.ms", &session)
            .set("consumer.heartbeat.interval.ms", &heartbeat);
        let answer = self.admin().alter_configs(&[change], &options()).await;
        let answer = answer.unwrap_or_else(|error| panic!("cannot set up group {group}: {error}"));
        assert!(
            answer.iter().all(Result::is_ok),
            "cannot set up group {group}: {answer:?}"
        );
    }

    /// Has the topic have so many partitions, and waits until each has a leader.
    ///
    /// # Panics
    /// When the broker refuses or does not answer.
    pub async fn add_partitions(&self, name: &str, partitions: i32) {
        let count = usize::try_from(partitions).expect("a number of partitions");
        let answer = self
            .admin()
            .create_partitions([&NewPartitions::new(name, count)], &options())
            .await;
        check(&answer.map(|mut all| all.remove(0)), "extend", name);
        let (kafka, name) = (self.clone(), name.to_owned());
        blocking(move || kafka.await_leaders(&name, partitions)).await;
    }

    /// Deletes a topic. The broker forgets it a moment later.
    ///
    /// # Panics
    /// When the broker refuses or does not answer.
    pub async fn delete_topic(&self, name: &str) {
        let answer = self.admin().delete_topics(&[name], &options()).await;
        check(&answer.map(|mut all| all.remove(0)), "delete", name);
    }

    /// Deletes the messages of a partition before `offset`, as the topic's retention would.
    ///
    /// # Panics
    /// When the broker refuses or does not answer.
    pub async fn delete_records(&self, topic: &str, partition: i32, offset: i64) {
        let mut before = TopicPartitionList::new();
        before
            .add_partition(topic, partition)
            .set_offset(Offset::Offset(offset))
            .expect("an offset is one");
        let deleted = self.admin().delete_records(&before, &options()).await;
        let deleted =
            deleted.unwrap_or_else(|error| panic!("cannot delete records of {topic}: {error}"));
        let elements = deleted.elements();
        let element = elements
            .first()
            .expect("the answer is about this partition");
        element
            .error()
            .unwrap_or_else(|error| panic!("cannot delete records of {topic}: {error}"));
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
        let (mut sent, mut waiting) = (Vec::new(), VecDeque::new());
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
        let (kafka, topic) = (self.clone(), topic.to_owned());
        blocking(move || kafka.read_to_end(&topic)).await
    }

    /// The offset after the last message, for each partition.
    ///
    /// # Panics
    /// When the topic does not exist, or the broker does not answer.
    pub async fn end_offsets(&self, topic: &str) -> BTreeMap<i32, i64> {
        let (kafka, topic) = (self.clone(), topic.to_owned());
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
        let (kafka, group, topic) = (self.clone(), group.to_owned(), topic.to_owned());
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
        let (kafka, group, topic) = (self.clone(), group.to_owned(), topic.to_owned());
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
        let (kafka, group) = (self.clone(), group.to_owned());
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

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.config().create().expect("the settings are valid")
    }

    /// A consumer that never joins its group and commits nothing.
    fn witness(&self, group: &str) -> BaseConsumer {
        let mut config = self.config();
        config
            .set("group.id", if group.is_empty() { "witness" } else { group })
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("fetch.message.max.bytes", MESSAGE_BYTES_MAX);
        config.create().expect("the settings are valid")
    }

    fn await_leaders(&self, topic: &str, count: i32) {
        let client = self.witness("");
        patiently(&format!("leaders of {topic}"), || {
            let metadata = client.fetch_metadata(Some(topic), ANSWER_LIMIT);
            let metadata = metadata.map_err(|error| error.to_string())?;
            let partitions = metadata.topics().iter().flat_map(MetadataTopic::partitions);
            let led = partitions
                .filter(|partition| partition.leader() >= 0)
                .count();
            if i32::try_from(led) == Ok(count) {
                Ok(())
            } else {
                Err(format!("{led} of {count} have one"))
            }
        });
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
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Asks again for a while: leaders and coordinators move, and a new topic is not known to every
/// broker at once.
fn patiently<T, E: Display>(what: &str, ask: impl Fn() -> Result<T, E>) -> T {
    let deadline = Instant::now() + REQUEST_LIMIT;
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error}"),
        }
        std::thread::sleep(ASK_AGAIN_AFTER);
    }
}

fn options() -> AdminOptions {
    AdminOptions::new()
        .request_timeout(Some(REQUEST_LIMIT))
        .operation_timeout(Some(REQUEST_LIMIT))
}

fn check(
    answer: &Result<Result<String, (String, RDKafkaErrorCode)>, KafkaError>,
    verb: &str,
    topic: &str,
) {
    match answer {
        Ok(Ok(_)) => {}
        Ok(Err((_, code))) => panic!("cannot {verb} topic {topic}: {code}"),
        Err(error) => panic!("cannot {verb} topic {topic}: {error}"),
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
