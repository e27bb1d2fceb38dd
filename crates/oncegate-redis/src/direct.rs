//! The direct way of a pipe: while calls come one at a time, each is sent on its caller's own task.
//!
//! A pipe is a task, so a call that goes through it is handed over twice: to the pipe, and back. At
//! everyday rates most calls are alone, and those hand-overs, not the call, are what it costs:
//! tokio runs a chain of four tasks that wake each other on one thread, and the fifth wakes another
//! thread (`scripts/bench rates`, context switches). A call that meets others goes through the
//! pipe, which sends them together.

use std::fmt;
use std::sync::Arc;

use oncegate_core::store::StoreError;
use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::{self, Handle};
use tokio::sync::Notify;

use super::durability::Durability;
use super::no_answer;
use super::pipeline::{self, ReadyConnection};
use super::replies::RawReply;
use super::request::Request;
use super::shared::Shared;

/// State that a pipe shares with the callers that may send by themselves.
pub(super) struct Direct {
    shared: Shared,
    node: Arc<str>,
    /// The runtime that drives the pipe's connection. `None` when that is not the callers': then a
    /// call wakes another thread in any case.
    runtime: Option<runtime::Id>,
    connection: Mutex<PipeConnection>,
    has_broken: Notify,
}

/// The connection of a pipe, and what is in flight on it.
#[derive(Default)]
struct PipeConnection {
    /// `None` while the pipe has none.
    ready: Option<ReadyConnection>,
    /// Tells the connections of a pipe apart.
    generation: u64,
    /// The pipelines in flight, of the pipe and of callers.
    in_flight: usize,
    /// `true` if the last pipeline had one call and met no other.
    is_quiet: bool,
    /// The reason to replace the connection, as a caller has found it.
    broken: Option<StoreError>,
}

impl Direct {
    pub(super) fn new(shared: Shared, node: Arc<str>, callers: Option<&Handle>) -> Self {
        // A confirmation by replicas or disks is paid for each pipeline, so calls are better off
        // together.
        let runtime = callers
            .filter(|_| shared.durability == Durability::Primary)
            .map(Handle::id);
        Self {
            shared,
            node,
            runtime,
            connection: Mutex::default(),
            has_broken: Notify::new(),
        }
    }

    /// Sends a call on the caller's task, or returns it if it must go through the pipe.
    ///
    /// Dropping the future does not take the call back: it may still be executed.
    pub(super) async fn send(&self, request: Request) -> Result<RawReply, Request> {
        let Some(call) = self.begin() else {
            return Err(request);
        };
        // Boxed: otherwise every caller's future would be larger.
        let exchange = pipeline::exchange(&self.shared, &self.node, &call.ready, vec![request], 0);
        let (answers, broken) = Box::pin(exchange).await;
        if let Some(reason) = broken {
            self.replace(call.in_flight.generation, reason);
        }
        Ok(answers.into_iter().next().unwrap_or_else(no_answer))
    }

    fn begin(&self) -> Option<DirectCall<'_>> {
        if self.runtime? != Handle::try_current().ok()?.id() {
            return None;
        }
        let mut connection = self.connection();
        if !connection.is_quiet || connection.in_flight > 0 || connection.broken.is_some() {
            return None;
        }
        let ready = connection.ready.clone()?;
        connection.in_flight += 1;
        let generation = connection.generation;
        Some(DirectCall {
            ready,
            in_flight: InFlight {
                direct: self,
                generation,
            },
        })
    }

    /// The pipe has a new connection.
    pub(super) fn open(&self, ready: ReadyConnection, generation: u64) {
        *self.connection() = PipeConnection {
            ready: Some(ready),
            generation,
            ..PipeConnection::default()
        };
    }

    /// The pipe has lost its connection.
    pub(super) fn close(&self) {
        self.connection().ready = None;
    }

    /// The pipe sends a pipeline with this number of calls. The returned value is kept while it is
    /// in flight.
    pub(super) fn pipe_sends(self: &Arc<Self>, calls: usize) -> PipelineInFlight {
        let mut connection = self.connection();
        connection.is_quiet = calls == 1 && connection.in_flight == 0;
        connection.in_flight += 1;
        PipelineInFlight {
            direct: Arc::clone(self),
            generation: connection.generation,
        }
    }

    /// Waits until a caller has found that the connection must be replaced. Returns why.
    pub(super) async fn broken(&self) -> StoreError {
        loop {
            let has_broken = self.has_broken.notified();
            if let Some(reason) = self.connection().broken.clone() {
                return reason;
            }
            has_broken.await;
        }
    }

    fn replace(&self, generation: u64, reason: StoreError) {
        let mut connection = self.connection();
        if connection.generation == generation {
            connection.broken.get_or_insert(reason);
            self.has_broken.notify_one();
        }
    }

    fn ended(&self, generation: u64) {
        let mut connection = self.connection();
        // A former connection's pipelines are not counted any more.
        if connection.generation == generation {
            connection.in_flight = connection.in_flight.saturating_sub(1);
        }
    }

    fn connection(&self) -> MutexGuard<'_, PipeConnection> {
        self.connection.lock()
    }
}

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Direct")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

/// A call on its caller's task.
struct DirectCall<'a> {
    ready: ReadyConnection,
    in_flight: InFlight<'a>,
}

/// Counts a caller's pipeline while it is in flight.
struct InFlight<'a> {
    direct: &'a Direct,
    generation: u64,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.direct.ended(self.generation);
    }
}

/// Counts a pipeline of the pipe while it is in flight.
pub(super) struct PipelineInFlight {
    direct: Arc<Direct>,
    generation: u64,
}

impl Drop for PipelineInFlight {
    fn drop(&mut self) {
        self.direct.ended(self.generation);
    }
}
