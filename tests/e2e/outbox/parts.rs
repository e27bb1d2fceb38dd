//! A topic of which some partitions have no leader.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate::kafka::KafkaPublisher;
use oncegate::outbox::Relay;
use oncegate_testkit::{KafkaCluster, unique};

use crate::content::partition_of;
use crate::world::{Running, World, firsts};

const PARTITIONS: i32 = 12;

/// The keys whose partitions have no leader: more than are tried, or held back one by one, at a
/// time.
const DEAD_KEYS: usize = 1_500;
const LIVE_KEYS: usize = 300;

// invariant: outbox-dead-partition
#[tokio::test]
async fn partitions_without_a_leader_hold_up_no_others() {
    let mut cluster = KafkaCluster::start().await;
    let topic = unique("outbox-parts");
    cluster
        .create_topic_with(&topic, &[("min.insync.replicas", "1")])
        .await;
    cluster.add_partitions(&topic, PARTITIONS).await;
    let mut leaders = BTreeMap::new();
    for partition in 0..PARTITIONS {
        leaders.insert(partition, cluster.leader(&topic, partition).await);
    }
    let victim = leaders[&0];
    let keys = |is_dead: bool, count: usize| -> Vec<String> {
        (0..)
            .map(|number| format!("order-{number}"))
            .filter(|key| (leaders[&partition_of(key.as_bytes(), PARTITIONS)] == victim) == is_dead)
            .take(count)
            .collect()
    };
    let dead = keys(true, DEAD_KEYS);
    let live = keys(false, LIVE_KEYS);
    cluster.node(victim).kill();
    let world = World::to((*cluster).clone(), topic).await;
    // The oldest ones are all of dead partitions.
    for number in 0..2 {
        world
            .write(dead.iter().map(|key| world.message(key, number)))
            .await;
        world
            .write(live.iter().map(|key| world.message(key, number)))
            .await;
    }
    let publisher = KafkaPublisher::new(world.kafka.bootstrap())
        // The shortest times, so that the test does not wait for long.
        .property("delivery.timeout.ms", "2000")
        .property("request.timeout.ms", "1000");
    let relay = Relay::new(world.outbox.clone(), publisher).lease(Duration::from_secs(2));
    let running = Running::start(relay);
    world.until_unsent(2 * DEAD_KEYS as u64).await;
    // What is written now leaves as well.
    world
        .write(live.iter().map(|key| world.message(key, 2)))
        .await;
    world
        .write(dead.iter().take(10).map(|key| world.message(key, 2)))
        .await;
    world.until_unsent(2 * DEAD_KEYS as u64 + 10).await;
    cluster.node(victim).start_again().await;
    world.until_sent().await;
    running.stop().await;
    let firsts = firsts(&world.published().await);
    assert_eq!(firsts.len(), DEAD_KEYS + LIVE_KEYS);
    for (number, key) in dead.iter().enumerate() {
        let expected: &[u32] = if number < 10 { &[0, 1, 2] } else { &[0, 1] };
        assert_eq!(firsts[key], expected, "{key}");
    }
    assert!(live.iter().all(|key| firsts[key] == [0, 1, 2]));
}
