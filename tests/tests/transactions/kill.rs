//! Workers that race on the same payments: killed between every two statements of a transaction and at random,
//! and stopped there.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use oncegate_tests::process::{bound_to_parent, is_stopped};
use oncegate_tests::{CLIENTS, Client, Process};
use tokio::task::JoinSet;

use crate::place::{Place, key_of};

/// How many workers are to be killed, in all: `ONCEGATE_KILLS`.
const DEFAULT_KILLS: u64 = 240;
/// How many workers of a client run at a time.
const WORKERS: usize = 4;
/// How many workers get the same payments.
const RIVALS: u64 = 3;
const PAYMENTS: i64 = 5;
/// The most statements of a connection that are worth a kill, and the steps of each.
const STATEMENTS: u64 = 9;
const STEPS: u64 = 3;
/// The longest that a worker may take, also while others keep the payments it waits for.
const LIMIT: Duration = Duration::from_secs(120);
/// How long a stopped worker sleeps: longer than its lease.
const STOPPED: Duration = Duration::from_millis(1_500);

/// What happens to a worker.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// It aborts at a point of its transactions.
    Dies { point: u64, passes: u64 },
    /// It is killed some time after it was started.
    Killed { after: Duration },
    /// It is stopped at a point until its lease is over, and goes on.
    Stops { point: u64, passes: u64 },
    /// Nothing.
    Lives,
}

/// The place, and what has happened there.
struct Scene {
    place: Place,
    seed: u64,
    started: AtomicU64,
    killed: AtomicU64,
    stopped: AtomicU64,
    /// The points at which one has died.
    points: Mutex<BTreeSet<u64>>,
}

impl Scene {
    async fn new(client: Client, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            place: Place::journaled(client).await,
            seed,
            started: AtomicU64::new(0),
            killed: AtomicU64::new(0),
            stopped: AtomicU64::new(0),
            points: Mutex::default(),
        })
    }

    /// What happens to the worker of this number: every point in turn, and every sixth time chance.
    fn fate(&self, number: u64) -> Fate {
        let mut rng = Rng::with_seed(self.seed ^ number);
        let passes = match self.place.till.client {
            // There the point is every step of every statement.
            Client::Sqlite => 1 + number % 60,
            _ => rng.u64(1..=3),
        };
        let point = number % (STATEMENTS * STEPS);
        match number % 6 {
            4 => Fate::Killed { after: Duration::from_millis(rng.u64(20..700)) },
            5 => Fate::Stops { point, passes },
            _ => Fate::Dies { point, passes },
        }
    }

    fn spawn(&self, ids: std::ops::Range<i64>, fate: Fate) -> Process {
        let (point, passes, action) = match fate {
            Fate::Dies { point, passes } => (point, passes, "kill"),
            Fate::Stops { point, passes } => (point, passes, "stop"),
            Fate::Killed { .. } | Fate::Lives => (0, 0, "kill"),
        };
        let till = &self.place.till;
        let ids: Vec<String> = ids.map(|id| id.to_string()).collect();
        let mut command = bound_to_parent(env!("CARGO_BIN_EXE_payer"), "KILL");
        command
            .args([&till.client.to_string(), &till.url, &till.table, &self.place.scope, &ids.join(",")])
            .args([point / STEPS, point % STEPS, passes].map(|number| number.to_string()))
            .arg(action);
        Process::spawn("payer", command)
    }

    /// Starts the next worker, and kills it at its point.
    async fn run_one(&self) {
        let number = self.started.fetch_add(1, SeqCst);
        let first = i64::try_from(number / RIVALS).unwrap() * PAYMENTS;
        let fate = self.fate(number);
        let mut worker = self.spawn(first..first + PAYMENTS, fate);
        let status = match fate {
            Fate::Killed { after } => {
                if let Ok(status) = tokio::time::timeout(after, worker.end()).await {
                    status
                } else {
                    worker.kill();
                    self.killed.fetch_add(1, SeqCst);
                    return;
                }
            }
            Fate::Stops { .. } => {
                while worker.try_wait().is_none() && !is_stopped(worker.id()) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                if worker.try_wait().is_none() {
                    self.stopped.fetch_add(1, SeqCst);
                    tokio::time::sleep(STOPPED).await;
                    worker.signal("CONT");
                }
                worker.end_within(LIMIT).await
            }
            Fate::Dies { .. } | Fate::Lives => worker.end_within(LIMIT).await,
        };
        let aborted = status.signal().is_some();
        assert!(aborted || status.success(), "seed {}: {fate:?}: {status}", self.seed);
        self.killed.fetch_add(u64::from(aborted), SeqCst);
        if let (true, Fate::Dies { point, passes }) = (aborted, fate) {
            let on_a_file = self.place.till.client == Client::Sqlite;
            self.points.lock().unwrap().insert(if on_a_file { passes } else { point });
        }
    }

    /// Checks that one run has completed, the one whose charge was committed, and that no killed run is recorded as
    /// completed.
    async fn check_journal(&self, id: i64, attempt: i32) {
        let entries = self.place.history(&key_of(&self.place.scope, id)).await;
        let of = |event: &str| entries.iter().filter(|entry| entry.event == event).collect::<Vec<_>>();
        let (claimed, completed) = (of("claimed"), of("completed"));
        let told = [completed.len(), 1] == [1, claimed.len().min(1)]
            && completed[0].attempt == u32::try_from(attempt).ok()
            && completed[0].run == claimed[claimed.len() - 1].run
            && entries.iter().position(|entry| entry == completed[0]) == Some(entries.len() - 1);
        assert!(told, "seed {}, {}, {id}: {entries:#?}", self.seed, self.place.till.client);
    }

    /// Kills workers until it is enough, and lets a last one finish.
    async fn run(self: Arc<Self>, kills: u64) {
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            let scene = Arc::clone(&self);
            workers.spawn(async move {
                while scene.killed.load(SeqCst) < kills {
                    scene.run_one().await;
                }
            });
        }
        while let Some(worker) = workers.join_next().await {
            worker.unwrap();
        }
        let (seed, client) = (self.seed, self.place.till.client);
        let last = i64::try_from(self.started.load(SeqCst).div_ceil(RIVALS)).unwrap() * PAYMENTS;
        let status = self.spawn(0..last, Fate::Lives).end_within(LIMIT).await;
        assert!(status.success(), "seed {seed}, {client}: {status}");
        let charges = self.place.till.charges().await;
        let wrong: Vec<_> = charges.iter().filter(|(_, attempts)| attempts.len() != 1).collect();
        assert!(wrong.is_empty(), "seed {seed}, {client}: charged more than once: {wrong:?}");
        assert_eq!(charges.len(), usize::try_from(last).unwrap(), "seed {seed}, {client}");
        // The workers' stores know nothing of the journal.
        for (id, attempts) in &charges {
            self.check_journal(*id, attempts[0]).await;
        }
        let again = charges.values().filter(|attempts| attempts[0] > 1).count();
        let (killed, stopped) = (self.killed.load(SeqCst), self.stopped.load(SeqCst));
        let points = self.points.lock().unwrap().len();
        println!(
            "{client}: {killed} killed, at {points} points, {stopped} stopped; \
             {last} payments charged once, {again} of them at a later attempt"
        );
        assert!(points >= 12 && stopped > 0 && again > 0, "seed {seed}: that proves nothing");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_killed_between_whatever_statements_each_payment_is_charged_once() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let kills = std::env::var("ONCEGATE_KILLS").map_or(DEFAULT_KILLS, |number| number.parse().unwrap());
    let mut scenes = JoinSet::new();
    for client in CLIENTS {
        scenes.spawn(Scene::new(client, seed).await.run(kills / CLIENTS.len() as u64));
    }
    while let Some(scene) = scenes.join_next().await {
        scene.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_stalls_in_its_transaction_keeps_the_payment_no_longer_than_its_lease() {
    let (mut stalls, mut scenes) = (JoinSet::new(), Vec::new());
    for client in [Client::TokioPostgres, Client::Sqlx] {
        let scene = Scene::new(client, 0).await;
        scenes.push(Arc::clone(&scene));
        for statement in 1..STATEMENTS {
            let scene = Arc::clone(&scene);
            stalls.spawn(async move {
                let id = i64::try_from(statement).unwrap();
                // It has its answer from the server, and does not go on.
                let point = statement * STEPS + STEPS - 1;
                let mut stalled = scene.spawn(id..id + 1, Fate::Stops { point, passes: 1 });
                while stalled.try_wait().is_none() && !is_stopped(stalled.id()) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                let stopped = stalled.try_wait().is_none();
                let status = scene.spawn(id..id + 1, Fate::Lives).end_within(LIMIT).await;
                assert!(status.success(), "{client}, statement {statement}: {status}");
                if stopped {
                    stalled.signal("CONT");
                    scene.stopped.fetch_add(1, SeqCst);
                }
                let status = stalled.end_within(LIMIT).await;
                assert!(status.success(), "{client}, statement {statement}: {status}");
                assert_eq!(scene.place.till.charges().await[&id].len(), 1, "{client}, statement {statement}");
            });
        }
    }
    while let Some(stall) = stalls.join_next().await {
        stall.unwrap();
    }
    // Begin, effect, completion, commit, in one statement each or two; the last numbers are not there with each client.
    assert!(scenes.iter().all(|scene| scene.stopped.load(SeqCst) >= 4));
}
