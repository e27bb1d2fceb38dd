//! Reading a whole topic, from its beginning to the end it has when the reading starts.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::topic_partition_list::Offset;
use rdkafka::{Message as _, TopicPartitionList};
use tokio::sync::{mpsc, oneshot};

use super::convert::{self, Routes};
use super::{member, settings, topics};
use crate::message::Message;
use crate::source::SourceError;

/// How many messages a batch has at the most.
const BATCH_MAX: usize = 1_000;

/// A batch ends when it has so many bytes.
const BATCH_BYTES: usize = 1 << 20;

/// How many batches are read ahead.
const BATCHES_AHEAD: usize = 4;

/// How long opening waits for the brokers, question by question.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for the next message before giving up: what is missing was there when we looked.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// How long one poll waits.
const POLL: Duration = Duration::from_millis(100);

/// All messages that a topic holds, partition by partition in their order, up to the end that the topic has
/// when the reader opens.
///
/// It joins no group and commits nothing. Memory is bounded, however long the topic: a few batches of at most
/// 1,000 messages and little more than 1 MiB, and librdkafka's queue of 16 MiB. Aborted messages do not appear.
/// Dropping it stops the reading.
pub struct TopicReader {
    batches: mpsc::Receiver<Result<Batch, SourceError>>,
    total: u64,
    position: u64,
}

struct Batch {
    messages: Vec<Message>,
    /// Offsets behind us, those without a message included.
    position: u64,
}

impl TopicReader {
    /// Opens `topic` in the cluster at `brokers`, with properties of librdkafka as in
    /// [`KafkaSource::property`](super::KafkaSource::property).
    ///
    /// # Errors
    /// When no broker answers, the topic does not exist, or a property is not usable.
    pub async fn open(
        brokers: impl Into<String>,
        topic: impl Into<String>,
        properties: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, SourceError> {
        let properties: Vec<_> = properties.into_iter().collect();
        Self::open_from(brokers.into(), topic.into(), &properties, BTreeMap::new()).await
    }

    /// The same, beginning at these offsets where there are any.
    pub(crate) async fn open_from(
        brokers: String,
        topic: String,
        properties: &[(String, String)],
        starts: BTreeMap<i32, i64>,
    ) -> Result<Self, SourceError> {
        settings::check_topic(&topic)?;
        let mut config = settings::client(&brokers, properties)?;
        config
            // The client wants the name of a group even of those who never join one.
            .set("group.id", "oncegate-reader")
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("enable.partition.eof", "true")
            // Retention may delete the beginning while we read: then what is left begins later.
            .set("auto.offset.reset", "earliest");
        let (batches, receiver) = mpsc::channel(BATCHES_AHEAD);
        let (opened, opening) = oneshot::channel();
        let body = move || match Reading::open(&config, &brokers, &topic, &starts) {
            Ok(mut reading) => {
                if opened.send(Ok(reading.total())).is_ok() {
                    reading.run(&batches);
                }
            }
            Err(error) => drop(opened.send(Err(error))),
        };
        let thread = std::thread::Builder::new().name("oncegate-reader".to_owned());
        thread.spawn(body).map_err(|error| SourceError::caused("no thread to read the topic", error))?;
        let total = opening.await.map_err(|error| SourceError::caused("the reader has ended", error))??;
        Ok(Self { batches: receiver, total, position: 0 })
    }

    /// How many offsets there are to read. A compacted topic, or one with transactions, has fewer messages.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// How many of them are behind us; at the end, [`total`](Self::total).
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next messages, in the order of each partition; `None` at the end. Dropping the future loses nothing.
    ///
    /// # Errors
    /// When the brokers stay silent for a minute, or refuse. Then the reading is over, and it is incomplete.
    pub async fn next_batch(&mut self) -> Result<Option<Vec<Message>>, SourceError> {
        while self.position < self.total {
            let Some(batch) = self.batches.recv().await else {
                return Err(SourceError::new("the reading ended before the end of the topic"));
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

/// The reading thread's side.
struct Reading {
    consumer: BaseConsumer<Context>,
    topic: Arc<str>,
    /// What is left to read, by partition.
    left: HashMap<i32, Range>,
    /// Offsets of partitions that are read to their end.
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

impl Reading {
    fn open(
        config: &ClientConfig,
        brokers: &str,
        topic: &str,
        starts: &BTreeMap<i32, i64>,
    ) -> Result<Self, SourceError> {
        let consumer: BaseConsumer<Context> =
            config.create_with_context(Context).map_err(settings::unusable)?;
        topics::check(&consumer, brokers, &[topic.to_owned()], OPEN_TIMEOUT)?;
        let (mut left, mut assignment) = (HashMap::new(), TopicPartitionList::new());
        for partition in topics::partitions(&consumer, brokers, topic, OPEN_TIMEOUT)? {
            let failed = |error| {
                SourceError::caused(format!("the ends of {topic}/{partition} are not to be had"), error)
            };
            let (first, end) = consumer.fetch_watermarks(topic, partition, OPEN_TIMEOUT).map_err(failed)?;
            let first = starts.get(&partition).map_or(first, |start| first.max(*start));
            if first < end {
                let added = assignment.add_partition_offset(topic, partition, Offset::Offset(first));
                added.map_err(failed)?;
                left.insert(partition, Range { first, next: first, end });
            }
        }
        let assigned = consumer.assign(&assignment);
        assigned.map_err(|error| SourceError::caused(format!("cannot read {topic}"), error))?;
        let topic = Arc::from(topic);
        Ok(Self { consumer, topic, left, finished: 0, messages: Vec::new(), bytes: 0 })
    }

    fn total(&self) -> u64 {
        self.finished + self.left.values().map(|range| range.length()).sum::<u64>()
    }

    fn position(&self) -> u64 {
        self.finished + self.left.values().map(|range| range.behind()).sum::<u64>()
    }

    fn run(&mut self, batches: &mpsc::Sender<Result<Batch, SourceError>>) {
        let mut heard = Instant::now();
        while !self.left.is_empty() {
            let went = match self.step() {
                Ok(progress) => {
                    if progress {
                        heard = Instant::now();
                    }
                    let pause = !progress && !self.messages.is_empty();
                    let full = self.messages.len() >= BATCH_MAX || self.bytes >= BATCH_BYTES;
                    if pause || full || self.left.is_empty() { Some(Ok(self.batch())) } else { None }
                }
                Err(error) => Some(Err(error)),
            };
            let silent = heard.elapsed() > SILENCE_MAX;
            let went = if silent { Some(Err(self.silence())) } else { went };
            let Some(went) = went else {
                continue;
            };
            let over = went.is_err();
            // Nobody polls while we wait here, and nobody has to: there is no group.
            if batches.blocking_send(went).is_err() || over {
                return;
            }
            heard = Instant::now();
        }
    }

    /// Polls once; whether it brought us forward.
    fn step(&mut self) -> Result<bool, SourceError> {
        match self.consumer.poll(POLL) {
            None => Ok(false),
            Some(Ok(borrowed)) => {
                let (partition, offset) = (borrowed.partition(), borrowed.offset());
                let Some(range) = self.left.get_mut(&partition) else {
                    return Ok(false);
                };
                range.next = range.next.max(offset + 1);
                let (wanted, over) = (offset < range.end, range.next >= range.end);
                if wanted {
                    let message = convert::message(&self.topic, Routes::Topics, &borrowed);
                    self.bytes += message.size_bytes();
                    self.messages.push(message);
                }
                drop(borrowed);
                if over {
                    self.finish(partition);
                }
                Ok(true)
            }
            // The end of the log: whatever was missing up to our end are gaps.
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                self.finish(partition);
                Ok(true)
            }
            Some(Err(KafkaError::MessageConsumptionFatal(code))) => {
                Err(SourceError::caused(format!("cannot read {}", self.topic), code))
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "Kafka reports trouble; reading goes on");
                Ok(false)
            }
        }
    }

    /// This partition has nothing more for us; what producers add meanwhile need not be fetched.
    fn finish(&mut self, partition: i32) {
        let Some(range) = self.left.remove(&partition) else {
            return;
        };
        self.finished += range.length();
        let mut list = TopicPartitionList::new();
        list.add_partition(&self.topic, partition);
        if let Err(error) = self.consumer.incremental_unassign(&list) {
            tracing::debug!(%error, partition, "a partition that is read could not be let go");
        }
    }

    fn batch(&mut self) -> Batch {
        self.bytes = 0;
        Batch { messages: std::mem::take(&mut self.messages), position: self.position() }
    }

    fn silence(&self) -> SourceError {
        let mut partitions: Vec<_> = self.left.keys().collect();
        partitions.sort();
        let topic = &self.topic;
        SourceError::new(format!("nothing came from {topic}, partitions {partitions:?}, for {SILENCE_MAX:?}"))
    }
}

/// The reader's callbacks: librdkafka's log.
#[derive(Debug)]
struct Context;

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        member::log(level, facility, line);
    }

    fn error(&self, _error: KafkaError, reason: &str) {
        tracing::debug!(reason, "Kafka client error");
    }

    fn stats_raw(&self, _statistics: &[u8]) {}
}

impl ConsumerContext for Context {
    fn commit_callback(&self, _result: KafkaResult<()>, _offsets: &TopicPartitionList) {}
}
