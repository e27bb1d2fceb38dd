//! The port behind which every store stands.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;

use crate::key::{Fingerprint, Scope, StoreKey};
use crate::record::{Record, State, StoreTime};
use crate::rules::{Operation, Reply};

mod memory;
mod promise;
mod scope;

pub use memory::MemoryStore;
pub use promise::{Promise, Survives};
pub use scope::{Epoch, Halt, InvalidEpoch, ScopeDescriptor};

/// One operation on one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The key.
    pub key: StoreKey,
    /// What to do.
    pub operation: Operation,
}

/// A place that keeps records and applies the [rules](crate::rules) to them, one key at a time and atomically.
///
/// A store encodes, sends, decodes and classifies errors. It decides nothing: whoever is in doubt reads
/// [`rules::apply`](crate::rules::apply). The batch is the unit of work, because it is the throughput: a
/// store makes one round trip of what it is handed, and joins concurrent calls where it can.
///
/// A call may be dropped at any time; what it was handed may then be executed or not.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug {
    /// Applies each command; the answers stand in the order of the commands.
    ///
    /// There is no transaction around the batch: each command succeeds or fails by itself. Two commands on
    /// one key in one batch may be applied in either order.
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>>;

    /// Applies one command, as nearly every call does: the same as [`execute`](Self::execute) of it alone.
    ///
    /// A store overrides it where it needs no list for one.
    ///
    /// # Errors
    /// As in the answer that `execute` gives.
    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        let answers = self.execute(vec![command]).await;
        answers.into_iter().next().unwrap_or_else(|| Err(StoreError::unknown("the store gave no answer")))
    }

    /// Reads records without changing anything; the answers stand in the order of the keys.
    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>>;

    /// Which of the keys are completed: the look-ahead of a replay, in bulk.
    ///
    /// It says nothing that [`read`](Self::read) does not say. A store overrides it where it can leave out
    /// what only the other states need.
    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        let looked = self.read(keys).await;
        looked.into_iter().map(|looked| Ok(looked?.and_then(|looked| Completed::of(looked.record)))).collect()
    }

    /// Keeps `proposed` as the scope's descriptor if what the store holds for it equals `expected`
    /// (`None`: nothing yet), and returns the descriptor that the store holds afterwards.
    ///
    /// # Errors
    /// When the store cannot tell; see [`StoreError`].
    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError>;

    /// The scope's descriptor, without changing anything; `None` when no gate has ever opened the scope here.
    ///
    /// # Errors
    /// When the store cannot tell; see [`StoreError`].
    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError>;

    /// Which part of the store answers for `key`, where parts fail by themselves: the shards of a cluster.
    ///
    /// While one part gives no answer, a consumer holds back that part's keys alone. The number means nothing
    /// else, and may change when the store moves a key. A store that is one whole says 0 of every key.
    fn shard(&self, _key: &StoreKey) -> u64 {
        0
    }

    /// The last loss of records that this process has noticed in the store; `None` while there was none, and for a store
    /// that does not look.
    ///
    /// From then on the store refuses every claim, until [`accept_loss`](Self::accept_loss).
    fn loss(&self) -> Option<StoreLoss> {
        None
    }

    /// Grants claims again after a [`loss`](Self::loss). Called when the loss was accepted, by a setting or by an operator.
    fn accept_loss(&self) {}

    /// What the store knows of its own upkeep at this moment. It asks no server.
    fn upkeep(&self) -> Upkeep {
        Upkeep::default()
    }

    /// Looks at what would break the promise, before the first message is taken.
    ///
    /// # Errors
    /// When the store cannot be reached, or when it must not be used as it is: then the error says which
    /// setting to change.
    async fn check(&self) -> Result<Checkup, StoreError>;
}

/// A shared store is a store.
#[async_trait]
impl<S: Store + ?Sized> Store for Arc<S> {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        (**self).execute(commands).await
    }

    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        (**self).execute_one(command).await
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        (**self).read(keys).await
    }

    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        (**self).prefetch(keys).await
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        (**self).describe(scope, expected, proposed).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        (**self).descriptor(scope).await
    }

    fn shard(&self, key: &StoreKey) -> u64 {
        (**self).shard(key)
    }

    fn loss(&self) -> Option<StoreLoss> {
        (**self).loss()
    }

    fn accept_loss(&self) {
        (**self).accept_loss();
    }

    fn upkeep(&self) -> Upkeep {
        (**self).upkeep()
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        (**self).check().await
    }
}

/// A loss of records, as a store noticed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLoss {
    /// When it was noticed, on this process's wall clock.
    pub at: SystemTime,
    /// What was noticed, in words without data.
    pub reason: Arc<str>,
}

/// A record as a store showed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordSnapshot {
    /// The store's time at the look, on the clock of the record's expiry: what
    /// [`Record::protected_for`] wants to know. Two looks need not share an origin.
    pub now: StoreTime,
    /// What the store holds.
    pub record: Record,
}

/// What a replay wants to know of a completed record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Digest of the rest of the payload, when the gate asked for one.
    pub fingerprint: Option<Fingerprint>,
    /// The encoded result; duplicates get exactly these bytes.
    pub result: Bytes,
}

impl Completed {
    /// A record's fingerprint and result, when it is completed.
    pub fn of(record: Record) -> Option<Self> {
        match record.state {
            State::Completed { result, .. } => Some(Self { fingerprint: record.fingerprint, result }),
            _ => None,
        }
    }
}

/// What a store tells of its upkeep while it runs. Each is `None` where there is nothing of the kind, or this process
/// does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Upkeep {
    /// How long ago the oldest expired record that may still be in the store has expired; zero when there is none. It
    /// grows while the store removes expired records slower than they come.
    pub oldest_expired: Option<Duration>,
    /// The size of the write-ahead log of an embedded store, in bytes.
    pub log_bytes: Option<u64>,
}

/// What a store says of itself at start-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkup {
    /// The store in a few words, such as `redis 7.0.15 at localhost:6379`. Never a password.
    pub store: String,
    /// What a completion survives there, with the settings as they were found.
    pub survives: Survives,
    /// What weakens the promise, each with its remedy, in whole sentences.
    pub warnings: Vec<String>,
}

/// Why a store gave no answer about a key. None of them ever means "new" or "completed".
///
/// They are grouped by what the caller can do.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Not executed. Try again later: the store is down, loading, full or overloaded.
    #[error("the store is unavailable: {reason}")]
    Unavailable {
        /// What it said, without data.
        reason: Arc<str>,
    },
    /// The outcome is unknown: it may have been executed, or may still be. Repeat with the same token.
    #[error("the store's answer was lost: {reason}")]
    Unknown {
        /// How the answer was lost.
        reason: Arc<str>,
    },
    /// The store holds something under this key that is no record of a known format.
    ///
    /// Somebody else writes there, or a newer release has. The message waits; nothing is overwritten.
    #[error("the record of {key} cannot be read: {reason}")]
    Unreadable {
        /// The key.
        key: StoreKey,
        /// What is wrong with it.
        reason: Arc<str>,
    },
    /// Trying again will not help before somebody changes something: rights, a password, a setting.
    #[error("the store refuses: {reason}")]
    Refused {
        /// What to change.
        reason: Arc<str>,
    },
}

impl StoreError {
    /// Not executed; try again later.
    pub fn unavailable(reason: impl fmt::Display) -> Self {
        Self::Unavailable { reason: reason.to_string().into() }
    }

    /// Executed or not: nobody knows.
    pub fn unknown(reason: impl fmt::Display) -> Self {
        Self::Unknown { reason: reason.to_string().into() }
    }

    /// Somebody must change something first.
    pub fn refused(reason: impl fmt::Display) -> Self {
        Self::Refused { reason: reason.to_string().into() }
    }

    /// The record under `key` is none of ours.
    pub fn unreadable(key: StoreKey, reason: impl fmt::Display) -> Self {
        Self::Unreadable { key, reason: reason.to_string().into() }
    }

    /// One lower-case word for metrics: `unavailable`, `unknown`, `unreadable` or `refused`.
    pub fn class(&self) -> &'static str {
        match self {
            Self::Unavailable { .. } => "unavailable",
            Self::Unknown { .. } => "unknown",
            Self::Unreadable { .. } => "unreadable",
            Self::Refused { .. } => "refused",
        }
    }
}
