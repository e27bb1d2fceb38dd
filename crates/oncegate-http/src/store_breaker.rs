//! A circuit breaker for the store: while it does not answer, requests are refused without a wait
//! for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Successive claims without an answer that open the breaker. One shard of several that is away
/// does not: claims of the others are answered in between.
const FAILURES_TO_OPEN: u32 = 5;

/// The interval at which an open breaker lets one request ask the store, and the pause after one
/// that was not answered. Without the pause, a client that sends one request after another would
/// wait with each of them.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Counts the claims that the store did not answer. Shared by all requests of a layer.
#[derive(Debug, Default)]
pub(super) struct StoreBreaker {
    claims: Mutex<UnansweredClaims>,
    /// `true` when the last claim was refused until an operator acts: in a halted scope, for
    /// example.
    is_refusing: AtomicBool,
}

#[derive(Clone, Copy, Debug, Default)]
struct UnansweredClaims {
    /// The number of successive ones.
    count: u32,
    /// The time at which the next request may ask; `None` while the breaker is closed.
    probe_at: Option<Instant>,
}

/// A change of the breaker's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BreakerChange {
    Opened,
    Closed,
}

impl StoreBreaker {
    /// Returns whether a request may ask the store. While the breaker is open, one may in each
    /// interval.
    pub(super) fn admits(&self, now: Instant) -> bool {
        self.with(|claims| match claims.probe_at {
            None => true,
            Some(probe_at) if probe_at > now => false,
            Some(_due) => {
                claims.probe_at = Some(now + PROBE_INTERVAL);
                true
            }
        })
    }

    /// Notes whether a claim was refused until an operator acts. Returns whether that is news: it
    /// is logged once, and not for each request.
    pub(super) fn refused(&self, refused: bool) -> bool {
        self.is_refusing.swap(refused, Ordering::Relaxed) != refused
    }

    /// Counts a claim that was answered, or not.
    pub(super) fn claimed(&self, answered: bool, now: Instant) -> Option<BreakerChange> {
        self.with(|claims| {
            if answered {
                let was_open = claims.probe_at.is_some();
                *claims = UnansweredClaims::default();
                return was_open.then_some(BreakerChange::Closed);
            }
            claims.count = claims.count.saturating_add(1);
            if claims.count < FAILURES_TO_OPEN {
                return None;
            }
            let was_open = claims.probe_at.replace(now + PROBE_INTERVAL).is_some();
            (!was_open).then_some(BreakerChange::Opened)
        })
    }

    fn with<T>(&self, change: impl FnOnce(&mut UnansweredClaims) -> T) -> T {
        change(&mut self.claims.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_breaker_probes_each_second_and_waits_after_silence() {
        let breaker = StoreBreaker::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for claim in 1..=FAILURES_TO_OPEN {
            assert!(breaker.admits(start));
            let opens = (claim == FAILURES_TO_OPEN).then_some(BreakerChange::Opened);
            assert_eq!(breaker.claimed(false, start), opens);
        }
        assert!(!breaker.admits(start));
        // One asks at the first second, and is not answered until the sixth; others ask meanwhile.
        assert!(breaker.admits(at(1)) && !breaker.admits(at(1)) && breaker.admits(at(2)));
        assert_eq!(breaker.claimed(false, at(6)), None);
        assert!(
            !breaker.admits(at(6)),
            "the next request of the same client waits again"
        );
        assert!(breaker.admits(at(7)));
        assert_eq!(breaker.claimed(true, at(7)), Some(BreakerChange::Closed));
        assert!(breaker.admits(at(7)) && breaker.admits(at(7)));
    }
}
