//! The password and certificates of a connection, read whenever a connection is opened.

use oncegate_core::store::StoreError;
use oncegate_store_toolkit::password::PasswordFile;
use redis::ConnectionInfo;

/// The password and certificates of connections, as far as the URL has none.
#[derive(Clone, Debug, Default)]
pub(super) struct Login {
    /// The file with the password.
    pub(super) password: Option<PasswordFile>,
    #[cfg(feature = "tls")]
    pub(super) certificates: super::tls::Certificates,
}

impl Login {
    /// The same certificates with another password, or none.
    pub(super) fn with_password(&self, password: Option<PasswordFile>) -> Self {
        let mut login = self.clone();
        login.password = password;
        login
    }

    /// Returns the settings of a connection with what is in the files now.
    ///
    /// # Errors
    /// When a file cannot be read, or is not what it should be. The text names the setting and the
    /// file.
    pub(super) fn applied(&self, info: ConnectionInfo) -> Result<ConnectionInfo, StoreError> {
        let info = match &self.password {
            None => info,
            Some(file) => {
                let settings = info.redis_settings().clone().set_password(file.read()?);
                info.set_redis_settings(settings)
            }
        };
        #[cfg(feature = "tls")]
        let info = self.certificates.applied(info)?;
        Ok(info)
    }
}
