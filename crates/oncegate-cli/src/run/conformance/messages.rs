//! The messages of the test.

use std::time::Duration;

use bytes::Bytes;
use oncegate::{Entry, Gate, Key, Lease, MemoryStore, Message, Origin};

use crate::exit::{Exit, Problem};

/// A payload that no worker can read: neither JSON nor UTF-8.
const GARBAGE: &[u8] = b"\xff\x00{worker-test";
/// The lease of the test: the second attempt of a message has to wait this long.
pub(super) const LEASE: Duration = Duration::from_millis(200);

/// Makes messages with attempts through a gate.
pub(super) struct Messages {
    gate: Gate,
    payload: Bytes,
    route: String,
    made: u32,
    /// A new scope for each test, so that a worker that stores keys has never seen it.
    test: String,
}

impl Messages {
    pub(super) fn new(payload: Bytes, route: &str) -> Self {
        let gate = Gate::new("worker-test", Key::message_key(), MemoryStore::new()).lease(LEASE);
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let test = format!("{}-{}", now.as_nanos(), std::process::id());
        Self {
            gate,
            payload,
            route: route.to_owned(),
            made: 0,
            test,
        }
    }

    pub(super) async fn good(&mut self) -> Result<Lease, Problem> {
        self.new_one(self.payload.clone()).await
    }

    pub(super) async fn garbage(&mut self) -> Result<Lease, Problem> {
        self.new_one(Bytes::from_static(GARBAGE)).await
    }

    async fn new_one(&mut self, payload: Bytes) -> Result<Lease, Problem> {
        self.made += 1;
        let topic = self.route.as_str();
        let origin = Origin::Kafka {
            topic: topic.into(),
            partition: 0,
            offset: i64::from(self.made),
        };
        let message = Message::new(topic, origin, Some(payload));
        self.again(&message.with_key(format!("{}-{}", self.test, self.made)))
            .await
    }

    /// The next attempt of a message, as soon as the one before is over.
    pub(super) async fn again(&self, message: &Message) -> Result<Lease, Problem> {
        loop {
            match self.gate.enter(message).await {
                Ok(Entry::Granted(lease)) => return Ok(lease),
                Ok(Entry::Busy { retry_in }) => tokio::time::sleep(retry_in).await,
                Ok(other) => {
                    return Err(Problem::new(
                        Exit::Bug,
                        format!("a test message is {other:?}"),
                    ));
                }
                Err(error) => return Err(Problem::caused(Exit::Bug, &error)),
            }
        }
    }
}
