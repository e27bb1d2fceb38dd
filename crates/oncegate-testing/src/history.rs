//! The events of a round, as the witnesses write them down.

use std::fmt;

use parking_lot::{Mutex, MutexGuard};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::Instant;

use crate::fault::Fault;

/// The most events of one round. What comes after them is counted, and not judged.
pub(crate) const MAX_EVENTS: usize = 200_000;

/// The message that is made of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// The sample itself, byte for byte.
    Original,
    /// The same event, spelt differently.
    Duplicate,
    /// JSON of its shape, with values that no handler expects.
    Poison,
    /// Something that is not JSON.
    Malformed,
}

/// The end of a run of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The handler returned a result.
    Completed,
    /// The handler wants another attempt.
    Failed,
    /// The handler wants the message later.
    Later,
    /// The handler gave up.
    GaveUp,
    /// The handler was dropped before it returned: its process was killed, its lease was lost, or
    /// it did not stop in time.
    Dropped,
}

/// The downstream service's answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CallAnswer {
    /// The service answered.
    Answered,
    /// The service answered with status 500.
    Refused,
    /// The caller got no answer.
    Lost,
}

/// An event of a round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Event {
    /// Milliseconds since the round began.
    pub at_ms: u64,
    /// The consumer process, if the event concerns one. A process that is started anew has another
    /// number.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32")]
    pub process: Option<u32>,
    /// The event itself.
    #[serde(flatten)]
    pub what: What,
}

/// The kind of an event, with its data. Samples are named by their numbers, from 1; keys by
/// digests. No event has anything of a payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum What {
    /// A message was sent to the broker.
    Produced {
        /// The number of the message in the round.
        message: usize,
        /// The sample that it is made of.
        #[schemars(range(min = 1))]
        sample: usize,
        /// The form in which the sample was sent.
        form: Form,
        /// The idempotency key of the message, if one can be derived.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "String")]
        key: Option<String>,
    },
    /// A process has started.
    Started,
    /// A process was killed.
    Killed,
    /// The processes were asked to stop, all of them.
    Stopping,
    /// A process has ended after it was asked to.
    Stopped,
    /// A process, or its worker, did not end when it was asked to.
    Hung,
    /// A consumer has failed, with this kind of error.
    ConsumerFailed {
        /// The error as text.
        error: String,
    },
    /// The broker has given a message to a process.
    Delivered {
        /// The message.
        message: usize,
    },
    /// The store has answered a claim.
    Claimed {
        /// The key.
        key: String,
        /// `granted`, `completed`, `busy`, `failed` or `mismatch`.
        verdict: &'static str,
    },
    /// A handler has begun.
    Began {
        /// The number of the run in the round.
        run: u64,
        /// The message.
        message: usize,
        /// The number of the attempt.
        attempt: u32,
        /// `true` if an earlier attempt ended without an outcome.
        recovered: bool,
        /// The number of messages in its batch, if the handler takes batches.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "usize")]
        batch: Option<usize>,
    },
    /// A run was asked to stop.
    Cancelled {
        /// The run.
        run: u64,
    },
    /// A run has ended.
    Ended {
        /// The run.
        run: u64,
        /// The outcome.
        outcome: Outcome,
        /// A digest of its result, if it has completed.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "String")]
        result: Option<String>,
    },
    /// A handler was told of a duplicate.
    ToldOfDuplicate {
        /// The message.
        message: usize,
    },
    /// The downstream service was called.
    Called {
        /// The number of the call in the round.
        call: u64,
        /// The sample whose values it has, if it has those of one.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "usize", range(min = 1))]
        sample: Option<usize>,
        /// The step, for handlers with several effects.
        step: String,
        /// A digest of its `Idempotency-Key`, if it had one.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "String")]
        idempotency_key: Option<String>,
        /// The run of the handler that it belongs to, if that is known.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "u64")]
        run: Option<u64>,
        /// `true` if it was made while the handler was told of a duplicate.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        in_duplicate: bool,
    },
    /// A call had its effect.
    Performed {
        /// The call.
        call: u64,
    },
    /// A call had a known `Idempotency-Key`: it had no effect, and gets the answer of the first
    /// one.
    Repeated {
        /// The call.
        call: u64,
        /// The first call with that key.
        first: u64,
        /// `true` if the body differs from that of the first call.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        other_body: bool,
    },
    /// A call has ended.
    Returned {
        /// The call.
        call: u64,
        /// The answer.
        answer: CallAnswer,
    },
    /// The store has answered a completion.
    Completed {
        /// The key.
        key: String,
        /// `false`: another owner has the key.
        applied: bool,
    },
    /// A message was acknowledged.
    Acked {
        /// The message.
        message: usize,
        /// `false`: its partition belongs to another process, so the ack has no effect.
        accepted: bool,
    },
    /// A message became a dead letter.
    DeadLettered {
        /// The message.
        message: usize,
        /// The cause, in one word.
        cause: &'static str,
    },
    /// The witness has listed an effect, at the end of the round.
    Listed {
        /// The number of the effect in the list.
        effect: usize,
        /// The sample whose values it has, if it has those of one.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "usize", range(min = 1))]
        sample: Option<usize>,
        /// The step of the effect.
        step: String,
    },
    /// A fault has begun.
    FaultBegan {
        /// The fault.
        fault: Fault,
        /// The sample whose call or completion it began with, if it began with one.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "usize", range(min = 1))]
        sample: Option<usize>,
    },
    /// A message was neither acknowledged nor a dead letter when the round was given up.
    Unfinished {
        /// The message.
        message: usize,
    },
}

/// Writes the events of a round down.
pub(crate) struct Recorder {
    began: Instant,
    events: Mutex<Vec<Event>>,
    /// The time of the last event, to see whether a round goes on.
    last: Mutex<Instant>,
}

impl Recorder {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            events: Mutex::default(),
            last: Mutex::new(now),
        }
    }

    pub(crate) fn note(&self, process: impl Into<Option<u32>>, what: What) {
        let now = Instant::now();
        let at_ms = u64::try_from(now.duration_since(self.began).as_millis()).unwrap_or(u64::MAX);
        let mut events = self.events();
        if events.len() < MAX_EVENTS {
            events.push(Event {
                at_ms,
                process: process.into(),
                what,
            });
        }
        *self.last.lock() = now;
    }

    /// The time of the last event.
    pub(crate) fn last(&self) -> Instant {
        *self.last.lock()
    }

    /// Returns what was written so far.
    pub(crate) fn taken(&self) -> Vec<Event> {
        std::mem::take(&mut *self.events())
    }

    /// A panic elsewhere does no harm: an event is pushed as a whole.
    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock()
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("events", &self.events().len())
            .finish_non_exhaustive()
    }
}

/// A short digest that tells values apart and shows nothing of them.
pub(crate) fn digest(bytes: &[u8]) -> String {
    let mut hex = blake3::hash(bytes).to_hex().to_string();
    hex.truncate(DIGEST_DIGITS);
    hex
}

/// The number of hexadecimal digits in a digest.
const DIGEST_DIGITS: usize = 12;
