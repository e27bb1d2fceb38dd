//! Serves the status page, the probes and the metrics, on loopback by default.

use std::io;

use oncegate::telemetry::Telemetry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tracing::info;

use crate::config::shape;
use crate::exit::Problem;

/// The value of `status.listen` that turns the page off.
pub(crate) const OFF: &str = "off";

/// A running status page.
#[derive(Debug)]
pub(crate) struct Served(Option<JoinHandle<()>>);

impl Served {
    /// Starts to serve the page, at `unset` or else the usual address unless the settings name one.
    ///
    /// # Errors
    /// When the address is invalid or in use.
    pub(crate) async fn start(
        status: &shape::Status,
        unset: Option<&str>,
        telemetry: &Telemetry,
    ) -> Result<Self, Problem> {
        let listen = status
            .listen
            .as_deref()
            .or(unset)
            .unwrap_or(shape::Status::LISTEN);
        if listen == OFF {
            return Ok(Self(None));
        }
        let listener = bind(listen).await;
        let bound = listener.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound.map_err(|error| {
            Problem::configuration(format!(
                "the status page cannot be served at {listen}: {error}; change `status.listen`, or set it to \"off\""
            ))
        })?;
        info!(%address, "the status page is served");
        // The name to listen at is one of the page, too.
        let hosts = listen.rsplit_once(':').map(|(host, _)| host.to_owned());
        let hosts: Vec<String> = hosts
            .into_iter()
            .chain(status.hosts.clone().unwrap_or_default().0)
            .collect();
        let telemetry = telemetry.clone();
        Ok(Self(Some(tokio::spawn(async move {
            telemetry.serve(listener, hosts).await;
        }))))
    }

    /// Stops serving, without waiting for slow readers.
    pub(crate) async fn stop(self) {
        if let Some(serving) = self.0 {
            serving.abort();
            drop(serving.await);
        }
    }
}

/// Binds the address. All addresses of a machine without IPv6 are those of IPv4.
async fn bind(listen: &str) -> io::Result<TcpListener> {
    let bound = TcpListener::bind(listen).await;
    match (bound, listen.strip_prefix("[::]:")) {
        (Err(error), Some(port)) if error.kind() != io::ErrorKind::AddrInUse => {
            let all_of_ipv4 = format!("0.0.0.0:{port}");
            TcpListener::bind(all_of_ipv4).await.map_err(|_| error)
        }
        (bound, _) => bound,
    }
}
