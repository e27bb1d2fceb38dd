//! Options, and how a store comes to be.

use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::{Manager, Pool, Runtime};
use oncegate_core::store::StoreError;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, ConnectionInfo, IntoConnectionInfo as _};

use super::link::{Lanes, Shared};
use super::scripts::Scripts;
use super::{Inner, RedisStore};

/// How long the server may take to answer, unless told otherwise.
const DEFAULT_RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long connecting may take, unless told otherwise.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How many connections a store uses: bulk and heartbeats.
const CONNECTIONS: usize = 2;

/// What an invalid URL is answered with; the URL itself is not repeated, for it may hold a password.
const INVALID_URL: &str = "the URL is invalid: redis://[user[:password]@]host[:port][/database] is expected";

/// Options for a [`RedisStore`].
#[must_use = "nothing happens before connect()"]
#[derive(Clone)]
pub struct RedisBuilder {
    origin: Origin,
    response_timeout: Duration,
    connect_timeout: Duration,
    evicting_policy_allowed: bool,
    scripts: Scripts,
}

/// Where the connections come from.
#[derive(Clone)]
pub(super) enum Origin {
    Url(String),
    Pool(Pool),
}

impl RedisBuilder {
    pub(super) fn new(origin: Origin) -> Self {
        Self {
            origin,
            response_timeout: DEFAULT_RESPONSE_TIMEOUT,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            evicting_policy_allowed: false,
            scripts: Scripts::default(),
        }
    }

    /// How long the server may take to answer before the outcome counts as unknown; large batches get more.
    ///
    /// 2 s by default. Keep it well below the lease.
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// How long one try to connect may take; 2 s by default. A pool that was brought has its own.
    pub fn connect_timeout(self, connect_timeout: Duration) -> Self {
        Self { connect_timeout, ..self }
    }

    /// Accepts a server whose `maxmemory-policy` may evict records. By default the check refuses it.
    ///
    /// An evicted record is a forgotten message: its next delivery runs again.
    pub fn allow_evicting_policy(self) -> Self {
        Self { evicting_policy_allowed: true, ..self }
    }

    /// Changes one place of a script, to prove that a test notices.
    ///
    /// # Errors
    /// When the text does not stand in the script exactly once.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn rewrite_script(mut self, name: &str, from: &str, to: &str) -> Result<Self, String> {
        self.scripts.rewrite(name, from, to)?;
        Ok(self)
    }

    /// Connects.
    ///
    /// # Errors
    /// When the URL is invalid, the server cannot be reached, or it refuses the user.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let (pool, address) = match &self.origin {
            Origin::Pool(pool) => (pool.clone(), String::new()),
            Origin::Url(url) => self.pool(url)?,
        };
        let scripts = Arc::new(self.scripts);
        let shared = Shared { pool, scripts: Arc::clone(&scripts), response_timeout: self.response_timeout };
        let lanes = Lanes::start(shared).await?;
        let evicting_policy_allowed = self.evicting_policy_allowed;
        Ok(RedisStore { inner: Arc::new(Inner { lanes, scripts, address, evicting_policy_allowed }) })
    }

    /// The pool for `url`, and the address in words. This is where other topologies will differ.
    fn pool(&self, url: &str) -> Result<(Pool, String), StoreError> {
        let info: ConnectionInfo =
            url.into_connection_info().map_err(|_| StoreError::refused(INVALID_URL))?;
        let address = info.addr().to_string();
        // Naming the library to the server is a command that old servers lack and tight rights refuse.
        let settings = info.redis_settings().clone().set_skip_set_lib_name();
        let info =
            info.set_redis_settings(settings).set_tcp_settings(TcpSettings::default().set_nodelay(true));
        // Pipelines have a time limit of their own, which grows with their size.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(Some(self.connect_timeout));
        let manager = Manager::new_with_config(info, config).map_err(|_| StoreError::refused(INVALID_URL))?;
        let pool = Pool::builder(manager).max_size(CONNECTIONS).runtime(Runtime::Tokio1).build();
        pool.map(|pool| (pool, address)).map_err(|error| StoreError::refused(format!("no pool: {error}")))
    }
}

impl std::fmt::Debug for RedisBuilder {
    /// Leaves out where it connects to: the URL may hold a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisBuilder")
            .field("response_timeout", &self.response_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("evicting_policy_allowed", &self.evicting_policy_allowed)
            .finish_non_exhaustive()
    }
}
