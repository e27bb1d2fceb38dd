//! Sends the messages of many callers to a queue in batches.

use std::collections::VecDeque;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::BatchResultErrorEntry;
use oncegate_outbox::PublishError;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};

use super::api::{CallError, answer_mut};
use super::outbox::BATCH_ENTRIES;
use super::outgoing::Outgoing;
use super::queue::{self, Queue};
use super::queue_error::QueueError;

/// The most batches of a queue that are in flight at a time.
const BATCHES_MOST: usize = 8;

/// A queue that messages are written to.
///
/// There is no task: the calls that wait for their message send the batches, each for all of those
/// that wait first.
#[derive(Debug)]
pub(crate) struct QueueWriter {
    client: Client,
    queue: Queue,
    waiting: Mutex<VecDeque<WaitingMessage>>,
    /// A permit for each batch in flight.
    turns: Semaphore,
}

/// A message, and the caller that is told its outcome.
#[derive(Debug)]
struct WaitingMessage {
    outgoing: Outgoing,
    told: oneshot::Sender<Result<(), PublishError>>,
}

impl QueueWriter {
    /// Finds the queue of this name or URL.
    ///
    /// # Errors
    /// The queue cannot be used, or does not answer.
    pub(crate) async fn open(client: Client, queue: &str) -> Result<Self, PublishError> {
        let found = queue::find(&client, queue).await;
        let queue = found.map_err(|error| match publish_error(error) {
            PublishError::Refused(why) => PublishError::TopicRefused(why),
            error => error,
        })?;
        Ok(Self {
            client,
            queue,
            waiting: Mutex::default(),
            turns: Semaphore::new(BATCHES_MOST),
        })
    }

    /// The queue, with its limits.
    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Returns when SQS has confirmed the message. Dropped, it may have been sent or not; so may
    /// the messages of other callers that it was sending, which get an error.
    pub(crate) async fn write(&self, outgoing: Outgoing) -> Result<(), PublishError> {
        let (told, mut answer) = oneshot::channel();
        self.waiting().push_back(WaitingMessage { outgoing, told });
        // Callers that are ready at the same time join the batch.
        tokio::task::yield_now().await;
        let mut is_being_sent = false;
        loop {
            tokio::select! {
                biased;
                answer = &mut answer => return answer.unwrap_or_else(|_| Err(dropped())),
                // The semaphore is never closed.
                _turn = self.turns.acquire(), if !is_being_sent => {
                    let batch = self.take();
                    // If nothing waits, another call is sending this one's message.
                    is_being_sent = batch.is_empty();
                    self.send(batch).await;
                }
            }
        }
    }

    fn waiting(&self) -> parking_lot::MutexGuard<'_, VecDeque<WaitingMessage>> {
        self.waiting.lock()
    }

    /// Takes the oldest messages, as many as a batch may have.
    fn take(&self) -> Vec<WaitingMessage> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut waiting = self.waiting();
        while let Some(next) = waiting.front() {
            let size = next.outgoing.bytes();
            let is_dropped = next.told.is_closed();
            let is_full = batch.len() == BATCH_ENTRIES || bytes + size > self.queue.batch_limit();
            if !is_dropped && is_full && !batch.is_empty() {
                break;
            }
            let Some(next) = waiting.pop_front() else {
                break;
            };
            if !is_dropped {
                bytes += size;
                batch.push(next);
            }
        }
        batch
    }

    /// Sends a batch. If SQS refuses it as a whole, each message is sent alone: a bad one costs its
    /// neighbours nothing.
    async fn send(&self, batch: Vec<WaitingMessage>) {
        if batch.is_empty() {
            return;
        }
        match self.call(&batch).await {
            Ok(answers) => tell(batch, answers),
            Err(error) if batch.len() > 1 && is_about_a_message(&error) => {
                for message in batch {
                    let alone = vec![message];
                    match self.call(&alone).await {
                        Ok(answers) => tell(alone, answers),
                        Err(error) => self.tell_all(alone, &error),
                    }
                }
            }
            Err(error) => self.tell_all(batch, &error),
        }
    }

    /// Sends the messages in one call, and returns the answer for each.
    async fn call(
        &self,
        batch: &[WaitingMessage],
    ) -> Result<Vec<Result<(), PublishError>>, CallError> {
        let mut call = self.client.send_message_batch().queue_url(&self.queue.url);
        for (place, message) in batch.iter().enumerate() {
            call = call.entries(message.outgoing.entry(place)?);
        }
        let answer = call.send().await.map_err(|error| CallError::of(&error))?;
        let done = answer
            .successful()
            .iter()
            .map(aws_sdk_sqs::types::SendMessageBatchResultEntry::id);
        Ok(answers(batch.len(), done, answer.failed()))
    }

    fn tell_all(&self, batch: Vec<WaitingMessage>, error: &CallError) {
        for message in batch {
            let error = QueueError::of(&self.queue.url, "SendMessage", error.clone());
            drop(message.told.send(Err(publish_error(error))));
        }
    }
}

fn tell(batch: Vec<WaitingMessage>, answers: Vec<Result<(), PublishError>>) {
    for (message, answer) in batch.into_iter().zip(answers) {
        // A caller that was dropped is told nothing.
        drop(message.told.send(answer));
    }
}

/// The error of a message whose sending call was dropped.
fn dropped() -> PublishError {
    PublishError::Unconfirmed("the call that sent it was dropped".to_owned())
}

/// Returns whether one of the messages may be the cause.
fn is_about_a_message(error: &CallError) -> bool {
    !(error.is_passing() || error.is_unanswered() || error.is_denied() || error.is_no_queue())
}

/// Returns the answers by place. An entry that the response does not mention is not confirmed.
fn answers<'a>(
    count: usize,
    done: impl Iterator<Item = &'a str>,
    failed: &[BatchResultErrorEntry],
) -> Vec<Result<(), PublishError>> {
    let mut answers: Vec<_> = std::iter::repeat_with(|| {
        Err(PublishError::Unconfirmed(
            "the answer does not mention the message".to_owned(),
        ))
    })
    .take(count)
    .collect();
    for id in done {
        if let Some(answer) = answer_mut(&mut answers, id) {
            *answer = Ok(());
        }
    }
    for entry in failed {
        let why = format!(
            "{}: {}",
            entry.code(),
            entry.message().unwrap_or("no reason was given")
        );
        let is_refused = entry.sender_fault() && !CallError::is_passing_code(entry.code());
        let error = if is_refused {
            PublishError::Refused(why)
        } else {
            PublishError::Unconfirmed(why)
        };
        if let Some(answer) = answer_mut(&mut answers, entry.id()) {
            *answer = Err(error);
        }
    }
    answers
}

/// Classifies an error by whether a later try may succeed.
fn publish_error(error: QueueError) -> PublishError {
    let text = error.to_string();
    match error {
        QueueError::Unreachable { .. } => PublishError::Unconfirmed(text),
        QueueError::Failed { error, .. } if error.is_passing() || error.is_unanswered() => {
            PublishError::Unconfirmed(text)
        }
        QueueError::Failed { error, .. } if error.is_denied() || error.is_no_queue() => {
            PublishError::TopicRefused(text)
        }
        _ => PublishError::Refused(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_entry_is_refused_by_the_sender_s_fault_alone() {
        let failed = |place: &str, code: &str, sender_fault: bool| {
            let entry = BatchResultErrorEntry::builder()
                .id(place)
                .code(code)
                .sender_fault(sender_fault);
            entry.build().unwrap()
        };
        let failures = [
            failed("1", "InvalidMessageContents", true),
            failed("2", "InternalError", false),
            failed("3", "RequestThrottled", true),
            failed("9", "InternalError", false),
        ];
        let answers = answers(6, ["0", "4", "x"].into_iter(), &failures);
        let classes: Vec<_> = answers
            .iter()
            .map(|answer| answer.as_ref().map_err(PublishError::class))
            .collect();
        let unconfirmed = Err("unconfirmed");
        assert_eq!(
            classes,
            [
                Ok(&()),
                Err("refused"),
                unconfirmed,
                unconfirmed,
                Ok(&()),
                unconfirmed
            ]
        );
    }
}
