//! Checks the outboxes of a configuration without a server.

use oncegate::core::key::Scope;
use oncegate::core::settings::Finding;

use super::check::path;
use super::shape::{OutboxKafka, OutboxSqs};
use super::values::{Property, Secret};
use super::{Loaded, Secrets};
use crate::outbox::Broker;
use crate::stores;

impl Loaded {
    pub(super) fn check_outboxes(&mut self, secrets: Secrets) {
        let outboxes = self.config.outbox.clone();
        let url = self
            .config
            .store
            .as_ref()
            .and_then(|store| store.url.clone())
            .unwrap_or_default();
        if !outboxes.is_empty() && stores::lacks_outboxes(&url) {
            self.error(&path(["store", "url"]), stores::NO_OUTBOX);
        }
        for (name, outbox) in &outboxes {
            let own = path(["outbox", name]);
            if let Err(error) = Scope::new(name) {
                self.error(&own, error.to_string());
            }
            for Finding { setting, what } in outbox.relay.check() {
                self.error(&path(["outbox", name, setting]), what);
            }
            match (&outbox.kafka, &outbox.sqs) {
                (Some(_), Some(_)) => {
                    self.error(
                        &own,
                        "it has both `kafka` and `sqs`; make an outbox of its own for each broker",
                    );
                }
                (None, None) => {
                    self.missing(
                        &path(["outbox", name, "kafka"]),
                        "{ brokers = [\"host:9092\"] }, or sqs = {}",
                    );
                }
                (None, Some(sqs)) => self.check_queues(name, sqs),
                (Some(kafka), None) => self.check_cluster(name, kafka, secrets),
            }
        }
    }

    /// Checks the server of the queues, which a URL names.
    fn check_queues(&mut self, name: &str, sqs: &OutboxSqs) {
        if sqs
            .endpoint_url
            .as_ref()
            .is_some_and(|url| !url.starts_with("http://") && !url.starts_with("https://"))
        {
            let at = path(["outbox", name, "sqs", "endpoint_url"]);
            self.error(
                &at,
                "it is the URL of a server, such as \"http://localhost:9324\"",
            );
        }
        if sqs.region.as_deref() == Some("") {
            self.error(
                &path(["outbox", name, "sqs", "region"]),
                "it is empty; name one, or leave it out",
            );
        }
    }

    fn check_cluster(&mut self, name: &str, kafka: &OutboxKafka, secrets: Secrets) {
        if kafka
            .brokers
            .as_ref()
            .is_none_or(|brokers| brokers.0.iter().all(String::is_empty))
        {
            self.missing(
                &path(["outbox", name, "kafka", "brokers"]),
                "[\"host:9092\"]",
            );
        }
        for (property, Property(value)) in kafka
            .properties
            .iter()
            .filter(|(name, _)| Property::is_secret(name))
        {
            self.check_secret(
                &path(["outbox", name, "kafka", "properties", property]),
                value,
                secrets,
            );
        }
        self.check_properties(name);
    }

    /// Lets the library check the properties, without reading secrets.
    fn check_properties(&mut self, name: &str) {
        let Some(mut outbox) = self.config.outbox.get(name).cloned() else {
            return;
        };
        if let Some(kafka) = &mut outbox.kafka {
            for Property(value) in kafka.properties.values_mut() {
                if let Secret::Env(_) = value {
                    *value = Secret::Literal(value.resolve().unwrap_or_default());
                }
            }
        }
        let at = path(["outbox", name, "kafka", "properties"]);
        match Broker::of(&outbox) {
            Err(error) => self.error(&at, error),
            Ok(Broker::Sqs(_)) => {}
            Ok(Broker::Kafka(publisher)) => {
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
