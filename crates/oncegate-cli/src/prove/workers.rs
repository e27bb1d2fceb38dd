//! Starts the worker for each process of a trial, with the address of its downstream service.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::{BoxError, Consumer, Gate};
use oncegate_testing::{Downstream, Launch, Launched, Service};

use super::ProveArgs;
use crate::config::shape;
use crate::config::values::Program;
use crate::run::{Limited, WorkerLimits, until_ready, worker};

/// The longest time that a worker may take to become ready.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// The variable with the address of the downstream service.
const DOWNSTREAM: &str = "ONCEGATE_DOWNSTREAM";

/// The worker under trial.
pub(super) struct Workers {
    exec: Option<String>,
    command: Option<String>,
    http: Option<String>,
    content_type: String,
    lease: Duration,
    service: Arc<Service>,
}

impl Workers {
    pub(super) fn of(args: &ProveArgs, service: Arc<Service>) -> Self {
        Self {
            exec: args.handler_exec.clone(),
            command: args.handler_command.clone(),
            http: args.handler.clone(),
            content_type: args.content_type.clone(),
            lease: args.lease,
            service,
        }
    }
}

#[async_trait]
impl Launch for Workers {
    type Handler = Limited;

    async fn launch(&self, downstream: Downstream) -> Result<Launched<Limited>, BoxError> {
        let place = match &self.http {
            // It was started before, with the address that all processes share.
            Some(_) => self.service.shared_place(downstream),
            None => self.service.place(downstream),
        };
        // By `env`, because the worker's process must have it and this one must not. A URL needs no quotes.
        let program = |text: &String| Program::Shell(format!("env {DOWNSTREAM}={} {text}", place.url()));
        let handler = shape::Handler {
            http: self.http.clone(),
            exec: self.exec.as_ref().map(program),
            command: self.command.as_ref().map(program),
            content_type: Some(self.content_type.clone()),
            ..shape::Handler::default()
        };
        let limits = WorkerLimits {
            lease: self.lease,
            result_max_bytes: Gate::DEFAULT_MAX_LARGE_RESULT_BYTES,
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
        let limited = Limited { worker, timeout: None, longest_delay, before: None };
        let end = async move {
            let by_itself = match foreman {
                Some(foreman) => foreman.dismiss().await,
                None => true,
            };
            drop(place);
            by_itself
        };
        Ok(Launched::new(limited).most(most).ended_by(end))
    }
}
