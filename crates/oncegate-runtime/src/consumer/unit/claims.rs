//! Claims the keys of a unit, and acts on the outcomes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use oncegate_core::record::TokenTag;
use oncegate_core::store::StoreError;
use tracing::{Span, info};

use super::super::end::{BUSY_BACKOFF, End, RELEASED_IS_DUE};
use super::super::item::{Item, Probe};
use super::super::member::{Ended, Member};
use super::super::permits::Permit;
use super::super::returned_letter;
use super::super::schedule::Shard;
use super::super::settle::settle;
use super::super::shared::Shared;
use super::alone::all_permits;
use super::calls::Work;
use super::duplicate::Answering;
use super::finish::{failed, not_run};
use super::tasks::{Granted, Tasks};
use super::{batch, calls};
use crate::dead_letters::DeadLetterCause;
use crate::gate::{Claimed, Lease, OpenClaim};
use crate::handler::BoxFuture;
use crate::health::WaitCause;
use crate::message::Message;
use crate::running::policy::GiveUp;

/// The time until a key is asked about again that is being moved between servers.
const KEY_RECHECK: Duration = Duration::from_millis(700);

/// The number of times in a row after which a key that cannot be asked about is told.
const KEY_IS_STUCK: u32 = 8;

/// The longest time between two reads of a record that cannot be read.
const UNREADABLE_RECHECK: Duration = Duration::from_secs(30);

/// The purpose of claims.
#[derive(Clone, Copy, Debug)]
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
    mut members: Vec<Member>,
    purpose: Purpose,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    let Some(first) = members.first() else {
        return ended;
    };
    let route = Arc::clone(&first.item.route);
    let batches = route.batches.as_ref().filter(|_| first.in_batch);
    // Members that end here leave the permits to the others. All members of a batch hold its own.
    let of_members = members.iter_mut().map(|member| {
        if member.in_batch {
            member.permit.clone()
        } else {
            member.permit.take()
        }
    });
    let mut permits: Vec<Permit> = of_members.flatten().collect();
    let mut work = Vec::with_capacity(members.len());
    let (places, claiming) = with_keys(members);
    let claimed = claim_all(claiming).await;
    let is_away = no_answer(&claimed);
    let mut claimed = claimed.into_iter();
    for without_key in places {
        if let Some(member) = without_key {
            // It waits with the messages beside it: bad keys alone would be many in a row.
            match &is_away {
                Some(error) => {
                    let error = error.clone();
                    tasks.settle(&mut ended, member, End::NoAnswer { error });
                }
                None => work.push(Work::WithoutKey(member)),
            }
        } else if let Some((member, claimed)) = claimed.next() {
            work.extend(follow(tasks, member, claimed, purpose, &mut ended));
        }
    }
    if let Some(note) = work
        .first_mut()
        .and_then(|one| one.member().item.attempt.as_ref())
    {
        note.claimed();
    }
    let Some(handler) = batches else {
        return calls::run(tasks, work, permits, ended).await;
    };
    permits.truncate(1);
    let mut granted = Vec::with_capacity(work.len());
    let mut others = Vec::new();
    for one in work {
        match one {
            Work::Run(one) => granted.push(one),
            mut other => {
                other.member().permit = None;
                others.push(other);
            }
        }
    }
    if granted.is_empty() {
        return calls::run(tasks, others, permits, ended).await;
    }
    if !others.is_empty() {
        let tasks_of_others = Arc::clone(tasks);
        tasks.spawn(
            async move { calls::run(&tasks_of_others, others, Vec::new(), Vec::new()).await },
        );
    }
    drop(permits);
    batch::run(tasks, &**handler, granted, ended).await
}

/// Returns the members that have keys, and for each place of the unit the member that has none.
fn with_keys(members: Vec<Member>) -> (Vec<Option<Member>>, Vec<Member>) {
    let mut places = Vec::with_capacity(members.len());
    let mut claiming = Vec::with_capacity(members.len());
    for member in members {
        if member.item.identity.is_ok() {
            claiming.push(member);
            places.push(None);
        } else {
            places.push(Some(member));
        }
    }
    (places, claiming)
}

/// Returns an error of these claims if none has an answer.
fn no_answer(claimed: &[(Member, Result<Claimed, StoreError>)]) -> Option<StoreError> {
    let errors = claimed.iter().map_while(|(_, claimed)| match claimed {
        Err(error @ (StoreError::Unavailable { .. } | StoreError::Unknown { .. })) => Some(error),
        _ => None,
    });
    let (count, last) = errors.fold((0, None), |(count, _), error| (count + 1, Some(error)));
    last.filter(|_| count == claimed.len()).cloned()
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

/// Does what the claim outcome says. Returns the call that the member waits for, if any.
fn follow(
    tasks: &Arc<Tasks>,
    mut member: Member,
    claimed: Result<Claimed, StoreError>,
    purpose: Purpose,
    ended: &mut Vec<Ended>,
) -> Option<Work> {
    let shared = &tasks.shared;
    let claimed = match claimed {
        Ok(Claimed::Granted(lease)) => {
            return granted(tasks, shared, (member, lease), purpose, ended).map(Work::Run);
        }
        Ok(Claimed::Completed(stored)) => {
            member.item.turn = None;
            let Some(tag) = member.item.past.unanswered_commit() else {
                return Some(Work::Answer(duplicate(shared, member, stored)));
            };
            tasks.spawn(completed_by(Arc::clone(tasks), member, tag, stored));
            return None;
        }
        other => other,
    };
    member.item.turn = None;
    let tasks_of_end = Arc::clone(tasks);
    tasks.apart(ended, async move {
        let end = not_granted(&tasks_of_end.shared, &mut member.item, claimed).await;
        settle(&tasks_of_end.shared, member, end).await
    });
    None
}

/// A completed member, for which the handler's `duplicate` is to be called.
fn duplicate(shared: &Shared, member: Member, stored: Bytes) -> Answering {
    let span = match &member.item.identity {
        Ok(identity) => shared
            .spans
            .answer(&member.item.delivery.message, &identity.key),
        Err(_no_key) => Span::none(),
    };
    Answering::new(member, stored, span)
}

/// Ends a member whose record is completed, perhaps by its own transaction, whose commit was not
/// answered.
async fn completed_by(
    tasks: Arc<Tasks>,
    member: Member,
    tag: TokenTag,
    stored: Bytes,
) -> Vec<Ended> {
    let item = &member.item;
    let end = match &item.identity {
        Err(_no_key) => End::HandedOver,
        Ok(identity) => match item.route.gate.is_completed_by(identity, tag).await {
            Ok(true) => {
                item.route
                    .gate
                    .note_transaction_completed(&item.delivery.message, identity, tag);
                End::Completed
            }
            Ok(false) => {
                let answer = Work::Answer(duplicate(&tasks.shared, member, stored));
                return calls::run(&tasks, vec![answer], Vec::new(), Vec::new()).await;
            }
            Err(error) => End::NoAnswer { error },
        },
    };
    vec![settle(&tasks.shared, member, end).await]
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
    if progress.is_effect_unknown() {
        lease.mark_recovered();
    }
    let not_to_run = not_to_run(shared, &member.item, &lease);
    let runs_later = match purpose {
        Purpose::Inspect => !progress.is_rolled_back(),
        // Earlier attempts have ended their processes. It holds no failure that must be recorded
        // first.
        Purpose::Run => lease.is_suspect() && !progress.is_rolled_back() && not_to_run.is_none(),
        Purpose::RunAlone => false,
    };
    if runs_later {
        tasks.spawn(run_later(Arc::clone(tasks), member, lease));
        return None;
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
    if let Some(why) = not_to_run {
        let end = not_run(&member.item, lease, why);
        tasks.settle(ended, member, end);
        return None;
    }
    Some(Granted {
        member,
        lease,
        span,
    })
}

/// Returns why the handler must not run under this claim, if so.
fn not_to_run(shared: &Shared, item: &Item, lease: &Lease) -> Option<GiveUp> {
    // While its handler is paused, the message may not be the cause of its failures.
    let is_counted = item.route.breaker.is_closed();
    lease.not_to_run(is_counted.then(|| shared.settings.attempt_limit()))
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
        Ok(Claimed::Completed(_)) => {
            debug_assert!(false, "it is answered");
            End::TAKEN_OVER
        }
        Ok(Claimed::Busy(retry_in)) => busy(shared, item, retry_in),
        // Of a failure that is not handed over, the letter is missing, and this is one of before.
        Ok(Claimed::Failed {
            reason,
            by,
            handed_over: true,
        }) if returned_letter::is_own(item) => {
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
        Err(error @ StoreError::KeyUnavailable { .. }) => key_unavailable(item, &error),
        Err(error) => End::NoAnswer { error },
    }
}

/// The end of a message whose key cannot be asked about. Its shard answers for other keys, so this
/// is no outage. A key that is being moved is there again within seconds; a move that broke off
/// half-way stays until an operator ends it, so it is told.
fn key_unavailable(item: &mut Item, error: &StoreError) -> End {
    item.past.key_unavailable = item.past.key_unavailable.saturating_add(1);
    let tries = item.past.key_unavailable;
    let is_stuck = tries >= KEY_IS_STUCK;
    if is_stuck && tries.is_power_of_two() {
        tracing::warn!(%error, tries, "the store answers for other keys; a message waits by itself");
    } else {
        tracing::debug!(%error, tries, "the message waits");
    }
    let cause = if is_stuck {
        WaitCause::Unreadable
    } else {
        WaitCause::Retry
    };
    End::NotNow {
        ask_again_in: KEY_RECHECK,
        cause,
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

/// Gives the claim back of a message that is to run alone: in quarantine if it may have ended
/// processes, or at another time if it is in a batch. It holds no claim while it waits: if this
/// process dies in the meantime, that costs it no attempt.
fn run_later(
    tasks: Arc<Tasks>,
    mut member: Member,
    lease: Lease,
) -> BoxFuture<'static, Vec<Ended>> {
    member.item.turn = None;
    Box::pin(async move {
        lease
            .release(Duration::ZERO, false, "the message waits to run alone")
            .await;
        let shared = &tasks.shared;
        let end = if member.in_batch {
            member.item.past.runs_alone = true;
            End::NotNow {
                ask_again_in: RELEASED_IS_DUE,
                cause: WaitCause::Retry,
            }
        } else {
            member.permit = None;
            match all_permits(shared, &member.item).await {
                Ok(every) => {
                    member.permit = Some(every);
                    return run(&tasks, vec![member], Purpose::RunAlone, Vec::new()).await;
                }
                Err(pause) => End::NotNow {
                    ask_again_in: pause,
                    cause: WaitCause::Alone,
                },
            }
        };
        vec![settle(shared, member, end).await]
    })
}
