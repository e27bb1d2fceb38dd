//! Records in PostgreSQL: one row each, in a table that people can read.
//!
//! Concurrent calls share statements. Claims of keys that have no record are one `INSERT`, and
//! completions by their owners one `UPDATE`, each a transaction of one round trip. Commands that
//! these do not settle, and all others, use a transaction of two round trips: it locks its rows in
//! the order of their keys, runs [`rules::apply`](oncegate_core::rules::apply) on their records,
//! writes the new records, and commits. Time is the server's clock. See [`PostgresStore`].
//!
//! - `schema`: the tables; `row`: a record as columns, and the three statements
//! - `direct`: a batch by single statements; `transaction`: a batch by the rules
//! - `link`: the thread and the queues; `shared`: the connections, and `session`: their settings
//! - `commit`: completes a record inside the user's transaction; `transactional`: transactions that
//!   the runtime opens, and `sessions`: what each process has received for them
//! - `outbox`: messages that are written in the user's transaction and published by a relay
//! - `journal`: the history of a key, written by triggers
//! - `purge`: expired records; `reconnect`: the pace of reconnecting; `notices`: warnings about a
//!   commit
//! - `builder` and `checkup`: connecting, and what is refused; `errors`: what each SQLSTATE means
//!
//! An operator can read the table while it is in use:
//!
//! ```sql
//! SELECT key, state, attempt, reason, to_timestamp(expires_at_ms / 1000) FROM oncegate_records;
//! ```
//!
//! An expired record counts as absent; a purge in the background removes its row.
//!
//! # Not obvious
//!
//! Implementation notes: facts about PostgreSQL that this code depends on.
//!
//! - A prepared statement keeps the plan that was best when the table was small: a sequential scan.
//!   The time per batch then grows with the table until autovacuum runs. So the store's sessions
//!   have sequential scans, hash joins and merge joins turned off. This also keeps rows in the
//!   order of the keys, which is why batches do not deadlock.
//! - BEGIN and six `SET LOCAL` would be a large part of a batch's cost. Sessions are opened with
//!   these settings (`options`), and a single statement is a transaction. A connection pooler
//!   refuses such a session or drops its settings. A setting of oncegate's own detects that, and
//!   then each transaction sets them.
//! - Claims and completions use separate transactions: one with both would lock its keys in two
//!   orders.
//! - A claim that conflicts with an uncommitted row waits for it. A command that `direct` has not
//!   settled is not refused: it runs by the rules, which read the row.
//! - The outcome of a statement whose connection broke is unknown. The store sends the same
//!   commands by the rules, under a lock, and compares their tokens.
//! - `BEGIN … READ WRITE` would override a server that was set read-only because its disk is nearly
//!   full. The store does not send it.
//! - The purge goes by page (`ctid`), not by key: keys are digests, so the primary key's order is
//!   random on the disk.
//! - A `ctid` identifies a row within one partition only, so on a partitioned table the purge
//!   deletes by key.
//! - A commit becomes visible when its wait for standbys has ended, however it ended. Any later
//!   commit that is waited for proves that the standbys have the earlier one too, provided that it
//!   wrote to the log: a transaction that only takes a number does not wait.
//! - PostgreSQL checks for a deadlock once, when a session has waited for `deadlock_timeout`.

mod builder;
mod checkup;
mod commit;
mod direct;
mod errors;
mod journal;
mod link;
mod notices;
mod outbox;
mod purge;
mod reconnect;
mod removal;
mod rights;
mod row;
mod schema;
mod session;
mod sessions;
mod settings;
mod shared;
#[cfg(feature = "testing")]
mod testing;
mod tls;
mod transaction;
mod transactional;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use deadpool_postgres::{Object, Pool};
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Checkup, Command, RecordSnapshot, Store, StoreError, Upkeep};

use self::builder::{Origin, Reached};
use self::errors::Trouble;
use self::link::Link;
use self::transaction::CommandResult;
use self::transactional::Connecting;
use oncegate_runtime::journal::JournalEntry;
use oncegate_store_toolkit::batch::{CarrierGone, Item, Joiner};
use oncegate_store_toolkit::purge::Backlog;

pub use self::builder::PostgresBuilder;
pub use self::outbox::{OutboxRow, OutboxTransaction, PostgresOutbox};
pub use self::schema::SchemaChange;
pub use self::settings::PostgresSettings;
#[cfg(feature = "sqlx")]
pub use self::transactional::SqlxTransactions;
pub use self::transactional::{Isolation, PostgresTransaction, PostgresTransactions};

/// Records in one PostgreSQL database, version 14 or later.
///
/// A clone is another handle on the same connections. When the server goes away, calls fail with
/// [`StoreError::Unavailable`] and succeed again once it is back; a connection that breaks while a
/// transaction is being committed means [`StoreError::Unknown`]. Confirmed writes survive a crash
/// of the server, and a failover as far as `synchronous_commit` and the standbys guarantee.
///
/// The tables are created once, by [`create_schema`](Self::create_schema) or `oncegate migrate`. To
/// run, a role needs only the rights of [`grant_sql`](Self::grant_sql), and none to create tables.
///
/// ```no_run
/// # async fn example() -> Result<(), oncegate_core::store::StoreError> {
/// use oncegate::postgres::PostgresStore;
///
/// let store = PostgresStore::connect("postgres://localhost/billing").await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PostgresStore {
    inner: Arc<Inner>,
}

struct Inner {
    link: Link,
    /// For transactions that the runtime opens; `None` when the caller supplied a pool.
    connecting: Option<Connecting>,
    reached: Reached,
    settings: PostgresSettings,
    backlog: Arc<Backlog>,
}

impl PostgresStore {
    /// Connects to `postgres://[user[:password]@]host[:port]/database` with the default options.
    ///
    /// Connections to other machines use TLS and verify the server's certificate; libpq's
    /// parameters `sslmode`, `sslrootcert`, `sslcert` and `sslkey` in the URL change that.
    ///
    /// # Errors
    /// When the URL is invalid, the server cannot be reached, or it refuses the user.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Options for a store at `url`.
    pub fn builder(url: &str) -> PostgresBuilder {
        PostgresBuilder::new(Origin::Url(url.to_owned()))
    }

    /// Options for a store over the caller's pool, with TLS for example. The pool needs room for
    /// eight connections. Use a separate pool: the store's thread drives the connections that the
    /// store opens.
    pub fn from_pool(pool: Pool) -> PostgresBuilder {
        PostgresBuilder::new(Origin::Pool(pool))
    }

    /// The statements that create the tables, for other tools to run. They can be repeated.
    pub fn schema_sql() -> String {
        schema::sql()
    }

    /// The statements that grant a role the rights to run consumers: `SELECT`, `INSERT`, `UPDATE`
    /// and `DELETE` on the tables, and no more.
    pub fn grant_sql(role: &str) -> String {
        schema::grants(role)
    }

    /// The statement that completes a record inside the caller's transaction, for clients that
    /// [`Attempt::commit_with`](oncegate_runtime::Attempt::commit_with) has no adapter for.
    ///
    /// Its parameters come from [`Attempt::completing`](oncegate_runtime::Attempt::completing):
    /// `$1` the key as text, `$2` the bytes of the token, `$3` the bytes of the result, `$4` the
    /// retention in milliseconds. It must change exactly one row: roll back if it does not. Make it
    /// the transaction's last statement before `COMMIT`.
    pub fn complete_sql() -> &'static str {
        row::COMPLETE
    }

    /// The statements that create the [`journal`](Self::journal) after the tables, for other tools
    /// to run. They can be repeated. Only a role that reads the journal needs rights on it.
    pub fn journal_sql() -> String {
        journal::sql()
    }

    /// Creates the tables, or migrates those of an earlier release to this release's format.
    ///
    /// Also creates the journal of a store that is [`journaled`](PostgresBuilder::journaled). If
    /// nothing is to be done, no rights are needed; otherwise the role must be allowed to create
    /// tables. It waits up to a minute for other processes that are creating the tables, and up to
    /// a minute for each answer of the server, independent of the
    /// [`response_timeout`](PostgresBuilder::response_timeout).
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the role lacks rights or the tables have the format of a later
    /// release.
    pub async fn create_schema(&self) -> Result<(), StoreError> {
        let journaled = self.inner.settings.journal;
        self.inner
            .link
            .run_for(schema::LIMIT, move |client| async move {
                let created = schema::create(&client, journaled).await;
                (client, created)
            })
            .await
    }

    /// Returns what [`create_schema`](Self::create_schema) would do, without doing it.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the tables have the format of a later release.
    pub async fn schema_change(&self) -> Result<SchemaChange, StoreError> {
        let journaled = self.inner.settings.journal;
        self.inner
            .link
            .run(move |client| async move {
                let change = schema::change(&client, journaled).await;
                (client, change)
            })
            .await
    }

    /// Returns the last journal entries of `key`, at most `most` of them, the oldest first.
    ///
    /// Empty if the database has no [journal](PostgresBuilder::journaled). An entry exists if and
    /// only if its change was committed, also one in the caller's own transaction. It contains the
    /// `application_name` of the connection that made the change. The purge of a record removes its
    /// entries too.
    ///
    /// # Errors
    /// When the server cannot be reached, or the role may not read the table `oncegate_journal`.
    pub async fn journal(
        &self,
        key: &StoreKey,
        most: u32,
    ) -> Result<Vec<JournalEntry>, StoreError> {
        let key = key.clone();
        self.inner
            .link
            .run(move |client| async move {
                let entries = journal::read(&client, &key, most).await;
                (client, entries)
            })
            .await
    }

    /// Removes the rows of expired records now, at full speed, and returns how many.
    ///
    /// Expired records count as absent anyway: this frees space. By default it happens in the
    /// background, see [`PostgresBuilder::purge_every`]. It skips rows that are locked, and blocks
    /// no other transaction. If it is dropped or fails half-way, the rows that it has removed stay
    /// removed.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses, or the archive fails.
    pub async fn purge(&self) -> Result<u64, StoreError> {
        self.inner.link.purge().await
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("address", &self.inner.reached.address)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let link = &self.inner.link;
        let mut classes = commands.iter().map(CommandClass::of);
        match classes.next() {
            Some(class) if classes.all(|other| other == class) => {
                ask(link.joiner(class), commands).await
            }
            // Boxed: otherwise the future of every call would be larger.
            _ => Box::pin(self.inner.execute_mixed(commands)).await,
        }
    }

    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        let joiner = self.inner.link.joiner(CommandClass::of(&command));
        joiner
            .submit_one(command)
            .await
            .unwrap_or_else(|gone| Err(ended(&gone)))
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        ask(&self.inner.link.reads, keys).await
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        let scope = scope.as_str().to_owned();
        let proposed = proposed.to_owned();
        let expected = expected.map(str::to_owned);
        self.inner
            .link
            .run(move |client| async move {
                let described =
                    keep_descriptor(&client, &scope, expected.as_deref(), &proposed).await;
                (client, described)
            })
            .await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        let scope = scope.as_str().to_owned();
        self.inner
            .link
            .run(move |client| async move {
                let held = held_descriptor(&client, &scope).await;
                (client, held)
            })
            .await
    }

    fn upkeep(&self) -> Upkeep {
        Upkeep {
            oldest_expired: self.inner.backlog.age(),
            ..Upkeep::default()
        }
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        let Inner {
            link,
            reached,
            settings,
            ..
        } = &*self.inner;
        let reached = reached.clone();
        let settings = settings.clone();
        link.run(move |client| async move {
            let checkup = checkup::ask(&client, &reached, &settings).await;
            (client, checkup)
        })
        .await
    }
}

impl Inner {
    /// Commands of several classes, which are sent at the same time.
    async fn execute_mixed(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let classes: Vec<CommandClass> = commands.iter().map(CommandClass::of).collect();
        let (claims, others): (Vec<_>, _) = commands
            .into_iter()
            .partition(|command| CommandClass::of(command) == CommandClass::Claims);
        let (heartbeats, ends) = others
            .into_iter()
            .partition(|command| CommandClass::of(command) == CommandClass::Heartbeats);
        let asked = futures_util::future::join3(
            ask(self.link.joiner(CommandClass::Claims), claims),
            ask(self.link.joiner(CommandClass::Heartbeats), heartbeats),
            ask(self.link.joiner(CommandClass::Ends), ends),
        );
        let (claims, heartbeats, ends) = asked.await;
        let mut claims = claims.into_iter();
        let mut heartbeats = heartbeats.into_iter();
        let mut ends = ends.into_iter();
        classes
            .into_iter()
            .map(|class| {
                let answers = match class {
                    CommandClass::Claims => &mut claims,
                    CommandClass::Heartbeats => &mut heartbeats,
                    CommandClass::Ends => &mut ends,
                };
                answers
                    .next()
                    .unwrap_or_else(|| Err(StoreError::unknown("no answer")))
            })
            .collect()
    }
}

impl Link {
    fn joiner(&self, class: CommandClass) -> &Joiner<Command, CommandResult> {
        match class {
            CommandClass::Claims => &self.claims,
            CommandClass::Heartbeats => &self.heartbeats,
            CommandClass::Ends => &self.ends,
        }
    }
}

/// The class of a command, which has a queue of its own: a batch of claims is one statement, a
/// batch of completions too, and heartbeats have a separate connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CommandClass {
    Claims,
    Heartbeats,
    Ends,
}

impl CommandClass {
    fn of(command: &Command) -> Self {
        match command.operation {
            Operation::Claim { .. } => Self::Claims,
            Operation::Extend { .. } => Self::Heartbeats,
            _ => Self::Ends,
        }
    }
}

/// Sends items. Returns one answer for each.
async fn ask<T: Item, A>(
    joiner: &Joiner<T, Result<A, StoreError>>,
    items: Vec<T>,
) -> Vec<Result<A, StoreError>> {
    let count = items.len();
    joiner
        .submit(items)
        .await
        .unwrap_or_else(|gone| (0..count).map(|_| Err(ended(&gone))).collect())
}

fn ended(gone: &CarrierGone) -> StoreError {
    let ended = "the store's thread ended";
    if gone.unsent {
        StoreError::unavailable(ended)
    } else {
        StoreError::unknown(ended)
    }
}

async fn keep_descriptor(
    client: &Object,
    scope: &str,
    expected: Option<&str>,
    proposed: &str,
) -> Result<String, Trouble> {
    let kept = match expected {
        None => {
            let insert = "INSERT INTO oncegate_descriptors (scope, descriptor) VALUES ($1, $2) \
                          ON CONFLICT (scope) DO NOTHING";
            client.execute(insert, &[&scope, &proposed]).await
        }
        Some(expected) => {
            let update = "UPDATE oncegate_descriptors SET descriptor = $3 \
                          WHERE scope = $1 AND descriptor = $2";
            client
                .execute(update, &[&scope, &expected, &proposed])
                .await
        }
    };
    kept.map_err(|error| errors::in_doubt(&error))?;
    let held = held_descriptor(client, scope).await?;
    Ok(held.unwrap_or_else(|| expected.unwrap_or_default().to_owned()))
}

async fn held_descriptor(client: &Object, scope: &str) -> Result<Option<String>, Trouble> {
    let row = client.query_one(row::DESCRIPTOR, &[&scope]).await;
    let row = row.map_err(|error| errors::not_executed(&error))?;
    if row.get("standby") {
        return Err(errors::standby().into());
    }
    Ok(row.get("descriptor"))
}
