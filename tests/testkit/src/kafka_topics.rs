//! Topics and groups of Kafka: they are made, changed and deleted.

use std::time::Duration;

use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier,
    TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::Consumer;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::metadata::{MetadataPartition, MetadataTopic};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::kafka::{ANSWER_LIMIT, Kafka, REQUEST_LIMIT, blocking, patiently};

impl Kafka {
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
        let kafka = self.clone();
        let name = topic.name.to_owned();
        let partitions = topic.num_partitions;
        blocking(move || kafka.await_leaders(&name, partitions)).await;
    }

    /// The broker that leads a partition now.
    ///
    /// # Panics
    /// When there is no such partition, or it has no leader within the limit of a request.
    pub async fn leader(&self, topic: &str, partition: i32) -> i32 {
        let kafka = self.clone();
        let topic = topic.to_owned();
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
        let heartbeat = (session / 10).as_millis().to_string();
        let session = session.as_millis().to_string();
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
        let kafka = self.clone();
        let name = name.to_owned();
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

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.config().create().expect("the settings are valid")
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
