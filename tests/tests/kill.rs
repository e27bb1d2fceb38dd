//! Workers killed with SIGKILL in the middle of their handlers.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use fastrand::Rng;
use oncegate_tests::process::bound_to_parent;
use oncegate_tests::{Kafka, Ledger, Process, Record, Redis, unique};

const MESSAGES: usize = 9_000;
const ORDERS: usize = 6_000;
const PARTITIONS: i32 = 6;
const WORKERS: usize = 3;
const KILLS: usize = 10;
/// How long nothing may move.
const STUCK_AFTER: Duration = Duration::from_secs(30);

struct Workers {
    arguments: Vec<String>,
    running: Vec<Process>,
}

impl Workers {
    fn start(&mut self) {
        let mut command = bound_to_parent(env!("CARGO_BIN_EXE_worker"), "KILL");
        command.args(&self.arguments);
        self.running.push(Process::spawn("worker", command));
    }

    fn kill_one(&mut self, rng: &mut Rng) -> u32 {
        let mut worker = self.running.swap_remove(rng.usize(..self.running.len()));
        worker.kill();
        worker.id()
    }
}

/// Looks again and again until it is so; fails when the ledger does not grow meanwhile.
async fn until(ledger: &Ledger, mut so: impl AsyncFnMut(usize) -> bool) {
    let mut last = (0, Instant::now());
    loop {
        let effects = ledger.read().len();
        if so(effects).await {
            return;
        }
        if effects != last.0 {
            last = (effects, Instant::now());
        }
        assert!(last.1.elapsed() < STUCK_AFTER, "stuck at {effects} effects");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_and_every_second_effect_is_explained_by_a_kill() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let (kafka, redis) = (Kafka::shared().await, Redis::shared().await);
    let topic = kafka.new_topic("kill", PARTITIONS).await;
    let record = |n: usize| {
        let order = if n < ORDERS { n } else { rng.usize(..ORDERS) };
        Record::new(format!(r#"{{"order":"{order}","n":{n}}}"#)).key(order.to_string())
    };
    kafka.produce(&topic, (0..MESSAGES).map(record).collect::<Vec<Record>>()).await;

    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path().join("ledger"));
    let group = unique("kill");
    let path = ledger.path().display().to_string();
    let (store, scope, brokers) = (redis.url().to_owned(), unique("kill"), kafka.bootstrap().to_owned());
    let arguments = vec![store, scope, path, "kafka".to_owned(), brokers, topic.clone(), group.clone()];
    let mut workers = Workers { arguments, running: Vec::new() };
    (0..WORKERS).for_each(|_| workers.start());

    let mut killed = BTreeSet::new();
    for n in 0..KILLS {
        // Some time after the last kill, while there is still enough left to do.
        let at = ORDERS * (n + 1) / (KILLS + 2) + rng.usize(..ORDERS / 40);
        until(&ledger, async |effects| effects >= at).await;
        killed.insert(workers.kill_one(&mut rng));
        workers.start();
    }
    let everything = i64::try_from(MESSAGES).unwrap();
    until(&ledger, async |effects| {
        effects >= ORDERS && kafka.committed_offsets(&group, &topic).await.values().sum::<i64>() == everything
    })
    .await;

    let mut by_order: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for effect in ledger.read() {
        by_order.entry(effect.effect).or_default().push(effect.pid);
    }
    assert_eq!(by_order.len(), ORDERS, "seed {seed}: lost");
    let mut explained = 0;
    for (order, pids) in by_order.iter().filter(|(_, pids)| pids.len() > 1) {
        let by_killed = pids.iter().filter(|pid| killed.contains(pid)).count();
        assert!(
            pids.len() - 1 <= by_killed,
            "seed {seed}: order {order} was charged by {pids:?}, killed: {killed:?}"
        );
        explained += pids.len() - 1;
    }
    println!("{KILLS} kills, lost 0, second effects {explained}, each explained by a kill");
}
