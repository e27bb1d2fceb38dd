//! TLS to a worker: whom this client trusts, and who it is.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::SystemTime;

use hyper::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tower_service::Service;
use tracing::warn;

use super::connect::{CONNECT_TIMEOUT, Connecting, tcp};

/// The files that decide about TLS, all in PEM.
#[derive(Clone, Debug, Default)]
pub(super) struct TlsFiles {
    /// The authorities that are trusted instead of those of the machine.
    pub(super) root: Option<PathBuf>,
    /// The client's certificate and its key.
    pub(super) client: Option<(PathBuf, PathBuf)>,
}

impl TlsFiles {
    /// Trusts the authorities of this file, for tests.
    #[cfg(test)]
    pub(super) fn trusting(root: &Path) -> Self {
        Self {
            root: Some(root.to_owned()),
            client: None,
        }
    }

    fn changed_at(&self) -> Vec<Option<SystemTime>> {
        let client = self
            .client
            .iter()
            .flat_map(|(certificate, key)| [certificate, key]);
        self.root
            .iter()
            .chain(client)
            .map(|path| std::fs::metadata(path)?.modified())
            .map(std::io::Result::ok)
            .collect()
    }
}

/// Connects with TLS, in bounded time, to a worker whose certificate names the host and is signed
/// by a trusted authority. The files are read again when they change.
#[derive(Clone)]
pub(super) struct Tls {
    http2: bool,
    files: TlsFiles,
    loaded: Arc<Mutex<LoadedConnector>>,
}

/// A connector, and of which files it was made.
struct LoadedConnector {
    connector: HttpsConnector<HttpConnector>,
    files: Vec<Option<SystemTime>>,
}

impl Tls {
    /// # Errors
    /// As text: a file holds no certificates or key, or this machine has no authorities.
    pub(super) fn new(http2: bool, files: TlsFiles) -> Result<Self, String> {
        let changed_at = files.changed_at();
        let loaded = LoadedConnector {
            connector: connector(http2, &files)?,
            files: changed_at,
        };
        Ok(Self {
            http2,
            files,
            loaded: Arc::new(Mutex::new(loaded)),
        })
    }

    /// Returns what makes the next connection. If the files have changed to something unusable, the
    /// former ones are used.
    fn connector(&self) -> HttpsConnector<HttpConnector> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.files.changed_at();
        if loaded.files != files {
            match connector(self.http2, &self.files) {
                Ok(connector) => *loaded = LoadedConnector { connector, files },
                Err(why) => warn!(why, "the changed certificates of the worker cannot be used"),
            }
        }
        loaded.connector.clone()
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

fn connector(http2: bool, files: &TlsFiles) -> Result<HttpsConnector<HttpConnector>, String> {
    // Set here and not for the whole process: other libraries in it choose their own.
    let cryptography = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(cryptography)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots(files.root.as_deref())?);
    let config = match &files.client {
        None => config.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates("tls_certificate", certificate)?;
            let secret = PrivateKeyDer::from_pem_file(key)
                .map_err(|error| format!("`tls_key` is {}: {error}", key.display()))?;
            config
                .with_client_auth_cert(chain, secret)
                .map_err(|error| format!("`tls_key` is {}: {error}", key.display()))?
        }
    };
    let mut tcp = tcp();
    tcp.enforce_http(false);
    let builder = HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_only();
    Ok(if http2 {
        builder.enable_http2().wrap_connector(tcp)
    } else {
        builder.enable_all_versions().wrap_connector(tcp)
    })
}

/// The trusted authorities: those of the given file, or those of the machine.
fn roots(file: Option<&Path>) -> Result<RootCertStore, String> {
    let certificates = match file {
        Some(file) => certificates("tls_root", file)?,
        None => rustls_native_certs::load_native_certs().certs,
    };
    let mut roots = RootCertStore::empty();
    match (roots.add_parsable_certificates(certificates).0, file) {
        (1.., _) => Ok(roots),
        (0, Some(file)) => Err(format!("`tls_root` is {}, which holds no certificate in PEM", file.display())),
        (0, None) => Err("this machine has no trusted certificate authorities: install them (`ca-certificates`), or set `tls_root`".to_owned()),
    }
}

fn certificates(setting: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    read.map_err(|error| format!("`{setting}` is {}: {error}", file.display()))
}
