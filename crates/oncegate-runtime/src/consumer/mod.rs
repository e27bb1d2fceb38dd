//! The runtime: receives messages from a source, claims their keys, runs handlers, and
//! acknowledges.
//!
//! A message's way through the files of this module: `intake` (limits, key, prefetch) → `schedule`
//! (order, and what starts next) → `engine` (permits, `breaker`, stop) → `unit` (claim, call,
//! finish) → `settle` (ack, retry, dead letter). Three tables decide everything, and are pure:
//! `schedule::state` (when a message starts), `split` (what runs next after a part of a batch has
//! failed) and `progress` (what its earlier attempts have left behind).
//!
//! The files form layers. A file imports files of lower layers, and of its own layer those to its
//! right:
//!
//! | layer | files |
//! |---|---|
//! | the consumer and its life | `builder`, `start`, `run`, `monitor` |
//! | what runs | `intake`, `prepare`, `engine`, `unit`, `settle`, `returned_letter`, `breaker_mark` |
//! | what they share | `member`, `item`, `progress`, `shared`, `session`, `transactional`, `route_handler`, `erased`, `end`, `trace`, `in_flight` |
//! | without I/O: rules and records | `split`, `settings`, `error`, `positions`, `watch`, `breaker`, `dead_letter_limit`, `retry_writes`, `permits`, `pace`, `quarantine`, `schedule`, `lanes` |
//!
//! A message in the engine is in exactly one `MessageState`; only `schedule` changes it, and all
//! counts follow from that.
//!
//! # Not obvious
//!
//! Implementation notes: facts about the runtime that this code depends on.
//!
//! - While the store is away, nothing is requested from a queue, except one message when none is in
//!   hand: an outage ends when a claim is answered, and a queue may have taken back every message
//!   that could claim.
//! - After `complete` has returned NotOwner, the verdict of the new owner counts: the message
//!   claims again at once.
//! - Two suspects in quarantine would wait for each other if each kept its own permit: the permit
//!   is given back first. So is the claim: a message that waits beside one that kills the process
//!   would otherwise lose an attempt at each death.
//! - The claims of a unit are answered together and its handlers are called one after another, so
//!   what was true of a claim need not be true when its handler's turn comes: lease, delivery and
//!   stop are looked at right before each call.
//! - The engine's timer must not fire for a probe that is due and waits for a permit: the engine
//!   would spin.
//! - A lane is a hash. Two messages that share one by accident only wait for each other.
//! - A prefetch does not answer with a reference to a large result: what it finds waits for a
//!   permit alone, and a result store may not answer.
//! - An attempt that returns an error or panics is not "recovered"; one that ended without
//!   reporting anything is.
//! - A circuit breaker's half-open message may never run its handler: it can be a duplicate, or
//!   busy elsewhere. `BreakerEvent::Over` comes at the end of every attempt, so the next message
//!   can then be the probe at once.
//! - While a circuit breaker is not closed, no message is given up for too many attempts, not even
//!   one whose attempts were used up by takeovers: each pause costs one message a lapse.
//! - `Failure::unknown` lets the lease lapse and does not release it. A release would state that
//!   nothing has happened, and another attempt could run beside the old one. A worker that does not
//!   answer ends this way.

mod breaker;
mod breaker_mark;
mod builder;
mod dead_letter_limit;
mod end;
mod engine;
mod erased;
mod error;
mod in_flight;
mod intake;
mod item;
mod lanes;
mod member;
mod monitor;
mod pace;
mod permits;
mod positions;
mod prepare;
mod progress;
mod quarantine;
mod retry_writes;
mod returned_letter;
mod route_handler;
mod run;
mod schedule;
mod session;
mod settings;
mod settle;
mod shared;
mod split;
mod start;
mod trace;
mod transactional;
mod unit;
mod watch;

pub use breaker::Breaker;
pub use builder::Consumer;
pub use dead_letter_limit::DeadLetterLimit;
pub use error::ConsumerError;
pub use monitor::Monitor;
pub use route_handler::{Batched, ConsumerHandler};
#[cfg(feature = "otel")]
pub use settings::TraceParent;
pub use settings::{BadKeys, ConsumerSettings, Ordering, ReturnedLetters, RouteTerms};
pub use transactional::Transactional;
