//! The part of the status page that acts: it pauses and resumes scopes, shows dead letters, and
//! redrives them. It is there only with a token ([`Operate`]).
//!
//! HTTP, forms and pages are known here. What is read and changed is behind the port [`Operator`],
//! which `oncegate run` implements with the code of its commands.
//!
//! Every action needs a session (`session`), which a person begins with the token and a name; the
//! secret of the session in a hidden field of the form; and an `Origin` that is this page. Requests
//! without these change nothing and read no dead letters. The pages need no script: `pages` renders
//! them, `routes` answers requests, `letters` groups and searches.

mod fields;
mod letters;
mod pages;
mod routes;
mod session;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use session::Sessions;

pub(super) use pages::{STYLE, summary};
pub(super) use routes::router;

/// The fewest bytes of a token: it is guessed by trying otherwise.
pub const TOKEN_MIN_BYTES: usize = 16;

/// Lets people act on the page who know the token.
///
/// Given to [`Telemetry::operated_by`](crate::Telemetry::operated_by).
pub struct Operate {
    operator: Arc<dyn Operator>,
    token: Box<TokenSource>,
    sessions: Sessions,
    snapshots: letters::Snapshots,
}

/// Reads the token, each time that it is compared.
type TokenSource = dyn Fn() -> Result<String, String> + Send + Sync;

impl Operate {
    /// Acts by this operator. `token` returns the token as it is now; when it changes, all sessions
    /// end. A token that cannot be read, or has fewer than 16 bytes, is none: no sign-in succeeds.
    pub fn new(
        operator: Arc<dyn Operator>,
        token: impl Fn() -> Result<String, String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            operator,
            token: Box::new(token),
            sessions: Sessions::default(),
            snapshots: letters::Snapshots::default(),
        }
    }

    /// The hash of the token as it is now, which is compared in constant time.
    fn token(&self) -> Result<blake3::Hash, String> {
        let token = (self.token)()?;
        check_token(&token)?;
        Ok(blake3::hash(token.as_bytes()))
    }
}

/// Checks that a token is long enough.
///
/// # Errors
/// Says how long it must be.
pub fn check_token(token: &str) -> Result<(), String> {
    if token.len() < TOKEN_MIN_BYTES {
        return Err(format!(
            "the token has {} bytes, and must have at least {TOKEN_MIN_BYTES}: use a long random text",
            token.len()
        ));
    }
    Ok(())
}

impl fmt::Debug for Operate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operate").finish_non_exhaustive()
    }
}

/// Reads and changes what the page shows. Errors are texts for the person who asked: they name what
/// to change, and hold no secret.
#[async_trait]
pub trait Operator: Send + Sync {
    /// Returns the places of dead letters, by the scopes of their consumers.
    fn places(&self) -> Vec<LetterPlace>;

    /// Returns a number that changes with each redrive that begins or ends: what was read before
    /// may be out of date.
    fn stamp(&self) -> u64;

    /// Reads the dead letters of a scope's consumer, within limits of its own.
    ///
    /// # Errors
    /// When they cannot be read.
    async fn read(&self, scope: &str) -> Result<Letters, String>;

    /// Reads one dead letter with its headers. `None`: it is not there.
    ///
    /// # Errors
    /// When the dead letters cannot be read.
    async fn show(&self, scope: &str, at: &str) -> Result<Option<LetterDetail>, String>;

    /// Begins to redrive dead letters. Returns at once.
    ///
    /// # Errors
    /// When another redrive of the scope runs, or the journal cannot be written; then nothing was
    /// begun.
    async fn redrive(&self, order: RedriveOrder) -> Result<(), String>;

    /// Stops the redrive of a scope. What was not sent stays.
    fn stop_redrive(&self, scope: &str);

    /// Returns the redrives that run, and the last ones that have ended.
    fn redrives(&self) -> Vec<RedriveReport>;

    /// Pauses the consumers of a scope, in every process.
    ///
    /// # Errors
    /// When it is paused already, or the store or the journal cannot be written.
    async fn pause(&self, change: Change) -> Result<(), String>;

    /// Lets the consumers of a paused scope go on.
    ///
    /// # Errors
    /// When it is not paused, or the store or the journal cannot be written.
    async fn resume(&self, change: Change) -> Result<(), String>;
}

/// A change of a scope, with who makes it and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The scope.
    pub scope: String,
    /// The person, by the name that was given with the token.
    pub by: String,
    /// The person's reason, for the journal.
    pub why: String,
}

/// The place of a consumer's dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LetterPlace {
    /// The scope of the consumer.
    pub scope: String,
    /// The topic or queue.
    pub name: String,
    /// The reason that they cannot be read here, if they cannot.
    pub unreadable: Option<String>,
    /// A sentence about what reading them changes, if it changes anything.
    pub cost: Option<&'static str>,
}

/// Dead letters as they were when they were read.
#[derive(Clone, Debug, Default)]
pub struct Letters {
    /// The dead letters, in the order in which they were read.
    pub letters: Vec<Letter>,
    /// The reason that there may be more of them, if only a part was read.
    pub cut: Option<String>,
}

/// A dead letter, without anything of its payload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Letter {
    /// The position: `orders.dead/0@42`.
    pub at: String,
    /// The cause; `foreign` for one that oncegate did not write.
    pub cause: String,
    /// The reason.
    pub reason: String,
    /// The origin of its message.
    pub origin: String,
    /// The key of its record.
    pub key: Option<String>,
    /// The number of attempts.
    pub attempts: Option<u32>,
    /// The time at which it was given up, in milliseconds since the Unix epoch.
    pub failed_at_ms: Option<u64>,
    /// The state since then, in a word.
    pub state: String,
    /// `true` if nothing was done about it yet.
    pub is_open: bool,
}

/// A dead letter with everything that may be shown of it.
#[derive(Clone, Debug, Default)]
pub struct LetterDetail {
    /// The letter.
    pub letter: Letter,
    /// The time of its first failure, in milliseconds since the Unix epoch.
    pub first_failed_at_ms: Option<u64>,
    /// The size of its payload.
    pub payload_bytes: usize,
    /// The names of its headers, and their values if payloads may be shown.
    pub headers: Vec<(String, Option<String>)>,
    /// The payload, if payloads may be shown.
    pub payload: Option<String>,
}

/// A redrive of dead letters that were counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedriveOrder {
    /// The scope, the person and the reason.
    pub change: Change,
    /// The positions of the dead letters. Others are not redriven.
    pub places: BTreeSet<String>,
    /// The most messages a second; `None` for no limit.
    pub rate: Option<u32>,
}

/// A redrive that runs or has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedriveReport {
    /// The scope.
    pub scope: String,
    /// The number of dead letters that were ordered.
    pub wanted: usize,
    /// The number of messages that were sent.
    pub sent: u64,
    /// The number of dead letters that were passed over, because they were completed, are under way
    /// or cannot be sent.
    pub passed: u64,
    /// `true` while it runs.
    pub runs: bool,
    /// The reason that it ended early, or that some could not be sent.
    pub trouble: Option<String>,
    /// The person who has begun it.
    pub by: String,
}
