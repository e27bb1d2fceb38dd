//! Reads and redrives the dead letters of a topic.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{CommitMode, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Header as OwnedHeader;
use rdkafka::topic_partition_list::Offset;

use super::reader::TopicReader;
use super::window::TopicWindow;
use crate::ask::group_offsets;
use crate::client::headers::{PREFIX, ROUTE_HEADER};
use crate::client::inquiry::{self, InquiryClient};
use crate::client::producer::DurableProducer;
use crate::client::settings::{self, Property};
use crate::produce::dead_letters;
use oncegate_runtime::dead_letter_reader::{DeadLetterReader, Disposition, StoredDeadLetter};
use oncegate_runtime::dead_letters::{DeadLetter, time_of};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::{Header, Message, Origin};
use oncegate_runtime::source::SourceError;

/// Reads the dead letters that a topic has when it is opened, in order within each partition.
///
/// Dead letters stay in the topic, also after a redrive. If a consumer group is set with
/// [`progress`](Self::progress), the settled positions are saved as its offsets, and the next
/// reader with the same group continues there.
pub struct KafkaDeadLetterReader {
    brokers: String,
    topic: String,
    properties: Vec<Property>,
    group: Option<String>,
    open: Option<OpenReader>,
}

struct OpenReader {
    reader: TopicReader,
    producer: DurableProducer,
    progress: Option<Progress>,
}

/// The settled offsets, in memory and as committed by the group.
struct Progress {
    client: Arc<InquiryClient>,
    /// The first unsettled offset by partition, for partitions that have moved since the last save.
    moved: BTreeMap<i32, i64>,
    /// Partitions with a dead letter that must be read again. Their offsets do not move past it.
    held: BTreeSet<i32>,
}

impl KafkaDeadLetterReader {
    /// Creates a reader for `topic` in the cluster at `brokers` (`"host:port,host:port"`).
    pub fn new(brokers: impl Into<String>, topic: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            topic: topic.into(),
            properties: Vec::new(),
            group: None,
            open: None,
        }
    }

    /// Sets a property of librdkafka, such as `security.protocol`, for reading and for sending.
    #[must_use]
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.push((name.into(), value.into()));
        self
    }

    /// Saves settled positions as the offsets of this consumer group, which has no members. Not set
    /// by default: nothing is saved.
    ///
    /// It needs the right to read the group. Brokers delete the offsets of an unused group, after a
    /// week by default.
    #[must_use]
    pub fn progress(mut self, group: impl Into<String>) -> Self {
        self.group = Some(group.into());
        self
    }

    fn opened(&mut self) -> Result<&mut OpenReader, SourceError> {
        self.open
            .as_mut()
            .ok_or_else(|| SourceError::new("the dead-letter reader has not been opened"))
    }
}

#[async_trait]
impl DeadLetterReader for KafkaDeadLetterReader {
    async fn open(&mut self) -> Result<(), SourceError> {
        settings::check_topic(&self.topic)?;
        let producer = DurableProducer::new(&self.brokers, self.properties.clone().into())?;
        let mut progress = None;
        let mut starts = BTreeMap::new();
        if let Some(group) = &self.group {
            let mut config = settings::client(&self.brokers, &self.properties)?;
            config
                .set("group.id", group)
                .set("enable.auto.commit", "false");
            let brokers = self.brokers.clone();
            let topic = self.topic.clone();
            let asking = blocking(move || {
                let client = inquiry::client(config)?;
                let starts = group_offsets::of_client(&client, &brokers, &topic)?;
                Ok((client, starts))
            });
            let (client, committed) = asking.await?;
            starts = committed;
            let client = Arc::new(client);
            progress = Some(Progress {
                client,
                moved: BTreeMap::new(),
                held: BTreeSet::new(),
            });
        }
        let reader = TopicReader::open_window(
            self.brokers.clone(),
            self.topic.clone(),
            self.properties.clone(),
            TopicWindow::starting(starts),
        )
        .await?;
        self.open = Some(OpenReader {
            reader,
            producer,
            progress,
        });
        Ok(())
    }

    async fn next_batch(&mut self) -> Result<Option<Vec<StoredDeadLetter>>, SourceError> {
        let batch = self.opened()?.reader.next_batch().await?;
        Ok(batch.map(|messages| {
            messages
                .into_iter()
                .map(|message| StoredDeadLetter::of(message, read))
                .collect()
        }))
    }

    fn destination(&self, stored: &StoredDeadLetter, to: Option<&str>) -> Result<String, String> {
        let topic = match (to, stored.message().origin()) {
            (Some(to), _) => to,
            (None, Origin::Kafka { topic, .. }) if stored.letter().is_some() => topic,
            (None, Origin::Queue { .. } | Origin::Other(_)) if stored.letter().is_some() => {
                return Err(format!(
                    "its origin is {}, which is not a topic: name a topic",
                    stored.message().origin()
                ));
            }
            (None, _) => return Err("it has no origin: name a topic".to_owned()),
        };
        if topic == self.topic {
            return Err(format!(
                "{topic} is the dead-letter topic itself: name another topic"
            ));
        }
        Ok(topic.to_owned())
    }

    async fn send(&self, stored: &StoredDeadLetter, destination: &str) -> Result<(), BoxError> {
        let open = self
            .open
            .as_ref()
            .ok_or("the dead-letter reader has not been opened")?;
        let message = stored.message();
        let mut headers = dead_letters::own_headers(message);
        // A message that oncegate did not write gets its route from the topic.
        if stored.letter().is_some() {
            headers = headers.insert(OwnedHeader {
                key: ROUTE_HEADER,
                value: Some(message.route()),
            });
        }
        let sent = open
            .producer
            .send(destination, message.into(), headers)
            .await;
        sent.map_err(|error| {
            format!(
                "{} to {destination}: {}",
                stored.place,
                open.producer.explain(&error)
            )
            .into()
        })
    }

    fn settle(&mut self, stored: &StoredDeadLetter, settled: Disposition) {
        let Origin::Kafka {
            partition, offset, ..
        } = stored.place
        else {
            return;
        };
        let Some(progress) = self.open.as_mut().and_then(|open| open.progress.as_mut()) else {
            return;
        };
        match settled {
            Disposition::Left => {
                progress.held.insert(partition);
            }
            Disposition::Sent | Disposition::Passed if !progress.held.contains(&partition) => {
                progress.moved.insert(partition, offset + 1);
            }
            Disposition::Sent | Disposition::Passed => {}
        }
    }

    async fn save(&mut self) -> Result<(), SourceError> {
        let topic = self.topic.clone();
        let Some(progress) = self.opened()?.progress.as_mut() else {
            return Ok(());
        };
        let moved = std::mem::take(&mut progress.moved);
        if moved.is_empty() {
            return Ok(());
        }
        let client = Arc::clone(&progress.client);
        blocking(move || {
            commit(&client, &topic, &moved)
                .map_err(|error| SourceError::caused("the progress could not be saved", error))
        })
        .await
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        if self.open.is_some() {
            self.save().await?;
        }
        // A client that is dropped waits for its threads.
        let open = self.open.take();
        blocking(move || {
            drop(open);
            Ok(())
        })
        .await
    }
}

impl fmt::Debug for KafkaDeadLetterReader {
    /// Shows no property values, because they may be passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaDeadLetterReader")
            .field("brokers", &self.brokers)
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

/// Runs a blocking call of librdkafka on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SourceError> + Send + 'static,
) -> Result<T, SourceError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| SourceError::caused("the Kafka client has panicked", error))?
}

fn commit(
    client: &InquiryClient,
    topic: &str,
    moved: &BTreeMap<i32, i64>,
) -> Result<(), KafkaError> {
    let mut list = TopicPartitionList::new();
    for (partition, offset) in moved {
        list.add_partition(topic, *partition)
            .set_offset(Offset::Offset(*offset))?;
    }
    // A client asks for its next token in `poll`.
    while client.poll(Duration::ZERO).is_some() {}
    client.commit(&list, CommitMode::Sync)
}

/// Decodes a dead letter that oncegate wrote; `None` for other messages.
fn read(kept: &Message) -> Option<DeadLetter> {
    let origin = match kafka_origin(kept) {
        Some(origin) => origin,
        None => Origin::parse(word(kept, "origin")?),
    };
    let own: Vec<Header> = kept
        .headers()
        .iter()
        .filter(|header| !header.name.starts_with(PREFIX))
        .cloned()
        .collect();
    let route = word(kept, "route")?;
    let mut message = Message::new(route, origin, kept.payload_bytes()).with_headers(own);
    if let Some(key) = kept.key() {
        message = message.with_key(Bytes::copy_from_slice(key));
    }
    if let Some(timestamp_ms) =
        word(kept, "origin-timestamp").and_then(|millis| millis.parse().ok())
    {
        message = message.with_timestamp_ms(timestamp_ms);
    }
    Some(DeadLetter {
        message,
        scope: word(kept, "scope")?.to_owned(),
        key: word(kept, "key").map(str::to_owned),
        cause: word(kept, "cause")?.parse().ok()?,
        reason: word(kept, "reason").unwrap_or_default().to_owned(),
        attempts: word(kept, "attempts")
            .and_then(|count| count.parse().ok())
            .unwrap_or(0),
        first_failed_at: time(kept, "first-failed-at"),
        failed_at: time(kept, "failed-at")?,
    })
}

/// Returns the text of one of our headers, by its name without the prefix.
fn word<'a>(kept: &'a Message, name: &str) -> Option<&'a str> {
    std::str::from_utf8(kept.header(&format!("{PREFIX}{name}"))?).ok()
}

fn time(kept: &Message, name: &str) -> Option<SystemTime> {
    time_of(word(kept, name)?.parse().ok()?)
}

fn kafka_origin(kept: &Message) -> Option<Origin> {
    Some(Origin::Kafka {
        topic: word(kept, "origin-topic")?.into(),
        partition: word(kept, "origin-partition")?.parse().ok()?,
        offset: word(kept, "origin-offset")?.parse().ok()?,
    })
}
