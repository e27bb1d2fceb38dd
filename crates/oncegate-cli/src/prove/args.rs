//! The arguments of `oncegate prove`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use oncegate::Key;
use oncegate_testing::Fault;

use crate::args::{KEY_FORMS, KEY_HELP};
use crate::configured::ConfigArgs;
use crate::parse::{duration, pair};

/// Try to make a worker charge twice or lose a payment, without a server
///
/// docs/PROVE.md explains it. Each line of --samples is a business event. The events and duplicates
/// of them go through an embedded broker, a gate and the worker, while faults happen: kills, lost
/// answers, failures of the downstream service and others. The worker must have its effects in the
/// downstream service that this command starts: POST $ONCEGATE_DOWNSTREAM/effects with a JSON body,
/// and with the header Idempotency-Key if it is right. The service is the witness.
///
/// Exit code 0: nothing was found. 1: a defect was found; each is one line on standard output. 3:
/// nothing was found, but fewer than three of four faults were tried.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("worker"))]
pub(crate) struct ProveArgs {
    #[command(flatten)]
    pub(super) config: ConfigArgs,

    /// The consumer of the configuration that is tried, with its worker, key, route and limits
    /// [default: the only one of the file]
    #[arg(long, value_name = "NAME")]
    pub(super) scope: Option<String>,

    /// A worker on standard streams
    #[arg(long, value_name = "COMMAND", group = "worker")]
    pub(super) handler_exec: Option<String>,

    /// A program that is started for each message
    #[arg(long, value_name = "COMMAND", group = "worker")]
    pub(super) handler_command: Option<String>,

    /// A worker behind HTTP, which was started with ONCEGATE_DOWNSTREAM=http://127.0.0.1:9797 (see
    /// --listen)
    #[arg(long, value_name = "URL", group = "worker")]
    pub(super) handler: Option<String>,

    /// The content type of the samples, for --handler [default: application/json, or that of
    /// --config]
    #[arg(long, value_name = "TYPE")]
    pub(super) content_type: Option<String>,

    /// Hand the worker batches of up to this many messages (docs/RUN.md) [default: one by one, or
    /// that of --config]
    #[arg(long, value_name = "COUNT", conflicts_with = "handler_command", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(super) batch_messages: Option<u16>,

    #[arg(long, value_name = "SPEC", env = "ONCEGATE_KEY", help = KEY_HELP, long_help = KEY_FORMS)]
    pub(super) key: Option<Key>,

    /// The route of the samples, which is a part of their keys [default: the topic or queue of
    /// --config, or samples]
    #[arg(long, value_name = "NAME")]
    pub(super) route: Option<String>,

    /// A file of JSON objects, one a line, each a different business event
    #[arg(long, value_name = "FILE")]
    pub(super) samples: PathBuf,

    /// Fields that differ when the same event is sent again, with commas: sent_at,trace.id
    #[arg(long, value_name = "PATHS", value_delimiter = ',')]
    pub(super) volatile: Vec<String>,

    /// How long to start rounds, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(super) seconds: u64,

    /// Play this number of rounds, however long that takes: 22 have each fault by itself
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["seconds", "round"])]
    pub(super) rounds: Option<u64>,

    /// The seed that decides the faults [default: random]
    #[arg(long, value_name = "NUMBER")]
    pub(super) seed: Option<u64>,

    /// Play only this round of the seed, after the first one without faults
    #[arg(long, value_name = "NUMBER", requires = "seed")]
    pub(super) round: Option<u64>,

    /// Leave these faults out of --round, as a finding did that did not need them
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "round")]
    pub(super) leave_out: Vec<Fault>,

    /// Send these samples alone in --round, as a finding did that did not need others: their
    /// numbers, with commas
    #[arg(
        long,
        value_name = "NUMBERS",
        value_delimiter = ',',
        requires = "round"
    )]
    pub(super) only_samples: Vec<usize>,

    /// The faults, with commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(super) faults: Vec<Fault>,

    /// A command that lists the effects in a file or table, one JSON object a line, with the
    /// business fields. It and the workers have the folder of their round in ONCEGATE_TRIAL_DIR.
    /// One round runs at a time unless it names that folder
    #[arg(long, value_name = "COMMAND")]
    pub(super) witness_command: Option<String>,

    /// A store to use instead of SQLite files: redis://host:port or postgres://host:port/database.
    /// The records are in scopes of the trial's own and are removed at its end. The store of
    /// --config is never used
    #[arg(long, value_name = "URL")]
    pub(super) store: Option<String>,

    /// Kafka's addresses, `host:port`, several with commas, instead of the embedded broker. The
    /// messages are in topics and groups of the trial's own, which are removed at its end. The
    /// brokers of --config are never used
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) brokers: Option<String>,

    /// A property of librdkafka for --brokers, such as security.protocol=SASL_SSL; may be repeated
    /// [default: those of --config]
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair, requires = "brokers")]
    pub(super) properties: Vec<(String, String)>,

    /// The lease of the gates; faults last for parts or multiples of it
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "2s")]
    pub(super) lease: Duration,

    /// How many rounds run at the same time, each with processes of its own [default: 4, and 1 with
    /// --handler and where rounds share what --witness-command lists]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) parallel: Option<u16>,

    /// Where the downstream service listens [default: a free port, and 127.0.0.1:9797 with
    /// --handler]
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) listen: Option<SocketAddr>,

    /// A folder for report.html, report.json and junit.xml
    #[arg(long, value_name = "FOLDER")]
    pub(super) report: Option<PathBuf>,

    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}
