//! The consumer runtime of oncegate: messages, attempts and handlers; the [`Gate`] that claims a
//! key and stores its result; the [`Consumer`] that runs handlers and acknowledges messages; and
//! the ports behind which brokers, stores and observers stand.
//!
//! The crate knows no broker and no database. Programs use it through the crate `oncegate`;
//! adapters are written against this crate and `oncegate-core`.
//!
//! ```text
//! Source (port)  →  lanes (order, permits)  →  key  →  gate (claim … complete)  →  handler
//!        ↑ ack only from here: settle  ←────────────────────────────┘ outcome
//! ```

pub mod attempt;
pub mod backoff;
pub mod batch;
mod cancellation;
pub mod codec;
mod completing;
pub mod consumer;
pub mod dead_letter_reader;
pub mod dead_letters;
mod documents;
mod entropy;
pub mod failure;
pub mod gate;
pub mod handler;
pub mod health;
pub mod journal;
mod memory;
mod memory_source;
pub mod message;
pub mod observe;
pub mod results;
pub mod running;
mod shutdown;
pub mod source;
pub mod transaction;
pub mod transactional;

pub use attempt::Attempt;
pub use backoff::Backoff;
pub use batch::{BatchHandler, BatchLimits, BatchMessage};
pub use codec::{Codec, Raw};
pub use consumer::Batched;
pub use consumer::{Consumer, ConsumerError, ConsumerSettings, Monitor, Ordering, Transactional};
pub use documents::Documents;
pub use failure::{BoxError, Failure, OrPermanent};
pub use gate::{
    AfterUnknown, CheckedSource, Completion, Entry, Gate, GateError, GateSettings, Lease,
    NotCommitted, OnStoreLoss, OtherBroker,
};
pub use handler::Handler;
pub use health::{Health, Status};
pub use memory::MemoryStore;
pub use memory_source::MemorySource;
pub use message::{Broker, Header, Message, Origin};
pub use observe::{Counters, Event, Observer};
pub use shutdown::shutdown_signal;
pub use transaction::{BlockingSqlTransaction, Completing, SqlTransaction};
pub use transactional::{TransactionalBatchHandler, TransactionalHandler, Transactions};
