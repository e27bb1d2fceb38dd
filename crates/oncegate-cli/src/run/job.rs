//! Messages on their way to a worker.

use oncegate::Message;
use tokio::sync::oneshot;

use super::worker::{AttemptInfo, Call, Reply};

/// A message and its attempt.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) message: Message,
    pub(super) attempt: AttemptInfo,
}

/// The messages of one line, on their way to a worker.
pub(super) struct Job {
    pub(super) orders: Vec<(Order, oneshot::Sender<Reply>)>,
    /// The line is one for batches, even if there is one message.
    pub(super) is_batch: bool,
    pub(super) call: Call,
}
