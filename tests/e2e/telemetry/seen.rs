//! Everything that this process logs and traces.

use std::io;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use opentelemetry::global;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// What was logged, at every level, and which spans have ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    log: Arc<Mutex<Vec<u8>>>,
    spans: Arc<Mutex<Vec<SpanData>>>,
}

/// One for the process, because the subscriber is.
static SEEN: LazyLock<Seen> = LazyLock::new(|| {
    let seen = Seen::default();
    global::set_text_map_propagator(TraceContextPropagator::new());
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(seen.clone())
        .build();
    let traces = tracing_opentelemetry::layer().with_tracer(provider.tracer("tests"));
    let log = seen.clone();
    let text = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(move || log.clone());
    tracing_subscriber::registry()
        .with(traces)
        .with(text)
        .init();
    // Its background work would end with it.
    std::mem::forget(provider);
    seen
});

/// Begins to listen, the first time.
pub(crate) fn seen() -> Seen {
    SEEN.clone()
}

impl Seen {
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&self.log.lock().unwrap_or_else(PoisonError::into_inner))
            .into_owned()
    }

    /// The spans so far whose name is this.
    pub(crate) fn spans(&self, name: &str) -> Vec<SpanData> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans
            .iter()
            .filter(|span| span.name == name)
            .cloned()
            .collect()
    }

    /// Every span so far, as text.
    pub(crate) fn spans_as_text(&self) -> String {
        format!(
            "{:?}",
            self.spans.lock().unwrap_or_else(PoisonError::into_inner)
        )
    }
}

impl io::Write for Seen {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SpanExporter for Seen {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.spans
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(batch);
        Ok(())
    }
}
