//! A cluster: its nodes, the slots of each, and the routing of requests.
//!
//! The requests of a call are grouped by node and sent as one pipeline per node. A redirected
//! request is sent again to the node in the redirection. A lost request is never sent again from
//! here: the caller decides about that. A node that is down affects its own keys only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use oncegate_core::store::StoreError;
use parking_lot::RwLock;
use redis::aio::ConnectionLike as _;
use redis::{ConnectionAddr, ConnectionInfo, Value};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::address::moved_to;
use super::connector::Connector;
use super::driver::Jobs;
use super::link::{Node, PipeName};
use super::opener::Opener;
use super::replies::RawReply;
use super::request::Request;
use super::shared::Shared;
use super::slots::{self, Host, Range, Redirect, SLOTS};
use super::{errors, no_answer};

/// The most redirections that a request follows.
const MAX_ROUNDS: usize = 6;

/// Age at which the slot map is refreshed even if nothing contradicts it.
const REFRESH_INTERVAL: Duration = Duration::from_secs(15);

/// Minimal time between two refreshes of the slot map, plus or minus a quarter.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

/// The number of nodes that are asked for the slot map concurrently; the first answer counts.
const ASKED_AT_ONCE: usize = 3;

/// The shard of the slots that no node has: no outage of a node is theirs, and none of theirs is a
/// node's.
const NO_SHARD: u64 = u64::MAX;

/// A handle on a cluster, for callers.
pub(super) struct Cluster {
    nodes: Arc<Nodes>,
}

/// State shared by the callers and the task that refreshes the slot map.
struct Nodes {
    map: RwLock<Arc<Map>>,
    jobs: Jobs,
    shared: Shared,
    opener: Opener,
    seeds: Vec<ConnectionInfo>,
    /// Set when an answer contradicted the slot map, or a node did not answer.
    doubt: Notify,
}

/// Maps slots to nodes. Immutable: a change makes a new map.
#[derive(Clone)]
struct Map {
    primaries: BTreeMap<Host, Arc<Node>>,
    /// The primary of each slot.
    owners: Box<[Option<Arc<Node>>]>,
    /// The number of each primary's shard, by its address: in the order of their lowest slots,
    /// from 0.
    shards: BTreeMap<Arc<str>, u64>,
    /// The other nodes that may know the slots.
    replicas: BTreeSet<Host>,
}

/// A request in flight.
struct Turn<'a, T> {
    position: usize,
    item: &'a T,
    slot: u16,
    /// The node that a redirection named for this request only.
    to: Option<Arc<Node>>,
}

/// The requests for one node.
type Group<'a, T> = (Arc<Node>, Vec<Turn<'a, T>>);

impl Cluster {
    /// Reads the slots and starts the nodes. A node that is down delays nothing.
    ///
    /// # Errors
    /// When none of `seeds` knows the slots.
    pub(super) async fn start(
        jobs: Jobs,
        seeds: Vec<ConnectionInfo>,
        opener: Opener,
        shared: Shared,
    ) -> Result<Self, StoreError> {
        let empty = Map {
            primaries: BTreeMap::new(),
            owners: vec![None; SLOTS].into(),
            shards: BTreeMap::new(),
            replicas: BTreeSet::new(),
        };
        let map = RwLock::new(Arc::new(empty));
        let nodes = Arc::new(Nodes {
            map,
            jobs,
            shared,
            opener,
            seeds,
            doubt: Notify::new(),
        });
        nodes.install(nodes.ask_around().await?);
        nodes.jobs.run(keep_map(Arc::clone(&nodes)));
        Ok(Self { nodes })
    }

    /// Sends one request per item to the node that has its key. Returns the answers in the order of
    /// the items.
    pub(super) async fn ask<T: Sync>(
        &self,
        pipe: PipeName,
        items: &[T],
        slot: impl Fn(&T) -> u16 + Send,
        request: impl Fn(&T) -> Request + Send + Sync,
    ) -> Vec<RawReply> {
        let mut answers = vec![no_answer(); items.len()];
        let mut open: Vec<Turn<'_, T>> = items
            .iter()
            .enumerate()
            .map(|(position, item)| Turn {
                position,
                item,
                slot: slot(item),
                to: None,
            })
            .collect();
        for _ in 0..MAX_ROUNDS {
            if open.is_empty() {
                break;
            }
            let asking = self
                .nodes
                .group(open, &mut answers)
                .into_iter()
                .map(|(node, turns)| {
                    let requests = turns
                        .iter()
                        .map(|turn| request(turn.item).asking(turn.to.is_some()));
                    let requests = requests.collect();
                    async move {
                        let replies = node.ask(pipe, requests).await;
                        (node, turns, replies)
                    }
                });
            let asked = join_all(asking.collect::<Vec<_>>()).await;
            open = Vec::new();
            for (node, turns, replies) in asked {
                for (turn, reply) in turns.into_iter().zip(replies) {
                    match self.nodes.redirected(&node, &reply) {
                        Some(redirect) => open.push(self.nodes.follow(turn, &redirect)),
                        None if is_redirection(&reply) => {
                            settle(&mut answers, turn.position, Ok(errors::moving()));
                        }
                        None => settle(&mut answers, turn.position, reply),
                    }
                }
            }
        }
        // Still redirected after the last round: a move of the slot has ended halfway, or two nodes
        // disagree about it. Their other slots are not concerned.
        for turn in open {
            settle(&mut answers, turn.position, Ok(errors::moving()));
        }
        answers
    }

    /// Sends the same request to every primary. Returns each answer with the node's address.
    pub(super) async fn ask_all(
        &self,
        request: impl Fn() -> Request + Send,
    ) -> Vec<(Arc<str>, RawReply)> {
        let map = self.nodes.map();
        let asking = map.primaries.values().map(|node| {
            let requests = vec![request()];
            async move {
                let answer = node.ask(PipeName::Bulk, requests).await.into_iter().next();
                (Arc::clone(&node.address), answer.unwrap_or_else(no_answer))
            }
        });
        join_all(asking.collect::<Vec<_>>()).await
    }

    /// Returns a function that lists the nodes that hold keys at the time of the call.
    pub(super) fn lister(&self) -> impl Fn() -> Vec<Primary> + Send + use<> {
        let nodes = Arc::clone(&self.nodes);
        move || {
            let map = nodes.map();
            map.primaries
                .values()
                .map(|node| Primary {
                    node: Arc::clone(node),
                    map: Some(Arc::clone(&map)),
                })
                .collect()
        }
    }

    /// The shard of a slot. It stays the same when a replica takes over. The slots that no node has
    /// are a shard of their own.
    pub(super) fn shard(&self, slot: u16) -> u64 {
        let map = self.nodes.map();
        let number = map
            .owner(slot)
            .and_then(|node| map.shards.get(&node.address));
        number.copied().unwrap_or(NO_SHARD)
    }
}

/// A server that holds keys.
pub(super) struct Primary {
    pub(super) node: Arc<Node>,
    /// The slots of each node; `None` for a server that holds all keys.
    map: Option<Arc<Map>>,
}

impl Primary {
    /// A server that holds all keys.
    pub(super) fn alone(node: Arc<Node>) -> Self {
        Self { node, map: None }
    }

    pub(super) fn holds(&self, slot: u16) -> bool {
        self.map.as_ref().is_none_or(|map| {
            map.owner(slot)
                .is_some_and(|owner| Arc::ptr_eq(owner, &self.node))
        })
    }
}

/// Returns whether the answer redirects to a node, even to one whose address is not known.
fn is_redirection(answer: &RawReply) -> bool {
    matches!(answer, Ok(Value::ServerError(error)) if matches!(error.code(), "MOVED" | "ASK"))
}

fn settle(answers: &mut [RawReply], position: usize, answer: RawReply) {
    if let Some(place) = answers.get_mut(position) {
        *place = answer;
    }
}

impl Map {
    fn owner(&self, slot: u16) -> Option<&Arc<Node>> {
        self.owners.get(usize::from(slot))?.as_ref()
    }

    /// Gives a slot to a node. One that had none has taken over the shard of the slot, as far as is
    /// known.
    fn give(&mut self, slot: u16, node: Arc<Node>) {
        let number = self
            .owner(slot)
            .and_then(|before| self.shards.get(&before.address))
            .copied();
        let unused = self.shards.len() as u64;
        self.shards
            .entry(Arc::clone(&node.address))
            .or_insert(number.unwrap_or(unused));
        if let Some(owner) = self.owners.get_mut(usize::from(slot)) {
            *owner = Some(node);
        }
    }
}

impl Nodes {
    fn map(&self) -> Arc<Map> {
        Arc::clone(&self.map.read())
    }

    /// Groups the requests by node. A request without a node is answered with an error.
    fn group<'a, T>(&self, turns: Vec<Turn<'a, T>>, answers: &mut [RawReply]) -> Vec<Group<'a, T>> {
        let map = self.map();
        let mut groups: BTreeMap<Arc<str>, Group<'a, T>> = BTreeMap::new();
        for turn in turns {
            let Some(node) = turn
                .to
                .as_ref()
                .or_else(|| map.owner(turn.slot))
                .map(Arc::clone)
            else {
                self.doubt.notify_one();
                settle(answers, turn.position, Ok(errors::unserved()));
                continue;
            };
            match groups.get_mut(&node.address) {
                Some((_, group)) => group.push(turn),
                None => drop(groups.insert(Arc::clone(&node.address), (node, vec![turn]))),
            }
        }
        groups.into_values().collect()
    }

    /// The redirection in the answer, if any. Marks the slot map as doubtful if the answer
    /// contradicts it.
    fn redirected(&self, node: &Node, answer: &RawReply) -> Option<Redirect> {
        let redirect = match answer {
            Ok(Value::ServerError(error)) => {
                let asked = node.address.rsplit_once(':').map_or("", |(host, _)| host);
                let redirect = slots::redirect(error, asked.trim_matches(['[', ']']));
                // ASK concerns one key, and most errors say nothing about slots.
                if redirect.as_ref().is_none_or(|redirect| redirect.once)
                    && error.code() != "CLUSTERDOWN"
                {
                    return redirect;
                }
                redirect
            }
            Ok(_) => return None,
            Err(_) => None,
        };
        self.doubt.notify_one();
        redirect
    }

    fn follow<'a, T>(&self, turn: Turn<'a, T>, redirect: &Redirect) -> Turn<'a, T> {
        let mut map = self.map.write();
        let node = match map.primaries.get(&redirect.host) {
            Some(node) => Arc::clone(node),
            None => {
                let node = self.start_node(&redirect.host);
                Arc::make_mut(&mut map)
                    .primaries
                    .insert(redirect.host.clone(), Arc::clone(&node));
                node
            }
        };
        if redirect.once {
            return Turn {
                to: Some(node),
                ..turn
            };
        }
        if map
            .owner(redirect.slot)
            .is_none_or(|owner| !Arc::ptr_eq(owner, &node))
        {
            Arc::make_mut(&mut map).give(redirect.slot, node);
        }
        Turn { to: None, ..turn }
    }

    fn start_node(&self, host: &Host) -> Arc<Node> {
        let connector = Connector::Server(Arc::new(self.info(host)), self.opener.clone());
        let (node, _) = Node::start(
            &self.jobs,
            host.to_string().into(),
            connector,
            self.shared.clone(),
        );
        Arc::new(node)
    }

    /// The connection settings of a node: those of the seeds.
    fn info(&self, host: &Host) -> ConnectionInfo {
        let seed = self
            .seeds
            .first()
            .expect("an address of a cluster names at least one node");
        moved_to(seed, &host.host, host.port)
    }

    /// Asks the known nodes for the slots, the seeds last. The first answer counts.
    async fn ask_around(&self) -> Result<Vec<Range>, StoreError> {
        let map = self.map();
        let mut hosts: Vec<&Host> = map.primaries.keys().chain(&map.replicas).collect();
        // Shuffled, so that a node with outdated slots is not asked first every time.
        fastrand::shuffle(&mut hosts);
        let infos = hosts
            .into_iter()
            .map(|host| self.info(host))
            .chain(self.seeds.iter().cloned());
        let answers = infos.map(|info| self.ask_one(info)).collect::<Vec<_>>();
        let mut answers = stream::iter(answers).buffer_unordered(ASKED_AT_ONCE);
        let mut why = StoreError::unavailable("no node of the cluster answers");
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(ranges) => return Ok(ranges),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    async fn ask_one(&self, info: ConnectionInfo) -> Result<Vec<Range>, StoreError> {
        let host = match info.addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host.clone(),
            _ => String::new(),
        };
        let mut connection = self.opener.open(info).await?;
        let mut question = redis::cmd("CLUSTER");
        question.arg("SLOTS");
        match timeout(
            self.shared.response_timeout,
            connection.req_packed_command(&question),
        )
        .await
        {
            Ok(Ok(Value::ServerError(error))) => Err(errors::store_error(&error, None)),
            Ok(Ok(answer)) => slots::ranges(&answer, &host)
                .filter(|ranges| !ranges.is_empty())
                .ok_or_else(|| StoreError::unavailable("the cluster has no slots yet")),
            Ok(Err(error)) => Err(errors::of_client(&error)),
            Err(_) => Err(StoreError::unavailable("no answer in time")),
        }
    }

    /// Builds a map from a node's answer. Known nodes keep their connections.
    fn install(&self, mut ranges: Vec<Range>) {
        ranges.sort_unstable_by_key(|range| range.first);
        let mut map = self.map.write();
        let mut primaries: BTreeMap<Host, Arc<Node>> = BTreeMap::new();
        let mut owners: Box<[Option<Arc<Node>>]> = vec![None; SLOTS].into();
        let mut shards = BTreeMap::new();
        let mut replicas = BTreeSet::new();
        for Range {
            first,
            last,
            primary,
            replicas: others,
        } in ranges
        {
            let node = primaries.entry(primary.clone()).or_insert_with(|| {
                map.primaries
                    .get(&primary)
                    .cloned()
                    .unwrap_or_else(|| self.start_node(&primary))
            });
            if let Some(owners) = owners.get_mut(usize::from(first)..=usize::from(last)) {
                owners.fill(Some(Arc::clone(node)));
            }
            let number = shards.len() as u64;
            shards.entry(Arc::clone(&node.address)).or_insert(number);
            replicas.extend(others);
        }
        *map = Arc::new(Map {
            primaries,
            owners,
            shards,
            replicas,
        });
    }
}

/// Refreshes the slot map when it is in doubt, and periodically.
async fn keep_map(nodes: Arc<Nodes>) {
    loop {
        tokio::select! {
            () = nodes.doubt.notified() => {}
            () = sleep(REFRESH_INTERVAL) => {}
        }
        match nodes.ask_around().await {
            Ok(ranges) => nodes.install(ranges),
            Err(reason) => {
                tracing::warn!(%reason, "cannot read the cluster's slots; using the last known ones");
            }
        }
        sleep(REFRESH_PAUSE.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
    }
}
