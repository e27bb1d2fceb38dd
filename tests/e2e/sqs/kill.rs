//! Workers of a queue killed with SIGKILL in the middle of their handlers.

use fastrand::Rng;
use oncegate_testkit::{Ledger, Redis, Sqs, Workers, unique};

const MESSAGES: usize = 3_000;
const ORDERS: usize = 2_000;
const WORKERS: usize = 3;
const KILLS: usize = 6;

// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_queue_is_lost_and_second_effects_are_by_kills() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let sqs = Sqs::shared().await;
    let redis = Redis::shared().await;
    let queue = sqs.new_queue("kill").await;
    let body = |n: usize| {
        let order = if n < ORDERS { n } else { rng.usize(..ORDERS) };
        format!(r#"{{"order":"{order}","n":{n}}}"#)
    };
    queue
        .send((0..MESSAGES).map(body).collect::<Vec<String>>())
        .await;

    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path().join("ledger"));
    let store = redis.url().to_owned();
    let scope = unique("kill");
    let path = ledger.path().display().to_string();
    let arguments = vec![store, scope, path, "sqs".to_owned(), queue.url().to_owned()];
    let credentials = [
        ("AWS_ACCESS_KEY_ID", "none"),
        ("AWS_SECRET_ACCESS_KEY", "none"),
    ];
    let mut workers = Workers::of(env!("CARGO_BIN_EXE_worker"), arguments).env(&credentials);
    (0..WORKERS).for_each(|_| workers.start());

    for n in 0..KILLS {
        // Some time after the last kill, while there is still enough left to do.
        let at = ORDERS * (n + 1) / (KILLS + 2) + rng.usize(..ORDERS / 40);
        workers
            .until(
                &ledger,
                async |effects| if effects >= at { Ok(()) } else { Err(()) },
            )
            .await;
        workers.replace_one(&mut rng);
    }
    workers
        .until(&ledger, async |effects| {
            let left = queue.depth().await.total();
            if effects >= ORDERS && left == 0 {
                Ok(())
            } else {
                Err(left)
            }
        })
        .await;
    let explained = workers.explained(
        &ledger,
        (0..ORDERS).map(|order| order.to_string()),
        &format!("seed {seed}"),
    );
    println!("{KILLS} kills, lost 0, second effects {explained}, each explained by a kill");
}
