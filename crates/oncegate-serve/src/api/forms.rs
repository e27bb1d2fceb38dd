//! The bodies of requests and answers. Their doc comments are the descriptions of the OpenAPI
//! document.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A claim of a key.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ClaimRequest<'a> {
    /// The scope, one of those of the caller.
    pub(super) scope: String,
    /// The name of the function, a part of the key: 1 to 128 of `A-Z a-z 0-9 . _ : -`. Without it,
    /// the key alone says what the work is.
    #[serde(default)]
    pub(super) function: Option<String>,
    /// The key: a string, a number, an array or an object. An object counts by its content,
    /// whatever the order of its members and the spelling of its numbers. If the scope has a key
    /// specification, the key is the document that it reads.
    #[serde(borrow, default)]
    #[schemars(with = "serde_json::Value")]
    pub(super) key: Option<&'a RawValue>,
    /// The arguments of the work. The same key with other arguments is a mismatch, and is neither
    /// run nor answered.
    #[serde(borrow, default)]
    #[schemars(with = "Option<serde_json::Value>")]
    pub(super) arguments: Option<&'a RawValue>,
    /// A random UUID that is made for this one claim. A claim that has had no answer is sent again
    /// with the same one, and gets the same grant. Never a constant: two processes that send the
    /// same one would both be granted the key.
    #[serde(default)]
    pub(super) nonce: Option<String>,
    /// The lease in milliseconds, 100 up to that of the scope, which is the default.
    #[serde(default)]
    pub(super) lease_ms: Option<u64>,
    /// The time for which the record is kept once the work is done, in milliseconds: from the lease
    /// up to the retention of the scope, which is the default.
    #[serde(default)]
    pub(super) retention_ms: Option<u64>,
    /// The time to wait for a result if the key is busy, in milliseconds, up to 60,000. Default: 0.
    #[serde(default)]
    pub(super) wait_ms: Option<u64>,
}

/// A look at a key.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LookRequest<'a> {
    /// The scope, as in the claim.
    pub(super) scope: String,
    /// The name of the function, as in the claim.
    #[serde(default)]
    pub(super) function: Option<String>,
    /// The key, as in the claim.
    #[serde(borrow, default)]
    #[schemars(with = "serde_json::Value")]
    pub(super) key: Option<&'a RawValue>,
    /// The time to wait until the work is done or given up, in milliseconds, up to 60,000. Default:
    /// 0.
    #[serde(default)]
    pub(super) wait_ms: Option<u64>,
}

/// The claims to extend, each by the lease that it was granted with.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ExtendRequest {
    /// Up to 1,000 claims, of any scopes of the caller.
    pub(super) claims: Vec<String>,
}

/// The end of work that is done.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CompleteRequest<'a> {
    /// The claim.
    pub(super) claim: String,
    /// The result as JSON, which duplicates get. Default: `null`.
    #[serde(borrow, default)]
    #[schemars(with = "Option<serde_json::Value>")]
    pub(super) result: Option<&'a RawValue>,
    /// The result as bytes in base64, instead of `result`.
    #[serde(default)]
    pub(super) result_base64: Option<String>,
    /// Completes without the result, because it was too large to be sent: duplicates learn that
    /// there is none.
    #[serde(default)]
    pub(super) without_result: bool,
}

/// The end of an attempt that has failed, or has not begun.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ReleaseRequest {
    /// The claim.
    pub(super) claim: String,
    /// The reason, cut to 256 bytes.
    #[serde(default)]
    pub(super) reason: String,
    /// `true` if the attempt counts: a failure does, and a stop before the work began does not.
    #[serde(default = "yes")]
    pub(super) counted: bool,
    /// The time after which the next attempt is due, in milliseconds. Default: the scope's back-off
    /// for an attempt that counts, 0 for another one.
    #[serde(default)]
    pub(super) retry_in_ms: Option<u64>,
}

fn yes() -> bool {
    true
}

/// The end of work that will never succeed.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FailRequest {
    /// The claim.
    pub(super) claim: String,
    /// The reason, cut to 256 bytes. Later claims of the key are answered with it.
    pub(super) reason: String,
}

/// The answer to a request that did what it asked for.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub(super) enum ClaimAnswer {
    /// Do the work, and extend the claim at a third of its lease until it has ended.
    Granted {
        /// The claim. It is the proof of ownership, so it belongs into no log.
        claim: String,
        /// The number of the attempt, from 1.
        attempt: u32,
        /// `true` if an earlier attempt ended without an outcome, so that its effect may have
        /// happened: ask downstream.
        recovered: bool,
        /// The lease in milliseconds, counted from before the request was sent.
        lease_ms: u64,
        /// A number that only grows for the key, if the scope is fenced.
        #[serde(skip_serializing_if = "Option::is_none")]
        fencing_token: Option<u64>,
    },
    /// The work is done.
    Completed {
        /// The first result.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<serde_json::Value>")]
        result: Option<Box<RawValue>>,
        /// The same as bytes in base64, if it was recorded as bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        result_base64: Option<String>,
        /// The reason why there is no result: it was too large to be kept, for example.
        #[serde(skip_serializing_if = "Option::is_none")]
        result_lost: Option<String>,
    },
    /// The claim has ended; another attempt may follow.
    Released {
        /// The number of the attempt.
        #[serde(skip_serializing_if = "Option::is_none")]
        attempt: Option<u32>,
        /// The time after which the next attempt is due.
        retry_in_ms: u64,
        /// The reason.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// No attempt follows.
    GivenUp {
        /// The number of attempts that were made.
        #[serde(skip_serializing_if = "Option::is_none")]
        attempt: Option<u32>,
        /// The reason.
        reason: String,
    },
    /// An owner has it.
    Claimed {
        /// The number of the attempt.
        attempt: u32,
        /// The rest of the lease; 0 when it is over, so that the next claim takes over.
        lease_left_ms: u64,
    },
    /// The work has never been claimed, or its record has expired.
    Absent,
}

/// The answer to a request that extends claims.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ExtendAnswer {
    /// One for each claim of the request, in its order.
    pub(super) claims: Vec<ExtendedClaim>,
}

/// The state of one claim.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub(super) enum ExtendedClaim {
    /// The lease begins again.
    Extended {
        /// The lease in milliseconds, counted from before the request was sent.
        lease_ms: u64,
    },
    /// Another owner has it, or it has ended: stop the work.
    LeaseLost,
    /// Held for longer than a run may take, and not extended: stop the work.
    Overrun,
    /// The store did not answer: send it again.
    Unknown,
    /// The text is no claim, or its scope is not one of the caller's.
    Invalid,
}

/// A problem, in the form of RFC 9457.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ProblemDocument {
    /// The address of its description.
    pub(super) r#type: String,
    /// The problem in a few words.
    pub(super) title: &'static str,
    /// The HTTP status.
    pub(super) status: u16,
    /// The fault, and what to change.
    pub(super) detail: String,
    /// The name of the problem, such as `busy`: the end of its type.
    pub(super) state: &'static str,
    /// The time after which it is worth sending the request again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) retry_in_ms: Option<u64>,
    /// The reason for which work was given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
}
