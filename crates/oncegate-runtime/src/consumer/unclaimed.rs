//! The first attempt of a transactional handler: one transaction, and no claim before it.
//!
//! It is for keys of which nothing is known. Whatever else it finds goes to [`attempt`](super::attempt), which claims
//! the key: a key with a record, a key that a process may have died with, and a run whose failure must be counted.

use std::future::Future;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::record::TokenTag;
use oncegate_core::store::StoreError;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, warn};

use super::ending::{BUSY_BACKOFF, Ending};
use super::item::{Item, RolledBack};
use super::shared::{Shared, TransactionalRoute};
use super::trace;
use super::transaction_batch::TransactionSeat;
use super::transactional::RunEnd;
use crate::gate::{Identity, OnGrant, TransactionRun};
use crate::health::{Stage, WaitCause};
use crate::observe::{Event, RunOutcome};
use crate::transactional::Excuse;

/// Runs the handler in a transaction that holds the key, if nothing is known of the key. `None`: the key must be claimed.
/// The caller holds a permit.
pub(super) async fn attempt(shared: &Shared, item: &mut Item, identity: &Identity) -> Option<Ending> {
    let route = Arc::clone(&item.route);
    let transactional = route.transactional.as_ref()?;
    let run = match prepare(item, identity, transactional).await {
        ControlFlow::Continue(run) => run?,
        ControlFlow::Break(ending) => return Some(ending),
    };
    let (span, tag) = (trace::unclaimed(shared, item, &identity.key), run.tag());
    let discarded = run.discarded().clone();
    let ended = finish(item, &discarded, transactional.work.run(run)).instrument(span).await;
    follow(shared, item, ended, tag)
}

/// The same in the transaction of a batch. What cannot be in one runs alone, and later.
pub(super) async fn attempt_in_batch(
    shared: &Shared,
    item: &mut Item,
    identity: &Identity,
    seat: TransactionSeat,
) -> Option<Ending> {
    let route = Arc::clone(&item.route);
    let transactional = route.transactional.as_ref()?;
    let run = match prepare(item, identity, transactional).await {
        ControlFlow::Continue(Some(run)) => Arc::new(run),
        // Another attempt, or another process, may have ended with it. It is not claimed here: that would cost it an
        // attempt if one of its neighbours ended this process.
        ControlFlow::Continue(None) if item.past.needs_claim => {
            item.past.runs_alone = true;
            return Some(Ending::NotNow { ask_again_in: Duration::ZERO, cause: WaitCause::Retry });
        }
        ControlFlow::Continue(None) => return None,
        ControlFlow::Break(ending) => return Some(ending),
    };
    let (span, tag) = (trace::unclaimed(shared, item, &identity.key), run.tag());
    let discarded = run.discarded().clone();
    let ended = finish(item, &discarded, seat.take(run)).instrument(span).await;
    item.past.runs_alone |= matches!(ended, RunEnd::Failed { .. });
    follow(shared, item, ended, tag)
}

/// The right to run without a claim; `None` if the key must be claimed.
async fn prepare(
    item: &mut Item,
    identity: &Identity,
    transactional: &TransactionalRoute,
) -> ControlFlow<Ending, Option<TransactionRun>> {
    if !may_run_unclaimed(item) {
        return ControlFlow::Continue(None);
    }
    match is_suspect(item).await {
        Ok(false) => {}
        Ok(true) => {
            item.past.needs_claim = true;
            return ControlFlow::Continue(None);
        }
        Err(error) => return ControlFlow::Break(Ending::NoAnswer { error }),
    }
    let limit = transactional.work.limit();
    let on_grant = item.probe.clone().map(|probe| OnGrant::new(move || probe.answered()));
    match item.route.gate.transaction_run(&item.delivery.message, identity, limit, on_grant) {
        Ok(run) => ControlFlow::Continue(Some(run)),
        Err(error) => ControlFlow::Break(Ending::NoAnswer { error }),
    }
}

/// Does what the end of the run with this tag says. `None`: the key must be claimed.
fn follow(shared: &Shared, item: &mut Item, ended: RunEnd, tag: TokenTag) -> Option<Ending> {
    let route = Arc::clone(&item.route);
    let gate = &route.gate;
    match ended {
        RunEnd::Committed => Some(Ending::Completed),
        RunEnd::RecordExists => None,
        RunEnd::Held => {
            item.past.busy = item.past.busy.saturating_add(1);
            let ask_again_in = BUSY_BACKOFF.wait(item.past.busy, shared.random());
            Some(Ending::NotNow { ask_again_in, cause: WaitCause::Busy })
        }
        RunEnd::NotBegun(error) => {
            gate.observe(Event::StoreError { scope: gate.scope(), class: error.class() });
            Some(Ending::NoAnswer { error })
        }
        RunEnd::Excused { excuse, reason } => Some(excused(shared, item, excuse, &reason)),
        RunEnd::Failed { failure, outcome } => {
            let count = item.tell_breaker(false, outcome, Some(&failure));
            item.past.rolled_back = Some(RolledBack { failure, count });
            None
        }
        RunEnd::Discarded => {
            Some(Ending::NotNow { ask_again_in: BUSY_BACKOFF.first(), cause: WaitCause::Lapse })
        }
        RunEnd::Unknown(error) => {
            let origin = item.delivery.message.origin();
            warn!(scope = gate.scope(), %origin, %error, "the commit was not answered; the record decides");
            gate.observe(Event::StoreError { scope: gate.scope(), class: error.class() });
            item.past.unanswered_commit = Some(tag);
            None
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
        gate.note_transaction_completed(&item.delivery.message, identity, tag);
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

/// Waits for the end of the run, and discards the run when the broker takes the message away.
async fn finish(
    item: &Item,
    discarded: &CancellationToken,
    running: impl Future<Output = RunEnd> + Send,
) -> RunEnd {
    item.enter(Stage::Running);
    let mut running = std::pin::pin!(running);
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
