//! A consumer over a cluster, over a primary that sentinels watch, and over one with a replica,
//! while servers fail and slots move.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::admin::{self, AcceptedLoss};
use oncegate::core::key::Scope;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::{
    Attempt, Consumer, ConsumerError, Gate, Key, Message, Monitor, OnStoreLoss, Ordering,
};
use oncegate_testkit::{
    Kafka, Record, RedisCluster, RedisPair, RedisSentinels, RedisServer, Watched, unique, until,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const CONCURRENCY: u32 = 16;
const PARTITIONS: i32 = 4;
const LIMIT: Duration = Duration::from_secs(240);

/// Payments in a topic, and what came of them.
struct Payments {
    topic: String,
    group: String,
    scope: String,
    kafka: Kafka,
    count: u64,
    copies: u64,
    /// The fencing tokens of each one's effects, where there are fencing tokens.
    effects: Arc<Mutex<BTreeMap<u64, Vec<Option<u64>>>>>,
}

#[derive(serde::Deserialize)]
struct Payment {
    id: u64,
}

impl Payments {
    async fn new(count: u64) -> Self {
        Self::with_copies(count, 1).await
    }

    /// So many deliveries are expected of each: all but the first come with
    /// [`come_again`](Self::come_again).
    async fn with_copies(count: u64, copies: u64) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("scale", PARTITIONS).await;
        let group = unique("scale");
        let scope = unique("scale");
        let effects = Arc::default();
        let payments = Self {
            topic,
            group,
            scope,
            kafka,
            count,
            copies,
            effects,
        };
        payments.come_again().await;
        payments
    }

    /// Produces each of them once.
    async fn come_again(&self) {
        let records =
            (0..self.count).map(|id| Record::new(format!(r#"{{"id":{id}}}"#)).key(id.to_string()));
        self.kafka.produce(&self.topic, records).await;
    }

    async fn gate(&self, url: &str, on_loss: OnStoreLoss) -> Gate {
        let store = RedisStore::connect(url).await.unwrap();
        // The lease outlives a failover, so that no run is cut short and none is taken over.
        Gate::new(self.scope.as_str(), Key::json(["id"]), store)
            .lease(Duration::from_secs(60))
            .on_store_loss(on_loss)
    }

    fn consume(&self, gate: Gate) -> Load<'_> {
        let ledger = Arc::clone(&self.effects);
        let handler = move |message: Message, attempt: Attempt| {
            let ledger = Arc::clone(&ledger);
            async move {
                let payment: Payment = message.json()?;
                tokio::time::sleep(Duration::from_millis(5)).await;
                ledger
                    .lock()
                    .unwrap()
                    .entry(payment.id)
                    .or_default()
                    .push(attempt.fencing_token());
                Ok(())
            }
        };
        let watched = Watched::new();
        let source = KafkaSource::new(
            self.kafka.bootstrap(),
            self.group.as_str(),
            [self.topic.as_str()],
        );
        let consumer = Consumer::new(source, gate, handler)
            .concurrency(CONCURRENCY)
            .ordering(Ordering::Unordered)
            .observer(Arc::clone(&watched) as _);
        let (stop, stopped) = oneshot::channel::<()>();
        let monitor = consumer.monitor();
        let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Load {
            payments: self,
            watched,
            monitor,
            stop,
            running,
        }
    }

    /// Starts a consumer that goes on when its store has lost records: a killed primary may lose
    /// its last writes, which is counted.
    async fn start(&self, url: &str) -> Load<'_> {
        self.consume(self.gate(url, OnStoreLoss::Continue).await)
    }

    fn deliveries(&self) -> u64 {
        self.count * self.copies
    }

    async fn committed(&self) -> u64 {
        let committed = self.kafka.committed_offsets(&self.group, &self.topic).await;
        committed
            .values()
            .map(|offset| u64::try_from(*offset).unwrap())
            .sum()
    }

    /// How many effects came a second time.
    fn extra(&self) -> u64 {
        let effects = self.effects.lock().unwrap();
        effects.values().map(|each| each.len() as u64 - 1).sum()
    }

    fn none_is_lost(&self) {
        assert_eq!(
            self.effects.lock().unwrap().len() as u64,
            self.count,
            "lost"
        );
    }
}

/// A consumer at work on them.
struct Load<'p> {
    payments: &'p Payments,
    watched: Arc<Watched>,
    monitor: Monitor,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), ConsumerError>>,
}

impl Load<'_> {
    async fn acks(&self, count: u64) {
        self.watched.until("acks", count).await;
    }

    /// Waits until so many claims are refused.
    async fn refused(&self, at_least: u64) {
        until("claims to be refused", LIMIT, async || {
            assert!(!self.running.is_finished(), "the consumer has ended");
            match self.watched.get("store_errors", "refused") {
                count if count >= at_least => Ok(()),
                count => Err(format!("{count} are; {:?}", self.monitor.health())),
            }
        })
        .await;
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.running.await.unwrap().unwrap();
    }

    /// Waits for the rest, and judges: nothing lost, and every second effect counted by its cause.
    async fn end(self) -> u64 {
        let payments = self.payments;
        let watched = Arc::clone(&self.watched);
        self.acks(payments.deliveries()).await;
        self.stop().await;
        payments.none_is_lost();
        let extra = payments.extra();
        let counted = watched.total("extra_runs");
        assert!(
            extra <= counted,
            "{extra} second effects, {counted} counted"
        );
        assert_eq!(payments.committed().await, payments.deliveries());
        extra
    }
}

// invariant: failover-under-load
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_loses_a_primary_and_moves_slots_loses_nothing() {
    let mut cluster = RedisCluster::start().await;
    let payments = Payments::new(6_000).await;
    let load = payments.start(&cluster.url()).await;
    load.acks(600).await;
    assert_eq!(
        load.watched.total("store_errors"),
        0,
        "nothing is wrong before the faults"
    );

    // Slots that move with their records, one after the other.
    for slot in 5_500..5_540 {
        cluster.begin_move(slot, 1, 2).await;
        cluster.move_keys(slot, 1, 2).await;
        cluster.end_move(slot, 1, 2).await;
    }
    assert_eq!(
        load.watched.total("store_errors"),
        0,
        "a slot that moves is no outage"
    );
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
    // No replica takes over for this shard.
    cluster.node(3).kill();
    let payments = Payments::new(MESSAGES).await;
    let load = payments.start(&cluster.url()).await;
    load.acks(200).await;
    take_away(cluster.node(0));
    // Two thirds of the keys, give or take eight times the deviation of such a draw.
    load.acks(MESSAGES * 2 / 3 - 200).await;
    assert!(load.watched.get("store_paused", "paused") >= 1);
    assert_eq!(
        load.watched.get("store_paused", "resumed"),
        0,
        "the shard still is away"
    );
    bring_back(cluster.node(0)).await;
    load.end().await
}

// invariant: shard-down
#[tokio::test(flavor = "multi_thread")]
async fn of_a_cluster_with_a_shard_down_the_other_keys_go_on() {
    let extra = others_go_on(RedisServer::kill, async |node| node.start_again().await).await;
    assert_eq!(extra, 0);
}

// invariant: shard-down
#[tokio::test(flavor = "multi_thread")]
async fn of_a_cluster_with_a_shard_that_hangs_the_other_keys_go_on() {
    let stop = |node: &mut RedisServer| node.process().signal("STOP");
    let extra = others_go_on(stop, async |node| node.process().signal("CONT")).await;
    println!("second effects after the hang: {extra}");
}

/// The address of a primary that is gone is no shard that still answers.
// invariant: shard-down
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_cluster_that_is_away_is_unready_after_a_failover() {
    const NODES: usize = 6;
    let mut cluster = RedisCluster::start().await;
    let payments = Payments::new(6_000).await;
    let load = payments.start(&cluster.url()).await;
    let is_ready = async |wanted: bool| {
        until("the readiness to change", LIMIT, async || {
            let health = load.monitor.health();
            if health.is_ready() == wanted {
                Ok(())
            } else {
                Err(health.to_string())
            }
        })
        .await;
    };
    load.acks(600).await;
    cluster.node(0).kill();
    load.watched.until("store_paused", 2).await;
    assert_eq!(cluster.primary_of(0).await, 3, "its replica has taken over");
    load.acks(2_000).await;
    is_ready(true).await;
    for node in 1..NODES {
        cluster.node(node).kill();
    }
    is_ready(false).await;
    for node in 0..NODES {
        cluster.node(node).start_again().await;
    }
    let extra = load.end().await;
    println!("second effects after the failover and the outage: {extra}");
}

// invariant: failover-under-load
#[tokio::test(flavor = "multi_thread")]
async fn sentinels_fail_over_under_load_and_the_new_primary_is_found() {
    let mut watched = RedisSentinels::start().await;
    let payments = Payments::new(5_000).await;
    let load = payments.start(&watched.url()).await;
    load.acks(500).await;
    watched.server(0).kill();
    let second = watched.failed_over_from(0).await;
    load.acks(2_500).await;
    // It comes back as what it was; the sentinels make a replica of it.
    watched.server(0).start_again().await;
    // This time all servers are alive: the old primary becomes a replica that still answers.
    watched.fail_over().await;
    watched.failed_over_from(second).await;
    let extra = load.end().await;
    println!("second effects after two failovers: {extra}");
}

/// The lease of claims that the replica had, without their ends. Their duplicates wait as long.
const LEFT_BEHIND: Duration = Duration::from_secs(3);

/// Cuts the replication link; then the primary is lost with its last writes, and the replica
/// becomes the primary.
async fn a_stale_replica_takes_over(pair: &mut RedisPair, load: &Load<'_>) {
    load.acks(300).await;
    pair.cut();
    load.acks(1_000).await;
    pair.fail_over().await;
    load.watched.until("store_losses", 1).await;
    // Duplicates of what was forgotten.
    load.payments.come_again().await;
}

// invariant: loss-undetected
#[tokio::test(flavor = "multi_thread")]
async fn after_a_stale_failover_reruns_count_with_greater_tokens() {
    let mut pair = RedisPair::start(&["--appendfsync", "always"]).await;
    let payments = Payments::with_copies(2_000, 2).await;
    let gate = payments
        .gate(&pair.front.url(), OnStoreLoss::Continue)
        .await;
    let load = payments.consume(gate.fenced().lease(LEFT_BEHIND));
    a_stale_replica_takes_over(&mut pair, &load).await;
    let watched = Arc::clone(&load.watched);
    let extra = load.end().await;
    assert!(extra > 0, "what the replica did not have ran again");
    assert!(
        watched.get("extra_runs", "store_loss") > 0,
        "{extra} second effects have another cause"
    );
    for (id, fencing_tokens) in payments.effects.lock().unwrap().iter() {
        assert!(
            fencing_tokens.is_sorted_by(|one, next| one < next),
            "payment {id}: {fencing_tokens:?}"
        );
    }
}

// invariant: loss-undetected, run-after-loss
#[tokio::test(flavor = "multi_thread")]
async fn after_a_stale_failover_nothing_runs_until_it_is_accepted() {
    let mut pair = RedisPair::start(&["--appendfsync", "always"]).await;
    let payments = Payments::with_copies(2_000, 2).await;
    let gate = payments.gate(&pair.front.url(), OnStoreLoss::Halt).await;
    let load = payments.consume(gate.lease(LEFT_BEHIND));
    a_stale_replica_takes_over(&mut pair, &load).await;
    load.refused(3).await;
    load.stop().await;
    assert_eq!(payments.extra(), 0, "it ran again");
    let committed = payments.committed().await;
    assert!(committed < payments.deliveries(), "there is something left");

    // A process that starts later notices the halt, and runs nothing either.
    let gate = payments.gate(&pair.front.url(), OnStoreLoss::Halt).await;
    let load = payments.consume(gate.lease(LEFT_BEHIND));
    load.refused(1).await;
    assert_eq!(
        (payments.extra(), payments.committed().await),
        (0, committed),
        "it ran again"
    );

    let store = RedisStore::connect(&pair.front.url()).await.unwrap();
    let scope = Scope::new(&payments.scope).unwrap();
    let halt = admin::halt_of(&store, &scope)
        .await
        .unwrap()
        .expect("the scope is halted");
    let accepted = admin::accept_loss(&store, &scope, &halt).await.unwrap();
    assert!(
        matches!(accepted, AcceptedLoss::Accepted(_)),
        "{accepted:?}"
    );
    until("the rest", LIMIT, async || {
        match payments.committed().await {
            committed if committed == payments.deliveries() => Ok(()),
            committed => Err(format!(
                "{committed} of {} are committed",
                payments.deliveries()
            )),
        }
    })
    .await;
    load.stop().await;
    payments.none_is_lost();
}
