//! The wait of a message that must run alone: earlier attempts have ended their processes, and the
//! attempts of other messages must not end with the next one.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

use super::super::end::RELEASED_IS_DUE;
use super::super::item::Item;
use super::super::permits::Permit;
use super::super::quarantine::SHORTEST_PAUSE;
use super::super::shared::Shared;
use crate::attempt::CANCELLATION_GRACE;
use crate::health::Stage;
use crate::observe::Event;

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
    let every = tokio::select! {
        biased;
        () = shared.stopping.cancelled() => return Err(SHORTEST_PAUSE),
        every = timeout(patience, shared.permits.all()) => every,
    };
    let Ok(Some(every)) = every else {
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
    Ok(every)
}
