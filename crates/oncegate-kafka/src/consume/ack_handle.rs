//! The handle that acknowledges one message of a partition.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::group::buffer::Fetched;
use crate::partitions::assignment::{Assignment, Receipt};
use oncegate_runtime::source::{AckHandle, Delivery};

/// Acknowledges one message. When it is dropped without an ack, the offset stays unfinished while
/// the partition is ours, and the partition's next owner gets the message again.
#[derive(Debug)]
struct KafkaAckHandle {
    assignment: Arc<Assignment>,
    receipt: Receipt,
    running: AtomicBool,
}

pub(crate) fn delivery(fetched: Fetched) -> Delivery {
    let Fetched {
        message,
        assignment,
        receipt,
        ..
    } = fetched;
    let ack_handle = KafkaAckHandle {
        assignment,
        receipt,
        running: AtomicBool::new(false),
    };
    Delivery {
        message,
        ack_handle: Arc::new(ack_handle),
    }
}

impl AckHandle for KafkaAckHandle {
    fn start(&self) -> bool {
        let started = self.assignment.start();
        if started && self.running.swap(true, Ordering::AcqRel) {
            // One attempt at a time is counted, so a second start without a stop is the same
            // attempt.
            self.assignment.stop();
        }
        started
    }

    fn is_ours(&self) -> bool {
        !self.assignment.is_revoked()
    }

    fn ack(&self) {
        self.assignment.complete(self.receipt);
    }

    fn stop(&self) {
        if self.running.swap(false, Ordering::AcqRel) {
            self.assignment.stop();
        }
    }
}

impl Drop for KafkaAckHandle {
    /// Ends the attempt of a dropped task, so that no revoke waits for it.
    fn drop(&mut self) {
        self.stop();
    }
}
