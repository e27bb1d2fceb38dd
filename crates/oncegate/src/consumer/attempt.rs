//! One attempt of one message: claim, run, complete. It ends with an [`Ending`] and acknowledges nothing.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use oncegate_core::store::StoreError;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, timeout};
use tracing::{Instrument as _, warn};

use super::breaker::RunResult;
use super::engine::breaker_key;
use super::{Item, Shared, trace};
use crate::attempt::CANCELLATION_GRACE;
use crate::dead_letters::DeadLetterCause;
use crate::failure::{Advice, Failure};
use crate::gate::{Claimed, Committed, Completion, Identity, Lease, Unfetched};
use crate::handler::Encoded;
use crate::health::{Stage, WaitCause};
use crate::observe::{Event, RunOutcome};

/// How an attempt ended.
#[derive(Debug)]
pub(super) enum Ending {
    /// COMPLETED is in the store, written by this attempt.
    Completed,
    /// COMPLETED was in the store, and the handler's `duplicate` has been called.
    Duplicate,
    /// FAILED is in the store, and the dead letter is written.
    HandedOver,
    /// The message must go to the dead letters.
    ///
    /// `attempts` is how many attempts ran.
    GiveUp { lease: Option<Lease>, cause: DeadLetterCause, reason: String, attempts: u32 },
    /// FAILED is in the store, but no dead letter has been written.
    NotHandedOver { reason: String },
    /// The handler failed; another attempt may follow.
    Retry { lease: Lease, delay: Duration, counted: bool, reason: String },
    /// The outcome of this attempt is unknown: its effect may have happened, and may still be in progress. Its lease
    /// must be over before another attempt begins.
    Lapsing { attempt: u32, lasts: Duration, reason: String },
    /// Another owner holds the key, or held it and may come back, or the message is not due.
    NotNow { ask_again_in: Duration, cause: WaitCause },
    /// The retry is not due, and the wait is longer than a claim can last.
    NotDue { due_in: Duration },
    /// The store did not answer the claim.
    NoAnswer { error: StoreError },
}

/// What earlier attempts of a message in this process leave behind that its record need not hold.
#[derive(Debug, Default)]
pub(super) struct Past {
    /// The outcome of one is unknown. The record holds this too, unless it was lost since.
    pub(super) effect_is_unknown: bool,
    /// How many in a row were not counted.
    pub(super) uncounted: u32,
    /// Why the last one failed.
    pub(super) last_failure: Option<Box<str>>,
}

/// How often `Handler::duplicate` is called before its failure is counted and the message acknowledged.
const DUPLICATE_TRIES: u32 = 3;

/// The longest time between two reads of a record that cannot be read.
const UNREADABLE_RECHECK: Duration = Duration::from_secs(30);

/// The longest time until the store treats a claim released without delay as due: it counts whole milliseconds.
const RELEASED_IS_DUE: Duration = Duration::from_millis(2);

/// How long a duplicate waits before it asks again for a result whose result store does not answer.
const RESULT_RECHECK: Duration = Duration::from_secs(2);

/// Claims the item's key and acts on the claim outcome. The permit is held while the handler runs.
pub(super) async fn attempt(shared: &Shared, item: &mut Item, permit: OwnedSemaphorePermit) -> Ending {
    let identity = match &item.identity {
        Ok(identity) => identity.clone(),
        Err(error) => {
            let reason = error.to_string();
            return Ending::GiveUp { lease: None, cause: DeadLetterCause::BadKey, reason, attempts: 0 };
        }
    };
    if let Some(stored) = item.found.take() {
        return answer(item, stored).await;
    }
    let (claimed, permits) = match claim(item, &identity).await {
        Ok(Claimed::Granted(lease)) if lease.is_suspect() && !is_used_up(shared, item, &lease) => {
            // It holds no claim while it waits: if this process dies in the meantime, that costs it no attempt.
            lease.release(Duration::ZERO, false, "the message waits to run alone").await;
            let every = Permits::Every(quarantine(shared, item, permit).await);
            (claim(item, &identity).await, every)
        }
        claimed => (claimed, Permits::One(permit)),
    };
    let mismatch = || "the key is known with other content".to_owned();
    match claimed {
        Ok(Claimed::Granted(mut lease)) => {
            if item.past.effect_is_unknown {
                lease.mark_recovered();
            }
            let span = trace::run(shared, item, &lease);
            run(shared, item, lease, permits).instrument(span).await
        }
        Ok(Claimed::Completed(stored)) => {
            let span = trace::answer(shared, item, &identity.key);
            answer(item, stored).instrument(span).await
        }
        // No attempt runs: a claim is protected for at most one lease.
        Ok(Claimed::Busy(retry_in)) if retry_in > item.route.gate.settings().lease => {
            Ending::NotDue { due_in: retry_in }
        }
        Ok(Claimed::Busy(retry_in)) => Ending::NotNow { ask_again_in: retry_in, cause: WaitCause::Busy },
        Ok(Claimed::Failed { handed_over: true, .. }) => Ending::HandedOver,
        Ok(Claimed::Failed { handed_over: false, reason }) => Ending::NotHandedOver { reason },
        Ok(Claimed::Mismatch) => {
            let (cause, reason) = (DeadLetterCause::Mismatch, mismatch());
            Ending::GiveUp { lease: None, cause, reason, attempts: 0 }
        }
        Err(StoreError::Unreadable { key, reason }) => {
            tracing::error!(%key, %reason, "the record cannot be read; its message waits");
            Ending::NotNow { ask_again_in: UNREADABLE_RECHECK, cause: WaitCause::Unreadable }
        }
        Err(error) => Ending::NoAnswer { error },
    }
}

/// Claims the item's key. After a lost answer the same claim is sent again: it may have been granted.
async fn claim(item: &mut Item, identity: &Identity) -> Result<Claimed, StoreError> {
    if item.without_store
        && let Some(fail_open) = &item.route.fail_open
    {
        if let Some(claim) = item.claim.take() {
            item.route.gate.abandon(identity, claim.token);
        }
        return fail_open.claim(&item.delivery.message, identity, fail_open.new_claim()).await;
    }
    let claim = *item.claim.get_or_insert_with(|| item.route.gate.new_claim());
    let claimed = item.route.gate.claim(&item.delivery.message, identity, claim).await;
    if claimed.is_ok() {
        item.claim = None;
    }
    claimed
}

/// Whether all attempts of the message were used before this one.
fn is_used_up(shared: &Shared, item: &Item, lease: &Lease) -> bool {
    // While its handler is paused, the message may not be the cause of its failures.
    lease.attempt().number() > shared.settings.max_attempts && item.route.breaker.is_closed()
}

/// Runs the handler under the lease and stores what it returns.
async fn run(shared: &Shared, item: &Item, lease: Lease, _permits: Permits) -> Ending {
    if is_used_up(shared, item, &lease) {
        return used_up(item, lease);
    }
    if lease.is_over() {
        // The grant came too late. Nothing has run yet.
        lease.release(Duration::ZERO, false, "the lease was over before the handler began").await;
        return Ending::NotNow { ask_again_in: Duration::ZERO, cause: WaitCause::Lapse };
    }
    item.enter(Stage::Running);
    let started = Instant::now();
    let ran = call(item, &lease).await;
    let outcome = match &ran {
        Ran::Returned(Ok(_)) => RunOutcome::Succeeded,
        Ran::Returned(Err(failure)) if failure.is_permanent() => RunOutcome::GaveUp,
        Ran::Returned(Err(_)) => RunOutcome::Failed,
        Ran::Panicked => RunOutcome::Panicked,
        Ran::Cancelled => RunOutcome::Cancelled,
    };
    let scope = item.route.gate.scope();
    let took = started.elapsed();
    shared.watch.handler_times.note(took);
    item.route.gate.observe(Event::HandlerRan { scope, outcome, took });
    trace::ended(outcome);
    item.enter(Stage::Ending);
    let spent = tell_breaker(item, &lease, outcome);
    if lease.is_attempted() {
        return read_back(shared, item, lease, ran, spent).await;
    }
    match ran {
        Ran::Returned(Ok(_)) if item.route.gate.settings().transactional => {
            failed(shared, item, lease, &Failure::retry(WITHOUT_TRANSACTION), spent)
        }
        Ran::Returned(Ok(encoded)) => complete(lease, encoded).await,
        Ran::Returned(Err(failure)) => failed(shared, item, lease, &failure, spent),
        Ran::Panicked => failed(shared, item, lease, &Failure::retry(PANICKED), spent),
        Ran::Cancelled => lapsing(&lease, CANCELLED.to_owned()),
    }
}

/// Gives the message up because the grant is over the limit of attempts. Nothing runs under it.
fn used_up(item: &Item, lease: Lease) -> Ending {
    let attempts = lease.attempt().number().saturating_sub(1);
    let reason = match &item.past.last_failure {
        Some(last) => format!("{attempts} attempts have failed or ended their process; the last one: {last}"),
        // They ran in other processes, or their processes ended.
        None => format!("{attempts} attempts have failed or ended their process"),
    };
    Ending::GiveUp { lease: Some(lease), cause: DeadLetterCause::AttemptsUsedUp, reason, attempts }
}

/// Ends the attempt without a write, so that the lease lapses and the next attempt is flagged as recovered.
fn lapsing(lease: &Lease, reason: String) -> Ending {
    Ending::Lapsing { attempt: lease.attempt().number(), lasts: lease.remaining(), reason }
}

/// The reason of an attempt whose handler was dropped after its cancellation.
const CANCELLED: &str = "the handler was cancelled, and did not end in time";

/// Another owner took over. Its outcome counts, so claim again to learn it.
const TAKEN_OVER: Ending = Ending::NotNow { ask_again_in: Duration::ZERO, cause: WaitCause::Busy };

/// The reason of a retry that a transactional gate demands.
const WITHOUT_TRANSACTION: &str = "the handler returned without `Attempt::commit_with` or `Attempt::completing`, \
                                   and its gate is `transactional()`";

/// Reads the record after the handler tried to complete the message in its own transaction. The record decides, not
/// what the handler returned.
async fn read_back(shared: &Shared, item: &Item, lease: Lease, ran: Ran, spent: Spent) -> Ending {
    match (lease.read_back().await, ran) {
        (Committed::Yes, ran) => {
            if let Ran::Returned(Err(failure)) = ran {
                warn!(origin = %item.delivery.message.origin(), %failure, "the handler failed after its transaction was committed");
            }
            Ending::Completed
        }
        (Committed::NotOwner, _) => TAKEN_OVER,
        (Committed::No, Ran::Returned(Err(failure))) => failed(shared, item, lease, &failure, spent),
        (Committed::No, Ran::Panicked) => failed(shared, item, lease, &Failure::retry(PANICKED), spent),
        (Committed::No, Ran::Returned(Ok(_))) => {
            let failure = lease.not_committed();
            failed(shared, item, lease, &failure, spent)
        }
        // Its effects outside the transaction may have happened.
        (Committed::No, Ran::Cancelled) => lapsing(&lease, CANCELLED.to_owned()),
    }
}

const PANICKED: &str = "the handler panicked";

/// The permits of a run: one, or all of them.
#[expect(dead_code, reason = "held for their drop")]
enum Permits {
    One(OwnedSemaphorePermit),
    Every(Option<OwnedSemaphorePermit>),
}

/// Waits until nothing else runs in this process, and keeps it so: a message that kills its process must not
/// use up the attempts of other messages.
///
/// It gives its own permit back first: two such messages that kept theirs would wait for each other.
async fn quarantine(
    shared: &Shared,
    item: &Item,
    permit: OwnedSemaphorePermit,
) -> Option<OwnedSemaphorePermit> {
    drop(permit);
    let scope = item.route.gate.scope();
    item.enter(Stage::Quarantined);
    item.route.gate.observe(Event::Quarantined { scope });
    let origin = item.delivery.message.origin();
    warn!(scope, %origin, "earlier attempts ended without an outcome: the message runs alone");
    let every = shared.permits.clone().acquire_many_owned(shared.settings.concurrency).await.ok();
    sleep(RELEASED_IS_DUE).await;
    every
}

/// How the handler's future ended.
enum Ran {
    Returned(Result<Encoded, Failure>),
    Panicked,
    Cancelled,
}

async fn call(item: &Item, lease: &Lease) -> Ran {
    let settings = item.route.gate.settings();
    let handler = &item.route.handler;
    let (message, attempt) = (lease.message().clone(), lease.attempt().clone());
    let work = async move { handler.handle(message, attempt, settings.codec).await };
    let mut work = std::pin::pin!(AssertUnwindSafe(work).catch_unwind());
    let stop = async {
        match item.delivery.ack_handle.lost() {
            None => lease.cancelled().cancelled().await,
            Some(lost) => tokio::select! {
                () = lease.cancelled().cancelled() => {}
                () = lost => lease.cancelled().cancel(),
            },
        }
    };
    let ran = tokio::select! {
        biased;
        ran = &mut work => Some(ran),
        () = stop => {
            let grace = settings.lease.min(CANCELLATION_GRACE);
            timeout(grace, work).await.ok()
        }
    };
    match ran {
        Some(Ok(returned)) => Ran::Returned(returned),
        Some(Err(_panic)) => Ran::Panicked,
        None => Ran::Cancelled,
    }
}

async fn complete(lease: Lease, encoded: Encoded) -> Ending {
    let storable = lease.storable(encoded).await;
    match lease.record_result(storable.stored).await {
        Completion::Applied => Ending::Completed,
        Completion::NotOwner => TAKEN_OVER,
    }
}

/// Whether the run, if it failed, costs an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spent {
    Yes,
    No,
}

/// Reports the run to the breaker. A run cut short by an outage or a stop is no evidence about the handler, and costs
/// no attempt.
fn tell_breaker(item: &Item, lease: &Lease, outcome: RunOutcome) -> Spent {
    let passed = match outcome {
        RunOutcome::Succeeded | RunOutcome::GaveUp => RunResult::Success,
        _ if lease.was_cut_short() => return Spent::No,
        _ => RunResult::Failure,
    };
    let gate = &item.route.gate;
    match breaker_key(item).is_none_or(|key| item.route.breaker.ran(gate, key, passed)) {
        true => Spent::Yes,
        false => Spent::No,
    }
}

fn failed(shared: &Shared, item: &Item, lease: Lease, failure: &Failure, spent: Spent) -> Ending {
    let reason = failure.reason();
    let attempt = lease.attempt().number();
    let give_up =
        |lease, cause, reason| Ending::GiveUp { lease: Some(lease), cause, reason, attempts: attempt };
    let (after, counted) = match failure.advice() {
        Advice::GiveUp => return give_up(lease, DeadLetterCause::Permanent, reason),
        Advice::Retry { after } => (after, spent == Spent::Yes),
        Advice::NotRun => (None, false),
        Advice::Unknown => return lapsing(&lease, reason),
    };
    if counted && attempt >= shared.settings.max_attempts {
        return give_up(lease, DeadLetterCause::AttemptsUsedUp, reason);
    }
    // Attempts that are not counted get the same delays as those that are.
    let failures = attempt.saturating_add(item.past.uncounted);
    let delay = after.unwrap_or_else(|| shared.settings.backoff.wait(failures, shared.random()));
    Ending::Retry { lease, delay, counted, reason }
}

/// Passes the first result to the handler. Whatever the handler does with it, the message is done.
pub(super) async fn answer(item: &Item, stored: Bytes) -> Ending {
    let (result, lost) = match item.route.gate.fetch(&stored).await {
        Ok(result) => (result, None),
        Err(Unfetched::Lost(error)) => (stored, Some(error.to_string())),
        Err(Unfetched::NoAnswer(_)) => {
            return Ending::NotNow { ask_again_in: RESULT_RECHECK, cause: WaitCause::Result };
        }
    };
    let handler = &item.route.handler;
    for failures in 1..=DUPLICATE_TRIES {
        let message = item.delivery.message.clone();
        let (result, lost) = (result.clone(), lost.clone().map(Into::into));
        let call = async move { handler.duplicate(message, result, lost).await };
        match AssertUnwindSafe(call).catch_unwind().await {
            Ok(Ok(())) => return Ending::Duplicate,
            Ok(Err(failure)) => {
                warn!(origin = %item.delivery.message.origin(), %failure, "`Handler::duplicate` failed");
            }
            Err(_panic) => warn!(origin = %item.delivery.message.origin(), "`Handler::duplicate` panicked"),
        }
        sleep(DUPLICATE_BACKOFF * failures).await;
    }
    item.route.gate.observe(Event::DuplicateHookFailed { scope: item.route.gate.scope() });
    Ending::Duplicate
}

const DUPLICATE_BACKOFF: Duration = Duration::from_millis(100);
