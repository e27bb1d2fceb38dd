//! Kafka: a source, dead letters, and a reader for whole topics.
//!
//! Each folder uses those below it in this table, and no file uses itself by way of others.
//!
//! | folder | what it has |
//! |---|---|
//! | `consume` | the source that a consumer receives from, and its retry topics |
//! | `group` | a member of a consumer group: poll thread, commit thread, callbacks, the replacement of its client |
//! | `read` | readers of whole topics and of dead letters |
//! | `produce` | dead letters, the publisher of an outbox, copies |
//! | `admin` | topics are created, removed and described, with tokens too |
//! | `ask` | questions about topics, rights and committed offsets |
//! | `client` | settings, logins, errors and log lines of every client; those that ask and that produce |
//! | `partitions` | epochs, watermarks, what may be committed; no broker |
//!
//! | what | where |
//! |---|---|
//! | when an offset is committed | `partitions::{watermark, assignment}` (the rules), `group::commit` (the request) |
//! | where a partition begins whose position the client must not decide | `group::begin`; `ask::committed` asks for the group's offsets |
//! | what happens when partitions are assigned and revoked | `group::member`; `group::callbacks` calls it |
//! | where messages wait for a retry that is far off | `consume::retries` (the topics), `consume::retry_tier` (the wait in one) |
//! | whether the client is connected, and reads its partitions | `group::{connection, connection_watch, unread}` |
//! | which lines of the client are logged | `client::log` |
//! | what happens when the client fails | `client::trouble` (the rules), `group::{membership, succession}` (the replacement) |
//! | recreated topics, offsets out of range | `client::notices` (found), `group::positions` |
//! | back-pressure, client errors | `partitions::fetch_limits` (when a partition is paused), `group::{poll, buffer}` |
//! | how dead letters, copies in retry topics and messages of an outbox are written; which errors a wait does not end | `client::producer`, `client::remedies` |
//! | how a message of an outbox becomes one of a topic | `produce::publisher` |
//! | which client settings are set or rejected | `client::settings` |
//! | which rights a consumer lacks | `ask::rights` |
//! | where login tokens come from (SASL OAUTHBEARER) | `client::tokens` |
//! | when a changed password or certificate is used | `client::properties` (the files), `client::rotation` (the replacement) |
//!
//! # Headers
//!
//! A dead letter has the payload, key and headers of its message, and the headers below, in UTF-8.
//! Headers with these names that the message already has, from an earlier delivery, are replaced.
//!
//! | header | value |
//! |---|---|
//! | `oncegate-id` | 32 hexadecimal digits, equal for all dead letters that one scope writes of one message: two that a crash has caused are recognised by it |
//! | `oncegate-route` | the route; a source with `routes_from_headers()` keeps it as the message's route |
//! | `oncegate-origin-topic`, `-partition`, `-offset` | where the message was consumed, if from Kafka |
//! | `oncegate-origin` | the same as text, if not from Kafka |
//! | `oncegate-origin-timestamp` | its original timestamp, in milliseconds since 1970 |
//! | `oncegate-scope` | the scope of the gate that dead-lettered it |
//! | `oncegate-key` | its idempotency key, if one could be derived |
//! | `oncegate-cause` | `bad_key`, `permanent` or another name of a `DeadLetterCause` |
//! | `oncegate-reason` | the reason as text on one line, at most 1 KiB; when the attempts are used up, that of the last one, if this process has seen it |
//! | `oncegate-attempts` | how many attempts ran; 0 when another process had given it up |
//! | `oncegate-first-failed-at` | when its first attempt failed, in milliseconds since 1970, if the same process saw that, or the message came from a retry topic |
//! | `oncegate-failed-at` | when it was dead-lettered, in milliseconds since 1970 |
//!
//! A message in a [retry topic](KafkaSource::retry_topics) has the headers of the route, the origin
//! and the first failure, and `oncegate-due`: when it is due, in milliseconds since 1970. The
//! handler receives the message without them.
//!
//! A header whose name is not UTF-8 is delivered without its value, under the name U+FFFD: the
//! client library gives no access to it. (It panics; the panic is caught, so a program built with
//! `panic = "abort"` ends.)
//!
//! # Not obvious
//!
//! Implementation notes: facts about Kafka and librdkafka that this code depends on.
//!
//! - Kafka does not check who commits. It accepts a commit for another member's partition, and
//!   right after a rejoin even a commit by a zombie. So `assignment` decides ownership: each
//!   assignment is an epoch, and receive, finish and commit check it under one lock.
//! - Only a synchronous commit reports its failure, and it has no time limit: it takes seconds in a
//!   rebalance and half a minute while the broker is down. So commits run on a thread of their own.
//!   A revoke requests a commit there, waits within its own limit, and requests it again while the
//!   brokers are busy with the rebalance.
//! - Callbacks run inside `poll`. A callback that waits for the poll thread waits forever.
//! - Offsets have gaps: compaction, transaction markers, aborted messages. The next offset may
//!   never arrive, so the watermark runs over *received* offsets.
//! - A pause discards the prefetched messages. So normal back-pressure is a wait, and partitions
//!   are paused only after nothing has been received for a quarter of a second. A pause survives
//!   revoke and re-assignment, so every new assignment is resumed.
//! - An offset that is not greater than the last one means that the log was truncated. A new epoch
//!   begins, and its position is committed at once; otherwise a crash would skip all messages up to
//!   the old position.
//! - A topic that was deleted and recreated has the same name and another id. The client notices
//!   the id, changes its fetches, and continues at the old position: if the new topic has more
//!   messages than that, the first ones are skipped. The client reports this only in its debug log
//!   (context `metadata`), in the same queue as the messages and before the first one of the new
//!   topic. `notices` reads that log, and each partition begins a new epoch at 0.
//! - `auto.offset.reset` decides where to continue when retention has deleted the position, and
//!   *latest* would skip the remaining messages. So it is *earliest*, also for a source that begins
//!   at the end. The log names the partition; the error of `auto.offset.reset=error` does not.
//! - A late answer about where a log begins or ends moves the client there, even if it was told to
//!   seek elsewhere meanwhile: the client then skips messages, or reads old ones. So the partitions
//!   of a source that begins at the end are assigned at an offset, for which the client asks
//!   nothing, and paused until the seek is done.
//! - A member of the new protocol that polls later than `max.poll.interval.ms` gets no further
//!   notification: its client must be replaced. Closing the client may hang, and runs its
//!   callbacks. So it is closed on a thread of its own, and its context is marked as retired before
//!   anything else.
//! - librdkafka does not count time inside `poll` against `max.poll.interval.ms`. A stopped process
//!   is nearly always inside `poll`, so only its session expires. A test of the poll interval must
//!   stop it inside a callback.
//! - Unsubscribing takes time. A client that is dropped meanwhile ends without leaving its group,
//!   which then waits until the session is over. So the poll thread finishes handlers and offsets
//!   first (`leave`), and dropping the client then leaves the group.
//! - A fatal `FENCED_INSTANCE_ID` is no reason to join again: a member that joins with a static id
//!   removes the one that had it, so two of them would remove each other forever.
//! - While a transaction that commits an offset is open, the brokers do not tell it, and the client
//!   repeats its whole request: all partitions of an assignment wait for one of them. So a callback
//!   asks first. Partitions about which it gets no answer are assigned at an offset and paused, and
//!   the commit thread asks about each alone.
//! - A commit that waits for a coordinator ends only when its client is closed. So a failed client
//!   is closed under it.
//! - A seek works in every protocol; `incremental_assign` fails in an eager group.
//! - librdkafka takes its log level from the crate `log` unless it is set. That level is *off* in a
//!   program that uses `tracing`.
//! - Dropping a consumer hangs while certain `TopicPartitionList`s of it are alive. Lists here live
//!   for a single call.
//! - A header name that is not UTF-8 panics inside rdkafka. The panic is caught; a program built
//!   with `panic = "abort"` ends.
//! - The client's `auto.offset.reset` is *largest* by default and skips messages. This source's
//!   default is the beginning.
//! - `fetch.queue.backoff.ms` is 1,000 by default and throttles small queues. This source sets 10.
//! - A producer that requests a topic's metadata creates the topic where brokers allow that; a
//!   consumer does not. So the dead-letter topic is checked with a consumer.

mod admin;
mod ask;
mod client;
mod consume;
mod group;
mod partitions;
mod produce;
mod read;

pub use admin::TopicPlan;
pub use admin::facts::{TopicFacts, describe_topics};
pub use admin::new_topics::{TopicCreation, create_topics};
pub use admin::removal::remove_topics;
pub use ask::group_offsets::committed_offsets;
pub use ask::rights::{MissingRight, Needs, Resource, missing_rights};
pub use client::source_settings::{KafkaSettings, StartAt};
pub use consume::retries::KafkaRetries;
pub use consume::source::KafkaSource;
pub use produce::dead_letters::KafkaDeadLetters;
pub use produce::publisher::KafkaPublisher;
pub use produce::writer::TopicWriter;
pub use read::dead_letter_reader::KafkaDeadLetterReader;
pub use read::reader::TopicReader;
pub use read::window::TopicWindow;
