//! The password and certificates of a connection, read whenever a connection is opened.

use std::path::PathBuf;

use oncegate_core::store::StoreError;
use redis::ConnectionInfo;

/// The most bytes of a file with a password.
const PASSWORD_MAX_BYTES: usize = 64 * 1024;

/// The password and certificates of connections, as far as the URL has none.
#[derive(Clone, Debug, Default)]
pub(super) struct Login {
    /// The file with the password.
    pub(super) password: Option<PathBuf>,
    #[cfg(feature = "tls")]
    pub(super) certificates: super::tls::Certificates,
}

impl Login {
    /// The same certificates with another password, or none.
    pub(super) fn with_password(&self, password: Option<PathBuf>) -> Self {
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
            Some(path) => {
                let settings = info.redis_settings().clone().set_password(password(path)?);
                info.set_redis_settings(settings)
            }
        };
        #[cfg(feature = "tls")]
        let info = self.certificates.applied(info)?;
        Ok(info)
    }
}

fn password(path: &std::path::Path) -> Result<String, StoreError> {
    let text = std::fs::read_to_string(path).map_err(|error| unreadable(path, &error))?;
    if text.len() > PASSWORD_MAX_BYTES {
        let bytes = text.len();
        let why = format_args!("{bytes} bytes are too many for a password");
        return Err(unreadable(path, &why));
    }
    // Editors end a file with a line feed.
    Ok(text
        .strip_suffix('\n')
        .map_or(text.as_str(), |text| text.trim_end_matches('\r'))
        .to_owned())
}

fn unreadable(path: &std::path::Path, why: &dyn std::fmt::Display) -> StoreError {
    StoreError::refused(format!(
        "the password cannot be read from {}: {why}",
        path.display()
    ))
}
