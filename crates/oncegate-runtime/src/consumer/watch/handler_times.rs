//! The durations of handlers, as a histogram.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// The number of handlers that must have run before their usual time is reported.
const ENOUGH_RUNS: u64 = 100;
/// Twice the number of powers of two that a number of microseconds may have.
const BUCKETS: usize = 128;

/// The durations of handlers: a histogram of powers of two and their midpoints, in microseconds,
/// that fades over time.
#[derive(Debug)]
pub(in crate::consumer) struct HandlerTimes([AtomicU32; BUCKETS]);

impl Default for HandlerTimes {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl HandlerTimes {
    pub(in crate::consumer) fn note(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(2);
        let power = micros.ilog2();
        let upper_half = (micros >> (power - 1)) & 1;
        let bucket = usize::try_from(2 * power).unwrap_or(0) + usize::from(upper_half == 1);
        if let Some(count) = self.0.get(bucket) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// The 99th percentile, rounded up to the next power of two or its midpoint; `None` while too
    /// few handlers have run.
    pub(in crate::consumer) fn p99(&self) -> Option<Duration> {
        let counts: Vec<u64> = self
            .0
            .iter()
            .map(|count| u64::from(count.load(Relaxed)))
            .collect();
        let all: u64 = counts.iter().sum();
        if all < ENOUGH_RUNS {
            return None;
        }
        let mut above = 0;
        let bucket = counts.iter().rposition(|count| {
            above += count;
            above * 100 > all
        })?;
        let half = 1_u64.checked_shl(u32::try_from(bucket / 2).ok()?.saturating_sub(1))?;
        Some(Duration::from_micros(
            half.saturating_mul(3 + (bucket % 2) as u64),
        ))
    }

    /// Halves the counts so far, so that the last minutes weigh most.
    pub(in crate::consumer) fn fade(&self) {
        for count in &self.0 {
            let noted = count.load(Relaxed);
            count.fetch_sub(noted / 2, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(millis: impl IntoIterator<Item = u64>) -> HandlerTimes {
        let times = HandlerTimes::default();
        millis
            .into_iter()
            .for_each(|millis| times.note(Duration::from_millis(millis)));
        times
    }

    #[test]
    fn the_99th_percentile_is_rounded_up_by_less_than_half() {
        assert_eq!(times(1..=99).p99(), None, "too few have run");
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..100 {
            let mut taken: Vec<u64> = (0..rng.u64(100..2_000))
                .map(|_| rng.u64(1..100_000))
                .collect();
            let found = times(taken.iter().copied()).p99().unwrap().as_millis();
            taken.sort_unstable();
            let exact = u128::from(taken[taken.len() - 1 - taken.len() / 100]);
            assert!(
                exact <= found && found * 2 <= exact * 3 + 2,
                "seed {seed}: {exact} ms, found {found} ms"
            );
        }
    }

    #[test]
    fn what_is_long_ago_counts_less() {
        let times = times((0..1_000).map(|_| 5_000));
        (0..8).for_each(|_| times.fade());
        (0..1_000).for_each(|_| times.note(Duration::from_millis(10)));
        assert!(times.p99().unwrap() < Duration::from_millis(20));
    }
}
