//! Options of a Redis store.

mod connect;

use std::path::PathBuf;
use std::time::Duration;

use deadpool_redis::Pool;
use oncegate_core::store::StoreError;

use super::RedisStore;
use super::checkup::Accepted;
use super::durability::Durability;
use super::login::Login;
use super::scripts::Scripts;
use super::watch::WATCH_INTERVAL;
use oncegate_store_toolkit::start::until_reachable;
#[cfg(feature = "tls")]
use oncegate_tls::Pem;

/// Default time limit for an answer of the server.
const DEFAULT_RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Default time limit for one try to connect.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Options for a [`RedisStore`].
#[must_use = "nothing happens before connect()"]
#[derive(Clone)]
pub struct RedisBuilder {
    origin: Origin,
    response_timeout: Duration,
    connect_timeout: Duration,
    start_patience: Duration,
    accepted: Accepted,
    grants_after_loss: bool,
    durability: Durability,
    watch_interval: Duration,
    sentinel: SentinelLogin,
    login: Login,
    expected_keys: Option<u64>,
    scripts: Scripts,
}

/// The login at the sentinels.
#[derive(Clone, Default)]
struct SentinelLogin {
    /// Empty: the default user.
    user: String,
    password: Option<String>,
    file: Option<PathBuf>,
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
            response_timeout: DEFAULT_RESPONSE_TIMEOUT,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            start_patience: Duration::ZERO,
            accepted: Accepted::default(),
            grants_after_loss: false,
            durability: Durability::Primary,
            watch_interval: WATCH_INTERVAL,
            sentinel: SentinelLogin::default(),
            login: Login::default(),
            expected_keys: None,
            scripts: Scripts::default(),
        }
    }

    /// Time limit for an answer of the server, after which the outcome counts as unknown; large
    /// batches get more.
    ///
    /// Default: 2 s. Keep it well below the lease.
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self {
            response_timeout,
            ..self
        }
    }

    /// Time limit for one try to connect. Default: 2 s. A pool that the caller supplies has its
    /// own.
    pub fn connect_timeout(self, connect_timeout: Duration) -> Self {
        Self {
            connect_timeout,
            ..self
        }
    }

    /// The place where a record must be stored before it counts. Default: [`Durability::Primary`].
    ///
    /// Higher levels cost a round trip to the replicas, or a flush to the disk, per pipeline. Keep
    /// the time limit well below the lease.
    pub fn durability(self, durability: Durability) -> Self {
        Self { durability, ..self }
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

    /// Accepts a server whose `maxmemory-policy` may evict records. By default the check refuses
    /// it.
    ///
    /// An evicted record is a forgotten message: its next delivery runs again.
    pub fn allow_evicting_policy(self) -> Self {
        Self {
            accepted: Accepted {
                evicting_policy: true,
                ..self.accepted
            },
            ..self
        }
    }

    /// Accepts a server without a replica: if its disk is lost, so are the records. By default the
    /// check warns about it.
    pub fn allow_no_replica(self) -> Self {
        Self {
            accepted: Accepted {
                no_replica: true,
                ..self.accepted
            },
            ..self
        }
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

    /// The authority that signed the servers' certificates, in PEM, instead of those that the
    /// machine trusts.
    ///
    /// For URLs that begin with `rediss`. The certificate must name the host that the URL (or the
    /// cluster, or a sentinel) names.
    #[cfg(feature = "tls")]
    pub fn tls_root(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.login.certificates.root = Some(Pem::Text(pem.into()));
        self
    }

    /// The file with the [authority](Self::tls_root), in PEM.
    ///
    /// It is read for each new connection, so another authority may be put into it while
    /// connections are open.
    #[cfg(feature = "tls")]
    pub fn tls_root_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.login.certificates.root = Some(Pem::File(path.into()));
        self
    }

    /// The files, in PEM, with the certificate that servers (and sentinels) require of clients, and
    /// with its key. Default: none.
    ///
    /// For URLs that begin with `rediss`. The files are read for each new connection, so they may
    /// be replaced while connections are open.
    #[cfg(feature = "tls")]
    pub fn tls_client(mut self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.login.certificates.client = Some((certificate.into(), key.into()));
        self
    }

    /// The file with the password, instead of one in the URL; a line feed at its end does not
    /// count. Default: none.
    ///
    /// It is read for each new connection, so the password may change while connections are open. A
    /// pool that the caller supplies has its own.
    pub fn password_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.login.password = Some(path.into());
        self
    }

    /// The user name and password for the sentinels, if they need them. Those in the URL are for
    /// the primary. An empty user is the default one.
    pub fn sentinel_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.sentinel = SentinelLogin {
            user: user.into(),
            password: Some(password.into()),
            file: None,
        };
        self
    }

    /// The same with the file that holds the password, which is read for each new connection.
    pub fn sentinel_password_file(
        mut self,
        user: impl Into<String>,
        path: impl Into<PathBuf>,
    ) -> Self {
        self.sentinel = SentinelLogin {
            user: user.into(),
            password: None,
            file: Some(path.into()),
        };
        self
    }

    /// States that the server is a managed service that answers a write only when it is durable by
    /// its own means, not by an append-only file: Amazon MemoryDB, or ElastiCache with synchronous
    /// durability. Default: off.
    ///
    /// The store cannot check this: it reports the row `declared` of `docs/STORES.md`, and warns
    /// neither of the missing append-only file nor of a missing replica. A service that is durable
    /// by replicas alone needs [`durability`](Self::durability).
    pub fn durable_service(self) -> Self {
        Self {
            accepted: Accepted {
                durable_service: true,
                ..self.accepted
            },
            ..self
        }
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
    /// When the URL is invalid, [`compact`](Self::compact) is given too many keys, the server
    /// cannot be reached within the [`start_patience`](Self::start_patience), or it refuses the
    /// user. In a cluster, it is enough that one of the named nodes answers.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        until_reachable(self.start_patience, fastrand::f64, || self.try_connect()).await
    }
}

impl std::fmt::Debug for RedisBuilder {
    /// Leaves out the URL, which may contain a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisBuilder")
            .field("response_timeout", &self.response_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("accepted", &self.accepted)
            .finish_non_exhaustive()
    }
}
