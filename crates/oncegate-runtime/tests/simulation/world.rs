//! One run: messages, workers that come and go, a store that fails, and the judgement at the end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use oncegate::consumer::DeadLetterLimit;
use oncegate::core::store::Store;
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{
    AfterUnknown, Backoff, BatchLimits, Batched, Consumer, ConsumerError, Counters, Gate,
    GateError, Key, MemoryStore, OnStoreLoss, Ordering, Transactional,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::broker::{Broker, Kind};
use crate::given::TillTransactions;
use crate::ledger::{Ledger, Letters};
use crate::pay::{Behaviour, Pay, PayGiven, PayTogether, behaviour};
use crate::steps::{Amid, Step, Steps};
use crate::till::{LONGEST_MS, Till};
use crate::witness::Witness;

mod judgement;
mod upsets;

const LEASE: Duration = Duration::from_secs(1);
const MAX_RUN: Duration = Duration::from_secs(10);
const MAX_ATTEMPTS: u32 = 12;
/// How long a transaction that a handler is given may be open.
const OPEN_MOST: Duration = Duration::from_secs(8);
/// After the faults have stopped, everything must be finished within this time.
const QUIET_WITHIN: Duration = Duration::from_secs(3 * 3600);

/// What a run has shown.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) counts: BTreeMap<(&'static str, &'static str), u64>,
    pub(crate) faults: BTreeMap<&'static str, u64>,
    /// What happened, in an order that only the seed decides.
    pub(crate) trace: String,
}

/// One simulated run.
pub(crate) struct World {
    rng: Rng,
    seed: u64,
    broker: Arc<Broker>,
    memory: Arc<MemoryStore>,
    store: Arc<FaultStore>,
    ledger: Arc<Ledger>,
    till: Arc<Till>,
    behaviours: Arc<Vec<Behaviour>>,
    counters: Arc<Counters>,
    workers: Vec<Worker>,
    store_losses: Arc<AtomicU32>,
    crashes: u64,
    stalls: u64,
    /// Runs that workers were throwing away when they crashed, so that no process has counted them.
    uncounted_discards: u64,
    taken_back: u64,
    started: u64,
    lost_answers: Arc<Mutex<BTreeMap<&'static str, u64>>>,
    /// What happened to a worker while one of its units was at this step.
    amid_units: BTreeMap<(Step, Amid), u64>,
}

struct Worker {
    member: usize,
    steps: Arc<Steps>,
    witness: Arc<Witness>,
    stop: Option<oneshot::Sender<()>>,
    running: JoinHandle<Result<(), ConsumerError>>,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let keys = rng.u64(1..14);
        let is_quick = is_quick(seed);
        let behaviours: Vec<Behaviour> = (0..keys)
            .map(|_| {
                if is_quick && rng.u32(..4) > 0 {
                    Behaviour::Quick
                } else if is_quick {
                    Behaviour::Computes {
                        polls: 1,
                        ms: rng.u64(..300),
                    }
                } else {
                    behaviour(&mut rng)
                }
            })
            .collect();
        let payload = |n: usize, rng: &mut Rng| match rng.u32(..25) {
            0 => "{not json".to_owned(),
            1 => r#"{"id":null}"#.to_owned(),
            _ => format!(r#"{{"n":{n},"id":{}}}"#, rng.u64(..keys)),
        };
        let messages = rng.usize(1..40);
        let payloads: Vec<String> = (0..messages).map(|n| payload(n, &mut rng)).collect();
        let memory = Arc::new(MemoryStore::new());
        let faults = if rng.u32(..5) == 0 {
            Faults::default()
        } else {
            faults(&mut rng)
        };
        let store = FaultStore::new(Arc::clone(&memory) as Arc<dyn Store>, faults, rng.u64(..))
            .sleep_with(sleep);
        let till = Till::new(Arc::clone(&memory), rng.fork());
        Self {
            seed,
            broker: Broker::new(
                [Kind::Queue, Kind::Log, Kind::LogWithRetries][rng.usize(..3)],
                payloads,
                rng.fork(),
            ),
            memory,
            store: Arc::new(store),
            ledger: Arc::default(),
            till,
            behaviours: Arc::new(behaviours),
            counters: Arc::default(),
            workers: Vec::new(),
            store_losses: Arc::default(),
            crashes: 0,
            stalls: 0,
            uncounted_discards: 0,
            taken_back: 0,
            started: 0,
            lost_answers: Arc::default(),
            amid_units: BTreeMap::new(),
            rng,
        }
    }

    fn start_worker(&mut self) {
        let member = self.broker.join(self.judge());
        self.started += 1;
        let steps = Steps::of(
            Arc::clone(&self.store) as Arc<dyn Store>,
            Arc::clone(&self.lost_answers),
        );
        let gate = Gate::new("sim", key(), Arc::clone(&steps) as Arc<dyn Store>)
            .lease(LEASE)
            .max_run(self.max_run());
        // A loss is one of the faults, and it is counted.
        let gate = gate.on_store_loss(OnStoreLoss::Continue);
        let gate = gate.after_unknown(self.after_unknown());
        let witness = Arc::new(Witness {
            memory: Arc::clone(&self.memory),
            ledger: Arc::clone(&self.ledger),
            gives_up_unknown: self.after_unknown() == AfterUnknown::GiveUp,
            has_stopped: AtomicBool::new(false),
        });
        let handler = Pay {
            witness: Arc::clone(&witness),
            behaviours: Arc::clone(&self.behaviours),
            ledger: Arc::clone(&self.ledger),
            till: Arc::clone(&self.till),
        };
        let letters = Letters {
            ledger: Arc::clone(&self.ledger),
            rng: Mutex::new(self.rng.fork()),
        };
        let ordering =
            [Ordering::Key, Ordering::Partition, Ordering::Unordered][self.rng.usize(..3)];
        let gate = gate.simulated(self.rng.u64(..));
        let in_flight = self.rng.usize(1..50);
        let limits = self.handles_batches().then(|| {
            let wait = Duration::from_millis(self.rng.u64(..200));
            BatchLimits::new(self.rng.usize(1..=in_flight.min(12))).wait(wait)
        });
        let source = member.clone();
        let consumer = if self.gives_transactions() {
            let transactions = TillTransactions(Arc::clone(&self.till));
            let handler = PayGiven(handler);
            let work = match limits {
                Some(limits) => Transactional::batched(transactions, limits, handler),
                None => Transactional::new(transactions, handler),
            };
            Consumer::new(source, gate, work.limit(OPEN_MOST))
        } else if let Some(limits) = limits {
            Consumer::new(source, gate, Batched::new(limits, PayTogether(handler)))
        } else {
            Consumer::new(source, gate, handler)
        };
        let consumer = self.configured(consumer, ordering, in_flight, letters);
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        self.workers.push(Worker {
            member: member.id,
            steps,
            witness,
            stop: Some(stop),
            running,
        });
    }

    /// The consumer with the settings of every worker.
    fn configured(
        &mut self,
        consumer: Consumer,
        ordering: Ordering,
        in_flight: usize,
        letters: Letters,
    ) -> Consumer {
        let consumer = consumer
            .concurrency(self.rng.u32(1..8))
            .ordering(ordering)
            .max_attempts(MAX_ATTEMPTS)
            .backoff(Backoff::new(
                Duration::from_millis(50),
                Duration::from_secs(5),
            ))
            .in_flight(in_flight, 1 << 20)
            .dead_letter_limit(DeadLetterLimit {
                in_a_row: 1_000,
                share: 1.1,
            })
            .overtaking_retries()
            .stop_deadline(Duration::from_secs(3))
            .dead_letters(letters)
            .observer(Arc::clone(&self.counters) as _);
        match self.fails_open_after() {
            Some(patience) => consumer.fail_open_after(patience),
            None => consumer,
        }
    }

    /// Runs under faults for a while, then without, until everything is finished; then replays
    /// everything.
    pub(crate) async fn run(mut self) -> Report {
        let began = Instant::now();
        for _ in 0..self.rng.usize(1..4) {
            self.start_worker();
        }
        // The first units have the most members.
        if self.is_quick() || self.rng.bool() {
            self.upset_amid_a_unit().await;
        }
        for _ in 0..self.rng.usize(..12) {
            sleep(Duration::from_millis(self.rng.u64(1..2_500))).await;
            self.upset().await;
        }
        self.store.stop_faults();
        self.till.stop_faults();
        self.finish().await;
        // A worker that has lost its lease may still be at it: its late effect belongs to the first
        // pass.
        self.stop_all().await;
        sleep(Duration::from_millis(LONGEST_MS)).await;
        if self.losses() == 0 && self.fail_open() == 0 {
            self.replay().await;
        }
        self.stop_all().await;
        self.judge_effects();
        let trace = format!(
            "{:?} {:?} {:?} {:?}",
            began.elapsed(),
            self.ledger,
            self.till,
            self.counters.snapshot()
        );
        Report {
            counts: self.counters.snapshot(),
            faults: self.faults(),
            trace,
        }
    }

    /// Delivers everything again, which must have no effect.
    async fn replay(&mut self) {
        let effects = self.ledger.effects.lock().unwrap().clone();
        let charges = self.till.charges();
        let given_up = self.given_up();
        self.broker.rewind();
        self.finish().await;
        assert_eq!(
            (effects, charges),
            (
                self.ledger.effects.lock().unwrap().clone(),
                self.till.charges()
            ),
            "seed {}: a replay had effects",
            self.seed
        );
        // Without its mark, a dead letter is written again, for whichever message of its payment.
        assert_eq!(
            self.given_up(),
            given_up,
            "seed {}: a replay dead-lettered more",
            self.seed
        );
    }

    async fn stop_one(&mut self) {
        if let Some(worker) = self.workers.pop() {
            self.stop(worker).await;
        }
    }

    async fn stop(&self, mut worker: Worker) {
        _ = worker.stop.take().map(|stop| stop.send(()));
        // Paused time goes on when every task that was ready has run.
        sleep(Duration::from_millis(1)).await;
        worker.witness.has_stopped.store(true, Relaxed);
        let deadline = Duration::from_secs(60);
        let stopped = timeout(deadline, worker.running).await;
        let stopped =
            stopped.unwrap_or_else(|_| panic!("seed {}: a worker does not stop", self.seed));
        match stopped.expect("a worker does not panic") {
            Ok(()) | Err(ConsumerError::Gate(GateError::Store(_))) => {}
            Err(ConsumerError::Settings(_)) if self.gives_transactions() && self.losses() > 0 => {}
            Err(error) => panic!("seed {}: a worker failed: {error}", self.seed),
        }
        self.broker.leave(worker.member);
    }

    async fn stop_all(&mut self) {
        while let Some(worker) = self.workers.pop() {
            self.stop(worker).await;
        }
    }

    /// Liveness: without faults everything is finished after a while.
    async fn finish(&mut self) {
        if self.workers.is_empty() {
            self.start_worker();
        }
        let give_up_at = Instant::now() + QUIET_WITHIN;
        while !self.broker.unacked().is_empty() {
            assert!(
                Instant::now() < give_up_at,
                "seed {}: messages {:?} are not finished; records: {:?}",
                self.seed,
                self.broker.unacked(),
                self.memory.records()
            );
            self.start_again_who_could_not_start().await;
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// What a supervisor does: a worker that met a store it could not open is started again.
    async fn start_again_who_could_not_start(&mut self) {
        let (ended, running) = self
            .workers
            .drain(..)
            .partition(|worker: &Worker| worker.running.is_finished());
        self.workers = running;
        let ended: Vec<Worker> = ended;
        for worker in ended {
            match worker.running.await.expect("a worker does not panic") {
                Err(ConsumerError::Gate(GateError::Store(_))) => {}
                // The descriptor was lost between the gate's look at it and that of the
                // transactions.
                Err(ConsumerError::Settings(_))
                    if self.gives_transactions() && self.losses() > 0 => {}
                other => panic!("seed {}: a worker ended by itself: {other:?}", self.seed),
            }
            self.broker.leave(worker.member);
            self.start_worker();
        }
    }

    /// Whether this payment's effect is in the records' database.
    fn transacts(&self, id: u64) -> bool {
        self.gives_transactions()
            || usize::try_from(id).is_ok_and(|id| self.behaviours[id].transacts())
    }

    /// In one world of three, a run may take little longer than a lease.
    fn max_run(&self) -> Duration {
        if self.seed % 3 == 2 {
            LEASE + LEASE / 2
        } else {
            MAX_RUN
        }
    }

    fn is_quick(&self) -> bool {
        is_quick(self.seed)
    }

    /// In one world of four, unless its workers run without a store, handlers are given their
    /// transactions.
    fn gives_transactions(&self) -> bool {
        self.seed % 4 == 3 && self.fails_open_after().is_none()
    }

    /// In one world of five, workers run without a store that has been away for so long.
    fn fails_open_after(&self) -> Option<Duration> {
        self.seed
            .is_multiple_of(5)
            .then(|| Duration::from_millis(self.seed / 5 % 4 * 500))
    }

    /// In one world of four, unless its workers run without a store, a message is given up when the
    /// outcome of an attempt is unknown.
    fn after_unknown(&self) -> AfterUnknown {
        let is_set = self.seed % 6 == 4 || self.seed % 12 == 11;
        if is_set && self.fails_open_after().is_none() {
            AfterUnknown::GiveUp
        } else {
            AfterUnknown::Retry
        }
    }

    /// In one world of three, and more often in the transactions that handlers are given, workers
    /// handle messages in batches.
    fn handles_batches(&self) -> bool {
        self.seed % 3 == 1 || self.seed % 8 == 7 && self.gives_transactions()
    }

    fn fail_open(&self) -> u64 {
        self.counters.get("extra_runs", "fail_open")
    }

    fn losses(&self) -> u32 {
        self.store_losses.load(Relaxed)
    }
}

/// In one world of four all handlers end at once, so that members of units end together.
fn is_quick(seed: u64) -> bool {
    seed % 4 == 1
}

/// Some of the faults that a store can have, each more or less likely.
fn faults(rng: &mut Rng) -> Faults {
    let mut some = |most: f64| if rng.bool() { rng.f64() * most } else { 0.0 };
    Faults {
        unavailable: some(0.1),
        reply_lost: some(0.2),
        request_lost: some(0.1),
        stray: some(0.5),
        slow_request: some(0.2),
        slow_reply: some(0.2),
        max_delay: Duration::from_millis(1_500),
        outage: some(0.02),
        outage_max_calls: 30,
        forget: 0.0,
    }
}

pub(crate) fn key() -> Key {
    Key::json(["id"])
}
