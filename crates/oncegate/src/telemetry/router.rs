//! The endpoint: `/metrics`, `/healthz`, `/readyz`, and a status page for browsers.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use serde::Serialize;

use super::export::Export;
use super::{Letter, Telemetry, unix_ms};
use crate::failure::BoxError;
use crate::health::{Health, Reason, Status};
use crate::observe::CATALOGUE;

/// The page with its style and script. It loads nothing from other servers.
const PAGE: &str = include_str!("page.html");

/// The page may only run its own script and style, and send requests to this server.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                           connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The version of the format of `/status.json`.
const SCHEMA: &str = "oncegate.status/1";

/// The content type of Prometheus' text format.
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

impl Telemetry {
    /// Publishes to Prometheus, by the `/metrics` of its [`router`](Self::router).
    ///
    /// # Errors
    /// When the exporter refuses the bounds of a histogram, which is a bug.
    pub fn prometheus() -> Result<Self, BoxError> {
        let mut builder = PrometheusBuilder::new();
        for metric in CATALOGUE {
            if let Some(bounds) = metric.bounds() {
                builder = builder.set_buckets_for_metric(Matcher::Full(metric.full_name()), bounds)?;
            }
        }
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        let tidied = handle.clone();
        let export = Export::to(Box::new(recorder)).with_upkeep(move || tidied.run_upkeep());
        Ok(Self::of(export, Some(handle)))
    }

    /// An axum router with the state of the [watched](Self::watch) consumers:
    ///
    /// | path | what |
    /// |---|---|
    /// | `/` | a page that shows `/status.json`; it loads nothing from other servers |
    /// | `/metrics` | for Prometheus; only with [`Telemetry::prometheus`] |
    /// | `/healthz` | 200, or 503 when a restart of the process would help |
    /// | `/readyz` | 200 while every consumer takes and handles messages, else 503; either with reasons as JSON |
    /// | `/status.json` | the data of the page |
    ///
    /// It requires no password. It shows nothing of payloads and keys, except for what handlers write into the reasons
    /// of their failures. Serve it on loopback, or in a trusted network.
    ///
    /// ```no_run
    /// # async fn serve(consumer: oncegate::Consumer) -> Result<(), oncegate::BoxError> {
    /// use oncegate::shutdown_signal;
    /// use oncegate::telemetry::Telemetry;
    ///
    /// let telemetry = Telemetry::prometheus()?;
    /// let consumer = telemetry.watch(consumer);
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:9464").await?;
    /// tokio::select! {
    ///     served = axum::serve(listener, telemetry.router()) => served?,
    ///     consumed = consumer.run_until(shutdown_signal()) => consumed?,
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn router(&self) -> Router {
        let router = Router::new()
            .route("/", get(page))
            .route("/status.json", get(status))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz));
        let router = match &self.inner.prometheus {
            Some(_) => router.route("/metrics", get(metrics)),
            None => router,
        };
        router.with_state(self.clone())
    }
}

/// Marks a response as not cacheable, because it shows the current state.
fn fresh(answer: impl IntoResponse) -> Response {
    ([(header::CACHE_CONTROL, "no-store")], answer).into_response()
}

async fn page() -> Response {
    const NO_SNIFFING: (HeaderName, &str) = (header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    fresh(([(header::CONTENT_SECURITY_POLICY, PAGE_POLICY), NO_SNIFFING], Html(PAGE)))
}

async fn metrics(State(telemetry): State<Telemetry>) -> Response {
    telemetry.record();
    let text = telemetry.inner.prometheus.as_ref().map(PrometheusHandle::render);
    fresh(([(header::CONTENT_TYPE, PROMETHEUS_TEXT)], text.unwrap_or_default()))
}

/// The answer to a probe.
#[derive(Debug, Serialize)]
struct Probed {
    /// Whether all consumers pass the probe.
    ok: bool,
    reasons: Vec<Said>,
}

/// A reason, as a code and as text.
#[derive(Debug, Serialize)]
struct Said {
    consumer: String,
    reason: &'static str,
    words: String,
}

fn said(status: &Status, reasons: &[Reason]) -> Vec<Said> {
    let said = |reason: &Reason| Said {
        consumer: status.name.clone(),
        reason: reason.as_str(),
        words: reason.to_string(),
    };
    reasons.iter().map(said).collect()
}

/// Answers a probe. `well` checks one consumer; all must pass.
fn probe(telemetry: &Telemetry, well: fn(&Health) -> bool) -> Response {
    let mut probed = Probed { ok: true, reasons: Vec::new() };
    for status in telemetry.statuses() {
        let health = Health::of(&status);
        probed.ok &= well(&health);
        probed.reasons.extend(said(&status, health.reasons()));
    }
    let code = if probed.ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    fresh((code, Json(probed)))
}

async fn healthz(State(telemetry): State<Telemetry>) -> Response {
    probe(&telemetry, Health::is_live)
}

async fn readyz(State(telemetry): State<Telemetry>) -> Response {
    probe(&telemetry, Health::is_ready)
}

/// The data of the page.
#[derive(Debug, Serialize)]
struct Shown {
    schema: &'static str,
    version: &'static str,
    at_unix_ms: u64,
    consumers: Vec<Consuming>,
    /// Counts by metric, then by label, since the process began, for all consumers together.
    counts: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
    /// The last dead letters, the newest first.
    dead_letters: Vec<Letter>,
}

#[derive(Debug, Serialize)]
struct Consuming {
    name: String,
    live: bool,
    ready: bool,
    reasons: Vec<Said>,
    status: Status,
}

async fn status(State(telemetry): State<Telemetry>) -> Response {
    let mut counts: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for ((name, label), count) in telemetry.counters().snapshot() {
        counts.entry(name).or_default().insert(label, count);
    }
    let consuming = |status: Status| {
        let health = Health::of(&status);
        Consuming {
            name: status.name.clone(),
            live: health.is_live(),
            ready: health.is_ready(),
            reasons: said(&status, health.reasons()),
            status,
        }
    };
    fresh(Json(Shown {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        at_unix_ms: unix_ms(),
        consumers: telemetry.statuses().into_iter().map(consuming).collect(),
        counts,
        dead_letters: telemetry.letters(),
    }))
}
