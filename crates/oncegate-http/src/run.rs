//! Runs a granted request, and sends its response.
//!
//! `settle` and `complete` ensure that a response is sent only after COMPLETED.

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ::http::{HeaderMap, Request, Response, StatusCode, header, response};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::IdempotencyLayer;
use super::body::{Body, collect};
use super::body_memory::OccupiedMemory;
use super::commit::{CommittedResponse, ResponseCommit, expires_unix_s};
use super::policy::{Decision, Settle};
use super::problem::{Cause, GivenUp, Problem};
use super::response::{StoredResponse, mark_expiry};
use super::rules::Rule;
use super::tasks::Permit;
use oncegate_runtime::attempt::CANCELLATION_GRACE;
use oncegate_runtime::codec::Raw;
use oncegate_runtime::gate::{Completion, Entry, Lease};
use oncegate_runtime::message::Message;
use oncegate_runtime::observe::{Event, RunOutcome};
use oncegate_runtime::running::policy::AttemptLimit;

/// The layer and the handler, for one request.
pub(super) type Handle<E> =
    Box<dyn FnOnce(Request<Body>) -> BoxFuture<'static, Result<Response<Body>, E>> + Send>;

/// The channel to the client's request, if it still waits.
struct Waiting<E> {
    client: Option<oneshot::Sender<Result<Response<Body>, E>>>,
}

impl<E> Waiting<E> {
    /// Returns whether a client still waits for its answer.
    fn is_there(&self) -> bool {
        self.client
            .as_ref()
            .is_some_and(|client| !client.is_closed())
    }

    /// Sends the answer. A client that has disconnected can repeat the request with its key.
    fn answer(&mut self, answer: Result<Response<Body>, E>) {
        if let Some(client) = self.client.take() {
            _ = client.send(answer);
        }
    }
}

/// Runs the request in a separate task, and waits for its answer. Dropping this future does not
/// stop the task.
pub(super) async fn start<E: Send + 'static>(
    layer: Arc<IdempotencyLayer>,
    (permit, memory): (Permit, OccupiedMemory),
    (mut lease, rule): (Lease, Option<Arc<Rule>>),
    request: Request<Body>,
    handle: Handle<E>,
) -> Result<Response<Body>, E> {
    let (client, answered) = oneshot::channel();
    let retention = rule.as_ref().and_then(|rule| rule.retention);
    if let Some(retention) = retention {
        lease.keep_for(retention);
    }
    let run = Run {
        layer: Arc::clone(&layer),
        retention: retention.unwrap_or_else(|| layer.gate.retention_period()),
        rule,
        waiting: Waiting {
            client: Some(client),
        },
    };
    layer.tasks.spawn(permit, async move {
        run.run(lease, request, handle).await;
        drop(memory);
    });
    // Without an answer, the task was cancelled or a body has panicked: its lease expires.
    answered
        .await
        .unwrap_or_else(|_| Ok(layer.refuse(&Problem::OutcomeUnknown)))
}

/// The outcome of the handler.
enum Ran<E> {
    Answered(Response<Body>),
    Failed(E),
    Panicked,
    Cancelled,
}

/// The state of the record after the handler's transaction.
enum ReadBack {
    Committed,
    /// Another attempt has taken over.
    NotOwner,
    /// Nothing was committed, and the lease is still valid.
    NotCommitted(Box<Lease>),
}

struct Run<E> {
    layer: Arc<IdempotencyLayer>,
    rule: Option<Arc<Rule>>,
    /// The time for which the record is kept.
    retention: Duration,
    waiting: Waiting<E>,
}

impl<E: Send + 'static> Run<E> {
    async fn run(mut self, lease: Lease, mut request: Request<Body>, handle: Handle<E>) {
        let attempt = lease.attempt().number();
        let message = lease.message().clone();
        if self.limit().is_over(attempt) {
            // Earlier attempts have ended their processes, so this one does not run.
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            let given_up = GivenUp {
                cause: Cause::AttemptsExhausted,
                status,
            };
            let response = self.problem(&Problem::Failed(given_up));
            return self
                .give_up(lease, Cause::AttemptsExhausted, response)
                .await;
        }
        let commit = ResponseCommit::new(&self.layer, lease.attempt(), self.retention);
        request.extensions_mut().insert(lease.attempt().clone());
        request.extensions_mut().insert(commit.clone());
        let started = Instant::now();
        let ran = call(&lease, self.grace(), request, handle).await;
        let took = started.elapsed();
        if !lease.is_attempted() {
            return self.end(lease, ran, took).await;
        }
        // The handler's transaction has decided, and only the record shows how.
        match self.read_back(lease).await {
            ReadBack::Committed => self.send_committed(&commit, ran, took, &message).await,
            ReadBack::NotOwner => self.follow(&message).await,
            ReadBack::NotCommitted(lease) => {
                let ran = self.without_commit(ran);
                self.end(*lease, ran, took).await;
            }
        }
    }

    /// Ends a request whose handler has committed nothing by itself.
    async fn end(mut self, lease: Lease, ran: Ran<E>, took: Duration) {
        let attempt = lease.attempt().number();
        match ran {
            Ran::Answered(response) => self.settle(lease, response, None, took).await,
            Ran::Panicked => {
                warn!(scope = self.layer.gate.scope(), key = %lease.store_key(), attempt, "a handler has panicked");
                let response = self.problem(&Problem::HandlerPanicked);
                self.settle(lease, response, Some(RunOutcome::Panicked), took)
                    .await;
            }
            Ran::Failed(error) => {
                self.ran(RunOutcome::Failed, took);
                if self.layer.gate.gives_up_unknown() {
                    // An error cannot say whether the effect has happened: a time limit inside of
                    // the layer may have dropped the handler. The lease lapses.
                    warn!(scope = self.layer.gate.scope(), key = %lease.store_key(), attempt, "a service has returned an error: the outcome is unknown, and the lease expires");
                    drop(lease);
                } else {
                    self.release(lease, true, StatusCode::INTERNAL_SERVER_ERROR)
                        .await;
                }
                self.waiting.answer(Err(error));
            }
            Ran::Cancelled => {
                self.ran(RunOutcome::Cancelled, took);
                lease
                    .discard("the handler was cancelled, and did not end in time")
                    .await;
                self.refuse(&Problem::OutcomeUnknown);
            }
        }
    }

    /// Reads the record after the handler has tried to complete it in a transaction.
    async fn read_back(&mut self, lease: Lease) -> ReadBack {
        let key = lease.store_key().clone();
        let mut reading = pin!(lease.committed());
        let committed = match timeout(self.layer.settings.settle_timeout, &mut reading).await {
            Ok(committed) => committed,
            Err(_elapsed) => {
                warn!(scope = self.layer.gate.scope(), %key, "it is not known whether a transaction was committed, and its client waits no longer");
                self.refuse(&Problem::OutcomeUnknown);
                reading.await
            }
        };
        match committed {
            Ok(Completion::Applied) => ReadBack::Committed,
            Ok(Completion::NotOwner) => ReadBack::NotOwner,
            Err(not_committed) => {
                warn!(scope = self.layer.gate.scope(), %key, reason = %not_committed, "the transaction of a request was not committed");
                ReadBack::NotCommitted(Box::new(not_committed.into_lease()))
            }
        }
    }

    /// Sends the response that was committed, whatever the handler has returned.
    async fn send_committed(
        mut self,
        commit: &ResponseCommit,
        ran: Ran<E>,
        took: Duration,
        message: &Message,
    ) {
        self.ran(RunOutcome::Succeeded, took);
        let response = match (commit.committed(), ran) {
            (CommittedResponse::Known(response), _) => response,
            // The key is completed without a response that could be repeated.
            (CommittedResponse::None, Ran::Answered(response)) => response,
            _ => return self.follow(message).await,
        };
        self.acked();
        self.send(response, "handled");
    }

    /// Changes the outcome of a handler whose transaction was not committed: a response that would
    /// complete the key must not.
    fn without_commit(&self, ran: Ran<E>) -> Ran<E> {
        let Ran::Answered(response) = ran else {
            return ran;
        };
        let (parts, body) = response.into_parts();
        if self.decide(&parts) != Decision::Complete {
            return Ran::Answered(Response::from_parts(parts, body));
        }
        let mut response = self.problem(&Problem::NotCommitted);
        response.extensions_mut().insert(Settle::Retry);
        Ran::Answered(response)
    }

    /// Settles the key as the response requires, then sends the response.
    async fn settle(
        mut self,
        lease: Lease,
        response: Response<Body>,
        ended: Option<RunOutcome>,
        took: Duration,
    ) {
        let (parts, body) = response.into_parts();
        let status = parts.status;
        let exhausted = self.limit().is_last(lease.attempt().number());
        let decision = match self.decide(&parts) {
            // A run that was interrupted by an outage must not use up an attempt.
            Decision::Release { counted } => Decision::Release {
                counted: counted && !lease.was_cut_short(),
            },
            other => other,
        };
        let response = Response::from_parts(parts, body);
        match decision {
            Decision::Complete => {
                self.ran(ended.unwrap_or(RunOutcome::Succeeded), took);
                self.complete(lease, response).await;
            }
            Decision::Release { counted: true } if exhausted => {
                self.ran(ended.unwrap_or(RunOutcome::Failed), took);
                self.give_up(lease, Cause::AttemptsExhausted, response)
                    .await;
            }
            Decision::Release { counted } => {
                self.ran(ended.unwrap_or(RunOutcome::Failed), took);
                self.release(lease, counted, status).await;
                self.send(response, "released");
            }
            Decision::Unknown => {
                self.ran(ended.unwrap_or(RunOutcome::Cancelled), took);
                let scope = self.layer.gate.scope();
                let key = lease.store_key();
                if response.extensions().get::<Settle>().is_some() {
                    warn!(scope, %key, %status, "the outcome of a request is unknown; its lease expires");
                } else {
                    warn!(scope, %key, %status, "the outcome of a request is unknown: a time limit inside of the layer may have dropped its handler; use the gate's `max_run` instead");
                }
                drop(lease);
                self.send(response, Problem::OutcomeUnknown.name());
            }
            Decision::Fail => {
                self.ran(ended.unwrap_or(RunOutcome::GaveUp), took);
                self.give_up(lease, Cause::Handler, response).await;
            }
        }
    }

    /// Writes COMPLETED, then sends the response.
    async fn complete(mut self, lease: Lease, response: Response<Body>) {
        let (mut parts, body) = response.into_parts();
        let settings = &self.layer.settings;
        let (limit_bytes, patience) = if is_endless(&parts.headers) {
            (0, Duration::ZERO)
        } else {
            (self.layer.kept_response_bytes(), settings.response_patience)
        };
        let collected = collect(body, limit_bytes, patience, |_bytes| true).await;
        let expires_unix_s = expires_unix_s(self.retention);
        let kept = StoredResponse::new(
            parts.status,
            &parts.headers,
            collected.whole.ok(),
            expires_unix_s,
        );
        if !kept.is_whole() {
            self.not_kept(&lease);
        }
        let message = lease.message().clone();
        let key = lease.store_key().clone();
        let mut completing = pin!(lease.complete(&Raw(kept.encode())));
        let completed = match timeout(settings.settle_timeout, &mut completing).await {
            Ok(completed) => completed,
            Err(_elapsed) => {
                warn!(scope = self.layer.gate.scope(), %key, "a response waits for its completion, and its client waits no longer");
                self.refuse(&Problem::OutcomeUnknown);
                // Heartbeats continue, and so do the tries with the same token.
                completing.await
            }
        };
        match completed {
            Ok(Completion::Applied) => {}
            Ok(Completion::NotOwner) => return self.follow(&message).await,
            Err(error) => {
                let scope = self.layer.gate.scope();
                warn!(scope, %key, %error, "the work is recorded without its response");
                self.layer.gate.observe(Event::ResultNotKept { scope });
            }
        }
        mark_expiry(&mut parts.headers, expires_unix_s);
        self.acked();
        self.send(Response::from_parts(parts, collected.body), "handled");
    }

    /// Answers with the outcome of another owner, which took over.
    async fn follow(mut self, message: &Message) {
        let problem = match self.layer.ask(message).await {
            Ok(Entry::Granted(lease)) => {
                // The key has no owner any more. The client repeats the request, and the next
                // attempt is marked as recovered.
                lease
                    .release(Duration::ZERO, false, "its owner had lost the lease")
                    .await;
                Problem::InProgress
            }
            Ok(entry) => {
                let response = self.layer.repeat(entry);
                return self.waiting.answer(Ok(response));
            }
            Err(_) => Problem::OutcomeUnknown,
        };
        self.refuse(&problem);
    }

    async fn release(&self, lease: Lease, counted: bool, status: StatusCode) {
        let scope = self.layer.gate.scope();
        info!(scope, key = %lease.store_key(), %status, counted, "a request was not completed; it runs again if repeated");
        lease
            .release(
                Duration::ZERO,
                counted,
                &format!("HTTP status {}", status.as_u16()),
            )
            .await;
        if counted {
            self.layer.gate.observe(Event::Retried { scope });
        }
    }

    /// Writes FAILED, then sends the response.
    async fn give_up(mut self, lease: Lease, cause: Cause, response: Response<Body>) {
        let given_up = GivenUp {
            cause,
            status: response.status(),
        };
        warn!(scope = self.layer.gate.scope(), key = %lease.store_key(), %given_up, "a request will not run again");
        let message = lease.message().clone();
        let mut failing = pin!(async { lease.fail(&given_up.to_string()).await });
        let failed = match timeout(self.layer.settings.settle_timeout, &mut failing).await {
            Ok(failed) => failed,
            Err(_elapsed) => {
                self.refuse(&Problem::OutcomeUnknown);
                failing.await
            }
        };
        match failed {
            Completion::Applied => self.send(response, "given-up"),
            Completion::NotOwner => self.follow(&message).await,
        }
    }

    fn decide(&self, response: &response::Parts) -> Decision {
        let policy = self.layer.settings.policy;
        policy.decide_by(self.rule.as_deref(), response)
    }

    fn limit(&self) -> AttemptLimit {
        AttemptLimit(self.layer.settings.max_attempts)
    }

    /// The time that a handler may continue after its cancellation.
    fn grace(&self) -> Duration {
        self.layer.gate.lease_period().min(CANCELLATION_GRACE)
    }

    fn ran(&self, outcome: RunOutcome, took: Duration) {
        let gate = &self.layer.gate;
        gate.observe(Event::HandlerRan {
            scope: gate.scope(),
            outcome,
            took,
        });
    }

    /// Counts the response as an ack, if its client still waits.
    fn acked(&self) {
        if self.waiting.is_there() {
            let scope = self.layer.gate.scope();
            self.layer.gate.observe(Event::Acked {
                scope,
                count: 1,
                age: None,
            });
        }
    }

    fn not_kept(&self, lease: &Lease) {
        let scope = self.layer.gate.scope();
        info!(scope, key = %lease.store_key(), "a response is too large or does not end; it is recorded without its body");
        self.layer.gate.observe(Event::ResultNotKept { scope });
    }

    fn problem(&self, problem: &Problem) -> Response<Body> {
        problem.response(&self.layer.settings.problems_at)
    }

    /// Answers the client, unless it was already answered or has disconnected; then nothing is
    /// counted.
    fn send(&mut self, response: Response<Body>, answer: &'static str) {
        if self.waiting.is_there() {
            self.layer.note(answer);
            self.waiting.answer(Ok(response));
        }
    }

    fn refuse(&mut self, problem: &Problem) {
        if self.waiting.is_there() {
            let response = self.layer.refuse(problem);
            self.waiting.answer(Ok(response));
        }
    }
}

/// Returns whether the body is a stream of events, which does not end by itself.
fn is_endless(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| {
        value
            .as_bytes()
            .to_ascii_lowercase()
            .starts_with(b"text/event-stream")
    })
}

async fn call<E>(
    lease: &Lease,
    grace: Duration,
    request: Request<Body>,
    handle: Handle<E>,
) -> Ran<E> {
    // Creating the future runs the user's code as well.
    let work = async move { handle(request).await };
    let mut work = pin!(AssertUnwindSafe(work).catch_unwind());
    let ran = tokio::select! {
        biased;
        ran = &mut work => Some(ran),
        () = lease.discarded().cancelled() => timeout(grace, work).await.ok(),
    };
    match ran {
        Some(Ok(Ok(response))) => Ran::Answered(response),
        Some(Ok(Err(error))) => Ran::Failed(error),
        Some(Err(_panic)) => Ran::Panicked,
        None => Ran::Cancelled,
    }
}
