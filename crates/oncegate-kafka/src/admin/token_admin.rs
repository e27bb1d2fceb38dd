//! Requests of administration by a client that logs in with tokens.

use std::collections::BTreeMap;

use async_trait::async_trait;
use kafka_protocol::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig};
use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::{
    CreateTopicsRequest, DeleteGroupsRequest, DeleteTopicsRequest, DescribeConfigsRequest,
    FindCoordinatorRequest, GroupId, MetadataRequest, TopicName,
};
use rdkafka::config::ClientConfig;
use rdkafka::error::RDKafkaErrorCode;
use tokio::time::{Duration, Instant, sleep, timeout_at};

use super::address::{Address, Failure};
use super::connection::{Access, BrokerConnection};
use super::login;
use super::messages::{Call, result, text};
use super::request::{
    Admin, BROKERS_TIMEOUT, CHANGE_TIMEOUT, Described, Outcome, SETTINGS, SETTINGS_TIMEOUT,
    TopicPlan, unanswered,
};
use super::tls::Tls;
use crate::client::settings;
use crate::client::tokens::Tokens;
use oncegate_runtime::source::SourceError;

/// The pause before a request that was not answered is repeated.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The protocol's number for a consumer group, in requests for a coordinator.
const COORDINATED_GROUP: i8 = 0;

/// The protocol's number for a topic, in requests for settings.
const TOPIC_SETTINGS: i8 = 2;

/// Sends requests with a token. Connections are kept for the next request.
pub(super) struct TokenAdmin {
    /// As the caller named them.
    named: String,
    brokers: Vec<Address>,
    access: Access,
    connections: BTreeMap<Address, BrokerConnection>,
}

/// The limit until which a request is repeated.
struct Patience {
    brokers: String,
    what: &'static str,
    limit: Duration,
    deadline: Instant,
}

/// Returns whether a client with these properties logs in at all: without SASL, the mechanism has
/// no meaning.
pub(super) fn is_for(config: &ClientConfig) -> bool {
    config
        .get("security.protocol")
        .is_some_and(|protocol| protocol.to_ascii_lowercase().starts_with("sasl_"))
}

impl TokenAdmin {
    /// # Errors
    /// When a property is not valid, or decides about TLS in a way that this client does not have.
    pub(super) fn new(
        brokers: &str,
        config: &ClientConfig,
        tokens: Tokens,
    ) -> Result<Self, SourceError> {
        // What librdkafka would refuse in a consumer is refused here.
        config.create_native_config().map_err(settings::unusable)?;
        let named = brokers
            .split(',')
            .filter(|broker| !broker.trim().is_empty());
        Ok(Self {
            named: brokers.to_owned(),
            brokers: named.map(Address::parse).collect::<Result<_, _>>()?,
            access: Access {
                tls: Tls::of(config)?,
                tokens,
            },
            connections: BTreeMap::new(),
        })
    }

    /// The limit of a request to do `what`, from now on.
    fn patience(&self, what: &'static str, limit: Duration) -> Patience {
        Patience {
            brokers: self.named.clone(),
            what,
            limit,
            deadline: Instant::now() + limit,
        }
    }

    /// Asks one broker. A connection is kept only after an answer.
    async fn ask<C: Call>(
        &mut self,
        broker: &Address,
        request: &C,
    ) -> Result<C::Response, Failure> {
        let mut connection = match self.connections.remove(broker) {
            Some(connection) => connection,
            // Boxed, because a login by the AWS SDK is a large future.
            None => Box::pin(login::open(broker, &self.access)).await?,
        };
        let answer = connection.ask(request).await?;
        self.connections.insert(broker.clone(), connection);
        Ok(answer)
    }

    /// Asks the first broker that answers.
    async fn ask_any<C: Call>(&mut self, request: &C) -> Result<C::Response, Failure> {
        let mut failure = Failure::refused("no broker is given");
        for broker in self.brokers.clone() {
            match self.ask(&broker, request).await {
                Err(Failure::Away(error)) => failure = Failure::Away(error),
                answer => return answer,
            }
        }
        Err(failure)
    }

    /// Returns the broker where topics are created and removed. Brokers with KRaft name any broker,
    /// which hands the request on.
    async fn controller(&mut self) -> Result<Address, Failure> {
        let no_topics = MetadataRequest::default()
            .with_topics(Some(Vec::new()))
            .with_allow_auto_topic_creation(false);
        let cluster = self.ask_any(&no_topics).await?;
        let controller = cluster
            .brokers
            .iter()
            .find(|broker| broker.node_id == cluster.controller_id);
        let controller = controller.map(|broker| Address::new(&broker.host, broker.port));
        controller.ok_or_else(|| Failure::away("the cluster has no controller"))
    }

    async fn try_to_create(&mut self, plans: &[TopicPlan]) -> Result<Vec<Outcome>, Failure> {
        let request = CreateTopicsRequest::default()
            .with_topics(plans.iter().map(creatable).collect())
            .with_timeout_ms(milliseconds(BROKERS_TIMEOUT));
        let controller = self.controller().await?;
        let topics = self.ask(&controller, &request).await?.topics;
        let answers = topics
            .iter()
            .map(|topic| (topic.name.as_str(), topic.error_code))
            .collect();
        outcomes(plans.iter().map(TopicPlan::name), &answers)
    }

    async fn try_to_remove(&mut self, topics: &[String]) -> Result<Vec<Outcome>, Failure> {
        let request = DeleteTopicsRequest::default()
            .with_topic_names(topics.iter().map(|topic| TopicName(text(topic))).collect())
            .with_timeout_ms(milliseconds(BROKERS_TIMEOUT));
        let controller = self.controller().await?;
        let removed = self.ask(&controller, &request).await?.responses;
        let removed: Vec<_> = removed
            .iter()
            .map(|topic| {
                let name = topic.name.as_ref().map(|name| name.to_string());
                (name.unwrap_or_default(), topic.error_code)
            })
            .collect();
        let answers = removed
            .iter()
            .map(|(name, code)| (name.as_str(), *code))
            .collect();
        outcomes(topics.iter().map(String::as_str), &answers)
    }

    async fn try_to_remove_group(&mut self, group: &str) -> Result<Outcome, Failure> {
        let request = FindCoordinatorRequest::default()
            .with_key(text(group))
            .with_key_type(COORDINATED_GROUP);
        let found = self.ask_any(&request).await?;
        if let Err(code) = result(found.error_code) {
            return lasting(group, Err(code));
        }
        let coordinator = Address::new(&found.host, found.port);
        let request = DeleteGroupsRequest::default().with_groups_names(vec![GroupId(text(group))]);
        let results = self.ask(&coordinator, &request).await?.results;
        let answers = results
            .iter()
            .map(|result| (result.group_id.as_str(), result.error_code))
            .collect();
        let removed = outcomes(std::iter::once(group), &answers)?.pop();
        removed.ok_or_else(|| unanswered_about(group))
    }

    async fn try_to_describe(&mut self, topics: &[&str]) -> Result<Described, Failure> {
        let names: Vec<_> = SETTINGS.iter().map(|name| text(*name)).collect();
        let resources = topics.iter().map(|topic| {
            DescribeConfigsResource::default()
                .with_resource_type(TOPIC_SETTINGS)
                .with_resource_name(text(*topic))
                .with_configuration_keys(Some(names.clone()))
        });
        let request = DescribeConfigsRequest::default().with_resources(resources.collect());
        let results = self.ask_any(&request).await?.results;
        let described = results.into_iter().map(|described| {
            let settings = described.configs.into_iter().map(|setting| {
                let value = setting.value.map(|value| value.to_string());
                (setting.name.to_string(), value.unwrap_or_default())
            });
            let settings = result(described.error_code).map(|()| settings.collect());
            (described.resource_name.to_string(), settings)
        });
        Ok(described.collect())
    }
}

#[async_trait]
impl Admin for TokenAdmin {
    async fn create_topics(&mut self, plans: &[TopicPlan]) -> Result<Vec<Outcome>, SourceError> {
        let patience = self.patience("create topics", CHANGE_TIMEOUT);
        loop {
            match patience.limited(self.try_to_create(plans)).await {
                Ok(outcomes) => return Ok(outcomes),
                Err(failure) => patience.after(failure).await?,
            }
        }
    }

    async fn remove_topics(&mut self, topics: &[String]) -> Result<Vec<Outcome>, SourceError> {
        let patience = self.patience("remove topics", CHANGE_TIMEOUT);
        loop {
            match patience.limited(self.try_to_remove(topics)).await {
                Ok(outcomes) => return Ok(outcomes),
                Err(failure) => patience.after(failure).await?,
            }
        }
    }

    async fn remove_group(&mut self, group: &str) -> Result<Outcome, SourceError> {
        let patience = self.patience("remove a group", CHANGE_TIMEOUT);
        loop {
            match patience.limited(self.try_to_remove_group(group)).await {
                Ok(outcome) => return Ok(outcome),
                Err(failure) => patience.after(failure).await?,
            }
        }
    }

    async fn settings(&mut self, topics: &[&str]) -> Result<Described, SourceError> {
        let patience = self.patience("describe topics", SETTINGS_TIMEOUT);
        loop {
            match patience.limited(self.try_to_describe(topics)).await {
                Ok(settings) => return Ok(settings),
                Err(failure) => patience.after(failure).await?,
            }
        }
    }
}

impl Patience {
    /// Gives an attempt the time that is left.
    async fn limited<T>(
        &self,
        attempt: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let answer = timeout_at(self.deadline, attempt).await;
        answer.unwrap_or_else(|_| Err(Failure::away("the last attempt was not answered in time")))
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// When there is none: the limit is over, or another attempt would change nothing.
    async fn after(&self, failure: Failure) -> Result<(), SourceError> {
        match failure {
            Failure::Refused(error) => Err(error),
            Failure::Away(error) if Instant::now() + ASK_AGAIN >= self.deadline => {
                Err(unanswered(&self.brokers, self.what, self.limit, error))
            }
            Failure::Away(error) => {
                tracing::debug!(%error, what = self.what, "the request to Kafka is repeated");
                sleep(ASK_AGAIN).await;
                Ok(())
            }
        }
    }
}

fn creatable(plan: &TopicPlan) -> CreatableTopic {
    let settings = plan.settings().into_iter().map(|(name, value)| {
        CreatableTopicConfig::default()
            .with_name(text(name))
            .with_value(Some(text(&value)))
    });
    CreatableTopic::default()
        .with_configs(settings.collect())
        .with_name(TopicName(text(plan.name())))
        .with_num_partitions(plan.partition_number())
        .with_replication_factor(plan.replica_number())
}

/// Returns the outcome of each of these, by the numbers of the answer.
fn outcomes<'a>(
    names: impl Iterator<Item = &'a str>,
    answers: &BTreeMap<&str, i16>,
) -> Result<Vec<Outcome>, Failure> {
    names
        .map(|name| {
            let code = answers
                .get(name)
                .copied()
                .ok_or_else(|| unanswered_about(name))?;
            lasting(name, result(code))
        })
        .collect()
}

/// An outcome, or the failure of an attempt at the wrong broker.
fn lasting(name: &str, result: Result<(), RDKafkaErrorCode>) -> Result<Outcome, Failure> {
    use RDKafkaErrorCode::{
        CoordinatorLoadInProgress, CoordinatorNotAvailable, NotController, NotCoordinator,
    };
    match result {
        Err(
            code @ (CoordinatorLoadInProgress
            | CoordinatorNotAvailable
            | NotController
            | NotCoordinator),
        ) => Err(Failure::away(code)),
        lasting => Ok((name.to_owned(), lasting)),
    }
}

fn unanswered_about(name: &str) -> Failure {
    Failure::refused(format!("the broker's answer says nothing about {name}"))
}

fn milliseconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis()).unwrap_or(i32::MAX)
}
