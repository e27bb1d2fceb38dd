//! `oncegate serve`: answers HTTP requests by doors, each once for each key.
//!
//! | layer | files |
//! |---|---|
//! | the kinds of doors | `kinds` |
//! | one file for each kind | `api`, `proxy`, `webhook` |
//! | what a kind is | `kind` |
//!
//! [`kinds`] says how another one is added.

mod api;
mod kind;
pub(crate) mod kinds;
mod proxy;
mod webhook;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncegate::telemetry::Telemetry;
use oncegate::{ConsumerSettings, Counters, GateError};
use oncegate_serve::{Address, Doors, Limits, Listener};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::shape::{self, Serve};
use crate::config::values::{Size, Time};
use crate::config::{self, Loaded, Secrets, Setting};
use crate::configured::ConfigArgs;
use crate::exit::{Exit, Problem};
use crate::output;
use crate::run::flags::parts;
use crate::run::status::Served;
use crate::run::until_ended;
use crate::stores;
use kinds::{DoorParts, ServedDoor};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.serve/1";

/// The time that running requests may take to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Answer HTTP requests in front of a service in any language, each key once
///
/// Each table [door.NAME] of the configuration is a door, at an address of its own or beside
/// others. docs/SERVE.md describes what clients and services see. Variables such as
/// ONCEGATE_DOOR__PAYMENTS__UPSTREAM and --set change what the file says. SIGTERM lets running
/// requests end; a second signal, a second later, does not wait for them.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// Refuse secrets that are written in the configuration itself
    #[arg(long)]
    strict: bool,

    /// At the end, print what was answered as one JSON document
    #[arg(long)]
    json: bool,

    /// Any setting by its path, such as door.payments.listen=0.0.0.0:8080; may be repeated
    #[arg(long = "set", value_name = "PATH=VALUE", value_parser = crate::parse::pair)]
    any: Vec<(String, String)>,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct ServeDocument {
    schema: &'static str,
    /// The responses to requests with keys, by what they were.
    answers: BTreeMap<&'static str, u64>,
    /// The connections and requests that were cut at the end.
    cut: usize,
}

pub(crate) async fn run(args: &ServeArgs) -> Result<Exit, Problem> {
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
    let flags = args.any.iter().map(|(path, value)| Setting {
        flag: format!("--set {path}"),
        path: parts(path),
        value: value.clone(),
    });
    let loaded = config::load(file, |_| flags.collect(), secrets)?;
    if !loaded.findings.all.is_empty() {
        eprintln!("{}", loaded.render());
    }
    if loaded.findings.has_errors() {
        return Err(Problem::configuration("the configuration has errors"));
    }
    if loaded.config.door.is_empty() {
        let text = "there is no door: name one by a table as [door.payments]; docs/SERVE.md has an example";
        return Err(Problem::configuration(text));
    }
    let stop = CancellationToken::new();
    let telemetry =
        Telemetry::prometheus().map_err(|error| Problem::new(Exit::Bug, error.to_string()))?;
    let serving = serve_all(&loaded, &telemetry, &stop);
    let ended = Box::pin(until_ended(serving, &stop, || {
        "running requests".to_owned()
    }))
    .await;
    if args.json {
        let cut = ended.as_ref().copied().unwrap_or_default();
        output::answer_json(&document(telemetry.counters(), cut))?;
    }
    ended.map(|_| Exit::Yes)
}

/// A door of the configuration that is open.
struct OpenDoor<'a> {
    name: &'a str,
    settings: &'a shape::Door,
    door: Arc<dyn ServedDoor>,
}

/// Serves all doors until the stop. Returns how many connections and requests were cut then.
async fn serve_all(
    loaded: &Loaded,
    telemetry: &Telemetry,
    stop: &CancellationToken,
) -> Result<usize, Problem> {
    let opened = tokio::select! {
        biased;
        () = stop.cancelled() => return Ok(0),
        opened = open_all(loaded, telemetry) => opened?,
    };
    let settings = loaded.config.serve.clone().unwrap_or_default();
    let listeners = bind_all(&opened, limits(&settings)).await?;
    let status = loaded.config.status.clone().unwrap_or_default();
    let served = Served::start(&status, None, telemetry).await?;
    let deadline = settings
        .drain_timeout
        .map_or(DRAIN_TIMEOUT, |Time(time)| time);
    let mut running = JoinSet::new();
    let stopping: Vec<_> = opened.iter().map(|open| Arc::clone(&open.door)).collect();
    let stopped = stop.clone().cancelled_owned();
    running.spawn(async move {
        stopped.await;
        stopping.iter().for_each(|door| door.stopping());
        0
    });
    for (listener, doors) in listeners {
        info!(
            address = listener.address(),
            ?doors,
            "requests are answered"
        );
        let stopped = stop.clone().cancelled_owned();
        running.spawn(listener.run_until(Arc::new(doors), stopped, deadline));
    }
    let mut ended = tokio::select! {
        biased;
        () = stop.cancelled() => None,
        // None ends before the stop, unless by a bug.
        ended = running.join_next() => ended,
    };
    let until = Instant::now() + deadline;
    let mut cut = 0;
    if ended.is_none() {
        ended = running.join_next().await;
    }
    while let Some(listener) = ended {
        cut += listener.map_err(|bug| Problem::new(Exit::Bug, bug.to_string()))?;
        ended = running.join_next().await;
    }
    // Only requests whose clients have disconnected still run.
    for OpenDoor { name, door, .. } in &opened {
        let left = until.saturating_duration_since(Instant::now());
        let dropped = door.drain(left).await;
        if dropped > 0 {
            warn!(
                door = name,
                dropped, "requests did not end in time; their leases expire"
            );
        }
        cut += dropped;
    }
    served.stop().await;
    Ok(cut)
}

/// Connects to the store, and opens all doors.
async fn open_all<'a>(
    loaded: &'a Loaded,
    telemetry: &Telemetry,
) -> Result<Vec<OpenDoor<'a>>, Problem> {
    let settings = loaded.config.store.clone().unwrap_or_default();
    let patience = ConsumerSettings::DEFAULT.start_patience;
    let store = stores::open_configured(&settings, patience).await?;
    let parts = DoorParts {
        store,
        settings: &settings,
        observer: Arc::new(telemetry.clone()),
    };
    let mut opened = Vec::new();
    for (name, settings) in &loaded.config.door {
        let kind = kinds::of(settings).map_err(|why| Problem::configuration(why).of(name))?;
        let door = kind
            .build(name, settings, &parts)
            .await
            .map_err(|problem| problem.of(name))?;
        door.open().await.map_err(|error| problem(error).of(name))?;
        opened.push(OpenDoor {
            name,
            settings,
            door,
        });
    }
    Ok(opened)
}

/// Binds each address once, for all its doors.
async fn bind_all(
    opened: &[OpenDoor<'_>],
    limits: Limits,
) -> Result<Vec<(Listener, Doors)>, Problem> {
    let mut by_address: BTreeMap<&str, Doors> = BTreeMap::new();
    for OpenDoor { settings, door, .. } in opened {
        let doors = by_address.entry(settings.address()).or_default();
        doors.add(settings.path.as_deref(), Arc::<dyn ServedDoor>::clone(door));
    }
    let mut listeners = Vec::new();
    for (text, doors) in by_address {
        let address = Address::parse(text).map_err(Problem::configuration)?;
        let listener = Listener::bind(&address, limits).await.map_err(|error| {
            Problem::configuration(format!(
                "requests cannot be taken at {text}: {error}; change the `listen` of the door"
            ))
        })?;
        listeners.push((listener, doors));
    }
    Ok(listeners)
}

fn limits(settings: &Serve) -> Limits {
    let default = Limits::DEFAULT;
    Limits {
        max_connections: settings
            .max_connections
            .map_or(default.max_connections, |most| {
                usize::try_from(most).unwrap_or(usize::MAX)
            }),
        max_head_bytes: settings
            .max_head
            .map_or(default.max_head_bytes, |Size(bytes)| bytes),
        head_timeout: settings
            .head_timeout
            .map_or(default.head_timeout, |Time(time)| time),
    }
}

fn problem(error: GateError) -> Problem {
    match error {
        GateError::Store(error) => error.into(),
        error => Problem::caused(Exit::Configuration, &error),
    }
}

fn document(counters: &Counters, cut: usize) -> ServeDocument {
    let answers = counters.snapshot().into_iter();
    ServeDocument {
        schema: SCHEMA,
        answers: answers
            .filter(|((name, _), _)| *name == "answers")
            .map(|((_, label), count)| (label, count))
            .collect(),
        cut,
    }
}
