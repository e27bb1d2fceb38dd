//! A message on its way to a worker: its attempt, and the call that hands it over.

use std::sync::Arc;

use oncegate_runtime::{Attempt, Message};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// The step of the idempotency key for workers, which are assumed to have one effect per message.
const STEP: &str = "handler";

/// A message and its attempt.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) message: Message,
    pub(crate) attempt: AttemptInfo,
}

/// The attempt as a worker gets it.
#[derive(Clone, Debug)]
pub(crate) struct AttemptInfo {
    /// The same for every attempt and delivery of the message.
    pub(crate) idempotency_key: String,
    pub(crate) number: u32,
    pub(crate) recovered: bool,
    pub(crate) fencing_token: Option<u64>,
}

impl AttemptInfo {
    pub(crate) fn of(attempt: &Attempt) -> Self {
        Self {
            idempotency_key: attempt.idempotency_key(STEP),
            number: attempt.number(),
            recovered: attempt.recovered(),
            fencing_token: attempt.fencing_token(),
        }
    }

    /// Makes a first attempt.
    #[cfg(test)]
    pub(crate) fn first(idempotency_key: &str) -> Self {
        Self {
            idempotency_key: idempotency_key.to_owned(),
            number: 1,
            recovered: false,
            fencing_token: None,
        }
    }
}

/// A call of a worker for a message.
///
/// It begins when the worker is given the message: from then on its outcome is unknown until the
/// worker answers, or gives the message back because it has not begun it. A call that is withdrawn
/// before never begins.
#[derive(Clone, Debug, Default)]
pub(crate) struct Call(Arc<CallState>);

#[derive(Debug, Default)]
struct CallState {
    stage: Mutex<Stage>,
    begins: CancellationToken,
    withdrawn: CancellationToken,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// The worker does not have the message.
    #[default]
    Waiting,
    Begun,
    /// The call will not begin.
    Over,
}

impl Call {
    /// Begins the call, unless it was withdrawn: then the worker must not be given the message.
    #[must_use]
    pub(crate) fn begin(&self) -> bool {
        let mut stage = self.0.stage.lock();
        if *stage == Stage::Over {
            return false;
        }
        *stage = Stage::Begun;
        self.0.begins.cancel();
        true
    }

    /// Resolves when the call begins for the first time.
    pub(crate) async fn begins(&self) {
        self.0.begins.cancelled().await;
    }

    pub(crate) fn has_begun(&self) -> bool {
        *self.0.stage.lock() == Stage::Begun
    }

    /// Takes the message back from a worker that has not begun it, and will not. Returns whether
    /// another may be given it: the call was not withdrawn.
    pub(crate) fn take_back(&self) -> bool {
        let mut stage = self.0.stage.lock();
        let is_wanted = *stage != Stage::Over && !self.is_withdrawn();
        *stage = if is_wanted {
            Stage::Waiting
        } else {
            Stage::Over
        };
        is_wanted
    }

    /// Prevents the call from beginning. Returns whether it has not begun.
    pub(crate) fn forestall(&self) -> bool {
        let mut stage = self.0.stage.lock();
        if *stage == Stage::Begun {
            return false;
        }
        *stage = Stage::Over;
        self.0.withdrawn.cancel();
        true
    }

    /// Withdraws the call. Returns whether the worker has the message.
    pub(crate) fn withdraw(&self) -> bool {
        let mut stage = self.0.stage.lock();
        self.0.withdrawn.cancel();
        if *stage != Stage::Begun {
            *stage = Stage::Over;
        }
        *stage == Stage::Begun
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.0.withdrawn.is_cancelled()
    }

    /// Resolves when the call is withdrawn.
    pub(crate) async fn withdrawn(&self) {
        self.0.withdrawn.cancelled().await;
    }
}

/// Withdraws a call when its handler returns or is dropped.
pub(crate) struct WithdrawOnDrop(pub(crate) Call);

impl Drop for WithdrawOnDrop {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}
