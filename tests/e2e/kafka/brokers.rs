//! Brokers that fail, leaders that move, and clusters that go on; for a classic group and one of
//! the new protocol.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::join_all;
use oncegate::kafka::KafkaSource;
use oncegate::observe::Counters;
use oncegate::source::Source;
use oncegate_testkit::fire::commits_of;
use oncegate_testkit::{KafkaCluster, Record, unique};

use crate::stage::{CLOSE, NEW, QUICK, finish, number, open, receive, until_committed, with};

/// How many messages come between two faults.
const EACH: usize = 300;
const PARTITIONS: i32 = 3;
/// The members of a classic group, which outlast a broker, and of one of the new protocol.
const GROUPS: [&[(&str, &str)]; 2] = [&[QUICK[0], ("session.timeout.ms", "45000")], NEW];

/// A group with a topic of its own.
struct Consumed {
    topic: String,
    group: String,
    source: KafkaSource,
    counters: Arc<Counters>,
}

impl Consumed {
    async fn start(cluster: &KafkaCluster, replicas: i32, properties: &[(&str, &str)]) -> Self {
        let topic = unique("led");
        let group = unique("group");
        cluster
            .create_replicated_topic(&topic, PARTITIONS, replicas)
            .await;
        let source = KafkaSource::new(cluster.bootstrap(), &group, [&topic]);
        let source = with(
            source.commit_interval(Duration::from_millis(50)),
            properties,
        );
        let counters = open(&source).await;
        Self {
            topic,
            group,
            source,
            counters,
        }
    }

    async fn produce(&self, cluster: &KafkaCluster, numbers: std::ops::Range<usize>) {
        let record = |n: usize| {
            let partition = i32::try_from(n).expect("it is not that many") % PARTITIONS;
            Record::new(n.to_string()).partition(partition)
        };
        cluster
            .produce(&self.topic, numbers.map(record).collect::<Vec<Record>>())
            .await;
    }

    fn partitions(&self) -> impl Iterator<Item = (String, i32)> {
        (0..PARTITIONS).map(|partition| (self.topic.clone(), partition))
    }

    /// Receives and finishes until `count` different messages have come. Returns how many
    /// deliveries that took.
    async fn finish(&self, count: impl Fn() -> Option<usize>) -> usize {
        let mut numbers = BTreeSet::new();
        let mut received = 0;
        while count() != Some(numbers.len()) {
            let messages = finish(receive(&self.source, 1).await);
            received += messages.len();
            numbers.extend(messages.iter().map(number));
        }
        received
    }

    async fn ends_well(self, cluster: &KafkaCluster) {
        until_committed(
            cluster,
            &self.group,
            &self.topic,
            &cluster.end_offsets(&self.topic).await,
        )
        .await;
        let commits: BTreeMap<i32, Vec<i64>> = commits_of(cluster, &self.group, &self.topic).await;
        assert!(
            commits.values().all(|commits| commits.is_sorted()),
            "a commit went back: {commits:?}"
        );
        let counted = |name| self.counters.total(name);
        assert_eq!(
            (counted("messages_gone"), counted("topics_made_again")),
            (0, 0)
        );
        self.source.close(CLOSE).await.expect("closes");
    }
}

/// The leader of a partition dies, then the coordinator of the groups; both come back.
async fn they_die(cluster: &mut KafkaCluster) {
    let groups = join_all(GROUPS.map(|properties| Consumed::start(cluster, 3, properties))).await;
    let handle = async |cluster: &KafkaCluster, round: usize| {
        let handled = groups.iter().map(async |one| {
            one.produce(cluster, round * EACH..(round + 1) * EACH).await;
            assert_eq!(
                one.finish(|| Some(EACH)).await,
                EACH,
                "each message comes once"
            );
            let ends = cluster.end_offsets(&one.topic).await;
            until_committed(cluster, &one.group, &one.topic, &ends).await;
        });
        join_all(handled).await;
    };

    handle(cluster, 0).await;
    let leader = cluster.leader(&groups[0].topic, 0).await;
    cluster.node(leader).kill();
    handle(cluster, 1).await;
    cluster.node(leader).start_again().await;
    handle(cluster, 2).await;
    let coordinator = cluster.coordinator().await;
    cluster.node(coordinator).kill();
    handle(cluster, 3).await;
    cluster.node(coordinator).start_again().await;
    handle(cluster, 4).await;
    for one in groups {
        one.ends_well(cluster).await;
    }
}

/// While messages come, every partition is reassigned twice, each time away from its leader, and
/// with them the one that makes a broker the coordinator of the groups.
async fn they_are_reassigned(cluster: &KafkaCluster) {
    // As many copies as must have a message: a reassignment leaves one of the two that there were.
    let groups = join_all(GROUPS.map(|properties| Consumed::start(cluster, 2, properties))).await;
    let moved = OnceLock::new();
    let moving = async {
        let (topic, partition) = KafkaCluster::COORDINATED;
        let coordinated = std::iter::once((topic.to_owned(), partition));
        let partitions: Vec<(String, i32)> = groups
            .iter()
            .flat_map(Consumed::partitions)
            .chain(coordinated)
            .collect();
        for _ in 0..2 {
            cluster.move_leaders(&partitions).await;
        }
        moved.set(()).expect("once");
    };
    let under_load = groups.iter().map(async |one| {
        let total = OnceLock::new();
        let producing = async {
            let mut sent = 0;
            while total.get().is_none() {
                let next = sent + EACH;
                // Set before the last ones are produced, so that the receiver can tell that they
                // are the last.
                if moved.get().is_some() {
                    total.set(next).expect("once");
                }
                one.produce(cluster, sent..next).await;
                sent = next;
            }
            sent
        };
        let (sent, received) = tokio::join!(producing, one.finish(|| total.get().copied()));
        println!(
            "{}: {sent} sent, {} of them received again",
            one.topic,
            received - sent
        );
    });
    tokio::join!(moving, join_all(under_load));
    for one in groups {
        one.ends_well(cluster).await;
    }
}

// invariant: leaders-that-die
#[tokio::test(flavor = "multi_thread")]
async fn leaders_and_coordinators_that_die_or_move_cost_nothing() {
    let mut cluster = KafkaCluster::start().await;
    they_die(&mut cluster).await;
    // It leaves the coordinator's partition two copies, so it comes last.
    they_are_reassigned(&cluster).await;
}
