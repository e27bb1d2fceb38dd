//! Options of a PostgreSQL store, and how it connects.

use std::path::PathBuf;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use oncegate_core::store::StoreError;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, TargetSessionAttrs};

use super::link::{CONNECTIONS, Link};
use super::notices::Notices;
use super::purge::Purge;
use super::session::{Sessions, session_options};
use super::settings::PostgresSettings;
use super::shared::Shared;
use super::tls::{Parameters, Tls};
use super::transactional::Connecting;
use super::{Inner, PostgresStore};
use oncegate_store_toolkit::archive::{Archive, SharedArchive};
use oncegate_store_toolkit::password::PasswordFile;
use oncegate_store_toolkit::start::until_reachable;

/// Default of the longest time between two purges of expired records.
const DEFAULT_PURGE_REST: Duration = Duration::from_secs(600);

/// The time for which sent data may stay unconfirmed before the system closes a connection.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Error text for an invalid URL. It does not repeat the URL, which may contain a password.
const INVALID_URL: &str =
    "the URL is invalid: postgres://[user[:password]@]host[:port]/database is expected";

/// Options for a [`PostgresStore`].
#[must_use = "nothing happens before connect()"]
#[derive(Clone)]
pub struct PostgresBuilder {
    origin: Origin,
    pub(super) settings: PostgresSettings,
    start_patience: Duration,
    purge: Purge,
}

/// The way to the server.
#[derive(Clone, Debug, Default)]
pub(super) struct Reached {
    /// `host:port/database`, or empty when the caller supplied a pool.
    pub(super) address: String,
    /// `true` if a password may be sent to another machine in plain text.
    pub(super) shows_password: bool,
}

/// The source of the connections.
#[derive(Clone)]
pub(super) enum Origin {
    Url(String),
    Pool(Pool),
}

impl PostgresBuilder {
    pub(super) fn new(origin: Origin) -> Self {
        Self {
            origin,
            settings: PostgresSettings::DEFAULT,
            start_patience: Duration::ZERO,
            purge: Purge {
                rest: Some(DEFAULT_PURGE_REST),
                ..Purge::default()
            },
        }
    }

    /// Sets all settings but the URL and the purge, such as those of a file.
    pub fn settings(self, settings: PostgresSettings) -> Self {
        Self { settings, ..self }
    }

    /// Sets the [file with the authorities](PostgresSettings::tls) that may sign the server's
    /// certificate: those of this machine by default.
    pub fn tls_root(mut self, file: impl Into<PathBuf>) -> Self {
        self.settings.tls.root = Some(file.into());
        self
    }

    /// Sets the files with the [client's certificate](PostgresSettings::tls) and its
    /// key; by default there is none.
    pub fn tls_client(mut self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.settings.tls.certificate = Some(certificate.into());
        self.settings.tls.key = Some(key.into());
        self
    }

    /// Sets the [file with the password](PostgresSettings::password_file).
    pub fn password_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.settings.password_file = Some(path.into());
        self
    }

    /// Sets the [time limit for one round trip](PostgresSettings::response_timeout): 5 s by
    /// default.
    pub fn response_timeout(mut self, response_timeout: Duration) -> Self {
        self.settings.response_timeout = response_timeout;
        self
    }

    /// Sets the [time limit](PostgresSettings::connect_timeout) of one attempt to connect: 2 s by
    /// default. A pool that the caller supplies has its own.
    pub fn connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.settings.connect_timeout = connect_timeout;
        self
    }

    /// Accepts [`synchronous_commit = off`](PostgresSettings::allow_asynchronous_commit).
    pub fn allow_asynchronous_commit(mut self) -> Self {
        self.settings.allow_asynchronous_commit = true;
        self
    }

    /// Accepts [`fsync = off`](PostgresSettings::allow_fsync_off), for a server with test data
    /// only.
    pub fn allow_fsync_off(mut self) -> Self {
        self.settings.allow_fsync_off = true;
        self
    }

    /// The longest time between the starts of two purges, which remove expired records. Default: 10
    /// min.
    ///
    /// Purges run more often, and pause less, when one record in twenty has expired by then, so
    /// that they keep up. The processes at one database take turns: one of them purges at a time,
    /// in small steps.
    pub fn purge_every(mut self, rest: Duration) -> Self {
        self.purge.rest = Some(rest);
        self
    }

    /// Leaves expired records in the table until [`PostgresStore::purge`] is called. They still
    /// count as absent.
    pub fn without_purge(mut self) -> Self {
        self.purge.rest = None;
        self
    }

    /// Passes expired records to `archive` before a purge deletes them. Default: no archive; they
    /// are deleted.
    ///
    /// Set the same archive for every process at one database, because any of them may run the
    /// purge.
    pub fn archive(mut self, archive: impl Archive + 'static) -> Self {
        self.purge.archive = Some(SharedArchive::new(archive));
        self
    }

    /// Requires a [journal](PostgresSettings::journal) in the database.
    pub fn journaled(mut self) -> Self {
        self.settings.journal = true;
        self
    }

    /// The time for which [`connect`](Self::connect) tries again while the server is away: it is
    /// starting, or is not there yet. Default: zero, which is one try, so that a wrong address is
    /// reported at once.
    ///
    /// A service that may start before its database sets this; five minutes are what a consumer
    /// waits for its brokers (`Consumer::start_patience`). Each failed try is logged as a warning,
    /// and the delays between them grow to 5 s. A server that refuses is not waited for.
    pub fn start_patience(mut self, patience: Duration) -> Self {
        self.start_patience = patience;
        self
    }

    /// Connects. It creates no tables: see [`PostgresStore::create_schema`].
    ///
    /// # Errors
    /// When the URL or a setting is invalid, the server cannot be reached within the
    /// [`start_patience`](Self::start_patience), or it refuses the user.
    pub async fn connect(self) -> Result<PostgresStore, StoreError> {
        if let Some(wrong) = self.settings.check().into_iter().next() {
            return Err(StoreError::refused(wrong.what));
        }
        until_reachable(self.start_patience, fastrand::f64, || self.try_connect()).await
    }

    async fn try_connect(&self) -> Result<PostgresStore, StoreError> {
        let url = match &self.origin {
            Origin::Pool(pool) => {
                let sessions = Sessions::Unconfigured;
                return self
                    .open((pool.clone(), None), None, Reached::default(), sessions)
                    .await;
            }
            Origin::Url(url) => url,
        };
        let PostgresSettings {
            response_timeout,
            tls,
            password_file,
            ..
        } = self.settings.clone();
        let (url, parameters) = Parameters::split(url)?;
        let mut config = self.config(&url)?;
        let password = password_file.map(PasswordFile::new);
        if let Some(password) = &password {
            config.password(password.read()?);
        }
        let parameters = parameters.or_files(tls);
        let shows_password = parameters.shows_password(&config);
        let tls = Tls::new(parameters, &mut config)?;
        let options = config.get_options().unwrap_or_default().to_owned();
        let mut ours = config.clone();
        ours.options(options + &session_options(response_timeout));
        let reached = Reached {
            address: address(&config),
            shows_password,
        };
        let connecting = Connecting {
            config: config.clone(),
            notices: Notices::new(tls.clone(), password.clone()),
            sessions: Sessions::Ours,
        };
        let opened = self
            .open(
                pool(ours, tls.clone(), password.clone())?,
                Some(connecting.clone()),
                reached.clone(),
                Sessions::Ours,
            )
            .await;
        match opened {
            // A pooler may refuse a session with settings, or drop them.
            Err(StoreError::Refused { .. }) => {
                let connecting = Connecting {
                    sessions: Sessions::Unconfigured,
                    ..connecting
                };
                let pool = pool(config.clone(), tls.clone(), password.clone())?;
                self.open(pool, Some(connecting), reached, Sessions::Unconfigured)
                    .await
            }
            opened => opened,
        }
    }

    async fn open(
        &self,
        (pool, notices): (Pool, Option<Notices>),
        connecting: Option<Connecting>,
        reached: Reached,
        sessions: Sessions,
    ) -> Result<PostgresStore, StoreError> {
        // Builders can be used again, and each store has its own purge.
        let purge = Purge {
            backlog: Arc::default(),
            ..self.purge.clone()
        };
        let backlog = Arc::clone(&purge.backlog);
        let link = Link::start(
            Shared::new(pool, notices, self.settings.response_timeout, sessions),
            purge,
        )?;
        // A pool of the caller's has no address here.
        let server = match &*reached.address {
            "" => "PostgreSQL".to_owned(),
            address => format!("PostgreSQL at {address}"),
        };
        let has_settings = link
            .has_settings()
            .await
            .map_err(|error| error.at(server))?;
        if sessions == Sessions::Ours && !has_settings {
            return Err(StoreError::refused(
                "the sessions do not keep their settings",
            ));
        }
        if sessions == Sessions::Unconfigured {
            link.keeps_statements().await?;
        }
        Ok(PostgresStore {
            inner: Inner {
                link,
                connecting,
                reached,
                settings: self.settings.clone(),
                backlog,
            }
            .into(),
        })
    }

    fn config(&self, url: &str) -> Result<Config, StoreError> {
        let mut config = Config::from_str(url).map_err(|_| StoreError::refused(INVALID_URL))?;
        config
            .connect_timeout(self.settings.connect_timeout)
            .tcp_user_timeout(TCP_USER_TIMEOUT)
            // Of several hosts, the one that accepts writes.
            .target_session_attrs(TargetSessionAttrs::ReadWrite);
        if config.get_application_name().is_none() {
            config.application_name("oncegate");
        }
        Ok(config)
    }
}

/// A pool, and the notices of the server on its connections.
fn pool(
    config: Config,
    tls: Option<Tls>,
    password: Option<PasswordFile>,
) -> Result<(Pool, Option<Notices>), StoreError> {
    let recycling = ManagerConfig {
        recycling_method: RecyclingMethod::Fast,
    };
    let notices = Notices::new(tls, password);
    let manager = Manager::from_connect(config, notices.clone(), recycling);
    let pool = Pool::builder(manager)
        .max_size(CONNECTIONS)
        .runtime(Runtime::Tokio1)
        .build();
    let pool = pool.map_err(|error| StoreError::refused(format!("no pool: {error}")))?;
    Ok((pool, Some(notices)))
}

/// The address in a configuration, without user and password.
fn address(config: &Config) -> String {
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    });
    let ports: Vec<u16> = config.get_ports().to_vec();
    let places: Vec<String> = hosts
        .enumerate()
        .map(|(position, host)| {
            // One port may be given for all hosts.
            let port = ports.get(position).or(ports.first()).unwrap_or(&5_432);
            format!("{host}:{port}")
        })
        .collect();
    format!(
        "{}/{}",
        places.join(","),
        config.get_dbname().unwrap_or_default()
    )
}

impl std::fmt::Debug for PostgresBuilder {
    /// Leaves out the URL, which may contain a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresBuilder")
            .field("settings", &self.settings)
            .field("purge", &self.purge)
            .finish_non_exhaustive()
    }
}
