//! A primary and its replica, whose link can be cut without either of them noticing.

use std::time::Duration;

use ::redis::InfoDict;

use crate::proxy::{Mode, Proxy};
use crate::redis::{Redis, RedisServer};
use crate::until::until;

/// How long a replica may take to follow, or to catch up.
const LIMIT: Duration = Duration::from_secs(240);

/// Two servers; they end with this value.
#[derive(Debug)]
pub struct RedisPair {
    /// It dies in a failover.
    pub primary: RedisServer,
    /// It takes over.
    pub replica: RedisServer,
    /// Where clients reach the current primary.
    pub front: Proxy,
    between: Proxy,
}

impl RedisPair {
    /// Starts both with these settings, and waits until one follows the other.
    ///
    /// # Panics
    /// When they do not start.
    pub async fn start(args: &[&str]) -> Self {
        Self::of(RedisServer::start_with, args).await
    }

    /// The same with servers of another kind.
    ///
    /// # Panics
    /// As [`RedisPair::start`].
    pub async fn of(start: impl AsyncFn(&[&str]) -> RedisServer, args: &[&str]) -> Self {
        let primary = start(&[args, &["--repl-diskless-sync-delay", "0"]].concat()).await;
        let front = Proxy::before(&primary).await;
        let between = Proxy::before_address(format!("127.0.0.1:{}", primary.port())).await;
        let port = between.address().port().to_string();
        let replica = start(&[args, &["--replicaof", "127.0.0.1", &port]].concat()).await;
        until("the replica to follow", LIMIT, async || {
            let info = replica.info("replication").await;
            info.contains("master_link_status:up")
                .then_some(())
                .ok_or(info)
        })
        .await;
        Self {
            primary,
            replica,
            front,
            between,
        }
    }

    /// Cuts the replication link; the primary cannot know why.
    pub fn cut(&self) {
        self.between.hold_all();
    }

    /// The end of a cut.
    pub fn join(&self) {
        self.between.set(Mode::Pass);
    }

    /// Waits until the replica has everything. No client may write meanwhile.
    ///
    /// # Panics
    /// When it takes more than a minute.
    pub async fn caught_up(&self) {
        until("the replica to have everything", LIMIT, async || {
            let there = offset(&self.primary, "master_repl_offset").await;
            let here = offset(&self.replica, "slave_repl_offset").await;
            if there == here {
                Ok(())
            } else {
                Err(format!("{here} of {there}"))
            }
        })
        .await;
    }

    /// The primary dies, the replica takes over with what it has, and clients find it where the
    /// primary was.
    ///
    /// # Panics
    /// When the replica does not obey.
    pub async fn fail_over(&mut self) {
        self.primary.kill();
        let mut promote = ::redis::cmd("REPLICAOF");
        let promoted = promote
            .arg("NO")
            .arg("ONE")
            .query_async(&mut self.replica.connection().await)
            .await;
        let () = promoted.expect("the replica obeys");
        self.front.point_at(&self.replica);
    }
}

/// How far a server's log of writes goes.
async fn offset(redis: &Redis, name: &str) -> u64 {
    let info = InfoDict::new(&redis.info("replication").await);
    info.get(name)
        .unwrap_or_else(|| panic!("no {name} in {info:?}"))
}
