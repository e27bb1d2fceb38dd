//! The messages of a line: on their way to a process, in flight at it, and left by it.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::ahead::Lines;
use crate::protocol::call::{Call, Order};
use crate::protocol::reply::Reply;

/// The messages of one line, on their way to a worker.
pub(super) struct Job {
    pub(super) orders: Vec<(Order, oneshot::Sender<Reply>)>,
    /// The line is one for batches, even if there is one message.
    pub(super) is_batch: bool,
    pub(super) call: Call,
}

/// A message in flight at the process: until it is answered, cancelled or not.
pub(super) struct InFlight {
    /// The number of its line.
    pub(super) line: u64,
    pub(super) is_batch: bool,
    pub(super) order: Order,
    pub(super) call: Call,
    pub(super) reply: oneshot::Sender<Reply>,
}

/// Messages whose process is stopping or has ended.
pub(super) struct Unanswered {
    pub(super) messages: HashMap<String, InFlight>,
    pub(super) lines: Lines,
    pub(super) strays: VecDeque<Stray>,
}

/// A wrong answer. It is a mistake of the worker once its grace is over and no right answer has
/// come in its place.
pub(super) struct Stray {
    pub(super) at: Instant,
    /// The message that it means to answer, if it names one.
    pub(super) id: Option<String>,
    pub(super) why: String,
}

impl Unanswered {
    /// The wrong answers that one of these messages may have got.
    pub(super) fn mistakes(&self) -> impl Iterator<Item = &str> {
        self.strays
            .iter()
            .filter(|_| !self.messages.is_empty())
            .map(|stray| stray.why.as_str())
    }

    /// Ends the messages, once the process has ended: until then they may still be running. Returns
    /// those that it was sent ahead and has not begun.
    pub(super) fn give_up(self, worker: u32, why: &str) -> Vec<Job> {
        let mut waiting: Vec<(u64, Job)> = Vec::new();
        for message in self.messages.into_values() {
            if self.lines.waits(message.line) {
                let line = message.line;
                waiting.extend(message.back().map(|job| (line, job)));
                continue;
            }
            let reply = if message.call.has_begun() {
                Reply::unknown(format!("worker {worker} ended before it answered: {why}"))
            } else {
                Reply::not_run(format!(
                    "worker {worker} ended before it was given the message: {why}"
                ))
            };
            drop(message.reply.send(reply));
        }
        waiting.sort_by_key(|(line, _)| *line);
        waiting.into_iter().map(|(_, job)| job).collect()
    }
}

/// The consequence of an answer.
pub(super) enum Taken {
    /// A message has its outcome.
    Answer,
    /// The process has not begun these messages, and will not: they are for the next one.
    Back(Job),
    Nothing,
}

impl InFlight {
    /// The message for another process; `None`: it was withdrawn, and its handler is told that it
    /// has not run.
    pub(super) fn back(self) -> Option<Job> {
        // The others of a batch may have begun under the same call.
        if self.is_batch || !self.call.take_back() {
            let why = "the worker has not begun the message";
            drop(self.reply.send(Reply::not_run(why)));
            return None;
        }
        Some(Job {
            orders: vec![(self.order, self.reply)],
            is_batch: false,
            call: self.call,
        })
    }
}

impl Job {
    /// Tells the handlers of the messages that they have not run.
    pub(super) fn not_run(self, why: &str) {
        for (_, reply) in self.orders {
            drop(reply.send(Reply::not_run(why)));
        }
    }
}

/// Messages that a process was sent ahead and has not begun. They go before those of the queue.
#[derive(Default)]
pub(super) struct Returned {
    jobs: Mutex<VecDeque<Job>>,
    pushed: Notify,
}

impl Returned {
    pub(super) fn push(&self, job: Job) {
        self.jobs.lock().push_back(job);
        self.pushed.notify_one();
    }

    pub(super) async fn next(&self) -> Job {
        loop {
            let pushed = self.pushed.notified();
            if let Some(job) = self.jobs.lock().pop_front() {
                return job;
            }
            pushed.await;
        }
    }
}
