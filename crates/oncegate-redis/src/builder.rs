//! Options of a Redis store, and how it connects.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_redis::Pool;
use oncegate_core::store::StoreError;
use redis::ConnectionInfo;

use super::address::{self, Address};
use super::buckets::Buckets;
use super::checkup::Accepted;
use super::cluster::{Cluster, Primary};
use super::connector::{self, Connector, Opener};
use super::driver::Driver;
use super::durability::Durability;
use super::link::{Node, Shared};
use super::login::Login;
use super::losses::Losses;
use super::memory::FullestServer;
use super::scripts::Scripts;
use super::sentinel::Sentinels;
#[cfg(feature = "tls")]
use super::tls::Authority;
use super::watch::{WATCH_INTERVAL, watch};
use super::{Inner, RedisStore, Topology};
use oncegate_store_toolkit::start::until_reachable;

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

/// What sentinels want to know of their clients.
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

/// The source of the connections after the URL was parsed.
enum Target {
    Address(Box<Address>),
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

    /// Where a record must be stored before it counts. Default: [`Durability::Primary`].
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
        self.login.certificates.root = Some(Authority::Pem(pem.into()));
        self
    }

    /// The file with the [authority](Self::tls_root), in PEM.
    ///
    /// It is read for each new connection, so another authority may be put into it while
    /// connections are open.
    #[cfg(feature = "tls")]
    pub fn tls_root_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.login.certificates.root = Some(Authority::File(path.into()));
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

    /// How long [`connect`](Self::connect) tries again while the server is away: a server that is
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

    async fn try_connect(&self) -> Result<RedisStore, StoreError> {
        let Self {
            response_timeout,
            accepted,
            durability,
            grants_after_loss,
            watch_interval,
            ..
        } = *self;
        let opener = Opener {
            connect_timeout: self.connect_timeout,
            login: Arc::new(self.login.clone()),
        };
        let (target, expected_keys) = match &self.origin {
            Origin::Url(url) => address::parse(url)
                .map(|(address, keys)| (Target::Address(Box::new(address)), keys))?,
            Origin::Pool(pool) => (Target::Pool(pool.clone()), None),
        };
        let scripts = self
            .scripts
            .clone()
            .durable(durability != Durability::Primary);
        let scripts = Arc::new(match self.expected_keys.or(expected_keys) {
            Some(expected_keys) => scripts.in_buckets(Buckets::for_keys(expected_keys)?),
            None => scripts,
        });
        let losses = Arc::new(Losses::new(accepted.evicting_policy, !grants_after_loss));
        let shared = Shared {
            scripts: Arc::clone(&scripts),
            response_timeout,
            durability,
            losses: Arc::clone(&losses),
            is_sharded: Arc::default(),
        };
        let driver = Driver::start()?;
        let mut warnings = Vec::new();
        let (topology, address) = self
            .reach(target, &driver, opener, shared, &mut warnings)
            .await?;
        let (watched, jobs) = (Arc::clone(&losses), driver.jobs());
        let memory = Arc::new(FullestServer::default());
        let sized = Arc::clone(&memory);
        match &topology {
            Topology::One(node) => {
                let node = Arc::clone(node);
                jobs.run(watch(watched, sized, watch_interval, move || {
                    vec![Primary::alone(Arc::clone(&node))]
                }));
            }
            Topology::Cluster(cluster) => {
                jobs.run(watch(watched, sized, watch_interval, cluster.lister()))
            }
        }
        let inner = Inner {
            topology,
            scripts,
            address,
            warnings,
            durability,
            accepted,
            losses,
            memory,
            tried: Mutex::default(),
            _driver: driver,
        };
        Ok(RedisStore {
            inner: Arc::new(inner),
        })
    }

    /// Connects, and returns the name of the server or cluster.
    async fn reach(
        &self,
        target: Target,
        driver: &Driver,
        opener: Opener,
        shared: Shared,
        warnings: &mut Vec<String>,
    ) -> Result<(Topology, String), StoreError> {
        let address = match target {
            Target::Pool(pool) => {
                return Ok((
                    one(driver, Connector::Pool(pool), "", shared).await?,
                    String::new(),
                ));
            }
            Target::Address(address) => *address,
        };
        match address {
            Address::Server(info) => {
                let info = self.prepared(info, &self.login, warnings)?;
                let address = info.addr().to_string();
                Ok((
                    one(
                        driver,
                        Connector::Server(Arc::new(info), opener),
                        &address,
                        shared,
                    )
                    .await?,
                    address,
                ))
            }
            Address::Cluster(seeds) => {
                let seeds = seeds
                    .into_iter()
                    .map(|seed| self.prepared(seed, &self.login, warnings));
                let seeds: Vec<ConnectionInfo> = seeds.collect::<Result<_, _>>()?;
                let address = seeds
                    .first()
                    .map(|seed| seed.addr().to_string())
                    .unwrap_or_default();
                let cluster = Cluster::start(driver.jobs(), seeds, opener, shared).await?;
                Ok((Topology::Cluster(cluster), address))
            }
            Address::Sentinels {
                sentinels,
                name,
                primary,
            } => {
                let login = self.login.with_password(self.sentinel.file.clone());
                let sentinels = sentinels
                    .into_iter()
                    .map(|info| self.prepared(self.logged_in(info), &login, warnings));
                let sentinels = sentinels.collect::<Result<_, _>>()?;
                let primary = self.prepared(primary, &self.login, warnings)?;
                let of_sentinels = Opener {
                    login: Arc::new(login),
                    ..opener.clone()
                };
                let watched = Sentinels {
                    sentinels,
                    name: name.clone(),
                    primary,
                    opener,
                    of_sentinels,
                };
                let connector = Connector::Sentinels(Arc::new(watched));
                Ok((one(driver, connector, &name, shared).await?, name))
            }
        }
    }

    /// The settings of a connection with those of this builder, after a check of the files. Notes a
    /// warning about a password in plain text.
    fn prepared(
        &self,
        info: ConnectionInfo,
        login: &Login,
        warnings: &mut Vec<String>,
    ) -> Result<ConnectionInfo, StoreError> {
        let info = login.applied(info)?;
        if warnings.is_empty() && address::shows_password(&info) {
            warnings.push(
                "The password is sent to another machine in plain text: use a URL that begins with rediss."
                    .to_owned(),
            );
        }
        Ok(connector::with_settings(info))
    }

    fn logged_in(&self, sentinel: ConnectionInfo) -> ConnectionInfo {
        let SentinelLogin { user, password, .. } = &self.sentinel;
        let settings = sentinel.redis_settings().clone();
        let settings = password
            .as_ref()
            .map_or(settings.clone(), |password| settings.set_password(password));
        let settings = if user.is_empty() {
            settings
        } else {
            settings.set_username(user)
        };
        sentinel.set_redis_settings(settings)
    }
}

/// Connects to one server. Returns when both of its lanes are connected.
async fn one(
    driver: &Driver,
    connector: Connector,
    address: &str,
    shared: Shared,
) -> Result<Topology, StoreError> {
    let (node, ups) = Node::start(&driver.jobs(), address.into(), connector, shared);
    for up in ups {
        up.await
            .unwrap_or_else(|_| Err(StoreError::unavailable("the store's thread ended")))?;
    }
    Ok(Topology::One(Arc::new(node)))
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
