//! The calls to SQS, one function each with its time limit, and the meaning of their errors.

use std::fmt;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::retry::RetryConfig;
use aws_sdk_sqs::config::timeout::TimeoutConfig;
use aws_sdk_sqs::error::{BuildError, ProvideErrorMetadata, SdkError};
use aws_sdk_sqs::types::{
    BatchResultErrorEntry, ChangeMessageVisibilityBatchRequestEntry,
    DeleteMessageBatchRequestEntry, Message, MessageSystemAttributeName,
};

use super::held::{Change, EntryResult, Target};

/// The time limit of one attempt to connect.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Time limit of a call that does not wait for messages.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// The time by which a receive may take longer than its wait.
const RECEIVE_MARGIN: Duration = Duration::from_secs(10);

/// The error codes for a queue that does not exist.
const NO_QUEUE: [&str; 2] = [
    "QueueDoesNotExist",
    "AWS.SimpleQueueService.NonExistentQueue",
];

/// The error codes for an invalid receipt handle. All other errors may be retried.
const GONE: [&str; 6] = [
    "ReceiptHandleIsInvalid",
    "InvalidParameterValue",
    "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
    "InvalidParameterValueException",
    "InvalidParameter",
];

/// The error codes for invalid or expired credentials.
const UNKNOWN_CALLER: [&str; 6] = [
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "MissingAuthenticationToken",
];

/// The error codes of a server that is too busy or restarting.
const PASSING: [&str; 6] = [
    "ServiceUnavailable",
    "InternalError",
    "InternalFailure",
    "ThrottlingException",
    "RequestThrottled",
    "RequestTimeout",
];

/// The wait of a receive for messages after a failed one. Its answer shows that the queue is back.
const PROBE_WAIT: Duration = Duration::from_secs(1);

/// The wait of a receive for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Poll {
    /// As long as the source's setting.
    Long,
    /// For a moment, to find out whether the queue answers again.
    Probe,
}

/// The calls to a queue while it is consumed. It does not retry; the caller counts failures.
#[derive(Debug)]
pub(crate) struct Api {
    polls: Client,
    calls: Client,
    url: String,
    wait: Duration,
    visibility: Duration,
}

/// The error of a call that has failed.
#[derive(Clone, Debug)]
pub(crate) struct CallError {
    pub(crate) code: String,
    /// `true` if no server answered.
    pub(crate) is_unreachable: bool,
    text: String,
}

impl CallError {
    pub(crate) fn of<E>(error: &SdkError<E>) -> Self
    where
        E: ProvideErrorMetadata + std::error::Error + 'static,
    {
        let code = error.code().unwrap_or_default().to_owned();
        let text = match (error.code(), error.message()) {
            (Some(code), Some(message)) => format!("{code}: {message}"),
            (Some(code), None) => code.to_owned(),
            // Without a message from the service, the chain of causes tells more than the outermost
            // error.
            (None, _) => with_causes(error),
        };
        let is_unreachable = match error {
            SdkError::TimeoutError(_) => true,
            SdkError::DispatchFailure(failure) => failure.is_io() || failure.is_timeout(),
            _ => false,
        };
        Self {
            code,
            is_unreachable,
            text,
        }
    }

    /// Returns whether no service has answered, as without credentials.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.code.is_empty()
    }

    /// Returns whether the queue does not exist.
    pub(crate) fn is_no_queue(&self) -> bool {
        NO_QUEUE.contains(&self.code.as_str())
    }

    /// Returns whether the error is temporary: the server is unreachable or too busy.
    pub(crate) fn is_passing(&self) -> bool {
        self.is_unreachable || Self::is_passing_code(&self.code)
    }

    /// Returns whether an error with this code is temporary.
    pub(crate) fn is_passing_code(code: &str) -> bool {
        PASSING.contains(&code)
    }

    /// Returns whether access is denied, or the caller is unknown, for example because its
    /// credentials have expired.
    pub(crate) fn is_denied(&self) -> bool {
        self.code.contains("AccessDenied") || UNKNOWN_CALLER.contains(&self.code.as_str())
    }
}

/// The texts of an error and of its causes, without those that an outer text contains.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = inner.source();
    }
    text
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for CallError {}

impl From<BuildError> for CallError {
    fn from(error: BuildError) -> Self {
        Self {
            code: String::new(),
            is_unreachable: false,
            text: error.to_string(),
        }
    }
}

impl Api {
    pub(crate) fn new(client: &Client, url: String, wait: Duration, visibility: Duration) -> Self {
        Self {
            polls: limited(client, wait + RECEIVE_MARGIN),
            calls: limited(client, CALL_TIMEOUT),
            url,
            wait,
            visibility,
        }
    }

    /// Waits for up to `most` messages, with all their attributes.
    pub(crate) async fn receive(
        &self,
        most: usize,
        poll: Poll,
        attempt: Option<&Attempt>,
    ) -> Result<Vec<Message>, CallError> {
        let (client, wait) = match poll {
            Poll::Long => (&self.polls, self.wait),
            Poll::Probe => (&self.calls, self.wait.min(PROBE_WAIT)),
        };
        let call = client
            .receive_message()
            .queue_url(&self.url)
            .max_number_of_messages(i32::try_from(most).unwrap_or(i32::MAX))
            .wait_time_seconds(seconds(wait))
            .visibility_timeout(seconds(self.visibility))
            .set_receive_request_attempt_id(attempt.map(|Attempt(id)| id.clone()))
            .message_system_attribute_names(MessageSystemAttributeName::All)
            .message_attribute_names("All");
        let answer = call.send().await.map_err(|error| CallError::of(&error))?;
        Ok(answer.messages.unwrap_or_default())
    }

    /// Deletes at most ten messages; the answers are in the same order.
    pub(crate) async fn delete(&self, targets: &[Target]) -> Result<Vec<EntryResult>, CallError> {
        let mut call = self.calls.delete_message_batch().queue_url(&self.url);
        for (position, target) in targets.iter().enumerate() {
            let entry = DeleteMessageBatchRequestEntry::builder().id(position.to_string());
            call = call.entries(entry.receipt_handle(&*target.handle).build()?);
        }
        let answer = call.send().await.map_err(|error| CallError::of(&error))?;
        let done = answer.successful.iter().map(|entry| entry.id.as_str());
        Ok(answers(targets.len(), done, &answer.failed))
    }

    /// Sets the visibility timeout of at most ten messages; the answers are in the same order.
    pub(crate) async fn change_visibility(
        &self,
        changes: &[Change],
    ) -> Result<Vec<EntryResult>, CallError> {
        let mut call = self
            .calls
            .change_message_visibility_batch()
            .queue_url(&self.url);
        for (position, change) in changes.iter().enumerate() {
            let entry = ChangeMessageVisibilityBatchRequestEntry::builder()
                .id(position.to_string())
                .receipt_handle(&*change.target.handle)
                .visibility_timeout(seconds(change.visibility));
            call = call.entries(entry.build()?);
        }
        let answer = call.send().await.map_err(|error| CallError::of(&error))?;
        let done = answer.successful.iter().map(|entry| entry.id.as_str());
        Ok(answers(changes.len(), done, &answer.failed))
    }
}

/// Returns a client whose calls have this time limit, and are not repeated.
fn limited(client: &Client, limit: Duration) -> Client {
    // Its own time limits also give it its own connections. The runtime that opened a connection
    // drives it, and a heartbeat must not depend on a blocked runtime.
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(limit)
        .operation_attempt_timeout(limit)
        .operation_timeout(limit)
        .build();
    let config = client.config().to_builder().timeout_config(timeouts);
    Client::from_conf(config.retry_config(RetryConfig::disabled()).build())
}

/// The attempt id of a receive from a FIFO queue, with which its answer can be requested again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attempt(String);

impl Attempt {
    pub(crate) fn new() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }
}

/// Returns whole seconds, rounded up: a visibility timeout may be longer than needed, never
/// shorter.
fn seconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis().div_ceil(1_000)).unwrap_or(i32::MAX)
}

/// Returns the answers by position. An entry that the response does not mention has failed.
fn answers<'a>(
    count: usize,
    done: impl Iterator<Item = &'a str>,
    failed: &[BatchResultErrorEntry],
) -> Vec<EntryResult> {
    let mut answers = vec![EntryResult::Failed; count];
    for id in done {
        if let Some(answer) = answer_mut(&mut answers, id) {
            *answer = EntryResult::Done;
        }
    }
    for entry in failed {
        if let Some(answer) = answer_mut(&mut answers, &entry.id) {
            *answer = if GONE.contains(&entry.code.as_str()) {
                EntryResult::Gone
            } else {
                EntryResult::Failed
            };
        }
    }
    answers
}

/// Returns the answer for the entry with this id, which is its position.
pub(crate) fn answer_mut<'a, T>(answers: &'a mut [T], id: &str) -> Option<&'a mut T> {
    answers.get_mut(id.parse::<usize>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(position: &str, code: &str) -> BatchResultErrorEntry {
        BatchResultErrorEntry::builder()
            .id(position)
            .sender_fault(true)
            .code(code)
            .build()
            .unwrap()
    }

    #[test]
    fn answers_stand_where_their_entries_stood() {
        let failures = [
            failed("1", "ReceiptHandleIsInvalid"),
            failed("3", "InternalError"),
            failed("9", "ReceiptHandleIsInvalid"),
        ];
        assert_eq!(
            answers(5, ["4", "0", "x"].into_iter(), &failures),
            [
                EntryResult::Done,
                EntryResult::Gone,
                EntryResult::Failed,
                EntryResult::Failed,
                EntryResult::Done
            ]
        );
    }

    #[test]
    fn parts_of_a_second_count_as_a_whole_one() {
        let cases = [(0, 0), (1, 1), (1_000, 1), (1_001, 2), (43_200_000, 43_200)];
        for (millis, expected) in cases {
            assert_eq!(seconds(Duration::from_millis(millis)), expected);
        }
    }
}
