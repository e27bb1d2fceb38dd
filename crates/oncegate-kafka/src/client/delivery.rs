//! One message on its way to the brokers.

use rdkafka::client::ClientContext;
use rdkafka::error::KafkaError;
use rdkafka::message::{Message as _, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

use oncegate_runtime::message::Message;

/// The partition of a message for which none was chosen.
const NO_PARTITION: i32 = -1;

/// The content of a message besides its headers.
#[derive(Clone, Copy)]
pub(crate) struct Content<'m> {
    /// `None`: the key decides.
    pub(crate) partition: Option<i32>,
    pub(crate) key: Option<&'m [u8]>,
    /// `None` for a tombstone.
    pub(crate) payload: Option<&'m [u8]>,
}

impl<'m> From<&'m Message> for Content<'m> {
    fn from(message: &'m Message) -> Self {
        Self {
            partition: None,
            key: message.key(),
            payload: (!message.is_tombstone()).then(|| message.payload()),
        }
    }
}

/// Sends a message, and waits for its report.
pub(super) async fn deliver<C: ClientContext + 'static>(
    client: &FutureProducer<C>,
    topic: &str,
    content: Content<'_>,
    headers: OwnedHeaders,
) -> Result<(), Undelivered> {
    let mut record = FutureRecord::<[u8], [u8]>::to(topic).headers(headers);
    if let Some(partition) = content.partition {
        record = record.partition(partition);
    }
    if let Some(payload) = content.payload {
        record = record.payload(payload);
    }
    if let Some(key) = content.key {
        record = record.key(key);
    }
    let report = client
        .send_result(record)
        .map_err(|(error, _)| Undelivered::unsent(error))?;
    report
        .await
        .map_err(|_| Undelivered::unsent(KafkaError::Canceled))?
        .map_err(|(error, message)| Undelivered {
            error,
            partition: message.partition(),
        })?;
    Ok(())
}

/// A message that may not have been written.
pub(super) struct Undelivered {
    pub(super) error: KafkaError,
    /// The partition that it was for; negative if it had none yet.
    pub(super) partition: i32,
}

impl Undelivered {
    fn unsent(error: KafkaError) -> Self {
        Self {
            error,
            partition: NO_PARTITION,
        }
    }
}
