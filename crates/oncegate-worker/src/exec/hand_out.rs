//! Hands messages to the workers of a crew, and waits for their replies.

use std::future::Future;
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use oncegate_runtime::Message;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::Workers;
use super::job::Job;
use super::violations::Violations;
use crate::protocol::call::{AttemptInfo, Call, Order};
use crate::protocol::reply::{BatchReply, Reply};

impl Workers {
    /// Gives the message to the next worker below its limit, and waits for the answer.
    ///
    /// A call that is withdrawn after it has begun resolves when the worker has answered, or was
    /// replaced.
    pub(crate) async fn hand_out(
        &self,
        message: &Message,
        attempt: &AttemptInfo,
        call: &Call,
    ) -> Reply {
        let order = Order {
            message: message.clone(),
            attempt: attempt.clone(),
        };
        let mut reply = Reply::not_run("the workers have been stopped");
        let mut answers = self.hand_out_all(vec![order], false, call).await;
        while let Some((_, answer)) = answers.next().await {
            reply = answer;
        }
        reply
    }

    /// Gives the batch to the next worker below its limit, and waits for the answers to all its
    /// messages. Each answer is given to `answered` when it comes, with the place of its message,
    /// until the call is withdrawn; what is returned for that message means nothing.
    pub(crate) async fn hand_out_batch(
        &self,
        orders: Vec<Order>,
        call: &Call,
        answered: impl Fn(usize, Reply),
    ) -> BatchReply {
        let mut replies: Vec<Reply> = orders
            .iter()
            .map(|_| Reply::unknown("the message is answered already"))
            .collect();
        let mut answers = self.hand_out_all(orders, true, call).await;
        while let Some((place, reply)) = answers.next().await {
            if matches!(reply, Reply::TooLong { .. }) {
                return BatchReply::Whole(reply);
            }
            if reply.is_answer() && !call.is_withdrawn() {
                answered(place, reply);
            } else if let Some(unanswered) = replies.get_mut(place) {
                *unanswered = reply;
            }
        }
        BatchReply::Each(replies)
    }

    /// Gives the messages to a worker. Returns their replies as they come, each with the place of
    /// its message.
    async fn hand_out_all(
        &self,
        orders: Vec<Order>,
        is_batch: bool,
        call: &Call,
    ) -> FuturesUnordered<impl Future<Output = (usize, Reply)> + use<>> {
        let mut jobs = Vec::with_capacity(orders.len());
        let mut answers = Vec::with_capacity(orders.len());
        for order in orders {
            let (reply, answer) = oneshot::channel();
            jobs.push((order, reply));
            answers.push(answer);
        }
        let job = Job {
            orders: jobs,
            is_batch,
            call: call.clone(),
        };
        let are_stopped = tokio::select! {
            biased;
            () = self.unfit() => true,
            () = self.rest.cancelled() => true,
            sent = self.jobs.send(job) => sent.is_err(),
        };
        let each = answers.into_iter().enumerate();
        each.map(|(place, answer)| {
            let waiting = Waiting {
                answer,
                call: call.clone(),
                violations: Arc::clone(&self.violations),
                rest: self.rest.clone(),
            };
            waiting.reply(place, are_stopped)
        })
        .collect()
    }
}

/// A message that was handed out.
struct Waiting {
    answer: oneshot::Receiver<Reply>,
    call: Call,
    violations: Arc<Violations>,
    rest: CancellationToken,
}

impl Waiting {
    /// Waits for the reply, unless no worker takes a message any more.
    async fn reply(mut self, place: usize, are_stopped: bool) -> (usize, Reply) {
        let answer = tokio::select! {
            biased;
            answer = &mut self.answer => answer.ok(),
            () = forestalled(&self.violations, &self.rest, &self.call) => None,
        };
        let reply = match answer {
            Some(reply) => reply,
            None if are_stopped => Reply::not_run("the workers have been stopped"),
            None if self.call.has_begun() => Reply::unknown("the worker ended before it answered"),
            None => Reply::not_run("the worker ended before it was given the message"),
        };
        (place, reply)
    }
}

/// Resolves when the consumer stops, or must stop because of its workers, and the call has not
/// begun.
async fn forestalled(violations: &Violations, rest: &CancellationToken, call: &Call) {
    tokio::select! {
        () = violations.too_many() => {}
        () = rest.cancelled() => {}
    }
    if !call.forestall() {
        std::future::pending::<()>().await;
    }
}
