//! One run: messages, faults, quiet, and the judgement.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fastrand::Rng;
use oncegate_testing::promise::{EffectName, Evidence, judge};

use super::commits::commits;
use super::faults::{Fault, Place};
use super::outside::{Seen, judge_programs};
use super::report::Report;
use super::settings::StoreKind;
use super::stage::{Server, Stage};
use super::work::MAX_ATTEMPTS;
use crate::broker::KafkaBroker;

/// What is to happen.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Decides everything that is left to chance.
    pub seed: u64,
    /// Which store.
    pub store: StoreKind,
    /// The faults, step by step; those of one step overlap.
    pub steps: Vec<Vec<Fault>>,
    /// The program of the workers.
    pub worker: PathBuf,
    /// The program `oncegate`, if the members of the group are programs of `oncegate run` that
    /// start workers; without it, the workers are the members.
    pub oncegate: Option<PathBuf>,
}

/// Returns the seed of `ONCEGATE_SEED`, or another one each time.
///
/// # Panics
/// When the variable is no number.
#[must_use]
pub fn seed() -> u64 {
    let given = std::env::var("ONCEGATE_SEED");
    given.map_or_else(
        |_| fastrand::u64(..),
        |seed| seed.parse().expect("ONCEGATE_SEED is a number"),
    )
}

/// How many messages come with each step, and before the first.
const MESSAGES_PER_STEP: usize = 80;
const WORKERS: usize = 3;
/// How often a fault that lasts is gone on with.
const TICK: Duration = Duration::from_millis(100);
/// Prefixes of errors that may end a worker: a gate, a source or dead letters that do not open.
const EXCUSED: [&str; 3] = [
    "Error: Gate(Store(",
    "Error: Source(",
    "Error: DeadLetters(",
];
/// What share of random steps has two faults.
const OVERLAPPING: f64 = 0.35;

impl Plan {
    /// Each of these faults once, in a random order.
    #[must_use]
    pub fn each_once(seed: u64, store: StoreKind, mut faults: Vec<Fault>, worker: PathBuf) -> Self {
        Rng::with_seed(seed).shuffle(&mut faults);
        let steps = faults.into_iter().map(|fault| vec![fault]).collect();
        Self {
            seed,
            store,
            steps,
            worker,
            oncegate: None,
        }
    }

    /// The same with programs of `oncegate run` as members. Otherwise the workers are the members.
    #[must_use]
    pub fn of_programs(self, oncegate: PathBuf) -> Self {
        Self {
            oncegate: Some(oncegate),
            ..self
        }
    }

    /// So many steps with one or two of these faults.
    ///
    /// # Panics
    /// When there are none.
    #[must_use]
    pub fn random(
        seed: u64,
        store: StoreKind,
        faults: &[Fault],
        steps: usize,
        worker: PathBuf,
    ) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut step = || {
            let first = *rng.choice(faults).expect("there are faults to choose from");
            let second = *rng.choice(faults).expect("there are faults to choose from");
            let overlap = first.place() != second.place() && rng.f64() < OVERLAPPING;
            // A server must be reachable to be flushed or filled.
            let place = |place| first.place() == place || second.place() == place;
            let possible = overlap && !(place(Place::Store) && place(Place::Wire));
            match (first, second) {
                _ if !possible => vec![first],
                // It waits until it would be noticed, or would hit a worker at work, which is not
                // to be in the middle of another fault.
                (_, Fault::Flush | Fault::FlushFresh | Fault::GroupSignal) => vec![second, first],
                _ => vec![first, second],
            }
        };
        let steps = (0..steps).map(|_| step()).collect();
        Self {
            seed,
            store,
            steps,
            worker,
            oncegate: None,
        }
    }
}

/// Runs it and judges it. The broker is the shared one when the run has none of its own.
///
/// # Panics
/// When a server or a worker cannot be started.
pub async fn run(plan: &Plan, broker: Option<&mut KafkaBroker>) -> Report {
    let begun = Instant::now();
    let programs = (plan.worker.clone(), plan.oncegate.clone());
    let mut stage = Stage::set(plan.seed, plan.store, programs, broker).await;
    stage.produce(MESSAGES_PER_STEP).await;
    (0..WORKERS).for_each(|_| stage.start_worker(None));
    for step in &plan.steps {
        stage.produce(MESSAGES_PER_STEP).await;
        step_of(&mut stage, step).await;
        stage.replace_the_dead();
    }
    let mut wrong: Vec<String> = stage.quiet().await.err().into_iter().collect();
    wrong.extend(stage.still_hanging());
    wrong.extend(stage.stop().await);
    // A worker that reaches neither store nor broker at its start may report so and end; the stage
    // restarts it.
    let is_excused = |what: &String| EXCUSED.iter().any(|excuse| what.contains(excuse));
    wrong.extend(
        stage
            .surprises
            .iter()
            .filter(|what| !is_excused(what))
            .cloned(),
    );
    let evidence = evidence(&mut stage, wrong).await;
    let judged = match &plan.oncegate {
        None => judge(&evidence),
        Some(_) => judge_programs(&Seen {
            evidence: &evidence,
            ledger: &stage.ledger.read(),
            members: &stage.members(),
        }),
    };
    let violations: Vec<String> = judged.broken.iter().map(ToString::to_string).collect();
    if !violations.is_empty() {
        keep(&stage, plan, &violations);
    }
    Report {
        seed: plan.seed,
        store: plan.store,
        faults: plan
            .steps
            .iter()
            .flatten()
            .map(ToString::to_string)
            .collect(),
        messages: evidence.produced.len() as u64,
        effects: evidence.effects.values().sum(),
        extra_effects: judged.second_effects,
        commits: evidence.commits.len() as u64,
        reached: judged.reached,
        surprises: stage.surprises.clone(),
        violations,
        seconds: begun.elapsed().as_secs(),
    }
}

async fn step_of(stage: &mut Stage<'_>, step: &[Fault]) {
    for fault in step {
        fault.begin(stage).await;
    }
    let begun = Instant::now();
    let mut left: Vec<Fault> = step.to_vec();
    while !left.is_empty() {
        tokio::time::sleep(TICK).await;
        left.iter().for_each(|fault| fault.go_on(stage));
        let (over, still) = left
            .into_iter()
            .partition(|fault| begun.elapsed() >= fault.lasts());
        left = still;
        let over: Vec<Fault> = over;
        for fault in over {
            fault.end(stage).await;
        }
    }
}

/// Asks every witness.
async fn evidence(stage: &mut Stage<'_>, hung: Vec<String>) -> Evidence {
    let settings = stage.settings.clone();
    let letters = stage.kafka.read_all(&settings.dead_topic).await;
    let origin = |letter: &rdkafka::message::OwnedMessage| {
        use rdkafka::Message as _;
        let payload = letter.payload()?.to_vec();
        let n = serde_json::from_slice::<serde_json::Value>(&payload)
            .ok()?
            .get("n")?
            .as_u64()?;
        let one = stage.produced.get(usize::try_from(n).ok()?)?;
        Some(one.origin.clone())
    };
    let letters: BTreeSet<String> = letters.iter().filter_map(origin).collect();
    let effects = stage.ledger.counts().into_iter();
    Evidence {
        entries: stage.history.read().expect("the history can be read"),
        topic: settings.topic.clone(),
        effects: effects
            .map(|(effect, times)| (paid(&effect), times))
            .collect(),
        dead_letters: letters,
        commits: commits(&stage.kafka, &settings.group, &settings.topic).await,
        records: Some(stage.records().await),
        max_attempts: Some(MAX_ATTEMPTS),
        notices_losses: matches!(stage.server, Server::Redis(_)),
        locks_rows: matches!(stage.server, Server::Postgres(_)),
        produced: stage.produced.clone(),
        hung,
    }
}

/// The name of an effect in the ledger, such as `12/1`.
fn paid(effect: &str) -> EffectName {
    let (order, amount) = effect
        .split_once('/')
        .expect("an effect is an order and an amount");
    EffectName::new(order, amount)
}

/// Keeps what a violation was found in: the history, the ledger, the workers' words.
fn keep(stage: &Stage<'_>, plan: &Plan, violations: &[String]) {
    let name = format!("../../target/fire/{:?}-{}", plan.store, plan.seed).to_lowercase();
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    fs::create_dir_all(&folder).expect("a folder can be made");
    for file in fs::read_dir(stage.folder.path())
        .into_iter()
        .flatten()
        .flatten()
    {
        // Whatever cannot be copied, a socket for example, is no evidence.
        drop(fs::copy(file.path(), folder.join(file.file_name())));
    }
    fs::write(folder.join("violations"), violations.join("\n"))
        .expect("the violations can be written");
    eprintln!("{} violations; see {}", violations.len(), folder.display());
}
