//! The poll thread: it owns the consumer and polls it in every state.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::BorrowedMessage;

use super::assignment::Assignment;
use super::buffer::{End, Fetched};
use super::convert::{self, Routes};
use super::member::{Context, Member, list_of};
use crate::observe::Event;

/// How many messages go to the buffer at once, at the most.
const BATCH_MAX: usize = 256;

/// How long a poll waits when nothing comes; a leave is noticed after this long at the latest.
const IDLE_POLL: Duration = Duration::from_millis(100);

/// The same while everything is paused: then nobody wakes us when there is room again.
const PAUSED_POLL: Duration = Duration::from_millis(20);

/// How long to wait for room, without polling, before the partitions are paused. Pausing throws away what
/// was prefetched, so it has to be worth it.
const ROOM_PATIENCE: Duration = Duration::from_millis(250);

/// How often a leave polls for its last callbacks.
const LEAVE_POLL: Duration = Duration::from_millis(20);

/// The state of the poll thread.
pub(crate) struct Poller {
    consumer: Arc<BaseConsumer<Context>>,
    member: Arc<Member>,
    span_max: usize,
    routes: Routes,
    batch: Vec<Fetched>,
    /// Ours by partition number, as of `generation`.
    owned: HashMap<i32, Vec<Arc<Assignment>>>,
    generation: u64,
    /// Everything is paused until the buffer has room.
    held: bool,
    /// Paused because too much would have to be replayed.
    crowded: Vec<Arc<Assignment>>,
}

impl Poller {
    pub(crate) fn new(
        consumer: Arc<BaseConsumer<Context>>,
        member: Arc<Member>,
        span_max: usize,
        routes: Routes,
    ) -> Self {
        Self {
            consumer,
            member,
            span_max: span_max.max(1),
            routes,
            batch: Vec::with_capacity(BATCH_MAX),
            owned: HashMap::new(),
            generation: 0,
            held: false,
            crowded: Vec::new(),
        }
    }

    /// Polls until the member leaves or cannot go on.
    pub(crate) fn run(&mut self) {
        while self.member.leaving().is_none() {
            self.refresh();
            self.mind_the_room();
            if let Err(why) = self.fill_batch() {
                tracing::error!(why, "the Kafka consumer cannot go on");
                self.member.buffer.end(End::Failed(why));
                // What has started may still end and be committed.
                self.member.leave(Instant::now() + self.member.drain_timeout + self.member.commit_patience);
            }
        }
    }

    /// Takes what is there, at most a batch; waits only when there is nothing.
    fn fill_batch(&mut self) -> Result<(), String> {
        let consumer = Arc::clone(&self.consumer);
        while self.batch.len() < BATCH_MAX {
            match consumer.poll(Duration::ZERO) {
                Some(Ok(message)) => self.take(&message),
                Some(Err(error)) => self.judge(&error)?,
                None if self.batch.is_empty() => {
                    let patience = if self.held { PAUSED_POLL } else { IDLE_POLL };
                    match consumer.poll(patience) {
                        Some(Ok(message)) => self.take(&message),
                        Some(Err(error)) => self.judge(&error)?,
                        None => break,
                    }
                }
                None => break,
            }
        }
        self.flush();
        Ok(())
    }

    fn take(&mut self, borrowed: &BorrowedMessage<'_>) {
        // A callback may have run inside this very poll.
        self.refresh();
        let (topic, number) = (borrowed.topic(), borrowed.partition());
        let owned = self.owned.get(&number).into_iter().flatten();
        let Some(assignment) = owned.into_iter().find(|owned| &*owned.partition().topic == topic) else {
            return;
        };
        let Some(received) = assignment.receive(borrowed.offset()) else {
            return;
        };
        if received.rewound {
            let (partition, offset) = (assignment.partition(), borrowed.offset());
            tracing::warn!(%partition, offset, "the log went back: truncated, or the topic was made again");
        }
        let message = convert::message(&assignment.partition().topic, self.routes, borrowed);
        let crowded = received.span > self.span_max;
        let assignment = Arc::clone(assignment);
        if crowded && !self.crowded.iter().any(|one| Arc::ptr_eq(one, &assignment)) {
            self.pause([&assignment]);
            self.crowded.push(Arc::clone(&assignment));
        }
        let bytes = message.size_bytes();
        self.batch.push(Fetched { message, bytes, assignment, receipt: received.receipt });
    }

    fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        if self.member.assignments.generation() != self.generation {
            self.batch.retain(|fetched| !fetched.assignment.is_revoked());
        }
        self.member.buffer.push(&mut self.batch);
    }

    /// Brings our copy of the assignment up to date.
    fn refresh(&mut self) {
        let generation = self.member.assignments.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.owned.clear();
        for assignment in self.member.assignments.all() {
            self.owned.entry(assignment.partition().number).or_default().push(assignment);
        }
        self.crowded.retain(|assignment| !assignment.is_revoked());
        if self.held {
            // What has just been assigned was resumed by the callback.
            self.pause(self.owned.values().flatten());
        }
    }

    /// Pauses and resumes, by hysteresis.
    fn mind_the_room(&mut self) {
        if self.held {
            if self.member.buffer.has_ample_room() {
                self.held = false;
                let crowded =
                    |one: &&Arc<Assignment>| self.crowded.iter().any(|other| Arc::ptr_eq(other, one));
                self.resume(self.owned.values().flatten().filter(|one| !crowded(one)));
                tracing::debug!("fetching goes on");
            }
        } else if self.member.buffer.is_full() && !self.member.buffer.wait_for_room(ROOM_PATIENCE) {
            self.held = true;
            self.pause(self.owned.values().flatten());
            tracing::debug!("the buffer is full and nobody receives: partitions paused");
        }
        if self.crowded.is_empty() {
            return;
        }
        let (free, crowded): (Vec<_>, Vec<_>) =
            self.crowded.drain(..).partition(|assignment| assignment.span() <= self.span_max / 2);
        self.crowded = crowded;
        if !self.held {
            self.resume(free.iter());
        }
    }

    fn pause<'a>(&self, assignments: impl IntoIterator<Item = &'a Arc<Assignment>>) {
        let list = list_of(assignments.into_iter().map(|one| one.partition()));
        if let Err(error) = self.consumer.pause(&list) {
            tracing::warn!(%error, "partitions could not be paused");
        }
    }

    fn resume<'a>(&self, assignments: impl Iterator<Item = &'a Arc<Assignment>>) {
        let list = list_of(assignments.map(|one| one.partition()));
        if let Err(error) = self.consumer.resume(&list) {
            tracing::warn!(%error, "partitions could not be resumed");
        }
    }

    /// Tells what passes by itself from what does not. `Err` says why we cannot go on.
    fn judge(&self, error: &KafkaError) -> Result<(), String> {
        if let Some((code, reason)) = self.consumer.client().fatal_error() {
            return Err(format!("the Kafka client has failed for good: {reason} ({code})"));
        }
        match error {
            KafkaError::PartitionEOF(_) => return Ok(()),
            KafkaError::MessageConsumptionFatal(code) => {
                return Err(format!("the Kafka client has failed for good: {code}"));
            }
            KafkaError::MessageConsumption(code) if forbidden(*code) => {
                return Err(format!("Kafka refuses us: {code}; check the credentials and the ACLs"));
            }
            _ => {}
        }
        let operation = match error.rdkafka_error_code() {
            Some(
                RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::Resolve
                | RDKafkaErrorCode::OperationTimedOut,
            ) => "broker",
            _ => "fetch",
        };
        tracing::warn!(%error, operation, "Kafka reports trouble; polling goes on");
        self.member.observer.observe(Event::SourceError { operation });
        Ok(())
    }

    /// Leaves the group: the revoke callback drains and commits, and then the partitions are others'.
    ///
    /// Returns why the last commit did not reach the broker, if so.
    pub(crate) fn leave(&mut self) -> Result<(), String> {
        let by = self.member.leaving().unwrap_or_else(Instant::now);
        self.member.buffer.end(End::Closed);
        self.consumer.unsubscribe();
        while !self.member.assignments.is_empty() && Instant::now() < by {
            // What still comes was not asked for any more; it is delivered again, elsewhere.
            drop(self.consumer.poll(LEAVE_POLL));
        }
        let ours = self.member.assignments.all();
        if !ours.is_empty() {
            self.member.assignments.end(&ours);
            return Err("the group did not let us go in time".to_owned());
        }
        self.member.take_uncommitted().map_or(Ok(()), Err)
    }

    /// Ends the commit thread and drops the consumer. Either may take long, or for ever: nobody waits for it
    /// without a bound.
    pub(crate) fn dismantle(self, commits: JoinHandle<()>) {
        self.member.desk.stop();
        if commits.join().is_err() {
            tracing::error!("the commit thread has panicked");
        }
        drop(self.consumer);
    }
}

fn forbidden(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode::{
        Authentication, ClusterAuthorizationFailed, GroupAuthorizationFailed, SaslAuthenticationFailed,
        TopicAuthorizationFailed,
    };
    matches!(
        code,
        Authentication
            | ClusterAuthorizationFailed
            | GroupAuthorizationFailed
            | SaslAuthenticationFailed
            | TopicAuthorizationFailed
    )
}
