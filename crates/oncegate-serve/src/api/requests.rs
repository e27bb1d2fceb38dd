//! The way of a request: its path, its caller, its body, the operation, the answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use oncegate_runtime::running::detached::DetachedClaim;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::timeout;

use super::callers::KnownCaller;
use super::paths::{OPENAPI, Operation, PATHS};
use super::problem::ApiProblem;
use super::{Shared, openapi};
use crate::Body;

/// The time limit for the body of a request.
const BODY_PATIENCE: Duration = Duration::from_secs(30);
/// The most bytes that are read of a body that is refused.
const DISCARDED_MOST: usize = 64 * 1024 * 1024;

/// The receiver of an answer; it is closed when the client has gone.
pub(super) type Reply = oneshot::Sender<Result<Carried, ApiProblem>>;

/// An operation that was carried out.
#[derive(Debug)]
pub(super) struct Carried {
    pub(super) status: StatusCode,
    pub(super) json: Vec<u8>,
    /// A grant that nothing but this answer tells its owner of: without an answer it is returned.
    pub(super) only_told_here: Option<DetachedClaim>,
}

impl Carried {
    /// An answer of status 200.
    pub(super) fn ok(answer: &impl Serialize) -> Self {
        Self {
            status: StatusCode::OK,
            // Strings, numbers and parsed JSON can always be serialized.
            json: serde_json::to_vec(answer).unwrap_or_default(),
            only_told_here: None,
        }
    }
}

impl Shared {
    pub(super) async fn respond(
        self: Arc<Self>,
        request: Request<Body>,
        prefix: Arc<str>,
    ) -> Response<Body> {
        match self.try_respond(request, &prefix).await {
            Ok(response) => response,
            Err(problem) => problem.response(),
        }
    }

    async fn try_respond(
        self: Arc<Self>,
        request: Request<Body>,
        prefix: &str,
    ) -> Result<Response<Body>, ApiProblem> {
        let Some(path) = request.uri().path().strip_prefix(prefix) else {
            return Err(ApiProblem::NotFound);
        };
        if path == OPENAPI {
            if request.method() != Method::GET {
                return Err(ApiProblem::MethodNotAllowed { allowed: "GET" });
            }
            return Ok(json_response(StatusCode::OK, openapi::document()));
        }
        let Some((_, operation)) = PATHS.iter().find(|(known, _)| *known == path) else {
            return Err(ApiProblem::NotFound);
        };
        let operation = *operation;
        if request.method() != Method::POST {
            return Err(ApiProblem::MethodNotAllowed { allowed: "POST" });
        }
        let Some(token) = bearer(request.headers()) else {
            return Err(ApiProblem::Unauthorized);
        };
        let Some(known) = self.callers.find(token).await else {
            return Err(ApiProblem::Unauthorized);
        };
        let room = match self.room(&known, request.headers()) {
            Ok(room) => room,
            Err(problem) => {
                discard(request.into_body()).await;
                return Err(problem);
            }
        };
        let body = self.read(request.into_body()).await?;
        let carried = self
            .carry_out_in_a_task(operation, known, body, room)
            .await?;
        Ok(json_response(carried.status, carried.json))
    }

    /// Takes the memory for the body out of what the caller may hold.
    fn room(
        &self,
        known: &KnownCaller,
        headers: &HeaderMap,
    ) -> Result<OwnedSemaphorePermit, ApiProblem> {
        let announced = headers
            .get(CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse().ok());
        let bytes: usize = announced.unwrap_or(self.max_request_bytes);
        if bytes > self.max_request_bytes {
            return Err(ApiProblem::RequestTooLarge {
                limit_bytes: self.max_request_bytes,
            });
        }
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        Arc::clone(&known.bytes)
            .try_acquire_many_owned(permits)
            .map_err(|_| ApiProblem::CallerOverloaded {
                what: "The bodies of this caller's current requests take up what it may have",
            })
    }

    async fn read(&self, body: Body) -> Result<Bytes, ApiProblem> {
        let limit_bytes = self.max_request_bytes;
        let collected = timeout(BODY_PATIENCE, Limited::new(body, limit_bytes).collect()).await;
        match collected {
            Ok(Ok(collected)) => Ok(collected.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                Err(ApiProblem::RequestTooLarge { limit_bytes })
            }
            Ok(Err(_)) => Err(ApiProblem::RequestBroken),
            Err(_) => Err(ApiProblem::RequestTooSlow),
        }
    }

    /// Carries the operation out in a task: what was begun ends, whether or not the client waits.
    async fn carry_out_in_a_task(
        self: &Arc<Self>,
        operation: Operation,
        known: Arc<KnownCaller>,
        body: Bytes,
        room: OwnedSemaphorePermit,
    ) -> Result<Carried, ApiProblem> {
        let (mut reply, answer) = oneshot::channel();
        let shared = Arc::clone(self);
        self.running.spawn(async move {
            let carried = shared.carry_out(operation, &known, &body, &mut reply).await;
            drop((body, room));
            if let Err(Ok(unread)) = reply.send(carried)
                && let Some(claim) = unread.only_told_here
            {
                shared.return_grant(&known, &claim).await;
            }
        });
        // The task has panicked, or the runtime ends.
        answer.await.unwrap_or(Err(ApiProblem::OutcomeUnknown))
    }

    async fn carry_out(
        &self,
        operation: Operation,
        known: &KnownCaller,
        body: &[u8],
        reply: &mut Reply,
    ) -> Result<Carried, ApiProblem> {
        match operation {
            Operation::Claim => self.claim(known, body, reply).await,
            Operation::Extend => self.extend(known, body).await,
            Operation::Complete => self.complete(known, body).await,
            Operation::Release => self.release(known, body).await,
            Operation::Fail => self.fail(known, body).await,
            Operation::Look => self.look(known, body, reply).await,
        }
    }
}

/// Reads a body that is refused, and keeps nothing of it: a client that still sends when its
/// connection is closed would not see the answer, and could not learn that its result is too large.
async fn discard(mut body: Body) {
    let mut left = DISCARDED_MOST;
    let discarding = async {
        while let Some(Ok(frame)) = body.frame().await {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            let Some(rest) = left.checked_sub(bytes) else {
                return;
            };
            left = rest;
        }
    };
    // However that ends, the answer is the same.
    _ = timeout(BODY_PATIENCE, discarding).await;
}

fn json_response(status: StatusCode, json: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::from(Bytes::from(json)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The token of the request, if it has one.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
