//! Three sentinels over a primary and two replicas.

use std::path::Path;
use std::time::Duration;

use futures_util::future::join_all;
use tempfile::TempDir;

use crate::certificates::Certificates;
use crate::place::{self, Port};
use crate::process::{self, Process};
use crate::redis::{RedisServer, connect};
use crate::until;

/// The name under which the sentinels know the primary.
const NAME: &str = "watched";

/// How long the sentinels may take until they know each other and the replicas.
const AGREEMENT_LIMIT: Duration = Duration::from_secs(240);

/// How long a failover may take.
const FAILOVER_LIMIT: Duration = Duration::from_secs(240);

/// A watched primary; everything dies with this value.
///
/// Server 0 begins as the primary.
#[derive(Debug)]
pub struct RedisSentinels {
    servers: Vec<RedisServer>,
    sentinels: Vec<Process>,
    ports: Vec<Port>,
    /// Of the servers, then of the sentinels.
    tls: Vec<Port>,
    _dir: TempDir,
}

impl RedisSentinels {
    /// Starts servers and sentinels and waits until they know each other.
    ///
    /// # Panics
    /// When it does not come about.
    pub async fn start() -> Self {
        Self::start_all(Vec::new(), &[const { Vec::new() }; 6]).await
    }

    /// The same, and all of them speak TLS to each other, and to clients at
    /// [`tls_url`](Self::tls_url).
    ///
    /// # Panics
    /// As [`RedisSentinels::start`].
    pub async fn start_tls(certificates: &Certificates) -> Self {
        let tls: Vec<Port> = (0..6).map(|_| Port::reserve()).collect();
        let arguments = |port: &Port| {
            let own = certificates
                .redis_arguments(&port.number().to_string())
                .into_iter();
            own.chain(["--tls-replication", "yes"].map(str::to_owned))
                .collect()
        };
        let args: Vec<Vec<String>> = tls.iter().map(arguments).collect();
        Self::start_all(tls, &args).await
    }

    /// With further arguments for each server, and then for each sentinel.
    async fn start_all(tls: Vec<Port>, args: &[Vec<String>]) -> Self {
        let words = |number: usize, own: &[&str]| -> Vec<String> {
            let further = args.get(number).into_iter().flatten().cloned();
            own.iter().map(ToString::to_string).chain(further).collect()
        };
        let start = async |words: Vec<String>| {
            RedisServer::start_with(&words.iter().map(String::as_str).collect::<Vec<_>>()).await
        };
        let eager = ["--repl-diskless-sync-delay", "0"];
        let primary = start(words(0, &eager)).await;
        let port = tls.first().map_or(primary.port(), Port::number).to_string();
        let follow = ["--replicaof", "127.0.0.1", &port, eager[0], eager[1]];
        let replicas = join_all([start(words(1, &follow)), start(words(2, &follow))]).await;
        let servers: Vec<RedisServer> = std::iter::once(primary).chain(replicas).collect();
        for replica in servers.iter().skip(1) {
            until("a replica to follow", AGREEMENT_LIMIT, async || {
                let info = replica.info("replication").await;
                info.contains("master_link_status:up")
                    .then_some(())
                    .ok_or(info)
            })
            .await;
        }
        let dir = place::server_dir("sentinel");
        let ports: Vec<Port> = (0..3).map(|_| Port::reserve()).collect();
        let sentinels = ports.iter().zip(3..).map(|(own, number)| {
            let further = words(number, &[]);
            sentinel(own, &port, &further, dir.path())
        });
        let sentinels = sentinels.collect();
        let watched = Self {
            servers,
            sentinels,
            ports,
            tls,
            _dir: dir,
        };
        watched.agreed().await;
        watched
    }

    /// The URL for clients: `redis+sentinel://`, the sentinels and the name.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.ports.iter().map(Port::address).collect();
        format!("redis+sentinel://{}/{NAME}", hosts.join(","))
    }

    /// The same for clients that speak TLS, when they were started so.
    #[must_use]
    pub fn tls_url(&self) -> String {
        let hosts: Vec<String> = self.tls.iter().skip(3).map(Port::address).collect();
        format!("rediss+sentinel://{}/{NAME}", hosts.join(","))
    }

    /// Sends a command to every sentinel.
    ///
    /// # Panics
    /// When one refuses.
    pub async fn tell_all(&self, words: &[&str]) {
        for port in &self.ports {
            let url = format!("redis://{}", port.address());
            let mut connection = connect(&url).await.expect("the sentinel answers");
            let mut command = ::redis::Cmd::new();
            command.arg(words);
            let () = command
                .query_async(&mut connection)
                .await
                .expect("the sentinel obeys");
        }
    }

    /// A server.
    #[must_use]
    pub fn server(&mut self, number: usize) -> &mut RedisServer {
        self.servers
            .get_mut(number)
            .expect("there are three servers")
    }

    /// Kills a sentinel. The first one stays: the questions below go to it.
    pub fn kill_sentinel(&mut self, number: usize) {
        assert_ne!(number, 0, "the first one is asked");
        self.sentinels
            .get_mut(number)
            .expect("there are three")
            .kill();
    }

    /// Which server the first sentinel takes for the primary.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn primary(&self) -> usize {
        let state = self.state(0).await.expect("the sentinel answers");
        let port = field(&state, "port")
            .and_then(|port| port.parse().ok())
            .unwrap_or(0);
        self.servers
            .iter()
            .position(|server| server.port() == port)
            .expect("it is one of the servers")
    }

    /// Waits until the sentinels have made another server than `old` the primary, and it agrees;
    /// returns which.
    ///
    /// # Panics
    /// When they do not.
    pub async fn failed_over_from(&self, old: usize) -> usize {
        until("the sentinels to fail over", FAILOVER_LIMIT, async || {
            let now = self.primary().await;
            if now == old {
                return Err("they have not".to_owned());
            }
            let info = self
                .servers
                .get(now)
                .expect("it is one of them")
                .info("replication")
                .await;
            info.contains("role:master").then_some(now).ok_or(info)
        })
        .await
    }

    /// Asks the first sentinel for a failover while all is well, until it begins one: it refuses
    /// while another one is under way, and until it has heard again from a replica that is fit.
    ///
    /// # Panics
    /// When it keeps refusing.
    pub async fn fail_over(&self) {
        let url = format!(
            "redis://{}",
            self.ports.first().expect("there are three").address()
        );
        until(
            "a sentinel to begin a failover",
            FAILOVER_LIMIT,
            async || {
                let mut connection = connect(&url).await.map_err(|error| error.to_string())?;
                let mut command = ::redis::cmd("SENTINEL");
                let begun = command
                    .arg("FAILOVER")
                    .arg(NAME)
                    .query_async::<()>(&mut connection)
                    .await;
                begun.map_err(|error| error.to_string())
            },
        )
        .await;
    }

    async fn agreed(&self) {
        for number in 0..self.ports.len() {
            until(
                "the sentinels to know each other",
                AGREEMENT_LIMIT,
                async || {
                    let state = self.state(number).await?;
                    let known = |name: &str| field(&state, name).unwrap_or_default();
                    let others = known("num-other-sentinels");
                    let replicas = known("num-slaves");
                    if (others.as_str(), replicas.as_str()) == ("2", "2") {
                        return Ok(());
                    }
                    Err(format!(
                        "{number} knows {others} other sentinels and {replicas} replicas"
                    ))
                },
            )
            .await;
        }
    }

    async fn state(&self, number: usize) -> Result<Vec<(String, String)>, String> {
        let url = format!(
            "redis://{}",
            self.ports.get(number).expect("there are three").address()
        );
        let answer = async {
            let client = ::redis::Client::open(url)?;
            let mut connection = client.get_multiplexed_async_connection().await?;
            let mut command = ::redis::cmd("SENTINEL");
            command
                .arg("MASTER")
                .arg(NAME)
                .query_async(&mut connection)
                .await
        };
        answer
            .await
            .map_err(|error: ::redis::RedisError| error.to_string())
    }
}

fn field(state: &[(String, String)], name: &str) -> Option<String> {
    state
        .iter()
        .find(|(known, _)| known == name)
        .map(|(_, value)| value.clone())
}

fn sentinel(own: &Port, primary: &str, further: &[String], dir: &Path) -> Process {
    let file = dir.join(format!("{}.conf", own.number()));
    // It writes into this file what it learns.
    let text = format!(
        "bind 127.0.0.1\nport {}\ndir {}\nsentinel monitor {NAME} 127.0.0.1 {primary} 2\n\
         sentinel down-after-milliseconds {NAME} 700\nsentinel failover-timeout {NAME} 5000\n",
        own.number(),
        dir.display(),
    );
    std::fs::write(&file, text)
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    let mut command = process::bound_to_parent("redis-server", "KILL");
    command.arg(&file).arg("--sentinel").args(further);
    Process::spawn_logged("a sentinel", command, &file.with_extension("log"))
}
