//! The bank: it does not depend on oncegate, and honours idempotency keys, as payment providers do.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use oncegate::BoxError;

/// A folder with one file for each charge, named after the idempotency key of its request.
///
/// The system creates a file once, also for processes that ask at the same time, and keeps it when
/// the process that asked is killed right after.
#[derive(Debug)]
pub struct Bank {
    folder: PathBuf,
}

impl Bank {
    /// Opens it, or makes it.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn open(folder: &Path) -> Result<Self, BoxError> {
        fs::create_dir_all(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
        })
    }

    /// Moves money, unless an earlier request had the same idempotency key.
    ///
    /// # Errors
    /// When the charge cannot be recorded.
    pub fn charge(&self, idempotency_key: &str) -> Result<(), BoxError> {
        match File::create_new(self.folder.join(idempotency_key)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error.into()),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// The charges that were made, by their idempotency keys.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn charges(&self) -> Result<BTreeSet<String>, BoxError> {
        Ok(fs::read_dir(&self.folder)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_, std::io::Error>>()?)
    }
}
