//! Checks the outboxes of a configuration without a server.

use oncegate::core::key::Scope;

use super::check::path;
use super::values::{Property, Secret};
use super::{Loaded, Secrets};
use crate::outbox::publisher;

impl Loaded {
    pub(super) fn check_outboxes(&mut self, secrets: Secrets) {
        let outboxes = self.config.outbox.clone();
        let url = self.config.store.as_ref().and_then(|store| store.url.clone()).unwrap_or_default();
        if !outboxes.is_empty() && url.starts_with("redis") {
            let at = path(["store", "url"]);
            self.error(
                &at,
                "an outbox is a table beside the rows of its effects: it needs postgres:// or an SQLite file",
            );
        }
        for (name, outbox) in &outboxes {
            let own = path(["outbox", name]);
            if let Err(error) = Scope::new(name) {
                self.error(&own, error.to_string());
            }
            let Some(kafka) = &outbox.kafka else {
                self.missing(&path(["outbox", name, "kafka"]), "{ brokers = [\"host:9092\"] }");
                continue;
            };
            if kafka.brokers.as_ref().is_none_or(|brokers| brokers.0.iter().all(String::is_empty)) {
                self.missing(&path(["outbox", name, "kafka", "brokers"]), "[\"host:9092\"]");
            }
            for (property, Property(value)) in
                kafka.properties.iter().filter(|(name, _)| Property::is_secret(name))
            {
                self.check_secret(&path(["outbox", name, "kafka", "properties", property]), value, secrets);
            }
            if outbox.batch == Some(0) {
                self.error(&path(["outbox", name, "batch"]), "at least one message must be in flight");
            }
            self.check_publisher(name);
        }
    }

    /// Lets the library check the properties, without reading secrets.
    fn check_publisher(&mut self, name: &str) {
        let Some(mut outbox) = self.config.outbox.get(name).cloned() else { return };
        if let Some(kafka) = &mut outbox.kafka {
            let unread = |Property(value): &mut Property| {
                if let Secret::Env(_) = value {
                    *value = Secret::Literal(value.resolve().unwrap_or_default());
                }
            };
            kafka.properties.values_mut().for_each(unread);
        }
        let at = path(["outbox", name, "kafka", "properties"]);
        match publisher(&outbox) {
            Err(error) => self.error(&at, error),
            Ok(publisher) => {
                if publisher.shows_login() {
                    self.warn(&at, "the login is sent to another machine in plain text; set \"security.protocol\" to \"SASL_SSL\"");
                }
                if let Err(error) = publisher.check() {
                    self.error(&at, error.to_string());
                }
            }
        }
    }
}
