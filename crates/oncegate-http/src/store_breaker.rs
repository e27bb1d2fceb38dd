//! A circuit breaker for the store: while it does not answer, requests are refused without a wait for it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Successive claims without an answer that open the breaker. One shard of several that is away does not: claims of
/// the others are answered in between.
const FAILURES_TO_OPEN: u32 = 5;

/// How often an open breaker lets one request ask the store.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Counts the claims that the store did not answer. Shared by all requests of a layer.
#[derive(Debug, Default)]
pub(super) struct StoreBreaker {
    claims: Mutex<UnansweredClaims>,
}

#[derive(Clone, Copy, Debug, Default)]
struct UnansweredClaims {
    /// Successive ones.
    count: u32,
    /// When the next request may ask; `None` while the breaker is closed.
    probe_at: Option<Instant>,
}

/// A change of the breaker's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BreakerChange {
    Opened,
    Closed,
}

impl StoreBreaker {
    /// Whether a request may ask the store. While the breaker is open, one may in each interval.
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

    /// Counts a claim that was answered, or not.
    pub(super) fn claimed(&self, answered: bool, now: Instant) -> Option<BreakerChange> {
        self.with(|claims| {
            if answered {
                let was_open = claims.probe_at.is_some();
                *claims = UnansweredClaims::default();
                return was_open.then_some(BreakerChange::Closed);
            }
            claims.count = claims.count.saturating_add(1);
            if claims.count < FAILURES_TO_OPEN || claims.probe_at.is_some() {
                return None;
            }
            claims.probe_at = Some(now + PROBE_INTERVAL);
            Some(BreakerChange::Opened)
        })
    }

    fn with<T>(&self, change: impl FnOnce(&mut UnansweredClaims) -> T) -> T {
        change(&mut self.claims.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
