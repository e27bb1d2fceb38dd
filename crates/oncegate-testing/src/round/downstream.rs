//! The downstream service: it remembers every call, answers a repeated key with the first answer,
//! and fails on request.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::Round;
use super::faults::CallFault;
use super::process::Process;
use crate::history::{CallAnswer, What, digest};

/// The longest step, in bytes; a longer one is cut.
const STEP_MAX_BYTES: usize = 64;

/// The downstream service as one process reaches it: what a handler under trial calls for each of
/// its effects.
///
/// It stands for the system in which effects happen: a payment service, a mail server. Cheap to
/// clone.
///
/// ```no_run
/// # async fn example(downstream: oncegate_testing::Downstream, key: &str) -> Result<(), oncegate_testing::DownstreamError> {
/// let answer = downstream.effect(&serde_json::json!({"order_id": "o-1"})).idempotency_key(key).send().await?;
/// println!("receipt {}", answer["receipt"]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Downstream {
    pub(crate) round: Arc<Round>,
    pub(crate) process: Arc<Process>,
}

/// An effect that is about to be requested of the [`Downstream`] service.
#[derive(Debug)]
pub struct EffectRequest<'a> {
    downstream: &'a Downstream,
    body: &'a Value,
    step: &'a str,
    idempotency_key: Option<&'a str>,
}

/// The reason why the downstream service has not confirmed an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DownstreamError {
    /// The service answered with status 500: the effect has not happened.
    #[error("the downstream service answers with status 500")]
    Refused,
    /// The service did not answer: the effect may have happened.
    #[error("the downstream service did not answer")]
    NoAnswer,
}

impl Downstream {
    /// The name of the round, which no other one of the trial has: for what a handler under trial
    /// keeps elsewhere.
    pub fn round(&self) -> &str {
        self.round.name()
    }

    /// Begins an effect with this body. The body must have the business fields by which its event
    /// is recognised.
    pub fn effect<'a>(&'a self, body: &'a Value) -> EffectRequest<'a> {
        EffectRequest {
            downstream: self,
            body,
            step: "",
            idempotency_key: None,
        }
    }
}

#[cfg(feature = "http")]
impl Downstream {
    /// The service as the process reaches it that handles a message with these values.
    pub(crate) fn of_caller(&self, body: &Value) -> Self {
        let process = self
            .round
            .process_with(body)
            .unwrap_or_else(|| Arc::clone(&self.process));
        Self {
            round: Arc::clone(&self.round),
            process,
        }
    }
}

impl fmt::Debug for Downstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Downstream")
            .field("process", &self.process.number)
            .finish_non_exhaustive()
    }
}

impl<'a> EffectRequest<'a> {
    /// The name of the effect, for handlers with several per message; empty by default, at most 64
    /// bytes.
    #[must_use]
    pub fn step(mut self, step: &'a str) -> Self {
        self.step = step;
        self
    }

    /// The `Idempotency-Key` of the call. Without one, a repetition is a second effect.
    #[must_use]
    pub fn idempotency_key(mut self, key: &'a str) -> Self {
        self.idempotency_key = Some(key);
        self
    }

    /// Requests the effect, and returns the answer: `{"receipt": …}`.
    ///
    /// # Errors
    /// When the service refuses or does not answer, because of a fault of the trial.
    pub async fn send(self) -> Result<Value, DownstreamError> {
        let Self {
            downstream,
            body,
            step,
            idempotency_key,
        } = self;
        downstream
            .round
            .called(&downstream.process, step, idempotency_key, body)
            .await
    }
}

/// The calls that had an effect.
#[derive(Debug, Default)]
pub(super) struct Ledger(Mutex<LedgerState>);

#[derive(Debug, Default)]
struct LedgerState {
    calls: u64,
    receipts: u64,
    /// The first call with each key.
    by_key: BTreeMap<String, FirstCall>,
    /// The samples that have had an effect.
    samples: BTreeSet<usize>,
}

/// The first call with a key.
#[derive(Clone, Debug)]
struct FirstCall {
    call: u64,
    answer: Value,
    body: Value,
}

impl Ledger {
    /// Returns whether each of these samples has had an effect.
    pub(super) fn has_effects_of(&self, mut samples: impl Iterator<Item = usize>) -> bool {
        let state = self.0.lock();
        samples.all(|sample| state.samples.contains(&sample))
    }

    fn next_call(&self) -> u64 {
        let mut state = self.0.lock();
        state.calls += 1;
        state.calls
    }

    /// Performs the effect, or finds that it has happened. Returns the answer, and the first call
    /// if there was one.
    fn perform(&self, request: &Accepted<'_>) -> (Value, Option<FirstCall>) {
        let Accepted {
            call,
            sample,
            key,
            body,
        } = *request;
        let mut state = self.0.lock();
        state.samples.extend(sample);
        if let Some(first) = key.and_then(|key| state.by_key.get(key)) {
            return (first.answer.clone(), Some(first.clone()));
        }
        state.receipts += 1;
        let answer = json!({ "receipt": format!("R-{}", state.receipts) });
        if let Some(key) = key {
            let first = FirstCall {
                call,
                answer: answer.clone(),
                body: body.clone(),
            };
            state.by_key.insert(key.to_owned(), first);
        }
        (answer, None)
    }
}

/// A call that the service has received.
struct Accepted<'a> {
    call: u64,
    sample: Option<usize>,
    key: Option<&'a str>,
    body: &'a Value,
}

impl Round {
    /// Handles a call of the downstream service.
    pub(crate) async fn called(
        &self,
        process: &Arc<Process>,
        step: &str,
        key: Option<&str>,
        body: &Value,
    ) -> Result<Value, DownstreamError> {
        if process.is_killed() {
            // Its last request was cut off with it.
            return Err(DownstreamError::NoAnswer);
        }
        let call = self.ledger.next_call();
        let (sample, run, in_duplicate) = self.context(process, body);
        let end = (0..=STEP_MAX_BYTES.min(step.len()))
            .rev()
            .find(|end| step.is_char_boundary(*end));
        let step = step
            .get(..end.unwrap_or_default())
            .unwrap_or_default()
            .to_owned();
        let idempotency_key = key.map(|key| digest(key.as_bytes()));
        self.recorder.note(
            process.number,
            What::Called {
                call,
                sample,
                step,
                idempotency_key,
                run,
                in_duplicate,
            },
        );
        let request = Accepted {
            call,
            sample,
            key,
            body,
        };
        let answer = match self.call_fault(process, sample) {
            None => Ok(self.perform(process, &request)),
            Some(fault) => self.misbehave(fault, process, &request).await,
        };
        let word = match answer {
            Ok(_) => CallAnswer::Answered,
            Err(DownstreamError::Refused) => CallAnswer::Refused,
            Err(DownstreamError::NoAnswer) => CallAnswer::Lost,
        };
        self.recorder
            .note(process.number, What::Returned { call, answer: word });
        answer
    }

    fn perform(&self, process: &Process, request: &Accepted<'_>) -> Value {
        let call = request.call;
        let (answer, first) = self.ledger.perform(request);
        let what = match first {
            None => What::Performed { call },
            Some(first) => {
                let other_body = !is_same(&first.body, request.body);
                What::Repeated {
                    call,
                    first: first.call,
                    other_body,
                }
            }
        };
        self.recorder.note(process.number, what);
        answer
    }

    /// Lets the process stand still. Its group takes it for gone, until it goes on.
    pub(super) async fn freeze(&self, process: &Process, time: Duration) {
        process.freeze(time);
        self.group.leave(process.number);
        self.hold(time).await;
        if !process.is_killed() {
            self.group.join(process.number);
        }
    }

    /// Holds a call up until another process runs its sample, too.
    pub(super) async fn overlapped(&self, process: &Process, sample: usize, at_most: Duration) {
        tokio::select! {
            () = self.active.elsewhere(process.number, sample) => {}
            () = self.hold(at_most) => {}
        }
    }

    /// Holds a call up, at most until the round ends.
    pub(super) async fn hold(&self, time: Duration) {
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            () = self.stopping.cancelled() => {}
        }
    }

    async fn misbehave(
        &self,
        fault: CallFault,
        process: &Arc<Process>,
        request: &Accepted<'_>,
    ) -> Result<Value, DownstreamError> {
        match fault {
            CallFault::Refuse => return Err(DownstreamError::Refused),
            CallFault::KillBefore => {
                self.kill(process);
                return Err(DownstreamError::NoAnswer);
            }
            CallFault::KillAfter(_) => {
                self.perform(process, request);
                self.kill(process);
                return Err(DownstreamError::NoAnswer);
            }
            CallFault::LoseAnswer => {
                self.perform(process, request);
                return Err(DownstreamError::NoAnswer);
            }
            CallFault::NoAnswer(time) => {
                self.hold(time).await;
                return Err(DownstreamError::NoAnswer);
            }
            CallFault::Late(time) => self.hold(time).await,
            CallFault::Freeze(time) => self.freeze(process, time).await,
            CallFault::Overlap { sample, at_most } => {
                self.overlapped(process, sample, at_most).await;
            }
        }
        Ok(self.perform(process, request))
    }
}

/// Returns whether two bodies say the same. The trial spells numbers of duplicates differently, and
/// a handler may pass them on.
fn is_same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one
                    .iter()
                    .all(|(name, value)| other.get(name).is_some_and(|other| is_same(value, other)))
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len()
                && one
                    .iter()
                    .zip(other)
                    .all(|(one, other)| is_same(one, other))
        }
        (Value::Number(one), Value::Number(other)) => {
            one == other || is_same_decimal(&one.to_string(), &other.to_string())
        }
        (Value::String(one), Value::String(other)) => one == other || is_same_decimal(one, other),
        _ => one == other,
    }
}

/// Returns whether two texts are one decimal number, with more or fewer zeros at its end.
fn is_same_decimal(one: &str, other: &str) -> bool {
    one.parse::<f64>().is_ok() && other.parse::<f64>().is_ok() && shortened(one) == shortened(other)
}

fn shortened(decimal: &str) -> &str {
    if !decimal.contains('.') || decimal.contains(['e', 'E']) {
        return decimal;
    }
    decimal.trim_end_matches('0').trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_that_say_the_same_are_spelt_as_they_like() {
        let body = json!({ "order": "o-1", "amount": 10.5, "lines": [1, 2.0], "price": "7.50" });
        assert!(is_same(
            &body,
            &json!({ "amount": 10.50, "order": "o-1", "lines": [1, 2], "price": "7.5" })
        ));
        for other in [
            json!({ "order": "o-1", "amount": 10.51, "lines": [1, 2.0], "price": "7.50" }),
            json!({ "order": "o-1", "amount": 10.5, "lines": [2.0, 1], "price": "7.50" }),
            json!({ "order": "o-10", "amount": 10.5, "lines": [1, 2.0], "price": "7.50" }),
            json!({ "order": "o-1", "amount": 10.5, "lines": [1, 2.0] }),
        ] {
            assert!(!is_same(&body, &other), "{other}");
        }
    }
}
