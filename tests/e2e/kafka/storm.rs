//! Rebalance storms: members join and leave all the time.
//!
//! `ONCEGATE_STORM_SECONDS` sets how long (default 24). The table it prints is the one in
//! `docs/KAFKA.md`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fastrand::Rng;
use oncegate::source::{Delivery, Source};
use oncegate_testkit::{Kafka, KafkaBroker, Record, unique, until};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{JoinHandle, JoinSet};

use crate::stage::{CLOSE, NEW, QUICK, RANGE, logged, member, place};

/// Members leave by saying so. The sessions are long, so that a busy machine adds no rebalances of
/// its own.
const COOPERATIVE: &[(&str, &str)] = &[QUICK[0], SESSION];
const EAGER: &[(&str, &str)] = &[QUICK[0], SESSION, RANGE[2]];
const SESSION: (&str, &str) = ("session.timeout.ms", "45000");

/// How many commits of a group may come so late that a partition goes back.
const LATE_COMMITS_MOST: usize = 1;
const PARTITIONS: i32 = 12;
const MEMBERS_MAX: usize = 4;
/// A member joins or leaves this often.
const CHANGE_EVERY: Duration = Duration::from_secs(3);
/// How many handlers a member runs at once, and for how long each.
const PERMITS: usize = 8;
const HANDLER_MS: std::ops::Range<u64> = 5..50;
/// How many messages come at once, to each group's topic.
const PRODUCED: usize = 200;
/// Without an effect for so long, the group has stalled.
const STALLED_AFTER: Duration = Duration::from_secs(45);
/// Everything must be done so long after the storm.
const CALM: Duration = Duration::from_secs(120);

/// What the handlers have done, and no member decides: how often, by partition and offset.
#[derive(Debug)]
struct Effects {
    runs: Mutex<BTreeMap<(i32, i64), u32>>,
    last: Mutex<Instant>,
    longest_gap: Mutex<Duration>,
}

impl Effects {
    fn new() -> Self {
        let runs = Mutex::default();
        let last = Mutex::new(Instant::now());
        Self {
            runs,
            last,
            longest_gap: Mutex::default(),
        }
    }

    fn happened(&self, place: (i32, i64)) {
        *self.runs.lock().unwrap().entry(place).or_default() += 1;
        self.moved();
    }

    fn moved(&self) {
        let since = std::mem::replace(&mut *self.last.lock().unwrap(), Instant::now()).elapsed();
        let mut longest = self.longest_gap.lock().unwrap();
        *longest = since.max(*longest);
    }

    fn count(&self) -> usize {
        self.runs.lock().unwrap().len()
    }

    fn twice(&self) -> usize {
        self.runs
            .lock()
            .unwrap()
            .values()
            .map(|runs| *runs as usize - 1)
            .sum()
    }

    /// The first offset of the partition from which something is missing.
    fn first_missing(&self, partition: i32) -> i64 {
        let runs = self.runs.lock().unwrap();
        let offsets = runs
            .range((partition, 0)..=(partition, i64::MAX))
            .map(|((_, offset), _)| *offset);
        (0..)
            .zip(offsets)
            .take_while(|(expected, offset)| expected == offset)
            .count() as i64
    }
}

/// A member that handles what it receives, until it is asked to leave.
struct Worker {
    leave: oneshot::Sender<()>,
    work: JoinHandle<()>,
}

impl Worker {
    async fn join(source: impl Source + 'static, effects: Arc<Effects>) -> Self {
        source
            .open(Arc::new(oncegate::observe::Counters::default()))
            .await
            .expect("opens");
        let (leave, told) = oneshot::channel();
        Self {
            leave,
            work: tokio::spawn(work(source, effects, told)),
        }
    }

    async fn leave(self) {
        self.leave
            .send(())
            .expect("it works until it is asked to leave");
        self.work.await.expect("no panic");
    }
}

async fn work(source: impl Source, effects: Arc<Effects>, mut told: oneshot::Receiver<()>) {
    let permits = Arc::new(Semaphore::new(PERMITS));
    let mut running = JoinSet::new();
    loop {
        let batch = tokio::select! {
            _ = &mut told => break,
            batch = source.receive(PERMITS) => batch.expect("receives").expect("more"),
        };
        for delivery in batch {
            let permit = Arc::clone(&permits).acquire_owned().await.expect("open");
            if delivery.ack_handle.start() {
                let effects = Arc::clone(&effects);
                running.spawn(async move {
                    handle(delivery, &effects).await;
                    drop(permit);
                });
            }
        }
        while running.try_join_next().is_some() {}
    }
    source.close(CLOSE).await.expect("leaves in time");
    running.join_all().await;
}

async fn handle(delivery: Delivery, effects: &Effects) {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(HANDLER_MS))).await;
    effects.happened(place(&delivery.message));
    delivery.ack_handle.ack();
    delivery.ack_handle.stop();
}

/// Another client that reads the committed offsets and the effects, and nothing else of oncegate.
///
/// The client may keep a commit while its coordinator is away, and send it late: rare, and it loses
/// nothing.
async fn watch(
    kafka: Kafka,
    group: String,
    topic: String,
    effects: Arc<Effects>,
    over: Arc<AtomicBool>,
) -> usize {
    let mut before = BTreeMap::<i32, i64>::new();
    let mut looks = 0;
    let mut late = 0;
    while !over.load(Ordering::Acquire) {
        let committed = kafka.committed_offsets(&group, &topic).await;
        for (partition, offset) in &committed {
            let missing = effects.first_missing(*partition);
            assert!(
                *offset <= missing,
                "{group}: {partition} is committed up to {offset}, {missing} is not done"
            );
            let last = before.get(partition).copied().unwrap_or_default();
            if *offset < last {
                late += 1;
                println!("{group}: {partition} went back from {last} to {offset}");
                assert!(
                    late <= LATE_COMMITS_MOST,
                    "{group}: commits go back again and again"
                );
            }
        }
        before.extend(committed);
        looks += 1;
        let stalled = effects.last.lock().unwrap().elapsed();
        assert!(
            stalled < STALLED_AFTER,
            "{group}: nothing has happened for {stalled:?}"
        );
    }
    looks
}

/// What a storm has come to.
#[derive(Debug)]
struct Outcome {
    messages: usize,
    changes: usize,
    twice: usize,
    longest_gap: Duration,
}

async fn storm(
    kafka: &Kafka,
    properties: &'static [(&str, &str)],
    drain: Duration,
    length: Duration,
    seed: u64,
) -> Outcome {
    let mut rng = Rng::with_seed(seed);
    let topic = kafka.new_topic("storm", PARTITIONS).await;
    let group = unique("storm");
    let effects = Arc::new(Effects::new());
    let over = Arc::new(AtomicBool::new(false));
    let watcher = tokio::spawn(watch(
        kafka.clone(),
        group.clone(),
        topic.clone(),
        Arc::clone(&effects),
        Arc::clone(&over),
    ));
    let produced = tokio::spawn(produce(kafka.clone(), topic.clone(), length));
    let join = async || {
        let source = member(kafka, &group, &topic, properties).drain_timeout(drain);
        Worker::join(source, Arc::clone(&effects)).await
    };

    let mut members = vec![join().await, join().await];
    let mut changes = 2;
    let mut clock = tokio::time::interval(CHANGE_EVERY);
    clock.tick().await;
    let end = Instant::now() + length;
    while Instant::now() < end {
        clock.tick().await;
        if members.len() < MEMBERS_MAX && (members.len() == 1 || rng.bool()) {
            members.push(join().await);
        } else {
            members
                .swap_remove(rng.usize(..members.len()))
                .leave()
                .await;
        }
        changes += 1;
    }
    let messages = produced.await.expect("no panic");
    let done = async || match effects.count() {
        count if count == messages => Ok(()),
        count => Err(format!("{count} of {messages} messages")),
    };
    until("every effect", CALM, done).await;
    effects.moved();
    // What ran on a partition that was given away meanwhile comes again before it counts.
    let ends = kafka.end_offsets(&topic).await;
    let committed = async || match kafka.committed_offsets(&group, &topic).await {
        committed if committed == ends => Ok(()),
        committed => Err(format!("{committed:?} of {ends:?}")),
    };
    until("every commit", CALM, committed).await;
    for member in members {
        member.leave().await;
    }
    over.store(true, Ordering::Release);
    let looks = watcher.await.expect("what was committed is right");
    assert!(looks > 10, "the watcher has hardly looked: {looks}");
    let longest_gap = *effects.longest_gap.lock().unwrap();
    Outcome {
        messages,
        changes,
        twice: effects.twice(),
        longest_gap,
    }
}

async fn produce(kafka: Kafka, topic: String, length: Duration) -> usize {
    let mut count = 0;
    let end = Instant::now() + length;
    let mut clock = tokio::time::interval(Duration::from_millis(100));
    while Instant::now() < end {
        clock.tick().await;
        let records = (0..PRODUCED).map(|n| {
            let partition = (count + n) % PARTITIONS as usize;
            Record::new((count + n).to_string()).partition(partition as i32)
        });
        count += kafka
            .produce(&topic, records.collect::<Vec<_>>())
            .await
            .len();
    }
    count
}

// invariant: rebalance-storm
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_committed_too_early_or_stalls_in_a_storm() {
    let seconds =
        std::env::var("ONCEGATE_STORM_SECONDS").map_or(24, |seconds| seconds.parse().unwrap());
    let length = Duration::from_secs(seconds);
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    logged();
    // A broker that is starved of its processor must not be taken for dead: a coordinator that goes
    // away in between lets a commit arrive late, which is another test's business.
    let kafka = KafkaBroker::start_with(&["broker.session.timeout.ms=30000"]).await;
    let drained = |properties| storm(&kafka, properties, Duration::from_secs(10), length, seed);
    let undrained = |properties| storm(&kafka, properties, Duration::ZERO, length, seed);
    let outcomes = tokio::join!(
        drained(COOPERATIVE),
        undrained(COOPERATIVE),
        drained(EAGER),
        undrained(EAGER),
        drained(NEW),
        undrained(NEW)
    );
    let outcomes = [
        ("cooperative, drained", outcomes.0),
        ("cooperative, not drained", outcomes.1),
        ("eager, drained", outcomes.2),
        ("eager, not drained", outcomes.3),
        ("new protocol, drained", outcomes.4),
        ("new protocol, not drained", outcomes.5),
    ];
    println!(
        "{:<28} {:>9} {:>8} {:>6} {:>11} {:>12}",
        "group", "messages", "changes", "twice", "per change", "longest gap"
    );
    for (
        group,
        Outcome {
            messages,
            changes,
            twice,
            longest_gap,
        },
    ) in &outcomes
    {
        let per_change = *twice as f64 / *changes as f64;
        println!(
            "{group:<28} {messages:>9} {changes:>8} {twice:>6} {per_change:>11.1} {longest_gap:>12.1?}"
        );
    }
}
