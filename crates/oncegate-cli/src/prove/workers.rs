//! Starts the worker for each process of a trial, with the address of its downstream service.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::{BoxError, Consumer, Gate};
use oncegate_testing::{Downstream, Launch, Launched, Service};

use super::ProveArgs;
use super::subject::Subject;
use crate::config::shape;
use crate::config::values::{Program, Size, Time};
use crate::run::{Limited, WorkerLimits, until_ready, worker};

/// The longest time that a worker may take to become ready.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// The variable with the address of the downstream service.
const DOWNSTREAM: &str = "ONCEGATE_DOWNSTREAM";

/// The worker under trial.
pub(super) struct Workers {
    subject: Subject,
    lease: Duration,
    service: Arc<Service>,
}

impl Workers {
    pub(super) fn of(args: &ProveArgs, subject: &Subject, service: Arc<Service>) -> Self {
        Self { subject: subject.clone(), lease: args.lease, service }
    }
}

/// The program with another variable in its environment, which this process must not have. Neither name nor value needs
/// quotes.
fn with_variable(program: &Program, name: &str, value: &str) -> Program {
    let variable = format!("{name}={value}");
    match program {
        Program::Shell(text) => Program::Shell(format!("env {variable} {text}")),
        Program::Words(words) => {
            Program::Words(["env".to_owned(), variable].into_iter().chain(words.iter().cloned()).collect())
        }
    }
}

#[async_trait]
impl Launch for Workers {
    type Handler = Limited;

    async fn launch(&self, downstream: Downstream) -> Result<Launched<Limited>, BoxError> {
        let handler = &self.subject.handler;
        let place = match &handler.http {
            // It was started before, with the address that all processes share.
            Some(_) => self.service.shared_place(downstream),
            None => self.service.place(downstream),
        };
        let program = |program: &Program| with_variable(program, DOWNSTREAM, place.url());
        let handler = shape::Handler {
            exec: handler.exec.as_ref().map(program),
            command: handler.command.as_ref().map(program),
            ..handler.clone()
        };
        let limits = WorkerLimits {
            lease: self.lease,
            result_max_bytes: (self.subject.settings.max_large_result)
                .map_or(Gate::DEFAULT_MAX_LARGE_RESULT_BYTES, |Size(bytes)| bytes),
            in_batches: false,
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
        let limited = Limited { worker, timeout, longest_delay };
        let end = async move {
            let by_itself = match foreman {
                Some(foreman) => foreman.dismiss().await,
                None => true,
            };
            drop(place);
            by_itself
        };
        Ok(Launched::new(limited).most(most.min(self.subject.most())).ended_by(end))
    }
}
