//! The topics and queues that a consumer's settings name: whether they exist, and creating those
//! that do not.

use async_trait::async_trait;
use serde::Serialize;

use crate::exit::Problem;
use crate::output::plain;

/// The purpose of a topic or queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    Source,
    Retry,
    DeadLetters,
}

/// The state of a topic or queue in its broker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    Exists,
    Missing,
    Created,
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Topic,
    Queue,
}

/// A topic or queue of the configuration.
#[derive(Debug, Serialize)]
pub(crate) struct NamedTopic {
    pub(crate) topic: String,
    pub(crate) kind: Kind,
    pub(crate) consumer: String,
    pub(crate) role: Role,
    pub(crate) state: State,
    /// Of an existing topic, or as asked for; `null` stands for the brokers' default, and of a
    /// queue.
    pub(crate) partitions: Option<usize>,
    pub(crate) replicas: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The wishes for new topics and queues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// The number of partitions, or the brokers' default.
    pub(crate) partitions: Option<u16>,
    /// The number of replicas of each partition, or the brokers' default.
    pub(crate) replication_factor: Option<u16>,
    /// Leave out what is consumed: it belongs to its producers.
    pub(crate) except_sources: bool,
}

/// The topics or queues of one consumer, and their broker.
#[async_trait]
pub(crate) trait Topology: Send {
    /// Returns the broker's address: the same name at the same address is the same topic or queue.
    fn broker(&self) -> &str;

    fn named(&self) -> &[NamedTopic];

    /// Leaves out those for which `is_wanted` returns `false`.
    fn retain(&mut self, is_wanted: &dyn Fn(&NamedTopic) -> bool);

    /// Returns the topics whose messages may come into the others, unless that is of no account.
    fn consumed(&self) -> &[String] {
        &[]
    }

    /// Asks the broker which of them exist.
    ///
    /// # Errors
    /// When the broker does not answer.
    async fn look(&mut self) -> Result<(), Problem>;

    /// Creates those that are missing; `consumed` are the topics of all consumers of this broker.
    /// One that is refused has its reason.
    ///
    /// # Errors
    /// When the broker does not answer.
    async fn create(&mut self, wanted: &Wanted, consumed: &[String]) -> Result<(), Problem>;
}

impl NamedTopic {
    /// Names a topic or queue of `consumer` that may be missing.
    pub(crate) fn new(topic: String, kind: Kind, consumer: &str, role: Role) -> Self {
        Self {
            topic,
            kind,
            consumer: consumer.to_owned(),
            role,
            state: State::Missing,
            partitions: None,
            replicas: None,
            reason: None,
        }
    }

    pub(crate) fn is_missing(&self) -> bool {
        self.state == State::Missing
    }

    /// Notes what is dangerous about one that exists.
    pub(crate) fn warn(&mut self, warnings: &[String]) {
        self.reason = (!warnings.is_empty()).then(|| warnings.join("\n"));
    }

    /// Notes that the broker refuses to create it, and why.
    pub(crate) fn refuse(&mut self, reason: &Problem) {
        self.state = State::Refused;
        self.reason = Some(reason.to_string());
    }

    fn purpose(&self) -> String {
        let consumer = plain(&self.consumer);
        match self.role {
            Role::Source => format!("consumed by {consumer}"),
            Role::Retry => format!("retries of {consumer}"),
            Role::DeadLetters => format!("dead letters of {consumer}"),
        }
    }

    fn size(&self) -> String {
        if self.kind == Kind::Queue {
            return "a quorum queue".to_owned();
        }
        format!(
            "{}, {}",
            counted(self.partitions, "partition"),
            counted(self.replicas, "replica")
        )
    }

    /// Returns the line that says whether it exists.
    pub(crate) fn found(&self) -> String {
        let topic = plain(&self.topic);
        match (self.is_missing(), self.kind) {
            (true, _) => format!("{topic}: to create, {} ({})", self.size(), self.purpose()),
            // Most brokers do not say what an existing queue is.
            (false, Kind::Queue) => {
                let warnings = self.reason.iter().flat_map(|reason| reason.lines());
                let warnings: String = warnings
                    .map(|warning| format!("\n  warning: {}", plain(warning)))
                    .collect();
                format!("{topic}: exists ({}){warnings}", self.purpose())
            }
            (false, Kind::Topic) => {
                format!("{topic}: exists, {} ({})", self.size(), self.purpose())
            }
        }
    }

    /// Returns the lines that say what was done about it; `None` when nothing was.
    pub(crate) fn done(&self) -> Option<String> {
        match (&self.state, &self.reason) {
            (State::Created, _) => Some(format!("created {}", plain(&self.topic))),
            (State::Refused, Some(reason)) => {
                Some(reason.lines().map(plain).collect::<Vec<_>>().join("\n"))
            }
            _ => None,
        }
    }
}

fn counted(count: Option<usize>, what: &str) -> String {
    match count {
        Some(1) => format!("1 {what}"),
        Some(count) => format!("{count} {what}s"),
        None => format!("the brokers' number of {what}s"),
    }
}
