//! Reads a topic, or a window of it, to the end that it has when the reader opens.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::Consumer;
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::Offset;
use rdkafka::{Message as _, TopicPartitionList};
use tokio::sync::{mpsc, oneshot};

use super::window::TopicWindow;
use crate::ask::topics;
use crate::client::convert::{self, Routes};
use crate::client::inquiry::{self, InquiryClient};
use crate::client::settings;
use oncegate_runtime::message::Message;
use oncegate_runtime::source::SourceError;

/// The most messages in a batch.
const BATCH_MAX: usize = 1_000;

/// A batch ends at this many bytes.
const BATCH_BYTES: usize = 1 << 20;

/// The number of batches that are prefetched.
const BATCHES_AHEAD: usize = 4;

/// Time limit of each request to the brokers while opening.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// The time to wait for the next message before the reader fails. The missing messages existed when
/// it opened.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// The time that one poll waits.
const POLL: Duration = Duration::from_millis(100);

/// Reads the messages of a topic, in order within each partition, up to the end that the topic has
/// when the reader opens.
///
/// It joins no group and commits nothing. Its memory is bounded for a topic of any length: a few
/// batches of at most 1,000 messages and little more than 1 MiB each, and librdkafka's queue of 16
/// MiB. It does not return aborted messages. Dropping it stops the reading.
pub struct TopicReader {
    batches: mpsc::Receiver<Result<Batch, SourceError>>,
    offsets: BTreeMap<i32, ops::Range<i64>>,
    withheld: u64,
    total: u64,
    position: u64,
}

struct Batch {
    messages: Vec<Message>,
    /// The number of offsets read, including those without a message.
    position: u64,
}

impl TopicReader {
    /// Opens `topic` in the cluster at `brokers`, with properties of librdkafka as in
    /// [`KafkaSource::property`](crate::KafkaSource::property).
    ///
    /// # Errors
    /// When no broker answers, the topic does not exist, or a property is not usable.
    pub async fn open(
        brokers: impl Into<String>,
        topic: impl Into<String>,
        properties: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, SourceError> {
        Self::open_window(brokers, topic, properties, TopicWindow::new()).await
    }

    /// Opens the messages of `topic` that are in the window, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// Also when the topic has no partition of the window.
    pub async fn open_window(
        brokers: impl Into<String>,
        topic: impl Into<String>,
        properties: impl IntoIterator<Item = (String, String)>,
        window: TopicWindow,
    ) -> Result<Self, SourceError> {
        let brokers: String = brokers.into();
        let topic: String = topic.into();
        let properties: Vec<_> = properties.into_iter().collect();
        settings::check_topic(&topic)?;
        let mut config = settings::client(&brokers, &properties)?;
        config
            // The client requires a group name even if it never joins a group.
            .set("group.id", "oncegate-reader")
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("enable.partition.eof", "true")
            // Retention may delete the first messages during the reading, so that the topic begins
            // later.
            .set("auto.offset.reset", "earliest");
        let watched = topic.clone();
        let (batches, receiver) = mpsc::channel(BATCHES_AHEAD);
        let (opened, opening) = oneshot::channel::<Result<Opened, SourceError>>();
        let thread = std::thread::Builder::new().name("oncegate-reader".to_owned());
        let spawned =
            thread.spawn(
                move || match Reading::open(&config, &brokers, &topic, &window) {
                    Ok(mut reading) => {
                        if opened.send(Ok(reading.opened())).is_ok() {
                            reading.run(&batches);
                        }
                    }
                    Err(error) => drop(opened.send(Err(error))),
                },
            );
        spawned.map_err(|error| {
            SourceError::caused("cannot start the thread that reads the topic", error)
        })?;
        let Opened { offsets, withheld } = opening
            .await
            .map_err(|error| SourceError::caused("the reader has ended", error))??;
        if withheld > 0 {
            tracing::warn!(
                topic = watched,
                offsets = withheld,
                "offsets behind an open transaction are not read: no consumer gets their messages before it ends; \
                 kafka-transactions.sh lists and aborts it"
            );
        }
        let total = offsets
            .values()
            .map(|range| u64::try_from(range.end - range.start).unwrap_or(0))
            .sum();
        Ok(Self {
            batches: receiver,
            offsets,
            withheld,
            total,
            position: 0,
        })
    }

    /// Returns the offsets that there are to read, by partition; partitions without any are left
    /// out.
    pub fn offsets(&self) -> &BTreeMap<i32, ops::Range<i64>> {
        &self.offsets
    }

    /// Returns how many offsets of the topic are not read, because they are behind a transaction
    /// that is open, or belong to it. No consumer gets their messages before it ends.
    pub fn withheld(&self) -> u64 {
        self.withheld
    }

    /// Returns how many offsets there are to read. A compacted topic, or one with transactions, has
    /// fewer messages.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns how many of these offsets are read; at the end, [`total`](Self::total).
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the next messages, in order within each partition; `None` at the end. Dropping the
    /// future loses nothing.
    ///
    /// # Errors
    /// When no message arrives for a minute, or the brokers deny access. The reading then ends
    /// incomplete.
    pub async fn next_batch(&mut self) -> Result<Option<Vec<Message>>, SourceError> {
        while self.position < self.total {
            let Some(batch) = self.batches.recv().await else {
                return Err(SourceError::new(
                    "the reader ended before the end of the topic",
                ));
            };
            let batch = batch?;
            self.position = batch.position;
            if !batch.messages.is_empty() {
                return Ok(Some(batch.messages));
            }
        }
        Ok(None)
    }
}

impl fmt::Debug for TopicReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopicReader")
            .field("position", &self.position)
            .field("total", &self.total)
            .finish_non_exhaustive()
    }
}

/// The extent of a reading, which is known when it opens.
struct Opened {
    offsets: BTreeMap<i32, ops::Range<i64>>,
    withheld: u64,
}

/// The state of the reading thread.
struct Reading {
    consumer: InquiryClient,
    topic: Arc<str>,
    routes: Routes,
    /// The offsets left to read, by partition.
    left: HashMap<i32, Range>,
    /// The number of offsets behind open transactions.
    withheld: u64,
    /// The number of offsets that the finished partitions had.
    finished: u64,
    messages: Vec<Message>,
    bytes: usize,
}

/// The offsets of one partition.
#[derive(Clone, Copy, Debug)]
struct Range {
    first: i64,
    next: i64,
    end: i64,
}

impl Range {
    fn length(self) -> u64 {
        u64::try_from(self.end - self.first).unwrap_or(0)
    }

    fn behind(self) -> u64 {
        u64::try_from(self.next.min(self.end) - self.first).unwrap_or(0)
    }
}

/// Returns the offsets of a partition that the client may read.
fn ends(
    client: &InquiryClient,
    topic: &str,
    partition: i32,
) -> Result<ops::Range<i64>, SourceError> {
    let ends = client.fetch_watermarks(topic, partition, OPEN_TIMEOUT);
    let (first, end) = ends.map_err(|error| {
        let what = format!("cannot read the first and last offset of {topic}/{partition}");
        SourceError::caused(what, error)
    })?;
    Ok(first..end)
}

impl Reading {
    fn open(
        config: &ClientConfig,
        brokers: &str,
        topic: &str,
        window: &TopicWindow,
    ) -> Result<Self, SourceError> {
        let consumer: InquiryClient = inquiry::client(config.clone())?;
        topics::check(&consumer, brokers, &[topic.to_owned()], OPEN_TIMEOUT)?;
        // This client sees the ends up to which its messages may be read, the other one the ends of
        // the log.
        let other = inquiry::offsets_client(config.clone())?;
        let mut kept = BTreeMap::new();
        let mut lasts = BTreeMap::new();
        for partition in topics::partitions(&consumer, brokers, topic, OPEN_TIMEOUT)? {
            // First, so that messages that come meanwhile are not taken for withheld ones.
            lasts.insert(partition, ends(&other, topic, partition)?.end);
            kept.insert(partition, ends(&consumer, topic, partition)?);
        }
        let stable: BTreeMap<i32, i64> = kept
            .iter()
            .map(|(number, kept)| (*number, kept.end))
            .collect();
        let mut left = HashMap::new();
        let mut withheld = 0;
        let mut assignment = TopicPartitionList::new();
        for (partition, ops::Range { start: first, end }) in
            window.apply(&consumer, topic, kept, OPEN_TIMEOUT)?
        {
            // A window that ends before asks for nothing behind it.
            if let Some(last) = lasts.get(&partition)
                && stable.get(&partition) == Some(&end)
            {
                withheld += u64::try_from(last - end).unwrap_or(0);
            }
            if first < end {
                let added = assignment
                    .add_partition(topic, partition)
                    .set_offset(Offset::Offset(first));
                added.map_err(|error| {
                    SourceError::caused(format!("cannot read {topic}/{partition}"), error)
                })?;
                left.insert(
                    partition,
                    Range {
                        first,
                        next: first,
                        end,
                    },
                );
            }
        }
        let assigned = consumer.assign(&assignment);
        assigned.map_err(|error| SourceError::caused(format!("cannot read {topic}"), error))?;
        let topic = Arc::from(topic);
        let routes = window.routes;
        Ok(Self {
            consumer,
            topic,
            routes,
            left,
            withheld,
            finished: 0,
            messages: Vec::new(),
            bytes: 0,
        })
    }

    fn opened(&self) -> Opened {
        let left = self.left.iter();
        Opened {
            offsets: left
                .map(|(partition, range)| (*partition, range.first..range.end))
                .collect(),
            withheld: self.withheld,
        }
    }

    fn position(&self) -> u64 {
        self.finished + self.left.values().map(|range| range.behind()).sum::<u64>()
    }

    fn run(&mut self, batches: &mpsc::Sender<Result<Batch, SourceError>>) {
        let mut progressed_at = Instant::now();
        while !self.left.is_empty() {
            let went = match self.step() {
                Ok(progress) => {
                    if progress {
                        progressed_at = Instant::now();
                    }
                    // What has arrived does not wait for messages that are late.
                    let pause = !progress && !self.messages.is_empty();
                    let full = self.messages.len() >= BATCH_MAX || self.bytes >= BATCH_BYTES;
                    if pause || full || self.left.is_empty() {
                        Some(Ok(self.batch()))
                    } else {
                        None
                    }
                }
                Err(error) => Some(Err(error)),
            };
            let silent = progressed_at.elapsed() > SILENCE_MAX;
            let went = if silent {
                Some(Err(self.silence()))
            } else {
                went
            };
            let Some(went) = went else {
                continue;
            };
            let over = went.is_err();
            // The client is not polled during this wait. That is fine, because it is in no group.
            if batches.blocking_send(went).is_err() || over {
                return;
            }
            progressed_at = Instant::now();
        }
    }

    /// Polls once; returns whether the position has moved.
    fn step(&mut self) -> Result<bool, SourceError> {
        match self.consumer.poll(POLL) {
            None => Ok(false),
            Some(Ok(borrowed)) => {
                let partition = borrowed.partition();
                let offset = borrowed.offset();
                let Some(range) = self.left.get_mut(&partition) else {
                    return Ok(false);
                };
                range.next = range.next.max(offset + 1);
                let wanted = offset < range.end;
                let over = range.next >= range.end;
                if wanted {
                    let message = convert::message(&self.topic, self.routes, &borrowed);
                    self.bytes += message.size_bytes();
                    self.messages.push(message);
                }
                drop(borrowed);
                if over {
                    self.finish(partition);
                }
                Ok(true)
            }
            // At the end of the log, all offsets that did not arrive are gaps.
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                self.finish(partition);
                Ok(true)
            }
            Some(Err(KafkaError::MessageConsumptionFatal(code))) => Err(SourceError::caused(
                format!("cannot read {}", self.topic),
                code,
            )),
            Some(Err(error)) => {
                tracing::warn!(%error, "the Kafka client reports an error; reading continues");
                Ok(false)
            }
        }
    }

    /// Stops fetching a finished partition; messages that producers add meanwhile are not read.
    fn finish(&mut self, partition: i32) {
        let Some(range) = self.left.remove(&partition) else {
            return;
        };
        self.finished += range.length();
        let mut list = TopicPartitionList::new();
        list.add_partition(&self.topic, partition);
        if let Err(error) = self.consumer.incremental_unassign(&list) {
            tracing::debug!(%error, partition, "cannot stop fetching a finished partition");
        }
    }

    fn batch(&mut self) -> Batch {
        self.bytes = 0;
        Batch {
            messages: std::mem::take(&mut self.messages),
            position: self.position(),
        }
    }

    fn silence(&self) -> SourceError {
        let mut partitions: Vec<_> = self.left.keys().collect();
        partitions.sort();
        let topic = &self.topic;
        SourceError::new(format!(
            "no message of {topic}, partitions {partitions:?}, arrived for {SILENCE_MAX:?}"
        ))
    }
}
