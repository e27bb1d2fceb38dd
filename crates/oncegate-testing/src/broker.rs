//! A real broker for the rounds of a trial, instead of the embedded one.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use oncegate_runtime::source::Source;
use oncegate_runtime::{BoxError, Message};

/// A broker that delivers the messages of a trial, see [`Trial::broker`](crate::Trial::broker).
#[async_trait]
pub trait Broker: Send + Sync + 'static {
    /// Makes a topic for one round, with this number of partitions and a consumer group of its own.
    /// No other round of the trial has this name.
    ///
    /// # Errors
    /// When it cannot be made; the trial ends with the error.
    async fn topic(&self, name: &str, partitions: usize) -> Result<Arc<dyn Topic>, BoxError>;
}

/// The topic of a round, and its consumer group.
#[async_trait]
pub trait Topic: Send + Sync + fmt::Debug {
    /// Sends a message, which has a number in its round, to one of the partitions, from 0 on. The
    /// same number may be sent several times.
    ///
    /// Calls whose futures are polled in order send in that order.
    ///
    /// # Errors
    /// When the broker does not take it; the trial ends with the error.
    async fn send(
        &self,
        partition: usize,
        number: usize,
        message: &Message,
    ) -> Result<(), BoxError>;

    /// Another member of the consumer group, which is opened by a consumer. The group begins with
    /// the first message of the topic. Handlers get its payloads, and route and origin as with the
    /// embedded broker.
    ///
    /// A member that is dropped leaves the group.
    fn member(&self) -> Arc<dyn Source>;

    /// The number with which a message was sent.
    fn number_of(&self, message: &Message) -> Option<usize>;

    /// Lets partitions move between the members.
    ///
    /// # Errors
    /// When they cannot be moved; the trial ends with the error.
    async fn rebalance(&self) -> Result<(), BoxError>;
}
