//! Checks without a server that required settings are present and that settings fit together.

use std::collections::BTreeMap;

use oncegate::Key;
use oncegate::consumer::RouteTerms;
use oncegate::core::key::Scope;
use oncegate::core::settings::Finding;
use oncegate::telemetry::operate::check_token;
use oncegate_worker::check_url;

use super::findings::About;
use super::format::RegistryUrl;
use super::shape::{self, Consumer, Handler};
use super::values::{FingerprintSetting, RouteSetting, Secret, Time};
use super::{Loaded, Path, Secrets, Severity};
use crate::run::build;
use crate::sources::SourceSettings;

/// A password belongs into a setting of its own.
pub(super) const PASSWORD_IN_URL: &str =
    "the URL contains a password; take it out, and set `password`";

const PASSWORD_IN_REGISTRY: &str =
    "an address contains a password; take it out, and set `user` and `password`";

pub(super) fn path<const N: usize>(parts: [&str; N]) -> Path {
    parts.map(str::to_owned).into()
}

fn below(above: &[String], setting: &[&str]) -> Path {
    let setting = setting.iter().map(|part| (*part).to_owned());
    above.iter().cloned().chain(setting).collect()
}

/// Returns what is wrong with the key of a consumer, or with its fingerprint. A wrong name of the
/// consumer is reported already.
fn key_findings(name: &str, key: &Key, consumer: &Consumer) -> Option<Finding> {
    let scope = Scope::new(name).ok()?;
    if let Err(error) = key.compile(&scope) {
        return Some(Finding::new("key", error.to_string()));
    }
    let FingerprintSetting(fingerprint) = consumer.fingerprint.as_ref()?;
    let error = fingerprint.compile(key).err()?;
    Some(Finding::new("fingerprint", error.to_string()))
}

impl Loaded {
    pub(super) fn error(&mut self, path: &[String], message: impl Into<String>) {
        self.findings.add(
            &self.layers,
            &self.text,
            (Severity::Error, About::Value),
            path,
            message,
        );
    }

    pub(super) fn warn(&mut self, path: &[String], message: impl Into<String>) {
        self.findings.add(
            &self.layers,
            &self.text,
            (Severity::Warning, About::Value),
            path,
            message,
        );
    }

    /// Reports a missing setting, unless it was present and wrong.
    pub(super) fn missing(&mut self, path: &[String], what: &str) {
        if !self.findings.is_spoilt(path) {
            self.error(path, format!("it is missing: {what}"));
        }
    }

    /// The path of a consumer's setting: its own, or the one that it inherits.
    pub(super) fn place(&self, consumer: &str, setting: &[&str]) -> Path {
        let own = below(&path(["consumer", consumer]), setting);
        self.layers.inherited(&own)
    }

    /// Returns the alternatives of a table that are set (all that it has, if none are listed), each
    /// with where it was set, for an error that they do not fit together; nothing if there is only
    /// one.
    pub(super) fn given_of(&self, at: &[String], alternatives: &[&str]) -> String {
        let table = self.layers.value(at).and_then(toml::Value::as_table);
        let given: Vec<String> = table
            .into_iter()
            .flat_map(toml::Table::keys)
            .filter(|name| alternatives.is_empty() || alternatives.contains(&name.as_str()))
            .map(|name| {
                let origin = self.layers.origin_within(&below(at, &[name.as_str()]));
                let origin = origin.map(|origin| self.named(origin));
                format!("`{name}` ({})", origin.unwrap_or_default())
            })
            .collect();
        match given.as_slice() {
            [] | [_] => String::new(),
            several => format!(", and these are set: {}", several.join(", ")),
        }
    }

    /// Looks for the programs and scripts of the workers on this machine.
    pub(crate) fn look_for_workers(&mut self) {
        for (name, consumer) in self.config.consumer.clone() {
            let Some((setting, absent)) = consumer.handler.as_ref().and_then(Handler::absent)
            else {
                continue;
            };
            let place = self.place(&name, &["handler", setting]);
            self.findings.add(
                &self.layers,
                &self.text,
                (Severity::Warning, About::Value),
                &place,
                absent,
            );
        }
        self.findings.sort();
    }

    pub(super) fn check(&mut self, secrets: Secrets) {
        match self.config.version {
            None | Some(1) => {}
            Some(other) => self.error(
                &path(["version"]),
                format!("this build reads version 1, not {other}"),
            ),
        }
        self.check_store(secrets);
        let has_none = self.config.consumer.is_empty()
            && self.config.outbox.is_empty()
            && self.config.door.is_empty();
        if has_none {
            self.missing(
                &path(["consumer"]),
                "a table as [consumer.billing], [outbox.shop] or [door.payments]",
            );
        }
        let consumers = self.config.consumer.clone();
        for (name, consumer) in &consumers {
            self.check_consumer(name, consumer, secrets);
        }
        self.check_groups(&consumers);
        self.check_inputs(&consumers);
        self.check_outboxes(secrets);
        self.check_doors(secrets);
        self.check_operate(secrets);
    }

    fn check_operate(&mut self, secrets: Secrets) {
        let status = self.config.status.clone().unwrap_or_default();
        let Some(operate) = status.operate else {
            return;
        };
        let at = path(["status", "operate", "token"]);
        match &operate.token {
            None => self.missing(
                &at,
                "a long random text, as { file = \"/run/secrets/page\" }",
            ),
            Some(token) => self.check_secret(&at, token, secrets),
        }
        if let Some(Secret::Literal(token)) = &operate.token
            && let Err(why) = check_token(token)
        {
            self.error(&at, why);
        }
    }

    fn check_store(&mut self, secrets: Secrets) {
        let store = self.config.store.clone().unwrap_or_default();
        let Some(url) = &store.url else {
            return self.missing(
                &path(["store", "url"]),
                "such as \"redis://localhost:6379\"",
            );
        };
        if let Err(problem) = crate::stores::check(url) {
            self.error(&path(["store", "url"]), problem.to_string());
        }
        let misplaced = crate::stores::findings(&store, url);
        for Finding { setting, what } in misplaced.into_iter().chain(store.check()) {
            self.error(&path(["store", setting]), what);
        }
        let userinfo = url
            .split_once("://")
            .and_then(|(_, rest)| rest.rsplit_once('@'))
            .map(|(user, _)| user);
        let in_url = userinfo.is_some_and(|user| user.contains(':'));
        if in_url {
            self.judge_literal(&path(["store", "url"]), secrets, PASSWORD_IN_URL);
        }
        if let Some(password) = &store.password {
            let at = path(["store", "password"]);
            self.check_secret(&at, password, secrets);
            if in_url {
                self.error(&at, "the URL contains a password as well");
            }
        }
        if let Some(password) = &store.sentinel_password {
            self.check_secret(&path(["store", "sentinel_password"]), password, secrets);
        }
        // The store may be another one for a while, by a flag: what it does not have is no error.
        for setting in self.layers.names("store") {
            let at = path(["store", &setting]);
            if let Some(owners) = shape::owners_elsewhere(url, &setting)
                && !self.findings.has(&at)
            {
                self.warn(
                    &at,
                    format!("this store does not have it: it is for {owners}"),
                );
            }
        }
    }

    pub(super) fn check_secret(&mut self, at: &[String], secret: &Secret, secrets: Secrets) {
        if matches!(secret, Secret::Literal(_)) {
            self.judge_literal(
                at,
                secrets,
                "this is the secret itself; move it to { file = \"…\" } or { env = \"…\" }",
            );
        }
    }

    pub(super) fn judge_literal(&mut self, at: &[String], secrets: Secrets, what: &str) {
        match secrets {
            Secrets::MayBeLiteral => self.warn(at, what),
            Secrets::MustBeElsewhere => self.error(at, what),
        }
    }

    fn check_consumer(&mut self, name: &str, consumer: &Consumer, secrets: Secrets) {
        let own = path(["consumer", name]);
        if let Err(error) = Scope::new(name) {
            self.error(&own, error.to_string());
        }
        if consumer.key.is_none() {
            self.missing(
                &below(&own, &["key"]),
                "the fields that identify a message, as { json = [\"order_id\"] }",
            );
        }
        self.check_notation(name);
        self.check_format(name, consumer, secrets);
        self.check_route(&below(&own, &["route"]), consumer);
        self.check_source(name, consumer, secrets);
        match &consumer.handler {
            None => self.missing(&below(&own, &["handler"]), "{ http = \"http://127.0.0.1:8080/handle\" }, { exec = \"./worker\" } or { command = \"./work\" }"),
            Some(handler) => self.check_handler(name, consumer, handler, secrets),
        }
        match &consumer.dead_letters {
            None => self.warn(
                &below(&own, &["dead_letters"]),
                "there are no dead letters (a topic, a queue or a file): the consumer stops at the first message that must be given up",
            ),
            Some(dead_letters) => self.check_dead_letters(name, consumer, dead_letters),
        }
        self.check_times(name, consumer);
        self.check_times_of_source(name, consumer, secrets);
        if !self.findings.is_spoilt(&own) {
            self.check_by_library(name, consumer);
        }
    }

    /// Warns of a route for a topic or queue that the source does not have. Its messages would keep
    /// their own.
    fn check_route(&mut self, at: &[String], consumer: &Consumer) {
        let Some(RouteSetting::Of(names)) = &consumer.route else {
            return;
        };
        let source = consumer
            .source
            .as_ref()
            .and_then(|source| source.settings().ok());
        let known = source.map(SourceSettings::routes).unwrap_or_default();
        if let Some(stranger) = names.keys().find(|name| !known.contains(name)) {
            self.warn(at, format!("the source has no topic or queue {stranger}"));
        }
    }

    fn check_handler(
        &mut self,
        name: &str,
        consumer: &Consumer,
        handler: &Handler,
        secrets: Secrets,
    ) {
        let kinds = [
            handler.http.is_some(),
            handler.exec.is_some(),
            handler.command.is_some(),
        ];
        if kinds.iter().filter(|given| **given).count() != 1 {
            let at = self.place(name, &["handler"]);
            if !self.findings.is_spoilt(&at) {
                let given = self.given_of(&at, &["http", "exec", "command"]);
                self.error(
                    &at,
                    format!("it must be one of `http`, `exec` and `command`{given}"),
                );
            }
            return;
        }
        if consumer.batch.is_some() && handler.command.is_some() {
            let at = self.place(name, &["batch"]);
            self.error(
                &at,
                "a `command` is started for each message; batches need `http` or `exec`",
            );
        }
        let allow_remote = handler.allow_remote.unwrap_or(false);
        if let Some(url) = &handler.http
            && let Err(why) = check_url(url, allow_remote)
        {
            let at = self.place(name, &["handler", "http"]);
            self.error(&at, why.to_string());
        }
        if let Some(url) = &handler.ready_url
            && let Err(why) = check_url(url, allow_remote)
        {
            let at = self.place(name, &["handler", "ready_url"]);
            self.error(&at, why.to_string());
        }
        if handler.workers == Some(0) {
            let at = self.place(name, &["handler", "workers"]);
            self.error(&at, "at least one worker is needed");
        }
        if let Some(token) = &handler.token {
            let at = self.place(name, &["handler", "token"]);
            self.check_secret(&at, token, secrets);
        }
        self.check_kind_of_handler(name, handler);
        if let Some(Time(timeout)) = handler.timeout
            && timeout > consumer.gate.max_run
        {
            let at = self.place(name, &["handler", "timeout"]);
            self.error(&at, "it is longer than `max_run`, which ends a run before");
        }
    }

    /// Finds settings of a handler that belong to another kind of handler.
    fn check_kind_of_handler(&mut self, name: &str, handler: &Handler) {
        let only_http = [
            ("ready_url", handler.ready_url.is_some()),
            ("token", handler.token.is_some()),
            ("http2", handler.http2.is_some()),
            ("allow_remote", handler.allow_remote.is_some()),
            ("cloudevents", handler.cloudevents.is_some()),
            ("content_type", handler.content_type.is_some()),
        ];
        for (setting, _) in only_http
            .into_iter()
            .chain(handler.tls.given())
            .filter(|(_, given)| *given && handler.http.is_none())
        {
            let at = self.place(name, &["handler", setting]);
            self.error(&at, "it belongs to `http`");
        }
        if let Some(Finding { setting, what }) = handler.tls.check() {
            let at = self.place(name, &["handler", setting]);
            self.error(&at, what);
        }
        if handler.workers.is_some() && handler.exec.is_none() {
            let at = self.place(name, &["handler", "workers"]);
            self.error(&at, "it belongs to `exec`");
        }
    }

    fn check_times(&mut self, name: &str, consumer: &Consumer) {
        if let Some(Time(horizon)) = consumer.replay_horizon
            && consumer.gate.retention < horizon
        {
            let at = self.place(name, &["replay_horizon"]);
            self.error(
                &at,
                "it is longer than `retention`: messages whose records have expired would run again",
            );
        }
        if consumer.runtime.fail_open_after.is_some() {
            let at = self.place(name, &["fail_open_after"]);
            self.warn(&at, "the promise does not hold while the store is unavailable for longer than this: completed messages may run again");
        }
        // Both kinds of servers have the same, if one is given.
        let at = path(["store", "response_timeout"]);
        let store = self.config.store.as_ref();
        if let Some(store) = store.filter(|_| self.layers.value(&at).is_some())
            && store.redis.response_timeout * 3 > consumer.gate.lease
        {
            self.error(
                &at,
                format!("the lease of `{name}` must be three times as long, for its heartbeats"),
            );
        }
    }

    /// Lets the library check its settings. Connects to nothing.
    fn check_by_library(&mut self, name: &str, consumer: &Consumer) {
        let source = self.build_source(name, consumer);
        let has_retry_topics =
            source.is_some_and(|source| source.into_source().retry_queue().is_some());
        let mut findings = consumer.gate.check();
        findings.extend(consumer.runtime.check());
        let settings = consumer
            .source
            .as_ref()
            .and_then(|source| source.settings().ok());
        let wrong = settings
            .and_then(|settings| settings.findings_of_order(consumer.runtime.ordering))
            .map(|Finding { what, .. }| Finding::new("ordering", what));
        findings.extend(wrong);
        // What is wrong with the format is reported already.
        if let Ok(Some(key)) = build::key(consumer) {
            findings.extend(key_findings(name, &key, consumer));
            findings.extend(consumer.runtime.check_route(&RouteTerms {
                scope: name,
                key: &key,
                gate: &consumer.gate,
                batch: consumer.batch.as_ref(),
                has_retry_topics,
            }));
        }
        for Finding { setting, what } in findings {
            let setting: Vec<&str> = setting.split('.').collect();
            let at = self.place(name, &setting);
            self.error(&at, what);
        }
    }

    /// Standard input is read once.
    fn check_inputs(&mut self, consumers: &BTreeMap<String, Consumer>) {
        let mut readers = consumers
            .iter()
            .filter(|(_, consumer)| consumer.reads_stdin())
            .map(|(name, _)| name);
        let Some(first) = readers.next() else { return };
        for other in readers {
            let at = self.place(other, &["source", "stdin"]);
            self.error(
                &at,
                format!("`{first}` reads standard input already, and each line is read once"),
            );
        }
    }

    /// Two consumers in one group must consume the same topics: otherwise each gets partitions of
    /// topics it does not consume.
    fn check_groups(&mut self, consumers: &BTreeMap<String, Consumer>) {
        let mut groups: BTreeMap<String, (String, Vec<String>)> = BTreeMap::new();
        for (name, consumer) in consumers {
            let Some(kafka) = consumer
                .source
                .as_ref()
                .and_then(|source| source.kafka.as_ref())
            else {
                continue;
            };
            let mut topics = kafka.topics.clone().unwrap_or_default().0;
            topics.sort();
            let group = kafka.group.clone().unwrap_or_else(|| name.clone());
            match groups.get(&group) {
                Some((other, theirs)) if *theirs != topics => {
                    let at = self.place(name, &["source", "kafka"]);
                    let message = format!(
                        "the group `{group}` consumes other topics in `{other}`: give it a `group` of its own"
                    );
                    self.error(&at, message);
                }
                Some(_) => {}
                None => drop(groups.insert(group, (name.clone(), topics))),
            }
        }
    }

    /// Checks the format of a consumer's payloads: its secrets, and that its schema can be read.
    fn check_format(&mut self, name: &str, consumer: &Consumer, secrets: Secrets) {
        let Some(format) = &consumer.format else {
            return;
        };
        for (setting, secret) in [("password", &format.password), ("token", &format.token)] {
            if let Some(secret) = secret {
                self.check_secret(&self.place(name, &["format", setting]), secret, secrets);
            }
        }
        if format
            .registry
            .as_ref()
            .is_some_and(RegistryUrl::has_password)
        {
            let at = self.place(name, &["format", "registry"]);
            self.judge_literal(&at, secrets, PASSWORD_IN_REGISTRY);
        }
        if let Err(why) = format.apply(Key::payload()) {
            self.error(&self.place(name, &["format"]), why);
        }
    }
}
