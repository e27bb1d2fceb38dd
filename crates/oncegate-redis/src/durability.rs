//! The places where a write must be stored before it counts.

use std::time::Duration;

use oncegate_core::store::StoreError;
use redis::{Cmd, Value};

use super::errors;
use super::info::Info;

/// The places where a record must be stored before the store reports it as written.
///
/// Every level above [`Primary`](Self::Primary) is confirmed at the end of each pipeline, on the
/// connection that has written. A write that is not confirmed in time is [`StoreError::Unknown`]:
/// it is repeated with the same token, and nothing is acknowledged meanwhile. The same holds for a
/// record that was found completed. Heartbeats do not wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(from = "DurabilityTable", into = "DurabilityTable")
)]
#[non_exhaustive]
pub enum Durability {
    /// In the primary's memory; persistence and replication follow later. The default.
    #[default]
    Primary,
    /// In the memory of the primary and of replicas (`WAIT`).
    Replicas {
        /// The number of replicas.
        count: u32,
        /// Time limit for their confirmation, per pipeline.
        timeout: Duration,
    },
    /// Synced to disk in the append-only file of the primary, and of replicas if any are required
    /// (`WAITAOF`).
    ///
    /// Needs Redis 7.2 or later, or Valkey.
    Fsync {
        /// The number of replicas that must have synced it too.
        replicas: u32,
        /// Time limit for the confirmation, per pipeline.
        timeout: Duration,
    },
}

/// The form of a durability in files.
#[cfg(feature = "config")]
#[derive(Clone, serde::Deserialize, serde::Serialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct DurabilityTable {
    /// The number of replicas that must have the record.
    replicas: u32,
    /// Require the record on the disk, too (Redis 7.2 or later).
    fsync: bool,
    /// The time limit for that.
    #[serde(with = "oncegate_core::settings::Time")]
    timeout: Duration,
}

#[cfg(feature = "config")]
impl Default for DurabilityTable {
    fn default() -> Self {
        Self {
            replicas: 0,
            fsync: false,
            timeout: Duration::from_secs(1),
        }
    }
}

#[cfg(feature = "config")]
impl From<DurabilityTable> for Durability {
    fn from(table: DurabilityTable) -> Self {
        let DurabilityTable {
            replicas,
            fsync,
            timeout,
        } = table;
        match (fsync, replicas) {
            (true, replicas) => Self::Fsync { replicas, timeout },
            (false, 0) => Self::Primary,
            (false, count) => Self::Replicas { count, timeout },
        }
    }
}

#[cfg(feature = "config")]
impl From<Durability> for DurabilityTable {
    fn from(durability: Durability) -> Self {
        let default = Self::default();
        match durability {
            Durability::Primary => default,
            Durability::Replicas { count, timeout } => Self {
                replicas: count,
                timeout,
                ..default
            },
            Durability::Fsync { replicas, timeout } => Self {
                replicas,
                fsync: true,
                timeout,
            },
        }
    }
}

impl Durability {
    /// The command that asks the server to confirm everything before it.
    pub(super) fn question(self) -> Option<Cmd> {
        let mut question = Cmd::new();
        match self {
            Self::Primary => return None,
            Self::Replicas { count, timeout } => {
                question.arg("WAIT").arg(count).arg(millis(timeout))
            }
            Self::Fsync { replicas, timeout } => question
                .arg("WAITAOF")
                .arg(1)
                .arg(replicas)
                .arg(millis(timeout)),
        };
        Some(question)
    }

    /// The time that the confirmation may take.
    pub(super) fn patience(self) -> Duration {
        match self {
            Self::Primary => Duration::ZERO,
            Self::Replicas { timeout, .. } | Self::Fsync { timeout, .. } => timeout,
        }
    }

    /// Returns why everything before the confirmation `said` does not count yet, if so.
    pub(super) fn missing(self, said: &Value) -> Option<StoreError> {
        let said = match said {
            Value::ServerError(error) => {
                return Some(match errors::store_error(error, None) {
                    refused @ StoreError::Refused { .. } => refused,
                    other => StoreError::unknown(other),
                });
            }
            Value::Array(parts) => parts.as_slice(),
            // WAIT answers with one number.
            single => std::slice::from_ref(single),
        };
        let wanted: &[u32] = match self {
            Self::Primary => return None,
            Self::Replicas { count, .. } => &[count],
            Self::Fsync { replicas, .. } => &[1, replicas],
        };
        let reached = wanted.len() == said.len()
            && wanted.iter().zip(said).all(
                |(wanted, said)| matches!(said, Value::Int(said) if *said >= i64::from(*wanted)),
            );
        (!reached).then(|| {
            StoreError::unknown(
                "too few replicas or disks confirmed the write (the store's `durability`)",
            )
        })
    }

    /// Returns why a server does not support this durability, if so.
    pub(super) fn refusal(self, info: &Info<'_>) -> Option<StoreError> {
        let Self::Fsync { .. } = self else {
            return None;
        };
        if !info.is_at_least(7, 2) {
            let version = info.get("redis_version").unwrap_or("of an unknown version");
            return Some(StoreError::refused(format!(
                "Durability::Fsync needs WAITAOF of Redis 7.2 or later, or Valkey, and this is redis {version}: use \
                 Durability::Replicas, or appendfsync always"
            )));
        }
        let without_file = info.get("aof_enabled") != Some("1");
        without_file.then(|| {
            StoreError::refused("Durability::Fsync needs the append-only file: set appendonly yes")
        })
    }

    /// Returns a warning if the server currently lacks something for this durability.
    pub(super) fn warning(self, info: &Info<'_>) -> Option<String> {
        let (Self::Replicas { count: wanted, .. }
        | Self::Fsync {
            replicas: wanted, ..
        }) = self
        else {
            return None;
        };
        let connected = info
            .get("connected_slaves")
            .and_then(|count| count.parse().ok())
            .unwrap_or(0_u32);
        (connected < wanted).then(|| {
            format!(
                "The durability asks for {wanted} replicas, and {connected} are connected: nothing runs or is \
                 completed until there are enough."
            )
        })
    }

    /// The additional commands that a user must be allowed, for `ACL SETUSER`.
    pub(super) fn rights(self) -> &'static str {
        match self {
            Self::Primary => "",
            Self::Replicas { .. } => " +pexpireat +wait",
            Self::Fsync { .. } => " +pexpireat +waitaof",
        }
    }
}

/// A time in milliseconds, never zero, which would wait for ever.
fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis())
        .unwrap_or(u64::MAX)
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(local: i64, replicas: i64) -> Value {
        Value::Array(vec![Value::Int(local), Value::Int(replicas)])
    }

    #[cfg(feature = "config")]
    #[test]
    fn the_form_in_files_says_the_same() {
        let timeout = Duration::from_secs(3);
        for durability in [
            Durability::Primary,
            Durability::Replicas { count: 2, timeout },
            Durability::Fsync {
                replicas: 0,
                timeout,
            },
            Durability::Fsync {
                replicas: 1,
                timeout,
            },
        ] {
            let table = DurabilityTable::from(durability);
            assert_eq!(Durability::from(table), durability);
        }
    }

    #[test]
    fn only_what_has_gone_so_far_counts() {
        let timeout = Duration::from_secs(1);
        let replicas = Durability::Replicas { count: 2, timeout };
        let fsync = Durability::Fsync {
            replicas: 1,
            timeout,
        };
        for (level, said, reached) in [
            (replicas, Value::Int(2), true),
            (replicas, Value::Int(3), true),
            (replicas, Value::Int(1), false),
            (replicas, Value::Nil, false),
            (fsync, both(1, 1), true),
            (fsync, both(0, 1), false),
            (fsync, both(1, 0), false),
            (fsync, Value::Int(1), false),
        ] {
            let missing = level.missing(&said);
            assert_eq!(missing.is_none(), reached, "{level:?} {said:?}");
            assert!(missing.is_none_or(|error| error.class() == "unknown"));
        }
    }
}
