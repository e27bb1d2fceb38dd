//! Stores in Redis.

use async_trait::async_trait;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::settings::Finding;
use oncegate::core::store::StoreError;
use oncegate::redis::{RedisSettings, RedisStore};
use schemars::{Schema, schema_for};

use super::{Extras, Opened, Opening, Purpose, StoreKind, secret};
use crate::config::shape::{self, WithTls};
use crate::exit::Problem;

pub(super) struct Redis;

#[async_trait]
impl StoreKind for Redis {
    fn name(&self) -> &'static str {
        "Redis"
    }

    fn forms(&self) -> &'static str {
        "redis://host:port, redis+cluster://host:port,host:port, \
         redis+sentinel://host:port,host:port/name (rediss for TLS)"
    }

    fn has_scheme(&self, scheme: &str) -> bool {
        // The store itself reports errors in the rest.
        matches!(scheme.split('+').next(), Some("redis" | "rediss"))
    }

    fn schema(&self) -> Schema {
        schema_for!(WithTls<RedisSettings>)
    }

    /// Refuses what only a Redis, or its sentinels, have where there is none: nothing else would
    /// use it.
    fn findings(&self, settings: &shape::Store, url: &str, is_chosen: bool) -> Vec<Finding> {
        let scheme = url.split("://").next().unwrap_or_default();
        let has_sentinels = is_chosen && scheme.ends_with("+sentinel");
        let has_user = settings.redis.sentinel_user.is_some();
        let has_password = settings.sentinel_password.is_some();
        [
            (
                is_chosen && settings.sqlite.journal,
                "journal",
                "Redis cannot keep one beside its records; name a file as the consumer's `journal` instead",
            ),
            (
                has_user && !has_sentinels,
                "sentinel_user",
                NO_SENTINELS,
            ),
            (
                has_password && !has_sentinels,
                "sentinel_password",
                NO_SENTINELS,
            ),
            (
                has_user && !has_password,
                "sentinel_user",
                "it needs `sentinel_password`",
            ),
            (
                settings.redis.durable_service && !is_chosen,
                "durable_service",
                "only a Redis may be such a service",
            ),
        ]
        .into_iter()
        .filter(|(is_wrong, ..)| *is_wrong)
        .map(|(_, setting, what)| Finding::new(setting, what))
        .collect()
    }

    async fn open(&self, opening: Opening<'_>) -> Result<Opened, Problem> {
        let (sentinel_password, sentinel_password_file) =
            secret(opening.settings.sentinel_password.as_ref())?;
        let settings = RedisSettings {
            tls: opening.settings.tls.clone(),
            password_file: opening.password_file,
            sentinel_password_file,
            ..opening.settings.redis.clone()
        };
        let user = settings.sentinel_user.clone().unwrap_or_default();
        let mut builder = RedisStore::builder(opening.location).settings(settings);
        if let Some(password) = sentinel_password {
            builder = builder.sentinel_login(user, password);
        }
        // A command that inspects reports such a policy with everything else, instead of it alone.
        if opening.purpose == Purpose::Read {
            builder = builder.allow_evicting_policy();
        }
        let store = builder.start_patience(opening.patience).connect().await?;
        Ok(Opened {
            redis: Some(store.clone()),
            ..Opened::new(store)
        })
    }
}

const NO_SENTINELS: &str = "only a store at redis+sentinel:// has sentinels";

#[async_trait]
impl Extras for RedisStore {
    async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        self.remove(scope, keys).await
    }
}
