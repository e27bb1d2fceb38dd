//! The first attempt of a transactional handler: one transaction, and no claim before it.
//!
//! It is for keys of which nothing is known. Whatever else it finds goes to [`attempt`](super::attempt), which claims
//! the key: a key with a record, a key that a process may have died with, and a run whose failure must be counted.

use std::ops::ControlFlow;
use std::sync::Arc;

use oncegate_core::store::StoreError;
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Instrument as _, debug, warn};

use super::ending::{BUSY_BACKOFF, Ending};
use super::item::{Item, RolledBack};
use super::shared::{Shared, TransactionalRoute};
use super::trace;
use super::transactional::RunEnd;
use crate::gate::{Identity, TransactionRun};
use crate::health::{Stage, WaitCause};
use crate::observe::{Event, RunOutcome};
use crate::transactional::Excuse;

/// Runs the handler in a transaction that holds the key, if nothing is known of the key. Continues with the permit when
/// the key must be claimed.
pub(super) async fn attempt(
    shared: &Shared,
    item: &mut Item,
    identity: &Identity,
    permit: OwnedSemaphorePermit,
) -> ControlFlow<Ending, OwnedSemaphorePermit> {
    let route = Arc::clone(&item.route);
    let Some(transactional) = route.transactional.as_ref().filter(|_| may_run_unclaimed(item)) else {
        return ControlFlow::Continue(permit);
    };
    match is_suspect(item).await {
        Ok(false) => {}
        Ok(true) => {
            item.past.needs_claim = true;
            return ControlFlow::Continue(permit);
        }
        Err(error) => return ControlFlow::Break(Ending::NoAnswer { error }),
    }
    let (gate, limit) = (&route.gate, transactional.work.limit());
    let run = match gate.transaction_run(&item.delivery.message, identity, limit) {
        Ok(run) => run,
        Err(error) => return ControlFlow::Break(Ending::NoAnswer { error }),
    };
    let span = trace::unclaimed(shared, item, &identity.key);
    let tag = run.tag();
    let ended = run_it(item, transactional, run).instrument(span).await;
    match ended {
        RunEnd::Committed => ControlFlow::Break(Ending::Completed),
        RunEnd::RecordExists => ControlFlow::Continue(permit),
        RunEnd::Held => {
            item.past.busy = item.past.busy.saturating_add(1);
            let ask_again_in = BUSY_BACKOFF.wait(item.past.busy, shared.random());
            ControlFlow::Break(Ending::NotNow { ask_again_in, cause: WaitCause::Busy })
        }
        RunEnd::NotBegun(error) => {
            gate.observe(Event::StoreError { scope: gate.scope(), class: error.class() });
            ControlFlow::Break(Ending::NoAnswer { error })
        }
        RunEnd::Excused { excuse, reason } => ControlFlow::Break(excused(shared, item, excuse, &reason)),
        RunEnd::Failed { failure, outcome } => {
            let count = item.tell_breaker(false, outcome, Some(&failure));
            item.past.rolled_back = Some(RolledBack { failure, count });
            ControlFlow::Continue(permit)
        }
        RunEnd::Discarded => {
            ControlFlow::Break(Ending::NotNow { ask_again_in: BUSY_BACKOFF.first(), cause: WaitCause::Lapse })
        }
        RunEnd::Unknown(error) => {
            let origin = item.delivery.message.origin();
            warn!(scope = gate.scope(), %origin, %error, "the commit was not answered; the record decides");
            gate.observe(Event::StoreError { scope: gate.scope(), class: error.class() });
            item.past.unanswered_commit = Some(tag);
            ControlFlow::Continue(permit)
        }
    }
}

/// Whether the key's record, which is completed, was completed by this message's transaction whose commit was not
/// answered.
pub(super) async fn is_completed_by_last_commit(
    item: &mut Item,
    identity: &Identity,
) -> Result<bool, StoreError> {
    let Some(tag) = item.past.unanswered_commit else { return Ok(false) };
    let gate = &item.route.gate;
    let is_ours = gate.is_completed_by(identity, tag).await?;
    item.past.unanswered_commit = None;
    if is_ours {
        gate.note_transaction_completed(identity, tag);
    }
    Ok(is_ours)
}

/// Whether nothing is known yet that only a claim can settle. A fencing token comes from a claim, too.
fn may_run_unclaimed(item: &Item) -> bool {
    let past = &item.past;
    let is_new = past.rolled_back.is_none() && past.unanswered_commit.is_none() && item.claim.is_none();
    is_new && !past.needs_claim && !past.effect_is_unknown && !item.route.gate.settings().fenced
}

/// Whether another process may have died with this key. When this returns, this process is known to have it.
async fn is_suspect(item: &Item) -> Result<bool, StoreError> {
    match &item.entry {
        Some(entry) => entry.list().await,
        None => Ok(false),
    }
}

/// Runs the handler, and ends it when the broker takes the message away.
async fn run_it(item: &Item, transactional: &TransactionalRoute, run: TransactionRun) -> RunEnd {
    item.enter(Stage::Running);
    let discarded = run.discarded().clone();
    let mut running = transactional.work.run(run);
    let ended = match item.delivery.ack_handle.lost() {
        None => running.await,
        Some(lost) => tokio::select! {
            biased;
            ended = &mut running => ended,
            () = lost => {
                discarded.cancel();
                running.await
            }
        },
    };
    item.enter(Stage::Ending);
    trace::ended(match &ended {
        RunEnd::Committed => {
            item.tell_breaker(false, RunOutcome::Succeeded, None);
            RunOutcome::Succeeded
        }
        RunEnd::Failed { outcome, .. } => *outcome,
        RunEnd::Discarded | RunEnd::Unknown(_) => RunOutcome::Cancelled,
        RunEnd::Excused { .. } | RunEnd::RecordExists | RunEnd::Held | RunEnd::NotBegun(_) => {
            RunOutcome::Failed
        }
    });
    ended
}

/// A run that failed through no fault of its own is repeated after a back-off, and is not counted.
fn excused(shared: &Shared, item: &mut Item, excuse: Excuse, reason: &str) -> Ending {
    let (scope, origin) = (item.route.gate.scope(), item.delivery.message.origin());
    debug!(scope, %origin, reason, ?excuse, "the transaction was rolled back; it is repeated, and not counted");
    // Under a claim it would be counted if it happened again: it may be the message's own doing.
    item.past.needs_claim |= excuse == Excuse::ConnectionLost;
    item.past.uncounted = item.past.uncounted.saturating_add(1);
    let ask_again_in = BUSY_BACKOFF.wait(item.past.uncounted, shared.random());
    Ending::NotNow { ask_again_in, cause: WaitCause::Retry }
}
