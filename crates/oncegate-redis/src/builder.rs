//! Options of a Redis store.

mod connect;

use std::path::PathBuf;
use std::time::Duration;

use deadpool_redis::Pool;
use oncegate_core::store::StoreError;

use super::RedisStore;
use super::durability::Durability;
use super::scripts::Scripts;
use super::settings::RedisSettings;
use super::watch::WATCH_INTERVAL;
use oncegate_store_toolkit::start::until_reachable;

/// Options for a [`RedisStore`].
#[must_use = "nothing happens before connect()"]
#[derive(Clone)]
pub struct RedisBuilder {
    origin: Origin,
    pub(super) settings: RedisSettings,
    /// The authority in PEM, instead of the file of the settings.
    #[cfg(feature = "tls")]
    tls_root: Option<Vec<u8>>,
    /// The password for the sentinels, if it is in no file.
    sentinel_password: Option<String>,
    start_patience: Duration,
    grants_after_loss: bool,
    watch_interval: Duration,
    expected_keys: Option<u64>,
    scripts: Scripts,
}

/// The source of the connections.
#[derive(Clone)]
pub(super) enum Origin {
    Url(String),
    Pool(Pool),
}

impl RedisBuilder {
    pub(super) fn new(origin: Origin) -> Self {
        Self {
            origin,
            settings: RedisSettings::DEFAULT,
            #[cfg(feature = "tls")]
            tls_root: None,
            sentinel_password: None,
            start_patience: Duration::ZERO,
            grants_after_loss: false,
            watch_interval: WATCH_INTERVAL,
            expected_keys: None,
            scripts: Scripts::default(),
        }
    }

    /// Sets all settings but the URL, such as those of a file.
    pub fn settings(self, settings: RedisSettings) -> Self {
        Self { settings, ..self }
    }

    /// Sets the [time limit for an answer](RedisSettings::response_timeout) of the server: 2 s by
    /// default.
    pub fn response_timeout(mut self, response_timeout: Duration) -> Self {
        self.settings.response_timeout = response_timeout;
        self
    }

    /// Sets the [time limit](RedisSettings::connect_timeout) of one attempt to connect: 2 s by
    /// default. A pool that the caller supplies has its own.
    pub fn connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.settings.connect_timeout = connect_timeout;
        self
    }

    /// Sets [where a record must be stored](RedisSettings::durability) before it counts:
    /// [`Durability::Primary`] by default.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.settings.durability = durability;
        self
    }

    /// Grants claims even if records are missing, for tests that make records expire.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn grant_after_loss(self) -> Self {
        Self {
            grants_after_loss: true,
            ..self
        }
    }

    /// Accepts a server whose `maxmemory-policy`
    /// [may evict records](RedisSettings::allow_evicting_policy).
    pub fn allow_evicting_policy(mut self) -> Self {
        self.settings.allow_evicting_policy = true;
        self
    }

    /// Accepts a server [without a replica](RedisSettings::allow_no_replica).
    pub fn allow_no_replica(mut self) -> Self {
        self.settings.allow_no_replica = true;
        self
    }

    /// Keeps completions without a result in buckets, for scopes with very many keys. Default: off.
    ///
    /// Buckets need about a quarter of the memory and about twice the server's time.
    ///
    /// `expected_keys` is the number of keys that the scope holds at once, that is, within one
    /// retention. With twice as many, every call is a little slower; with ten times as many, much
    /// slower. The number belongs to the scope: a store that opens the scope with another number
    /// (exactly: another power of two of buckets), or without one, is refused. The most is
    /// 838,860,800; [`connect`](Self::connect) refuses more. Handlers whose `Output` is `()` have
    /// no result; other records are kept as usual. The retention of each key stays exact. An
    /// expired key may stay in memory until its bucket is written to again, at most an eighth of
    /// the retention longer. The user needs the rights that [`RedisStore::acl_rules`] returns.
    ///
    /// A URL can set the same with `?compact=N` at its end, for programs that configure nothing but
    /// a URL. This method overrides the URL.
    pub fn compact(mut self, expected_keys: u64) -> Self {
        self.expected_keys = Some(expected_keys);
        self
    }

    /// Interval between two checks of the servers, for tests that count replies. Default: 2 s.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn watch_interval(self, watch_interval: Duration) -> Self {
        Self {
            watch_interval,
            ..self
        }
    }

    /// Uses the scripts instead of plain commands, to prove that both give the same answers.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn scripts_alone(mut self) -> Self {
        self.scripts = self.scripts.alone();
        self
    }

    /// Changes one place of a script, to prove that a test detects it.
    ///
    /// # Errors
    /// When the text does not stand in the script exactly once.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn rewrite_script(mut self, name: &str, from: &str, to: &str) -> Result<Self, String> {
        self.scripts.rewrite(name, from, to)?;
        Ok(self)
    }

    /// Sets the authority that has signed the servers' certificates, in PEM, instead of
    /// [its file](RedisSettings::tls).
    #[cfg(feature = "tls")]
    pub fn tls_root(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.tls_root = Some(pem.into());
        self
    }

    /// Sets the [file with the authority](RedisSettings::tls).
    #[cfg(feature = "tls")]
    pub fn tls_root_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls_root = None;
        self.settings.tls.root = Some(path.into());
        self
    }

    /// Sets the files with the [client's certificate](RedisSettings::tls) and its key;
    /// by default there is none.
    #[cfg(feature = "tls")]
    pub fn tls_client(mut self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.settings.tls.certificate = Some(certificate.into());
        self.settings.tls.key = Some(key.into());
        self
    }

    /// Sets the [file with the password](RedisSettings::password_file).
    pub fn password_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.settings.password_file = Some(path.into());
        self
    }

    /// Sets the user name and password for the sentinels, if they need them. Those in the URL are
    /// for the primary. An empty user is the default one.
    pub fn sentinel_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.settings.sentinel_user = Some(user.into());
        self.settings.sentinel_password_file = None;
        self.sentinel_password = Some(password.into());
        self
    }

    /// Does the same with the [file that holds the
    /// password](RedisSettings::sentinel_password_file).
    pub fn sentinel_password_file(
        mut self,
        user: impl Into<String>,
        path: impl Into<PathBuf>,
    ) -> Self {
        self.settings.sentinel_user = Some(user.into());
        self.settings.sentinel_password_file = Some(path.into());
        self.sentinel_password = None;
        self
    }

    /// States that the server is a managed service that is
    /// [durable by its own means](RedisSettings::durable_service).
    pub fn durable_service(mut self) -> Self {
        self.settings.durable_service = true;
        self
    }

    /// The time for which [`connect`](Self::connect) tries again while the server is away: it is
    /// starting, or is not there yet. Default: zero, which is one try, so that a wrong address is
    /// reported at once.
    ///
    /// A service that may start before its database sets this; five minutes are what a consumer
    /// waits for its brokers (`Consumer::start_patience`). Each failed try is logged as a warning,
    /// and the delays between them grow to 5 s. A server that refuses is not waited for.
    pub fn start_patience(self, start_patience: Duration) -> Self {
        Self {
            start_patience,
            ..self
        }
    }

    /// Connects.
    ///
    /// # Errors
    /// When the URL or a setting is invalid, [`compact`](Self::compact) is given too many keys, the
    /// server cannot be reached within the [`start_patience`](Self::start_patience), or it refuses
    /// the user. In a cluster, it is enough that one of the named nodes answers.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        if let Some(wrong) = self.settings.check().into_iter().next() {
            return Err(StoreError::refused(wrong.what));
        }
        until_reachable(self.start_patience, fastrand::f64, || self.try_connect()).await
    }
}

impl std::fmt::Debug for RedisBuilder {
    /// Leaves out the URL, which may contain a password, and all that is no plain setting.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisBuilder")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
