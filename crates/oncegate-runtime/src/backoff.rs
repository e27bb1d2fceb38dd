//! The delays between retries.

use std::time::Duration;

#[cfg(feature = "config")]
use oncegate_core::settings::Time;

/// The longest time that a setting or a handler may ask for: a year. A point in time must be
/// representable.
pub(crate) const LONGEST_TIME: Duration = Duration::from_secs(365 * 24 * 3_600);

/// Exponential back-off with jitter: delays double up to a limit, and each is shortened by a random
/// part of up to a half, so that clients that failed together do not retry together.
///
/// See Brooker, "Exponential Backoff and Jitter" (AWS Architecture Blog, 2015); this is its "equal
/// jitter".
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct Backoff {
    /// The first wait; it doubles.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    first: Duration,
    /// The longest wait.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    most: Duration,
}

impl Backoff {
    /// The delays between attempts: 100 ms, doubling up to 30 s.
    pub const DEFAULT: Self = Self::new(Duration::from_millis(100), Duration::from_secs(30));
    const FACTOR: u32 = 2;

    /// Delays from `first`, doubling, up to `most`.
    pub const fn new(first: Duration, most: Duration) -> Self {
        Self { first, most }
    }

    /// The first delay, before its jitter.
    pub const fn first(&self) -> Duration {
        self.first
    }

    /// The longest delay.
    pub const fn most(&self) -> Duration {
        self.most
    }

    /// The delay after the `failures`-th failure in a row (from 1); `fraction` is random, from 0 up
    /// to 1.
    pub fn wait(&self, failures: u32, fraction: f64) -> Duration {
        let doublings = failures.saturating_sub(1).min(30);
        let whole = self
            .first
            .saturating_mul(Self::FACTOR.saturating_pow(doublings))
            .min(self.most);
        whole.mul_f64(1.0 - fraction / 2.0)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_limit_and_keep_at_least_half() {
        let backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        let whole: Vec<u128> = [1, 2, 3, 6, 7, 100]
            .map(|n| backoff.wait(n, 0.0).as_millis())
            .into();
        assert_eq!(whole, [100, 200, 400, 3200, 5000, 5000]);
        assert_eq!(backoff.wait(2, 1.0), Duration::from_millis(100));
    }
}
