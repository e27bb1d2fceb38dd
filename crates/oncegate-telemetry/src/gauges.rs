//! The states of consumers as gauges.

use std::collections::HashMap;
use std::time::Duration;

use metrics::{Gauge, Key, Label};
use parking_lot::Mutex;

use super::export::Export;
use oncegate_outbox::OutboxBacklog;
use oncegate_runtime::health::{Health, Messages, PartitionStatus, ScopeStatus, Status};
use oncegate_runtime::observe::Metric;

/// The gauges that were set so far. The facade removes none, so those that are no longer reported
/// are set to zero.
#[derive(Default)]
pub(super) struct Gauges {
    known: Mutex<HashMap<Key, Gauge>>,
}

impl Gauges {
    /// Sets the gauges to the status of these consumers and to the backlogs of these outboxes.
    /// Gauges that are no longer reported become zero.
    pub(super) fn set(&self, export: &Export, statuses: &[Status], outboxes: &[Outbox]) {
        let mut values = GaugeValues::default();
        values.insert("build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1.0);
        statuses.iter().for_each(|status| values.consumer(status));
        outboxes
            .iter()
            .for_each(|(outbox, backlog)| values.outbox(outbox, *backlog));
        let mut known = self.known.lock();
        known
            .iter()
            .filter(|(key, _)| !values.gauges.contains_key(*key))
            .for_each(|(_, gauge)| gauge.set(0.0));
        for (key, value) in values.gauges {
            let gauge = known.entry(key).or_insert_with_key(|key| export.gauge(key));
            gauge.set(value);
        }
    }
}

/// The name of an outbox, and its backlog.
pub(super) type Outbox = (String, OutboxBacklog);

#[derive(Default)]
struct GaugeValues {
    gauges: HashMap<Key, f64>,
}

impl GaugeValues {
    fn insert(&mut self, name: &'static str, labels: &[(&'static str, &str)], value: f64) {
        let name = Metric::named(name).map_or_else(|| name.to_owned(), Metric::full_name);
        let labels = labels
            .iter()
            .map(|(name, value)| Label::new(*name, (*value).to_owned()));
        self.gauges
            .insert(Key::from_parts(name, labels.collect::<Vec<_>>()), value);
    }

    fn consumer(&mut self, status: &Status) {
        let name = status.name.as_str();
        let consumer = [("consumer", name)];
        let health = Health::of(status);
        self.insert("live", &consumer, flag(health.is_live()));
        self.insert("ready", &consumer, flag(health.is_ready()));
        for reason in health.reasons() {
            self.insert(
                "unwell",
                &[("consumer", name), ("reason", reason.as_str())],
                1.0,
            );
        }
        for cause in &status.paused {
            self.insert(
                "paused",
                &[("consumer", name), ("cause", cause.as_str())],
                1.0,
            );
        }
        status.scopes.iter().for_each(|scope| self.scope(scope));
        self.insert("permits", &consumer, f64::from(status.permits.total));
        self.insert("permits_free", &consumer, f64::from(status.permits.free));
        self.messages(name, status.messages);
        if let Some(polled_ago) = status.source.polled_ago {
            self.insert("poll_age_seconds", &consumer, polled_ago.as_secs_f64());
        }
        if let Some(worker) = &status.worker {
            self.insert("worker_processes", &consumer, f64::from(worker.processes));
            self.insert("worker_processes_ready", &consumer, f64::from(worker.ready));
            self.insert("worker_restarts", &consumer, count(worker.restarts));
        }
        status
            .source
            .partitions
            .iter()
            .for_each(|partition| self.partition(name, partition));
    }

    fn scope(&mut self, status: &ScopeStatus) {
        let scope = [("scope", status.scope.as_str())];
        self.insert("store_up", &scope, flag(status.is_store_up()));
        for (name, duration) in [
            ("lease_remaining_seconds", status.lease_remaining),
            ("lease_seconds", status.lease),
            ("run_remaining_seconds", status.run_remaining),
            ("max_run_seconds", status.max_run),
            ("record_retention_seconds", status.retention),
        ] {
            self.insert(name, &scope, duration.as_secs_f64());
        }
        if let Some(age) = status.oldest_expired {
            self.insert("oldest_expired_seconds", &scope, age.as_secs_f64());
        }
        for (name, bytes) in [
            ("store_log_bytes", status.log_bytes),
            ("store_memory_bytes", status.memory_bytes),
            ("store_memory_max_bytes", status.max_memory_bytes),
        ] {
            if let Some(bytes) = bytes {
                self.insert(name, &scope, count(bytes));
            }
        }
    }

    fn messages(&mut self, consumer: &str, messages: Messages) {
        let named = [("consumer", consumer)];
        self.insert("in_flight", &named, count(messages.in_flight as u64));
        self.insert("in_flight_bytes", &named, count(messages.bytes as u64));
        for (stage, how_many) in [
            ("running", messages.running),
            ("ready", messages.ready),
            ("behind", messages.behind),
            ("parked", messages.parked),
            ("held_back", messages.held_back),
        ] {
            self.insert(
                "messages",
                &[("consumer", consumer), ("stage", stage)],
                count(how_many as u64),
            );
        }
    }

    fn outbox(&mut self, outbox: &str, backlog: OutboxBacklog) {
        let outbox = [("outbox", outbox)];
        self.insert("outbox_waiting", &outbox, count(backlog.messages));
        let oldest = backlog.oldest.unwrap_or(Duration::ZERO).as_secs_f64();
        self.insert("outbox_oldest_seconds", &outbox, oldest);
    }

    fn partition(&mut self, consumer: &str, status: &PartitionStatus) {
        let number = status.partition.to_string();
        let labels = [
            ("consumer", consumer),
            ("topic", &*status.topic),
            ("partition", &*number),
        ];
        let oldest = status
            .oldest_unfinished
            .unwrap_or(Duration::ZERO)
            .as_secs_f64();
        self.insert("oldest_incomplete_age_seconds", &labels, oldest);
        for (name, value) in [
            ("lag", status.lag),
            ("watermark", status.watermark.and_then(offset)),
            ("committed_offset", status.committed.and_then(offset)),
        ] {
            if let Some(value) = value {
                self.insert(name, &labels, count(value));
            }
        }
    }
}

fn flag(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

/// An offset as a count; `None` for the negative numbers that stand for "none".
fn offset(offset: i64) -> Option<u64> {
    u64::try_from(offset).ok()
}

/// The value of a gauge: exact up to 2^53, which no offset reaches.
fn count(value: u64) -> f64 {
    value as f64
}

#[cfg(all(test, feature = "status"))]
mod tests {
    use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

    use super::*;
    use crate::Telemetry;
    use oncegate_runtime::health::{PauseCause, SourceStatus, WorkerStatus};
    use oncegate_runtime::observe::{CATALOGUE, Kind};

    fn telemetry() -> (Telemetry, PrometheusHandle) {
        let recorder = PrometheusBuilder::new().build_recorder();
        let rendered = recorder.handle();
        (Telemetry::with_recorder(recorder), rendered)
    }

    /// A consumer of two partitions whose store is unavailable.
    fn paused() -> Status {
        let partitions = [0, 1].map(|number| PartitionStatus {
            lag: Some(7),
            watermark: Some(100),
            committed: Some(90),
            oldest_unfinished: Some(Duration::from_millis(2_500)),
            ..PartitionStatus::new("orders", number)
        });
        let source = SourceStatus {
            polled_ago: Some(Duration::from_millis(250)),
            partitions: partitions.into(),
            ..SourceStatus::default()
        };
        let scope = serde_json::json!({
            "scope": "billing", "route": null, "store": "a store", "promise": "disk", "holds": "it is on the disk",
            "warnings": [], "lease_seconds": 30.0, "lease_remaining_seconds": 6.5, "retention_seconds": 604_800.0,
            "max_run_seconds": 900.0, "run_remaining_seconds": 840.5, "memory_bytes": 1_024, "max_memory_bytes": 8_192, "oldest_expired_seconds": 75.0, "log_bytes": 4_096, "shards": 1,
            "outages": [{ "shard": 0, "for_seconds": 5.0, "error": "away", "waiting": 1, "open": false }],
            "handler_paused": false,
        });
        let mut status = Status::default();
        status.name = "billing".to_owned();
        status.scopes =
            vec![serde_json::from_value(scope).expect("a scope as the status page shows it")];
        status.paused = vec![PauseCause::StoreAway];
        status.source = source;
        let mut worker = WorkerStatus::default();
        worker.processes = 4;
        worker.ready = 3;
        worker.restarts = 7;
        status.worker = Some(worker);
        status
    }

    /// An outbox whose messages wait.
    fn waiting() -> Outbox {
        let oldest = Some(Duration::from_millis(90_500));
        (
            "shop".to_owned(),
            OutboxBacklog {
                messages: 12,
                oldest,
            },
        )
    }

    #[test]
    fn a_status_sets_every_gauge_of_the_catalogue() {
        let (telemetry, rendered) = telemetry();
        telemetry.set(&[paused()], &[waiting()]);
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
            r#"oncegate_lease_seconds{scope="billing"} 30"#,
            r#"oncegate_run_remaining_seconds{scope="billing"} 840.5"#,
            r#"oncegate_max_run_seconds{scope="billing"} 900"#,
            r#"oncegate_store_memory_bytes{scope="billing"} 1024"#,
            r#"oncegate_store_memory_max_bytes{scope="billing"} 8192"#,
            r#"oncegate_record_retention_seconds{scope="billing"} 604800"#,
            r#"oncegate_oldest_expired_seconds{scope="billing"} 75"#,
            r#"oncegate_store_log_bytes{scope="billing"} 4096"#,
            r#"oncegate_paused{consumer="billing",cause="store_away"} 1"#,
            r#"oncegate_poll_age_seconds{consumer="billing"} 0.25"#,
            r#"oncegate_ready{consumer="billing"} 0"#,
            r#"oncegate_worker_processes{consumer="billing"} 4"#,
            r#"oncegate_worker_processes_ready{consumer="billing"} 3"#,
            r#"oncegate_worker_restarts{consumer="billing"} 7"#,
            r#"oncegate_outbox_waiting{outbox="shop"} 12"#,
            r#"oncegate_outbox_oldest_seconds{outbox="shop"} 90.5"#,
            r#"oncegate_extra_runs_total{scope="billing",cause="store_loss"} 0"#,
        ] {
            assert!(
                text.contains(&format!("{line}\n")),
                "{line} is not in {text}"
            );
        }
    }

    #[test]
    fn what_is_no_longer_said_is_zero() {
        let (telemetry, rendered) = telemetry();
        telemetry.set(&[paused()], &[waiting()]);
        let mut after = paused();
        after.paused.clear();
        after.source.partitions.truncate(1);
        telemetry.set(&[after], &[]);
        let text = rendered.render();
        for line in [
            r#"oncegate_lag{consumer="billing",topic="orders",partition="0"} 7"#,
            r#"oncegate_lag{consumer="billing",topic="orders",partition="1"} 0"#,
            r#"oncegate_committed_offset{consumer="billing",topic="orders",partition="1"} 0"#,
            r#"oncegate_paused{consumer="billing",cause="store_away"} 0"#,
            r#"oncegate_outbox_waiting{outbox="shop"} 0"#,
        ] {
            assert!(
                text.contains(&format!("{line}\n")),
                "{line} is not in {text}"
            );
        }
    }
}
