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

/// How much of a connection TLS protects.
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

/// Who may sign the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Authorities {
    /// Those of this machine.
    System,
    /// Those of a file in PEM.
    File(PathBuf),
}

/// What a URL says about TLS.
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
            (self.certificate, self.key) = (Some(certificate), Some(key));
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

    /// Whether a password may be sent to another machine in plain text. With `prefer`, a server
    /// decides, or what pretends to be one.
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

/// How connections are protected.
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
        let changed_at = |path: &Path| {
            std::fs::metadata(path)
                .and_then(|found| found.modified())
                .ok()
        };
        files
            .into_iter()
            .map(|path| path.and_then(changed_at))
            .collect()
    }
}

/// Whether one of the hosts is another machine. Where a host has an address (`hostaddr`), that is
/// what is connected to.
fn is_remote(config: &Config) -> bool {
    let addresses = config.get_hostaddrs();
    // The one at the same position.
    let without_address = config.get_hosts().iter().skip(addresses.len());
    !addresses.iter().all(std::net::IpAddr::is_loopback)
        || !without_address.into_iter().all(is_here)
}

/// Whether a host is this machine.
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
    let unusable = |what: &str, path: &Path, error: &dyn std::fmt::Display| {
        StoreError::refused(format!("{what}: {}: {error}", path.display()))
    };
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
    let chain = chain.map_err(|error| {
        unusable(
            "sslcert (the store's `tls_certificate`)",
            certificate,
            &error,
        )
    })?;
    let secret = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| unusable("sslkey (the store's `tls_key`)", key, &error))?;
    builder
        .with_client_auth_cert(chain, secret)
        .map_err(|error| {
            unusable(
                "sslcert (the store's `tls_certificate`)",
                certificate,
                &error,
            )
        })
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
    let refuse = |error: &dyn std::fmt::Display| {
        StoreError::refused(format!(
            "sslrootcert (the store's `tls_root`): {}: {error}",
            file.display()
        ))
    };
    for certificate in CertificateDer::pem_file_iter(file).map_err(|error| refuse(&error))? {
        let certificate = certificate.map_err(|error| refuse(&error))?;
        roots.add(certificate).map_err(|error| refuse(&error))?;
    }
    if roots.is_empty() {
        return Err(refuse(&"no certificate in PEM is in it"));
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
mod tests {
    use super::*;

    #[test]
    fn the_parameters_about_tls_are_taken_out_of_the_url() {
        let url = "postgres://u:p%40@db:5432/shop?sslmode=verify-ca&application_name=a%20b&sslrootcert=%2Fetc%2Fca.pem";
        let (rest, parameters) = Parameters::split(url).expect("it is right");
        assert_eq!(
            rest,
            "postgres://u:p%40@db:5432/shop?application_name=a%20b"
        );
        let file = Some(Authorities::File("/etc/ca.pem".into()));
        assert_eq!(
            (parameters.mode, parameters.root),
            (Some(Mode::VerifyCa), file)
        );
        let (rest, parameters) =
            Parameters::split("postgres://db/shop?sslrootcert=system").expect("it is right");
        let system = Parameters {
            root: Some(Authorities::System),
            ..Parameters::default()
        };
        assert_eq!(
            (rest.as_str(), &parameters),
            ("postgres://db/shop", &system)
        );
        assert_eq!(
            parameters.or_root(Some("/etc/ca.pem".into())),
            system,
            "the URL decides"
        );
    }

    #[test]
    fn an_error_names_the_parameter() {
        for (query, named) in [("sslmode=allow", "sslmode"), ("sslcert=a.pem", "sslkey")] {
            let refused =
                Parameters::split(&format!("postgres://db/shop?{query}")).expect_err("it is wrong");
            assert!(refused.to_string().contains(named), "{refused}");
        }
    }

    /// The mode towards the server of a URL, with the authorities of this file.
    fn mode_at(url: &str, root: Option<&Path>) -> Result<Mode, StoreError> {
        let (rest, parameters) = Parameters::split(url)?;
        let mut config: Config = rest.parse().expect("it is right");
        let tls = Tls::new(parameters.or_root(root.map(Path::to_owned)), &mut config)?;
        Ok(tls.map_or(Mode::Disable, |tls| tls.mode))
    }

    #[test]
    fn other_machines_are_verified_unless_the_url_says_otherwise() {
        for (url, expected) in [
            ("postgres://db.example.org/shop", Mode::VerifyFull),
            ("postgres://127.0.0.1,db.example.org/shop", Mode::VerifyFull),
            ("postgres://127.0.0.1/shop", Mode::Disable),
            // The address is what is connected to, whatever the host is called.
            (
                "postgres://localhost/shop?hostaddr=10.0.0.5",
                Mode::VerifyFull,
            ),
            (
                "postgres://localhost,localhost/shop?hostaddr=127.0.0.1,10.0.0.5",
                Mode::VerifyFull,
            ),
            ("postgres:///shop?hostaddr=10.0.0.5", Mode::VerifyFull),
            (
                "postgres://db.example.org/shop?hostaddr=127.0.0.1",
                Mode::Disable,
            ),
            ("postgres:///shop?hostaddr=%3A%3A1", Mode::Disable),
            ("postgres://localhost/shop?sslmode=require", Mode::Require),
            (
                "postgres://localhost/shop?sslrootcert=system",
                Mode::VerifyFull,
            ),
            (
                "postgres://db.example.org/shop?sslmode=disable",
                Mode::Disable,
            ),
        ] {
            assert_eq!(
                mode_at(url, None).expect("the machine has authorities"),
                expected,
                "{url}"
            );
        }
    }

    #[test]
    fn authorities_that_prove_nothing_are_refused() {
        for weak in ["disable", "prefer", "require", "verify-ca"] {
            let url = format!("postgres://db/shop?sslrootcert=system&sslmode={weak}");
            let refused = mode_at(&url, None).expect_err(weak).to_string();
            assert!(refused.contains("sslmode=verify-full"), "{weak}: {refused}");
        }
        let refused =
            mode_at("postgres://db/shop?sslmode=verify-ca", None).expect_err("no authorities");
        assert!(
            refused.to_string().contains("needs sslrootcert"),
            "{refused}"
        );
    }

    #[test]
    fn named_authorities_are_read_in_every_mode_with_tls() {
        for mode in ["prefer", "require", "verify-ca", "verify-full"] {
            let url = format!("postgres://localhost/shop?sslmode={mode}");
            let refused = mode_at(&url, Some(Path::new("/no/such.pem")))
                .expect_err(mode)
                .to_string();
            assert!(refused.contains("/no/such.pem"), "{mode}: {refused}");
        }
        let refused =
            mode_at("postgres://localhost/shop", Some(Path::new("/no/such.pem"))).expect_err("TLS");
        assert!(refused.to_string().contains("/no/such.pem"), "{refused}");
    }
}
