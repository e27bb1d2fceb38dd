//! The checks of `oncegate doctor` for the consumers of a configuration.

use std::sync::Arc;
use std::time::Duration;

use oncegate::core::key::{Descriptor, Scope};
use oncegate::core::store::{ScopeDescriptor, Store};
use oncegate::{GateError, GateSettings};

use super::{NamedQueue, Questions, Report};
use crate::config::shape;
use crate::exit::{Exit, Problem};
use crate::run::build;
use crate::sources::{LetterQueue, Source, sqs};
use crate::stores::{self, Opened};

impl Report {
    /// Examines the store of a configuration. A file that no consumer has made yet is none of the
    /// findings.
    pub(super) async fn configured_store(&mut self, settings: &shape::Store) -> Option<Opened> {
        match stores::file_to_be_made(settings) {
            Some(file) => {
                self.saw(format!(
                    "store: there is no file {} yet; the first consumer makes it",
                    file.display()
                ));
                None
            }
            None => self.store(stores::open_to_read(settings).await).await,
        }
    }
}

/// Examines the scopes and sources of these consumers, and the servers of their store.
pub(super) async fn examine_consumers<'a>(
    mut report: Report,
    opened: Option<&Opened>,
    consumers: impl Iterator<Item = (&'a str, shape::Consumer)> + Send,
) -> Report {
    let redis = opened.and_then(|opened| opened.redis.as_ref());
    let first = match redis {
        Some(redis) => report.servers(redis).await,
        None => None,
    };
    let mut longest = Duration::ZERO;
    for (name, consumer) in consumers {
        longest = longest.max(consumer.gate.retention);
        report.about(name);
        if let (Some(opened), Ok(scope)) = (opened, Scope::new(name)) {
            same_key(&scope, &consumer, &opened.store, &mut report).await;
            same_broker(name, &consumer, &opened.store, &mut report).await;
            report.rights(opened, &scope).await;
        }
        match questions(name, &consumer) {
            Ok(questions) => questions.ask(&mut report).await,
            Err(why) => report.problem("source", &Problem::configuration(why)),
        }
        registry(name, &consumer, &mut report).await;
        if let Some((_, absent)) = consumer.handler.as_ref().and_then(shape::Handler::absent) {
            report.finding("handler", absent, "");
        }
    }
    if let (Some(redis), Some(first)) = (redis, first) {
        report.about_all();
        report.forecast(redis, first, longest).await;
    }
    report
}

/// A gate does not open if the scope's records were made with another key.
async fn same_key(
    scope: &Scope,
    consumer: &shape::Consumer,
    store: &Arc<dyn Store>,
    report: &mut Report,
) {
    let Some(key) = &consumer.key else { return };
    let fingerprint = consumer
        .fingerprint
        .as_ref()
        .map(|fingerprint| &fingerprint.0);
    let Ok(ours) = Descriptor::new(&key.0, fingerprint) else {
        return;
    };
    let held = match store.descriptor(scope).await {
        Ok(held) => held
            .map(|held| ScopeDescriptor::parse(scope, &held))
            .transpose(),
        Err(error) => Err(error),
    };
    let held = match held {
        Ok(Some(held)) => held,
        Ok(None) => return,
        Err(error) => return report.problem("store", &error.into()),
    };
    let name = scope.as_str();
    if let Some(halt) = &held.halt {
        let what = format!(
            "scope `{name}` is halted, because the store has lost records: {}",
            halt.reason
        );
        let fix = format!(
            "find out what would run again (oncegate replay), then run: oncegate accept loss --scope {name}"
        );
        report.finding("store_loss", what, &fix);
    }
    if held.keys != ours.as_str() {
        let scope = name.to_owned();
        let ours = ours.as_str().to_owned();
        let refused = GateError::OtherDescriptor {
            scope,
            held: held.keys,
            ours,
        };
        report.finding("key", refused.to_string(), "");
    }
}

/// A source does not open at another broker than that of the scope's records. What is wrong with
/// its server, or with its settings, is asked about afterwards.
async fn same_broker(
    name: &str,
    consumer: &shape::Consumer,
    store: &Arc<dyn Store>,
    report: &mut Report,
) {
    let source = consumer.source.clone().unwrap_or_default();
    let Ok(source) = source.open(name, Duration::ZERO) else {
        return;
    };
    let Ok(Some(gate)) = build::gate(name, consumer, Arc::clone(store)) else {
        return;
    };
    let checked = gate.checked_source(source.into_source());
    if let Ok(Some(why)) = checked.refused().await {
        report.finding("source", why, "");
    }
}

/// A consumer reads the schemas of its format from the registry.
async fn registry(name: &str, consumer: &shape::Consumer, report: &mut Report) {
    let Some(format) = &consumer.format else {
        return;
    };
    let Some(registry) = &format.registry else {
        return;
    };
    match format.check().await {
        Ok(()) => report.saw(format!("schema registry {registry} of {name}: it answers")),
        Err(why) => report.problem("format", &Problem::new(Exit::Unreachable, why)),
    }
}

/// Returns what to ask about the consumer `name`.
///
/// # Errors
/// When the file or variable of a secret cannot be read.
pub(super) fn questions(name: &str, consumer: &shape::Consumer) -> Result<Questions, String> {
    let source = consumer.source.clone().unwrap_or_default();
    let kafka = source.kafka.as_ref();
    let kafka = kafka
        .map(|kafka| kafka.cluster(name, consumer.dead_letters.as_ref()))
        .transpose()?;
    Ok(Questions {
        retention: consumer.gate.retention,
        lease: consumer.gate.lease,
        max_attempts: consumer.runtime.max_attempts,
        max_run: consumer.gate.max_run,
        by_message_key: consumer
            .key
            .as_ref()
            .is_some_and(|key| key.0.is_message_key()),
        group: match &source.kafka {
            Some(_) => Some(source.settings()?.open(name, GateSettings::DEFAULT.lease)?),
            None => None,
        },
        kafka,
        queue: queue(name, &source)?,
        letters: letters(name, &source, consumer)?,
    })
}

/// Returns the queue of a source whose own checks say all about it, with its name.
fn queue(name: &str, source: &Source) -> Result<Option<NamedQueue>, String> {
    let settings = source.settings().ok();
    let Some((settings, queue)) = settings.and_then(|settings| Some((settings, settings.queue()?)))
    else {
        return Ok(None);
    };
    Ok(Some((
        queue.to_owned(),
        settings.open(name, GateSettings::DEFAULT.lease)?,
    )))
}

/// Returns the dead-letter queue, reached as a consumer reaches it.
fn letters(
    name: &str,
    source: &Source,
    consumer: &shape::Consumer,
) -> Result<Option<Box<dyn LetterQueue>>, String> {
    let Some(letters) = consumer
        .dead_letters
        .as_ref()
        .filter(|letters| letters.is_queue())
    else {
        return Ok(None);
    };
    match source.settings() {
        Ok(settings) => Ok(settings
            .open(name, GateSettings::DEFAULT.lease)?
            .letter_queue(letters)),
        Err(_) => Ok(sqs::letter_queue(letters)),
    }
}
