//! The workers that a configuration names.

use std::sync::Arc;

use oncegate::Gate;
use oncegate_worker::{HttpSettings, Supervisor, TokenSource, Worker, WorkerKind, WorkerLimits};

use crate::config::values::ProgramSetting;
use crate::config::{Loaded, shape};
use crate::exit::Problem;

/// The limits of a worker whose consumer has these settings.
pub(crate) fn limits(loaded: &Loaded, settings: &shape::Consumer, gate: &Gate) -> WorkerLimits {
    WorkerLimits {
        lease: gate.lease_period(),
        result_max_bytes: settings.gate.max_large_result_bytes,
        in_batches: settings.batch.is_some(),
        hidden: loaded.variables(),
        given: Vec::new(),
    }
}

/// Starts the worker that a configuration names.
///
/// # Errors
/// When its program is known to be missing, or a setting is wrong.
pub(crate) fn start(
    handler: &shape::Handler,
    limits: &WorkerLimits,
) -> Result<(Worker, Option<Supervisor>), Problem> {
    if let Some((_, absent)) = handler.absent() {
        return Err(Problem::configuration(absent));
    }
    Ok(Worker::start(kind(handler), limits)?)
}

/// The way the worker is called.
pub(crate) fn kind(handler: &shape::Handler) -> WorkerKind {
    if let Some(ProgramSetting(program)) = handler.exec.clone() {
        return WorkerKind::Exec {
            program,
            workers: handler.workers.unwrap_or(1),
        };
    }
    if let Some(ProgramSetting(program)) = handler.command.clone() {
        return WorkerKind::Command(program);
    }
    WorkerKind::Http(HttpSettings {
        url: handler.http.clone().unwrap_or_default(),
        ready_url: handler.ready_url.clone(),
        allow_remote: handler.allow_remote.unwrap_or(false),
        tls: handler.tls.clone(),
        token: handler
            .token
            .clone()
            .map(|token| -> Arc<dyn TokenSource> { Arc::new(token) }),
        content_type: handler.content_type.clone(),
        http2: handler.http2.unwrap_or(false),
        cloudevents: handler.cloudevents.unwrap_or(false),
    })
}
