//! The endpoint: `/metrics`, `/healthz`, `/readyz`, and a status page for browsers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderName, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use serde::Serialize;

use super::export::Export;
use super::operate::{self, Operate};
use super::{RecentLetter, Telemetry, unix_ms};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::health::{Health, Reason, Status};
use oncegate_runtime::observe::CATALOGUE;

/// The page with its script, and places for style, summary and links. It loads nothing from other
/// servers.
const PAGE: &str = include_str!("page.html");

/// The policy of the page: it may only run its own script and style, and send requests to this
/// server.
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
                builder =
                    builder.set_buckets_for_metric(Matcher::Full(metric.full_name()), bounds)?;
            }
        }
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        let tidied = handle.clone();
        let export = Export::to(Box::new(recorder)).with_upkeep(move || tidied.run_upkeep());
        Ok(Self::of(export, Some(handle)))
    }

    /// Lets people act on the page who know a token: pause and resume scopes, read dead letters,
    /// and redrive them. Call it before the [`router`](Self::router) is made: the first call
    /// counts.
    pub fn operated_by(&self, operate: Operate) {
        // A second one would leave two sets of sessions.
        _ = self.inner.operate.set(Arc::new(operate));
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
    /// | `/operate` | forms for people with a token; see [`operated_by`](Self::operated_by) |
    ///
    /// The page and its data answer only requests whose `Host` is an IP address, `localhost`, or
    /// absent: otherwise a page of another site could read them in a browser on this machine, by a
    /// name that it lets resolve to this address (DNS rebinding). [`router_for`](Self::router_for)
    /// allows other names. Metrics and probes answer any request.
    ///
    /// No password is required, except for what acts. Nothing of payloads and keys is shown, except
    /// for what handlers write into the reasons of their failures. Serve it on loopback, or in a
    /// trusted network, by [`serve`](Self::serve), which has limits.
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
    ///     () = telemetry.serve::<String>(listener, []) => {}
    ///     consumed = consumer.run_until(shutdown_signal()) => consumed?,
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn router(&self) -> Router {
        self.router_for::<String>([])
    }

    /// The [`router`](Self::router) of a page that is also reached by these host names, such as
    /// `status.internal`; a port is not a part of them.
    pub fn router_for<H: Into<String>>(&self, hosts: impl IntoIterator<Item = H>) -> Router {
        let hosts: Arc<[String]> = hosts.into_iter().map(Into::into).collect();
        let pages = Router::new()
            .route("/", get(page))
            .route("/status.json", get(status));
        let pages = match self.inner.operate.get() {
            Some(operate) => pages.merge(operate::router(self.clone(), Arc::clone(operate))),
            None => pages,
        };
        let router = pages
            .layer(middleware::from_fn_with_state(hosts, for_known_hosts))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz));
        let router = match &self.inner.prometheus {
            Some(_) => router.route("/metrics", get(metrics)),
            None => router,
        };
        router.with_state(self.clone())
    }
}

/// Answers only requests under a name that no other site can have.
async fn for_known_hosts(
    State(hosts): State<Arc<[String]>>,
    request: Request,
    next: Next,
) -> Response {
    const REFUSED: &str = "This host name is not allowed for the page: use the IP address or localhost, or allow the \
                           name with `Telemetry::router_for` (`status.hosts` of `oncegate run`).\n";
    let named = match request.uri().authority() {
        Some(authority) => Some(authority.as_str().as_bytes()),
        None => request
            .headers()
            .get(header::HOST)
            .map(|host| host.as_bytes()),
    };
    if named.is_none_or(|host| is_known(host, &hosts)) {
        next.run(request).await
    } else {
        fresh((StatusCode::MISDIRECTED_REQUEST, REFUSED))
    }
}

/// Returns whether this `Host` is an IP address, a name of the machine itself, or one of `hosts`.
fn is_known(host: &[u8], hosts: &[String]) -> bool {
    let Ok(authority) = Authority::try_from(host) else {
        return false;
    };
    let host = authority.host();
    host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|known| host.eq_ignore_ascii_case(known))
}

/// Marks a response as not cacheable, because it shows the current state.
pub(crate) fn fresh(answer: impl IntoResponse) -> Response {
    ([(header::CACHE_CONTROL, "no-store")], answer).into_response()
}

async fn page(State(telemetry): State<Telemetry>) -> Response {
    const NO_SNIFFING: (HeaderName, &str) = (header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    let style = format!("<style>{}</style>", operate::STYLE);
    let link = match telemetry.inner.operate.get() {
        Some(_) => r#"<a href="operate">Operate</a>"#,
        None => "",
    };
    let summary = operate::summary(&telemetry.statuses()).into_string();
    // The summary is last: it holds texts of others.
    let page = PAGE
        .replacen("<style><!--style--></style>", &style, 1)
        .replacen("<!--operate-->", link, 1)
        .replacen("<!--summary-->", &summary, 1);
    fresh((
        [(header::CONTENT_SECURITY_POLICY, PAGE_POLICY), NO_SNIFFING],
        Html(page),
    ))
}

async fn metrics(State(telemetry): State<Telemetry>) -> Response {
    telemetry.record();
    let text = telemetry
        .inner
        .prometheus
        .as_ref()
        .map(PrometheusHandle::render);
    fresh((
        [(header::CONTENT_TYPE, PROMETHEUS_TEXT)],
        text.unwrap_or_default(),
    ))
}

/// The answer to a probe.
#[derive(Debug, Serialize)]
struct Probed {
    /// `true` when all consumers pass the probe.
    ok: bool,
    reasons: Vec<ReasonView>,
}

/// A reason, as a code and as text.
#[derive(Debug, Serialize)]
struct ReasonView {
    consumer: String,
    reason: &'static str,
    words: String,
}

fn reason_views(status: &Status, reasons: &[Reason]) -> Vec<ReasonView> {
    reasons
        .iter()
        .map(|reason| ReasonView {
            consumer: status.name.clone(),
            reason: reason.as_str(),
            words: reason.to_string(),
        })
        .collect()
}

/// Answers a probe. `well` checks one consumer; all must pass.
fn probe(telemetry: &Telemetry, well: fn(&Health) -> bool) -> Response {
    let mut probed = Probed {
        ok: true,
        reasons: Vec::new(),
    };
    for status in telemetry.statuses() {
        let health = Health::of(&status);
        probed.ok &= well(&health);
        probed
            .reasons
            .extend(reason_views(&status, health.reasons()));
    }
    let code = if probed.ok {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
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
    dead_letters: Vec<RecentLetter>,
}

#[derive(Debug, Serialize)]
struct Consuming {
    name: String,
    live: bool,
    ready: bool,
    reasons: Vec<ReasonView>,
    /// A sentence for each thing that waits, with what it waits for.
    waits: Vec<String>,
    status: Status,
}

impl Consuming {
    fn of(status: Status) -> Self {
        let health = Health::of(&status);
        Self {
            name: status.name.clone(),
            live: health.is_live(),
            ready: health.is_ready(),
            reasons: reason_views(&status, health.reasons()),
            waits: status.waits(),
            status,
        }
    }
}

async fn status(State(telemetry): State<Telemetry>) -> Response {
    let mut counts: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for ((name, label), count) in telemetry.counters().snapshot() {
        counts.entry(name).or_default().insert(label, count);
    }
    fresh(Json(Shown {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        at_unix_ms: unix_ms(),
        consumers: telemetry
            .statuses()
            .into_iter()
            .map(Consuming::of)
            .collect(),
        counts,
        dead_letters: telemetry.letters(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_localhost_are_known_others_must_be_allowed() {
        let hosts = ["status.internal".to_owned()];
        for known in [
            "127.0.0.1",
            "10.0.0.7:9464",
            "[::1]:9464",
            "LOCALHOST:9464",
            "Status.Internal:80",
        ] {
            assert!(is_known(known.as_bytes(), &hosts), "{known}");
        }
        for unknown in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:9464",
            "",
            "a b",
        ] {
            assert!(!is_known(unknown.as_bytes(), &hosts), "{unknown}");
        }
        assert!(!is_known(b"status.internal", &[]));
    }
}
