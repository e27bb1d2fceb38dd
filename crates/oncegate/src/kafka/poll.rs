//! The poll thread, which owns the consumer and polls it in every state.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::BorrowedMessage;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::assignment::{Assignment, Partition};
use super::buffer::{End, Fetched};
use super::connection::Watch;
use super::convert::{self, Routes};
use super::member::{Context, Member, list_of};
use super::notices::Notice;
use super::settings::Start;
use super::trouble::Trouble;
use crate::observe::Event;

/// The most messages that are moved to the buffer at once.
const BATCH_MAX: usize = 256;

/// A batch ends at this many bytes, because 256 large messages would far exceed the buffer.
const BATCH_BYTES: usize = 1 << 20;

/// How long a poll waits for a message; a request to leave is noticed after this time at the latest.
const IDLE_POLL: Duration = Duration::from_millis(100);

/// The same while everything is paused, because nothing wakes the poll thread when the buffer has room again.
const PAUSED_POLL: Duration = Duration::from_millis(20);

/// How long to wait for room in the buffer, without polling, before the partitions are paused. A pause discards the
/// prefetched messages, so it must be worth that.
const ROOM_PATIENCE: Duration = Duration::from_millis(250);

/// Time limit for one seek. A seek that fails is retried, and no message of the partition is accepted before it
/// succeeds.
const SEEK_PATIENCE: Duration = Duration::from_millis(500);

/// The poll thread's state for one client.
pub(crate) struct Poller {
    consumer: Arc<BaseConsumer<Context>>,
    member: Arc<Member>,
    terms: Terms,
    batch: Vec<Fetched>,
    batch_bytes: usize,
    /// Our assignments by partition number, as of `generation`.
    owned: HashMap<i32, Vec<Arc<Assignment>>>,
    generation: u64,
    /// Whether everything is paused until the buffer has room.
    held: bool,
    /// Partitions that are paused because a crash would replay too many messages.
    crowded: Vec<Arc<Assignment>>,
    /// Partitions that must seek to these offsets. Until then, their messages are dropped.
    seeking: Vec<(Arc<Assignment>, Offset)>,
    /// Partitions that are not read yet, because the commit thread still decides where they begin.
    beginning: Vec<Arc<Assignment>>,
    /// Positions whose messages were deleted, until the first remaining message of the partition arrives.
    gone_from: HashMap<Partition, i64>,
    /// Watches whether the client is connected.
    watch: Watch,
}

/// The source's settings for the poll thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// How many messages may be delivered again after a crash, per partition.
    pub(crate) span_max: usize,
    pub(crate) routes: Routes,
    pub(crate) start: Start,
    /// Whether the group uses the new protocol, in which a poll that comes too late ends the membership for good.
    pub(crate) new_protocol: bool,
}

impl Poller {
    pub(crate) fn new(
        consumer: Arc<BaseConsumer<Context>>,
        member: Arc<Member>,
        terms: Terms,
        watch: Watch,
    ) -> Self {
        Self {
            consumer,
            member,
            terms: Terms { span_max: terms.span_max.max(1), ..terms },
            batch: Vec::with_capacity(BATCH_MAX),
            batch_bytes: 0,
            owned: HashMap::new(),
            generation: 0,
            held: false,
            crowded: Vec::new(),
            seeking: Vec::new(),
            beginning: Vec::new(),
            gone_from: HashMap::new(),
            watch,
        }
    }

    /// Polls until the member leaves; returns the reason if the client has failed.
    pub(crate) fn run(&mut self) -> Option<Trouble> {
        while self.member.leaving().is_none() {
            self.member.polling(self.held);
            self.refresh();
            self.mind_the_room();
            self.begin();
            self.seek();
            if self.member.assignments.may_pass() {
                self.pass();
            }
            if let Err(trouble) = self.fill_batch() {
                return Some(trouble);
            }
            if let Some(trouble) = self.watch.look(&self.member) {
                return Some(trouble);
            }
        }
        None
    }

    /// Takes the available messages, at most a batch; waits only when there are none.
    fn fill_batch(&mut self) -> Result<(), Trouble> {
        let consumer = Arc::clone(&self.consumer);
        while self.batch.len() < BATCH_MAX && self.batch_bytes < BATCH_BYTES {
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
        self.heed();
        self.flush();
        Ok(())
    }

    fn take(&mut self, borrowed: &BorrowedMessage<'_>) {
        self.member.failures.succeeded("broker");
        self.member.failures.succeeded("fetch");
        // A callback may have run inside this poll, and a log line may concern this message.
        self.heed();
        self.refresh();
        let (topic, number) = (borrowed.topic(), borrowed.partition());
        let owned = self.owned.get(&number).into_iter().flatten();
        let Some(assignment) = owned.into_iter().find(|owned| &*owned.partition().topic == topic) else {
            return;
        };
        if self.is_sought(assignment) {
            return;
        }
        let Some(received) = assignment.receive(borrowed.offset()) else {
            return;
        };
        if let Some(from) = self.gone_from.remove(assignment.partition()) {
            report_gone(&self.member, assignment.partition(), from, borrowed.offset());
        }
        if received.rewound {
            let (partition, offset) = (assignment.partition(), borrowed.offset());
            tracing::warn!(%partition, offset, "the log went back: it was truncated, or the topic was recreated");
        }
        let message = convert::message(&assignment.partition().topic, self.terms.routes, borrowed);
        let crowded = received.span > self.terms.span_max;
        let assignment = Arc::clone(assignment);
        if crowded && !self.crowded.iter().any(|one| Arc::ptr_eq(one, &assignment)) {
            self.pause([&assignment]);
            assignment.set_crowded(true);
            self.member.observer.observe(Event::SourcePaused { cause: "span" });
            self.crowded.push(Arc::clone(&assignment));
        }
        let bytes = message.size_bytes();
        self.batch_bytes += bytes;
        self.batch.push(Fetched { message, bytes, assignment, receipt: received.receipt });
    }

    fn flush(&mut self) {
        self.batch_bytes = 0;
        if self.batch.is_empty() {
            return;
        }
        if self.member.assignments.generation() != self.generation {
            self.batch.retain(|fetched| !fetched.assignment.is_revoked());
        }
        self.member.buffer.push(&mut self.batch);
    }

    /// Acts on the notices from the client's log.
    fn heed(&mut self) {
        for notice in self.member.notices.take() {
            match notice {
                Notice::MadeAgain(topic) => self.made_again(&topic),
                Notice::OutOfRange { partition, position } => self.out_of_range(partition, position),
            }
        }
    }

    /// Handles a recreated topic: positions in the deleted topic mean nothing in the new one.
    fn made_again(&mut self, topic: &str) {
        self.refresh();
        let ours =
            self.owned.values().flatten().map(|one| one.partition()).filter(|one| &*one.topic == topic);
        let ours: Vec<Partition> = ours.cloned().collect();
        tracing::warn!(
            topic,
            partitions = ours.len(),
            "the topic was recreated; reading it from its beginning"
        );
        self.member.observer.observe(Event::TopicMadeAgain);
        for partition in ours {
            self.gone_from.remove(&partition);
            // A new log begins at 0, and the broker must not keep the position in the old one.
            self.read_anew(partition, Some(0));
        }
    }

    /// Handles a position without messages: they were deleted, or the log was truncated.
    fn out_of_range(&mut self, partition: Partition, position: i64) {
        self.refresh();
        if self.owned_one(&partition).is_none_or(|owned| self.is_sought(owned)) {
            return;
        }
        tracing::warn!(%partition, position, "the log has no message at this position; continuing with its oldest one");
        if self.terms.start == Start::End {
            // The client continues at the end, which is where a *new* group should begin. This group would skip
            // messages that exist.
            self.read_anew(partition.clone(), None);
        }
        self.gone_from.insert(partition, position);
    }

    fn owned_one(&self, partition: &Partition) -> Option<&Arc<Assignment>> {
        self.owned.get(&partition.number).into_iter().flatten().find(|owned| owned.partition() == partition)
    }

    fn is_sought(&self, assignment: &Arc<Assignment>) -> bool {
        self.seeking.iter().any(|(sought, _)| Arc::ptr_eq(sought, assignment))
    }

    /// Begins another epoch of one of our partitions, from the partition's beginning.
    fn read_anew(&mut self, partition: Partition, base: Option<i64>) {
        if !self.member.assignments.restart(&partition, base) {
            return;
        }
        if !self.held {
            // The last epoch may have been paused because too many of its messages were unfinished.
            let list = list_of(std::iter::once(&partition));
            if let Err(error) = self.consumer.resume(&list) {
                tracing::warn!(%error, "cannot resume a partition that is read again from its beginning");
            }
        }
        self.member.buffer.purge_revoked();
        self.refresh();
        if let Some(assignment) = self.owned_one(&partition).cloned() {
            self.seeking.push((assignment, Offset::Beginning));
        }
        self.seek();
    }

    /// Starts reading the partitions whose starting position is decided and committed.
    fn begin(&mut self) {
        let seeking = &mut self.seeking;
        self.beginning.retain(|assignment| {
            let position = assignment.begins_at();
            seeking.extend(position.map(|position| (Arc::clone(assignment), Offset::Offset(position))));
            position.is_none()
        });
    }

    /// Seeks the partitions that wait for a seek.
    fn seek(&mut self) {
        if self.seeking.is_empty() {
            return;
        }
        self.refresh();
        let sought =
            list_at(&self.seeking).and_then(|list| self.consumer.seek_partitions(list, SEEK_PATIENCE));
        match sought {
            // A seek that fails, for example because the leader is not known, is retried.
            Ok(sought) => self.seeking.retain(|(assignment, _)| {
                let partition = assignment.partition();
                let element = sought.find_partition(&partition.topic, partition.number);
                let begun = element.is_some_and(|element| element.error().is_ok());
                if begun {
                    assignment.begun();
                }
                !begun
            }),
            Err(error) => tracing::debug!(%error, "the client cannot seek yet"),
        }
    }

    /// Moves the watermarks past offsets without a message. The client's positions are exact, transaction markers
    /// included, because only this thread polls it.
    fn pass(&self) {
        let positions = match self.consumer.position() {
            Ok(positions) => positions,
            Err(error) => return tracing::debug!(%error, "the client does not report its positions"),
        };
        for assignment in self.owned.values().flatten().filter(|one| !self.is_sought(one)) {
            let partition = assignment.partition();
            let found = positions.find_partition(&partition.topic, partition.number);
            if let Some(Offset::Offset(position)) = found.map(|found| found.offset()) {
                assignment.passes(position);
            }
        }
    }

    /// Updates our copy of the assignment.
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
        self.seeking.retain(|(assignment, _)| !assignment.is_revoked());
        self.beginning = self.member.assignments.all();
        self.beginning.retain(|assignment| !assignment.has_begun());
        self.batch.retain(|fetched| !fetched.assignment.is_revoked());
        let owned = &self.owned;
        self.gone_from.retain(|gone, _| {
            owned.get(&gone.number).into_iter().flatten().any(|owned| owned.partition() == gone)
        });
        if self.held {
            // The callback has resumed the newly assigned partitions.
            self.pause(self.owned.values().flatten());
        }
    }

    /// Pauses when the buffer is full, and resumes when half of it is free.
    fn mind_the_room(&mut self) {
        if self.held {
            if self.member.buffer.has_ample_room() {
                self.held = false;
                let crowded =
                    |one: &&Arc<Assignment>| self.crowded.iter().any(|other| Arc::ptr_eq(other, one));
                self.resume(self.owned.values().flatten().filter(|one| !crowded(one)));
                tracing::debug!("the buffer has room again: partitions resumed");
            }
        } else if self.member.buffer.is_full() && !self.member.buffer.wait_for_room(ROOM_PATIENCE) {
            self.held = true;
            self.pause(self.owned.values().flatten());
            tracing::debug!("the buffer is full and no message is received: partitions paused");
            self.member.observer.observe(Event::SourcePaused { cause: "full" });
        }
        if self.crowded.is_empty() {
            return;
        }
        let (free, crowded): (Vec<_>, Vec<_>) =
            self.crowded.drain(..).partition(|assignment| assignment.span() <= self.terms.span_max / 2);
        self.crowded = crowded;
        free.iter().for_each(|assignment| assignment.set_crowded(false));
        if !self.held {
            self.resume(free.iter());
        }
    }

    fn pause<'a>(&self, assignments: impl IntoIterator<Item = &'a Arc<Assignment>>) {
        let list = list_of(assignments.into_iter().map(|one| one.partition()));
        if let Err(error) = self.consumer.pause(&list) {
            tracing::warn!(%error, "cannot pause partitions");
        }
    }

    fn resume<'a>(&self, assignments: impl Iterator<Item = &'a Arc<Assignment>>) {
        let list = list_of(assignments.map(|one| one.partition()));
        if let Err(error) = self.consumer.resume(&list) {
            tracing::warn!(%error, "cannot resume partitions");
        }
    }

    /// Decides whether an error is temporary. `Err` is the reason why this client cannot continue.
    fn judge(&self, error: &KafkaError) -> Result<(), Trouble> {
        if let Some((code, reason)) = self.consumer.client().fatal_error() {
            return Err(Trouble::of_fatal(code, &reason));
        }
        match error {
            KafkaError::PartitionEOF(_) => return Ok(()),
            KafkaError::MessageConsumptionFatal(code) => {
                return Err(Trouble::of_fatal(*code, &code.to_string()));
            }
            // A classic member joins again by itself. A member of the new protocol gets no further notification.
            KafkaError::MessageConsumption(RDKafkaErrorCode::PollExceeded) if self.terms.new_protocol => {
                return Err(Trouble::poll_interval());
            }
            KafkaError::MessageConsumption(code) if Trouble::forbidden(*code) => {
                return Err(Trouble::Hopeless(format!(
                    "Kafka denies access: {code}; check the credentials and the ACLs"
                )));
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
        self.member.failures.failed(Instant::now(), operation, error);
        tracing::warn!(%error, operation, "the Kafka client reports an error; polling continues");
        self.member.observer.observe(Event::SourceError { operation });
        Ok(())
    }

    /// Gives up all partitions: running handlers may finish, and their offsets are committed. The client leaves the
    /// group when it is dropped.
    ///
    /// It does not unsubscribe. Unsubscribing takes time, and a client that is dropped meanwhile ends without leaving
    /// its group, which then waits until the session is over (librdkafka 2.12). It would also make a static member
    /// leave.
    ///
    /// Returns an error with the reason when the last commit did not reach the broker.
    pub(crate) fn leave(&mut self) -> Result<(), String> {
        self.member.buffer.end(End::Closed);
        self.refresh();
        self.pass();
        let context = self.consumer.context();
        context.give_back(|| self.consumer.assignment_lost());
        context.retire();
        self.member.take_uncommitted().map_or(Ok(()), Err)
    }
}

/// Returns the partition list for one seek.
fn list_at(sought: &[(Arc<Assignment>, Offset)]) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::with_capacity(sought.len());
    for (assignment, offset) in sought {
        let partition = assignment.partition();
        list.add_partition_offset(&partition.topic, partition.number, *offset)?;
    }
    Ok(list)
}

fn report_gone(member: &Member, partition: &Partition, from: i64, first: i64) {
    let count = first.saturating_sub(from);
    // If the log was truncated, there is nothing in between.
    let Ok(count @ 1..) = u64::try_from(count) else { return };
    tracing::error!(
        %partition, from, first, count,
        "messages were deleted before they were received; check the topic's retention"
    );
    member.observer.observe(Event::MessagesGone { count });
}
