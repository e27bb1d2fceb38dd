//! What is looked at before a queue is used.

use std::fmt;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry, QueueAttributeName,
};
use serde_json::Value;

use super::api::CallError;
use super::settings::{Settings, is_fifo, name};
use crate::source::{SourceError, Terms};

/// A queue as it was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Queue {
    pub(crate) url: String,
    pub(crate) fifo: bool,
    /// How often a message may be received before the redrive policy takes it.
    pub(crate) max_receives: Option<u32>,
    /// In seconds.
    retention: Option<u64>,
    /// In bytes, attributes included.
    pub(crate) max_message_bytes: Option<usize>,
}

/// Why a queue cannot be used, in words that name what to change.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    #[error("the queue `{0}` does not exist: create it, or correct its name, the region or the account")]
    Missing(String),
    #[error("the credentials may not call `sqs:{action}` on the queue `{queue}`: grant it ({error})")]
    Denied { queue: String, action: &'static str, error: CallError },
    #[error("the queue `{queue}` cannot be asked with `sqs:{action}`: {error}")]
    Failed { queue: String, action: &'static str, error: CallError },
    #[error("nobody answers `sqs:{action}` for the queue `{queue}`: correct its region or endpoint, or wait")]
    Unreachable { queue: String, action: &'static str, error: CallError },
    #[error("the queue `{0}` is FIFO by its attributes and not by its name; that is no queue of SQS")]
    Misnamed(String),
}

impl QueueError {
    fn of(queue: &str, action: &'static str, error: CallError) -> Self {
        let queue = queue.to_owned();
        match error {
            error if error.is_no_queue() => Self::Missing(queue),
            error if error.is_denied() => Self::Denied { queue, action, error },
            error if error.is_unreachable => Self::Unreachable { queue, action, error },
            error => Self::Failed { queue, action, error },
        }
    }
}

impl From<QueueError> for SourceError {
    fn from(error: QueueError) -> Self {
        let what = error.to_string();
        match error {
            QueueError::Unreachable { error, .. } => Self::caused(what, error),
            _ => Self::new(what),
        }
    }
}

/// Finds the queue and reads its attributes.
pub(crate) async fn find(client: &Client, queue: &str) -> Result<Queue, QueueError> {
    let url = if queue.contains("://") {
        queue.to_owned()
    } else {
        let found = client.get_queue_url().queue_name(queue).send().await;
        let found = found.map_err(|error| QueueError::of(queue, "GetQueueUrl", CallError::of(&error)))?;
        found.queue_url.ok_or_else(|| QueueError::Missing(queue.to_owned()))?
    };
    let asked = client.get_queue_attributes().queue_url(&url).attribute_names(QueueAttributeName::All);
    let answer = asked.send().await;
    let answer =
        answer.map_err(|error| QueueError::of(queue, "GetQueueAttributes", CallError::of(&error)))?;
    let attributes = answer.attributes.unwrap_or_default();
    let attribute = |name: QueueAttributeName| attributes.get(&name).map(String::as_str);
    let fifo = attribute(QueueAttributeName::FifoQueue) == Some("true");
    if fifo && !is_fifo(&url) {
        return Err(QueueError::Misnamed(name(queue).to_owned()));
    }
    Ok(Queue {
        fifo: is_fifo(&url),
        max_receives: attribute(QueueAttributeName::RedrivePolicy).and_then(max_receives),
        retention: attribute(QueueAttributeName::MessageRetentionPeriod).and_then(|value| value.parse().ok()),
        max_message_bytes: attribute(QueueAttributeName::MaximumMessageSize)
            .and_then(|value| value.parse().ok()),
        url,
    })
}

/// `maxReceiveCount` is a number for some senders and a string for others.
fn max_receives(policy: &str) -> Option<u32> {
    let policy: Value = serde_json::from_str(policy).ok()?;
    let count = policy.get("maxReceiveCount")?;
    count.as_u64().and_then(|count| u32::try_from(count).ok()).or_else(|| count.as_str()?.parse().ok())
}

/// Whether the rights that are needed later are there: asked with a receipt handle that belongs to nothing.
pub(crate) async fn check_rights(client: &Client, queue: &Queue) -> Result<(), QueueError> {
    const NOTHING: &str = "oncegate-asks-for-its-rights";
    let refused = |action: &'static str, error: CallError| {
        if error.is_denied() { Err(QueueError::of(&queue.url, action, error)) } else { Ok(()) }
    };
    let entry = DeleteMessageBatchRequestEntry::builder().id("0").receipt_handle(NOTHING).build();
    let call =
        client.delete_message_batch().queue_url(&queue.url).set_entries(entry.ok().map(|entry| vec![entry]));
    if let Err(error) = call.send().await {
        refused("DeleteMessage", CallError::of(&error))?;
    }
    let entry = ChangeMessageVisibilityBatchRequestEntry::builder().id("0").receipt_handle(NOTHING);
    let entry = entry.visibility_timeout(0).build();
    let call = client.change_message_visibility_batch().queue_url(&queue.url);
    if let Err(error) = call.set_entries(entry.ok().map(|entry| vec![entry])).send().await {
        refused("ChangeMessageVisibility", CallError::of(&error))?;
    }
    Ok(())
}

impl Queue {
    /// What weakens the promise, or will surprise somebody.
    pub(crate) fn warnings(&self, settings: &Settings, terms: &Terms) -> Vec<Warning> {
        let mut warnings = Vec::new();
        if let Some(receives) = self.max_receives
            && receives <= terms.max_attempts
        {
            warnings.push(Warning::Redrive { receives, attempts: terms.max_attempts });
        }
        if settings.visibility < terms.lease {
            warnings.push(Warning::Visibility {
                visibility: settings.visibility.as_secs(),
                lease: terms.lease.as_secs(),
            });
        }
        if let Some(queue) = self.retention
            && queue > terms.retention.as_secs()
        {
            warnings.push(Warning::Retention { queue, records: terms.retention.as_secs() });
        }
        warnings
    }
}

/// Something to know at start-up. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Warning {
    Redrive { receives: u32, attempts: u32 },
    Visibility { visibility: u64, lease: u64 },
    Retention { queue: u64, records: u64 },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redrive { receives, attempts } => write!(
                f,
                "the queue's redrive policy takes a message after {receives} receives, and this consumer makes \
                 {attempts} attempts: the policy may take messages without a reason before they are given up \
                 with one. Set `maxReceiveCount` above {attempts}, or `max_attempts` below {receives}"
            ),
            Self::Visibility { visibility, lease } => write!(
                f,
                "`visibility` is {visibility} s and the gate's lease {lease} s: after a crash a message comes \
                 again before its lease is over, and waits. Set `visibility` to {lease} s or more"
            ),
            Self::Retention { queue, records } => write!(
                f,
                "the queue keeps messages for {queue} s and the gate its records for {records} s: a message \
                 that comes again after its record is forgotten runs again. Set the gate's `retention` to \
                 {queue} s or more"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::settings::Connection;
    use super::*;

    #[test]
    fn the_receive_limit_is_read_as_number_or_text() {
        let policy =
            r#"{"deadLetterTargetArn":"arn:aws:sqs:eu-central-1:000000000000:dead","maxReceiveCount":5}"#;
        assert_eq!(max_receives(policy), Some(5));
        assert_eq!(max_receives(&policy.replace("5}", "\"7\"}")), Some(7));
        assert_eq!(max_receives("{}"), None);
        assert_eq!(max_receives("no json"), None);
    }

    #[test]
    fn what_does_not_fit_together_is_said_in_words() {
        let settings = Settings::new(Connection::default(), "orders".to_owned());
        let terms = Terms::default();
        let fine = Queue { max_receives: Some(11), retention: Some(345_600), ..Queue::default() };
        assert_eq!(fine.warnings(&settings, &terms), []);
        let odd = Queue { max_receives: Some(10), retention: Some(1_209_600), ..Queue::default() };
        let settings = Settings { visibility: Duration::from_secs(10), ..settings };
        let texts: Vec<String> = odd.warnings(&settings, &terms).iter().map(ToString::to_string).collect();
        assert!(
            texts[0].contains("after 10 receives") && texts[0].contains("Set `maxReceiveCount` above 10")
        );
        assert!(texts[1].contains("`visibility` is 10 s") && texts[1].contains("30 s or more"));
        assert!(texts[2].contains("`retention` to 1209600 s"));
    }
}
