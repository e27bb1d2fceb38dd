//! The handle that acknowledges one delivery.

use std::pin::Pin;
use std::sync::Arc;

use oncegate_runtime::source::{AckHandle, Delivery};
use tokio_util::sync::CancellationToken;

use super::hub::{Fetched, Hub};

/// Acknowledges one delivery. When dropped without an ack, it returns the message to its queue.
///
/// Retries wait in the consumer: a message that is returned is delivered again at once, and counts
/// as one more delivery for the limit of a quorum queue.
#[derive(Debug)]
struct AmqpTicket {
    hub: Arc<Hub>,
    epoch: u64,
    tag: u64,
    lost: CancellationToken,
    in_order: bool,
}

pub(crate) fn delivery(hub: &Arc<Hub>, fetched: Fetched, in_order: bool) -> Delivery {
    let Fetched {
        message,
        epoch,
        tag,
        lost,
    } = fetched;
    Delivery {
        message,
        ack_handle: Arc::new(AmqpTicket {
            hub: Arc::clone(hub),
            epoch,
            tag,
            lost,
            in_order,
        }),
    }
}

/// The number of the order of a queue: a source has one.
const QUEUE: u64 = 0;

impl AckHandle for AmqpTicket {
    fn start(&self) -> bool {
        self.hub.is_ours(self.epoch, self.tag)
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

    fn stop(&self) {}

    fn lost(&self) -> Option<Pin<Box<dyn Future<Output = ()> + Send + '_>>> {
        Some(Box::pin(self.lost.cancelled()))
    }
}

impl Drop for AmqpTicket {
    fn drop(&mut self) {
        // This has no effect on a delivery that was already acknowledged.
        self.hub.give_back(self.epoch, self.tag);
    }
}
