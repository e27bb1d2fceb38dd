//! The protocol of standard streams: one JSON object per line, in both directions. `values` finds
//! the ends of what a worker writes.
//!
//! # Not obvious
//!
//! Implementation notes: facts about serde that this code depends on.
//!
//! - serde's untagged enums cannot hold a `RawValue`: the forms of a line are tried one after the
//!   other.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use oncegate_runtime::{Header, Message};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, Value};
use tokio::io::AsyncWriteExt as _;
use tokio::process::ChildStdin;
use tokio::sync::mpsc;

use super::attributes::Room;
use super::call::{AttemptInfo, Call, Order};
use super::origin;
use super::reply::{Reply, WorkerResult};

/// The longest line in either direction, in bytes.
pub(crate) const LINE_MAX_BYTES: u64 = 16 * 1024 * 1024;
/// The part of an invalid line that is shown, in characters.
const SHOWN_MOST: usize = 120;

/// A line from a worker.
#[derive(Debug)]
pub(crate) enum WorkerLine {
    Ready(Ready),
    Answer(Answer),
    /// Answers to several messages.
    Answers(Vec<Answer>),
}

#[derive(Debug, Deserialize)]
pub(crate) struct Ready {
    pub(crate) r#type: ReadyType,
    pub(crate) v: u32,
    #[serde(default = "one")]
    pub(crate) max_in_flight: usize,
    /// `true` if the worker takes batches.
    #[serde(default)]
    pub(crate) batches: bool,
}

fn one() -> usize {
    1
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ReadyType {
    Ready,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Answer {
    pub(crate) id: String,
    pub(crate) outcome: Outcome,
    pub(crate) result: Option<Box<RawValue>>,
    pub(crate) delay_ms: Option<u64>,
    pub(crate) reason: Option<String>,
    /// The result is no JSON, and is not kept.
    #[serde(skip)]
    pub(crate) is_unreadable: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    Complete,
    Retry,
    Later,
    DeadLetter,
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        let Answer {
            outcome,
            result,
            delay_ms,
            reason,
            is_unreadable,
            ..
        } = answer;
        let reason = reason.unwrap_or_else(|| "the worker gives no reason".to_owned());
        match outcome {
            // The effect has happened: the message must not run again because of its result.
            Outcome::Complete if is_unreadable => Self::Complete(WorkerResult::NoJson),
            Outcome::Complete => {
                Self::Complete(result.map_or(WorkerResult::Nothing, WorkerResult::of_json))
            }
            Outcome::Retry => Self::Retry {
                delay: delay_ms.map(Duration::from_millis),
                reason,
            },
            Outcome::Later => Self::Later {
                delay: delay_ms.map(Duration::from_millis),
                reason,
            },
            Outcome::DeadLetter => Self::DeadLetter { reason },
        }
    }
}

/// A message as a line for a worker.
#[derive(Serialize)]
pub(crate) struct HandleLine<'a> {
    r#type: &'static str,
    v: u32,
    id: &'a str,
    idempotency_key: &'a str,
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    fencing_token: Option<u64>,
    recovered: bool,
    lease_ms: u64,
    origin: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    headers: Vec<(&'a str, serde_json::Value)>,
    /// The number of headers, the key among them, that are too large to be passed.
    #[serde(skip_serializing_if = "is_zero")]
    headers_left_out: usize,
    /// `null` for a tombstone; left out when it is not text.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// A batch as a line for a worker.
#[derive(Serialize)]
pub(crate) struct BatchLine<'a> {
    r#type: &'static str,
    v: u32,
    messages: Vec<HandleLine<'a>>,
}

impl<'a> BatchLine<'a> {
    /// The messages with their ids.
    pub(crate) fn of(orders: &'a [(Order, String)], lease: Duration) -> Self {
        let messages = orders
            .iter()
            .map(|(order, id)| HandleLine::of_order(order, id, lease))
            .collect();
        Self {
            r#type: "batch",
            v: 1,
            messages,
        }
    }
}

fn header_value(value: Option<&[u8]>) -> Value {
    match value.map(|value| (value, std::str::from_utf8(value))) {
        None => Value::Null,
        Some((_, Ok(text))) => Value::from(text),
        Some((value, Err(_))) => serde_json::json!({ "base64": BASE64.encode(value) }),
    }
}

impl<'a> HandleLine<'a> {
    pub(crate) fn of_order(order: &'a Order, id: &'a str, lease: Duration) -> Self {
        Self::of(&order.message, &order.attempt, id, lease)
    }

    /// Logs how many headers are left out, if any are.
    pub(crate) fn of(
        message: &'a Message,
        attempt: &'a AttemptInfo,
        id: &'a str,
        lease: Duration,
    ) -> Self {
        let text = std::str::from_utf8(message.payload()).ok();
        let mut room = Room::default();
        let key = message.key().filter(|key| room.takes("key", key));
        let key_text = key.and_then(|key| std::str::from_utf8(key).ok());
        let headers = message
            .headers()
            .iter()
            .filter(|Header { name, value }| room.takes(name, value.as_deref().unwrap_or_default()))
            .map(|Header { name, value }| (&**name, header_value(value.as_deref())))
            .collect();
        let headers_left_out = room.tell(message);
        Self {
            r#type: "message",
            v: 1,
            id,
            idempotency_key: &attempt.idempotency_key,
            attempt: attempt.number,
            fencing_token: attempt.fencing_token,
            recovered: attempt.recovered,
            lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
            origin: origin::as_json(message),
            key: key_text.map(str::to_owned),
            key_base64: key
                .filter(|_| key_text.is_none())
                .map(|key| BASE64.encode(key)),
            headers,
            headers_left_out,
            payload: text.map(|text| (!message.is_tombstone()).then_some(text)),
            payload_base64: text.is_none().then(|| BASE64.encode(message.payload())),
        }
    }
}

/// A line that a worker has written, with its number.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) number: u64,
    pub(crate) text: Vec<u8>,
}

/// An error in something that a worker has written.
#[derive(Debug)]
pub(crate) struct Misread {
    /// The line's number, what is wrong with it, and its beginning.
    pub(crate) why: String,
    /// The id of the message that it means to answer, if it names one.
    pub(crate) id: Option<String>,
    /// `true` if it is no attempt at the protocol, as what a `print` writes.
    pub(crate) is_noise: bool,
}

/// Parses what a worker has written.
pub(crate) fn parse(line: &Line) -> Result<WorkerLine, Misread> {
    said(&line.text)
        .or_else(|| said_around_results(&line.text))
        .ok_or_else(|| {
            let value = serde_json::from_slice(&line.text).ok();
            let number = line.number;
            let shown = shown(&line.text);
            let mistake = mistake(&line.text, value.as_ref());
            Misread {
                why: format!("line {number} of its standard output {mistake}: {shown:?}"),
                id: value.as_ref().and_then(answered_id),
                is_noise: is_noise(&line.text, value.as_ref()),
            }
        })
}

/// Parses an array of answers.
pub(crate) fn answers(text: &[u8]) -> Option<Vec<Answer>> {
    match said(text).or_else(|| said_around_results(text))? {
        WorkerLine::Answers(answers) => Some(answers),
        WorkerLine::Answer(_) | WorkerLine::Ready(_) => None,
    }
}

fn said(text: &[u8]) -> Option<WorkerLine> {
    let answer = serde_json::from_slice(text).map(WorkerLine::Answer);
    let answer = answer.or_else(|_| serde_json::from_slice(text).map(WorkerLine::Answers));
    answer
        .or_else(|_| serde_json::from_slice(text).map(WorkerLine::Ready))
        .ok()
}

/// Stands for what is no JSON while a line is parsed around it.
const NO_JSON: &str = "\"oncegate: no JSON\"";

/// Parses answers whose results are not JSON: some libraries write `NaN` and `Infinity`, or text
/// that is not UTF-8.
fn said_around_results(text: &[u8]) -> Option<WorkerLine> {
    let text = String::from_utf8_lossy(text);
    let is_lossy = text.contains(char::REPLACEMENT_CHARACTER);
    let mut said = said(without_odd_numbers(&text).as_bytes())?;
    let answers = match &mut said {
        WorkerLine::Answer(answer) => std::slice::from_mut(answer),
        WorkerLine::Answers(answers) => answers,
        WorkerLine::Ready(_) => return None,
    };
    for answer in answers {
        answer.is_unreadable = answer
            .result
            .as_ref()
            .is_some_and(|result| is_lossy || result.get().contains(NO_JSON));
    }
    Some(said)
}

/// Replaces the numbers that JSON does not have, outside of strings.
fn without_odd_numbers(text: &str) -> String {
    let mut replaced = String::with_capacity(text.len());
    // Every second part is within quotes, except for those that an escaped quote ends.
    let mut is_in_string = false;
    for part in text.split_inclusive('"') {
        if is_in_string {
            let before = part.strip_suffix('"').unwrap_or(part);
            let escapes = before.len() - before.trim_end_matches('\\').len();
            is_in_string = escapes % 2 == 1;
            replaced.push_str(part);
        } else {
            is_in_string = true;
            let part = ["-Infinity", "Infinity", "NaN"]
                .into_iter()
                .fold(part.to_owned(), |part, odd| part.replace(odd, NO_JSON));
            replaced.push_str(&part);
        }
    }
    replaced
}

/// The id of an answer that has something wrong.
fn answered_id(value: &Value) -> Option<String> {
    match (value.get("id")?, value.get("outcome")) {
        (Value::String(id), _) => Some(id.clone()),
        (Value::Number(id), Some(_)) => Some(id.to_string()),
        _ => None,
    }
}

/// Returns whether the text cannot be meant as an answer or as `ready`, not even a damaged one.
fn is_noise(text: &[u8], value: Option<&Value>) -> bool {
    const OUTCOME: &[u8] = b"\"outcome\"";
    let is_ready = value
        .and_then(|value| value.get("type"))
        .is_some_and(|kind| kind == "ready");
    !is_ready && !text.windows(OUTCOME.len()).any(|part| part == OUTCOME)
}

/// Describes what is wrong with an invalid line.
fn mistake(text: &[u8], value: Option<&Value>) -> String {
    const OUTCOMES: [&str; 4] = ["complete", "retry", "later", "dead-letter"];
    if text.len() as u64 >= LINE_MAX_BYTES && !text.ends_with(b"\n") {
        return format!("is longer than {LINE_MAX_BYTES} bytes");
    }
    let Some(value) = value else {
        return "is no JSON; only the protocol belongs there, print to standard error".to_owned();
    };
    let Value::Object(fields) = value else {
        return "is JSON, but no object, and no array of answers".to_owned();
    };
    let outcomes = "\"complete\", \"retry\", \"later\" or \"dead-letter\"";
    match (fields.get("type"), fields.get("id"), fields.get("outcome")) {
        (Some(Value::String(ready)), None, _) if ready == "ready" => match fields.get("v") {
            None => "has no `v`; it is 1".to_owned(),
            Some(_) => "has a wrong number: `v` and `max_in_flight` are whole numbers".to_owned(),
        },
        (Some(_), None, _) => {
            "has a `type` that no worker writes: only \"ready\" is one".to_owned()
        }
        (None, None, None) => {
            "is neither {\"type\":\"ready\",\"v\":1} nor an answer with `id` and `outcome`"
                .to_owned()
        }
        (None, None, Some(_)) => "has no `id`; it is that of the message".to_owned(),
        (_, Some(Value::Number(id)), _) => {
            format!(
                "has a number as its `id`; write it as the message has it, as the string \"{id}\""
            )
        }
        (_, Some(Value::String(_)), None) => format!("has no `outcome`; it is {outcomes}"),
        (_, Some(Value::String(_)), Some(Value::String(outcome))) => {
            if OUTCOMES.contains(&&**outcome) {
                "has a field of the wrong type: `delay_ms` is a whole number, `reason` a string"
                    .to_owned()
            } else {
                format!("has an unknown `outcome`; it is {outcomes}")
            }
        }
        (_, Some(Value::String(_)), Some(_)) => "has an `outcome` that is no string".to_owned(),
        (_, Some(_), _) => "has an `id` that is no string".to_owned(),
    }
}

/// The beginning of a worker's line, for the log.
pub(crate) fn shown(text: &[u8]) -> String {
    let text = text
        .get(..text.len().min(4 * SHOWN_MOST))
        .unwrap_or_default();
    String::from_utf8_lossy(text)
        .chars()
        .take(SHOWN_MOST)
        .collect()
}

/// A line for a worker.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) line: Vec<u8>,
    /// The call that begins when this line is written.
    pub(crate) call: Option<Call>,
}

/// Writes lines until all senders are dropped, and closes the worker's input. A call that was
/// withdrawn before its line is written does not begin.
pub(crate) async fn write_lines(mut stdin: ChildStdin, mut lines: mpsc::Receiver<Outgoing>) {
    while let Some(Outgoing { mut line, call }) = lines.recv().await {
        if call.is_some_and(|call| !call.begin()) {
            continue;
        }
        line.push(b'\n');
        if stdin.write_all(&line).await.is_err() || stdin.flush().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
