//! Converts a record to the columns of its row, and back.

use bytes::Bytes;
use oncegate_core::key::Fingerprint;
use oncegate_core::record::{FencingToken, Record, Recovery, State, StoreTime, Token, TokenTag};
use rusqlite::types::{FromSql, ToSql};
use rusqlite::{Row, Statement, params};

/// A record as its columns.
pub(super) struct Columns<'a> {
    record: &'a Record,
    state: &'static str,
    owner: &'a [u8],
    attempt: u8,
    recovery: &'static str,
    fencing_token: Option<FencingToken>,
    handed_over: bool,
    reason: &'a str,
    result: Option<&'a [u8]>,
}

impl<'a> Columns<'a> {
    pub(super) fn of(record: &'a Record) -> Self {
        let (name, owner) = match &record.state {
            State::Pending { token, .. } => ("pending", token.as_bytes().as_slice()),
            State::Released { by, .. } => ("released", by.0.as_slice()),
            State::Completed { by, .. } => ("completed", by.0.as_slice()),
            State::Failed { by, .. } => ("failed", by.0.as_slice()),
        };
        let columns = Self {
            record,
            state: name,
            owner,
            attempt: 0,
            recovery: "none",
            fencing_token: None,
            handed_over: false,
            reason: "",
            result: None,
        };
        match &record.state {
            &State::Pending {
                attempt,
                recovery,
                fencing_token,
                ..
            } => Self {
                attempt,
                recovery: recovery.as_str(),
                fencing_token,
                ..columns
            },
            State::Released {
                attempt,
                recovery,
                fencing_token,
                reason,
                ..
            } => {
                let recovery = recovery.as_str();
                Self {
                    attempt: *attempt,
                    recovery,
                    fencing_token: *fencing_token,
                    reason,
                    ..columns
                }
            }
            State::Completed { result, .. } => Self {
                result: Some(result),
                ..columns
            },
            State::Failed {
                attempt,
                handed_over,
                reason,
                ..
            } => Self {
                attempt: *attempt,
                handed_over: *handed_over,
                reason,
                ..columns
            },
        }
    }

    /// Runs [`INSERT`](super::INSERT) for a key or [`UPDATE`](super::UPDATE) for a row's id.
    pub(super) fn run(
        &self,
        statement: &mut Statement<'_>,
        row: &dyn ToSql,
    ) -> rusqlite::Result<usize> {
        statement.execute(params![
            row,
            self.state,
            millis(self.record.expires_at),
            self.owner,
            self.attempt,
            self.recovery,
            self.fencing_token.map(number),
            self.record
                .fingerprint
                .as_ref()
                .map(|fingerprint| fingerprint.as_bytes().as_slice()),
            self.handed_over,
            self.reason,
            self.result,
        ])
    }
}

/// A time as its column holds it.
pub(super) fn millis(time: StoreTime) -> i64 {
    i64::try_from(time.millis()).unwrap_or(i64::MAX)
}

/// A fencing token as its column holds it.
pub(super) fn number(FencingToken(number): FencingToken) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Decodes a row that may contain anything: nothing is guessed, and errors do not contain the data.
///
/// The columns are in the order of [`READ`](super::READ).
pub(super) fn decode(row: &Row<'_>) -> Result<Record, String> {
    let expires_at_ms: i64 = column(row, 1, "expires_at_ms")?;
    let attempt: u8 = column(row, 3, "attempt")?;
    let recovery = match text(row, 4, "recovery")? {
        "none" => Recovery::None,
        "earlier" => Recovery::Earlier,
        "takeover" => Recovery::Takeover,
        _ => return Err("recovery is of no known kind".to_owned()),
    };
    let fencing_token: Option<i64> = column(row, 5, "fencing_token")?;
    let fencing_token = fencing_token.map(|fencing_token| {
        u64::try_from(fencing_token)
            .map(FencingToken)
            .map_err(|_| "fencing_token is negative")
    });
    let fencing_token = fencing_token.transpose()?;
    let fingerprint: Option<[u8; Fingerprint::BYTES]> = column(row, 6, "fingerprint")?;
    let state = match text(row, 0, "state")? {
        "pending" => {
            let token: [u8; 16] = column(row, 2, "owner")?;
            State::Pending {
                token: Token::from(token),
                attempt,
                recovery,
                fencing_token,
            }
        }
        "released" => State::Released {
            by: tag(row)?,
            attempt,
            recovery,
            fencing_token,
            reason: reason(row)?,
        },
        "completed" => {
            let result: Vec<u8> = column(row, 9, "result")?;
            State::Completed {
                by: tag(row)?,
                result: Bytes::from(result),
            }
        }
        "failed" => {
            let handed_over = column(row, 7, "handed_over")?;
            State::Failed {
                by: tag(row)?,
                attempt,
                handed_over,
                reason: reason(row)?,
            }
        }
        _ => return Err("state is of no known kind".to_owned()),
    };
    // No record expires before 1970: as a time, a negative value would make its key new.
    let expires_at_ms = u64::try_from(expires_at_ms).map_err(|_| "expires_at_ms is negative")?;
    let expires_at = StoreTime::from_millis(expires_at_ms);
    Ok(Record {
        expires_at,
        fingerprint: fingerprint.map(Fingerprint::from_bytes),
        state,
    })
}

fn tag(row: &Row<'_>) -> Result<TokenTag, String> {
    column(row, 2, "owner").map(TokenTag)
}

fn reason(row: &Row<'_>) -> Result<String, String> {
    text(row, 8, "reason").map(str::to_owned)
}

fn column<T: FromSql>(row: &Row<'_>, at: usize, name: &str) -> Result<T, String> {
    row.get(at)
        .map_err(|_| format!("column {name} holds something else"))
}

fn text<'r>(row: &'r Row<'_>, at: usize, name: &str) -> Result<&'r str, String> {
    let value = row.get_ref(at).ok().and_then(|value| value.as_str().ok());
    value.ok_or_else(|| format!("column {name} holds something else"))
}
