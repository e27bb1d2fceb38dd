//! The Lua scripts, and the requests and replies that go with them.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, State, StoreTime, TAIL, TokenTag};
use oncegate_core::rules::{Grant, Operation, REOPENED, Reply, Verdict, cut_reason};
use oncegate_core::store::{Command, Looked, StoreError};
use redis::{Arg, Cmd, Value};

use super::buckets::{Buckets, Names};
use super::layout::{self, Garbage};
use super::link::Answer;
use super::losses::Witness;
use super::{native, slots};
use crate::batch::Item;

/// About what a request costs on the wire besides its key and its payload.
const OVERHEAD_BYTES: usize = 160;

const COMPACT: &str = include_str!("../../lua/compact.lua");

/// One script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Claim,
    Extend,
    Complete,
    Release,
    Fail,
    HandOver,
    Reopen,
    Look,
    /// The last one: it is about no record.
    Describe,
}

const VERBS: usize = 9;

/// The scripts as they are sent.
#[derive(Clone, Debug)]
pub(super) struct Scripts {
    sources: [Source; VERBS],
    durable: bool,
    /// Whether plain commands stand for scripts where they can.
    plain: bool,
    buckets: Option<Buckets>,
    /// What goes before every verb when completions are kept in buckets.
    compact: Cow<'static, str>,
}

#[derive(Clone, Debug)]
struct Source {
    text: Cow<'static, str>,
    sha: Box<str>,
}

impl Source {
    fn new(text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        let sha = redis::Script::new(&text).get_hash().into();
        Self { text, sha }
    }
}

impl Default for Scripts {
    fn default() -> Self {
        // The order is that of `Verb`.
        let sources = [
            Source::new(include_str!("../../lua/claim.lua")),
            Source::new(include_str!("../../lua/extend.lua")),
            Source::new(include_str!("../../lua/complete.lua")),
            Source::new(include_str!("../../lua/release.lua")),
            Source::new(include_str!("../../lua/fail.lua")),
            Source::new(include_str!("../../lua/hand_over.lua")),
            Source::new(include_str!("../../lua/reopen.lua")),
            Source::new(include_str!("../../lua/look.lua")),
            Source::new(include_str!("../../lua/describe.lua")),
        ];
        Self { sources, durable: false, plain: true, buckets: None, compact: COMPACT.into() }
    }
}

impl Scripts {
    /// Whether what is found settled is written once more, so that its durability can be waited for.
    pub(super) fn durable(self, durable: bool) -> Self {
        Self { durable, ..self }
    }

    /// Keeps completions without a result in buckets: each verb works through `compact.lua`, and no plain command will do.
    pub(super) fn in_buckets(mut self, buckets: Buckets) -> Self {
        let compact = &self.compact;
        for source in self.sources.iter_mut().take(Verb::Describe as usize) {
            // The line with the flags has to stay the first one.
            let text = match source.text.split_once('\n') {
                Some((flags, verb)) if flags.starts_with("#!") => format!("{flags}\n{compact}{verb}"),
                _ => format!("{compact}{}", source.text),
            };
            *source = Source::new(text);
        }
        Self { buckets: Some(buckets), plain: false, ..self }
    }

    /// Asks for everything by a script, to prove that plain commands say the same.
    #[cfg(feature = "testing")]
    pub(super) fn alone(self) -> Self {
        Self { plain: false, ..self }
    }

    /// Replaces the one place where `from` stands in a script, to prove that a test notices.
    ///
    /// # Errors
    /// When there is no such script, or the text does not stand in it exactly once.
    #[cfg(feature = "testing")]
    pub(super) fn rewrite(&mut self, name: &str, from: &str, to: &str) -> Result<(), String> {
        /// The files without their ending, in the order of `Verb`.
        const NAMES: [&str; VERBS] =
            ["claim", "extend", "complete", "release", "fail", "hand_over", "reopen", "look", "describe"];
        let rewritten = |text: &str| match text.matches(from).count() {
            1 => Ok(text.replace(from, to)),
            found => Err(format!("{name}.lua has `{from}` {found} times")),
        };
        if name == "compact" {
            self.compact = rewritten(&self.compact)?.into();
            return Ok(());
        }
        let mut named = NAMES.iter().zip(&mut self.sources);
        let source = named.find(|(known, _)| **known == name).map(|(_, source)| source);
        let source = source.ok_or_else(|| format!("there is no {name}.lua"))?;
        *source = Source::new(rewritten(&source.text)?);
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

    fn evalsha(&self, verb: Verb, bytes: usize) -> Cmd {
        let source = self.sources.get(verb as usize).expect("there is a source for each verb");
        let mut cmd = Cmd::with_capacity(9, OVERHEAD_BYTES + bytes);
        cmd.arg("EVALSHA").arg(&*source.sha);
        cmd
    }

    fn call(&self, verb: Verb, key: &StoreKey, payload_bytes: usize) -> Cmd {
        let mut cmd = self.evalsha(verb, key.as_str().len() + payload_bytes);
        match self.buckets {
            None => cmd.arg("1").arg(key.as_str()),
            Some(buckets) => {
                let Names { record, bucket, field } = buckets.names(key);
                cmd.arg("2").arg(record).arg(bucket).arg(&field)
            }
        };
        cmd
    }

    /// The slot of a record in a cluster.
    pub(super) fn slot(&self, key: &StoreKey) -> u16 {
        self.buckets.map_or_else(|| slots::slot(key.as_str()), |buckets| buckets.slot(key))
    }

    pub(super) fn buckets(&self) -> Option<Buckets> {
        self.buckets
    }

    /// What asks a server for `command`: a plain command if one is enough there, or else the script.
    pub(super) fn request(&self, command: &Command, has_ifeq: bool) -> Request {
        let plain = if self.plain { native::request(command, has_ifeq) } else { None };
        plain.unwrap_or_else(|| self.script(command))
    }

    /// What the answer to [`request`](Self::request) says; `None` when the script has to be asked.
    pub(super) fn settled(&self, command: &Command, answer: Answer) -> Option<Result<Reply, StoreError>> {
        let is_plain = self.plain
            && match command.operation {
                Operation::Claim { fenced, .. } => !fenced,
                // Only a script answers in words.
                Operation::Complete { .. } => !matches!(answer, Ok(Value::BulkString(_))),
                _ => false,
            };
        if is_plain { native::settled(command, answer, self.durable) } else { Some(said(command, answer)) }
    }

    /// What asks the script for `command`.
    pub(super) fn script(&self, command: &Command) -> Request {
        let key = &command.key;
        let mut payload_bytes = 0;
        let cmd = match &command.operation {
            Operation::Claim { token, lease, fingerprint, fenced } => {
                let record = layout::first_attempt(token.as_bytes(), layout::fingerprint_bytes(*fingerprint));
                let mut cmd = self.call(Verb::Claim, key, 0);
                match record.split_last() {
                    Some((_attempt, unnumbered)) if *fenced => cmd.arg(unnumbered),
                    _ => cmd.arg(&record),
                };
                cmd.arg(layout::millis(*lease + TAIL));
                if self.durable {
                    cmd.arg("1");
                }
                cmd
            }
            Operation::Extend { token, lease } => {
                let mut cmd = self.call(Verb::Extend, key, 0);
                cmd.arg(token.as_bytes()).arg(layout::millis(*lease + TAIL));
                cmd
            }
            Operation::Complete { token, fingerprint, result, retention } => {
                payload_bytes = result.len();
                let fingerprint = layout::fingerprint_bytes(*fingerprint);
                let completed = layout::completed(token.tag(), fingerprint, result);
                let mut cmd = self.call(Verb::Complete, key, payload_bytes);
                cmd.arg(&layout::first_attempt(token.as_bytes(), fingerprint)).arg(&completed);
                cmd.arg(layout::millis(*retention));
                cmd
            }
            Operation::Release { token, delay, counted, reason } => {
                let reason = cut_reason(reason);
                payload_bytes = reason.len();
                let mut cmd = self.call(Verb::Release, key, payload_bytes);
                cmd.arg(token.as_bytes()).arg(layout::millis(*delay + TAIL));
                cmd.arg(if *counted { "1" } else { "0" }).arg(reason);
                cmd
            }
            Operation::Fail { token, reason, retention } => {
                let reason = cut_reason(reason);
                payload_bytes = reason.len();
                let mut cmd = self.call(Verb::Fail, key, payload_bytes);
                cmd.arg(token.as_bytes()).arg(layout::millis(*retention)).arg(reason);
                cmd
            }
            Operation::HandOver => self.call(Verb::HandOver, key, 0),
            Operation::Reopen { expected } => {
                let expected_bytes = layout::encode(expected);
                payload_bytes = expected_bytes.len();
                let mut cmd = self.call(Verb::Reopen, key, payload_bytes);
                cmd.arg(expected_bytes).arg(layout::encode(&reopened(expected)));
                cmd.arg(layout::millis(TAIL) - 1);
                cmd
            }
        };
        let completes = matches!(command.operation, Operation::Complete { .. });
        // A heartbeat waits for nobody.
        let confirm = !matches!(command.operation, Operation::Extend { .. });
        Request {
            completes,
            confirm,
            ..Request::new(cmd, OVERHEAD_BYTES + key.as_str().len() + payload_bytes)
        }
    }

    /// What asks for a record and the time it has left.
    pub(super) fn look(&self, key: &StoreKey) -> Request {
        Request::new(self.call(Verb::Look, key, 0), OVERHEAD_BYTES + key.as_str().len())
    }

    /// The same, for what will be acknowledged if it is completed.
    pub(super) fn look_ahead(&self, key: &StoreKey) -> Request {
        let mut request = self.look(key);
        if self.durable {
            request.cmd.arg("1");
        }
        request.confirmed()
    }

    /// What shows whether a request that completed is forgotten: how to ask, the tag, and the retention.
    pub(super) fn witness(&self, cmd: &Cmd) -> Option<Witness> {
        let words = cmd.args_iter().filter_map(|arg| match arg {
            Arg::Simple(bytes) => Some(bytes),
            _ => None,
        });
        let words: Vec<&[u8]> = words.collect();
        let look = self.sources.get(Verb::Look as usize)?.sha.as_bytes();
        let (question, record, retention) = match *words.as_slice() {
            // SET, PX and IFEQ; or EVALSHA, the script, the number of keys, and the first attempt.
            [b"SET", key, record, _, retention, ..] | [_, _, _, key, _, record, retention] => {
                (vec![b"GET".as_slice(), key], record, retention)
            }
            // Here the record is in its bucket, or it was.
            [evalsha, _, keys, key, bucket, field, _, record, retention] => {
                (vec![evalsha, look, keys, key, bucket, field], record, retention)
            }
            _ => return None,
        };
        let tag = record.get(1..5)?.try_into().ok()?;
        let retention = std::str::from_utf8(retention).ok()?.parse().ok()?;
        Witness::new(&question, tag, Duration::from_millis(retention))
    }

    /// What compares and sets a descriptor.
    pub(super) fn describe(&self, key: &str, expected: Option<&str>, proposed: &str) -> Request {
        let bytes = proposed.len() + expected.map_or(0, str::len);
        let mut cmd = self.evalsha(Verb::Describe, key.len() + bytes);
        cmd.arg("1").arg(key).arg(proposed);
        if let Some(expected) = expected {
            cmd.arg(expected);
        }
        Request::new(cmd, OVERHEAD_BYTES + key.len() + bytes).confirmed()
    }
}

/// One command on its way to the server.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) cmd: Cmd,
    /// The node answers only after ASKING: the key's slot is on its way there.
    pub(super) asking: bool,
    /// The answer counts only when all before it is as durable as was asked for.
    pub(super) confirm: bool,
    /// It writes a completion.
    pub(super) completes: bool,
    bytes: usize,
}

impl Request {
    pub(super) fn new(cmd: Cmd, bytes: usize) -> Self {
        Self { cmd, asking: false, confirm: false, completes: false, bytes }
    }

    pub(super) fn confirmed(self) -> Self {
        Self { confirm: true, ..self }
    }

    /// The same, for a node that a redirection named for this once.
    pub(super) fn asking(self, asking: bool) -> Self {
        Self { asking, ..self }
    }

    /// A bare read of a record.
    pub(super) fn get(key: &str) -> Self {
        let mut cmd = Cmd::with_capacity(2, key.len() + 4);
        cmd.arg("GET").arg(key);
        Self::new(cmd, key.len() + 24)
    }

    /// A small question.
    pub(super) fn plain(cmd: Cmd) -> Self {
        Self::new(cmd, OVERHEAD_BYTES)
    }

    /// How the server keeps its data; not every user may ask.
    pub(super) fn persistence() -> Self {
        let mut cmd = redis::cmd("CONFIG");
        cmd.arg("GET").arg("appendfsync").arg("save");
        Self::new(cmd, 48)
    }

    /// What the server says of itself.
    pub(super) fn info() -> Self {
        Self::new(redis::cmd("INFO"), 16)
    }
}

impl Item for Request {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What a reopened record becomes, as in [`oncegate_core::rules`].
fn reopened(expected: &Record) -> Record {
    let fence = match expected.state {
        State::Pending { fence, .. } | State::Released { fence, .. } => fence,
        State::Completed { .. } | State::Failed { .. } => None,
    };
    let reason = REOPENED.to_owned();
    let state = State::Released { by: TokenTag::NONE, attempt: 0, recovered: false, fence, reason };
    Record { expires_at: StoreTime::default(), fingerprint: None, state }
}

/// What a script answered to `command`.
pub(super) fn said(command: &Command, answer: Answer) -> Result<Reply, StoreError> {
    let said = super::bulk_string(answer, &command.key)?.unwrap_or_default();
    reply(&command.operation, said).map_err(|why| StoreError::unreadable(command.key.clone(), why))
}

fn reply(operation: &Operation, said: Vec<u8>) -> Result<Reply, Garbage> {
    if matches!(operation, Operation::Claim { .. }) {
        return verdict(Bytes::from(said));
    }
    match said.as_slice() {
        b"H" => Ok(Reply::Held { recreated: false }),
        b"R" => Ok(Reply::Held { recreated: true }),
        b"L" => Ok(Reply::Lost),
        _ => Err("the script said something unheard of"),
    }
}

fn verdict(said: Bytes) -> Result<Reply, Garbage> {
    let letter = *said.first().ok_or("claim.lua said nothing")?;
    let rest = said.slice(1..);
    let verdict = match letter.to_ascii_uppercase() {
        state @ (b'P' | b'Q' | b'R') => Verdict::Granted(layout::grant(state, &rest)?),
        b'N' => Verdict::Granted(Grant { reopened: true, ..layout::grant(b'P', &rest)? }),
        b'C' => Verdict::Completed { result: rest },
        b'B' => Verdict::Busy { retry_in: Duration::from_millis(number(&rest)?) },
        state @ (b'F' | b'G') => Verdict::Failed { reason: layout::text(&rest), handed_over: state == b'G' },
        b'M' => Verdict::Mismatch,
        _ => return Err("claim.lua said something unheard of"),
    };
    Ok(Reply::Verdict { verdict, uncompared: letter.is_ascii_lowercase() })
}

/// The record that look.lua showed.
pub(super) fn shown(said: Vec<u8>) -> Result<Looked, Garbage> {
    let said = Bytes::from(said);
    let mut parts = said.splitn(3, |byte| *byte == b' ');
    let (Some(now), Some(expires_at), Some(record)) = (parts.next(), parts.next(), parts.next()) else {
        return Err("look.lua said something unheard of");
    };
    let now = StoreTime::from_micros(number(now)?);
    // It says -1 of a key that never expires.
    let expires_at = number(expires_at).map_err(|_| "it has no expiry")?;
    let record = layout::decode(said.slice_ref(record), StoreTime::from_millis(expires_at))?;
    Ok(Looked { now, record })
}

fn number(digits: &[u8]) -> Result<u64, Garbage> {
    let text = std::str::from_utf8(digits).map_err(|_| "a number that is none")?;
    text.parse().map_err(|_| "a number that is none")
}
