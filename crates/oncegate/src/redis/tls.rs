//! TLS to Redis: which authorities are trusted. The certificate must always name the host.

use oncegate_core::store::StoreError;
use redis::{Client, ConnectionAddr, ConnectionInfo, TlsCertificates};

/// Sets this authority instead of the machine's on a TLS connection; other connections are left unchanged.
pub(super) fn with_root(info: ConnectionInfo, root: Option<&[u8]>) -> Result<ConnectionInfo, StoreError> {
    let ConnectionAddr::TcpTls { .. } = info.addr() else { return Ok(info) };
    choose_cryptography();
    let Some(root) = root else { return Ok(info) };
    let certificates = TlsCertificates { client_tls: None, root_cert: Some(root.to_vec()) };
    let client = Client::build_with_tls(info, certificates).map_err(|_| {
        StoreError::refused("RedisBuilder::tls_root() needs the authority's certificate in PEM")
    })?;
    Ok(client.get_connection_info().clone())
}

/// Installs a crypto provider for rustls, which needs one per process. The program's own choice takes precedence.
fn choose_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // If another thread has installed one meanwhile, that one is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
