//! What runs in its own task: attempts, and answers to messages found completed.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::super::attempt::{answer, attempt};
use super::super::lanes::{LaneId, PlaceId};
use super::super::settle::{Outcome, settle};
use super::super::{Item, Route, Shared};
use super::{Done, Shard, breaker_key};
use crate::source::AckHandle;

/// Calls the ack handle's `stop` when the attempt is over, whatever its outcome.
struct Started(Arc<dyn AckHandle>);

impl Drop for Started {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Calls the breaker's `over` when the attempt is over, whether or not the handler has run.
struct Asked {
    route: Arc<Route>,
    key: Option<LaneId>,
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.route.breaker.over(&self.route.gate, key);
        }
    }
}

pub(super) async fn attempt_one(
    shared: Arc<Shared>,
    place: PlaceId,
    mut item: Item,
    asked: Option<Shard>,
    permit: OwnedSemaphorePermit,
) -> Done {
    let bytes = item.bytes;
    let _asked = Asked { route: Arc::clone(&item.route), key: breaker_key(&item) };
    if shared.stopping.is_cancelled() || !item.delivery.ack_handle.start() {
        return Done::Attempted { place, bytes, asked: None, outcome: Outcome::NotOurs };
    }
    let _started = Started(Arc::clone(&item.delivery.ack_handle));
    let ending = attempt(&shared, &mut item, permit).await;
    let outcome = settle(&shared, item, ending).await;
    Done::Attempted { place, bytes, asked, outcome }
}

pub(super) async fn answer_all(shared: Arc<Shared>, items: Vec<Item>, permit: OwnedSemaphorePermit) -> Done {
    let mut messages = Vec::with_capacity(items.len());
    for mut item in items {
        messages.push(item.bytes);
        let Some(stored) = item.found.take() else { continue };
        if !item.delivery.ack_handle.start() {
            continue;
        }
        let _started = Started(Arc::clone(&item.delivery.ack_handle));
        let ending = answer(&item, stored).await;
        settle(&shared, item, ending).await;
    }
    drop(permit);
    Done::Answered { messages }
}
