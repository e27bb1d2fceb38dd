//! `oncegate outbox relay`: publishes what transactions have written into outboxes.

use oncegate::outbox::RelayError;
use oncegate::telemetry::Telemetry;
use oncegate::{ConsumerSettings, Counters};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::relay_of;
use crate::config::{self, Layers, Loaded, Secrets, Setting};
use crate::configured::ConfigArgs;
use crate::exit::{Exit, Problem};
use crate::output;
use crate::run::flags::parts;
use crate::run::status::{OFF, Served};
use crate::run::until_ended;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.outbox_relay/1";

/// The outbox that flags are about, if the file has not exactly one.
const UNNAMED: &str = "default";

/// Publish what transactions have written into outboxes, until it is stopped
///
/// Any number of these may run: for each outbox one of them leads, and another takes over when it
/// ends. A database or broker that is away is waited for. Settings come from a file, with tables
/// such as [outbox.shop], from variables such as ONCEGATE_OUTBOX__SHOP__LEASE over it, and from
/// flags over both. SIGTERM lets messages in flight end; a second signal does not wait for them.
#[derive(Debug, clap::Args)]
pub(crate) struct RelayArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// Refuse secrets that are written in the configuration itself
    #[arg(long)]
    strict: bool,

    /// At the end, print what was published as one JSON document
    #[arg(long)]
    json: bool,

    /// The outbox that the flags apply to [default: the only one of the file, or `default`]
    #[arg(long, value_name = "NAME")]
    outbox: Option<String>,

    /// store.url: the database of the outbox, postgres://host:port/database or sqlite:path
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    /// Addresses of Kafka, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT")]
    brokers: Option<String>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = crate::parse::pair)]
    properties: Vec<(String, String)>,

    /// The region of SQS, instead of Kafka: messages are published to queues
    #[arg(long, value_name = "REGION")]
    region: Option<String>,

    /// The address of another SQS server, instead of Kafka
    #[arg(long, value_name = "URL")]
    endpoint_url: Option<String>,

    /// The most messages in flight
    #[arg(long, value_name = "COUNT")]
    batch: Option<String>,

    /// The lease: how long another relay waits after this one was killed
    #[arg(long, value_name = "TIME")]
    lease: Option<String>,

    /// How long sent messages are kept in the table
    #[arg(long, value_name = "TIME")]
    retention: Option<String>,

    /// The address of the page with metrics: 127.0.0.1:9464 [default: off]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,

    /// Any setting by its path, such as outbox.shop.poll_interval=1s; may be repeated
    #[arg(long = "set", value_name = "PATH=VALUE", value_parser = crate::parse::pair)]
    any: Vec<(String, String)>,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct RelayDocument {
    schema: &'static str,
    published: u64,
    failures: u64,
    purged: u64,
}

impl RelayArgs {
    /// Returns whether a flag sets something of the outbox that `--outbox` names.
    fn has_settings(&self) -> bool {
        let settings = self.settings(&Layers::default());
        settings.iter().any(|setting| {
            let mut path = setting.path.iter().map(String::as_str);
            path.next() == Some("outbox") && path.next() == Some(UNNAMED)
        })
    }

    /// The given settings, each with its flag and its path.
    fn settings(&self, layers: &Layers) -> Vec<Setting> {
        let known = layers.names("outbox");
        let outbox = match (&self.outbox, known.as_slice()) {
            (Some(outbox), _) => outbox.clone(),
            (None, [only]) => only.clone(),
            (None, _) => UNNAMED.to_owned(),
        };
        let of = |path: &[&str]| {
            ["outbox", &outbox]
                .iter()
                .chain(path)
                .map(|part| (*part).to_owned())
                .collect::<Vec<_>>()
        };
        let given = [
            (
                "--store",
                vec!["store".to_owned(), "url".to_owned()],
                &self.store,
            ),
            (
                "--listen",
                vec!["status".to_owned(), "listen".to_owned()],
                &self.listen,
            ),
            ("--brokers", of(&["kafka", "brokers"]), &self.brokers),
            ("--region", of(&["sqs", "region"]), &self.region),
            (
                "--endpoint-url",
                of(&["sqs", "endpoint_url"]),
                &self.endpoint_url,
            ),
            ("--batch", of(&["batch"]), &self.batch),
            ("--lease", of(&["lease"]), &self.lease),
            ("--retention", of(&["retention"]), &self.retention),
        ];
        let given = given.into_iter().filter_map(|(flag, path, value)| {
            Some(Setting {
                flag: flag.to_owned(),
                path,
                value: value.clone()?,
            })
        });
        let properties = self.properties.iter().map(|(name, value)| Setting {
            flag: format!("--property {name}"),
            path: of(&["kafka", "properties", name]),
            value: value.clone(),
        });
        let any = self.any.iter().map(|(path, value)| Setting {
            flag: format!("--set {path}"),
            path: parts(path),
            value: value.clone(),
        });
        given.chain(properties).chain(any).collect()
    }
}

pub(super) async fn run(args: &RelayArgs) -> Result<Exit, Problem> {
    let secrets = if args.strict {
        Secrets::MustBeElsewhere
    } else {
        Secrets::MayBeLiteral
    };
    // Flags change what the file says.
    let file = args.config.file(false);
    if let Some(words) = args.config.unnamed().filter(|_| file.is_some()) {
        info!("{words}");
    }
    let mut known = Vec::new();
    let loaded = config::load(
        file,
        |layers| {
            known = layers.names("outbox");
            args.settings(layers)
        },
        secrets,
    )?;
    let outbox = args.outbox.as_deref();
    args.config
        .fits("--outbox", outbox, &known, args.has_settings())?;
    if !loaded.findings.all.is_empty() {
        eprintln!("{}", loaded.render());
    }
    if loaded.findings.has_errors() {
        return Err(Problem::configuration("the configuration has errors"));
    }
    if loaded.config.outbox.is_empty() {
        let text = "there is no outbox: name one by a table as [outbox.shop], or by --outbox with --brokers or --region";
        return Err(Problem::configuration(text));
    }
    let stop = CancellationToken::new();
    let telemetry =
        Telemetry::prometheus().map_err(|error| Problem::new(Exit::Bug, error.to_string()))?;
    let relaying = relay_all(&loaded, &telemetry, &stop);
    let ended = until_ended(relaying, &stop, || "what is in flight".to_owned()).await;
    if args.json {
        output::answer_json(&document(telemetry.counters()))?;
    }
    ended.map(|()| Exit::Yes)
}

/// Runs the relays of all outboxes. The first that fails stops the others.
async fn relay_all(
    loaded: &Loaded,
    telemetry: &Telemetry,
    stop: &CancellationToken,
) -> Result<(), Problem> {
    let status = loaded.config.status.clone().unwrap_or_default();
    let served = Served::start(&status, Some(OFF), telemetry).await?;
    let mut relays = JoinSet::new();
    for (name, outbox) in loaded.config.outbox.clone() {
        let stop = stop.clone();
        let store = loaded.config.store.clone().unwrap_or_default();
        let telemetry = telemetry.clone();
        relays.spawn(async move {
            let running = async {
                let patience = ConsumerSettings::DEFAULT.start_patience;
                let relay = tokio::select! {
                    biased;
                    () = stop.cancelled() => return Ok(()),
                    relay = relay_of(&store, &name, &outbox, patience) => relay?,
                };
                telemetry
                    .watch_relay(relay)
                    .run_until(stop.cancelled())
                    .await
                    .map_err(problem)
            };
            running.await.map_err(|problem: Problem| problem.of(&name))
        });
    }
    let mut result = Ok(());
    while let Some(ended) = relays.join_next().await {
        let ended = ended.unwrap_or_else(|bug| Err(Problem::new(Exit::Bug, bug.to_string())));
        if ended.is_err() {
            stop.cancel();
        }
        result = result.and(ended);
    }
    served.stop().await;
    result
}

fn problem(error: RelayError) -> Problem {
    match error {
        RelayError::Store { error, .. } => error.into(),
        error => Problem::configuration(error.to_string()),
    }
}

fn document(counters: &Counters) -> RelayDocument {
    RelayDocument {
        schema: SCHEMA,
        published: counters.total("outbox_published"),
        failures: counters.total("outbox_failures"),
        purged: counters.total("outbox_purged"),
    }
}
