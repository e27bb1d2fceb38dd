//! The state of the processes of a worker, for the start, the probes and the status page.

use std::sync::Arc;
use std::time::Duration;

use oncegate_runtime::health::WorkerStatus;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::error::WorkerError;

/// The number of messages that a worker takes, all of its processes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The number of messages that it handles at a time.
    pub at_a_time: u32,
    /// The number of messages that it takes besides, as long as it answers within milliseconds.
    pub ahead: u32,
}

impl Capacity {
    /// A worker that takes whatever comes.
    pub const UNLIMITED: Self = Self {
        at_a_time: u32::MAX,
        ahead: 0,
    };
}

/// The number of requests in a row that a worker behind HTTP takes no connection for until it
/// counts as gone: one may meet a restart, or a full backlog.
const GONE_AFTER: u32 = 3;

/// The current state of a worker. All clones share it.
#[derive(Clone, Debug, Default)]
pub struct WorkerReport(Arc<watch::Sender<Worked>>);

#[derive(Debug, Default)]
struct Worked {
    status: WorkerStatus,
    /// `true` if the worker's program cannot be started.
    cannot_start: bool,
    /// The number of requests in a row that a worker behind HTTP has taken no connection for.
    unreachable_in_a_row: u32,
}

/// The end of a process that was to go on.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    pub(crate) why: String,
    pub(crate) was_ready: bool,
    /// A shell has found no such program.
    pub(crate) cannot_start: bool,
}

impl WorkerReport {
    /// Returns the state of the worker, for the consumer that it works for.
    pub fn status(&self) -> WorkerStatus {
        self.0.borrow().status.clone()
    }

    fn change(&self, change: impl FnOnce(&mut WorkerStatus)) {
        self.0.send_modify(|worked| change(&mut worked.status));
    }

    /// Nothing is handled before the worker is ready, and this is why it is not.
    pub(crate) fn not_ready(&self, why: &str) {
        self.change(|status| status.not_ready = Some(why.to_owned()));
    }

    pub(crate) fn started(&self) {
        self.change(|status| {
            status.processes += 1;
            status
                .not_ready
                .get_or_insert_with(|| "its processes have not reported that they are".to_owned());
        });
    }

    /// A process is ready, or a worker that needs none.
    pub(crate) fn ready(&self) {
        self.change(|status| {
            status.ready += 1;
            status.not_ready = None;
        });
    }

    /// A worker behind HTTP has taken no connection for a request.
    pub(crate) fn unreachable(&self, why: &str) {
        let mut is_news = false;
        self.0.send_modify(|worked| {
            worked.unreachable_in_a_row = worked.unreachable_in_a_row.saturating_add(1);
            if worked.unreachable_in_a_row >= GONE_AFTER {
                is_news = worked.status.not_ready.replace(why.to_owned()).is_none();
            }
        });
        if is_news {
            warn!(
                why,
                "the worker is not ready any more; its messages wait for it"
            );
        }
    }

    /// A worker behind HTTP has answered a request.
    pub(crate) fn reached(&self) {
        let mut is_news = false;
        self.0.send_if_modified(|worked| {
            worked.unreachable_in_a_row = 0;
            is_news = worked.status.not_ready.take().is_some();
            is_news
        });
        if is_news {
            info!("the worker is ready again");
        }
    }

    /// A process has ended that was to go on.
    pub(crate) fn ended(&self, ended: &Ended) {
        self.0.send_modify(|worked| {
            let status = &mut worked.status;
            status.processes = status.processes.saturating_sub(1);
            if ended.was_ready {
                status.ready = status.ready.saturating_sub(1);
            }
            if status.ready == 0 {
                status.not_ready = Some(ended.why.clone());
            }
            status.ends_in_a_row = status.ends_in_a_row.saturating_add(1);
            status.last_end = Some(ended.why.clone());
            worked.cannot_start |= ended.cannot_start;
        });
    }

    /// A command has ended without an outcome.
    pub(crate) fn ended_without_outcome(&self, why: &str) {
        self.change(|status| {
            status.ends_in_a_row = status.ends_in_a_row.saturating_add(1);
            status.last_end = Some(why.to_owned());
        });
    }

    pub(crate) fn restarts(&self) {
        self.change(|status| status.restarts += 1);
    }

    /// A message has an outcome.
    pub(crate) fn answered(&self) {
        self.0
            .send_if_modified(|worked| std::mem::take(&mut worked.status.ends_in_a_row) > 0);
    }

    /// Resolves when no process will be ready: at once when there is no such program, and after
    /// `patience` at the first process that has ended without having been ready.
    pub(crate) async fn never_ready(&self, patience: Duration) -> WorkerError {
        let mut seen = self.0.subscribe();
        let give_up = tokio::time::timeout(patience, seen.wait_for(|worked| worked.cannot_start));
        if let Ok(Ok(worked)) = give_up.await {
            return WorkerError::CannotStart(last_end(&worked));
        }
        let mut seen = self.0.subscribe();
        // This report is a sender, so the wait does not fail.
        let ended = seen
            .wait_for(|worked| worked.status.last_end.is_some())
            .await;
        WorkerError::NotReady {
            patience,
            why: ended.map(|worked| last_end(&worked)).unwrap_or_default(),
        }
    }
}

fn last_end(worked: &Worked) -> String {
    worked.status.last_end.clone().unwrap_or_default()
}
