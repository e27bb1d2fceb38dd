//! The page for probes, on loopback unless told otherwise.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use oncegate::consumer::Monitor;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tracing::info;

use crate::exit::{Exit, Problem};

/// Where it is not served at all.
const OFF: &str = "off";

/// A page that is being served, until it is stopped.
#[derive(Debug)]
pub(crate) struct Served(Option<JoinHandle<std::io::Result<()>>>);

impl Served {
    /// Begins to serve.
    ///
    /// # Errors
    /// When the address is none, or somebody else has it.
    pub(crate) async fn start(listen: &str, monitors: Vec<Monitor>) -> Result<Self, Problem> {
        if listen == OFF {
            return Ok(Self(None));
        }
        let refuse = |error: std::io::Error| {
            let text = format!(
                "nothing can be served at {listen}: {error}; set `status.listen`, perhaps to \"off\""
            );
            Problem::new(Exit::Configuration, text)
        };
        let listener = TcpListener::bind(listen).await.map_err(refuse)?;
        let address = listener.local_addr().map_err(refuse)?;
        info!(%address, "the status page is served");
        let serving = axum::serve(listener, router(monitors));
        Ok(Self(Some(tokio::spawn(async move { serving.await }))))
    }

    /// Ends it. Somebody may read slowly; nobody waits for that.
    pub(crate) async fn stop(self) {
        if let Some(serving) = self.0 {
            serving.abort();
            drop(serving.await);
        }
    }
}

fn router(monitors: Vec<Monitor>) -> Router {
    let is_live =
        async |State(monitors): State<Vec<Monitor>>| answer(&monitors, oncegate::health::Health::is_live);
    let is_ready =
        async |State(monitors): State<Vec<Monitor>>| answer(&monitors, oncegate::health::Health::is_ready);
    Router::new().route("/healthz", get(is_live)).route("/readyz", get(is_ready)).with_state(monitors)
}

/// 200 when it is so of all consumers; and how each of them is, in words.
fn answer(monitors: &[Monitor], so: fn(&oncegate::health::Health) -> bool) -> (StatusCode, String) {
    let health: Vec<_> = monitors.iter().map(Monitor::health).collect();
    let status = if health.iter().all(so) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, health.iter().map(|health| format!("{health}\n")).collect())
}
