//! A message that starts in a unit, and what becomes of it.

use std::time::Duration;

use oncegate_core::store::StoreError;

use super::error::ConsumerError;
use super::item::Item;
use super::lanes::PlaceId;
use super::permits::Permit;
use super::schedule::Shard;
use crate::health::WaitCause;

/// A message that is about to start.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) place: PlaceId,
    pub(super) item: Box<Item>,
    /// The shard of the store that its attempt asks.
    pub(super) asks: Option<Shard>,
    /// `true` if it starts together with the others of its batch, and one call is for all of them.
    pub(super) in_batch: bool,
    /// The right to run its handler. Before the handlers of a unit are called, the first members
    /// hold the permits of all. It is given back before the message is settled.
    pub(super) permit: Option<Permit>,
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
    /// A message that starts alone, and has no permit yet.
    pub(super) fn new(place: PlaceId, item: Box<Item>, asks: Option<Shard>) -> Self {
        Self {
            place,
            item,
            asks,
            in_batch: false,
            permit: None,
        }
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
