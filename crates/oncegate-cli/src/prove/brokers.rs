//! The topics of the rounds on a real broker, which are removed again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate::kafka::{self, KafkaSource, TopicCreation, TopicFacts, TopicPlan, TopicWriter};
use oncegate::message::Header;
use oncegate::observe::Counters;
use oncegate::source::Source;
use oncegate::{BoxError, Message};
use oncegate_testing::{Broker, Topic, Trial};
use parking_lot::{Mutex, MutexGuard};

use super::args::ProveArgs;
use super::tried::TriedConsumer;
use crate::config::values::Property;
use crate::exit::{Exit, Problem, not_opened};

/// The prefix of the names of scopes, topics and groups that a trial makes on servers.
pub(super) const TRIAL: &str = "oncegate-prove";

/// The header with the number of a message in its round.
const NUMBER_HEADER: &str = "oncegate-trial-message";
/// The time between two commits: what a killed process has finished is delivered again until then.
const COMMIT_INTERVAL: Duration = Duration::from_millis(500);
/// The time limit for the member that makes the partitions move.
const VISIT_LIMIT: Duration = Duration::from_secs(2);
const VISITOR_LEAVES_WITHIN: Duration = Duration::from_secs(5);
/// The time limit for the brokers to know a new topic, and for the members of an interrupted trial
/// to leave their groups.
const CHANGE_LIMIT: Duration = Duration::from_secs(60);
const CHANGE_INTERVAL: Duration = Duration::from_millis(250);

/// A cluster in which the trial has topics and consumer groups of its own.
pub(super) struct Brokers(Arc<TrialCluster>);

struct TrialCluster {
    brokers: String,
    properties: Vec<(String, String)>,
    /// The topics that have been made, or may have been.
    topics: Mutex<Vec<String>>,
}

impl Brokers {
    /// The cluster that `--brokers` names, with `--property` and the properties of the
    /// configuration.
    ///
    /// # Errors
    /// When a property cannot be read, topics cannot be created with it, or the brokers do not
    /// answer.
    pub(super) async fn of(
        args: &ProveArgs,
        tried: &TriedConsumer,
    ) -> Result<Option<Self>, Problem> {
        let Some(brokers) = &args.brokers else {
            return Ok(None);
        };
        let configured = tried
            .settings
            .source
            .clone()
            .unwrap_or_default()
            .kafka
            .unwrap_or_default();
        let mut properties = Vec::new();
        for (name, Property(value)) in &configured.properties {
            let value = value
                .resolve()
                .map_err(|why| Problem::configuration(format!("the property {name}: {why}")))?;
            properties.push((name.clone(), value));
        }
        // What is set last wins.
        properties.extend(args.properties.iter().cloned());
        let cluster = TrialCluster {
            brokers: brokers.clone(),
            properties,
            topics: Mutex::default(),
        };
        // Before the trial, so that a wrong address or password costs no minute.
        kafka::create_topics(brokers, &[], &cluster.properties)
            .await
            .map_err(|error| not_opened(&error))?;
        cluster.facts(TRIAL).await?;
        Ok(Some(Self(Arc::new(cluster))))
    }

    /// Lets the trial use the cluster.
    pub(super) fn of_trial(&self, trial: Trial) -> Trial {
        trial.broker(SharedCluster(Arc::clone(&self.0)))
    }

    /// Removes all topics and groups of the trial.
    ///
    /// # Errors
    /// With what is left.
    pub(super) async fn remove(&self) -> Result<(), Problem> {
        let cluster = &self.0;
        let topics = self.0.topics().clone();
        let deadline = Instant::now() + CHANGE_LIMIT;
        loop {
            // The group of a topic has the topic's name.
            let removed =
                kafka::remove_topics(&cluster.brokers, &topics, &topics, &cluster.properties).await;
            let Err(error) = removed else { return Ok(()) };
            if Instant::now() >= deadline {
                let left = Problem::caused(Exit::Unreachable, &error);
                let what = format!(
                    "topics and groups of the trial are left at {}; remove those named {}",
                    cluster.brokers,
                    topics.join(", ")
                );
                return Err(left.and(&Problem::new(Exit::Unreachable, what)));
            }
            tokio::time::sleep(CHANGE_INTERVAL).await;
        }
    }
}

impl TrialCluster {
    fn topics(&self) -> MutexGuard<'_, Vec<String>> {
        self.topics.lock()
    }

    async fn facts(&self, topic: &str) -> Result<TopicFacts, Problem> {
        let facts =
            kafka::describe_topics(&self.brokers, &[topic.to_owned()], &self.properties).await;
        let mut facts = facts.map_err(|error| not_opened(&error))?;
        facts
            .pop()
            .ok_or_else(|| Problem::new(Exit::Bug, "the brokers have not answered about a topic"))
    }

    async fn create(&self, name: &str, partitions: usize) -> Result<(), BoxError> {
        let partitions = u16::try_from(partitions)?;
        self.topics().push(name.to_owned());
        let plan = TopicPlan::new(name).partitions(partitions);
        for creation in kafka::create_topics(&self.brokers, &[plan], &self.properties).await? {
            if let TopicCreation::Refused(error) = creation {
                return Err(error.into());
            }
        }
        // Other brokers may know it later than the one that has made it.
        let deadline = Instant::now() + CHANGE_LIMIT;
        loop {
            let facts = self
                .facts(name)
                .await
                .map_err(|problem| problem.to_string())?;
            if facts.partitions == usize::from(partitions) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(format!(
                    "the brokers do not know the topic {name} after {CHANGE_LIMIT:?}"
                )
                .into());
            }
            tokio::time::sleep(CHANGE_INTERVAL).await;
        }
    }
}

/// The cluster as the trial knows it.
struct SharedCluster(Arc<TrialCluster>);

#[async_trait]
impl Broker for SharedCluster {
    async fn topic(&self, name: &str, partitions: usize) -> Result<Arc<dyn Topic>, BoxError> {
        let cluster = Arc::clone(&self.0);
        cluster.create(name, partitions).await?;
        let writer = TopicWriter::new(&cluster.brokers, name, &cluster.properties)?;
        Ok(Arc::new(RoundTopic {
            name: name.to_owned(),
            writer,
            cluster,
        }))
    }
}

/// The topic of a round. Its group has the same name.
struct RoundTopic {
    name: String,
    writer: TopicWriter,
    cluster: Arc<TrialCluster>,
}

impl std::fmt::Debug for RoundTopic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("RoundTopic").field(&self.name).finish()
    }
}

impl RoundTopic {
    fn source(&self) -> KafkaSource {
        let source = KafkaSource::new(&self.cluster.brokers, &self.name, [&self.name])
            .commit_interval(COMMIT_INTERVAL);
        let properties = self.cluster.properties.iter();
        properties.fold(source, |source, (name, value)| source.property(name, value))
    }
}

#[async_trait]
impl Topic for RoundTopic {
    async fn send(
        &self,
        partition: usize,
        number: usize,
        message: &Message,
    ) -> Result<(), BoxError> {
        let number = Header {
            name: NUMBER_HEADER.into(),
            value: Some(number.to_string().into()),
        };
        let message = message.clone().with_headers(vec![number]);
        Ok(self
            .writer
            .write(i32::try_from(partition)?, &message)
            .await?)
    }

    fn member(&self) -> Arc<dyn Source> {
        Arc::new(self.source())
    }

    fn number_of(&self, message: &Message) -> Option<usize> {
        std::str::from_utf8(message.header(NUMBER_HEADER)?)
            .ok()?
            .parse()
            .ok()
    }

    /// Another member joins, and leaves when partitions have moved to it.
    async fn rebalance(&self) -> Result<(), BoxError> {
        let visitor = self.source();
        visitor.open(Arc::new(Counters::default())).await?;
        // What it gets is delivered again, because it acknowledges nothing. It may get nothing.
        drop(tokio::time::timeout(VISIT_LIMIT, visitor.receive(1)).await);
        // A visitor that cannot leave in time leaves later.
        drop(visitor.close(VISITOR_LEAVES_WITHIN).await);
        Ok(())
    }
}
