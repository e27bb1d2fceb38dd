//! The first attempts of a transactional handler: one transaction, for one message or for a batch,
//! and no claim before it.
//!
//! It is for keys of which nothing is known. Whatever else it finds is [claimed](super::claims): a
//! key with a record, a key that a process may have died with, and a run whose failure must be
//! counted.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::store::StoreError;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::super::end::End;
use super::super::erased::{ErasedTransactionalBatches, TransactionEnd};
use super::super::item::Item;
use super::super::member::{Ended, Member};
use super::super::progress::Progress;
use super::super::session::UnitListing;
use super::super::shared::TransactionalRoute;
use super::claims::{self, Purpose};
use super::tasks::Tasks;
use crate::gate::{OnGrant, TransactionRun};
use crate::handler::BoxFuture;
use crate::health::{Stage, WaitCause};

mod follow;
mod members;

use follow::{InTransaction, follow};
use members::{TransactionMembers, claim_apart};

/// Runs each member in a transaction of its own, if nothing is known of its key.
pub(super) async fn run_each(
    tasks: &Arc<Tasks>,
    transactional: &TransactionalRoute,
    members: Vec<Member>,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    let mut listing = UnitListing::default();
    let mut to_claim = Vec::new();
    for mut member in members {
        let run = match prepare(&mut listing, &mut member.item).await {
            ControlFlow::Continue(Some(run)) => run,
            ControlFlow::Continue(None) => {
                to_claim.push(member);
                continue;
            }
            ControlFlow::Break(end) => {
                tasks.settle(&mut ended, member, end);
                continue;
            }
        };
        let run = Arc::new(run);
        let span = tasks
            .shared
            .spans
            .unclaimed(&member.item.delivery.message, run.store_key());
        member.item.enter(Stage::Running, Instant::now());
        let running = transactional.work.run(Arc::clone(&run));
        let end = until_lost(&member.item, &run, running)
            .instrument(span.clone())
            .await;
        to_claim.extend(follow(
            tasks,
            InTransaction { member, run, span },
            end,
            &mut ended,
        ));
    }
    claims::run(tasks, to_claim, Purpose::Run, ended).await
}

/// Runs the members in one transaction. What fails it runs again without the message that made it
/// fail. What cannot be in one runs alone, and later.
pub(super) async fn run_batch(
    tasks: &Arc<Tasks>,
    caller: &Arc<dyn ErasedTransactionalBatches>,
    members: Vec<Member>,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    let mut listing = UnitListing::default();
    let mut begun = Vec::with_capacity(members.len());
    let mut to_claim = Vec::new();
    for mut member in members {
        match prepare(&mut listing, &mut member.item).await {
            ControlFlow::Continue(Some(run)) => {
                let span = tasks
                    .shared
                    .spans
                    .unclaimed(&member.item.delivery.message, run.store_key());
                begun.push(InTransaction {
                    member,
                    run: Arc::new(run),
                    span,
                });
            }
            // Another attempt, or another process, may have ended with it. It is not claimed here:
            // that would cost it an attempt if one of its neighbours ended this process.
            ControlFlow::Continue(None)
                if matches!(member.item.past.progress, Progress::NeedsClaim) =>
            {
                member.item.past.runs_alone = true;
                let end = End::NotNow {
                    ask_again_in: Duration::ZERO,
                    cause: WaitCause::Retry,
                };
                tasks.settle(&mut ended, member, end);
            }
            ControlFlow::Continue(None) => to_claim.push(member),
            ControlFlow::Break(end) => tasks.settle(&mut ended, member, end),
        }
    }
    tasks.report(&mut ended);
    if !to_claim.is_empty() {
        claim_apart(tasks, to_claim);
    }
    TransactionMembers::of(tasks, caller, begun).run().await
}

/// Returns the right to run without a claim; `None` if the key must be claimed.
async fn prepare(
    listing: &mut UnitListing,
    item: &mut Item,
) -> ControlFlow<End, Option<TransactionRun>> {
    // A fencing token comes from a claim.
    if !item.past.progress.is_new() || item.claim.is_some() || item.route.gate.settings().fenced {
        return ControlFlow::Continue(None);
    }
    match is_suspect(listing, item).await {
        Ok(false) => {}
        Ok(true) => {
            item.past.progress = Progress::NeedsClaim;
            return ControlFlow::Continue(None);
        }
        Err(error) => return ControlFlow::Break(End::NoAnswer { error }),
    }
    let Ok(identity) = &item.identity else {
        return ControlFlow::Continue(None);
    };
    let Some(limit) = item
        .route
        .transactional
        .as_ref()
        .map(|transactional| transactional.work.limit())
    else {
        return ControlFlow::Continue(None);
    };
    let on_grant = item
        .probe
        .clone()
        .map(|probe| OnGrant::new(move || probe.answered()));
    match item
        .route
        .gate
        .transaction_run(&item.delivery.message, identity, limit, on_grant)
    {
        Ok(run) => ControlFlow::Continue(Some(run)),
        Err(error) => ControlFlow::Break(End::NoAnswer { error }),
    }
}

/// Returns whether another process may have died with this key. When this returns, this process is
/// known to have it.
async fn is_suspect(listing: &mut UnitListing, item: &Item) -> Result<bool, StoreError> {
    match &item.entry {
        Some(entry) => listing.list(entry).await,
        None => Ok(false),
    }
}

/// Waits for the end of the transaction, which is rolled back when the broker takes the message
/// away.
async fn until_lost(
    item: &Item,
    run: &TransactionRun,
    running: BoxFuture<'_, TransactionEnd>,
) -> TransactionEnd {
    let Some(lost) = item.delivery.ack_handle.lost() else {
        return running.await;
    };
    let mut running = running;
    tokio::select! {
        biased;
        end = &mut running => end,
        () = lost => {
            run.discarded().cancel();
            running.await
        }
    }
}
