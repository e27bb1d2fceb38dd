//! The trait that a user implements to handle many messages in one call.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::settings::Finding;
#[cfg(feature = "config")]
use oncegate_core::settings::{Size, Time};
use tokio::sync::mpsc;

use crate::attempt::Attempt;
use crate::codec::{Codec, FromStored, Output};
use crate::failure::{BoxError, Failure};
use crate::handler::{BoxFuture, Encoded, ErasedHandler};
use crate::message::Message;

/// The work to be done once per key, for many messages in one call: for code that writes a hundred
/// rows in one statement.
///
/// Each message keeps an [`Attempt`] of its own: its own claim, lease, fencing token and
/// idempotency keys. A batch holds no key twice. Its messages are in the order of their arrival,
/// and no two of them are from the same lane of the consumer's [`Ordering`](crate::Ordering): with
/// [`Ordering::Partition`](crate::Ordering::Partition) a batch has at most one message of each
/// partition. Messages that are completed, or whose keys other processes hold, are left out.
///
/// - On a **crash**, each message of the batch runs again, flagged by its own
///   [`Attempt::recovered`].
/// - On a **duplicate**, `handle` does not run: [`duplicate`](Self::duplicate) gets the stored
///   result.
/// - On a **cancellation** of one message, its [`Attempt::cancelled`] resolves, and its outcome may
///   be ignored. The others are not affected. The future is dropped when all of them are cancelled,
///   a little later.
/// - On a **panic**, or an error for the whole batch, the batch is [split](Self::handle).
pub trait BatchHandler: Send + Sync + 'static {
    /// The result of one message: stored with its key, and passed to duplicates. `()` stores
    /// nothing.
    type Output: Output;

    /// Does the work of all messages, and returns one outcome for each, in the order of `batch`.
    ///
    /// The outcome of a message is that of [`Handler::handle`](crate::Handler::handle): its result,
    /// another attempt, or [`Failure::permanent`], which sends it to the dead letters. If the
    /// number of outcomes is not that of the messages, they are all treated as
    /// [`Failure::unknown`].
    ///
    /// A handler that knows the outcome of one message before those of the others reports it by
    /// [`BatchMessage::answer`]; it is recorded at once.
    ///
    /// # Errors
    /// An error for the whole batch states that none of its work is done: roll back before you
    /// return it. The consumer then calls `handle` with one half of the batch and then with the
    /// other, and splits further what fails. So a message that makes its batch fail is found, gets
    /// its own reason, and costs the others no attempt. It runs in a batch of its own from then on.
    ///
    /// A batch is not split after [`Failure::retry_after`], [`Failure::later`],
    /// [`Failure::not_run`] and [`Failure::unknown`], because no message can be the cause. They
    /// concern each message of the batch as if it had been alone. When three messages fail alone,
    /// one after another, and no call succeeds in between, the cause is taken to be something that
    /// all of them need: the rest of the batch is tried again after the back-off, and uses up no
    /// attempt.
    fn handle(
        &self,
        batch: &[BatchMessage],
    ) -> impl Future<Output = Result<Vec<Result<Self::Output, Failure>>, Failure>> + Send;

    /// Called for a message whose work was done before, as
    /// [`Handler::duplicate`](crate::Handler::duplicate).
    ///
    /// # Errors
    /// After an error it is called again, three times in all; then the message is acknowledged all
    /// the same, and counted.
    fn duplicate(
        &self,
        message: &Message,
        result: Self::Output,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        _ = (message, result);
        std::future::ready(Ok(()))
    }

    /// Called for a duplicate whose stored result is unusable, as
    /// [`Handler::undecodable_duplicate`](crate::Handler::undecodable_duplicate).
    fn undecodable_duplicate(
        &self,
        message: &Message,
        stored: Bytes,
        error: BoxError,
    ) -> impl Future<Output = ()> + Send {
        _ = (message, stored, error);
        std::future::ready(())
    }
}

/// A message of a batch with its attempt.
#[derive(Clone, Debug)]
pub struct BatchMessage {
    message: Message,
    attempt: Attempt,
    early: Option<Early>,
}

impl BatchMessage {
    pub(crate) fn new(message: Message, attempt: Attempt) -> Self {
        Self {
            message,
            attempt,
            early: None,
        }
    }

    /// The message.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// The attempt of this message: its number, its cancellation, its idempotency keys.
    pub fn attempt(&self) -> &Attempt {
        &self.attempt
    }

    /// Ends this message with its outcome before the call of its batch ends: the outcome is
    /// recorded at once, whatever becomes of the others. `O` is the handler's
    /// [`Output`](BatchHandler::Output).
    ///
    /// The first outcome of a message counts: what [`handle`](BatchHandler::handle) returns for it
    /// later is ignored, and so is an error for the whole batch. When every message has its
    /// outcome, the future of `handle` is dropped. In a
    /// [`TransactionalBatchHandler`](crate::TransactionalBatchHandler) this does nothing: there an
    /// outcome counts when the transaction is committed.
    pub fn answer<O: Output>(&self, outcome: Result<O, Failure>) {
        let Some(early) = &self.early else { return };
        if early.is_answered.swap(true, Relaxed) {
            return;
        }
        let outcome = outcome.map(|output| encoded(self, &output, early.codec));
        if let Some(Listener(listen)) = &early.listener {
            listen(&outcome);
        }
        // The call of the batch has ended when this fails, and the message has another outcome.
        _ = early.answers.send(EarlyAnswer {
            place: early.place,
            outcome,
        });
    }

    /// Calls `listen` with the outcome that [`answer`](Self::answer) is given, before it is
    /// recorded.
    #[doc(hidden)]
    #[must_use]
    pub fn listened(
        mut self,
        listen: impl Fn(&Result<Result<Bytes, BoxError>, Failure>) + Send + Sync + 'static,
    ) -> Self {
        if let Some(early) = &mut self.early {
            early.listener = Some(Listener(Arc::new(listen)));
        }
        self
    }

    /// The same message in a call whose early answers are sent to `answers`.
    pub(crate) fn in_call(
        &self,
        place: usize,
        codec: Codec,
        answers: &mpsc::UnboundedSender<EarlyAnswer>,
    ) -> Self {
        let early = Early {
            place,
            codec,
            answers: answers.clone(),
            is_answered: Arc::default(),
            listener: None,
        };
        Self {
            early: Some(early),
            ..self.clone()
        }
    }
}

/// The outcome of one message, before the call of its batch has ended.
#[derive(Debug)]
pub(crate) struct EarlyAnswer {
    /// The place of the message in the batch of the call.
    pub(crate) place: usize,
    pub(crate) outcome: Result<Encoded, Failure>,
}

/// Takes the outcome of one message while the call of its batch goes on.
#[derive(Clone, Debug)]
struct Early {
    place: usize,
    codec: Codec,
    /// Gets one answer for each message at most, so it needs no limit of its own.
    answers: mpsc::UnboundedSender<EarlyAnswer>,
    is_answered: Arc<AtomicBool>,
    listener: Option<Listener>,
}

/// A function that receives an early outcome.
type Told = dyn Fn(&Result<Encoded, Failure>) + Send + Sync;

#[derive(Clone)]
struct Listener(Arc<Told>);

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listener")
    }
}

/// Encodes the result of a message for its record.
fn encoded<O: Output>(one: &BatchMessage, output: &O, codec: Codec) -> Encoded {
    if one.attempt.completion().is_attempted() {
        // Its transaction has stored the result, or nothing was stored.
        return Ok(Bytes::new());
    }
    output.to_stored(codec)
}

/// The size at which a batch is full, and the time that a smaller one waits for more messages.
///
/// A batch starts when it has the most messages or bytes, when the wait of its first message is
/// over, or when no more messages can come. While they wait, messages are not claimed, and they
/// need no permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct BatchLimits {
    /// The most messages of a batch, 1 to 10,000.
    pub messages: usize,
    /// The most bytes of the messages of a batch. A larger message is a batch of its own.
    #[cfg_attr(feature = "config", serde(with = "Size"))]
    pub bytes: usize,
    /// How long the first message of a batch waits for others, at most 5s.
    ///
    /// With zero, which no file can say, a batch has the messages that are ready when a permit is
    /// free.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub wait: Duration,
}

impl BatchLimits {
    /// The limits of batches whose number of messages is not given: 100 messages, 8 MiB, 10 ms.
    pub const DEFAULT: Self = Self {
        messages: 100,
        bytes: 8 * 1024 * 1024,
        wait: Duration::from_millis(10),
    };
    /// The most messages that a batch may have: 10,000.
    pub const MOST_MESSAGES: usize = 10_000;
    /// The longest wait: 5 seconds.
    pub const LONGEST_WAIT: Duration = Duration::from_secs(5);

    /// Batches of at most this many messages: 1 to [`MOST_MESSAGES`](Self::MOST_MESSAGES).
    pub const fn new(messages: usize) -> Self {
        Self {
            messages,
            ..Self::DEFAULT
        }
    }

    /// Sets the [most bytes](field@Self::bytes) of a batch: 8 MiB by default.
    #[must_use]
    pub const fn bytes(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    /// Sets the [time that a batch waits](field@Self::wait) for more messages: 10 ms by default.
    #[must_use]
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Returns what is wrong with these limits.
    pub fn check(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let most = Self::MOST_MESSAGES;
        if self.messages == 0 || self.messages > most {
            findings.push(Finding::new(
                "batch.messages",
                format!("`batch.messages` must be between 1 and {most}"),
            ));
        }
        if self.bytes == 0 {
            findings.push(Finding::new(
                "batch.bytes",
                "`batch.bytes` must be at least 1",
            ));
        }
        let longest = Self::LONGEST_WAIT;
        if self.wait > longest {
            findings.push(Finding::new(
                "batch.wait",
                format!("`batch.wait` must be at most {longest:?}"),
            ));
        }
        findings
    }
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The outcomes of a batch, each result encoded; or the failure of all.
pub(crate) type BatchOutcome = Result<Vec<Result<Encoded, Failure>>, Failure>;

/// A batch handler with its type erased.
pub(crate) trait ErasedBatchHandler: ErasedHandler {
    /// Runs the handler once, and encodes its results. There is one outcome for each message.
    fn handle_batch<'a>(
        &'a self,
        batch: &'a [BatchMessage],
        codec: Codec,
    ) -> BoxFuture<'a, BatchOutcome>;
}

/// Makes a batch handler a handler, too: a message that runs alone is a batch of one.
pub(crate) struct ErasedBatches<H>(pub(crate) H);

impl<H: BatchHandler> ErasedBatchHandler for ErasedBatches<H> {
    fn handle_batch<'a>(
        &'a self,
        batch: &'a [BatchMessage],
        codec: Codec,
    ) -> BoxFuture<'a, BatchOutcome> {
        Box::pin(async move {
            let outcomes = self.0.handle(batch).await?;
            if outcomes.len() != batch.len() {
                return Err(miscounted(outcomes.len(), batch.len()));
            }
            let each = batch.iter().zip(outcomes);
            Ok(each
                .map(|(one, outcome)| Ok(encoded(one, &outcome?, codec)))
                .collect())
        })
    }
}

/// The failure of a handler that succeeded, when it is not known for which messages.
fn miscounted(outcomes: usize, messages: usize) -> Failure {
    Failure::unknown(format!(
        "the batch handler returned {outcomes} outcomes for {messages} messages"
    ))
}

impl<H: BatchHandler> ErasedHandler for ErasedBatches<H> {
    fn handle(
        self: Arc<Self>,
        message: Message,
        attempt: Attempt,
        codec: Codec,
    ) -> BoxFuture<'static, Result<Encoded, Failure>> {
        Box::pin(async move {
            let (answers, mut early) = mpsc::unbounded_channel();
            let batch = [BatchMessage::new(message, attempt).in_call(0, codec, &answers)];
            let ended = tokio::select! {
                biased;
                Some(answer) = early.recv() => return answer.outcome,
                ended = self.handle_batch(&batch, codec) => ended,
            };
            // The message may have been answered in the poll in which the call ended.
            if let Ok(answer) = early.try_recv() {
                return answer.outcome;
            }
            ended?.pop().unwrap_or_else(|| Err(miscounted(0, 1)))
        })
    }

    fn duplicate(
        &self,
        message: Message,
        stored: Bytes,
        lost: Option<BoxError>,
    ) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async move {
            match lost.map_or_else(|| H::Output::from_stored(&stored), Err) {
                Ok(result) => self.0.duplicate(&message, result).await,
                Err(error) => {
                    self.0.undecodable_duplicate(&message, stored, error).await;
                    Ok(())
                }
            }
        })
    }
}
