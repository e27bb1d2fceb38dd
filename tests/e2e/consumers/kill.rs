//! Workers killed with SIGKILL in the middle of their handlers.

use fastrand::Rng;
use oncegate_testkit::{Kafka, Ledger, Record, Redis, Workers, unique};

const MESSAGES: usize = 9_000;
const ORDERS: usize = 6_000;
const PARTITIONS: i32 = 6;
const WORKERS: usize = 3;
const KILLS: usize = 10;

// invariant: killed-process
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
    kafka
        .produce(&topic, (0..MESSAGES).map(record).collect::<Vec<Record>>())
        .await;

    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path().join("ledger"));
    let group = unique("kill");
    let (store, scope, path) = (
        redis.url().to_owned(),
        unique("kill"),
        ledger.path().display().to_string(),
    );
    let brokers = kafka.bootstrap().to_owned();
    let arguments = vec![
        store,
        scope,
        path,
        "kafka".to_owned(),
        brokers,
        topic.clone(),
        group.clone(),
    ];
    let mut workers = Workers::of(env!("CARGO_BIN_EXE_worker"), arguments);
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
    let everything = i64::try_from(MESSAGES).unwrap();
    workers
        .until(&ledger, async |effects| {
            let committed = kafka
                .committed_offsets(&group, &topic)
                .await
                .values()
                .sum::<i64>();
            if effects >= ORDERS && committed == everything {
                Ok(())
            } else {
                Err(committed)
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
