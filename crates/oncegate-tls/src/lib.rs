//! TLS of a client: the authorities that it trusts, what a server's certificate must prove, and the
//! client's own certificate.
//!
//! Brokers, stores, registries and workers have their own words for these: parameters of a URL,
//! properties, settings. Each adapter makes a [`TlsClient`] of its words, and names them in the
//! error when a part is [`Unusable`].

mod rotated;
mod verifier;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use verifier::Lenient;

pub use rotated::Rotated;

/// The parts that make a client's configuration.
#[derive(Clone, Debug, Default)]
pub struct TlsClient {
    /// The authorities that are trusted.
    pub authorities: Authorities,
    /// The proof that a server's certificate must give.
    pub proof: Proof,
    /// The client's certificate with its intermediates, and its key.
    pub identity: Option<(Pem, Pem)>,
}

/// The authorities that may sign a server's certificate.
#[derive(Clone, Debug, Default)]
pub enum Authorities {
    /// The authorities of this machine.
    #[default]
    Machine,
    /// The authorities in PEM.
    Pem(Pem),
    /// The authorities in a folder, as OpenSSL has it.
    Folder(PathBuf),
    /// No authority, for a client whose servers have no TLS.
    None,
}

/// The proof that a server's certificate must give.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Proof {
    /// A trusted authority has signed the certificate, and it names the host.
    #[default]
    Host,
    /// A trusted authority has signed the certificate, whatever host it names.
    Authority,
    /// Any certificate is accepted. The authorities are not read.
    Nothing,
}

/// A text in PEM.
#[derive(Clone)]
pub enum Pem {
    /// The file that has the text.
    File(PathBuf),
    /// The text itself.
    Text(Vec<u8>),
}

impl Pem {
    /// Returns the text.
    ///
    /// # Errors
    /// When the file cannot be read; the error names it.
    pub fn read(&self) -> Result<Vec<u8>, String> {
        match self {
            Self::File(path) => std::fs::read(path)
                .map_err(|error| format!("{} cannot be read: {error}", path.display())),
            Self::Text(text) => Ok(text.clone()),
        }
    }

    fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Text(_) => None,
        }
    }

    /// An error about the content, which never has anything of it.
    fn wrong(&self, part: Part, why: impl fmt::Display) -> Unusable {
        let why = match self {
            Self::File(path) => format!("{}: {why}", path.display()),
            Self::Text(_) => why.to_string(),
        };
        Unusable { part, why }
    }

    fn certificates(&self, part: Part) -> Result<Vec<CertificateDer<'static>>, Unusable> {
        let text = self.read().map_err(|why| Unusable { part, why })?;
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
        let found = found.map_err(|error| self.wrong(part, error))?;
        if found.is_empty() {
            return Err(self.wrong(part, "no certificate in PEM is in it"));
        }
        Ok(found)
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, Unusable> {
        let part = Part::Key;
        let text = self.read().map_err(|why| Unusable { part, why })?;
        PrivateKeyDer::from_pem_slice(&text).map_err(|error| self.wrong(part, error))
    }
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Text(_) => f.debug_tuple("Text").finish_non_exhaustive(),
        }
    }
}

impl TlsClient {
    /// Returns the configuration. Its cryptography is set in it and not for the whole process: the
    /// program around it chooses its own.
    ///
    /// # Errors
    /// When a file cannot be read, or a text is not what it should be.
    pub fn config(&self) -> Result<ClientConfig, Unusable> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("ring has the cryptography of every version");
        let builder = match self.proof {
            Proof::Host => builder.with_root_certificates(self.authorities.read()?),
            Proof::Authority => {
                let roots = Arc::new(self.authorities.read()?);
                let chain =
                    WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
                        .build()
                        .map_err(|error| Unusable {
                            part: Part::Authorities,
                            why: error.to_string(),
                        })?;
                builder
                    .dangerous()
                    .with_custom_certificate_verifier(Lenient::to_any_host(provider, chain))
            }
            Proof::Nothing => builder
                .dangerous()
                .with_custom_certificate_verifier(Lenient::to_any_certificate(provider)),
        };
        let Some((certificate, key)) = &self.identity else {
            return Ok(builder.with_no_client_auth());
        };
        let chain = certificate.certificates(Part::Certificate)?;
        builder
            .with_client_auth_cert(chain, key.key()?)
            .map_err(|error| certificate.wrong(Part::Certificate, error))
    }

    /// Returns the files that the configuration is made of.
    fn files(&self) -> impl Iterator<Item = &Path> {
        let authorities = match &self.authorities {
            Authorities::Pem(pem) => pem.path(),
            Authorities::Folder(path) => Some(path.as_path()),
            Authorities::Machine | Authorities::None => None,
        };
        let identity = self.identity.iter();
        let identity = identity.flat_map(|(certificate, key)| [certificate.path(), key.path()]);
        authorities.into_iter().chain(identity.flatten())
    }
}

impl Authorities {
    /// Reads the authorities. Those that rustls cannot use are left out, as long as there are
    /// others.
    fn read(&self) -> Result<RootCertStore, Unusable> {
        let mut roots = RootCertStore::empty();
        let found = match self {
            Self::Machine => rustls_native_certs::load_native_certs().certs,
            Self::Pem(pem) => pem.certificates(Part::Authorities)?,
            Self::Folder(path) => {
                rustls_native_certs::load_certs_from_paths(None, Some(path)).certs
            }
            Self::None => return Ok(roots),
        };
        if roots.add_parsable_certificates(found).0 == 0 {
            let why = match self {
                Self::Pem(Pem::File(path)) | Self::Folder(path) => {
                    format!("{}: no usable certificate is in it", path.display())
                }
                Self::Pem(Pem::Text(_)) => "no usable certificate is in it".to_owned(),
                _ => "this machine has no trusted certificate authorities: install them (`ca-certificates`), or name a file with some"
                    .to_owned(),
            };
            return Err(Unusable {
                part: Part::Authorities,
                why,
            });
        }
        Ok(roots)
    }
}

/// The part of a [`TlsClient`] that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The trusted authorities.
    Authorities,
    /// The client's certificate.
    Certificate,
    /// The key of the client's certificate.
    Key,
}

/// The error for a part that no configuration can be made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// The part, for which the caller has a word of its own.
    pub part: Part,
    /// The reason, with the file, and without anything of its content.
    pub why: String,
}

/// Chooses the cryptography of the whole process, for client libraries that take no configuration.
/// The program's own choice takes precedence.
pub fn choose_cryptography() {
    if CryptoProvider::get_default().is_none() {
        // If another thread has installed one meanwhile, that one is used.
        _ = ring::default_provider().install_default();
    }
}

#[cfg(test)]
mod tests;
