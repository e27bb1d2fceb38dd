//! Brokers that die, and clusters that go on without one.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::source::Source;
use oncegate_tests::{KafkaCluster, unique};

use crate::stage::{CLOSE, NEW, QUICK, finish, number, numbered, open, receive, until_committed, with};

/// How many messages come between two faults.
const EACH: usize = 300;
const PARTITIONS: i32 = 3;

/// The leader of a partition dies, then the coordinator of the group; both come back.
async fn goes_on(cluster: &mut KafkaCluster, properties: &[(&str, &str)]) {
    let (topic, group) = (unique("led"), unique("group"));
    cluster.create_replicated_topic(&topic, PARTITIONS, 3).await;
    let source = KafkaSource::new(cluster.bootstrap(), &group, [&topic]);
    let source = with(source.commit_interval(Duration::from_millis(50)), properties);
    let counters = open(&source).await;
    let mut numbers = BTreeSet::new();
    let mut handle = async |cluster: &KafkaCluster, round: usize| {
        cluster.produce(&topic, numbered(EACH, PARTITIONS)).await;
        let finished = finish(receive(&source, EACH).await);
        numbers.extend(finished.iter().map(|message| round * EACH + number(message)));
        until_committed(cluster, &group, &topic, &cluster.end_offsets(&topic).await).await;
    };

    handle(cluster, 0).await;
    let leader = cluster.leader(&topic, 0).await;
    cluster.node(leader).kill();
    handle(cluster, 1).await;
    cluster.node(leader).start_again().await;
    handle(cluster, 2).await;
    let coordinator = cluster.coordinator().await;
    cluster.node(coordinator).kill();
    handle(cluster, 3).await;
    cluster.node(coordinator).start_again().await;
    handle(cluster, 4).await;

    assert_eq!(numbers, (0..5 * EACH).collect());
    assert_eq!((counters.total("messages_gone"), counters.total("topics_made_again")), (0, 0));
    source.close(CLOSE).await.expect("closes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_and_a_coordinator_that_die_cost_nothing() {
    let mut cluster = KafkaCluster::start().await;
    goes_on(&mut cluster, &[QUICK[0], ("session.timeout.ms", "45000")]).await;
    goes_on(&mut cluster, NEW).await;
}
