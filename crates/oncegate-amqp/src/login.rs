//! The login at a broker: a password, and certificates.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use oncegate_core::settings::TlsFiles;
use oncegate_runtime::source::SourceError;

use super::error::AmqpError;

/// Reads a password, or says why it cannot.
type ReadPassword = dyn Fn() -> Result<String, String> + Send + Sync;

/// The proof of who a client is, and whom it trusts, besides what the URI of the broker has.
///
/// Password and files are read for each new connection, so that they may change while a consumer
/// runs.
///
/// ```
/// use oncegate_amqp::AmqpLogin;
/// use oncegate_core::settings::TlsFiles;
///
/// let login = AmqpLogin::default()
///     .password_by(|| {
///         let text = std::fs::read_to_string("/run/secrets/rabbitmq");
///         text.map(|text| text.trim_end().to_owned())
///             .map_err(|error| error.to_string())
///     })
///     .tls(TlsFiles::trusting("/run/secrets/ca.pem"));
/// ```
#[derive(Clone, Default)]
pub struct AmqpLogin {
    password: Option<Arc<ReadPassword>>,
    files: TlsFiles,
}

impl AmqpLogin {
    /// Logs in with this password, in place of that in the URI.
    #[must_use]
    pub fn password(self, password: impl Into<String>) -> Self {
        let password = password.into();
        self.password_by(move || Ok(password.clone()))
    }

    /// Logs in with the password that `read` returns, in place of that in the URI. It is called for
    /// each new connection; its error says why there is no password, and has nothing of it.
    #[must_use]
    pub fn password_by(
        mut self,
        read: impl Fn() -> Result<String, String> + Send + Sync + 'static,
    ) -> Self {
        self.password = Some(Arc::new(read));
        self
    }

    /// Trusts the authority in these files besides those of the machine, and shows the client's
    /// certificate. Only with `amqps://`.
    #[must_use]
    pub fn tls(mut self, files: TlsFiles) -> Self {
        self.files = files;
        self
    }

    /// Reads password and files once, as the next connection does. It connects to nothing.
    ///
    /// # Errors
    /// One of them cannot be read; the text has the setting and the file.
    pub fn check(&self) -> Result<(), SourceError> {
        self.read_password()?;
        self.read_files()?;
        Ok(())
    }

    /// Returns the password, if it is not that of the URI.
    ///
    /// # Errors
    /// The password cannot be read.
    pub(crate) fn read_password(&self) -> Result<Option<String>, AmqpError> {
        let read = self.password.as_ref().map(|read| read()).transpose();
        read.map_err(|why| AmqpError::new(format!("the password cannot be read: {why}")))
    }

    /// Returns what the files have now.
    ///
    /// # Errors
    /// A file cannot be read; the text has the setting and the file.
    pub(crate) fn read_files(&self) -> Result<OwnedTLSConfig, AmqpError> {
        let root = self.files.root.as_deref();
        let root =
            root.map(|path| std::fs::read_to_string(path).map_err(unreadable("tls_root", path)));
        let identity = self.files.client().map(|(certificate, key)| {
            Ok(OwnedIdentity::PKCS8 {
                pem: std::fs::read(&certificate)
                    .map_err(unreadable("tls_certificate", &certificate))?,
                key: std::fs::read(&key).map_err(unreadable("tls_key", &key))?,
            })
        });
        Ok(OwnedTLSConfig {
            identity: identity.transpose()?,
            cert_chain: root.transpose()?,
        })
    }
}

impl fmt::Debug for AmqpLogin {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpLogin")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

fn unreadable(setting: &str, path: &Path) -> impl FnOnce(std::io::Error) -> AmqpError {
    move |error| {
        let path = path.display();
        AmqpError::new(format!("`{setting}`: {path} cannot be read: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_password_is_read_for_each_connection() {
        let reads = AtomicU32::new(0);
        let login =
            AmqpLogin::default().password_by(move || match reads.fetch_add(1, Ordering::Relaxed) {
                0 => Err("the vault is sealed".to_owned()),
                read => Ok(format!("secret {read}")),
            });
        let sealed = login.read_password().unwrap_err().to_string();
        assert!(sealed.contains("the vault is sealed"), "{sealed}");
        for read in ["secret 1", "secret 2"] {
            assert_eq!(login.read_password().unwrap().as_deref(), Some(read));
        }
        assert!(!format!("{login:?}").contains("secret"));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named_with_its_setting() {
        let folder = std::env::temp_dir();
        let login = AmqpLogin::default().tls(TlsFiles::trusting(folder.join("no/ca.pem")));
        let error = login.read_files().unwrap_err().to_string();
        assert!(
            error.contains("`tls_root`") && error.contains("no/ca.pem"),
            "{error}"
        );
    }
}
