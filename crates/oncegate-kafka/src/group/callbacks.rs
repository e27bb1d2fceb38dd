//! librdkafka's callbacks of a member's client.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdkafka::TopicPartitionList;
use rdkafka::client::{ClientContext, OAuthToken};
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::topic_partition_list::Offset;

use super::commit_desk::{CommitContext, CommitDesk};
use super::member::Member;
use crate::ask::committed;
use crate::client::log;
use crate::client::login::{LoginFailure, TOKEN};
use crate::client::statistics;
use crate::client::tokens::{self, Tokens};
use crate::partitions::assignment::PLACEHOLDER;
use crate::partitions::assignments::Assignments;
use crate::partitions::partition::Partition;
use crate::partitions::partition_map::{PartitionMap, list_of};
use oncegate_runtime::health::FailureLog;
use oncegate_runtime::observe::Observer;
use oncegate_runtime::source::CommitAnnotation;

/// librdkafka's callbacks. They run on the poll thread, inside `poll`.
#[derive(Debug)]
pub(crate) struct MemberContext {
    member: Arc<Member>,
    desk: CommitDesk,
    /// `true` if the user wants to see librdkafka's debug log.
    debug: bool,
    tokens: Option<Tokens>,
    /// `true` once another client has replaced this one: its callbacks must have no effect.
    retired: AtomicBool,
}

impl MemberContext {
    pub(crate) fn new(member: Arc<Member>, debug: bool, tokens: Option<Tokens>) -> Self {
        Self {
            member,
            desk: CommitDesk::default(),
            debug,
            tokens,
            retired: AtomicBool::new(false),
        }
    }

    /// Gives up all partitions, outside of any callback, unless the member `is_lost`.
    pub(crate) fn give_back(&self, is_lost: impl Fn() -> bool) {
        let ours = self.member.assignments.all();
        let ours: Vec<Partition> = ours.iter().map(|one| one.partition().clone()).collect();
        self.member
            .revoked(&ours, is_lost(), |by| self.desk.commit_last(by, &is_lost));
    }

    /// Retires this client: from now on it does not change the state of its replacement.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        self.desk.stop();
    }

    /// Notes the partitions in which the client has no position.
    ///
    /// The client keeps its position in a partition for a moment after a revoke. Where it has none
    /// now, its next one is from the new assignment.
    fn note_positions(&self, consumer: &BaseConsumer<Self>, assigned: &[Partition]) {
        let positions = match consumer.position() {
            Ok(positions) => PartitionMap::of_list(&positions, |element| element.offset()),
            Err(error) => {
                return tracing::debug!(%error, "the client does not report its positions");
            }
        };
        for partition in assigned {
            if positions
                .of(partition)
                .is_none_or(|position| *position == Offset::Invalid)
                && let Some(assignment) = self.member.assignments.get(partition)
            {
                assignment.has_no_position();
            }
        }
    }

    fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }
}

impl ClientContext for MemberContext {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn generate_oauth_token(&self, _config: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        let token = tokens::generate(self.tokens.as_ref());
        if token.is_ok() && !self.is_retired() {
            self.member.failures.succeeded(TOKEN);
        }
        token
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        if !self.is_retired() {
            self.member.notices.hear(level, line);
        }
        if self.debug || !matches!(level, RDKafkaLogLevel::Debug) {
            log::log(level, facility, line);
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        // `poll` returns the same error, and it is handled there; only its text is missing there.
        tracing::debug!(reason, "Kafka client error");
        if let Some(failure) = LoginFailure::of(&error, reason, self.tokens.is_some()) {
            self.member.login_failed(failure);
        }
    }

    fn stats_raw(&self, statistics: &[u8]) {
        if !self.is_retired() {
            let summary = statistics::summary(statistics);
            self.member.heard(summary.responses, summary.silent);
            self.member.settled(summary.is_settled);
            let connected = statistics::each_report(statistics, |topic, number, report| {
                self.member.assignments.reported(topic, number, report);
            });
            if let Some(is_connected) = connected {
                self.member.connected(is_connected);
            }
        }
    }
}

impl CommitContext for MemberContext {
    fn desk(&self) -> &CommitDesk {
        &self.desk
    }

    fn assignments(&self) -> &Assignments {
        &self.member.assignments
    }

    fn failures(&self) -> &FailureLog {
        &self.member.failures
    }

    fn observer(&self) -> &dyn Observer {
        &*self.member.observer
    }

    fn annotation(&self) -> Option<String> {
        self.member.annotation.as_ref().map(CommitAnnotation::text)
    }

    fn begins_at_end(&self) -> bool {
        self.member.begins_at_end()
    }
}

impl ConsumerContext for MemberContext {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        if self.is_retired() {
            return;
        }
        match rebalance {
            Rebalance::Revoke(list) => {
                self.member
                    .revoked(&partitions(list), consumer.assignment_lost(), |by| {
                        self.desk.commit_now(by)
                    });
            }
            Rebalance::Assign(list) => {
                let assigned = partitions(list);
                let held = if self.member.begins_at_end() {
                    assigned.clone()
                } else {
                    committed::unanswered(consumer, &assigned)
                };
                let held = held.iter().fold(PartitionMap::default(), |mut all, one| {
                    all.insert(one, ());
                    all
                });
                self.member.assigned(&assigned, &held);
                if !held.is_empty() {
                    hold(consumer, list, &held);
                    self.desk.ask();
                }
            }
            Rebalance::Error(error) => tracing::warn!(%error, "rebalance failed"),
        }
    }

    fn post_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        // A pause survives revocation and re-assignment: a partition that comes back paused would
        // stall without an error.
        if let Rebalance::Assign(list) = rebalance
            && !self.is_retired()
        {
            let assigned = partitions(list);
            let (held, read): (Vec<_>, Vec<_>) = assigned.iter().partition(|partition| {
                self.member
                    .assignments
                    .get(partition)
                    .is_some_and(|one| !one.has_begun())
            });
            // The poll thread resumes those that are held.
            let paused = if held.is_empty() {
                Ok(())
            } else {
                consumer.pause(&list_of(held.into_iter()))
            };
            let resumed = if read.is_empty() {
                Ok(())
            } else {
                consumer.resume(&list_of(read.into_iter()))
            };
            if let Err(error) = paused.and(resumed) {
                tracing::warn!(%error, "cannot pause or resume assigned partitions");
            }
            self.note_positions(consumer, &assigned);
        }
    }

    fn commit_callback(&self, _result: KafkaResult<()>, _offsets: &TopicPartitionList) {}
}

/// Lets the client fetch nothing from the `held` partitions, whose starting position it must not
/// decide.
///
/// They get an offset, whichever it is, because without one the client asks for the committed one,
/// and then for the log's beginning: a late answer to that puts the client there, even after a seek
/// to the right position (librdkafka 2.12). They are paused again after the assignment, because the
/// client may not know them before.
fn hold(
    consumer: &BaseConsumer<MemberContext>,
    assigned: &TopicPartitionList,
    held: &PartitionMap<()>,
) {
    let mut paused = TopicPartitionList::new();
    for mut partition in assigned.elements() {
        if held.get(partition.topic(), partition.partition()).is_none() {
            continue;
        }
        if let Err(error) = partition.set_offset(Offset::Offset(PLACEHOLDER)) {
            tracing::warn!(%error, "cannot set the offset of an assigned partition");
        }
        paused.add_partition(partition.topic(), partition.partition());
    }
    // A list of its own, because errors are written into it.
    if let Err(error) = consumer.pause(&paused) {
        tracing::warn!(%error, "cannot pause assigned partitions");
    }
}

fn partitions(list: &TopicPartitionList) -> Vec<Partition> {
    list.elements()
        .iter()
        .map(|element| Partition {
            topic: element.topic().into(),
            number: element.partition(),
        })
        .collect()
}
