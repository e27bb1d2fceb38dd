//! Proves a [`Store`](oncegate_core::store::Store) or [`Source`](oncegate_runtime::source::Source)
//! of your own under faults: whether oncegate's promise holds with it. The project's own stores and
//! sources are judged with the same code.
//!
//! A trial of a handler ([`Trial`](crate::Trial)) assumes that oncegate keeps its promise. This
//! module checks the promise itself, from the outside:
//!
//! 1. Each worker process opens one [`History`], and wraps what it gives to its
//!    [`Consumer`](oncegate_runtime::Consumer): the store in a [`RecordedStore`], the source in a
//!    [`RecordedSource`], the dead letters in [`RecordedDeadLetters`], and a [`RecordedObserver`]
//!    besides. They note every call and its answer through the public traits alone. The handler
//!    notes when it begins and ends, and each duplicate that it is told of.
//! 2. A program of yours sends messages, causes faults, and notes them: it kills workers with
//!    SIGKILL, stops them, cuts connections, empties the store ([`STORE_LOSS`]). A [`PointHook`]
//!    lets a worker end itself or stop between two steps.
//! 3. When all is quiet, it collects the [`Evidence`]: the history, and what witnesses outside of
//!    oncegate's code say (the effects of a ledger, the dead letters, the broker's commits, the
//!    records as another client reads them). [`judge`] returns the invariants that are broken.
//!
//! A killed process leaves calls without answers, which count as unknown and not as failed.
//!
//! | | what must hold | needs |
//! |---|---|---|
//! | S1 | every ack has an earlier durable end | history |
//! | S2 | every message has an effect or is a dead letter | `produced`, `effects`, `dead_letters` |
//! | S3 | a result goes to the event that made it | `produced` |
//! | S4 | only the owner token that was granted last can write | history |
//! | S5 | no grant after a completion | history |
//! | S6 | the fencing tokens of a key grow | history |
//! | S8 | effects of a key ≤ 1 + takeovers of that key + losses of the store | `produced`, `effects` |
//! | S9 | a process that got NotOwner acknowledges nothing | history |
//! | S10 | below a committed offset everything is acknowledged | `topic`, `commits` |
//! | S11 | commits never go back | `commits` |
//! | S12 | an unknown completion is not acknowledged | history |
//! | S13 | duplicates get the first result, byte for byte | history |
//! | S14 | a message with the key of another and other content is never run and never answered | history, `produced` |
//! | S16 | what the store answers about a key could have come from [`apply`](oncegate_core::rules::apply), call by call | history |
//! | S17 | a completed record is there as long as it was promised | `records` |
//! | S18 | attempts stay within the limit, and only a failed handler uses one up | history, `max_attempts` |
//! | S19 | a loss of records is noticed, and only a loss | history, `notices_losses` |
//! | S20 | counters equal the history | processes that ended as they should |
//! | L1 | no claim stays for ever | `records` |
//! | L2 | everything comes to its end | `hung` |
//!
//! S7 (a system that checks fencing tokens accepts no smaller one) and S15 (scopes never mix) need
//! no history; the first is the downstream system's, the second is checked by the conformance suite
//! of `oncegate-core`.
//!
//! # Example
//!
//! One process, no faults: the smallest history that is complete.
//!
//! ```
//! use std::sync::Arc;
//!
//! use oncegate_core::store::Store;
//! use oncegate_runtime::MemoryStore;
//! use oncegate_testing::promise::{Evidence, History, RecordedStore, judge};
//!
//! # fn main() -> std::io::Result<()> {
//! let folder = std::env::temp_dir().join(format!("oncegate-promise-{}", std::process::id()));
//! let history = Arc::new(History::open(&folder)?);
//! let store = RecordedStore::new(MemoryStore::new(), Arc::clone(&history));
//! // Give `store` to a gate, run a consumer, cause faults. Then:
//! let evidence = Evidence { entries: history.read()?, ..Evidence::default() };
//! assert!(judge(&evidence).broken.is_empty());
//! # drop(store);
//! # std::fs::remove_file(folder)
//! # }
//! ```

mod calls;
mod evidence;
mod history;
mod judge;
mod linear;
mod operation;
mod point;
mod recorded;

#[cfg(test)]
mod tests;

pub use calls::completed_keys;
pub use evidence::{BrokenInvariant, Evidence, OffsetCommit, ProducedMessage, PromiseReport};
pub use history::{EffectName, Entry, History, Occurrence, STORE_LOSS, SUCCEEDED};
pub use judge::judge;
pub use operation::{Op, StoreAnswer};
pub use point::{POINTS, Point, PointHook};
pub use recorded::{RecordedDeadLetters, RecordedObserver, RecordedSource, RecordedStore};
