//! The messages in flight at one process of a worker.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use oncegate::Origin;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use super::exec::Job;
use super::lines::{Answer, LINE_MAX_BYTES, Line, Outgoing, Told, shown};
use super::worker::{Call, Reply};

/// The time without a first answer after which a log line describes the expected answer.
pub(super) const REMINDER: Duration = Duration::from_secs(5);

/// One process, while its streams are open.
pub(super) struct Session {
    /// The worker's number.
    number: u32,
    lease: Duration,
    /// How long the process may leave a message unanswered after its `cancel`.
    grace: Duration,
    tell: mpsc::Sender<Outgoing>,
    pub(super) said: mpsc::Receiver<Line>,
    in_flight: HashMap<String, InFlight>,
    /// Tasks that end with the id of a message that was cancelled.
    pub(super) withdrawn: JoinSet<String>,
    /// Cancelled messages, in the order in which their grace ends.
    cancelled: VecDeque<(Instant, String)>,
    next_id: u64,
    /// When the reminder about the first answer is logged.
    remind_at: Option<Instant>,
    has_answered: bool,
    unknown_ids: u64,
}

/// A message in flight at the process: until it is answered, cancelled or not.
struct InFlight {
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
            withdrawn: JoinSet::new(),
            cancelled: VecDeque::new(),
            next_id: 0,
            remind_at: None,
            has_answered: false,
            unknown_ids: 0,
        }
    }

    /// The number of messages in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Gives the process a message.
    ///
    /// # Errors
    /// As text: why no more lines can be sent to it.
    pub(super) fn give(&mut self, job: Job) -> Result<(), String> {
        let Job { message, attempt, call, reply } = job;
        if call.is_withdrawn() {
            return Ok(());
        }
        self.next_id += 1;
        let id = self.next_id.to_string();
        let line = match serde_json::to_vec(&Told::of(&message, &attempt, &id, self.lease)) {
            Ok(line) if line.len() as u64 <= LINE_MAX_BYTES => line,
            Ok(line) => {
                let reason = format!("as a line it has {} bytes, more than {LINE_MAX_BYTES}", line.len());
                drop(reply.send(Reply::DeadLetter { reason }));
                return Ok(());
            }
            Err(error) => return Err(format!("a message cannot be written as a line: {error}")),
        };
        let origin = message.origin().clone();
        self.in_flight.insert(id.clone(), InFlight { origin, call: call.clone(), reply });
        let (withdrawn, call_of_line) = (call.clone(), call);
        self.withdrawn.spawn(async move {
            withdrawn.withdrawn().await;
            id
        });
        if !self.has_answered {
            self.remind_at.get_or_insert_with(|| Instant::now() + REMINDER);
        }
        self.write(Outgoing { line, call: Some(call_of_line) })
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
                self.in_flight.remove(&id);
                Ok(())
            }
            Some(_) => {
                let line = serde_json::json!({ "type": "cancel", "id": id }).to_string().into_bytes();
                self.cancelled.push_back((Instant::now() + self.grace, id));
                self.write(Outgoing { line, call: None })
            }
        }
    }

    fn write(&self, line: Outgoing) -> Result<(), String> {
        self.tell.try_send(line).map_err(|_| "it does not read its standard input".to_owned())
    }

    /// Takes an answer, also to a cancelled message, which is no longer in flight then.
    pub(super) fn answer(&mut self, answer: Answer, line: u64) {
        (self.has_answered, self.remind_at) = (true, None);
        if let Some(message) = self.in_flight.remove(&answer.id) {
            drop(message.reply.send(answer.into()));
            return;
        }
        self.unknown_ids += 1;
        // A worker with only wrong ids must not fill the log.
        if self.unknown_ids.is_power_of_two() {
            let (worker, id, times) = (self.number, shown(answer.id.as_bytes()), self.unknown_ids);
            warn!(
                worker,
                line,
                id,
                times,
                "the worker has answered a message that it does not have; `id` must be that of the message, and each is answered once"
            );
        }
    }

    /// When [`look`](Self::look) has something to do.
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.cancelled.front().map(|(at, _)| *at).into_iter().chain(self.remind_at).min()
    }

    /// Logs the reminder when it is due. `Err`: the process has not answered a message within the grace after its
    /// `cancel`.
    pub(super) fn look(&mut self) -> Result<(), String> {
        let now = Instant::now();
        while self.cancelled.front().is_some_and(|(at, _)| *at <= now)
            && let Some((_, id)) = self.cancelled.pop_front()
        {
            if let Some(message) = self.in_flight.get(&id) {
                let (origin, grace) = (&message.origin, self.grace);
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

    /// Closes the input of the process after the lines written so far. Returns the unanswered messages.
    pub(super) fn close(self) -> Unanswered {
        Unanswered(self.in_flight)
    }
}

impl Unanswered {
    /// To be called once the process has ended: until then its messages may still be running.
    pub(super) fn give_up(self, worker: u32, why: &str) {
        for message in self.0.into_values() {
            let reply = match message.call.has_begun() {
                true => Reply::unknown(format!("worker {worker} ended before it answered: {why}")),
                false => {
                    Reply::not_run(format!("worker {worker} ended before it was given the message: {why}"))
                }
            };
            drop(message.reply.send(reply));
        }
    }
}
