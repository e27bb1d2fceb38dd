//! The deliveries of one channel that are neither acknowledged nor returned, and the acks that are
//! due.
//!
//! This module does no I/O. A delivery tag counts within its channel alone, so each handle carries
//! the epoch of its channel: in a later epoch it belongs to no delivery.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A message to the broker about deliveries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settlement {
    /// The delivery goes back to its queue.
    Return(u64),
    /// The delivery is finished.
    Ack(u64),
    /// The delivery and all earlier ones are finished, except for those that were returned.
    AckUpTo(u64),
}

/// The deliveries of the current channel.
#[derive(Debug, Default)]
pub(crate) struct Held {
    epoch: u64,
    /// The times at which unfinished deliveries were received.
    in_hand: BTreeMap<u64, Instant>,
    acked: BTreeSet<u64>,
    returned: BTreeSet<u64>,
    /// Deliveries that go back when the channel is closed: all together, and so in their order.
    withheld: BTreeSet<u64>,
    lost: CancellationToken,
}

impl Held {
    /// Begins with a new channel. Deliveries of the last one are no longer ours.
    pub(crate) fn begin(&mut self) {
        self.lost.cancel();
        *self = Self {
            epoch: self.epoch + 1,
            ..Self::default()
        };
    }

    /// Holds a delivery. Returns the epoch, and a token that fires when the channel is lost.
    pub(crate) fn admit(&mut self, now: Instant, tag: u64) -> (u64, CancellationToken) {
        self.in_hand.insert(tag, now);
        (self.epoch, self.lost.clone())
    }

    pub(crate) fn is_ours(&self, epoch: u64, tag: u64) -> bool {
        epoch == self.epoch && self.in_hand.contains_key(&tag)
    }

    /// Acknowledges a delivery; `false` when it is no longer ours.
    pub(crate) fn ack(&mut self, epoch: u64, tag: u64) -> bool {
        let is_ours = epoch == self.epoch && self.in_hand.remove(&tag).is_some();
        is_ours && self.acked.insert(tag)
    }

    /// Returns a delivery to its queue; `false` when it is no longer ours.
    pub(crate) fn give_back(&mut self, epoch: u64, tag: u64) -> bool {
        let is_ours = epoch == self.epoch && self.in_hand.remove(&tag).is_some();
        is_ours && self.returned.insert(tag)
    }

    /// Keeps a delivery until the channel is closed, which returns it; `false` when it is no longer
    /// ours.
    pub(crate) fn withhold(&mut self, epoch: u64, tag: u64) -> bool {
        let is_ours = epoch == self.epoch && self.in_hand.remove(&tag).is_some();
        is_ours && self.withheld.insert(tag)
    }

    /// Takes what is due: first the returns, and after them, in a second list, the acks. An ack of
    /// several deliveries ends below the first unfinished one. It must be sent after the returns,
    /// or it would acknowledge them.
    pub(crate) fn take(&mut self) -> (Vec<Settlement>, Vec<Settlement>) {
        let returns = std::mem::take(&mut self.returned)
            .into_iter()
            .map(Settlement::Return)
            .collect();
        let unfinished = [self.in_hand.keys().next(), self.withheld.first()];
        let first_unfinished = unfinished
            .into_iter()
            .flatten()
            .min()
            .copied()
            .unwrap_or(u64::MAX);
        let above = self.acked.split_off(&first_unfinished);
        let below = std::mem::take(&mut self.acked);
        let mut acks: Vec<Settlement> = match (below.len(), below.last()) {
            (0, _) | (_, None) => Vec::new(),
            (1, Some(tag)) => vec![Settlement::Ack(*tag)],
            (_, Some(tag)) => vec![Settlement::AckUpTo(*tag)],
        };
        acks.extend(above.into_iter().map(Settlement::Ack));
        (returns, acks)
    }

    /// Returns whether every delivery is acknowledged or returned, and the broker has been told so.
    /// Acks also come while others are sent.
    pub(crate) fn is_settled(&self) -> bool {
        self.in_hand.is_empty() && self.acked.is_empty() && self.returned.is_empty()
    }

    /// Returns how many deliveries are neither acknowledged nor returned.
    pub(crate) fn in_hand(&self) -> usize {
        self.in_hand.len()
    }

    /// Returns when the oldest of them was received.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.in_hand.values().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(tags: std::ops::RangeInclusive<u64>) -> Held {
        let mut held = Held::default();
        held.begin();
        for tag in tags {
            held.admit(Instant::now(), tag);
        }
        held
    }

    // invariant: amqp-ack-below-unfinished
    #[test]
    fn one_ack_covers_no_unfinished_delivery() {
        let mut held = held(1..=7);
        for tag in [1, 2, 3, 5, 7] {
            assert!(held.ack(1, tag));
        }
        let acks = vec![
            Settlement::AckUpTo(3),
            Settlement::Ack(5),
            Settlement::Ack(7),
        ];
        assert_eq!(held.take(), (vec![], acks));
        assert_eq!(held.take(), (vec![], vec![]), "each once");
        assert!(held.ack(1, 4));
        assert_eq!(held.take(), (vec![], vec![Settlement::Ack(4)]));
        assert!(held.give_back(1, 6));
        assert!(!held.ack(1, 6), "it was returned");
        assert_eq!(held.take(), (vec![Settlement::Return(6)], vec![]));
        assert_eq!(held.in_hand(), 0);
    }

    // invariant: amqp-ack-below-unfinished
    #[test]
    fn one_ack_covers_no_delivery_that_is_withheld() {
        let mut held = held(1..=4);
        assert!(held.withhold(1, 2) && !held.ack(1, 2));
        for tag in [1, 3, 4] {
            assert!(held.ack(1, tag));
        }
        let acks = vec![Settlement::Ack(1), Settlement::Ack(3), Settlement::Ack(4)];
        assert_eq!(held.take(), (vec![], acks), "2 goes back with the channel");
        assert_eq!(held.in_hand(), 0);
    }

    #[test]
    fn acks_that_are_not_sent_keep_the_channel() {
        let mut held = held(1..=3);
        assert!(!held.is_settled());
        assert!(held.ack(1, 1) && held.ack(1, 2) && held.give_back(1, 3));
        assert!(
            held.in_hand() == 0 && !held.is_settled(),
            "nothing was told to the broker"
        );
        held.take();
        assert!(held.is_settled());
        held.admit(Instant::now(), 4);
        held.withhold(1, 4);
        assert!(held.is_settled(), "it goes back with the channel");
    }

    // invariant: amqp-ack-of-an-old-channel
    #[test]
    fn a_handle_of_an_old_channel_acknowledges_nothing() {
        let mut held = held(1..=2);
        let (epoch, lost) = held.admit(Instant::now(), 3);
        assert!(held.ack(epoch, 1));
        held.begin();
        assert!(lost.is_cancelled());
        held.admit(Instant::now(), 2);
        assert!(!held.is_ours(epoch, 2) && !held.ack(epoch, 2) && !held.give_back(epoch, 2));
        assert_eq!(
            held.take(),
            (vec![], vec![]),
            "nor does an ack that was not sent yet"
        );
    }
}
