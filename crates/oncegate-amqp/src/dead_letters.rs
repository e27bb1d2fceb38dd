//! Writes dead letters to a queue.

use std::fmt;

use async_trait::async_trait;
use oncegate_runtime::dead_letters::{DeadLetter, DeadLetterRefused, DeadLetters};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::source::SourceError;
use tracing::warn;

use super::convert::queue_of;
use super::error::AmqpError;
use super::letter::Outgoing;
use super::login::AmqpLogin;
use super::publisher::Publisher;
use super::settings::{Connection, check_name};

/// Writes dead letters to a queue: payload, headers and properties unchanged, and two headers with
/// their origin and cause (see [`amqp`](super)).
///
/// A dead letter counts as written when the broker has confirmed it. It is published through the
/// default exchange, as persistent and `mandatory`: without a queue of this name, the write fails,
/// and the message is not acknowledged. The queue must be durable, and should be a quorum queue
/// without a limit that drops messages.
///
/// Headers that do not fit into a frame of the connection (128 KiB by default) are left out, the
/// largest first; `oncegate-origin` has their names, and it is logged.
pub struct AmqpDeadLetters {
    connection: Connection,
    queue: String,
    /// The queue that a source consumes. Dead letters must go to a different one.
    consumed: Option<String>,
    publisher: Publisher,
}

impl AmqpDeadLetters {
    /// Creates dead letters that write to the queue of this name at the broker of the URI, as
    /// [`AmqpSource::new`](super::AmqpSource::new) takes it.
    ///
    /// [`AmqpSource::dead_letters`](super::AmqpSource::dead_letters) takes the URI and the
    /// login of the source.
    pub fn new(uri: impl Into<String>, queue: impl Into<String>) -> Self {
        Self::with(Connection::new(uri.into()), queue.into())
    }

    pub(crate) fn with(connection: Connection, queue: String) -> Self {
        let name = format!("oncegate writes dead letters to {queue}");
        let publisher = Publisher::new(connection.clone(), name);
        Self {
            connection,
            queue,
            consumed: None,
            publisher,
        }
    }

    pub(crate) fn beside(mut self, consumed: String) -> Self {
        self.consumed = Some(consumed);
        self
    }

    /// Sets the password and the certificates, besides what the URI has.
    #[must_use]
    pub fn login(mut self, login: AmqpLogin) -> Self {
        self.connection.login = login;
        self.connected_anew()
    }

    /// Checks the queue as [`open`](DeadLetters::open) does. It writes nothing.
    ///
    /// # Errors
    /// When the queue cannot be used: it does not exist, the broker cannot be reached, or a right
    /// is missing.
    pub async fn check_queue(&self) -> Result<(), SourceError> {
        self.check().await?;
        self.publisher.close().await;
        Ok(())
    }

    /// Returns the queue's name.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    fn connected_anew(self) -> Self {
        let Self {
            connection,
            queue,
            consumed,
            ..
        } = self;
        Self {
            consumed,
            ..Self::with(connection, queue)
        }
    }

    async fn check(&self) -> Result<(), AmqpError> {
        self.connection.uri()?;
        check_name("dead-letter queue", &self.queue)?;
        if let Some(consumed) = &self.consumed {
            self.refuse_loop(consumed)?;
        }
        self.publisher.check(&self.queue).await
    }

    /// Returns the error of a write: [`DeadLetterRefused`] when the broker will never take the
    /// letter.
    fn unwritten(&self, error: &AmqpError) -> BoxError {
        let what = format!(
            "dead letter could not be written to the queue `{}`: {error}",
            self.queue
        );
        if error.is_refused() {
            Box::new(DeadLetterRefused::new(what))
        } else {
            what.into()
        }
    }

    fn refuse_loop(&self, consumed: &str) -> Result<(), AmqpError> {
        if consumed == self.queue {
            return Err(AmqpError::new(format!(
                "the dead-letter queue `{consumed}` is consumed by the same consumer: every dead letter would come back \
                 as a message; use another queue"
            )));
        }
        Ok(())
    }
}

#[async_trait]
impl DeadLetters for AmqpDeadLetters {
    /// Checks that the queue exists, that no source consumes it, and that the user may write to it.
    async fn open(&self) -> Result<(), BoxError> {
        Ok(self.check().await.map_err(SourceError::from)?)
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        if let Some(consumed) = queue_of(letter.message.origin()) {
            self.refuse_loop(consumed)?;
        }
        let limit = self
            .publisher
            .header_limit()
            .await
            .map_err(|error| self.unwritten(&error))?;
        let outgoing = Outgoing::letter(letter, limit);
        if !outgoing.left_out.is_empty() {
            let origin = letter.message.origin();
            warn!(%origin, left_out = ?outgoing.left_out, limit, "the dead letter has no room for these headers of its message");
        }
        self.publisher
            .publish(&self.queue, outgoing)
            .await
            .map_err(|error| self.unwritten(&error))
    }
}

impl fmt::Debug for AmqpDeadLetters {
    /// Does not show the URI, because it has a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpDeadLetters")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}
