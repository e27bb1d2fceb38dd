//! The deliveries of one channel that are neither acknowledged nor returned, and the acks that are
//! due.
//!
//! This module does no I/O. A delivery tag counts within its channel alone, so each handle carries
//! the epoch of its channel: in a later epoch it belongs to no delivery.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

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

/// A delivery that is not finished.
#[derive(Clone, Copy, Debug)]
struct InHand {
    since: Instant,
    is_running: bool,
}

/// The number of unfinished deliveries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) in_hand: usize,
    pub(crate) running: usize,
}

/// The deliveries of the current channel.
#[derive(Debug, Default)]
pub(crate) struct Held {
    epoch: u64,
    /// Unfinished deliveries, with the times at which they were received.
    in_hand: BTreeMap<u64, InHand>,
    /// Deliveries that run while the broker has them again: see [`Held::give_back_old`].
    lent: BTreeSet<u64>,
    acked: BTreeSet<u64>,
    returned: BTreeSet<u64>,
    /// Deliveries that go back when the channel is left: all together, and so in their order.
    withheld: BTreeSet<u64>,
    /// Every delivery up to this one was received. A channel with several consumers passes on their
    /// deliveries in any order.
    received_up_to: u64,
    /// Deliveries after it.
    received_early: BTreeSet<u64>,
}

impl Held {
    /// Begins with a new channel. Deliveries of the last one are no longer ours.
    pub(crate) fn begin(&mut self) {
        *self = Self {
            epoch: self.epoch + 1,
            ..Self::default()
        };
    }

    /// Holds a delivery, and returns its epoch.
    pub(crate) fn admit(&mut self, now: Instant, tag: u64) -> u64 {
        let in_hand = InHand {
            since: now,
            is_running: false,
        };
        self.in_hand.insert(tag, in_hand);
        self.received_early.insert(tag);
        while self.received_early.remove(&(self.received_up_to + 1)) {
            self.received_up_to += 1;
        }
        self.epoch
    }

    pub(crate) fn is_ours(&self, epoch: u64, tag: u64) -> bool {
        epoch == self.epoch && (self.in_hand.contains_key(&tag) || self.lent.contains(&tag))
    }

    /// Begins a run; `false` when the delivery is no longer ours.
    pub(crate) fn start(&mut self, epoch: u64, tag: u64) -> bool {
        if epoch != self.epoch {
            return false;
        }
        let in_hand = self.in_hand.get_mut(&tag);
        in_hand.map(|one| one.is_running = true).is_some()
    }

    /// Ends a run.
    pub(crate) fn stop(&mut self, epoch: u64, tag: u64) {
        if epoch != self.epoch {
            return;
        }
        if let Some(one) = self.in_hand.get_mut(&tag) {
            one.is_running = false;
        }
        self.lent.remove(&tag);
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

    /// Keeps a delivery until the channel is left, which returns it; `false` when it is no longer
    /// ours.
    pub(crate) fn withhold(&mut self, epoch: u64, tag: u64) -> bool {
        let is_ours = epoch == self.epoch && self.in_hand.remove(&tag).is_some();
        is_ours && self.withheld.insert(tag)
    }

    /// Returns to the queue what was received before `before`: the broker would take it away, with
    /// everything else. Returns how many there are.
    ///
    /// What waits is delivered again, and its record tells how long it has to wait. What runs goes
    /// on, and stays ours: its record answers the delivery that comes again, here or elsewhere.
    pub(crate) fn give_back_old(&mut self, before: Instant) -> usize {
        let old = self.in_hand.extract_if(.., |_, one| one.since < before);
        let old: Vec<(u64, InHand)> = old.collect();
        for (tag, one) in &old {
            self.returned.insert(*tag);
            if one.is_running {
                self.lent.insert(*tag);
            }
        }
        old.len()
    }

    /// Takes what is due: first the returns, and after them, in a second list, the acks. An ack of
    /// several deliveries ends below the first one that is unfinished or not received yet. It must
    /// be sent after the returns, or it would acknowledge them.
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
            .unwrap_or(u64::MAX)
            .min(self.received_up_to + 1);
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

    /// Counts the deliveries that are neither acknowledged nor returned.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            in_hand: self.in_hand.len(),
            running: self.in_hand.values().filter(|one| one.is_running).count(),
        }
    }

    /// Returns when the oldest of them was received.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.in_hand.values().map(|one| one.since).min()
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
        assert_eq!(held.counts().in_hand, 0);
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
        assert_eq!(held.counts().in_hand, 0);
    }

    #[test]
    fn acks_that_are_not_sent_keep_the_channel() {
        let mut held = held(1..=3);
        assert!(!held.is_settled());
        assert!(held.ack(1, 1) && held.ack(1, 2) && held.give_back(1, 3));
        assert!(
            held.counts().in_hand == 0 && !held.is_settled(),
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
        let epoch = held.admit(Instant::now(), 3);
        assert!(held.ack(epoch, 1));
        held.begin();
        held.admit(Instant::now(), 2);
        assert!(!held.is_ours(epoch, 2) && !held.ack(epoch, 2) && !held.give_back(epoch, 2));
        assert_eq!(
            held.take(),
            (vec![], vec![]),
            "nor does an ack that was not sent yet"
        );
    }

    // invariant: amqp-ack-below-unfinished
    #[test]
    fn one_ack_covers_no_delivery_that_was_not_received_yet() {
        let mut held = held(1..=2);
        // Another consumer of the channel has been delivered 3.
        held.admit(Instant::now(), 4);
        for tag in [1, 2, 4] {
            assert!(held.ack(1, tag));
        }
        let acks = vec![Settlement::AckUpTo(2), Settlement::Ack(4)];
        assert_eq!(held.take(), (vec![], acks));
        held.admit(Instant::now(), 3);
        held.admit(Instant::now(), 5);
        assert!(held.ack(1, 3) && held.ack(1, 5));
        assert_eq!(held.take(), (vec![], vec![Settlement::AckUpTo(5)]));
    }

    // invariant: amqp-time-out-of-what-waits
    #[tokio::test(start_paused = true)]
    async fn what_is_held_for_long_goes_back_and_what_runs_goes_on() {
        let mut held = held(1..=2);
        assert!(held.start(1, 2));
        tokio::time::advance(std::time::Duration::from_secs(9)).await;
        let now = Instant::now();
        held.admit(now, 3);
        assert_eq!(held.give_back_old(now), 2);
        assert!(!held.is_ours(1, 1), "it is delivered again");
        assert!(held.is_ours(1, 2) && held.is_ours(1, 3));
        let returns = vec![Settlement::Return(1), Settlement::Return(2)];
        assert_eq!(held.take(), (returns, vec![]));
        assert!(!held.ack(1, 2), "its record answers the next delivery");
        held.stop(1, 2);
        assert!(!held.is_ours(1, 2));
        assert_eq!(held.take(), (vec![], vec![]));
    }
}
