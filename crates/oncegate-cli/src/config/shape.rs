//! The settings of a configuration: one structure for the file, the environment, the flags, the
//! JSON schema and the table in the documentation.
//!
//! Settings of the library are its own structures, with its documentation and defaults. The others
//! are optional here, so that one that is missing does not hide the others; `check` knows what is
//! missing.

mod api;
mod door;
mod store;
mod webhook;

use std::collections::BTreeMap;
use std::path::PathBuf;

use oncegate::core::settings::TlsFiles;
use oncegate::outbox::RelaySettings;
use oncegate::{BatchLimits, ConsumerSettings, GateSettings};
use schemars::JsonSchema;
use serde::Deserialize;

pub(crate) use self::api::{Api, ApiCaller};
pub(crate) use self::door::{Door, DoorRule, Serve};
pub(crate) use self::store::{Store, WithTls, owners_elsewhere};
use super::format::Format;
use super::values::{
    FingerprintSetting, KeySetting, Names, ProgramSetting, Property, RouteSetting, Secret, Time,
};

/// The configuration of `oncegate run`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    /// The version of this form: 1.
    #[schemars(extend("const" = 1))]
    pub(crate) version: Option<u32>,
    /// Where the records are.
    pub(crate) store: Option<Store>,
    /// What every consumer inherits that does not say otherwise: any of its settings.
    #[expect(
        dead_code,
        reason = "read for its mistakes; consumers inherit from the table itself"
    )]
    pub(crate) defaults: Option<Consumer>,
    /// The consumers, each under its name, which is the scope of its keys.
    #[serde(default)]
    pub(crate) consumer: BTreeMap<String, Consumer>,
    /// The outboxes that `oncegate outbox relay` publishes, each under its name.
    #[serde(default)]
    pub(crate) outbox: BTreeMap<String, Outbox>,
    /// The doors that `oncegate serve` opens, each under its name, which is the scope of its keys.
    #[serde(default)]
    pub(crate) door: BTreeMap<String, Door>,
    /// The listeners of `oncegate serve`.
    pub(crate) serve: Option<Serve>,
    /// The page for people and probes.
    pub(crate) status: Option<Status>,
}

impl Consumer {
    /// The route that messages of this topic or queue have in keys.
    pub(crate) fn route_of<'a>(&'a self, name: &'a str) -> &'a str {
        self.route.as_ref().map_or(name, |route| route.name(name))
    }

    pub(crate) fn reads_stdin(&self) -> bool {
        self.source
            .as_ref()
            .is_some_and(|source| source.stdin.is_some())
    }
}

/// A source, a gate and a handler.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Consumer {
    /// Where messages come from: `kafka`, `sqs` or `stdin`.
    pub(crate) source: Option<crate::sources::Source>,
    /// The fields that identify a message.
    pub(crate) key: Option<KeySetting>,
    /// The route in keys, in the place of the topic or queue that a message comes from: one for
    /// all, or `{ "eu.orders" = "orders" }`. For a stream that has another name now.
    pub(crate) route: Option<RouteSetting>,
    /// The format of payloads that are not JSON: Avro, Protobuf, compressed. Keys are those of the
    /// JSON with the same values.
    pub(crate) format: Option<Format>,
    /// What else must be equal besides the key: `"payload"`, `{ except = […] }` or `"raw"`. Without
    /// it, contents are not compared.
    pub(crate) fingerprint: Option<FingerprintSetting>,
    /// The worker that handles messages: `http`, `exec` or `command`.
    pub(crate) handler: Option<Handler>,
    /// The dead-letter topic, queue or file: `kafka`, `sqs` or `file`. Without it, the consumer
    /// stops at the first dead letter.
    pub(crate) dead_letters: Option<crate::sources::DeadLetters>,
    /// The longest replay that you plan, to be checked against the retention.
    pub(crate) replay_horizon: Option<Time>,
    /// Hands the worker many messages at a time: a JSON array by `http`, or one line to `exec`.
    /// `concurrency` then counts batches. Without it, messages are handled one by one.
    pub(crate) batch: Option<BatchLimits>,
    /// A folder for larger results. Without it they are not kept.
    pub(crate) large_results: Option<PathBuf>,
    /// A file that tells what happens to each key, one JSON object in a line. A best effort: it may
    /// miss what happened just before a crash. Without it nothing is written.
    pub(crate) journal: Option<PathBuf>,
    #[serde(default, rename = "*gate")]
    #[schemars(flatten)]
    pub(crate) gate: GateSettings,
    #[serde(default, rename = "*runtime")]
    #[schemars(flatten)]
    pub(crate) runtime: ConsumerSettings,
}

/// Who does the work; one of `http`, `exec` and `command`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Handler {
    /// Call this URL for each message: `http://127.0.0.1:8080/handle`, `https://worker/handle`, or
    /// `unix:/path/of/socket`.
    pub(crate) http: Option<String>,
    /// Start this program and exchange JSON lines with it.
    pub(crate) exec: Option<ProgramSetting>,
    /// Start this program for each message.
    pub(crate) command: Option<ProgramSetting>,
    /// How many of `exec` to run.
    #[schemars(extend("default" = 1))]
    pub(crate) workers: Option<u32>,
    /// How long the worker may take. After that the outcome is unknown, and the message waits until
    /// its lease expires.
    #[schemars(extend("default" = "max_run"))]
    pub(crate) timeout: Option<Time>,
    /// Requested by `GET` until it answers with 2xx, before the first message is taken. Without it,
    /// a connection is tried.
    pub(crate) ready_url: Option<String>,
    /// Allow `http` to another machine, which is not encrypted.
    #[schemars(extend("default" = false))]
    pub(crate) allow_remote: Option<bool>,
    #[serde(default, rename = "*tls")]
    #[schemars(flatten)]
    pub(crate) tls: TlsFiles,
    /// Sent as `Authorization: Bearer …` to `http`.
    pub(crate) token: Option<Secret>,
    /// The content type of messages without one.
    #[schemars(extend("default" = "application/octet-stream"))]
    pub(crate) content_type: Option<String>,
    /// Use only HTTP/2. Over TLS, HTTP/2 is used in any case with a worker that supports it.
    #[schemars(extend("default" = false))]
    pub(crate) http2: Option<bool>,
    /// Also send messages that are not CloudEvents as CloudEvents.
    #[schemars(extend("default" = false))]
    pub(crate) cloudevents: Option<bool>,
}

impl Handler {
    /// Returns the setting, and what its worker needs and this machine does not have; `None` as far
    /// as nothing is known to be missing.
    pub(crate) fn absent(&self) -> Option<(&'static str, String)> {
        let (setting, flag, ProgramSetting(program)) = match (&self.exec, &self.command) {
            (Some(program), _) => ("exec", "--handler-exec", program),
            (None, Some(program)) => ("command", "--handler-command", program),
            (None, None) => return None,
        };
        let what = program.missing()?;
        Some((
            setting,
            format!("the worker cannot be started: {what}; change `handler.{setting}` ({flag})"),
        ))
    }
}

/// An outbox in the database of the store, and the broker that its messages go to.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Outbox {
    /// The cluster that the messages are published to. Each message names its topic. Exactly one of
    /// `kafka` and `sqs`.
    pub(crate) kafka: Option<OutboxKafka>,
    /// The queues that the messages are published to. Each message names its queue, or has its URL:
    /// `sqs = {}`.
    pub(crate) sqs: Option<OutboxSqs>,
    #[serde(default, rename = "*relay")]
    #[schemars(flatten)]
    pub(crate) relay: RelaySettings,
}

/// The cluster that an outbox is published to.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutboxKafka {
    /// Addresses of the cluster, `host:port`.
    pub(crate) brokers: Option<Names>,
    /// Properties of librdkafka, such as `"security.protocol" = "SSL"`. What comes from a file, or
    /// is a file's name, is read again when the file changes.
    #[serde(default)]
    pub(crate) properties: BTreeMap<String, Property>,
}

/// Where the queues are that an outbox is published to.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutboxSqs {
    /// The region.
    #[schemars(extend("default" = "the AWS SDK's, or the URL's"))]
    pub(crate) region: Option<String>,
    /// The address of another SQS server.
    pub(crate) endpoint_url: Option<String>,
}

/// The page for people and probes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Status {
    /// The address of the status page, `/metrics`, `/healthz` and `/readyz`, or `off`. They need no
    /// password. `off` unless set when all consumers read standard input.
    #[schemars(extend("default" = Self::LISTEN))]
    pub(crate) listen: Option<String>,
    /// Host names under which the page is reached, besides that of `listen`, `localhost` and IP
    /// addresses. Under other names it refuses to answer, so that no page of another site reads it.
    pub(crate) hosts: Option<Names>,
    /// Lets people act on the page who know a token: pause and resume a scope, read dead letters,
    /// redrive them. Without it, the page only shows.
    pub(crate) operate: Option<Operate>,
}

/// The rights of people on the page who know a token.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Operate {
    /// The token to sign in with, at least 16 bytes: a long random text. Sessions end when it
    /// changes.
    pub(crate) token: Option<Secret>,
    /// Show payloads and values of headers of dead letters.
    #[schemars(extend("default" = false))]
    pub(crate) payloads: Option<bool>,
    /// The journal of what is done on the page, one JSON object a line: when, who, why and what.
    #[schemars(extend("default" = "oncegate/journal.jsonl in $XDG_STATE_HOME or ~/.local/state"))]
    pub(crate) journal: Option<PathBuf>,
}

impl Status {
    /// The default address: only this machine can reach it.
    pub(crate) const LISTEN: &str = "127.0.0.1:9464";
}
