//! What each error of the server means to a caller. None of them is ever an answer about a key.
//!
//! They are told apart by SQLSTATE, never by their text, which is translated and may quote data.

use std::error::Error as _;

use deadpool_postgres::PoolError;
use oncegate_core::store::StoreError;
use tokio_postgres::Error;
use tokio_postgres::error::Severity;

use super::schema::REMEDY;

/// The most characters of the server's own words that an error repeats.
const MAX_DETAIL_CHARS: usize = 160;

const LOCK_NOT_AVAILABLE: &str = "55P03";

/// What to tell the caller, and whether it is worth trying again before telling him.
#[derive(Debug)]
pub(super) struct Trouble {
    pub(super) error: StoreError,
    /// Nothing was executed, and the cause is likely over by the next try.
    pub(super) passing: bool,
    /// Nothing was executed, because somebody holds one of the rows.
    pub(super) row_held: bool,
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self { error, passing: false, row_held: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Not executed, and likely to work at once on the next try.
    Passing,
    /// Not executed: try again later.
    Unavailable,
    /// Not executed: somebody must change something first.
    Refused,
}

use Class::{Passing, Refused, Unavailable};

/// What a SQLSTATE means, by its beginning; the first line that fits counts.
#[rustfmt::skip]
const MEANINGS: &[(&str, Class, &str)] = &[
    ("40001", Passing, "the transaction crossed another one"),
    ("40P01", Passing, "the transaction was chosen to end a deadlock"),
    ("25P02", Refused, "an earlier statement of the transaction has failed"),
    ("57P01", Passing, "the server ended the session"),
    ("57P02", Passing, "another session of the server crashed"),
    ("57P05", Passing, "the server ended an idle session"),
    ("25P03", Passing, "the server ended a session that was idle in its transaction"),
    ("57P03", Unavailable, "the server is starting or stopping"),
    ("57014", Unavailable, "the statement was cancelled or took too long (statement_timeout)"),
    (LOCK_NOT_AVAILABLE, Unavailable, "a lock was not to be had in time (lock_timeout): somebody holds the row"),
    ("53300", Unavailable, "the server has too many connections (max_connections)"),
    ("53100", Unavailable, "the server's disk is full"),
    ("53200", Unavailable, "the server is out of memory"),
    ("53", Unavailable, "the server is short of something"),
    ("58", Unavailable, "the server's system failed"),
    ("25006", Unavailable, "the server takes no writes: it is a standby, or read-only"),
    ("08P01", Refused, "the server, or a pooler before it, does not take the connection as it is asked for"),
    ("08", Unavailable, "the connection to the server failed"),
    ("28", Refused, "the server refuses the user or the password"),
    ("3D000", Refused, "the database does not exist"),
    ("42501", Refused, "the role lacks rights; `oncegate sql --store postgres --role NAME` prints what to grant"),
    ("42P01", Refused, "the tables are missing"),
    ("3F000", Refused, "the schema is missing"),
    ("42703", Refused, "the tables are of another format"),
    ("XX001", Refused, "the server found damaged data"),
    ("XX002", Refused, "the server found a damaged index"),
];

/// What an error means while nothing has been committed, or could have been.
pub(super) fn not_executed(error: &Error) -> Trouble {
    let Some(answered) = error.as_db_error() else {
        return without_an_answer(error);
    };
    answered_with(answered.code().code(), answered.message())
}

/// What it means that the server answered an error of this SQLSTATE, in these words.
pub(super) fn answered_with(state: &str, message: &str) -> Trouble {
    let (class, text) = meaning(state);
    let error = match class {
        Passing | Unavailable => StoreError::unavailable(format!("{text} (SQLSTATE {state})")),
        Refused if matches!(state, "42P01" | "3F000" | "42703") => {
            StoreError::refused(format!("{text} (SQLSTATE {state}): {REMEDY}"))
        }
        // These name a table or a role, and quote no data.
        Refused if state == "42501" || state.starts_with("28") => {
            let words: String = message.chars().take(MAX_DETAIL_CHARS).collect();
            StoreError::refused(format!("{text} (SQLSTATE {state}): {words}"))
        }
        Refused => StoreError::refused(format!("{text} (SQLSTATE {state})")),
    };
    Trouble { error, passing: class == Passing, row_held: state == LOCK_NOT_AVAILABLE }
}

/// What an error means once a commit was on its way: an answer of the server settles it, silence does not.
pub(super) fn in_doubt(error: &Error) -> Trouble {
    match error.as_db_error() {
        // A session that is ended while it commits may have committed.
        Some(answered) if !is_about_the_session(answered.code().code()) => not_executed(error),
        _ => StoreError::unknown("the connection was lost while the transaction was being committed").into(),
    }
}

/// What an error means of the question whether the standbys have a commit that was answered.
pub(super) fn unconfirmed(error: &Error) -> Trouble {
    StoreError::unknown(format!("the standbys did not confirm the commit: {}", not_executed(error).error))
        .into()
}

/// Whether the server has answered that a statement which commits by itself has failed. A session that goes on has
/// rolled it back; one that ends may have committed before.
pub(super) fn is_rolled_back(error: &Error) -> bool {
    error.as_db_error().is_some_and(|answered| answered.parsed_severity() == Some(Severity::Error))
}

/// Why the pool has no connection to give.
pub(super) fn no_connection(error: &PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => not_executed(error).error,
        PoolError::Timeout(_) => StoreError::unavailable("no connection was to be had in time"),
        _ => StoreError::unavailable("the pool gives no connection"),
    }
}

fn meaning(state: &str) -> (Class, &'static str) {
    let found = MEANINGS.iter().find(|(begins, ..)| state.starts_with(begins));
    found.map_or((Refused, "the server answered an error"), |&(_, class, text)| (class, text))
}

/// Whether a SQLSTATE says that the session ends, and so nothing about its last statement.
pub(super) fn is_about_the_session(state: &str) -> bool {
    ["57P", "08", "25P03", "58", "XX"].iter().any(|begins| state.starts_with(begins))
}

fn without_an_answer(error: &Error) -> Trouble {
    if error.is_closed() {
        let lost = Trouble::from(StoreError::unavailable("the connection was lost"));
        return Trouble { passing: true, ..lost };
    }
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(io) = source.downcast_ref::<std::io::Error>() {
            // What the client says of a server that is no target for writes.
            if io.kind() == std::io::ErrorKind::PermissionDenied && io.raw_os_error().is_none() {
                return StoreError::unavailable(meaning("25006").1).into();
            }
            // Connecting and reading fail by the system's own words, which hold an address at most.
            return StoreError::unavailable(format!("the connection failed: {}", io.kind())).into();
        }
        cause = source.source();
    }
    let text = error.to_string();
    if text.starts_with("error connecting") || text.starts_with("timeout") {
        return StoreError::unavailable("the server cannot be reached").into();
    }
    if text.starts_with("invalid configuration") || text.starts_with("error performing TLS") {
        return StoreError::refused(
            "the connection's settings do not fit the server: a password is missing, or TLS is asked for. For \
             TLS bring a pool: PostgresStore::from_pool()",
        )
        .into();
    }
    StoreError::unavailable("the conversation with the server broke").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sqlstate_has_its_class() {
        for (state, class) in [
            ("40001", Passing),
            ("40P01", Passing),
            ("57P01", Passing),
            ("57P03", Unavailable),
            ("57014", Unavailable),
            ("53300", Unavailable),
            ("53100", Unavailable),
            ("53400", Unavailable),
            ("25006", Unavailable),
            ("55P03", Unavailable),
            ("08006", Unavailable),
            ("42501", Refused),
            ("42P01", Refused),
            ("28P01", Refused),
            ("28000", Refused),
            ("3D000", Refused),
            ("22021", Refused),
        ] {
            assert_eq!(meaning(state).0, class, "{state}");
        }
    }

    #[test]
    fn only_an_answer_about_the_statement_settles_a_commit() {
        for (state, doubtful) in [("57P01", true), ("08006", true), ("40001", false), ("53100", false)] {
            assert_eq!(is_about_the_session(state), doubtful, "{state}");
        }
    }
}
