//! Claims the keys of a unit, and acts on the outcomes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use oncegate_core::store::StoreError;
use tokio::time::{Instant, sleep, timeout};
use tracing::{Instrument as _, info, warn};

use super::super::end::{BUSY_BACKOFF, End};
use super::super::item::{Item, Probe};
use super::super::member::{Ended, Member, Permit};
use super::super::returned_letter;
use super::super::schedule::Shard;
use super::super::settle::settle;
use super::super::shared::Shared;
use super::duplicate::answer;
use super::finish::{failed, used_up};
use super::tasks::{Granted, Tasks};
use super::{batch, calls};
use crate::dead_letters::DeadLetterCause;
use crate::gate::{Claimed, Lease, OpenClaim};
use crate::handler::BoxFuture;
use crate::health::{Stage, WaitCause};
use crate::message::Message;
use crate::observe::Event;

/// The time until a key is asked about again that is being moved between servers.
const KEY_RECHECK: Duration = Duration::from_secs(1);

/// The longest time between two reads of a record that cannot be read.
const UNREADABLE_RECHECK: Duration = Duration::from_secs(30);

/// The longest time until the store treats a claim released without delay as due, or a lease as
/// over: it counts whole milliseconds.
const RELEASED_IS_DUE: Duration = Duration::from_millis(2);

/// The longest time that a message that must run alone keeps others from starting while the last
/// handlers end.
const QUARANTINE_PATIENCE: Duration = Duration::from_secs(10);

/// The delay before such a message tries again to run alone: meanwhile the others run.
const QUARANTINE_PAUSE: Duration = Duration::from_secs(30);

/// The purpose of claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The handlers run under them.
    Run,
    /// The same, and nothing else runs in this process.
    RunAlone,
    /// To learn what became of the keys. The handlers run later.
    Inspect,
}

/// Claims the keys of these members, and runs the handlers of those that are granted.
pub(super) async fn run(
    tasks: &Arc<Tasks>,
    members: Vec<Member>,
    purpose: Purpose,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    let mut granted = Vec::with_capacity(members.len());
    for (member, claimed) in claim_all(members).await {
        granted.extend(follow(tasks, member, claimed, purpose, &mut ended));
    }
    let Some(first) = granted.first() else {
        return ended;
    };
    let route = Arc::clone(&first.member.item.route);
    match &route.batches {
        Some(handler) if first.member.is_in_batch() => {
            batch::run(tasks, &**handler, granted, ended).await
        }
        _ => calls::run(tasks, granted, ended).await,
    }
}

/// Claims the keys of these members: those of one shard by one call, so that a shard without an
/// answer holds up no other. Those that run without their store have no shard.
async fn claim_all(members: Vec<Member>) -> Vec<(Member, Result<Claimed, StoreError>)> {
    let is_one_shard = members
        .windows(2)
        .all(|pair| matches!(pair, [one, other] if one.asks == other.asks));
    if is_one_shard {
        return claim_of_shard(members).await;
    }
    let mut shards: BTreeMap<Option<Shard>, Vec<(usize, Member)>> = BTreeMap::new();
    for (position, member) in members.into_iter().enumerate() {
        shards
            .entry(member.asks)
            .or_default()
            .push((position, member));
    }
    let claims = shards.into_values().map(|of_shard| async move {
        let (positions, members): (Vec<usize>, Vec<Member>) = of_shard.into_iter().unzip();
        positions
            .into_iter()
            .zip(claim_of_shard(members).await)
            .collect::<Vec<_>>()
    });
    let mut claimed: Vec<_> = join_all(claims).await.into_iter().flatten().collect();
    claimed.sort_by_key(|(position, _)| *position);
    claimed.into_iter().map(|(_, claimed)| claimed).collect()
}

/// Claims keys by one call. After a lost answer the same claim is sent again: it may have been
/// granted.
async fn claim_of_shard(mut members: Vec<Member>) -> Vec<(Member, Result<Claimed, StoreError>)> {
    let mut claims: Vec<(&mut OpenClaim, &Message)> = Vec::with_capacity(members.len());
    for member in &mut members {
        let Item {
            route,
            delivery,
            claim,
            identity,
            without_store,
            ..
        } = &mut *member.item;
        let Ok(identity) = identity else {
            debug_assert!(false, "a message without a key is settled before");
            continue;
        };
        let claim = match &route.fail_open {
            Some(fail_open) if *without_store => claim.insert(fail_open.new_claim(identity)),
            _ => claim.get_or_insert_with(|| route.gate.new_claim(identity)),
        };
        claims.push((claim, &delivery.message));
    }
    let answers = OpenClaim::send_all(&mut claims).await;
    for (member, claimed) in members.iter_mut().zip(&answers) {
        if claimed.is_ok() || member.item.without_store {
            member.item.claim = None;
        }
        if matches!(claimed, Ok(_) | Err(StoreError::Unreadable { .. })) {
            member.item.probe.iter().for_each(Probe::answered);
        }
    }
    members.into_iter().zip(answers).collect()
}

/// Does what the claim outcome says. Returns the member if its handler is to run.
fn follow(
    tasks: &Arc<Tasks>,
    mut member: Member,
    claimed: Result<Claimed, StoreError>,
    purpose: Purpose,
    ended: &mut Vec<Ended>,
) -> Option<Granted> {
    let shared = &tasks.shared;
    let lease = match claimed {
        Ok(Claimed::Granted(lease)) => lease,
        other => {
            let tasks_of_end = Arc::clone(tasks);
            tasks.apart(ended, async move {
                let end = not_granted(&tasks_of_end.shared, &mut member.item, other).await;
                settle(&tasks_of_end.shared, member, end).await
            });
            return None;
        }
    };
    granted(tasks, shared, (member, lease), purpose, ended)
}

/// Returns the member if its handler is to run under this claim: not if a failure of before must be
/// recorded first, nor if it must run at another time.
fn granted(
    tasks: &Arc<Tasks>,
    shared: &Shared,
    (mut member, lease): (Member, Lease),
    purpose: Purpose,
    ended: &mut Vec<Ended>,
) -> Option<Granted> {
    let progress = &member.item.past.progress;
    let is_used_up = is_used_up(shared, &member.item, &lease);
    let runs_later = match purpose {
        Purpose::Inspect => !progress.is_rolled_back(),
        // Earlier attempts have ended their processes. It holds no failure that must be recorded
        // first.
        Purpose::Run => lease.is_suspect() && !progress.is_rolled_back() && !is_used_up,
        Purpose::RunAlone => false,
    };
    if runs_later {
        tasks.spawn(run_later(Arc::clone(tasks), member, lease));
        return None;
    }
    if progress.is_effect_unknown() {
        lease.mark_recovered();
    }
    if let Some(rolled_back) = member.item.past.granted() {
        let end = failed(
            shared,
            &member.item,
            lease,
            &rolled_back.failure,
            rolled_back.count,
        );
        tasks.settle(ended, member, end);
        return None;
    }
    let span = shared.spans.run(&lease);
    if is_used_up {
        let end = used_up(&member.item, lease);
        tasks.settle(ended, member, end);
        return None;
    }
    if lease.is_over() {
        let tasks_of_end = Arc::clone(tasks);
        tasks.apart(ended, async move {
            // The grant came too late. Nothing has run yet.
            lease
                .release(
                    Duration::ZERO,
                    false,
                    "the lease was over before the handler began",
                )
                .await;
            let end = End::NotNow {
                ask_again_in: Duration::ZERO,
                cause: WaitCause::Lapse,
            };
            settle(&tasks_of_end.shared, member, end).await
        });
        return None;
    }
    Some(Granted {
        member,
        lease,
        span,
    })
}

/// Returns whether all attempts of the message were used before this one.
fn is_used_up(shared: &Shared, item: &Item, lease: &Lease) -> bool {
    // While its handler is paused, the message may not be the cause of its failures.
    lease.attempt().number() > shared.settings.max_attempts && item.route.breaker.is_closed()
}

/// The end of a message whose key was not granted.
async fn not_granted(
    shared: &Shared,
    item: &mut Item,
    claimed: Result<Claimed, StoreError>,
) -> End {
    match claimed {
        Ok(Claimed::Granted(lease)) => {
            debug_assert!(false, "it was granted");
            End::lapsing(&lease, "the claim was not used".to_owned())
        }
        Ok(Claimed::Completed(stored)) => completed(shared, item, stored).await,
        Ok(Claimed::Busy(retry_in)) => busy(shared, item, retry_in),
        Ok(Claimed::Failed { reason, by, .. }) if returned_letter::is_own(item) => {
            returned_letter::follow(shared, item, (reason, by)).await
        }
        Ok(Claimed::Failed {
            handed_over: true, ..
        }) => {
            let scope = item.route.gate.scope();
            let origin = item.delivery.message.origin();
            info!(scope, %origin, "the message has failed before, and is in the dead letters");
            End::HandedOver
        }
        Ok(Claimed::Failed {
            handed_over: false,
            reason,
            by,
        }) => End::NotHandedOver { reason, by },
        Ok(Claimed::Mismatch) => {
            let cause = DeadLetterCause::Mismatch;
            let reason = "the key is known with other content".to_owned();
            End::GiveUp {
                lease: None,
                cause,
                reason,
                attempts: 0,
            }
        }
        Err(StoreError::Unreadable { key, reason }) => {
            tracing::error!(%key, %reason, "the record cannot be read; its message waits");
            End::NotNow {
                ask_again_in: UNREADABLE_RECHECK,
                cause: WaitCause::Unreadable,
            }
        }
        // Its shard answers for other keys, so this is no outage.
        Err(error @ StoreError::KeyUnavailable { .. }) => {
            tracing::debug!(%error, "the message waits");
            End::NotNow {
                ask_again_in: KEY_RECHECK,
                cause: WaitCause::Retry,
            }
        }
        Err(error) => End::NoAnswer { error },
    }
}

/// The end of a message whose key another attempt has, or whose retry is not due.
fn busy(shared: &Shared, item: &mut Item, retry_in: Duration) -> End {
    // No attempt runs: a claim is protected for at most one lease.
    if retry_in > item.route.gate.settings().lease + RELEASED_IS_DUE {
        return End::NotDue { due_in: retry_in };
    }
    item.past.busy = item.past.busy.saturating_add(1);
    let ask_again_in = retry_in.min(BUSY_BACKOFF.wait(item.past.busy, shared.random()));
    End::NotNow {
        ask_again_in,
        cause: WaitCause::Busy,
    }
}

/// The end of a message whose record is completed: by its own transaction, if the commit was not
/// answered, or before.
async fn completed(shared: &Shared, item: &Item, stored: Bytes) -> End {
    let Ok(identity) = &item.identity else {
        return End::HandedOver;
    };
    if let Some(tag) = item.past.unanswered_commit() {
        match item.route.gate.is_completed_by(identity, tag).await {
            Ok(true) => {
                item.route
                    .gate
                    .note_transaction_completed(&item.delivery.message, identity, tag);
                return End::Completed;
            }
            Ok(false) => {}
            Err(error) => return End::NoAnswer { error },
        }
    }
    let span = shared.spans.answer(&item.delivery.message, &identity.key);
    answer(item, stored).instrument(span).await
}

/// Gives the claim back of a message that is to run alone: in quarantine if it may have ended
/// processes, or at another time if it is in a batch. It holds no claim while it waits: if this
/// process dies in the meantime, that costs it no attempt.
fn run_later(
    tasks: Arc<Tasks>,
    mut member: Member,
    lease: Lease,
) -> BoxFuture<'static, Vec<Ended>> {
    Box::pin(async move {
        lease
            .release(Duration::ZERO, false, "the message waits to run alone")
            .await;
        let shared = &tasks.shared;
        let wait = if member.is_in_batch() {
            member.item.past.runs_alone = true;
            RELEASED_IS_DUE
        } else {
            let permit = member.permit.take();
            member.permit = quarantine(shared, &member.item, permit).await;
            if member.permit.is_some() {
                return run(&tasks, vec![member], Purpose::RunAlone, Vec::new()).await;
            }
            QUARANTINE_PAUSE
        };
        let end = End::NotNow {
            ask_again_in: wait,
            cause: WaitCause::Retry,
        };
        vec![settle(shared, member, end).await]
    })
}

/// Waits until nothing else runs in this process, and keeps it so: a message that kills its process
/// must not use up the attempts of other messages. `None` when the consumer stops, or when others
/// run for too long: while this one waits for the last permits, no other message starts.
///
/// It gives its own permit back first: two such messages that kept theirs would wait for each
/// other.
async fn quarantine(shared: &Shared, item: &Item, permit: Option<Permit>) -> Option<Permit> {
    drop(permit);
    let scope = item.route.gate.scope();
    item.enter(Stage::Quarantined, Instant::now());
    item.route.gate.observe(Event::Quarantined { scope });
    let origin = item.delivery.message.origin();
    warn!(scope, %origin, "earlier attempts ended without an outcome: the message runs alone");
    let every = shared
        .permits
        .clone()
        .acquire_many_owned(shared.settings.concurrency);
    let every = tokio::select! {
        biased;
        () = shared.stopping.cancelled() => return None,
        every = timeout(QUARANTINE_PATIENCE, every) => every,
    };
    let Ok(Ok(every)) = every else {
        warn!(scope, %origin, "other handlers run for too long; the message waits to run alone later");
        return None;
    };
    sleep(RELEASED_IS_DUE).await;
    (!shared.stopping.is_cancelled()).then_some(Permit::Own(every))
}
