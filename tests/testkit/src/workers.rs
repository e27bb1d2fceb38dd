//! Worker processes that are killed, and the judgement of what they did.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::time::{Duration, Instant};

use fastrand::Rng;
use oncegate_testing::judge_effects;

use crate::ledger::Ledger;
use crate::process::{self, Process};

/// How long nothing may move.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// Interval at which progress is checked.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Workers of the same program and arguments; they die with this value.
#[derive(Debug)]
pub struct Workers {
    program: OsString,
    arguments: Vec<String>,
    environment: Vec<(&'static str, &'static str)>,
    running: Vec<Process>,
    /// Killed, or stopped for a while.
    hit: BTreeSet<u32>,
}

impl Workers {
    /// None yet.
    #[must_use]
    pub fn of(program: impl Into<OsString>, arguments: Vec<String>) -> Self {
        let environment = Vec::new();
        let running = Vec::new();
        let hit = BTreeSet::new();
        Self {
            program: program.into(),
            arguments,
            environment,
            running,
            hit,
        }
    }

    /// The same with these environment variables.
    #[must_use]
    pub fn env(mut self, environment: &[(&'static str, &'static str)]) -> Self {
        self.environment.extend(environment);
        self
    }

    /// Starts one more.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(&mut self) {
        let mut command = process::bound_to_parent(&self.program, "KILL");
        command
            .args(&self.arguments)
            .envs(self.environment.iter().copied());
        self.running.push(Process::spawn("worker", command));
    }

    /// SIGKILL for one at random, and a new one in its place.
    ///
    /// # Panics
    /// When none runs.
    pub fn replace_one(&mut self, rng: &mut Rng) {
        let mut worker = self.running.swap_remove(rng.usize(..self.running.len()));
        worker.kill();
        self.hit.insert(worker.id());
        self.start();
    }

    /// SIGSTOP for one at random.
    ///
    /// # Panics
    /// When none runs.
    pub fn stop_one(&mut self, rng: &mut Rng) {
        let worker = rng.choice(&mut self.running).expect("one runs");
        worker.signal("STOP");
        self.hit.insert(worker.id());
    }

    /// SIGCONT for all.
    pub fn go_on(&mut self) {
        self.running
            .iter_mut()
            .for_each(|worker| worker.signal("CONT"));
    }

    /// Polls until `so` holds; it gets the number of effects, each counted once.
    ///
    /// # Panics
    /// When neither the ledger nor what `so` sees has moved for a minute.
    pub async fn until<S: PartialEq>(
        &self,
        ledger: &Ledger,
        mut so: impl AsyncFnMut(usize) -> Result<(), S>,
    ) {
        let mut last = ((0, None), Instant::now());
        loop {
            let effects = ledger.counts();
            let Err(left) = so(effects.len()).await else {
                return;
            };
            let happened: u64 = effects.values().sum();
            let now = (happened, Some(left));
            if now != last.0 {
                last = (now, Instant::now());
            }
            assert!(
                last.1.elapsed() < STUCK_AFTER,
                "stuck at {happened} effects"
            );
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Judges the ledger: every effect has happened, and each second one is explained by a worker
    /// that had the same effect, and was killed or stopped. Returns how many of those there are.
    ///
    /// # Panics
    /// When an effect is missing or a second one is not explained; the text begins with `run`.
    #[must_use]
    pub fn explained(
        &self,
        ledger: &Ledger,
        wanted: impl IntoIterator<Item = String>,
        run: &str,
    ) -> u64 {
        let mut pids: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for effect in ledger.read() {
            pids.entry(effect.effect).or_default().push(effect.pid);
        }
        let happened = pids
            .iter()
            .map(|(effect, pids)| (effect.clone(), pids.len() as u64))
            .collect();
        let by_hit = |effect: &String| {
            let pids = pids.get(effect).into_iter().flatten();
            pids.filter(|pid| self.hit.contains(pid)).count() as u64
        };
        let found = judge_effects(
            &wanted.into_iter().collect(),
            &BTreeSet::new(),
            &happened,
            by_hit,
        );
        assert!(found.lost.is_empty(), "{run}: lost {:?}", found.lost);
        assert!(
            found.unasked.is_empty(),
            "{run}: nothing asked for {:?}",
            found.unasked
        );
        let unexplained: Vec<_> = found
            .unexplained()
            .map(|one| (&one.effect, pids.get(&one.effect)))
            .collect();
        assert!(
            unexplained.is_empty(),
            "{run}: done by {unexplained:?}, hit: {:?}",
            self.hit
        );
        found.second_effects()
    }
}
