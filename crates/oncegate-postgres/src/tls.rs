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

use std::path::PathBuf;

use oncegate_core::settings::TlsFiles;
use oncegate_core::store::StoreError;
use oncegate_tls::{Authorities, Part, Pem, Proof, Rotated, TlsClient, Unusable};
use percent_encoding::percent_decode_str;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres_rustls::MakeRustlsConnect;

/// The value of `sslrootcert` for the machine's own authorities.
const SYSTEM: &str = "system";

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

/// The value of `sslrootcert`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Root {
    /// The authorities of this machine.
    System,
    /// The authorities in a file in PEM.
    File(PathBuf),
}

/// The parameters of a URL about TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Parameters {
    mode: Option<Mode>,
    root: Option<Root>,
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
                "sslrootcert" if value == SYSTEM => parameters.root = Some(Root::System),
                "sslrootcert" => parameters.root = Some(Root::File(value.into())),
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

    /// Uses these files, unless the URL names others: of authorities, or with the client's
    /// certificate and its key.
    pub(super) fn or_files(mut self, files: TlsFiles) -> Self {
        if self.certificate.is_none() {
            self.certificate = files.certificate;
            self.key = files.key;
        }
        self.root = self.root.or(files.root.map(Root::File));
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
            (Some(Root::System), weak) if weak != Mode::VerifyFull => Err(StoreError::refused(
                "sslrootcert=system needs sslmode=verify-full: this machine's authorities sign certificates for any host",
            )),
            (None, Mode::VerifyCa) => Err(StoreError::refused(
                "sslmode=verify-ca needs sslrootcert, a file with the authorities in PEM: those of this machine sign \
                 certificates for any host",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the client of these parameters in a mode that [`check`](Self::check) has accepted.
    fn client(&self, mode: Mode) -> TlsClient {
        let authorities = match &self.root {
            Some(Root::File(path)) => Authorities::Pem(Pem::File(path.clone())),
            Some(Root::System) | None => Authorities::Machine,
        };
        let proof = match (mode, &self.root) {
            (Mode::VerifyFull, _) => Proof::Host,
            (_, Some(_)) => Proof::Authority,
            (_, None) => Proof::Nothing,
        };
        let identity = self.certificate.clone().zip(self.key.clone());
        TlsClient {
            authorities,
            proof,
            identity: identity.map(|(certificate, key)| (Pem::File(certificate), Pem::File(key))),
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
pub(super) struct Tls(Rotated);

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
        let client = Rotated::new(parameters.client(mode));
        client.map(Self).map(Some).map_err(refused)
    }

    /// Returns what protects the next connection. If the files have changed to something unusable,
    /// the former ones are used, and a warning names the reason.
    pub(super) fn connector(&self) -> MakeRustlsConnect {
        let config = self.0.config(|unusable| {
            let error = refused(unusable);
            tracing::warn!(%error, "the changed certificates cannot be used");
        });
        MakeRustlsConnect::new(config)
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

fn refused(Unusable { part, why }: Unusable) -> StoreError {
    let setting = match part {
        Part::Authorities => "sslrootcert (the store's `tls_root`)",
        Part::Certificate => "sslcert (the store's `tls_certificate`)",
        Part::Key => "sslkey (the store's `tls_key`)",
    };
    StoreError::refused(format!("{setting}: {why}"))
}

#[cfg(test)]
mod tests;
