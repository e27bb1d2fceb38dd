//! The topics of a consumer, and how they are created.

use std::time::Duration;

use async_trait::async_trait;
use oncegate::kafka::{self, TopicCreation, TopicPlan};

use crate::exit::{Exit, Problem, not_opened};
use crate::sources::topology::{Kind, NamedTopic, Role, State, Topology, Wanted};

/// The most bytes that headers add to a dead letter: a reason of 1 KiB, and the other headers.
pub(crate) const LETTER_BYTES: u64 = 4 * 1024;

/// The finding about a message key as the key of a compacted topic.
pub(crate) const ENTITY_KEYS: &str = "it is compacted, so the key of a message names an entity; with `message-key` each later change of that entity is a \
                                      duplicate, and is not handled";
/// The key that a compacted topic needs.
pub(crate) const VERSIONED_KEYS: &str = "take a key that tells changes apart: fields of the payload with a version or the time of the change, such as \
                                         customer_id,version";

/// Topics, and their cluster.
#[derive(Debug, Default)]
pub(crate) struct Topics {
    pub(crate) brokers: String,
    /// The consumer group. Without it, the rights on group and topics are not tried.
    pub(crate) group: Option<String>,
    pub(crate) properties: Vec<(String, String)>,
    pub(crate) consumed: Vec<String>,
    /// The retry topics, each with the time that a message waits in it.
    pub(crate) retries: Vec<(String, Duration)>,
    pub(crate) dead_letters: Option<String>,
    /// The fix to report when no dead-letter topic is named; `None` when dead letters are kept
    /// elsewhere.
    pub(crate) without_dead_letters: Option<&'static str>,
}

/// The topics of one consumer, as `topics create` makes them.
pub(super) struct Cluster {
    brokers: String,
    properties: Vec<(String, String)>,
    consumed: Vec<String>,
    named: Vec<NamedTopic>,
}

impl Cluster {
    pub(super) fn new(topics: Topics, consumer: &str, wanted: &Wanted) -> Self {
        let Topics {
            brokers,
            properties,
            consumed,
            retries,
            dead_letters,
            ..
        } = topics;
        let sources = consumed.iter().filter(|_| !wanted.except_sources);
        let sources = sources.map(|topic| (topic.clone(), Role::Source));
        let retries = retries.into_iter().map(|(topic, _)| (topic, Role::Retry));
        let letters = dead_letters
            .into_iter()
            .map(|topic| (topic, Role::DeadLetters));
        let named = sources
            .chain(retries)
            .chain(letters)
            .map(|(topic, role)| NamedTopic {
                partitions: wanted.partitions.map(usize::from),
                replicas: wanted.replication_factor.map(usize::from),
                ..NamedTopic::new(topic, Kind::Topic, consumer, role)
            });
        Self {
            brokers,
            properties,
            named: named.collect(),
            consumed,
        }
    }

    async fn create_those(
        &mut self,
        wanted: &Wanted,
        has_role: fn(Role) -> bool,
        max_message_bytes: Option<u64>,
    ) -> Result<(), Problem> {
        let missing = self
            .named
            .iter_mut()
            .filter(|topic| topic.is_missing() && has_role(topic.role));
        let missing: Vec<&mut NamedTopic> = missing.collect();
        if missing.is_empty() {
            return Ok(());
        }
        let plans: Vec<TopicPlan> = missing
            .iter()
            .map(|topic| plan(wanted, &topic.topic, max_message_bytes))
            .collect();
        let created = kafka::create_topics(&self.brokers, &plans, &self.properties).await;
        let created = created.map_err(|error| not_opened(&error))?;
        for (topic, creation) in missing.into_iter().zip(created) {
            match creation {
                TopicCreation::Refused(error) => {
                    topic.refuse(&Problem::caused(Exit::Configuration, &error));
                }
                // Another process may have been faster.
                TopicCreation::Existed => topic.state = State::Exists,
                _ => topic.state = State::Created,
            }
        }
        Ok(())
    }
}

fn plan(wanted: &Wanted, topic: &str, max_message_bytes: Option<u64>) -> TopicPlan {
    let plan = TopicPlan::new(topic);
    let plan = wanted
        .partitions
        .into_iter()
        .fold(plan, TopicPlan::partitions);
    let plan = wanted
        .replication_factor
        .into_iter()
        .fold(plan, TopicPlan::replication_factor);
    max_message_bytes
        .into_iter()
        .fold(plan, TopicPlan::max_message_bytes)
}

#[async_trait]
impl Topology for Cluster {
    fn broker(&self) -> &str {
        &self.brokers
    }

    fn named(&self) -> &[NamedTopic] {
        &self.named
    }

    fn retain(&mut self, is_wanted: &dyn Fn(&NamedTopic) -> bool) {
        self.named.retain(is_wanted);
    }

    fn consumed(&self) -> &[String] {
        &self.consumed
    }

    async fn look(&mut self) -> Result<(), Problem> {
        let names: Vec<String> = self.named.iter().map(|topic| topic.topic.clone()).collect();
        let facts = kafka::describe_topics(&self.brokers, &names, &self.properties).await;
        let facts = facts.map_err(|error| not_opened(&error))?;
        for (topic, fact) in self
            .named
            .iter_mut()
            .zip(&facts)
            .filter(|(_, fact)| fact.partitions > 0)
        {
            topic.state = State::Exists;
            topic.partitions = Some(fact.partitions);
            topic.replicas = Some(fact.replicas);
        }
        Ok(())
    }

    /// Creates first what is consumed, because dead letters and retries are a little larger than
    /// its largest messages.
    async fn create(&mut self, wanted: &Wanted, consumed: &[String]) -> Result<(), Problem> {
        self.create_those(wanted, |role| role == Role::Source, None)
            .await?;
        if !self
            .named
            .iter()
            .any(|topic| topic.is_missing() && topic.role != Role::Source)
        {
            return Ok(());
        }
        let facts = kafka::describe_topics(&self.brokers, consumed, &self.properties).await;
        let facts = facts.map_err(|error| not_opened(&error))?;
        let largest = facts.iter().filter_map(|fact| fact.max_message_bytes).max();
        let most = largest.map(|bytes| bytes + LETTER_BYTES);
        self.create_those(wanted, |role| role != Role::Source, most)
            .await
    }
}
