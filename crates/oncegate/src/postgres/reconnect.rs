//! Paces the tries to connect while the server is away.
//!
//! A caller may ask again as fast as he is refused, and a server that comes back with a thousand clients at
//! its door goes away again.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::store::StoreError;

use crate::backoff::Backoff;
use crate::entropy::Entropy;

/// How long to wait after tries that failed. The longest wait is what a server that is back is missed for.
const PACE: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(500));

/// Who may try to connect, and when.
#[derive(Default)]
pub(super) struct Reconnect {
    absence: Mutex<Option<Absence>>,
    entropy: Entropy,
}

/// The server was not to be had at the last try.
struct Absence {
    failures: u32,
    next_try_at: Instant,
    error: StoreError,
}

impl Reconnect {
    /// Says whether the caller may try now; one at a time does while the server is away.
    ///
    /// # Errors
    /// What the last try has failed with, when it is too early for another.
    pub(super) fn turn(&self) -> Result<(), StoreError> {
        let mut absence = self.absence.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(absence) = &mut *absence else { return Ok(()) };
        let now = Instant::now();
        if now < absence.next_try_at {
            return Err(absence.error.clone());
        }
        absence.next_try_at = now + PACE.wait(absence.failures, self.entropy.fraction());
        Ok(())
    }

    /// A try has failed.
    pub(super) fn failed(&self, error: &StoreError) {
        let mut absence = self.absence.lock().unwrap_or_else(PoisonError::into_inner);
        let failures = absence.as_ref().map_or(0, |absence| absence.failures).saturating_add(1);
        let next_try_at = Instant::now() + PACE.wait(failures, self.entropy.fraction());
        *absence = Some(Absence { failures, next_try_at, error: error.clone() });
    }

    /// The server is there.
    pub(super) fn succeeded(&self) {
        *self.absence.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
