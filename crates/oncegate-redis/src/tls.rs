//! TLS to Redis: which authorities are trusted, and who the client is. The server's certificate
//! must always name the host.

use std::path::{Path, PathBuf};

use oncegate_core::store::StoreError;
use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, TlsCertificates};

/// The name of a client's certificate in errors.
const CLIENT: &str =
    "the store's `tls_client` (in a configuration `tls_certificate` and `tls_key`)";

/// The certificates of TLS connections.
#[derive(Clone, Debug, Default)]
pub(super) struct Certificates {
    /// Instead of the authorities of this machine.
    pub(super) root: Option<Authority>,
    /// The files with the client's certificate and its key.
    pub(super) client: Option<(PathBuf, PathBuf)>,
}

/// The authority that signed the servers' certificates.
#[derive(Clone, Debug)]
pub(super) enum Authority {
    /// In PEM.
    Pem(Vec<u8>),
    /// The file with it, which is read for each new connection.
    File(PathBuf),
}

impl Authority {
    fn pem(&self) -> Result<Vec<u8>, StoreError> {
        match self {
            Self::Pem(pem) => Ok(pem.clone()),
            Self::File(path) => file("the store's `tls_root`", path),
        }
    }
}

impl Certificates {
    /// Sets them on a TLS connection; other connections are left unchanged.
    ///
    /// # Errors
    /// When a file cannot be read, or does not hold what it should.
    pub(super) fn applied(&self, info: ConnectionInfo) -> Result<ConnectionInfo, StoreError> {
        let ConnectionAddr::TcpTls { .. } = info.addr() else {
            return Ok(info);
        };
        choose_cryptography();
        let client_tls = self.client.as_ref().map(|(certificate, key)| {
            Ok(ClientTlsConfig {
                client_cert: file(CLIENT, certificate)?,
                client_key: file(CLIENT, key)?,
            })
        });
        let client_tls = client_tls.transpose()?;
        let root_cert = self.root.as_ref().map(Authority::pem).transpose()?;
        let needs = match (&client_tls, &root_cert) {
            (None, None) => return Ok(info),
            (None, Some(_)) => {
                "the store's `tls_root` must be the authority's certificate in PEM".to_owned()
            }
            (Some(_), None) => format!("{CLIENT} must be a certificate and its key in PEM"),
            (Some(_), Some(_)) => format!(
                "the store's `tls_root` must be the authority's certificate in PEM, and {CLIENT} a certificate and its key"
            ),
        };
        let certificates = TlsCertificates {
            client_tls,
            root_cert,
        };
        let client =
            Client::build_with_tls(info, certificates).map_err(|_| StoreError::refused(needs))?;
        Ok(client.get_connection_info().clone())
    }
}

fn file(setting: &str, path: &Path) -> Result<Vec<u8>, StoreError> {
    std::fs::read(path).map_err(|error| {
        StoreError::refused(format!(
            "{setting}: {} cannot be read: {error}",
            path.display()
        ))
    })
}

/// Installs a crypto provider for rustls, which needs one per process. The program's own choice
/// takes precedence.
fn choose_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // If another thread has installed one meanwhile, that one is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
