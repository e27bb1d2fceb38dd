//! The checks of a request before its handler: its key, its caller, its body, and the gate.

use std::sync::Arc;
use std::time::Duration;

use ::http::request::Parts;
use ::http::{HeaderValue, Request, Response, Version, header};
use bytes::Bytes;
use http_body::Body as _;
use oncegate_core::store::StoreError;
use tokio::time::{Instant, sleep, timeout};
use tracing::{error, info, warn};

use super::body::{Body, Cut, collect};
use super::body_memory::OccupiedMemory;
use super::key;
use super::problem::{Cause, GivenUp, Problem};
use super::request::{Caller, Duty, Form, message};
use super::response::StoredResponse;
use super::rules::{FoundKey, Rule};
use super::run::{self, Handle};
use super::store_breaker::BreakerChange;
use super::{IdempotencyLayer, Settings};
use oncegate_runtime::codec::Raw;
use oncegate_runtime::gate::{Entry, GateError, Lease, Stored};
use oncegate_runtime::message::Message;
use oncegate_runtime::observe::{Event, ExtraRunCause};

/// The first and the longest wait of a duplicate whose key is busy; the waits double.
const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// The gate's decision about a request.
pub(super) enum Admission {
    /// The handler runs.
    Granted(Lease),
    /// The request is answered without its handler.
    Answered(Response<Body>),
    /// Another request owns the key, for this long at most.
    Busy { retry_in: Duration },
    /// The store is unavailable, and the route is set to fail open.
    FailOpen,
}

/// A request that the layer holds, before its body was read.
struct Held {
    principal: String,
    /// `None` when it is in the body.
    key: Option<String>,
    rule: Option<Arc<Rule>>,
}

impl Held {
    /// Returns the caller with the key; `None` when the body has no key, and needs none.
    fn caller(self, body: &Bytes) -> Result<Option<Caller>, Problem> {
        let Self {
            principal,
            key,
            rule,
        } = self;
        let found = match key {
            Some(key) => Some(key),
            None => rule
                .as_ref()
                .and_then(|rule| rule.key_of_body(body))
                .unwrap_or(Err(Problem::KeyMissing))?,
        };
        let Some(key) = found else {
            return Ok(None);
        };
        Ok(Some(Caller {
            principal,
            key,
            rule,
        }))
    }
}

pub(super) async fn serve<E: Send + 'static>(
    layer: Arc<IdempotencyLayer>,
    request: Request<Body>,
    handle: Handle<E>,
) -> Result<Response<Body>, E> {
    let (parts, body) = request.into_parts();
    let held = match layer.held(&parts) {
        Ok(Some(held)) => held,
        Ok(None) => return handle(Request::from_parts(parts, body)).await,
        Err(problem) => return Ok(layer.refuse_unread(&problem, &parts, body.is_end_stream())),
    };
    let (body, memory) = match layer.read(body, &held.principal).await {
        Ok(read) => read,
        Err(problem) => return Ok(layer.refuse_unread(&problem, &parts, false)),
    };
    let caller = match held.caller(&body) {
        Ok(Some(caller)) => caller,
        Ok(None) => return handle(Request::from_parts(parts, Body::from(body))).await,
        Err(problem) => return Ok(layer.refuse(&problem)),
    };
    let give_up_at = Instant::now() + layer.settings.wait;
    let mut wait = FIRST_WAIT;
    let mut waited = false;
    loop {
        // A claimed request runs at once, so a permit is needed first.
        let Some(permit) = layer.tasks.permit() else {
            return Ok(layer.refuse(&Problem::Overloaded));
        };
        let retry_in = match layer.claim(&parts, &caller, &body).await {
            Admission::Granted(lease) => {
                let request = Request::from_parts(parts, Body::from(body));
                let granted = (lease, caller.rule);
                return run::start(layer, (permit, memory), granted, request, handle).await;
            }
            Admission::Answered(response) => return Ok(response),
            Admission::FailOpen => {
                return handle(Request::from_parts(parts, Body::from(body))).await;
            }
            Admission::Busy { retry_in } => retry_in,
        };
        drop(permit);
        // A key that was released is due a moment later; waiting is better than a refusal.
        let is_due = retry_in <= FIRST_WAIT && !waited;
        if !is_due && Instant::now() + wait > give_up_at {
            return Ok(layer.refuse(&Problem::InProgress));
        }
        sleep(wait.min(retry_in)).await;
        waited = true;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

/// Returns whether the store cannot be asked now. An unreadable record, for example, is still a
/// record: the request may have been handled.
fn is_away(error: &StoreError) -> bool {
    error.is_away()
}

/// Returns whether the program must be changed before requests can be served.
fn is_setting(error: &GateError) -> bool {
    matches!(
        error,
        GateError::Settings { .. } | GateError::Key(_) | GateError::OtherDescriptor { .. }
    )
}

impl IdempotencyLayer {
    /// Returns how the request is held; `None` when it passes.
    fn held(&self, request: &Parts) -> Result<Option<Held>, Problem> {
        let Settings {
            rules, key_headers, ..
        } = &self.settings;
        let (rule, required) = match rules {
            Some(rules) => match rules.find(request) {
                Some(rule) => {
                    let required = rule.required;
                    (Some(rule), required)
                }
                None => return Ok(None),
            },
            None => match Duty::of(&request.method) {
                Duty::Safe => return Ok(None),
                duty => (None, self.settings.required && duty == Duty::Enforce),
            },
        };
        let found = match &rule {
            Some(rule) => rule.key_of_head(request, key_headers),
            None => FoundKey::InHeaders(key_headers.to_vec()),
        };
        let key = match found {
            FoundKey::Known(key) => Some(key),
            FoundKey::InBody => None,
            FoundKey::InHeaders(names) => {
                let key = key::of_any(&request.headers, &names, self.settings.strict);
                match key.map_err(Problem::KeyInvalid)? {
                    Some(key) => Some(key),
                    None if required => return Err(Problem::KeyMissing),
                    None => return Ok(None),
                }
            }
        };
        let principal = self.settings.principal.of(request);
        let principal = principal.ok_or(Problem::PrincipalMissing)?;
        Ok(Some(Held {
            principal,
            key,
            rule,
        }))
    }

    /// Reads the body before the claim: a slow upload holds no lease.
    async fn read(&self, body: Body, principal: &str) -> Result<(Bytes, OccupiedMemory), Problem> {
        let limit_bytes = self.settings.max_request_bytes;
        let mut memory = self.body_memory.none(principal, self.caller_bytes());
        let patience = self.settings.request_timeout;
        let collected = collect(body, limit_bytes, patience, |bytes| memory.occupy(bytes)).await;
        let refusal = memory.refusal();
        collected
            .whole
            .map(|body| (body, memory))
            .map_err(|cut| match cut {
                Cut::TooLarge => Problem::RequestTooLarge { limit_bytes },
                Cut::NoRoom => refusal,
                Cut::TooSlow => Problem::RequestTooSlow,
                Cut::Broken => Problem::RequestBroken,
            })
    }

    async fn claim(&self, request: &Parts, caller: &Caller, body: &Bytes) -> Admission {
        if !self.store_breaker.admits(Instant::now()) {
            return self.without_store();
        }
        let as_json = message(request, caller, body, Form::Json);
        let mut entry = self.ask(&as_json).await;
        if let Err(GateError::BadKey(_)) = entry {
            // Some JSON cannot be compared, such as an object with a duplicate name. Its bytes can.
            entry = self.ask(&message(request, caller, body, Form::Bytes)).await;
        }
        self.note_claim(entry.as_ref().err());
        if entry.is_ok() && self.store_breaker.refused(false) {
            info!(scope = self.gate.scope(), "requests are served again");
        }
        match entry {
            Ok(Entry::Granted(lease)) => Admission::Granted(lease),
            Ok(Entry::Busy { retry_in }) => Admission::Busy { retry_in },
            Ok(other) => Admission::Answered(self.repeat(other)),
            Err(GateError::Store(error)) if is_away(&error) => {
                warn!(scope = self.gate.scope(), %error, "the store did not answer a request's claim");
                self.without_store()
            }
            Err(GateError::BadKey(_)) => {
                Admission::Answered(self.refuse(&Problem::KeyInvalid("no key can be made of it")))
            }
            Err(error) => Admission::Answered(self.refuse_for(&error)),
        }
    }

    /// The answer to a request whose claim the gate has refused.
    fn refuse_for(&self, error: &GateError) -> Response<Body> {
        let scope = self.gate.scope();
        match error {
            error if is_setting(error) => {
                error!(scope, %error, "requests with an Idempotency-Key cannot be served");
                self.refuse(&Problem::Misconfigured)
            }
            GateError::Store(error @ StoreError::Refused { .. }) => {
                if self.store_breaker.refused(true) {
                    warn!(scope, %error, "requests are refused until this is changed");
                }
                self.refuse(&Problem::StoreUnavailable)
            }
            error => {
                // There may be a response that cannot be read now, so the handler must not run.
                warn!(scope, %error, "a request is refused because its record cannot be read");
                self.refuse(&Problem::StoreUnavailable)
            }
        }
    }

    /// Asks the gate, for a limited time. At the time limit, a claim that may have been granted is
    /// released.
    pub(super) async fn ask(&self, message: &Message) -> Result<Entry, GateError> {
        self.check_limits()?;
        let patience = self.settings.claim_timeout;
        let asked = timeout(patience, self.gate.enter(message)).await;
        asked.unwrap_or_else(|_| {
            Err(StoreError::unknown(format!("no answer within {patience:?}")).into())
        })
    }

    /// Tells the breaker whether the store has answered a claim.
    fn note_claim(&self, error: Option<&GateError>) {
        let answered = match error {
            None => true,
            Some(GateError::Store(error)) => !is_away(error),
            // These errors do not tell whether the store answers.
            Some(_) => return,
        };
        let scope = self.gate.scope();
        match self.store_breaker.claimed(answered, Instant::now()) {
            Some(BreakerChange::Opened) => {
                warn!(
                    scope,
                    "the store does not answer claims; requests no longer wait for it, except for one a second"
                );
            }
            Some(BreakerChange::Closed) => info!(scope, "the store answers claims again"),
            None => {}
        }
    }

    fn without_store(&self) -> Admission {
        let scope = self.gate.scope();
        if self.settings.fail_open {
            warn!(
                scope,
                "a request runs without protection against its repetition"
            );
            self.gate.observe(Event::Answered {
                scope,
                answer: "fail_open",
            });
            self.gate.observe(Event::ExtraRun {
                scope,
                cause: ExtraRunCause::FailOpen,
            });
            return Admission::FailOpen;
        }
        Admission::Answered(self.refuse(&Problem::StoreUnavailable))
    }

    /// The answer to a request whose handler does not run.
    pub(super) fn repeat(&self, entry: Entry) -> Response<Body> {
        let problem = match entry {
            Entry::Completed(stored) => return self.replay(&stored),
            Entry::Mismatch => Problem::KeyReused,
            Entry::Failed { reason, .. } => {
                let server_error = GivenUp {
                    cause: Cause::AttemptsExhausted,
                    status: ::http::StatusCode::INTERNAL_SERVER_ERROR,
                };
                Problem::Failed(reason.parse().unwrap_or(server_error))
            }
            Entry::Granted(_) | Entry::Busy { .. } => Problem::InProgress,
        };
        self.refuse(&problem)
    }

    fn replay(&self, stored: &Stored) -> Response<Body> {
        let kept = stored
            .decode::<Raw>()
            .ok()
            .and_then(|Raw(bytes)| StoredResponse::decode(&bytes));
        let status = kept.as_ref().map(|kept| kept.status);
        match kept.and_then(StoredResponse::replay) {
            Some(response) => {
                self.gate.observe(Event::Acked {
                    scope: self.gate.scope(),
                    count: 1,
                    age: None,
                });
                self.note("replayed");
                response
            }
            None => self.refuse(&Problem::ResponseNotKept { status }),
        }
    }

    pub(super) fn refuse(&self, problem: &Problem) -> Response<Body> {
        self.note(problem.name());
        problem.response(&self.settings.problems_at)
    }

    /// Refuses a request whose body may not have come yet. A server of HTTP/1 closes such a
    /// connection, and its client must learn of it: another request on it would be lost.
    fn refuse_unread(
        &self,
        problem: &Problem,
        request: &Parts,
        is_complete: bool,
    ) -> Response<Body> {
        let mut response = self.refuse(problem);
        if !is_complete && request.version <= Version::HTTP_11 {
            response
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    pub(super) fn note(&self, answer: &'static str) {
        self.gate.observe(Event::Answered {
            scope: self.gate.scope(),
            answer,
        });
    }
}
