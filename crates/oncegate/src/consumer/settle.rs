//! The one place where an ending becomes an ack, a retry, a dead letter or a wait.
//!
//! To check that the ack comes after COMPLETED, read this file alone: `ack` is called once, at the end,
//! and every path to it goes through [`Ending::Completed`], [`Ending::Duplicate`], [`Ending::HandedOver`], or an
//! awaited write of a dead letter or of a copy in a retry topic.

use std::sync::PoisonError;
use std::time::{Duration, Instant, SystemTime};

use oncegate_core::store::StoreError;
use tracing::{info, warn};

use super::attempt::Ending;
use super::intake::InFlight;
use super::{BadKeys, ConsumerError, Item, Shared};
use crate::backoff::Backoff;
use crate::dead_letters::{DeadLetter, DeadLetterCause, DeadLetters};
use crate::gate::{Completion, Lease};
use crate::health::{Stage, WaitCause};
use crate::observe::Event;

/// What the engine does with the message next.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Nothing: it was acknowledged.
    Acked,
    /// Nothing: the message no longer belongs to this consumer.
    NotOurs,
    /// Another attempt after a delay. The message keeps its place, so none behind it overtakes.
    Again { item: Item, after: Duration, cause: WaitCause },
    /// Another attempt as soon as the store answers again.
    NoAnswer { item: Item, error: StoreError },
    /// The consumer cannot go on. The message was not acknowledged.
    Stop(Box<ConsumerError>),
}

/// The delays between tries to write a dead letter.
const DEAD_LETTER_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

pub(super) async fn settle(shared: &Shared, mut item: Item, ending: Ending) -> Outcome {
    let mut age = None;
    match ending {
        Ending::Completed => {
            shared.noted(false);
            age = item.delivery.message.age();
        }
        Ending::Duplicate => {
            shared.noted(true);
        }
        Ending::HandedOver => {}
        Ending::GiveUp { lease, cause, reason, attempts } => {
            match give_up(shared, &item, lease, cause, reason, attempts).await {
                Ok(Completion::Applied) => {}
                Ok(Completion::NotOwner) => {
                    return Outcome::Again { item, after: Duration::ZERO, cause: WaitCause::Busy };
                }
                Err(error) => return Outcome::Stop(Box::new(error)),
            }
        }
        Ending::NotHandedOver { reason } => {
            if let Err(error) = hand_over(shared, &item, DeadLetterCause::NotHandedOver, reason, 0).await {
                return Outcome::Stop(Box::new(error));
            }
        }
        Ending::Retry { lease, delay, counted, reason } => {
            match retry(shared, &mut item, lease, delay, counted, reason).await {
                Next::HandedOn => {}
                Next::HandedBack => return Outcome::NotOurs,
                Next::Here => return Outcome::Again { item, after: delay, cause: WaitCause::Retry },
            }
        }
        Ending::Lapsing { attempt, lasts, reason } => {
            let (scope, origin) = (item.route.gate.scope(), item.delivery.message.origin());
            warn!(scope, %origin, attempt, reason, ?lasts, "the outcome of an attempt is unknown; the message is tried again when the lease of the attempt is over");
            (item.past.effect_is_unknown, item.past.last_failure) = (true, Some(reason.into()));
            return Outcome::Again { item, after: lasts, cause: WaitCause::Lapse };
        }
        Ending::NotNow { ask_again_in, cause } => return Outcome::Again { item, after: ask_again_in, cause },
        Ending::NotDue { due_in } => {
            if hand_on(shared, &item, due_in).await.is_none() {
                // A clock that jumped must not block a key: ask again after at most one lease.
                let after = due_in.min(item.route.gate.settings().lease);
                return Outcome::Again { item, after, cause: WaitCause::Retry };
            }
        }
        Ending::NoAnswer { error } => return Outcome::NoAnswer { item, error },
    }
    item.delivery.ack_handle.ack();
    shared.watch.ended();
    shared.observer.observe(Event::Acked { scope: item.route.gate.scope(), count: 1, age });
    Outcome::Acked
}

/// Where a message waits for its retry.
enum Next {
    HandedOn,
    HandedBack,
    Here,
}

/// Releases the claim of a failed attempt, and puts the message where it waits.
async fn retry(
    shared: &Shared,
    item: &mut Item,
    lease: Lease,
    delay: Duration,
    counted: bool,
    reason: String,
) -> Next {
    let attempt = lease.attempt().number();
    {
        let (scope, origin) = (item.route.gate.scope(), item.delivery.message.origin());
        info!(scope, %origin, attempt, ?delay, reason, "the attempt failed; the message will be tried again");
    }
    if counted && attempt == 1 {
        let message = item.delivery.message.clone();
        item.delivery.message = message.with_first_failed_at(SystemTime::now());
    }
    let handed_on = hand_on(shared, item, delay).await;
    lease.release(handed_on.unwrap_or(delay), counted, &reason).await;
    item.route.gate.observe(Event::Retried { scope: item.route.gate.scope() });
    item.past.uncounted = if counted { 0 } else { item.past.uncounted.saturating_add(1) };
    item.past.last_failure = Some(reason.into());
    match handed_on {
        Some(_) => Next::HandedOn,
        None if item.delivery.ack_handle.nack_after(delay) => Next::HandedBack,
        None => Next::Here,
    }
}

/// Sends the message to a retry topic if the delay is long enough, and returns how long it waits there. `None`: it
/// stays here, because its delay is short, there is no retry topic, or the retry topic cannot be written.
///
/// A crash after this leaves two copies of the message, one here and one there: the record answers the second.
async fn hand_on(shared: &Shared, item: &Item, wait: Duration) -> Option<Duration> {
    let queue = shared.retry_queue.as_ref()?;
    let wait = queue.wait(wait)?;
    item.enter(Stage::Ending);
    match queue.send(&item.delivery.message, wait).await {
        Ok(()) => Some(wait),
        Err(error) => {
            let origin = item.delivery.message.origin();
            warn!(%origin, error, "the retry topic could not be written; the message waits in this process");
            shared.observer.observe(Event::SourceError { operation: "retry" });
            None
        }
    }
}

/// Records the failure under the lease, then writes the dead letter.
async fn give_up(
    shared: &Shared,
    item: &Item,
    lease: Option<Lease>,
    cause: DeadLetterCause,
    reason: String,
    attempts: u32,
) -> Result<Completion, ConsumerError> {
    if let Err(error) = may_give_up(shared, item, cause, &reason) {
        if let Some(lease) = lease {
            lease.release(Duration::ZERO, false, "the consumer stops").await;
        }
        return Err(error);
    }
    if let Some(lease) = lease
        && lease.fail(&reason).await == Completion::NotOwner
    {
        return Ok(Completion::NotOwner);
    }
    hand_over(shared, item, cause, reason, attempts).await?;
    Ok(Completion::Applied)
}

/// Checks that a message may be given up: dead letters are configured, and the dead-letter limit is not reached.
fn may_give_up(
    shared: &Shared,
    item: &Item,
    cause: DeadLetterCause,
    reason: &str,
) -> Result<(), ConsumerError> {
    if cause == DeadLetterCause::BadKey && shared.settings.bad_keys == BadKeys::Refuse {
        let origin = item.delivery.message.origin().clone();
        return Err(ConsumerError::BadKey { origin, reason: reason.to_owned() });
    }
    if shared.dead_letters.is_none() {
        let origin = item.delivery.message.origin().clone();
        return Err(ConsumerError::NoDeadLetters { origin, reason: reason.to_owned() });
    }
    let mut guard = shared.dead_letter_guard.lock().unwrap_or_else(PoisonError::into_inner);
    guard
        .giving_up()
        .map_err(|what| ConsumerError::TooManyDeadLetters { what, last_reason: reason.to_owned() })
}

/// Writes the dead letter, awaits it, and marks the record so that no other worker writes it again.
async fn hand_over(
    shared: &Shared,
    item: &Item,
    cause: DeadLetterCause,
    reason: String,
    attempts: u32,
) -> Result<(), ConsumerError> {
    let message = item.delivery.message.clone();
    let Some(dead_letters) = &shared.dead_letters else {
        return Err(ConsumerError::NoDeadLetters { origin: message.origin().clone(), reason });
    };
    let scope = item.route.gate.scope();
    let key = item.identity.as_ref().ok().map(|identity| identity.key.to_string());
    warn!(scope, origin = %message.origin(), cause = cause.as_str(), reason, attempts, "writing the dead letter");
    let failed_at = SystemTime::now();
    let first_failed_at = match cause {
        // Another process gave it up, at a time that is not recorded.
        DeadLetterCause::NotHandedOver => None,
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
    item.enter(Stage::Burying);
    send(shared, item, &**dead_letters, &letter).await;
    let (origin, reason) = (letter.message.origin(), letter.reason.as_str());
    item.route.gate.observe(Event::DeadLettered { scope, cause, origin, reason });
    // Only records hold "handed over"; a bad key and a mismatch have no record of their own.
    if !matches!(cause, DeadLetterCause::BadKey | DeadLetterCause::Mismatch)
        && let Ok(identity) = &item.identity
        && let Err(error) = item.route.gate.hand_over(&identity.key).await
    {
        // The dead letter is written and the ack follows. At worst another delivery writes it again.
        item.route.gate.observe(Event::StoreError { scope, class: error.class() });
    }
    Ok(())
}

/// Retries until the dead letter is written. From the first failure on the message counts as waiting, so that from a
/// queue one more message is received.
async fn send(shared: &Shared, item: &Item, dead_letters: &dyn DeadLetters, letter: &DeadLetter) {
    let (mut failures, mut waits) = (0_u32, None);
    while let Err(error) = dead_letters.send(letter).await {
        failures = failures.saturating_add(1);
        waits.get_or_insert_with(|| Waits::new(&shared.in_flight));
        shared.failures.failed(Instant::now(), LETTER, &error);
        warn!(origin = %letter.message.origin(), error, failures, "the dead letter could not be written; trying again");
        shared.observer.observe(Event::SourceError { operation: LETTER });
        tokio::time::sleep(DEAD_LETTER_BACKOFF.wait(failures, item.route.gate.fraction())).await;
    }
    shared.failures.succeeded(LETTER);
}

/// The name of the operation that writes dead letters, in metrics and in the status.
const LETTER: &str = "dead_letter";

/// Counts a message as waiting until it is dropped.
struct Waits<'a>(&'a InFlight);

impl<'a> Waits<'a> {
    fn new(in_flight: &'a InFlight) -> Self {
        in_flight.waits();
        Self(in_flight)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.waits_no_more();
    }
}
