//! The protocol of standard streams: one JSON object per line, in both directions.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use oncegate::{Header, Message};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::ChildStdin;
use tokio::sync::mpsc;

use super::origin;
use super::worker::{Reply, Work, idempotency_key};

/// The longest line in either direction, in bytes.
pub(super) const LINE_MAX_BYTES: u64 = 16 * 1024 * 1024;
/// How much of a line is shown that is no protocol, in characters.
const SHOWN_MOST: usize = 120;

/// What a worker says.
#[derive(Debug)]
pub(super) enum Said {
    Ready(Ready),
    Answer(Answer),
}

#[derive(Debug, Deserialize)]
pub(super) struct Ready {
    pub(super) r#type: ReadyType,
    pub(super) v: u32,
    #[serde(default = "one")]
    pub(super) max_in_flight: usize,
}

fn one() -> usize {
    1
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ReadyType {
    Ready,
}

#[derive(Debug, Deserialize)]
pub(super) struct Answer {
    pub(super) id: String,
    pub(super) outcome: Outcome,
    pub(super) result: Option<Box<RawValue>>,
    pub(super) delay_ms: Option<u64>,
    pub(super) reason: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    Complete,
    Retry,
    DeadLetter,
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        let Answer { outcome, result, delay_ms, reason, .. } = answer;
        let reason = reason.unwrap_or_else(|| "the worker gives no reason".to_owned());
        match outcome {
            Outcome::Complete => Self::Complete(result.map_or(Work::Nothing, Work::of_json)),
            Outcome::Retry => Self::Retry { delay: delay_ms.map(Duration::from_millis), reason },
            Outcome::DeadLetter => Self::DeadLetter { reason },
        }
    }
}

/// What a worker is told of a message.
#[derive(Serialize)]
pub(super) struct Told<'a> {
    r#type: &'static str,
    v: u32,
    id: &'a str,
    idempotency_key: String,
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    fence: Option<u64>,
    recovered: bool,
    lease_ms: u64,
    origin: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    headers: Vec<(&'a str, serde_json::Value)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

impl<'a> Told<'a> {
    pub(super) fn of(message: &'a Message, id: &'a str, lease: Duration) -> Self {
        let text = std::str::from_utf8(message.payload()).ok();
        let key = message.key();
        let key_text = key.and_then(|key| std::str::from_utf8(key).ok());
        let header = |header: &'a Header| {
            let value = header.value.as_deref().map(|value| match std::str::from_utf8(value) {
                Ok(text) => serde_json::Value::from(text),
                Err(_) => serde_json::json!({ "base64": BASE64.encode(value) }),
            });
            (&*header.name, value.unwrap_or_default())
        };
        Self {
            r#type: "message",
            v: 1,
            id,
            idempotency_key: idempotency_key(message),
            attempt: message.attempt(),
            fence: message.fence(),
            recovered: message.recovered(),
            lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
            origin: origin::as_json(message.origin()),
            key: key_text.map(str::to_owned),
            key_base64: key.filter(|_| key_text.is_none()).map(|key| BASE64.encode(key)),
            headers: message.headers().iter().map(header).collect(),
            payload: text.filter(|_| !message.is_tombstone()),
            payload_base64: text.is_none().then(|| BASE64.encode(message.payload())),
        }
    }
}

/// A line with its number.
pub(super) struct Line {
    pub(super) number: u64,
    pub(super) text: Vec<u8>,
}

pub(super) fn parse(line: Line) -> Result<Said, String> {
    let answer = serde_json::from_slice(&line.text).map(Said::Answer);
    answer.or_else(|_| serde_json::from_slice(&line.text).map(Said::Ready)).map_err(|_| {
        let shown: String = String::from_utf8_lossy(&line.text).chars().take(SHOWN_MOST).collect();
        format!("line {} of its standard output is no message of the protocol: {shown:?}", line.number)
    })
}

/// Passes lines on until the end. A line that is too long is passed on as it is, and is no protocol.
pub(super) async fn read_lines(stdout: impl tokio::io::AsyncRead + Unpin, lines: mpsc::Sender<Line>) {
    let mut stdout = BufReader::new(stdout);
    for number in 1.. {
        let mut text = Vec::new();
        let read = (&mut stdout).take(LINE_MAX_BYTES).read_until(b'\n', &mut text).await;
        if !matches!(read, Ok(1..)) || lines.send(Line { number, text }).await.is_err() {
            return;
        }
    }
}

/// Writes lines until nobody has any, and closes the worker's input.
pub(super) async fn write_lines(mut stdin: ChildStdin, mut lines: mpsc::Receiver<Vec<u8>>) {
    while let Some(mut line) = lines.recv().await {
        line.push(b'\n');
        if stdin.write_all(&line).await.is_err() || stdin.flush().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use oncegate::Origin;

    use super::*;

    fn line(text: &str) -> Line {
        Line { number: 7, text: text.as_bytes().to_vec() }
    }

    #[test]
    fn lines_of_the_protocol_are_read_and_others_named() {
        let ready = parse(line(r#"{"type":"ready","v":1,"max_in_flight":8}"#));
        assert!(matches!(ready, Ok(Said::Ready(Ready { max_in_flight: 8, .. }))));
        let answer = parse(line(r#"{"id":"17","outcome":"complete","result":{"n":9007199254740993}}"#));
        let Ok(Said::Answer(Answer { result: Some(result), .. })) = answer else { panic!("an answer") };
        assert_eq!(result.get(), r#"{"n":9007199254740993}"#);
        assert!(parse(line(r#"{"id":"17","outcome":"dead-letter","reason":"no"}"#)).is_ok());
        for wrong in
            ["hello", "{}", r#"{"id":17,"outcome":"complete"}"#, r#"{"id":"1","outcome":"done"}"#, ""]
        {
            let Err(why) = parse(line(wrong)) else { panic!("{wrong}") };
            assert!(why.contains("line 7") && why.contains(&format!("{wrong:?}")), "{why}");
        }
    }

    #[test]
    fn a_message_is_one_line_whatever_is_in_it() {
        let origin = Origin::Queue { queue: "orders".into(), id: "a".into() };
        let message = |payload: &'static [u8]| Message::new("orders", origin.clone(), Some(payload.into()));
        let told = |message: &Message| {
            serde_json::to_string(&Told::of(message, "1", Duration::from_secs(30))).unwrap()
        };
        let text = told(&message(b"two\nlines"));
        assert!(text.contains(r#""payload":"two\nlines""#) && !text.contains('\n'), "{text}");
        assert!(
            text.contains(r#""origin":{"sqs":{"id":"a","queue":"orders"}}"#)
                && text.contains(r#""lease_ms":30000"#)
        );
        assert!(told(&message(b"\xff")).contains(r#""payload_base64":"/w==""#));
        let tombstone = Message::new("orders", origin.clone(), None);
        assert!(!told(&tombstone).contains("payload"));
    }
}
