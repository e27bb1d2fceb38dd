//! Decodes what the server answers: the replies of the scripts, records as plain reads return them,
//! and errors.

use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, State, StoreTime};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::{Command, RecordSnapshot, StoreError};
use redis::Value;

use super::errors;
use super::layout::{self, Garbage};

/// The server's answer to one command of a pipeline. Errors of the server are values here.
pub(super) type RawReply = Result<Value, StoreError>;

/// Decodes the answer of the script for `command`.
pub(super) fn of_script(command: &Command, answer: RawReply) -> Result<Reply, StoreError> {
    let bytes = bulk_string(answer, &command.key)?.unwrap_or_default();
    reply(&command.operation, bytes).map_err(|why| StoreError::unreadable(command.key.clone(), why))
}

fn reply(operation: &Operation, bytes: Vec<u8>) -> Result<Reply, Garbage> {
    if matches!(operation, Operation::Claim { .. }) {
        return verdict(&Bytes::from(bytes));
    }
    match bytes.as_slice() {
        // "A": the completion was executed before, and its answer was lost.
        b"H" | b"A" => Ok(Reply::Applied { recreated: false }),
        b"R" => Ok(Reply::Applied { recreated: true }),
        b"L" => Ok(Reply::NotOwner),
        _ => Err("the script returned an unexpected answer"),
    }
}

fn verdict(bytes: &Bytes) -> Result<Reply, Garbage> {
    let letter = *bytes.first().ok_or("claim.lua returned nothing")?;
    let rest = bytes.slice(1..);
    let verdict = match letter.to_ascii_uppercase() {
        state @ (b'P' | b'Q' | b'R') => Verdict::Granted(layout::grant(state, &rest)?),
        b'N' => Verdict::Granted(Grant {
            reopened: true,
            ..layout::grant(b'P', &rest)?
        }),
        b'C' => Verdict::Completed { result: rest },
        b'B' => Verdict::Busy {
            retry_in: Duration::from_millis(number(&rest)?),
        },
        state @ (b'F' | b'G') => layout::failed(state, &rest)?,
        b'M' => Verdict::Mismatch,
        _ => return Err("claim.lua returned an unexpected answer"),
    };
    Ok(Reply::Verdict {
        verdict,
        uncompared: letter.is_ascii_lowercase(),
    })
}

/// Decodes the answer of read.lua.
pub(super) fn snapshot(
    answer: RawReply,
    key: &StoreKey,
) -> Result<Option<RecordSnapshot>, StoreError> {
    let record = bulk_string(answer, key)?.map(parse_snapshot).transpose();
    record.map_err(|why| StoreError::unreadable(key.clone(), why))
}

/// The expiry of a record that never expires: the end of the year 9999, as in the scripts.
const NEVER: StoreTime = StoreTime::from_millis(253_402_300_799_000);

/// Decodes the record that read.lua returned.
fn parse_snapshot(bytes: Vec<u8>) -> Result<RecordSnapshot, Garbage> {
    let bytes = Bytes::from(bytes);
    let mut parts = bytes.splitn(3, |byte| *byte == b' ');
    let (Some(now), Some(expires_at), Some(record)) = (parts.next(), parts.next(), parts.next())
    else {
        return Err("read.lua returned an unexpected answer");
    };
    let now = StoreTime::from_micros(number(now)?);
    // The script returns -1 for a key that never expires. A settled record needs no expiry; the age
    // of the others is derived from theirs.
    let expires_at = number(expires_at).ok().map(StoreTime::from_millis);
    let record = layout::decode(bytes.slice_ref(record), expires_at.unwrap_or(NEVER))?;
    let is_settled = matches!(record.state, State::Completed { .. } | State::Failed { .. });
    if expires_at.is_none() && !is_settled {
        return Err("it has no expiry");
    }
    Ok(RecordSnapshot { now, record })
}

/// Decodes the answer of a plain read, which has no expiry.
pub(super) fn record(answer: RawReply, key: &StoreKey) -> Result<Option<Record>, StoreError> {
    let record =
        bulk_string(answer, key)?.map(|said| layout::decode(said.into(), StoreTime::default()));
    record
        .transpose()
        .map_err(|why| StoreError::unreadable(key.clone(), why))
}

/// The server's answer, unless it is an error.
pub(super) fn value(answer: RawReply) -> Result<Value, StoreError> {
    match answer? {
        Value::ServerError(error) => Err(errors::store_error(&error, None)),
        value => Ok(value),
    }
}

/// The bytes that the server returned for `key`, if any.
fn bulk_string(answer: RawReply, key: &StoreKey) -> Result<Option<Vec<u8>>, StoreError> {
    match answer? {
        Value::BulkString(said) => Ok(Some(said)),
        Value::Nil => Ok(None),
        Value::ServerError(error) => Err(errors::store_error(&error, Some(key))),
        _ => Err(StoreError::unknown(
            "the server returned an unexpected answer",
        )),
    }
}

fn number(digits: &[u8]) -> Result<u64, Garbage> {
    let text = std::str::from_utf8(digits).map_err(|_| "it has an invalid number")?;
    text.parse().map_err(|_| "it has an invalid number")
}
