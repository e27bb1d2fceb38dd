//! The one place where an [`End`] becomes an ack, a retry, a dead letter or a wait.
//!
//! To check that the ack comes after COMPLETED, read this file alone: `ack` is called once, in
//! [`acknowledge`], when [`after`] says that nothing is left to do, or the caller of
//! [`settle_completed`] that COMPLETED has just been recorded. Every path to that goes through
//! [`End::Completed`], [`End::Duplicate`], [`End::HandedOver`], or an awaited write of a dead
//! letter or of a copy in a retry topic.

use std::time::{Duration, SystemTime};

use oncegate_core::record::TokenTag;
use oncegate_core::store::{DeadLetterStop, StoreError};
use tokio::time::Instant;
use tracing::{info, warn};

use super::end::End;
use super::error::ConsumerError;
use super::item::Item;
use super::member::{Ended, Member, Next};
use super::settings::BadKeys;
use super::shared::Shared;
use crate::backoff::Backoff;
use crate::dead_letters::{
    DeadLetter, DeadLetterCause, DeadLetterRefused, DeadLetters, millis_since_1970,
};
use crate::gate::{Completion, Identity, Lease};
use crate::health::{Stage, WaitCause};
use crate::observe::Event;
use crate::running::policy::OUTCOME_UNKNOWN;

mod retry;

use retry::{Waits, hand_on, later, retry};

/// The delays between tries to write a dead letter.
const DEAD_LETTER_BACKOFF: Backoff =
    Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

/// The delays between tries to mark a record as handed over.
const MARK_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// Settles a member whose attempt has ended. Its permit is free for others.
pub(super) async fn settle(shared: &Shared, member: Member, end: End) -> Ended {
    let Member {
        place,
        mut item,
        asks,
        permit,
        in_batch: _,
    } = member;
    drop(permit);
    let age = matches!(end, End::Completed)
        .then(|| item.delivery.message.age())
        .flatten();
    let next = match after(shared, &mut item, end).await {
        After::Ack => {
            acknowledge(shared, &item, age);
            Next::Finished
        }
        After::Drop => Next::Finished,
        After::Again { after, cause } => Next::Again {
            item: item.given_back(),
            after,
            cause,
        },
        After::NoAnswer { error } => Next::NoAnswer {
            item: item.given_back(),
            error,
        },
        After::Stop(error) => Next::Stop(error),
    };
    Ended {
        place,
        asked: asks,
        next,
    }
}

/// Settles a member whose completion has just been recorded. Nearly all of them need no await, and
/// so no future that would be allocated for each.
///
/// # Errors
/// Returns the member if a stop at the dead-letter limit must be removed first; then
/// [`settle_after_stop`] follows.
pub(super) fn settle_completed(shared: &Shared, member: Member) -> Result<Ended, Member> {
    if shared.noted(false) {
        return Err(member);
    }
    Ok(completed(shared, member))
}

/// Settles a member whose completion is recorded after the stop at the dead-letter limit was
/// removed.
pub(super) async fn settle_after_stop(shared: &Shared, member: Member) -> Ended {
    end_stop(shared).await;
    completed(shared, member)
}

fn completed(shared: &Shared, member: Member) -> Ended {
    let age = member.item.delivery.message.age();
    acknowledge(shared, &member.item, age);
    Ended {
        place: member.place,
        asked: member.asks,
        next: Next::Finished,
    }
}

/// Acknowledges a message with which nothing is left to do.
fn acknowledge(shared: &Shared, item: &Item, age: Option<Duration>) {
    item.delivery.ack_handle.ack();
    shared.watch.ended();
    shared.observer.observe(Event::Acked {
        scope: item.route.gate.scope(),
        count: 1,
        age,
    });
}

/// The rest of the work for a message.
enum After {
    /// Nothing: it is to be acknowledged.
    Ack,
    /// Nothing: it no longer belongs to this consumer.
    Drop,
    Again {
        after: Duration,
        cause: WaitCause,
    },
    NoAnswer {
        error: StoreError,
    },
    Stop(Box<ConsumerError>),
}

/// The cause of a letter for a record that another process has failed. A redrive after an unknown
/// outcome must be warned of, whichever process has written the letter.
fn cause_of_earlier(reason: &str) -> DeadLetterCause {
    if reason.starts_with(OUTCOME_UNKNOWN) {
        DeadLetterCause::OutcomeUnknown
    } else {
        DeadLetterCause::NotHandedOver
    }
}

/// Does what the end demands before the ack.
async fn after(shared: &Shared, item: &mut Item, end: End) -> After {
    item.past.ended(&end);
    match end {
        End::Completed => {
            // A message has succeeded: a stop at the dead-letter limit may be over.
            if shared.noted(false) {
                end_stop(shared).await;
            }
            After::Ack
        }
        End::Duplicate => {
            // While a stop is kept, duplicates do not count.
            _ = shared.noted(true);
            After::Ack
        }
        End::HandedOver => After::Ack,
        End::GiveUp {
            lease,
            cause,
            reason,
            attempts,
        } => After::of_letter(give_up(shared, item, lease, cause, reason, attempts).await),
        End::NotHandedOver { reason, by } => {
            let cause = cause_of_earlier(&reason);
            let written = hand_over(shared, item, cause, reason, 0, Some(by)).await;
            After::of_letter(written.map(|()| Completion::Applied))
        }
        End::Retry {
            lease,
            delay,
            count,
            reason,
        } => {
            let waits = retry(shared, item, *lease, delay, count, reason).await;
            After::of_wait(waits, delay, WaitCause::Retry)
        }
        End::Later {
            lease,
            delay,
            reason,
        } => {
            let waits = later(shared, item, *lease, delay, &reason).await;
            After::of_wait(waits, delay, WaitCause::Later)
        }
        End::Lapsing {
            attempt,
            lasts,
            reason,
        } => lapse(item, attempt, lasts, reason),
        End::Discarded { lease, reason } => {
            let attempt = lease.attempt().number();
            let lasts = lease.remaining();
            lease.discard(&reason).await;
            lapse(item, attempt, lasts, reason)
        }
        End::NotNow {
            ask_again_in,
            cause,
        } => After::Again {
            after: ask_again_in,
            cause,
        },
        End::NotDue { due_in } => match hand_on(shared, item, due_in).await {
            Some(_) => After::Ack,
            // A clock that jumped must not block a key: ask again after at most one lease.
            None => After::Again {
                after: due_in.min(item.route.gate.settings().lease),
                cause: WaitCause::Retry,
            },
        },
        End::NoAnswer { error } => After::NoAnswer { error },
    }
}

/// Lets the message wait until the lease of an attempt is over whose outcome is unknown.
fn lapse(item: &mut Item, attempt: u32, lasts: Duration, reason: String) -> After {
    let scope = item.route.gate.scope();
    let origin = item.delivery.message.origin();
    warn!(scope, %origin, attempt, reason, ?lasts, "the outcome of an attempt is unknown; the message is tried again when the lease of the attempt is over");
    item.note_failure(attempt, reason);
    After::Again {
        after: lasts,
        cause: WaitCause::Lapse,
    }
}

impl After {
    /// The rest of the work for a message whose dead letter was written or refused.
    fn of_letter(given_up: Result<Completion, ConsumerError>) -> Self {
        match given_up {
            Ok(Completion::Applied) => Self::Ack,
            // The outcome of the other owner counts.
            Ok(Completion::NotOwner) => Self::Again {
                after: Duration::ZERO,
                cause: WaitCause::Busy,
            },
            Err(error) => Self::Stop(Box::new(error)),
        }
    }

    /// The rest of the work for a message that waits there for as long as the delay.
    fn of_wait(waits: Waits, delay: Duration, cause: WaitCause) -> Self {
        match waits {
            Waits::InRetryTopic => Self::Ack,
            Waits::AtBroker => Self::Drop,
            Waits::Here => Self::Again {
                after: delay,
                cause,
            },
        }
    }
}

/// Records the failure under the lease, then writes the dead letter.
async fn give_up(
    shared: &Shared,
    item: &Item,
    lease: Option<Box<Lease>>,
    cause: DeadLetterCause,
    reason: String,
    attempts: u32,
) -> Result<Completion, ConsumerError> {
    if let Err(error) = may_give_up(shared, item, cause, &reason).await {
        if let Some(lease) = lease {
            lease
                .release(Duration::ZERO, false, "the consumer stops")
                .await;
        }
        return Err(error);
    }
    let failed_by = lease.as_ref().map(|lease| lease.tag());
    if let Some(lease) = lease
        && lease.fail(&reason).await == Completion::NotOwner
    {
        return Ok(Completion::NotOwner);
    }
    hand_over(shared, item, cause, reason, attempts, failed_by).await?;
    Ok(Completion::Applied)
}

/// Checks that a message may be given up: dead letters are configured, and the dead-letter limit is
/// not reached.
async fn may_give_up(
    shared: &Shared,
    item: &Item,
    cause: DeadLetterCause,
    reason: &str,
) -> Result<(), ConsumerError> {
    if cause == DeadLetterCause::BadKey && shared.settings.bad_keys == BadKeys::Refuse {
        let origin = item.delivery.message.origin().clone();
        return Err(ConsumerError::BadKey {
            origin,
            reason: reason.to_owned(),
        });
    }
    if shared.dead_letters.is_none() {
        let origin = item.delivery.message.origin().clone();
        return Err(ConsumerError::NoDeadLetters {
            origin,
            reason: reason.to_owned(),
        });
    }
    let counted = shared
        .dead_letter_guard()
        .giving_up(millis_since_1970(SystemTime::now()));
    let Err(refusal) = counted else { return Ok(()) };
    if let Some(stop) = &refusal.stop {
        keep_stop(shared, item, stop).await;
    }
    Err(ConsumerError::TooManyDeadLetters {
        what: refusal.what,
        last_reason: reason.to_owned(),
    })
}

/// Keeps the stop at the dead-letter limit in the store, so that a restart does not forget it. If
/// the store does not answer within the stop deadline, the consumer ends without that.
async fn keep_stop(shared: &Shared, item: &Item, stop: &DeadLetterStop) {
    let gate = &item.route.gate;
    let began = Instant::now();
    let mut failures = 0_u32;
    while let Err(error) = gate.set_dead_letter_stop(Some(stop)).await {
        failures = failures.saturating_add(1);
        let scope = gate.scope();
        warn!(scope, %error, failures, "the stop at the dead-letter limit could not be kept");
        if !error.is_away() || began.elapsed() >= shared.settings.stop_deadline {
            return;
        }
        tokio::time::sleep(MARK_BACKOFF.wait(failures, gate.fraction())).await;
    }
}

/// Removes the stop of an earlier process: a message has succeeded, so its cause is gone.
async fn end_stop(shared: &Shared) {
    for route in shared.routes() {
        let scope = route.gate.scope();
        match route.gate.set_dead_letter_stop(None).await {
            Ok(Some(_)) => info!(
                scope,
                "messages succeed again: the stop at the dead-letter limit is over"
            ),
            Ok(None) => {}
            Err(error) => {
                warn!(scope, %error, "the stop at the dead-letter limit could not be removed");
                shared.dead_letter_guard().still_kept();
            }
        }
    }
}

/// Writes the dead letter, awaits it, and marks the record, which the owner `failed_by` has failed,
/// so that no other worker writes it again.
async fn hand_over(
    shared: &Shared,
    item: &Item,
    cause: DeadLetterCause,
    reason: String,
    attempts: u32,
    failed_by: Option<TokenTag>,
) -> Result<(), ConsumerError> {
    let message = item.delivery.message.clone();
    let Some(dead_letters) = &shared.dead_letters else {
        return Err(ConsumerError::NoDeadLetters {
            origin: message.origin().clone(),
            reason,
        });
    };
    let scope = item.route.gate.scope();
    let key = item
        .identity
        .as_ref()
        .ok()
        .map(|identity| identity.key.to_string());
    warn!(scope, origin = %message.origin(), cause = cause.as_str(), reason, attempts, "writing the dead letter");
    let failed_at = SystemTime::now();
    let first_failed_at = match cause {
        // Another process gave it up, at a time that is not recorded.
        DeadLetterCause::NotHandedOver => None,
        // The first attempt did not report when it ended.
        DeadLetterCause::OutcomeUnknown => message.first_failed_at(),
        // A message that failed at once, or never ran, failed for the first time now.
        _ if attempts <= 1 => Some(failed_at),
        _ => message.first_failed_at(),
    };
    let letter = DeadLetter {
        message,
        scope: scope.to_owned(),
        key,
        cause,
        reason,
        attempts,
        first_failed_at,
        failed_at,
    };
    item.enter(Stage::DeadLettering, Instant::now());
    send(shared, item, &**dead_letters, &letter).await?;
    let origin = letter.message.origin();
    let reason = letter.reason.as_str();
    item.route.gate.observe(Event::DeadLettered {
        scope,
        cause,
        origin,
        reason,
    });
    // Only records hold "handed over"; a bad key and a mismatch have no record of their own.
    if let (Ok(identity), Some(by)) = (&item.identity, failed_by) {
        mark_handed_over(shared, item, identity, by).await;
    }
    Ok(())
}

/// Marks the record, so that a duplicate writes no second dead letter. Repeats while the store does
/// not answer, until the stop deadline: the dead letter is written, so the ack may follow without
/// the mark.
async fn mark_handed_over(shared: &Shared, item: &Item, identity: &Identity, by: TokenTag) {
    let gate = &item.route.gate;
    let mut stopped = std::pin::pin!(async {
        shared.stopping.cancelled().await;
        tokio::time::sleep(shared.settings.stop_deadline).await;
    });
    let patience = if item.without_store {
        Some(Duration::ZERO)
    } else {
        shared.settings.fail_open_after
    };
    let began = Instant::now();
    let mut failures = 0_u32;
    while let Err(error) = gate.hand_over(&identity.key, by).await {
        gate.observe(Event::StoreError {
            scope: gate.scope(),
            class: error.class(),
        });
        failures = failures.saturating_add(1);
        let origin = item.delivery.message.origin();
        warn!(%origin, %error, failures, "the dead letter is written, and its record could not be marked");
        let is_impatient = patience.is_some_and(|patience| began.elapsed() >= patience);
        if is_impatient || matches!(error, StoreError::Unreadable { .. }) {
            return;
        }
        tokio::select! {
            biased;
            () = &mut stopped => return,
            () = tokio::time::sleep(MARK_BACKOFF.wait(failures, gate.fraction())) => {}
        }
    }
}

/// Retries until the dead letter is written; returns an error if it never will be. From the first
/// failure on the message counts as waiting, so that from a queue one more message is received.
async fn send(
    shared: &Shared,
    item: &Item,
    dead_letters: &dyn DeadLetters,
    letter: &DeadLetter,
) -> Result<(), ConsumerError> {
    let mut failures = 0_u32;
    let mut waits = None;
    while let Err(error) = dead_letters.send(letter).await {
        failures = failures.saturating_add(1);
        waits.get_or_insert_with(|| shared.in_flight.waits_for_dead_letter());
        shared
            .failures
            .failed(Instant::now().into_std(), LETTER, &error);
        warn!(origin = %letter.message.origin(), error, failures, "the dead letter could not be written; trying again");
        shared
            .observer
            .observe(Event::SourceError { operation: LETTER });
        if let Some(refused) = error.downcast_ref::<DeadLetterRefused>() {
            let origin = letter.message.origin().clone();
            let reason = refused.to_string();
            return Err(ConsumerError::DeadLetterRefused { origin, reason });
        }
        tokio::time::sleep(DEAD_LETTER_BACKOFF.wait(failures, item.route.gate.fraction())).await;
    }
    shared.failures.succeeded(LETTER);
    Ok(())
}

/// The name of the operation that writes dead letters, in metrics and in the status.
const LETTER: &str = "dead_letter";
