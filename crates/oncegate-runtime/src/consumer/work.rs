//! What a consumer runs for the messages of a route: a handler of any kind, with its type erased.

use std::sync::Arc;
use std::time::Duration;

use super::shared::Batches;
use super::transactional::ErasedTransactional;
use crate::handler::{ErasedHandler, Handler};

/// What a consumer runs for the messages of a route: a [`Handler`], a [`Batched`](crate::Batched) or a
/// [`Transactional`](crate::Transactional).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no handler",
    note = "implement `Handler` for it, or wrap a `TransactionalHandler` by `Transactional::new`, a `BatchHandler` by \
            `Batched::new`, a `TransactionalBatchHandler` by `Transactional::batched`"
)]
pub trait ConsumerHandler: sealed::Sealed {}

impl<H: Handler> ConsumerHandler for H {}

pub(super) mod sealed {
    /// Keeps other crates from implementing [`ConsumerHandler`](super::ConsumerHandler).
    pub trait Sealed {
        /// Erases the type of the handler.
        fn into_work(self) -> super::Work;
    }
}

impl<H: Handler> sealed::Sealed for H {
    fn into_work(self) -> Work {
        Work { handler: Arc::new(self), transactional: None, batches: None }
    }
}

/// A handler of any kind, with its type erased.
pub struct Work {
    /// For duplicates, and for runs under a claim.
    pub(super) handler: Arc<dyn ErasedHandler>,
    /// For runs without a claim.
    pub(super) transactional: Option<Arc<dyn ErasedTransactional>>,
    /// For calls with many messages.
    pub(super) batches: Option<Batches>,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("limit", &self.limit()).finish_non_exhaustive()
    }
}

impl Work {
    /// The limit of its transactions, if it is transactional.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.transactional.as_ref().map(|work| work.limit())
    }
}
