//! TLS to a worker: whom this client trusts, and who it is.

use std::io;
use std::task::{Context, Poll};

use hyper::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use oncegate_core::settings::TlsFiles;
use oncegate_tls::{Authorities, Part, Pem, Rotated, TlsClient, Unusable};
use tokio::net::TcpStream;
use tower_service::Service;
use tracing::warn;

use super::connect::{CONNECT_TIMEOUT, Connecting, tcp};

/// Connects with TLS, in bounded time, to a worker whose certificate names the host and is signed
/// by a trusted authority. The files are read again when they change.
#[derive(Clone)]
pub(super) struct Tls {
    http2: bool,
    client: Rotated,
}

impl Tls {
    /// # Errors
    /// As text: a file holds no certificates or key, or this machine has no authorities.
    pub(super) fn new(http2: bool, files: &TlsFiles) -> Result<Self, String> {
        let authorities = files.root.clone().map(Pem::File).map(Authorities::Pem);
        let identity = files.client();
        let client = TlsClient {
            authorities: authorities.unwrap_or_default(),
            identity: identity.map(|(certificate, key)| (Pem::File(certificate), Pem::File(key))),
            ..TlsClient::default()
        };
        let client = Rotated::new(client).map_err(unusable)?;
        Ok(Self { http2, client })
    }

    /// Returns what makes the next connection. If the files have changed to something unusable, the
    /// former ones are used.
    fn connector(&self) -> HttpsConnector<HttpConnector> {
        let config = self.client.config(|error| {
            let why = unusable(error);
            warn!(why, "the changed certificates of the worker cannot be used");
        });
        let mut tcp = tcp();
        tcp.enforce_http(false);
        let builder = HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_only();
        if self.http2 {
            builder.enable_http2().wrap_connector(tcp)
        } else {
            builder.enable_all_versions().wrap_connector(tcp)
        }
    }
}

impl Service<Uri> for Tls {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = io::Error;
    type Future = Connecting<Self::Response>;

    /// The connector below is always ready.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, self.connector().call(uri));
        Box::pin(async move {
            match connecting.await {
                Ok(connected) => connected.map_err(io::Error::other),
                Err(_) => Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "no answer to the TLS handshake",
                )),
            }
        })
    }
}

/// Returns whether a connection failed because the other side does not accept this client's
/// certificate, or misses one. The handshake ends with that, so nothing sent on the connection was
/// read.
pub(super) fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    use rustls::AlertDescription::{
        AccessDenied, BadCertificate, CertificateExpired, CertificateRequired, CertificateRevoked,
        CertificateUnknown, DecryptError, HandshakeFailure, UnknownCA, UnsupportedCertificate,
    };
    let mut cause = Some(error);
    while let Some(error) = cause {
        let tls = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        if let Some(rustls::Error::AlertReceived(alert)) =
            tls.and_then(|inner| inner.downcast_ref())
        {
            return matches!(
                alert,
                AccessDenied
                    | BadCertificate
                    | CertificateExpired
                    | CertificateRequired
                    | CertificateRevoked
                    | CertificateUnknown
                    // A signature of the handshake is not that of the authority, or there is none.
                    | DecryptError
                    | HandshakeFailure
                    | UnknownCA
                    | UnsupportedCertificate
            );
        }
        cause = error.source();
    }
    false
}

fn unusable(Unusable { part, why }: Unusable) -> String {
    let setting = match part {
        Part::Authorities => "tls_root",
        Part::Certificate => "tls_certificate",
        Part::Key => "tls_key",
    };
    format!("`{setting}`: {why}")
}
