//! The hand-written baseline: a loop that sends two commands for each message, in pipelines on one
//! connection.

use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::record::TAIL;
use oncegate_testkit::Redis;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Pipeline, Value};

/// The line of a script that the shared file replaces, and that file.
const INCLUDED: (&str, &str) = (
    "-- include lib/record.lua\n",
    include_str!("../../lua/lib/record.lua"),
);
/// The scripts of this release, as [`assembled`] takes them.
pub(crate) const CLAIM: &str = include_str!("../../lua/claim.lua");
pub(crate) const COMPLETE: &str = include_str!("../../lua/complete.lua");
pub(crate) const FIRST_CLAIMS: &str = include_str!("../../lua/first_claims.lua");
pub(crate) const FIRST_COMPLETIONS: &str = include_str!("../../lua/first_completions.lua");

/// The response timeout, long enough for a pipeline on a busy machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// A lease of 30 s in the form that is sent.
pub(crate) const LEASE_MILLIS: u64 = 30_000 + TAIL.as_millis() as u64;
pub(crate) const RETENTION_MILLIS: u64 = 7 * 86_400_000;

/// A script as the store sends it.
pub(crate) fn assembled(script: &str) -> String {
    script.replace(INCLUDED.0, INCLUDED.1)
}

/// The commands that claim and complete a key.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    claim: How,
    complete: How,
    fenced: bool,
}

/// A loaded script, the plain command that replaces it, or one script call for all keys.
#[derive(Clone, Debug)]
enum How {
    Script(String),
    Plain,
    Together(String),
}

impl How {
    fn together(&self) -> Self {
        match self {
            Self::Script(sha) => Self::Together(sha.clone()),
            other => other.clone(),
        }
    }
}

impl Pair {
    /// Uses a plain command for the claim, as the store does without a fencing token.
    pub(crate) fn plain_claim(&self) -> Self {
        Self {
            claim: How::Plain,
            ..self.clone()
        }
    }

    /// Uses shared script calls, as the store does for commands in one pipeline.
    pub(crate) fn together(&self) -> Self {
        Self {
            claim: self.claim.together(),
            complete: self.complete.together(),
            ..self.clone()
        }
    }

    /// Uses plain commands only, for servers that support `SET … IFEQ`.
    pub(crate) fn plain() -> Self {
        Self {
            claim: How::Plain,
            complete: How::Plain,
            fenced: false,
        }
    }

    /// The claims of these keys, with their first records.
    fn claims(&self, claims: &[(String, Vec<u8>)]) -> Pipeline {
        let mut pipeline = redis::pipe();
        if let How::Together(sha) = &self.claim {
            let call = pipeline.cmd("EVALSHA").arg(sha).arg(claims.len());
            claims.iter().for_each(|(key, _)| _ = call.arg(key));
            call.arg(LEASE_MILLIS);
            claims.iter().for_each(|(_, record)| _ = call.arg(record));
        }
        // A claim without the attempt, its last byte, requests a fencing token.
        let wanted = ..if self.fenced {
            RECORD_BYTES - 1
        } else {
            RECORD_BYTES
        };
        for (key, record) in claims {
            let record = record.get(wanted).expect("it is that long");
            match &self.claim {
                How::Script(sha) => pipeline
                    .cmd("EVALSHA")
                    .arg(sha)
                    .arg(1)
                    .arg(key)
                    .arg(record)
                    .arg(LEASE_MILLIS),
                How::Plain => pipeline
                    .cmd("SET")
                    .arg(key)
                    .arg(record)
                    .arg("PX")
                    .arg(LEASE_MILLIS)
                    .arg("NX")
                    .arg("GET"),
                How::Together(_) => break,
            };
        }
        pipeline
    }

    /// The completions of these claims.
    fn completions(&self, claims: &[(String, Vec<u8>)]) -> Pipeline {
        let mut pipeline = redis::pipe();
        if let How::Together(sha) = &self.complete {
            let call = pipeline.cmd("EVALSHA").arg(sha).arg(claims.len());
            claims.iter().for_each(|(key, _)| _ = call.arg(key));
            call.arg(RETENTION_MILLIS);
            claims
                .iter()
                .for_each(|(_, record)| _ = call.arg(record).arg(completed_record(record)));
        }
        for (key, record) in claims {
            let completed = completed_record(record);
            match &self.complete {
                How::Script(sha) => {
                    let call = pipeline.cmd("EVALSHA").arg(sha).arg(1).arg(key);
                    call.arg(record).arg(completed).arg(RETENTION_MILLIS)
                }
                How::Plain => {
                    let set = pipeline.cmd("SET").arg(key).arg(completed);
                    set.arg("PX").arg(RETENTION_MILLIS).arg("IFEQ").arg(record)
                }
                How::Together(_) => break,
            };
        }
        pipeline
    }
}

/// A connection with one pipeline at a time.
#[derive(Debug)]
pub(crate) struct Bare {
    connection: MultiplexedConnection,
}

impl Bare {
    pub(crate) async fn connect(redis: &Redis) -> Self {
        let client = redis::Client::open(redis.url()).expect("the URL is valid");
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(ANSWER_LIMIT));
        let connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await;
        Self {
            connection: connection.expect("the server answers"),
        }
    }

    pub(crate) async fn load(&mut self, claim: &str, complete: &str, fenced: bool) -> Pair {
        let mut pipeline = redis::pipe();
        for script in [claim, complete] {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(assembled(script));
        }
        let loaded: Result<(String, String), _> = pipeline.query_async(&mut self.connection).await;
        let (claim, complete) = loaded.expect("the scripts are valid");
        Pair {
            claim: How::Script(claim),
            complete: How::Script(complete),
            fenced,
        }
    }

    /// Claims and completes `count` keys of a new scope, without results, `batch` at a time.
    pub(crate) async fn run(&mut self, pair: &Pair, scope: &str, count: usize, batch: usize) {
        for first in (0..count).step_by(batch) {
            let keys = first..count.min(first + batch);
            let claims: Vec<_> = keys
                .map(|n| (format!("{scope}:{n:022}"), first_record()))
                .collect();
            let pipeline = pair.claims(&claims);
            self.send(&pipeline, |reply| match reply {
                // The reply of `SET … NX GET` for a new key.
                Value::Nil => true,
                // Granted as the first attempt.
                Value::BulkString(record) => record.first() == Some(&b'P'),
                _ => false,
            })
            .await;
            let pipeline = pair.completions(&claims);
            let is_together = matches!(pair.complete, How::Together(_));
            self.send(&pipeline, |reply| match reply {
                Value::BulkString(held) => held == b"H",
                // The shared call has settled all keys.
                Value::Nil => is_together,
                reply => *reply == Value::Okay,
            })
            .await;
        }
    }

    async fn send(&mut self, pipeline: &Pipeline, expected: impl Fn(&Value) -> bool) {
        let replies: Result<Vec<Value>, _> = pipeline.query_async(&mut self.connection).await;
        let replies = replies.expect("the server answers every call");
        let other = replies.iter().find(|reply| !expected(reply));
        assert!(other.is_none(), "an unexpected answer: {other:?}");
    }

    /// Runs a script over the keys from `first` up to `end` of a scope, in calls of a fixed number
    /// of keys.
    pub(crate) async fn fill(
        &mut self,
        script: &str,
        scope: &str,
        first: usize,
        end: usize,
        at_once: usize,
    ) {
        for from in (first..end).step_by(at_once) {
            let mut call = redis::cmd("EVAL");
            call.arg(script)
                .arg(0)
                .arg(scope)
                .arg(from)
                .arg(at_once.min(end - from));
            let filled = call.query_async(&mut self.connection).await;
            let () = filled.expect("the server has enough memory");
        }
    }

    /// Reads the records of the keys in one pipeline.
    pub(crate) async fn get(&self, keys: &[StoreKey]) {
        let mut pipeline = redis::pipe();
        for key in keys {
            pipeline.cmd("GET").arg(key.as_str());
        }
        let replies: Result<Vec<Value>, _> =
            pipeline.query_async(&mut self.connection.clone()).await;
        let replies = replies.expect("the server answers every call");
        assert!(
            replies
                .iter()
                .all(|reply| matches!(reply, Value::BulkString(_))),
            "each is there"
        );
    }

    /// The processor time that the server has used so far, in microseconds.
    pub(crate) async fn server_cpu_micros(&mut self) -> f64 {
        let info = self.info("cpu").await;
        let seconds = ["used_cpu_user", "used_cpu_sys"]
            .map(|name| info.get::<f64>(name).expect("INFO has the processor times"));
        seconds.iter().sum::<f64>() * 1e6
    }

    /// The bytes that the server has allocated.
    pub(crate) async fn used_memory_bytes(&mut self) -> f64 {
        self.info("memory")
            .await
            .get("used_memory")
            .expect("INFO has the used memory")
    }

    async fn info(&mut self, section: &str) -> redis::InfoDict {
        let mut info = redis::cmd("INFO");
        info.arg(section)
            .query_async(&mut self.connection)
            .await
            .expect("the server answers")
    }

    /// Deletes all keys, so that every contestant starts with the same server state.
    pub(crate) async fn flush(&mut self) {
        let flushed = redis::cmd("FLUSHALL")
            .arg("SYNC")
            .query_async(&mut self.connection)
            .await;
        let () = flushed.expect("the server may be flushed");
    }
}

/// The record of a first claim without a fencing token.
const RECORD_BYTES: usize = 25;

/// "P", a token, no fingerprint, attempt 1.
pub(crate) fn first_record() -> Vec<u8> {
    let mut record = Vec::with_capacity(RECORD_BYTES);
    record.push(b'P');
    record.extend_from_slice(&fastrand::u128(..).to_be_bytes());
    record.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 1]);
    record
}

/// "C", the token's tag, no fingerprint, no result.
pub(crate) fn completed_record(first: &[u8]) -> Vec<u8> {
    let mut record = vec![b'C'];
    record.extend(first.iter().skip(1).take(4));
    record.extend_from_slice(&[0; 7]);
    record
}
