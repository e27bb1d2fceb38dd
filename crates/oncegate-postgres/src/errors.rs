//! Maps each server error to what it means to the caller. No error is ever an answer about a key.
//!
//! Errors are classified by SQLSTATE, never by their text, which is translated and may quote data.

use std::error::Error as _;

use deadpool_postgres::PoolError;
use oncegate_core::store::StoreError;
use oncegate_runtime::transactional::{CommitError, Excuse};
use rustls::CertificateError;
use tokio_postgres::Error;
use tokio_postgres::error::Severity;

/// Advice to create the tables, for every error about missing tables.
pub(super) const REMEDY: &str = "run `oncegate migrate`, or call PostgresStore::create_schema(), as a role with DDL rights, and grant \
     the consumer's role SELECT, INSERT, UPDATE and DELETE on the tables (`oncegate migrate --print` prints the statements)";

/// The most characters of the server's error text that an error repeats.
const MAX_DETAIL_CHARS: usize = 160;

const LOCK_NOT_AVAILABLE: &str = "55P03";

/// The error for the caller, and whether to try again before returning it.
#[derive(Debug)]
pub(super) struct Trouble {
    pub(super) error: StoreError,
    /// Nothing was executed, and the cause is probably gone at the next try.
    pub(super) passing: bool,
    /// Nothing was executed, because another transaction holds one of the rows.
    pub(super) row_held: bool,
    /// Nothing was executed, because a row or an entry of an index is damaged.
    pub(super) damaged: bool,
    /// Nothing was executed, because of a serialization failure or a deadlock.
    pub(super) crossed: bool,
}

impl Trouble {
    /// Returns what it means to the transaction of the statement: it is rolled back.
    pub(super) fn rolled_back(self) -> CommitError {
        let error = self.error.into();
        if self.crossed {
            CommitError::Conflict(error)
        } else {
            CommitError::RolledBack(error)
        }
    }
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self {
            error,
            passing: false,
            row_held: false,
            damaged: false,
            crossed: false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Not executed, and likely to succeed at the next try at once.
    Passing,
    /// Not executed: try again later.
    Unavailable,
    /// Not executed: the configuration or the server must be changed first.
    Refused,
}

use Class::{Passing, Refused, Unavailable};

/// A statement that was prepared is prepared no more, or was already.
const POOLED: &str = "a pooler gives statements to sessions that did not prepare them: set max_prepared_statements of PgBouncer \
                      above zero (1.21 or later), or pool_mode = session";

/// The meanings of SQLSTATEs, by their prefixes; the first line that matches counts.
#[rustfmt::skip]
const MEANINGS: &[(&str, Class, &str)] = &[
    ("40001", Passing, "the transaction crossed another one"),
    ("40P01", Passing, "the transaction was chosen to end a deadlock"),
    ("22012", Refused, "a statement was not executed in the transaction that was begun for it: set pool_mode of a pooler \
                        to transaction or session, and default_transaction_deferrable to off"),
    ("25P02", Refused, "an earlier statement of the transaction has failed"),
    ("57P01", Passing, "the server ended the session"),
    ("57P02", Passing, "another session of the server crashed"),
    ("57P05", Passing, "the server ended an idle session"),
    ("25P03", Passing, "the server ended a session that was idle in its transaction"),
    ("57P03", Unavailable, "the server is starting or stopping"),
    ("57014", Unavailable, "the statement was cancelled or took too long (statement_timeout)"),
    (LOCK_NOT_AVAILABLE, Unavailable, "no lock in time (lock_timeout): another transaction holds the row"),
    ("53300", Unavailable, "the server has too many connections (max_connections)"),
    ("53100", Unavailable, "the server's disk is full"),
    ("53200", Unavailable, "the server is out of memory"),
    ("53", Unavailable, "the server lacks a resource"),
    ("58", Unavailable, "the server's system failed"),
    ("25006", Unavailable, "the server accepts no writes: it is a standby, or read-only"),
    ("08P01", Refused, "the server, or a pooler before it, refuses the settings of the connection"),
    ("08", Unavailable, "the connection to the server failed"),
    ("28", Refused, "the server refuses the user, or its password in the URL or the store's `password` (in Rust `password_file`)"),
    ("26000", Refused, POOLED),
    ("42P05", Refused, POOLED),
    ("3D000", Refused, "the database does not exist"),
    ("42501", Refused, "the role lacks rights; `oncegate migrate --print --role NAME` prints what to grant"),
    ("42P01", Refused, "the tables are missing"),
    ("3F000", Refused, "the schema is missing"),
    ("42703", Refused, "the tables are of another format"),
    ("XX001", Refused, "the server found damaged data: restore it from a backup"),
    ("XX002", Refused, "the server found a damaged index: REINDEX TABLE oncegate_records"),
];

/// The error for data that a standby has returned, which may be old: an address that is shared by
/// servers, or a pooler, may lead to one.
pub(super) fn standby() -> StoreError {
    StoreError::unavailable("the server is a standby: name its primary in the URL")
}

/// Converts an error from before a commit was sent.
pub(super) fn not_executed(error: &Error) -> Trouble {
    let Some(answered) = error.as_db_error() else {
        return without_an_answer(error);
    };
    answered_with(answered.code().code(), answered.message())
}

/// Converts a server error with this SQLSTATE and text.
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
    let crossed = excuse(state) == Some(Excuse::Conflict);
    Trouble {
        error,
        passing: class == Passing,
        row_held: state == LOCK_NOT_AVAILABLE,
        damaged: matches!(state, "XX001" | "XX002"),
        crossed,
    }
}

/// Converts an error after a commit was sent: an answer of the server settles the outcome, silence
/// does not.
pub(super) fn in_doubt(error: &Error) -> Trouble {
    match error.as_db_error() {
        // A session that is ended while it commits may have committed.
        Some(answered) if !is_about_the_session(answered.code().code()) => not_executed(error),
        _ => {
            StoreError::unknown("the connection was lost while the transaction was being committed")
                .into()
        }
    }
}

/// Returns the excuse of a statement for an error with this SQLSTATE; `None` if it is its fault.
pub(super) fn excuse(state: &str) -> Option<Excuse> {
    match state {
        "40001" | "40P01" => Some(Excuse::Conflict),
        "57P01" | "57P02" | "57P03" => Some(Excuse::ConnectionLost),
        _ if state.starts_with("08") => Some(Excuse::ConnectionLost),
        _ => None,
    }
}

/// Converts an error of the check whether the standbys have a confirmed commit.
pub(super) fn unconfirmed(error: &Error) -> Trouble {
    StoreError::unknown(format!(
        "the standbys did not confirm the commit: {}",
        not_executed(error).error
    ))
    .into()
}

/// Returns whether the server has reported the failure of a statement that commits by itself. A
/// session that continues has rolled it back; one that ends may have committed before.
pub(super) fn is_rolled_back(error: &Error) -> bool {
    error
        .as_db_error()
        .is_some_and(|answered| answered.parsed_severity() == Some(Severity::Error))
}

/// Converts an error of the pool.
pub(super) fn no_connection(error: &PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => not_executed(error).error,
        PoolError::Timeout(_) => StoreError::unavailable("no connection in time"),
        _ => StoreError::unavailable("the pool has no connection"),
    }
}

fn meaning(state: &str) -> (Class, &'static str) {
    let found = MEANINGS
        .iter()
        .find(|(begins, ..)| state.starts_with(begins));
    found.map_or(
        (Refused, "the server answered an error"),
        |&(_, class, text)| (class, text),
    )
}

/// Returns whether a SQLSTATE means that the session ends, so that the outcome of its last
/// statement is unknown.
pub(super) fn is_about_the_session(state: &str) -> bool {
    ["57P", "08", "25P03", "58", "XX"]
        .iter()
        .any(|begins| state.starts_with(begins))
}

fn without_an_answer(error: &Error) -> Trouble {
    if error.is_closed() {
        let lost = Trouble::from(StoreError::unavailable("the connection was lost"));
        return Trouble {
            passing: true,
            ..lost
        };
    }
    // The reason is somewhere in the chain of causes; the outer errors say only that it failed.
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(io) = source.downcast_ref::<std::io::Error>() {
            if let Some(tls) = io
                .get_ref()
                .and_then(|inner| inner.downcast_ref::<rustls::Error>())
            {
                return not_secured(tls).into();
            }
            // The client's error for a server that does not accept writes.
            if io.kind() == std::io::ErrorKind::PermissionDenied && io.raw_os_error().is_none() {
                return StoreError::unavailable(meaning("25006").1).into();
            }
            // Connecting and reading fail with errors of the system, which contain an address at
            // most.
            return StoreError::unavailable(format!("the connection failed: {}", io.kind())).into();
        }
        cause = source.source();
    }
    let text = error.to_string();
    if text.starts_with("error connecting") || text.starts_with("timeout") {
        return StoreError::unavailable("the server cannot be reached").into();
    }
    if text.starts_with("invalid configuration") {
        return StoreError::refused("the server asks for a password: set it in the URL, or as the store's `password` (in Rust `password_file`)").into();
    }
    if text.starts_with("error performing TLS") {
        let why = error.source().map(ToString::to_string).unwrap_or_default();
        let words = if why.contains("hostname") {
            "TLS needs the server's name: give host in the URL beside hostaddr"
        } else {
            "the server has no TLS: set sslmode=disable in the URL, or enable it there"
        };
        return StoreError::refused(words).into();
    }
    StoreError::unavailable("the exchange with the server broke").into()
}

/// The error for a connection that TLS did not protect: the parameter that decides it, and the
/// reason.
fn not_secured(error: &rustls::Error) -> StoreError {
    use rustls::Error::{AlertReceived, InvalidCertificate};
    let parameter = match error {
        InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "the server's certificate does not name the host of the URL (sslmode=verify-full)",
        // Another authority of the same name.
        InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            "the server's certificate is not signed by an authority of sslrootcert (the store's `tls_root`)"
        }
        InvalidCertificate(_) => "the server's certificate cannot be accepted",
        AlertReceived(_) => {
            "the server does not accept the client's certificate (sslcert and sslkey; the store's `tls_client`, in a \
             configuration `tls_certificate` and `tls_key`)"
        }
        _ => "no TLS with the server",
    };
    StoreError::refused(format!("{parameter}: {error}"))
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
        for (state, doubtful) in [
            ("57P01", true),
            ("08006", true),
            ("40001", false),
            ("53100", false),
        ] {
            assert_eq!(is_about_the_session(state), doubtful, "{state}");
        }
    }
}
