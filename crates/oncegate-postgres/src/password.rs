//! A password that is kept in a file, and read for each connection.

use std::fmt;
use std::path::PathBuf;

use oncegate_core::store::StoreError;

/// The most bytes of such a file.
const MAX_BYTES: usize = 64 * 1024;

/// The file with the password.
#[derive(Clone, Debug)]
pub(super) struct PasswordFile(PathBuf);

impl PasswordFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Returns the password that the file has now, without the line feed that editors leave at its
    /// end.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(super) fn read(&self) -> Result<String, StoreError> {
        let text = std::fs::read_to_string(&self.0).map_err(|error| self.unreadable(&error))?;
        if text.len() > MAX_BYTES {
            let bytes = text.len();
            let why = format_args!("{bytes} bytes are too many for a password");
            return Err(self.unreadable(&why));
        }
        Ok(text
            .strip_suffix('\n')
            .map_or(text.as_str(), |text| text.trim_end_matches('\r'))
            .to_owned())
    }

    fn unreadable(&self, why: &dyn fmt::Display) -> StoreError {
        StoreError::refused(format!(
            "the password cannot be read from {}: {why}",
            self.0.display()
        ))
    }
}
