//! Workers killed with SIGKILL, in the middle of their handlers or before an ack.

use std::path::PathBuf;
use std::time::Duration;

use fastrand::Rng;
use oncegate_testkit::fire::{
    Entry, History, Occurrence, Point, StoreKind, Trap, WorkerSettings, Zombie,
};
use oncegate_testkit::{Kafka, Ledger, Record, Redis, Workers, unique, until};

use crate::retry_topics::{LIMIT, Stage};

const MESSAGES: usize = 9_000;
const ORDERS: usize = 6_000;
const PARTITIONS: i32 = 6;
const WORKERS: usize = 3;
const KILLS: usize = 10;
/// An order whose first attempt fails, in a worker under fire.
const FAILS_ONCE: u64 = 3;

// invariant: killed-process
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_and_every_second_effect_is_by_a_kill() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let kafka = Kafka::shared().await;
    let redis = Redis::shared().await;
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
    let store = redis.url().to_owned();
    let scope = unique("kill");
    let path = ledger.path().display().to_string();
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

async fn until_all_is_committed(kafka: &Kafka, group: &str, topic: &str) {
    until("everything to be committed", LIMIT, async || {
        let committed = kafka.committed_offsets(group, topic).await;
        let ends = kafka.end_offsets(topic).await;
        if committed == ends {
            Ok(())
        } else {
            Err(format!("{topic}: {committed:?} of {ends:?}"))
        }
    })
    .await;
}

/// How often a message was received, its attempts that ran, and how often its record has answered.
fn counts<'a>(entries: impl Iterator<Item = &'a Entry>, origin: &str) -> (usize, Vec<u32>, usize) {
    let mut received = 0;
    let mut ran = Vec::new();
    let mut answered = 0;
    for entry in entries {
        match &entry.what {
            Occurrence::Received { origin: of, .. } if *of == origin => received += 1,
            Occurrence::Begun {
                origin: of,
                attempt,
                ..
            } if *of == origin => ran.push(*attempt),
            Occurrence::Duplicate { origin: of, .. } if *of == origin => answered += 1,
            _ => {}
        }
    }
    (received, ran, answered)
}

// invariant: retry-topic
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_between_the_copy_and_the_ack_leaves_one_effect() {
    let stage = Stage::with(0).await;
    let folder = tempfile::tempdir().unwrap();
    let dead = stage.kafka.new_topic("dead", 1).await;
    let store = (StoreKind::Redis, stage.redis.url());
    let mut settings = WorkerSettings::new(
        store,
        &stage.kafka,
        (stage.topic.clone(), dead),
        folder.path(),
    );
    settings.retries = Some((Duration::from_secs(1), stage.later.clone()));
    let worker = |traps: &[Trap]| {
        Zombie::start(
            PathBuf::from(env!("CARGO_BIN_EXE_fire_worker")),
            &settings,
            traps,
        )
    };
    stage
        .kafka
        .produce(
            &stage.topic,
            [Record::new(format!(
                r#"{{"order":{FAILS_ONCE},"amount":1}}"#
            ))],
        )
        .await;

    // Its first ack is the one behind the copy.
    let mut killed = worker(&[Trap::Stop(Point::AckBefore)]);
    killed.until_stopped(LIMIT).await;
    assert_eq!(
        stage.kafka.read_all(&stage.later).await.len(),
        1,
        "its copy waits"
    );
    killed.kill();
    let committed = stage
        .kafka
        .committed_offsets(&settings.group, &stage.topic)
        .await;
    assert!(committed.get(&0).is_none_or(|at| *at == 0), "{committed:?}");

    let mut other = worker(&[]);
    let later_group = format!("{}.{}", settings.group, stage.later);
    for (group, topic) in [
        (&settings.group, &stage.topic),
        (&later_group, &stage.later),
    ] {
        until_all_is_committed(&stage.kafka, group, topic).await;
    }
    other.stop().await;
    let origin = format!("{}/0@0", stage.topic);
    let history = History::open(&settings.history).unwrap().read().unwrap();
    let of_other = history.iter().filter(|entry| entry.pid == other.id());
    // The record counts the attempt of the process that was killed, so the next one is the second,
    // and succeeds.
    assert_eq!(
        counts(of_other, &origin),
        (2, vec![2], 1),
        "the message and its copy: one effect, one answer"
    );
    assert_eq!(
        Ledger::open(&settings.ledger)
            .counts()
            .into_values()
            .collect::<Vec<_>>(),
        [1],
        "one effect"
    );
}
