//! The end of a transaction for one of its messages, and what follows: keys that are claimed.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::{Span, debug, warn};

use crate::consumer::end::{BUSY_BACKOFF, End};
use crate::consumer::erased::TransactionEnd;
use crate::consumer::item::Item;
use crate::consumer::member::{Ended, Member};
use crate::consumer::progress::{Progress, RolledBack, after_transaction};
use crate::consumer::shared::Shared;
use crate::consumer::trace;
use crate::consumer::unit::claims::{self, Purpose};
use crate::consumer::unit::tasks::Tasks;
use crate::gate::TransactionRun;
use crate::handler::BoxFuture;
use crate::health::{Stage, WaitCause};
use crate::observe::{Event, RunOutcome};
use crate::transactional::Excuse;

/// A member in a transaction.
pub(super) struct InTransaction {
    pub(super) member: Member,
    pub(super) run: Arc<TransactionRun>,
    pub(super) span: Span,
}

/// Does what the end of the transaction says. Returns the member if its key must be claimed.
pub(super) fn follow(
    tasks: &Arc<Tasks>,
    InTransaction {
        mut member,
        run,
        span,
    }: InTransaction,
    end: TransactionEnd,
    ended: &mut Vec<Ended>,
) -> Option<Member> {
    let shared = &tasks.shared;
    let item = &mut member.item;
    note(item, &span, &end);
    let route = Arc::clone(&item.route);
    let gate = &route.gate;
    item.past.progress = after_transaction(&end, run.tag());
    let end = match end {
        TransactionEnd::Committed => End::Completed,
        TransactionEnd::RecordExists => return Some(member),
        TransactionEnd::Held => {
            item.past.busy = item.past.busy.saturating_add(1);
            let ask_again_in = BUSY_BACKOFF.wait(item.past.busy, shared.random());
            End::NotNow {
                ask_again_in,
                cause: WaitCause::Busy,
            }
        }
        TransactionEnd::NotBegun(error) => {
            gate.observe(Event::StoreError {
                scope: gate.scope(),
                class: error.class(),
            });
            End::NoAnswer { error }
        }
        TransactionEnd::Excused { excuse, reason } => excused(shared, item, excuse, &reason),
        // The failure is recorded under a claim: this transaction has left nothing in the store.
        TransactionEnd::Failed { failure, outcome } => {
            let count = item.tell_breaker(false, outcome, Some(&failure));
            item.past.progress = Progress::RolledBack(RolledBack { failure, count });
            return Some(member);
        }
        TransactionEnd::Discarded => End::NotNow {
            ask_again_in: BUSY_BACKOFF.first(),
            cause: WaitCause::Lapse,
        },
        TransactionEnd::Unknown(error) => {
            let origin = item.delivery.message.origin();
            warn!(scope = gate.scope(), %origin, %error, "the commit was not answered; the record decides");
            gate.observe(Event::StoreError {
                scope: gate.scope(),
                class: error.class(),
            });
            return Some(member);
        }
    };
    tasks.settle(ended, member, end);
    None
}

/// Tells the span, and the breaker of a success, how the transaction ended.
fn note(item: &Item, span: &Span, end: &TransactionEnd) {
    item.enter(Stage::Ending, Instant::now());
    let outcome = match end {
        TransactionEnd::Committed => {
            item.tell_breaker(false, RunOutcome::Succeeded, None);
            RunOutcome::Succeeded
        }
        TransactionEnd::Failed { outcome, .. } => *outcome,
        TransactionEnd::Discarded | TransactionEnd::Unknown(_) => RunOutcome::Cancelled,
        TransactionEnd::Excused { .. }
        | TransactionEnd::RecordExists
        | TransactionEnd::Held
        | TransactionEnd::NotBegun(_) => RunOutcome::Failed,
    };
    trace::ended(span, outcome);
}

/// Repeats a run that failed through no fault of its own after a back-off. It is not counted.
fn excused(shared: &Shared, item: &mut Item, excuse: Excuse, reason: &str) -> End {
    let scope = item.route.gate.scope();
    let origin = item.delivery.message.origin();
    debug!(scope, %origin, reason, ?excuse, "the transaction was rolled back; it is repeated, and not counted");
    item.past.uncounted = item.past.uncounted.saturating_add(1);
    let ask_again_in = BUSY_BACKOFF.wait(item.past.uncounted, shared.random());
    End::NotNow {
        ask_again_in,
        cause: WaitCause::Retry,
    }
}

/// Claims the keys of members that run without a transaction of this unit: alone under their
/// claims, or later if they are in a batch.
pub(super) async fn claim(
    tasks: &Arc<Tasks>,
    members: Vec<Member>,
    ended: Vec<Ended>,
) -> Vec<Ended> {
    let purpose = match members.first() {
        Some(member) if member.in_batch => Purpose::Inspect,
        _ => Purpose::Run,
    };
    claims::run(tasks, members, purpose, ended).await
}

/// The same, while transactions of the unit go on.
pub(super) fn claim_apart(tasks: &Arc<Tasks>, members: Vec<Member>) {
    if members.is_empty() {
        return;
    }
    let others = Arc::clone(tasks);
    tasks.spawn(
        Box::pin(async move { claim(&others, members, Vec::new()).await })
            as BoxFuture<'static, Vec<Ended>>,
    );
}
