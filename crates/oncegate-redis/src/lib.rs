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
mod layout;
mod link;
mod login;
mod losses;
mod memory;
mod pipeline;
mod removal;
mod replies;
mod report;
mod rights;
mod scripts;
mod sentinel;
mod shortcut;
mod slots;
#[cfg(feature = "tls")]
mod tls;
mod watch;
mod witnesses;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use async_trait::async_trait;
use deadpool_redis::Pool;
use futures_util::future::join;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{
    Checkup, Command, Completed, RecordSnapshot, Store, StoreError, StoreLoss, Upkeep,
};
use redis::Value;

use self::buckets::{marked, unmarked};
use self::builder::Origin;
use self::checkup::{Accepted, Persistence};
use self::cluster::Cluster;
use self::driver::Driver;
use self::link::{Answer, LaneName, Node};
use self::losses::Losses;
use self::memory::FullestServer;
use self::scripts::{Request, Scripts};
use oncegate_store_toolkit::batch::MAX_BATCH_ITEMS;
use oncegate_store_toolkit::clock;

pub use self::builder::RedisBuilder;
pub use self::durability::Durability;
pub use self::report::{ServerReport, SlowCall};

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
    durability: Durability,
    accepted: Accepted,
    losses: Arc<Losses>,
    memory: Arc<FullestServer>,
    /// The scopes whose rights have been checked and are sufficient.
    tried: Mutex<BTreeSet<Scope>>,
    _driver: Driver,
}

/// The servers that hold the keys.
enum Topology {
    /// One server holds all keys.
    One(Arc<Node>),
    /// Each key is in the node that has its slot.
    Cluster(Cluster),
}

impl Topology {
    /// Sends one request per item to the server that holds its key. Returns the answers in the
    /// order of the items.
    async fn ask<T: Sync>(
        &self,
        lane: LaneName,
        items: &[T],
        slot: impl Fn(&T) -> u16 + Send,
        request: impl Fn(&T) -> Request + Send + Sync,
    ) -> Vec<Answer> {
        match self {
            Self::One(node) => {
                let requests = items.iter().map(&request).collect();
                node.ask(lane, requests).await
            }
            Self::Cluster(cluster) => cluster.ask(lane, items, slot, request).await,
        }
    }

    /// Sends the request for one item.
    async fn ask_one<T: Sync>(
        &self,
        lane: LaneName,
        item: &T,
        slot: impl Fn(&T) -> u16 + Send,
        request: impl Fn(&T) -> Request + Send + Sync,
    ) -> Answer {
        match self {
            Self::One(node) => node.ask_one(lane, request(item)).await,
            Self::Cluster(cluster) => {
                // Boxed: otherwise the future of every message would be larger.
                let answers =
                    Box::pin(cluster.ask(lane, std::slice::from_ref(item), slot, request)).await;
                answers.into_iter().next().unwrap_or_else(no_answer)
            }
        }
    }

    /// Sends the same request to every server that holds keys. Returns each answer with the
    /// server's address.
    async fn ask_all(&self, request: impl Fn() -> Request + Send) -> Vec<(Arc<str>, Answer)> {
        match self {
            Self::One(node) => {
                let answers = node.ask(LaneName::Bulk, vec![request()]).await;
                answers
                    .into_iter()
                    .map(|answer| (Arc::clone(&node.address), answer))
                    .collect()
            }
            Self::Cluster(cluster) => cluster.ask_all(request).await,
        }
    }
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
    async fn apply(&self, lane: LaneName, commands: &[&Command]) -> Vec<Result<Reply, StoreError>> {
        let Inner {
            topology, scripts, ..
        } = &*self.inner;
        let request = |command: &&Command| scripts.request(command);
        let slot = |command: &&Command| scripts.slot(&command.key);
        let answers = topology.ask(lane, commands, slot, request).await;
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
        let script = |command: &&Command| scripts.script(command);
        let answers = if unclear.is_empty() {
            Vec::new()
        } else {
            topology.ask(lane, &unclear, slot, script).await
        };
        let mut script_replies = unclear
            .iter()
            .zip(answers)
            .map(|(command, answer)| replies::of_script(command, answer));
        let settled = settled.into_iter();
        let no_reply = || Err(StoreError::unknown("no answer"));
        settled
            .map(|settled| {
                settled
                    .or_else(|| script_replies.next())
                    .unwrap_or_else(no_reply)
            })
            .collect()
    }

    /// Executes one command, as nearly every call does.
    async fn apply_one(&self, lane: LaneName, command: &Command) -> Result<Reply, StoreError> {
        let Inner {
            topology, scripts, ..
        } = &*self.inner;
        let slot = |command: &Command| scripts.slot(&command.key);
        let request = |command: &Command| scripts.request(command);
        let answer = topology.ask_one(lane, command, slot, request).await;
        if let Some(settled) = scripts.settled(command, answer) {
            return settled;
        }
        let script = |command: &Command| scripts.script(command);
        replies::of_script(command, topology.ask_one(lane, command, slot, script).await)
    }

    /// Sends one request about a key that is not a record.
    async fn ask_about(
        &self,
        key: &str,
        request: impl Fn(&&str) -> Request + Send + Sync,
    ) -> Result<Value, StoreError> {
        let request = |key: &&str| request(key);
        let slot = |key: &&str| slots::slot(key);
        replies::value(
            self.inner
                .topology
                .ask_one(LaneName::Bulk, &key, slot, request)
                .await,
        )
    }
}

impl RedisStore {
    /// The record's own key, its bucket and its field there, for tests that inspect the data
    /// directly.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn names(&self, key: &StoreKey) -> Option<(String, String, [u8; 16])> {
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

#[async_trait]
impl Store for RedisStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let losses = &self.inner.losses;
        let refused_before = losses.refusal();
        let is_sent = |command: &&Command| refused_before.is_none() || !is_claim(command);
        let (heartbeats, bulk): (Vec<&Command>, Vec<&Command>) = commands
            .iter()
            .filter(is_sent)
            .partition(|command| is_heartbeat(command));
        let (bulk, heartbeats) = join(
            self.apply(LaneName::Bulk, &bulk),
            self.apply(LaneName::Heartbeats, &heartbeats),
        )
        .await;
        let (mut bulk, mut heartbeats) = (bulk.into_iter(), heartbeats.into_iter());
        // A loss may have been noticed meanwhile, and then the server knows less than it should.
        let refused = losses.refusal().map(StoreError::refused);
        let read = |command: &Command| {
            if !is_sent(&command) {
                return Err(StoreError::refused(
                    refused_before.as_deref().unwrap_or_default(),
                ));
            }
            let lane = if is_heartbeat(command) {
                &mut heartbeats
            } else {
                &mut bulk
            };
            let reply = lane
                .next()
                .unwrap_or_else(|| Err(StoreError::unknown("no answer")));
            match refused.as_ref().filter(|_| is_claim(command)) {
                Some(refused) => Err(refused.clone()),
                None => reply,
            }
        };
        commands.iter().map(read).collect()
    }

    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        let refusal = || {
            let refusal = if is_claim(&command) {
                self.inner.losses.refusal()
            } else {
                None
            };
            refusal.map(StoreError::refused)
        };
        if let Some(refused) = refusal() {
            return Err(refused);
        }
        let reply = self.apply_one(lane_of(&command), &command).await;
        // A loss may have been noticed meanwhile, and then the server knows less than it should.
        refusal().map_or(reply, Err)
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let Inner {
            topology, scripts, ..
        } = &*self.inner;
        let request = |key: &StoreKey| scripts.read(key);
        let answers = topology
            .ask(LaneName::Bulk, &keys, |key| scripts.slot(key), request)
            .await;
        keys.iter()
            .zip(answers)
            .map(|(key, answer)| replies::snapshot(answer, key))
            .collect()
    }

    /// Reads the records without their expiry, which costs more than the record itself.
    ///
    /// The first read of each batch uses a script that a demoted primary refuses. The refusal
    /// applies to the whole batch: old data of such a server must not lead to an acknowledgement. A
    /// demoted node of a cluster redirects every read to the primary, so in a cluster all are plain
    /// reads.
    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        let Inner {
            topology, scripts, ..
        } = &*self.inner;
        // Only a script can write a record once more for its durability, or read buckets.
        let all = self.inner.durability != Durability::Primary || scripts.buckets().is_some();
        let is_guard = |position: usize| {
            all || (matches!(topology, Topology::One(_))
                && position.is_multiple_of(MAX_BATCH_ITEMS))
        };
        let items: Vec<(usize, &StoreKey)> = keys.iter().enumerate().collect();
        let request = |(position, key): &(usize, &StoreKey)| {
            if is_guard(*position) {
                scripts.prefetch(key)
            } else {
                Request::get(key.as_str())
            }
        };
        let answers = topology
            .ask(
                LaneName::Bulk,
                &items,
                |(_, key)| scripts.slot(key),
                request,
            )
            .await;
        let mut refusal = None;
        let read = |(position, (key, answer)): (usize, (&StoreKey, Answer))| {
            let record = if is_guard(position) {
                let first = replies::snapshot(answer, key);
                refusal = first
                    .as_ref()
                    .err()
                    .filter(|error| is_not_about_a_key(error))
                    .cloned();
                first?.map(|snapshot| snapshot.record)
            } else {
                refusal.clone().map_or(Ok(()), Err)?;
                replies::record(answer, key)?
            };
            Ok(record.and_then(Completed::of))
        };
        keys.iter().zip(answers).enumerate().map(read).collect()
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        self.try_rights(scope).await?;
        let scripts = &self.inner.scripts;
        let buckets = scripts.buckets();
        let (marked, proposed) = (
            expected.map(|expected| marked(buckets, expected)),
            marked(buckets, proposed),
        );
        let request = |key: &&str| scripts.describe(key, marked.as_deref(), &proposed);
        match self.ask_about(&descriptor_key(scope), request).await? {
            Value::Nil => Ok(expected.unwrap_or_default().to_owned()),
            Value::BulkString(kept) => unmarked(buckets, &String::from_utf8_lossy(&kept)),
            _ => Err(StoreError::unknown(
                "describe.lua returned an unexpected answer",
            )),
        }
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        // A plain read would be answered by a replica that lags, too, behind an address that
        // follows the primary.
        match self
            .ask_about(&descriptor_key(scope), |key| {
                self.inner.scripts.described(key)
            })
            .await?
        {
            Value::Nil => Ok(None),
            Value::BulkString(kept) => unmarked(
                self.inner.scripts.buckets(),
                &String::from_utf8_lossy(&kept),
            )
            .map(Some),
            _ => Err(StoreError::unknown(
                "the server returned an unexpected answer",
            )),
        }
    }

    fn shard(&self, key: &StoreKey) -> u64 {
        match &self.inner.topology {
            Topology::One(_) => 0,
            Topology::Cluster(cluster) => cluster.shard(self.inner.scripts.slot(key)),
        }
    }

    fn loss(&self) -> Option<StoreLoss> {
        self.inner.losses.loss()
    }

    fn accept_loss(&self) {
        self.inner.losses.accept_loss();
    }

    fn check_spacing(&self) -> u32 {
        self.inner.losses.spacing()
    }

    fn upkeep(&self) -> Upkeep {
        Upkeep {
            memory: self.inner.memory.get(),
            ..Upkeep::default()
        }
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        let Inner {
            topology,
            address,
            warnings,
            durability,
            accepted,
            ..
        } = &*self.inner;
        let asked = SystemTime::now();
        let (infos, persistences) = join(
            topology.ask_all(Request::info),
            topology.ask_all(Request::persistence),
        )
        .await;
        let answered = SystemTime::now();
        let mut checkups = Vec::new();
        for (node, answer) in infos {
            let Value::BulkString(info) = replies::value(answer)? else {
                return Err(StoreError::unknown("INFO returned an unexpected answer"));
            };
            let persistence = persistences.iter().find(|(of, _)| *of == node);
            let persistence = persistence.map(|(_, answer)| Persistence::of(answer.as_ref().ok()));
            let info = String::from_utf8_lossy(&info);
            let info = checkup::Info(&info);
            let mut checkup = checkup::read(
                &info,
                &persistence.unwrap_or_default(),
                &node,
                *durability,
                *accepted,
            )?;
            let clock = info
                .clock()
                .and_then(|server| clock::warning(server, asked, answered));
            checkup.warnings.extend(clock);
            checkups.push(checkup);
        }
        let checkup = match topology {
            Topology::One(_) => checkups.pop(),
            Topology::Cluster(_) => checkup::of_cluster(checkups, address),
        };
        let mut checkup = checkup.ok_or_else(|| StoreError::unknown("no server has answered"))?;
        checkup.warnings.extend(warnings.iter().cloned());
        Ok(checkup)
    }
}

/// A record's key has a digest after the colon, and no digest is ever this word.
fn descriptor_key(scope: &Scope) -> String {
    format!("{}:descriptor", scope.as_str())
}

fn is_claim(command: &Command) -> bool {
    matches!(command.operation, Operation::Claim { .. })
}

fn lane_of(command: &Command) -> LaneName {
    if is_heartbeat(command) {
        LaneName::Heartbeats
    } else {
        LaneName::Bulk
    }
}

/// Heartbeats use a separate connection.
fn is_heartbeat(command: &Command) -> bool {
    matches!(command.operation, Operation::Extend { .. })
}

fn no_answer() -> Answer {
    Err(StoreError::unknown("no answer"))
}

fn is_not_about_a_key(error: &StoreError) -> bool {
    !matches!(error, StoreError::Unreadable { .. })
}
