//! What tests do to a server behind the store's back.

use std::time::Duration;

use oncegate::redis::{RedisBuilder, RedisStore, packed};
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::{Record, Token};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Redis, unique};
use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, Pipeline, ToRedisArgs};

/// Moves a key's expiry towards now; a record whose expiry would not be later than now is gone.
const PASS: &str = "local left = redis.call('PTTL', KEYS[1])
if left < 0 then return end
left = left - tonumber(ARGV[1])
if left > 0 then redis.call('PEXPIRE', KEYS[1], left) else redis.call('DEL', KEYS[1]) end";

/// The same for what a bucket has of the record; there it stays, and is over.
const PASS_IN_BUCKET: &str = "local value = redis.call('HGET', KEYS[1], ARGV[1])
if not value then return end
local ends = struct.unpack('>I6', value, #value - 5) - tonumber(ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], string.sub(value, 1, -7) .. struct.pack('>I6', ends))";

/// Puts a completion into a bucket.
const PLANT_IN_BUCKET: &str = "local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. struct.pack('>I6', ends))
redis.call('EXPIRE', KEYS[1], 8640000)";

/// How many commands travel together.
const CHUNK: usize = 500;

/// How long a server on a busy machine may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection of the test's own.
#[derive(Clone)]
pub(crate) struct Hand {
    connection: MultiplexedConnection,
    /// Returns the names of its records.
    store: Option<RedisStore>,
}

impl Hand {
    pub(crate) async fn on(redis: &Redis) -> Self {
        let mut connection = redis.connection().await;
        connection.set_response_timeout(PATIENCE);
        Self {
            connection,
            store: None,
        }
    }

    /// The same, for records that this store keeps.
    pub(crate) fn of(self, store: &RedisStore) -> Self {
        Self {
            store: Some(store.clone()),
            ..self
        }
    }

    /// The record's own key, and its bucket and field if there are buckets.
    fn place(&self, key: &StoreKey) -> (String, Option<(String, [u8; 16])>) {
        match self.store.as_ref().and_then(|store| store.names(key)) {
            Some((own, bucket, field)) => (own, Some((bucket, field))),
            None => (key.to_string(), None),
        }
    }

    /// Asks the server something.
    pub(crate) async fn ask<T: FromRedisValue>(
        &self,
        words: &[impl ToRedisArgs + AsRef<str> + Sync],
    ) -> T {
        let mut cmd = redis::Cmd::new();
        for word in words {
            cmd.arg(word);
        }
        let answer = cmd.query_async(&mut self.connection.clone()).await;
        answer.unwrap_or_else(|error| panic!("{} failed: {error}", words[0].as_ref()))
    }

    /// Returns a number of the server's `INFO`.
    pub(crate) async fn info(&self, section: &str, field: &str) -> u64 {
        let info: String = self.ask(&["INFO", section]).await;
        let mut lines = info.lines().filter_map(|line| line.split_once(':'));
        let (_, number) = lines.find(|(name, _)| *name == field).unwrap();
        number.trim().parse().unwrap()
    }

    /// Returns how many errors of this code the server has answered.
    pub(crate) async fn errors(&self, code: &str) -> u64 {
        let errors: String = self.ask(&["INFO", "errorstats"]).await;
        let line = format!("errorstat_{code}:count=");
        let count = errors.lines().find_map(|said| said.strip_prefix(&line));
        count.map_or(0, |count| count.trim().parse().unwrap())
    }

    /// Lets time pass for keys.
    pub(crate) async fn pass(&self, waits: &[(StoreKey, Duration)]) {
        for chunk in waits.chunks(CHUNK) {
            let mut pipeline = Pipeline::new();
            for (key, wait) in chunk {
                let millis = u64::try_from(wait.as_millis()).unwrap();
                let (own, in_bucket) = self.place(key);
                pipeline
                    .cmd("EVAL")
                    .arg(PASS)
                    .arg(1)
                    .arg(own)
                    .arg(millis)
                    .ignore();
                if let Some((bucket, field)) = in_bucket {
                    let pass = pipeline.cmd("EVAL").arg(PASS_IN_BUCKET).arg(1).arg(bucket);
                    pass.arg(&field).arg(millis).ignore();
                }
            }
            self.send(&pipeline).await;
        }
    }

    /// Puts records as they are; their expiry is counted from now.
    pub(crate) async fn plant(&self, records: &[(StoreKey, Record)]) {
        for chunk in records.chunks(CHUNK) {
            let mut pipeline = Pipeline::new();
            for (key, record) in chunk {
                let left = record.expires_at.millis();
                let bytes = packed(record);
                match (self.place(key), bytes.as_slice()) {
                    ((_, Some((bucket, field))), [b'C', rest @ ..]) if rest.len() == 11 => {
                        // A fingerprint of zeros is none.
                        let kept = if rest[4..] == [0; 7] {
                            &rest[..4]
                        } else {
                            rest
                        };
                        let plant = pipeline.cmd("EVAL").arg(PLANT_IN_BUCKET).arg(1).arg(bucket);
                        plant.arg(&field).arg(kept).arg(left).ignore()
                    }
                    ((own, _), _) => pipeline
                        .cmd("SET")
                        .arg(own)
                        .arg(bytes)
                        .arg("PX")
                        .arg(left)
                        .ignore(),
                };
            }
            self.send(&pipeline).await;
        }
    }

    /// Puts bytes that are no record.
    pub(crate) async fn spoil(&self, key: &StoreKey, bytes: &[u8]) {
        let mut pipeline = Pipeline::new();
        pipeline
            .cmd("SET")
            .arg(self.place(key).0)
            .arg(bytes)
            .arg("EX")
            .arg(1_000)
            .ignore();
        self.send(&pipeline).await;
    }

    async fn send(&self, pipeline: &Pipeline) {
        let () = pipeline
            .query_async(&mut self.connection.clone())
            .await
            .expect("the server answers");
    }
}

/// A store whose records the test makes older, and so lets expire: that is no loss.
pub(crate) fn timeless(url: &str) -> RedisBuilder {
    RedisStore::builder(url).grant_after_loss()
}

/// A scope of the test's own.
pub(crate) fn scope() -> Scope {
    Scope::new(unique("t")).unwrap()
}

/// A key of this number.
pub(crate) fn key(scope: &Scope, number: u128) -> StoreKey {
    StoreKey::new(scope, Digest::from_bytes(number.to_be_bytes()))
}

/// A token that no other call got.
pub(crate) fn token() -> Token {
    Token::from_bits(fastrand::u128(1..))
}

/// A lease of half a minute.
pub(crate) fn claim(token: Token) -> Operation {
    Operation::Claim {
        token,
        lease: Duration::from_secs(30),
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    }
}

pub(crate) fn complete(token: Token, result: &'static [u8]) -> Operation {
    let retention = Duration::from_secs(3_600);
    Operation::Complete {
        token,
        fingerprint: None,
        result: result.into(),
        retention,
    }
}

/// One operation on one key.
pub(crate) async fn apply(
    store: &dyn Store,
    key: &StoreKey,
    operation: Operation,
) -> Result<Reply, StoreError> {
    let mut answers = store
        .execute(vec![Command {
            key: key.clone(),
            operation,
        }])
        .await;
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}
