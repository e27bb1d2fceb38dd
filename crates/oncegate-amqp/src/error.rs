//! Errors of the broker, with what to change.

use std::fmt;
use std::time::Duration;

use lapin::ErrorKind;
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use oncegate_runtime::source::SourceError;

/// The call that an error answers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked<'a> {
    /// To connect.
    Connection { user: &'a str, vhost: &'a str },
    /// To open a channel.
    Channel,
    /// To check that the queue exists.
    Queue(&'a str),
    /// To deliver messages of the queue.
    Messages(&'a str),
    /// To make the queue.
    Declare(&'a str),
    /// To publish to the queue, through the default exchange.
    Publish(&'a str),
}

impl fmt::Display for Asked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connection { user, vhost } => {
                write!(f, "the login of `{user}` at the virtual host `{vhost}`")
            }
            Self::Channel => f.write_str("a new channel"),
            Self::Queue(queue) => write!(f, "the queue `{queue}`"),
            Self::Messages(queue) => write!(f, "messages of the queue `{queue}`"),
            Self::Declare(queue) => write!(f, "to make the queue `{queue}`"),
            Self::Publish(queue) => write!(f, "a message to the queue `{queue}`"),
        }
    }
}

/// An error of the broker or of its connection.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct AmqpError {
    what: String,
    is_away: bool,
    is_refused: bool,
    is_missing: bool,
    is_no_priority: bool,
    /// The broker has taken deliveries away that were held for too long.
    pub(crate) timed_out: Option<TimedOut>,
    /// The client could not read what the broker has sent.
    pub(crate) is_unreadable: bool,
}

/// The `consumer_timeout` of the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimedOut {
    /// After this time.
    After(Duration),
    /// After a time that it did not say, or for another reason.
    Perhaps,
}

/// Parts of texts by which RabbitMQ says that a queue's node or leader is not there at the moment.
const QUEUE_AWAY: [&str; 4] = [
    "down or inaccessible",
    "is stopped",
    "timeout",
    "not available",
];
/// The text by which RabbitMQ closes a channel whose messages were not acknowledged in time.
const ACK_TIMED_OUT: &str = "delivery acknowledgement on channel";

/// The text by which RabbitMQ refuses a second consumer beside an exclusive one.
const EXCLUSIVE: &str = "in exclusive use";
/// The argument of a consumer that streams refuse.
pub(crate) const CONSUMER_PRIORITY: &str = "x-priority";
/// The text by which RabbitMQ says that queues of this type have no such argument.
const TYPE_HAS_NONE: &str = "of queue type";

impl AmqpError {
    /// Creates an error that another try does not end.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            is_away: false,
            is_refused: false,
            is_missing: false,
            is_no_priority: false,
            timed_out: None,
            is_unreadable: false,
        }
    }

    /// Creates an error that ends when the broker answers again.
    pub(crate) fn away(what: impl Into<String>) -> Self {
        Self {
            is_away: true,
            ..Self::new(what)
        }
    }

    /// Creates the error of a broker that delivers nothing more to this consumer.
    pub(crate) fn cancelled() -> Self {
        Self {
            timed_out: Some(TimedOut::Perhaps),
            ..Self::away(
                "the broker has cancelled the consumer: the queue was deleted, its node has stopped, or (a quorum queue \
                 of RabbitMQ 4.3) a message was not acknowledged within its `consumer_timeout`; then set that in \
                 rabbitmq.conf above the longest time that a message runs and waits for its retries",
            )
        }
    }

    /// Creates the error of a broker that did not answer within the limit.
    pub(crate) fn unanswered(asked: Asked<'_>) -> Self {
        let hint = match asked {
            Asked::Connection { .. } | Asked::Channel => String::new(),
            Asked::Queue(queue)
            | Asked::Messages(queue)
            | Asked::Declare(queue)
            | Asked::Publish(queue) => format!(
                ": a quorum queue without a leader answers nothing, see `rabbitmq-queues quorum_status {queue}`"
            ),
        };
        Self::away(format!("the broker did not answer in time ({asked}){hint}"))
    }

    /// Creates the error of a queue name that no queue has.
    pub(crate) fn no_queue(queue: &str) -> Self {
        Self {
            is_missing: true,
            ..Self::new(missing(
                Asked::Publish(queue),
                "the message could not be routed",
            ))
        }
    }

    /// Creates the error of a broker that reads nothing from connections that publish.
    pub(crate) fn blocked() -> Self {
        Self::away(
            "the broker takes no messages: it is short of memory or disk (see `rabbitmq-diagnostics check_local_alarms`)",
        )
    }

    /// Returns whether the broker will refuse this message however often it is sent.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// Returns whether there is no such queue.
    pub(crate) fn is_missing(&self) -> bool {
        self.is_missing
    }

    /// Returns whether the broker takes the priority of a consumer for none.
    pub(crate) fn is_no_priority(&self) -> bool {
        self.is_no_priority
    }

    /// Explains an error of the client.
    pub(crate) fn of(asked: Asked<'_>, error: &lapin::Error) -> Self {
        let ErrorKind::ProtocolError(protocol) = error.kind() else {
            return Self::of_connection(asked, error);
        };
        let said = protocol.get_message().to_string();
        match protocol.kind() {
            // Another consumer has the queue for itself, for now.
            AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) if said.contains(EXCLUSIVE) => {
                Self::away(format!(
                    "another consumer has the queue exclusively: {said}"
                ))
            }
            AMQPErrorKind::Soft(AMQPSoftError::RESOURCELOCKED) => Self::away(format!(
                "another connection has the queue exclusively: {said}"
            )),
            AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => Self::new(refused(asked, &said)),
            AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND)
                if QUEUE_AWAY.iter().any(|part| said.contains(part)) =>
            {
                Self::away(format!("the queue is not available at the moment: {said}"))
            }
            AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => Self {
                is_missing: true,
                ..Self::new(missing(asked, &said))
            },
            AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED)
                if said.contains(ACK_TIMED_OUT) =>
            {
                let timed_out = timeout_in(&said).map_or(TimedOut::Perhaps, TimedOut::After);
                let closed = Self::away(format!(
                    "the broker has closed the channel, because a message was not acknowledged within its \
                     `consumer_timeout`; every message is delivered again. Set `consumer_timeout` in rabbitmq.conf (or \
                     `x-consumer-timeout` of the queue) above the longest time that a message runs and waits for its \
                     retries: {said}"
                ));
                Self {
                    timed_out: Some(timed_out),
                    ..closed
                }
            }
            AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED)
                if said.contains("message size") =>
            {
                Self {
                    is_refused: true,
                    ..Self::new(format!("the message is too large for the broker: {said}"))
                }
            }
            AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED)
                if said.contains(CONSUMER_PRIORITY) && !said.contains(TYPE_HAS_NONE) =>
            {
                Self {
                    is_no_priority: true,
                    ..Self::new(format!(
                        "the broker refuses the consumer's priority: {said}"
                    ))
                }
            }
            AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED)
                if said.contains(CONSUMER_PRIORITY) =>
            {
                Self::new(format!(
                    "the queue is a stream, which delivers acknowledged messages again: use a classic or a quorum queue \
                     ({said})"
                ))
            }
            AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => Self::new(not_allowed(asked, &said)),
            AMQPErrorKind::Hard(_) => {
                Self::away(format!("the broker has closed the connection: {said}"))
            }
            AMQPErrorKind::Soft(_) => Self::new(format!("the broker refuses ({asked}): {said}")),
        }
    }

    fn of_connection(asked: Asked<'_>, error: &lapin::Error) -> Self {
        match error.kind() {
            ErrorKind::IOError(io) if io.kind() == std::io::ErrorKind::InvalidData => {
                Self::new(format!(
                    "TLS to the broker failed: {io}; check `tls_root` and the host's name in the URI"
                ))
            }
            ErrorKind::ParsingError(_) => Self {
                is_unreadable: true,
                ..Self::away(format!(
                    "the broker has sent a frame that this client cannot read ({error}): one message of the queue stops all \
                     others. It is one of the first: look at them with the management plugin, and move it to another \
                     queue. Meanwhile one message at a time is asked for, so that no other is returned with it"
                ))
            },
            ErrorKind::SerialisationError(_) | ErrorKind::ChannelsLimitReached => {
                Self::new(format!("the client refuses ({asked}): {error}"))
            }
            _ => Self::away(format!("the broker is unreachable: {error}")),
        }
    }
}

impl From<AmqpError> for SourceError {
    fn from(error: AmqpError) -> Self {
        let source = Self::new(error.what);
        if error.is_away { source.away() } else { source }
    }
}

/// Returns the time that RabbitMQ names: `… Timeout value used: 1800000 ms. …`.
fn timeout_in(said: &str) -> Option<Duration> {
    let value = said.split_once("Timeout value used: ")?.1;
    let millis = value.split(' ').next()?.parse().ok()?;
    Some(Duration::from_millis(millis))
}

fn refused(asked: Asked<'_>, said: &str) -> String {
    match asked {
        Asked::Connection { user, .. } => {
            format!(
                "the broker refuses the credentials of the user `{user}`: correct them in the URI ({said})"
            )
        }
        Asked::Queue(queue) | Asked::Messages(queue) => {
            format!(
                "the user may not read the queue `{queue}`: grant the permission `read` on it ({said})"
            )
        }
        Asked::Declare(queue) => format!(
            "the user may not make the queue `{queue}`: grant the permission `configure` on it, or let its owner make it \
             ({said})"
        ),
        Asked::Publish(queue) => format!(
            "the user may not write to the queue `{queue}`: grant the permission `write` on `amq.default`, the default \
             exchange ({said})"
        ),
        Asked::Channel => format!("the user may not open a channel ({said})"),
    }
}

fn missing(asked: Asked<'_>, said: &str) -> String {
    match asked {
        Asked::Queue(name)
        | Asked::Messages(name)
        | Asked::Declare(name)
        | Asked::Publish(name) => format!(
            "the queue `{name}` does not exist: create it, for example with `oncegate topics create` or `rabbitmqadmin \
             declare queue name={name} durable=true`, or correct its name or the virtual host ({said})"
        ),
        Asked::Connection { .. } | Asked::Channel => {
            format!("the broker does not know what was asked for: {said}")
        }
    }
}

fn not_allowed(asked: Asked<'_>, said: &str) -> String {
    match asked {
        Asked::Connection { vhost, .. } if said.contains("not found") => {
            format!(
                "the virtual host `{vhost}` does not exist: create it, or correct the end of the URI ({said})"
            )
        }
        Asked::Connection { user, vhost } => {
            format!(
                "the user `{user}` may not use the virtual host `{vhost}`: grant it permissions there ({said})"
            )
        }
        _ => format!("the broker does not allow it ({asked}): {said}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::protocol::AMQPError;

    fn error(kind: AMQPErrorKind, said: &str) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::new(kind, said.into())).into()
    }

    #[test]
    fn errors_say_what_to_change_and_whether_to_wait() {
        fn soft(kind: AMQPSoftError, said: &str) -> lapin::Error {
            error(AMQPErrorKind::Soft(kind), said)
        }
        let cases = [
            (
                soft(AMQPSoftError::NOTFOUND, "NOT_FOUND - no queue 'orders'"),
                "rabbitmqadmin",
                false,
            ),
            (
                soft(
                    AMQPSoftError::NOTFOUND,
                    "home node 'r@h' of queue is down or inaccessible",
                ),
                "moment",
                true,
            ),
            (
                soft(AMQPSoftError::ACCESSREFUSED, "ACCESS_REFUSED"),
                "permission `read`",
                false,
            ),
            (
                soft(
                    AMQPSoftError::PRECONDITIONFAILED,
                    "delivery acknowledgement on channel 1 timed out",
                ),
                "consumer_timeout",
                true,
            ),
            (
                error(
                    AMQPErrorKind::Hard(AMQPHardError::CONNECTIONFORCED),
                    "shutdown",
                ),
                "closed",
                true,
            ),
        ];
        for (error, word, away) in cases {
            let explained = AmqpError::of(Asked::Messages("orders"), &error);
            assert!(explained.to_string().contains(word), "{explained}");
            assert_eq!(SourceError::from(explained).is_away(), away, "{error}");
        }
    }

    #[test]
    fn a_queue_that_does_not_answer_may_have_no_leader() {
        let silent = AmqpError::unanswered(Asked::Queue("orders"));
        let text = silent.to_string();
        assert!(text.contains("quorum_status orders"), "{text}");
        assert!(SourceError::from(silent).is_away());
    }
}
