//! A consumer over a cluster, and over a primary that sentinels watch, while servers go away and slots move.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::redis::{OnStoreLoss, RedisStore};
use oncegate::{Consumer, ConsumerError, Gate, Key, Message, Ordering};
use oncegate_tests::{Kafka, Record, RedisCluster, RedisSentinels, RedisServer, Watched, unique};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const CONCURRENCY: u32 = 16;
const PARTITIONS: i32 = 4;

/// A consumer at work, and what its handler did: how often for each message.
struct Load {
    topic: String,
    group: String,
    kafka: Kafka,
    messages: u64,
    effects: Arc<Mutex<BTreeMap<u64, u64>>>,
    watched: Arc<Watched>,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), ConsumerError>>,
}

#[derive(serde::Deserialize)]
struct Payment {
    id: u64,
}

impl Load {
    async fn start(url: &str, messages: u64) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("scale", PARTITIONS).await;
        let records = (0..messages).map(|n| Record::new(format!(r#"{{"id":{n}}}"#)).key(n.to_string()));
        kafka.produce(&topic, records).await;
        let effects = Arc::new(Mutex::new(BTreeMap::new()));
        let ledger = Arc::clone(&effects);
        let handler = move |message: Message| {
            let ledger = Arc::clone(&ledger);
            async move {
                let payment: Payment = message.json()?;
                tokio::time::sleep(Duration::from_millis(5)).await;
                *ledger.lock().unwrap().entry(payment.id).or_default() += 1;
                Ok(())
            }
        };
        let (group, watched) = (unique("scale"), Watched::new());
        // A primary that is killed may take its last writes with it, which is counted.
        let store = RedisStore::builder(url).on_store_loss(OnStoreLoss::Continue).connect().await.unwrap();
        // The lease outlives a failover, so that no run is cut short and none is taken over.
        let gate = Gate::new(unique("scale"), Key::json(["id"]), store).lease(Duration::from_secs(60));
        let source = KafkaSource::new(kafka.bootstrap(), group.as_str(), [topic.as_str()]);
        let consumer = Consumer::new(source, gate, handler)
            .concurrency(CONCURRENCY)
            .ordering(Ordering::Unordered)
            .observer(Arc::clone(&watched) as _);
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Self { topic, group, kafka, messages, effects, watched, stop, running }
    }

    async fn acks(&self, count: u64) {
        self.watched.until("acks", count).await;
    }

    /// Waits for the rest, and judges: nothing lost, and every second effect counted by its cause.
    async fn end(self) -> u64 {
        self.acks(self.messages).await;
        self.stop.send(()).unwrap();
        self.running.await.unwrap().unwrap();
        let effects = self.effects.lock().unwrap().clone();
        assert_eq!(effects.len() as u64, self.messages, "lost");
        let extra = effects.values().sum::<u64>() - self.messages;
        let counted = self.watched.total("extra_runs");
        assert!(extra <= counted, "{extra} second effects, {counted} counted");
        let committed: i64 = self.kafka.committed_offsets(&self.group, &self.topic).await.values().sum();
        assert_eq!(committed, i64::try_from(self.messages).unwrap());
        extra
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_loses_a_primary_and_moves_slots_under_load_and_no_message_is_lost() {
    let mut cluster = RedisCluster::start().await;
    let load = Load::start(&cluster.url(), 6_000).await;
    load.acks(600).await;
    assert_eq!(load.watched.total("store_errors"), 0, "nothing is wrong before the faults");

    // Slots that move with their records, one after the other.
    for slot in 5_500..5_540 {
        cluster.begin_move(slot, 1, 2).await;
        cluster.move_keys(slot, 1, 2).await;
        cluster.end_move(slot, 1, 2).await;
    }
    assert_eq!(load.watched.total("store_errors"), 0, "a slot that moves is no outage");
    assert_eq!(cluster.primary_of(5_500).await, 2);
    load.acks(1_800).await;

    cluster.node(0).kill();
    load.watched.until("store_paused", 1).await;
    load.watched.until("store_paused", 2).await;
    assert_eq!(cluster.primary_of(0).await, 3, "its replica has taken over");
    load.acks(5_000).await;
    cluster.node(0).start_again().await;
    let extra = load.end().await;
    println!("second effects after the failover: {extra}");
}

/// A third of the keys has nowhere to go for a while; the others must not notice.
async fn others_go_on(
    take_away: impl FnOnce(&mut RedisServer),
    bring_back: impl AsyncFnOnce(&mut RedisServer),
) -> u64 {
    const MESSAGES: u64 = 3_000;
    // It must come back with all that it has answered: see `RedisServer::synced`.
    let mut cluster = RedisCluster::start_with(&["--appendfsync", "always"]).await;
    // Nobody takes over for this shard.
    cluster.node(3).kill();
    let load = Load::start(&cluster.url(), MESSAGES).await;
    load.acks(200).await;
    take_away(cluster.node(0));
    // Two thirds of the keys, give or take eight times the deviation of such a draw.
    load.acks(MESSAGES * 2 / 3 - 200).await;
    assert!(load.watched.get("store_paused", "paused") >= 1);
    assert_eq!(load.watched.get("store_paused", "resumed"), 0, "the shard still is away");
    bring_back(cluster.node(0)).await;
    load.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_cluster_with_a_shard_down_the_other_keys_go_on() {
    let extra = others_go_on(RedisServer::kill, async |node| node.start_again().await).await;
    assert_eq!(extra, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_cluster_with_a_shard_that_hangs_the_other_keys_go_on() {
    let stop = |node: &mut RedisServer| node.process().signal("STOP");
    let extra = others_go_on(stop, async |node| node.process().signal("CONT")).await;
    println!("second effects after the hang: {extra}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinels_fail_over_under_load_and_the_new_primary_is_found() {
    let mut watched = RedisSentinels::start().await;
    let load = Load::start(&watched.url(), 5_000).await;
    load.acks(500).await;
    watched.server(0).kill();
    let second = watched.failed_over_from(0).await;
    load.acks(2_500).await;
    // It comes back as what it was; the sentinels make a replica of it.
    watched.server(0).start_again().await;
    // This time everybody is alive: the old primary becomes a replica that still answers.
    watched.fail_over().await;
    watched.failed_over_from(second).await;
    let extra = load.end().await;
    println!("second effects after two failovers: {extra}");
}
