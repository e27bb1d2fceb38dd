//! Ends the attempts whose handlers have ended: those that succeeded together by one call of the
//! store.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::store::StoreError;
use tokio::time::Instant;
use tracing::warn;

use super::super::breaker::FailureCount;
use super::super::end::{CANCELLED, End, PANICKED, Ran};
use super::super::item::Item;
use super::super::member::{Ended, Member};
use super::super::settle::{settle, settle_after_stop, settle_completed};
use super::super::shared::Shared;
use super::super::trace;
use super::tasks::{Granted, Tasks};
use crate::dead_letters::DeadLetterCause;
use crate::failure::Failure;
use crate::gate::{Committed, Completion, Lease};
use crate::handler::Encoded;
use crate::health::Stage;
use crate::observe::Event;
use crate::running::policy::{Consequence, GiveUp, after_failure, outcome_unknown};

/// The reason of a retry that a transactional gate demands.
const WITHOUT_TRANSACTION: &str = "the handler returned without `Attempt::commit_with` or `Attempt::completing`, \
                                   and its gate is `transactional()`";

/// A member that waits for no call any more.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all of them are the large one"
)]
pub(super) enum Finished {
    /// The handler has ended.
    Ran {
        granted: Granted,
        ran: Ran,
        /// The time of this run alone.
        took: Duration,
        /// The cost of the run if it has failed.
        count: FailureCount,
    },
    /// The member has no key, and ends when those before it have: the dead-letter limit counts
    /// messages in their order.
    WithoutKey(Member),
}

impl Finished {
    pub(super) fn ran(granted: Granted, ran: Ran, took: Duration) -> Self {
        let item = &granted.member.item;
        item.route.pace.note_run(took);
        // At once: a handler that fails must not run for all others of its unit before the breaker
        // knows.
        let cut_short = granted.lease.was_cut_short();
        let count = item.tell_breaker(cut_short, ran.outcome(), ran.failure());
        Self::Ran {
            granted,
            ran,
            took,
            count,
        }
    }
}

/// A member in the order in which its unit is settled.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all of them are the large one"
)]
enum Settling {
    /// The record is to hold this result.
    Result(Granted, Bytes),
    WithoutKey(Member),
}

/// Ends the attempts of these members. Those whose results are stored as they are are completed by
/// one call.
pub(super) async fn finish(tasks: &Arc<Tasks>, finished: Vec<Finished>) -> Vec<Ended> {
    let mut ended = Vec::with_capacity(finished.len());
    let mut settling = Vec::with_capacity(finished.len());
    let now = Instant::now();
    for one in finished {
        let (granted, ran, took, count) = match one {
            Finished::Ran {
                granted,
                ran,
                took,
                count,
            } => (granted, ran, took, count),
            Finished::WithoutKey(member) => {
                settling.push(Settling::WithoutKey(member));
                continue;
            }
        };
        note(&tasks.shared, &granted, &ran, (took, now));
        match ran {
            Ran::Returned(Ok(Ok(stored))) if is_stored_as_it_is(&granted, &stored) => {
                settling.push(Settling::Result(granted, stored));
            }
            ran => {
                let tasks_of_end = Arc::clone(tasks);
                tasks.apart(&mut ended, async move {
                    finish_one(&tasks_of_end.shared, granted, ran, count).await
                });
            }
        }
    }
    record(tasks, settling, &mut ended).await;
    ended
}

/// Tells the observer and the span how the handler ended.
fn note(
    shared: &Shared,
    Granted { member, span, .. }: &Granted,
    ran: &Ran,
    (took, now): (Duration, Instant),
) {
    let gate = &member.item.route.gate;
    let outcome = ran.outcome();
    shared.watch.handler_times.note(took);
    gate.observe(Event::HandlerRan {
        scope: gate.scope(),
        outcome,
        took,
    });
    trace::ended(span, outcome);
    member.item.enter(Stage::Ending, now);
}

/// Returns whether the record of this run holds its result and nothing else is to be done: no
/// transaction of the handler's, no result store.
fn is_stored_as_it_is(Granted { member, lease, .. }: &Granted, stored: &Bytes) -> bool {
    let settings = member.item.route.gate.settings();
    stored.len() <= settings.max_result_bytes
        && !settings.transactional
        && !lease.attempt().is_fail_open()
        && !lease.is_attempted()
}

/// Completes the records of these members by one call, and settles them in their order.
async fn record(tasks: &Arc<Tasks>, settling: Vec<Settling>, ended: &mut Vec<Ended>) {
    let leases: Vec<(&Lease, &Bytes)> = settling
        .iter()
        .filter_map(|one| match one {
            Settling::Result(granted, stored) => Some((&granted.lease, stored)),
            Settling::WithoutKey(_) => None,
        })
        .collect();
    let began = Instant::now();
    let mut recorded = if leases.is_empty() {
        Vec::new()
    } else {
        tasks.report(ended);
        Lease::record_results(&leases).await
    }
    .into_iter();
    for one in settling {
        let (granted, stored) = match one {
            Settling::Result(granted, stored) => (granted, stored),
            Settling::WithoutKey(member) => {
                let end = without_key(&member.item);
                tasks.settle(ended, member, end);
                continue;
            }
        };
        let Granted {
            member,
            lease,
            span,
        } = granted;
        match recorded.next() {
            Some(Ok(Completion::Applied)) => {
                drop((lease, span));
                match settle_completed(&tasks.shared, member) {
                    Ok(end) => ended.push(end),
                    Err(member) => {
                        let tasks_of_end = Arc::clone(tasks);
                        tasks.apart(ended, async move {
                            settle_after_stop(&tasks_of_end.shared, member).await
                        });
                    }
                }
            }
            Some(Ok(Completion::NotOwner)) => {
                drop((lease, span));
                tasks.settle(ended, member, End::TAKEN_OVER);
            }
            other => {
                let error = other
                    .and_then(Result::err)
                    .unwrap_or_else(|| StoreError::unknown("the store gave no answer"));
                let tasks_of_end = Arc::clone(tasks);
                tasks.apart(ended, async move {
                    let end = end_of(lease.record_again(stored, began, error).await);
                    drop((lease, span));
                    settle(&tasks_of_end.shared, member, end).await
                });
            }
        }
    }
}

/// The end of a message of which no key can be made.
pub(super) fn without_key(item: &Item) -> End {
    let reason = match &item.identity {
        Err(error) => error.to_string(),
        Ok(_) => String::new(),
    };
    End::GiveUp {
        lease: None,
        cause: DeadLetterCause::BadKey,
        reason,
        attempts: 0,
    }
}

fn end_of(completion: Completion) -> End {
    match completion {
        Completion::Applied => End::Completed,
        Completion::NotOwner => End::TAKEN_OVER,
    }
}

/// Ends the attempt of one member, and settles it.
async fn finish_one(shared: &Shared, granted: Granted, ran: Ran, count: FailureCount) -> Ended {
    let Granted {
        member,
        lease,
        span,
    } = granted;
    let item = &member.item;
    let end = if lease.is_attempted() {
        read_back(shared, item, lease, ran, count).await
    } else {
        match ran {
            Ran::Returned(Ok(_)) if item.route.gate.settings().transactional => failed(
                shared,
                item,
                lease,
                &Failure::retry(WITHOUT_TRANSACTION),
                count,
            ),
            Ran::Returned(Ok(encoded)) => complete(lease, encoded).await,
            Ran::Returned(Err(failure)) => failed(shared, item, lease, &failure, count),
            Ran::Panicked => failed(shared, item, lease, &Failure::retry(PANICKED), count),
            Ran::Cancelled => discarded(lease),
        }
    };
    drop(span);
    settle(shared, member, end).await
}

async fn complete(lease: Lease, encoded: Encoded) -> End {
    let storable = lease.storable(encoded).await;
    end_of(lease.record_result(storable.stored).await)
}

/// Reads the record after the handler tried to complete the message in its own transaction. The
/// record decides, not what the handler returned.
async fn read_back(
    shared: &Shared,
    item: &Item,
    lease: Lease,
    ran: Ran,
    count: FailureCount,
) -> End {
    match (lease.read_back().await, ran) {
        (Committed::Yes, ran) => {
            if let Ran::Returned(Err(failure)) = ran {
                warn!(origin = %item.delivery.message.origin(), %failure, "the handler failed after its transaction was committed");
            }
            End::Completed
        }
        (Committed::NotOwner, _) => End::TAKEN_OVER,
        (Committed::No, Ran::Returned(Err(failure))) => {
            failed(shared, item, lease, &failure, count)
        }
        (Committed::No, Ran::Panicked) => {
            failed(shared, item, lease, &Failure::retry(PANICKED), count)
        }
        (Committed::No, Ran::Returned(Ok(_))) => {
            let failure = lease.not_committed();
            failed(shared, item, lease, &failure, count)
        }
        // Its effects outside the transaction may have happened.
        (Committed::No, Ran::Cancelled) => discarded(lease),
    }
}

/// The end of an attempt whose handler was dropped. What it has begun elsewhere may go on.
fn discarded(lease: Lease) -> End {
    End::Discarded {
        lease: Box::new(lease),
        reason: CANCELLED.to_owned(),
    }
}

/// Gives the message up at a grant under which nothing is to run.
pub(super) fn not_run(item: &Item, lease: Lease, why: GiveUp) -> End {
    let attempt = lease.attempt().number();
    let attempts = attempt.saturating_sub(1);
    let last = item.past.failures.as_deref();
    let reason = match (why, last.map(|failures| &*failures.reason)) {
        (GiveUp::OutcomeUnknown, last) => outcome_unknown(attempt, last),
        (_, Some(last)) => {
            format!("{attempts} attempts have failed or ended their process; the last one: {last}")
        }
        // They ran in other processes, or their processes ended.
        (_, None) => format!("{attempts} attempts have failed or ended their process"),
    };
    give_up(lease, cause(why), reason, attempts)
}

fn cause(why: GiveUp) -> DeadLetterCause {
    match why {
        GiveUp::Permanent => DeadLetterCause::Permanent,
        GiveUp::AttemptsUsedUp => DeadLetterCause::AttemptsUsedUp,
        GiveUp::OutcomeUnknown => DeadLetterCause::OutcomeUnknown,
    }
}

fn give_up(lease: Lease, cause: DeadLetterCause, reason: String, attempts: u32) -> End {
    End::GiveUp {
        lease: Some(Box::new(lease)),
        cause,
        reason,
        attempts,
    }
}

/// The end of an attempt that has failed.
pub(super) fn failed(
    shared: &Shared,
    item: &Item,
    lease: Lease,
    failure: &Failure,
    count: FailureCount,
) -> End {
    let reason = failure.reason();
    let attempt = lease.attempt().number();

    let counted = count == FailureCount::Counted;
    let limit = shared.settings.attempt_limit();
    let (after, count) = match after_failure(failure.advice(), attempt, counted, limit) {
        Consequence::GiveUp(why) => return give_up(lease, cause(why), reason, attempt),
        Consequence::Later { after } => {
            return End::Later {
                lease: Box::new(lease),
                delay: not_too_soon(shared, after),
                reason,
            };
        }
        Consequence::Unknown => return End::unknown(lease, reason, count),
        Consequence::Retry {
            after,
            counted: true,
        } => (after, count),
        Consequence::Retry { after, .. } => (after, FailureCount::Uncounted),
    };
    // Attempts that are not counted get the same delays as those that are.
    let failures = attempt.saturating_add(item.past.uncounted);
    let delay = after.unwrap_or_else(|| shared.settings.backoff.wait(failures, shared.random()));
    End::Retry {
        lease: Box::new(lease),
        delay: not_too_soon(shared, delay),
        count,
        reason,
    }
}

/// Returns the delay, or the shortest one. A message that is due starts before messages that came
/// later, so one without a delay would leave them no permit.
fn not_too_soon(shared: &Shared, delay: Duration) -> Duration {
    delay.max(shared.settings.backoff.first() / 2)
}
