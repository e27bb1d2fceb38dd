//! The handle that acknowledges one message of a queue.

use std::sync::Arc;
use std::time::Duration;

use super::held::MessageId;
use super::hub::{Fetched, Hub};
use oncegate_runtime::source::{AckHandle, Delivery};

/// The shortest retry that returns to the queue, which counts visibility in whole seconds. An
/// earlier one waits here.
const SHORTEST_RETRY: Duration = Duration::from_secs(1);

/// Acknowledges one message, which is then deleted. When dropped without an ack, it returns the
/// message at once.
#[derive(Debug)]
struct SqsAckHandle {
    hub: Arc<Hub>,
    id: MessageId,
    delivery: u64,
    /// `true` if its retries wait here, because otherwise the order of its group would break, or
    /// the redrive policy would move the message.
    stays: bool,
}

pub(crate) fn delivery(hub: &Arc<Hub>, fetched: Fetched) -> Delivery {
    let Fetched {
        message,
        id,
        admitted,
        stays,
    } = fetched;
    Delivery {
        message,
        ack_handle: Arc::new(SqsAckHandle {
            hub: Arc::clone(hub),
            id,
            delivery: admitted.delivery,
            stays,
        }),
    }
}

impl AckHandle for SqsAckHandle {
    fn start(&self) -> bool {
        self.hub.may_start(&self.id, self.delivery)
    }

    fn is_ours(&self) -> bool {
        self.hub.is_ours(&self.id, self.delivery)
    }

    fn ack(&self) {
        self.hub.ack(&self.id, self.delivery);
    }

    fn stop(&self) {}

    fn nack_after(&self, delay: Duration) -> bool {
        if self.stays || delay < SHORTEST_RETRY {
            return false;
        }
        self.hub.give_back(&self.id, self.delivery, delay);
        true
    }
}

impl Drop for SqsAckHandle {
    fn drop(&mut self) {
        // This has no effect on a message that was already acknowledged or returned.
        self.hub.give_back(&self.id, self.delivery, Duration::ZERO);
    }
}
