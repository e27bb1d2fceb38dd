//! The callers of the API: their tokens, their scopes, and what each of them may hold.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::record::Token;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// The shortest token, in bytes: one that can be guessed protects nothing.
const MIN_TOKEN_BYTES: usize = 16;
/// The most bytes of a file with tokens.
const MAX_TOKEN_FILE_BYTES: u64 = 64 * 1024;

/// A program that uses the API: its name, its tokens, its scopes and its limits.
pub struct Caller {
    name: String,
    tokens: Vec<String>,
    files: Vec<PathBuf>,
    scopes: BTreeSet<String>,
    max_claims: usize,
    max_bytes: usize,
    max_waiting: usize,
}

impl Caller {
    /// A caller of this name, without a token and a scope yet.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            tokens: Vec::new(),
            files: Vec::new(),
            scopes: BTreeSet::new(),
            max_claims: 1_000,
            max_bytes: 16 * 1024 * 1024,
            max_waiting: 100,
        }
    }

    /// A bearer token of at least 16 characters. Several are valid at once.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.tokens.push(token.into());
        self
    }

    /// A file with bearer tokens, one a line. It is read again while the server runs: write the new
    /// token below the old one, let the callers change, and take the old line out.
    #[must_use]
    pub fn token_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.files.push(path.into());
        self
    }

    /// Adds scopes that the caller may use.
    #[must_use]
    pub fn scopes<S: Into<String>>(mut self, scopes: impl IntoIterator<Item = S>) -> Self {
        self.scopes.extend(scopes.into_iter().map(Into::into));
        self
    }

    /// The most claims that the caller holds at once, 1,000 by default, as far as this server
    /// knows.
    #[must_use]
    pub fn max_claims(mut self, claims: usize) -> Self {
        self.max_claims = claims;
        self
    }

    /// The most bytes of request bodies of the caller in memory at once, 16 MiB by default.
    #[must_use]
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// The most requests of the caller that wait for a result at once, 100 by default. A further
    /// one is answered at once.
    #[must_use]
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.max_waiting = requests;
        self
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn named_scopes(&self) -> impl Iterator<Item = &str> {
        self.scopes.iter().map(String::as_str)
    }

    pub(super) fn byte_limit(&self) -> usize {
        self.max_bytes
    }

    /// Reads every token.
    fn read_tokens(&self) -> Result<Vec<blake3::Hash>, TokenError> {
        let mut tokens = self.tokens.clone();
        for path in &self.files {
            tokens.extend(tokens_of(path).map_err(|source| TokenError::File {
                path: path.clone(),
                source,
            })?);
        }
        if tokens.is_empty() {
            return Err(TokenError::None {
                caller: self.name.clone(),
            });
        }
        if tokens.iter().any(|token| token.len() < MIN_TOKEN_BYTES) {
            return Err(TokenError::TooShort {
                caller: self.name.clone(),
            });
        }
        Ok(tokens.iter().map(|token| digest(token)).collect())
    }
}

impl fmt::Debug for Caller {
    /// Shows no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("name", &self.name)
            .field("scopes", &self.scopes)
            .finish_non_exhaustive()
    }
}

/// The reason why the tokens of a caller cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// A file cannot be read.
    #[error("the token file {path} cannot be read: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// There is no token.
    #[error("the caller {caller} has no token: give it one, or a file with one a line")]
    None {
        /// The caller's name.
        caller: String,
    },
    /// A token can be guessed.
    #[error(
        "a token of the caller {caller} has fewer than {MIN_TOKEN_BYTES} characters: make one with `openssl rand -hex 32`"
    )]
    TooShort {
        /// The caller's name.
        caller: String,
    },
}

fn tokens_of(path: &Path) -> io::Result<Vec<String>> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path)?
        .take(MAX_TOKEN_FILE_BYTES)
        .read_to_string(&mut text)?;
    Ok(text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect())
}

fn digest(token: &str) -> blake3::Hash {
    blake3::hash(token.as_bytes())
}

/// A caller while the server runs.
pub(super) struct KnownCaller {
    pub(super) caller: Caller,
    /// Digests, which are compared in constant time.
    tokens: RwLock<Vec<blake3::Hash>>,
    claims: Mutex<HashMap<Token, Seen>>,
    pub(super) bytes: Arc<Semaphore>,
    pub(super) waiting: Arc<Semaphore>,
}

/// A claim that this server has granted or extended.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// The time at which this server first saw it: its run lasts no longer than `max_run` from then
    /// on.
    first: Instant,
    until: Instant,
}

impl KnownCaller {
    /// Reads the tokens of a caller.
    pub(super) fn new(caller: Caller) -> Result<Self, TokenError> {
        let tokens = RwLock::new(caller.read_tokens()?);
        Ok(Self {
            tokens,
            claims: Mutex::default(),
            bytes: permits(caller.max_bytes),
            waiting: permits(caller.max_waiting),
            caller,
        })
    }

    /// Returns whether `token` is one of this caller's. Every one is compared, in constant time.
    fn has(&self, token: &blake3::Hash) -> bool {
        self.tokens
            .read()
            .iter()
            .fold(false, |found, known| found | (known == token))
    }

    pub(super) fn may_use(&self, scope: &str) -> bool {
        self.caller.scopes.contains(scope)
    }

    /// Returns whether one more claim may be granted, or the one with this token again: its answer
    /// was lost. Those whose lease is over do not count.
    pub(super) fn may_claim(&self, again: Option<&Token>) -> bool {
        let mut claims = self.claims.lock();
        if again.is_some_and(|token| claims.contains_key(token)) {
            return true;
        }
        if claims.len() >= self.caller.max_claims {
            let now = Instant::now();
            claims.retain(|_, seen| seen.until > now);
        }
        claims.len() < self.caller.max_claims
    }

    /// Notes that a claim was granted or extended at `now`.
    pub(super) fn note_held(&self, token: Token, lease: Duration, now: Instant) {
        let mut claims = self.claims.lock();
        let until = now + lease;
        let is_full = claims.len() >= self.caller.max_claims;
        match claims.get_mut(&token) {
            Some(seen) => seen.until = until,
            // Granted by another server, or before a restart: it is not counted here.
            None if is_full => {}
            None => {
                claims.insert(token, Seen { first: now, until });
            }
        }
    }

    /// Returns whether the claim has been held for longer than `max_run`, as far as this server
    /// knows.
    pub(super) fn is_overrun(&self, token: &Token, max_run: Duration, now: Instant) -> bool {
        let claims = self.claims.lock();
        claims
            .get(token)
            .is_some_and(|seen| now.saturating_duration_since(seen.first) >= max_run)
    }

    /// Notes that a claim has ended.
    pub(super) fn note_ended(&self, token: &Token) {
        self.claims.lock().remove(token);
    }
}

fn permits(count: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)))
}

/// All callers, found by their token.
pub(super) struct Callers {
    known: Vec<Arc<KnownCaller>>,
    read_at: Mutex<Instant>,
    /// Held while the files are read.
    reading: tokio::sync::Mutex<()>,
}

/// The age at which what was read of the files is read again.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(5);
/// The same when a token is unknown: it may be a new one.
const READ_AGAIN_FOR_UNKNOWN: Duration = Duration::from_millis(500);

impl Callers {
    pub(super) fn new(known: Vec<KnownCaller>) -> Self {
        Self {
            known: known.into_iter().map(Arc::new).collect(),
            read_at: Mutex::new(Instant::now()),
            reading: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the caller that has this token.
    pub(super) async fn find(self: &Arc<Self>, token: &str) -> Option<Arc<KnownCaller>> {
        let token = digest(token);
        if self.is_due(READ_AGAIN_AFTER)
            && let Ok(_reading) = self.reading.try_lock()
        {
            self.read_again().await;
        }
        if let Some(found) = self.has(&token) {
            return Some(found);
        }
        // Who comes while the files are read waits for what is in them.
        let _reading = self.reading.lock().await;
        if self.is_due(READ_AGAIN_FOR_UNKNOWN) {
            self.read_again().await;
        }
        self.has(&token)
    }

    fn has(&self, token: &blake3::Hash) -> Option<Arc<KnownCaller>> {
        // Every caller is asked, so that the time does not tell which one is known.
        self.known
            .iter()
            .fold(
                None,
                |found, known| {
                    if known.has(token) { Some(known) } else { found }
                },
            )
            .cloned()
    }

    /// Returns whether the files are to be read again, and lets one request do it.
    fn is_due(&self, after: Duration) -> bool {
        let mut read_at = self.read_at.lock();
        let now = Instant::now();
        let is_due = now.saturating_duration_since(*read_at) >= after;
        if is_due {
            *read_at = now;
        }
        is_due
    }

    /// Reads the files of every caller. Those of one whose files cannot be read stay as they are.
    async fn read_again(self: &Arc<Self>) {
        let callers = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || {
            for known in callers.known.iter().filter(|known| known.has_files()) {
                match known.caller.read_tokens() {
                    Ok(tokens) => *known.tokens.write() = tokens,
                    Err(error) => {
                        tracing::error!(caller = known.caller.name(), %error, "the tokens stay as they were");
                    }
                }
            }
        });
        if let Err(error) = read.await {
            tracing::error!(%error, "the files with tokens were not read");
        }
    }
}

impl KnownCaller {
    fn has_files(&self) -> bool {
        !self.caller.files.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    const OLD: &str = "0123456789abcdef-old";
    const NEW: &str = "0123456789abcdef-new";

    #[tokio::test(start_paused = true)]
    async fn a_file_rotates_tokens_and_one_that_is_gone_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, format!("{OLD}\n")).unwrap();
        let known = KnownCaller::new(Caller::new("cron").token_file(&path)).unwrap();
        let callers = Arc::new(Callers::new(vec![known]));
        assert!(callers.find(OLD).await.is_some());
        assert!(callers.find(NEW).await.is_none());

        std::fs::write(&path, format!("{OLD}\n\n  {NEW}\n")).unwrap();
        tokio::time::advance(READ_AGAIN_FOR_UNKNOWN).await;
        assert!(callers.find(NEW).await.is_some());
        assert!(callers.find(OLD).await.is_some());

        std::fs::write(&path, NEW).unwrap();
        tokio::time::advance(READ_AGAIN_AFTER).await;
        assert!(callers.find(OLD).await.is_none(), "it was taken out");

        std::fs::remove_file(&path).unwrap();
        tokio::time::advance(READ_AGAIN_AFTER).await;
        assert!(callers.find(NEW).await.is_some());
        assert!(callers.find("").await.is_none());
    }

    #[test]
    fn a_caller_without_a_good_token_is_refused() {
        let refused = |caller: Caller| KnownCaller::new(caller).err().unwrap().to_string();
        assert!(refused(Caller::new("cron")).contains("has no token"));
        assert!(refused(Caller::new("cron").token("short")).contains("openssl rand"));
        assert!(refused(Caller::new("cron").token_file("/nowhere/at/all")).contains("/nowhere"));
    }

    #[tokio::test(start_paused = true)]
    async fn claims_count_until_their_lease_is_over() {
        let known = KnownCaller::new(Caller::new("cron").token(OLD).max_claims(2)).unwrap();
        let lease = Duration::from_secs(30);
        for bits in 1..=2 {
            assert!(known.may_claim(None));
            known.note_held(Token::from_bits(bits), lease, Instant::now());
        }
        assert!(!known.may_claim(None));
        known.note_ended(&Token::from_bits(1));
        assert!(known.may_claim(None));
        known.note_held(Token::from_bits(3), lease, Instant::now());
        tokio::time::advance(lease / 2).await;
        known.note_held(Token::from_bits(2), lease, Instant::now());
        tokio::time::advance(lease / 2).await;
        assert!(known.may_claim(None), "the third has lapsed");
        let second = Token::from_bits(2);
        assert!(known.is_overrun(&second, lease, Instant::now()));
        assert!(!known.is_overrun(&second, lease * 2, Instant::now()));
    }
}
