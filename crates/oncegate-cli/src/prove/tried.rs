//! The worker under trial, with the key and the limits that `oncegate run` would use: from flags,
//! or from a configuration.

use std::path::Path;

use oncegate::{BatchLimits, ConsumerSettings, Gate, Key, MemoryStore, Ordering};
use serde_json::Value;

use super::args::ProveArgs;
use super::witness::WitnessCommand;
use crate::config::format::Deliver;
use crate::config::values::{KeySetting, ProgramSetting};
use crate::config::{self, Secrets, Setting, shape};
use crate::configured::{choose, route_of};
use crate::exit::{Exit, Problem};
use crate::run::build;

/// The route of the samples where nothing else gives one.
const ROUTE: &str = "samples";
/// The content type of samples without a configuration.
const JSON: &str = "application/json";
/// The settings of a trial that no configuration limits.
const UNLIMITED: ConsumerSettings = ConsumerSettings {
    concurrency: u32::MAX,
    ordering: Ordering::Unordered,
    ..ConsumerSettings::DEFAULT
};

/// The consumer that is tried.
#[derive(Clone, Debug)]
pub(super) struct TriedConsumer {
    pub(super) key: Key,
    pub(super) route: String,
    pub(super) handler: shape::Handler,
    /// The other settings of the consumer; those that a trial needs for itself are not used.
    pub(super) settings: shape::Consumer,
    /// The variables of this process that the worker does not get.
    pub(super) hidden: Vec<String>,
}

impl TriedConsumer {
    /// # Errors
    /// When there is no worker or no key, or they cannot be tried; the text says what to change.
    pub(super) fn of(args: &ProveArgs) -> Result<Self, Problem> {
        let tried = match file(args) {
            None => Self::of_flags(args)?,
            Some(file) => Self::of_configuration(args, file)?,
        };
        tried.check(args)?;
        Ok(tried)
    }

    fn of_flags(args: &ProveArgs) -> Result<Self, Problem> {
        if args.scope.is_some() {
            return Err(Problem::new(
                Exit::Usage,
                "--scope names a consumer of a configuration: give --config",
            ));
        }
        let handler = shape::Handler {
            http: args.handler.clone(),
            exec: args.handler_exec.clone().map(ProgramSetting::shell),
            command: args.handler_command.clone().map(ProgramSetting::shell),
            content_type: Some(args.content_type.clone().unwrap_or_else(|| JSON.to_owned())),
            ..shape::Handler::default()
        };
        if handler.http.is_none() && handler.exec.is_none() && handler.command.is_none() {
            return Err(missing(
                "there is no worker: give --handler-exec, --handler-command or --handler",
            ));
        }
        let key = args
            .key
            .clone()
            .ok_or_else(|| missing("there is no key: give --key"))?;
        let route = args.route.clone().unwrap_or_else(|| ROUTE.to_owned());
        let settings = shape::Consumer {
            batch: args
                .batch_messages
                .map(|messages| BatchLimits::new(messages.into())),
            runtime: UNLIMITED,
            ..shape::Consumer::default()
        };
        Ok(Self {
            key,
            route,
            handler,
            settings,
            hidden: Vec::new(),
        })
    }

    fn of_configuration(args: &ProveArgs, file: &Path) -> Result<Self, Problem> {
        if let Some(words) = args.config.unnamed() {
            eprintln!("oncegate: {words}");
        }
        let loaded = config::load(
            Some(file),
            |layers| flags(args, &layers.names("consumer")),
            Secrets::MayBeLiteral,
        )?;
        if loaded.findings.has_errors() {
            eprintln!("{}", loaded.render());
            return Err(refused("the configuration has errors"));
        }
        let (name, settings) = choose(&loaded, args.scope.as_deref())?;
        let Some(KeySetting(key)) = settings.key.clone() else {
            return Err(refused("there is no key").of(name));
        };
        // Samples are documents, which have the keys of the payloads that they stand for.
        if settings
            .format
            .as_ref()
            .is_some_and(|format| format.deliver != Some(Deliver::Json))
        {
            let why = "its workers get payloads in their format, and the samples of a trial are JSON: set `format.deliver = \"json\"`, with which they get JSON from the topic, too";
            return Err(refused(why).of(name));
        }
        let route = match &args.route {
            Some(route) => Some(route.clone()),
            None => route_of(settings).map_err(|why| refused(why).of(name))?,
        };
        let route = route.unwrap_or_else(|| ROUTE.to_owned());
        let handler = settings.handler.clone().unwrap_or_default();
        let mut settings = settings.clone();
        if !loaded.is_given(name, "ordering") {
            settings.runtime.ordering = UNLIMITED.ordering;
        }
        if !loaded.is_given(name, "concurrency") {
            settings.runtime.concurrency = UNLIMITED.concurrency;
        }
        Ok(Self {
            key,
            route,
            handler,
            settings,
            hidden: loaded.variables(),
        })
    }

    /// Refuses what a trial cannot try, which would look like a defect of the worker.
    fn check(&self, args: &ProveArgs) -> Result<(), Problem> {
        if let Some(source) = outside_of_payload(&self.key) {
            return Err(refused(format!(
                "the key is made of {source}, and the samples of a trial are payloads without any; give --key with fields of the payload"
            )));
        }
        if self.takes_turns(args) && args.parallel.is_some_and(|rounds| rounds > 1) {
            let why = "--parallel: one round runs at a time with --handler, and with a --witness-command that does not name ONCEGATE_TRIAL_DIR";
            return Err(Problem::new(Exit::Usage, why));
        }
        let of_round = args
            .witness_command
            .as_deref()
            .is_some_and(WitnessCommand::is_of_round);
        if self.handler.http.is_some() && of_round {
            let why = "--witness-command: a worker behind HTTP has no ONCEGATE_TRIAL_DIR; list the effects of all rounds";
            return Err(Problem::new(Exit::Usage, why));
        }
        let gate = self
            .gate(Gate::new("trial", self.key.clone(), MemoryStore::new()))
            .lease(args.lease);
        gate.check().map_err(|error| {
            Problem::caused(Exit::Configuration, &error).and(&refused(format!(
                "the lease of the trial is {:?}; another is set by --lease",
                args.lease
            )))
        })
    }

    /// The gate with the settings of the consumer.
    pub(super) fn gate(&self, gate: Gate) -> Gate {
        build::with_gate_settings(gate, &self.settings)
    }

    /// Returns whether one round runs at a time, because rounds share the worker or what is listed.
    pub(super) fn takes_turns(&self, args: &ProveArgs) -> bool {
        self.handler.http.is_some()
            || args
                .witness_command
                .as_deref()
                .is_some_and(|command| !WitnessCommand::is_of_round(command))
    }

    /// Returns the most messages or batches that the worker gets at a time.
    pub(super) fn most(&self) -> u32 {
        self.settings.runtime.concurrency
    }
}

/// The configuration of the trial. A worker by flags has none, unless one is named.
pub(super) fn file(args: &ProveArgs) -> Option<&Path> {
    let workers = [&args.handler, &args.handler_exec, &args.handler_command];
    args.config
        .file(workers.iter().any(|worker| worker.is_some()))
}

fn refused(why: impl Into<String>) -> Problem {
    Problem::configuration(why)
}

/// The flags as settings over those of the file, for the consumer that is tried.
fn flags(args: &ProveArgs, known: &[String]) -> Vec<Setting> {
    let consumer = match (&args.scope, known) {
        (Some(scope), _) => scope,
        (None, [only]) => only,
        // Which consumer is meant is asked later.
        (None, _) => return Vec::new(),
    };
    let key = args
        .key
        .as_ref()
        .map(|key| serde_json::to_string(key).unwrap_or_default());
    let messages = args.batch_messages.map(|messages| messages.to_string());
    let given: [(&str, &[&str], &Option<String>); 6] = [
        ("--key", &["key"], &key),
        ("--handler", &["handler", "http"], &args.handler),
        ("--handler-exec", &["handler", "exec"], &args.handler_exec),
        (
            "--handler-command",
            &["handler", "command"],
            &args.handler_command,
        ),
        (
            "--content-type",
            &["handler", "content_type"],
            &args.content_type,
        ),
        ("--batch-messages", &["batch", "messages"], &messages),
    ];
    given
        .into_iter()
        .filter_map(|(flag, path, value)| {
            Setting::of_consumer(consumer, flag, path, value.as_ref())
        })
        .collect()
}

fn missing(what: &str) -> Problem {
    Problem::new(
        Exit::Usage,
        format!("{what}, or a configuration with one (--config)"),
    )
}

fn header_of(key: &Value) -> Option<String> {
    key.get("header").and_then(Value::as_str).map(str::to_owned)
}

/// Returns what the key needs besides a payload, in words.
fn outside_of_payload(key: &Key) -> Option<String> {
    let key = serde_json::to_value(key).unwrap_or_default();
    let header = header_of(&key).or_else(|| key.get("tenant").and_then(header_of));
    match header {
        Some(name) => Some(format!("the header {name:?}")),
        None if key.get("message_key").is_some() => Some("the broker's key".to_owned()),
        None if key.get("message_id").is_some() => Some("the id of the message".to_owned()),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(key: &Key) -> String {
        outside_of_payload(key).unwrap_or_default()
    }

    #[test]
    fn keys_of_what_samples_do_not_have_are_named() {
        assert_eq!(says(&Key::header("order-id")), "the header \"order-id\"");
        assert_eq!(says(&Key::message_key()), "the broker's key");
        assert_eq!(says(&Key::message_id()), "the id of the message");
        assert_eq!(says(&Key::json(["id"])), "");
        let tenant = oncegate::core::key::TenantSource::header("shop");
        assert_eq!(
            says(&Key::json(["id"]).tenant(tenant)),
            "the header \"shop\""
        );
    }
}
