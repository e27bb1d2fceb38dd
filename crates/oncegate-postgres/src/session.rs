//! The settings of a session, which each of our transactions needs.

use std::time::Duration;

/// Settings with which every statement looks its keys up in the index, one after another in the
/// given order.
///
/// Otherwise a prepared statement that was planned while the table was small would always read the
/// whole table, and with another order two batches could deadlock.
///
/// Up to PostgreSQL 17 a plan that is discouraged and chosen all the same, to read a table of one
/// row for example, costs 10^10, far above `jit_above_cost`: without the last setting such a
/// statement is compiled for tenths of a second, each time.
const PLAN: [(&str, &str); 4] = [
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
];

/// A custom setting, which shows that a session was opened with our settings.
pub(super) const SESSION_MARK: &str = "oncegate.response_timeout_ms";

/// The longest time limit that the server accepts, in milliseconds.
const LONGEST_LIMIT_MS: u128 = i32::MAX as u128;

/// The place where our limits are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sessions {
    /// In each session from its beginning, so that a statement may stand alone.
    Ours,
    /// In each transaction, so that they are valid on any connection, also behind a pooler, which
    /// shares sessions.
    Unconfigured,
}

/// The settings of our transactions, by the server's names.
pub(super) fn settings(response_timeout: Duration) -> Vec<(&'static str, String)> {
    let limit_ms = limit_ms(response_timeout);
    let limits = [
        ("lock_timeout", (limit_ms / 2).to_string()),
        ("statement_timeout", limit_ms.to_string()),
        ("idle_in_transaction_session_timeout", limit_ms.to_string()),
    ];
    limits
        .into_iter()
        .chain(PLAN.map(|(name, value)| (name, value.to_owned())))
        .collect()
}

pub(crate) fn limit_ms(response_timeout: Duration) -> u128 {
    response_timeout.as_millis().clamp(2, LONGEST_LIMIT_MS)
}

/// The `options` of a connection that give its session our settings.
pub(crate) fn session_options(response_timeout: Duration) -> String {
    let further = [
        (
            "default_transaction_isolation",
            r"read\ committed".to_owned(),
        ),
        // Where it is on, `row::MARK` marks nothing.
        ("default_transaction_deferrable", "off".to_owned()),
        (SESSION_MARK, session_mark(response_timeout)),
    ];
    let settings = settings(response_timeout).into_iter().chain(further);
    settings
        .map(|(name, value)| format!(" -c {name}={value}"))
        .collect()
}

/// The value of [`SESSION_MARK`] in a session with our settings.
pub(super) fn session_mark(response_timeout: Duration) -> String {
    limit_ms(response_timeout).to_string()
}
