//! TLS to Redis: which authorities are trusted, and who the client is. The server's certificate must always name the
//! host.

use std::path::PathBuf;

use oncegate_core::store::StoreError;
use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, TlsCertificates};

/// The certificates of TLS connections.
#[derive(Clone, Debug, Default)]
pub(super) struct Certificates {
    /// The authority, in PEM, instead of those of this machine.
    pub(super) root: Option<Vec<u8>>,
    /// The files with the client's certificate and its key.
    pub(super) client: Option<(PathBuf, PathBuf)>,
}

impl Certificates {
    /// Sets them on a TLS connection; other connections are left unchanged.
    ///
    /// # Errors
    /// When a file cannot be read, or does not hold what it should.
    pub(super) fn applied(&self, info: ConnectionInfo) -> Result<ConnectionInfo, StoreError> {
        let ConnectionAddr::TcpTls { .. } = info.addr() else { return Ok(info) };
        choose_cryptography();
        let client_tls = self.client.as_ref().map(|(certificate, key)| {
            Ok(ClientTlsConfig { client_cert: file(certificate)?, client_key: file(key)? })
        });
        let client_tls = client_tls.transpose()?;
        let needs = match (&client_tls, &self.root) {
            (None, None) => return Ok(info),
            (None, Some(_)) => "RedisBuilder::tls_root() needs the authority's certificate in PEM",
            (Some(_), None) => "RedisBuilder::tls_client() needs a certificate and its key in PEM",
            (Some(_), Some(_)) => {
                "RedisBuilder::tls_root() and tls_client() need certificates, and the key of the client's, in PEM"
            }
        };
        let certificates = TlsCertificates { client_tls, root_cert: self.root.clone() };
        let client = Client::build_with_tls(info, certificates).map_err(|_| StoreError::refused(needs))?;
        Ok(client.get_connection_info().clone())
    }
}

fn file(path: &std::path::Path) -> Result<Vec<u8>, StoreError> {
    std::fs::read(path).map_err(|error| {
        StoreError::refused(format!("RedisBuilder::tls_client(): {} cannot be read: {error}", path.display()))
    })
}

/// Installs a crypto provider for rustls, which needs one per process. The program's own choice takes precedence.
fn choose_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // If another thread has installed one meanwhile, that one is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
