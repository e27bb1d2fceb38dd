//! TLS to Redis: which authorities are trusted, and who the client is. The server's certificate
//! must always name the host.

use std::path::PathBuf;

use oncegate_core::settings::TlsFiles;
use oncegate_core::store::StoreError;
use oncegate_tls::{Pem, choose_cryptography};
use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, TlsCertificates};

/// The name of the authorities in errors.
const ROOT: &str = "the store's `tls_root`";

/// The name of a client's certificate in errors.
const CLIENT: &str =
    "the store's `tls_client` (in a configuration `tls_certificate` and `tls_key`)";

/// The certificates of TLS connections.
#[derive(Clone, Debug, Default)]
pub(super) struct Certificates {
    /// Instead of the authorities of this machine.
    pub(super) root: Option<Pem>,
    /// The files with the client's certificate and its key.
    pub(super) client: Option<(PathBuf, PathBuf)>,
}

impl Certificates {
    /// Returns the certificates in these files, with an authority in PEM instead of its file.
    pub(super) fn of(files: &TlsFiles, root: Option<Vec<u8>>) -> Self {
        let file = files.root.clone().map(Pem::File);
        Self {
            root: root.map(Pem::Text).or(file),
            client: files.client(),
        }
    }

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
                client_cert: read(CLIENT, &Pem::File(certificate.clone()))?,
                client_key: read(CLIENT, &Pem::File(key.clone()))?,
            })
        });
        let client_tls = client_tls.transpose()?;
        let root_cert = self
            .root
            .as_ref()
            .map(|root| read(ROOT, root))
            .transpose()?;
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

fn read(setting: &str, pem: &Pem) -> Result<Vec<u8>, StoreError> {
    pem.read()
        .map_err(|why| StoreError::refused(format!("{setting}: {why}")))
}
