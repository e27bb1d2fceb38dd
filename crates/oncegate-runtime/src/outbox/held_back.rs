//! Messages that are not tried again yet, because the broker has not taken them or an earlier one of their key.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::UnsentMessage;
use crate::backoff::Backoff;

/// The pauses before a message that was not published is tried again.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// The most orders that are held back. When so many wait, the broker is away, and everything waits.
pub(super) const MOST: usize = 256;

/// What keeps its order: the messages with one key in one topic. A message without a key is an order of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum OrderOf {
    Key { topic: Arc<str>, key: Bytes },
    Alone { sequence: i64 },
}

impl OrderOf {
    pub(super) fn of(unsent: &UnsentMessage) -> Self {
        match unsent.message.key_bytes() {
            Some(key) => Self::Key { topic: unsent.message.topic().into(), key: key.clone() },
            None => Self::Alone { sequence: unsent.sequence },
        }
    }
}

/// Which messages of an outbox are not read now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldBack {
    /// All messages with these topics and keys.
    pub keys: Vec<(Arc<str>, Bytes)>,
    /// The messages with these sequences.
    pub sequences: Vec<i64>,
}

/// The orders that wait, each until its next try.
#[derive(Debug, Default)]
pub(super) struct HeldOrders(HashMap<OrderOf, HeldOrder>);

#[derive(Debug)]
struct HeldOrder {
    failures: u32,
    until: Instant,
}

impl HeldOrders {
    /// Holds an order back after its first message was not published. `fraction` is random, from 0 up to 1.
    pub(super) fn failed(&mut self, order: OrderOf, now: Instant, fraction: f64) {
        // An order that was not tried again for so long has no messages any more.
        self.0.retain(|_, held| held.until + BACKOFF.most() > now);
        let held = self.0.entry(order).or_insert(HeldOrder { failures: 0, until: now });
        held.failures += 1;
        held.until = now + BACKOFF.wait(held.failures, fraction);
    }

    /// Forgets the failures of an order, of which a message was published.
    pub(super) fn succeeded(&mut self, order: &OrderOf) {
        self.0.remove(order);
    }

    /// What is held back now.
    pub(super) fn at(&self, now: Instant) -> HeldBack {
        let mut held_back = HeldBack::default();
        for (order, _) in self.0.iter().filter(|(_, held)| held.until > now) {
            match order {
                OrderOf::Key { topic, key } => held_back.keys.push((Arc::clone(topic), key.clone())),
                OrderOf::Alone { sequence } => held_back.sequences.push(*sequence),
            }
        }
        held_back
    }

    /// When the next order may be tried again, if so many are held back that nothing else may be tried.
    pub(super) fn full_until(&self, now: Instant) -> Option<Instant> {
        let waiting = || self.0.values().filter(|held| held.until > now);
        (waiting().count() >= MOST).then(|| waiting().map(|held| held.until).min())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_waits_longer_after_each_failure_and_is_free_after_a_success() {
        let (mut held, now) = (HeldOrders::default(), Instant::now());
        let order = OrderOf::Key { topic: "shipments".into(), key: Bytes::from_static(b"customer-1") };
        held.failed(order.clone(), now, 0.0);
        assert_eq!(held.at(now).keys.len(), 1);
        let soon = now + Duration::from_millis(250);
        assert_eq!(held.at(soon), HeldBack::default());
        held.failed(order.clone(), soon, 0.0);
        assert_eq!(held.at(soon + Duration::from_millis(499)).keys.len(), 1);
        held.succeeded(&order);
        assert_eq!(held.at(soon), HeldBack::default());
    }

    #[test]
    fn everything_waits_when_the_most_orders_wait() {
        let (mut held, now) = (HeldOrders::default(), Instant::now());
        for sequence in 0..MOST as i64 {
            assert_eq!(held.full_until(now), None);
            held.failed(OrderOf::Alone { sequence }, now, 0.0);
        }
        let free = now + Duration::from_millis(250);
        assert_eq!(held.full_until(now), Some(free));
        assert_eq!((held.full_until(free), held.at(now).sequences.len()), (None, MOST));
    }
}
