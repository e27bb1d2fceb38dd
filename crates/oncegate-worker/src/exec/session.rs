//! The messages in flight at one process of a worker.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use super::ahead::Lines;
use super::job::{InFlight, Job, Stray, Taken, Unanswered};
use crate::protocol::call::Order;
use crate::protocol::lines::{BatchLine, HandleLine, Outgoing};
use crate::protocol::reply::Reply;
use crate::protocol::said::{Answer, LINE_MAX_BYTES, shown};
use crate::protocol::values::{Finder, Written};

/// The time without a first answer after which a log line describes the expected answer.
pub(super) const REMINDER: Duration = Duration::from_secs(5);

/// The time after a wrong answer within which a right one shows that it was none, but a line that
/// looks like one.
const STRAY_GRACE: Duration = Duration::from_secs(2);
/// The most wrong answers that are remembered.
const STRAYS_MOST: usize = 64;
/// The ids of a process begin at a random number of twelve digits, so that nothing that a worker
/// writes for other reasons has the id of a message by chance.
const FIRST_ID: std::ops::Range<u64> = 100_000_000_000..900_000_000_000;

/// A process, while its streams are open.
pub(super) struct Session {
    /// The worker's number.
    number: u32,
    lease: Duration,
    /// The time for which the process may leave a message unanswered after its `cancel`.
    grace: Duration,
    /// `None` once its input is closed.
    tell: Option<mpsc::Sender<Outgoing>>,
    /// The parts of its output.
    pub(super) said: mpsc::Receiver<Vec<u8>>,
    finder: Finder,
    /// The findings in its output that were not dealt with.
    pub(super) written: VecDeque<Written>,
    in_flight: HashMap<String, InFlight>,
    /// The ids of the messages of each line that are in flight.
    ids: HashMap<u64, Vec<String>>,
    lines: Lines,
    /// Tasks that end with the ids of messages that were cancelled.
    pub(super) withdrawn: JoinSet<Vec<String>>,
    /// Cancelled messages, in the order in which their grace ends.
    cancelled: VecDeque<(Instant, String)>,
    first_id: u64,
    next_id: u64,
    /// Wrong answers that may have been none, in their order.
    strays: VecDeque<Stray>,
    /// The time at which the reminder about the first answer is logged.
    remind_at: Option<Instant>,
    has_answered: bool,
    repeated: u64,
    flawed: u64,
    /// The number of lines that had nothing to do with the protocol.
    ignored: u64,
}

impl Session {
    pub(super) fn new(
        number: u32,
        lease: Duration,
        grace: Duration,
        tell: mpsc::Sender<Outgoing>,
        said: mpsc::Receiver<Vec<u8>>,
    ) -> Self {
        let first_id = fastrand::u64(FIRST_ID);
        Self {
            number,
            lease,
            grace,
            tell: Some(tell),
            said,
            finder: Finder::default(),
            written: VecDeque::new(),
            in_flight: HashMap::new(),
            ids: HashMap::new(),
            lines: Lines::default(),
            withdrawn: JoinSet::new(),
            cancelled: VecDeque::new(),
            first_id,
            next_id: first_id,
            strays: VecDeque::new(),
            remind_at: None,
            has_answered: false,
            repeated: 0,
            flawed: 0,
            ignored: 0,
        }
    }

    /// Begins to give it lines.
    pub(super) fn begin(&mut self, lines: Lines) {
        self.lines = lines;
    }

    /// Returns whether it takes another line, a message or a batch, now.
    pub(super) fn has_room(&self) -> bool {
        self.lines.has_room()
    }

    /// Lets nothing more begin at the process, because the consumer stops.
    pub(super) fn rest(&mut self) {
        self.lines.rest();
    }

    pub(super) fn rests(&self) -> bool {
        self.lines.rests()
    }

    /// Takes a part of its output, or its end. Returns whether it goes on.
    pub(super) fn read(&mut self, chunk: Option<Vec<u8>>) -> bool {
        let in_flight = &self.in_flight;
        let known = &|id: &str| in_flight.contains_key(id);
        self.written.extend(match &chunk {
            Some(chunk) => self.finder.take(chunk, known),
            None => self.finder.end(known),
        });
        chunk.is_some()
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
        self.ids.insert(number, ids.clone());
        self.lines.sent(number, Instant::now());
        for ((order, id), reply) in orders.into_iter().zip(replies) {
            self.in_flight.insert(
                id,
                InFlight {
                    line: number,
                    is_batch,
                    order,
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
        if let Some(left) = self.ids.get_mut(&message.line) {
            left.retain(|other| other != id);
            if left.is_empty() {
                self.ids.remove(&message.line);
                self.lines.over(message.line, Instant::now());
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

    /// Recalls the lines that have waited in the process for too long, unless it has begun them.
    ///
    /// # Errors
    /// As text: why no line can be sent to it.
    pub(super) fn recall(&mut self) -> Result<(), String> {
        while let Some(line) = self.lines.overdue(Instant::now()) {
            for id in self.ids.get(&line).into_iter().flatten() {
                let line = serde_json::json!({ "type": "recall", "id": id });
                let line = line.to_string().into_bytes();
                self.write(Outgoing { line, call: None })?;
            }
        }
        Ok(())
    }

    fn write(&self, line: Outgoing) -> Result<(), String> {
        let sent = self.tell.as_ref().map(|tell| tell.try_send(line));
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err("it does not read its standard input".to_owned()),
        }
    }

    /// Takes an answer, also to a cancelled message, which is no longer in flight then. An answer
    /// to no message in flight is ignored if the message is answered already, as every one but the
    /// first is; an answer to another message is a wrong one.
    pub(super) fn answer(&mut self, answer: Answer, line: u64) -> Taken {
        let given = self.in_flight.get(&answer.id);
        if given.is_some_and(|message| self.lines.waits(message.line)) && !answer.is_not_run() {
            // It begins lines in another order than it promises.
            self.lines.doubt();
        }
        let Some(message) = self.remove(&answer.id) else {
            self.answered_other(&answer.id, line);
            return Taken::Nothing;
        };
        if answer.is_not_run() {
            return match message.back() {
                Some(job) if !self.lines.rests() => Taken::Back(job),
                Some(job) => {
                    job.not_run("the consumer stops");
                    Taken::Nothing
                }
                None => Taken::Nothing,
            };
        }
        self.has_answered = true;
        self.remind_at = None;
        // What was wrong before it was not meant as the answer.
        let stray = self.stray_of(Some(&answer.id));
        if let Some(place) = stray.or_else(|| self.stray_of(None)) {
            self.strays.remove(place);
        }
        self.warn_of_fields(&answer, line);
        drop(message.reply.send(answer.into()));
        Taken::Answer
    }

    /// The place of the first wrong answer to this message, or to none.
    fn stray_of(&self, id: Option<&str>) -> Option<usize> {
        self.strays
            .iter()
            .position(|stray| stray.id.as_deref() == id)
    }

    /// Takes an answer to no message in flight.
    fn answered_other(&mut self, id: &str, line: u64) {
        let was_given = self.was_given(id);
        let id = shown(id.as_bytes());
        if !was_given {
            let why = format!(
                "line {line} of its standard output answers {id:?}, which it was not given; `id` must be that of the message"
            );
            return self.stray(None, why);
        }
        self.repeated += 1;
        // A worker that answers everything twice must not fill the log.
        if self.repeated.is_power_of_two() {
            warn!(
                worker = self.number,
                line,
                id,
                times = self.repeated,
                "the worker has answered a message again; the first answer counts"
            );
        }
    }

    /// Logs what is wrong in an answer that counts.
    fn warn_of_fields(&mut self, answer: &Answer, line: u64) {
        let worker = self.number;
        let id = answer.id.as_str();
        if answer.is_unreadable {
            warn!(
                worker,
                line, id, "the result of the message is no JSON; it is completed without it"
            );
        }
        if let Some(flaw) = answer.flaw {
            self.flawed += 1;
            let times = self.flawed;
            if times.is_power_of_two() {
                warn!(
                    worker,
                    line,
                    id,
                    flaw,
                    times,
                    "a field of the worker's answer is wrong; its default counts"
                );
            }
        }
    }

    /// Returns whether the process was given a message with this id.
    fn was_given(&self, id: &str) -> bool {
        id.parse()
            .is_ok_and(|id: u64| id > self.first_id && id <= self.next_id)
    }

    /// Notes a wrong answer, to this message if it names one. With nothing in flight it is none.
    pub(super) fn stray(&mut self, id: Option<String>, why: String) {
        self.lines.doubt();
        warn!(
            worker = self.number,
            why, "the worker's answer is wrong, unless a right one follows"
        );
        if !self.in_flight.is_empty() && self.strays.len() < STRAYS_MOST {
            let at = Instant::now() + STRAY_GRACE;
            self.strays.push_back(Stray { at, id, why });
        }
    }

    /// Takes a wrong answer whose grace is over, if a message in flight may be the one that it
    /// means.
    pub(super) fn overdue_stray(&mut self) -> Option<Stray> {
        let now = Instant::now();
        while self.strays.front().is_some_and(|stray| stray.at <= now)
            && let Some(stray) = self.strays.pop_front()
        {
            let is_open = match &stray.id {
                Some(id) => self.in_flight.contains_key(id),
                None => !self.in_flight.is_empty(),
            };
            if is_open {
                return Some(stray);
            }
        }
        None
    }

    /// Takes a wrong answer for that to this message: what became of it is unknown.
    pub(super) fn spoil(&mut self, id: &str, why: &str) {
        let Some(message) = self.remove(id) else {
            return;
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
    }

    /// Notes a line that has nothing to do with the protocol.
    pub(super) fn ignore(&mut self, why: &str) {
        // It may be what is left of an answer.
        self.lines.doubt();
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
            .chain(self.strays.front().map(|stray| stray.at))
            .chain(self.lines.overdue_at())
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
                let origin = message.order.message.origin();
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

    /// Closes the input of the process after the lines written so far.
    pub(super) fn close_input(&mut self) {
        self.tell = None;
    }

    /// Notes that an answer may have been missed.
    pub(super) fn doubt(&mut self) {
        self.lines.doubt();
    }

    /// Returns the messages that the process has not answered.
    pub(super) fn close(self) -> Unanswered {
        Unanswered {
            messages: self.in_flight,
            lines: self.lines,
            strays: self.strays,
        }
    }
}
