//! Batches for a worker: many messages in one request or one line, with an outcome for each.
//!
//! Over HTTP, a batch is a JSON array of the objects that workers on standard streams get as lines,
//! and the answer is a JSON array of their answers. On standard streams, a batch is one line with
//! all of them, and each answer is recorded when it comes.

use std::collections::HashMap;
use std::time::SystemTime;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited as LimitedBody};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request};
use oncegate::{BatchHandler, BatchMessage, Failure};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::answer::{self, ResponseBody};
use super::http::Caller;
use super::job::Order;
use super::lines::{self, HandleLine, LINE_MAX_BYTES};
use super::worker::{AttemptInfo, Call, Limited, Reply, WithdrawOnDrop, Work, Worker};

/// The reply of a worker to a batch.
#[derive(Debug)]
pub(super) enum BatchReply {
    /// A reply to each message, in the order of the batch.
    Each(Vec<Reply>),
    /// A reply to the batch as a whole.
    Whole(Reply),
}

impl BatchHandler for Limited {
    type Output = Work;

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<Work, Failure>>, Failure> {
        batch
            .iter()
            .try_for_each(|one| self.begin(one.message(), one.attempt()))?;
        let mut delivered = Vec::with_capacity(batch.len());
        for one in batch {
            delivered.push(self.delivered(one.message()).await);
        }
        if delivered.iter().any(Result::is_err) {
            return Ok(delivered
                .into_iter()
                .map(|message| {
                    Err(message.err().unwrap_or_else(|| {
                        Failure::not_run("another message of its batch has no document")
                    }))
                })
                .collect());
        }
        let delivered = delivered.into_iter().flatten();
        let attempts = batch.iter().map(|one| AttemptInfo::of(one.attempt()));
        let orders = delivered
            .zip(attempts)
            .map(|(message, attempt)| Order { message, attempt })
            .collect();
        match self.call_batch(batch, orders).await {
            BatchReply::Each(replies) => Ok(replies
                .into_iter()
                .map(|reply| self.outcome(reply))
                .collect()),
            BatchReply::Whole(reply) => {
                // Nothing but a failure concerns the batch as a whole.
                self.outcome(reply).map(|_| Vec::new())
            }
        }
    }
}

impl Limited {
    /// Waits for the worker's answer to the batch, within the limits.
    async fn call_batch(&self, batch: &[BatchMessage], orders: Vec<Order>) -> BatchReply {
        let call = Call::default();
        let _withdrawn = WithdrawOnDrop(call.clone());
        let answered: Vec<CancellationToken> =
            batch.iter().map(|_| CancellationToken::new()).collect();
        let work = async {
            match &*self.worker {
                Worker::Http(caller) => caller.call_batch(&orders, &call).await,
                Worker::Exec(crew) => {
                    crew.hand_out_batch(orders, &call, |place, reply| {
                        self.answer_early(batch, &answered, place, reply);
                    })
                    .await
                }
                Worker::Command(_) => {
                    BatchReply::Whole(Reply::not_run("a command takes no batches: remove `batch`"))
                }
            }
        };
        // Those that are answered need no cancellation.
        let discarded = async {
            for (one, answered) in batch.iter().zip(&answered) {
                tokio::select! {
                    () = one.attempt().discarded() => {}
                    () = answered.cancelled() => {}
                }
            }
        };
        let mut work = std::pin::pin!(work);
        let why = tokio::select! {
            biased;
            reply = &mut work => return reply,
            () = discarded => "the run was cancelled".to_owned(),
            why = self.too_late(&call) => why,
        };
        if !call.withdraw() {
            return BatchReply::Whole(Reply::not_run(format!(
                "{why} before the worker had the batch"
            )));
        }
        // As for a single message: the batch keeps its permit until the worker has answered, or was
        // replaced.
        if let Worker::Exec(_) = &*self.worker {
            drop(work.await);
        }
        BatchReply::Whole(Reply::unknown(why))
    }

    /// Ends a message whose outcome the worker has said before those of the others.
    fn answer_early(
        &self,
        batch: &[BatchMessage],
        answered: &[CancellationToken],
        place: usize,
        reply: Reply,
    ) {
        if let (Some(one), Some(answered)) = (batch.get(place), answered.get(place)) {
            one.answer(self.outcome(reply));
            answered.cancel();
        }
    }
}

impl Caller {
    /// Sends the batch and waits for the answer.
    async fn call_batch(&self, orders: &[Order], call: &Call) -> BatchReply {
        self.pacing.wait().await;
        let request = match self.batch_request(orders) {
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
        let body = match LimitedBody::new(body, most).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => {
                // The worker may have handled every message.
                let why = format!("the worker's answer to a batch cannot be read: {error}");
                return BatchReply::Whole(Reply::unknown(why));
            }
        };
        let reply = answer::outcome(&head, ResponseBody::Whole(body.clone()), SystemTime::now());
        self.pacing.note(head.status, &reply);
        match reply {
            Reply::Complete(_) => replies(&body, orders.len()),
            reply => BatchReply::Whole(reply),
        }
    }

    /// The request for a batch: the messages are a JSON array, numbered from 1.
    fn batch_request(&self, orders: &[Order]) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        let ids: Vec<String> = (1..=orders.len())
            .map(|number| number.to_string())
            .collect();
        let lease = self.told.lease();
        let numbered = orders.iter().zip(&ids);
        let lines: Vec<HandleLine<'_>> = numbered
            .map(|(order, id)| HandleLine::of_order(order, id, lease))
            .collect();
        // Strings, numbers and JSON values cannot fail to be written as JSON.
        let body = serde_json::to_vec(&lines).unwrap_or_default();
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(self.way.uri())
            .header(CONTENT_TYPE, "application/json")
            .header("oncegate-batch", orders.len())
            .header("oncegate-lease", self.told.lease_ms.to_string());
        if let Some(token) = &self.told.token {
            request = request.header(AUTHORIZATION, token.header());
        }
        request.body(Full::new(Bytes::from(body)))
    }
}

/// The replies in the body of an answer to a batch. An empty body completes every message without a
/// result.
fn replies(body: &Bytes, messages: usize) -> BatchReply {
    if body.is_empty() {
        return BatchReply::Each(
            (0..messages)
                .map(|_| Reply::Complete(Work::Nothing))
                .collect(),
        );
    }
    let Some(answers) = lines::answers(body) else {
        let why = "the worker's answer to a batch is no array of objects with `id` and `outcome`";
        return BatchReply::Whole(Reply::unknown(why));
    };
    let mut by_id: HashMap<String, Reply> = HashMap::new();
    for answer in answers {
        let id = answer.id.clone();
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
                [Reply::Complete(Work::Nothing), Reply::Retry { .. }]
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
                    Reply::Complete(Work::NoJson),
                    Reply::Complete(Work::Result { .. })
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
                .all(|reply| matches!(reply, Reply::Complete(Work::Nothing)))
        );
        for wrong in ["{}", "[1]", r#"[{"id":1,"outcome":"complete"}]"#, "done"] {
            assert!(
                matches!(replied(wrong), BatchReply::Whole(Reply::Unknown { .. })),
                "{wrong}"
            );
        }
    }
}
