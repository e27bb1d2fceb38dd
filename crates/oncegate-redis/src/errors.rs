//! Maps each server error to what it means to the caller and to whether the connection is kept.
//!
//! No error is ever an answer about a key.

use std::fmt::Write as _;

use oncegate_core::key::StoreKey;
use oncegate_core::store::StoreError;
use redis::{ErrorKind, RedisError, ServerError, Value};

/// The most characters of the server's error text that an error repeats.
const MAX_DETAIL_CHARS: usize = 160;

/// The action that the caller can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Not executed: try again later.
    Unavailable,
    /// Not executed, and other keys of the same server may be: try again later.
    KeyUnavailable,
    /// Not executed: the configuration or the server must be changed first.
    Refused,
    /// The key holds data that is not a record.
    Unreadable,
}

/// The consequence for the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connection {
    Keep,
    Replace,
}

/// A line of the table: an error code, what it means, and its text.
struct Meaning {
    code: &'static str,
    class: Class,
    connection: Connection,
    text: &'static str,
}

const fn meaning(
    code: &'static str,
    class: Class,
    connection: Connection,
    text: &'static str,
) -> Meaning {
    Meaning {
        code,
        class,
        connection,
        text,
    }
}

const NO_PASSWORD: &str = "the server requires a password: set it in the URL, or as the store's `password` (in Rust \
                           `password_file`)";

const WRONG_PASSWORD: &str = "the server refuses the user name or password: correct them in the URL, or the password in the \
                              store's `password` (in Rust `password_file`)";

/// The beginning of the reason for which rustls does not accept a certificate.
const NOT_ACCEPTED: &str = "invalid peer certificate: ";

/// Also of a key whose redirections come to no end.
const MOVING: &str = "its slot is being moved between nodes of the cluster; if that has ended halfway, finish it \
                      (redis-cli --cluster fix) or take it back (CLUSTER SETSLOT … STABLE)";

/// The beginning of the details of CLUSTERDOWN when only the key's slot is concerned.
const SLOT_NOT_SERVED: &str = "Hash slot not served";

const UNSERVED: Meaning = meaning(
    "CLUSTERDOWN",
    KeyUnavailable,
    Keep,
    "no node of the cluster has its slot: give the slot to one (redis-cli --cluster fix)",
);

use Class::{KeyUnavailable, Refused, Unavailable, Unreadable};
use Connection::{Keep, Replace};

/// Every error code that a server is known to return for a script or a read.
#[rustfmt::skip]
const MEANINGS: &[Meaning] = &[
    meaning("LOADING", Unavailable, Keep, "the server is loading its data"),
    meaning("BUSY", Unavailable, Keep, "a script keeps the server busy"),
    meaning("TRYAGAIN", KeyUnavailable, Keep, MOVING),
    meaning("CLUSTERDOWN", Unavailable, Keep, "the cluster is down"),
    meaning("OOM", Unavailable, Keep, "the server is full (maxmemory): it accepts no new records"),
    meaning("MISCONF", Unavailable, Keep, "the server cannot write its data to disk"),
    meaning("NOREPLICAS", Unavailable, Keep, "the server has too few good replicas (min-replicas-to-write)"),
    meaning("NOSCRIPT", Unavailable, Keep, "the server forgets its scripts as fast as they are loaded"),
    // A demoted primary keeps its connections and answers PING: only a new connection finds the new
    // one.
    meaning("READONLY", Unavailable, Replace, "the server is a replica"),
    meaning("MASTERDOWN", Unavailable, Replace, "the server is a replica without its primary"),
    meaning("UNBLOCKED", Unavailable, Replace, "the server changed its role"),
    // A password may have been set or changed at run time: a new connection shows the current one.
    meaning("NOAUTH", Refused, Replace, NO_PASSWORD),
    meaning("WRONGPASS", Refused, Replace, WRONG_PASSWORD),
    meaning("NOPERM", Refused, Keep, "the user lacks rights"),
    // In a cluster, both are followed and never become an error.
    meaning("MOVED", Refused, Keep, "the server is a node of a cluster: write redis+cluster:// in the URL"),
    meaning("ASK", Refused, Keep, "the server is a node of a cluster: write redis+cluster:// in the URL"),
    // Of a call with several keys, each is then asked for alone.
    meaning("CROSSSLOT", Refused, Keep, "the server refuses keys of several slots in one call"),
    meaning("WRONGTYPE", Unreadable, Keep, "it is not a string"),
    meaning("UNREADABLE", Unreadable, Keep, "it is not a record of format 1"),
];

/// The errors without a code, by the beginning of their text.
#[rustfmt::skip]
const CODELESS: &[Meaning] = &[
    meaning("max number of clients reached", Unavailable, Replace, "the server has too many clients (maxclients)"),
    meaning("This instance has cluster support disabled", Refused, Keep, "the server is not a cluster node: write redis:// in the URL"),
    meaning("WAITAOF cannot be used", Refused, Keep, "Durability::Fsync needs WAITAOF and the append-only file: set appendonly yes"),
    meaning("WAIT cannot be used", Unavailable, Replace, "the server is a replica"),
    meaning("The user executing the script", Refused, Keep, "the user lacks rights that a script needs"),
    meaning("unknown command", Refused, Keep, "the server does not know a command that oncegate needs"),
];

/// Converts a server error for the caller that asked about `key`.
pub(super) fn store_error(error: &ServerError, key: Option<&StoreKey>) -> StoreError {
    let Some(meaning) = find(error) else {
        return StoreError::refused(format!("the server answered an error: {}", words(error)));
    };
    match (meaning.class, key) {
        (KeyUnavailable, Some(key)) => StoreError::KeyUnavailable {
            key: key.clone(),
            reason: meaning.text.into(),
        },
        (Unavailable | KeyUnavailable, _) => StoreError::unavailable(meaning.text),
        (Unreadable, Some(key)) => StoreError::unreadable(key.clone(), meaning.text),
        (Unreadable, None) => StoreError::refused(meaning.text),
        (Refused, _) if meaning.code == "NOPERM" => {
            StoreError::refused(format!("{}: {}", meaning.text, words(error)))
        }
        (Refused, _) => StoreError::refused(meaning.text),
    }
}

/// Converts an error of the client before a command was sent: while connecting, or in a query about
/// the server.
pub(super) fn of_client(error: &RedisError) -> StoreError {
    let server_error = error.clone().into_server_errors();
    if let Some((_, error)) = server_error.as_deref().and_then(<[_]>::first) {
        return store_error(error, None);
    }
    // rustls reports this in the text of an I/O error. A pipe goes on trying: the certificate may
    // be renewed.
    if let Some((_, reason)) = error.to_string().split_once(NOT_ACCEPTED) {
        let reason: String = reason.chars().take(MAX_DETAIL_CHARS).collect();
        return StoreError::refused(format!(
            "the server's certificate is not accepted ({reason}): it must be valid, name the host, and be signed by an \
             authority that the store's `tls_root`, or without it this machine, knows"
        ));
    }
    match error.kind() {
        // Also when the server is not ready for them.
        ErrorKind::AuthenticationFailed => StoreError::refused(WRONG_PASSWORD),
        ErrorKind::InvalidClientConfig => {
            StoreError::refused("the connection's settings are invalid")
        }
        _ if error.is_connection_refusal() => {
            StoreError::unavailable("connection refused: no server listens there")
        }
        _ if error.is_timeout() => StoreError::unavailable("the server does not answer"),
        _ => StoreError::unavailable(format!("cannot connect: {}", error.category())),
    }
}

/// Returns the answer for a key whose slot no node has, as a node gives it.
pub(super) fn unserved() -> Value {
    node_error(&format!("{} {SLOT_NOT_SERVED}", UNSERVED.code))
}

/// Returns the answer for a key that one node after another redirects, as a node gives it whose
/// slot is being moved.
pub(super) fn moving() -> Value {
    node_error("TRYAGAIN")
}

/// Parses an error, which is the only way to make one.
fn node_error(line: &str) -> Value {
    redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("it is an error of RESP")
}

/// Returns whether the connection that returned this error should be replaced.
pub(super) fn ends_connection(error: &ServerError) -> bool {
    find(error).is_some_and(|meaning| meaning.connection == Replace)
}

/// Returns whether the server does not have the script. Then it was not executed, and loading it
/// helps.
pub(super) fn lacks_script(error: &ServerError) -> bool {
    error.code() == "NOSCRIPT"
}

/// Returns whether the server refuses keys of several slots in one call. Then it was not executed.
pub(super) fn is_several_slots(error: &ServerError) -> bool {
    error.code() == "CROSSSLOT"
}

fn find(error: &ServerError) -> Option<&'static Meaning> {
    if error.code() == "ERR" {
        let detail = error.details().unwrap_or_default();
        return CODELESS
            .iter()
            .find(|meaning| detail.starts_with(meaning.code));
    }
    let detail = error.details().unwrap_or_default();
    if error.code() == UNSERVED.code && detail.starts_with(SLOT_NOT_SERVED) {
        return Some(&UNSERVED);
    }
    MEANINGS.iter().find(|meaning| meaning.code == error.code())
}

/// The server's error text, cut before any quoted argument, which may be user data.
fn words(error: &ServerError) -> String {
    let detail = error.details().unwrap_or_default();
    let detail = detail
        .split("with args beginning")
        .next()
        .unwrap_or_default();
    let detail: String = detail.chars().take(MAX_DETAIL_CHARS).collect();
    let mut words = error.code().to_owned();
    if !detail.is_empty() {
        // Writing to a string cannot fail.
        let _ = write!(words, " {detail}");
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> ServerError {
        match node_error(line) {
            Value::ServerError(error) => error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_error_has_its_class() {
        for (line, class, replace) in [
            (
                "LOADING Redis is loading the dataset in memory",
                "unavailable",
                false,
            ),
            (
                "READONLY You can't write against a read only replica.",
                "unavailable",
                true,
            ),
            ("MASTERDOWN Link with MASTER is down", "unavailable", true),
            ("CLUSTERDOWN The cluster is down", "unavailable", false),
            (
                "TRYAGAIN Multiple keys request during rehashing of slot",
                "unavailable",
                false,
            ),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                "unavailable",
                false,
            ),
            (
                "MISCONF Errors writing to the AOF file: No space left on device",
                "unavailable",
                false,
            ),
            (
                "NOREPLICAS Not enough good replicas to write.",
                "unavailable",
                false,
            ),
            ("BUSY Redis is busy running a script.", "unavailable", false),
            ("NOSCRIPT No matching script.", "unavailable", false),
            ("ERR max number of clients reached", "unavailable", true),
            ("NOAUTH Authentication required.", "refused", true),
            ("WRONGPASS invalid username-password pair", "refused", true),
            (
                "NOPERM this user has no permissions to run the 'evalsha' command",
                "refused",
                false,
            ),
            ("MOVED 3999 127.0.0.1:6381", "refused", false),
            ("ASK 3999 127.0.0.1:6381", "refused", false),
            (
                "CROSSSLOT Keys in request don't hash to the same slot",
                "refused",
                false,
            ),
            (
                "ERR unknown command 'EVALSHA', with args beginning with: 'secret'",
                "refused",
                false,
            ),
            ("ERR something new", "refused", false),
            ("WEIRD something new", "refused", false),
        ] {
            let error = parse(line);
            assert_eq!(store_error(&error, None).class(), class, "{line}");
            assert_eq!(ends_connection(&error), replace, "{line}");
        }
    }

    #[test]
    fn an_error_of_one_slot_concerns_its_key_alone() {
        let scope = oncegate_core::key::Scope::new("orders").unwrap();
        let key = StoreKey::new(&scope, oncegate_core::testing::key("1").digest());
        for (answer, concerns_key) in [
            (moving(), true),
            (unserved(), true),
            (
                node_error("TRYAGAIN Multiple keys request during rehashing of slot"),
                true,
            ),
            (node_error("CLUSTERDOWN Hash slot not served"), true),
            (node_error("CLUSTERDOWN The cluster is down"), false),
        ] {
            let Value::ServerError(error) = answer else {
                panic!("{answer:?}")
            };
            let is_of_key = matches!(
                store_error(&error, Some(&key)),
                StoreError::KeyUnavailable { .. }
            );
            assert_eq!(is_of_key, concerns_key, "{error}");
        }
    }

    #[test]
    fn what_the_server_quotes_is_not_repeated() {
        let error = parse("ERR bad thing, with args beginning with: 'secret'");
        assert!(!store_error(&error, None).to_string().contains("secret"));
    }
}
