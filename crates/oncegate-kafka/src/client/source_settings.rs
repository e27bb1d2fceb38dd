//! The settings of a source that are the same for every cluster, group and topic.

use std::time::Duration;

use oncegate_core::settings::Finding;
#[cfg(feature = "config")]
use oncegate_core::settings::Time;

use super::convert::Routes;

/// The position at which a group without committed offsets begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum StartAt {
    /// The oldest message. The default.
    #[default]
    Beginning,
    /// The end of the topic. Existing messages are skipped, also when the committed offsets have
    /// expired.
    ///
    /// The position is committed at once, for all partitions of the topic, before any message is
    /// received: later messages are never skipped, even if the process ends before the first
    /// message is finished. A partition that the topic gains later begins with its first message.
    End,
}

/// The settings of a [`KafkaSource`](crate::KafkaSource), besides its cluster, its group, its
/// topics and the properties of librdkafka.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct KafkaSettings {
    /// The static member of the group that this process is, another one for each process
    /// (`group.instance.id`).
    ///
    /// A restart within the session timeout gets the same partitions back, and the group does not
    /// rebalance. During that time no other member gets the partitions, and closing the source does
    /// not release them. A second process with the same id replaces the first one, which then stops
    /// with an error that names `static_member`. In the new protocol the second process instead
    /// waits until the first one has ended, at most 90 s. An id is 1 to 249 letters, digits, dots,
    /// underscores or dashes.
    pub static_member: Option<String>,
    /// The start of a group without committed offsets: `beginning` or `end`.
    pub from: StartAt,
    /// The time between two commits of finished offsets, 10ms to 1d.
    ///
    /// After a crash, messages finished since the last commit are delivered again.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub commit_interval: Duration,
    /// The time that a rebalance waits for work that has started, at most half of
    /// `max.poll.interval.ms`.
    ///
    /// A handler that takes longer continues, and its message is delivered again to the partition's
    /// next owner.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub drain_timeout: Duration,
    /// The number of messages of a partition that may be received beyond the first unfinished one.
    ///
    /// It bounds how many messages are delivered again after a crash, and the memory for their
    /// offsets (16 bytes each). A partition over the limit is paused until it is down to half of
    /// it. All partitions of the source and its retry topics together may have ten times as many:
    /// beyond that, those with more than an equal share are paused.
    pub unfinished_messages: usize,
    /// Take routes from the header `oncegate-route`: for topics to which oncegate alone writes.
    ///
    /// A dead letter or a redriven message keeps its first route so, and its key. A service that
    /// copies all headers would give its own messages the wrong route.
    pub routes_from_headers: bool,
    /// Continue at the committed positions when topics get other ids, instead of reading them from
    /// their beginning: for an address that is switched to another cluster, which has the same
    /// messages at the same offsets.
    ///
    /// A topic that was deleted and recreated has another id, and positions in the deleted topic
    /// mean nothing in the new one. Messages of a topic that was really recreated are then skipped,
    /// up to the old position.
    pub keep_positions_of_recreated_topics: bool,
    /// The time limit of one attempt to open, in which the brokers must answer, at most a day.
    #[cfg_attr(feature = "config", serde(skip))]
    pub open_timeout: Duration,
    /// The number of messages that wait to be received, in addition to librdkafka's own queue.
    #[cfg_attr(feature = "config", serde(skip))]
    pub buffered_messages: usize,
    /// The bytes of messages that wait to be received.
    ///
    /// The buffer may exceed it by 1 MiB and one message. The limit of librdkafka's own queue is
    /// `queued.max.messages.kbytes`, 16 MiB here.
    #[cfg_attr(feature = "config", serde(skip))]
    pub buffered_bytes: usize,
}

/// The longest time that a setting may name.
const LONGEST: Duration = Duration::from_secs(24 * 3_600);

/// The shortest time between two commits.
const COMMIT_INTERVAL_MIN: Duration = Duration::from_millis(10);

impl KafkaSettings {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        static_member: None,
        from: StartAt::Beginning,
        commit_interval: Duration::from_secs(1),
        drain_timeout: Duration::from_secs(10),
        unfinished_messages: 100_000,
        routes_from_headers: false,
        keep_positions_of_recreated_topics: false,
        open_timeout: Duration::from_secs(10),
        buffered_messages: 10_000,
        buffered_bytes: 32 << 20,
    };

    /// Returns what is wrong with these settings alone.
    pub fn check(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let interval = self.commit_interval;
        if !(COMMIT_INTERVAL_MIN..=LONGEST).contains(&interval) {
            findings.push(Finding::new(
                "commit_interval",
                format!(
                    "commit_interval is {interval:?}, and must be between {COMMIT_INTERVAL_MIN:?} and {LONGEST:?}"
                ),
            ));
        }
        let timeout = self.open_timeout;
        if timeout > LONGEST {
            findings.push(Finding::new(
                "open_timeout",
                format!("open_timeout is {timeout:?}, and must be at most {LONGEST:?}"),
            ));
        }
        findings
    }

    pub(crate) fn routes(&self) -> Routes {
        if self.routes_from_headers {
            Routes::Headers
        } else {
            Routes::Topics
        }
    }
}

impl Default for KafkaSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}
