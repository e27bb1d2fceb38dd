//! Keeps the mark of a circuit breaker in the scope's descriptor: it is there while the breaker is
//! open.
//!
//! No message waits for it. Other processes of the scope have breakers of their own, and the last
//! write wins: the mark only decides how a process starts.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::shared::Route;
use crate::backoff::Backoff;

/// The delays between tries to write the mark.
const WRITE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

/// Writes the mark at each of the `changes` of the route's breaker, until `ended`. What the store
/// did not answer is tried again with what is true by then, after `ended` once.
pub(super) async fn keep(
    route: Arc<Route>,
    mut changes: watch::Receiver<bool>,
    ended: CancellationToken,
) {
    let gate = &route.gate;
    let mut failures = 0_u32;
    loop {
        let retry = async move {
            match failures {
                0 => pending().await,
                _ => sleep(WRITE_BACKOFF.wait(failures, gate.fraction())).await,
            }
        };
        let is_ending = tokio::select! {
            biased;
            changed = changes.changed() => changed.is_err(),
            () = ended.cancelled() => true,
            () = retry => false,
        };
        if is_ending && failures == 0 {
            return;
        }
        let is_open = *changes.borrow_and_update();
        failures = match gate.mark_breaker(is_open).await {
            Ok(()) => 0,
            Err(error) => {
                let scope = gate.scope();
                warn!(scope, is_open, %error, "the mark of the circuit breaker could not be written");
                // What refuses needs an operator; the next change tries again.
                if error.is_away() {
                    failures.saturating_add(1)
                } else {
                    0
                }
            }
        };
        if is_ending {
            return;
        }
    }
}
