//! A message that starts in a unit, and what becomes of it.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::store::StoreError;
use tokio::sync::OwnedSemaphorePermit;

use super::error::ConsumerError;
use super::item::Item;
use super::lanes::PlaceId;
use super::schedule::Shard;
use crate::health::WaitCause;

/// A message that is about to start.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) place: PlaceId,
    pub(super) item: Box<Item>,
    /// The shard of the store that its attempt asks.
    pub(super) asks: Option<Shard>,
    /// The right to run its handler. It is given back before the message is settled.
    pub(super) permit: Option<Permit>,
}

/// The right to run handlers.
#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
pub(super) enum Permit {
    /// The permit of a message alone, or all permits.
    Own(OwnedSemaphorePermit),
    /// The one of its batch.
    OfBatch(Arc<OwnedSemaphorePermit>),
}

/// A member whose attempt has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) place: PlaceId,
    /// The shard of the store that was asked, if any.
    pub(super) asked: Option<Shard>,
    pub(super) next: Next,
}

/// The next step of a message after an attempt.
#[derive(Debug)]
pub(super) enum Next {
    /// Nothing: it was acknowledged, or no longer belongs to this consumer.
    Finished,
    /// Another attempt after a delay. The message keeps its place, so none behind it overtakes.
    Again {
        item: Box<Item>,
        after: Duration,
        cause: WaitCause,
    },
    /// Another attempt as soon as the store answers again.
    NoAnswer { item: Box<Item>, error: StoreError },
    /// The consumer cannot go on. The message was not acknowledged.
    Stop(Box<ConsumerError>),
}

impl Member {
    pub(super) fn is_in_batch(&self) -> bool {
        matches!(self.permit, Some(Permit::OfBatch(_)))
    }

    /// The end of a member that has not started.
    pub(super) fn not_ours(self) -> Ended {
        Ended {
            place: self.place,
            asked: None,
            next: Next::Finished,
        }
    }
}
