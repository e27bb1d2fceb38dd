//! Asks for the group's committed offsets, and finds the partitions whose offset the brokers
//! withhold.
//!
//! While a transaction that commits an offset is open, the brokers do not tell that offset.
//! librdkafka (2.12) then repeats the whole request, so one such partition holds back every
//! partition that was asked about with it, and all that are assigned later. So partitions that get
//! no answer together are asked about one by one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::Offset;

use crate::partitions::partition::Partition;
use crate::partitions::partition_map::list_of;

/// Time limit of one request. A revoke's commit waits for it.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit of a request about a partition whose offset may be withheld. The coordinator answers
/// others.
const ALONE_TIMEOUT: Duration = Duration::from_millis(250);

/// The time that a rebalance callback has for its requests.
const CALLBACK_PATIENCE: Duration = Duration::from_secs(1);

/// The most partitions in one request: the client's work with an answer grows with its square.
const ASKED_AT_ONCE: usize = 500;

/// The most requests without an answer in one round, so that commits do not wait for long.
const UNANSWERED_MAX: usize = 4;

/// The number of a partition that no topic has. The coordinator answers at once that it has no
/// offset.
const NO_PARTITION: i32 = i32::MAX;

/// Offsets by partition number, of one topic.
pub(crate) type Offsets = BTreeMap<i32, i64>;

/// Returns the partitions about which the coordinator says nothing. It may be slow, or withhold an
/// offset.
///
/// It is called in a rebalance callback, which must not wait for long.
pub(crate) fn unanswered<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[Partition],
) -> Vec<Partition> {
    let until = Instant::now() + CALLBACK_PATIENCE;
    let mut unanswered = Vec::new();
    for asked in partitions.chunks(ASKED_AT_ONCE) {
        let left = until.saturating_duration_since(Instant::now());
        let is_answered = match consumer.committed_offsets(list_of(asked.iter()), left) {
            Ok(answer) => answer
                .elements()
                .iter()
                .all(|one| one.error().err().is_none_or(|error| !is_silence(&error))),
            Err(error) => !is_silence(&error),
        };
        if !is_answered {
            unanswered.extend_from_slice(asked);
        }
    }
    unanswered
}

/// The coordinator's answer about a topic.
#[derive(Debug, Default)]
pub(crate) struct Committed {
    /// The offsets that it tells.
    pub(crate) offsets: Offsets,
    /// The partitions whose offset it withholds.
    pub(crate) withheld: Vec<i32>,
}

/// Asks about partitions of one topic, and remembers those without an answer.
#[derive(Debug, Default)]
pub(crate) struct Inquirer {
    /// Partitions without an answer, the one that was asked about longest ago first.
    silent: Vec<Partition>,
}

impl Inquirer {
    /// Returns the partitions whose offset is withheld.
    pub(crate) fn withheld(&self) -> &[Partition] {
        &self.silent
    }

    /// Forgets the partitions that are not `wanted` any more.
    pub(crate) fn retain(&mut self, wanted: impl Fn(&Partition) -> bool) {
        self.silent.retain(wanted);
    }

    /// Returns what the coordinator says about these partitions.
    ///
    /// # Errors
    /// When it does not answer at all, or refuses.
    pub(crate) fn ask<C: ConsumerContext>(
        &mut self,
        consumer: &BaseConsumer<C>,
        topic: &str,
        numbers: &[i32],
    ) -> Result<Committed, KafkaError> {
        let mut committed = Committed::default();
        let together = numbers
            .iter()
            .filter(|number| !is_in(&self.silent, topic, **number));
        let together: Vec<i32> = together.copied().collect();
        for asked in together.chunks(ASKED_AT_ONCE) {
            match request(consumer, topic, asked, ANSWER_TIMEOUT) {
                Ok(offsets) => committed.offsets.extend(offsets),
                Err(error) if is_silence(&error) => {
                    // Without an answer to this, it is the coordinator that is away.
                    request(consumer, topic, &[NO_PARTITION], ANSWER_TIMEOUT)?;
                    let asked = asked.iter().map(|number| Partition {
                        topic: topic.into(),
                        number: *number,
                    });
                    self.silent.extend(asked);
                }
                Err(error) => return Err(error),
            }
        }
        self.ask_one_by_one(consumer, topic, numbers, &mut committed)?;
        committed.withheld = numbers
            .iter()
            .filter(|number| is_in(&self.silent, topic, **number))
            .copied()
            .collect();
        Ok(committed)
    }

    fn ask_one_by_one<C: ConsumerContext>(
        &mut self,
        consumer: &BaseConsumer<C>,
        topic: &str,
        numbers: &[i32],
        committed: &mut Committed,
    ) -> Result<(), KafkaError> {
        let mut unanswered = Vec::new();
        let mut rest = Vec::new();
        // After an error they are asked about together again.
        for one in std::mem::take(&mut self.silent) {
            let is_asked = &*one.topic == topic && numbers.contains(&one.number);
            if !is_asked || unanswered.len() >= UNANSWERED_MAX {
                rest.push(one);
                continue;
            }
            match request(consumer, topic, &[one.number], ALONE_TIMEOUT) {
                Ok(offsets) => committed.offsets.extend(offsets),
                Err(error) if is_silence(&error) => unanswered.push(one),
                Err(error) => return Err(error),
            }
        }
        rest.append(&mut unanswered);
        self.silent = rest;
        Ok(())
    }
}

fn is_in(partitions: &[Partition], topic: &str, number: i32) -> bool {
    partitions
        .iter()
        .any(|one| &*one.topic == topic && one.number == number)
}

/// Returns the committed offsets of these partitions; those without one are absent.
fn request<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    numbers: &[i32],
    timeout: Duration,
) -> Result<Offsets, KafkaError> {
    let mut asked = TopicPartitionList::new();
    for number in numbers {
        asked.add_partition(topic, *number);
    }
    read(consumer.committed_offsets(asked, timeout))
}

/// Returns the offsets in an answer, or the first error in it.
pub(crate) fn read(answer: Result<TopicPartitionList, KafkaError>) -> Result<Offsets, KafkaError> {
    let answer = answer?;
    let mut offsets = Offsets::new();
    for element in answer.elements() {
        element.error()?;
        if let Offset::Offset(offset) = element.offset() {
            offsets.insert(element.partition(), offset);
        }
    }
    Ok(offsets)
}

/// Returns whether an error means that no answer came in time. The client's own limit ends its
/// repetitions with the broker's error.
fn is_silence(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(RDKafkaErrorCode::OperationTimedOut | RDKafkaErrorCode::UnstableOffsetCommit)
    )
}
