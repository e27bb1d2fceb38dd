//! A process that is stopped past its lease and its session, and then goes on: between every two
//! steps of a message.
//!
//! Meanwhile another one takes over and finishes. The broker would accept a commit of the first
//! one, right after it has joined again: so what keeps it from acknowledging is oncegate alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use oncegate_testkit::fire::{
    Entry, History, Occurrence, POINTS, Point, Protocol, SESSION, Sink, StoreKind, Trap,
    WorkerSettings, Zombie,
};
use oncegate_testkit::{Kafka, Ledger, Record, Redis, until};

/// The longest wait for anything: a takeover needs a session and a lease.
const LIMIT: Duration = Duration::from_secs(240);
/// How long the poll thread of a worker may be away, and is away.
const POLL_INTERVAL: Duration = Duration::from_secs(4);
/// Ten times as long as librdkafka takes to notice a missing poll: nothing shows from outside that
/// it has.
const NOTICED_AFTER: Duration = Duration::from_secs(5);
/// The order that the first worker is stopped in.
const ORDER: &str = "1/1";

struct Scene {
    kafka: Kafka,
    settings: WorkerSettings,
    sinks: [Sink; 2],
    _folder: tempfile::TempDir,
}

impl Scene {
    async fn with(partitions: i32) -> Self {
        let kafka = Kafka::shared().await;
        let redis = Redis::shared().await;
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let topics = (
            kafka.new_topic("zombie", partitions).await,
            kafka.new_topic("zombie-dead", 1).await,
        );
        let mut settings = WorkerSettings::new(
            (StoreKind::Redis, redis.url()),
            &kafka,
            topics,
            folder.path(),
        );
        settings.sinks = vec![file("checks.db"), file("believes.db")];
        let sinks = [
            Sink::open(file("checks.db")),
            Sink::open(file("believes.db")),
        ];
        Self {
            kafka,
            settings,
            sinks,
            _folder: folder,
        }
    }

    /// Orders for this partition.
    async fn produce(&self, partition: i32, orders: std::ops::Range<u64>) {
        let record = |order| {
            Record::new(format!(r#"{{"order":{order},"amount":1,"n":{order}}}"#))
                .partition(partition)
        };
        self.kafka
            .produce(
                &self.settings.topic,
                orders.map(record).collect::<Vec<Record>>(),
            )
            .await;
    }

    fn worker(&self, traps: &[Trap]) -> Zombie {
        Zombie::start(
            PathBuf::from(env!("CARGO_BIN_EXE_fire_worker")),
            &self.settings,
            traps,
        )
    }

    fn history(&self) -> Vec<Entry> {
        History::open(&self.settings.history)
            .unwrap()
            .read()
            .unwrap()
    }

    /// Waits until this worker has begun a message; `false` when it has stopped before, as after
    /// the end of its session because the machine is busy.
    async fn begins(&self, zombie: &Zombie) -> bool {
        let begun = |entry: &Entry| {
            entry.pid == zombie.id() && matches!(entry.what, Occurrence::Begun { .. })
        };
        until("the handler", LIMIT, async || {
            if self.history().iter().any(begun) {
                Ok(true)
            } else if zombie.is_stopped() {
                Ok(false)
            } else {
                Err("it has not begun".to_owned())
            }
        })
        .await
    }

    /// Waits until everything is committed.
    async fn until_committed(&self) {
        let ends = self.kafka.end_offsets(&self.settings.topic).await;
        until("the commits of the last offsets", LIMIT, async || {
            let committed = self
                .kafka
                .committed_offsets(&self.settings.group, &self.settings.topic)
                .await;
            let left = |(partition, end): &(&i32, &i64)| {
                committed.get(partition).copied().unwrap_or_default() != **end
            };
            if ends.iter().any(|one| left(&one)) {
                Err(format!("{committed:?} of {ends:?}"))
            } else {
                Ok(())
            }
        })
        .await;
    }

    /// No commit went back since `before`.
    async fn went_on(&self, before: &BTreeMap<i32, Vec<i64>>, run: &str) {
        for (partition, commits) in self.commits().await {
            let before = before.get(&partition).map_or(&[][..], Vec::as_slice);
            assert!(
                commits.starts_with(before),
                "{run}: {commits:?} after {before:?}"
            );
            assert!(
                commits.is_sorted(),
                "{run}: a commit of partition {partition} went back: {commits:?}"
            );
        }
    }

    /// The late effect reached both downstream systems; the one that checks fencing tokens has
    /// refused it.
    fn refused_by_fencing_token(&self) {
        let calls = self.sinks[0].calls(ORDER);
        let [(first, true), (second, false)] = calls[..] else {
            panic!("{calls:?}")
        };
        assert!(
            second < first,
            "the late one shows the older fencing token: {calls:?}"
        );
        assert_eq!(self.accepted(), [1, 2]);
    }

    /// How many payments of the order each downstream system has accepted.
    fn accepted(&self) -> [usize; 2] {
        self.sinks.each_ref().map(|sink| {
            sink.calls(ORDER)
                .iter()
                .filter(|(_, accepted)| *accepted)
                .count()
        })
    }
}

async fn zombie_at(point: Point) {
    let scene = Scene::with(1).await;
    scene.produce(0, 1..2).await;
    let mut zombie = scene.worker(&[Trap::Stop(point)]);
    zombie.until_stopped(LIMIT).await;
    let stopped_at = scene.history().len();
    let _other = scene.worker(&[]);
    // The session and the lease of the first one are over before the other one can do this.
    scene.until_committed().await;
    let commits_before = scene.commits().await;
    zombie.go_on();
    // It joins again, and takes part: the whole group has met it before this is finished.
    scene.produce(0, 2..40).await;
    scene.until_committed().await;
    scene.went_on(&commits_before, &format!("{point:?}")).await;

    let is_heard = matches!(
        point,
        Point::EffectBefore | Point::EffectAfter | Point::CompleteBefore
    );
    let after = until("the zombie's reply", LIMIT, async || {
        match scene.after(stopped_at, zombie.id()) {
            None if is_heard => Err("nothing yet".to_owned()),
            after => Ok(after),
        }
    });
    let after = after.await;
    let effects = Ledger::open(&scene.settings.ledger).counts()[ORDER];
    let [checks, believes] = scene.accepted();
    println!(
        "{point:?}: {effects} effects; accepted with fencing tokens {checks}, without {believes}; {after:?}"
    );
    match point {
        // Nothing was claimed, or the lease was over: the zombie claims, and gets the current
        // state.
        Point::ClaimBefore | Point::ClaimAfter => {
            assert_eq!((effects, after), (1, None), "{point:?}");
        }
        // It owned the key and has not completed it. Another worker did: the zombie's completion is
        // refused.
        Point::EffectBefore | Point::EffectAfter | Point::CompleteBefore => {
            assert_eq!((effects, after), (2, Some("lost")), "{point:?}");
        }
        // Its completion arrived, or the other one's did.
        Point::CompleteSent => assert!(matches!(effects, 1 | 2)),
        Point::CompleteAfter | Point::AckBefore | Point::AckAfter => {
            assert_eq!(effects, 1, "{point:?}");
        }
        Point::Revoke => unreachable!("it is no step of a message"),
    }
    if point == Point::EffectBefore {
        scene.refused_by_fencing_token();
    }
}

/// The process is stopped while its poll thread is inside a revoke. The thread is held there until
/// the client has noticed that the poll interval is exceeded. One handler is in the middle of its
/// message.
async fn zombie_past_its_poll_interval(protocol: Protocol) {
    let mut scene = Scene::with(2).await;
    scene.settings.protocol = protocol;
    scene.settings.poll_interval = Some(POLL_INTERVAL);
    if protocol == Protocol::New {
        scene
            .kafka
            .set_session(&scene.settings.group, SESSION)
            .await;
    }
    scene.produce(0, 1..2).await;
    let traps = [Trap::Hold(Point::EffectBefore), Trap::Stop(Point::Revoke)];
    let mut zombie = loop {
        let zombie = scene.worker(&traps);
        if scene.begins(&zombie).await {
            break zombie;
        }
    };
    let mut other = scene.worker(&[]);
    zombie.until_stopped(LIMIT).await;
    let stopped_at = scene.history().len();
    // The fault itself: it is stopped for so long.
    tokio::time::sleep(POLL_INTERVAL).await;
    scene.until_committed().await;
    let commits_before = scene.commits().await;
    zombie.wake();
    tokio::time::sleep(NOTICED_AFTER).await;
    zombie.go_on();

    scene.produce(0, 2..40).await;
    scene.produce(1, 41..80).await;
    scene.until_committed().await;
    let mut next = 81;
    until("the zombie to take part again", LIMIT, async || {
        scene.produce(0, next..next + 1).await;
        scene.produce(1, next + 1..next + 2).await;
        next += 2;
        let acked = |entry: &Entry| {
            entry.pid == zombie.id()
                && matches!(&entry.what, Occurrence::Ack { origin, .. } if *origin != scene.first_origin())
        };
        if scene.history()[stopped_at..].iter().any(acked) {
            Ok(())
        } else {
            Err("it has finished nothing".to_owned())
        }
    })
    .await;
    zombie.stop().await;
    scene.until_committed().await;
    other.stop().await;
    let run = format!("{protocol:?}");
    scene.went_on(&commits_before, &run).await;
    assert_eq!(scene.after(stopped_at, zombie.id()), Some("lost"), "{run}");
    scene.refused_by_fencing_token();
    let replaced = scene.counted(zombie.id(), "members_replaced poll_interval");
    println!("{run}: replaced {replaced} times");
    assert_eq!(
        replaced > 0,
        protocol == Protocol::New,
        "{run}: only a member of the new protocol ends because of it"
    );
}

impl Scene {
    /// Every commit of each partition, in the broker's order.
    async fn commits(&self) -> BTreeMap<i32, Vec<i64>> {
        oncegate_testkit::fire::commits_of(&self.kafka, &self.settings.group, &self.settings.topic)
            .await
    }

    /// The first reply about its completion that the stopped worker got after it went on: held,
    /// lost, or none.
    fn after(&self, line: usize, pid: u32) -> Option<&'static str> {
        let entries = self.history();
        // An answer that came too late to be waited for is asked for again.
        let mut completes = BTreeSet::new();
        let mut word = None;
        let mut finished = false;
        let first = self.first_origin();
        let received = entries.iter().find_map(|entry| match &entry.what {
            Occurrence::Received {
                origin,
                key: Some(key),
            } if *origin == first => Some(key),
            _ => None,
        });
        for (number, entry) in entries
            .iter()
            .enumerate()
            .filter(|(_, entry)| entry.pid == pid)
        {
            match &entry.what {
                Occurrence::Invoke { call, key, op } if op.completes() && Some(key) == received => {
                    completes.insert(*call);
                }
                Occurrence::Ok { call, answer } if completes.contains(call) => {
                    finished |= answer.is_held();
                    if number >= line {
                        word.get_or_insert(if answer.is_held() { "held" } else { "lost" });
                    }
                }
                Occurrence::Ok { answer, .. } if answer.is_settled() => finished = true,
                Occurrence::Ack { origin, .. } if *origin == first => {
                    let told = || entries.iter().filter(|entry| entry.pid == pid).take(100);
                    assert!(
                        finished,
                        "the zombie acknowledged what it did not know to be finished: {:#?}",
                        told().collect::<Vec<_>>()
                    );
                }
                _ => {}
            }
        }
        word
    }

    /// What a worker that has ended well has counted.
    fn counted(&self, pid: u32, name: &str) -> u64 {
        let counts = self
            .history()
            .into_iter()
            .find_map(|entry| match entry.what {
                Occurrence::Counted { counts } if entry.pid == pid => Some(counts),
                _ => None,
            });
        counts
            .expect("it has ended well")
            .get(name)
            .copied()
            .unwrap_or_default()
    }

    fn first_origin(&self) -> String {
        format!("{}/0@0", self.settings.topic)
    }
}

// invariant: stopped-process
#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_stopped_between_any_two_steps_changes_nothing_more() {
    // Each has a topic of its own and waits most of the time.
    futures_util::future::join_all(POINTS.map(zombie_at)).await;
}

// invariant: stopped-process
#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_past_its_poll_interval_commits_nothing_of_before() {
    // As above.
    tokio::join!(
        zombie_past_its_poll_interval(Protocol::Classic),
        zombie_past_its_poll_interval(Protocol::New)
    );
}
