//! One attempt of one message: claim, run, complete. It ends with an [`Ending`] and acknowledges nothing.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use oncegate_core::store::StoreError;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, timeout};
use tracing::{Instrument as _, info, warn};

use super::answer::answer;
use super::batch::{BatchSeat, MemberRan, Verdict};
use super::breaker::FailureCount;
use super::ending::{BUSY_BACKOFF, Ending};
use super::item::{Item, Probe, RolledBack};
use super::returned_letter;
use super::shared::Shared;
use super::trace;
use super::transaction_batch::TransactionSeat;
use super::unclaimed;
use crate::attempt::CANCELLATION_GRACE;
use crate::batch::BatchMessage;
use crate::dead_letters::DeadLetterCause;
use crate::failure::{Advice, Failure};
use crate::gate::{Claimed, Committed, Completion, Identity, Lease};
use crate::handler::Encoded;
use crate::health::{Stage, WaitCause};
use crate::observe::{BatchCall, Event, RunOutcome};

/// The time until a key is asked about again that is being moved between servers.
const KEY_RECHECK: Duration = Duration::from_secs(1);

/// The longest time between two reads of a record that cannot be read.
const UNREADABLE_RECHECK: Duration = Duration::from_secs(30);

/// The longest time until the store treats a claim released without delay as due, or a lease as over: it counts whole
/// milliseconds.
const RELEASED_IS_DUE: Duration = Duration::from_millis(2);

/// How long a message that must run alone may keep others from starting while the last handlers end.
const QUARANTINE_PATIENCE: Duration = Duration::from_secs(10);

/// The delay before such a message tries again to run alone: meanwhile the others run.
const QUARANTINE_PAUSE: Duration = Duration::from_secs(30);

/// How an attempt runs the handler.
#[derive(Debug)]
pub(super) enum RunSlot {
    /// It calls the handler itself, under this permit.
    Own(OwnedSemaphorePermit),
    /// It is part of a batch's call.
    InBatch(BatchSeat),
    /// It is part of a batch's transaction.
    InTransaction(TransactionSeat),
}

/// Claims the item's key and acts on the claim outcome. The permit of the slot is held while the handler runs.
pub(super) async fn attempt(shared: &Shared, item: &mut Item, slot: RunSlot) -> Ending {
    let identity = match &item.identity {
        Ok(identity) => identity.clone(),
        Err(error) => {
            let reason = error.to_string();
            return Ending::GiveUp { lease: None, cause: DeadLetterCause::BadKey, reason, attempts: 0 };
        }
    };
    let (seat, permits) = match slot {
        RunSlot::Own(permit) => (None, RunPermits::Own(permit)),
        RunSlot::InBatch(seat) => {
            let permit = seat.permit();
            (Some(seat), RunPermits::OfBatch(permit))
        }
        RunSlot::InTransaction(seat) => return attempt_in_transaction(shared, item, &identity, seat).await,
    };
    if let Some(stored) = item.found.take() {
        drop(seat);
        return answer(item, stored).await;
    }
    if seat.is_none()
        && let Some(ending) = unclaimed::attempt(shared, item, &identity).await
    {
        return ending;
    }
    let (claimed, seat, permits) = match claim(item, &identity).await {
        Ok(Claimed::Granted(lease)) if must_run_alone(shared, item, &lease) => {
            let is_in_batch = seat.is_some();
            drop(seat);
            // It holds no claim while it waits: if this process dies in the meantime, that costs it no attempt.
            lease.release(Duration::ZERO, false, "the message waits to run alone").await;
            if is_in_batch {
                item.past.runs_alone = true;
                return Ending::NotNow { ask_again_in: RELEASED_IS_DUE, cause: WaitCause::Retry };
            }
            let Some(every) = quarantine(shared, item, permits).await else {
                return Ending::NotNow { ask_again_in: QUARANTINE_PAUSE, cause: WaitCause::Retry };
            };
            (claim(item, &identity).await, None, every)
        }
        // The batch does not wait for a message that is not to run.
        claimed => {
            let seat = seat.filter(|_| matches!(claimed, Ok(Claimed::Granted(_))));
            (claimed, seat, permits)
        }
    };
    follow(shared, item, &identity, claimed, (seat, permits)).await
}

/// The attempt of a message that is in the transaction of a batch, unless something is known of its key. Then the key is
/// claimed, and its handler runs later and alone.
async fn attempt_in_transaction(
    shared: &Shared,
    item: &mut Item,
    identity: &Identity,
    seat: TransactionSeat,
) -> Ending {
    let permit = seat.permit();
    if let Some(stored) = item.found.take() {
        drop(seat);
        return answer(item, stored).await;
    }
    if let Some(ending) = unclaimed::attempt_in_batch(shared, item, identity, seat).await {
        return ending;
    }
    match claim(item, identity).await {
        Ok(Claimed::Granted(lease)) if item.past.rolled_back.is_none() => {
            lease.release(Duration::ZERO, false, "the message waits to run alone").await;
            item.past.runs_alone = true;
            Ending::NotNow { ask_again_in: RELEASED_IS_DUE, cause: WaitCause::Retry }
        }
        claimed => follow(shared, item, identity, claimed, (None, RunPermits::OfBatch(permit))).await,
    }
}

/// Does what the claim outcome says.
async fn follow(
    shared: &Shared,
    item: &mut Item,
    identity: &Identity,
    claimed: Result<Claimed, StoreError>,
    (seat, permits): (Option<BatchSeat>, RunPermits),
) -> Ending {
    let mismatch = || "the key is known with other content".to_owned();
    match claimed {
        Ok(Claimed::Granted(lease)) => granted(shared, item, lease, seat, permits).await,
        Ok(Claimed::Completed(stored)) => completed(shared, item, identity, stored).await,
        Ok(Claimed::Busy(retry_in)) => busy(shared, item, retry_in),
        Ok(Claimed::Failed { reason, by, .. }) if returned_letter::is_own(item) => {
            returned_letter::follow(shared, item, identity, (reason, by)).await
        }
        Ok(Claimed::Failed { handed_over: true, .. }) => {
            let (scope, origin) = (item.route.gate.scope(), item.delivery.message.origin());
            info!(scope, %origin, "the message has failed before, and is in the dead letters");
            Ending::HandedOver
        }
        Ok(Claimed::Failed { handed_over: false, reason, by }) => Ending::NotHandedOver { reason, by },
        Ok(Claimed::Mismatch) => {
            let (cause, reason) = (DeadLetterCause::Mismatch, mismatch());
            Ending::GiveUp { lease: None, cause, reason, attempts: 0 }
        }
        Err(StoreError::Unreadable { key, reason }) => {
            tracing::error!(%key, %reason, "the record cannot be read; its message waits");
            Ending::NotNow { ask_again_in: UNREADABLE_RECHECK, cause: WaitCause::Unreadable }
        }
        // Its shard answers for other keys, so this is no outage.
        Err(error @ StoreError::KeyUnavailable { .. }) => {
            tracing::debug!(%error, "the message waits");
            Ending::NotNow { ask_again_in: KEY_RECHECK, cause: WaitCause::Retry }
        }
        Err(error) => Ending::NoAnswer { error },
    }
}

/// Whether earlier attempts of the message have ended their processes. It holds no failure that must be recorded first.
fn must_run_alone(shared: &Shared, item: &Item, lease: &Lease) -> bool {
    lease.is_suspect() && item.past.rolled_back.is_none() && !is_used_up(shared, item, lease)
}

/// The key is claimed: runs the handler, unless a failure of before must be recorded first.
async fn granted(
    shared: &Shared,
    item: &mut Item,
    mut lease: Lease,
    seat: Option<BatchSeat>,
    permits: RunPermits,
) -> Ending {
    item.past.busy = 0;
    if item.past.effect_is_unknown {
        lease.mark_recovered();
    }
    if let Some(RolledBack { failure, count }) = item.past.rolled_back.take() {
        return failed(shared, item, lease, &failure, count);
    }
    let span = trace::run(shared, item, &lease);
    run(shared, item, lease, seat, permits).instrument(span).await
}

/// Another attempt has the key, or its retry is not due.
fn busy(shared: &Shared, item: &mut Item, retry_in: Duration) -> Ending {
    // No attempt runs: a claim is protected for at most one lease.
    if retry_in > item.route.gate.settings().lease + RELEASED_IS_DUE {
        return Ending::NotDue { due_in: retry_in };
    }
    item.past.busy = item.past.busy.saturating_add(1);
    let ask_again_in = retry_in.min(BUSY_BACKOFF.wait(item.past.busy, shared.random()));
    Ending::NotNow { ask_again_in, cause: WaitCause::Busy }
}

/// The record is completed: by this message's own transaction, if its commit was not answered, or before.
async fn completed(shared: &Shared, item: &mut Item, identity: &Identity, stored: Bytes) -> Ending {
    match unclaimed::is_completed_by_last_commit(item, identity).await {
        Ok(true) => Ending::Completed,
        Ok(false) => {
            let span = trace::answer(shared, item, &identity.key);
            answer(item, stored).instrument(span).await
        }
        Err(error) => Ending::NoAnswer { error },
    }
}

/// Claims the item's key. After a lost answer the same claim is sent again: it may have been granted.
async fn claim(item: &mut Item, identity: &Identity) -> Result<Claimed, StoreError> {
    let Item { route, delivery, claim, probe, past, .. } = item;
    if item.without_store
        && let Some(fail_open) = &route.fail_open
    {
        *claim = None;
        return fail_open.new_claim(identity).send(&delivery.message).await;
    }
    let claim_now =
        claim.get_or_insert_with(|| route.gate.new_claim(identity).after_discard(past.was_discarded));
    let claimed = claim_now.send(&delivery.message).await;
    if claimed.is_ok() {
        *claim = None;
    }
    if matches!(claimed, Ok(_) | Err(StoreError::Unreadable { .. })) {
        probe.iter().for_each(Probe::answered);
    }
    claimed
}

/// Whether all attempts of the message were used before this one.
fn is_used_up(shared: &Shared, item: &Item, lease: &Lease) -> bool {
    // While its handler is paused, the message may not be the cause of its failures.
    lease.attempt().number() > shared.settings.max_attempts && item.route.breaker.is_closed()
}

/// Runs the handler under the lease and stores what it returns.
async fn run(
    shared: &Shared,
    item: &mut Item,
    lease: Lease,
    seat: Option<BatchSeat>,
    _permits: RunPermits,
) -> Ending {
    if is_used_up(shared, item, &lease) {
        return used_up(item, lease);
    }
    if lease.is_over() {
        drop(seat);
        // The grant came too late. Nothing has run yet.
        lease.release(Duration::ZERO, false, "the lease was over before the handler began").await;
        return Ending::NotNow { ask_again_in: Duration::ZERO, cause: WaitCause::Lapse };
    }
    item.enter(Stage::Running);
    let started = Instant::now();
    let ran = match seat {
        None => call(item, &lease, call_alone(item, &lease)).await,
        Some(seat) => {
            let (message, attempt) = (lease.message().clone(), lease.attempt().clone());
            let mut fails_alone = false;
            let taken = async {
                let ran;
                Verdict { ran, fails_alone } = seat.take(BatchMessage::new(message, attempt)).await;
                ran
            };
            let ran = call(item, &lease, taken).await;
            item.past.runs_alone |= fails_alone;
            ran
        }
    };
    let outcome = match &ran {
        Ran::Returned(Ok(_)) => RunOutcome::Succeeded,
        Ran::Returned(Err(failure)) if failure.is_permanent() => RunOutcome::GaveUp,
        Ran::Returned(Err(failure)) if failure.is_later() => RunOutcome::Later,
        Ran::Returned(Err(_)) => RunOutcome::Failed,
        Ran::Panicked => RunOutcome::Panicked,
        Ran::Cancelled => RunOutcome::Cancelled,
    };
    item.past.was_discarded = matches!(ran, Ran::Cancelled);
    let scope = item.route.gate.scope();
    let took = started.elapsed();
    shared.watch.handler_times.note(took);
    item.route.gate.observe(Event::HandlerRan { scope, outcome, took });
    trace::ended(outcome);
    item.enter(Stage::Ending);
    let count = item.tell_breaker(lease.was_cut_short(), outcome, ran.failure());
    if lease.is_attempted() {
        return read_back(shared, item, lease, ran, count).await;
    }
    match ran {
        Ran::Returned(Ok(_)) if item.route.gate.settings().transactional => {
            failed(shared, item, lease, &Failure::retry(WITHOUT_TRANSACTION), count)
        }
        Ran::Returned(Ok(encoded)) => complete(lease, encoded).await,
        Ran::Returned(Err(failure)) => failed(shared, item, lease, &failure, count),
        Ran::Panicked => failed(shared, item, lease, &Failure::retry(PANICKED), count),
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
async fn read_back(shared: &Shared, item: &Item, lease: Lease, ran: Ran, count: FailureCount) -> Ending {
    match (lease.read_back().await, ran) {
        (Committed::Yes, ran) => {
            if let Ran::Returned(Err(failure)) = ran {
                warn!(origin = %item.delivery.message.origin(), %failure, "the handler failed after its transaction was committed");
            }
            Ending::Completed
        }
        (Committed::NotOwner, _) => TAKEN_OVER,
        (Committed::No, Ran::Returned(Err(failure))) => failed(shared, item, lease, &failure, count),
        (Committed::No, Ran::Panicked) => failed(shared, item, lease, &Failure::retry(PANICKED), count),
        (Committed::No, Ran::Returned(Ok(_))) => {
            let failure = lease.not_committed();
            failed(shared, item, lease, &failure, count)
        }
        // Its effects outside the transaction may have happened.
        (Committed::No, Ran::Cancelled) => lapsing(&lease, CANCELLED.to_owned()),
    }
}

const PANICKED: &str = "the handler panicked";

/// The permits of a run: its own, one or all of them; or the one of its batch.
#[expect(dead_code, reason = "held for their drop")]
enum RunPermits {
    Own(OwnedSemaphorePermit),
    OfBatch(Arc<OwnedSemaphorePermit>),
}

/// Waits until nothing else runs in this process, and keeps it so: a message that kills its process must not
/// use up the attempts of other messages. `None` when the consumer stops, or when others run for too long: while this
/// one waits for the last permits, no other message starts.
///
/// It gives its own permit back first: two such messages that kept theirs would wait for each other.
async fn quarantine(shared: &Shared, item: &Item, permits: RunPermits) -> Option<RunPermits> {
    drop(permits);
    let scope = item.route.gate.scope();
    item.enter(Stage::Quarantined);
    item.route.gate.observe(Event::Quarantined { scope });
    let origin = item.delivery.message.origin();
    warn!(scope, %origin, "earlier attempts ended without an outcome: the message runs alone");
    let every = shared.permits.clone().acquire_many_owned(shared.settings.concurrency);
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
    (!shared.stopping.is_cancelled()).then_some(RunPermits::Own(every))
}

/// How the handler's future ended.
enum Ran {
    Returned(Result<Encoded, Failure>),
    Panicked,
    Cancelled,
}

impl Ran {
    fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Returned(Err(failure)) => Some(failure),
            _ => None,
        }
    }
}

/// Calls the handler with this message alone.
async fn call_alone(item: &Item, lease: &Lease) -> MemberRan {
    let handler = &item.route.handler;
    let (message, attempt) = (lease.message().clone(), lease.attempt().clone());
    let gate = &item.route.gate;
    if item.route.batches.is_some() {
        gate.observe(Event::BatchCalled { scope: gate.scope(), call: BatchCall::Gathered });
    }
    let codec = gate.settings().codec;
    let work = async move { handler.handle(message, attempt, codec).await };
    match AssertUnwindSafe(work).catch_unwind().await {
        Ok(returned) => MemberRan::Returned(returned),
        Err(_panic) => MemberRan::Panicked,
    }
}

/// Waits for the handler's end, or until it is cancelled and does not end in time.
async fn call(item: &Item, lease: &Lease, work: impl Future<Output = MemberRan>) -> Ran {
    let mut work = std::pin::pin!(work);
    let stop = async {
        match item.delivery.ack_handle.lost() {
            None => lease.discarded().cancelled().await,
            Some(lost) => tokio::select! {
                () = lease.discarded().cancelled() => {}
                () = lost => lease.discarded().cancel(),
            },
        }
    };
    let ran = tokio::select! {
        biased;
        ran = &mut work => Some(ran),
        () = stop => {
            let grace = item.route.gate.settings().lease.min(CANCELLATION_GRACE);
            timeout(grace, work).await.ok()
        }
    };
    match ran {
        Some(MemberRan::Returned(returned)) => Ran::Returned(returned),
        Some(MemberRan::Panicked) => Ran::Panicked,
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

fn failed(shared: &Shared, item: &Item, lease: Lease, failure: &Failure, count: FailureCount) -> Ending {
    let reason = failure.reason();
    let attempt = lease.attempt().number();
    // One that is due starts before messages that came later, so one without a delay would leave them no permit.
    let delayed = |delay: Duration| delay.max(shared.settings.backoff.first() / 2);
    let give_up =
        |lease, cause, reason| Ending::GiveUp { lease: Some(lease), cause, reason, attempts: attempt };
    let (after, count) = match failure.advice() {
        Advice::GiveUp => return give_up(lease, DeadLetterCause::Permanent, reason),
        Advice::Retry { after } => (after, count),
        Advice::NotRun => (None, FailureCount::Uncounted),
        Advice::Later { after } => return Ending::Later { lease, delay: delayed(after), reason },
        Advice::Unknown => return lapsing(&lease, reason),
    };
    if count == FailureCount::Counted && attempt >= shared.settings.max_attempts {
        return give_up(lease, DeadLetterCause::AttemptsUsedUp, reason);
    }
    // Attempts that are not counted get the same delays as those that are.
    let failures = attempt.saturating_add(item.past.uncounted);
    let delay = delayed(after.unwrap_or_else(|| shared.settings.backoff.wait(failures, shared.random())));
    Ending::Retry { lease, delay, count, reason }
}
