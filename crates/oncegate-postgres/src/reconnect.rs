//! Paces the tries to connect while the server is away.
//!
//! A caller may retry as fast as it is refused. A server that comes back could not handle a
//! thousand clients that connect at once.

use std::time::{Duration, Instant};

use oncegate_core::store::StoreError;
use parking_lot::Mutex;

use oncegate_runtime::backoff::Backoff;

/// The pauses after failed tries. The longest one is how long a server that is back may stay
/// unused.
const PACE: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(500));

/// Decides which caller may try to connect, and when.
#[derive(Default)]
pub(super) struct Reconnect {
    absence: Mutex<Option<Absence>>,
}

/// The last try to connect failed.
struct Absence {
    failures: u32,
    next_try_at: Instant,
    error: StoreError,
}

impl Reconnect {
    /// Returns whether the caller may try now. While the server is away, one caller at a time may.
    ///
    /// # Errors
    /// The error of the last try, when it is too early for another.
    pub(super) fn turn(&self) -> Result<(), StoreError> {
        let mut absence = self.absence.lock();
        let Some(absence) = &mut *absence else {
            return Ok(());
        };
        let now = Instant::now();
        if now < absence.next_try_at {
            return Err(absence.error.clone());
        }
        absence.next_try_at = now + PACE.wait(absence.failures, fastrand::f64());
        Ok(())
    }

    /// Records that a try has failed.
    pub(super) fn failed(&self, error: &StoreError) {
        let mut absence = self.absence.lock();
        let failures = absence
            .as_ref()
            .map_or(0, |absence| absence.failures)
            .saturating_add(1);
        let next_try_at = Instant::now() + PACE.wait(failures, fastrand::f64());
        *absence = Some(Absence {
            failures,
            next_try_at,
            error: error.clone(),
        });
    }

    /// Records that the server is reachable.
    pub(super) fn succeeded(&self) {
        *self.absence.lock() = None;
    }
}
