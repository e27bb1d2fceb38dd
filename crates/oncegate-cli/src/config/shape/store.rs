//! The settings of a store.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::config::values::{Secret, Time};

/// The store of the records.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Store {
    /// `redis://`, `redis+cluster://`, `redis+sentinel://` (`rediss` for TLS), `postgres://`, or an
    /// SQLite file as `sqlite:path`.
    pub(crate) url: Option<String>,
    /// The password that belongs into the URL. From a file, it is read for each new connection.
    pub(crate) password: Option<Secret>,
    /// The durability that a record must have before it counts, in Redis.
    pub(crate) durability: Option<Durability>,
    /// How long the server may take to answer. Keep it well below the lease.
    #[schemars(extend("default" = "2s for Redis, 5s for PostgreSQL"))]
    pub(crate) response_timeout: Option<Time>,
    /// The time limit of one attempt to connect.
    #[schemars(extend("default" = "2s"))]
    pub(crate) connect_timeout: Option<Time>,
    /// The authority that has signed the servers' certificates, a file in PEM, for `rediss` and
    /// `postgres` URLs. It is read again when it changes.
    pub(crate) tls_root: Option<PathBuf>,
    /// The certificate that the servers require of clients, a file in PEM, for `rediss` and
    /// `postgres` URLs. It belongs to `tls_key`; both are read again when they change.
    pub(crate) tls_certificate: Option<PathBuf>,
    /// The key of `tls_certificate`, a file in PEM.
    pub(crate) tls_key: Option<PathBuf>,
    /// The user for the sentinels of `redis+sentinel://`. Without it, their default user.
    pub(crate) sentinel_user: Option<String>,
    /// The password for the sentinels, if they want one; that of the URL is the primary's. From a
    /// file, it is read for each new connection.
    pub(crate) sentinel_password: Option<Secret>,
    /// The Redis is a managed service that answers a write only when it is durable by its own
    /// means, such as Amazon MemoryDB: no append-only file is asked for. It cannot be checked.
    #[schemars(extend("default" = false))]
    pub(crate) durable_service: Option<bool>,
    /// Accept a Redis that may evict records: messages of evicted records run again.
    #[schemars(extend("default" = false))]
    pub(crate) allow_evicting_policy: Option<bool>,
    /// Accept a Redis without a replica: if its disk is lost, so are the records. Otherwise that is
    /// a warning, and a finding of `oncegate doctor`.
    #[schemars(extend("default" = false))]
    pub(crate) allow_no_replica: Option<bool>,
    /// Accept a PostgreSQL with `synchronous_commit = off`: a crash of the server takes back the
    /// last completions.
    #[schemars(extend("default" = false))]
    pub(crate) allow_asynchronous_commit: Option<bool>,
    /// Accept a PostgreSQL with `fsync = off`, for test data alone: a power cut may damage or lose
    /// every record.
    #[schemars(extend("default" = false))]
    pub(crate) allow_fsync_off: Option<bool>,
    /// Keep a journal of every change in the store itself, in the transaction of the change:
    /// SQLite, and PostgreSQL after `oncegate migrate --journal`. For Redis see the consumer's
    /// `journal`.
    #[schemars(extend("default" = false))]
    pub(crate) journal: Option<bool>,
}

/// Waiting for replicas or disks.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Durability {
    /// How many replicas must have the record.
    #[schemars(extend("default" = 0))]
    pub(crate) replicas: Option<u32>,
    /// Whether the record must be on the disk (Redis 7.2 or later).
    #[schemars(extend("default" = false))]
    pub(crate) fsync: Option<bool>,
    /// How long to wait for that.
    #[schemars(extend("default" = "1s"))]
    pub(crate) timeout: Option<Time>,
}
