//! Serves the status page, the probes and the metrics, on loopback by default.

use oncegate::telemetry::Telemetry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tracing::info;

use crate::exit::{Exit, Problem};

/// The value of `status.listen` that turns the page off.
const OFF: &str = "off";

/// A running status page.
#[derive(Debug)]
pub(crate) struct Served(Option<JoinHandle<std::io::Result<()>>>);

impl Served {
    /// Starts to serve the page.
    ///
    /// # Errors
    /// When the address is invalid or in use.
    pub(crate) async fn start(listen: &str, telemetry: &Telemetry) -> Result<Self, Problem> {
        if listen == OFF {
            return Ok(Self(None));
        }
        let refuse = |error: std::io::Error| {
            let text = format!(
                "the status page cannot be served at {listen}: {error}; change `status.listen`, or set it to \"off\""
            );
            Problem::new(Exit::Configuration, text)
        };
        let listener = TcpListener::bind(listen).await.map_err(refuse)?;
        let address = listener.local_addr().map_err(refuse)?;
        info!(%address, "the status page is served");
        let serving = axum::serve(listener, telemetry.router());
        Ok(Self(Some(tokio::spawn(async move { serving.await }))))
    }

    /// Stops serving, without waiting for slow readers.
    pub(crate) async fn stop(self) {
        if let Some(serving) = self.0 {
            serving.abort();
            drop(serving.await);
        }
    }
}
