//! Handlers that are given their transaction: the runtime opens it, the handler works in it, and
//! the effect and COMPLETED commit together.
//!
//! A user implements [`TransactionalHandler`] for one message, or [`TransactionalBatchHandler`] for
//! many, and passes it to a consumer as a [`Transactional`](crate::Transactional). [`Transactions`]
//! is the port that a database implements.
//!
//! The first attempt of a key makes no claim. Its transaction begins by writing COMPLETED for the
//! key, so another transaction of the same key waits for this one, or is answered that the key is
//! held. A rollback takes the record back with the effect. Whatever has a record already takes the
//! path of every other handler: it claims its key, and its transaction completes that claim.
//!
//! # Not obvious
//!
//! Implementation notes: facts that this code depends on.
//!
//! - COMPLETED at the beginning of a transaction is the same as a claim and its completion at that
//!   instant: nothing can see the record before the commit, and the retention counts from the
//!   instant of the write.
//! - A process that ends in its transaction leaves no record, so [`Sessions`] holds what each
//!   process has received.
//! - A commit without an answer may still happen. A claim of the key waits for it, and the tag of
//!   the record then shows which attempt has completed it.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use oncegate_core::key::Scope;
use oncegate_core::store::StoreError;

use crate::attempt::Attempt;
use crate::batch::BatchMessage;
use crate::codec::Output;
use crate::failure::{BoxError, Failure};
use crate::message::Message;
use crate::transaction::Completing;

/// The work to be done once per key, inside a transaction that the runtime opens and commits.
///
/// `Tx` is the transaction of the client library: `PostgresTransaction`, sqlx's
/// `Transaction<'static, Postgres>`, or `SqliteTransaction`. Pass the handler to a consumer as a
/// [`Transactional`](crate::Transactional).
///
/// - On a **crash** before the commit nothing of the transaction exists, and another attempt runs.
///   What the handler did elsewhere, in other databases or services, may have happened.
/// - On a **duplicate**, `handle` does not run: [`duplicate`](Self::duplicate) gets the stored
///   result.
/// - On an **error** or **panic** the transaction is rolled back and the attempt counts as failed.
///   A serialisation failure or deadlock is no failed attempt, if the handler returns the client's
///   error by `?`: the transaction is repeated.
/// - On a **cancellation** (the consumer stops, the message was assigned to another consumer), or
///   when the transaction is open for longer than its limit, the future is dropped and the
///   transaction rolled back.
pub trait TransactionalHandler<Tx>: Send + Sync + 'static {
    /// The result: stored with the key, and passed to duplicates. `()` stores nothing.
    type Output: Output;

    /// Does the work in `transaction`. Do not commit or roll it back: the runtime commits when this
    /// returns `Ok`.
    ///
    /// # Errors
    /// `?` on any error rolls back and requests another attempt; [`Failure::permanent`] sends the
    /// message to the dead letters.
    fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut Tx,
    ) -> impl Future<Output = Result<Self::Output, Failure>> + Send;

    /// As [`Handler::duplicate`](crate::Handler::duplicate). It has no transaction.
    ///
    /// # Errors
    /// After an error it is called again, three times in all; then the message is acknowledged all
    /// the same, and counted.
    fn duplicate(
        &self,
        message: &Message,
        result: Self::Output,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        _ = (message, result);
        std::future::ready(Ok(()))
    }

    /// As [`Handler::undecodable_duplicate`](crate::Handler::undecodable_duplicate).
    fn undecodable_duplicate(
        &self,
        message: &Message,
        stored: Bytes,
        error: BoxError,
    ) -> impl Future<Output = ()> + Send {
        _ = (message, stored, error);
        std::future::ready(())
    }
}

/// The work to be done once per key, for many messages in one transaction that the runtime opens
/// and commits.
///
/// All effects and results of a batch are one commit. `Tx` is as in [`TransactionalHandler`]. Pass
/// the handler to a consumer as a [`Transactional::batched`](crate::Transactional::batched).
///
/// A batch has first attempts of keys without a record. It holds no key twice, and no two messages
/// of one lane of the consumer's [`Ordering`](crate::Ordering). Every other message is a batch of
/// its own: the next attempt after a failure, and a message that may have ended a process.
///
/// - On a **crash** before the commit nothing of the batch exists. Its messages run again, each in
///   a transaction of its own, so that one that ends its process uses up its own attempts.
/// - On a **duplicate**, `handle` does not run: [`duplicate`](Self::duplicate) gets the stored
///   result.
/// - On an **error** or **panic** the transaction is rolled back, and the batch is
///   [split](Self::handle). A serialisation failure or deadlock costs no attempt, if the handler
///   returns the client's error by `?`: the batch is repeated.
/// - On a **cancellation** of one message (it was assigned to another consumer) the batch goes on.
///   When all of them are cancelled, or the transaction is open for longer than its limit, the
///   future is dropped and the transaction rolled back.
pub trait TransactionalBatchHandler<Tx>: Send + Sync + 'static {
    /// The result of one message: stored with its key, and passed to duplicates. `()` stores
    /// nothing.
    type Output: Output;

    /// Does the work of all messages in `transaction`, and returns one outcome for each, in the
    /// order of `batch`. Do not commit or roll back: the runtime commits when every outcome is a
    /// result.
    ///
    /// A transaction keeps all its effects or none. So when some outcomes are failures, it is
    /// rolled back, and the messages with results run again without the failed ones, at once. A
    /// failed message counts with its own reason, and its next attempt has a transaction of its
    /// own.
    ///
    /// # Errors
    /// An error for the whole batch is for a handler that cannot tell which message is bad, as when
    /// one statement writes all rows. The consumer then calls `handle` with one half of the batch
    /// and then with the other, each in a transaction of its own, and splits further what fails. So
    /// the bad message is found, gets its own reason, and costs the others no attempt. A wrong
    /// number of outcomes is such an error.
    ///
    /// As in [`BatchHandler::handle`](crate::BatchHandler::handle), [`Failure::retry_after`],
    /// [`Failure::later`], [`Failure::not_run`] and [`Failure::unknown`] are not split, and after
    /// three messages that fail alone in a row the rest of the batch is tried later.
    fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut Tx,
    ) -> impl Future<Output = Result<Vec<Result<Self::Output, Failure>>, Failure>> + Send;

    /// As [`Handler::duplicate`](crate::Handler::duplicate). It has no transaction.
    ///
    /// # Errors
    /// After an error it is called again, three times in all; then the message is acknowledged all
    /// the same, and counted.
    fn duplicate(
        &self,
        message: &Message,
        result: Self::Output,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        _ = (message, result);
        std::future::ready(Ok(()))
    }

    /// As [`Handler::undecodable_duplicate`](crate::Handler::undecodable_duplicate).
    fn undecodable_duplicate(
        &self,
        message: &Message,
        stored: Bytes,
        error: BoxError,
    ) -> impl Future<Output = ()> + Send {
        _ = (message, stored, error);
        std::future::ready(())
    }
}

/// A database that opens transactions beside the records of a gate's store: the port of the SQL
/// adapters.
///
/// Implemented by `PostgresTransactions`, `SqlxTransactions` and `SqliteTransactions`.
pub trait Transactions: Send + Sync + 'static {
    /// The transaction that a handler works in. When it is dropped, it is rolled back.
    type Transaction: Send + 'static;

    /// The part of a transaction's beginning that its end must know.
    type Hold: Send + 'static;

    /// `true` if the client blocks its thread. A whole transaction, with its handler, then runs on
    /// a thread that may block.
    const BLOCKS: bool = false;

    /// Reads the scope's descriptor over these connections. It shows whether they reach the
    /// database of the gate's store.
    ///
    /// # Errors
    /// The database did not answer, or lacks a table; the error says how to create it.
    fn descriptor(
        &self,
        scope: &Scope,
    ) -> impl Future<Output = Result<Option<String>, StoreError>> + Send;

    /// Returns the place where processes note what they have received.
    fn sessions(&self) -> Arc<dyn Sessions>;

    /// Begins a transaction that the server ends after `limit`, and takes the key in it as `ground`
    /// says.
    ///
    /// # Errors
    /// The database did not answer or refuses. No transaction is open.
    fn begin(
        &self,
        completing: &Completing,
        ground: Ground,
        limit: Duration,
    ) -> impl Future<Output = Result<Begun<Self::Transaction, Self::Hold>, StoreError>> + Send;

    /// Stores the result, and commits.
    ///
    /// # Errors
    /// Nothing is committed, unless the error is [`CommitError::Unknown`].
    fn commit(
        &self,
        transaction: Self::Transaction,
        hold: Self::Hold,
        completing: &Completing,
    ) -> impl Future<Output = Result<(), CommitError>> + Send;

    /// Begins a transaction as [`begin`](Self::begin) does, and takes those keys of `batch` in it
    /// that have no record: in the order of the keys, so that two batches cannot deadlock. Returns
    /// a hold for each key that it has taken, and `None` for each key with a record. With a record
    /// for every key, nothing is open.
    ///
    /// It waits for a key that another transaction holds for no longer than [`KEY_WAIT`]: many
    /// other messages wait with it.
    ///
    /// # Errors
    /// The database did not answer or refuses. No transaction is open.
    fn begin_batch(
        &self,
        batch: &[Completing],
        limit: Duration,
    ) -> impl Future<Output = Result<BatchBegun<Self::Transaction, Self::Hold>, StoreError>> + Send;

    /// Stores the results of the keys that [`begin_batch`](Self::begin_batch) has taken, and
    /// commits.
    ///
    /// # Errors
    /// As in [`commit`](Self::commit), for all keys alike.
    fn commit_batch(
        &self,
        transaction: Self::Transaction,
        batch: Vec<(Self::Hold, Completing)>,
    ) -> impl Future<Output = Result<(), CommitError>> + Send;

    /// Rolls back. Dropping the transaction does the same, and may cost its connection.
    fn roll_back(&self, transaction: Self::Transaction) -> impl Future<Output = ()> + Send;

    /// Returns an excuse if an error that the handler has returned is no fault of its own. `error`
    /// is the error or one of its causes.
    fn excuse(&self, error: &(dyn Error + 'static)) -> Option<Excuse>;
}

/// The longest time that a batch waits for keys that another transaction holds: 1 second. The batch
/// is then split, and the key waits alone.
pub const KEY_WAIT: Duration = Duration::from_secs(1);

/// The ground on which a transaction takes its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    /// Nothing is known of the key: the transaction begins by writing COMPLETED without a result.
    NoRecord,
    /// The key is claimed under the token of the completion: the transaction ends by completing
    /// that claim.
    Claimed,
}

/// The result of beginning a transaction.
#[derive(Debug)]
pub enum Begun<Tx, Hold> {
    /// The transaction is open, and the key is its own.
    Open(Tx, Hold),
    /// There is a record of the key. Nothing is open.
    RecordExists,
    /// Another transaction holds the key for longer than this one may wait. Nothing is open.
    Held,
}

impl<Tx, Hold> Begun<Tx, Hold> {
    /// The same with another hold.
    pub(crate) fn map_hold<T>(self, map: impl FnOnce(Hold) -> T) -> Begun<Tx, T> {
        match self {
            Self::Open(transaction, hold) => Begun::Open(transaction, map(hold)),
            Self::RecordExists => Begun::RecordExists,
            Self::Held => Begun::Held,
        }
    }
}

/// The result of beginning the transaction of a batch: when it is open, with a hold for each key
/// that it has taken, in the order of the batch.
pub type BatchBegun<Tx, Hold> = Begun<Tx, Vec<Option<Hold>>>;

/// The reason why a transaction was not committed.
#[derive(Debug)]
pub enum CommitError {
    /// The transaction was rolled back because of another one: a serialisation failure or a
    /// deadlock.
    Conflict(BoxError),
    /// The transaction was rolled back for another reason, such as a deferred constraint.
    RolledBack(BoxError),
    /// The commit was sent and not answered: it may have happened, or still happen.
    Unknown(StoreError),
}

impl CommitError {
    /// Returns the error of the database.
    pub fn into_error(self) -> BoxError {
        match self {
            Self::Conflict(error) | Self::RolledBack(error) => error,
            Self::Unknown(error) => error.into(),
        }
    }
}

/// The reason why a failed transaction is no failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excuse {
    /// Another transaction was in the way: a serialisation failure or a deadlock.
    Conflict,
    /// The connection was lost, or the server went away.
    ConnectionLost,
}

/// The notes of what each process has received and not finished, as lists of short digests of keys.
///
/// A process writes down what it has received before it hands any of it to a handler. When it ends
/// without [`end`](Self::end), its lists remain, and other processes claim these keys before they
/// run them: a message that ends its process is then counted. The lists are a hint: a lost one
/// costs one attempt that is not counted, a list too many costs a claim.
#[async_trait]
pub trait Sessions: Send + Sync + fmt::Debug {
    /// Adds a list to a session, and removes others of its lists.
    ///
    /// # Errors
    /// The database did not answer: start none of these messages.
    async fn add(&self, list: NewList) -> Result<(), StoreError>;

    /// Notes that the session is alive, and returns the lists of the scope's other sessions that
    /// have not done so for longer than `silent_for`. A list never changes, so those that are
    /// `known` come without their digests. Sessions that have been silent for longer than
    /// [`FORGOTTEN_AFTER`] are removed.
    ///
    /// # Errors
    /// The database did not answer.
    async fn beat(
        &self,
        session: SessionId,
        silent_for: Duration,
        known: BTreeSet<ListId>,
    ) -> Result<Vec<SilentList>, StoreError>;

    /// Removes the session and its lists: the process has ended its handlers.
    ///
    /// # Errors
    /// The database did not answer. The lists then remain, which costs a claim for each of their
    /// keys.
    async fn end(&self, session: SessionId) -> Result<(), StoreError>;
}

/// The time for which the lists of a silent session are kept: a day.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(86_400);

/// A session: one run of a consumer in a scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionId {
    /// The scope.
    pub scope: Scope,
    /// Random, so that no two sessions share it.
    pub number: i64,
}

/// The name of a list in its scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListId {
    /// The number of its session.
    pub session: i64,
    /// The number of the list in its session, from 1.
    pub list: i64,
}

/// A list of a session that is silent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SilentList {
    /// The name.
    pub id: ListId,
    /// The digests of its keys; `None` if it was known.
    pub digests: Option<Vec<i64>>,
}

/// A list to be added to a session.
#[derive(Clone, Debug)]
pub struct NewList {
    /// The session.
    pub session: SessionId,
    /// The number of the list in its session, from 1.
    pub number: i64,
    /// The digests of the keys that were received.
    pub digests: Vec<i64>,
    /// The lists of the session whose messages are all finished.
    pub finished: Vec<i64>,
}
