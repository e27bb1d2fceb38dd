//! Three Kafka brokers that are one cluster.

use std::ops::Deref;
use std::time::Duration;

use futures_util::future::join_all;

use crate::broker::{self, KafkaBroker, Ports};
use crate::kafka::Kafka;
use crate::until::until;

/// How many brokers: the fewest of which one may fail.
const NODES: usize = 3;

/// Everything three times, and two copies are enough to go on. One partition of offsets: its leader
/// is every group's coordinator.
const SETTINGS: &[&str] = &[
    "offsets.topic.replication.factor=3",
    "offsets.topic.num.partitions=1",
    "transaction.state.log.replication.factor=3",
    "default.replication.factor=3",
    "min.insync.replicas=2",
];

/// How long a partition may take to be somewhere else.
const MOVE_LIMIT: Duration = Duration::from_secs(90);

/// A cluster of three brokers, each also a controller; it dies with this value. About 360 MB each.
#[derive(Debug)]
pub struct KafkaCluster {
    kafka: Kafka,
    nodes: Vec<KafkaBroker>,
}

impl KafkaCluster {
    /// The partition whose leader coordinates every group.
    pub const COORDINATED: (&str, i32) = ("__consumer_offsets", 0);

    /// Starts it on free ports and waits until each broker answers.
    ///
    /// # Panics
    /// As [`KafkaBroker::start`].
    pub async fn start() -> Self {
        let ports: Vec<Ports> = (0..NODES).map(|_| Ports::reserve()).collect();
        let voters: Vec<String> = ports
            .iter()
            .zip(1..)
            .map(|(ports, node)| ports.voter(node))
            .collect();
        let bootstrap: Vec<String> = ports.iter().map(|ports| ports.broker.address()).collect();
        let voters = voters.join(",");
        let id = broker::random_cluster_id();
        let nodes = ports.into_iter().zip(1..);
        let mut nodes: Vec<KafkaBroker> = nodes
            .map(|(ports, node)| KafkaBroker::prepare(node, &voters, &id, ports, SETTINGS))
            .collect();
        join_all(nodes.iter_mut().map(KafkaBroker::start_first)).await;
        Self {
            kafka: Kafka::at(bootstrap.join(",")),
            nodes,
        }
    }

    /// The broker of this number, from 1 on, as in [`Kafka::leader`].
    ///
    /// # Panics
    /// When there is none.
    pub fn node(&mut self, number: i32) -> &mut KafkaBroker {
        let index = usize::try_from(number - 1).expect("numbers begin with 1");
        self.nodes.get_mut(index).expect("a broker has this number")
    }

    /// The broker that coordinates every group.
    ///
    /// # Panics
    /// When no group has been joined yet, or there is no coordinator within the limit of a request.
    pub async fn coordinator(&self) -> i32 {
        let (topic, partition) = Self::COORDINATED;
        self.kafka.leader(topic, partition).await
    }

    /// Reassigns each of these partitions to the two brokers that do not lead it, and waits until
    /// each has another leader.
    ///
    /// # Panics
    /// When Kafka's tool fails, or a partition has not moved within a minute and a half.
    pub async fn move_leaders(&self, partitions: &[(String, i32)]) {
        let mut moves = Vec::new();
        for (topic, partition) in partitions {
            let leader = self.kafka.leader(topic, *partition).await;
            let others = (1..).take(NODES).filter(|node| *node != leader).collect();
            moves.push((leader, (topic.as_str(), *partition, others)));
        }
        let wanted: Vec<(&str, i32, Vec<i32>)> =
            moves.iter().map(|(_, wanted)| wanted.clone()).collect();
        self.nodes
            .first()
            .expect("a cluster has brokers")
            .reassign(&wanted)
            .await;
        for (before, (topic, partition, _)) in moves {
            until("another leader", MOVE_LIMIT, async || {
                match self.kafka.leader(topic, partition).await {
                    leader if leader == before => {
                        Err(format!("{topic}/{partition} is led by {leader}"))
                    }
                    _ => Ok(()),
                }
            })
            .await;
        }
    }
}

impl Deref for KafkaCluster {
    type Target = Kafka;

    fn deref(&self) -> &Kafka {
        &self.kafka
    }
}
