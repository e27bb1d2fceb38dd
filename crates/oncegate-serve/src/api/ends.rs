//! The ends of claims, each from its body to its answer.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use oncegate_core::record::whole_millis;
use oncegate_runtime::backoff::Backoff;
use oncegate_runtime::codec::Raw;
use oncegate_runtime::failure::Failure;
use oncegate_runtime::gate::GateError;
use oncegate_runtime::running::detached::{ClaimEnd, DetachedClaim};
use tokio::time::{Instant, sleep, timeout_at};

use super::callers::KnownCaller;
use super::claims::parse;
use super::forms::{ClaimAnswer, CompleteRequest, FailRequest, ReleaseRequest};
use super::problem::ApiProblem;
use super::requests::Carried;
use super::{ApiScope, Shared};

/// The time for which the end of a claim is repeated before its caller has to.
const END_PATIENCE: Duration = Duration::from_secs(5);
/// The delays between those repeats.
const END_BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));

impl Shared {
    pub(super) async fn complete(
        &self,
        known: &KnownCaller,
        body: &[u8],
    ) -> Result<Carried, ApiProblem> {
        let request: CompleteRequest<'_> = parse(body)?;
        let (scope, claim) = self.held(known, &request.claim)?;
        let gate = &scope.gate;
        let given = usize::from(request.result.is_some())
            + usize::from(request.result_base64.is_some())
            + usize::from(request.without_result);
        if given > 1 {
            let what = "send one of \"result\", \"result_base64\" and \"without_result\"";
            return Err(ApiProblem::RequestInvalid {
                what: what.to_owned(),
            });
        }
        let ended = if request.without_result {
            until_known(scope, || gate.complete_claim_without_result(&claim)).await?
        } else if let Some(text) = &request.result_base64 {
            let Ok(bytes) = STANDARD.decode(text) else {
                let what =
                    "\"result_base64\" is no base64 with the alphabet of RFC 4648, section 4";
                return Err(ApiProblem::RequestInvalid {
                    what: what.to_owned(),
                });
            };
            let raw = Raw(Bytes::from(bytes));
            until_known(scope, || gate.complete_claim(&claim, &raw)).await?
        } else {
            until_known(scope, || gate.complete_claim(&claim, &request.result)).await?
        };
        known.note_ended(&claim.token);
        ended_as(scope, ended)
    }

    pub(super) async fn release(
        &self,
        known: &KnownCaller,
        body: &[u8],
    ) -> Result<Carried, ApiProblem> {
        let request: ReleaseRequest = parse(body)?;
        let (scope, claim) = self.held(known, &request.claim)?;
        let delay = request.retry_in_ms.map(Duration::from_millis);
        let reason = reason_or(&request.reason, "released without a reason");
        let failure = match (request.counted, delay) {
            (true, None) => Failure::retry(reason),
            (true, Some(delay)) => Failure::retry_after(delay, reason),
            (false, delay) => Failure::later(delay.unwrap_or_default(), reason),
        };
        self.end_attempt(known, scope, &claim, &failure).await
    }

    pub(super) async fn fail(
        &self,
        known: &KnownCaller,
        body: &[u8],
    ) -> Result<Carried, ApiProblem> {
        let request: FailRequest = parse(body)?;
        let (scope, claim) = self.held(known, &request.claim)?;
        let reason = reason_or(&request.reason, "failed without a reason");
        self.end_attempt(known, scope, &claim, &Failure::permanent(reason))
            .await
    }

    async fn end_attempt(
        &self,
        known: &KnownCaller,
        scope: &ApiScope,
        claim: &DetachedClaim,
        failure: &Failure,
    ) -> Result<Carried, ApiProblem> {
        let ended = until_known(scope, || {
            scope
                .gate
                .fail_claim(claim, failure, scope.limit, scope.backoff)
        })
        .await?;
        known.note_ended(&claim.token);
        ended_as(scope, ended)
    }
}

fn reason_or<'a>(reason: &'a str, otherwise: &'a str) -> String {
    let reason = reason.trim();
    if reason.is_empty() { otherwise } else { reason }.to_owned()
}

/// Repeats the end of a claim for a while until the store has answered.
async fn until_known<F>(
    scope: &ApiScope,
    mut end: impl FnMut() -> F + Send,
) -> Result<ClaimEnd, ApiProblem>
where
    F: Future<Output = Result<ClaimEnd, GateError>> + Send,
{
    let deadline = Instant::now() + END_PATIENCE;
    let mut failures = 0;
    let mut may_be_done = false;
    loop {
        let error = match timeout_at(deadline, end()).await {
            Ok(Ok(ended)) => return Ok(ended),
            Ok(Err(error)) => error,
            Err(_) => return Err(ApiProblem::OutcomeUnknown),
        };
        let GateError::Store(reason) = &error else {
            return Err(ApiProblem::of_gate(scope.gate.scope(), error));
        };
        may_be_done |= reason.class() == "unknown";
        failures += 1;
        let pause = END_BACKOFF.wait(failures, fastrand::f64());
        if !reason.is_away() || Instant::now() + pause >= deadline {
            let problem = ApiProblem::of_gate(scope.gate.scope(), error);
            return Err(if may_be_done {
                ApiProblem::OutcomeUnknown
            } else {
                problem
            });
        }
        sleep(pause).await;
    }
}

/// The answer to the end of a claim.
fn ended_as(scope: &ApiScope, ended: ClaimEnd) -> Result<Carried, ApiProblem> {
    let answer = match ended {
        ClaimEnd::Completed { is_kept: true } => ClaimAnswer::Completed {
            result: None,
            result_base64: None,
            result_lost: None,
        },
        ClaimEnd::Completed { is_kept: false } => {
            let most = scope.gate.recorded_result_bytes();
            ClaimAnswer::Completed {
                result: None,
                result_base64: None,
                result_lost: Some(format!("it was not kept; a record keeps {most} bytes")),
            }
        }
        ClaimEnd::Released { retry_in } => ClaimAnswer::Released {
            attempt: None,
            retry_in_ms: whole_millis(retry_in),
            reason: None,
        },
        ClaimEnd::GivenUp { reason } => ClaimAnswer::GivenUp {
            attempt: None,
            reason,
        },
        ClaimEnd::NotOwner => return Err(ApiProblem::LeaseLost),
    };
    Ok(Carried::ok(&answer))
}
