//! Maps an HTTP response to an outcome, by the table of `docs/RUN.md`.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hyper::http::response::Parts;
use hyper::{HeaderMap, StatusCode, header};
use serde::Deserialize;

use super::reply::{Reply, WorkerResult};

/// The outcome header, which overrides the status.
const OUTCOME: &str = "oncegate-outcome";

/// The body of a response, as far as it was received.
#[derive(Debug)]
pub(crate) enum ResponseBody {
    Whole(Bytes),
    TooLarge {
        most: usize,
    },
    /// The connection ended before the body did.
    CutShort(String),
}

/// Returns the worker's reply. `now` is needed for a `Retry-After` that is a date.
pub(crate) fn outcome(head: &Parts, body: ResponseBody, now: SystemTime) -> Reply {
    let said = head
        .headers
        .get(OUTCOME)
        .map(|value| value.to_str().unwrap_or_default().trim().to_lowercase());
    let meaning = match said.as_deref() {
        None if is_of_a_gateway(head.status) => {
            let words = words(head, &body);
            return Reply::unknown(format!(
                "{words} (a gateway may have said so; a worker that means it adds Oncegate-Outcome: retry)"
            ));
        }
        None => Meaning::of(head.status),
        Some("complete") => Meaning::Complete,
        Some("retry") => Meaning::Retry,
        Some("later") => Meaning::Later,
        Some("dead-letter") => Meaning::DeadLetter,
        Some(_) => {
            return Reply::unknown(
                "the worker's oncegate-outcome is not one of complete, retry, later and dead-letter",
            );
        }
    };
    match (meaning, body) {
        // An incomplete answer may have been any answer.
        (_, ResponseBody::CutShort(why)) => Reply::unknown(format!(
            "the worker's answer ({}) was cut short: {why}",
            head.status
        )),
        (Meaning::Complete, ResponseBody::Whole(body)) => {
            Reply::Complete(WorkerResult::of_bytes(content_type(&head.headers), body))
        }
        (Meaning::Complete, ResponseBody::TooLarge { most }) => {
            Reply::Complete(WorkerResult::TooLarge { most })
        }
        (Meaning::Retry, body) => Reply::Retry {
            delay: retry_after(&head.headers, now),
            reason: words(head, &body),
        },
        (Meaning::Later, body) => Reply::Later {
            delay: retry_after(&head.headers, now),
            reason: words(head, &body),
        },
        (Meaning::DeadLetter, body) => Reply::DeadLetter {
            reason: words(head, &body),
        },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    Complete,
    Retry,
    /// No status means this: a worker must say it, because nothing limits how often a message is
    /// wanted later.
    Later,
    DeadLetter,
}

/// Returns whether this status is usually that of a proxy or load balancer, which may have given
/// the request to the worker before: 408 and 502 to 504, and what some of them say beside these.
fn is_of_a_gateway(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 502..=504 | 520..=530 | 598 | 599)
}

/// Returns how long the service wants to be left alone: the `Retry-After` of a 503, also of a
/// gateway's.
pub(crate) fn pause(head: &Parts, now: SystemTime) -> Option<Duration> {
    (head.status == StatusCode::SERVICE_UNAVAILABLE)
        .then(|| retry_after(&head.headers, now))
        .flatten()
}

impl Meaning {
    /// The meaning of a status that is the worker's own.
    fn of(status: StatusCode) -> Self {
        match status.as_u16() {
            200..=299 => Self::Complete,
            // The worker is at fault, or busy.
            408 | 409 | 423 | 425 | 429 | 500.. => Self::Retry,
            // The endpoint is wrong, not the message: otherwise all messages would become dead
            // letters.
            401 | 403 | 404 | 405 | 407 | ..=199 | 300..=399 => Self::Retry,
            400..=499 => Self::DeadLetter,
        }
    }
}

fn content_type(headers: &HeaderMap) -> Option<String> {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned)
}

/// Parses `Retry-After`: seconds, or a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => Some(
            httpdate::parse_http_date(text)
                .ok()?
                .duration_since(now)
                .unwrap_or_default(),
        ),
    }
}

/// Problem details of RFC 9457.
#[derive(Deserialize)]
struct ProblemDetails {
    title: Option<String>,
    detail: Option<String>,
}

/// The reason as the worker gives it.
fn words(head: &Parts, body: &ResponseBody) -> String {
    let status = head.status;
    let ResponseBody::Whole(body) = body else {
        return format!("the worker answers {status}");
    };
    let is_problem = content_type(&head.headers)
        .is_some_and(|name| name.starts_with("application/problem+json"));
    let problem = if is_problem {
        serde_json::from_slice::<ProblemDetails>(body).ok()
    } else {
        None
    };
    let said = match problem {
        Some(ProblemDetails {
            title: Some(title),
            detail: Some(detail),
        }) => format!("{title}: {detail}"),
        Some(
            ProblemDetails {
                title: Some(words), ..
            }
            | ProblemDetails {
                detail: Some(words),
                ..
            },
        ) => words,
        _ => String::from_utf8_lossy(body.get(..body.len().min(1024)).unwrap_or_default())
            .trim()
            .to_owned(),
    };
    if said.is_empty() {
        format!("the worker answers {status}")
    } else {
        format!("the worker answers {status}: {said}")
    }
}

#[cfg(test)]
mod tests {
    use hyper::Response;

    use super::*;

    fn answered(status: u16, headers: &[(&str, &str)], body: &'static str) -> Reply {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        let (head, ()) = response.body(()).unwrap().into_parts();
        outcome(
            &head,
            ResponseBody::Whole(Bytes::from_static(body.as_bytes())),
            SystemTime::UNIX_EPOCH,
        )
    }

    #[test]
    fn a_status_means_what_the_documentation_says() {
        for status in [200, 201, 204, 299] {
            assert!(
                matches!(answered(status, &[], ""), Reply::Complete(_)),
                "{status}"
            );
        }
        let retried = [
            409, 423, 425, 429, 500, 501, 505, 507, 401, 403, 404, 405, 407, 301, 302, 307, 308,
        ];
        for status in retried {
            assert!(
                matches!(answered(status, &[], ""), Reply::Retry { delay: None, .. }),
                "{status}"
            );
        }
        for status in [400, 402, 406, 410, 413, 415, 418, 422, 451] {
            assert!(
                matches!(answered(status, &[], ""), Reply::DeadLetter { .. }),
                "{status}"
            );
        }
    }

    #[test]
    fn a_gateway_does_not_know_what_the_worker_has_done() {
        for status in [408, 502, 503, 504, 520, 524, 527, 530, 598, 599] {
            let Reply::Unknown { reason } = answered(status, &[("retry-after", "7")], "") else {
                panic!("{status} is the gateway's")
            };
            assert!(reason.contains(&status.to_string()), "{reason}");
            let reply = answered(status, &[("oncegate-outcome", "retry")], "");
            assert!(matches!(reply, Reply::Retry { .. }), "{status}: {reply:?}");
        }
    }

    fn said(outcome: &str) -> Reply {
        answered(200, &[("oncegate-outcome", outcome)], "")
    }

    fn delay(retry_after: &str) -> Option<Duration> {
        match answered(429, &[("retry-after", retry_after)], "") {
            Reply::Retry { delay, .. } => delay,
            other => panic!("{other:?}"),
        }
    }

    fn reason(headers: &[(&str, &str)], body: &'static str) -> String {
        match answered(422, headers, body) {
            Reply::DeadLetter { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn its_own_word_wins_over_the_status() {
        assert!(matches!(said("retry"), Reply::Retry { .. }));
        assert!(matches!(said("Dead-Letter"), Reply::DeadLetter { .. }));
        assert!(matches!(said("later"), Reply::Later { delay: None, .. }));
        assert!(matches!(said("done"), Reply::Unknown { .. }));
        assert!(matches!(
            answered(500, &[("oncegate-outcome", "complete")], ""),
            Reply::Complete(_)
        ));
    }

    #[test]
    fn it_may_ask_for_time_in_seconds_or_by_a_date() {
        assert_eq!(delay("7"), Some(Duration::from_secs(7)));
        assert_eq!(
            delay("Thu, 01 Jan 1970 00:01:00 GMT"),
            Some(Duration::from_secs(60))
        );
        assert_eq!(delay("soon"), None);
        let later = answered(
            200,
            &[("oncegate-outcome", "later"), ("retry-after", "600")],
            "",
        );
        assert!(
            matches!(later, Reply::Later { delay: Some(delay), .. } if delay == Duration::from_secs(600))
        );
    }

    #[test]
    fn a_reason_is_in_the_workers_words() {
        let problem = &[("content-type", "application/problem+json")];
        assert_eq!(
            reason(
                problem,
                r#"{"title":"No such order","detail":"it is 7","status":422}"#
            ),
            "the worker answers 422 Unprocessable Entity: No such order: it is 7"
        );
        assert_eq!(
            reason(problem, "{"),
            "the worker answers 422 Unprocessable Entity: {"
        );
        assert_eq!(
            reason(&[], ""),
            "the worker answers 422 Unprocessable Entity"
        );
    }

    #[test]
    fn half_an_answer_is_no_answer() {
        for status in [200, 422, 500] {
            let (head, ()) = Response::builder()
                .status(status)
                .body(())
                .unwrap()
                .into_parts();
            let reply = outcome(
                &head,
                ResponseBody::CutShort("reset".to_owned()),
                SystemTime::UNIX_EPOCH,
            );
            assert!(matches!(reply, Reply::Unknown { .. }), "{status}");
        }
    }
}
