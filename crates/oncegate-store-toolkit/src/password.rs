//! A password that is kept in a file, and read for each connection.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;

use oncegate_core::store::StoreError;

/// The most bytes of such a file.
const MAX_BYTES: u64 = 64 * 1024;

/// The file with the password.
#[derive(Clone, Debug)]
pub struct PasswordFile(PathBuf);

impl PasswordFile {
    /// The file at this path. Nothing is read yet.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Returns the password that the file has now, without the line break that editors leave at
    /// its end.
    ///
    /// # Errors
    /// The file cannot be read, is not UTF-8, or has more than 64 KiB. The text has the path, and
    /// nothing of what the file has.
    pub fn read(&self) -> Result<String, StoreError> {
        let file = File::open(&self.0).map_err(|error| self.unreadable(error))?;
        let mut file = file.take(MAX_BYTES + 1);
        let mut text = String::new();
        file.read_to_string(&mut text)
            .map_err(|error| self.unreadable(error))?;
        if file.limit() == 0 {
            return Err(self.unreadable(format_args!("it has more than {MAX_BYTES} bytes")));
        }
        if let Some(line) = text.strip_suffix('\n') {
            text.truncate(line.trim_end_matches('\r').len());
        }
        Ok(text)
    }

    fn unreadable(&self, why: impl fmt::Display) -> StoreError {
        StoreError::refused(format!(
            "the password cannot be read from {}: {why}",
            self.0.display()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &[u8]) -> Result<String, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        let read = PasswordFile::new(file.path().to_owned()).read();
        read.map_err(|error| error.to_string())
    }

    #[test]
    fn the_last_line_break_alone_is_left_out() {
        assert_eq!(read(b"hunter2").unwrap(), "hunter2");
        assert_eq!(read(b"hunter2\n").unwrap(), "hunter2");
        assert_eq!(read(b"hunter2\r\n").unwrap(), "hunter2");
        assert_eq!(read(b" two\n\n").unwrap(), " two\n");
        assert_eq!(read(b"").unwrap(), "");
    }

    #[test]
    fn what_is_no_password_is_refused_and_not_shown() {
        let longest = vec![b'a'; usize::try_from(MAX_BYTES).unwrap()];
        assert_eq!(read(&longest).unwrap().len(), longest.len());
        let why = read(&[&longest[..], b"a"].concat()).unwrap_err();
        assert!(why.contains("more than 65536 bytes"), "{why}");
        let why = read(b"hunter2\xff").unwrap_err();
        assert!(why.contains("UTF-8") && !why.contains("hunter"), "{why}");
        let missing = PasswordFile::new("/nowhere/password".into()).read();
        let why = missing.unwrap_err().to_string();
        assert!(why.contains("from /nowhere/password: "), "{why}");
    }
}
