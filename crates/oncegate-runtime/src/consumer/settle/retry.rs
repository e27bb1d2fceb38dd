//! The release of a claim whose message runs again later, and the place where the message waits.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::consumer::breaker::FailureCount;
use crate::consumer::item::Item;
use crate::consumer::retry_writes::RETRY;
use crate::consumer::shared::Shared;
use crate::gate::Lease;
use crate::health::Stage;
use crate::observe::Event;

/// The place where a message waits for its retry.
pub(super) enum Waits {
    InRetryTopic,
    AtBroker,
    Here,
}

/// Releases the claim of a failed attempt, and puts the message where it waits.
pub(super) async fn retry(
    shared: &Shared,
    item: &mut Item,
    lease: Lease,
    delay: Duration,
    count: FailureCount,
    reason: String,
) -> Waits {
    let attempt = lease.attempt().number();
    let scope = item.route.gate.scope();
    let origin = item.delivery.message.origin();
    info!(scope, %origin, attempt, ?delay, reason, "the attempt failed; the message will be tried again");
    let is_counted = count == FailureCount::Counted;
    if is_counted && attempt == 1 {
        let message = item.delivery.message.clone();
        item.delivery.message = message.with_first_failed_at(SystemTime::now());
    }
    let next = wait(shared, item, lease, delay, is_counted, &reason).await;
    item.route.gate.observe(Event::Retried {
        scope: item.route.gate.scope(),
    });
    item.past.uncounted = if is_counted {
        0
    } else {
        item.past.uncounted.saturating_add(1)
    };
    item.note_failure(attempt, reason);
    next
}

/// Releases the claim of a message that cannot be done yet, and puts the message where it waits.
/// That is no attempt and no failure: a handler may want a message later any number of times.
pub(super) async fn later(
    shared: &Shared,
    item: &mut Item,
    lease: Lease,
    delay: Duration,
    reason: &str,
) -> Waits {
    let scope = item.route.gate.scope();
    let origin = item.delivery.message.origin();
    debug!(scope, %origin, ?delay, reason, "the handler wants the message later");
    wait(shared, item, lease, delay, NOT_COUNTED, reason).await
}

/// A release that takes the attempt back.
const NOT_COUNTED: bool = false;

/// Releases a claim, and puts its message where it waits for as long as `delay`, or a little
/// longer.
async fn wait(
    shared: &Shared,
    item: &mut Item,
    lease: Lease,
    delay: Duration,
    counted: bool,
    reason: &str,
) -> Waits {
    let handed_on = hand_on(shared, item, delay).await;
    lease
        .release(handed_on.unwrap_or(delay), counted, reason)
        .await;
    match handed_on {
        Some(_) => Waits::InRetryTopic,
        None if item.delivery.ack_handle.nack_after(delay) => Waits::AtBroker,
        None => Waits::Here,
    }
}

/// Sends the message to a retry topic if the delay is long enough, and returns how long it waits
/// there. `None`: it stays here, because its delay is short, there is no retry topic, or the retry
/// topic cannot be written.
///
/// A crash after this leaves two copies of the message, one here and one there: the record answers
/// the second.
pub(super) async fn hand_on(shared: &Shared, item: &mut Item, wait: Duration) -> Option<Duration> {
    let queue = shared.retry_queue.as_ref()?;
    let wait = queue.wait(wait)?;
    item.enter(Stage::Ending, Instant::now());
    match queue.send(&item.delivery.message, wait).await {
        Ok(()) => {
            shared.retry_writes.succeeded(wait);
            Some(wait)
        }
        Err(error) => {
            let origin = item.delivery.message.origin();
            warn!(%origin, error, "the retry topic could not be written; the message waits in this process");
            item.past.unwritten = Some(shared.retry_writes.failed(wait, &error));
            shared
                .observer
                .observe(Event::SourceError { operation: RETRY });
            None
        }
    }
}
