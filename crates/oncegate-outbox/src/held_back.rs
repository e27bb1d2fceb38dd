//! Messages that are not tried again yet, because the broker has not taken them or an earlier one
//! of their key.
//!
//! A broker that takes nothing of a topic delays only that topic: it is held back as a whole, and a
//! few of its messages are tried from time to time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{PublishError, UnsentMessage};
use oncegate_runtime::backoff::Backoff;

/// The pauses before a message that was not published is tried again.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// The most orders that are held back one by one.
const ORDERS_MOST: usize = 4_096;

/// The number of unconfirmed orders from which on their topic is held back as a whole.
const UNCONFIRMED_MOST: usize = 256;

/// The most topics that are held back. When so many wait, everything waits.
pub(super) const TOPICS_MOST: usize = 256;

/// The number of orders that are tried at once of a topic that is held back because of many of its
/// orders. Some of them may be in partitions that can be written.
const PROBES: usize = 16;

/// The unit of order: the messages with one key in one topic. A message without a key is an order
/// of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum OrderOf {
    Key { topic: Arc<str>, key: Bytes },
    Alone { topic: Arc<str>, sequence: i64 },
}

impl OrderOf {
    pub(super) fn of(unsent: &UnsentMessage) -> Self {
        let topic = unsent.message.topic().into();
        match unsent.message.key_bytes() {
            Some(key) => Self::Key {
                topic,
                key: key.clone(),
            },
            None => Self::Alone {
                topic,
                sequence: unsent.sequence,
            },
        }
    }

    fn topic(&self) -> &Arc<str> {
        let (Self::Key { topic, .. } | Self::Alone { topic, .. }) = self;
        topic
    }
}

/// The messages of an outbox that are not read now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldBack {
    /// The messages with these topics.
    pub topics: Vec<Arc<str>>,
    /// The messages with these topics and keys.
    pub keys: Vec<(Arc<str>, Bytes)>,
    /// The messages with these sequences.
    pub sequences: Vec<i64>,
}

impl HeldBack {
    pub(super) fn add(&mut self, order: &OrderOf) {
        match order {
            OrderOf::Key { topic, key } => self.keys.push((Arc::clone(topic), key.clone())),
            OrderOf::Alone { sequence, .. } => self.sequences.push(*sequence),
        }
    }
}

/// The orders and topics that wait, each until its next try.
#[derive(Debug, Default)]
pub(super) struct HeldOrders {
    orders: HashMap<OrderOf, HeldOrder>,
    topics: HashMap<Arc<str>, HeldTopic>,
}

#[derive(Debug)]
struct HeldOrder {
    failures: u32,
    until: Instant,
    is_confirmed: bool,
}

#[derive(Debug)]
struct HeldTopic {
    failures: u32,
    until: Instant,
    /// The number of its orders that are tried at once.
    probes: usize,
    /// `true` while orders of the topic are being tried.
    is_probed: bool,
}

impl HeldOrders {
    /// Holds an order back, or its topic, after its first message was not published. `fraction` is
    /// random, from 0 up to 1.
    pub(super) fn failed(
        &mut self,
        order: OrderOf,
        failure: &PublishError,
        now: Instant,
        fraction: f64,
    ) {
        // An order that was not tried again for so long has no messages any more.
        self.orders
            .retain(|_, held| held.until + BACKOFF.most() > now);
        self.topics
            .retain(|_, held| held.until + BACKOFF.most() > now);
        let topic = Arc::clone(order.topic());
        match failure {
            PublishError::TopicRefused(_) => return self.hold_topic(topic, 1, now, fraction),
            // The broker may take other messages of this topic.
            PublishError::Refused(_) => drop(self.topics.remove(&topic)),
            PublishError::Unconfirmed(_) if self.topics.contains_key(&topic) => {
                return self.hold_topic(topic, PROBES, now, fraction);
            }
            PublishError::Unconfirmed(_) => {}
        }
        let is_confirmed = !matches!(failure, PublishError::Unconfirmed(_));
        let held = self.orders.entry(order).or_insert(HeldOrder {
            failures: 0,
            until: now,
            is_confirmed,
        });
        held.failures += 1;
        held.until = now + BACKOFF.wait(held.failures, fraction);
        held.is_confirmed = is_confirmed;
        let unconfirmed = self
            .orders
            .iter()
            .filter(|(order, held)| !held.is_confirmed && *order.topic() == topic);
        if unconfirmed.count() >= UNCONFIRMED_MOST {
            self.hold_topic(topic, PROBES, now, fraction);
        } else if self.orders.len() > ORDERS_MOST
            && let Some(topic) = self.topic_with_most_orders()
        {
            self.hold_topic(topic, PROBES, now, fraction);
        }
    }

    fn topic_with_most_orders(&self) -> Option<Arc<str>> {
        let mut counts: HashMap<&Arc<str>, usize> = HashMap::new();
        for order in self.orders.keys() {
            *counts.entry(order.topic()).or_default() += 1;
        }
        counts
            .into_iter()
            .max_by_key(|(_, count)| *count)
            .map(|(topic, _)| Arc::clone(topic))
    }

    /// Holds a topic back, unless it is already and was not tried since.
    fn hold_topic(&mut self, topic: Arc<str>, probes: usize, now: Instant, fraction: f64) {
        self.orders.retain(|order, _| *order.topic() != topic);
        let new = HeldTopic {
            failures: 0,
            until: now,
            probes,
            is_probed: true,
        };
        let held = self.topics.entry(topic).or_insert(new);
        if held.is_probed {
            held.failures += 1;
            held.until = now + BACKOFF.wait(held.failures, fraction);
            held.is_probed = false;
        }
    }

    /// Forgets the failures of an order, of which a message was published, and those of its topic.
    pub(super) fn succeeded(&mut self, order: &OrderOf) {
        self.orders.remove(order);
        self.topics.remove(order.topic());
    }

    /// Returns the orders and topics that are held back now.
    pub(super) fn at(&self, now: Instant) -> HeldBack {
        let topics = self.topics.iter().filter(|(_, held)| held.until > now);
        let topics = topics.map(|(topic, _)| Arc::clone(topic)).collect();
        let mut held_back = HeldBack {
            topics,
            ..HeldBack::default()
        };
        for (order, _) in self.orders.iter().filter(|(_, held)| held.until > now) {
            held_back.add(order);
        }
        held_back
    }

    /// Takes the orders that may be tried now: of a topic that was held back, only a few.
    pub(super) fn take<T>(
        &mut self,
        mut orders: Vec<(OrderOf, T)>,
        now: Instant,
    ) -> Vec<(OrderOf, T)> {
        let mut taken: HashMap<Arc<str>, usize> = HashMap::new();
        orders.retain(|(order, _)| {
            let Some(held) = self.topics.get_mut(order.topic()) else {
                return true;
            };
            let taken = taken.entry(Arc::clone(order.topic())).or_default();
            *taken += 1;
            // No more of the topic is read until there is an outcome.
            held.is_probed = true;
            held.until = now + BACKOFF.most();
            *taken <= held.probes
        });
        orders
    }

    /// Returns the time at which the next topic may be tried again, if so many are held back that
    /// nothing else may be tried.
    pub(super) fn full_until(&self, now: Instant) -> Option<Instant> {
        let times = self.topics.values().map(|held| held.until);
        let waiting = times.filter(|until| *until > now);
        if waiting.clone().count() < TOPICS_MOST {
            return None;
        }
        waiting.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(topic: &str, key: usize) -> OrderOf {
        OrderOf::Key {
            topic: topic.into(),
            key: key.to_string().into(),
        }
    }

    fn unconfirmed() -> PublishError {
        PublishError::Unconfirmed(String::new())
    }

    #[test]
    fn an_order_waits_longer_per_failure_and_is_free_after_success() {
        let mut held = HeldOrders::default();
        let now = Instant::now();
        let order = order("shipments", 1);
        held.failed(order.clone(), &unconfirmed(), now, 0.0);
        assert_eq!(held.at(now).keys.len(), 1);
        let soon = now + Duration::from_millis(250);
        assert_eq!(held.at(soon), HeldBack::default());
        held.failed(order.clone(), &unconfirmed(), soon, 0.0);
        assert_eq!(held.at(soon + Duration::from_millis(499)).keys.len(), 1);
        held.succeeded(&order);
        assert_eq!(held.at(soon), HeldBack::default());
    }

    #[test]
    fn a_refused_topic_is_held_back_and_tried_with_one_order() {
        let mut held = HeldOrders::default();
        let now = Instant::now();
        let refused = PublishError::TopicRefused(String::new());
        for key in 0..750 {
            held.failed(order("denied", key), &refused, now, 0.0);
        }
        let topics = HeldBack {
            topics: vec!["denied".into()],
            ..HeldBack::default()
        };
        assert_eq!((held.at(now), held.full_until(now)), (topics.clone(), None));
        // The failures of one try count once.
        let free = now + Duration::from_millis(250);
        assert_eq!(held.at(free), HeldBack::default());
        let read =
            [order("denied", 1), order("denied", 2), order("other", 1)].map(|order| (order, ()));
        let taken: Vec<OrderOf> = held
            .take(read.into(), free)
            .into_iter()
            .map(|(order, ())| order)
            .collect();
        assert_eq!(taken, [order("denied", 1), order("other", 1)]);
        assert_eq!(held.at(free), topics, "it is tried twice");
        held.failed(order("denied", 1), &refused, free, 0.0);
        assert_eq!(held.at(free + Duration::from_millis(499)), topics);
        held.succeeded(&order("denied", 1));
        assert_eq!(held.at(free), HeldBack::default());
    }

    #[test]
    fn a_topic_with_many_unconfirmed_orders_is_tried_with_some() {
        let mut held = HeldOrders::default();
        let now = Instant::now();
        for key in 0..UNCONFIRMED_MOST {
            assert_eq!(held.at(now).topics.len(), 0);
            held.failed(order("away", key), &unconfirmed(), now, 0.0);
        }
        assert_eq!((held.at(now).topics.len(), held.at(now).keys.len()), (1, 0));
        let all: Vec<_> = (0..100).map(|key| (order("away", key), ())).collect();
        assert_eq!(
            held.take(all, now + Duration::from_millis(250)).len(),
            PROBES
        );
    }

    #[test]
    fn refused_messages_hold_back_no_other_order_of_their_topic() {
        let mut held = HeldOrders::default();
        let now = Instant::now();
        let refused = PublishError::Refused(String::new());
        for key in 0..ORDERS_MOST {
            held.failed(order("small", key), &refused, now, 0.0);
        }
        assert_eq!(
            (held.at(now).topics.len(), held.at(now).keys.len()),
            (0, ORDERS_MOST)
        );
        held.failed(order("small", ORDERS_MOST), &refused, now, 0.0);
        assert_eq!(
            (held.at(now).topics.len(), held.at(now).keys.len()),
            (1, 0),
            "it has a limit"
        );
    }

    #[test]
    fn everything_waits_when_the_most_topics_wait() {
        let mut held = HeldOrders::default();
        let now = Instant::now();
        for topic in 0..TOPICS_MOST {
            assert_eq!(held.full_until(now), None);
            let refused = PublishError::TopicRefused(String::new());
            held.failed(order(&topic.to_string(), 1), &refused, now, 0.0);
        }
        let free = now + Duration::from_millis(250);
        assert_eq!(
            (held.full_until(now), held.full_until(free)),
            (Some(free), None)
        );
    }
}
