//! The wait of a message that must run alone: earlier attempts have ended their processes, and the
//! attempts of other messages must not end with the next one.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

use super::item::Item;
use super::member::Permit;
use super::shared::Shared;
use crate::attempt::CANCELLATION_GRACE;
use crate::health::Stage;
use crate::observe::Event;

/// The longest time until the store treats a claim released without delay as due, or a lease as
/// over: it counts whole milliseconds.
pub(super) const RELEASED_IS_DUE: Duration = Duration::from_millis(2);

/// The time for which the first message that must run alone keeps others from starting while the
/// last handlers end.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);

/// The least time until such a message tries again: meanwhile the others run.
const SHORTEST_PAUSE: Duration = Duration::from_secs(30);

/// The patience of the messages that must run alone. It doubles whenever the running handlers have
/// taken longer, so that a message runs alone beside handlers of any duration.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    doublings: AtomicU32,
}

impl Quarantine {
    /// Returns how long the next message waits, at most `longest`.
    fn patience(&self, longest: Duration) -> Duration {
        let factor = 1_u32.checked_shl(self.doublings.load(Relaxed));
        FIRST_PATIENCE
            .saturating_mul(factor.unwrap_or(u32::MAX))
            .min(longest.max(FIRST_PATIENCE))
    }

    /// Notes that other handlers have run for longer than `patience`.
    fn note_failure(&self, patience: Duration) {
        // Two messages that have waited for the same handlers make it grow once.
        let is_current = self.patience(Duration::MAX) <= patience;
        if is_current {
            self.doublings.fetch_add(1, Relaxed);
        }
    }
}

/// Waits until nothing else runs in this process, and keeps it so while the returned permit is
/// held. `Err` with the time after which to try again when the consumer stops, or when others run
/// for too long: while this message waits for the last permits, no other one starts.
///
/// The caller gives its own permit back first: two such messages that kept theirs would wait for
/// each other.
pub(super) async fn all_permits(shared: &Shared, item: &Item) -> Result<Permit, Duration> {
    let scope = item.route.gate.scope();
    item.enter(Stage::Quarantined, Instant::now());
    item.route.gate.observe(Event::Quarantined { scope });
    let origin = item.delivery.message.origin();
    // No handler runs for longer, but one that blocks its thread.
    let longest = shared.terms().max_run + CANCELLATION_GRACE;
    let patience = shared.quarantine.patience(longest);
    warn!(scope, %origin, ?patience, "earlier attempts ended without an outcome: the message runs alone");
    let every = shared
        .permits
        .clone()
        .acquire_many_owned(shared.settings.concurrency);
    let every = tokio::select! {
        biased;
        () = shared.stopping.cancelled() => return Err(SHORTEST_PAUSE),
        every = timeout(patience, every) => every,
    };
    let Ok(Ok(every)) = every else {
        shared.quarantine.note_failure(patience);
        // The others have at least half of the time.
        let pause = patience.max(SHORTEST_PAUSE);
        warn!(scope, %origin, ?patience, ?pause, "other handlers run for longer; the message waits to run alone later, and with more patience");
        return Err(pause);
    };
    sleep(RELEASED_IS_DUE).await;
    if shared.stopping.is_cancelled() {
        return Err(SHORTEST_PAUSE);
    }
    Ok(Permit::new(every))
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
