//! The trait that every store implements.

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
mod wrapper;

pub use memory::MemoryStore;
pub use promise::{Promise, Survives};
pub use scope::{DeadLetterStop, Epoch, Halt, InvalidEpoch, Pause, RecordOrigin, ScopeDescriptor};
pub use wrapper::StoreWrapper;

/// A single operation on a single key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The key.
    pub key: StoreKey,
    /// The operation.
    pub operation: Operation,
}

/// Keeps records and applies the [rules](crate::rules) to them, atomically for each key.
///
/// A store encodes, sends, decodes and classifies errors. It decides nothing:
/// [`rules::apply`](crate::rules::apply) defines every outcome. The unit of work is a batch,
/// because round trips limit the throughput: a store sends a batch in one round trip, and merges
/// concurrent calls where it can.
///
/// The future of a call may be dropped at any time. Its commands may then have been executed or
/// not.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug {
    /// Applies each command. Returns the replies in the order of the commands.
    ///
    /// The batch is not a transaction: each command succeeds or fails on its own. Two commands on
    /// one key in one batch may be applied in either order.
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>>;

    /// Applies one command: the same as [`execute`](Self::execute) with a single command.
    ///
    /// Nearly every call is of this kind. A store overrides this method where it can avoid the
    /// list.
    ///
    /// # Errors
    /// The same as in the reply of `execute`.
    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        let answers = self.execute(vec![command]).await;
        answers
            .into_iter()
            .next()
            .unwrap_or_else(|| Err(StoreError::unknown("the store gave no answer")))
    }

    /// Reads records without changing them. Returns the snapshots in the order of the keys; `None`
    /// for an absent record.
    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>>;

    /// Reads which of the keys are completed: the bulk prefetch of a replay.
    ///
    /// Returns no more than [`read`](Self::read) does. A store overrides this method where it can
    /// leave out what only the other states need.
    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        let found = self.read(keys).await;
        found
            .into_iter()
            .map(|found| Ok(found?.and_then(|found| Completed::of(found.record))))
            .collect()
    }

    /// Sets the scope's descriptor to `proposed` if the current one equals `expected` (`None`:
    /// there is none yet). Returns the descriptor that the store holds afterwards.
    ///
    /// # Errors
    /// The store could not answer; see [`StoreError`].
    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError>;

    /// Reads the scope's descriptor without changing it; `None` when no gate has ever opened the
    /// scope in this store.
    ///
    /// # Errors
    /// The store could not answer; see [`StoreError`].
    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError>;

    /// The shard that holds `key`: the part of the store that fails as one, such as a shard of a
    /// cluster.
    ///
    /// While one shard does not answer, a consumer holds back only the keys of that shard. The
    /// number has no other meaning, and it may change when the store moves a key. A store without
    /// shards returns 0 for every key.
    fn shard(&self, _key: &StoreKey) -> u64 {
        0
    }

    /// The last loss of records that this process has detected in the store; `None` when there was
    /// none, and for a store that does not check.
    ///
    /// After a loss the store refuses every claim until [`accept_loss`](Self::accept_loss) is
    /// called.
    fn loss(&self) -> Option<StoreLoss> {
        None
    }

    /// Lets the store grant claims again after a [`loss`](Self::loss). Called when a setting or an
    /// operator has accepted the loss.
    fn accept_loss(&self) {}

    /// By how much the checks of a gate for lost records are to be less frequent, because many
    /// processes use the server: 1 for no change. Makes no call to a server.
    fn check_spacing(&self) -> u32 {
        1
    }

    /// The current state of the store's cleanup. Makes no call to a server.
    fn upkeep(&self) -> Upkeep {
        Upkeep::default()
    }

    /// Checks the store for settings that would break its promise. Called before the first message
    /// is received.
    ///
    /// # Errors
    /// The store cannot be reached, or its settings are not acceptable; the error then names the
    /// setting to change.
    async fn check(&self) -> Result<Checkup, StoreError>;
}

/// Forwards every call to the shared store.
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

    fn check_spacing(&self) -> u32 {
        (**self).check_spacing()
    }

    fn upkeep(&self) -> Upkeep {
        (**self).upkeep()
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        (**self).check().await
    }
}

/// A loss of records that a store has detected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLoss {
    /// The time at which the loss was detected, on this process's wall clock.
    pub at: SystemTime,
    /// The detected loss, as text without data.
    pub reason: Arc<str>,
}

/// A record as it was read from a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordSnapshot {
    /// The store's time when the record was read, on the clock of the record's expiry: the argument
    /// of [`Record::protected_for`]. Two snapshots need not share an origin.
    pub now: StoreTime,
    /// The record.
    pub record: Record,
}

/// The part of a completed record that a replay needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Digest of the rest of the payload, when the gate asked for one.
    pub fingerprint: Option<Fingerprint>,
    /// The encoded result. Duplicates get exactly these bytes.
    pub result: Bytes,
}

impl Completed {
    /// The fingerprint and result of a completed record; `None` for every other state.
    pub fn of(record: Record) -> Option<Self> {
        match record.state {
            State::Completed { result, .. } => Some(Self {
                fingerprint: record.fingerprint,
                result,
            }),
            _ => None,
        }
    }
}

/// Figures about a store's cleanup and room while it runs. Each is `None` if it does not apply to
/// the store or this process does not know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Upkeep {
    /// The time since the expiry of the oldest record that may still be in the store; zero when
    /// there is none. It grows while records expire faster than the store removes them.
    pub oldest_expired: Option<Duration>,
    /// The size of the write-ahead log of an embedded store, in bytes.
    pub log_bytes: Option<u64>,
    /// The memory of a server that keeps its records there; of several, of the one with the least
    /// room.
    pub memory: Option<StoreMemory>,
}

/// The memory of a store's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreMemory {
    /// The memory that the server uses, in bytes.
    pub used_bytes: u64,
    /// The memory that it may use, in bytes; `None` when it has no limit of its own.
    pub max_bytes: Option<u64>,
}

/// The result of a store's start-up check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkup {
    /// A short description of the store, such as `redis 7.0.15 at localhost:6379`. Never contains a
    /// password.
    pub store: String,
    /// The faults that a completion survives in this store with its current settings.
    pub survives: Survives,
    /// The reasons why the promise is weaker, each in whole sentences and with its remedy.
    pub warnings: Vec<String>,
}

/// The reason why a store did not answer for a key. No error ever means "new" or "completed".
///
/// The variants are grouped by what the caller can do.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The command was not executed: the store is down, loading, full or overloaded. Try again
    /// later.
    #[error("the store is unavailable: {reason}")]
    Unavailable {
        /// The store's report, without data.
        reason: Arc<str>,
    },
    /// The command was not executed: this key cannot be asked about now, for example because it is
    /// being moved between servers. The other keys of its shard can. Try again later.
    #[error("the store cannot be asked about {key} now: {reason}")]
    KeyUnavailable {
        /// The key.
        key: StoreKey,
        /// The store's report, without data.
        reason: Arc<str>,
    },
    /// The outcome is unknown: the command may have been executed, or may still be. Repeat it with
    /// the same token.
    #[error("the store's answer was lost: {reason}")]
    Unknown {
        /// The way in which the answer was lost.
        reason: Arc<str>,
    },
    /// The value that the store holds under this key is not a record of a known format.
    ///
    /// Another program or a newer release wrote it. The message waits; nothing is overwritten.
    #[error("the record of {key} cannot be read: {reason}")]
    Unreadable {
        /// The key.
        key: StoreKey,
        /// The fault.
        reason: Arc<str>,
    },
    /// The store refuses until its permissions, a password or a setting are changed. A retry alone
    /// does not help.
    #[error("the store refuses: {reason}")]
    Refused {
        /// The change to make.
        reason: Arc<str>,
    },
}

impl StoreError {
    /// Returns whether the server may not have been reached, so that the same call can succeed
    /// later without a change by an operator.
    pub fn is_away(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. } | Self::KeyUnavailable { .. } | Self::Unknown { .. }
        )
    }

    /// Creates [`Unavailable`](Self::Unavailable): not executed, try again later.
    pub fn unavailable(reason: impl fmt::Display) -> Self {
        Self::Unavailable {
            reason: reason.to_string().into(),
        }
    }

    /// Creates [`Unknown`](Self::Unknown): it is not known whether the command was executed.
    pub fn unknown(reason: impl fmt::Display) -> Self {
        Self::Unknown {
            reason: reason.to_string().into(),
        }
    }

    /// Creates [`Refused`](Self::Refused): a setting must be changed first.
    pub fn refused(reason: impl fmt::Display) -> Self {
        Self::Refused {
            reason: reason.to_string().into(),
        }
    }

    /// Creates [`Unreadable`](Self::Unreadable): the value under `key` is not a record of a known
    /// format.
    pub fn unreadable(key: StoreKey, reason: impl fmt::Display) -> Self {
        Self::Unreadable {
            key,
            reason: reason.to_string().into(),
        }
    }

    /// The same error with the server before its reason, such as `Redis at localhost:6379`. It must
    /// contain no password.
    #[must_use]
    pub fn at(self, server: impl fmt::Display) -> Self {
        match self {
            Self::Unavailable { reason } => Self::unavailable(format_args!("{server}: {reason}")),
            Self::Unknown { reason } => Self::unknown(format_args!("{server}: {reason}")),
            Self::Refused { reason } => Self::refused(format_args!("{server}: {reason}")),
            // Its key says where it is.
            Self::Unreadable { .. } | Self::KeyUnavailable { .. } => self,
        }
    }

    /// Returns one lower-case word for metrics: `unavailable`, `unknown`, `unreadable` or
    /// `refused`.
    pub fn class(&self) -> &'static str {
        match self {
            Self::Unavailable { .. } | Self::KeyUnavailable { .. } => "unavailable",
            Self::Unknown { .. } => "unknown",
            Self::Unreadable { .. } => "unreadable",
            Self::Refused { .. } => "refused",
        }
    }
}
