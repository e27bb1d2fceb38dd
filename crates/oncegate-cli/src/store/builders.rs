//! The builders of server stores, with the settings of a configuration.

use std::path::PathBuf;
use std::time::Duration;

use oncegate::postgres::{PostgresBuilder, PostgresStore};
use oncegate::redis::{Durability, RedisBuilder, RedisStore};

use crate::config::shape;
use crate::config::values::{Secret, Time};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Consume,
    Read,
}

/// The use of a store, and what is not in its URL.
pub(super) struct Access<'a> {
    pub(super) purpose: Purpose,
    /// The file with the password, which the store reads itself whenever it connects.
    pub(super) password_file: Option<&'a PathBuf>,
    /// The password for sentinels that is in no file.
    pub(super) sentinel_password: Option<String>,
}

pub(super) fn postgres(url: &str, store: &shape::Store, access: &Access<'_>) -> PostgresBuilder {
    let mut builder = PostgresStore::builder(url);
    if access.purpose == Purpose::Read {
        builder = builder.without_purge();
    }
    if store.journal == Some(true) {
        builder = builder.journaled();
    }
    if store.allow_asynchronous_commit == Some(true) {
        builder = builder.allow_asynchronous_commit();
    }
    if store.allow_fsync_off == Some(true) {
        builder = builder.allow_fsync_off();
    }
    if let Some(Time(time)) = store.response_timeout {
        builder = builder.response_timeout(time);
    }
    if let Some(Time(time)) = store.connect_timeout {
        builder = builder.connect_timeout(time);
    }
    if let Some(path) = &store.tls_root {
        builder = builder.tls_root(path);
    }
    if let (Some(certificate), Some(key)) = (&store.tls_certificate, &store.tls_key) {
        builder = builder.tls_client(certificate, key);
    }
    match access.password_file {
        Some(path) => builder.password_file(path),
        None => builder,
    }
}

pub(super) fn redis(url: &str, store: &shape::Store, access: &Access<'_>) -> RedisBuilder {
    let mut builder = RedisStore::builder(url).durability(durability(store.durability.as_ref()));
    // A command that inspects reports such a policy with everything else, instead of it alone.
    if store.allow_evicting_policy == Some(true) || access.purpose == Purpose::Read {
        builder = builder.allow_evicting_policy();
    }
    if store.allow_no_replica == Some(true) {
        builder = builder.allow_no_replica();
    }
    if store.durable_service == Some(true) {
        builder = builder.durable_service();
    }
    let user = store.sentinel_user.as_deref().unwrap_or_default();
    if let Some(Secret::File(path)) = &store.sentinel_password {
        builder = builder.sentinel_password_file(user, path);
    } else if let Some(password) = &access.sentinel_password {
        builder = builder.sentinel_login(user, password);
    }
    if let Some(Time(time)) = store.response_timeout {
        builder = builder.response_timeout(time);
    }
    if let Some(Time(time)) = store.connect_timeout {
        builder = builder.connect_timeout(time);
    }
    if let Some(path) = &store.tls_root {
        builder = builder.tls_root_file(path);
    }
    if let (Some(certificate), Some(key)) = (&store.tls_certificate, &store.tls_key) {
        builder = builder.tls_client(certificate, key);
    }
    match access.password_file {
        Some(path) => builder.password_file(path),
        None => builder,
    }
}

fn durability(given: Option<&shape::Durability>) -> Durability {
    /// The default time limit for replicas or disks.
    const TIMEOUT: Duration = Duration::from_secs(1);
    let Some(given) = given else {
        return Durability::Primary;
    };
    let timeout = given.timeout.map_or(TIMEOUT, |Time(time)| time);
    match (given.fsync.unwrap_or(false), given.replicas.unwrap_or(0)) {
        (true, replicas) => Durability::Fsync { replicas, timeout },
        (false, 0) => Durability::Primary,
        (false, count) => Durability::Replicas { count, timeout },
    }
}
