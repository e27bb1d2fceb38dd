//! Responses that are kept by a transaction of the handler, together with the rows that it writes.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::http::Response;
use bytes::Bytes;
use parking_lot::Mutex;

use super::IdempotencyLayer;
use super::body::Body;
use super::problem::Problem;
use super::response::{StoredResponse, mark_expiry};
use oncegate_runtime::attempt::Attempt;
use oncegate_runtime::codec::Raw;
use oncegate_runtime::failure::{BoxError, Failure};
use oncegate_runtime::transaction::{BlockingSqlTransaction, SqlTransaction};

/// Keeps the response of a request in a transaction of its handler. Every request that the layer
/// lets in under a key has one in its extensions, beside the [`Attempt`].
///
/// The rows that the handler has written, and the response that repetitions get, are committed
/// together, or neither is. The response leaves after the commit.
///
/// ```no_run
/// # #[cfg(feature = "postgres")] mod example {
/// use axum::Extension;
/// use oncegate::BoxError;
/// use oncegate::http::{Body, ResponseCommit};
///
/// async fn pay(pool: deadpool_postgres::Pool, commit: ResponseCommit) -> Result<http::Response<Body>, BoxError> {
///     let mut client = pool.get().await?;
///     let transaction = client.transaction().await?;
///     transaction.execute("UPDATE accounts SET balance = balance - 10 WHERE id = 4711", &[]).await?;
///     let response = http::Response::builder().status(201).body("charged 4711")?;
///     Ok(commit.commit_with(transaction, response).await?)
/// }
/// # }
/// ```
///
/// The record decides what the client gets, not the value that the handler returns. When the
/// transaction was committed, the client gets the response that was given to the transaction, also
/// if the handler returns something else. When it was not, nothing is kept, a response that would
/// complete the key becomes 503 `not-committed`, and a repeated request runs again.
#[derive(Clone)]
pub struct ResponseCommit {
    attempt: Attempt,
    limits: Limits,
    problems_at: Arc<str>,
    given: Arc<Mutex<Given>>,
}

/// The largest response, and the time that it is kept.
#[derive(Clone, Copy, Debug)]
struct Limits {
    body_bytes: usize,
    /// The bytes of status, headers and body together, as they are stored.
    record_bytes: usize,
    retention: Duration,
}

/// The responses that were given to transactions.
#[derive(Debug, Default)]
struct Given {
    /// The number of responses.
    count: u32,
    /// The last one; after a confirmed commit, its response.
    response: Option<Response<Bytes>>,
    is_confirmed: bool,
}

/// The response that the layer sends after a transaction was committed.
pub(super) enum CommittedResponse {
    /// The response that was committed.
    Known(Response<Body>),
    /// Several responses were given to transactions: the record shows the committed one.
    InTheRecord,
    /// The handler has completed the key without a response.
    None,
}

impl ResponseCommit {
    pub(super) fn new(layer: &IdempotencyLayer, attempt: &Attempt, retention: Duration) -> Self {
        let limits = Limits {
            body_bytes: layer.kept_response_bytes(),
            record_bytes: layer.gate.recorded_result_bytes(),
            retention,
        };
        let problems_at = Arc::clone(&layer.settings.problems_at);
        Self {
            attempt: attempt.clone(),
            limits,
            problems_at,
            given: Arc::default(),
        }
    }

    /// The attempt of the request.
    pub fn attempt(&self) -> &Attempt {
        &self.attempt
    }

    /// Keeps `response` in `transaction`, and commits it. Call it last, and return its result.
    ///
    /// The transaction must be one of the database in which the gate's store keeps its records.
    /// From here on it runs under the limits of [`Attempt::commit_with`]. After a **crash** both
    /// the rows and the kept response exist, or neither; a repeated request gets the response, or
    /// runs. A body over the layer's [`max_response_bytes`](IdempotencyLayer::max_response_bytes)
    /// or the gate's `max_result_bytes` is not kept: repetitions then get 409 `response-not-kept`.
    ///
    /// # Errors
    /// When the lease was lost to another attempt, or the database failed: then the transaction was
    /// rolled back, unless the connection broke during the commit. Return it and do nothing else:
    /// the layer reads the record.
    pub async fn commit_with<S, Tx: SqlTransaction<S>, B: Into<Bytes>>(
        &self,
        transaction: Tx,
        response: Response<B>,
    ) -> Result<Response<Body>, ResponseNotCommitted> {
        let (response, kept) = self.give(response);
        let committed = self.attempt.commit_with(transaction, &kept).await;
        self.end(response, committed)
    }

    /// As [`commit_with`](Self::commit_with), for a transaction on the SQLite file of the gate's
    /// store. It blocks: call it on a thread that may.
    ///
    /// # Errors
    /// As [`commit_with`](Self::commit_with).
    pub fn blocking_commit_with<S, Tx: BlockingSqlTransaction<S>, B: Into<Bytes>>(
        &self,
        transaction: Tx,
        response: Response<B>,
    ) -> Result<Response<Body>, ResponseNotCommitted> {
        let (response, kept) = self.give(response);
        let committed = self.attempt.blocking_commit_with(transaction, &kept);
        self.end(response, committed)
    }

    /// Notes the response before its transaction is committed, and returns it with its stored form.
    fn give<B: Into<Bytes>>(&self, response: Response<B>) -> (Response<Bytes>, Raw) {
        let Limits {
            body_bytes,
            record_bytes,
            retention,
        } = self.limits;
        let mut response = response.map(Into::into);
        let expires_unix_s = expires_unix_s(retention);
        let status = response.status();
        let headers = response.headers();
        let body = Some(response.body().clone()).filter(|body| body.len() <= body_bytes);
        let whole = StoredResponse::new(status, headers, body, expires_unix_s).encode();
        // One byte names the encoding.
        let kept = if whole.len() < record_bytes {
            whole
        } else {
            StoredResponse::new(status, headers, None, expires_unix_s).encode()
        };
        mark_expiry(response.headers_mut(), expires_unix_s);
        let mut given = self.given();
        given.count += 1;
        if !given.is_confirmed {
            given.response = Some(response.clone());
        }
        drop(given);
        (response, Raw(kept))
    }

    fn end(
        &self,
        response: Response<Bytes>,
        committed: Result<(), Failure>,
    ) -> Result<Response<Body>, ResponseNotCommitted> {
        match committed {
            Ok(()) => {
                let mut given = self.given();
                given.is_confirmed = true;
                given.response = Some(response.clone());
                Ok(response.map(Body::from))
            }
            Err(failure) => {
                let problems_at = Arc::clone(&self.problems_at);
                Err(ResponseNotCommitted {
                    error: failure.into_error(),
                    problems_at,
                })
            }
        }
    }

    /// The response to send once the record shows that a transaction was committed.
    pub(super) fn committed(&self) -> CommittedResponse {
        let Given {
            count,
            response,
            is_confirmed,
        } = std::mem::take(&mut *self.given());
        match response {
            Some(response) if is_confirmed || count == 1 => {
                CommittedResponse::Known(response.map(Body::from))
            }
            Some(_) => CommittedResponse::InTheRecord,
            None => CommittedResponse::None,
        }
    }

    fn given(&self) -> parking_lot::MutexGuard<'_, Given> {
        self.given.lock()
    }
}

impl fmt::Debug for ResponseCommit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseCommit")
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// The reason that the transaction of a response was not committed, as far as the handler knows.
/// The layer reads the record.
#[derive(Debug)]
pub struct ResponseNotCommitted {
    error: BoxError,
    problems_at: Arc<str>,
}

impl ResponseNotCommitted {
    /// A response for the handler to return: 503 `not-committed`. If the transaction was committed
    /// nevertheless, the client gets the committed response instead.
    pub fn response(&self) -> Response<Body> {
        Problem::NotCommitted.response(&self.problems_at)
    }
}

impl fmt::Display for ResponseNotCommitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the response was not committed: {}", self.error)
    }
}

impl std::error::Error for ResponseNotCommitted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}

/// The time at which a record expires that is completed now, in seconds since 1970.
pub(super) fn expires_unix_s(retention: Duration) -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    now.saturating_add(retention).as_secs()
}
