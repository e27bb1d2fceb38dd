//! TLS to PostgreSQL, by the parameters that libpq has in its URLs.
//!
//! Source: [libpq, SSL support](https://www.postgresql.org/docs/current/libpq-ssl.html).
//!
//! | parameter | meaning |
//! |---|---|
//! | `sslmode` | `disable`, `prefer`, `require`, `verify-ca` or `verify-full`; without it, `verify-full` to other machines and where one of the others is set, and `disable` on this machine |
//! | `sslrootcert` | a file in PEM with the authorities that may sign the server's certificate, in every mode that uses TLS; `system`, those of this machine, which only `verify-full` takes and has without it |
//! | `sslcert`, `sslkey` | files in PEM with the client's certificate and key |
//!
//! Authorities of a machine sign certificates for any host, so they prove nothing where the host is
//! not compared. With `prefer`, libpq continues in plain text where a handshake fails; here it is
//! an error.
//!
//! The files are read again when they change, so certificates can be rotated while connections are
//! open. libpq's `allow` is refused: it asks for TLS only where a server insists, which protects
//! against nothing.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use oncegate_core::store::StoreError;
use percent_encoding::percent_decode_str;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres_rustls::MakeRustlsConnect;

/// The value of `sslrootcert` for the machine's own authorities.
const SYSTEM: &str = "system";

/// The name of the file with the authorities in errors.
const ROOT: &str = "sslrootcert (the store's `tls_root`)";

/// The name of the file with the client's certificate in errors.
const CERTIFICATE: &str = "sslcert (the store's `tls_certificate`)";

/// The extent to which TLS protects a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// No TLS.
    Disable,
    /// TLS if the server has it; its certificate is checked as by `VerifyCa` if authorities are
    /// named.
    Prefer,
    /// TLS; the server's certificate is checked as by `VerifyCa` if authorities are named.
    Require,
    /// TLS with a server whose certificate is signed by a known authority.
    VerifyCa,
    /// TLS with a server whose certificate is signed by a known authority, and names the host.
    VerifyFull,
}

/// The authorities that may sign the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Authorities {
    /// The authorities of this machine.
    System,
    /// The authorities in a file in PEM.
    File(PathBuf),
}

/// The parameters of a URL about TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Parameters {
    mode: Option<Mode>,
    root: Option<Authorities>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl Parameters {
    /// Takes the parameters about TLS out of a URL; returns the rest of it.
    ///
    /// # Errors
    /// When the mode is unknown, or a client's certificate comes without its key.
    pub(super) fn split(url: &str) -> Result<(String, Self), StoreError> {
        let mut parameters = Self::default();
        let Some((address, query)) = url.split_once('?') else {
            return Ok((url.to_owned(), parameters));
        };
        let mut others = Vec::new();
        for pair in query.split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_decode_str(value).decode_utf8_lossy().into_owned();
            match name {
                "sslmode" => parameters.mode = Some(mode(&value)?),
                "sslrootcert" if value == SYSTEM => parameters.root = Some(Authorities::System),
                "sslrootcert" => parameters.root = Some(Authorities::File(value.into())),
                "sslcert" => parameters.certificate = Some(value.into()),
                "sslkey" => parameters.key = Some(value.into()),
                _ => others.push(pair),
            }
        }
        if parameters.certificate.is_some() != parameters.key.is_some() {
            return Err(StoreError::refused(
                "sslcert and sslkey belong together: give both in the URL",
            ));
        }
        let rest = if others.is_empty() {
            String::new()
        } else {
            format!("?{}", others.join("&"))
        };
        Ok((format!("{address}{rest}"), parameters))
    }

    /// Trusts the authorities of this file, unless the URL names others.
    pub(super) fn or_root(mut self, root: Option<PathBuf>) -> Self {
        self.root = self.root.or(root.map(Authorities::File));
        self
    }

    /// Uses these files with the client's certificate and key, unless the URL names others.
    pub(super) fn or_client(mut self, files: Option<(PathBuf, PathBuf)>) -> Self {
        if let (None, Some((certificate, key))) = (&self.certificate, files) {
            self.certificate = Some(certificate);
            self.key = Some(key);
        }
        self
    }
}

impl Parameters {
    fn mode_to(&self, config: &Config) -> Mode {
        let is_secured = self.root.is_some() || self.certificate.is_some() || is_remote(config);
        self.mode.unwrap_or(if is_secured {
            Mode::VerifyFull
        } else {
            Mode::Disable
        })
    }

    /// # Errors
    /// When the authorities prove nothing in this mode.
    fn check(&self, mode: Mode) -> Result<(), StoreError> {
        match (&self.root, mode) {
            (Some(Authorities::System), weak) if weak != Mode::VerifyFull => {
                Err(StoreError::refused(
                    "sslrootcert=system needs sslmode=verify-full: this machine's authorities sign certificates for any host",
                ))
            }
            (None, Mode::VerifyCa) => Err(StoreError::refused(
                "sslmode=verify-ca needs sslrootcert, a file with the authorities in PEM: those of this machine sign \
                 certificates for any host",
            )),
            _ => Ok(()),
        }
    }

    /// The file with the authorities.
    fn root_file(&self) -> Option<&Path> {
        match &self.root {
            Some(Authorities::File(path)) => Some(path),
            Some(Authorities::System) | None => None,
        }
    }

    /// Returns whether a password may be sent to another machine in plain text. With `prefer`, a
    /// server decides, or what pretends to be one.
    pub(super) fn shows_password(&self, config: &Config) -> bool {
        let may_be_plain = matches!(self.mode_to(config), Mode::Disable | Mode::Prefer);
        may_be_plain && is_remote(config) && config.get_password().is_some()
    }
}

fn mode(name: &str) -> Result<Mode, StoreError> {
    match name {
        "disable" => Ok(Mode::Disable),
        "prefer" => Ok(Mode::Prefer),
        "require" => Ok(Mode::Require),
        "verify-ca" => Ok(Mode::VerifyCa),
        "verify-full" => Ok(Mode::VerifyFull),
        other => Err(StoreError::refused(format!(
            "sslmode is {other:?}: disable, prefer, require, verify-ca or verify-full is expected"
        ))),
    }
}

/// The protection of connections.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    mode: Mode,
    parameters: Parameters,
    loaded: Arc<Mutex<Loaded>>,
}

/// A client's configuration, and of which files it was made.
struct Loaded {
    config: ClientConfig,
    files: Vec<Option<SystemTime>>,
}

impl Tls {
    /// The protection of connections to the hosts of `config`, whose own mode is set.
    ///
    /// # Errors
    /// When a file cannot be read, or is not what it should be.
    pub(super) fn new(
        parameters: Parameters,
        config: &mut Config,
    ) -> Result<Option<Self>, StoreError> {
        let mode = parameters.mode_to(config);
        parameters.check(mode)?;
        config.ssl_mode(match mode {
            Mode::Disable => SslMode::Disable,
            Mode::Prefer => SslMode::Prefer,
            Mode::Require | Mode::VerifyCa | Mode::VerifyFull => SslMode::Require,
        });
        if mode == Mode::Disable {
            return Ok(None);
        }
        let loaded = Loaded {
            config: load(mode, &parameters)?,
            files: parameters.changed_at(),
        };
        Ok(Some(Self {
            mode,
            parameters,
            loaded: Arc::new(Mutex::new(loaded)),
        }))
    }

    /// Returns what protects the next connection. If the files have changed to something unusable,
    /// the former ones are used, and a warning names the reason.
    pub(super) fn connector(&self) -> MakeRustlsConnect {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.parameters.changed_at();
        if loaded.files != files {
            match load(self.mode, &self.parameters) {
                Ok(config) => *loaded = Loaded { config, files },
                Err(error) => tracing::warn!(%error, "the changed certificates cannot be used"),
            }
        }
        MakeRustlsConnect::new(loaded.config.clone())
    }
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded").finish_non_exhaustive()
    }
}

impl Parameters {
    fn changed_at(&self) -> Vec<Option<SystemTime>> {
        let files = [
            self.root_file(),
            self.certificate.as_deref(),
            self.key.as_deref(),
        ];
        files
            .into_iter()
            .map(|path| std::fs::metadata(path?).ok()?.modified().ok())
            .collect()
    }
}

/// Returns whether one of the hosts is another machine. Where a host has an address (`hostaddr`),
/// that is what is connected to.
fn is_remote(config: &Config) -> bool {
    let addresses = config.get_hostaddrs();
    // The one at the same position.
    let without_address = config.get_hosts().iter().skip(addresses.len());
    !addresses.iter().all(std::net::IpAddr::is_loopback)
        || !without_address.into_iter().all(is_here)
}

/// Returns whether a host is this machine.
fn is_here(host: &Host) -> bool {
    match host {
        Host::Tcp(name) => {
            name == "localhost"
                || name
                    .parse::<std::net::IpAddr>()
                    .is_ok_and(|address| address.is_loopback())
        }
        #[cfg(unix)]
        Host::Unix(_) => true,
    }
}

/// Reads the files, and makes a client's configuration of them.
fn load(mode: Mode, parameters: &Parameters) -> Result<ClientConfig, StoreError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| StoreError::refused(format!("TLS: {error}")))?;
    let chain = if mode == Mode::VerifyFull || parameters.root.is_some() {
        let roots = roots(parameters.root_file())?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build();
        Some(verifier.map_err(|error| StoreError::refused(format!("sslrootcert: {error}")))?)
    } else {
        None
    };
    let verifier: Arc<dyn ServerCertVerifier> = match chain {
        Some(chain) if mode == Mode::VerifyFull => chain,
        chain => Arc::new(Lenient { provider, chain }),
    };
    let builder = builder
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let (Some(certificate), Some(key)) = (&parameters.certificate, &parameters.key) else {
        return Ok(builder.with_no_client_auth());
    };
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect);
    let chain = chain.map_err(|error| unusable(CERTIFICATE, certificate, &error))?;
    let secret = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| unusable("sslkey (the store's `tls_key`)", key, &error))?;
    builder
        .with_client_auth_cert(chain, secret)
        .map_err(|error| unusable(CERTIFICATE, certificate, &error))
}

fn unusable(what: &str, path: &Path, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::refused(format!("{what}: {}: {error}", path.display()))
}

/// The authorities of a file, or those of this machine.
fn roots(file: Option<&Path>) -> Result<RootCertStore, StoreError> {
    let mut roots = RootCertStore::empty();
    let Some(file) = file else {
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            return Err(StoreError::refused(
                "this machine has no list of authorities: set sslrootcert in the URL, or the store's `tls_root`",
            ));
        }
        roots.add_parsable_certificates(found.certs);
        return Ok(roots);
    };
    let certificates =
        CertificateDer::pem_file_iter(file).map_err(|error| unusable(ROOT, file, &error))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| unusable(ROOT, file, &error))?;
        roots
            .add(certificate)
            .map_err(|error| unusable(ROOT, file, &error))?;
    }
    if roots.is_empty() {
        return Err(unusable(ROOT, file, &"no certificate in PEM is in it"));
    }
    Ok(roots)
}

/// Accepts certificates that name another host; without a `chain`, also those of unknown
/// authorities.
#[derive(Debug)]
struct Lenient {
    provider: Arc<CryptoProvider>,
    chain: Option<Arc<WebPkiServerVerifier>>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else {
            return Ok(ServerCertVerified::assertion());
        };
        match chain.verify_server_cert(certificate, intermediates, host, ocsp, now) {
            // The name is compared last.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests;
