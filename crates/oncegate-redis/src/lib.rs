//! Records in Redis or Valkey: one key each, changed by one Lua script per operation (`lua/`).
//!
//! Concurrent calls share one pipeline per round trip. Each server has two connections, one for
//! bulk and one for heartbeats. Heartbeats are driven by a thread that all stores of the process
//! share, bulk by the runtime of its callers. See [`RedisStore`].
//!
//! # Not obvious
//!
//! Implementation notes: facts about Redis and Valkey that this code depends on.
//!
//! - `appendfsync everysec` does not keep every answered write when the *server* is killed. While a
//!   sync of its file is running, Redis delays the next write for up to two seconds and answers all
//!   the same. Tests that kill a server and need its data start it with `RedisServer::synced`.
//! - A script with `allow-oom` runs on a full server. A script without a shebang line runs too, and
//!   its *writes* are refused one by one. `claim` has no shebang: it must answer completed keys on
//!   a full server and refuse new ones.
//! - `SET … NX GET` is refused on a full server even for existing keys: `claim` falls back to GET
//!   on that error.
//! - A Lua error does not undo earlier writes. Everything is checked before the first write.
//! - `shortcut` sends a plain command where one is enough, and one script call for many keys where
//!   several first attempts share a pipeline (not in a cluster: their slots differ; nor after a
//!   CROSSSLOT, which a proxy in front of several servers may answer although its INFO has
//!   `cluster_enabled:0`). Every answer that does not settle the command is followed by the rules'
//!   script, so the rules stand in those scripts alone. The connection's greeting reports what each
//!   node supports; if a node then refuses a shortcut, the script runs instead.
//! - `lua/lib/record.lua` is inserted where a script includes it, after the path of nearly every
//!   call, so that this path does not pay for it: creating a function costs a part of a microsecond
//!   for each call.
//! - With `compact`, `lua/compact.lua` shadows `redis` for the script that follows it: the scripts
//!   of operations do not know buckets. All but `claim` read a record's own key first; `claim` must
//!   read the bucket before it writes.
//! - While a slot moves, a call with two keys is refused (TRYAGAIN) unless both are on one node and
//!   exist, for as long as the move takes. So heartbeats of compact keys first ask about the
//!   record's own key alone.
//! - Valkey 9 unpacks a hash as soon as one field has an expiry, so buckets keep each field's
//!   expiry in its value.
//! - After `SCRIPT FLUSH`, a restart or a failover, EVALSHA answers NOSCRIPT in the middle of a
//!   pipeline. Those commands were not executed, and only they are sent again.
//! - A demoted primary keeps its connections and answers reads with old data. `read` is not marked
//!   `no-writes`, so such a server refuses it. READONLY, MASTERDOWN and UNBLOCKED replace the
//!   connection.
//! - Checking a connection out of a pool for each call costs the server three times as much as the
//!   call.
//! - The cluster client of redis-rs repeats by itself what an I/O error has made unknown, refuses a
//!   pipeline over several slots, and cannot report which shard is down. So `cluster` keeps the
//!   slot map, and each node has two connections, as a single server has.
//! - ASKING applies to the next command only, and a command that finds no script has used it up:
//!   both are sent again.
//! - `WAIT` counts what its own connection wrote (Redis 7.0: what was written when its last command
//!   ran; newer servers and Valkey: only its own writes). A repeat, or a record that was found
//!   completed, writes nothing. So where a durability is required, the scripts write settled
//!   records once more: `PEXPIREAT` with the same expiry in `claim` and `read` (allowed on a full
//!   server, unlike SET), and SET with KEEPTTL where `allow-oom` allows it.
//! - After a full synchronisation a replica rewrites its append-only file. If it is killed before
//!   that is done, it has nothing.
//! - A restart from the append-only file begins a new replication history, so offsets prove nothing
//!   about it: the last completion is the witness. After a failover, `second_repl_offset` holds the
//!   offset where the histories part.
//! - On a busy server the last completion is younger than a FLUSHALL by the time of the next check,
//!   and a key that has run again since looks as if nothing was lost. So completions that four
//!   earlier checks have seen are read as well.
//! - An INFO reply may be older than one that another connection has read since. It is compared
//!   with what was known when it was requested.
//! - A sentinel that was cut off still names the old primary. Of a majority of sentinels, the one
//!   with the largest configuration epoch is believed.
//! - Keys of a shard that is down wait in the outage of that shard (`Store::shard`) and do not
//!   delay other keys.
//! - The error codes are a table (`errors`). An error code is never an answer about a key.

mod address;
mod buckets;
mod builder;
mod checkup;
mod cluster;
mod connector;
mod direct;
mod driver;
mod durability;
mod errors;
mod first_attempt;
mod info;
mod layout;
mod link;
mod login;
mod losses;
mod memory;
mod opener;
mod pipeline;
mod removal;
mod replies;
mod report;
mod request;
mod rights;
mod scripts;
mod sentinel;
mod settings;
mod shared;
mod shortcut;
mod slots;
mod sources;
mod store;
#[cfg(feature = "tls")]
mod tls;
mod topology;
mod watch;
mod witnesses;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use deadpool_redis::Pool;
use oncegate_core::key::Scope;
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, StoreError};
use parking_lot::Mutex;
use redis::Value;

use self::builder::Origin;
use self::driver::Driver;
use self::link::PipeName;
use self::losses::Losses;
use self::memory::FullestServer;
use self::replies::RawReply;
use self::request::Request;
use self::scripts::Scripts;
use self::topology::Topology;

pub use self::builder::RedisBuilder;
pub use self::durability::Durability;
pub use self::report::{ServerReport, SlowCall};
pub use self::settings::RedisSettings;

/// Records in Redis or Valkey, version 7.0 or later: one server, a primary that Sentinel watches
/// over, or a cluster.
///
/// A clone is another handle on the same connections. When a server goes away, calls fail at once
/// with [`StoreError::Unavailable`]. The store reconnects by itself with a few tries a second; then
/// calls succeed again. Calls that were in flight when the connection broke return
/// [`StoreError::Unknown`]. In a cluster, only the keys of that server are affected.
///
/// | URL | connects to |
/// |---|---|
/// | `redis://[user[:password]@]host[:port][/database]` | this server |
/// | `redis+cluster://[user[:password]@]host[:port],host[:port]…` | the cluster that these nodes belong to; one that answers is enough |
/// | `redis+sentinel://[user[:password]@]host[:port],host[:port]…/name[/database]` | the primary that these sentinels know by this name; port 26379 when none is given |
///
/// With `rediss` instead of `redis`, and the feature `redis-tls`, all connections speak TLS, and
/// the certificate must name the host. `?compact=N` at the end is
/// [`compact(N)`](RedisBuilder::compact).
///
/// ```no_run
/// # async fn example() -> Result<(), oncegate_core::store::StoreError> {
/// use oncegate::redis::RedisStore;
///
/// let store = RedisStore::connect("redis://localhost:6379").await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

struct Inner {
    topology: Topology,
    scripts: Arc<Scripts>,
    /// `host:port` of the server or of a cluster node, the primary's name, or empty when the caller
    /// supplied a pool.
    address: String,
    /// The values that only the URL sets.
    warnings: Vec<String>,
    settings: RedisSettings,
    losses: Arc<Losses>,
    memory: Arc<FullestServer>,
    /// The scopes whose rights have been checked and are sufficient.
    tried: Mutex<BTreeSet<Scope>>,
    _driver: Driver,
}

impl RedisStore {
    /// Connects to one of the URLs above with the default options.
    ///
    /// # Errors
    /// When the URL is invalid, the server cannot be reached, or it refuses the user.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Options for a store at `url`.
    pub fn builder(url: &str) -> RedisBuilder {
        RedisBuilder::new(Origin::Url(url.to_owned()))
    }

    /// Options for a store over the caller's pool, which needs room for two connections.
    ///
    /// The store keeps both connections for its whole life. Use a separate pool, with TCP nodelay
    /// and without a response timeout.
    pub fn from_pool(pool: Pool) -> RedisBuilder {
        RedisBuilder::new(Origin::Pool(pool))
    }

    fn is_cluster(&self) -> bool {
        matches!(self.inner.topology, Topology::Cluster(_))
    }

    /// Executes each command by a shortcut where there is one, and by the script if the shortcut
    /// does not settle it.
    async fn apply(&self, pipe: PipeName, commands: &[&Command]) -> Vec<Result<Reply, StoreError>> {
        let Inner {
            topology, scripts, ..
        } = &*self.inner;
        let answers = topology
            .ask(
                pipe,
                commands,
                |command| scripts.slot(&command.key),
                |command| scripts.request(command),
            )
            .await;
        let settled = commands
            .iter()
            .zip(answers)
            .map(|(command, answer)| scripts.settled(command, answer));
        let settled: Vec<Option<Result<Reply, StoreError>>> = settled.collect();
        let unclear = commands
            .iter()
            .zip(&settled)
            .filter(|(_, settled)| settled.is_none());
        let unclear: Vec<&Command> = unclear.map(|(command, _)| *command).collect();
        let answers = if unclear.is_empty() {
            Vec::new()
        } else {
            topology
                .ask(
                    pipe,
                    &unclear,
                    |command| scripts.slot(&command.key),
                    |command| scripts.script(command),
                )
                .await
        };
        let mut script_replies = unclear
            .iter()
            .zip(answers)
            .map(|(command, answer)| replies::of_script(command, answer));
        settled
            .into_iter()
            .map(|settled| {
                settled
                    .or_else(|| script_replies.next())
                    .unwrap_or_else(no_reply)
            })
            .collect()
    }

    /// Executes one command, as nearly every call does.
    async fn apply_one(&self, pipe: PipeName, command: &Command) -> Result<Reply, StoreError> {
        let Inner {
            topology, scripts, ..
        } = &*self.inner;
        let answer = topology
            .ask_one(
                pipe,
                command,
                |command| scripts.slot(&command.key),
                |command| scripts.request(command),
            )
            .await;
        if let Some(settled) = scripts.settled(command, answer) {
            return settled;
        }
        let answer = topology
            .ask_one(
                pipe,
                command,
                |command| scripts.slot(&command.key),
                |command| scripts.script(command),
            )
            .await;
        replies::of_script(command, answer)
    }

    /// Sends one request about a key that is not a record.
    async fn ask_about(
        &self,
        key: &str,
        request: impl Fn(&&str) -> Request + Send + Sync,
    ) -> Result<Value, StoreError> {
        let answer = self
            .inner
            .topology
            .ask_one(PipeName::Bulk, &key, |key| slots::slot(key), request)
            .await;
        replies::value(answer)
    }
}

impl RedisStore {
    /// The record's own key, its bucket and its field there, for tests that inspect the data
    /// directly.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn names(&self, key: &oncegate_core::key::StoreKey) -> Option<(String, String, [u8; 16])> {
        let names = self.inner.scripts.buckets()?.names(key);
        Some((names.record, names.bucket, names.field))
    }
}

/// The bytes that the store keeps for a record, for tests that write one directly.
#[cfg(feature = "testing")]
#[doc(hidden)]
pub fn packed(record: &oncegate_core::record::Record) -> Vec<u8> {
    layout::encode(record)
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("address", &self.inner.address)
            .finish_non_exhaustive()
    }
}

/// A record's key has a digest after the colon, and no digest is ever this word.
fn descriptor_key(scope: &Scope) -> String {
    format!("{}:descriptor", scope.as_str())
}

fn pipe_of(command: &Command) -> PipeName {
    if is_heartbeat(command) {
        PipeName::Heartbeats
    } else {
        PipeName::Bulk
    }
}

/// Heartbeats use a separate connection.
fn is_heartbeat(command: &Command) -> bool {
    matches!(command.operation, Operation::Extend { .. })
}

fn no_answer() -> RawReply {
    Err(StoreError::unknown("no answer"))
}

fn no_reply() -> Result<Reply, StoreError> {
    Err(StoreError::unknown("no answer"))
}
