//! The paths of the API.

/// The operation that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Claim,
    Extend,
    Complete,
    Release,
    Fail,
    Look,
}

/// Every path of an operation, each with the method POST.
pub(super) const PATHS: [(&str, Operation); 6] = [
    ("/v1/claims", Operation::Claim),
    ("/v1/claims/extend", Operation::Extend),
    ("/v1/claims/complete", Operation::Complete),
    ("/v1/claims/release", Operation::Release),
    ("/v1/claims/fail", Operation::Fail),
    ("/v1/look", Operation::Look),
];

/// The path of the description of all others.
pub(super) const OPENAPI: &str = "/v1/openapi.json";
