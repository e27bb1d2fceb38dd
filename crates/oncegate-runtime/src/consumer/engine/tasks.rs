//! What runs in its own task: attempts, and answers to messages found completed.

use std::sync::Arc;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::super::answer::answer;
use super::super::attempt::{RunSlot, attempt};
use super::super::batch::Batch;
use super::super::item::Item;
use super::super::lanes::PlaceId;
use super::super::schedule::Shard;
use super::super::seats::seats;
use super::super::settle::{Outcome, settle};
use super::super::shared::{BatchCaller, Batches, Route, Shared};
use super::super::transaction_batch::TransactionBatch;
use crate::handler::BoxFuture;
use crate::source::AckHandle;

/// A message that is about to start.
pub(super) struct NextAttempt {
    pub(super) place: PlaceId,
    pub(super) item: Item,
    /// The shard of the store that its attempt asks.
    pub(super) asks: Option<Shard>,
}

/// How an attempt ended.
pub(super) struct EndedAttempt {
    pub(super) place: PlaceId,
    /// The shard of the store that was asked, if any.
    pub(super) asked: Option<Shard>,
    pub(super) outcome: Outcome,
}

/// What a task returns.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all are of the large kind, and a box for each costs more"
)]
pub(super) enum Done {
    Attempted(EndedAttempt),
    /// The last messages of a batch whose attempts have ended.
    Batch(Vec<EndedAttempt>),
    Answered {
        places: Vec<PlaceId>,
    },
}

/// Calls the ack handle's `stop` when the attempt is over, whatever its outcome.
struct Started(Arc<dyn AckHandle>);

impl Drop for Started {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Calls the breaker's `over` when the attempt is over, whether or not the handler has run.
struct BreakerAttempt {
    route: Arc<Route>,
    key: Option<u64>,
}

impl Drop for BreakerAttempt {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.route.breaker.over(&self.route.gate, key);
        }
    }
}

pub(super) async fn attempt_one(
    shared: Arc<Shared>,
    place: PlaceId,
    item: Item,
    asks: Option<Shard>,
    permit: OwnedSemaphorePermit,
) -> Done {
    Done::Attempted(attempt_in(&shared, NextAttempt { place, item, asks }, RunSlot::Own(permit)).await)
}

/// Runs the attempts of a batch side by side in one task. Those that end before the others are sent to `ends_early`, so
/// that no message waits for another one's dead letter.
pub(super) async fn attempt_batch(
    shared: Arc<Shared>,
    members: Vec<NextAttempt>,
    permit: OwnedSemaphorePermit,
    ends_early: mpsc::UnboundedSender<Vec<EndedAttempt>>,
) -> Done {
    let Some(route) = members.first().map(|member| Arc::clone(&member.item.route)) else {
        return Done::Batch(Vec::new());
    };
    let Some(Batches { caller, .. }) = &route.batches else {
        debug_assert!(false, "only routes with a batch handler gather their messages");
        return Done::Batch(Vec::new());
    };
    let mut left = members.len();
    let (call, slots): (BoxFuture<'_, ()>, Vec<RunSlot>) = match caller {
        BatchCaller::Claimed(handler) => {
            let (taken, seats) = seats(left, permit);
            let call = Batch::new(&route, handler).run(taken);
            (Box::pin(call), seats.into_iter().map(RunSlot::InBatch).collect())
        }
        BatchCaller::InTransaction(caller) => {
            let (taken, seats) = seats(left, permit);
            let call = TransactionBatch::new(&route, caller).run(taken);
            (Box::pin(call), seats.into_iter().map(RunSlot::InTransaction).collect())
        }
    };
    let attempt = |(member, slot)| attempt_in(&shared, member, slot);
    let attempts: FuturesUnordered<_> = members.into_iter().zip(slots).map(attempt).collect();
    let mut attempts = std::pin::pin!(attempts.ready_chunks(left));
    let mut call = call.fuse();
    loop {
        tokio::select! {
            biased;
            Some(ended) = attempts.next() => {
                left = left.saturating_sub(ended.len());
                if left == 0 {
                    return Done::Batch(ended);
                }
                // The engine receives until this task has ended.
                _ = ends_early.send(ended);
            }
            () = &mut call => {}
        }
    }
}

async fn attempt_in(shared: &Shared, member: NextAttempt, slot: RunSlot) -> EndedAttempt {
    let NextAttempt { place, mut item, asks } = member;
    let _attempt = BreakerAttempt { route: Arc::clone(&item.route), key: item.breaker_key() };
    if shared.stopping.is_cancelled() || !item.delivery.ack_handle.start() {
        return EndedAttempt { place, asked: None, outcome: Outcome::NotOurs };
    }
    let _started = Started(Arc::clone(&item.delivery.ack_handle));
    let ending = attempt(shared, &mut item, slot).await;
    let outcome = settle(shared, item, ending).await;
    EndedAttempt { place, asked: asks, outcome }
}

pub(super) async fn answer_all(
    shared: Arc<Shared>,
    items: Vec<(PlaceId, Item)>,
    permit: OwnedSemaphorePermit,
) -> Done {
    let mut places = Vec::with_capacity(items.len());
    for (place, mut item) in items {
        places.push(place);
        let Some(stored) = item.found.take() else { continue };
        if !item.delivery.ack_handle.start() {
            continue;
        }
        let _started = Started(Arc::clone(&item.delivery.ack_handle));
        let ending = answer(&item, stored).await;
        settle(&shared, item, ending).await;
    }
    drop(permit);
    Done::Answered { places }
}
