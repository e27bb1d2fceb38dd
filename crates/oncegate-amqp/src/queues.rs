//! Finds the queues of a source, and makes missing ones. A consumer never makes a queue.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_runtime::source::SourceError;

use super::AmqpSource;
use super::connect::{call, channel, check_queue, close, connect};
use super::error::{AmqpError, Asked};
use super::headers::short;
use super::settings::check_name;

/// A queue to make. It is a durable quorum queue: the broker confirms a message when a majority of
/// the queue's replicas has it.
#[derive(Clone, Debug)]
pub struct QueuePlan {
    name: String,
    delivery_limit: Option<i32>,
}

impl QueuePlan {
    /// Plans a queue of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            delivery_limit: None,
        }
    }

    /// Sets how often the broker returns a message before it drops it (`x-delivery-limit`): by
    /// default, as the broker does it. -1 means without a limit, which a queue of dead letters
    /// needs: each reading returns its messages.
    #[must_use]
    pub fn delivery_limit(mut self, returns: i32) -> Self {
        self.delivery_limit = Some(returns);
        self
    }

    fn arguments(&self) -> FieldTable {
        let mut arguments = FieldTable::default();
        arguments.insert(
            "x-queue-type".into(),
            AMQPValue::LongString("quorum".into()),
        );
        if let Some(limit) = self.delivery_limit {
            arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(limit));
        }
        arguments
    }
}

impl AmqpSource {
    /// Returns which of these queues exist at the source's broker. Needs the right `read` on those
    /// that do.
    ///
    /// # Errors
    /// When the broker is away or refuses the login, a name is none, or a right is missing.
    pub async fn find_queues(&self, names: &[&str]) -> Result<Vec<bool>, SourceError> {
        let connection = connect(self.connection(), "oncegate looks for queues").await?;
        let found = async {
            let mut found = Vec::with_capacity(names.len());
            for name in names {
                check_name("queue", name)?;
                // The broker closes a channel after an error.
                let probe = channel(&connection).await?;
                found.push(match check_queue(&probe, name).await {
                    Ok(_) => true,
                    Err(error) if error.is_missing() => false,
                    Err(error) => return Err(error),
                });
            }
            Ok(found)
        };
        let found = found.await;
        close(&connection).await;
        Ok(found?)
    }

    /// Makes a queue at the source's broker, if there is none of its name. Needs the right
    /// `configure` on it.
    ///
    /// # Errors
    /// When the broker is away or refuses the login, the right is missing, or a queue of this name
    /// has other settings.
    pub async fn create_queue(&self, plan: &QueuePlan) -> Result<(), SourceError> {
        check_name("queue", &plan.name)?;
        let Some(name) = short(&plan.name) else {
            return Err(AmqpError::new("the queue's name is too long").into());
        };
        let connection = connect(self.connection(), "oncegate makes queues").await?;
        let created = async {
            let channel = channel(&connection).await?;
            let options = QueueDeclareOptions::durable();
            let asked = Asked::Declare(&plan.name);
            call(
                asked,
                channel.queue_declare(name, options, plan.arguments()),
            )
            .await
            .map(drop)
        };
        let created = created.await;
        close(&connection).await;
        Ok(created?)
    }
}
