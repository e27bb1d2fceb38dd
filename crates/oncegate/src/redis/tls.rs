//! TLS to Redis: which authorities are believed. That the certificate names the host is always checked.

use oncegate_core::store::StoreError;
use redis::{Client, ConnectionAddr, ConnectionInfo, TlsCertificates};

/// The settings of a TLS connection with this authority instead of the machine's; others stay as they are.
pub(super) fn with_root(info: ConnectionInfo, root: Option<&[u8]>) -> Result<ConnectionInfo, StoreError> {
    let ConnectionAddr::TcpTls { .. } = info.addr() else { return Ok(info) };
    choose_cryptography();
    let Some(root) = root else { return Ok(info) };
    let certificates = TlsCertificates { client_tls: None, root_cert: Some(root.to_vec()) };
    let client = Client::build_with_tls(info, certificates).map_err(|_| {
        StoreError::refused("RedisBuilder::tls_root() wants the authority's certificate in PEM")
    })?;
    Ok(client.get_connection_info().clone())
}

/// rustls asks for one implementation of its ciphers for the whole process. The program's choice comes first.
fn choose_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Somebody else may have been quicker; then it is theirs.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
