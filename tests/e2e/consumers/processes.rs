//! Real worker processes on a real broker: how they stop, what a crash costs other messages, and
//! what a worker that holds a key costs the others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use oncegate_testkit::{Effect, Kafka, Ledger, Process, Record, Redis, process, unique, until};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(240);

/// A topic with payments, a scope, and the ledger of all workers that charge them.
struct Stage {
    kafka: Kafka,
    redis: Redis,
    topic: String,
    dead: String,
    scope: String,
    ledger: Ledger,
    _folder: TempDir,
}

impl Stage {
    async fn with(partitions: i32, payments: impl IntoIterator<Item = String>) -> Self {
        let kafka = Kafka::shared().await;
        let redis = Redis::shared().await;
        let topic = kafka.new_topic("processes", partitions).await;
        let dead = kafka.new_topic("dead", 1).await;
        let record = |(n, payment): (usize, String)| {
            Record::new(payment).partition(i32::try_from(n).unwrap() % partitions)
        };
        kafka
            .produce(
                &topic,
                payments
                    .into_iter()
                    .enumerate()
                    .map(record)
                    .collect::<Vec<Record>>(),
            )
            .await;
        let folder = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(folder.path().join("ledger"));
        Self {
            kafka,
            redis,
            topic,
            dead,
            scope: unique("processes"),
            ledger,
            _folder: folder,
        }
    }

    fn start(&self, group: &str) -> Process {
        let path = self.ledger.path().display().to_string();
        let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_worker"), "KILL");
        command.args([
            self.redis.url(),
            &self.scope,
            &path,
            "kafka",
            self.kafka.bootstrap(),
            &self.topic,
            group,
        ]);
        command.arg(&self.dead);
        Process::spawn("worker", command)
    }

    async fn committed(&self, group: &str) -> i64 {
        self.kafka
            .committed_offsets(group, &self.topic)
            .await
            .values()
            .sum()
    }

    async fn until_committed(&self, group: &str, offset: i64) {
        until("the commits", LIMIT, async || {
            match self.committed(group).await {
                committed if committed >= offset => Ok(()),
                committed => Err(format!(
                    "{committed} of {offset} are committed; effects: {:?}",
                    self.ledger.counts()
                )),
            }
        })
        .await;
    }

    async fn until_effects(&self, what: &str, so: impl Fn(&[Effect]) -> bool + Send + Sync) {
        until(what, LIMIT, async || match self.ledger.read() {
            effects if so(&effects) => Ok(()),
            effects => Err(format!("{} effects", effects.len())),
        })
        .await;
    }
}

fn payment(order: impl std::fmt::Display, how: &str) -> String {
    format!(r#"{{"order":"{order}","how":"{how}"}}"#)
}

// invariant: delivered-after-clean-stop
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_delivered_again_after_a_clean_stop() {
    const PAYMENTS: usize = 400;
    let stage = Stage::with(4, (0..PAYMENTS).map(|n| payment(n, "usual"))).await;
    let mut effects = 0;
    let mut stops = 0;
    while effects < PAYMENTS {
        let mut worker = stage.start(&stage.scope);
        let enough = (effects + 60).min(PAYMENTS);
        stage
            .until_effects("some effects", |now| now.len() >= enough)
            .await;
        worker.signal("TERM");
        let status = worker.end_within(LIMIT).await;
        assert!(status.success(), "{status}");
        effects = stage.ledger.read().len();
        // What is beyond the committed offsets is delivered again: nothing of it has had an effect.
        assert_eq!(
            usize::try_from(stage.committed(&stage.scope).await).unwrap(),
            effects
        );
        stops += 1;
    }
    assert!(stage.ledger.counts().values().all(|count| *count == 1));
    println!("{stops} stops by SIGTERM, {effects} messages, delivered again: 0");
}

// invariant: stop-without-end
#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_the_process_and_another_takes_over() {
    let stage = Stage::with(1, [payment("usual", "usual"), payment("held", "hold")]).await;
    let mut worker = stage.start(&stage.scope);
    let both = |effects: &[Effect]| effects.len() >= 2;
    stage.until_effects("the handler that holds", both).await;
    worker.signal("TERM");
    // Its handler does not return, and it may take ten minutes to stop; whichever signal comes
    // second ends that.
    until("the worker's end", LIMIT, async || {
        match worker.try_wait() {
            Some(_) => Ok(()),
            None => {
                worker.signal("TERM");
                Err("it runs".to_owned())
            }
        }
    })
    .await;
    let _other = stage.start(&stage.scope);
    stage.until_committed(&stage.scope, 2).await;
    assert_eq!(
        stage.ledger.counts()["start held 1"],
        2,
        "it runs again, recovered, and the stop has cost no attempt"
    );
}

// invariant: process-ends-with-message
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_ends_its_process_runs_alone_then_is_buried() {
    const NEIGHBOURS: usize = 160;
    let slow = |n: usize| {
        payment(
            format_args!("neighbour-{n}"),
            if n == NEIGHBOURS / 2 { "abort" } else { "slow" },
        )
    };
    let stage = Stage::with(1, (0..NEIGHBOURS).map(slow)).await;
    let everything = i64::try_from(NEIGHBOURS).unwrap();
    let mut worker = stage.start(&stage.scope);
    let mut deaths = 0_u32;
    until("the end of all", LIMIT, async || {
        if worker.try_wait().is_some() {
            deaths += 1;
            worker = stage.start(&stage.scope);
        }
        match stage.committed(&stage.scope).await {
            committed if committed == everything => Ok(()),
            committed => Err(format!("{committed} are committed after {deaths} deaths")),
        }
    })
    .await;
    assert_eq!(deaths, 5, "as many attempts as it gets");
    assert_eq!(
        stage.kafka.read_all(&stage.dead).await.len(),
        1,
        "it is with the dead letters"
    );
    let killer = format!("neighbour-{}", NEIGHBOURS / 2);
    let effects = stage.ledger.read();
    for alone in 3..=5 {
        let start = format!("start {killer} {alone}");
        let at = effects
            .iter()
            .position(|effect| effect.effect == start)
            .unwrap();
        let beside = running_at(&effects, at);
        assert!(beside.is_empty(), "attempt {alone} ran beside {beside:?}");
        let is_left = effects[at + 1..]
            .iter()
            .any(|effect| effect.effect.starts_with("start neighbour-"));
        assert!(
            is_left || alone > 3,
            "there was no other message left to run beside"
        );
    }
    let counts = stage.ledger.counts();
    for n in (0..NEIGHBOURS).filter(|n| *n != NEIGHBOURS / 2) {
        // A crash between its effect and its completion charges it again: the attempt is marked as
        // recovered.
        assert!(
            counts[&format!("neighbour-{n}")] >= 1,
            "each of the others was charged"
        );
        assert!(
            !counts.contains_key(&format!("start neighbour-{n} 4")),
            "a death that it had no part in cost an attempt"
        );
    }
}

/// Which handlers of the same process had begun and not ended when this one began, and which began
/// after it.
fn running_at(effects: &[Effect], at: usize) -> BTreeSet<String> {
    let mut running = BTreeMap::new();
    let of_process = effects
        .iter()
        .enumerate()
        .filter(|(_, effect)| effect.pid == effects[at].pid);
    for (n, effect) in of_process.filter(|(n, _)| *n != at) {
        match effect
            .effect
            .strip_prefix("start ")
            .and_then(|start| start.split_once(' '))
        {
            Some((order, _)) => _ = running.insert(order.to_owned(), n),
            None if n < at => _ = running.remove(&effect.effect),
            None => {}
        }
    }
    running.into_keys().collect()
}

// invariant: other-process-holds-key
#[tokio::test(flavor = "multi_thread")]
async fn a_key_held_elsewhere_blocks_no_other_and_is_taken_over() {
    const PAYMENTS: i64 = 40;
    let how = |n: i64| if n == 10 { "hold" } else { "usual" };
    let stage = Stage::with(1, (0..PAYMENTS).map(|n| payment(n, how(n)))).await;
    // Two groups: each gets every message, and they share the scope.
    let one = unique("one");
    let two = unique("two");
    let mut holder = stage.start(&one);
    stage
        .until_effects("the handler that holds", |effects| {
            effects.iter().any(|effect| effect.effect == "start 10 1")
        })
        .await;
    let _other = stage.start(&two);
    // The other keys go on, and the offset waits for this one.
    stage.until_committed(&two, 10).await;
    stage
        .until_effects("all but one", |effects| {
            effects.len() >= usize::try_from(PAYMENTS).unwrap()
        })
        .await;
    assert_eq!(
        stage.committed(&two).await,
        10,
        "the committed offset waits for the key that is busy elsewhere"
    );
    assert!(
        !stage.ledger.counts().contains_key("start 10 2"),
        "a live owner keeps its key"
    );
    holder.kill();
    stage.until_committed(&two, PAYMENTS).await;
    let counts = stage.ledger.counts();
    assert_eq!(
        (counts["start 10 1"], counts["start 10 2"], counts["10"]),
        (1, 1, 1)
    );
}
