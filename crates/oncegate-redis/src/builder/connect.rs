//! Connects a store with the options of its builder.

use std::sync::Arc;

use deadpool_redis::Pool;
use oncegate_core::store::StoreError;
use oncegate_store_toolkit::password::PasswordFile;
use parking_lot::Mutex;
use redis::ConnectionInfo;

use super::{Origin, RedisBuilder};
use crate::address::{self, Address};
use crate::buckets::Buckets;
use crate::cluster::{Cluster, Primary};
use crate::connector::Connector;
use crate::driver::Driver;
use crate::durability::Durability;
use crate::link::Node;
use crate::login::Login;
use crate::losses::Losses;
use crate::memory::FullestServer;
use crate::opener::{self, Opener};
use crate::sentinel::Sentinels;
use crate::shared::Shared;
#[cfg(feature = "tls")]
use crate::tls::Certificates;
use crate::topology::Topology;
use crate::watch::watch;
use crate::{Inner, RedisStore};

/// The source of the connections after the URL was parsed.
enum Target {
    Address(Box<Address>),
    Pool(Pool),
}

impl RedisBuilder {
    pub(super) async fn try_connect(&self) -> Result<RedisStore, StoreError> {
        let settings = &self.settings;
        let durability = settings.durability;
        let opener = Opener {
            connect_timeout: settings.connect_timeout,
            login: Arc::new(self.login()),
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
        let losses = Arc::new(Losses::new(
            settings.allow_evicting_policy,
            !self.grants_after_loss,
        ));
        let shared = Shared {
            scripts: Arc::clone(&scripts),
            response_timeout: settings.response_timeout,
            durability,
            losses: Arc::clone(&losses),
            is_sharded: Arc::default(),
        };
        let driver = Driver::start()?;
        let mut warnings = Vec::new();
        let (topology, address) = self
            .reach(target, &driver, opener, shared, &mut warnings)
            .await?;
        let watched = Arc::clone(&losses);
        let jobs = driver.jobs();
        let memory = Arc::new(FullestServer::default());
        let sized = Arc::clone(&memory);
        match &topology {
            Topology::One(node) => {
                let node = Arc::clone(node);
                jobs.run(watch(watched, sized, self.watch_interval, move || {
                    vec![Primary::alone(Arc::clone(&node))]
                }));
            }
            Topology::Cluster(cluster) => {
                jobs.run(watch(watched, sized, self.watch_interval, cluster.lister()));
            }
        }
        let inner = Inner {
            topology,
            scripts,
            address,
            warnings,
            settings: settings.clone(),
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
                let info = prepared(info, &opener.login, warnings)?;
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
                    .map(|seed| prepared(seed, &opener.login, warnings));
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
                let password = self.settings.sentinel_password_file.clone();
                let login = opener.login.with_password(password.map(PasswordFile::new));
                let sentinels = sentinels
                    .into_iter()
                    .map(|info| prepared(self.logged_in(info), &login, warnings));
                let sentinels = sentinels.collect::<Result<_, _>>()?;
                let primary = prepared(primary, &opener.login, warnings)?;
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

    /// The login of connections to the servers.
    fn login(&self) -> Login {
        Login {
            password: self.settings.password_file.clone().map(PasswordFile::new),
            #[cfg(feature = "tls")]
            certificates: Certificates::of(&self.settings.tls, self.tls_root.clone()),
        }
    }

    fn logged_in(&self, sentinel: ConnectionInfo) -> ConnectionInfo {
        let mut settings = sentinel.redis_settings().clone();
        if let Some(password) = &self.sentinel_password {
            settings = settings.set_password(password);
        }
        if let Some(user) = self.settings.sentinel_user.as_deref()
            && !user.is_empty()
        {
            settings = settings.set_username(user);
        }
        sentinel.set_redis_settings(settings)
    }
}

/// The settings of a connection with a login, after a check of the files. Notes a warning about a
/// password in plain text.
fn prepared(
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
    Ok(opener::with_settings(info))
}

/// Connects to one server. Returns when both of its pipes are connected.
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
