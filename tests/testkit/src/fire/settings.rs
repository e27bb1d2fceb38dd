//! The settings of the workers of one run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::kafka::Kafka;
use crate::unique;

/// Which store the workers use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreKind {
    /// A Redis server of the run's own.
    Redis,
    /// One file that all workers share.
    Sqlite,
    /// A PostgreSQL server of the run's own.
    Postgres,
    /// An emulator of DynamoDB, of the run's own.
    DynamoDb,
}

/// How the members of a group agree on the assignment of partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    /// Among themselves, cooperatively.
    Classic,
    /// The broker assigns. It also decides on the members' sessions.
    New,
}

/// Settings of a worker process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerSettings {
    /// Which store.
    pub store: StoreKind,
    /// Its URL or path.
    pub address: String,
    /// The scope of the keys.
    pub scope: String,
    /// The Kafka brokers.
    pub brokers: String,
    /// The consumer group.
    pub group: String,
    /// Where orders come from.
    pub topic: String,
    /// The dead-letter topic.
    pub dead_topic: String,
    /// The file of the effects.
    pub ledger: PathBuf,
    /// The file of the history.
    pub history: PathBuf,
    /// Downstream systems that are paid as well.
    pub sinks: Vec<PathBuf>,
    /// Where every retry waits, and for how long; in its lane without.
    pub retries: Option<(Duration, String)>,
    /// How the worker is a member of its group.
    pub protocol: Protocol,
    /// How long its poll thread may be away; as by default without.
    pub poll_interval: Option<Duration>,
}

impl WorkerSettings {
    /// A classic member of a new group, with a new scope, whose files are in `folder`.
    #[must_use]
    pub fn new(
        (store, address): (StoreKind, &str),
        kafka: &Kafka,
        (topic, dead_topic): (String, String),
        folder: &Path,
    ) -> Self {
        Self {
            store,
            address: address.to_owned(),
            scope: unique("fire"),
            brokers: kafka.bootstrap().to_owned(),
            group: unique("fire"),
            topic,
            dead_topic,
            ledger: folder.join("ledger"),
            history: folder.join("history"),
            sinks: Vec::new(),
            retries: None,
            protocol: Protocol::Classic,
            poll_interval: None,
        }
    }

    /// The settings as the argument of a worker.
    pub(super) fn as_json(&self) -> String {
        serde_json::to_string(self).expect("settings are plain data")
    }
}
