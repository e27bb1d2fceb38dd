//! The connections: a thread of their own, and a queue each for claims, their ends, heartbeats and looks.
//!
//! deadpool-postgres makes and holds the connections, and replaces those that broke. One is checked out for
//! a batch, never for a call.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError};
use futures_util::StreamExt as _;
use futures_util::future::{join, join3};
use futures_util::stream::FuturesUnordered;
use oncegate_core::key::StoreKey;
use oncegate_core::store::{Command, StoreError};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, SimpleQueryMessage, Statement};
use tokio_util::sync::CancellationToken;

use super::direct;
use super::errors::{self, Trouble};
use super::notices::Notices;
use super::purge::Purge;
use super::reconnect::Reconnect;
use super::row;
use super::transaction::{self, Answer, LookAnswer, within};
use crate::batch::{self, Batch, Carrier, Item, Joiner};

/// How many connections carry claims, and how many what ends them. While one waits for the disk, or for a row that
/// somebody holds, the next batch gathers and travels.
const FLIGHTS: usize = 2;

/// How many connections a store uses at most: claims, their ends, heartbeats, looks, the purge, and one for what
/// else is not about a key.
pub(super) const CONNECTIONS: usize = 2 * FLIGHTS + 4;

/// Up to so many commands go in one statement: a statement costs much besides its rows. Of more, half are claimed while the
/// others are completed.
const UNDIVIDED_ITEMS: usize = 128;

/// How many calls of `purge` may wait for their turn.
const MAX_WAITING_PURGES: usize = 16;

/// Every statement looks its keys up in the index, one after another in the order in which it was given them. A
/// prepared statement that was planned while the table was small would read all of it for ever; and in another
/// order two batches could wait for each other.
const PLAN: [(&str, &str); 3] =
    [("enable_seqscan", "off"), ("enable_hashjoin", "off"), ("enable_mergejoin", "off")];

/// A setting of our own, by which a session tells that it was opened with our settings.
const SESSION_MARK: &str = "oncegate.response_timeout_ms";

/// The longest time limit that the server takes, in milliseconds.
const LONGEST_LIMIT_MS: u128 = i32::MAX as u128;

/// What a command weighs besides its text, in bytes.
const COMMAND_BYTES: usize = 100;

/// What every task on the thread shares.
pub(super) struct Shared {
    pub(super) pool: Pool,
    /// How long the server may take for one round trip.
    pub(super) response_timeout: Duration,
    /// Begins a transaction under our limits.
    pub(super) begin: String,
    sessions: Sessions,
    /// What the server says on the connections; `None` where they are not opened here.
    notices: Option<Notices>,
    reconnect: Reconnect,
}

/// Where our limits are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sessions {
    /// Each session has them from its beginning, so that a statement may stand alone.
    Ours,
    /// Each transaction is given them: so they hold on any connection, also behind a pooler, which hands
    /// sessions around.
    Anybodys,
}

/// What our transactions run under, by the names of the server's settings.
fn settings(response_timeout: Duration) -> Vec<(&'static str, String)> {
    let limit_ms = limit_ms(response_timeout);
    let limits = [
        ("lock_timeout", (limit_ms / 2).to_string()),
        ("statement_timeout", limit_ms.to_string()),
        ("idle_in_transaction_session_timeout", limit_ms.to_string()),
    ];
    limits.into_iter().chain(PLAN.map(|(name, value)| (name, value.to_owned()))).collect()
}

fn limit_ms(response_timeout: Duration) -> u128 {
    response_timeout.as_millis().clamp(2, LONGEST_LIMIT_MS)
}

/// What a connection is opened with so that its session has our settings, in the form of the URL's `options`.
pub(super) fn session_options(response_timeout: Duration) -> String {
    let further = [
        ("default_transaction_isolation", r"read\ committed".to_owned()),
        (SESSION_MARK, session_mark(response_timeout)),
    ];
    let settings = settings(response_timeout).into_iter().chain(further);
    settings.map(|(name, value)| format!(" -c {name}={value}")).collect()
}

/// What a session answers to [`SESSION_MARK`] if it has our settings.
fn session_mark(response_timeout: Duration) -> String {
    limit_ms(response_timeout).to_string()
}

impl Shared {
    pub(super) fn new(
        pool: Pool,
        notices: Option<Notices>,
        response_timeout: Duration,
        sessions: Sessions,
    ) -> Self {
        let mut begin = "BEGIN ISOLATION LEVEL READ COMMITTED".to_owned();
        if sessions == Sessions::Anybodys {
            let set = |(name, value)| format!("; SET LOCAL {name} = {value}");
            begin.extend(settings(response_timeout).into_iter().map(set));
        }
        Self { pool, response_timeout, begin, sessions, notices, reconnect: Reconnect::default() }
    }

    /// Runs something that ends with a commit, whose answer the server may have given without the standbys that it should
    /// have waited for: then nobody knows what it came to.
    ///
    /// What is said on a connection that was not opened here cannot be heard. There a second transaction is waited for.
    pub(super) async fn committed<T>(
        &self,
        client: &Object,
        work: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        let Some(notices) = &self.notices else {
            // In this order on the wire.
            let (done, confirmed) = join(work, client.batch_execute(row::CONFIRM)).await;
            let done = done?;
            confirmed.map_err(|error| errors::unconfirmed(&error))?;
            return Ok(done);
        };
        let before = notices.cut_waits();
        let done = work.await?;
        // Of another connection's commit this says nothing, but it is so rare that it may count as this one's.
        if notices.cut_waits() == before {
            return Ok(done);
        }
        Err(StoreError::unknown(
            "the server stopped waiting for its synchronous standbys before they had the commit",
        )
        .into())
    }

    /// Waits until the synchronous standbys have what can be seen now.
    pub(super) async fn confirm(&self, client: &Object) -> Result<(), Trouble> {
        let confirm = client.batch_execute(row::CONFIRM);
        let confirm = async { confirm.await.map_err(|error| errors::not_executed(&error)) };
        let confirmed = within(self.response_timeout, self.committed(client, confirm)).await;
        // Nothing was to be changed, so there is nothing that may have happened.
        confirmed
            .map_err(|_| StoreError::unavailable("the synchronous standbys did not confirm in time").into())
    }

    /// Runs one statement in a transaction of its own, in one round trip. `lost` says what it means when the answer to
    /// its commit is.
    pub(super) async fn alone(
        &self,
        client: &Object,
        statement: &Statement,
        parameters: &[&(dyn ToSql + Sync)],
        lost: fn(&tokio_postgres::Error) -> Trouble,
    ) -> Result<Vec<Row>, Trouble> {
        let query = client.query(statement, parameters);
        if self.sessions == Sessions::Ours {
            return query.await.map_err(|error| match errors::is_rolled_back(&error) {
                true => errors::not_executed(&error),
                false => lost(&error),
            });
        }
        // In this order on the wire.
        let sent = join3(client.batch_execute(&self.begin), query, client.batch_execute("COMMIT"));
        let (begun, rows, committed) = sent.await;
        match (begun.and(rows), committed) {
            (Ok(rows), Ok(())) => Ok(rows),
            // The server is there, and has turned the commit into a rollback.
            (Err(error), Ok(())) => Err(errors::not_executed(&error)),
            (_, Err(error)) => Err(lost(&error)),
        }
    }

    /// A connection to work with. While the server is away, most callers hear at once why.
    pub(super) async fn client(&self) -> Result<Object, StoreError> {
        // One that is there need not be made.
        if self.pool.status().available == 0 {
            self.reconnect.turn()?;
        }
        let got = tokio::time::timeout(self.response_timeout, self.pool.get()).await;
        let got = got.map_err(|_| StoreError::unavailable("no connection was to be had in time"))?;
        match got {
            Ok(client) => {
                self.reconnect.succeeded();
                Ok(client)
            }
            Err(error) => {
                let says = errors::no_connection(&error);
                if matches!(error, PoolError::Backend(_)) {
                    self.reconnect.failed(&says);
                }
                Err(says)
            }
        }
    }

    /// Gives the connection back, or closes it when anything went wrong: that ends its transaction.
    pub(super) fn settle<T>(&self, client: Object, outcome: Result<T, Trouble>) -> Result<T, Trouble> {
        if outcome.is_err() {
            drop(Object::take(client));
        }
        outcome
    }
}

/// The callers' end. Dropping it stops the thread and waits for it.
pub(super) struct Link {
    pub(super) claims: Joiner<Command, Answer>,
    /// For everything about keys but claims, heartbeats and looks.
    pub(super) ends: Joiner<Command, Answer>,
    /// For heartbeats, which must not queue behind bulk.
    pub(super) heartbeats: Joiner<Command, Answer>,
    /// For looks.
    pub(super) looks: Joiner<StoreKey, LookAnswer>,
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
    /// When the system gives no thread.
    pub(super) fn start(shared: Shared, purge: Purge) -> Result<Self, StoreError> {
        let shared = Arc::new(shared);
        let (claims, claim_carrier) = batch::channel();
        let (ends, end_carrier) = batch::channel();
        let (heartbeats, heartbeat_carrier) = batch::channel();
        let (looks, look_carrier) = batch::channel();
        let (purges, asked_purges) = mpsc::channel(MAX_WAITING_PURGES);
        let no_thread = |error| StoreError::unavailable(format!("no thread: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime: Runtime = runtime.map_err(no_thread)?;
        let (handle, stop) = (runtime.handle().clone(), CancellationToken::new());
        let (stopped, driven) = (stop.clone(), Arc::clone(&shared));
        let drive = move || {
            batch::let_calls_gather();
            let lanes = async {
                tokio::join!(
                    carry(claim_carrier, FLIGHTS, |batch| execute(Arc::clone(&driven), batch)),
                    carry(end_carrier, FLIGHTS, |batch| execute(Arc::clone(&driven), batch)),
                    carry(heartbeat_carrier, 1, |batch| execute(Arc::clone(&driven), batch)),
                    carry(look_carrier, 1, |batch| look(Arc::clone(&driven), batch)),
                    purge_when_asked(&driven, &purge, asked_purges),
                    purge.walk_in_the_background(&driven),
                )
            };
            runtime.block_on(async {
                tokio::select! {
                    () = stopped.cancelled() => {}
                    _ = lanes => {}
                }
            });
            // A name that is still being resolved keeps nobody waiting.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("oncegate-postgres".to_owned()).spawn(drive);
        let thread = Some(thread.map_err(no_thread)?);
        Ok(Self { claims, ends, heartbeats, looks, purges, shared, handle, stop, thread })
    }

    /// Walks through the table once, at full speed, and returns how many rows it has removed.
    pub(super) async fn purge(&self) -> Result<u64, StoreError> {
        let (caller, answer) = oneshot::channel();
        let ended = || StoreError::unavailable("the store's thread ended");
        self.purges.send(caller).await.map_err(|_| ended())?;
        answer.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Whether the sessions have the settings of [`session_options`]. A pooler may have dropped them.
    ///
    /// # Errors
    /// When no session can be had.
    pub(super) async fn has_settings(&self) -> Result<bool, StoreError> {
        let mark = session_mark(self.shared.response_timeout);
        self.run(move |client| async move {
            let told = client.simple_query(&format!("SELECT current_setting('{SESSION_MARK}', true)")).await;
            let is_ours = |message: &SimpleQueryMessage| {
                matches!(message, SimpleQueryMessage::Row(row) if row.get(0) == Some(&mark))
            };
            let told = told.map(|messages| messages.iter().any(is_ours));
            (client, told.map_err(|error| errors::not_executed(&error)))
        })
        .await
    }

    /// Runs something on the thread, with a connection of its own, which takes no longer than an answer may.
    pub(super) async fn run<T, F, Work>(&self, work: Work) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = (Object, Result<T, Trouble>)> + Send,
        Work: FnOnce(Object) -> F + Send + 'static,
    {
        self.run_for(self.shared.response_timeout, work).await
    }

    /// The same for something that may take as long as `limit`.
    pub(super) async fn run_for<T, F, Work>(&self, limit: Duration, work: Work) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = (Object, Result<T, Trouble>)> + Send,
        Work: FnOnce(Object) -> F + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        let task = self.handle.spawn(async move {
            let client = shared.client().await?;
            // Not settled means dropped in the middle of something: then nobody knows what was executed.
            let worked = tokio::time::timeout(limit, work(client)).await;
            let (client, outcome) =
                worked.map_err(|_| StoreError::unknown("the server did not answer in time"))?;
            shared.settle(client, outcome).map_err(|trouble| trouble.error)
        });
        task.await.unwrap_or_else(|_| Err(StoreError::unknown("the store's thread ended")))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // Nobody is left who waits for an answer, so the thread ends at its next wake-up. Whether it
            // had panicked does not matter any more.
            let _ = thread.join();
        }
    }
}

impl Item for Command {
    fn bytes(&self) -> usize {
        use oncegate_core::rules::Operation;
        COMMAND_BYTES
            + match &self.operation {
                Operation::Complete { result, .. } => result.len(),
                Operation::Release { reason, .. } | Operation::Fail { reason, .. } => reason.len(),
                _ => 0,
            }
    }
}

impl Item for StoreKey {
    fn bytes(&self) -> usize {
        self.as_str().len()
    }
}

/// Carries batch after batch, at most `flights` at once, until every caller is gone.
async fn carry<T: Item, A, F>(
    mut carrier: Carrier<T, A>,
    flights: usize,
    send_batch: impl Fn(Batch<T, A>) -> F,
) where
    F: Future<Output = ()>,
{
    let mut under_way = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            Some(()) = under_way.next(), if !under_way.is_empty() => {}
            batch = carrier.next(|| UNDIVIDED_ITEMS), if under_way.len() < flights => match batch {
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
        // The caller may have stopped waiting; what was removed stays removed.
        let _ = caller.send(purge.walk(shared, None).await.map(|(_, removed)| removed));
    }
}

async fn execute(shared: Arc<Shared>, mut batch: Batch<Command, Answer>) {
    let commands = batch.take_items();
    match direct::execute(&shared, &commands).await {
        Ok(answers) => batch.answer(answers),
        Err(error) => batch.answer_all(&Err(error)),
    }
}

async fn look(shared: Arc<Shared>, mut batch: Batch<StoreKey, LookAnswer>) {
    let keys = batch.take_items();
    match transaction::look(&shared, &keys).await {
        Ok(answers) => batch.answer(answers),
        Err(error) => batch.answer_all(&Err(error)),
    }
}
