//! Workers of a queue killed with SIGKILL in the middle of their handlers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use fastrand::Rng;
use oncegate_tests::process::bound_to_parent;
use oncegate_tests::{Ledger, Process, Queue, Redis, Sqs, unique};

const MESSAGES: usize = 3_000;
const ORDERS: usize = 2_000;
const WORKERS: usize = 3;
const KILLS: usize = 6;
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
        command.envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")]);
        self.running.push(Process::spawn("worker", command));
    }

    fn kill_one(&mut self, rng: &mut Rng) -> u32 {
        let mut worker = self.running.swap_remove(rng.usize(..self.running.len()));
        worker.kill();
        worker.id()
    }
}

/// Looks again and again until it is so; fails when the ledger does not grow meanwhile.
async fn until(ledger: &Ledger, queue: &Queue, mut so: impl FnMut(usize, u64) -> bool) {
    let mut last = ((0, 0), Instant::now());
    loop {
        let now = (ledger.read().len(), queue.depth().await.total());
        if so(now.0, now.1) {
            return;
        }
        if now != last.0 {
            last = (now, Instant::now());
        }
        assert!(last.1.elapsed() < STUCK_AFTER, "stuck at {} effects, {} messages left", now.0, now.1);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_queue_is_lost_and_every_second_effect_is_explained_by_a_kill() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let (sqs, redis) = (Sqs::shared().await, Redis::shared().await);
    let queue = sqs.new_queue("kill").await;
    let body = |n: usize| {
        let order = if n < ORDERS { n } else { rng.usize(..ORDERS) };
        format!(r#"{{"order":"{order}","n":{n}}}"#)
    };
    queue.send((0..MESSAGES).map(body).collect::<Vec<String>>()).await;

    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path().join("ledger"));
    let path = ledger.path().display().to_string();
    let (store, scope) = (redis.url().to_owned(), unique("kill"));
    let arguments = vec![store, scope, path, "sqs".to_owned(), queue.url().to_owned()];
    let mut workers = Workers { arguments, running: Vec::new() };
    (0..WORKERS).for_each(|_| workers.start());

    let mut killed = BTreeSet::new();
    for n in 0..KILLS {
        // Some time after the last kill, while there is still enough left to do.
        let at = ORDERS * (n + 1) / (KILLS + 2) + rng.usize(..ORDERS / 40);
        until(&ledger, &queue, |effects, _| effects >= at).await;
        killed.insert(workers.kill_one(&mut rng));
        workers.start();
    }
    until(&ledger, &queue, |effects, left| effects >= ORDERS && left == 0).await;

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
