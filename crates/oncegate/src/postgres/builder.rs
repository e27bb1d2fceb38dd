//! Options, and how a store connects.

use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use oncegate_core::store::StoreError;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, TargetSessionAttrs};

use super::link::{self, CONNECTIONS, Link, Sessions, Shared};
use super::notices::Notices;
use super::purge::Purge;
use super::{Inner, PostgresStore};
use crate::archive::{Archive, SharedArchive};

/// How long the server may take for one round trip, unless told otherwise.
const DEFAULT_RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one try to connect may take, unless told otherwise.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest time between two walks that remove expired records, unless told otherwise.
const DEFAULT_PURGE_REST: Duration = Duration::from_secs(600);

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
    allowed: Allowed,
    purge: Purge,
    journaled: bool,
}

/// What the check accepts although it breaks the promise.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Allowed {
    pub(super) asynchronous_commit: bool,
    pub(super) fsync_off: bool,
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
            allowed: Allowed::default(),
            purge: Purge { rest: Some(DEFAULT_PURGE_REST), ..Purge::default() },
            journaled: false,
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
    pub fn allow_asynchronous_commit(mut self) -> Self {
        self.allowed.asynchronous_commit = true;
        self
    }

    /// Accepts `fsync = off`, for a server that holds nothing but tests. By default the check refuses it.
    ///
    /// Then a power cut may damage or lose every record.
    pub fn allow_fsync_off(mut self) -> Self {
        self.allowed.fsync_off = true;
        self
    }

    /// The longest time between two walks through the table that remove expired records; 10 min by default.
    ///
    /// Walks come sooner, and pause less, when one record in twenty has expired by then: a purge keeps up with what expires.
    /// All processes at one database take turns: one of them walks, in small steps.
    pub fn purge_every(mut self, rest: Duration) -> Self {
        self.purge.rest = Some(rest);
        self
    }

    /// Leaves expired records in the table until [`PostgresStore::purge`] is called. They still count as
    /// absent.
    pub fn without_purge(mut self) -> Self {
        self.purge.rest = None;
        self
    }

    /// Hands expired records to `archive` before a purge deletes them; by default they are just deleted.
    ///
    /// Set the same for every process at one database, because any of them may be the one that purges.
    pub fn archive(mut self, archive: impl Archive + 'static) -> Self {
        self.purge.archive = Some(SharedArchive::new(archive));
        self
    }

    /// Demands a journal: an entry for each change of state, written in the same transaction, by triggers on the
    /// table; see [`PostgresStore::journal`]. None by default.
    ///
    /// [`create_schema`](PostgresStore::create_schema) makes it, and without it the check refuses the store. Once it is
    /// made, it tells of every change in the database, whoever makes it and however his store is built.
    pub fn journaled(mut self) -> Self {
        self.journaled = true;
        self
    }

    /// Connects. It makes no tables: see [`PostgresStore::create_schema`].
    ///
    /// # Errors
    /// When the URL is invalid, the server cannot be reached, or it refuses the user.
    pub async fn connect(self) -> Result<PostgresStore, StoreError> {
        let url = match &self.origin {
            Origin::Pool(pool) => {
                return self.open((pool.clone(), None), String::new(), Sessions::Anybodys).await;
            }
            Origin::Url(url) => url,
        };
        let config = self.config(url)?;
        let options = config.get_options().unwrap_or_default().to_owned();
        let mut ours = config.clone();
        ours.options(options + &link::session_options(self.response_timeout));
        let address = address(&config);
        let opened = self.open(pool(ours)?, address.clone(), Sessions::Ours).await;
        match opened {
            // A pooler may refuse a session with settings, or drop them.
            Err(StoreError::Refused { .. }) => self.open(pool(config)?, address, Sessions::Anybodys).await,
            opened => opened,
        }
    }

    async fn open(
        &self,
        (pool, notices): (Pool, Option<Notices>),
        address: String,
        sessions: Sessions,
    ) -> Result<PostgresStore, StoreError> {
        // Builders can be used again, and each store has a purge of its own.
        let purge = Purge { backlog: Arc::default(), ..self.purge.clone() };
        let backlog = Arc::clone(&purge.backlog);
        let link = Link::start(Shared::new(pool, notices, self.response_timeout, sessions), purge)?;
        let has_settings = link.has_settings().await?;
        if sessions == Sessions::Ours && !has_settings {
            return Err(StoreError::refused("the sessions do not keep their settings"));
        }
        Ok(PostgresStore {
            inner: Inner { link, address, allowed: self.allowed, journaled: self.journaled, backlog }.into(),
        })
    }

    fn config(&self, url: &str) -> Result<Config, StoreError> {
        let mut config = Config::from_str(url).map_err(|_| StoreError::refused(INVALID_URL))?;
        config
            .connect_timeout(self.connect_timeout)
            .tcp_user_timeout(TCP_USER_TIMEOUT)
            // Of several hosts, the one that takes writes.
            .target_session_attrs(TargetSessionAttrs::ReadWrite);
        if config.get_application_name().is_none() {
            config.application_name("oncegate");
        }
        Ok(config)
    }
}

/// A pool, and what the server says on its connections.
fn pool(config: Config) -> Result<(Pool, Option<Notices>), StoreError> {
    let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let notices = Notices::default();
    let manager = Manager::from_connect(config, notices.clone(), recycling);
    let pool = Pool::builder(manager).max_size(CONNECTIONS).runtime(Runtime::Tokio1).build();
    let pool = pool.map_err(|error| StoreError::refused(format!("no pool: {error}")))?;
    Ok((pool, Some(notices)))
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
            .field("allowed", &self.allowed)
            .field("purge", &self.purge)
            .field("journaled", &self.journaled)
            .finish_non_exhaustive()
    }
}
