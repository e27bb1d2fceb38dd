//! The servers' reports about themselves, for an operator: room, records, and our scripts in their
//! slow logs.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use oncegate_core::store::{StoreError, StoreMemory};
use redis::{FromRedisValue as _, Value};

use super::info::Info;
use super::request::Request;
use super::scripts::Scripts;
use super::{RedisStore, memory, replies};

/// The most entries of a slow log that are read.
const SLOW_ENTRIES: u32 = 128;

/// The state of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerReport {
    /// `host:port`, or empty when the caller supplied a pool.
    pub address: String,
    /// The server's memory; `None` if it does not show it.
    pub memory: Option<StoreMemory>,
    /// The bytes of its memory that are keys and values.
    pub data_bytes: Option<u64>,
    /// The number of its keys, in all databases.
    pub keys: u64,
    /// The number of keys that have expired since it started.
    pub expired_keys: u64,
    /// The calls of oncegate's scripts in its slow log, the newest first.
    ///
    /// # Errors
    /// An error when the server does not show it to this user (`+slowlog|get`), or has none.
    pub slow_calls: Result<Vec<SlowCall>, String>,
}

/// A call of one of oncegate's scripts in a slow log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlowCall {
    /// The script: the name of its file in `lua/`, without the ending.
    pub script: &'static str,
    /// The duration of the call.
    pub took: Duration,
    /// The time of the call.
    pub at: SystemTime,
}

impl RedisStore {
    /// Asks each server for its memory, its keys and its slow log. Changes nothing.
    ///
    /// # Errors
    /// When a server does not answer.
    pub async fn server_reports(&self) -> Result<Vec<ServerReport>, StoreError> {
        let topology = &self.inner.topology;
        let infos = topology.ask_all(Request::info).await;
        let slow_logs = topology.ask_all(|| Request::plain(slow_log())).await;
        let mut slow_logs: HashMap<_, _> = slow_logs.into_iter().collect();
        let mut reports = Vec::with_capacity(infos.len());
        for (address, answer) in infos {
            let Value::BulkString(info) = replies::value(answer)? else {
                return Err(StoreError::unknown("INFO returned an unexpected answer"));
            };
            let slow = slow_logs.remove(&address).unwrap_or_else(super::no_answer);
            let slow = match replies::value(slow) {
                Ok(entries) => Ok(slow_calls(&entries, &self.inner.scripts)),
                Err(error @ StoreError::Refused { .. }) => Err(error.to_string()),
                Err(error) => return Err(error),
            };
            reports.push(report(
                &address,
                &Info(&String::from_utf8_lossy(&info)),
                slow,
            ));
        }
        Ok(reports)
    }

    /// Returns whether each record has a key of its own, so that the number of keys is that of the
    /// records.
    pub fn has_a_key_for_each_record(&self) -> bool {
        self.inner.scripts.buckets().is_none()
    }
}

fn slow_log() -> redis::Cmd {
    let mut cmd = redis::cmd("SLOWLOG");
    cmd.arg("GET").arg(SLOW_ENTRIES);
    cmd
}

fn report(
    address: &str,
    info: &Info<'_>,
    slow_calls: Result<Vec<SlowCall>, String>,
) -> ServerReport {
    // db0:keys=3,expires=3,avg_ttl=604799
    let databases = info
        .0
        .lines()
        .filter(|line| line.starts_with("db") && line.contains(":keys="));
    let keys = databases.filter_map(|line| {
        line.split_once(":keys=")?
            .1
            .split(',')
            .next()?
            .parse::<u64>()
            .ok()
    });
    ServerReport {
        address: address.to_owned(),
        memory: memory::of(info),
        data_bytes: info.number("used_memory_dataset"),
        keys: keys.sum(),
        expired_keys: info.number("expired_keys").unwrap_or_default(),
        slow_calls,
    }
}

/// The calls of our scripts in the answer to SLOWLOG GET.
fn slow_calls(entries: &Value, scripts: &Scripts) -> Vec<SlowCall> {
    let Value::Array(entries) = entries else {
        return Vec::new();
    };
    entries
        .iter()
        .filter_map(|entry| slow_call(entry, scripts))
        .collect()
}

/// The number of the entry, the second in which it was called, microseconds, and the command with
/// its arguments.
fn slow_call(entry: &Value, scripts: &Scripts) -> Option<SlowCall> {
    let Value::Array(fields) = entry else {
        return None;
    };
    let [_, Value::Int(at), Value::Int(micros), command, ..] = fields.as_slice() else {
        return None;
    };
    let command = Vec::<String>::from_redis_value_ref(command).ok()?;
    let [verb, sha, ..] = command.as_slice() else {
        return None;
    };
    let script = verb
        .eq_ignore_ascii_case("EVALSHA")
        .then(|| scripts.name_of(sha))
        .flatten()?;
    Some(SlowCall {
        script,
        took: Duration::from_micros(u64::try_from(*micros).ok()?),
        at: SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(u64::try_from(*at).ok()?))?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::sources::Verb;
    use super::*;

    #[test]
    fn the_keys_of_all_databases_count() {
        let info = "used_memory:2048\r\nmaxmemory:4096\r\nused_memory_dataset:512\r\nexpired_keys:7\r\n\
            # Keyspace\r\ndb0:keys=3,expires=3,avg_ttl=1\r\ndb12:keys=4,expires=0,avg_ttl=0\r\n";
        let report = report("one", &Info(info), Ok(Vec::new()));
        assert_eq!(
            (report.keys, report.expired_keys, report.data_bytes),
            (7, 7, Some(512))
        );
        assert_eq!(
            report.memory,
            Some(StoreMemory {
                used_bytes: 2_048,
                max_bytes: Some(4_096)
            })
        );
    }

    fn call(words: &[&str]) -> Value {
        let words = words
            .iter()
            .map(|word| Value::BulkString((*word).into()))
            .collect();
        Value::Array(vec![
            Value::Int(1),
            Value::Int(100),
            Value::Int(25_000),
            Value::Array(words),
        ])
    }

    #[test]
    fn only_our_scripts_in_a_slow_log_are_ours() {
        let scripts = Scripts::default();
        let of_others = "0123456789012345678901234567890123456789";
        let ours = scripts.sha(Verb::Complete).to_owned();
        let log = Value::Array(vec![
            call(&["evalsha", &ours, "1", "billing:x"]),
            call(&["EVALSHA", of_others, "1", "billing:x"]),
            call(&["KEYS", "*"]),
            Value::Nil,
        ]);
        let found = slow_calls(&log, &scripts);
        let expected = SlowCall {
            script: "complete",
            took: Duration::from_millis(25),
            at: SystemTime::UNIX_EPOCH + Duration::from_secs(100),
        };
        assert_eq!(found, [expected]);
    }
}
