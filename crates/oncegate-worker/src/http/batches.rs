//! Batches over HTTP: many messages in one request, with an outcome for each.
//!
//! A batch is a JSON array of the objects that workers on standard streams get as lines, and the
//! answer is a JSON array of their answers.

use std::collections::HashMap;
use std::time::SystemTime;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Limited};
use tracing::warn;

use super::Caller;
use crate::protocol::answer::{self, ResponseBody};
use crate::protocol::call::{Call, Order};
use crate::protocol::reply::{BatchReply, Reply, WorkerResult};
use crate::protocol::request;
use crate::protocol::said::{self, LINE_MAX_BYTES};

impl Caller {
    /// Sends the batch and waits for the answer.
    pub(crate) async fn call_batch(&self, orders: &[Order], call: &Call) -> BatchReply {
        self.pacing.wait().await;
        let request = match request::of_batch(orders, self.way.uri(), &self.told) {
            Ok(request) => request,
            Err(error) => {
                return BatchReply::Whole(Reply::retry(format!("it makes no request: {error}")));
            }
        };
        let response = match self.send(request, call).await {
            Ok(response) => response,
            Err(reply) => return BatchReply::Whole(reply),
        };
        let (head, body) = response.into_parts();
        let most = usize::try_from(LINE_MAX_BYTES).unwrap_or(usize::MAX);
        let body = match Limited::new(body, most).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => {
                // The worker may have handled every message.
                let why = format!("the worker's answer to a batch cannot be read: {error}");
                return BatchReply::Whole(Reply::unknown(why));
            }
        };
        let now = SystemTime::now();
        self.pacing.note(answer::pause(&head, now));
        match answer::outcome(&head, ResponseBody::Whole(body.clone()), now) {
            Reply::Complete(_) => replies(&body, orders.len()),
            reply => BatchReply::Whole(reply),
        }
    }
}

/// The replies in the body of an answer to a batch. An empty body completes every message without a
/// result.
fn replies(body: &Bytes, messages: usize) -> BatchReply {
    if body.is_empty() {
        return BatchReply::Each(
            (0..messages)
                .map(|_| Reply::Complete(WorkerResult::Nothing))
                .collect(),
        );
    }
    let Some(answers) = said::answers(body) else {
        let why = "the worker's answer to a batch is no array of objects with `id` and `outcome`";
        return BatchReply::Whole(Reply::unknown(why));
    };
    let mut by_id: HashMap<String, Reply> = HashMap::new();
    for answer in answers {
        let id = answer.id.clone();
        if let Some(flaw) = answer.flaw {
            warn!(
                id,
                flaw, "a field of an answer to a batch is wrong; its default counts"
            );
        }
        // Also when the second outcome is the same: a worker that answers twice may have done the
        // work twice.
        if by_id.contains_key(&id) {
            warn!(
                id,
                "the worker's answer to a batch has two outcomes for a message; the first counts"
            );
            continue;
        }
        by_id.insert(id, answer.into());
    }
    let replies = (1..=messages).map(|number| {
        by_id.remove(&number.to_string()).unwrap_or_else(|| {
            Reply::unknown("the worker's answer to a batch has no outcome for this message")
        })
    });
    BatchReply::Each(replies.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replied(body: &'static str) -> BatchReply {
        replies(&Bytes::from_static(body.as_bytes()), 2)
    }

    #[test]
    fn an_answer_has_an_outcome_for_each_message_in_any_order() {
        let BatchReply::Each(replies) = replied(
            r#"[{"id":"2","outcome":"retry","delay_ms":7,"reason":"busy"},{"id":"1","outcome":"complete"}]"#,
        ) else {
            panic!("it is an answer to each")
        };
        assert!(
            matches!(
                &replies[..],
                [Reply::Complete(WorkerResult::Nothing), Reply::Retry { .. }]
            ),
            "{replies:?}"
        );
    }

    #[test]
    fn what_is_wrong_in_one_answer_costs_no_other() {
        let BatchReply::Each(replies) = replied(
            r#"[{"id":1,"outcome":"retry","delay_ms":"5","reason":[]},{"id":"2","outcome":"done"},7]"#,
        ) else {
            panic!("it is an answer to each")
        };
        assert!(
            matches!(
                &replies[..],
                [Reply::Retry { delay: None, .. }, Reply::Unknown { .. }]
            ),
            "{replies:?}"
        );
    }

    #[test]
    fn the_first_of_two_outcomes_counts() {
        let BatchReply::Each(replies) = replied(
            r#"[{"id":"1","outcome":"complete"},{"id":"1","outcome":"dead-letter"},{"id":"2","outcome":"later"}]"#,
        ) else {
            panic!("it is an answer to each")
        };
        assert!(
            matches!(&replies[..], [Reply::Complete(_), Reply::Later { .. }]),
            "{replies:?}"
        );
    }

    #[test]
    fn a_result_that_is_no_json_costs_only_the_result() {
        let BatchReply::Each(replies) = replied(
            r#"[{"id":"1","outcome":"complete","result":NaN},{"id":"2","outcome":"complete","result":1}]"#,
        ) else {
            panic!("it is an answer to each")
        };
        assert!(
            matches!(
                &replies[..],
                [
                    Reply::Complete(WorkerResult::NoJson),
                    Reply::Complete(WorkerResult::Result { .. })
                ]
            ),
            "{replies:?}"
        );
    }

    #[test]
    fn a_message_without_an_outcome_may_have_been_handled() {
        let BatchReply::Each(replies) = replied(r#"[{"id":"1","outcome":"complete"}]"#) else {
            panic!("it is an answer to each")
        };
        assert!(
            matches!(&replies[..], [Reply::Complete(_), Reply::Unknown { .. }]),
            "{replies:?}"
        );
        let BatchReply::Each(replies) = replied("") else {
            panic!("nothing completes all")
        };
        assert!(
            replies
                .iter()
                .all(|reply| matches!(reply, Reply::Complete(WorkerResult::Nothing)))
        );
        for wrong in ["{}", "[1]", r#"[{"id":"1"}]"#, "done"] {
            assert!(
                matches!(replied(wrong), BatchReply::Whole(Reply::Unknown { .. })),
                "{wrong}"
            );
        }
    }
}
