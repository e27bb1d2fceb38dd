//! TLS to brokers, by the properties that librdkafka has for it.
//!
//! | property | meaning |
//! |---|---|
//! | `security.protocol` | `ssl` and `sasl_ssl` have TLS |
//! | `ssl.ca.location`, `ssl.ca.pem` | the authorities in PEM: a file, or a folder as OpenSSL has it; without them, those of this machine |
//! | `ssl.certificate.location`, `ssl.key.location`, `ssl.certificate.pem`, `ssl.key.pem` | the client's certificate and its key in PEM, without a password |
//! | `enable.ssl.certificate.verification` | `false`: any certificate is accepted |
//! | `ssl.endpoint.identification.algorithm` | `none`: a certificate may name another host |
//!
//! The others that decide about TLS are refused, because nothing here would use them. librdkafka
//! uses OpenSSL; rustls is stricter: a certificate must have the host among its alternative names
//! (`subjectAltName`).

use std::fmt::Display;
use std::io;
use std::path::Path;
use std::sync::Arc;

use oncegate_tls::{Authorities, Part, Pem, Proof, TlsClient, Unusable};
use rdkafka::config::ClientConfig;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, Error as TlsError};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::address::{Address, Failure};
use crate::client::login::RefusedLogin;
use oncegate_runtime::source::SourceError;

const AUTHORITIES: &str = "ssl.ca";
const CERTIFICATE: &str = "ssl.certificate";
const KEY: &str = "ssl.key";
const VERIFICATION: &str = "enable.ssl.certificate.verification";
const IDENTIFICATION: &str = "ssl.endpoint.identification.algorithm";

/// The value of `ssl.ca.location` for the authorities of this machine.
const PROBE: &str = "probe";

/// Properties of librdkafka about TLS that this client does not have, and what to use instead.
const REFUSED: &[(&str, &str)] = &[
    ("ssl.cipher.suites", "leave it out"),
    ("ssl.crl.location", "leave it out"),
    ("ssl.curves.list", "leave it out"),
    ("ssl.engine.location", "use ssl.key.location"),
    (
        "ssl.keystore.location",
        "use ssl.certificate.location and ssl.key.location",
    ),
    ("ssl.providers", "leave it out"),
    ("ssl.sigalgs.list", "leave it out"),
];

/// Protects the connections of one client.
pub(super) struct Tls(TlsConnector);

impl Tls {
    /// The TLS of a client with these properties of librdkafka; `None` without TLS.
    ///
    /// # Errors
    /// When a file cannot be read or used, or a property is one of those that are refused.
    pub(super) fn of(config: &ClientConfig) -> Result<Option<Self>, SourceError> {
        let protocol = config
            .get("security.protocol")
            .unwrap_or_default()
            .to_ascii_lowercase();
        if !protocol.ends_with("ssl") {
            return Ok(None);
        }
        if let Some((name, instead)) = REFUSED.iter().find(|(name, _)| config.get(name).is_some()) {
            return Err(SourceError::new(format!(
                "the property {name} is not supported where topics are created, removed or described with a token \
                 (sasl.mechanism=OAUTHBEARER): {instead}"
            )));
        }
        let client = TlsClient {
            authorities: authorities(config),
            proof: proof(config),
            identity: identity(config)?,
        };
        let made = client.config().map_err(|Unusable { part, why }| {
            let what = match part {
                Part::Authorities => AUTHORITIES,
                Part::Certificate => CERTIFICATE,
                Part::Key => KEY,
            };
            unusable(what, &why)
        })?;
        Ok(Some(Self(TlsConnector::from(Arc::new(made)))))
    }

    /// Makes a TLS connection of one without.
    pub(super) async fn connect(
        &self,
        address: &Address,
        tcp: TcpStream,
    ) -> Result<TlsStream<TcpStream>, Failure> {
        let host = ServerName::try_from(address.host.clone());
        let host = host.map_err(|_| {
            Failure::refused(format!(
                "the broker's address {address} has no name of a host for TLS"
            ))
        })?;
        self.0
            .connect(host, tcp)
            .await
            .map_err(|error| match reason(&error) {
                Some(_) if is_about_client(&error) => failure(address, error),
                Some(reason) => {
                    Failure::refused(RefusedLogin::Tls.told(&format!("{address}: {reason}")))
                }
                None => Failure::away(format!("{address}: {error}")),
            })
    }
}

/// Translates an error of a connection. In TLS 1.3, brokers refuse a client's certificate after the
/// handshake.
pub(super) fn failure(address: &Address, error: io::Error) -> Failure {
    match reason(&error) {
        Some(reason) if is_about_client(&error) => {
            Failure::refused(RefusedLogin::Certificate.told(&format!("{address}: {reason}")))
        }
        _ => Failure::away(format!("{address}: {error}")),
    }
}

/// Returns the error of the TLS library, if it is the cause.
fn reason(error: &io::Error) -> Option<&TlsError> {
    error.get_ref().and_then(|error| error.downcast_ref())
}

/// Returns whether brokers have ended a connection because of the client's certificate.
fn is_about_client(error: &io::Error) -> bool {
    use AlertDescription::{
        BadCertificate, CertificateExpired, CertificateRequired, CertificateRevoked,
        CertificateUnknown, UnknownCA, UnsupportedCertificate,
    };
    matches!(
        reason(error),
        Some(TlsError::AlertReceived(
            BadCertificate
                | CertificateExpired
                | CertificateRequired
                | CertificateRevoked
                | CertificateUnknown
                | UnknownCA
                | UnsupportedCertificate
        ))
    )
}

/// The error about the content of `ssl.…location` or `ssl.…pem`, without the content.
fn unusable(what: &str, error: &dyn Display) -> SourceError {
    SourceError::new(format!(
        "the property {what}.location or {what}.pem cannot be used: {error}"
    ))
}

/// The text of `pem`, or the file of `location`.
fn pem(config: &ClientConfig, what: &str) -> Option<Pem> {
    let text = config.get(&format!("{what}.pem"));
    let file = config.get(&format!("{what}.location"));
    text.map(|text| Pem::Text(text.as_bytes().to_vec()))
        .or_else(|| file.map(|path| Pem::File(path.into())))
}

/// The client's certificate with its key.
fn identity(config: &ClientConfig) -> Result<Option<(Pem, Pem)>, SourceError> {
    let (chain, key) = match (pem(config, CERTIFICATE), pem(config, KEY)) {
        (Some(chain), Some(key)) => (chain, key),
        (None, None) => return Ok(None),
        (Some(_), None) => {
            return Err(unusable(
                KEY,
                &"it is missing, and the certificate is there",
            ));
        }
        (None, Some(_)) => {
            return Err(unusable(
                CERTIFICATE,
                &"it is missing, and the key is there",
            ));
        }
    };
    let text = key.read().map_err(|error| unusable(KEY, &error))?;
    if String::from_utf8_lossy(&text).contains("ENCRYPTED") {
        let why = "with a token (sasl.mechanism=OAUTHBEARER), topics are created, removed and described with a key without a \
                   password only (ssl.key.password)";
        return Err(unusable(KEY, &why));
    }
    Ok(Some((chain, key)))
}

/// Returns whether a property that is true by default is set to false, in one of librdkafka's words
/// for it.
fn is_off(config: &ClientConfig, name: &str) -> bool {
    let set = config.get(name).map(str::to_ascii_lowercase);
    set.is_some_and(|set| matches!(set.as_str(), "false" | "f" | "0"))
}

fn proof(config: &ClientConfig) -> Proof {
    let algorithm = config.get(IDENTIFICATION);
    if is_off(config, VERIFICATION) {
        Proof::Nothing
    } else if algorithm.is_some_and(|algorithm| algorithm.eq_ignore_ascii_case("none")) {
        Proof::Authority
    } else {
        Proof::Host
    }
}

/// The authorities of the properties, or those of this machine.
fn authorities(config: &ClientConfig) -> Authorities {
    match pem(config, AUTHORITIES) {
        None => Authorities::Machine,
        Some(Pem::File(probe)) if probe == Path::new(PROBE) => Authorities::Machine,
        Some(Pem::File(folder)) if folder.is_dir() => Authorities::Folder(folder),
        Some(pem) => Authorities::Pem(pem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(properties: &[(&str, &str)]) -> String {
        let mut config = ClientConfig::new();
        config.set("security.protocol", "SASL_SSL");
        for (name, value) in properties {
            config.set(*name, *value);
        }
        Tls::of(&config).err().expect("it is refused").to_string()
    }

    #[test]
    fn what_this_client_cannot_do_is_refused_by_property_name() {
        for (name, instead) in REFUSED {
            let told = refusal(&[(name, "given")]);
            assert!(told.contains(name) && told.contains(instead), "{told}");
        }
        let encrypted =
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMAA=\n-----END ENCRYPTED PRIVATE KEY-----\n";
        let told = refusal(&[("ssl.certificate.pem", "any"), ("ssl.key.pem", encrypted)]);
        assert!(
            told.contains("ssl.key.password") && !told.contains("MAA="),
            "{told}"
        );
        for (given, named) in [
            (("ssl.ca.location", "/no/such/file"), "ssl.ca.location"),
            (("ssl.ca.pem", "nothing"), "ssl.ca.pem"),
            (("ssl.certificate.pem", "alone"), "ssl.key.location"),
            (("ssl.key.pem", "alone"), "ssl.certificate.location"),
        ] {
            let told = refusal(&[given]);
            assert!(told.contains(named), "{named}: {told}");
        }
    }

    #[test]
    fn a_client_without_tls_needs_no_authorities() {
        let mut config = ClientConfig::new();
        config
            .set("security.protocol", "SASL_PLAINTEXT")
            .set("ssl.ca.location", "/no/such/file");
        assert!(Tls::of(&config).expect("it is not read").is_none());
    }

    #[test]
    fn a_check_is_left_out_only_in_the_words_of_the_client_library() {
        for (value, expected) in [
            ("false", true),
            ("F", true),
            ("0", true),
            ("true", false),
            ("no", false),
        ] {
            let mut config = ClientConfig::new();
            assert_eq!(
                is_off(config.set(VERIFICATION, value), VERIFICATION),
                expected,
                "{value}"
            );
        }
    }
}
