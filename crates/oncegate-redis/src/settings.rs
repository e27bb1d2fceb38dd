//! The settings of a store in Redis, and their check.

use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "config")]
use oncegate_core::settings::Time;
use oncegate_core::settings::{Finding, TlsFiles};

use super::durability::Durability;

/// The settings of a [`RedisStore`](crate::RedisStore), besides its URL.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct RedisSettings {
    /// The durability that a record must have before it counts, in Redis.
    ///
    /// Higher levels cost a round trip to the replicas, or a flush to the disk, per pipeline. Keep
    /// the time limit well below the lease.
    pub durability: Durability,
    /// The time that the server may take to answer. Keep it well below the lease.
    ///
    /// After that the outcome counts as unknown. Large batches get more.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub response_timeout: Duration,
    /// The time limit of one attempt to connect.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub connect_timeout: Duration,
    /// The files of TLS: the authority, and the client's certificate with its key.
    ///
    /// The server's certificate must name the host that the URL (or the cluster, or a sentinel)
    /// names. Sentinels get the client's certificate, too. The files are read for each new
    /// connection.
    #[cfg_attr(feature = "config", serde(skip))]
    pub tls: TlsFiles,
    /// The file with the password, instead of one in the URL; a line feed at its end does not
    /// count.
    ///
    /// It is read for each new connection, so the password may change while connections are open. A
    /// pool that the caller supplies has its own.
    #[cfg_attr(feature = "config", serde(skip))]
    pub password_file: Option<PathBuf>,
    /// The user for the sentinels of `redis+sentinel://`. Without it, their default user.
    ///
    /// The one in the URL is for the primary.
    pub sentinel_user: Option<String>,
    /// The file with the password for the sentinels, which is read for each new connection.
    #[cfg_attr(feature = "config", serde(skip))]
    pub sentinel_password_file: Option<PathBuf>,
    /// The Redis is a managed service that answers a write only when it is durable by its own
    /// means, such as Amazon MemoryDB: no append-only file is asked for. It cannot be checked.
    ///
    /// ElastiCache with synchronous durability is such a service, too. The store reports the row
    /// `declared` of `docs/STORES.md`, and warns neither of the missing append-only file nor of a
    /// missing replica. A service that is durable by replicas alone needs `durability`.
    pub durable_service: bool,
    /// Accept a Redis that may evict records: messages of evicted records run again.
    ///
    /// The check refuses a server with such a `maxmemory-policy` otherwise.
    pub allow_evicting_policy: bool,
    /// Accept a Redis without a replica: if its disk is lost, so are the records. Otherwise that is
    /// a warning, and a finding of `oncegate doctor`.
    pub allow_no_replica: bool,
}

impl RedisSettings {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        durability: Durability::Primary,
        response_timeout: Duration::from_secs(2),
        connect_timeout: Duration::from_secs(2),
        tls: TlsFiles::NONE,
        password_file: None,
        sentinel_user: None,
        sentinel_password_file: None,
        durable_service: false,
        allow_evicting_policy: false,
        allow_no_replica: false,
    };

    /// Returns what is wrong with these settings.
    pub fn check(&self) -> Vec<Finding> {
        let unused = self
            .tls
            .given()
            .into_iter()
            .filter(|(_, is_given)| *is_given && !cfg!(feature = "tls"))
            .map(|(setting, _)| {
                Finding::new(
                    setting,
                    "this build has no TLS: it needs the feature `redis-tls`",
                )
            });
        self.tls.check().into_iter().chain(unused).collect()
    }
}

impl Default for RedisSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RedisStore;

    #[test]
    fn a_builder_has_the_defaults_and_setters_change_them() {
        let builder = RedisStore::builder("redis://localhost");
        assert_eq!(builder.settings, RedisSettings::DEFAULT);
        assert_eq!(RedisSettings::DEFAULT.check(), []);
        let builder = builder
            .allow_no_replica()
            .sentinel_password_file("watcher", "/run/secrets/sentinel");
        let expected = RedisSettings {
            allow_no_replica: true,
            sentinel_user: Some("watcher".to_owned()),
            sentinel_password_file: Some("/run/secrets/sentinel".into()),
            ..RedisSettings::DEFAULT
        };
        assert_eq!(builder.settings, expected);
    }

    #[tokio::test]
    async fn a_certificate_without_its_key_is_refused_before_a_connection() {
        let settings = RedisSettings {
            tls: TlsFiles {
                certificate: Some("client.pem".into()),
                ..TlsFiles::NONE
            },
            ..RedisSettings::DEFAULT
        };
        let [Finding { setting, what }] = settings.check().try_into().unwrap();
        assert_eq!(setting, "tls_certificate");
        let builder = RedisStore::builder("rediss://localhost").settings(settings);
        let refused = builder.connect().await.unwrap_err();
        assert_eq!(refused.class(), "refused");
        assert!(refused.to_string().contains(&what), "{refused}");
    }
}
