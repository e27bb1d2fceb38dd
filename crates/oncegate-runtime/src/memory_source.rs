//! A source of given messages.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;

use crate::message::{Message, Origin};
use crate::observe::Observer;
use crate::source::{AckHandle, Delivery, Source, SourceError};

/// A source of given messages, for tests of a handler and for a first look.
///
/// It delivers each of them once, in their order. A consumer of it ends by itself when all are
/// handled. A clone is the same source: keep one to see what was acknowledged.
///
/// ```
/// use oncegate::prelude::*;
/// use oncegate::MemorySource;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// let source = MemorySource::new("orders", [r#"{"order_id":1}"#, r#"{"order_id":1}"#]);
/// let gate = Gate::new("billing", Key::json(["order_id"]), MemoryStore::new());
/// let handler = async |_: Message, attempt: Attempt| Ok(attempt.number());
/// Consumer::new(source.clone(), gate, handler).run_until(std::future::pending()).await?;
/// assert_eq!(source.acknowledged().len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MemorySource {
    messages: Arc<GivenMessages>,
}

#[derive(Debug, Default)]
struct GivenMessages {
    waiting: Mutex<VecDeque<Message>>,
    acknowledged: Mutex<Vec<Origin>>,
}

impl MemorySource {
    /// Creates a source of messages of `route` with these payloads. Their origins are those of
    /// partition 0 of a topic of this name, from offset 0 on.
    pub fn new(
        route: impl Into<Arc<str>>,
        payloads: impl IntoIterator<Item = impl Into<Bytes>>,
    ) -> Self {
        let route: Arc<str> = route.into();
        let messages = payloads.into_iter().zip(0..).map(|(payload, offset)| {
            let origin = Origin::Kafka {
                topic: Arc::clone(&route),
                partition: 0,
                offset,
            };
            Message::new(Arc::clone(&route), origin, Some(payload.into()))
        });
        Self::of(messages)
    }

    /// Creates a source of these messages, with their keys, headers and origins.
    pub fn of(messages: impl IntoIterator<Item = Message>) -> Self {
        let messages = GivenMessages {
            waiting: Mutex::new(messages.into_iter().collect()),
            ..GivenMessages::default()
        };
        Self {
            messages: Arc::new(messages),
        }
    }

    /// Returns the origins of the messages that were acknowledged, in that order.
    pub fn acknowledged(&self) -> Vec<Origin> {
        self.messages.acknowledged.lock().clone()
    }
}

#[async_trait]
impl Source for MemorySource {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let mut waiting = self.messages.waiting.lock();
        if waiting.is_empty() {
            return Ok(None);
        }
        let count = most.min(waiting.len());
        let deliveries = waiting.drain(..count).map(|message| Delivery {
            ack_handle: Arc::new(MemoryAck {
                messages: Arc::clone(&self.messages),
                origin: message.origin().clone(),
            }),
            message,
        });
        Ok(Some(deliveries.collect()))
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

#[derive(Debug)]
struct MemoryAck {
    messages: Arc<GivenMessages>,
    origin: Origin,
}

impl AckHandle for MemoryAck {
    fn start(&self) -> bool {
        true
    }

    fn ack(&self) {
        self.messages.acknowledged.lock().push(self.origin.clone());
    }

    fn stop(&self) {}
}
