//! `--at orders/0@703`: one message of a topic, by its position.

use std::fmt;
use std::str::FromStr;

use oncegate::Message;
use oncegate::kafka::{TopicReader, TopicWindow};
use oncegate::message::Origin;

use crate::config::{Loaded, shape};
use crate::configured::{choose, missing};
use crate::exit::{Exit, Problem, not_opened};
use crate::parse::pair;
use crate::sources::kafka::Topics;

/// A position in a topic, as logs, dead letters and the status page write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    topic: String,
    partition: i32,
    offset: i64,
}

impl FromStr for Position {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.rsplit_once('/').and_then(|(topic, rest)| {
            let (partition, offset) = rest.split_once('@')?;
            let partition = partition.parse().ok().filter(|partition| *partition >= 0)?;
            let offset = offset.parse().ok().filter(|offset| *offset >= 0)?;
            (!topic.is_empty()).then(|| Self {
                topic: topic.to_owned(),
                partition,
                offset,
            })
        });
        parsed.ok_or_else(|| {
            let hint = if text.contains('#') {
                ". This is the position of a message in a queue, which cannot be read again: give its payload, or its \
                 --store-key from the log or the dead letter"
            } else {
                ""
            };
            format!("it must be TOPIC/PARTITION@OFFSET, such as orders/0@703{hint}")
        })
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            topic,
            partition,
            offset,
        } = self;
        write!(f, "{topic}/{partition}@{offset}")
    }
}

/// One message of a topic.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "A message in Kafka, in the place of a payload")]
pub(crate) struct AtArgs {
    /// The message at this position, as logs and dead letters write it: orders/0@703
    #[arg(long, value_name = "TOPIC/PARTITION@OFFSET", conflicts_with_all = ["headers", "message_key", "message_id", "payload"])]
    pub(crate) at: Option<Position>,

    /// Kafka's addresses, `host:port`, several with commas [default: those of the configuration]
    #[arg(long, value_name = "HOST:PORT", env = "ONCEGATE_BROKERS")]
    pub(crate) brokers: Option<String>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated [default:
    /// those of the configuration]
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair)]
    pub(crate) properties: Vec<(String, String)>,
}

impl AtArgs {
    /// Reads the message, if a position is given. `settings` are those of its consumer.
    ///
    /// # Errors
    /// When there is no such message, or the brokers do not answer.
    pub(crate) async fn message(
        &self,
        consumer: Option<(&str, &shape::Consumer)>,
    ) -> Result<Option<Message>, Problem> {
        let Some(position) = &self.at else {
            return Ok(None);
        };
        let mut access = match consumer {
            Some((name, settings)) => cluster(name, settings, position)?,
            None => TopicAccess::default(),
        };
        if let Some(brokers) = &self.brokers {
            access.brokers.clone_from(brokers);
        }
        if access.brokers.is_empty() {
            return Err(missing("--brokers"));
        }
        if !self.properties.is_empty() {
            access.properties.clone_from(&self.properties);
        }
        read(&access, position).await.map(Some)
    }
}

/// Returns the consumer that a command is about: the one that is named, or else the only one that
/// consumes the topic of the position.
///
/// # Errors
/// When there is no such consumer, or there are several.
pub(crate) fn choose_at<'a>(
    loaded: &'a Loaded,
    scope: Option<&str>,
    at: Option<&Position>,
) -> Result<(&'a str, &'a shape::Consumer), Problem> {
    if let (None, Some(position)) = (scope, at) {
        let mut consuming = loaded.consumers().filter(|(_, settings)| {
            consumed(settings).is_some_and(|it| it.contains(&position.topic))
        });
        if let (Some(one), None) = (consuming.next(), consuming.next()) {
            return Ok(one);
        }
    }
    choose(loaded, scope)
}

/// The topics that a consumer of Kafka consumes.
fn consumed(settings: &shape::Consumer) -> Option<Vec<String>> {
    let kafka = settings.source.as_ref()?.kafka.as_ref()?;
    Some(kafka.topics.clone().unwrap_or_default().0)
}

/// The way to the message.
#[derive(Debug, Default)]
struct TopicAccess {
    brokers: String,
    properties: Vec<(String, String)>,
    routes_from_headers: bool,
}

fn cluster(
    name: &str,
    settings: &shape::Consumer,
    position: &Position,
) -> Result<TopicAccess, Problem> {
    let kafka = settings
        .source
        .as_ref()
        .and_then(|source| source.kafka.as_ref());
    let kafka = kafka.ok_or_else(|| {
        let why = "it does not read topics of Kafka, and --at is a position in one: give the payload of the message, or its \
                   --store-key";
        Problem::configuration(why).of(name)
    })?;
    let Topics {
        brokers,
        properties,
        consumed,
        ..
    } = kafka
        .cluster(name, settings.dead_letters.as_ref())
        .map_err(|why| Problem::configuration(why).of(name))?;
    if !consumed.contains(&position.topic) {
        let why = format!(
            "it does not consume the topic {}, so the message has another key or none: --at takes positions in {}",
            position.topic,
            consumed.join(", ")
        );
        return Err(Problem::configuration(why).of(name));
    }
    Ok(TopicAccess {
        brokers,
        properties,
        routes_from_headers: kafka.settings.routes_from_headers,
    })
}

/// Reads the one message. It joins no group and commits nothing.
async fn read(access: &TopicAccess, position: &Position) -> Result<Message, Problem> {
    let Position {
        topic,
        partition,
        offset,
    } = position;
    let window = TopicWindow::new()
        .partition(*partition)
        .from_offset(*offset);
    let window = if access.routes_from_headers {
        window.routes_from_headers()
    } else {
        window
    };
    let properties = access.properties.iter().cloned();
    let opened = TopicReader::open_window(&access.brokers, topic, properties, window).await;
    let mut reader = opened.map_err(|error| not_opened(&error))?;
    let Some(left) = reader.offsets().get(partition).cloned() else {
        let why = match reader.withheld() {
            0 => "there is no message yet: the partition ends before this offset",
            _ => "it is not readable yet: it is behind an open transaction, or not written",
        };
        return Err(nothing(position, why));
    };
    if left.start > *offset {
        let why = format!(
            "it is gone: the partition begins at offset {} now, because the topic's retention has deleted what was \
             before",
            left.start
        );
        return Err(nothing(position, &why));
    }
    let first = reader.next_batch().await?;
    let found = first.and_then(|batch| batch.into_iter().next());
    found
        .filter(|message| {
            matches!(message.origin(), Origin::Kafka { offset: found, .. } if i64::eq(found, offset))
        })
        .ok_or_else(|| {
            let why = "there is no message: it was compacted away, belongs to an aborted transaction, or the offset is \
                       that of a transaction's end";
            nothing(position, why)
        })
}

fn nothing(position: &Position, why: &str) -> Problem {
    Problem::new(Exit::BadData, format!("--at {position}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_what_logs_write() {
        let position: Position = "eu/orders.v1/12@9007199254740993".parse().unwrap();
        assert_eq!(
            position,
            Position {
                topic: "eu/orders.v1".to_owned(),
                partition: 12,
                offset: 9_007_199_254_740_993,
            }
        );
        assert_eq!(position.to_string(), "eu/orders.v1/12@9007199254740993");
    }

    #[test]
    fn something_else_is_refused_in_words() {
        for wrong in [
            "",
            "orders",
            "orders/0",
            "orders@7",
            "/0@7",
            "orders/-1@7",
            "orders/0@x",
        ] {
            let why = wrong.parse::<Position>().unwrap_err();
            assert!(why.contains("orders/0@703"), "{wrong}: {why}");
        }
        let why = "jobs#8c2e".parse::<Position>().unwrap_err();
        assert!(
            why.contains("queue") && why.contains("--store-key"),
            "{why}"
        );
    }
}
