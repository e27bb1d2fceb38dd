//! Claims, looks and heartbeats, each from its body to its answer.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use http::StatusCode;
use oncegate_core::record::whole_millis;
use oncegate_runtime::backoff::Backoff;
use oncegate_runtime::codec::Raw;
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::gate::{GateError, Stored};
use oncegate_runtime::message::Message;
use oncegate_runtime::running::detached::{ClaimOutcome, ClaimTerms, DetachedClaim, KeyState};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, timeout};

use super::callers::KnownCaller;
use super::forms::{
    ClaimAnswer, ClaimRequest, ExtendAnswer, ExtendRequest, ExtendedClaim, LookRequest,
};
use super::problem::ApiProblem;
use super::requests::{Carried, Reply};
use super::{ApiScope, Shared, claim_id, key};

/// The time limit for the store's answer to a claim, a look or a heartbeat.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// The delays before a busy key is asked about again.
const WAIT_BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(250));
/// The longest wait for a result.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// The most claims that one request extends.
const MAX_EXTENDS: usize = 1_000;
/// The shortest lease, as for every gate.
const MIN_LEASE: Duration = Duration::from_millis(100);

impl Shared {
    pub(super) async fn claim(
        &self,
        known: &KnownCaller,
        body: &[u8],
        reply: &mut Reply,
    ) -> Result<Carried, ApiProblem> {
        let request: ClaimRequest<'_> = parse(body)?;
        let scope = self.scope(known, &request.scope)?;
        let message = key::message(request.function.as_deref(), request.key)?;
        let terms = self.terms(known, scope, &request)?;
        let wait = checked_wait(request.wait_ms)?;
        let mut waiting = Waiting::new(self, known, wait);
        loop {
            if !known.may_claim(terms.token.as_ref()) {
                return Err(ApiProblem::CallerOverloaded {
                    what: "This caller holds as many claims as it may",
                });
            }
            let sent_at = Instant::now();
            let outcome = claim_once(scope, &message, &terms).await?;
            let retry_in = match outcome {
                ClaimOutcome::Busy { retry_in } => retry_in,
                ClaimOutcome::Granted {
                    claim,
                    recovered,
                    fencing_token,
                } => {
                    known.note_held(claim.token, claim.lease, sent_at);
                    let answer = ClaimAnswer::Granted {
                        claim: claim_id::encode(&claim),
                        attempt: claim.attempt,
                        recovered,
                        lease_ms: whole_millis(claim.lease),
                        fencing_token,
                    };
                    return Ok(Carried {
                        status: StatusCode::CREATED,
                        only_told_here: terms.token.is_none().then_some(claim),
                        ..Carried::ok(&answer)
                    });
                }
                ClaimOutcome::Completed(stored) => return Ok(Carried::ok(&completed(&stored))),
                ClaimOutcome::GivenUp { reason } => return Err(ApiProblem::GivenUp { reason }),
                ClaimOutcome::Mismatch => return Err(ApiProblem::Mismatch),
            };
            if !waiting.pause(retry_in, reply).await {
                return Err(ApiProblem::Busy { retry_in });
            }
        }
    }

    /// Returns a grant whose caller was gone before it had the answer.
    pub(super) async fn return_grant(&self, known: &KnownCaller, claim: &DetachedClaim) {
        known.note_ended(&claim.token);
        let Some(scope) = self.scopes.get(claim.key.scope()) else {
            return;
        };
        if let Err(error) = scope.gate.return_claim(claim).await {
            let scope = scope.gate.scope();
            tracing::warn!(scope, %error, "a grant whose caller is gone was not returned; its lease lapses");
        }
    }

    fn terms(
        &self,
        known: &KnownCaller,
        scope: &ApiScope,
        request: &ClaimRequest<'_>,
    ) -> Result<ClaimTerms, ApiProblem> {
        let longest = scope.gate.lease_period();
        let lease = within("lease_ms", request.lease_ms, longest, MIN_LEASE, longest)?;
        let retention = scope.gate.retention_period();
        let retention = within(
            "retention_ms",
            request.retention_ms,
            retention,
            lease,
            retention,
        )?;
        let fingerprint = request
            .arguments
            .map(|arguments| key::fingerprint(&self.arguments, arguments))
            .transpose()?;
        let token = request
            .nonce
            .as_deref()
            .map(|nonce| key::token(known.caller.name(), nonce))
            .transpose()?;
        Ok(ClaimTerms {
            lease,
            retention,
            fingerprint,
            token,
            limit: scope.limit,
        })
    }

    pub(super) async fn look(
        &self,
        known: &KnownCaller,
        body: &[u8],
        reply: &mut Reply,
    ) -> Result<Carried, ApiProblem> {
        let request: LookRequest<'_> = parse(body)?;
        let scope = self.scope(known, &request.scope)?;
        let message = key::message(request.function.as_deref(), request.key)?;
        let wait = checked_wait(request.wait_ms)?;
        let mut waiting = Waiting::new(self, known, wait);
        loop {
            let state = answered(scope, scope.gate.look(&message)).await?;
            let is_final = matches!(state, KeyState::Completed(_) | KeyState::GivenUp { .. });
            if is_final || !waiting.pause(MAX_WAIT, reply).await {
                return Ok(Carried::ok(&looked_at(state)));
            }
        }
    }

    pub(super) async fn extend(
        &self,
        known: &KnownCaller,
        body: &[u8],
    ) -> Result<Carried, ApiProblem> {
        let request: ExtendRequest = parse(body)?;
        if request.claims.len() > MAX_EXTENDS {
            let what =
                format!("\"claims\" has more than {MAX_EXTENDS} claims: send several requests");
            return Err(ApiProblem::RequestInvalid { what });
        }
        let now = Instant::now();
        let mut claims: Vec<Option<DetachedClaim>> = Vec::new();
        let mut answers: Vec<ExtendedClaim> = Vec::new();
        for text in &request.claims {
            let held = self.held(known, text).ok();
            answers.push(match &held {
                None => ExtendedClaim::Invalid,
                Some((scope, claim))
                    if known.is_overrun(&claim.token, scope.gate.run_period(), now) =>
                {
                    ExtendedClaim::Overrun
                }
                Some(_) => ExtendedClaim::Unknown,
            });
            claims.push(held.map(|(_, claim)| claim));
        }
        let of_scopes = self.scopes.iter().map(|(name, scope)| {
            let due: Vec<(usize, DetachedClaim)> = claims
                .iter()
                .enumerate()
                .filter(|(at, _)| matches!(answers.get(*at), Some(ExtendedClaim::Unknown)))
                .filter_map(|(at, claim)| Some((at, claim.clone()?)))
                .filter(|(_, claim)| claim.key.scope() == name)
                .collect();
            extend_all(scope, due)
        });
        for (at, claim, is_owner) in join_all(of_scopes).await.into_iter().flatten() {
            let Some(answer) = answers.get_mut(at) else {
                continue;
            };
            if is_owner {
                known.note_held(claim.token, claim.lease, now);
                let lease_ms = whole_millis(claim.lease);
                *answer = ExtendedClaim::Extended { lease_ms };
            } else {
                known.note_ended(&claim.token);
                *answer = ExtendedClaim::LeaseLost;
            }
        }
        Ok(Carried::ok(&ExtendAnswer { claims: answers }))
    }

    pub(super) fn scope(&self, known: &KnownCaller, name: &str) -> Result<&ApiScope, ApiProblem> {
        self.scopes
            .get(name)
            .filter(|_| known.may_use(name))
            .ok_or_else(|| ApiProblem::ScopeForbidden {
                scope: name.chars().take(64).collect(),
            })
    }

    /// Reads a claim, with the bounds that its scope has now.
    pub(super) fn held(
        &self,
        known: &KnownCaller,
        text: &str,
    ) -> Result<(&ApiScope, DetachedClaim), ApiProblem> {
        let mut claim = claim_id::decode(text).ok_or(ApiProblem::ClaimInvalid)?;
        let scope = self.scope(known, claim.key.scope())?;
        claim.lease = claim.lease.min(scope.gate.lease_period());
        claim.retention = claim.retention.min(scope.gate.retention_period());
        Ok((scope, claim))
    }
}

/// A request that may wait for a result.
struct Waiting<'a> {
    shared: &'a Shared,
    known: &'a KnownCaller,
    give_up_at: Instant,
    asked: u32,
    /// A permit of those of all requests, and one of those of its caller.
    permits: Option<[OwnedSemaphorePermit; 2]>,
}

impl<'a> Waiting<'a> {
    fn new(shared: &'a Shared, known: &'a KnownCaller, wait: Duration) -> Self {
        Self {
            shared,
            known,
            give_up_at: Instant::now() + wait,
            asked: 0,
            permits: None,
        }
    }

    /// Waits before the store is asked again. `false`: it is not asked again, because the time is
    /// over, the client has gone, too many wait, or the server stops.
    async fn pause(&mut self, retry_in: Duration, reply: &mut Reply) -> bool {
        self.asked += 1;
        let pause = retry_in.min(WAIT_BACKOFF.wait(self.asked, fastrand::f64()));
        if Instant::now() + pause > self.give_up_at || !self.may_wait() {
            return false;
        }
        tokio::select! {
            () = sleep(pause) => true,
            () = reply.closed() => false,
            () = self.shared.stopping.cancelled() => false,
        }
    }

    fn may_wait(&mut self) -> bool {
        if self.permits.is_none() {
            let all = Arc::clone(&self.shared.waiting).try_acquire_owned();
            let of_caller = Arc::clone(&self.known.waiting).try_acquire_owned();
            self.permits = all.ok().zip(of_caller.ok()).map(|(a, b)| [a, b]);
        }
        self.permits.is_some()
    }
}

pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, ApiProblem> {
    serde_json::from_slice(body).map_err(|error| ApiProblem::RequestInvalid {
        what: format!("the body is not the JSON of this operation: {error}"),
    })
}

/// The setting in milliseconds, or its default.
fn within(
    name: &str,
    millis: Option<u64>,
    default: Duration,
    least: Duration,
    most: Duration,
) -> Result<Duration, ApiProblem> {
    let Some(millis) = millis else {
        return Ok(default.max(least));
    };
    let given = Duration::from_millis(millis);
    if given < least || given > most {
        return Err(ApiProblem::RequestInvalid {
            what: format!(
                "\"{name}\" is {millis}; in this scope it must be between {} and {}",
                whole_millis(least),
                whole_millis(most)
            ),
        });
    }
    Ok(given)
}

fn checked_wait(wait_ms: Option<u64>) -> Result<Duration, ApiProblem> {
    within("wait_ms", wait_ms, Duration::ZERO, Duration::ZERO, MAX_WAIT)
}

async fn claim_once(
    scope: &ApiScope,
    message: &Message,
    terms: &ClaimTerms,
) -> Result<ClaimOutcome, ApiProblem> {
    answered(scope, scope.gate.claim(message, terms)).await
}

/// Limits the wait for an answer of the store.
async fn answered<T>(
    scope: &ApiScope,
    asked: impl Future<Output = Result<T, GateError>> + Send,
) -> Result<T, ApiProblem> {
    match timeout(ANSWER_LIMIT, asked).await {
        Ok(answer) => answer.map_err(|error| ApiProblem::of_gate(scope.gate.scope(), error)),
        Err(_) => Err(ApiProblem::OutcomeUnknown),
    }
}

/// Extends claims of one scope. Returns those that the store has answered for.
async fn extend_all(
    scope: &ApiScope,
    due: Vec<(usize, DetachedClaim)>,
) -> Vec<(usize, DetachedClaim, bool)> {
    let claims: Vec<DetachedClaim> = due.iter().map(|(_, claim)| claim.clone()).collect();
    if claims.is_empty() {
        return Vec::new();
    }
    let Ok(extended) = answered(scope, scope.gate.extend_claims(&claims)).await else {
        return Vec::new();
    };
    due.into_iter()
        .zip(extended)
        .filter_map(|((at, claim), is_owner)| Some((at, claim, is_owner.ok()?)))
        .collect()
}

fn looked_at(state: KeyState) -> ClaimAnswer {
    match state {
        KeyState::Absent => ClaimAnswer::Absent,
        KeyState::Claimed {
            attempt,
            lease_left,
        } => ClaimAnswer::Claimed {
            attempt,
            lease_left_ms: lease_left.map_or(0, whole_millis),
        },
        KeyState::Released {
            attempt,
            retry_in,
            reason,
        } => ClaimAnswer::Released {
            attempt: Some(attempt),
            retry_in_ms: retry_in.map_or(0, whole_millis),
            reason: Some(reason),
        },
        KeyState::Completed(stored) => completed(&stored),
        KeyState::GivenUp { attempt, reason } => ClaimAnswer::GivenUp {
            attempt: Some(attempt),
            reason,
        },
    }
}

/// The stored result: JSON, bytes, or the reason why there is none.
fn completed(stored: &Stored) -> ClaimAnswer {
    if let Ok(Raw(bytes)) = stored.decode() {
        return ClaimAnswer::Completed {
            result: None,
            result_base64: Some(STANDARD.encode(bytes)),
            result_lost: None,
        };
    }
    let json = stored.decode::<Box<RawValue>>().or_else(|error| {
        // A handler in Rust may have recorded it in another encoding.
        let value = stored.decode::<serde_json::Value>().map_err(|_| error)?;
        Ok::<_, BoxError>(serde_json::value::to_raw_value(&value)?)
    });
    match json {
        Ok(json) => ClaimAnswer::Completed {
            result: Some(json),
            result_base64: None,
            result_lost: None,
        },
        Err(error) => ClaimAnswer::Completed {
            result: None,
            result_base64: None,
            result_lost: Some(error.to_string()),
        },
    }
}
