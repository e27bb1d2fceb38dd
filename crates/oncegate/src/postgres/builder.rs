//! Options, and how a store connects.

use std::str::FromStr as _;
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use oncegate_core::store::StoreError;
use tokio_postgres::config::{Host, TargetSessionAttrs};
use tokio_postgres::{Config, NoTls};

use super::link::{CONNECTIONS, Link, Shared};
use super::{Inner, PostgresStore, errors};

/// How long the server may take for one round trip, unless told otherwise.
const DEFAULT_RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one try to connect may take, unless told otherwise.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long sent data may stay unconfirmed before the system gives up a connection.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// What an invalid URL is answered with; the URL itself is not repeated, for it may hold a password.
const INVALID_URL: &str = "the URL is invalid: postgres://[user[:password]@]host[:port]/database is expected";

/// Options for a [`PostgresStore`].
#[must_use = "nothing happens before connect()"]
#[derive(Clone)]
pub struct PostgresBuilder {
    origin: Origin,
    response_timeout: Duration,
    connect_timeout: Duration,
    asynchronous_commit_allowed: bool,
}

/// Where the connections come from.
#[derive(Clone)]
pub(super) enum Origin {
    Url(String),
    Pool(Pool),
}

impl PostgresBuilder {
    pub(super) fn new(origin: Origin) -> Self {
        Self {
            origin,
            response_timeout: DEFAULT_RESPONSE_TIMEOUT,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            asynchronous_commit_allowed: false,
        }
    }

    /// How long the server may take for one round trip; 5 s by default. Keep it well below the lease.
    ///
    /// It is also each transaction's `statement_timeout` and `idle_in_transaction_session_timeout`, and
    /// half of it the `lock_timeout`: a stalled process blocks nobody's keys for longer.
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// How long one try to connect may take; 2 s by default. A pool that was brought has its own.
    pub fn connect_timeout(self, connect_timeout: Duration) -> Self {
        Self { connect_timeout, ..self }
    }

    /// Accepts `synchronous_commit = off`. By default the check refuses it.
    ///
    /// Then a crash of the server takes back completions that were acknowledged already.
    pub fn allow_asynchronous_commit(self) -> Self {
        Self { asynchronous_commit_allowed: true, ..self }
    }

    /// Connects. It makes no tables: see [`PostgresStore::create_schema`].
    ///
    /// # Errors
    /// When the URL is invalid, the server cannot be reached, or it refuses the user.
    pub async fn connect(self) -> Result<PostgresStore, StoreError> {
        let (pool, address) = match &self.origin {
            Origin::Pool(pool) => (pool.clone(), String::new()),
            Origin::Url(url) => self.pool(url)?,
        };
        let link = Link::start(Shared::new(pool, self.response_timeout))?;
        let asynchronous_commit_allowed = self.asynchronous_commit_allowed;
        let store = PostgresStore { inner: Inner { link, address, asynchronous_commit_allowed }.into() };
        let reach = |client: deadpool_postgres::Object| async {
            let reached = client.batch_execute("").await.map_err(|error| errors::not_executed(&error));
            (client, reached)
        };
        store.inner.link.run(reach).await?;
        Ok(store)
    }

    /// The pool for `url`, and the address in words.
    fn pool(&self, url: &str) -> Result<(Pool, String), StoreError> {
        let mut config = Config::from_str(url).map_err(|_| StoreError::refused(INVALID_URL))?;
        config
            .connect_timeout(self.connect_timeout)
            .tcp_user_timeout(TCP_USER_TIMEOUT)
            // Of several hosts, the one that takes writes.
            .target_session_attrs(TargetSessionAttrs::ReadWrite);
        if config.get_application_name().is_none() {
            config.application_name("oncegate");
        }
        let address = address(&config);
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(config, NoTls, recycling);
        let pool = Pool::builder(manager).max_size(CONNECTIONS).runtime(Runtime::Tokio1).build();
        pool.map(|pool| (pool, address)).map_err(|error| StoreError::refused(format!("no pool: {error}")))
    }
}

/// Where a configuration leads, without user and password.
fn address(config: &Config) -> String {
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    });
    let ports: Vec<u16> = config.get_ports().to_vec();
    let port = |position: usize| ports.get(position).or(ports.first()).copied().unwrap_or(5_432);
    let places: Vec<String> =
        hosts.enumerate().map(|(position, host)| format!("{host}:{}", port(position))).collect();
    format!("{}/{}", places.join(","), config.get_dbname().unwrap_or_default())
}

impl std::fmt::Debug for PostgresBuilder {
    /// Leaves out where it connects to: the URL may hold a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresBuilder")
            .field("response_timeout", &self.response_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("asynchronous_commit_allowed", &self.asynchronous_commit_allowed)
            .finish_non_exhaustive()
    }
}
