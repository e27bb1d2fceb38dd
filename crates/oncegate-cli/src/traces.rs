//! Traces by OTLP over HTTP (feature `otlp`), when the environment names a collector.
//!
//! The variables are OpenTelemetry's own: `OTEL_EXPORTER_OTLP_ENDPOINT`,
//! `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and their like.

use std::sync::Arc;
use std::time::Duration;

use opentelemetry::global;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter as Exports};
use tokio::runtime::Runtime;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;

use crate::exit::{Exit, Problem};

/// Either of these variables turns traces on.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
];

/// Exports traces until it is dropped; then it sends the remaining ones, for five seconds at most.
#[derive(Debug)]
pub(crate) struct Traces {
    provider: SdkTracerProvider,
}

impl Traces {
    /// `None` when the environment names no collector.
    ///
    /// # Errors
    /// When the values of the variables cannot be used.
    pub(crate) fn start() -> Result<Option<Self>, Problem> {
        if !ENDPOINTS
            .iter()
            .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
        {
            return Ok(None);
        }
        let exporter = SpanExporter::builder().with_http().build();
        let exporter =
            exporter.map_err(|error| Problem::configuration(format!("traces: {error}")))?;
        Self::to(exporter).map(Some)
    }

    fn to(exporter: SpanExporter) -> Result<Self, Problem> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        let runtime =
            runtime.map_err(|error| Problem::new(Exit::Bug, format!("no runtime: {error}")))?;
        let named = Resource::builder();
        let resource = match std::env::var_os("OTEL_SERVICE_NAME") {
            Some(_) => named,
            None => named.with_service_name("oncegate"),
        };
        global::set_text_map_propagator(TraceContextPropagator::new());
        let exporter = OnRuntime {
            exporter: Arc::new(exporter),
            runtime,
        };
        let provider = SdkTracerProvider::builder().with_resource(resource.build());
        Ok(Self {
            provider: provider.with_batch_exporter(exporter).build(),
        })
    }

    /// The layer that collects oncegate's own spans.
    pub(crate) fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let ours = Targets::new().with_target("oncegate", LevelFilter::INFO);
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("oncegate"))
            .with_filter(ours)
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "the last traces may not have been sent");
        }
    }
}

/// A runtime for the exporter's HTTP client. The exporter's thread has no runtime, and must not
/// depend on another one.
#[derive(Debug)]
struct OnRuntime {
    exporter: Arc<SpanExporter>,
    runtime: Runtime,
}

impl Exports for OnRuntime {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let exporter = Arc::clone(&self.exporter);
        let exported = self
            .runtime
            .spawn(async move { exporter.export(batch).await })
            .await;
        exported.unwrap_or_else(|error| Err(OTelSdkError::InternalFailure(error.to_string())))
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        // It is called once, before anything is exported, so the exporter has no other user yet.
        if let Some(exporter) = Arc::get_mut(&mut self.exporter) {
            exporter.set_resource(resource);
        }
    }
}

#[cfg(test)]
mod tests {

    use axum::Router;
    use axum::body::Bytes;
    use axum::routing::post;
    use oncegate_testkit::HttpServer;
    use opentelemetry_otlp::WithExportConfig as _;
    use parking_lot::Mutex;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_left_is_sent_to_the_collector_at_the_end() {
        let got: Arc<Mutex<Vec<u8>>> = Arc::default();
        let collected = Arc::clone(&got);
        let collect = async move |body: Bytes| {
            collected.lock().extend_from_slice(&body);
        };
        let collector = HttpServer::start(Router::new().route("/v1/traces", post(collect))).await;
        let endpoint = format!("http://{}/v1/traces", collector.address());
        let sending = tokio::task::spawn_blocking(move || {
            let exporter = SpanExporter::builder()
                .with_http()
                .with_endpoint(endpoint)
                .build()
                .unwrap();
            let traces = Traces::to(exporter).unwrap();
            let subscriber = tracing_subscriber::registry().with(traces.layer());
            tracing::subscriber::with_default(subscriber, || {
                tracing::info_span!(target: "oncegate::process", "process", otel.name = "process orders")
                    .in_scope(|| {});
                tracing::info_span!(target: "another_crate", "else").in_scope(|| {});
            });
            drop(traces);
        });
        sending.await.unwrap();
        let got = got.lock();
        let has = |text: &str| {
            got.windows(text.len())
                .any(|window| window == text.as_bytes())
        };
        assert!(
            has("process orders") && has("service.name"),
            "{} bytes",
            got.len()
        );
        assert!(!has("another_crate"), "others' spans are not ours to send");
    }
}
