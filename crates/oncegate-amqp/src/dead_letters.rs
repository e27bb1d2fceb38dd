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
use super::management;
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
    /// The URL of the management plugin.
    management: Option<String>,
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
            management: None,
            publisher,
        }
    }

    pub(crate) fn beside(mut self, consumed: String, management: Option<String>) -> Self {
        self.consumed = Some(consumed);
        self.management = management;
        self
    }

    /// Sets the password and the certificates, besides what the URI has.
    #[must_use]
    pub fn login(mut self, login: AmqpLogin) -> Self {
        self.connection.login = login;
        self.connected_anew()
    }

    /// Asks the management plugin at this URL, such as `http://localhost:15672`, for the limits of
    /// the queue at the start. Those of a source ask the plugin of the source.
    #[must_use]
    pub fn management(mut self, url: impl Into<String>) -> Self {
        self.management = Some(url.into());
        self
    }

    /// Checks the queue as [`open`](DeadLetters::open) does. It writes nothing. Returns a warning
    /// for each limit of the queue that may lose dead letters, if the management plugin is set.
    ///
    /// # Errors
    /// When the queue cannot be used: it does not exist, the broker cannot be reached, or a right
    /// is missing.
    pub async fn check_queue(&self) -> Result<Vec<String>, SourceError> {
        self.check().await?;
        let warnings = self.warnings().await;
        self.publisher.close().await;
        Ok(warnings)
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
            management,
            ..
        } = self;
        Self {
            consumed,
            management,
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

    async fn warnings(&self) -> Vec<String> {
        let Some(url) = &self.management else {
            return Vec::new();
        };
        let major = self.publisher.major_version().await;
        match management::describe(&self.connection, &self.queue, url).await {
            Ok(described) => described.letter_warnings(&self.queue, major),
            Err(error) => vec![management::unknown(&self.queue, &error)],
        }
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
        self.check().await.map_err(SourceError::from)?;
        for warning in self.warnings().await {
            warn!(queue = self.queue, "{warning}");
        }
        Ok(())
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
