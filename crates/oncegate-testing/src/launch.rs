//! The start of a process's handler: a new one for each process, as after a deployment or a crash.

use std::future::Future;
use std::pin::Pin;

use async_trait::async_trait;
use oncegate_runtime::{BatchHandler, BatchLimits, BoxError, Consumer, Handler};

use crate::round::{Downstream, Start, Watched};

/// Starts the handler of a process.
///
/// A closure that makes a handler of a [`Downstream`] is one; implement the trait for handlers that
/// are other programs.
#[async_trait]
pub trait Launch: Send + Sync + 'static {
    /// Starts the handler of another process. Its effects go to `downstream`.
    ///
    /// # Errors
    /// When it cannot be started; the trial ends with the error.
    async fn launch(&self, downstream: Downstream) -> Result<Launched, BoxError>;
}

/// A handler that has been started.
pub struct Launched {
    consumer: MakeConsumer,
    pub(crate) most: u32,
    end: EndFuture,
}

/// Makes the consumer of a process with the handler.
type MakeConsumer = Box<dyn FnOnce(Start) -> Consumer + Send>;

/// Ends a handler, and resolves to whether it has ended by itself.
type EndFuture = Pin<Box<dyn Future<Output = bool> + Send>>;

impl std::fmt::Debug for Launched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launched")
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}

impl Launched {
    /// A handler in this process.
    pub fn new(handler: impl Handler) -> Self {
        Self::of(Box::new(|start| Watched::consumer(handler, start)))
    }

    /// A handler in this process that takes batches within these limits.
    pub fn in_batches(limits: BatchLimits, handler: impl BatchHandler) -> Self {
        Self::of(Box::new(move |start| {
            Watched::batch_consumer(limits, handler, start)
        }))
    }

    fn of(consumer: MakeConsumer) -> Self {
        Self {
            consumer,
            most: u32::MAX,
            end: Box::pin(std::future::ready(true)),
        }
    }

    /// Limits the number of messages, or batches, that it takes at a time; no limit by default.
    #[must_use]
    pub fn most(mut self, messages: u32) -> Self {
        self.most = messages;
        self
    }

    /// Sets how the handler's own process is ended: `end` asks it to, waits, and resolves to
    /// whether that was enough. If `end` is dropped instead, the process must be killed.
    #[must_use]
    pub fn ended_by(mut self, end: impl Future<Output = bool> + Send + 'static) -> Self {
        self.end = Box::pin(end);
        self
    }

    /// The consumer that runs the handler in this process, and how the handler is ended.
    pub(crate) fn started(self, start: Start) -> (Consumer, EndFuture) {
        ((self.consumer)(start), self.end)
    }
}

#[async_trait]
impl<F, H> Launch for F
where
    F: Fn(Downstream) -> H + Send + Sync + 'static,
    H: Handler,
{
    async fn launch(&self, downstream: Downstream) -> Result<Launched, BoxError> {
        Ok(Launched::new(self(downstream)))
    }
}

/// Starts the batch handlers that a closure makes.
pub(crate) struct LaunchInBatches<F> {
    pub(crate) limits: BatchLimits,
    pub(crate) make: F,
}

#[async_trait]
impl<F, H> Launch for LaunchInBatches<F>
where
    F: Fn(Downstream) -> H + Send + Sync + 'static,
    H: BatchHandler,
{
    async fn launch(&self, downstream: Downstream) -> Result<Launched, BoxError> {
        Ok(Launched::in_batches(self.limits, (self.make)(downstream)))
    }
}
