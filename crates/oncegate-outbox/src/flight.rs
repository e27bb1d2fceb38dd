//! The messages that are being published: at most one batch.

use std::collections::HashMap;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};

use super::held_back::OrderOf;
use super::{HeldBack, PublishError, ReadLimits, UnsentMessage};

/// The size of some messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OrderSize {
    messages: u32,
    bytes: u64,
}

impl OrderSize {
    pub(super) fn of(messages: &[UnsentMessage]) -> Self {
        let bytes = messages
            .iter()
            .filter_map(|unsent| unsent.message.payload());
        Self {
            messages: u32::try_from(messages.len()).unwrap_or(u32::MAX),
            bytes: bytes.map(|payload| payload.len() as u64).sum(),
        }
    }
}

type Published = Result<(), PublishError>;

/// The orders of which messages are being published.
#[derive(Default)]
pub(super) struct Flight<'a> {
    sending: FuturesUnordered<BoxFuture<'a, (OrderOf, Published)>>,
    sizes: HashMap<OrderOf, OrderSize>,
}

impl<'a> Flight<'a> {
    /// Adds an order, of which nothing is in flight.
    pub(super) fn add(
        &mut self,
        order: OrderOf,
        size: OrderSize,
        sending: BoxFuture<'a, Published>,
    ) {
        self.sizes.insert(order.clone(), size);
        self.sending
            .push(sending.map(|outcome| (order, outcome)).boxed());
    }

    /// The next order that has ended, and its outcome.
    pub(super) async fn next(&mut self) -> Option<(OrderOf, Published)> {
        let (order, outcome) = self.sending.next().await?;
        self.sizes.remove(&order);
        Some((order, outcome))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sending.is_empty()
    }

    /// The limits of a read beside the messages in flight; `None` when they are at the limit.
    pub(super) fn room(&self, most: ReadLimits) -> Option<ReadLimits> {
        let mut left = most;
        for size in self.sizes.values() {
            left.messages = left.messages.checked_sub(size.messages)?;
            left.bytes = left.bytes.checked_sub(size.bytes)?;
        }
        // A message that is larger than the limit is read alone.
        (left.messages > 0 && (left.bytes > 0 || self.is_empty())).then_some(left)
    }

    /// Adds the orders in flight to those that are held back.
    pub(super) fn and(&self, mut held_back: HeldBack) -> HeldBack {
        self.sizes.keys().for_each(|order| held_back.add(order));
        held_back
    }
}

/// The messages by their orders, each in the order of the batch; the order with the oldest message
/// first.
pub(super) fn in_orders(batch: Vec<UnsentMessage>) -> Vec<(OrderOf, Vec<UnsentMessage>)> {
    let mut orders: Vec<(OrderOf, Vec<UnsentMessage>)> = Vec::new();
    let mut places = HashMap::new();
    for unsent in batch {
        let order = OrderOf::of(&unsent);
        let place = *places.entry(order.clone()).or_insert(orders.len());
        match orders.get_mut(place) {
            Some((_, messages)) => messages.push(unsent),
            None => orders.push((order, vec![unsent])),
        }
    }
    orders
}

#[cfg(test)]
mod tests {
    use super::super::OutboxMessage;
    use super::*;

    fn unsent(sequence: i64) -> UnsentMessage {
        let message = OutboxMessage::new("shipments", vec![0; 10]);
        UnsentMessage {
            sequence,
            message,
            age: std::time::Duration::ZERO,
            fault: None,
        }
    }

    #[tokio::test]
    async fn a_flight_is_at_most_one_batch() {
        let most = ReadLimits {
            messages: 3,
            bytes: 100,
        };
        let mut flight = Flight::default();
        assert_eq!(flight.room(most), Some(most));
        let two = [unsent(1), unsent(2)];
        let first = OrderOf::of(&two[0]);
        flight.add(
            first.clone(),
            OrderSize::of(&two),
            std::future::ready(Ok(())).boxed(),
        );
        assert_eq!(
            flight.room(most),
            Some(ReadLimits {
                messages: 1,
                bytes: 80
            })
        );
        assert_eq!(
            flight.room(ReadLimits {
                messages: 2,
                ..most
            }),
            None
        );
        assert_eq!(flight.room(ReadLimits { bytes: 20, ..most }), None);
        assert_eq!(flight.and(HeldBack::default()).sequences, [1]);
        let (order, outcome) = flight.next().await.unwrap();
        assert_eq!(
            (order, outcome.is_ok(), flight.is_empty()),
            (first, true, true)
        );
        assert_eq!(flight.room(most), Some(most));
    }
}
