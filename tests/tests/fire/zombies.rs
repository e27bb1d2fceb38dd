//! A process that is stopped past its lease and its session, and then goes on: between every two steps of a message.
//!
//! Meanwhile another one takes over and finishes. The broker would accept a commit of the first one, right after it
//! has joined again: so what keeps it from acknowledging is oncegate alone.

use std::path::PathBuf;
use std::time::Duration;

use oncegate_tests::fire::{History, POINTS, Point, Sink, StoreKind, What, WorkerSettings, Zombie};
use oncegate_tests::{Kafka, Ledger, Record, Redis, unique, until};

/// The longest wait for anything: a takeover needs a session and a lease.
const LIMIT: Duration = Duration::from_secs(90);
/// The order that the first worker is stopped in.
const ORDER: &str = "1/1";

struct Scene {
    kafka: Kafka,
    settings: WorkerSettings,
    sinks: [Sink; 2],
    _folder: tempfile::TempDir,
}

impl Scene {
    async fn new() -> Self {
        let (kafka, redis) = (Kafka::shared().await, Redis::shared().await);
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let settings = WorkerSettings {
            store: StoreKind::Redis,
            address: redis.url().to_owned(),
            scope: unique("zombie"),
            brokers: kafka.bootstrap().to_owned(),
            group: unique("zombie"),
            topic: kafka.new_topic("zombie", 1).await,
            dead_topic: kafka.new_topic("zombie-dead", 1).await,
            ledger: file("ledger"),
            history: file("history"),
            sinks: vec![file("checks.db"), file("believes.db")],
        };
        let sinks = [Sink::open(file("checks.db")), Sink::open(file("believes.db"))];
        Self { kafka, settings, sinks, _folder: folder }
    }

    async fn produce(&self, orders: std::ops::Range<u64>) {
        let record =
            |order| Record::new(format!(r#"{{"order":{order},"amount":1,"n":{order}}}"#)).key("same");
        self.kafka.produce(&self.settings.topic, orders.map(record).collect::<Vec<Record>>()).await;
    }

    fn worker(&self, doom: Option<Point>) -> Zombie {
        Zombie::start(PathBuf::from(env!("CARGO_BIN_EXE_fire_worker")), &self.settings, doom)
    }

    async fn until_committed(&self, end: i64) {
        until("the commit of the last offset", LIMIT, async || {
            let committed = self.kafka.committed_offsets(&self.settings.group, &self.settings.topic).await;
            if committed.get(&0) == Some(&end) { Ok(()) } else { Err(format!("{committed:?}")) }
        })
        .await;
    }
}

async fn zombie_at(point: Point) {
    let scene = Scene::new().await;
    scene.produce(1..2).await;
    let mut zombie = scene.worker(Some(point));
    zombie.until_stopped(LIMIT).await;
    let stopped_at = History::open(&scene.settings.history).read().len();
    let _other = scene.worker(None);
    // The session and the lease of the first one are over before the other one can do this.
    scene.until_committed(1).await;
    let commits_before = scene.commits().await;
    zombie.go_on();
    // It joins again, and takes part: the whole group has met it before this is finished.
    scene.produce(2..40).await;
    scene.until_committed(39).await;
    let commits = scene.commits().await;
    assert!(commits.starts_with(&commits_before), "{point:?}");
    assert!(commits.is_sorted(), "{point:?}: a commit went back: {commits:?}");

    let is_heard = matches!(point, Point::EffectBefore | Point::EffectAfter | Point::CompleteBefore);
    let after = until("what the zombie hears", LIMIT, async || match scene.after(stopped_at, zombie.id()) {
        None if is_heard => Err("nothing yet".to_owned()),
        after => Ok(after),
    });
    let after = after.await;
    let effects = Ledger::open(&scene.settings.ledger).counts()[ORDER];
    let accepted = |sink: &Sink| sink.calls(ORDER).iter().filter(|(_, accepted)| *accepted).count();
    let [checks, believes] = scene.sinks.each_ref().map(accepted);
    println!("{point:?}: {effects} effects; accepted with fences {checks}, without {believes}; {after:?}");
    match point {
        // Nothing was claimed, or the claim was over when it was looked at: the zombie asks, and is told.
        Point::ClaimBefore | Point::ClaimAfter => assert_eq!((effects, after), (1, None), "{point:?}"),
        // It owned the key and has not completed it. Another one did: it is not heard any more.
        Point::EffectBefore | Point::EffectAfter | Point::CompleteBefore => {
            assert_eq!((effects, after), (2, Some("lost")), "{point:?}");
        }
        // Its completion arrived, or the other one's did.
        Point::CompleteSent => assert!(matches!(effects, 1 | 2)),
        Point::CompleteAfter | Point::AckBefore | Point::AckAfter => assert_eq!(effects, 1, "{point:?}"),
    }
    if point == Point::EffectBefore {
        // The same late effect: a system that looks at fences refuses it, one that does not has paid twice.
        let calls = scene.sinks[0].calls(ORDER);
        let [(first, true), (second, false)] = calls[..] else { panic!("{calls:?}") };
        assert!(second < first, "the late one shows the older fence: {calls:?}");
        assert_eq!((checks, believes), (1, 2));
    }
}

impl Scene {
    /// Every commit of the partition, in the broker's order.
    async fn commits(&self) -> Vec<i64> {
        oncegate_tests::fire::commits_of(&self.kafka, &self.settings.group, &self.settings.topic).await
    }

    /// The first word that the stopped worker heard about its completion after it went on: held, lost, or none.
    fn after(&self, line: usize, pid: u32) -> Option<&'static str> {
        let entries = History::open(&self.settings.history).read();
        let (mut completes, mut word, mut finished) = (None, None, false);
        let first = self.first_origin();
        let received = entries.iter().find_map(|entry| match &entry.what {
            What::Received { origin, key: Some(key) } if *origin == first => Some(key),
            _ => None,
        });
        for (number, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.pid == pid) {
            match &entry.what {
                What::Invoke { call, key, op } if op.completes() && Some(key) == received => {
                    completes.get_or_insert(*call);
                }
                What::Ok { call, answer } if completes == Some(*call) => {
                    finished |= answer.is_held();
                    if number >= line {
                        word = Some(if answer.is_held() { "held" } else { "lost" });
                    }
                }
                What::Ok { answer, .. } if answer.is_settled() => finished = true,
                What::Ack { origin, .. } if *origin == first => {
                    assert!(finished, "the zombie acknowledged what it did not know to be finished");
                }
                _ => {}
            }
        }
        word
    }

    fn first_origin(&self) -> String {
        format!("{}/0@0", self.settings.topic)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_stopped_between_any_two_steps_changes_nothing_any_more() {
    // Each has a topic of its own and waits most of the time.
    futures_util::future::join_all(POINTS.map(zombie_at)).await;
}
