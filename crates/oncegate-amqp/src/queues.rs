//! Finds the queues of a source, and makes missing ones. A consumer never makes a queue.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_runtime::source::SourceError;

use super::AmqpSource;
use super::connect::{call, channel, check_queue, close, connect};
use super::error::{AmqpError, Asked};
use super::findings::NO_LIMIT_SINCE;
use super::headers::short;
use super::management;
use super::settings::{Connection, check_name};

/// A queue to make. It is a durable quorum queue: the broker confirms a message when a majority of
/// the queue's replicas has it.
#[derive(Clone, Debug)]
pub struct QueuePlan {
    name: String,
    delivery_limit: DeliveryLimit,
}

/// The limit of a queue on returns.
#[derive(Clone, Copy, Debug)]
enum DeliveryLimit {
    None,
    Returns(u32),
}

impl QueuePlan {
    /// Plans a queue of this name, without a limit on returns.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            delivery_limit: DeliveryLimit::None,
        }
    }

    /// Sets how often the broker returns a message before it drops it (`x-delivery-limit`): by
    /// default, as often as it takes.
    #[must_use]
    pub fn delivery_limit(mut self, returns: u32) -> Self {
        self.delivery_limit = DeliveryLimit::Returns(returns);
        self
    }

    /// Returns the arguments for a broker of this version.
    fn arguments(&self, major: Option<u32>) -> FieldTable {
        let mut arguments = FieldTable::default();
        arguments.insert(
            "x-queue-type".into(),
            AMQPValue::LongString("quorum".into()),
        );
        // From RabbitMQ 4 on, there is a limit by default. Before that, there is none, and -1 would
        // drop a message at its first return.
        let limit = match self.delivery_limit {
            DeliveryLimit::Returns(returns) => Some(i64::from(returns)),
            DeliveryLimit::None => major
                .is_some_and(|major| major >= NO_LIMIT_SINCE)
                .then_some(-1),
        };
        if let Some(limit) = limit {
            arguments.insert(DELIVERY_LIMIT.into(), AMQPValue::LongLongInt(limit));
        }
        arguments
    }
}

/// The argument that limits how often a message comes back.
const DELIVERY_LIMIT: &str = "x-delivery-limit";

/// Refuses a queue whose messages would be lost when they are returned: one that was made with a
/// limit of -1 on a broker where that is no word for "none".
///
/// No answer of AMQP names a queue's arguments. But a queue that exists is declared once more only
/// with the arguments that it has.
pub(crate) async fn refuse_to_lose(settings: &Connection, queue: &str) -> Result<(), AmqpError> {
    let connection = connect(settings, "oncegate looks at a queue").await?;
    let refused = async {
        let is_early = connection
            .seen
            .major_version()
            .is_some_and(|major| major < NO_LIMIT_SINCE);
        let probe = channel(&connection).await?;
        check_queue(&probe, queue).await?;
        let Some(name) = short(queue).filter(|_| is_early) else {
            return Ok(());
        };
        let mut arguments = FieldTable::default();
        arguments.insert(
            "x-queue-type".into(),
            AMQPValue::LongString("quorum".into()),
        );
        arguments.insert(DELIVERY_LIMIT.into(), AMQPValue::LongLongInt(-1));
        let options = QueueDeclareOptions::durable();
        let declared = probe.queue_declare(name, options, arguments);
        match call(Asked::Declare(queue), declared).await {
            Ok(_) => Err(AmqpError::new(format!(
                "the queue `{queue}` has the `x-delivery-limit` -1, which is no limit only since RabbitMQ \
                 {NO_LIMIT_SINCE}: this broker would drop every message that is looked at. Make another queue without \
                 this argument, and move the messages with the shovel plugin, without returning any"
            ))),
            // It has other arguments, or the user may not ask.
            Err(_) => Ok(()),
        }
    };
    let refused = refused.await;
    close(&connection).await;
    refused
}

/// Returns how many messages of the queue wait for a consumer.
pub(crate) async fn waiting(settings: &Connection, queue: &str) -> Result<u32, AmqpError> {
    let connection = connect(settings, "oncegate counts messages").await?;
    let counted = async { check_queue(&channel(&connection).await?, queue).await };
    let counted = counted.await;
    close(&connection).await;
    counted
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

    /// Asks the management plugin, if it is set, for the limits of a queue of this broker. Returns
    /// a warning for each that may lose messages, or dead letters.
    ///
    /// # Errors
    /// When the broker is away or refuses the login.
    pub async fn queue_warnings(
        &self,
        queue: &str,
        has_letters: bool,
        max_attempts: u32,
    ) -> Result<Vec<String>, SourceError> {
        let Some(url) = self.management_url() else {
            return Ok(Vec::new());
        };
        let connection = connect(self.connection(), "oncegate looks at queues").await?;
        let major = connection.seen.major_version();
        close(&connection).await;
        let described = management::describe(self.connection(), queue, url).await;
        Ok(match described {
            Ok(described) if has_letters => described.letter_warnings(queue, major),
            Ok(described) => described.warnings(queue, max_attempts, major),
            Err(error) => vec![management::unknown(queue, &error)],
        })
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
        let major = connection.seen.major_version();
        let created = async {
            let channel = channel(&connection).await?;
            let options = QueueDeclareOptions::durable();
            let asked = Asked::Declare(&plan.name);
            call(
                asked,
                channel.queue_declare(name, options, plan.arguments(major)),
            )
            .await
            .map(drop)
        };
        let created = created.await;
        close(&connection).await;
        Ok(created?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // invariant: amqp-read-loses-letters
    #[test]
    fn no_limit_is_said_only_where_it_is_none() {
        let plan = QueuePlan::new("dead");
        fn limit(arguments: FieldTable) -> Option<AMQPValue> {
            arguments.inner().get(DELIVERY_LIMIT).cloned()
        }
        assert_eq!(limit(plan.arguments(Some(3))), None);
        assert_eq!(limit(plan.arguments(None)), None);
        let none = Some(AMQPValue::LongLongInt(-1));
        assert_eq!(limit(plan.arguments(Some(4))), none);
        let seven = Some(AMQPValue::LongLongInt(7));
        assert_eq!(limit(plan.delivery_limit(7).arguments(Some(3))), seven);
    }
}
