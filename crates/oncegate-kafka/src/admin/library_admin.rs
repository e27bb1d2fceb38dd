//! Requests of administration that librdkafka sends: with every login but tokens.

use async_trait::async_trait;
use rdkafka::admin::{
    AdminClient, AdminOptions, NewTopic, OwnedResourceSpecifier, ResourceSpecifier,
    TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::RDKafkaErrorCode;

use super::request::{
    Admin, BROKERS_TIMEOUT, CHANGE_TIMEOUT, Described, Outcome, SETTINGS_TIMEOUT, TopicPlan,
    TopicSettings, unanswered,
};
use crate::client::settings;
use oncegate_runtime::source::SourceError;

/// Sends requests with librdkafka.
pub(super) struct LibraryAdmin {
    brokers: String,
    client: AdminClient<DefaultClientContext>,
}

impl LibraryAdmin {
    /// # Errors
    /// When a property is not valid.
    pub(super) fn new(brokers: &str, config: &ClientConfig) -> Result<Self, SourceError> {
        let client = config.create().map_err(settings::unusable)?;
        Ok(Self {
            brokers: brokers.to_owned(),
            client,
        })
    }
}

/// Returns the outcome for the topic or group that an answer names.
fn outcome(answer: Result<String, (String, RDKafkaErrorCode)>) -> Outcome {
    match answer {
        Ok(name) => (name, Ok(())),
        Err((name, code)) => (name, Err(code)),
    }
}

fn change() -> AdminOptions {
    AdminOptions::new()
        .request_timeout(Some(CHANGE_TIMEOUT))
        .operation_timeout(Some(BROKERS_TIMEOUT))
}

#[async_trait]
impl Admin for LibraryAdmin {
    async fn create_topics(&mut self, plans: &[TopicPlan]) -> Result<Vec<Outcome>, SourceError> {
        let settings: Vec<_> = plans.iter().map(TopicPlan::settings).collect();
        let topics: Vec<NewTopic<'_>> = plans
            .iter()
            .zip(&settings)
            .map(|(plan, settings)| {
                let replicas = TopicReplication::Fixed(plan.replica_number().into());
                let topic = NewTopic::new(plan.name(), plan.partition_number(), replicas);
                settings
                    .iter()
                    .fold(topic, |topic, (name, value)| topic.set(name, value))
            })
            .collect();
        let answers = self.client.create_topics(&topics, &change()).await;
        let answers = answers
            .map_err(|error| unanswered(&self.brokers, "create topics", CHANGE_TIMEOUT, error))?;
        Ok(answers.into_iter().map(outcome).collect())
    }

    async fn remove_topics(&mut self, topics: &[String]) -> Result<Vec<Outcome>, SourceError> {
        let names: Vec<&str> = topics.iter().map(String::as_str).collect();
        let answers = self.client.delete_topics(&names, &change()).await;
        let answers = answers
            .map_err(|error| unanswered(&self.brokers, "remove topics", CHANGE_TIMEOUT, error))?;
        Ok(answers.into_iter().map(outcome).collect())
    }

    async fn remove_group(&mut self, group: &str) -> Result<Outcome, SourceError> {
        let options = AdminOptions::new().request_timeout(Some(CHANGE_TIMEOUT));
        let answers = self.client.delete_groups(&[group], &options).await;
        let mut answers = answers
            .map_err(|error| unanswered(&self.brokers, "remove a group", CHANGE_TIMEOUT, error))?;
        let answer = answers.pop().map(outcome);
        answer.ok_or_else(|| {
            SourceError::new(format!("the brokers have not answered about group {group}"))
        })
    }

    async fn settings(&mut self, topics: &[&str]) -> Result<Described, SourceError> {
        let options = AdminOptions::new().request_timeout(Some(SETTINGS_TIMEOUT));
        let resources: Vec<_> = topics
            .iter()
            .map(|topic| ResourceSpecifier::Topic(topic))
            .collect();
        let answers = self.client.describe_configs(&resources, &options).await;
        let answers = answers.map_err(|error| {
            unanswered(&self.brokers, "describe topics", SETTINGS_TIMEOUT, error)
        })?;
        let mut described = Described::new();
        for resource in answers.into_iter().flatten() {
            let OwnedResourceSpecifier::Topic(topic) = resource.specifier else {
                continue;
            };
            let entries = resource.entries.into_iter();
            let settings: TopicSettings = entries
                .map(|entry| (entry.name, entry.value.unwrap_or_default()))
                .collect();
            // What rdkafka makes of a refusal; every topic has settings.
            let refused = settings.is_empty();
            let settings = (!refused).then_some(settings);
            described.insert(
                topic,
                settings.ok_or(RDKafkaErrorCode::TopicAuthorizationFailed),
            );
        }
        Ok(described)
    }
}
