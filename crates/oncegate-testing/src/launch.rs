//! How the handler of a process is started: a new one for each process, as after a deployment or a crash.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use oncegate_runtime::source::Source;
use oncegate_runtime::{BoxError, Consumer, Gate, Handler};

use crate::round::{Downstream, Process, Round, Watched};

/// Starts the handler of a process.
///
/// A closure that makes a handler of a [`Downstream`] is one; implement the trait for handlers that are other programs.
#[async_trait]
pub trait Launch: Send + Sync + 'static {
    /// The handler.
    type Handler: Handler;

    /// Starts the handler of another process. Its effects go to `downstream`.
    ///
    /// # Errors
    /// When it cannot be started; the trial ends with the error.
    async fn launch(&self, downstream: Downstream) -> Result<Launched<Self::Handler>, BoxError>;
}

/// A handler that has been started.
pub struct Launched<H> {
    handler: H,
    most: u32,
    end: EndFuture,
}

/// Ends a handler, and resolves to whether it has ended by itself.
type EndFuture = Pin<Box<dyn Future<Output = bool> + Send>>;

impl<H> std::fmt::Debug for Launched<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launched").field("most", &self.most).finish_non_exhaustive()
    }
}

impl<H: Handler> Launched<H> {
    /// A handler in this process.
    pub fn new(handler: H) -> Self {
        Self { handler, most: u32::MAX, end: Box::pin(std::future::ready(true)) }
    }

    /// How many messages it takes at a time; no limit by default.
    #[must_use]
    pub fn most(mut self, messages: u32) -> Self {
        self.most = messages;
        self
    }

    /// How the handler's own process is ended: `end` asks it to, waits, and resolves to whether that was enough. If `end` is
    /// dropped instead, the process must be killed.
    #[must_use]
    pub fn ended_by(mut self, end: impl Future<Output = bool> + Send + 'static) -> Self {
        self.end = Box::pin(end);
        self
    }
}

#[async_trait]
impl<F, H> Launch for F
where
    F: Fn(Downstream) -> H + Send + Sync + 'static,
    H: Handler,
{
    type Handler = H;

    async fn launch(&self, downstream: Downstream) -> Result<Launched<H>, BoxError> {
        Ok(Launched::new(self(downstream)))
    }
}

/// What a process needs to start its consumer.
pub(crate) struct Start {
    pub(crate) round: Arc<Round>,
    pub(crate) process: Arc<Process>,
    pub(crate) member: Arc<dyn Source>,
    pub(crate) gate: Gate,
    pub(crate) downstream: Downstream,
}

/// A consumer that is ready to run.
pub(crate) struct Started {
    pub(crate) consumer: Consumer,
    pub(crate) most: u32,
    pub(crate) end: EndFuture,
}

/// [`Launch`] with its types erased.
#[async_trait]
pub(crate) trait ErasedLaunch: Send + Sync {
    async fn start(&self, start: Start) -> Result<Started, BoxError>;
}

#[async_trait]
impl<L: Launch> ErasedLaunch for L {
    async fn start(&self, start: Start) -> Result<Started, BoxError> {
        let Launched { handler, most, end } = self.launch(start.downstream.clone()).await?;
        Ok(Started { consumer: Watched::consumer(handler, start), most, end })
    }
}
