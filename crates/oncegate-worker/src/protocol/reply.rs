//! The reply of a worker, and the result that is stored with the key.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::de::IgnoredAny;
use serde::ser::{Error as _, SerializeMap};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// The reply of a worker to a message, or what a missing reply means.
#[derive(Debug)]
pub enum Reply {
    /// The work is done.
    Complete(WorkerResult),
    /// The attempt has failed.
    Retry {
        /// The delay that the worker requests.
        delay: Option<Duration>,
        /// The reason, in the worker's words.
        reason: String,
    },
    /// The message cannot be done yet: the worker wants it later, and has not failed.
    Later {
        /// The delay that the worker requests.
        delay: Option<Duration>,
        /// The reason, in the worker's words.
        reason: String,
    },
    /// No attempt can succeed.
    DeadLetter {
        /// The reason, in the worker's words.
        reason: String,
    },
    /// The worker may have done the work, or may still be working.
    Unknown {
        /// The reason why that is not known.
        reason: String,
    },
    /// The worker was not given the message.
    NotRun {
        /// The reason why it was not.
        reason: String,
    },
    /// The batch makes too long a line; its parts may not.
    TooLong {
        /// The size of the line, and the limit.
        reason: String,
    },
}

impl Reply {
    pub(crate) fn retry(reason: impl Into<String>) -> Self {
        Self::Retry {
            delay: None,
            reason: reason.into(),
        }
    }

    /// Returns whether the worker has said what became of the message.
    pub(crate) fn is_answer(&self) -> bool {
        match self {
            Self::Complete(_)
            | Self::Retry { .. }
            | Self::Later { .. }
            | Self::DeadLetter { .. } => true,
            Self::Unknown { .. } | Self::NotRun { .. } | Self::TooLong { .. } => false,
        }
    }

    pub(crate) fn unknown(reason: impl Into<String>) -> Self {
        Self::Unknown {
            reason: reason.into(),
        }
    }

    pub(crate) fn not_run(reason: impl Into<String>) -> Self {
        Self::NotRun {
            reason: reason.into(),
        }
    }
}

/// The reply of a worker to a batch.
#[derive(Debug)]
pub(crate) enum BatchReply {
    /// A reply to each message, in the order of the batch.
    Each(Vec<Reply>),
    /// A reply to the batch as a whole.
    Whole(Reply),
}

/// The result of a worker, as it is stored with the key.
///
/// In the record it is JSON: `null` when it is empty, otherwise an object with one of `json`,
/// `text` and `base64`, and with `content_type` if the worker named one.
#[derive(Debug)]
pub enum WorkerResult {
    /// There is no result.
    Nothing,
    /// A result that is kept.
    Result {
        /// The content type, if the worker named one.
        content_type: Option<String>,
        /// The result itself.
        body: ResultBody,
    },
    /// Larger than the limit: the work is done, and its result is not kept.
    TooLarge {
        /// The limit, in bytes.
        most: usize,
    },
    /// The work is done, and its result is no JSON.
    NoJson,
}

/// The result of a worker, as the worker has written it.
#[derive(Debug)]
pub enum ResultBody {
    /// JSON.
    Json(Box<RawValue>),
    /// Text, or bytes that are none.
    Bytes(Bytes),
}

impl WorkerResult {
    pub(crate) fn of_bytes(content_type: Option<String>, body: Bytes) -> Self {
        if body.is_empty() {
            return Self::Nothing;
        }
        let is_json = content_type.as_deref().is_some_and(|name| {
            let name = name.split(';').next().unwrap_or_default().trim();
            name == "application/json" || name.ends_with("+json")
        });
        let json = if is_json {
            serde_json::from_slice(&body).ok()
        } else {
            None
        };
        Self::Result {
            content_type,
            body: json.map_or(ResultBody::Bytes(body), ResultBody::Json),
        }
    }

    pub(crate) fn of_json(json: Box<RawValue>) -> Self {
        match json.get() {
            "null" => Self::Nothing,
            _ => Self::Result {
                content_type: None,
                body: ResultBody::Json(json),
            },
        }
    }
}

impl Serialize for WorkerResult {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (content_type, body) = match self {
            Self::Nothing => return serializer.serialize_unit(),
            Self::TooLarge { most } => {
                return Err(S::Error::custom(format!(
                    "the worker's result is larger than {most} bytes"
                )));
            }
            Self::NoJson => return Err(S::Error::custom("the worker's result is no JSON")),
            Self::Result { content_type, body } => (content_type, body),
        };
        let mut map = serializer.serialize_map(None)?;
        if let Some(content_type) = content_type {
            map.serialize_entry("content_type", content_type)?;
        }
        match body {
            ResultBody::Json(json) => map.serialize_entry("json", json)?,
            ResultBody::Bytes(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => map.serialize_entry("text", text)?,
                Err(_) => map.serialize_entry("base64", &BASE64.encode(bytes))?,
            },
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for WorkerResult {
    /// The result of a duplicate is not used here: it is stored for operators who inspect the
    /// record.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(content_type: Option<&str>, body: &'static [u8]) -> String {
        let work =
            WorkerResult::of_bytes(content_type.map(str::to_owned), Bytes::from_static(body));
        serde_json::to_string(&work).unwrap()
    }

    #[test]
    fn results_are_kept_so_that_other_programs_can_read_them() {
        assert_eq!(kept(None, b""), "null");
        assert_eq!(kept(None, b"receipt 42"), r#"{"text":"receipt 42"}"#);
        let json = kept(
            Some("application/json; charset=utf-8"),
            br#"{"receipt":9007199254740993}"#,
        );
        assert_eq!(
            json,
            r#"{"content_type":"application/json; charset=utf-8","json":{"receipt":9007199254740993}}"#
        );
        assert_eq!(
            kept(Some("application/json"), b"{no"),
            r#"{"content_type":"application/json","text":"{no"}"#
        );
        assert_eq!(
            kept(Some("image/png"), b"\xff\x00"),
            r#"{"content_type":"image/png","base64":"/wA="}"#
        );
        assert!(serde_json::to_string(&WorkerResult::TooLarge { most: 1 }).is_err());
    }
}
