//! The page for people, probes and Prometheus, on loopback unless told otherwise.

use oncegate::telemetry::Telemetry;
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
    pub(crate) async fn start(listen: &str, telemetry: &Telemetry) -> Result<Self, Problem> {
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
        let serving = axum::serve(listener, telemetry.router());
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
