//! `oncegate key`: explains the key of a message.

use oncegate::core::key::{Explanation, KeyInput, Scope, StoreKey, vectors};
use oncegate::{Key, Message};
use serde::Serialize;
use tracing::warn;

use crate::args::{KEY_FORMS, KEY_HELP, MessageArgs};
use crate::at::{AtArgs, choose_at};
use crate::config::format::Format;
use crate::configured::{ConfigArgs, missing, route_of};
use crate::examined::{formatted, routed};
use crate::exit::{Exit, Problem};
use crate::output;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.key/1";

/// The placeholder for a scope or a route that is not given.
const EXAMPLE: &str = "example";

/// Explain the key of a message: canonical form, digest, and name in the store
///
/// Key, scope and route are those of the configuration, where no flag says them. The payload comes
/// from a file or from standard input. The answer shows the values of the key's
/// fields.
#[derive(Debug, clap::Args)]
pub(crate) struct KeyArgs {
    #[command(flatten)]
    config: ConfigArgs,

    #[arg(long, value_name = "SPEC", env = "ONCEGATE_KEY", help = KEY_HELP, long_help = KEY_FORMS)]
    key: Option<Key>,

    /// What the payload is, if it is not JSON: registry:URL, avro:FILE, protobuf:FILE#MESSAGE,
    /// gzip, zstd or base64
    #[arg(long, value_name = "FORMAT")]
    format: Option<Format>,

    /// The scope of the consumer's gate
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Option<Scope>,

    /// The route of the message: its topic or the name of its queue, unless it was retried or
    /// redriven [default: that of the configuration]
    #[arg(long, value_name = "NAME", aliases = ["topic", "queue"])]
    route: Option<String>,

    #[command(flatten)]
    at: AtArgs,

    #[command(flatten)]
    message: MessageArgs,

    /// Check this build against the published test vectors instead
    #[arg(long)]
    vectors: bool,

    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct KeyDocument<'a> {
    schema: &'static str,
    canonical: &'a [String],
    canonical_hex: String,
    digest: String,
    store_key: &'a StoreKey,
}

/// The answer of `--vectors --json`.
#[derive(Serialize)]
struct VectorsDocument {
    schema: &'static str,
    passed: bool,
    vectors: Option<usize>,
    wrong: Vec<String>,
}

pub(crate) async fn run(args: &KeyArgs) -> Result<Exit, Problem> {
    if args.vectors {
        return check_vectors(args.json);
    }
    let NamedKey {
        key,
        scope,
        route,
        message,
    } = args.named().await?;
    for (given, name) in [(scope.is_some(), "scope"), (route.is_some(), "route")] {
        if !given {
            warn!(
                "without --{name}, this is the key of the {name} `{EXAMPLE}`; others have another digest"
            );
        }
    }
    let scope = match scope {
        Some(scope) => scope,
        None => Scope::new(EXAMPLE)?,
    };
    let route = route.as_deref().unwrap_or(EXAMPLE);
    let explanation = match &message {
        Some(message) => explain_message(&key, &scope, route, message).await?,
        None => explain(&key, &scope, route, &args.message).await?,
    };
    if args.json {
        let canonical_hex = explanation
            .canonical()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        output::answer_json(&KeyDocument {
            schema: SCHEMA,
            canonical: explanation.lines(),
            canonical_hex,
            digest: explanation.digest().to_string(),
            store_key: explanation.store_key(),
        })?;
    } else {
        output::answer(&explanation.to_string())?;
    }
    Ok(Exit::Yes)
}

/// A key, with the scope and the route of its messages as far as they are known.
struct NamedKey {
    key: Key,
    scope: Option<Scope>,
    route: Option<String>,
    /// The message at `--at`.
    message: Option<Message>,
}

impl KeyArgs {
    /// Returns the key that flags and configuration name.
    async fn named(&self) -> Result<NamedKey, Problem> {
        let loaded = self.config.load(self.key.is_some())?;
        let scope = self.scope.as_ref().map(Scope::as_str);
        let Some(loaded) = loaded else {
            let key = formatted(self.key.clone(), self.format.as_ref())?;
            let message = self.at.message(None).await?;
            return Ok(NamedKey {
                key: key.ok_or_else(|| missing("--key"))?,
                scope: self.scope.clone(),
                route: self.route.clone().or_else(|| route(message.as_ref())),
                message,
            });
        };
        let (name, consumer) = choose_at(&loaded, scope, self.at.at.as_ref())?;
        let message = self.at.message(Some((name, consumer))).await?;
        let route = match self.route.clone().or_else(|| route(message.as_ref())) {
            Some(route) => Some(route),
            None => route_of(consumer).map_err(|why| Problem::configuration(why).of(name))?,
        };
        let key = self
            .key
            .clone()
            .or_else(|| consumer.key.clone().map(|key| key.0));
        let key = formatted(key, self.format.as_ref().or(consumer.format.as_ref()))?;
        let key = routed(key, consumer.route.as_ref());
        Ok(NamedKey {
            key: key.ok_or_else(|| Problem::configuration("there is no key").of(name))?,
            scope: Some(Scope::new(name)?),
            route,
            message,
        })
    }
}

/// The route of the message at `--at`.
fn route(message: Option<&Message>) -> Option<String> {
    message.map(|message| message.route().to_owned())
}

/// The key of a message that was read.
pub(crate) async fn explain_message(
    key: &Key,
    scope: &Scope,
    route: &str,
    message: &Message,
) -> Result<Explanation, Problem> {
    let compiled = key.compile(scope)?;
    let prepared = compiled.prepare(message).await;
    prepared.map_err(|error| Problem::caused(Exit::Unreachable, &error))?;
    compiled
        .explain(route, message)
        .map_err(|error| Problem::caused(Exit::BadData, &error))
}

/// The key of the message that the arguments describe.
pub(crate) async fn explain(
    key: &Key,
    scope: &Scope,
    route: &str,
    message: &MessageArgs,
) -> Result<Explanation, Problem> {
    let compiled = key.compile(scope)?;
    let payload = message.read_payload(key).await?;
    let headers = message.headers.iter();
    let headers: Vec<(&str, &[u8])> = headers
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect();
    let mut input = payload
        .as_deref()
        .map_or(KeyInput::empty(), KeyInput::payload)
        .with_headers(&headers);
    if let Some(key) = &message.message_key {
        input = input.with_message_key(key);
    }
    if let Some(id) = &message.message_id {
        input = input.with_message_id(id);
    }
    let prepared = compiled.prepare(&input).await;
    prepared.map_err(|error| Problem::caused(Exit::Unreachable, &error))?;
    compiled
        .explain(route, &input)
        .map_err(|error| Problem::caused(Exit::BadData, &error))
}

fn check_vectors(json: bool) -> Result<Exit, Problem> {
    let (count, wrong) = match vectors::check() {
        Ok(count) => (Some(count), Vec::new()),
        Err(wrong) => (None, wrong),
    };
    let passed = wrong.is_empty();
    if json {
        output::answer_json(&VectorsDocument {
            schema: SCHEMA,
            passed,
            vectors: count,
            wrong,
        })?;
    } else if let Some(count) = count {
        output::answer(&format!(
            "This build makes the published keys: {count} of {count} vectors."
        ))?;
    } else {
        output::answer(&wrong.join("\n"))?;
    }
    Ok(if passed { Exit::Yes } else { Exit::No })
}
