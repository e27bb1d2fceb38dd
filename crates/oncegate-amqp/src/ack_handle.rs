//! The handle that acknowledges one delivery.

use std::sync::Arc;

use oncegate_runtime::source::{AckHandle, Delivery};

use super::hub::{Fetched, Hub};

/// Acknowledges one delivery. When dropped without an ack, it returns the message to its queue.
///
/// Retries wait in the consumer, because a message that is returned is delivered again at once. A
/// lost delivery stops no run: the run ends under its lease, and its record answers the delivery
/// that comes again. So the handle never says that it is lost.
#[derive(Debug)]
struct AmqpAckHandle {
    hub: Arc<Hub>,
    epoch: u64,
    tag: u64,
    in_order: bool,
}

pub(crate) fn delivery(hub: &Arc<Hub>, fetched: Fetched, in_order: bool) -> Delivery {
    let Fetched {
        message,
        epoch,
        tag,
    } = fetched;
    Delivery {
        message,
        ack_handle: Arc::new(AmqpAckHandle {
            hub: Arc::clone(hub),
            epoch,
            tag,
            in_order,
        }),
    }
}

/// The number of the order of a queue: a source has one.
const QUEUE: u64 = 0;

impl AckHandle for AmqpAckHandle {
    fn start(&self) -> bool {
        self.hub.start(self.epoch, self.tag)
    }

    fn is_ours(&self) -> bool {
        self.hub.is_ours(self.epoch, self.tag)
    }

    fn order(&self) -> Option<u64> {
        self.in_order.then_some(QUEUE)
    }

    fn ack(&self) {
        self.hub.ack(self.epoch, self.tag);
    }

    fn stop(&self) {
        self.hub.stop(self.epoch, self.tag);
    }
}

impl Drop for AmqpAckHandle {
    fn drop(&mut self) {
        // This has no effect on a delivery that was already acknowledged.
        self.hub.give_back(self.epoch, self.tag);
    }
}
