//! Checks of a consumer's source, and of the dead letters that it can have.

use oncegate::core::settings::Finding;

use super::check::{PASSWORD_IN_URL, path};
use super::findings::dotted;
use super::shape::Consumer;
use super::{Loaded, Secrets};
use crate::sources::{ConfiguredSource, DeadLetters, Source, SourceFinding};

impl Loaded {
    pub(super) fn check_source(&mut self, name: &str, consumer: &Consumer, secrets: Secrets) {
        let Some(source) = &consumer.source else {
            let at = path(["consumer", name, "source"]);
            return self.missing(
                &at,
                "{ kafka = { brokers, topics } } or { sqs = { queue } }",
            );
        };
        match source.settings() {
            Ok(settings) => {
                for finding in settings.findings() {
                    self.report(name, settings.table(), &finding, secrets);
                }
            }
            Err(why) => {
                let at = self.place(name, &["source"]);
                if !self.findings.is_spoilt(&at) {
                    let given = self.given_of(&at, &[]);
                    self.error(&at, format!("{why}{given}"));
                }
            }
        }
    }

    /// Warns where the source does not fit to the times of its consumer.
    pub(super) fn check_times_of_source(
        &mut self,
        name: &str,
        consumer: &Consumer,
        secrets: Secrets,
    ) {
        let Some(Ok(settings)) = consumer.source.as_ref().map(Source::settings) else {
            return;
        };
        let lease = consumer.gate.lease;
        let max_run = consumer.gate.max_run;
        for finding in settings.findings_beside(lease, max_run) {
            self.report(name, settings.table(), &finding, secrets);
        }
    }

    fn report(&mut self, name: &str, table: &str, finding: &SourceFinding<'_>, secrets: Secrets) {
        match finding {
            SourceFinding::Missing(setting, example) => {
                let at = self.place(name, &["source", table, setting]);
                self.missing(&at, example);
            }
            SourceFinding::Error(setting, why) => {
                let at = self.place(name, &["source", table, setting]);
                self.error(&at, *why);
            }
            SourceFinding::Wrong(Finding { setting, what }) => {
                let at = self.place(name, &["source", table, setting]);
                self.error(&at, what);
            }
            SourceFinding::Warning(setting, why) => {
                let at = self.place(name, &["source", table, setting]);
                self.warn(&at, why);
            }
            SourceFinding::ConsumerWarning(setting, why) => {
                let at = self.place(name, &[setting]);
                self.warn(&at, *why);
            }
            SourceFinding::SecretInUrl(setting) => {
                let at = self.place(name, &["source", table, setting]);
                self.judge_literal(&at, secrets, PASSWORD_IN_URL);
            }
            SourceFinding::Secret(setting, secret) => {
                let at = self.place(name, &[&["source", table], &setting[..]].concat());
                self.check_secret(&at, secret, secrets);
            }
        }
    }

    pub(super) fn check_dead_letters(
        &mut self,
        name: &str,
        consumer: &Consumer,
        letters: &DeadLetters,
    ) {
        let settings = consumer
            .source
            .as_ref()
            .and_then(|source| source.settings().ok());
        let wrong = match letters.check() {
            Ok(()) => settings.and_then(|settings| settings.refuse_letters(letters)),
            Err(why) => Some(("", why)),
        };
        let Some((setting, message)) = wrong else {
            return;
        };
        let within: &[&str] = if setting.is_empty() {
            &["dead_letters"]
        } else {
            &["dead_letters", setting]
        };
        let at = self.place(name, within);
        if !self.findings.is_spoilt(&at) {
            let given = if setting.is_empty() {
                self.given_of(&at, &[])
            } else {
                String::new()
            };
            self.error(&at, format!("{message}{given}"));
        }
    }

    /// Lets the library check the settings of the source. Returns the source, if nothing is wrong
    /// or missing.
    pub(super) fn build_source(
        &mut self,
        name: &str,
        consumer: &Consumer,
    ) -> Option<Box<dyn ConfiguredSource>> {
        let settings = consumer
            .source
            .as_ref()?
            .settings()
            .ok()
            .filter(|settings| settings.is_complete())?;
        let source = settings.open_without_secrets(name);
        match source.and_then(|source| source.check().map(|()| source)) {
            Ok(source) => {
                if let Some((setting, why)) = source.warning() {
                    let at = self.place(name, &["source", settings.table(), setting]);
                    self.warn(&at, why);
                }
                Some(source)
            }
            Err(error) => {
                let at = self.place(name, &["source", settings.table()]);
                // Unless the source has an error already.
                let within = dotted(&at);
                if !self
                    .findings
                    .all
                    .iter()
                    .any(|finding| finding.path.starts_with(&within))
                {
                    self.error(&at, error);
                }
                None
            }
        }
    }
}
