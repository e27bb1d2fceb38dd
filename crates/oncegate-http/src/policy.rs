//! Decides from a response what happens to its key.

use ::http::StatusCode;
use ::http::response::Parts;

use super::rules::Rule;

/// A handler's own decision about its key, as an extension of its response; it overrides the
/// status.
///
/// In axum: `(StatusCode::CONFLICT, Extension(Settle::Retry), "not yet")`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settle {
    /// The work is done: keep this response for repetitions, whatever its status.
    Complete,
    /// The response is not kept, and the next request runs the handler again. The attempt counts.
    Retry,
    /// The request is given up: repetitions get the status of this response, and never run.
    Fail,
    /// The work was not begun: the response is not kept, the next request runs the handler at once,
    /// and no attempt is used up.
    NotRun,
    /// The effect may have happened or not: nothing is written, the lease expires, and the next
    /// attempt is marked as recovered.
    Unknown,
}

/// The fate of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Complete,
    Release {
        counted: bool,
    },
    /// The handler may have been dropped halfway: nothing is written, and the lease expires.
    Unknown,
    Fail,
}

/// The rule by which the status decides, unless the response contains a [`Settle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// Keeps results, but not responses that another attempt may change: these release the key.
    ByStatus,
    /// Keeps every response once the handler has begun.
    KeepEverything,
}

impl Policy {
    /// Decides by the rule of the request, if it has one that says which statuses are kept.
    pub(super) fn decide_by(self, rule: Option<&Rule>, response: &Parts) -> Decision {
        let word = response.extensions.get::<Settle>();
        match rule.and_then(|rule| rule.keeps(response.status)) {
            Some(true) if word.is_none() => Decision::Complete,
            Some(false) => match self.decide(response) {
                // Only the handler itself says that it is done with a status that is not kept.
                Decision::Complete if word.is_none() => Decision::Release { counted: false },
                decision => decision,
            },
            _ => self.decide(response),
        }
    }

    fn decide(self, response: &Parts) -> Decision {
        match response.extensions.get::<Settle>() {
            Some(Settle::Complete) => return Decision::Complete,
            Some(Settle::Retry) => return Decision::Release { counted: true },
            Some(Settle::Fail) => return Decision::Fail,
            Some(Settle::NotRun) => return Decision::Release { counted: false },
            Some(Settle::Unknown) => return Decision::Unknown,
            None => {}
        }
        match response.status {
            _ if self == Self::KeepEverything => Decision::Complete,
            // A time limit inside of the layer drops the handler, which may have had its effect by
            // then; so may a server that the handler has called and that did not answer it.
            StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => Decision::Unknown,
            // These statuses do not concern the work, but the caller, the rate or the time.
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::CONFLICT
            | StatusCode::TOO_EARLY
            | StatusCode::TOO_MANY_REQUESTS => Decision::Release { counted: false },
            status if status.is_server_error() => Decision::Release { counted: true },
            _ => Decision::Complete,
        }
    }
}

#[cfg(test)]
mod tests {
    use ::http::Response;

    use super::*;

    fn decide(policy: Policy, status: u16, word: Option<Settle>) -> Decision {
        let mut response = Response::builder().status(status).body(()).unwrap();
        if let Some(word) = word {
            response.extensions_mut().insert(word);
        }
        policy.decide(&response.into_parts().0)
    }

    #[test]
    fn the_status_decides_unless_the_handler_does() {
        let free = Decision::Release { counted: false };
        let counted = Decision::Release { counted: true };
        for status in [200, 201, 204, 302, 400, 402, 404, 410, 413, 422, 451] {
            assert_eq!(
                decide(Policy::ByStatus, status, None),
                Decision::Complete,
                "{status}"
            );
        }
        for status in [401, 403, 409, 425, 429] {
            assert_eq!(decide(Policy::ByStatus, status, None), free, "{status}");
        }
        for status in [408, 504] {
            assert_eq!(
                decide(Policy::ByStatus, status, None),
                Decision::Unknown,
                "{status}"
            );
            assert_eq!(
                decide(Policy::KeepEverything, status, None),
                Decision::Complete,
                "{status}"
            );
            assert_eq!(
                decide(Policy::ByStatus, status, Some(Settle::Complete)),
                Decision::Complete
            );
            assert_eq!(
                decide(Policy::ByStatus, status, Some(Settle::Retry)),
                counted
            );
        }
        for status in [500, 502, 503, 599] {
            assert_eq!(decide(Policy::ByStatus, status, None), counted, "{status}");
            assert_eq!(
                decide(Policy::KeepEverything, status, None),
                Decision::Complete,
                "{status}"
            );
            assert_eq!(
                decide(Policy::ByStatus, status, Some(Settle::Complete)),
                Decision::Complete
            );
        }
        assert_eq!(
            decide(Policy::KeepEverything, 200, Some(Settle::Retry)),
            counted
        );
        assert_eq!(
            decide(Policy::ByStatus, 200, Some(Settle::Fail)),
            Decision::Fail
        );
        for policy in [Policy::ByStatus, Policy::KeepEverything] {
            assert_eq!(decide(policy, 502, Some(Settle::NotRun)), free);
            assert_eq!(
                decide(policy, 502, Some(Settle::Unknown)),
                Decision::Unknown
            );
        }
    }

    #[test]
    fn a_rule_says_which_statuses_are_kept() {
        let rule = Rule::new("POST", "/a")
            .unwrap()
            .keep(["2xx", "500"])
            .unwrap();
        let decide = |status: u16, word: Option<Settle>| {
            let mut response = Response::builder().status(status).body(()).unwrap();
            if let Some(word) = word {
                response.extensions_mut().insert(word);
            }
            Policy::ByStatus.decide_by(Some(&rule), &response.into_parts().0)
        };
        for (status, expected) in [
            (201, Decision::Complete),
            (500, Decision::Complete),
            (404, Decision::Release { counted: false }),
            (429, Decision::Release { counted: false }),
            (502, Decision::Release { counted: true }),
            (504, Decision::Unknown),
        ] {
            assert_eq!(decide(status, None), expected, "{status}");
        }
        assert_eq!(decide(200, Some(Settle::Unknown)), Decision::Unknown);
        assert_eq!(decide(404, Some(Settle::Complete)), Decision::Complete);
    }
}
