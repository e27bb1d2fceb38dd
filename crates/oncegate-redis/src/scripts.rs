//! The requests that run the Lua scripts. `replies` decodes the answers.

use std::borrow::Cow;
use std::time::Duration;

use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::{Record, Recovery, State, StoreTime, TAIL, Token, TokenTag};
use oncegate_core::rules::{Operation, REOPENED, Reply, cut_reason, resolved};
use oncegate_core::store::{Command, StoreError};
use redis::{Cmd, Value};

use super::buckets::{Buckets, Names};
use super::first_attempt::{self, FirstAttempt};
use super::layout;
use super::replies::{self, RawReply};
use super::request::{OVERHEAD_BYTES, Request, What};
use super::slots;
use super::sources::{COMPACT, NAMES, Source, VERBS, Verb};
use super::witnesses::{Completed, Witness};

/// The scripts as they are sent.
#[derive(Clone, Debug)]
pub(super) struct Scripts {
    sources: [Source; VERBS],
    durable: bool,
    /// `true` if first attempts use shortcuts.
    shortcuts: bool,
    buckets: Option<Buckets>,
    /// The script that precedes every verb when completions are kept in buckets.
    compact: Cow<'static, str>,
}

impl Default for Scripts {
    fn default() -> Self {
        Self {
            sources: Source::all(),
            durable: false,
            shortcuts: true,
            buckets: None,
            compact: COMPACT.into(),
        }
    }
}

impl Scripts {
    /// Sets whether a settled record is written once more, so that its durability can be confirmed.
    pub(super) fn durable(self, durable: bool) -> Self {
        Self { durable, ..self }
    }

    /// Keeps completions without a result in buckets: each verb runs through `compact.lua`, and no
    /// shortcut is used.
    pub(super) fn in_buckets(mut self, buckets: Buckets) -> Self {
        let compact = &self.compact;
        for source in self.sources.iter_mut().take(Verb::Describe as usize) {
            // The line with the flags has to stay the first one.
            let text = match source.text.split_once('\n') {
                Some((flags, verb)) if flags.starts_with("#!") => {
                    format!("{flags}\n{compact}{verb}")
                }
                _ => format!("{compact}{}", source.text),
            };
            *source = Source::new(text);
        }
        Self {
            buckets: Some(buckets),
            shortcuts: false,
            ..self
        }
    }

    /// The name of the script with this digest, if it is one of these.
    pub(super) fn name_of(&self, sha: &str) -> Option<&'static str> {
        let mut named = NAMES.into_iter().zip(&self.sources);
        named
            .find(|(_, source)| source.sha.eq_ignore_ascii_case(sha))
            .map(|(name, _)| name)
    }

    /// Uses the rules' scripts for everything, to prove that shortcuts give the same answers.
    #[cfg(feature = "testing")]
    pub(super) fn alone(self) -> Self {
        Self {
            shortcuts: false,
            ..self
        }
    }

    /// Replaces the one occurrence of `from` in a script, to prove that a test detects it.
    ///
    /// # Errors
    /// When there is no such script, or the script does not contain the text exactly once.
    #[cfg(feature = "testing")]
    pub(super) fn rewrite(&mut self, name: &str, from: &str, to: &str) -> Result<(), String> {
        if name == "compact" {
            self.compact = rewritten(name, &self.compact, from, to)?.into();
            return Ok(());
        }
        if !NAMES.contains(&name) {
            return Err(format!("there is no {name}.lua"));
        }
        for (_, source) in NAMES
            .iter()
            .zip(&mut self.sources)
            .filter(|(known, _)| **known == name)
        {
            *source = Source::new(rewritten(name, &source.text, from, to)?);
        }
        Ok(())
    }

    /// The requests that load every script.
    pub(super) fn load(&self) -> impl ExactSizeIterator<Item = Cmd> + '_ {
        self.sources.iter().map(|source| {
            let mut cmd = Cmd::with_capacity(3, source.text.len() + 16);
            cmd.arg("SCRIPT").arg("LOAD").arg(source.text.as_bytes());
            cmd
        })
    }

    pub(super) fn evalsha(&self, verb: Verb, words: usize, bytes: usize) -> Cmd {
        let mut cmd = Cmd::with_capacity(words, OVERHEAD_BYTES + bytes);
        cmd.arg("EVALSHA").arg(self.sha(verb));
        cmd
    }

    pub(super) fn sha(&self, verb: Verb) -> &str {
        &self
            .sources
            .get(verb as usize)
            .expect("there is a source for each verb")
            .sha
    }

    fn call(&self, verb: Verb, key: &StoreKey, payload_bytes: usize) -> Cmd {
        let mut cmd = self.evalsha(verb, 9, key.as_str().len() + payload_bytes);
        match self.buckets {
            None => cmd.arg("1").arg(key.as_str()),
            Some(buckets) => {
                let Names {
                    record,
                    bucket,
                    field,
                } = buckets.names(key);
                cmd.arg("2").arg(record).arg(bucket).arg(&field)
            }
        };
        cmd
    }

    /// The operation that completes a record.
    pub(super) fn complete(
        &self,
        key: &StoreKey,
        token: &Token,
        fingerprint: [u8; 7],
        result: &[u8],
        retention_ms: u64,
    ) -> Cmd {
        let mut cmd = self.call(Verb::Complete, key, result.len());
        cmd.arg(&layout::first_attempt(token.as_bytes(), fingerprint));
        layout::add_completed(&mut cmd, token.tag(), fingerprint, result);
        cmd.arg(retention_ms);
        cmd
    }

    /// The slot of a record in a cluster.
    pub(super) fn slot(&self, key: &StoreKey) -> u16 {
        self.buckets
            .map_or_else(|| slots::slot(key.as_str()), |buckets| buckets.slot(key))
    }

    pub(super) fn buckets(&self) -> Option<Buckets> {
        self.buckets
    }

    /// The request for `command`: a shortcut if there is one, or else the script.
    pub(super) fn request(&self, command: &Command) -> Request {
        let first = if self.shortcuts {
            FirstAttempt::of(command)
        } else {
            None
        };
        match (first, self.buckets, &command.operation) {
            (Some(first), ..) => Request::first(first),
            (None, Some(buckets), Operation::Extend { token, lease }) => {
                self.extend_own(buckets, &command.key, token, *lease)
            }
            _ => self.script(command),
        }
    }

    /// The heartbeat of a record that is not in its bucket, as every claim is.
    ///
    /// While a slot moves, a node refuses calls with several keys (TRYAGAIN), but not those with
    /// one.
    fn extend_own(
        &self,
        buckets: Buckets,
        key: &StoreKey,
        token: &Token,
        lease: Duration,
    ) -> Request {
        let mut cmd = self.evalsha(Verb::ExtendOwn, 6, key.as_str().len());
        cmd.arg("1")
            .arg(buckets.names(key).record)
            .arg(token.as_bytes())
            .arg(layout::millis(lease + TAIL));
        Request::new(cmd, OVERHEAD_BYTES + key.as_str().len())
    }

    /// Decodes the answer to [`request`](Self::request); `None` when the script has to run.
    pub(super) fn settled(
        &self,
        command: &Command,
        answer: RawReply,
    ) -> Option<Result<Reply, StoreError>> {
        if self.buckets.is_some() && matches!(command.operation, Operation::Extend { .. }) {
            // A record that is not under its own key may be in its bucket.
            return Some(replies::of_script(command, answer))
                .filter(|reply| !matches!(reply, Ok(Reply::NotOwner)));
        }
        let is_short = self.shortcuts
            && match command.operation {
                Operation::Claim { fenced, .. } => !fenced,
                // Only a script answers with a string.
                Operation::Complete { .. } => !matches!(answer, Ok(Value::BulkString(_))),
                _ => false,
            };
        if is_short {
            first_attempt::settled(command, answer, self.durable)
        } else {
            Some(replies::of_script(command, answer))
        }
    }

    /// The request that runs the script of `command`.
    pub(super) fn script(&self, command: &Command) -> Request {
        let key = &command.key;
        let mut completed = None;
        let (cmd, payload_bytes) = match &command.operation {
            Operation::Claim {
                token,
                lease,
                fingerprint,
                fenced,
                longest_lease,
            } => {
                let cmd = self.claim(key, *token, *lease, *fingerprint, *fenced, *longest_lease);
                (cmd, 0)
            }
            Operation::Extend { token, lease } => (self.extend(key, token, *lease), 0),
            Operation::Complete {
                token,
                fingerprint,
                result,
                retention,
            } => {
                let fingerprint = layout::fingerprint_bytes(*fingerprint);
                let retention_ms = layout::millis(*retention);
                completed = Some(Completed::of(key, token.tag(), retention_ms));
                let cmd = self.complete(key, token, fingerprint, result, retention_ms);
                (cmd, result.len())
            }
            Operation::Release {
                token,
                delay,
                end,
                reason,
            } => {
                let reason = cut_reason(reason);
                let mut cmd = self.call(Verb::Release, key, reason.len());
                cmd.arg(token.as_bytes()).arg(layout::millis(*delay + TAIL));
                cmd.arg(end.as_str()).arg(&reason);
                (cmd, reason.len())
            }
            Operation::Fail {
                token,
                reason,
                retention,
            } => {
                let reason = cut_reason(reason);
                let mut cmd = self.call(Verb::Fail, key, reason.len());
                cmd.arg(token.as_bytes());
                cmd.arg(layout::millis(*retention)).arg(&reason);
                (cmd, reason.len())
            }
            Operation::HandOver { by: TokenTag(tag) } => {
                let mut cmd = self.call(Verb::HandOver, key, 0);
                cmd.arg(tag);
                (cmd, 0)
            }
            Operation::Reopen { expected } => self.reopen(key, expected),
            Operation::Resolve {
                expected,
                token,
                resolution,
                retention,
            } => {
                // The expiry of a record is no part of its bytes.
                let ended = resolved(expected, *token, resolution, StoreTime::default());
                self.resolve(key, expected, &ended, *retention)
            }
        };
        let mut request = Request::new(cmd, OVERHEAD_BYTES + key.as_str().len() + payload_bytes);
        request.completed = completed;
        // A heartbeat does not wait for durability.
        request.confirm = !matches!(command.operation, Operation::Extend { .. });
        request
    }

    fn claim(
        &self,
        key: &StoreKey,
        token: Token,
        lease: Duration,
        fingerprint: Option<Fingerprint>,
        fenced: bool,
        longest_lease: Duration,
    ) -> Cmd {
        let record =
            layout::first_attempt(token.as_bytes(), layout::fingerprint_bytes(fingerprint));
        let mut cmd = self.call(Verb::Claim, key, 0);
        // The server numbers the attempt when it creates the fencing token.
        match record.split_last() {
            Some((_attempt, unnumbered)) if fenced => cmd.arg(unnumbered),
            _ => cmd.arg(&record),
        };
        cmd.arg(layout::millis(lease + TAIL));
        cmd.arg(layout::millis(longest_lease.saturating_add(TAIL)));
        if self.durable {
            cmd.arg("1");
        }
        cmd
    }

    fn extend(&self, key: &StoreKey, token: &Token, lease: Duration) -> Cmd {
        let mut cmd = self.call(Verb::Extend, key, 0);
        cmd.arg(token.as_bytes()).arg(layout::millis(lease + TAIL));
        cmd
    }

    /// The command that reopens a record, and the number of its payload bytes.
    fn reopen(&self, key: &StoreKey, expected: &Record) -> (Cmd, usize) {
        let expected_bytes = layout::encode(expected);
        let payload_bytes = expected_bytes.len();
        let mut cmd = self.call(Verb::Reopen, key, payload_bytes);
        cmd.arg(expected_bytes)
            .arg(layout::encode(&reopened(expected)));
        cmd.arg(layout::millis(TAIL) - 1);
        (cmd, payload_bytes)
    }

    /// The command that ends a record for an operator, and the number of its payload bytes.
    fn resolve(
        &self,
        key: &StoreKey,
        expected: &Record,
        ended: &Record,
        retention: Duration,
    ) -> (Cmd, usize) {
        let expected_bytes = layout::encode(expected);
        let ended_bytes = layout::encode(ended);
        let payload_bytes = expected_bytes.len() + ended_bytes.len();
        let mut cmd = self.call(Verb::Resolve, key, payload_bytes);
        cmd.arg(expected_bytes).arg(ended_bytes);
        cmd.arg(layout::millis(retention));
        (cmd, payload_bytes)
    }

    /// The request that reads a record and the time until it expires.
    pub(super) fn read(&self, key: &StoreKey) -> Request {
        Request::new(
            self.call(Verb::Read, key, 0),
            OVERHEAD_BYTES + key.as_str().len(),
        )
    }

    /// The request that reads a record whose message will be acknowledged if it is completed.
    pub(super) fn prefetch(&self, key: &StoreKey) -> Request {
        let mut request = self.read(key);
        if let (true, What::Cmd(cmd)) = (self.durable, &mut request.what) {
            cmd.arg("1");
        }
        request.confirmed()
    }

    /// The witness that shows whether a completion is lost.
    pub(super) fn witness(&self, completed: &Completed) -> Option<Witness> {
        let Completed {
            key,
            tag,
            retention_ms,
        } = completed;
        // Only a primary runs this script: a replica may not have the completion yet.
        let read = self.sources.get(Verb::Read as usize)?.sha.as_bytes();
        let mut question = vec![b"EVALSHA".to_vec(), read.to_vec()];
        match self.buckets {
            None => question.extend([b"1".to_vec(), key.as_str().into()]),
            // The record is in its bucket, or was.
            Some(buckets) => {
                let Names {
                    record,
                    bucket,
                    field,
                } = buckets.names(key);
                question.extend([b"2".to_vec(), record.into(), bucket.into(), field.into()]);
            }
        }
        Witness::new(
            self.slot(key),
            question,
            *tag,
            Duration::from_millis(*retention_ms),
        )
    }

    /// The request that reads a descriptor, which only a primary answers: a comparison that nothing
    /// equals.
    pub(super) fn described(&self, key: &str) -> Request {
        let mut cmd = self.evalsha(Verb::Describe, 6, key.len());
        cmd.arg("1").arg(key).arg("").arg("");
        Request::new(cmd, OVERHEAD_BYTES + key.len())
    }

    /// The request that compares and sets a descriptor.
    pub(super) fn describe(&self, key: &str, expected: Option<&str>, proposed: &str) -> Request {
        let bytes = proposed.len() + expected.map_or(0, str::len);
        let mut cmd = self.evalsha(Verb::Describe, 6, key.len() + bytes);
        cmd.arg("1").arg(key).arg(proposed);
        if let Some(expected) = expected {
            cmd.arg(expected);
        }
        Request::new(cmd, OVERHEAD_BYTES + key.len() + bytes).confirmed()
    }
}

#[cfg(feature = "testing")]
fn rewritten(name: &str, text: &str, from: &str, to: &str) -> Result<String, String> {
    match text.matches(from).count() {
        1 => Ok(text.replace(from, to)),
        found => Err(format!("{name}.lua has `{from}` {found} times")),
    }
}

/// The state of a reopened record, as in [`oncegate_core::rules`].
fn reopened(expected: &Record) -> Record {
    let fencing_token = match expected.state {
        State::Pending { fencing_token, .. } | State::Released { fencing_token, .. } => {
            fencing_token
        }
        State::Completed { .. } | State::Failed { .. } => None,
    };
    let reason = REOPENED.to_owned();
    let state = State::Released {
        by: TokenTag::NONE,
        attempt: 0,
        recovery: Recovery::None,
        fencing_token,
        reason,
    };
    Record {
        expires_at: StoreTime::default(),
        fingerprint: None,
        state,
    }
}
