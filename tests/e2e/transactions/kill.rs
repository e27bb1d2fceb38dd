//! Workers that race on the same payments: killed between every two statements of a transaction and
//! at random, and stopped there.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use oncegate::core::record::State;
use oncegate_testkit::process::{bound_to_parent, is_stopped};
use oncegate_testkit::{CLIENTS, Client, Process};
use tokio::task::JoinSet;

use crate::place::{Place, key_of};

/// How many workers are to be killed, in all: `ONCEGATE_KILLS`.
const DEFAULT_KILLS: u64 = 160;
/// The same for handlers that are given their transaction.
const DEFAULT_KILLS_GIVEN: u64 = 72;
/// The same for handlers that are given the transaction of a batch.
const DEFAULT_KILLS_BATCHED: u64 = 66;
/// How many workers of a client run at a time.
const WORKERS: usize = 4;
/// How many workers get the same payments.
const RIVALS: u64 = 3;
const PAYMENTS: i64 = 5;
/// The most statements of a connection that are worth a kill, and the steps of each.
const STATEMENTS: u64 = 9;
const STEPS: u64 = 3;
/// The longest that a worker may take, also while others keep the payments it waits for.
const LIMIT: Duration = Duration::from_secs(240);
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
    /// Whose transaction it is: the handler's `own`, one that it is `given`, or one of a batch
    /// (`batched`).
    transaction: &'static str,
    seed: u64,
    started: AtomicU64,
    killed: AtomicU64,
    stopped: AtomicU64,
    /// The points at which one has died.
    points: Mutex<BTreeSet<u64>>,
}

impl Scene {
    async fn new(client: Client, transaction: &'static str, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            place: Place::journaled(client).await,
            transaction,
            seed,
            started: AtomicU64::new(0),
            killed: AtomicU64::new(0),
            stopped: AtomicU64::new(0),
            points: Mutex::default(),
        })
    }

    /// Whether the runtime opens the transactions.
    fn is_given(&self) -> bool {
        self.transaction != "own"
    }

    /// What happens to the worker of this number: every point in turn, and every sixth time chance.
    fn fate(&self, number: u64) -> Fate {
        let mut rng = Rng::with_seed(self.seed ^ number);
        let passes = match self.place.till.client {
            // There the point is every step of every statement, or of the handler's own. A third of
            // the workers get past all points, so that some batches are charged without a claim.
            Client::Sqlite if self.transaction == "batched" => {
                1 + number % (3 * PAYMENTS.unsigned_abs())
            }
            Client::Sqlite if self.is_given() => 1 + number % (2 * PAYMENTS.unsigned_abs()),
            Client::Sqlite => 1 + number % 60,
            // A worker has one transaction, and another one if that is repeated.
            _ if self.transaction == "batched" => rng.u64(1..=2),
            _ => rng.u64(1..=3),
        };
        let point = number % (STATEMENTS * STEPS);
        match number % 6 {
            4 => Fate::Killed {
                after: Duration::from_millis(rng.u64(20..700)),
            },
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
            .args([
                &till.client.to_string(),
                &till.url,
                &till.table,
                &self.place.scope,
                &ids.join(","),
            ])
            .args([point / STEPS, point % STEPS, passes].map(|number| number.to_string()))
            .args([action, self.transaction]);
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
        assert!(
            aborted || status.success(),
            "seed {}: {fate:?}: {status}",
            self.seed
        );
        self.killed.fetch_add(u64::from(aborted), SeqCst);
        if let (true, Fate::Dies { point, passes }) = (aborted, fate) {
            let on_a_file = self.place.till.client == Client::Sqlite;
            self.points
                .lock()
                .unwrap()
                .insert(if on_a_file { passes } else { point });
        }
    }

    /// Checks that one run has completed, the one whose charge was committed, and that no killed
    /// run is recorded as completed.
    ///
    /// Returns whether it was claimed. Only a transaction that the handler was given needs no
    /// claim.
    async fn check_journal(&self, id: i64, attempt: i32) -> bool {
        let entries = self.place.history(&key_of(&self.place.scope, id)).await;
        let of = |event: &str| {
            entries
                .iter()
                .filter(|entry| entry.event == event)
                .collect::<Vec<_>>()
        };
        let claimed = of("claimed");
        let completed = of("completed");
        if self.is_given() && entries.len() == 1 {
            assert_eq!(
                (completed.len(), attempt),
                (1, 1),
                "seed {}: {entries:#?}",
                self.seed
            );
            return false;
        }
        let told = [completed.len(), 1] == [1, claimed.len().min(1)]
            && completed[0].attempt == u32::try_from(attempt).ok()
            && completed[0].run == claimed[claimed.len() - 1].run
            && entries.iter().position(|entry| entry == completed[0]) == Some(entries.len() - 1);
        assert!(
            told,
            "seed {}, {}, {id}, charged by attempt {attempt}: {entries:?}",
            self.seed, self.place.till.client
        );
        true
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
        let seed = self.seed;
        let client = self.place.till.client;
        let last = i64::try_from(self.started.load(SeqCst).div_ceil(RIVALS)).unwrap() * PAYMENTS;
        let status = self.spawn(0..last, Fate::Lives).end_within(LIMIT).await;
        assert!(status.success(), "seed {seed}, {client}: {status}");
        let charges = self.place.till.charges().await;
        let wrong: Vec<_> = charges
            .iter()
            .filter(|(_, attempts)| attempts.len() != 1)
            .collect();
        assert!(
            wrong.is_empty(),
            "seed {seed}, {client}: charged more than once: {wrong:?}"
        );
        assert_eq!(
            charges.len(),
            usize::try_from(last).unwrap(),
            "seed {seed}, {client}"
        );
        // The workers' stores know nothing of the journal.
        let mut claimed = 0;
        for (id, attempts) in &charges {
            claimed += usize::from(self.check_journal(*id, attempts[0]).await);
        }
        let again = charges.values().filter(|attempts| attempts[0] > 1).count();
        let killed = self.killed.load(SeqCst);
        let stopped = self.stopped.load(SeqCst);
        let points = self.points.lock().unwrap().len();
        println!(
            "{client}: {killed} killed, at {points} points, {stopped} stopped; \
             {last} payments charged once, {claimed} of them under a claim, {again} at a later attempt"
        );
        let is_some_unclaimed = !self.is_given() || claimed < charges.len();
        // The rivals of a batch may have begun theirs before the kill.
        let is_some_claimed = claimed > 0 || self.transaction == "batched";
        let least = if self.is_given() { 6 } else { 12 };
        assert!(
            points >= least && stopped > 0 && is_some_claimed && is_some_unclaimed,
            "seed {seed}: that proves nothing"
        );
        assert!(
            again > 0 || self.is_given(),
            "seed {seed}: that proves nothing"
        );
    }
}

// invariant: second-committed-effect, journal-in-transaction
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_between_any_statements_charges_each_payment_once() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let kills =
        std::env::var("ONCEGATE_KILLS").map_or(DEFAULT_KILLS, |number| number.parse().unwrap());
    let mut scenes = JoinSet::new();
    for client in CLIENTS {
        scenes.spawn(
            Scene::new(client, "own", seed)
                .await
                .run(kills / CLIENTS.len() as u64),
        );
    }
    while let Some(scene) = scenes.join_next().await {
        scene.unwrap();
    }
}

// invariant: second-committed-effect
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_in_a_given_transaction_charges_each_payment_once() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let kills = std::env::var("ONCEGATE_KILLS")
        .map_or(DEFAULT_KILLS_GIVEN, |number| number.parse().unwrap());
    let mut scenes = JoinSet::new();
    let clients = [Client::TokioPostgres, Client::Sqlx, Client::Sqlite];
    for client in clients {
        scenes.spawn(
            Scene::new(client, "given", seed)
                .await
                .run(kills / clients.len() as u64),
        );
    }
    while let Some(scene) = scenes.join_next().await {
        scene.unwrap();
    }
}

/// All or none of a batch is charged by one transaction, and its payments are killed together.
// invariant: second-committed-effect
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_in_a_batch_transaction_charges_each_payment_once() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let kills = std::env::var("ONCEGATE_KILLS")
        .map_or(DEFAULT_KILLS_BATCHED, |number| number.parse().unwrap());
    let mut scenes = JoinSet::new();
    let clients = [Client::TokioPostgres, Client::Sqlx, Client::Sqlite];
    for client in clients {
        scenes.spawn(
            Scene::new(client, "batched", seed)
                .await
                .run(kills / clients.len() as u64),
        );
    }
    while let Some(scene) = scenes.join_next().await {
        scene.unwrap();
    }
}

/// The number of the payment that ends every process, and how many attempts it has.
const POISON: i64 = 13;
const ATTEMPTS: u32 = 4;

/// A payment that ends every process runs once without a record, and then as often as it has
/// attempts.
// invariant: transactional-poison
#[tokio::test(flavor = "multi_thread")]
async fn a_payment_that_ends_processes_is_buried_and_others_charged() {
    // Each waits for the leases of the dead.
    tokio::join!(
        poisoned(Client::TokioPostgres, "poisoned"),
        poisoned(Client::Sqlite, "poisoned"),
        poisoned(Client::TokioPostgres, "batched-poisoned"),
        poisoned(Client::Sqlite, "batched-poisoned"),
    );
}

async fn poisoned(client: Client, transaction: &'static str) {
    let scene = Scene::new(client, transaction, 0).await;
    let mut deaths = 0;
    loop {
        let status = scene.spawn(10..17, Fate::Lives).end_within(LIMIT).await;
        if status.success() {
            break;
        }
        assert!(status.signal().is_some(), "{client}: {status}");
        deaths += 1;
        assert!(
            deaths <= ATTEMPTS + 1,
            "{client}: it ends its process for ever"
        );
    }
    let charges = scene.place.till.charges().await;
    let neighbours: Vec<_> = charges
        .iter()
        .map(|(id, attempts)| (*id, attempts.len()))
        .collect();
    assert_eq!(
        neighbours,
        [10, 11, 12, 14, 15, 16].map(|id| (id, 1)),
        "{client}"
    );
    let found = scene
        .place
        .store
        .read(vec![key_of(&scene.place.scope, POISON)])
        .await
        .remove(0);
    let record = found.unwrap().unwrap().record;
    assert!(
        matches!(
            record.state,
            State::Failed {
                handed_over: true,
                ..
            }
        ),
        "{client}: {record:?}"
    );
    assert!(deaths >= 2, "{client}: it has not run twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_owner_keeps_its_payment_no_longer_than_its_lease() {
    let mut stalls = JoinSet::new();
    let mut scenes = Vec::new();
    for client in [Client::TokioPostgres, Client::Sqlx] {
        let scene = Scene::new(client, "own", 0).await;
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
                assert!(
                    status.success(),
                    "{client}, statement {statement}: {status}"
                );
                if stopped {
                    stalled.signal("CONT");
                    scene.stopped.fetch_add(1, SeqCst);
                }
                let status = stalled.end_within(LIMIT).await;
                assert!(
                    status.success(),
                    "{client}, statement {statement}: {status}"
                );
                assert_eq!(
                    scene.place.till.charges().await[&id].len(),
                    1,
                    "{client}, statement {statement}"
                );
            });
        }
    }
    while let Some(stall) = stalls.join_next().await {
        stall.unwrap();
    }
    // Begin, effect, completion, commit, in one statement each or two; the last numbers are not
    // there with each client.
    assert!(scenes.iter().all(|scene| scene.stopped.load(SeqCst) >= 4));
}
