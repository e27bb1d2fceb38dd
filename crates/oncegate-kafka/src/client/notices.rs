//! Reads facts that librdkafka reports only in its log.
//!
//! librdkafka detects by a topic's id that the topic was deleted and recreated, and it knows the
//! position at which a partition's log no longer has a message. It raises no error or event for
//! either. It logs both before it fetches the first message from the new position, and the log
//! lines are in the same queue as the messages, so the poll thread sees the log line first.
//!
//! The wording is librdkafka's. `tests/e2e/kafka/topics.rs` fails when a version words it
//! differently.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rdkafka::config::RDKafkaLogLevel;

use crate::partitions::partition::Partition;

/// The context of librdkafka's debug log that contains topic ids. It logs metadata changes, not
/// each fetch.
pub(crate) const DEBUG_CONTEXT: &str = "metadata";

/// The id of a topic whose broker gives none (before Kafka 2.8): 16 zero bytes in base64.
const NO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

/// An event that the poll thread must act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The topic of this name was deleted and recreated.
    MadeAgain(String),
    /// The log has no message at `position`, where the partition should have continued. The client
    /// continues where `auto.offset.reset` points.
    OutOfRange { partition: Partition, position: i64 },
}

/// Parses the log, and keeps notices until the poll thread takes them.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    any: AtomicBool,
    heard: Mutex<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    /// Topic ids by topic name. They outlive a client, so that its replacement detects a change in
    /// between.
    ids: HashMap<String, String>,
    notices: Vec<Notice>,
}

impl Notices {
    /// Parses one log line.
    pub(crate) fn hear(&self, level: RDKafkaLogLevel, line: &str) {
        let notice = match parse(line) {
            Some(Line::Id { id: NO_ID, .. }) | None => None,
            Some(Line::Id { topic, id }) => {
                let former = self.heard().ids.insert(topic.to_owned(), id.to_owned());
                former
                    .filter(|former| former != id)
                    .map(|_| Notice::MadeAgain(topic.to_owned()))
            }
            // A group's starting position is logged with the same text, but not as a warning.
            Some(Line::Reset { .. }) if matches!(level, RDKafkaLogLevel::Debug) => None,
            Some(Line::Reset {
                topic,
                number,
                position,
            }) => Some(Notice::OutOfRange {
                partition: Partition {
                    topic: topic.into(),
                    number,
                },
                position,
            }),
        };
        if let Some(notice) = notice {
            self.heard().notices.push(notice);
            self.any.store(true, Ordering::Release);
        }
    }

    /// Returns the notices since the last call.
    pub(crate) fn take(&self) -> Vec<Notice> {
        if !self.any.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut self.heard().notices)
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock()
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Id {
        topic: &'a str,
        id: &'a str,
    },
    Reset {
        topic: &'a str,
        number: i32,
        position: i64,
    },
}

fn parse(line: &str) -> Option<Line<'_>> {
    let line = match line.strip_prefix("[thrd:") {
        Some(rest) => rest.split_once("]: ")?.1,
        None => line,
    };
    if let Some((topic, ids)) = line
        .strip_prefix("Topic ")
        .and_then(|rest| rest.split_once(" changed id from "))
    {
        let (_, id) = ids.split_once(" to ")?;
        return Some(Line::Id {
            topic,
            id: id.trim_end(),
        });
    }
    let (partition, reset) = line.split_once("]: offset reset (at offset ")?;
    let (topic, number) = partition.split_once(" [")?;
    let (position, _) = reset.split_once(' ')?;
    Some(Line::Reset {
        topic,
        number: number.parse().ok()?,
        position: position.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "kDXv2SbUQ9KBqzfKZqNXcA";
    const NEW: &str = "9gmSVT6LQPaHRfHQyBOGVQ";

    fn changed(topic: &str, from: &str, to: &str) -> String {
        format!("[thrd:main]: Topic {topic} changed id from {from} to {to}")
    }

    fn reset(at: &str) -> String {
        format!(
            "[thrd:main]: orders.v1 [3]: offset reset (at offset {at} (leader epoch 0), broker 1) to cached \
             BEGINNING offset 500 (leader epoch -1): fetch failed due to requested offset not available on the \
             broker: Broker: Offset out of range"
        )
    }

    #[test]
    fn a_topic_counts_as_recreated_only_when_a_known_id_changes() {
        let notices = Notices::default();
        let hear = |line: &str| {
            notices.hear(RDKafkaLogLevel::Debug, line);
            notices.take()
        };
        assert!(hear(&changed("orders", NO_ID, OLD)).is_empty());
        assert!(
            hear(&changed("refunds", NO_ID, NEW)).is_empty(),
            "another topic"
        );
        assert!(
            hear(&changed("orders", NO_ID, OLD)).is_empty(),
            "a new client logs it again"
        );
        assert!(
            hear(&changed("orders", OLD, NO_ID)).is_empty(),
            "a broker that gives no ids"
        );
        assert_eq!(
            hear(&changed("orders", NO_ID, NEW)),
            [Notice::MadeAgain("orders".to_owned())]
        );
        assert!(notices.take().is_empty(), "it is reported once");
    }

    #[test]
    fn a_position_out_of_range_is_heard_as_a_warning_alone() {
        let notices = Notices::default();
        notices.hear(RDKafkaLogLevel::Debug, &reset("10"));
        notices.hear(RDKafkaLogLevel::Warning, &reset("INVALID"));
        assert!(notices.take().is_empty());
        notices.hear(RDKafkaLogLevel::Warning, &reset("10"));
        let partition = Partition {
            topic: "orders.v1".into(),
            number: 3,
        };
        assert_eq!(
            notices.take(),
            [Notice::OutOfRange {
                partition,
                position: 10
            }]
        );
    }

    #[test]
    fn other_lines_say_nothing() {
        for line in [
            "",
            "[thrd:",
            "Topic t changed state unknown -> exists",
            "t [0]: fetch",
            "]: offset reset (at offset ",
        ] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }
}
