//! The messages in flight at one process of a worker.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use oncegate_runtime::Origin;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::protocol::call::{Call, Order};
use crate::protocol::lines::{
    Answer, BatchLine, HandleLine, LINE_MAX_BYTES, Line, Outgoing, shown,
};
use crate::protocol::reply::Reply;

/// The time without a first answer after which a log line describes the expected answer.
pub(super) const REMINDER: Duration = Duration::from_secs(5);

/// The messages of one line, on their way to a worker.
pub(super) struct Job {
    pub(super) orders: Vec<(Order, oneshot::Sender<Reply>)>,
    /// The line is one for batches, even if there is one message.
    pub(super) is_batch: bool,
    pub(super) call: Call,
}

/// A process, while its streams are open.
pub(super) struct Session {
    /// The worker's number.
    number: u32,
    lease: Duration,
    /// The time for which the process may leave a message unanswered after its `cancel`.
    grace: Duration,
    tell: mpsc::Sender<Outgoing>,
    pub(super) said: mpsc::Receiver<Line>,
    in_flight: HashMap<String, InFlight>,
    /// The number of messages of each line that are in flight.
    lines: HashMap<u64, usize>,
    /// Tasks that end with the ids of messages that were cancelled.
    pub(super) withdrawn: JoinSet<Vec<String>>,
    /// Cancelled messages, in the order in which their grace ends.
    cancelled: VecDeque<(Instant, String)>,
    next_id: u64,
    /// The time at which the reminder about the first answer is logged.
    remind_at: Option<Instant>,
    has_answered: bool,
    unknown_ids: u64,
    /// The number of lines that had nothing to do with the protocol.
    ignored: u64,
}

/// A message in flight at the process: until it is answered, cancelled or not.
struct InFlight {
    /// The number of its line.
    line: u64,
    origin: Origin,
    call: Call,
    reply: oneshot::Sender<Reply>,
}

/// Messages whose process is stopping or has ended.
pub(super) struct Unanswered(HashMap<String, InFlight>);

impl Session {
    pub(super) fn new(
        number: u32,
        lease: Duration,
        grace: Duration,
        tell: mpsc::Sender<Outgoing>,
        said: mpsc::Receiver<Line>,
    ) -> Self {
        Self {
            number,
            lease,
            grace,
            tell,
            said,
            in_flight: HashMap::new(),
            lines: HashMap::new(),
            withdrawn: JoinSet::new(),
            cancelled: VecDeque::new(),
            next_id: 0,
            remind_at: None,
            has_answered: false,
            unknown_ids: 0,
            ignored: 0,
        }
    }

    /// The number of lines, messages or batches, with messages in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.lines.len()
    }

    /// Gives the process a message or a batch.
    ///
    /// # Errors
    /// As text: why no more lines can be sent to it.
    pub(super) fn give(&mut self, job: Job) -> Result<(), String> {
        let Job {
            orders,
            is_batch,
            call,
        } = job;
        if call.is_withdrawn() {
            return Ok(());
        }
        let (orders, replies): (Vec<(Order, String)>, Vec<_>) = orders
            .into_iter()
            .map(|(order, reply)| ((order, self.new_id()), reply))
            .unzip();
        let line = match self.line(&orders, is_batch)? {
            Ok(line) => line,
            Err(too_long) => {
                for reply in replies {
                    drop(reply.send(too_long()));
                }
                return Ok(());
            }
        };
        let ids: Vec<String> = orders.iter().map(|(_, id)| id.clone()).collect();
        let number = self.next_id;
        self.lines.insert(number, ids.len());
        for ((order, id), reply) in orders.into_iter().zip(replies) {
            let origin = order.message.origin().clone();
            self.in_flight.insert(
                id,
                InFlight {
                    line: number,
                    origin,
                    call: call.clone(),
                    reply,
                },
            );
        }
        let withdrawn = call.clone();
        self.withdrawn.spawn(async move {
            withdrawn.withdrawn().await;
            ids
        });
        if !self.has_answered {
            self.remind_at
                .get_or_insert_with(|| Instant::now() + REMINDER);
        }
        self.write(Outgoing {
            line,
            call: Some(call),
        })
    }

    fn new_id(&mut self) -> String {
        self.next_id += 1;
        self.next_id.to_string()
    }

    /// The line of these messages, or what is replied to each when it is too long.
    fn line(
        &self,
        orders: &[(Order, String)],
        is_batch: bool,
    ) -> Result<Result<Vec<u8>, impl Fn() -> Reply + use<>>, String> {
        let line = match orders {
            [(order, id)] if !is_batch => {
                serde_json::to_vec(&HandleLine::of_order(order, id, self.lease))
            }
            orders => serde_json::to_vec(&BatchLine::of(orders, self.lease)),
        };
        let line =
            line.map_err(|error| format!("a message cannot be written as a line: {error}"))?;
        if line.len() as u64 <= LINE_MAX_BYTES {
            return Ok(Ok(line));
        }
        let is_lone = orders.len() == 1;
        let bytes = line.len();
        Ok(Err(move || {
            let reason = format!("as a line it has {bytes} bytes, more than {LINE_MAX_BYTES}");
            if is_lone {
                Reply::DeadLetter { reason }
            } else {
                Reply::TooLong { reason }
            }
        }))
    }

    /// Takes a message out of flight.
    fn remove(&mut self, id: &str) -> Option<InFlight> {
        let message = self.in_flight.remove(id)?;
        if let Some(left) = self.lines.get_mut(&message.line) {
            *left -= 1;
            if *left == 0 {
                self.lines.remove(&message.line);
            }
        }
        Some(message)
    }

    /// Cancels this message at the process, if the process was given the message.
    ///
    /// # Errors
    /// As text: why no line can be sent to it.
    pub(super) fn cancel(&mut self, id: String) -> Result<(), String> {
        match self.in_flight.get(&id) {
            // It is answered already.
            None => Ok(()),
            Some(message) if !message.call.has_begun() => {
                self.remove(&id);
                Ok(())
            }
            Some(_) => {
                let line = serde_json::json!({ "type": "cancel", "id": id })
                    .to_string()
                    .into_bytes();
                self.cancelled.push_back((Instant::now() + self.grace, id));
                self.write(Outgoing { line, call: None })
            }
        }
    }

    fn write(&self, line: Outgoing) -> Result<(), String> {
        self.tell
            .try_send(line)
            .map_err(|_| "it does not read its standard input".to_owned())
    }

    /// Takes an answer, also to a cancelled message, which is no longer in flight then. Returns
    /// whether the message is in flight; otherwise the answer is ignored, as is every one but the
    /// first.
    pub(super) fn answer(&mut self, answer: Answer, line: u64) -> bool {
        self.has_answered = true;
        self.remind_at = None;
        if let Some(message) = self.remove(&answer.id) {
            if answer.is_unreadable {
                let worker = self.number;
                let id = answer.id.as_str();
                warn!(
                    worker,
                    line, id, "the result of the message is no JSON; it is completed without it"
                );
            }
            drop(message.reply.send(answer.into()));
            return true;
        }
        self.unknown_ids += 1;
        // A worker with only wrong ids must not fill the log.
        if self.unknown_ids.is_power_of_two() {
            let worker = self.number;
            let id = shown(answer.id.as_bytes());
            let times = self.unknown_ids;
            warn!(
                worker,
                line,
                id,
                times,
                "the worker has answered a message that it does not have; `id` must be that of the message, and each is answered once"
            );
        }
        false
    }

    /// Takes a wrong answer to this message: what became of it is unknown. Returns whether the
    /// message is in flight.
    pub(super) fn spoil(&mut self, id: &str, why: &str) -> bool {
        let Some(message) = self.remove(id) else {
            return false;
        };
        self.has_answered = true;
        self.remind_at = None;
        warn!(
            worker = self.number,
            why, "the worker's answer is wrong; the outcome of the message is unknown"
        );
        drop(message.reply.send(Reply::unknown(format!(
            "the worker's answer is wrong: {why}"
        ))));
        true
    }

    /// Notes a line that has nothing to do with the protocol.
    pub(super) fn ignore(&mut self, why: &str) {
        self.ignored += 1;
        // A worker that prints for each message must not fill the log.
        if self.ignored.is_power_of_two() {
            let worker = self.number;
            let times = self.ignored;
            warn!(
                worker,
                why, times, "the worker writes to standard output what is no answer; it is ignored"
            );
        }
    }

    /// Returns when [`look`](Self::look) has something to do.
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.cancelled
            .front()
            .map(|(at, _)| *at)
            .into_iter()
            .chain(self.remind_at)
            .min()
    }

    /// Logs the reminder when it is due. `Err`: the process has not answered a message within the
    /// grace after its `cancel`.
    pub(super) fn look(&mut self) -> Result<(), String> {
        let now = Instant::now();
        while self.cancelled.front().is_some_and(|(at, _)| *at <= now)
            && let Some((_, id)) = self.cancelled.pop_front()
        {
            if let Some(message) = self.in_flight.get(&id) {
                let origin = &message.origin;
                let grace = self.grace;
                return Err(format!(
                    "it has not answered message {origin} (id {id:?}) within {grace:?} after the message was cancelled"
                ));
            }
        }
        if self.remind_at.is_some_and(|at| at <= now) {
            self.remind_at = None;
            info!(
                worker = self.number,
                "the worker has not answered its first message for {REMINDER:?}; an answer is one line, as {{\"id\":\"1\",\"outcome\":\"complete\"}}, and standard output must be flushed after it"
            );
        }
        Ok(())
    }

    /// Closes the input of the process after the lines written so far. Returns the unanswered
    /// messages.
    pub(super) fn close(self) -> Unanswered {
        Unanswered(self.in_flight)
    }
}

impl Unanswered {
    /// To be called once the process has ended: until then its messages may still be running.
    pub(super) fn give_up(self, worker: u32, why: &str) {
        for message in self.0.into_values() {
            let reply = if message.call.has_begun() {
                Reply::unknown(format!("worker {worker} ended before it answered: {why}"))
            } else {
                Reply::not_run(format!(
                    "worker {worker} ended before it was given the message: {why}"
                ))
            };
            drop(message.reply.send(reply));
        }
    }
}
