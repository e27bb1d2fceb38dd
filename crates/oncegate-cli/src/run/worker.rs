//! A worker in any language as a handler: maps its replies to the handler's results.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use oncegate::core::reason::one_line;
use oncegate::{Attempt, Documents, Failure, Handler, Message};
use serde::de::IgnoredAny;
use serde::ser::{Error as _, SerializeMap};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use super::command::Commands;
use super::exec::Crew;
use super::http::Caller;

/// The longest reason that is kept, in bytes.
const REASON_MAX_BYTES: usize = 1024;

/// The step of the idempotency key for workers, which are assumed to have one effect per message.
const STEP: &str = "handler";

/// The worker that handles messages.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one for the whole run")]
pub(crate) enum Worker {
    Http(Caller),
    Exec(Crew),
    Command(Commands),
}

impl Worker {
    /// Resolves when the worker has broken the protocol so that its consumer must stop.
    pub(crate) async fn unfit(&self) {
        match self {
            Self::Exec(crew) => crew.unfit().await,
            Self::Http(_) | Self::Command(_) => std::future::pending().await,
        }
    }

    /// Returns why the consumer must stop.
    pub(crate) fn why_unfit(&self) -> Option<String> {
        match self {
            Self::Exec(crew) => crew.why_unfit(),
            Self::Http(_) | Self::Command(_) => None,
        }
    }
}

/// A worker with the limits on each of its runs.
#[derive(Debug)]
pub(crate) struct Limited {
    pub(crate) worker: Arc<Worker>,
    pub(crate) timeout: Option<Duration>,
    /// The longest retry delay that a worker may request, and the delay of a message that it wants
    /// later without saying when.
    pub(crate) longest_delay: Duration,
    /// Called before each run. When it fails, the worker does not get the message.
    pub(crate) before: Option<BeforeRun>,
    /// Makes the documents that the worker gets in the place of payloads.
    pub(crate) documents: Option<Documents>,
}

/// A function that is called before a worker gets a message.
#[derive(Clone)]
pub(crate) struct BeforeRun(Arc<RunHook>);

/// Returns why a run must not happen.
type RunHook = dyn Fn(&Message, &Attempt) -> Result<(), String> + Send + Sync;

impl BeforeRun {
    pub(crate) fn new(
        before: impl Fn(&Message, &Attempt) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(before))
    }
}

impl fmt::Debug for BeforeRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BeforeRun").finish_non_exhaustive()
    }
}

/// A call of a worker for a message.
///
/// It begins when the worker is given the message: from then on its outcome is unknown until the
/// worker answers. A call that is withdrawn before never begins.
#[derive(Clone, Debug, Default)]
pub(crate) struct Call(Arc<CallState>);

#[derive(Debug, Default)]
struct CallState {
    /// `true` if the call has begun; not set until that is decided.
    begun: OnceLock<bool>,
    begins: CancellationToken,
    withdrawn: CancellationToken,
}

impl Call {
    /// Begins the call, unless it was withdrawn: then the worker must not be given the message.
    #[must_use]
    pub(super) fn begin(&self) -> bool {
        let begun = *self.0.begun.get_or_init(|| true);
        if begun {
            self.0.begins.cancel();
        }
        begun
    }

    pub(super) fn has_begun(&self) -> bool {
        self.0.begun.get() == Some(&true)
    }

    /// Prevents the call from beginning. Returns whether it has not begun.
    pub(super) fn forestall(&self) -> bool {
        let begun = *self.0.begun.get_or_init(|| false);
        if !begun {
            self.0.withdrawn.cancel();
        }
        !begun
    }

    /// Withdraws the call. Returns whether the worker has the message.
    pub(super) fn withdraw(&self) -> bool {
        let begun = *self.0.begun.get_or_init(|| false);
        self.0.withdrawn.cancel();
        begun
    }

    pub(super) fn is_withdrawn(&self) -> bool {
        self.0.withdrawn.is_cancelled()
    }

    /// Resolves when the call is withdrawn.
    pub(super) async fn withdrawn(&self) {
        self.0.withdrawn.cancelled().await;
    }
}

/// Withdraws a call when its handler returns or is dropped.
pub(super) struct WithdrawOnDrop(pub(super) Call);

impl Drop for WithdrawOnDrop {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}

/// The reply of a worker to a message, or what a missing reply means.
#[derive(Debug)]
pub(crate) enum Reply {
    Complete(Work),
    Retry {
        delay: Option<Duration>,
        reason: String,
    },
    /// The message cannot be done yet: the worker wants it later, and has not failed.
    Later {
        delay: Option<Duration>,
        reason: String,
    },
    DeadLetter {
        reason: String,
    },
    /// The worker may have done the work, or may still be working.
    Unknown {
        reason: String,
    },
    /// The worker was not given the message.
    NotRun {
        reason: String,
    },
    /// The batch makes too long a line; its parts may not.
    TooLong {
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
    pub(super) fn is_answer(&self) -> bool {
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

impl Handler for Limited {
    type Output = Work;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<Work, Failure> {
        self.begin(message, attempt)?;
        let message = self.delivered(message).await?;
        self.outcome(self.call(&message, attempt).await)
    }
}

impl Limited {
    /// Does what is to be done before the run.
    pub(super) fn begin(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        match &self.before {
            Some(BeforeRun(before)) => before(message, attempt).map_err(Failure::not_run),
            None => Ok(()),
        }
    }

    /// The message as the worker gets it.
    pub(super) async fn delivered(&self, message: &Message) -> Result<Message, Failure> {
        match &self.documents {
            Some(documents) => documents.of(message).await,
            None => Ok(message.clone()),
        }
    }

    /// Waits for the worker's answer, within the limits.
    async fn call(&self, message: &Message, attempt: &Attempt) -> Reply {
        let told = AttemptInfo::of(attempt);
        let call = Call::default();
        let _withdrawn = WithdrawOnDrop(call.clone());
        let work = async {
            match &*self.worker {
                Worker::Http(caller) => caller.call(message, &told, &call).await,
                Worker::Exec(crew) => crew.hand_out(message, &told, &call).await,
                Worker::Command(commands) => commands.run(message, &told, &call).await,
            }
        };
        let mut work = std::pin::pin!(work);
        let why = tokio::select! {
            biased;
            reply = &mut work => return reply,
            () = attempt.discarded() => "the run was cancelled".to_owned(),
            why = self.too_late(&call) => why,
        };
        if !call.withdraw() {
            return Reply::not_run(format!("{why} before the worker had the message"));
        }
        // With a worker on standard streams, the message stays in flight and keeps its permit until
        // the worker answers or has been replaced. Calls of other workers are dropped: the
        // connection is closed, the process killed.
        if let Worker::Exec(_) = &*self.worker {
            drop(work.await);
        }
        Reply::unknown(why)
    }

    /// Resolves when the timeout of a call that has begun is over, with words for that.
    pub(super) async fn too_late(&self, call: &Call) -> String {
        call.0.begins.cancelled().await;
        let Some(timeout) = self.timeout else {
            return std::future::pending().await;
        };
        tokio::time::sleep(timeout).await;
        format!("no answer within {timeout:?} (`timeout`)")
    }

    pub(super) fn outcome(&self, reply: Reply) -> Result<Work, Failure> {
        match reply {
            Reply::Complete(work) => Ok(work),
            Reply::Retry {
                delay: Some(delay),
                reason,
            } => Err(Failure::retry_after(
                delay.min(self.longest_delay),
                shortened(reason),
            )),
            Reply::Retry {
                delay: None,
                reason,
            }
            | Reply::TooLong { reason } => Err(Failure::retry(shortened(reason))),
            // It asks for a time that the message needs, so the longest back-off is no limit, only
            // the default.
            Reply::Later { delay, reason } => Err(Failure::later(
                delay.unwrap_or(self.longest_delay),
                shortened(reason),
            )),
            Reply::DeadLetter { reason } => Err(Failure::permanent(shortened(reason))),
            Reply::Unknown { reason } => Err(Failure::unknown(shortened(reason))),
            Reply::NotRun { reason } => Err(Failure::not_run(shortened(reason))),
        }
    }
}

/// The attempt as a worker gets it.
#[derive(Clone, Debug)]
pub(crate) struct AttemptInfo {
    /// The same for every attempt and delivery of the message.
    pub(crate) idempotency_key: String,
    pub(crate) number: u32,
    pub(crate) recovered: bool,
    pub(crate) fencing_token: Option<u64>,
}

impl AttemptInfo {
    pub(crate) fn of(attempt: &Attempt) -> Self {
        Self {
            idempotency_key: attempt.idempotency_key(STEP),
            number: attempt.number(),
            recovered: attempt.recovered(),
            fencing_token: attempt.fencing_token(),
        }
    }

    /// Makes a first attempt.
    #[cfg(test)]
    pub(crate) fn first(idempotency_key: &str) -> Self {
        Self {
            idempotency_key: idempotency_key.to_owned(),
            number: 1,
            recovered: false,
            fencing_token: None,
        }
    }
}

/// The reason on one line, cut to the longest that is kept.
fn shortened(mut reason: String) -> String {
    let end = (0..=REASON_MAX_BYTES.min(reason.len()))
        .rev()
        .find(|end| reason.is_char_boundary(*end));
    reason.truncate(end.unwrap_or_default());
    one_line(&reason)
}

/// The result of a worker, as it is stored with the key.
///
/// In the record it is JSON: `null` when it is empty, otherwise an object with one of `json`,
/// `text` and `base64`, and with `content_type` if the worker named one.
#[derive(Debug)]
pub(crate) enum Work {
    Nothing,
    Result {
        content_type: Option<String>,
        body: ResultBody,
    },
    /// Larger than the limit: the work is done, and its result is not kept.
    TooLarge {
        most: usize,
    },
    /// The work is done, and its result is no JSON.
    NoJson,
}

#[derive(Debug)]
pub(crate) enum ResultBody {
    Json(Box<RawValue>),
    Bytes(Bytes),
}

impl Work {
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

impl Serialize for Work {
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

impl<'de> Deserialize<'de> for Work {
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
        let work = Work::of_bytes(content_type.map(str::to_owned), Bytes::from_static(body));
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
        assert!(serde_json::to_string(&Work::TooLarge { most: 1 }).is_err());
    }

    #[test]
    fn reasons_are_short_and_have_no_control_characters() {
        assert_eq!(shortened("a\u{1b}[b".to_owned()), "a[b");
        assert_eq!(
            shortened("no\nsuch\taccount\u{2028}7".to_owned()),
            "no such account 7"
        );
        assert_eq!(
            shortened("user\u{202e}gpj.exe\u{2066}".to_owned()),
            "usergpj.exe"
        );
        assert_eq!(shortened("ö".repeat(600)).len(), 1024);
    }
}
