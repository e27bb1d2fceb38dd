//! Starts the worker for each process of a trial, with the address of its downstream service.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::{BoxError, Consumer, Gate};
use oncegate_testing::{Downstream, Launch, Launched, Service};

use super::ProveArgs;
use super::repeat::quoted;
use super::tried::TriedConsumer;
use super::witness::{FOLDER, WitnessCommand};
use crate::config::shape;
use crate::config::values::{Program, Size, Time};
use crate::run::{Limited, WorkerLimits, until_ready, worker};

/// The longest time that a worker may take to become ready.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// The variable with the address of the downstream service.
const DOWNSTREAM: &str = "ONCEGATE_DOWNSTREAM";

/// The worker under trial.
pub(super) struct Workers {
    tried: TriedConsumer,
    lease: Duration,
    service: Arc<Service>,
    witness: Option<Arc<WitnessCommand>>,
}

impl Workers {
    pub(super) fn of(
        args: &ProveArgs,
        tried: &TriedConsumer,
        service: Arc<Service>,
        witness: Option<Arc<WitnessCommand>>,
    ) -> Self {
        Self { tried: tried.clone(), lease: args.lease, service, witness }
    }
}

/// The program with another variable in its environment, which this process must not have.
fn with_variable(program: &Program, name: &str, value: &str) -> Program {
    let variable = format!("{name}={value}");
    match program {
        Program::Shell(text) => Program::Shell(format!("env {} {text}", quoted(&variable))),
        Program::Words(words) => {
            Program::Words(["env".to_owned(), variable].into_iter().chain(words.iter().cloned()).collect())
        }
    }
}

#[async_trait]
impl Launch for Workers {
    async fn launch(&self, downstream: Downstream) -> Result<Launched, BoxError> {
        let (handler, round) = (&self.tried.handler, downstream.round().to_owned());
        let place = match &handler.http {
            // It was started before, with the address that all processes share.
            Some(_) => self.service.shared_place(downstream),
            None => self.service.place(downstream),
        };
        let folder = self.witness.as_ref().map(|witness| witness.folder(&round)).transpose()?;
        let program = |program: &Program| {
            let program = with_variable(program, DOWNSTREAM, place.url());
            match &folder {
                Some(folder) => with_variable(&program, FOLDER, &folder.to_string_lossy()),
                None => program,
            }
        };
        let handler = shape::Handler {
            exec: handler.exec.as_ref().map(program),
            command: handler.command.as_ref().map(program),
            ..handler.clone()
        };
        let limits = WorkerLimits {
            lease: self.lease,
            result_max_bytes: (self.tried.settings.max_large_result)
                .map_or(Gate::DEFAULT_MAX_LARGE_RESULT_BYTES, |Size(bytes)| bytes),
            in_batches: self.tried.batch_limits().is_some(),
        };
        let (worker, foreman) = worker(&handler, &limits)?;
        let worker = Arc::new(worker);
        let ready = tokio::time::timeout(READY_LIMIT, until_ready("trial", &worker)).await;
        let most = ready.map_err(|_| {
            format!(
                "the worker was not ready within {READY_LIMIT:?}; ONCEGATE_LOG=warn shows its standard error, and `oncegate worker-test` what is missing"
            )
        })?;
        let longest_delay = Consumer::DEFAULT_BACKOFF.most();
        let timeout = handler.timeout.map(|Time(timeout)| timeout);
        let limited = Limited { worker, timeout, longest_delay, before: None };
        let end = async move {
            let by_itself = match foreman {
                Some(foreman) => foreman.dismiss().await,
                None => true,
            };
            drop(place);
            by_itself
        };
        let launched = match self.tried.batch_limits() {
            None => Launched::new(limited),
            Some(limits) => Launched::in_batches(limits, limited),
        };
        Ok(launched.most(most.min(self.tried.most())).ended_by(end))
    }
}
