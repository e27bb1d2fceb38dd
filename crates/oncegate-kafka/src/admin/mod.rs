//! Requests of administration: they create, remove and describe topics, and remove groups.
//!
//! | login | sent by |
//! |---|---|
//! | tokens (SASL OAUTHBEARER) | `token_admin`, a client of Kafka's protocol for these requests alone; `connection` has its frames, `messages` the versions, `login` and `tls` what their names say |
//! | every other one | `library_admin`, librdkafka |
//!
//! librdkafka asks for a token through the main queue of a client, which rdkafka's `AdminClient` never polls. Without
//! unsafe code, there is no other way to give it one: its requests would wait until their time limit.

mod library_admin;

#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod token_admin;

#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod connection;
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod login;
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod messages;
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod tls;

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::error::RDKafkaErrorCode;

use self::library_admin::LibraryAdmin;
use super::new_topics::TopicPlan;
use super::settings::{self, Property};
use super::tokens::Tokens;
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::source::SourceError;

/// Time limit of a request that creates or removes something.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(15);

/// How long the brokers may take to create or remove all partitions. The answer comes then.
const BROKERS_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit of a request for the settings of a topic.
const SETTINGS_TIMEOUT: Duration = Duration::from_secs(10);

/// What became of one topic or group: its name, and the brokers' error if there was one.
pub(crate) type Outcome = (String, Result<(), RDKafkaErrorCode>);

/// The settings of a topic by their names; of those without a value, an empty one.
pub(crate) type TopicSettings = BTreeMap<String, String>;

/// Sends requests of administration to one cluster. Each has a time limit, and can be repeated.
///
/// The error of a request means that no broker has answered it, or that the login was refused.
#[async_trait]
pub(crate) trait Admin: Send {
    /// Creates topics; returns what became of each, in the order of `plans`.
    async fn create_topics(&mut self, plans: &[TopicPlan]) -> Result<Vec<Outcome>, SourceError>;

    /// Removes topics; returns what became of each.
    async fn remove_topics(&mut self, topics: &[String]) -> Result<Vec<Outcome>, SourceError>;

    /// Removes a consumer group.
    async fn remove_group(&mut self, group: &str) -> Result<Outcome, SourceError>;

    /// Returns the settings of a topic, at least those that this crate looks at, or the brokers' error.
    async fn settings(&mut self, topic: &str)
    -> Result<Result<TopicSettings, RDKafkaErrorCode>, SourceError>;
}

/// Returns what sends the requests to the cluster at `brokers`, with properties of librdkafka. Nothing is sent yet.
///
/// # Errors
/// When a property is not valid, or decides about TLS in a way that requests with a token do not have.
pub(crate) fn of(brokers: &str, properties: &[Property]) -> Result<Box<dyn Admin>, SourceError> {
    let mut config = settings::client(brokers, properties)?;
    match Tokens::take(&mut config)? {
        #[cfg(any(feature = "oauth", feature = "msk-iam"))]
        Some(tokens) if token_admin::is_for(&config) => {
            Ok(Box::new(token_admin::TokenAdmin::new(brokers, &config, tokens)?))
        }
        _ => Ok(Box::new(LibraryAdmin::new(brokers, &config)?)),
    }
}

/// The error of a request to do `what` that no broker has answered.
fn unanswered(brokers: &str, what: &str, limit: Duration, error: impl Into<BoxError>) -> SourceError {
    let text = format!("no Kafka broker at {brokers} has answered the request to {what} within {limit:?}");
    SourceError::caused(text, error)
}
