//! The checks before a queue is used.

use std::fmt;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry, QueueAttributeName,
};
use serde_json::Value;

use super::api::CallError;
use super::queue_error::QueueError;
use super::settings::{Settings, has_login, is_fifo, name};
use oncegate_runtime::source::Terms;

/// The time after its receive at which SQS makes a message visible again, whatever was extended.
const HELD_AT_MOST: Duration = Duration::from_secs(12 * 3_600);

/// A queue and its attributes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Queue {
    pub(crate) url: String,
    /// The account and the region, if the service tells them.
    pub(crate) place: Option<String>,
    pub(crate) fifo: bool,
    /// The number of receives after which the redrive policy moves a message.
    pub(crate) max_receives: Option<u32>,
    /// The time for which the queue keeps messages, in seconds.
    pub(crate) retention: Option<u64>,
    /// The largest message in bytes, including its attributes.
    pub(crate) max_message_bytes: Option<usize>,
}

/// Finds the queue and reads its attributes.
pub(crate) async fn find(client: &Client, queue: &str) -> Result<Queue, QueueError> {
    if has_login(queue) {
        return Err(QueueError::Login);
    }
    let url = if queue.contains("://") {
        queue.to_owned()
    } else {
        let found = client.get_queue_url().queue_name(queue).send().await;
        let found =
            found.map_err(|error| QueueError::of(queue, "GetQueueUrl", CallError::of(&error)))?;
        found
            .queue_url
            .ok_or_else(|| QueueError::Missing(queue.to_owned()))?
    };
    let asked = client
        .get_queue_attributes()
        .queue_url(&url)
        .attribute_names(QueueAttributeName::All);
    let answer = asked.send().await;
    let answer = answer
        .map_err(|error| QueueError::of(queue, "GetQueueAttributes", CallError::of(&error)))?;
    let attributes = answer.attributes.unwrap_or_default();
    let attribute = |name: QueueAttributeName| attributes.get(&name).map(String::as_str);
    let fifo = attribute(QueueAttributeName::FifoQueue) == Some("true");
    if fifo && !is_fifo(&url) {
        return Err(QueueError::Misnamed(name(queue).to_owned()));
    }
    Ok(Queue {
        fifo: is_fifo(&url),
        place: attribute(QueueAttributeName::QueueArn).and_then(place),
        max_receives: attribute(QueueAttributeName::RedrivePolicy).and_then(max_receives),
        retention: attribute(QueueAttributeName::MessageRetentionPeriod)
            .and_then(|value| value.parse().ok()),
        max_message_bytes: attribute(QueueAttributeName::MaximumMessageSize)
            .and_then(|value| value.parse().ok()),
        url,
    })
}

/// Returns the account and the region of an ARN: `arn:aws:sqs:eu-central-1:123456789012:orders`.
fn place(arn: &str) -> Option<String> {
    let mut parts = arn.split(':').skip(3);
    let region = parts.next().filter(|region| !region.is_empty())?;
    let account = parts.next().filter(|account| !account.is_empty())?;
    Some(format!("SQS in {region}, account {account}"))
}

/// Reads `maxReceiveCount` of a redrive policy, which is a number for some writers and a string for
/// others.
fn max_receives(policy: &str) -> Option<u32> {
    let policy: Value = serde_json::from_str(policy).ok()?;
    let count = policy.get("maxReceiveCount")?;
    count
        .as_u64()
        .and_then(|count| u32::try_from(count).ok())
        .or_else(|| count.as_str()?.parse().ok())
}

/// Checks the rights to delete and to change visibility, by calls with a receipt handle that
/// matches no message.
pub(crate) async fn check_rights(client: &Client, queue: &Queue) -> Result<(), QueueError> {
    const NOTHING: &str = "oncegate-asks-for-its-rights";
    let entry = DeleteMessageBatchRequestEntry::builder()
        .id("0")
        .receipt_handle(NOTHING)
        .build();
    let call = client
        .delete_message_batch()
        .queue_url(&queue.url)
        .set_entries(entry.ok().map(|entry| vec![entry]));
    if let Err(error) = call.send().await {
        refused(queue, "DeleteMessage", CallError::of(&error))?;
    }
    let entry = ChangeMessageVisibilityBatchRequestEntry::builder()
        .id("0")
        .receipt_handle(NOTHING);
    let entry = entry.visibility_timeout(0).build();
    let call = client
        .change_message_visibility_batch()
        .queue_url(&queue.url);
    if let Err(error) = call
        .set_entries(entry.ok().map(|entry| vec![entry]))
        .send()
        .await
    {
        refused(queue, "ChangeMessageVisibility", CallError::of(&error))?;
    }
    Ok(())
}

/// Returns an error if a call without effect was denied. Its other errors are as expected.
fn refused(queue: &Queue, action: &'static str, error: CallError) -> Result<(), QueueError> {
    if error.is_denied() {
        Err(QueueError::of(&queue.url, action, error))
    } else {
        Ok(())
    }
}

impl Queue {
    /// Returns warnings for settings that weaken the guarantees or have unexpected effects.
    pub(crate) fn warnings(&self, settings: &Settings, terms: &Terms) -> Vec<Warning> {
        let mut warnings = Vec::new();
        if let Some(receives) = self.max_receives
            && receives <= terms.max_attempts
        {
            warnings.push(Warning::Redrive {
                receives,
                attempts: terms.max_attempts,
            });
        }
        if settings.source.visibility < terms.lease {
            warnings.push(Warning::Visibility {
                visibility: settings.source.visibility.as_secs(),
                lease: terms.lease.as_secs(),
            });
        }
        if terms.max_run > HELD_AT_MOST {
            warnings.push(Warning::MaxRun {
                max_run: terms.max_run.as_secs(),
            });
        }
        if let Some(queue) = self.retention
            && queue > terms.retention.as_secs()
        {
            warnings.push(Warning::Retention {
                queue,
                records: terms.retention.as_secs(),
            });
        }
        warnings
    }
}

/// A warning at start-up. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Warning {
    Redrive { receives: u32, attempts: u32 },
    Visibility { visibility: u64, lease: u64 },
    MaxRun { max_run: u64 },
    Retention { queue: u64, records: u64 },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redrive { receives, attempts } => write!(
                f,
                "the queue's redrive policy moves a message after {receives} receives, and this consumer makes \
                 {attempts} attempts: the policy may move messages, without a reason, before they become dead \
                 letters with one. Set `maxReceiveCount` above {attempts}, or `max_attempts` below {receives}"
            ),
            Self::Visibility { visibility, lease } => write!(
                f,
                "`visibility` is {visibility} s and the gate's lease {lease} s: after a crash a message is \
                 delivered again before its lease is over, and waits. Set `visibility` to {lease} s or more"
            ),
            Self::MaxRun { max_run } => write!(
                f,
                "the gate's `max_run` is {max_run} s, and SQS makes a message visible 12 hours after its receive, \
                 even if its handler runs: the message is delivered again then, and waits for the run. \
                 Set `max_run` to 12 h or less, or split the work"
            ),
            Self::Retention { queue, records } => write!(
                f,
                "the queue keeps messages for {queue} s and the gate its records for {records} s: a message \
                 that is delivered again after its record has expired runs again. Set the gate's `retention` to \
                 {queue} s or more"
            ),
        }
    }
}

/// The number of bytes that a dead letter may have more than its message: its origin and reason are
/// added.
const LETTER_ROOM_BYTES: usize = 2_048;
/// The largest `MaximumMessageSize`: that of older servers with SQS's protocol, and that of SQS
/// today.
const MESSAGE_MAX_BYTES: [usize; 2] = [262_144, 1_048_576];

impl Queue {
    /// Returns how many bytes a message may have, including its attributes.
    pub(crate) fn limit(&self) -> usize {
        self.max_message_bytes.unwrap_or(MESSAGE_MAX_BYTES[0])
    }

    /// Returns how many bytes the messages of a batch may have together. A smaller limit of a
    /// message is none of a batch.
    pub(crate) fn batch_limit(&self) -> usize {
        self.limit().max(MESSAGE_MAX_BYTES[0])
    }

    /// Returns a warning when this dead-letter queue does not accept each message of `consumed`
    /// with the added attributes, although a larger limit is possible.
    pub(crate) fn letters_warning(&self, consumed: &Self) -> Option<String> {
        let own = self.limit();
        let largest = consumed.limit();
        let is_short =
            own < largest || own < largest + LETTER_ROOM_BYTES && !MESSAGE_MAX_BYTES.contains(&own);
        let enough = (largest + LETTER_ROOM_BYTES).min(MESSAGE_MAX_BYTES[1].max(largest));
        is_short.then(|| {
            format!(
                "the dead-letter queue takes {own} bytes a message and the consumed queue {largest}: a dead letter is \
                 up to {LETTER_ROOM_BYTES} bytes larger than its message. One that does not fit loses its attributes; \
                 one whose body does not fit is not written, and its message stays unacknowledged. Set the dead-letter queue's \
                 `MaximumMessageSize` to {enough}, or as much as the server allows"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::settings::Connection;
    use super::*;

    #[test]
    fn a_queue_of_one_name_elsewhere_has_another_place() {
        let eu = "arn:aws:sqs:eu-central-1:123456789012:orders";
        assert_eq!(
            place(eu).as_deref(),
            Some("SQS in eu-central-1, account 123456789012")
        );
        assert_ne!(place(eu), place(&eu.replace("eu-", "us-")));
        assert_ne!(place(eu), place(&eu.replace("9012", "9013")));
        assert_eq!(place("arn:aws:sqs::123456789012:orders"), None);
    }

    #[test]
    fn the_receive_limit_is_read_as_number_or_text() {
        let policy = r#"{"deadLetterTargetArn":"arn:aws:sqs:eu-central-1:000000000000:dead","maxReceiveCount":5}"#;
        assert_eq!(max_receives(policy), Some(5));
        assert_eq!(max_receives(&policy.replace("5}", "\"7\"}")), Some(7));
        assert_eq!(max_receives("{}"), None);
        assert_eq!(max_receives("no json"), None);
    }

    #[test]
    fn what_does_not_fit_together_is_said_in_words() {
        let settings = Settings::new(Connection::default(), "orders".to_owned());
        let terms = Terms::default();
        let fine = Queue {
            max_receives: Some(11),
            retention: Some(345_600),
            ..Queue::default()
        };
        assert_eq!(fine.warnings(&settings, &terms), []);
        let odd = Queue {
            max_receives: Some(10),
            retention: Some(1_209_600),
            ..Queue::default()
        };
        let mut settings = settings;
        settings.source.visibility = Duration::from_secs(10);
        let texts: Vec<String> = odd
            .warnings(&settings, &terms)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert!(
            texts[0].contains("after 10 receives")
                && texts[0].contains("Set `maxReceiveCount` above 10")
        );
        assert!(texts[1].contains("`visibility` is 10 s") && texts[1].contains("30 s or more"));
        assert!(texts[2].contains("`retention` to 1209600 s"));
    }

    #[test]
    fn a_run_longer_than_a_queue_waits_is_said() {
        let settings = Settings::new(Connection::default(), "orders".to_owned());
        let with = |hours: u64| {
            let terms = Terms {
                max_run: Duration::from_secs(hours * 3_600),
                ..Terms::default()
            };
            Queue::default().warnings(&settings, &terms)
        };
        assert_eq!(with(12), []);
        assert_eq!(
            with(13),
            [Warning::MaxRun {
                max_run: 13 * 3_600
            }]
        );
    }

    #[test]
    fn a_queue_of_dead_letters_with_too_little_room_is_said() {
        let queue = |bytes: usize| Queue {
            max_message_bytes: Some(bytes),
            ..Queue::default()
        };
        let warning = |dead: usize, consumed: usize| queue(dead).letters_warning(&queue(consumed));
        for (dead, consumed, enough) in [
            (1_024, 2_048, "4096"),
            (2_048, 2_048, "4096"),
            (262_144, 1_048_576, "1048576"),
            (4_000, 2_048, "4096"),
        ] {
            let text = warning(dead, consumed).expect("a warning");
            assert!(
                text.contains(&format!("takes {dead} bytes"))
                    && text.contains(&format!("to {enough},")),
                "{text}"
            );
        }
        for (dead, consumed) in [
            (4_096, 2_048),
            (262_144, 262_144),
            (1_048_576, 1_048_576),
            (1_048_576, 262_144),
        ] {
            assert_eq!(warning(dead, consumed), None, "{dead} for {consumed}");
        }
    }
}
