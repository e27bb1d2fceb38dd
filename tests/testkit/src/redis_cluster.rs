//! A Redis Cluster for one test: three primaries, and a replica of each.

use std::time::Duration;

use ::redis::Value;
use futures_util::future::join_all;

use crate::certificates::Certificates;
use crate::place::Port;
use crate::redis::RedisServer;
use crate::until;

/// How many primaries there are, and how many replicas.
const SHARDS: usize = 3;

/// How many slots a cluster has.
const SLOTS: usize = 16_384;

/// How long the nodes may take until they agree.
const AGREEMENT_LIMIT: Duration = Duration::from_secs(30);

/// A cluster that dies with this value. One shard that is down does not stop the others.
///
/// Nodes 0, 1 and 2 begin as primaries; 3, 4 and 5 as their replicas.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    buses: Vec<Port>,
    tls: Vec<Port>,
}

impl RedisCluster {
    /// Starts a cluster and waits until every node reports it as whole.
    ///
    /// # Panics
    /// When it does not come about.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Like [`RedisCluster::start`], with further arguments for each node.
    ///
    /// # Panics
    /// As [`RedisCluster::start`].
    pub async fn start_with(args: &[&str]) -> Self {
        let args = args.iter().map(ToString::to_string).collect();
        Self::start_nodes(Vec::new(), &vec![args; 2 * SHARDS]).await
    }

    /// A cluster whose nodes speak TLS to each other, and to clients at [`tls_url`](Self::tls_url).
    ///
    /// # Panics
    /// As [`RedisCluster::start`].
    pub async fn start_tls(certificates: &Certificates) -> Self {
        let tls: Vec<Port> = (0..2 * SHARDS).map(|_| Port::reserve()).collect();
        let arguments = |port: &Port| {
            let own = certificates
                .redis_arguments(&port.number().to_string())
                .into_iter();
            own.chain(["--tls-cluster", "yes", "--tls-replication", "yes"].map(str::to_owned))
                .collect()
        };
        let args: Vec<Vec<String>> = tls.iter().map(arguments).collect();
        Self::start_nodes(tls, &args).await
    }

    /// A node that has all slots, as its [`node`](Self::node) 0: it refuses a call with keys of
    /// several slots.
    ///
    /// # Panics
    /// As [`RedisCluster::start`].
    pub async fn start_single() -> Self {
        let bus = Port::reserve();
        let number = bus.number().to_string();
        let node =
            RedisServer::start_with(&["--cluster-enabled", "yes", "--cluster-port", &number]).await;
        let cluster = Self {
            nodes: vec![node],
            buses: vec![bus],
            tls: Vec::new(),
        };
        cluster
            .ask::<()>(
                0,
                &["CLUSTER", "ADDSLOTSRANGE", "0", &(SLOTS - 1).to_string()],
            )
            .await;
        cluster
            .until_info(0, &["CLUSTER", "INFO"], &["cluster_state:ok"])
            .await;
        cluster
    }

    async fn start_nodes(tls: Vec<Port>, args: &[Vec<String>]) -> Self {
        let buses: Vec<Port> = (0..2 * SHARDS).map(|_| Port::reserve()).collect();
        let starting = buses.iter().zip(args).map(|(bus, args)| async move {
            let bus = bus.number().to_string();
            let own = [
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                &bus,
                "--cluster-node-timeout",
                "1500",
            ];
            let more = [
                "--cluster-require-full-coverage",
                "no",
                "--repl-diskless-sync-delay",
                "0",
            ];
            let all: Vec<&str> = own
                .into_iter()
                .chain(more)
                .chain(args.iter().map(String::as_str))
                .collect();
            RedisServer::start_with(&all).await
        });
        let nodes = join_all(starting).await;
        let cluster = Self { nodes, buses, tls };
        cluster.introduce().await;
        cluster.agreed().await;
        cluster
    }

    /// The URL for clients: `redis+cluster://` and all nodes.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<&str> = self
            .nodes
            .iter()
            .map(|node| node.url().trim_start_matches("redis://"))
            .collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// The same for clients that speak TLS, when it was started so.
    #[must_use]
    pub fn tls_url(&self) -> String {
        let hosts: Vec<String> = self.tls.iter().map(Port::address).collect();
        format!("rediss+cluster://{}", hosts.join(","))
    }

    /// A node.
    #[must_use]
    pub fn node(&mut self, number: usize) -> &mut RedisServer {
        self.nodes.get_mut(number).expect("there are six nodes")
    }

    /// The slot of a key.
    ///
    /// # Panics
    /// When the first node does not answer.
    pub async fn slot_of(&self, key: &str) -> u16 {
        self.ask(0, &["CLUSTER", "KEYSLOT", key]).await
    }

    /// Which node is the primary of a slot, as most nodes that answer see it.
    ///
    /// # Panics
    /// When no node answers.
    pub async fn primary_of(&self, slot: u16) -> usize {
        let mut seen = Vec::new();
        for node in self.nodes.iter().filter(|node| node.runs()) {
            seen.extend(self.owner_seen_by(node, slot).await);
        }
        let votes = |number: &usize| seen.iter().filter(|other| *other == number).count();
        *seen
            .iter()
            .max_by_key(|number| votes(number))
            .expect("some node answers")
    }

    /// Moves a slot without its keys being moved yet: from now on, keys that are not there are
    /// asked for at `to`.
    ///
    /// # Panics
    /// When the nodes refuse.
    pub async fn begin_move(&mut self, slot: u16, from: usize, to: usize) {
        let source = self.id(from).await;
        let target = self.id(to).await;
        let slot = slot.to_string();
        self.ask::<()>(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source])
            .await;
        self.ask::<()>(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target])
            .await;
    }

    /// Begins to move a slot, and leaves out the step at its target, as a move that has broken off.
    ///
    /// # Panics
    /// When the node refuses.
    pub async fn begin_half_move(&mut self, slot: u16, from: usize, to: usize) {
        let target = self.id(to).await;
        let slot = slot.to_string();
        self.ask::<()>(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target])
            .await;
    }

    /// Takes a slot away from the node that has it, so that no node has it.
    ///
    /// # Panics
    /// When a node refuses.
    pub async fn remove_slot(&mut self, slot: u16, from: usize) {
        let slot = slot.to_string();
        // It tells the others which slots it has, so it is first.
        let others = (0..2 * SHARDS).filter(|node| *node != from);
        for node in std::iter::once(from).chain(others) {
            self.ask::<()>(node, &["CLUSTER", "DELSLOTS", &slot]).await;
        }
    }

    /// Gives a slot that no node has to a node.
    ///
    /// # Panics
    /// When the node refuses.
    pub async fn add_slot(&mut self, slot: u16, to: usize) {
        let slot = slot.to_string();
        self.ask::<()>(to, &["CLUSTER", "ADDSLOTS", &slot]).await;
        // A node remembers a move that it had begun before it lost the slot.
        self.ask::<()>(to, &["CLUSTER", "SETSLOT", &slot, "STABLE"])
            .await;
    }

    /// Moves the keys of a slot that is being moved; returns how many.
    ///
    /// # Panics
    /// When the nodes refuse.
    pub async fn move_keys(&mut self, slot: u16, from: usize, to: usize) -> usize {
        let slot = slot.to_string();
        let port = self.node(to).port().to_string();
        let mut moved = 0;
        loop {
            let keys: Vec<String> = self
                .ask(from, &["CLUSTER", "GETKEYSINSLOT", &slot, "100"])
                .await;
            if keys.is_empty() {
                return moved;
            }
            moved += keys.len();
            let words = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            let words: Vec<&str> = words
                .into_iter()
                .chain(keys.iter().map(String::as_str))
                .collect();
            self.ask::<Value>(from, &words).await;
        }
    }

    /// Ends the move of a slot: it belongs to `to`, and `from` redirects to it.
    ///
    /// # Panics
    /// When the nodes refuse.
    pub async fn end_move(&mut self, slot: u16, from: usize, to: usize) {
        let id = self.id(to).await;
        let slot = slot.to_string();
        for node in [to, from] {
            self.ask::<()>(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &id])
                .await;
        }
    }

    async fn owner_seen_by(&self, node: &RedisServer, slot: u16) -> Option<usize> {
        let client = ::redis::Client::open(node.url()).ok()?;
        let mut connection = client.get_multiplexed_async_connection().await.ok()?;
        let mut question = ::redis::cmd("CLUSTER");
        let ranges: Vec<Vec<Value>> = question
            .arg("SLOTS")
            .query_async(&mut connection)
            .await
            .ok()?;
        let port = ranges.iter().find_map(|range| match range.as_slice() {
            [
                Value::Int(first),
                Value::Int(last),
                Value::Array(primary),
                ..,
            ] if (*first..=*last).contains(&i64::from(slot)) => primary.get(1),
            _ => None,
        })?;
        self.nodes
            .iter()
            .position(|node| *port == Value::Int(i64::from(node.port())))
    }

    /// Gives the primaries their slots, makes all nodes meet, and makes the rest replicas.
    async fn introduce(&self) {
        for (number, _) in self.nodes.iter().enumerate() {
            let epoch = (number + 1).to_string();
            self.ask::<()>(number, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch])
                .await;
        }
        for shard in 0..SHARDS {
            let first = shard * SLOTS / SHARDS;
            let last = (shard + 1) * SLOTS / SHARDS - 1;
            self.ask::<()>(
                shard,
                &[
                    "CLUSTER",
                    "ADDSLOTSRANGE",
                    &first.to_string(),
                    &last.to_string(),
                ],
            )
            .await;
        }
        for (node, bus) in self.nodes.iter().zip(&self.buses).skip(1) {
            let port = node.port().to_string();
            let bus = bus.number().to_string();
            self.ask::<()>(0, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus])
                .await;
        }
        for number in 0..2 * SHARDS {
            self.until_info(number, &["CLUSTER", "INFO"], &["cluster_known_nodes:6"])
                .await;
        }
        for shard in 0..SHARDS {
            let primary = self.id(shard).await;
            self.ask::<()>(shard + SHARDS, &["CLUSTER", "REPLICATE", &primary])
                .await;
        }
    }

    /// Waits until every node reports the cluster as whole, and every replica follows.
    async fn agreed(&self) {
        for number in 0..2 * SHARDS {
            self.until_info(
                number,
                &["CLUSTER", "INFO"],
                &["cluster_state:ok", "cluster_slots_ok:16384"],
            )
            .await;
        }
        for number in SHARDS..2 * SHARDS {
            let role = ["role:slave", "master_link_status:up"];
            self.until_info(number, &["INFO", "replication"], &role)
                .await;
        }
        for shard in 0..SHARDS {
            self.until_info(shard, &["INFO", "replication"], &["connected_slaves:1"])
                .await;
        }
    }

    async fn until_info(&self, number: usize, question: &[&str], lines: &[&str]) {
        until(
            "the cluster's nodes to agree",
            AGREEMENT_LIMIT,
            async || {
                let info: String = self.ask(number, question).await;
                let missing = lines
                    .iter()
                    .find(|line| !info.lines().any(|said| said == **line));
                missing.map_or(Ok(()), |line| {
                    Err(format!("node {number} does not report {line}"))
                })
            },
        )
        .await;
    }

    async fn id(&self, number: usize) -> String {
        self.ask(number, &["CLUSTER", "MYID"]).await
    }

    async fn ask<T: ::redis::FromRedisValue>(&self, number: usize, words: &[&str]) -> T {
        let node = self.nodes.get(number).expect("there are six nodes");
        let mut command = ::redis::Cmd::new();
        command.arg(words);
        let answer = command.query_async(&mut node.connection().await).await;
        answer.unwrap_or_else(|error| panic!("node {number} refuses {words:?}: {error}"))
    }
}
