//! Runs the contestants of a benchmark in turns.

use std::future::Future;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::figure::{Figure, Unit};

/// The extent of the measurements.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Plan {
    /// The number of measurements of each contestant.
    pub(crate) repetitions: u32,
    /// Small sizes, whose figures mean nothing.
    pub(crate) quick: bool,
}

impl Plan {
    /// The full size, or the small one that only checks that the benchmark works.
    pub(crate) fn size(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }

    /// A warm-up round and then the repetitions. In each round, every contestant is measured once.
    pub(crate) fn rounds(&self, benchmark: &str, contestants: &[&'static str]) -> Rounds {
        Rounds::new(benchmark, contestants, 1, self.repetitions)
    }

    /// The rounds without a warm-up, for figures that do not depend on time.
    pub(crate) fn cold_rounds(&self, benchmark: &str, contestants: &[&'static str]) -> Rounds {
        Rounds::new(benchmark, contestants, 0, self.repetitions)
    }
}

/// The rounds of one benchmark and their measurements.
#[derive(Debug)]
pub(crate) struct Rounds {
    begun: u32,
    warm_ups: u32,
    repetitions: u32,
    series: Vec<(&'static str, Vec<f64>)>,
    bar: ProgressBar,
}

impl Rounds {
    fn new(benchmark: &str, contestants: &[&'static str], warm_ups: u32, repetitions: u32) -> Self {
        let steps = contestants.len() as u64 * u64::from(warm_ups + repetitions);
        let style =
            ProgressStyle::with_template("{prefix:>12} [{bar:30}] {pos}/{len} {msg} ({elapsed})");
        let bar = ProgressBar::new(steps).with_prefix(benchmark.to_owned());
        let bar = bar.with_style(style.expect("the template is valid"));
        bar.enable_steady_tick(Duration::from_millis(200));
        Self {
            begun: 0,
            warm_ups,
            repetitions,
            series: Vec::new(),
            bar,
        }
    }

    /// Begins the next round. Returns `false` when there is none.
    pub(crate) fn next(&mut self) -> bool {
        self.begun += 1;
        self.begun <= self.warm_ups + self.repetitions
    }

    /// Measures a contestant in this round.
    pub(crate) async fn measure(
        &mut self,
        contestant: &'static str,
        measured: impl Future<Output = f64>,
    ) {
        let warm_up = if self.is_warm_up() { " (warm-up)" } else { "" };
        self.bar.set_message(format!("{contestant}{warm_up}"));
        let value = measured.await;
        self.note(contestant, value);
        self.bar.inc(1);
    }

    /// Records another value of this round.
    pub(crate) fn note(&mut self, series: &'static str, value: f64) {
        if self.is_warm_up() {
            return;
        }
        match self.series.iter_mut().find(|(name, _)| *name == series) {
            Some((_, values)) => values.push(value),
            None => self.series.push((series, vec![value])),
        }
    }

    /// The figure of a contestant.
    pub(crate) fn figure(&self, contestant: &'static str, unit: Unit) -> Figure {
        Figure::new(contestant, unit, self.values(contestant))
    }

    /// The figure of a contestant compared with a baseline, round by round.
    pub(crate) fn against(
        &self,
        contestant: &'static str,
        unit: Unit,
        baseline: &'static str,
    ) -> Figure {
        self.figure(contestant, unit)
            .against(baseline, self.values(baseline))
    }

    fn values(&self, series: &str) -> &[f64] {
        let found = self.series.iter().find(|(name, _)| *name == series);
        found
            .map(|(_, values)| &values[..])
            .expect("every series was measured")
    }

    fn is_warm_up(&self) -> bool {
        self.begun <= self.warm_ups
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
