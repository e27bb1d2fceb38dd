//! The completion of a run in a transaction, and whether it was tried.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::{Record, State, StoreTime, Token};
use oncegate_core::rules::{Operation, Reply, apply};
use parking_lot::Mutex;

use crate::codec::{Codec, ToStored, not_kept};
use crate::failure::BoxError;

/// A completion to be written inside the caller's own transaction; created by
/// [`Attempt::completing`](crate::Attempt::completing).
#[derive(Clone)]
pub struct Completing {
    key: StoreKey,
    token: Token,
    fingerprint: Option<Fingerprint>,
    result: Bytes,
    retention: Duration,
    lease: Duration,
}

impl Completing {
    /// The key of the record.
    pub fn key(&self) -> &StoreKey {
        &self.key
    }

    /// The owner token that the record must hold. Never log it: anyone who has it can complete the
    /// key.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Digest of the rest of the payload, if the gate uses fingerprints.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint
    }

    /// The result as it is stored.
    pub fn result(&self) -> &Bytes {
        &self.result
    }

    /// Returns how long the record is kept from now on.
    pub fn retention(&self) -> Duration {
        self.retention
    }

    /// Returns how long the rest of the transaction may take: the gate's lease. In the meantime the
    /// record is locked, and no other claim of the key is granted.
    pub fn limit(&self) -> Duration {
        self.lease
    }

    /// The claim of a key without a record, in the transaction that also completes it.
    pub fn claim(&self) -> Operation {
        Operation::Claim {
            token: self.token,
            lease: self.lease,
            fingerprint: self.fingerprint,
            fenced: false,
            // No other owner's lease can be left over in a record that does not exist.
            longest_lease: Duration::MAX,
        }
    }

    /// The completion as an operation on the record.
    pub fn operation(&self) -> Operation {
        Operation::Complete {
            token: self.token,
            fingerprint: self.fingerprint,
            result: self.result.clone(),
            retention: self.retention,
        }
    }

    /// Returns what the record holds afterwards, by the [rules](oncegate_core::rules), if it
    /// belongs to this run.
    ///
    /// `record` must have been read at `now` under a lock that is held until the transaction ends.
    ///
    /// # Errors
    /// Returns an error when there is no record, it belongs to another owner, or it is completed.
    /// Then roll back: what this transaction has written must not be committed, not even when this
    /// same run has completed the key in an earlier transaction.
    pub fn apply(&self, now: StoreTime, record: Option<Record>) -> Result<Record, BoxError> {
        let before = record.filter(|record| record.kept(now));
        let completed = matches!(
            before,
            Some(Record {
                state: State::Completed { .. },
                ..
            })
        );
        match apply(now, before, &self.operation()) {
            _ if completed => Err("the key is completed already: the transaction was rolled back".into()),
            (Some(after), Reply::Applied { recreated: false }) => Ok(after),
            (_, Reply::Applied { .. }) => {
                Err("there is no record of the key where the transaction is, so it was \
                                            rolled back: use the database of the gate's store"
                    .into())
            }
            _ => Err(
                "the lease was lost, and the key belongs to another owner: the transaction was rolled back"
                    .into(),
            ),
        }
    }
}

impl fmt::Debug for Completing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completing")
            .field("key", &self.key)
            .field("token", &self.token)
            .field("result_bytes", &self.result.len())
            .finish_non_exhaustive()
    }
}

/// The data that completes a run in a transaction, and whether a completion was tried.
#[derive(Debug)]
pub(crate) struct RunCompletion {
    pub(crate) key: StoreKey,
    pub(crate) token: Token,
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) retention: Mutex<Duration>,
    pub(crate) lease: Duration,
    pub(crate) codec: Codec,
    pub(crate) max_result_bytes: usize,
    pub(crate) attempted: Mutex<Option<Attempted>>,
}

/// A completion in a transaction was tried; only the store knows whether it was committed.
#[derive(Debug, Default)]
pub(crate) struct Attempted {
    /// The size of the result that it stores.
    pub(crate) result_bytes: u64,
    /// The reason why the stored result is not the handler's.
    pub(crate) not_kept: Option<BoxError>,
    /// The error that the handler received.
    pub(crate) trouble: Option<String>,
}

impl RunCompletion {
    /// The completion without a result, for the beginning of a transaction that the runtime opens.
    pub(crate) fn beginning(&self) -> Completing {
        self.with_result(Bytes::new())
    }

    pub(crate) fn completing<T: ToStored + ?Sized>(&self, output: &T) -> Completing {
        let (result, not_kept) = self.encode(output);
        *self.lock() = Some(Attempted {
            result_bytes: result.len() as u64,
            not_kept,
            trouble: None,
        });
        self.with_result(result)
    }

    fn with_result(&self, result: Bytes) -> Completing {
        Completing {
            key: self.key.clone(),
            token: self.token,
            fingerprint: self.fingerprint,
            result,
            retention: *self.retention.lock(),
            lease: self.lease,
        }
    }

    /// Keeps the record for this long once it is completed.
    pub(crate) fn keep_for(&self, retention: Duration) {
        *self.retention.lock() = retention;
    }

    /// Returns the result for the record, and the reason if it is not kept. A transaction does not
    /// wait for a result store.
    fn encode<T: ToStored + ?Sized>(&self, output: &T) -> (Bytes, Option<BoxError>) {
        let most = self.max_result_bytes;
        match output.to_stored(self.codec) {
            Ok(stored) if stored.len() <= most => (stored, None),
            Ok(stored) => {
                let why = format!(
                    "the result has {} bytes, `max_result_bytes` is {most}",
                    stored.len()
                );
                (not_kept(), Some(why.into()))
            }
            Err(error) => (not_kept(), Some(error)),
        }
    }

    /// Returns whether a completion in a transaction was tried.
    pub(crate) fn is_attempted(&self) -> bool {
        self.lock().is_some()
    }

    pub(crate) fn lock(&self) -> parking_lot::MutexGuard<'_, Option<Attempted>> {
        self.attempted.lock()
    }
}
