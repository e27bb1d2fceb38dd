//! Handlers of oncegate as AWS Lambda functions, behind event source mappings of SQS, Kafka and
//! Kinesis.
//!
//! ```no_run
//! use oncegate::lambda::Function;
//! use oncegate::{Attempt, Failure, Gate, Key, MemoryStore, Message};
//!
//! #[derive(serde::Deserialize)]
//! struct Order {
//!     order_id: String,
//! }
//!
//! async fn charge(message: Message, attempt: Attempt) -> Result<String, Failure> {
//!     let order: Order = message.json()?;
//!     Ok(format!("{} charged under {}", order.order_id, attempt.idempotency_key("charge")))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), oncegate::BoxError> {
//! // In production a store that outlives the environment: DynamoDB, Redis, PostgreSQL.
//! let gate = Gate::new("payments", Key::json(["order_id"]), MemoryStore::new());
//! Function::new(gate, charge).reports_item_failures().run().await
//! # }
//! ```
//!
//! # What a function answers
//!
//! Lambda deletes, or checkpoints, what an invocation does not report as failed. So a message is
//! reported as done only after its record is COMPLETED: by this invocation, or by an earlier one.
//! Everything else is a failure, and comes again: a handler's error, a key that runs elsewhere, a
//! message that was not begun, one whose time was over, one that was given up. What is given up
//! stays a failure on purpose: the queue's redrive policy or the mapping's on-failure destination
//! takes it, and no attempt runs for it any more.
//!
//! | | without | with [`reports_item_failures`](Function::reports_item_failures) |
//! |---|---|---|
//! | all done | success | success |
//! | some failed | the invocation fails, and the whole batch comes again | those alone come again; of a FIFO queue, the rest of their groups too |
//! | Kinesis | | everything from the first failure on |
//! | Kafka | | of each partition, everything from its first failure on |
//!
//! Without it, nothing is lost however the mapping is configured, and what was done costs a look at
//! its record. With it, the mapping must have `ReportBatchItemFailures`: without that, Lambda does
//! not look at the answer, and what has failed would be lost.
//!
//! # Time
//!
//! A message is not begun when less time is left than [`at_least`](Function::at_least), or, after
//! the first one of its lane, than the longest run so far. A handler that still runs shortly before
//! the function's time is over is dropped: its outcome is unknown, its lease lapses, and the next
//! attempt is marked as [recovered](Attempt::recovered). The gate's
//! [`lease`](Gate::lease) says how long that takes: make it shorter than the queue's visibility
//! timeout. Between two invocations the environment is frozen, with no handler running; a lease
//! that an environment had before it was frozen, or killed, cannot be used to write after another
//! owner has taken over.
//!
//! # Order
//!
//! Messages of a FIFO queue's group, of a Kinesis partition key and of a Kafka partition are
//! handled one after another, and nothing behind a failure is begun. All others run side by side,
//! up to [`concurrency`](Function::concurrency).

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::{FutureExt as _, StreamExt as _, stream};
use lambda_runtime::{LambdaEvent, service_fn};
#[cfg(doc)]
use oncegate_runtime::Attempt;
use oncegate_runtime::backoff::Backoff;
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::Message;
use oncegate_runtime::running::{Done, RunError};
use oncegate_runtime::{Gate, Handler};
use serde_json::Value;
use tokio::time::{Instant, timeout};

mod event;

use event::{Batch, Item};

/// The time before the end of an invocation that is kept for the answer.
const RESERVE: Duration = Duration::from_millis(500);

/// The longest wait for a message with the same key that runs now, in this event or elsewhere.
const WAIT: Duration = Duration::from_secs(2);

/// A handler as a Lambda function.
pub struct Function<H> {
    gate: Gate,
    handler: H,
    reports_item_failures: bool,
    concurrency: usize,
    at_least: Duration,
    max_attempts: u32,
    backoff: Backoff,
    longest_run_ms: AtomicU64,
}

/// The reason for which an event has no answer: Lambda delivers its whole batch again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// The event is of a source that the function does not know.
    #[error(
        "the event is none of SQS, Kafka or Kinesis (its `eventSource` is `{source_name}`); connect the function to one of them by an event source mapping"
    )]
    Unknown {
        /// The event's source.
        source_name: String,
    },
    /// The event is not what its source sends.
    #[error("the event is not what its source sends: {what}")]
    Malformed {
        /// The fault, without a value of the event.
        what: String,
    },
    /// Some of its messages have no result yet.
    #[error("{failed} of {messages} messages have no result yet; the first: {reason}")]
    Failed {
        /// The number of messages without a result.
        failed: usize,
        /// The number of messages in the event.
        messages: usize,
        /// The reason of the first one.
        reason: String,
    },
}

impl EventError {
    fn unknown(source_name: &str) -> Self {
        Self::Unknown {
            source_name: source_name.chars().take(64).collect(),
        }
    }

    fn lacking(what: &str) -> Self {
        Self::Malformed {
            what: format!("a record lacks {what}"),
        }
    }

    fn malformed(error: serde_json::Error) -> Self {
        // The text of an error of another category may show a value.
        let what = if error.is_data() && error.to_string().starts_with("missing field") {
            error.to_string()
        } else {
            "a record has a value of another type".to_owned()
        };
        Self::Malformed { what }
    }
}

impl<H: Handler> Function<H> {
    const DEFAULT_CONCURRENCY: usize = 16;
    const DEFAULT_AT_LEAST: Duration = Duration::from_secs(1);

    /// A function that runs `handler` once for each key of `gate`.
    pub fn new(gate: Gate, handler: H) -> Self {
        Self {
            gate,
            handler,
            reports_item_failures: false,
            concurrency: Self::DEFAULT_CONCURRENCY,
            at_least: Self::DEFAULT_AT_LEAST,
            max_attempts: 10,
            backoff: Backoff::DEFAULT,
            longest_run_ms: AtomicU64::new(0),
        }
    }

    /// Answers with the messages that have failed, instead of failing the whole invocation.
    ///
    /// The mapping must have `ReportBatchItemFailures` among its `FunctionResponseTypes`: Lambda
    /// ignores the answer otherwise, and **messages that have failed are lost**. Off by default.
    #[must_use]
    pub fn reports_item_failures(mut self) -> Self {
        self.reports_item_failures = true;
        self
    }

    /// The most handlers that run side by side: 16 by default, at least 1.
    #[must_use]
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers.max(1);
        self
    }

    /// The time that must be left for a message to begin: 1 s by default.
    #[must_use]
    pub fn at_least(mut self, time: Duration) -> Self {
        self.at_least = time;
        self
    }

    /// Gives a key up after so many attempts, 10 by default. Those that end their environment
    /// count.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// The delays between attempts, [`Backoff::DEFAULT`] by default. A message that comes again
    /// before its attempt is due is a failure once more.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Opens the gate, and answers invocations of Lambda's runtime API until the environment ends.
    ///
    /// # Errors
    /// When the gate cannot be opened, which Lambda shows as an error of initialisation; the text
    /// names what to change. When the runtime API cannot be reached.
    pub async fn run(self) -> Result<(), BoxError> {
        self.gate.open().await?;
        let function = Arc::new(self);
        let service = service_fn(move |event: LambdaEvent<Value>| {
            let function = Arc::clone(&function);
            async move {
                let left = event.context.deadline().duration_since(SystemTime::now());
                let deadline = Instant::now() + left.unwrap_or_default();
                let answer = function.answer(&event.payload, deadline).await;
                answer.map_err(BoxError::from)
            }
        });
        lambda_runtime::run(service).await
    }

    /// Handles the messages of one event, and returns the answer for Lambda. [`run`](Self::run)
    /// calls it; call it yourself where another runtime delivers the events.
    ///
    /// # Errors
    /// When the event cannot be read, or messages have failed and the function does not
    /// [report them one by one](Self::reports_item_failures).
    pub async fn answer(&self, event: &Value, deadline: Instant) -> Result<Value, EventError> {
        let batch = Batch::read(event)?;
        let end = deadline.checked_sub(RESERVE).unwrap_or(deadline);
        let lanes = stream::iter(lanes(&batch.items))
            .map(|lane| self.handle_lane(&batch, lane, end))
            .buffer_unordered(self.concurrency);
        let mut failures: Vec<(usize, String)> = lanes.concat().await;
        failures.sort_unstable();
        let Some((_, reason)) = failures.first() else {
            return Ok(batch.answer(&[]));
        };
        if !self.reports_item_failures {
            return Err(EventError::Failed {
                failed: failures.len(),
                messages: batch.items.len(),
                reason: reason.clone(),
            });
        }
        let places: Vec<usize> = failures.iter().map(|(place, _)| *place).collect();
        Ok(batch.answer(&places))
    }

    /// Handles messages one after another, and nothing behind a failure. Returns the failures.
    async fn handle_lane(
        &self,
        batch: &Batch,
        places: Vec<usize>,
        end: Instant,
    ) -> Vec<(usize, String)> {
        let mut failures = Vec::new();
        let mut is_first = true;
        for place in places {
            let Some(Item { message, .. }) = batch.items.get(place) else {
                continue;
            };
            if !failures.is_empty() {
                failures.push((place, format!("{} is behind a failure", message.origin())));
                continue;
            }
            if let Err(why) = self.handle(message, end, is_first).await {
                tracing::warn!(
                    origin = %message.origin(),
                    why,
                    "a message has no result yet, and comes again"
                );
                failures.push((place, format!("{}: {why}", message.origin())));
            }
            is_first = false;
        }
        failures
    }

    /// Handles one message. The error says why it is not done.
    async fn handle(&self, message: &Message, end: Instant, is_first: bool) -> Result<(), String> {
        let began = Instant::now();
        let left = end.saturating_duration_since(began);
        let longest = Duration::from_millis(self.longest_run_ms.load(Ordering::Relaxed));
        // One that takes longer than a whole invocation could never begin again.
        let needed = if is_first {
            self.at_least
        } else {
            self.at_least.max(longest)
        };
        if left < needed {
            return Err(format!("only {left:?} were left, so it was not begun"));
        }
        let run = self.gate.runner();
        let run = run
            .max_attempts(self.max_attempts)
            .backoff(self.backoff)
            .wait(WAIT.min(left));
        let work = run.run(message, async |attempt| {
            self.handler.handle(message, &attempt).await
        });
        // A panic belongs to its message: the others go on.
        let ended = timeout(left, AssertUnwindSafe(work).catch_unwind()).await;
        let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        match ended {
            Err(_elapsed) => Err("the function's time was over while it ran".to_owned()),
            Ok(Err(_panic)) => Err("its handler panicked".to_owned()),
            Ok(Ok(Ok(Done::Now(_)))) => {
                self.longest_run_ms.fetch_max(took, Ordering::Relaxed);
                Ok(())
            }
            Ok(Ok(Ok(Done::Before(result)))) => {
                // It must neither take the others' time nor end them.
                let hook = async { self.handler.duplicate(message, result).await };
                let left = end.saturating_duration_since(Instant::now());
                match timeout(left, AssertUnwindSafe(hook).catch_unwind()).await {
                    Ok(Ok(Ok(()))) => {}
                    Ok(Ok(Err(failure))) => {
                        tracing::warn!(%failure, "a duplicate's hook has failed");
                    }
                    Ok(Err(_panic)) => tracing::warn!("a duplicate's hook has panicked"),
                    Err(_elapsed) => tracing::warn!("a duplicate's hook has not ended in time"),
                }
                Ok(())
            }
            // The record is COMPLETED; only the stored result is of another type.
            Ok(Ok(Err(RunError::Result(error)))) => {
                tracing::warn!(%error, "a message was done before, and its result cannot be read");
                Ok(())
            }
            Ok(Ok(Err(error))) => Err(error.to_string()),
        }
    }
}

impl<H> fmt::Debug for Function<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function")
            .field("scope", &self.gate.scope())
            .field("reports_item_failures", &self.reports_item_failures)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

/// The places of messages that are handled one after another, in their order.
fn lanes(items: &[Item]) -> Vec<Vec<usize>> {
    let mut lanes: Vec<Vec<usize>> = Vec::new();
    let mut of_name = std::collections::HashMap::new();
    for (place, item) in items.iter().enumerate() {
        let Some(name) = &item.lane else {
            lanes.push(vec![place]);
            continue;
        };
        let number = *of_name.entry(name).or_insert_with(|| {
            lanes.push(Vec::new());
            lanes.len() - 1
        });
        lanes
            .get_mut(number)
            .into_iter()
            .for_each(|lane| lane.push(place));
    }
    lanes
}
