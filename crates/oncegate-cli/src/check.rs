//! `oncegate check`: the errors of a configuration.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::config::table::Explained;
use crate::config::values::KeySetting;
use crate::config::{self, Finding, Findings, Loaded, Secrets, Severity};
use crate::configured::ConfigArgs;
use crate::doctor::{self, Report};
use crate::exit::{Exit, Problem};
use crate::output;
use crate::sources::SourceSettings;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.check/1";

/// Check a configuration without a server: list all errors, each with its line
///
/// Variables such as ONCEGATE_CONSUMER__BILLING__LEASE count, as they do for `oncegate run`. It
/// connects to nothing, unless --online asks the servers as `oncegate doctor` does. Exit code 1:
/// the configuration has errors, or there are findings; 69: a server cannot be reached.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// Show every effective setting, and where it came from
    #[arg(long)]
    explain: bool,

    /// Refuse secrets that are written in the configuration itself
    #[arg(long)]
    strict: bool,

    /// Ask store, brokers and registries as well, as `oncegate doctor` does
    #[arg(long)]
    online: bool,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct CheckDocument<'a> {
    schema: &'static str,
    ok: bool,
    findings: &'a [Finding],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    settings: Vec<Explained>,
    /// The topics and queues whose messages have the keys of one route.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<SharedRoute>,
    /// The findings of the servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    online: Option<Report>,
}

/// Topics or queues whose messages have the keys of one route.
#[derive(Serialize)]
struct SharedRoute {
    consumer: String,
    route: String,
    names: Vec<String>,
}

impl SharedRoute {
    /// Returns the routes of the consumers with that setting.
    fn all(loaded: &Loaded) -> Vec<Self> {
        let mut shared = Vec::new();
        for (consumer, settings) in loaded
            .consumers()
            .filter(|(_, settings)| settings.route.is_some())
        {
            let source = settings
                .source
                .as_ref()
                .and_then(|source| source.settings().ok());
            let mut by_route: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for name in source.map(SourceSettings::routes).unwrap_or_default() {
                by_route
                    .entry(settings.route_of(&name).to_owned())
                    .or_default()
                    .push(name);
            }
            shared.extend(by_route.into_iter().map(|(route, names)| Self {
                consumer: consumer.to_owned(),
                route,
                names,
            }));
        }
        shared
    }
}

impl fmt::Display for SharedRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            consumer,
            route,
            names,
        } = self;
        write!(
            f,
            "{consumer}: messages of {} have the keys of the route {route}",
            names.join(", ")
        )
    }
}

pub(crate) async fn run(args: &CheckArgs) -> Result<Exit, Problem> {
    let secrets = if args.strict {
        Secrets::MustBeElsewhere
    } else {
        Secrets::MayBeLiteral
    };
    let file = args.config.required()?;
    let mut loaded = config::load(Some(file), |_| Vec::new(), secrets)?;
    loaded.look_for_workers();
    let findings = &loaded.findings;
    let ok = !findings.has_errors();
    let settings = if args.explain && ok {
        loaded.explain()
    } else {
        Vec::new()
    };
    let routes = if ok {
        SharedRoute::all(&loaded)
    } else {
        Vec::new()
    };
    let online = if ok && args.online {
        let examined = Box::pin(doctor::examine(&loaded));
        Some(within(args.answer.timeout, async { Ok(examined.await) }).await?)
    } else {
        None
    };
    let exit = match &online {
        Some(report) => report.exit(),
        None if ok => Exit::Yes,
        None => Exit::No,
    };
    let uncompared = uncompared(&loaded);
    if args.answer.json {
        let findings = &*findings.all;
        output::answer_json(&CheckDocument {
            schema: SCHEMA,
            ok,
            findings,
            settings,
            routes,
            online,
        })?;
        return Ok(exit);
    }
    if !findings.all.is_empty() {
        eprintln!("{}\n", loaded.render());
    }
    if !settings.is_empty() {
        output::answer(&explained(&settings))?;
    }
    let file = file.display().to_string();
    output::answer(&judgement(&file, findings))?;
    for route in routes {
        output::answer(&route.to_string())?;
    }
    if let Some(report) = online {
        output::answer(&report.text())?;
    }
    if let Some(note) = uncompared.filter(|_| ok) {
        eprintln!("oncegate: {note}");
    }
    Ok(exit)
}

/// Returns a word on consumers that take an id that is used again for a duplicate; `None` if all
/// compare contents.
fn uncompared(loaded: &Loaded) -> Option<String> {
    let without = loaded.consumers().filter(|(_, settings)| {
        let key = settings.key.as_ref();
        settings.fingerprint.is_none() && key.is_some_and(|KeySetting(key)| !key.is_of_payload())
    });
    let names: Vec<&str> = without.map(|(name, _)| name).collect();
    (!names.is_empty()).then(|| {
        format!(
            "{}: contents are not compared: a key that comes again with another content is a duplicate, and is not handled. \
             `fingerprint` compares them (docs/GUIDE.md).",
            names.join(", ")
        )
    })
}

fn judgement(file: &str, findings: &Findings) -> String {
    let errors = findings.count(Severity::Error);
    let warnings = findings.count(Severity::Warning);
    match (errors, warnings) {
        (0, 0) => format!("{file} is fine."),
        (0, _) => format!(
            "{file} will do, with {warnings} warning{}.",
            plural(warnings)
        ),
        _ => format!(
            "{file} has {errors} error{} and {warnings} warning{}.",
            plural(errors),
            plural(warnings)
        ),
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Returns one setting per line, with the origins in one column.
fn explained(settings: &[Explained]) -> String {
    /// A longer setting moves only its own origin to the right.
    const WIDTH_MOST: usize = 70;
    let width = settings
        .iter()
        .map(|setting| assigned(setting).chars().count())
        .filter(|width| *width <= WIDTH_MOST)
        .max()
        .unwrap_or(0);
    settings
        .iter()
        .map(|setting| format!("{:width$}  # {}", assigned(setting), setting.origin))
        .collect::<Vec<_>>()
        .join("\n")
}

fn assigned(Explained { path, value, .. }: &Explained) -> String {
    format!("{path} = {value}")
}
