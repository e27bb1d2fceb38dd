//! Messages that are not tried again yet, because the broker has not taken them or an earlier one
//! of their key.
//!
//! A broker that takes nothing of a topic, or of a part of one, delays only that: it is held back
//! as a whole, and a few of its messages are tried from time to time, other ones each time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{PublishError, TopicPart, UnsentMessage};
use oncegate_runtime::backoff::Backoff;

/// The pauses before a message that was not published is tried again.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// The most orders that are held back one by one.
const ORDERS_MOST: usize = 4_096;

/// The number of unconfirmed orders from which on their topic is held back as a whole.
const UNCONFIRMED_MOST: usize = 256;

/// The number of unconfirmed orders from which on their part of a topic is held back.
const UNCONFIRMED_OF_PART_MOST: usize = 16;

/// The most topics that are held back. When so many wait, everything waits.
pub(super) const TOPICS_MOST: usize = 256;

/// The number of orders that are tried at once of a topic that is held back because of many of its
/// orders. Some of them may be in partitions that can be written.
const PROBES: usize = 16;

/// The number of orders that are tried at once of a part of a topic.
const PROBES_OF_PART: usize = 4;

/// The most orders of which it is known that they were tried since their place is held back.
const TRIED_MOST: usize = 4_096;

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

    /// The broker's key, if it has one.
    pub(super) fn key(&self) -> Option<&[u8]> {
        match self {
            Self::Key { key, .. } => Some(key),
            Self::Alone { .. } => None,
        }
    }

    pub(super) fn topic_name(&self) -> &str {
        self.topic()
    }
}

/// A topic, or a part of one, that is held back as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place {
    topic: Arc<str>,
    part: Option<TopicPart>,
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
    /// The messages up to this sequence, and the later ones with a topic and key of which a message
    /// up to it is not sent; `None`: no more than the others.
    pub up_to: Option<i64>,
}

impl HeldBack {
    pub(super) fn add(&mut self, order: &OrderOf) {
        match order {
            OrderOf::Key { topic, key } => self.keys.push((Arc::clone(topic), key.clone())),
            OrderOf::Alone { sequence, .. } => self.sequences.push(*sequence),
        }
    }
}

/// The orders, topics and parts of topics that wait, each until its next try.
#[derive(Debug, Default)]
pub(super) struct HeldOrders {
    orders: HashMap<OrderOf, HeldOrder>,
    places: HashMap<Place, HeldPlace>,
}

#[derive(Debug)]
struct HeldOrder {
    failures: u32,
    until: Instant,
    is_confirmed: bool,
    part: Option<TopicPart>,
}

#[derive(Debug)]
struct HeldPlace {
    failures: u32,
    until: Instant,
    /// The number of its orders that are tried at once.
    probes: usize,
    /// `true` while orders of the place are being tried.
    is_probed: bool,
    /// The orders that were tried in vain. Others are next: the oldest may be those that fail.
    tried: HashSet<OrderOf>,
}

/// The orders of a read that may be tried now.
#[derive(Debug)]
pub(super) struct Taken<T> {
    pub(super) orders: Vec<(OrderOf, T)>,
    /// `true` if others of the read are not tried now, so that the next read begins behind them.
    pub(super) is_passing: bool,
}

impl HeldOrders {
    /// Holds an order back, or its place, after its first message was not published. `fraction` is
    /// random, from 0 up to 1.
    pub(super) fn failed(
        &mut self,
        (order, part): (OrderOf, Option<TopicPart>),
        failure: &PublishError,
        now: Instant,
        fraction: f64,
    ) {
        // What was not tried again for so long has no messages any more.
        self.orders
            .retain(|_, held| held.until + BACKOFF.most() > now);
        self.places
            .retain(|_, held| held.until + BACKOFF.most() > now);
        let topic = Arc::clone(order.topic());
        let whole = Place { topic, part: None };
        let place = Place {
            part,
            ..whole.clone()
        };
        match failure {
            PublishError::TopicRefused(_) => return self.hold(whole, 1, (now, fraction)),
            // The broker may take other messages of this place.
            PublishError::Refused(_) => {
                self.places.remove(&whole);
                self.places.remove(&place);
            }
            PublishError::Unconfirmed(_) => {
                // The part of the message is known by now: the others have their own state.
                if part.is_some() {
                    self.places.remove(&whole);
                }
                if let Some(held) = self.places.get_mut(&place) {
                    held.note_tried(order);
                    return self.hold(place, probes_of(part), (now, fraction));
                }
            }
        }
        let is_confirmed = !matches!(failure, PublishError::Unconfirmed(_));
        let held = self.orders.entry(order).or_insert(HeldOrder {
            failures: 0,
            until: now,
            is_confirmed,
            part,
        });
        held.failures += 1;
        held.until = now + BACKOFF.wait(held.failures, fraction);
        held.is_confirmed = is_confirmed;
        held.part = part;
        self.hold_crowded(place, (now, fraction));
    }

    /// Holds the place back as a whole if too many of its orders are held back one by one; in any
    /// case so many places that not too many orders are.
    fn hold_crowded(&mut self, place: Place, when: (Instant, f64)) {
        let most = match place.part {
            Some(_) => UNCONFIRMED_OF_PART_MOST,
            None => UNCONFIRMED_MOST,
        };
        let unconfirmed = self.orders.iter().filter(|(order, held)| {
            !held.is_confirmed && *order.topic() == place.topic && held.part == place.part
        });
        if unconfirmed.count() >= most {
            let probes = probes_of(place.part);
            self.hold(place, probes, when);
        } else if self.orders.len() > ORDERS_MOST
            && let Some(topic) = self.topic_with_most_orders()
        {
            self.hold(Place { topic, part: None }, PROBES, when);
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

    /// Holds a place back, unless it is already and was not tried since.
    fn hold(&mut self, place: Place, probes: usize, (now, fraction): (Instant, f64)) {
        self.orders.retain(|order, held| {
            *order.topic() != place.topic || (place.part.is_some() && held.part != place.part)
        });
        let held = self.places.entry(place).or_insert_with(|| HeldPlace {
            failures: 0,
            until: now,
            probes,
            is_probed: true,
            tried: HashSet::new(),
        });
        if held.is_probed {
            held.failures += 1;
            held.until = now + BACKOFF.wait(held.failures, fraction);
            held.is_probed = false;
        }
    }

    /// Forgets the failures of an order, of which a message was published, and those of its place.
    pub(super) fn succeeded(&mut self, order: &OrderOf, part: Option<TopicPart>) {
        self.orders.remove(order);
        if self.places.is_empty() {
            return;
        }
        let topic = Arc::clone(order.topic());
        let whole = Place { topic, part: None };
        self.places.remove(&whole);
        self.places.remove(&Place { part, ..whole });
    }

    /// Returns the orders and topics that are held back now. Parts are not among them: a store does
    /// not know them, unless all parts of a topic are.
    pub(super) fn at(&self, now: Instant) -> HeldBack {
        let mut held_back = HeldBack::default();
        let mut parts: HashMap<&Arc<str>, u32> = HashMap::new();
        for (place, _) in self.places.iter().filter(|(_, held)| held.until > now) {
            let Some(part) = place.part else {
                held_back.topics.push(Arc::clone(&place.topic));
                continue;
            };
            let count = parts.entry(&place.topic).or_default();
            *count += u32::from(part.number < part.of);
            if *count == part.of {
                held_back.topics.push(Arc::clone(&place.topic));
            }
        }
        for (order, _) in self.orders.iter().filter(|(_, held)| held.until > now) {
            held_back.add(order);
        }
        held_back
    }

    /// Takes the orders that may be tried now: of a place that was held back, only a few, and none
    /// of one that still is. `part` returns the part of an order's topic.
    pub(super) fn take<T>(
        &mut self,
        mut orders: Vec<(OrderOf, T)>,
        now: Instant,
        part: impl Fn(&OrderOf) -> Option<TopicPart>,
    ) -> Taken<T> {
        let mut is_passing = false;
        if self.places.is_empty() {
            return Taken { orders, is_passing };
        }
        let mut taken: HashMap<Place, usize> = HashMap::new();
        orders.retain(|(order, _)| {
            let topic = Arc::clone(order.topic());
            let whole = Place { topic, part: None };
            let place = match part(order) {
                _ if self.places.contains_key(&whole) => whole,
                part => Place { part, ..whole },
            };
            let Some(held) = self.places.get_mut(&place) else {
                return true;
            };
            let taken = taken.entry(place).or_default();
            let is_open = *taken > 0 || held.until <= now;
            let is_taken = is_open && *taken < held.probes && !held.tried.contains(order);
            if is_taken {
                *taken += 1;
                // No more of the place is tried until there is an outcome.
                held.is_probed = true;
                held.until = now + BACKOFF.most();
            }
            is_passing |= !is_taken;
            is_taken
        });
        Taken { orders, is_passing }
    }

    /// Returns whether neither a topic nor a part of one is held back.
    pub(super) fn holds_no_place(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns whether a place may be tried again since `began`.
    pub(super) fn is_due_since(&self, began: Instant, now: Instant) -> bool {
        self.places
            .values()
            .any(|held| began < held.until && held.until <= now)
    }

    /// Lets the places that are due be tried with any of their orders: there are no others. Returns
    /// whether there is such a place.
    pub(super) fn forget_tried(&mut self, now: Instant) -> bool {
        let due = self.places.values_mut().filter(|held| held.until <= now);
        due.fold(false, |any, held| {
            let has_tried = !held.tried.is_empty();
            held.tried.clear();
            any || has_tried
        })
    }

    /// Returns the time at which the next topic may be tried again, if so many are held back that
    /// nothing else may be tried.
    pub(super) fn full_until(&self, now: Instant) -> Option<Instant> {
        let topics = self.places.iter().filter(|(place, _)| place.part.is_none());
        let waiting = topics
            .map(|(_, held)| held.until)
            .filter(|until| *until > now);
        if waiting.clone().count() < TOPICS_MOST {
            return None;
        }
        waiting.min()
    }
}

impl HeldPlace {
    fn note_tried(&mut self, order: OrderOf) {
        if self.tried.len() >= TRIED_MOST {
            self.tried.clear();
        }
        self.tried.insert(order);
    }
}

fn probes_of(part: Option<TopicPart>) -> usize {
    match part {
        Some(_) => PROBES_OF_PART,
        None => PROBES,
    }
}

#[cfg(test)]
mod tests;
