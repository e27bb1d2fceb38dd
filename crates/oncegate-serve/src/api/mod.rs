//! Claims over HTTP, for functions in any language: the same records, leases and rules as those of
//! a consumer in Rust.
//!
//! `docs/FUNCTIONS.md` of the repository is the manual: the requests with `curl`, the clients, and
//! what each answer asks of its caller. `GET /v1/openapi.json` describes every body.
//!
//! ```
//! use oncegate_runtime::MemoryStore;
//! use oncegate_serve::api::{Api, ApiScope, Caller, function_gate};
//!
//! let nightly = ApiScope::new(function_gate("nightly", MemoryStore::new()));
//! let cron = Caller::new("cron").token("8c1f6b0f2a7f4d7c9a0e").scopes(["nightly"]);
//! let api = Api::new([nightly], [cron])?;
//! # let _ = api;
//! # Ok::<(), oncegate_serve::api::ApiError>(())
//! ```
//!
//! No claim is kept in a server. Any server over the same store extends and ends it, and a restart
//! loses none. What a server knows by itself are the limits of its callers.
//!
//! # Problems
//!
//! Every answer that is not 2xx is `application/problem+json`. Its `type` is the address of its
//! description below, and its `state` the name alone.
//!
//! # unauthorized
//! 401. The request has no token that this server knows.
//! # scope-forbidden
//! 403. The scope is not one of the caller's.
//! # not-found
//! 404. There is no such path.
//! # method-not-allowed
//! 405. The path has another method.
//! # request-invalid
//! 400. A field is missing, unknown or out of its bounds; the detail names it.
//! # request-too-large
//! 413. The body is larger than the largest result that a scope keeps, and some room. To complete
//!      work whose result is larger, send `"without_result": true`.
//! # request-too-slow
//! 408. The body took longer than 30 s.
//! # request-broken
//! 400. The body ended too early.
//! # key-missing
//! 400. The key is missing, null or empty.
//! # key-invalid
//! 400. The key specification of the scope cannot make a key of it.
//! # claim-invalid
//! 400. The text is no claim of this version.
//! # busy
//! 409 with `Retry-After` and `retry_in_ms`. Another owner has the key, or its next attempt is not
//! due: do not do the work.
//! # lease-lost
//! 409. Another owner has taken over, or the claim has ended in another way. Nothing was changed.
//! # given-up
//! 410. A permanent failure, or as many attempts as the scope allows: no attempt follows.
//! # mismatch
//! 422. The key is known with other arguments.
//! # caller-overloaded
//! 429 with `Retry-After`. The caller has reached one of its limits.
//! # store-unavailable
//! 503 with `Retry-After`. Nothing was done.
//! # outcome-unknown
//! 503 with `Retry-After`. It may have been done: send the same request again.
//! # record-unreadable
//! 500. Another program or a newer release wrote the record.
//! # misconfigured
//! 500. The gate of the scope cannot be opened; the log has what to change.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::{Request, Response};
use oncegate_core::key::{CompiledFingerprint, KeySpecError};
use oncegate_core::store::Checkup;
use oncegate_runtime::backoff::Backoff;
use oncegate_runtime::gate::{Gate, GateError};
use oncegate_runtime::running::policy::AttemptLimit;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

mod callers;
mod claim_id;
mod claims;
mod ends;
mod forms;
mod key;
mod openapi;
mod paths;
mod problem;
mod requests;

pub use callers::{Caller, TokenError};
pub use key::function_gate;

use callers::{Callers, KnownCaller};

use crate::{Body, Door};

/// The most requests that wait for a result at once, of all callers.
const MAX_WAITING: usize = 1_000;

/// The bytes of a request besides its result.
const ROOM_BYTES: usize = 192 * 1024;

/// A scope of the API: its gate, and what follows attempts that fail.
#[derive(Clone, Debug)]
pub struct ApiScope {
    gate: Arc<Gate>,
    limit: AttemptLimit,
    backoff: Backoff,
}

impl ApiScope {
    /// The scope of this gate, such as one of [`function_gate`].
    ///
    /// The lease and the retention of the gate are the defaults of its claims and the most that one
    /// may ask for. A claim is extended for no longer than its `max_run`.
    pub fn new(gate: impl Into<Arc<Gate>>) -> Self {
        Self {
            gate: gate.into(),
            limit: AttemptLimit(10),
            backoff: Backoff::DEFAULT,
        }
    }

    /// The number of attempts that may fail or end their process before the work is given up: 10 by
    /// default, up to 254.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.limit = AttemptLimit(attempts);
        self
    }

    /// The delays between attempts, [`Backoff::DEFAULT`] by default.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }
}

/// The reason why an API cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// Two scopes or two callers have one name.
    #[error("there are two of the name {name:?}: each scope and each caller has its own")]
    Twice {
        /// The name.
        name: String,
    },
    /// A caller may use a scope that is not there.
    #[error("the caller {caller} has the scope {scope:?}, which this API does not have")]
    UnknownScope {
        /// The caller.
        caller: String,
        /// The scope.
        scope: String,
    },
    /// A caller may use nothing.
    #[error("the caller {caller} has no scope: name those that it may use")]
    NoScope {
        /// The caller.
        caller: String,
    },
    /// There is no caller, so every request would be refused.
    #[error("the API has no caller")]
    NoCaller,
    /// A limit of attempts that a record cannot count.
    #[error("the scope {scope} has {attempts} attempts; it must be between 1 and 254")]
    Attempts {
        /// The scope.
        scope: String,
        /// The setting.
        attempts: u32,
    },
    /// The bytes of a caller are fewer than one request may have.
    #[error("the caller {caller} may hold {bytes} bytes, and one request may have {request}")]
    TooFewBytes {
        /// The caller.
        caller: String,
        /// The setting.
        bytes: usize,
        /// The largest request.
        request: usize,
    },
    /// The tokens of a caller cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The fingerprint of arguments cannot be made.
    #[error(transparent)]
    Fingerprint(#[from] KeySpecError),
}

/// Answers claims over HTTP. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Api {
    shared: Arc<Shared>,
    /// The path before each of the paths.
    prefix: Arc<str>,
}

struct Shared {
    scopes: BTreeMap<String, ApiScope>,
    callers: Arc<Callers>,
    arguments: CompiledFingerprint,
    waiting: Arc<Semaphore>,
    max_request_bytes: usize,
    running: TaskTracker,
    stopping: CancellationToken,
}

impl Api {
    /// An API with these scopes and callers. It reads the tokens, and accesses no store.
    ///
    /// # Errors
    /// [`ApiError`] names what to change.
    pub fn new(
        scopes: impl IntoIterator<Item = ApiScope>,
        callers: impl IntoIterator<Item = Caller>,
    ) -> Result<Self, ApiError> {
        let mut named = BTreeMap::new();
        for scope in scopes {
            let name = scope.gate.scope().to_owned();
            let AttemptLimit(attempts) = scope.limit;
            if !(1..=254).contains(&attempts) {
                return Err(ApiError::Attempts {
                    scope: name,
                    attempts,
                });
            }
            if named.insert(name.clone(), scope).is_some() {
                return Err(ApiError::Twice { name });
            }
        }
        let largest_result = named
            .values()
            .map(|scope| scope.gate.recorded_result_bytes())
            .max()
            .unwrap_or_default();
        // Base64 makes four characters of three bytes.
        let max_request_bytes = largest_result / 3 * 4 + ROOM_BYTES;
        let mut known = Vec::new();
        for caller in callers {
            check_caller(&caller, &named, max_request_bytes)?;
            if known
                .iter()
                .any(|other: &KnownCaller| other.caller.name() == caller.name())
            {
                let name = caller.name().to_owned();
                return Err(ApiError::Twice { name });
            }
            known.push(KnownCaller::new(caller)?);
        }
        if known.is_empty() {
            return Err(ApiError::NoCaller);
        }
        Ok(Self {
            prefix: "".into(),
            shared: Arc::new(Shared {
                scopes: named,
                callers: Arc::new(Callers::new(known)),
                arguments: key::arguments_fingerprint()?,
                waiting: Arc::new(Semaphore::new(MAX_WAITING)),
                max_request_bytes,
                running: TaskTracker::new(),
                stopping: CancellationToken::new(),
            }),
        })
    }

    /// Puts a path before each of the API's: below `/oncegate`, claims go to `/oncegate/v1/claims`.
    #[must_use]
    pub fn below(mut self, path: &str) -> Self {
        self.prefix = path.trim_end_matches('/').into();
        self
    }

    /// Opens the gate of every scope: wrong settings are reported here, and not by the first claim.
    ///
    /// # Errors
    /// As of [`Gate::open`].
    pub async fn open(&self) -> Result<Vec<Checkup>, GateError> {
        let mut checkups = Vec::new();
        for scope in self.shared.scopes.values() {
            checkups.push(scope.gate.open().await?);
        }
        Ok(checkups)
    }

    /// Answers what waits for a result, now and from now on: their clients wait elsewhere.
    pub fn stop_waiting(&self) {
        self.shared.stopping.cancel();
    }

    /// Answers what waits for a result, and waits for the operations that run, up to `deadline`.
    /// Returns how many have not ended by then; their callers repeat them. Claims are not touched:
    /// their owners go on with another server, or with the next one here.
    pub async fn drain(&self, deadline: Duration) -> usize {
        self.stop_waiting();
        self.shared.running.close();
        if timeout(deadline, self.shared.running.wait()).await.is_ok() {
            return 0;
        }
        self.shared.running.len()
    }
}

impl Door for Api {
    fn answer(&self, request: Request<Body>) -> BoxFuture<'static, Response<Body>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(shared.respond(request, Arc::clone(&self.prefix)))
    }
}

impl fmt::Debug for Api {
    /// Shows the scopes, and no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api")
            .field("scopes", &self.shared.scopes.keys())
            .finish_non_exhaustive()
    }
}

fn check_caller(
    caller: &Caller,
    scopes: &BTreeMap<String, ApiScope>,
    max_request_bytes: usize,
) -> Result<(), ApiError> {
    let name = caller.name().to_owned();
    if let Some(scope) = caller
        .named_scopes()
        .find(|scope| !scopes.contains_key(*scope))
    {
        return Err(ApiError::UnknownScope {
            caller: name,
            scope: scope.to_owned(),
        });
    }
    if caller.named_scopes().next().is_none() {
        return Err(ApiError::NoScope { caller: name });
    }
    if caller.byte_limit() < max_request_bytes {
        return Err(ApiError::TooFewBytes {
            caller: name,
            bytes: caller.byte_limit(),
            request: max_request_bytes,
        });
    }
    Ok(())
}
