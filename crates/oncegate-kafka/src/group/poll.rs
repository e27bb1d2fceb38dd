//! The poll thread, which owns the consumer and polls it in every state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::BorrowedMessage;
use rdkafka::topic_partition_list::Offset;

use super::buffer::{End, Fetched};
use super::callbacks::MemberContext;
use super::commit_desk::CommitContext as _;
use super::connection_watch::Watch;
use super::member::Member;
use super::unread::UnreadWatch;
use crate::client::convert::{self, Routes};
use crate::client::log;
use crate::client::notices::Notice;
use crate::client::rotation::Rotation;
use crate::client::trouble::{JOIN, JoinTerms, Trouble, failed_operation};
use crate::partitions::assignment::Assignment;
use crate::partitions::fetch_limits::{Excess, FetchLimits};
use crate::partitions::partition::Partition;
use crate::partitions::partition_map::{PartitionMap, list_of};
use oncegate_runtime::observe::Event;

/// The most messages that are moved to the buffer at once.
const BATCH_MAX: usize = 256;

/// A batch ends at this many bytes, because 256 large messages would far exceed the buffer.
const BATCH_BYTES: usize = 1 << 20;

/// The time that a poll waits for a message; a request to leave is noticed after it at the latest.
const IDLE_POLL: Duration = Duration::from_millis(100);

/// The same while everything is paused, because nothing wakes the poll thread when the buffer has
/// room again.
const PAUSED_POLL: Duration = Duration::from_millis(20);

/// The time to wait for room in the buffer, without polling, before the partitions are paused. A
/// pause discards the prefetched messages, so it must be worth that.
const ROOM_PATIENCE: Duration = Duration::from_millis(250);

/// The poll thread's state for one client.
pub(crate) struct Poller {
    pub(super) consumer: Arc<BaseConsumer<MemberContext>>,
    pub(super) member: Arc<Member>,
    pub(super) terms: Terms,
    batch: Vec<Fetched>,
    batch_bytes: usize,
    /// Our assignments, as of `generation`.
    pub(super) owned: PartitionMap<Arc<Assignment>>,
    generation: u64,
    /// `true` while everything is paused until the buffer has room.
    pub(super) held: bool,
    /// Partitions that are paused because a crash would replay too many messages, or too many are
    /// not due.
    crowded: PartitionMap<Arc<Assignment>>,
    /// Partitions that must seek to these offsets. Until then, their messages are dropped.
    pub(super) seeking: PartitionMap<(Arc<Assignment>, Offset)>,
    /// Partitions that are not read yet, because the commit thread still decides where they begin.
    pub(super) beginning: Vec<Arc<Assignment>>,
    /// Partitions whose client has left [`PLACEHOLDER`] before it was sought elsewhere, until their
    /// first message arrives.
    ///
    /// [`PLACEHOLDER`]: crate::partitions::assignment::PLACEHOLDER
    pub(super) left_early: PartitionMap<Arc<Assignment>>,
    /// Positions whose messages were deleted, until the first remaining message of the partition
    /// arrives.
    pub(super) gone_from: PartitionMap<(Partition, i64)>,
    /// Watches whether the client is connected.
    watch: Watch,
    /// Watches whether its password or certificate has changed.
    rotation: Rotation,
    /// Watches whether it begins to read its partitions.
    unread: UnreadWatch,
}

/// The source's settings for the poll thread.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// The limits on what is received and not finished.
    pub(crate) limits: FetchLimits,
    pub(crate) routes: Routes,
    /// `true` if the position is kept when a topic's id changes.
    pub(crate) keeps_positions: bool,
    /// `true` if the group uses the new protocol, in which a poll that comes too late ends the
    /// membership for good.
    pub(crate) new_protocol: bool,
    /// The terms on which the member joins its group.
    pub(crate) join: JoinTerms,
    /// `true` if the client is replaced when it does not begin to read a partition.
    pub(crate) may_replace_unread: bool,
}

impl Poller {
    pub(crate) fn new(
        consumer: Arc<BaseConsumer<MemberContext>>,
        member: Arc<Member>,
        terms: Terms,
        watch: Watch,
        rotation: Rotation,
    ) -> Self {
        Self {
            consumer,
            member,
            unread: UnreadWatch::new(terms.may_replace_unread),
            terms,
            batch: Vec::with_capacity(BATCH_MAX),
            batch_bytes: 0,
            owned: PartitionMap::default(),
            generation: 0,
            held: false,
            crowded: PartitionMap::default(),
            seeking: PartitionMap::default(),
            beginning: Vec::new(),
            left_early: PartitionMap::default(),
            gone_from: PartitionMap::default(),
            watch,
            rotation,
        }
    }

    /// Polls until the member leaves; returns the reason if the client has failed.
    pub(crate) fn run(&mut self) -> Option<Trouble> {
        while self.member.leaving().is_none() {
            self.member.polling(self.held);
            self.refresh();
            self.pause_when_full();
            self.begin();
            self.seek();
            if self.member.assignments.may_pass() {
                self.pass();
            }
            if let Err(trouble) = self.fill_batch() {
                return Some(trouble);
            }
            let looks = self
                .watch
                .look(&self.member)
                .or_else(|| self.rotation.look());
            if let Some(trouble) = looks.or_else(|| self.unread.look(&self.member)) {
                return Some(trouble);
            }
            if self.consumer.context().desk().is_stopped() {
                return Some(Trouble::no_commits());
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
                        // While brokers are away, errors come without a pause: a stop must be
                        // noticed between them.
                        Some(Err(error)) => {
                            self.judge(&error)?;
                            break;
                        }
                        None => break,
                    }
                }
                None => break,
            }
        }
        self.act_on_notices();
        self.flush();
        Ok(())
    }

    fn take(&mut self, borrowed: &BorrowedMessage<'_>) {
        self.member.delivers();
        // A callback may have run inside this poll, and a log line may concern this message.
        self.act_on_notices();
        self.refresh();
        let Some(assignment) = self.owned.get(borrowed.topic(), borrowed.partition()) else {
            return;
        };
        if self.is_sought(assignment) {
            return;
        }
        if !self.left_early.is_empty()
            && self.left_early.remove(assignment.partition()).is_some()
            && let Some(sought) = assignment.seeks_again_before(borrowed.offset())
        {
            let again = (Arc::clone(assignment), Offset::Offset(sought));
            self.seeking.insert(assignment.partition(), again);
            return;
        }
        let Some(received) = assignment.receive(borrowed.offset()) else {
            return;
        };
        if let Some((_, from)) = self.gone_from.remove(assignment.partition()) {
            report_gone(
                &self.member,
                assignment.partition(),
                from,
                borrowed.offset(),
            );
        }
        if received.rewound {
            let partition = assignment.partition();
            let offset = borrowed.offset();
            tracing::warn!(%partition, offset, "the log went back: it was truncated, or the topic was recreated");
        }
        let message = convert::message(&assignment.partition().topic, self.terms.routes, borrowed);
        let assignment = Arc::clone(assignment);
        if let Some(excess) = self.terms.limits.excess(assignment.backlog(received.span))
            && self
                .crowded
                .insert(assignment.partition(), Arc::clone(&assignment))
                .is_none()
        {
            self.pause([&assignment]);
            assignment.set_crowded(true);
            if excess == Excess::Span {
                self.member
                    .observer
                    .observe(Event::SourcePaused { cause: "span" });
            }
        }
        let bytes = message.size_bytes();
        self.batch_bytes += bytes;
        self.batch.push(Fetched {
            message,
            bytes,
            assignment,
            receipt: received.receipt,
        });
    }

    fn flush(&mut self) {
        self.batch_bytes = 0;
        if self.batch.is_empty() {
            return;
        }
        if self.member.assignments.generation() != self.generation {
            self.batch
                .retain(|fetched| !fetched.assignment.is_revoked());
        }
        self.member.buffer.push(&mut self.batch);
    }

    /// Acts on the notices from the client's log.
    fn act_on_notices(&mut self) {
        for notice in self.member.notices.take() {
            match notice {
                Notice::MadeAgain(topic) => self.made_again(&topic),
                Notice::OutOfRange {
                    partition,
                    position,
                } => self.out_of_range(partition, position),
            }
        }
    }

    /// Updates our copy of the assignment.
    pub(super) fn refresh(&mut self) {
        let generation = self.member.assignments.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.owned.clear();
        for assignment in self.member.assignments.all() {
            self.owned
                .insert(&assignment.partition().clone(), assignment);
        }
        self.crowded.retain(|assignment| !assignment.is_revoked());
        self.seeking
            .retain(|(assignment, _)| !assignment.is_revoked());
        self.beginning = self.member.assignments.all();
        self.beginning.retain(|assignment| !assignment.has_begun());
        self.batch
            .retain(|fetched| !fetched.assignment.is_revoked());
        self.left_early
            .retain(|assignment| !assignment.is_revoked());
        let owned = &self.owned;
        self.gone_from.retain(|(gone, _)| owned.of(gone).is_some());
        if self.held {
            // The callback may have resumed the newly assigned partitions.
            self.pause(self.owned.values());
        }
    }

    /// Pauses when the buffer is full, and resumes when half of it is free.
    fn pause_when_full(&mut self) {
        if self.held {
            if self.member.buffer.has_ample_room() {
                self.held = false;
                self.resume(
                    self.owned.values().filter(|one| {
                        one.has_begun() && self.crowded.of(one.partition()).is_none()
                    }),
                );
                tracing::debug!("the buffer has room again: partitions resumed");
            }
        } else if self.member.buffer.is_full() && !self.member.buffer.wait_for_room(ROOM_PATIENCE) {
            self.held = true;
            self.pause(self.owned.values());
            tracing::debug!("the buffer is full and no message is received: partitions paused");
            self.member
                .observer
                .observe(Event::SourcePaused { cause: "full" });
        }
        if self.crowded.is_empty() {
            return;
        }
        let free: Vec<_> = self
            .crowded
            .values()
            .filter(|one| self.terms.limits.has_room(one.backlog(one.span())))
            .cloned()
            .collect();
        for assignment in &free {
            self.crowded.remove(assignment.partition());
            assignment.set_crowded(false);
        }
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

    pub(super) fn resume<'a>(&self, assignments: impl Iterator<Item = &'a Arc<Assignment>>) {
        let list = list_of(assignments.map(|one| one.partition()));
        if let Err(error) = self.consumer.resume(&list) {
            tracing::warn!(%error, "cannot resume partitions");
        }
    }

    /// Decides whether an error is temporary. `Err` is the reason why this client cannot continue.
    fn judge(&self, error: &KafkaError) -> Result<(), Trouble> {
        let fatal = self.consumer.client().fatal_error();
        if let Some(trouble) = Trouble::of(error, fatal, self.terms.new_protocol) {
            return Err(trouble);
        }
        let login = self.member.take_login_failure();
        match error {
            KafkaError::PartitionEOF(_) => return Ok(()),
            // A changed password is not everywhere at the same time.
            KafkaError::MessageConsumption(code)
                if Trouble::is_about_login(*code) && self.rotation.may_come() => {}
            KafkaError::MessageConsumption(code) if Trouble::forbidden(*code) => {
                let why = login.map_or_else(
                    || format!("Kafka denies access: {code}; check the credentials and the ACLs"),
                    |login| login.text,
                );
                return Err(Trouble::Hopeless(why));
            }
            _ => {}
        }
        let refused = self.terms.join.refusal(error);
        let operation = if refused.is_some() {
            JOIN
        } else {
            failed_operation(error, login.as_ref())
        };
        let error = refused
            .or(login.map(|login| login.text))
            .unwrap_or_else(|| error.to_string());
        self.member
            .failures
            .failed(Instant::now(), operation, &error);
        if let Some(left_out) = log::worth_logging(&format!("{operation}: {error}")) {
            tracing::warn!(
                error,
                operation,
                left_out,
                "the Kafka client reports an error; polling continues"
            );
        }
        self.member
            .observer
            .observe(Event::SourceError { operation });
        Ok(())
    }

    /// Gives up all partitions: running handlers may finish, and their offsets are committed. The
    /// client leaves the group when it is dropped.
    ///
    /// It does not unsubscribe. Unsubscribing takes time, and a client that is dropped meanwhile
    /// ends without leaving its group, which then waits until the session is over (librdkafka
    /// 2.12). It would also make a static member leave.
    ///
    /// Returns an error with the reason when the last commit did not reach the broker.
    pub(crate) fn leave(&mut self) -> Result<(), String> {
        self.member.buffer.end(End::Closed);
        self.give_back();
        self.consumer.context().retire();
        self.member.take_uncommitted().map_or(Ok(()), Err)
    }

    /// Gives up all partitions, as in a rebalance: running handlers may finish, and their offsets
    /// are committed.
    pub(crate) fn give_back(&mut self) {
        self.refresh();
        self.pass();
        self.consumer
            .context()
            .give_back(|| self.consumer.assignment_lost());
    }
}

fn report_gone(member: &Member, partition: &Partition, from: i64, first: i64) {
    let count = first.saturating_sub(from);
    // If the log was truncated, there is nothing in between.
    let Ok(count @ 1..) = u64::try_from(count) else {
        return;
    };
    tracing::error!(
        %partition, from, first, count,
        "messages were deleted before they were received; check the topic's retention"
    );
    member.observer.observe(Event::MessagesGone { count });
}
