//! The page for people and probes, on loopback unless told otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use oncegate::telemetry::Telemetry;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::exit::{Exit, Problem};

/// Where it is not served at all.
const OFF: &str = "off";

/// What the page knows of the process.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// The workers are there, and messages are consumed.
    pub(crate) consuming: AtomicBool,
}

/// A page that is being served, until it is stopped.
#[derive(Debug)]
pub(crate) struct Served {
    stop: CancellationToken,
    serving: Option<JoinHandle<std::io::Result<()>>>,
}

impl Served {
    /// Begins to serve.
    ///
    /// # Errors
    /// When the address is none, or somebody else has it.
    pub(crate) async fn start(
        listen: &str,
        telemetry: &Telemetry,
        health: Arc<Health>,
    ) -> Result<Self, Problem> {
        let stop = CancellationToken::new();
        if listen == OFF {
            return Ok(Self { stop, serving: None });
        }
        let refuse = |error: std::io::Error| {
            let text = format!(
                "the status page cannot be served at {listen}: {error}; set `status.listen`, or to \"off\""
            );
            Problem::new(Exit::Configuration, text)
        };
        let listener = TcpListener::bind(listen).await.map_err(refuse)?;
        let address = listener.local_addr().map_err(refuse)?;
        info!(%address, "the status page is served");
        let stopped = stop.clone();
        let serving = axum::serve(listener, router(telemetry, health))
            .with_graceful_shutdown(stopped.cancelled_owned());
        Ok(Self { stop, serving: Some(tokio::spawn(async move { serving.await })) })
    }

    /// Ends it.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        if let Some(serving) = self.serving {
            // Somebody may read slowly; nobody waits for that.
            serving.abort();
            drop(serving.await);
        }
    }
}

fn router(telemetry: &Telemetry, health: Arc<Health>) -> Router {
    telemetry.router().layer(middleware::from_fn_with_state(health, until_consuming))
}

/// Before all workers are there, there may be no consumer yet that could say that it is not ready.
async fn until_consuming(State(health): State<Arc<Health>>, request: Request, next: Next) -> Response {
    if request.uri().path() != "/readyz" || health.consuming.load(SeqCst) {
        return next.run(request).await;
    }
    let reason = json!({"consumer": "", "reason": "starting", "words": "not consuming yet"});
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"ok": false, "reasons": [reason]}))).into_response()
}
