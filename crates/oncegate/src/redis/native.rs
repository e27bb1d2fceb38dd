//! Plain commands that stand for a script where one of them is enough, over the same bytes.
//!
//! A claim without a fence is `SET … NX GET`: nothing was there, or what was there shows that it is settled. The completion
//! of a first attempt is `SET … IFEQ`, where the server has it: the owner knows every byte of its record. Whatever that
//! does not settle is asked of the script, so the rules stand there and nowhere else.

use bytes::Bytes;
use oncegate_core::record::{Recovery, TAIL};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::{Command, StoreError};
use redis::{Cmd, Value};

use super::checkup::Info;
use super::link::Answer;
use super::scripts::Request;
use super::{errors, layout};

/// The first versions that know `SET … IFEQ`.
const IFEQ_IN_REDIS: (u32, u32) = (8, 4);
const IFEQ_IN_VALKEY: (u32, u32) = (8, 1);

/// What a word of a plain command costs on the wire besides its bytes, and how many there are.
const OVERHEAD_BYTES: usize = 96;

/// Whether a server knows `SET … IFEQ`. One that says so and does not answers with an error, and then the script is asked.
pub(super) fn has_ifeq(info: &Info<'_>) -> bool {
    match info.version("valkey_version") {
        Some(version) => version >= IFEQ_IN_VALKEY,
        None => info.version("redis_version").is_some_and(|version| version >= IFEQ_IN_REDIS),
    }
}

/// The plain command for `command`, if there is one.
pub(super) fn request(command: &Command, has_ifeq: bool) -> Option<Request> {
    let key = command.key.as_str();
    match &command.operation {
        Operation::Claim { token, lease, fingerprint, fenced: false } => {
            let record = layout::first_attempt(token.as_bytes(), layout::fingerprint_bytes(*fingerprint));
            let mut cmd = Cmd::with_capacity(7, OVERHEAD_BYTES + key.len());
            cmd.arg("SET")
                .arg(key)
                .arg(&record)
                .arg("PX")
                .arg(layout::millis(*lease + TAIL))
                .arg("NX")
                .arg("GET");
            Some(Request::new(cmd, OVERHEAD_BYTES + key.len()).confirmed())
        }
        Operation::Complete { token, fingerprint, result, retention } if has_ifeq => {
            let fingerprint = layout::fingerprint_bytes(*fingerprint);
            let first = layout::first_attempt(token.as_bytes(), fingerprint);
            let mut cmd = Cmd::with_capacity(7, OVERHEAD_BYTES + key.len() + result.len());
            cmd.arg("SET").arg(key).arg(layout::completed(token.tag(), fingerprint, result));
            cmd.arg("PX").arg(layout::millis(*retention)).arg("IFEQ").arg(&first);
            let mut request = Request::new(cmd, OVERHEAD_BYTES + key.len() + result.len()).confirmed();
            request.completes = true;
            Some(request)
        }
        _ => None,
    }
}

/// What a plain command's answer settles; `None` when the script has to be asked.
///
/// With `durable`, what is found settled is the script's business: it must be written once more.
pub(super) fn settled(command: &Command, answer: Answer, durable: bool) -> Option<Result<Reply, StoreError>> {
    let granted = Grant { attempt: 1, recovery: Recovery::None, fence: None, reopened: false };
    match (&command.operation, answer) {
        (_, Err(error)) => Some(Err(error)),
        // Of a full server the script asks more gently, and what is unheard of here it may know.
        (_, Ok(Value::ServerError(error))) if matches!(error.code(), "OOM" | "ERR") => None,
        (_, Ok(Value::ServerError(error))) => Some(Err(errors::store_error(&error, Some(&command.key)))),
        (Operation::Claim { .. }, Ok(Value::Nil)) => {
            Some(Ok(Reply::Verdict { verdict: Verdict::Granted(granted), uncompared: false }))
        }
        (Operation::Claim { fingerprint, .. }, Ok(Value::BulkString(record))) if !durable => {
            verdict(layout::fingerprint_bytes(*fingerprint), record.into()).map(Ok)
        }
        (Operation::Complete { .. }, Ok(Value::Okay)) => Some(Ok(Reply::Held { recreated: false })),
        _ => None,
    }
}

/// What a settled record says to a claim with this fingerprint; `None` of any other record.
fn verdict(ours: [u8; 7], record: Bytes) -> Option<Reply> {
    let (theirs, verdict) = layout::settled(record)?;
    let uncompared = ours != theirs;
    let is_same_specification = ours.first() != Some(&0) && ours.first() == theirs.first();
    if uncompared && is_same_specification {
        return Some(Reply::Verdict { verdict: Verdict::Mismatch, uncompared: false });
    }
    Some(Reply::Verdict { verdict, uncompared })
}
