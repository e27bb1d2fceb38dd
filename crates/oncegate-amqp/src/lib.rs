//! RabbitMQ (AMQP 0-9-1): a source for classic and quorum queues, and dead letters.
//!
//! | what | where |
//! |---|---|
//! | which deliveries an ack covers | `held` |
//! | when the connection is given up, and when it is opened again | `session`, `drive` |
//! | when a queue that delivers nothing is consumed anew | `watch` |
//! | what an error of the broker means | `error` |
//! | which limits of a queue are reported at the start | `findings` |
//! | how missing queues are made, if that is asked for | `queues` |
//! | which password and certificates a connection has | `login` |
//! | which bytes are changed before the client reads them | `frames`, `transport` |
//! | when a message is sent to its queue again | `again` |
//! | how many messages are delivered ahead | `prefetch` |
//! | which headers a message has | `convert`, `headers` |
//! | what a dead letter has | `letter` |
//!
//! # The life of a message
//!
//! - It is **delivered** ahead, as far as [`AmqpSource::prefetch`] allows, and waits here until a
//!   handler is free.
//! - It is **held** without an ack while it waits, runs, or waits for its retry, because the broker
//!   has no delayed returns. Before the broker's `consumer_timeout` (30 minutes by default) is
//!   over, it goes back to the queue and comes again.
//! - It is **acknowledged** after its record is completed, or its dead letter is confirmed. One ack
//!   covers several messages where no unfinished message is below them.
//! - When the **connection is lost**, the broker delivers again what was not acknowledged. The
//!   handlers of the old deliveries go on, and their acks are dropped: an ack handle has the epoch
//!   of its channel.
//! - At a **stop**, messages that have not started return to the queue at once.
//!
//! # Rights
//!
//! A source needs the permission `read` on its queue; dead letters need `write` on `amq.default`,
//! the default exchange. A consumer declares nothing, so that it needs no permission `configure`:
//! [`AmqpSource::create_queue`] does. Both rights are checked at the start.
//!
//! # Headers
//!
//! A sender's headers become headers of the same names, with their values as text. What the
//! protocol has besides becomes headers with the prefix `AMQP.`, which senders cannot use:
//!
//! | header | value |
//! |---|---|
//! | `content-type`, `content-encoding` | the properties of these names |
//! | `AMQP.exchange`, `AMQP.routing-key` | what the message was published with |
//! | `AMQP.redelivered` | `true` if the broker may have delivered the message before |
//! | `AMQP.message-id`, `AMQP.correlation-id`, `AMQP.reply-to`, `AMQP.type`, `AMQP.app-id`, `AMQP.user-id`, `AMQP.expiration`, `AMQP.priority` | the properties, if present |
//! | `AMQP.unreadable` | the names of headers that are missing: not UTF-8, or too deep |
//! | `AMQP.raw-properties` | all properties of such a message, as they came |
//! | `AMQP.header-types` | the types of headers that are not text, as a JSON object |
//! | `x-delivery-count`, `x-death`, … | as the broker writes them |
//!
//! The property `timestamp` is the message's timestamp, and `message-id` its id. A message without
//! one has no id, so that no key can be derived from it.
//!
//! # Dead letters
//!
//! A dead letter has the payload, headers and properties of its message, except for `expiration`
//! and `user-id`, and the two headers below.
//!
//! | header | value |
//! |---|---|
//! | `oncegate-reason` | the cause (`bad_key`, `permanent`, `attempts_used_up`, `mismatch`, `not_handed_over` or `outcome_unknown`) and the reason as text on one line, at most 1 KiB |
//! | `oncegate-origin` | a JSON object: `id`, which copies of one dead letter have in common, `route`, `origin`, `scope`, `key`, `cause`, `attempts`, `first_failed_at_ms` (if the process that dead-lettered it saw that), `failed_at_ms`, `timestamp_ms`, `exchange`, `routing_key`, `user_id`, `expiration`, `tombstone`, and `left_out`, the names of headers that had no room in a frame |
//!
//! # Not obvious
//!
//! Implementation notes: facts about RabbitMQ and its client that this code depends on.
//!
//! - A delivery tag counts within its channel. The same number on the next channel is another
//!   message.
//! - An ack of "all up to this one" also covers deliveries that were returned later. Returns are
//!   sent before acks.
//! - A confirmed message may have been dropped: without `mandatory`, the broker confirms what it
//!   could not route.
//! - A quorum queue buffers acks that come faster than it takes them, and forgets those of a
//!   channel that closes. Many single acks before a close may be lost in it; acks of many messages
//!   are few. Their redeliveries are answered.
//! - A message that is returned is delivered again at once. So retries wait here. It counts for the
//!   `delivery-limit` of a quorum queue before RabbitMQ 4.3; since then only what a closed channel
//!   had counts.
//! - `x-delivery-limit: -1` is no limit since RabbitMQ 4, and the lowest one before.
//! - The consumers of one channel share its delivery tags, and their deliveries arrive in any
//!   order: an ack of several must end below the first tag that has not arrived.
//! - Any error closes the channel, with all its deliveries. Checks have channels of their own.
//! - While the broker is short of memory or disk, it stops reading from connections that publish.
//!   Acks must not wait for that, so dead letters have a connection of their own.
//! - A stream delivers acknowledged messages again. AMQP 0-9-1 does not name a queue's type, so the
//!   source always subscribes with `x-priority`, which a stream refuses.
//! - The connection lives on a thread of its own: a handler that blocks its thread must not cost a
//!   heartbeat.

mod source;

mod ack_handle;
mod again;
mod connect;
mod convert;
mod dead_letter_reader;
mod dead_letters;
mod drive;
mod error;
mod findings;
mod frames;
mod headers;
mod held;
mod hub;
mod letter;
mod login;
mod management;
mod nested;
mod prefetch;
mod publisher;
mod queues;
mod session;
mod settings;
mod source_settings;
mod transport;
mod watch;

pub use dead_letter_reader::AmqpDeadLetterReader;
pub use dead_letters::AmqpDeadLetters;
pub use login::AmqpLogin;
pub use queues::QueuePlan;
pub use source::AmqpSource;
pub use source_settings::AmqpSettings;
