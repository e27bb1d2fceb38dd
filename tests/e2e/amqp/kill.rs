//! Workers of a queue killed with SIGKILL in the middle of their handlers.

use fastrand::Rng;
use oncegate_testkit::{Ledger, QueueKind, RabbitMq, Redis, Workers, unique};

const MESSAGES: usize = 3_000;
const ORDERS: usize = 2_000;
const WORKERS: usize = 3;
const KILLS: usize = 6;

async fn nothing_is_lost(kind: QueueKind) {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let server = RabbitMq::shared().await;
    let redis = Redis::shared().await;
    let queue = server.new_queue("kill", kind).await;
    let body = |n: usize| {
        let order = if n < ORDERS { n } else { rng.usize(..ORDERS) };
        format!(r#"{{"order":"{order}","n":{n}}}"#)
    };
    queue.send((0..MESSAGES).map(body).collect::<Vec<String>>()).await;

    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path().join("ledger"));
    let path = ledger.path().display().to_string();
    let from = ["amqp".to_owned(), server.uri(), queue.name().to_owned()];
    let arguments = [redis.url().to_owned(), unique("kill"), path].into_iter().chain(from).collect();
    let mut workers = Workers::of(env!("CARGO_BIN_EXE_worker"), arguments);
    for _ in 0..WORKERS {
        workers.start();
    }
    for n in 0..KILLS {
        // Some time after the last kill, while there is still enough left to do.
        let at = ORDERS * (n + 1) / (KILLS + 2) + rng.usize(..ORDERS / 40);
        workers.until(&ledger, async |effects| if effects >= at { Ok(()) } else { Err(()) }).await;
        workers.replace_one(&mut rng);
    }
    workers
        .until(&ledger, async |effects| {
            let left = queue.ready().await;
            if effects >= ORDERS && left == 0 { Ok(()) } else { Err(left) }
        })
        .await;
    let explained =
        workers.explained(&ledger, (0..ORDERS).map(|order| order.to_string()), &format!("seed {seed}"));
    println!("{KILLS} kills, lost 0, second effects {explained}, each explained by a kill");
}

// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_of_a_classic_queue_lose_nothing() {
    nothing_is_lost(QueueKind::Classic).await;
}

// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_of_a_quorum_queue_lose_nothing() {
    nothing_is_lost(QueueKind::Quorum).await;
}
