//! Starts the worker for each process of a trial, with the address of its downstream service.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate::{Backoff, BoxError};
use oncegate_testing::{Downstream, Launch, Launched, Service};
use oncegate_worker::{WorkerHandler, WorkerLimits};

use super::args::ProveArgs;
use super::tried::TriedConsumer;
use super::witness::{FOLDER, WitnessCommand};
use crate::config::values::Time;
use crate::exit::Problem;
use crate::run::workers;

/// The longest time that a worker may take to become ready.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// A worker may take as many times as long to end as one of the trial has taken to start, if that
/// is more than the time that it has in production: a machine that starves it is no defect of it.
const ENDS_IN_STARTS: u32 = 20;
/// The most that a worker gets for that reason.
const END_LIMIT: Duration = Duration::from_secs(60);
/// The variable with the address of the downstream service.
const DOWNSTREAM: &str = "ONCEGATE_DOWNSTREAM";

/// The worker under trial.
pub(super) struct Workers {
    tried: TriedConsumer,
    lease: Duration,
    service: Arc<Service>,
    witness: Option<Arc<WitnessCommand>>,
    /// The longest time that a worker has taken to become ready, in milliseconds.
    slowest_start: Arc<AtomicU64>,
}

impl Workers {
    pub(super) fn of(
        args: &ProveArgs,
        tried: &TriedConsumer,
        service: Arc<Service>,
        witness: Option<Arc<WitnessCommand>>,
    ) -> Self {
        Self {
            tried: tried.clone(),
            lease: args.lease,
            service,
            witness,
            slowest_start: Arc::default(),
        }
    }
}

/// Returns the shortest time limit for a worker to end, in a trial whose slowest worker has taken
/// this long to start.
fn end_grace(slowest_start: Duration) -> Duration {
    slowest_start.saturating_mul(ENDS_IN_STARTS).min(END_LIMIT)
}

#[async_trait]
impl Launch for Workers {
    async fn launch(&self, downstream: Downstream) -> Result<Launched, BoxError> {
        let handler = &self.tried.handler;
        let round = downstream.round().to_owned();
        let place = match &handler.http {
            // It was started before, with the address that all processes share.
            Some(_) => self.service.shared_address(downstream),
            None => self.service.address(downstream),
        };
        let folder = self
            .witness
            .as_ref()
            .map(|witness| witness.folder(&round))
            .transpose()?;
        let mut given = vec![(DOWNSTREAM.to_owned(), place.url().to_owned())];
        given.extend(
            folder.map(|folder| (FOLDER.to_owned(), folder.to_string_lossy().into_owned())),
        );
        let limits = WorkerLimits {
            lease: self.lease,
            result_max_bytes: self.tried.settings.gate.max_large_result_bytes,
            in_batches: self.tried.settings.batch.is_some(),
            hidden: self.tried.hidden.clone(),
            given,
        };
        let started = Instant::now();
        let (worker, supervisor) =
            workers::start(handler, &limits).map_err(|problem| problem.to_string())?;
        let worker = Arc::new(worker);
        let ready =
            tokio::time::timeout(READY_LIMIT, worker.until_ready("trial", READY_LIMIT)).await;
        let room = ready.map_err(|_| {
            format!(
                "the worker was not ready within {READY_LIMIT:?}; ONCEGATE_LOG=warn shows its standard error, and `oncegate worker-test` what is missing"
            )
        })?;
        let room = room.map_err(|error| Problem::from(error).to_string())?;
        let most = room.at_a_time.saturating_add(room.ahead);
        let took = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.slowest_start.fetch_max(took, Ordering::Relaxed);
        let slowest_start = Arc::clone(&self.slowest_start);
        let longest_delay = Backoff::DEFAULT.most();
        let timeout = handler.timeout.map(|Time(timeout)| timeout);
        let handler = WorkerHandler {
            worker,
            timeout,
            longest_delay,
            before: None,
            documents: None,
        };
        let end = async move {
            let by_itself = match supervisor {
                Some(supervisor) => {
                    let start = Duration::from_millis(slowest_start.load(Ordering::Relaxed));
                    supervisor.stop_within(end_grace(start)).await
                }
                None => true,
            };
            drop(place);
            by_itself
        };
        let launched = match self.tried.settings.batch {
            None => Launched::new(handler),
            Some(limits) => Launched::in_batches(limits, handler),
        };
        Ok(launched.most(most.min(self.tried.most())).ended_by(end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_a_machine_starves_get_more_time_to_end() {
        assert_eq!(
            end_grace(Duration::from_millis(100)),
            Duration::from_secs(2),
            "less than in production"
        );
        assert_eq!(end_grace(Duration::from_secs(2)), Duration::from_secs(40));
        assert_eq!(end_grace(Duration::MAX), END_LIMIT);
    }
}
