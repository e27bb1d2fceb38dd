//! The patience of messages that must run alone.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// The time for which the first message that must run alone keeps others from starting while the
/// last handlers end.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);

/// The least time until such a message tries again: meanwhile the others run.
pub(super) const SHORTEST_PAUSE: Duration = Duration::from_secs(30);

/// The patience of the messages that must run alone. It doubles whenever the running handlers have
/// taken longer, so that a message runs alone beside handlers of any duration.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    doublings: AtomicU32,
}

impl Quarantine {
    /// Returns how long the next message waits, at most `longest`.
    pub(super) fn patience(&self, longest: Duration) -> Duration {
        let factor = 1_u32.checked_shl(self.doublings.load(Relaxed));
        FIRST_PATIENCE
            .saturating_mul(factor.unwrap_or(u32::MAX))
            .min(longest.max(FIRST_PATIENCE))
    }

    /// Notes that other handlers have run for longer than `patience`.
    pub(super) fn note_failure(&self, patience: Duration) {
        // Two messages that have waited for the same handlers make it grow once.
        let is_current = self.patience(Duration::MAX) <= patience;
        if is_current {
            self.doublings.fetch_add(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_patience_grows_until_every_handler_has_ended() {
        let quarantine = Quarantine::default();
        let longest = Duration::from_secs(900);
        let seconds: Vec<u64> = (0..9)
            .map(|_| {
                let patience = quarantine.patience(longest);
                quarantine.note_failure(patience);
                quarantine.note_failure(patience);
                patience.as_secs()
            })
            .collect();
        assert_eq!(seconds, [10, 20, 40, 80, 160, 320, 640, 900, 900]);
        (0..100).for_each(|_| quarantine.note_failure(Duration::MAX));
        assert_eq!(quarantine.patience(longest), longest);
    }
}
