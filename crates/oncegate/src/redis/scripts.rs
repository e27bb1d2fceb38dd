//! The Lua scripts, and the requests and replies that go with them.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::record::{Record, State, StoreTime, TAIL, TokenTag};
use oncegate_core::rules::{Grant, Operation, REOPENED, Reply, Verdict, cut_reason};
use oncegate_core::store::{Command, Looked};
use redis::{Arg, Cmd};

use super::layout::{self, Garbage};
use super::losses::Witness;
use crate::batch::Item;

/// About what a request costs on the wire besides its key and its payload.
const OVERHEAD_BYTES: usize = 160;

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
    Describe,
}

const VERBS: usize = 9;

/// The scripts as they are sent.
#[derive(Clone, Debug)]
pub(super) struct Scripts {
    sources: [Source; VERBS],
    durable: bool,
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
        Self { sources, durable: false }
    }
}

impl Scripts {
    /// Whether what is found settled is written once more, so that its durability can be waited for.
    pub(super) fn durable(self, durable: bool) -> Self {
        Self { durable, ..self }
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
        let mut named = NAMES.iter().zip(&mut self.sources);
        let source = named.find(|(known, _)| **known == name).map(|(_, source)| source);
        let source = source.ok_or_else(|| format!("there is no {name}.lua"))?;
        let found = source.text.matches(from).count();
        if found != 1 {
            return Err(format!("{name}.lua has `{from}` {found} times"));
        }
        *source = Source::new(source.text.replace(from, to));
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

    fn call(&self, verb: Verb, key: &str, payload_bytes: usize) -> Cmd {
        let source = self.sources.get(verb as usize).expect("there is a source for each verb");
        let mut cmd = Cmd::with_capacity(8, OVERHEAD_BYTES + key.len() + payload_bytes);
        cmd.arg("EVALSHA").arg(&*source.sha).arg("1").arg(key);
        cmd
    }

    /// What asks the server for `command`.
    pub(super) fn request(&self, command: &Command) -> Request {
        let key = command.key.as_str();
        let mut payload_bytes = 0;
        let cmd = match &command.operation {
            Operation::Claim { token, lease, fingerprint, fenced } => {
                let record = first_attempt(token.as_bytes(), layout::fingerprint_bytes(*fingerprint));
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
                let completed = completed(token.tag(), fingerprint, result);
                let mut cmd = self.call(Verb::Complete, key, payload_bytes);
                cmd.arg(&first_attempt(token.as_bytes(), fingerprint)).arg(&completed);
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
        Request { completes, confirm, ..Request::new(cmd, OVERHEAD_BYTES + key.len() + payload_bytes) }
    }

    /// What asks for a record and the time it has left.
    pub(super) fn look(&self, key: &str) -> Request {
        Request::new(self.call(Verb::Look, key, 0), OVERHEAD_BYTES + key.len())
    }

    /// The same, for what will be acknowledged if it is completed.
    pub(super) fn look_ahead(&self, key: &str) -> Request {
        let mut request = self.look(key);
        if self.durable {
            request.cmd.arg("1");
        }
        request.confirmed()
    }

    /// The key, the tag and the retention of a request that completes.
    pub(super) fn witness(cmd: &Cmd) -> Option<Witness> {
        // EVALSHA, the script, the number of keys, the key, the first attempt, the record, the retention.
        let mut args = cmd.args_iter().skip(3).filter_map(|arg| match arg {
            Arg::Simple(bytes) => Some(bytes),
            _ => None,
        });
        let (key, _, record, retention) = (args.next()?, args.next()?, args.next()?, args.next()?);
        let text = |bytes| std::str::from_utf8(bytes).ok();
        let tag = record.get(1..5)?.try_into().ok()?;
        Witness::new(text(key)?, tag, Duration::from_millis(text(retention)?.parse().ok()?))
    }

    /// What compares and sets a descriptor.
    pub(super) fn describe(&self, key: &str, expected: Option<&str>, proposed: &str) -> Request {
        let bytes = proposed.len() + expected.map_or(0, str::len);
        let mut cmd = self.call(Verb::Describe, key, bytes);
        cmd.arg(proposed);
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
    fn new(cmd: Cmd, bytes: usize) -> Self {
        Self { cmd, asking: false, confirm: false, completes: false, bytes }
    }

    fn confirmed(self) -> Self {
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

/// The bytes of an unfenced first attempt, put together on the stack: this is the path of every message.
fn first_attempt(token: &[u8; 16], fingerprint: [u8; 7]) -> [u8; 25] {
    let mut record = [b'P'; 25];
    let (_, rest) = record.split_at_mut(1);
    let (token_place, rest) = rest.split_at_mut(16);
    let (fingerprint_place, attempt_place) = rest.split_at_mut(7);
    token_place.copy_from_slice(token);
    fingerprint_place.copy_from_slice(&fingerprint);
    attempt_place.fill(1);
    record
}

fn completed(TokenTag(tag): TokenTag, fingerprint: [u8; 7], result: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(12 + result.len());
    record.push(b'C');
    record.extend_from_slice(&tag);
    record.extend_from_slice(&fingerprint);
    record.extend_from_slice(result);
    record
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

/// What a script said about `operation`.
pub(super) fn reply(operation: &Operation, said: Vec<u8>) -> Result<Reply, Garbage> {
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
