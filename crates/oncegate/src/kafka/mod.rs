//! Kafka: a source, dead letters, and a reader for whole topics.
//!
//! | what | where |
//! |---|---|
//! | when an offset is committed | `watermark`, `assignment` (the rule), `commit` (the call) |
//! | where a partition without a commit begins | `begin` |
//! | what happens when partitions come and go | `member` |
//! | where messages wait for a far retry | `retries` |
//! | whether the client is connected | `connection` |
//! | what happens when the client dies | `trouble` (the rule), `membership` (the deed) |
//! | topics that are made again, offsets out of range | `notices` (how we hear), `poll` (what we do) |
//! | back-pressure, errors of the client | `poll`, `buffer` |
//! | which client settings are chosen and refused | `settings` |
//!
//! # Headers
//!
//! A dead letter has the payload, key and headers of its message, and these headers in UTF-8 beside them.
//! The same names on the message itself, from an earlier round, are replaced.
//!
//! | header | value |
//! |---|---|
//! | `oncegate-route` | the route; a source with `routes_from_headers()` keeps it as the message's route |
//! | `oncegate-origin-topic`, `-partition`, `-offset` | where the message was consumed, if from Kafka |
//! | `oncegate-origin` | the same in words, if not from Kafka |
//! | `oncegate-origin-timestamp` | its timestamp there, in milliseconds since 1970 |
//! | `oncegate-scope` | the scope of the gate that gave it up |
//! | `oncegate-key` | its idempotency key, if one could be derived |
//! | `oncegate-cause` | `bad_key`, `permanent`, `attempts_used_up`, `mismatch` or `not_handed_over` |
//! | `oncegate-reason` | the reason in words, at most 1 KiB |
//! | `oncegate-attempts` | how many attempts ran |
//! | `oncegate-first-failed-at` | when its first attempt failed, in milliseconds since 1970, if the process that gave it up saw that, or it came by a retry topic |
//! | `oncegate-failed-at` | when it was given up, in milliseconds since 1970 |
//!
//! A message in a [retry topic](KafkaSource::retry_topics) has those of the route, the origin and the first failure, and
//! `oncegate-due`: when it is due, in milliseconds since 1970. Its handler sees it without them.
//!
//! A header whose name is not UTF-8 is delivered without its value, under the name U+FFFD: the client library
//! gives no access to it. (It panics; the panic is caught, so a program built with `panic = "abort"` ends.)

mod source;

mod ack_handle;
mod annotations;
mod assignment;
mod begin;
mod buffer;
mod commit;
mod connection;
mod convert;
mod dead_letter_reader;
mod dead_letters;
mod facts;
mod member;
mod membership;
mod notices;
mod poll;
mod reader;
mod retries;
mod settings;
mod standing;
mod statistics;
mod status;
mod topics;
mod trouble;
mod watermark;

pub use dead_letter_reader::KafkaDeadLetterReader;
pub use dead_letters::KafkaDeadLetters;
pub use facts::{TopicFacts, describe_topics};
pub use reader::TopicReader;
pub use retries::KafkaRetries;
pub use source::KafkaSource;

/// Names the route of a message that was retried or redriven.
pub(crate) const ROUTE_HEADER: &str = "oncegate-route";

/// Names when the first attempt failed, in milliseconds since 1970.
pub(crate) const FIRST_FAILED_HEADER: &str = "oncegate-first-failed-at";
