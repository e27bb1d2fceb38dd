//! The requirements of a consumer's start: its store, its topics or queues, and its worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::BoxError;
use oncegate::core::store::Store;
use oncegate::dead_letters::DeadLetters;
use oncegate::source::{SourceError, Terms};
use tracing::{info, warn};

use super::report::{NotReady, WorkerReport};
use super::worker::Worker;
use crate::exit::{Exit, Problem, dead_letters_not_opened, not_opened};
use crate::sources::ConfiguredSource;

/// The time between two checks whether a worker is ready.
const READY_INTERVAL: Duration = Duration::from_millis(200);
/// The time between two log lines that a worker is not ready.
const READY_REMINDER: u32 = 50;

/// The servers of a consumer.
pub(super) struct Servers {
    pub(super) source: Box<dyn ConfiguredSource>,
    pub(super) dead_letters: Option<Arc<dyn DeadLetters>>,
    pub(super) store: Arc<dyn Store>,
}

impl Servers {
    /// Checks what the start would refuse, so that it is reported even if the worker never becomes
    /// ready.
    ///
    /// # Errors
    /// When a topic or queue does not exist or cannot be used, or the store must not be used with
    /// its settings. A server that is away is an error once the check has taken longer than
    /// `patience`; until then the start waits for it.
    pub(super) async fn check(&self, name: &str, patience: Duration) -> Result<(), Problem> {
        let begun = Instant::now();
        match self.store.check().await {
            Err(error) if error.is_away() => warn!(consumer = name, %error, "the store is away"),
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        match self.source.examine(&Terms::default()).await {
            Err(error) if error.is_away() && begun.elapsed() < patience => {
                warn!(consumer = name, %error, "the server of the source is away");
            }
            Err(error) => return Err(not_opened(&error)),
            Ok(_) => {}
        }
        let Some(dead_letters) = &self.dead_letters else {
            return Ok(());
        };
        match dead_letters.open().await {
            Err(error) if is_away(&error) && begun.elapsed() < patience => {
                warn!(consumer = name, %error, "the server of the dead letters is away");
            }
            Err(error) => return Err(dead_letters_not_opened(&error)),
            Ok(()) => {}
        }
        Ok(())
    }
}

fn is_away(error: &BoxError) -> bool {
    error
        .downcast_ref::<SourceError>()
        .is_some_and(SourceError::is_away)
}

/// Waits until the worker is ready. Returns the most messages that it takes at a time.
///
/// # Errors
/// When its program cannot be started, or when its processes have ended before they were ready for
/// `patience`. A worker behind HTTP is waited for without a limit.
pub(crate) async fn until_ready(
    name: &str,
    worker: &Worker,
    report: &WorkerReport,
    patience: Duration,
) -> Result<u32, Problem> {
    let mut tries = 0_u32;
    loop {
        let ready = match worker {
            Worker::Http(caller) => caller.is_ready().await.map(|()| u32::MAX),
            Worker::Exec(crew) => Ok(crew
                .ready(patience)
                .await
                .map_err(|never| never_ready(never, patience))?),
            Worker::Command(_) => Ok(u32::MAX),
        };
        let why = match ready {
            Ok(room) => {
                if matches!(worker, Worker::Http(_)) {
                    report.ready();
                }
                info!(consumer = name, "the worker is ready");
                return Ok(room);
            }
            Err(why) => why,
        };
        report.not_ready(&why);
        if tries.is_multiple_of(READY_REMINDER) {
            warn!(
                consumer = name,
                why, "the worker is not ready yet; nothing is consumed before it is"
            );
        }
        tries = tries.wrapping_add(1);
        tokio::time::sleep(READY_INTERVAL).await;
    }
}

fn never_ready(never: NotReady, patience: Duration) -> Problem {
    match never {
        NotReady::CannotStart(why) => Problem::configuration(format!(
            "the worker cannot be started: {why}; change `handler.exec` (--handler-exec)"
        )),
        NotReady::Ends(why) => Problem::new(
            Exit::Unreachable,
            format!("the worker was not ready within {patience:?} (`start_patience`): {why}"),
        ),
    }
}
