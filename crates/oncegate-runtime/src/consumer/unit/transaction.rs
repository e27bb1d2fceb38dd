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

use super::super::end::End;
use super::super::erased::ErasedTransactional;
use super::super::item::Item;
use super::super::member::{Ended, Member};
use super::super::progress::Progress;
use super::super::session::UnitListing;
use super::tasks::Tasks;
use crate::gate::{OnGrant, TransactionRun};
use crate::health::WaitCause;

mod follow;
mod members;

use follow::{InTransaction, claim, claim_apart};
use members::TransactionMembers;

/// Runs the members in one transaction. What fails it runs again without the message that made it
/// fail. A member that cannot be in a batch runs alone, and later.
pub(super) async fn run(
    tasks: &Arc<Tasks>,
    handler: &Arc<dyn ErasedTransactional>,
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
                if member.in_batch && matches!(member.item.past.progress, Progress::NeedsClaim) =>
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
    if begun.is_empty() {
        return claim(tasks, to_claim, ended).await;
    }
    tasks.report(&mut ended);
    claim_apart(tasks, to_claim);
    TransactionMembers::of(tasks, handler, begun).run().await
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
        .map(|transactional| transactional.handler.limit())
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
