//! What a message's owner holds of its partition.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::assignment::{Assignment, Receipt};
use super::buffer::Fetched;
use crate::source::{Delivery, Ticket};

/// The right to finish one message. Dropped without an ack, it leaves the offset unfinished for as long as
/// the partition is ours, and the next owner gets the message again.
#[derive(Debug)]
struct KafkaTicket {
    assignment: Arc<Assignment>,
    receipt: Receipt,
    running: AtomicBool,
}

pub(crate) fn delivery(fetched: Fetched) -> Delivery {
    let Fetched { message, assignment, receipt, .. } = fetched;
    let ticket = KafkaTicket { assignment, receipt, running: AtomicBool::new(false) };
    Delivery { message, ticket: Box::new(ticket) }
}

impl Ticket for KafkaTicket {
    fn start(&self) -> bool {
        let started = self.assignment.start();
        if started && self.running.swap(true, Ordering::AcqRel) {
            // One attempt at a time is counted; a second start without a stop is the same attempt.
            self.assignment.stop();
        }
        started
    }

    fn stop(&self) {
        if self.running.swap(false, Ordering::AcqRel) {
            self.assignment.stop();
        }
    }

    fn ack(self: Box<Self>) {
        self.assignment.complete(self.receipt);
    }
}

impl Drop for KafkaTicket {
    /// Ends the attempt, if one runs: behind the ack, so that a revoke that waits for it commits the ack too,
    /// and also when the attempt's task was dropped.
    fn drop(&mut self) {
        self.stop();
    }
}
