//! The meaning of an object that a worker has written: that it is ready, an answer, a wrong one, or
//! nothing of the protocol.
//!
//! An object with the `id` and the `outcome` of a message is an answer, whatever else is in it: a
//! field that is wrong beside these has its default. The effect has happened, and must not happen
//! again because of a field.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::{RawValue, Value};

use super::repaired::{NO_JSON, Repaired};
use super::reply::{Reply, WorkerResult};

/// The longest line in either direction, in bytes.
pub(crate) const LINE_MAX_BYTES: u64 = 16 * 1024 * 1024;
/// The part of an invalid line that is shown, in characters.
const SHOWN_MOST: usize = 120;
/// The fields of an answer.
const FIELDS: [&str; 5] = ["id", "outcome", "result", "delay_ms", "reason"];
/// The words of an answer for its outcome.
const OUTCOMES: [(&str, Outcome); 5] = [
    ("complete", Outcome::Complete),
    ("retry", Outcome::Retry),
    ("later", Outcome::Later),
    ("dead-letter", Outcome::DeadLetter),
    ("not-run", Outcome::NotRun),
];

/// The report of a worker that it takes messages.
#[derive(Debug, Deserialize)]
pub(crate) struct Ready {
    pub(crate) v: u32,
    #[serde(default = "one")]
    pub(crate) max_in_flight: usize,
    /// `true` if the worker takes batches.
    #[serde(default)]
    pub(crate) batches: bool,
    /// The number of messages that it takes before it has answered those before.
    #[serde(default)]
    pub(crate) ahead: usize,
}

fn one() -> usize {
    1
}

/// An answer to a message.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) id: String,
    outcome: Outcome,
    result: Option<Box<RawValue>>,
    delay: Option<Duration>,
    reason: Option<String>,
    /// The result is no JSON, and is not kept.
    pub(crate) is_unreadable: bool,
    /// A field beside `id` and `outcome` is wrong, so that its default counts.
    pub(crate) flaw: Option<&'static str>,
    /// No field is there that answers do not have. With others it may be a log line.
    pub(super) is_plain: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Complete,
    Retry,
    Later,
    DeadLetter,
    /// The process has not begun the message, and will not.
    NotRun,
}

impl Answer {
    /// Returns whether the process gives the message back without having begun it.
    pub(crate) fn is_not_run(&self) -> bool {
        self.outcome == Outcome::NotRun
    }
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        let Answer {
            outcome,
            result,
            delay,
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
            Outcome::Retry => Self::Retry { delay, reason },
            Outcome::Later => Self::Later { delay, reason },
            Outcome::DeadLetter => Self::DeadLetter { reason },
            Outcome::NotRun => Self::NotRun { reason },
        }
    }
}

/// An object by its meaning.
#[derive(Debug)]
pub(super) enum ObjectKind {
    Ready(Ready),
    Answer(Answer),
    /// Meant as one of these, and not to be taken as one.
    Wrong {
        /// The message that it means to answer, if it names one.
        id: Option<String>,
    },
    /// Nothing of the protocol.
    Other,
}

impl ObjectKind {
    /// The meaning of this text, which is a whole object.
    pub(super) fn of(text: &[u8]) -> Self {
        if let Ok(fields) = serde_json::from_slice::<Fields>(text) {
            return fields.meaning(text, false);
        }
        let repaired = Repaired::of(text);
        match serde_json::from_str::<Fields>(&repaired.text) {
            Ok(fields) => fields.meaning(repaired.text.as_bytes(), repaired.is_lossy),
            Err(_) => Self::Other,
        }
    }
}

/// Parses an array of answers; `None` if there is none in it. What is no answer in it is left out.
pub(crate) fn answers(text: &[u8]) -> Option<Vec<Answer>> {
    let repaired;
    let values: Vec<&RawValue> = match serde_json::from_slice(text) {
        Ok(values) => values,
        Err(_) => {
            repaired = Repaired::of(text).text;
            serde_json::from_str(&repaired).ok()?
        }
    };
    let is_empty = values.is_empty();
    let answers: Vec<Answer> = values
        .into_iter()
        .filter_map(|value| match ObjectKind::of(value.get().as_bytes()) {
            ObjectKind::Answer(answer) => Some(answer),
            ObjectKind::Ready(_) | ObjectKind::Wrong { .. } | ObjectKind::Other => None,
        })
        .collect();
    (is_empty || !answers.is_empty()).then_some(answers)
}

/// The fields of an object as they were written, also those that repeat.
struct Fields(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(FieldsVisitor)
    }
}

impl Fields {
    /// The value of a field, unless it is there several times with different values.
    fn only(&self, name: &str) -> Option<&str> {
        let mut values = self
            .0
            .iter()
            .filter(|(found, _)| found == name)
            .map(|(_, value)| value.get());
        let first = values.next()?;
        values.all(|other| other == first).then_some(first)
    }

    /// The first value of a field that is not `null`.
    fn first(&self, name: &str) -> Option<&RawValue> {
        let mut fields = self.0.iter();
        let (_, value) = fields.find(|(found, _)| found == name)?;
        (value.get() != "null").then_some(value)
    }

    fn meaning(&self, text: &[u8], is_lossy: bool) -> ObjectKind {
        let id = self.only("id").and_then(id);
        let said = self.only("outcome").map(outcome);
        // A log line has other fields, and is no answer that has gone wrong.
        let is_plain = self.0.iter().all(|(name, _)| FIELDS.contains(&&**name));
        match (id, said) {
            (Some(id), Some(Some(outcome))) => ObjectKind::Answer(Answer {
                is_plain,
                ..self.answer(id, outcome, is_lossy)
            }),
            (Some(id), Some(None)) if is_plain => ObjectKind::Wrong { id: Some(id) },
            (None, Some(Some(_))) if is_plain => ObjectKind::Wrong { id: None },
            (None, _) if self.only("type") == Some("\"ready\"") => serde_json::from_slice(text)
                .map_or(ObjectKind::Wrong { id: None }, ObjectKind::Ready),
            _ => ObjectKind::Other,
        }
    }

    fn answer(&self, id: String, outcome: Outcome, is_lossy: bool) -> Answer {
        let result = self.first("result").map(ToOwned::to_owned);
        let delay = self.first("delay_ms").map(delay);
        let reason = self.first("reason").map(text);
        let flaw = match (&delay, &reason) {
            (Some(None), _) => Some("`delay_ms` is a whole number of milliseconds"),
            (_, Some(Err(_))) => Some("`reason` is a string"),
            _ => None,
        };
        let is_unreadable = result
            .as_ref()
            .is_some_and(|result| is_lossy || result.get().contains(NO_JSON));
        Answer {
            id,
            outcome,
            result,
            delay: delay.flatten(),
            reason: reason.map(|reason| reason.unwrap_or_else(|written| written)),
            is_unreadable,
            flaw,
            is_plain: true,
        }
    }
}

/// The id as a message has it, which a worker may have made a number of.
fn id(value: &str) -> Option<String> {
    if value.starts_with('"') {
        return serde_json::from_str(value).ok();
    }
    value
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| value.to_owned())
}

fn outcome(value: &str) -> Option<Outcome> {
    let word: String = serde_json::from_str(value).ok()?;
    OUTCOMES
        .into_iter()
        .find_map(|(name, outcome)| word.eq_ignore_ascii_case(name).then_some(outcome))
}

/// The delay, if it is a whole number of milliseconds; libraries write it as 500, 500.0 or 5e2.
fn delay(value: &RawValue) -> Option<Duration> {
    let value = value.get();
    if let Ok(milliseconds) = value.parse() {
        return Some(Duration::from_millis(milliseconds));
    }
    let milliseconds: f64 = value.parse().ok()?;
    (milliseconds.fract() == 0.0)
        .then(|| Duration::try_from_secs_f64(milliseconds / 1000.0).ok())
        .flatten()
}

/// The text.
///
/// # Errors
/// When it is none: the value as it is written.
fn text(value: &RawValue) -> Result<String, String> {
    serde_json::from_str(value.get()).map_err(|_| value.get().to_owned())
}

/// Describes what is wrong with something that a worker has written.
pub(super) fn mistake(text: &[u8]) -> String {
    if text.len() as u64 >= LINE_MAX_BYTES && !text.ends_with(b"\n") {
        return format!("is longer than {LINE_MAX_BYTES} bytes");
    }
    let Ok(value) = serde_json::from_slice(text) else {
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
        (Some(_), None, None) => {
            "has a `type` that no worker writes: only \"ready\" is one".to_owned()
        }
        (_, None, None) => {
            "is neither {\"type\":\"ready\",\"v\":1} nor an answer with `id` and `outcome`"
                .to_owned()
        }
        (_, None, Some(_)) => "has no `id`; it is that of the message".to_owned(),
        (_, Some(Value::String(_) | Value::Number(_)), None) => {
            format!("has no `outcome`; it is {outcomes}")
        }
        (_, Some(Value::String(_) | Value::Number(_)), Some(Value::String(_))) => {
            format!("has an unknown `outcome`; it is {outcomes}")
        }
        (_, Some(Value::String(_) | Value::Number(_)), Some(_)) => {
            "has an `outcome` that is no string".to_owned()
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> Answer {
        match ObjectKind::of(text.as_bytes()) {
            ObjectKind::Answer(answer) => answer,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn delay_of(written: &str) -> (Option<Duration>, bool) {
        let answer = answer(&format!(
            r#"{{"id":"1","outcome":"retry","delay_ms":{written}}}"#
        ));
        let is_flawed = answer.flaw.is_some();
        let Reply::Retry { delay, .. } = Reply::from(answer) else {
            panic!("{written}: no retry")
        };
        (delay, is_flawed)
    }

    #[test]
    fn a_delay_that_is_none_is_left_to_the_back_off() {
        let half = Some(Duration::from_millis(500));
        for written in ["500", "500.0", "5e2", "5E+2"] {
            assert_eq!(delay_of(written), (half, false), "{written}");
        }
        assert_eq!(delay_of("null"), (None, false));
        for written in ["\"500\"", "0.5", "-1", "NaN", "1e300", "{}", "[]", "true"] {
            assert_eq!(delay_of(written), (None, true), "{written}");
        }
    }

    #[test]
    fn what_is_wrong_beside_an_outcome_has_its_default() {
        let odd = answer(r#"{"id":"1","outcome":"dead-letter","reason":{"code":7}}"#);
        assert_eq!(odd.flaw, Some("`reason` is a string"));
        assert!(
            matches!(Reply::from(odd), Reply::DeadLetter { reason } if reason == r#"{"code":7}"#)
        );
        for text in [
            r#"{"id":"1","outcome":"complete","reason":1,"reason":"a","x":1,"x":2}"#,
            r#"{"id":"1","id":"1","outcome":"Complete"}"#,
            r#"{"id":1,"outcome":"COMPLETE","result":null,"reason":null,"delay_ms":null}"#,
            "{\"id\":\"1\",\"outcome\":\"complete\",\"reason\":\"tab\tescape\u{1b}\u{0}\"}",
            r#"{"id":"1","outcome":"complete","reason":"C:\work \x1b \ud800"}"#,
        ] {
            let answer = answer(text);
            assert_eq!(answer.id, "1", "{text}");
            assert!(
                matches!(Reply::from(answer), Reply::Complete(WorkerResult::Nothing)),
                "{text}"
            );
        }
    }

    #[test]
    fn what_names_no_message_or_no_outcome_is_no_answer() {
        for (wrong, id) in [
            (r#"{"id":"1","outcome":"done"}"#, Some("1")),
            (r#"{"id":"1","outcome":1}"#, Some("1")),
            (r#"{"id":"1","id":"2","outcome":"complete"}"#, None),
            (r#"{"id":null,"outcome":"complete"}"#, None),
            (r#"{"outcome":"complete"}"#, None),
            (r#"{"type":"ready"}"#, None),
            (r#"{"type":"ready","v":"1"}"#, None),
        ] {
            assert!(
                matches!(ObjectKind::of(wrong.as_bytes()), ObjectKind::Wrong { id: found } if found.as_deref() == id),
                "{wrong}"
            );
        }
        for other in [
            "{}",
            r#"{"id":"1"}"#,
            r#"{"level":30,"id":17,"msg":"charged"}"#,
            r#"{"outcome":"charged"}"#,
            r#"{"order":7,"outcome":"complete"}"#,
            r#"{"id":"1","outcome":"pending","level":30}"#,
            r#"{"type":"message"}"#,
        ] {
            assert!(
                matches!(ObjectKind::of(other.as_bytes()), ObjectKind::Other),
                "{other}"
            );
        }
    }

    #[test]
    fn a_result_that_is_no_json_costs_only_the_result() {
        for result in [
            "NaN",
            "-Infinity",
            r#"{"fee":NaN,"note":"NaN \\\"","x":[Infinity,-Infinity]}"#,
        ] {
            let answer = answer(&format!(
                r#"{{"id":"1","outcome":"complete","result":{result}}}"#
            ));
            assert!(
                matches!(Reply::from(answer), Reply::Complete(WorkerResult::NoJson)),
                "{result}"
            );
        }
        let latin = b"{\"id\":\"1\",\"outcome\":\"complete\",\"result\":\"M\xfcller\"}";
        assert!(matches!(
            ObjectKind::of(latin),
            ObjectKind::Answer(Answer {
                is_unreadable: true,
                ..
            })
        ));
        let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        let kept = answer(&format!(
            r#"{{"id":"1","outcome":"complete","result":{deep}}}"#
        ));
        assert!(!kept.is_unreadable);
        let kept = answer(r#"{"id":"17","outcome":"complete","result":{"n":9007199254740993}}"#);
        assert_eq!(kept.result.unwrap().get(), r#"{"n":9007199254740993}"#);
    }

    #[test]
    fn an_array_has_the_answers_that_are_in_it() {
        let text = br#"[{"id":"1","outcome":"complete","result":1},7,{"id":"2"},{"id":"3","outcome":"retry","delay_ms":"x"},{"id":"4","outcome":"complete","result":NaN}]"#;
        let found: Vec<(String, bool)> = answers(text)
            .unwrap()
            .into_iter()
            .map(|answer| (answer.id, answer.is_unreadable))
            .collect();
        let expected = [("1", false), ("3", false), ("4", true)];
        assert_eq!(found, expected.map(|(id, is)| (id.to_owned(), is)));
        for none in ["{}", "[1]", "done", r#"[{"id":"1"}]"#] {
            assert!(answers(none.as_bytes()).is_none(), "{none}");
        }
    }

    #[test]
    fn the_exact_mistake_is_named() {
        for (wrong, named) in [
            ("hello", "no JSON"),
            ("", "no JSON"),
            ("[1]", "no object"),
            ("{}", "neither"),
            (r#"{"outcome":"complete"}"#, "no `id`"),
            (
                r#"{"id":null,"outcome":"complete"}"#,
                "`id` that is no string",
            ),
            (r#"{"id":"1"}"#, "no `outcome`"),
            (r#"{"id":"1","outcome":"done"}"#, "unknown `outcome`"),
            (r#"{"id":"1","outcome":1}"#, "`outcome` that is no string"),
            (r#"{"type":"ready"}"#, "no `v`"),
            (
                r#"{"type":"ready","v":"1"}"#,
                "`v` and `max_in_flight` are whole numbers",
            ),
            (r#"{"type":"message"}"#, "`type` that no worker writes"),
        ] {
            assert!(mistake(wrong.as_bytes()).contains(named), "{wrong}");
        }
        let long = b"x".repeat(usize::try_from(LINE_MAX_BYTES).unwrap());
        assert!(mistake(&long).contains("longer than 16777216 bytes"));
    }
}
