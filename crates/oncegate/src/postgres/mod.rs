//! Records in PostgreSQL: one row each, in a table that people can read.
//!
//! Concurrent calls travel together. Claims of keys that have no record are one `INSERT`, and completions by their
//! owners one `UPDATE`, each a transaction of one round trip. What these leave, and all else, is a transaction
//! of two: it locks its rows in the order of their keys, runs
//! [`rules::apply`](oncegate_core::rules::apply) on what they hold, writes what came out, and commits. Time is
//! the server's clock. See [`PostgresStore`].
//!
//! - `schema`: the tables; `row`: a record as columns, and the three statements
//! - `direct`: a batch, the straight way first; `transaction`: a batch by the rules; `link`: the thread, the connections and the queues
//! - `commit`: a record completed inside a transaction of the user's own
//! - `journal`: what happened to a key, written by triggers
//! - `purge`: expired records; `reconnect`: how often a server that is away is tried; `notices`: warnings about a commit
//! - `builder` and `checkup`: connecting, and what is refused; `errors`: what each SQLSTATE means
//!
//! An operator reads it while it is in use:
//!
//! ```sql
//! SELECT key, state, attempt, reason, to_timestamp(expires_at_ms / 1000) FROM oncegate_records;
//! ```
//!
//! An expired record counts as absent; a purge in the background removes what is left of them.

mod builder;
mod checkup;
mod commit;
mod direct;
mod errors;
mod journal;
mod link;
mod notices;
mod purge;
mod reconnect;
mod row;
mod schema;
#[cfg(feature = "testing")]
mod testing;
mod transaction;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use deadpool_postgres::{Object, Pool};
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Checkup, Command, RecordSnapshot, Store, StoreError, Upkeep};

use self::builder::{Allowed, Origin};
use self::errors::Trouble;
use self::link::Link;
use self::transaction::Answer;
use crate::batch::{CarrierGone, Item, Joiner};
use crate::journal::Entry;
use crate::purge::Backlog;

pub use self::builder::PostgresBuilder;
pub use self::schema::SchemaChange;

/// Records in one PostgreSQL database, version 14 or later.
///
/// A clone is another handle on the same connections. When the server goes away, calls fail with
/// [`StoreError::Unavailable`] and succeed again once it is back; a connection that breaks while a
/// transaction is being committed means [`StoreError::Unknown`]. What was answered survives a crash of the
/// server, and a failover as far as `synchronous_commit` and the standbys say.
///
/// The tables are made once, by [`create_schema`](Self::create_schema) or `oncegate migrate`; to run, a role
/// needs the few rights of [`grant_sql`](Self::grant_sql) and none to make tables.
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
    /// `host:port/database`, or empty when a pool was brought.
    address: String,
    allowed: Allowed,
    journaled: bool,
    backlog: Arc<Backlog>,
}

impl PostgresStore {
    /// Connects to `postgres://[user[:password]@]host[:port]/database` with the default options.
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

    /// Options for a store over a pool of the caller's, with TLS for example. It needs room for eight
    /// connections, and should be the store's own: the store's thread drives what it opens.
    pub fn from_pool(pool: Pool) -> PostgresBuilder {
        PostgresBuilder::new(Origin::Pool(pool))
    }

    /// The statements that make the tables, for those who make them by other means. They can be repeated.
    pub fn schema_sql() -> String {
        schema::sql()
    }

    /// The statements that let a role run consumers: it needs `SELECT`, `INSERT`, `UPDATE` and `DELETE` on the
    /// tables, and no more.
    pub fn grant_sql(role: &str) -> String {
        schema::grants(role)
    }

    /// The statement that completes a record inside a transaction of the caller's own, for clients that
    /// [`Attempt::commit_with`](crate::Attempt::commit_with) has no adapter for.
    ///
    /// Its parameters come from [`Attempt::completing`](crate::Attempt::completing): `$1` the key as text, `$2` the
    /// bytes of the token, `$3` the bytes of the result, `$4` the retention in milliseconds. It must change
    /// exactly one row: roll back if it does not. Make it the transaction's last statement before `COMMIT`.
    pub fn complete_sql() -> &'static str {
        row::COMPLETE
    }

    /// The statements that make the [`journal`](Self::journal), for those who make it by other means, after the
    /// tables. They can be repeated. Nobody needs rights on it but those who read it.
    pub fn journal_sql() -> String {
        journal::sql()
    }

    /// Makes the tables, and the journal of a store that is [`journaled`](PostgresBuilder::journaled), or brings those
    /// of an earlier release to this one's format. When they are as they should be, it does nothing and needs no rights;
    /// otherwise it needs a role that may create tables.
    ///
    /// It waits up to a minute for others who are making them, and as long for each of the server's answers, whatever
    /// the [`response_timeout`](PostgresBuilder::response_timeout) is.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the role lacks rights or the tables have the format of a later release.
    pub async fn create_schema(&self) -> Result<(), StoreError> {
        let journaled = self.inner.journaled;
        let create = move |client: Object| async move {
            let created = schema::create(&client, journaled).await;
            (client, created)
        };
        self.inner.link.run_for(schema::LIMIT, create).await
    }

    /// What [`create_schema`](Self::create_schema) would do, without doing it.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the tables have the format of a later release.
    pub async fn schema_change(&self) -> Result<SchemaChange, StoreError> {
        let journaled = self.inner.journaled;
        let read = move |client: Object| async move {
            let change = schema::change(&client, journaled).await;
            (client, change)
        };
        self.inner.link.run(read).await
    }

    /// What happened to `key`, the oldest first, at most the last `most` entries; none if the database has no
    /// [journal](PostgresBuilder::journaled).
    ///
    /// An entry is there if and only if the change is that it tells of, also one in a transaction of the caller's own. It
    /// names the connection's `application_name` as who did it. The purge of a record takes its entries along.
    ///
    /// # Errors
    /// When the server cannot be reached, or the role may not read the table `oncegate_journal`.
    pub async fn journal(&self, key: &StoreKey, most: u32) -> Result<Vec<Entry>, StoreError> {
        let key = key.clone();
        let read = move |client: Object| async move {
            let entries = journal::read(&client, &key, most).await;
            (client, entries)
        };
        self.inner.link.run(read).await
    }

    /// Removes the rows of expired records now, at full speed, and returns how many.
    ///
    /// Expired records count as absent anyway: this frees space. By default it happens in the background, see
    /// [`PostgresBuilder::purge_every`]. Rows that somebody works on are passed over and nobody waits for it.
    /// If it is dropped or fails half-way, what it has removed stays removed.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses, or the archive keeps nothing.
    pub async fn purge(&self) -> Result<u64, StoreError> {
        self.inner.link.purge().await
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("address", &self.inner.address).finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let link = &self.inner.link;
        let mut lanes = commands.iter().map(Lane::of);
        match lanes.next() {
            Some(lane) if lanes.all(|other| other == lane) => ask(link.joiner(lane), commands).await,
            // On the heap: every call's future would carry the room for it.
            _ => Box::pin(self.inner.execute_mixed(commands)).await,
        }
    }

    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        let joiner = self.inner.link.joiner(Lane::of(&command));
        joiner.submit_one(command).await.unwrap_or_else(|gone| Err(ended(&gone)))
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        ask(&self.inner.link.looks, keys).await
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        let (scope, proposed) = (scope.as_str().to_owned(), proposed.to_owned());
        let expected = expected.map(str::to_owned);
        let describe = move |client: Object| async move {
            let described = keep_descriptor(&client, &scope, expected.as_deref(), &proposed).await;
            (client, described)
        };
        self.inner.link.run(describe).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        let scope = scope.as_str().to_owned();
        let read = move |client: Object| async move {
            let held = held_descriptor(&client, &scope).await;
            (client, held)
        };
        self.inner.link.run(read).await
    }

    fn upkeep(&self) -> Upkeep {
        Upkeep { oldest_expired: self.inner.backlog.age(), log_bytes: None }
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        let Inner { link, address, allowed, journaled, .. } = &*self.inner;
        let (address, allowed, journaled) = (address.clone(), *allowed, *journaled);
        let check = move |client: Object| async move {
            let checkup = checkup::ask(&client, &address, allowed, journaled).await;
            (client, checkup)
        };
        link.run(check).await
    }
}

impl Inner {
    /// Commands of several lanes, which travel at the same time.
    async fn execute_mixed(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let lanes: Vec<Lane> = commands.iter().map(Lane::of).collect();
        let (claims, others): (Vec<_>, _) =
            commands.into_iter().partition(|command| Lane::of(command) == Lane::Claims);
        let (heartbeats, ends) =
            others.into_iter().partition(|command| Lane::of(command) == Lane::Heartbeats);
        let asked = futures_util::future::join3(
            ask(self.link.joiner(Lane::Claims), claims),
            ask(self.link.joiner(Lane::Heartbeats), heartbeats),
            ask(self.link.joiner(Lane::Ends), ends),
        );
        let (claims, heartbeats, ends) = asked.await;
        let (mut claims, mut heartbeats, mut ends) =
            (claims.into_iter(), heartbeats.into_iter(), ends.into_iter());
        let answer = |lane| {
            let lane = match lane {
                Lane::Claims => &mut claims,
                Lane::Heartbeats => &mut heartbeats,
                Lane::Ends => &mut ends,
            };
            lane.next().unwrap_or_else(|| Err(StoreError::unknown("no answer")))
        };
        lanes.into_iter().map(answer).collect()
    }
}

impl Link {
    fn joiner(&self, lane: Lane) -> &Joiner<Command, Answer> {
        match lane {
            Lane::Claims => &self.claims,
            Lane::Heartbeats => &self.heartbeats,
            Lane::Ends => &self.ends,
        }
    }
}

/// What travels together: so a batch of claims is one statement, and one of completions too, and heartbeats have a
/// connection of their own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lane {
    Claims,
    Heartbeats,
    Ends,
}

impl Lane {
    fn of(command: &Command) -> Self {
        match command.operation {
            Operation::Claim { .. } => Self::Claims,
            Operation::Extend { .. } => Self::Heartbeats,
            _ => Self::Ends,
        }
    }
}

/// Sends items; there is one answer for each.
async fn ask<T: Item, A>(
    joiner: &Joiner<T, Result<A, StoreError>>,
    items: Vec<T>,
) -> Vec<Result<A, StoreError>> {
    let count = items.len();
    joiner.submit(items).await.unwrap_or_else(|gone| (0..count).map(|_| Err(ended(&gone))).collect())
}

fn ended(gone: &CarrierGone) -> StoreError {
    let ended = "the store's thread ended";
    if gone.unsent { StoreError::unavailable(ended) } else { StoreError::unknown(ended) }
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
            client.execute(update, &[&scope, &expected, &proposed]).await
        }
    };
    kept.map_err(|error| errors::in_doubt(&error))?;
    let held = held_descriptor(client, scope).await?;
    Ok(held.unwrap_or_else(|| expected.unwrap_or_default().to_owned()))
}

async fn held_descriptor(client: &Object, scope: &str) -> Result<Option<String>, Trouble> {
    let select = "SELECT descriptor FROM oncegate_descriptors WHERE scope = $1";
    let row = client.query_opt(select, &[&scope]).await.map_err(|error| errors::not_executed(&error))?;
    Ok(row.map(|row| row.get(0)))
}
