//! Reads and redrives the dead letters of a queue.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_runtime::dead_letter_reader::{DeadLetterReader, Disposition, StoredDeadLetter};
use oncegate_runtime::dead_letters::DeadLetterRefused;
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::{Message, Origin};
use oncegate_runtime::observe::Counters;
use oncegate_runtime::source::{AckHandle, Delivery, Source as _, SourceError};
use tokio::time::{Instant, timeout};

use super::AmqpSource;
use super::convert::queue_of;
use super::letter::{self, Outgoing};
use super::login::AmqpLogin;
use super::publisher::Publisher;
use super::queues;
use super::settings::{Connection, check_name};

/// The time in which not a byte of a message arrives, and after which the broker is asked whether
/// messages wait. Without any, the queue is read.
const QUIET: Duration = Duration::from_secs(3);
/// The time for which messages may wait in the queue while none arrives.
const WITHHELD_MOST: Duration = Duration::from_secs(60);
/// The number of messages that are requested at a time.
const RECEIVE_MOST: usize = 100;
/// The most dead letters that are held: the largest prefetch of the protocol. The rest of a longer
/// queue is read the next time.
const HELD_MOST: u16 = u16::MAX;
/// Time limit for returning and acknowledging messages at the end.
const CLOSE_LIMIT: Duration = Duration::from_secs(60);

/// Reads the dead letters that are ready in a queue.
///
/// A queue cannot be read without receiving. That hides its messages until the reader is closed,
/// and marks them as redelivered. Dead letters whose message was sent are acknowledged, and the
/// others return to their places in the queue. A quorum queue counts each return before RabbitMQ
/// 4.3, and drops messages at its `delivery-limit`: from RabbitMQ 4 on, give a dead-letter queue
/// the limit -1. Before RabbitMQ 4, give it none: there -1 is a limit that drops a message at its
/// first return, so such a queue is not opened.
pub struct AmqpDeadLetterReader {
    connection: Connection,
    queue: String,
    most: u16,
    open: Option<ReaderConnection>,
}

struct ReaderConnection {
    source: AmqpSource,
    publisher: Publisher,
    /// Ack handles of messages that are received and not settled, by the place of the message.
    held: HashMap<Origin, Arc<dyn AckHandle>>,
    seen: usize,
    /// The number of times that each name has occurred: messages without an id of their own may
    /// share one.
    names: HashMap<String, usize>,
}

impl AmqpDeadLetterReader {
    /// Creates a reader for the queue of this name at the broker of the URI, as
    /// [`AmqpSource::new`](super::AmqpSource::new) takes it.
    pub fn new(uri: impl Into<String>, queue: impl Into<String>) -> Self {
        Self {
            connection: Connection::new(uri.into()),
            queue: queue.into(),
            most: HELD_MOST,
            open: None,
        }
    }

    /// Sets the password and the certificates, besides what the URI has.
    #[must_use]
    pub fn login(mut self, login: AmqpLogin) -> Self {
        self.connection.login = login;
        self
    }

    /// Sets the most dead letters to receive: 65,535 by default, which is also the limit.
    #[must_use]
    pub fn most(mut self, most: u16) -> Self {
        self.most = most;
        self
    }

    fn opened(&self) -> Result<&ReaderConnection, SourceError> {
        self.open
            .as_ref()
            .ok_or_else(|| SourceError::new("the dead-letter reader has not been opened"))
    }
}

impl ReaderConnection {
    /// Names a message by its id, or that of its dead letter. A number follows if another message
    /// has the same.
    fn name(&mut self, queue: &str, message: &Message) -> Origin {
        let own = match message.origin() {
            Origin::Queue { id, .. } => Some(id.to_string()),
            _ => letter::id(message),
        };
        let own = own.unwrap_or_else(|| "no-id".to_owned());
        let count = self.names.entry(own.clone()).or_default();
        *count += 1;
        let id = if *count == 1 {
            own
        } else {
            format!("{own}~{count}")
        };
        Origin::Queue {
            queue: queue.into(),
            id: id.into(),
        }
    }
}

#[async_trait]
impl DeadLetterReader for AmqpDeadLetterReader {
    async fn open(&mut self) -> Result<(), SourceError> {
        queues::refuse_to_lose(&self.connection, &self.queue).await?;
        let source = AmqpSource::with(self.connection.clone(), self.queue.clone());
        let source = source.prefetch(self.most.max(1)).looking();
        source.open(Arc::new(Counters::default())).await?;
        let name = format!("oncegate redrives {}", self.queue);
        let publisher = Publisher::new(self.connection.clone(), name);
        let held = HashMap::new();
        self.open = Some(ReaderConnection {
            source,
            publisher,
            held,
            seen: 0,
            names: HashMap::new(),
        });
        Ok(())
    }

    async fn next_batch(&mut self) -> Result<Option<Vec<StoredDeadLetter>>, SourceError> {
        let most = usize::from(self.most);
        let Some(open) = self.open.as_mut() else {
            return Err(SourceError::new(
                "the dead-letter reader has not been opened",
            ));
        };
        let room = most.saturating_sub(open.seen);
        if room == 0 {
            return Ok(None);
        }
        // A timeout loses nothing: messages that arrive later are returned with the rest.
        let mut quiet_since = Instant::now();
        let received = loop {
            let arrived = open.source.received_bytes();
            let receiving = open.source.receive(room.min(RECEIVE_MOST));
            if let Ok(received) = timeout(QUIET, receiving).await {
                break received?;
            }
            if open.source.received_bytes() != arrived {
                // A large message takes its time.
                quiet_since = Instant::now();
                continue;
            }
            let waiting = queues::waiting(&self.connection, &self.queue).await?;
            if waiting == 0 {
                return Ok(None);
            }
            if quiet_since.elapsed() >= WITHHELD_MOST {
                return Err(SourceError::new(format!(
                    "the queue `{}` has {waiting} more messages, and the broker delivers none of them: another consumer                      is its single active one or has a higher priority, or a memory alarm is on                      (`rabbitmq-diagnostics check_local_alarms`)",
                    self.queue
                ))
                .away());
            }
        };
        let Some(deliveries) = received else {
            return Ok(None);
        };
        open.seen += deliveries.len();
        let mut letters = Vec::with_capacity(deliveries.len());
        for Delivery {
            message,
            ack_handle,
        } in deliveries
        {
            let place = open.name(&self.queue, &message);
            open.held.insert(place.clone(), ack_handle);
            letters.push(StoredDeadLetter {
                place,
                ..StoredDeadLetter::of(message, letter::read)
            });
        }
        Ok(Some(letters))
    }

    fn destination(&self, stored: &StoredDeadLetter, to: Option<&str>) -> Result<String, String> {
        let message = stored.message();
        let queue = match (to, stored.letter()) {
            (Some(to), _) => to,
            (None, Some(_)) => queue_of(message.origin()).ok_or_else(|| {
                format!(
                    "its origin is {}, which is not a queue: name a queue",
                    message.origin()
                )
            })?,
            (None, None) => dead_lettered_from(message)
                .ok_or_else(|| "it has no origin: name a queue".to_owned())?,
        };
        if queue == self.queue {
            return Err(format!(
                "{queue} is the dead-letter queue itself: name another queue"
            ));
        }
        check_name("queue", queue).map_err(|error| error.to_string())?;
        redriven(stored, queue).map(|_| queue.to_owned())
    }

    async fn send(&self, stored: &StoredDeadLetter, destination: &str) -> Result<(), BoxError> {
        let message = redriven(stored, destination)?;
        let sent = self.opened()?.publisher.publish(destination, message).await;
        sent.map_err(|error| {
            let what = format!("{} to {destination}: {error}", stored.place);
            if error.is_refused() || error.is_missing() {
                Box::new(DeadLetterRefused::new(what)) as BoxError
            } else {
                what.into()
            }
        })
    }

    fn settle(&mut self, stored: &StoredDeadLetter, settled: Disposition) {
        let Some(open) = self.open.as_mut() else {
            return;
        };
        // Dead letters that stay are held until the end. Otherwise the queue would deliver them
        // again at once.
        if settled == Disposition::Sent
            && let Some(ack_handle) = open.held.remove(&stored.place)
        {
            ack_handle.ack();
        }
    }

    /// Does nothing: the queue's thread acknowledges settled messages, and a message that is not
    /// acknowledged is delivered again.
    async fn save(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        let Some(open) = self.open.take() else {
            return Ok(());
        };
        // An ack handle that is dropped without an ack returns its message; from here on with all
        // others, in their order.
        open.source.stop_receiving();
        drop(open.held);
        open.publisher.close().await;
        open.source.close(CLOSE_LIMIT).await
    }
}

/// Returns the queue that a dead-letter exchange of the broker took the message from.
fn dead_lettered_from(message: &Message) -> Option<&str> {
    std::str::from_utf8(message.header("x-first-death-queue")?).ok()
}

/// Returns the message with its first route. A message that oncegate did not write gets its route
/// from the queue.
fn redriven(stored: &StoredDeadLetter, destination: &str) -> Result<Outgoing, String> {
    let route = stored.letter().map(|letter| letter.message.route());
    Outgoing::redriven(stored.message(), route, destination)
}

impl fmt::Debug for AmqpDeadLetterReader {
    /// Does not show the URI, because it has a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpDeadLetterReader")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}
