//! `Idempotency-Key` for tower and axum: a request that is sent again is answered, not handled
//! again.
//!
//! In HTTP the response is the acknowledgement, so it leaves only after the record of its request
//! is COMPLETED in the store. `docs/HTTP.md` of the repository is the manual: what clients see, the
//! settings, and the limits.
//!
//! ```
//! use axum::routing::post;
//! use axum::{Extension, Router};
//! use oncegate::http::{Attempt, IdempotencyLayer, Principal, request_gate};
//! use oncegate::{Gate, MemoryStore};
//!
//! #[derive(Clone)]
//! struct UserId(u64);
//! # impl std::fmt::Display for UserId {
//! #     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { self.0.fmt(f) }
//! # }
//!
//! async fn charge(Extension(attempt): Extension<Attempt>, order: String) -> String {
//!     format!("charged {order} under {}", attempt.idempotency_key("charge"))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), oncegate::BoxError> {
//! let gate = request_gate("payments", MemoryStore::new());
//! let idempotency = IdempotencyLayer::new(gate, Principal::extension::<UserId>());
//! idempotency.open().await?; // reports wrong settings at start-up
//!
//! let app: Router = Router::new()
//!     .route("/charges", post(charge))
//!     .layer(idempotency.clone()) // inside authentication, outside the handler
//!     .layer(Extension(UserId(7))); // stands for authentication here
//! // axum::serve(listener, app).with_graceful_shutdown(shutdown_signal()).await?;
//! idempotency.drain(std::time::Duration::from_secs(20)).await;
//! # let _ = app;
//! # Ok(())
//! # }
//! ```
//!
//! # What clients see
//!
//! | situation | answer |
//! |---|---|
//! | the first request with a key | the handler's response, with `Idempotency-Expires: @<seconds since 1970>` |
//! | the same again, after it | the same status, body and kept headers, with `Idempotent-Replayed: true` |
//! | the same again, while it runs | 409 `in-progress`, `Retry-After: 1` |
//! | the key with another request | 422 `key-reused` |
//!
//! Every response that is not from the handler is `application/problem+json`. The `type` of a
//! problem is the address of its description below.
//!
//! # key-missing
//! 400. The operation requires an `Idempotency-Key`. Nothing was done.
//! # key-invalid
//! 400. The `Idempotency-Key` is neither a quoted string nor a plain token of up to 255 bytes, or
//!      occurs twice. Or the key is in the body, and the body has not those fields.
//! # principal-missing
//! 401. Keys belong to a caller, and authentication has put none into the request.
//! # request-too-large
//! 413. The body is larger than [`max_request_bytes`](IdempotencyLayer::max_request_bytes). Nothing
//!      was done.
//! # request-too-slow
//! 408. The body took longer than [`request_timeout`](IdempotencyLayer::request_timeout). Nothing
//!      was done.
//! # request-broken
//! 400. The body ended too early. Nothing was done.
//! # key-reused
//! 422. The key was used with another method, host, path, query or body. Use a new key for a new
//!      operation.
//! # in-progress
//! 409 with `Retry-After`. The first request with this key is still being handled; send the same
//! request again.
//! # outcome-unknown
//! 503 with `Retry-After`. The request may have been handled, but the store did not confirm it in
//! time. Send it again with the same key: a completed request is not handled again.
//! # response-not-kept
//! 409 without `Retry-After`. The request was handled; its response was too large to keep, or did
//! not end.
//! # store-unavailable
//! 503 with `Retry-After`. Nothing was done, because duplicates could not be detected.
//! # overloaded
//! 503 with `Retry-After`. Too many handlers are running, the bodies of the current requests leave
//! no memory for this one, or the service stops. Nothing was done.
//! # caller-overloaded
//! 429 with `Retry-After`. The bodies of this caller's current requests take up what one caller may
//! have. Nothing was done.
//! # handler-panicked
//! 500. The handler has panicked. Another request with the same key runs it again.
//! # not-committed
//! 503 with `Retry-After`. The handler's transaction was not committed: nothing of it was done.
//! Send it again with the same key.
//! # attempts-exhausted
//! The status of the last attempt. Every attempt has failed, and the request is not handled again
//! under this key.
//! # given-up
//! The status of the response. The handler gave up for good.
//! # outcome-undecided
//! 409. An earlier attempt ended without an outcome, for example because its process was killed,
//!      and the gate [gives up then](oncegate_runtime::AfterUnknown::GiveUp): the request is not
//!      handled again until an operator has looked what became of it. `oncegate complete
//!      --store-key` says that it was done, and `oncegate reset` lets it run again.
//! # misconfigured
//! 500. The gate cannot be opened; the service's log contains what to change.
//!
//! # Not obvious
//!
//! Implementation notes: facts about HTTP that this code depends on.
//!
//! - hyper drops the future of a response when its client disconnects, and everything in it. So
//!   handlers run in tasks.
//! - A released key is due at once, and "due" means a whole millisecond later. A request for such a
//!   key waits that long instead of refusing.
//! - A response body may fail after a good status. The effect has happened by then, so the record
//!   holds "done, not kept".
//! - The route is the same for all requests, so that a key that is reused on another path is a
//!   mismatch and not another key.
//! - A panic in `call` and one in the future that it returns both belong to the handler: the future
//!   is made inside the task.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::HeaderName;
use oncegate_core::store::Checkup;

use oncegate_runtime::gate::{Gate, GateError};

mod body;
mod body_memory;
mod commit;
mod door;
mod key;
mod policy;
mod principal;
mod problem;
mod request;
mod response;
mod rules;
mod run;
mod service;
mod store_breaker;
mod tasks;

pub use body::Body;
pub use commit::{ResponseCommit, ResponseNotCommitted};
pub use oncegate_runtime::attempt::Attempt;
pub use policy::Settle;
pub use principal::Principal;
pub use problem::DoneBefore;
pub use request::{event_gate, request_gate};
pub use rules::{RequestPart, Rule, RuleError, Rules};
pub use service::Idempotency;

use body_memory::BodyMemory;
use policy::Policy;
use store_breaker::StoreBreaker;
use tasks::Tasks;

/// The highest value for [`IdempotencyLayer::max_request_bytes`]: 64 MiB.
const MAX_REQUEST_BYTES_LIMIT: usize = 64 * 1024 * 1024;

/// The highest value for [`IdempotencyLayer::max_response_bytes`]: 8 MiB.
const MAX_RESPONSE_BYTES_LIMIT: usize = 8 * 1024 * 1024;

/// The highest value for [`IdempotencyLayer::max_attempts`]: what a record can count.
const MAX_ATTEMPTS_LIMIT: u32 = 254;

/// A tower layer that implements `Idempotency-Key`. Cheap to clone; clones share the gate and the
/// running handlers.
///
/// Place it inside authentication, outside the handler, and inside compression and every other
/// layer that changes responses. A clone may have other settings, for another route:
/// `layer.clone().optional()`.
#[derive(Clone)]
pub struct IdempotencyLayer {
    gate: Arc<Gate>,
    /// `true` when the gate was made by [`request_gate`] or [`event_gate`].
    fits: bool,
    tasks: Arc<Tasks>,
    body_memory: Arc<BodyMemory>,
    store_breaker: Arc<StoreBreaker>,
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    principal: Principal,
    required: bool,
    strict: bool,
    policy: Policy,
    max_request_bytes: usize,
    request_timeout: Duration,
    max_response_bytes: Option<usize>,
    response_patience: Duration,
    claim_timeout: Duration,
    settle_timeout: Duration,
    wait: Duration,
    max_attempts: u32,
    fail_open: bool,
    /// The headers that may have the key.
    key_headers: Arc<[HeaderName]>,
    /// `None`: every POST and PATCH is held.
    rules: Option<Rules>,
    max_caller_bytes: Option<usize>,
    problems_at: Arc<str>,
}

impl IdempotencyLayer {
    const DEFAULT_MAX_REQUEST_BYTES: usize = 1024 * 1024;
    const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
    const DEFAULT_MAX_RESPONSE_BYTES: usize = 64 * 1024;
    const DEFAULT_RESPONSE_PATIENCE: Duration = Duration::from_secs(5);
    const DEFAULT_CLAIM_TIMEOUT: Duration = Duration::from_secs(5);
    const DEFAULT_SETTLE_TIMEOUT: Duration = Duration::from_secs(10);
    /// The default of [`max_attempts`](Self::max_attempts): 10.
    pub const DEFAULT_MAX_ATTEMPTS: u32 = 10;
    const DEFAULT_MAX_IN_FLIGHT: usize = 1_024;
    const DEFAULT_MAX_BUFFERED_BYTES: usize = 256 * 1024 * 1024;

    /// A layer over a gate made by [`request_gate`], for requests that come from `principal`.
    ///
    /// Lease, retention, fencing tokens and observer are set on the gate.
    pub fn new(gate: Gate, principal: Principal) -> Self {
        let settings = Settings {
            principal,
            required: true,
            strict: false,
            policy: Policy::ByStatus,
            max_request_bytes: Self::DEFAULT_MAX_REQUEST_BYTES,
            request_timeout: Self::DEFAULT_REQUEST_TIMEOUT,
            max_response_bytes: None,
            response_patience: Self::DEFAULT_RESPONSE_PATIENCE,
            claim_timeout: Self::DEFAULT_CLAIM_TIMEOUT,
            settle_timeout: Self::DEFAULT_SETTLE_TIMEOUT,
            wait: Duration::ZERO,
            max_attempts: Self::DEFAULT_MAX_ATTEMPTS,
            fail_open: false,
            key_headers: Arc::new([key::HEADER]),
            rules: None,
            max_caller_bytes: None,
            problems_at: problem::DEFAULT_PROBLEMS_AT.into(),
        };
        let tasks = Arc::new(Tasks::new(Self::DEFAULT_MAX_IN_FLIGHT));
        let body_memory = Arc::new(BodyMemory::new(Self::DEFAULT_MAX_BUFFERED_BYTES));
        let fits = *gate.key() == request::key();
        let store_breaker = Arc::default();
        Self {
            gate: Arc::new(gate),
            fits,
            tasks,
            body_memory,
            store_breaker,
            settings,
        }
    }

    /// Lets POST and PATCH pass without a key, unprotected. By default they need one.
    ///
    /// PUT, DELETE and other methods that are not safe never need a key, but a key that is sent is
    /// used.
    pub fn optional(mut self) -> Self {
        self.settings.required = false;
        self
    }

    /// Holds the requests that these rules name, and no others: those pass without a look at their
    /// keys. [`optional`](Self::optional) does not count then, because each rule says whether it
    /// needs a key.
    ///
    /// ```
    /// use oncegate::http::{Rule, RuleError, Rules};
    ///
    /// # fn main() -> Result<(), RuleError> {
    /// let rules = Rules::new([
    ///     Rule::new("POST", "/payments")?,
    ///     Rule::new("DELETE", "/payments/{id}")?.key_in_path(["id"])?,
    /// ])?;
    /// # let _ = rules;
    /// # Ok(())
    /// # }
    /// ```
    pub fn rules(mut self, rules: Rules) -> Self {
        self.settings.rules = Some(rules);
        self
    }

    /// Takes keys from these headers: `Idempotency-Key` by default. A request may have its key in
    /// several of them; two different keys are refused.
    pub fn key_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.settings.key_headers = names.into_iter().collect();
        self
    }

    /// Refuses keys without quotes. By default `abc` and `"abc"` are the same key: the draft
    /// requires quotes, but many clients send none.
    pub fn strict(mut self) -> Self {
        self.settings.strict = true;
        self
    }

    /// Keeps every response once the handler has begun, 5xx and panics included. By default 401,
    /// 403, 408, 409, 425, 429 and 5xx are not kept, and a repeated request runs the handler again.
    pub fn keep_everything(mut self) -> Self {
        self.settings.policy = Policy::KeepEverything;
        self
    }

    /// The largest request body: 1 MiB by default, up to 64 MiB. Larger ones get 413. It is read
    /// before the claim, and held in memory.
    pub fn max_request_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_request_bytes = bytes;
        self
    }

    /// Time limit for the request body. Default: 30 s. After it, the answer is 408.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.settings.request_timeout = timeout;
        self
    }

    /// The largest response body that is kept: 64 KiB by default, up to 8 MiB. A larger one is
    /// recorded as done without its body before its first byte leaves, and repetitions get 409
    /// `response-not-kept`.
    ///
    /// The gate limits body and headers together, by [`max_result_bytes`](Gate::max_result_bytes),
    /// or by [`max_large_result_bytes`](Gate::max_large_result_bytes) if it has a store for large
    /// results. If that is less, it is the default, and a larger value is refused when the layer
    /// opens.
    pub fn max_response_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_response_bytes = Some(bytes);
        self
    }

    /// The time that the layer waits for the end of a response body before it treats the body as
    /// endless. Default: 5 s.
    ///
    /// Server-sent events are recognised by their content type, without a wait.
    pub fn response_patience(mut self, patience: Duration) -> Self {
        self.settings.response_patience = patience;
        self
    }

    /// Time limit for the store's answer to a request's claim. Default: 5 s. After it, the answer
    /// is 503 `store-unavailable`, and nothing runs.
    ///
    /// After five claims in a row without an answer, requests are refused at once, except for one a
    /// second, until the store answers one.
    pub fn claim_timeout(mut self, timeout: Duration) -> Self {
        self.settings.claim_timeout = timeout;
        self
    }

    /// Time limit for the completion that a response waits for. Default: 10 s. After it, the client
    /// gets 503 `outcome-unknown`, and the layer goes on trying to complete.
    pub fn settle_timeout(mut self, timeout: Duration) -> Self {
        self.settings.settle_timeout = timeout;
        self
    }

    /// The time that a repetition waits for the first request's response before it gets 409
    /// `in-progress`.
    ///
    /// Default: no wait. While it waits, it asks the store every 20 to 250 ms.
    pub fn wait(mut self, patience: Duration) -> Self {
        self.settings.wait = patience;
        self
    }

    /// The number of attempts of a key that may fail or end their process before the request is
    /// given up: 10 by default, 1 to 254.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.max_attempts = attempts;
        self
    }

    /// The most handlers that run at once: 1,024 by default. Further requests get 503 `overloaded`.
    /// Limits outside of this layer do not count handlers whose clients have disconnected.
    ///
    /// Clones made before this call share another limit.
    pub fn max_in_flight(mut self, handlers: usize) -> Self {
        self.tasks = Arc::new(Tasks::new(handlers));
        self
    }

    /// The most bytes of request bodies in memory at once, from the first byte until the handler
    /// has ended: 256 MiB by default. A request whose body does not fit gets 503 `overloaded`. It
    /// bounds the memory that concurrent uploads can take; must be at least
    /// [`max_request_bytes`](Self::max_request_bytes).
    ///
    /// Clones made before this call share another limit.
    pub fn max_buffered_bytes(mut self, bytes: usize) -> Self {
        self.body_memory = Arc::new(BodyMemory::new(bytes));
        self
    }

    /// The most bytes of request bodies of one caller in memory at once: half of
    /// [`max_buffered_bytes`](Self::max_buffered_bytes) by default, so that no caller takes the
    /// memory of all others; with [`Principal::single_tenant`] all of it. A request whose body does
    /// not fit gets 429 `caller-overloaded`. Must be at least
    /// [`max_request_bytes`](Self::max_request_bytes).
    pub fn max_caller_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_caller_bytes = Some(bytes);
        self
    }

    /// Runs requests *without protection* when the store does not answer their claim. By default
    /// they get 503, and nothing runs. Each is counted as the answer `fail_open`, and as
    /// `extra_runs{fail_open}`.
    pub fn fail_open(mut self) -> Self {
        self.settings.fail_open = true;
        self
    }

    /// The address where your documentation describes the problems, such as
    /// `https://api.example.com/problems/`; the problem's name is appended. Default: the
    /// documentation of this module.
    pub fn problems_at(mut self, address: impl Into<Arc<str>>) -> Self {
        self.settings.problems_at = address.into();
        self
    }

    /// Returns the gate, for what stands around the layer and observes under the same scope.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Checks the settings and opens the gate. A layer that is not opened opens at its first
    /// request.
    ///
    /// # Errors
    /// The text of the [`GateError`] names what to change.
    pub async fn open(&self) -> Result<Checkup, GateError> {
        self.check_limits()?;
        self.check_rules()?;
        self.gate.open().await
    }

    /// Checks the settings, as [`open`](Self::open) does first. It does not access the store.
    ///
    /// # Errors
    /// The first one that is wrong; the text of the [`GateError`] names what to change.
    pub fn check(&self) -> Result<(), GateError> {
        self.check_limits()?;
        self.check_rules()?;
        self.gate.check()
    }

    /// Shuts down: accepts no new requests, waits until no handler runs, and cancels those that
    /// still run after `deadline`. Returns how many were cancelled. Call it after the server has
    /// stopped accepting.
    ///
    /// A cancelled handler is dropped at its next `await`. Its lease expires, and the next attempt
    /// is marked as recovered, because this one may have had its effect.
    pub async fn drain(&self, deadline: Duration) -> usize {
        self.tasks.drain(deadline).await
    }

    /// The largest response body that is kept.
    fn kept_response_bytes(&self) -> usize {
        let of_gate = self.gate.largest_result_bytes();
        self.settings
            .max_response_bytes
            .unwrap_or(Self::DEFAULT_MAX_RESPONSE_BYTES.min(of_gate))
    }

    /// The most bytes of request bodies of one caller in memory at once.
    fn caller_bytes(&self) -> usize {
        let Settings {
            max_caller_bytes,
            max_request_bytes,
            principal,
            ..
        } = &self.settings;
        let most = self.body_memory.bytes();
        let default = if principal.is_one() {
            most
        } else {
            (most / 2).max(*max_request_bytes)
        };
        max_caller_bytes.unwrap_or(default)
    }

    /// Checks what each request depends on.
    fn check_limits(&self) -> Result<(), GateError> {
        let Settings {
            max_request_bytes,
            max_attempts,
            fail_open,
            ..
        } = self.settings;
        let max_response_bytes = self.kept_response_bytes();
        if !self.fits {
            return self.refuse_setting(
                "its key is not that of HTTP requests; make it with `request_gate`",
            );
        }
        if max_request_bytes > MAX_REQUEST_BYTES_LIMIT {
            return self.refuse_setting("`max_request_bytes` must be at most 64 MiB");
        }
        if max_request_bytes > self.body_memory.bytes() {
            return self
                .refuse_setting("`max_buffered_bytes` must be at least `max_request_bytes`");
        }
        if max_request_bytes > self.caller_bytes() {
            return self.refuse_setting("`max_caller_bytes` must be at least `max_request_bytes`");
        }
        if max_response_bytes > MAX_RESPONSE_BYTES_LIMIT {
            return self.refuse_setting("`max_response_bytes` must be at most 8 MiB");
        }
        if max_response_bytes > self.gate.largest_result_bytes() {
            return self.refuse_setting(
                "`max_response_bytes` is more than the gate keeps; raise its `max_result_bytes`, or give it `large_results`",
            );
        }
        if fail_open && self.gate.gives_up_unknown() {
            return self.refuse_setting(
                "the layer fails open, and its gate has `AfterUnknown::GiveUp`: without its store nothing is known of earlier attempts; leave one of them out",
            );
        }
        if !(1..=MAX_ATTEMPTS_LIMIT).contains(&max_attempts) {
            return self.refuse_setting("`max_attempts` must be between 1 and 254");
        }
        Ok(())
    }

    fn check_rules(&self) -> Result<(), GateError> {
        if self.settings.key_headers.is_empty() {
            return self.refuse_setting("`key_headers` names no header");
        }
        let Some(rules) = &self.settings.rules else {
            return Ok(());
        };
        if let Some(shadowed) = rules.shadowed().first() {
            return self.refuse_setting(shadowed);
        }
        let longest = rules.longest_retention();
        if longest.is_some_and(|longest| longest > self.gate.retention_period()) {
            return self.refuse_setting(
                "the `retention` of a rule is longer than that of the gate; raise the gate's",
            );
        }
        Ok(())
    }

    fn refuse_setting(&self, what: &str) -> Result<(), GateError> {
        Err(GateError::Settings {
            scope: self.gate.scope().to_owned(),
            what: what.to_owned(),
        })
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
