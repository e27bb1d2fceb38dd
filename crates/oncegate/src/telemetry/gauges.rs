//! The states of consumers as gauges.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use metrics::{Gauge, Key, Label};

use super::export::Export;
use crate::health::{Health, PartitionStatus, Status};
use crate::observe::Metric;

/// The gauges that were set so far. The facade removes none, so those that are no longer reported are set to zero.
#[derive(Default)]
pub(super) struct Gauges {
    known: Mutex<HashMap<Key, Gauge>>,
}

impl Gauges {
    /// Sets the gauges to the status of these consumers, and sets those that none reports any more to zero.
    pub(super) fn set(&self, export: &Export, statuses: &[Status]) {
        let mut said = Said::default();
        said.say("build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1.0);
        statuses.iter().for_each(|status| said.consumer(status));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().filter(|(key, _)| !said.gauges.contains_key(*key)).for_each(|(_, gauge)| gauge.set(0.0));
        for (key, value) in said.gauges {
            let gauge = known.entry(key).or_insert_with_key(|key| export.gauge(key));
            gauge.set(value);
        }
    }
}

#[derive(Default)]
struct Said {
    gauges: HashMap<Key, f64>,
}

impl Said {
    fn say(&mut self, name: &'static str, labels: &[(&'static str, &str)], value: f64) {
        let name = Metric::named(name).map_or_else(|| name.to_owned(), Metric::full_name);
        let labels = labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned()));
        self.gauges.insert(Key::from_parts(name, labels.collect::<Vec<_>>()), value);
    }

    fn consumer(&mut self, status: &Status) {
        let name = status.name.as_str();
        let consumer = [("consumer", name)];
        let health = Health::of(status);
        self.say("live", &consumer, flag(health.is_live()));
        self.say("ready", &consumer, flag(health.is_ready()));
        for reason in health.reasons() {
            self.say("unwell", &[("consumer", name), ("reason", reason.as_str())], 1.0);
        }
        for cause in &status.paused {
            self.say("paused", &[("consumer", name), ("cause", cause.as_str())], 1.0);
        }
        for scope in &status.scopes {
            let named = [("scope", scope.scope.as_str())];
            self.say("store_up", &named, flag(scope.is_store_up()));
            self.say("lease_remaining_seconds", &named, scope.lease_remaining.as_secs_f64());
            self.say("record_retention_seconds", &named, scope.retention.as_secs_f64());
            if let Some(age) = scope.oldest_expired {
                self.say("oldest_expired_seconds", &named, age.as_secs_f64());
            }
            if let Some(bytes) = scope.log_bytes {
                self.say("store_log_bytes", &named, count(bytes));
            }
        }
        self.say("permits", &consumer, f64::from(status.permits.total));
        self.say("permits_free", &consumer, f64::from(status.permits.free));
        let messages = status.messages;
        self.say("in_flight", &consumer, count(messages.in_flight as u64));
        self.say("in_flight_bytes", &consumer, count(messages.bytes as u64));
        for (stage, how_many) in [
            ("running", messages.running),
            ("ready", messages.ready),
            ("behind", messages.behind),
            ("parked", messages.parked),
            ("held_back", messages.held_back),
        ] {
            self.say("messages", &[("consumer", name), ("stage", stage)], count(how_many as u64));
        }
        if let Some(polled_ago) = status.source.polled_ago {
            self.say("poll_age_seconds", &consumer, polled_ago.as_secs_f64());
        }
        status.source.partitions.iter().for_each(|partition| self.partition(name, partition));
    }

    fn partition(&mut self, consumer: &str, status: &PartitionStatus) {
        let number = status.partition.to_string();
        let labels = [("consumer", consumer), ("topic", &*status.topic), ("partition", &*number)];
        let oldest = status.oldest_unfinished.unwrap_or(Duration::ZERO).as_secs_f64();
        self.say("oldest_incomplete_age_seconds", &labels, oldest);
        let offset = |offset: Option<i64>| offset.and_then(|offset| u64::try_from(offset).ok());
        for (name, value) in [
            ("lag", status.lag),
            ("watermark", offset(status.watermark)),
            ("committed_offset", offset(status.committed)),
        ] {
            if let Some(value) = value {
                self.say(name, &labels, count(value));
            }
        }
    }
}

fn flag(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

/// Exact up to 2^53, which no offset reaches.
fn count(value: u64) -> f64 {
    value as f64
}

#[cfg(all(test, feature = "status"))]
mod tests {
    use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

    use super::*;
    use crate::health::{PauseCause, ScopeStatus, SourceStatus};
    use crate::observe::{CATALOGUE, Kind};
    use crate::telemetry::Telemetry;

    fn telemetry() -> (Telemetry, PrometheusHandle) {
        let recorder = PrometheusBuilder::new().build_recorder();
        let rendered = recorder.handle();
        (Telemetry::with_recorder(recorder), rendered)
    }

    /// A consumer of two partitions whose store is unavailable.
    fn paused() -> Status {
        let partition = |number: i32| PartitionStatus {
            lag: Some(7),
            watermark: Some(100),
            committed: Some(90),
            oldest_unfinished: Some(Duration::from_millis(2_500)),
            ..PartitionStatus::new("orders", number)
        };
        let source = SourceStatus {
            polled_ago: Some(Duration::from_millis(250)),
            partitions: vec![partition(0), partition(1)],
            ..SourceStatus::default()
        };
        let away = crate::health::StoreOutage {
            shard: 0,
            lasts: Duration::from_secs(5),
            error: "away".to_owned(),
            waiting: 1,
            open: false,
        };
        let scope = ScopeStatus {
            scope: "billing".to_owned(),
            route: None,
            store: "a store".to_owned(),
            promise: "disk".to_owned(),
            holds: "it is on the disk".to_owned(),
            warnings: Vec::new(),
            lease: Duration::from_secs(30),
            lease_remaining: Duration::from_millis(6_500),
            retention: Duration::from_secs(604_800),
            max_run: Duration::from_secs(900),
            oldest_expired: Some(Duration::from_secs(75)),
            log_bytes: Some(4_096),
            shards: 1,
            outages: vec![away],
            handler_paused: false,
        };
        Status {
            name: "billing".to_owned(),
            scopes: vec![scope],
            paused: vec![PauseCause::StoreAway],
            source,
            ..Status::default()
        }
    }

    #[test]
    fn a_status_sets_every_gauge_of_the_catalogue() {
        let (telemetry, rendered) = telemetry();
        telemetry.set(&[paused()]);
        let text = rendered.render();
        for metric in CATALOGUE.iter().filter(|metric| metric.kind == Kind::Gauge) {
            let typed = format!("# TYPE {} gauge\n", metric.full_name());
            assert!(text.contains(&typed), "{typed} is not in {text}");
        }
        for line in [
            r#"oncegate_lag{consumer="billing",topic="orders",partition="1"} 7"#,
            r#"oncegate_oldest_incomplete_age_seconds{consumer="billing",topic="orders",partition="0"} 2.5"#,
            r#"oncegate_store_up{scope="billing"} 0"#,
            r#"oncegate_lease_remaining_seconds{scope="billing"} 6.5"#,
            r#"oncegate_record_retention_seconds{scope="billing"} 604800"#,
            r#"oncegate_oldest_expired_seconds{scope="billing"} 75"#,
            r#"oncegate_store_log_bytes{scope="billing"} 4096"#,
            r#"oncegate_paused{consumer="billing",cause="store_away"} 1"#,
            r#"oncegate_poll_age_seconds{consumer="billing"} 0.25"#,
            r#"oncegate_ready{consumer="billing"} 0"#,
            r#"oncegate_extra_runs_total{scope="billing",cause="store_loss"} 0"#,
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line} is not in {text}");
        }
    }

    #[test]
    fn what_is_no_longer_said_is_zero() {
        let (telemetry, rendered) = telemetry();
        telemetry.set(&[paused()]);
        let mut after = paused();
        after.paused.clear();
        after.source.partitions.truncate(1);
        telemetry.set(&[after]);
        let text = rendered.render();
        for line in [
            r#"oncegate_lag{consumer="billing",topic="orders",partition="0"} 7"#,
            r#"oncegate_lag{consumer="billing",topic="orders",partition="1"} 0"#,
            r#"oncegate_committed_offset{consumer="billing",topic="orders",partition="1"} 0"#,
            r#"oncegate_paused{consumer="billing",cause="store_away"} 0"#,
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line} is not in {text}");
        }
    }
}
