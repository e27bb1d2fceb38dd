//! The thread that drives the connections, with one queue each for claims, their ends, heartbeats
//! and reads.
//!
//! deadpool-postgres opens and holds the connections, and replaces broken ones. A connection is
//! checked out per batch, never per call.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use deadpool_postgres::Object;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use oncegate_core::key::StoreKey;
use oncegate_core::store::{Command, StoreError};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::SimpleQueryMessage;
use tokio_util::sync::CancellationToken;

use super::direct;
use super::errors::{self, Trouble};
use super::purge::Purge;
use super::session::{SESSION_MARK, session_mark};
use super::shared::Shared;
use super::transaction::{self, CommandResult, ReadAnswer};
use oncegate_store_toolkit::batch::{self, Batch, Carrier, Item, Joiner};

/// The number of batches of claims in flight, and of batches of their ends. While one waits for the
/// disk, or for a locked row, the next batch is collected and sent.
const BATCHES_IN_FLIGHT: usize = 2;

/// The most connections of a store: claims, their ends, heartbeats, reads, the purge, and one for
/// everything else that is not about a key.
pub(super) const CONNECTIONS: usize = 2 * BATCHES_IN_FLIGHT + 4;

/// Up to this many commands go in one statement: a statement has a high cost besides its rows. Of
/// more, half are claimed while the others are completed.
const UNDIVIDED_ITEMS: usize = 128;

/// The most calls of `purge` that may wait for their turn.
const MAX_WAITING_PURGES: usize = 16;

/// The callers' handle. Dropping it stops the thread and waits for it.
pub(super) struct Link {
    pub(super) claims: Joiner<Command, CommandResult>,
    /// For everything about keys except claims, heartbeats and reads.
    pub(super) ends: Joiner<Command, CommandResult>,
    /// For heartbeats, which must not queue behind bulk.
    pub(super) heartbeats: Joiner<Command, CommandResult>,
    /// For reads.
    pub(super) reads: Joiner<StoreKey, ReadAnswer>,
    purges: mpsc::Sender<oneshot::Sender<Result<u64, StoreError>>>,
    shared: Arc<Shared>,
    handle: Handle,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Link {
    /// Starts the thread. It connects when there is something to send.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(super) fn start(shared: Shared, purge: Purge) -> Result<Self, StoreError> {
        let shared = Arc::new(shared);
        let (claims, claim_carrier) = batch::channel();
        let (ends, end_carrier) = batch::channel();
        let (heartbeats, heartbeat_carrier) = batch::channel();
        let (reads, read_carrier) = batch::channel();
        let (purges, asked_purges) = mpsc::channel(MAX_WAITING_PURGES);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime: Runtime = runtime.map_err(|error| no_thread(&error))?;
        let handle = runtime.handle().clone();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let driven = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("oncegate-postgres".to_owned())
            .spawn(move || {
                let queues = async {
                    tokio::join!(
                        carry(claim_carrier, BATCHES_IN_FLIGHT, |batch| execute(
                            &driven, batch
                        )),
                        carry(end_carrier, BATCHES_IN_FLIGHT, |batch| execute(
                            &driven, batch
                        )),
                        carry(heartbeat_carrier, 1, |batch| execute(&driven, batch)),
                        carry(read_carrier, 1, |batch| read(&driven, batch)),
                        purge_when_asked(&driven, &purge, asked_purges),
                        purge.walk_in_the_background(&driven),
                    )
                };
                runtime.block_on(async {
                    tokio::select! {
                        () = stopped.cancelled() => {}
                        _ = queues => {}
                    }
                });
                // Does not wait for a name that is still being resolved.
                runtime.shutdown_background();
            });
        let thread = Some(thread.map_err(|error| no_thread(&error))?);
        Ok(Self {
            claims,
            ends,
            heartbeats,
            reads,
            purges,
            shared,
            handle,
            stop,
            thread,
        })
    }

    /// Purges the table once, at full speed, and returns how many rows it has removed.
    pub(super) async fn purge(&self) -> Result<u64, StoreError> {
        let (caller, answer) = oneshot::channel();
        if self.purges.send(caller).await.is_err() {
            return Err(StoreError::unavailable("the store's thread ended"));
        }
        answer
            .await
            .unwrap_or_else(|_| Err(StoreError::unavailable("the store's thread ended")))
    }

    /// Returns whether the sessions have the settings of [`session_options`]. A pooler may have
    /// dropped them.
    ///
    /// # Errors
    /// When no session can be opened.
    pub(super) async fn has_settings(&self) -> Result<bool, StoreError> {
        let mark = session_mark(self.shared.response_timeout);
        self.run(move |client| async move {
            let ask = format!("SELECT current_setting('{SESSION_MARK}', true)");
            let answer = client.simple_query(&ask).await.map(|messages| {
                messages.iter().any(|message| {
                    matches!(message, SimpleQueryMessage::Row(row) if row.get(0) == Some(&mark))
                })
            });
            (client, answer.map_err(|error| errors::not_executed(&error)))
        })
        .await
    }

    /// Checks that a statement can be executed in another session than the one that prepared it, if
    /// a pooler has several sessions for the connections.
    ///
    /// # Errors
    /// When it cannot, with what to change at the pooler.
    pub(super) async fn keeps_statements(&self) -> Result<(), StoreError> {
        let shared = Arc::clone(&self.shared);
        self.run(move |client| async move {
            let tried = try_statement(&shared, &client).await;
            (client, tried)
        })
        .await
    }

    /// Runs `work` on the thread, with a separate connection, within the time limit for an answer.
    pub(super) async fn run<T, F, PurgeStep>(&self, work: PurgeStep) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = (Object, Result<T, Trouble>)> + Send,
        PurgeStep: FnOnce(Object) -> F + Send + 'static,
    {
        self.run_for(self.shared.response_timeout, work).await
    }

    /// Runs `work` on the thread, with a separate connection, within `limit`.
    pub(super) async fn run_for<T, F, PurgeStep>(
        &self,
        limit: Duration,
        work: PurgeStep,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = (Object, Result<T, Trouble>)> + Send,
        PurgeStep: FnOnce(Object) -> F + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        let task = self.handle.spawn(async move {
            let client = shared.client().await?;
            // Not settled means dropped half-way: then it is unknown what was executed.
            let worked = tokio::time::timeout(limit, work(client)).await;
            let (client, outcome) =
                worked.map_err(|_| StoreError::unknown("the server did not answer in time"))?;
            shared
                .settle(client, outcome)
                .map_err(|trouble| trouble.error)
        });
        task.await
            .unwrap_or_else(|_| Err(StoreError::unknown("the store's thread ended")))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // No caller waits for an answer any more, so the thread ends at its next wake-up.
            // Whether it panicked does not matter.
            let _ = thread.join();
        }
    }
}

fn no_thread(error: &std::io::Error) -> StoreError {
    StoreError::unavailable(format!("no thread: {error}"))
}

/// Prepares a statement, and executes it while another connection holds the session that was used
/// last.
async fn try_statement(shared: &Shared, client: &Object) -> Result<(), Trouble> {
    let statement = client
        .prepare("SELECT 1")
        .await
        .map_err(|error| errors::not_executed(&error))?;
    let other = shared.client().await?;
    other
        .batch_execute("BEGIN")
        .await
        .map_err(|error| errors::not_executed(&error))?;
    let executed = client.query_one(&statement, &[]).await;
    let ended = other.batch_execute("ROLLBACK").await;
    let outcome = executed
        .and(ended)
        .map_err(|error| errors::not_executed(&error));
    shared.settle(other, outcome)
}

/// Executes the batches, at most `in_flight` at once, until every caller is gone.
async fn carry<T: Item, A, F>(
    mut carrier: Carrier<T, A>,
    in_flight: usize,
    send_batch: impl Fn(Batch<T, A>) -> F,
) where
    F: Future<Output = ()>,
{
    let mut under_way = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            Some(()) = under_way.next(), if !under_way.is_empty() => {}
            batch = carrier.next(1, || UNDIVIDED_ITEMS), if under_way.len() < in_flight => match batch {
                Some(batch) => under_way.push(send_batch(batch)),
                None => break,
            },
        }
    }
    while under_way.next().await.is_some() {}
}

async fn purge_when_asked(
    shared: &Shared,
    purge: &Purge,
    mut asked: mpsc::Receiver<oneshot::Sender<Result<u64, StoreError>>>,
) {
    while let Some(caller) = asked.recv().await {
        // The caller may have stopped waiting; the removed rows stay removed.
        let _ = caller.send(purge.walk(shared, None).await.map(|(_, removed)| removed));
    }
}

async fn execute(shared: &Shared, mut batch: Batch<Command, CommandResult>) {
    let commands = batch.take_items();
    match direct::execute(shared, &commands).await {
        Ok(answers) => batch.answer(answers),
        Err(error) => batch.answer_all(&Err(error)),
    }
}

async fn read(shared: &Shared, mut batch: Batch<StoreKey, ReadAnswer>) {
    let keys = batch.take_items();
    match transaction::read_records(shared, &keys).await {
        Ok(answers) => batch.answer(answers),
        Err(error) => batch.answer_all(&Err(error)),
    }
}
