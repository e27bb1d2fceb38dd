//! Records in Redis or Valkey: one key each, changed by one Lua script per operation (`lua/`).
//!
//! Concurrent calls travel together, one pipeline per round trip, over two connections that a thread of
//! their own drives: one for bulk, one for heartbeats. See [`RedisStore`].

mod builder;
mod checkup;
mod errors;
mod flight;
mod layout;
mod link;
mod scripts;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use deadpool_redis::Pool;
use futures_util::future::join;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::{Record, StoreTime};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Checkup, Command, Completed, Looked, Store, StoreError};
use redis::Value;

use self::builder::Origin;
use self::checkup::Persistence;
use self::link::{Answer, Lanes};
use self::scripts::{Request, Scripts};
use crate::batch::{CarrierGone, Joiner, MAX_BATCH_ITEMS};

pub use self::builder::RedisBuilder;

/// Records in one Redis or Valkey server, version 7.0 or later.
///
/// A clone is another handle on the same connections. When the server goes away, calls fail at once with
/// [`StoreError::Unavailable`], the store connects again by itself, a few tries a second, and calls succeed
/// again; what was on its way when the connection broke is [`StoreError::Unknown`].
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
    lanes: Lanes,
    scripts: Arc<Scripts>,
    /// `host:port`, or empty when a pool was brought.
    address: String,
    evicting_policy_allowed: bool,
}

impl RedisStore {
    /// Connects to `redis://[user[:password]@]host[:port][/database]` with the default options.
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

    /// Options for a store over a pool of the caller's, which needs room for two connections.
    ///
    /// The store keeps both for as long as it lives, so give it a pool of its own, with TCP nodelay on and
    /// without a response timeout.
    pub fn from_pool(pool: Pool) -> RedisBuilder {
        RedisBuilder::new(Origin::Pool(pool))
    }

    /// Sends one request that is not about a key.
    async fn ask_one(&self, request: Request) -> Result<Value, StoreError> {
        let answers = ask(&self.inner.lanes.bulk, vec![request]).await;
        match answers.into_iter().next().unwrap_or_else(no_answer)? {
            Value::ServerError(error) => Err(errors::store_error(&error, None)),
            value => Ok(value),
        }
    }
}

/// The bytes under which the store keeps a record, for tests that plant one.
#[cfg(feature = "testing")]
#[doc(hidden)]
pub fn packed(record: &Record) -> Vec<u8> {
    layout::encode(record)
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("address", &self.inner.address).finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for RedisStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let Inner { lanes, scripts, .. } = &*self.inner;
        let mut bulk = Vec::with_capacity(commands.len());
        let mut heartbeats = Vec::new();
        for command in &commands {
            let lane = if is_heartbeat(command) { &mut heartbeats } else { &mut bulk };
            lane.push(scripts.request(command));
        }
        let asked = join(ask(&lanes.bulk, bulk), ask(&lanes.heartbeats, heartbeats)).await;
        let (mut bulk, mut heartbeats) = (asked.0.into_iter(), asked.1.into_iter());
        let read = |command: &Command| {
            let lane = if is_heartbeat(command) { &mut heartbeats } else { &mut bulk };
            let said = bulk_string(lane.next().unwrap_or_else(no_answer), &command.key)?;
            scripts::reply(&command.operation, said.unwrap_or_default())
                .map_err(|why| StoreError::unreadable(command.key.clone(), why))
        };
        commands.iter().map(read).collect()
    }

    async fn look(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Looked>, StoreError>> {
        let requests = keys.iter().map(|key| self.inner.scripts.look(key.as_str())).collect();
        let answers = ask(&self.inner.lanes.bulk, requests).await;
        keys.iter().zip(answers).map(|(key, answer)| looked(answer, key)).collect()
    }

    /// Bare reads: the expiry, which costs more than the record, is left out.
    ///
    /// The first of each batch goes through a script that a demoted primary refuses, and its refusal stands
    /// for the whole batch: what such a server once knew must not be acknowledged.
    async fn look_ahead(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        let request = |(position, key): (usize, &StoreKey)| match position % MAX_BATCH_ITEMS {
            0 => self.inner.scripts.look(key.as_str()),
            _ => Request::get(key.as_str()),
        };
        let requests = keys.iter().enumerate().map(request).collect();
        let answers = ask(&self.inner.lanes.bulk, requests).await;
        let mut refusal = None;
        let read = |(position, (key, answer)): (usize, (&StoreKey, Answer))| {
            let record = if position % MAX_BATCH_ITEMS == 0 {
                let first = looked(answer, key);
                refusal = first.as_ref().err().filter(|error| is_not_about_a_key(error)).cloned();
                first?.map(|looked| looked.record)
            } else {
                refusal.clone().map_or(Ok(()), Err)?;
                read(answer, key)?
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
        let request = self.inner.scripts.describe(&descriptor_key(scope), expected, proposed);
        match self.ask_one(request).await? {
            Value::Nil => Ok(expected.unwrap_or_default().to_owned()),
            Value::BulkString(kept) => Ok(String::from_utf8_lossy(&kept).into_owned()),
            _ => Err(StoreError::unknown("describe.lua said something unheard of")),
        }
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        match self.ask_one(Request::get(&descriptor_key(scope))).await? {
            Value::Nil => Ok(None),
            Value::BulkString(kept) => Ok(Some(String::from_utf8_lossy(&kept).into_owned())),
            _ => Err(StoreError::unknown("the server said something unheard of")),
        }
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        let persistence = Persistence::of(self.ask_one(Request::persistence()).await);
        match self.ask_one(Request::info()).await? {
            Value::BulkString(info) => checkup::read(
                &String::from_utf8_lossy(&info),
                &persistence,
                &self.inner.address,
                self.inner.evicting_policy_allowed,
            ),
            _ => Err(StoreError::unknown("INFO said something unheard of")),
        }
    }
}

/// Keys of records go on with a digest after the colon, and none is ever this word.
fn descriptor_key(scope: &Scope) -> String {
    format!("{}:descriptor", scope.as_str())
}

/// Heartbeats have a connection of their own.
fn is_heartbeat(command: &Command) -> bool {
    matches!(command.operation, Operation::Extend { .. })
}

/// Sends requests; there is one answer for each.
async fn ask(joiner: &Joiner<Request, Answer>, requests: Vec<Request>) -> Vec<Answer> {
    let count = requests.len();
    joiner.submit(requests).await.unwrap_or_else(|CarrierGone { unsent }| {
        let ended = "the store's thread ended";
        let error = if unsent { StoreError::unavailable(ended) } else { StoreError::unknown(ended) };
        vec![Err(error); count]
    })
}

fn no_answer() -> Answer {
    Err(StoreError::unknown("no answer"))
}

/// The bytes that the server answered about `key`, if it answered any.
fn bulk_string(answer: Answer, key: &StoreKey) -> Result<Option<Vec<u8>>, StoreError> {
    match answer? {
        Value::BulkString(said) => Ok(Some(said)),
        Value::Nil => Ok(None),
        Value::ServerError(error) => Err(errors::store_error(&error, Some(key))),
        _ => Err(StoreError::unknown("the server said something unheard of")),
    }
}

/// What look.lua answered.
fn looked(answer: Answer, key: &StoreKey) -> Result<Option<Looked>, StoreError> {
    let record = bulk_string(answer, key)?.map(scripts::shown).transpose();
    record.map_err(|why| StoreError::unreadable(key.clone(), why))
}

/// What a bare read answered; the record's expiry is not told.
fn read(answer: Answer, key: &StoreKey) -> Result<Option<Record>, StoreError> {
    let record = bulk_string(answer, key)?.map(|said| layout::decode(said.into(), StoreTime::default()));
    record.transpose().map_err(|why| StoreError::unreadable(key.clone(), why))
}

fn is_not_about_a_key(error: &StoreError) -> bool {
    !matches!(error, StoreError::Unreadable { .. })
}
