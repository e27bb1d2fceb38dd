//! A worker: how it is called, what it is held to, and when it is ready.

use std::time::Duration;

use tracing::{info, warn};

use crate::command::Commands;
use crate::error::WorkerError;
use crate::exec::{Supervisor, Workers};
use crate::http::{Caller, HttpSettings};
use crate::process::Runnable;
use crate::program::Program;
use crate::report::{Capacity, WorkerReport};

/// The time between two checks whether a worker is ready.
const READY_INTERVAL: Duration = Duration::from_millis(200);
/// The number of checks between two log lines that a worker is not ready.
const READY_REMINDER: u32 = 50;

/// The way a worker is called.
#[derive(Clone, Debug)]
pub enum WorkerKind {
    /// HTTP: one request for each message or batch.
    Http(HttpSettings),
    /// Standard streams: processes that read messages as JSON lines, and write answers.
    Exec {
        /// The program.
        program: Program,
        /// The number of its processes.
        workers: u32,
    },
    /// A program that is started for each message.
    Command(Program),
}

/// The limits that a worker is held to.
#[derive(Clone, Debug)]
pub struct WorkerLimits {
    /// The lease of the gate.
    pub lease: Duration,
    /// The largest result that is kept, in bytes.
    pub result_max_bytes: usize,
    /// `true` if it gets batches.
    pub in_batches: bool,
    /// The variables of this process that it does not get.
    pub hidden: Vec<String>,
    /// The variables that it gets besides.
    pub given: Vec<(String, String)>,
}

impl WorkerLimits {
    /// A program that runs within these limits.
    pub(crate) fn runnable(&self, program: Program) -> Runnable {
        Runnable::new(program, &self.hidden, &self.given)
    }
}

/// The worker that handles messages.
#[derive(Debug)]
pub struct Worker {
    pub(crate) called: Called,
    report: WorkerReport,
}

/// A worker by the way it is called.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one for the whole run")]
pub(crate) enum Called {
    Http(Caller),
    Exec(Workers),
    Command(Commands),
}

impl Worker {
    /// Starts the worker: the processes of one on standard streams, which the supervisor ends. Must
    /// be called within a tokio runtime.
    ///
    /// # Errors
    /// When the settings of a worker behind HTTP are wrong.
    pub fn start(
        kind: WorkerKind,
        limits: &WorkerLimits,
    ) -> Result<(Self, Option<Supervisor>), WorkerError> {
        let report = WorkerReport::default();
        let most = limits.result_max_bytes;
        let mut supervisor = None;
        let called = match kind {
            WorkerKind::Http(settings) => {
                Called::Http(Caller::new(&settings, limits.lease, most, &report)?)
            }
            WorkerKind::Exec { program, workers } => {
                let program = limits.runnable(program);
                let (crew, started) =
                    Workers::start(&program, workers, limits.in_batches, limits.lease, &report);
                supervisor = Some(started);
                Called::Exec(crew)
            }
            WorkerKind::Command(program) => {
                let program = limits.runnable(program);
                Called::Command(Commands::new(program, most, report.clone()))
            }
        };
        Ok((Self { called, report }, supervisor))
    }

    /// The state of the worker, as it changes.
    pub fn report(&self) -> &WorkerReport {
        &self.report
    }

    /// Waits until the worker of this consumer is ready. Returns how many messages it takes.
    ///
    /// # Errors
    /// When its program cannot be started, or when its processes have ended before they were ready
    /// for `patience`. A worker behind HTTP is waited for without a limit.
    pub async fn until_ready(
        &self,
        consumer: &str,
        patience: Duration,
    ) -> Result<Capacity, WorkerError> {
        let mut tries = 0_u32;
        loop {
            let ready = match &self.called {
                Called::Http(caller) => caller.is_ready().await.map(|()| Capacity::UNLIMITED),
                Called::Exec(crew) => Ok(crew.ready(patience).await?),
                Called::Command(_) => Ok(Capacity::UNLIMITED),
            };
            let why = match ready {
                Ok(room) => {
                    if matches!(self.called, Called::Http(_)) {
                        self.report.ready();
                    }
                    info!(consumer, "the worker is ready");
                    return Ok(room);
                }
                Err(why) => why,
            };
            self.report.not_ready(&why);
            if tries.is_multiple_of(READY_REMINDER) {
                warn!(
                    consumer,
                    why, "the worker is not ready yet; nothing is consumed before it is"
                );
            }
            tries = tries.wrapping_add(1);
            tokio::time::sleep(READY_INTERVAL).await;
        }
    }

    /// Lets no more messages begin, because the consumer stops: those that were sent to the worker
    /// and have not begun are not run.
    pub fn rest(&self) {
        if let Called::Exec(crew) = &self.called {
            crew.rest();
        }
    }

    /// Resolves when the worker has broken the protocol so that its consumer must stop.
    pub async fn unfit(&self) {
        match &self.called {
            Called::Exec(crew) => crew.unfit().await,
            Called::Http(_) | Called::Command(_) => std::future::pending().await,
        }
    }

    /// Returns why the consumer must stop, if it must.
    pub fn why_unfit(&self) -> Option<String> {
        match &self.called {
            Called::Exec(crew) => crew.why_unfit(),
            Called::Http(_) | Called::Command(_) => None,
        }
    }
}
