//! Metrics through the `metrics` facade, and (feature `status`) an endpoint for Prometheus, probes
//! and a browser.
//!
//! One [`Telemetry`] is the observer of every consumer of a process:
//!
//! ```
//! # #[cfg(feature = "status")]
//! # fn observed(consumer: oncegate::Consumer) -> Result<(), oncegate::BoxError> {
//! use oncegate::telemetry::Telemetry;
//!
//! let telemetry = Telemetry::prometheus()?;
//! let consumer = telemetry.watch(consumer);
//! # drop(consumer);
//! # Ok(())
//! # }
//! ```
//!
//! [`CATALOGUE`](oncegate_runtime::observe::CATALOGUE), and the table in `docs/OBSERVABILITY.md`,
//! describe all metrics.
//!
//! # Not obvious
//!
//! Implementation notes: facts about metrics and spans that this code depends on.
//!
//! - Prometheus treats a counter that appears with its first event as if it had always been at one.
//!   So all counters of a scope are registered when the scope is first seen.
//! - The `metrics` facade never removes a gauge. A gauge that a consumer no longer reports is set
//!   to zero; otherwise a revoked partition would keep its lag forever.
//! - The Prometheus recorder keeps every duration until it is scraped, which may never happen. So
//!   each 4,096th event triggers its upkeep.
//! - A span's parent can be set only before the span is entered.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::Serialize;

use oncegate_outbox::{Relay, RelayMonitor};
use oncegate_runtime::consumer::{Consumer, Monitor};
use oncegate_runtime::health::Status;
use oncegate_runtime::observe::{Counters, Event, Observer};

mod export;
mod gauges;

#[cfg(feature = "status")]
pub mod operate;
#[cfg(feature = "status")]
mod router;
#[cfg(feature = "status")]
mod server;

use export::Export;
use gauges::Gauges;

/// The number of recent dead letters that are kept.
const LETTERS: usize = 20;

/// The most bytes of a dead letter's reason that are kept.
const REASON_BYTES: usize = 256;

/// An observer that counts events for metrics and for the status page.
///
/// Cheap to clone; all clones share their state. Each event costs two additions in memory. Memory
/// is allocated only at the first event of a kind.
#[derive(Clone)]
pub struct Telemetry {
    inner: Arc<Inner>,
}

struct Inner {
    export: Export,
    #[cfg_attr(
        not(feature = "status"),
        expect(dead_code, reason = "there is none without the feature")
    )]
    prometheus: Option<Rendered>,
    gauges: Gauges,
    monitors: Mutex<Vec<Monitor>>,
    relays: Mutex<Vec<RelayMonitor>>,
    counters: Counters,
    /// The last dead letters, the newest at the end.
    letters: Mutex<VecDeque<RecentLetter>>,
    /// The part that acts on the page, if there is one.
    #[cfg(feature = "status")]
    operate: std::sync::OnceLock<Arc<operate::Operate>>,
}

/// Renders the metrics as text, if this crate has the exporter.
#[cfg(feature = "status")]
type Rendered = metrics_exporter_prometheus::PrometheusHandle;
#[cfg(not(feature = "status"))]
type Rendered = std::convert::Infallible;

/// A dead letter, as shown on the page.
#[derive(Clone, Debug, Serialize)]
struct RecentLetter {
    at_unix_ms: u64,
    scope: String,
    origin: String,
    cause: &'static str,
    reason: String,
}

impl Telemetry {
    /// Publishes through the program's own recorder, the one set by
    /// [`metrics::set_global_recorder`].
    ///
    /// Set it before the first event, and configure the bounds of the histograms in its exporter
    /// ([`CATALOGUE`](oncegate_runtime::observe::CATALOGUE)).
    pub fn global() -> Self {
        Self::of(Export::global(), None)
    }

    /// Publishes through this recorder.
    pub fn with_recorder(recorder: impl metrics::Recorder + Send + Sync + 'static) -> Self {
        Self::of(Export::to(Box::new(recorder)), None)
    }

    fn of(export: Export, prometheus: Option<Rendered>) -> Self {
        let inner = Inner {
            export,
            prometheus,
            gauges: Gauges::default(),
            monitors: Mutex::default(),
            relays: Mutex::default(),
            counters: Counters::default(),
            letters: Mutex::default(),
            #[cfg(feature = "status")]
            operate: std::sync::OnceLock::new(),
        };
        Self {
            inner: Arc::new(inner),
        }
    }

    /// Observes this consumer from now on, and reads its status when metrics or the page are
    /// requested.
    ///
    /// Replaces the consumer's own [`observer`](Consumer::observer).
    #[must_use = "the consumer that is returned is the one that is observed"]
    pub fn watch(&self, consumer: Consumer) -> Consumer {
        self.inner.monitors.lock().push(consumer.monitor());
        consumer.observer(Arc::new(self.clone()))
    }

    /// Observes this relay from now on, and reads the backlog of its outbox when metrics are
    /// requested.
    ///
    /// Replaces the relay's own [`observer`](Relay::observer).
    #[must_use = "the relay that is returned is the one that is observed"]
    pub fn watch_relay(&self, relay: Relay) -> Relay {
        self.inner.relays.lock().push(relay.monitor());
        relay.observer(Arc::new(self.clone()))
    }

    /// Sets the gauges to the status of the watched consumers and relays. Call this every few
    /// seconds if the program exports through its own recorder; the router's `/metrics` does it by
    /// itself.
    ///
    /// A gauge that is no longer reported becomes zero, such as the lag of a revoked partition.
    pub fn record(&self) {
        self.set(&self.statuses(), &self.outboxes());
    }

    fn set(&self, statuses: &[Status], outboxes: &[gauges::Outbox]) {
        let scopes = statuses.iter().flat_map(|status| &status.scopes);
        scopes.for_each(|scope| self.inner.export.begin(&scope.scope));
        self.inner
            .gauges
            .set(&self.inner.export, statuses, outboxes);
    }

    fn statuses(&self) -> Vec<Status> {
        let monitors = self.inner.monitors.lock().clone();
        monitors.iter().map(Monitor::status).collect()
    }

    /// The backlogs of the outboxes of the watched relays that run.
    fn outboxes(&self) -> Vec<gauges::Outbox> {
        let relays = self.inner.relays.lock();
        relays
            .iter()
            .filter_map(|relay| Some((relay.outbox().to_owned(), relay.backlog()?)))
            .collect()
    }

    /// The last dead letters, the newest first.
    #[cfg(feature = "status")]
    fn letters(&self) -> Vec<RecentLetter> {
        let letters = self.inner.letters.lock();
        letters.iter().rev().cloned().collect()
    }

    /// Returns the counts of all events so far.
    pub fn counters(&self) -> &Counters {
        &self.inner.counters
    }
}

impl Observer for Telemetry {
    fn observe(&self, event: Event<'_>) {
        self.inner.counters.observe(event);
        self.inner.export.observe(event);
        if let Event::DeadLettered {
            scope,
            cause,
            origin,
            reason,
        } = event
        {
            let mut letters = self.inner.letters.lock();
            let surplus = (letters.len() + 1).saturating_sub(LETTERS);
            letters.drain(..surplus);
            letters.push_back(RecentLetter {
                at_unix_ms: unix_ms(),
                scope: scope.to_owned(),
                origin: origin.to_string(),
                cause: cause.as_str(),
                reason: head(reason, REASON_BYTES).to_owned(),
            });
        }
    }
}

impl fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Telemetry")
            .field("counters", &self.inner.counters)
            .finish_non_exhaustive()
    }
}

/// Now, in milliseconds since 1970.
fn unix_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The first `most` bytes of a text, or slightly fewer, so that no character is cut.
fn head(text: &str, most: usize) -> &str {
    text.get(..text.floor_char_boundary(most))
        .unwrap_or_default()
}
