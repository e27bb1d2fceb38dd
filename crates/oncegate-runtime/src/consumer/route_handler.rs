//! The handlers that a consumer runs for the messages of a route, of any kind, with their types
//! erased.

use std::sync::Arc;
use std::time::Duration;

use super::erased::ErasedTransactional;
use crate::batch::{BatchHandler, BatchLimits, ErasedBatchHandler, ErasedBatches};
use crate::handler::{ErasedHandler, Handler};

/// A handler that a consumer runs for the messages of a route: a [`Handler`], a [`Batched`]
/// or a [`Transactional`](crate::Transactional).
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
        fn erased(self) -> super::RouteHandler;
    }
}

impl<H: Handler> sealed::Sealed for H {
    fn erased(self) -> RouteHandler {
        RouteHandler::of(Arc::new(self))
    }
}

/// A handler of any kind, with its type erased.
pub struct RouteHandler {
    /// For duplicates, and for runs of one message under a claim.
    pub(super) handler: Arc<dyn ErasedHandler>,
    /// The limits of its batches, if it takes batches.
    pub(super) limits: Option<BatchLimits>,
    /// For calls with many messages under their claims.
    pub(super) batches: Option<Arc<dyn ErasedBatchHandler>>,
    /// For runs without a claim, in a transaction of one message or of a batch.
    pub(super) transactional: Option<Arc<dyn ErasedTransactional>>,
}

impl std::fmt::Debug for RouteHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RouteHandler")
            .field("limit", &self.limit())
            .finish_non_exhaustive()
    }
}

impl RouteHandler {
    /// A handler for one message at a time, which runs under claims.
    pub(super) fn of(handler: Arc<dyn ErasedHandler>) -> Self {
        Self {
            handler,
            limits: None,
            batches: None,
            transactional: None,
        }
    }

    /// The limit of its transactions, if it is transactional.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.transactional.as_ref().map(|handler| handler.limit())
    }
}

/// A [`BatchHandler`] with the limits of its batches; pass it to
/// [`Consumer::new`](crate::Consumer::new) or [`route`](crate::Consumer::route) in the place of a
/// handler.
///
/// ```
/// use oncegate::{BatchHandler, BatchLimits, BatchMessage, Batched, Failure};
///
/// struct Ledger;
///
/// impl BatchHandler for Ledger {
///     type Output = ();
///
///     async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
///         Ok(batch.iter().map(|_| Ok(())).collect())
///     }
/// }
///
/// let hundreds = Batched::new(BatchLimits::new(100), Ledger);
/// ```
pub struct Batched {
    limits: BatchLimits,
    erased: RouteHandler,
}

impl Batched {
    /// The handler, with batches within these limits.
    pub fn new(limits: BatchLimits, handler: impl BatchHandler) -> Self {
        let handler = Arc::new(ErasedBatches(handler));
        let erased = RouteHandler {
            limits: Some(limits),
            batches: Some(Arc::clone(&handler) as _),
            ..RouteHandler::of(handler)
        };
        Self { limits, erased }
    }
}

impl std::fmt::Debug for Batched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batched")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl ConsumerHandler for Batched {}

impl sealed::Sealed for Batched {
    fn erased(self) -> RouteHandler {
        self.erased
    }
}
