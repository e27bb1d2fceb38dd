//! The real runtime on paused time: a broker in memory, a store that fails, workers that come and
//! go. One seed decides everything.
//!
//! `ONCEGATE_SEED=n` runs one seed, `ONCEGATE_SEEDS=n` another number of them, from
//! `ONCEGATE_FIRST_SEED` on; and as many again, until everything was met that a run can meet. The
//! test prints the command that repeats its range, and when a seed fails the command for that seed.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod broker;
mod given;
mod ledger;
mod pay;
mod steps;
mod till;
mod witness;
mod world;

use std::collections::BTreeMap;

use world::{Report, World};

const DEFAULT_SEEDS: u64 = 600;
/// So many seeds at most, until everything was met that they must have met.
const MOST_SEEDS: u64 = 12_000;

fn run(seed: u64) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async { World::new(seed).run().await })
}

/// The command of this test, without the seeds.
const COMMAND: &str = "cargo test -p oncegate-runtime --features testing --test simulation -- whatever_happens --nocapture";

/// Prints the command that runs the seed alone, when its run panics.
struct NamedOnPanic(u64);

impl Drop for NamedOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this seed alone: ONCEGATE_SEED={} {COMMAND}", self.0);
        }
    }
}

fn run_named(seed: u64) -> Report {
    let _named = NamedOnPanic(seed);
    run(seed)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} must be a number"))
    })
}

// invariant: ack-before-completed
// invariant: second-committed-effect
// invariant: run-not-its-own
// invariant: starts-after-the-stop
// invariant: outcome-unknown
#[test]
fn whatever_happens_nothing_is_lost_and_extras_are_explained() {
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.to_string();
        if !text.contains("simulated") {
            eprintln!("{text}");
        }
    }));
    if let Some(seed) = number("ONCEGATE_SEED") {
        println!("{:#?}", run(seed));
        return;
    }
    let first = number("ONCEGATE_FIRST_SEED").unwrap_or_else(|| fastrand::u64(..u64::MAX / 2));
    let seeds = number("ONCEGATE_SEEDS").unwrap_or(DEFAULT_SEEDS);
    let mut totals = Totals::default();
    for from in (first..).step_by(usize::try_from(seeds).unwrap()) {
        let end = from + seeds;
        let range = format!("ONCEGATE_FIRST_SEED={from} ONCEGATE_SEEDS={seeds} {COMMAND}");
        println!("{seeds} seeds, the last one {}; again: {range}", end - 1);
        let middle = from + seeds / 2;
        let runs = |from: u64, to: u64| {
            std::thread::spawn(move || (from..to).map(run_named).collect::<Vec<Report>>())
        };
        let halves = [runs(from, middle), runs(middle, end)].map(std::thread::JoinHandle::join);
        assert!(
            halves.iter().all(Result::is_ok),
            "a seed failed, named above; the whole range: {range}"
        );
        halves
            .into_iter()
            .flatten()
            .flatten()
            .for_each(|report| totals.add(&report));
        let missing = totals.missing();
        if missing.is_empty() {
            break;
        }
        // The rarest comes once in 300 seeds.
        assert!(
            end - first < MOST_SEEDS.max(seeds),
            "no run reached {missing:?}: they prove nothing. {totals:#?}"
        );
    }
    println!("{totals:#?}");
}

/// What the runs have met.
#[derive(Debug, Default)]
struct Totals {
    reached: BTreeMap<(&'static str, &'static str), u64>,
    faults: BTreeMap<&'static str, u64>,
}

impl Totals {
    fn add(&mut self, report: &Report) {
        for (name, count) in &report.counts {
            *self.reached.entry(*name).or_insert(0) += count;
        }
        for (name, count) in &report.faults {
            *self.faults.entry(*name).or_insert(0) += count;
        }
    }

    /// What no run has met, although the runs prove nothing without it.
    fn missing(&self) -> Vec<String> {
        let reached = REACHED
            .iter()
            .filter(|name| !self.reached.contains_key(name))
            .map(|name| format!("{name:?}"));
        let faults = FATES
            .iter()
            .chain(&LOST_ANSWERS)
            .filter(|name| !self.faults.contains_key(*name))
            .map(|name| (*name).to_owned());
        let none = self
            .faults
            .iter()
            .filter(|(_, count)| **count == 0)
            .map(|(name, _)| (*name).to_owned());
        reached.chain(faults).chain(none).collect()
    }
}

/// What the runs must have reached, or they prove nothing.
const REACHED: [(&str, &str); 26] = [
    ("claims", "granted"),
    ("claims", "completed"),
    ("claims", "busy"),
    ("claims", "failed"),
    ("batch_calls", "gathered"),
    ("batch_calls", "split"),
    ("handler_runs", "succeeded"),
    ("handler_runs", "failed"),
    ("handler_runs", "later"),
    ("handler_runs", "gave_up"),
    ("handler_runs", "panicked"),
    ("handler_runs", "cancelled"),
    ("extra_runs", "crash_takeover"),
    ("extra_runs", "lease_lost"),
    ("extra_runs", "complete_unknown"),
    ("extra_runs", "store_loss"),
    ("extra_runs", "fail_open"),
    ("complete_lost", ""),
    ("dead_letters", "bad_key"),
    ("dead_letters", "permanent"),
    ("dead_letters", "attempts_used_up"),
    ("dead_letters", "outcome_unknown"),
    ("store_errors", "unknown"),
    ("store_errors", "unavailable"),
    ("store_paused", "resumed"),
    ("quarantined", ""),
];

/// What must have become of transactions that handlers are given.
const FATES: [&str; 10] = [
    "given_batch_committed",
    "given_committed",
    "given_crossed",
    "given_cut",
    "given_held",
    "given_late_and_done",
    "given_late_and_refused",
    "given_not_begun",
    "given_sessions_away",
    "given_taken_meanwhile",
];

/// The answers that units of several members must have lost.
const LOST_ANSWERS: [&str; 2] = ["lost_claims_of_units", "lost_completions_of_units"];

#[test]
fn a_seed_decides_everything() {
    for seed in 0..20 {
        assert_eq!(run(seed).trace, run(seed).trace, "seed {seed}");
    }
}
