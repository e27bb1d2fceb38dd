//! The effect: a bank that charges on every request. Its statement does not depend on oncegate.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use oncegate::BoxError;
use serde::{Deserialize, Serialize};

/// A line of the statement: money has moved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Charge {
    pub(crate) order: String,
    pub(crate) amount: u64,
    /// The shop's name for this charge, to find it again.
    pub(crate) reference: String,
}

#[derive(Debug)]
pub(crate) struct Bank {
    path: PathBuf,
    statement: Mutex<File>,
}

impl Bank {
    pub(crate) fn open(path: &Path) -> Result<Self, BoxError> {
        let statement = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self {
            path: path.to_owned(),
            statement: Mutex::new(statement),
        })
    }

    /// Moves money. It charges as often as it is asked.
    pub(crate) fn charge(&self, charge: &Charge) -> Result<(), BoxError> {
        let mut line = serde_json::to_vec(charge)?;
        line.push(b'\n');
        // In one write: a process that is killed leaves a whole line or none.
        self.statement
            .lock()
            .map_err(|_| "the bank is broken")?
            .write_all(&line)?;
        Ok(())
    }

    /// The charge of this reference, if there was one.
    pub(crate) fn find(&self, reference: &str) -> Result<Option<Charge>, BoxError> {
        Ok(self
            .statement()?
            .into_iter()
            .find(|charge| charge.reference == reference))
    }

    /// The number of times that an order was charged.
    pub(crate) fn charges(&self, order: &str) -> Result<usize, BoxError> {
        Ok(self
            .statement()?
            .iter()
            .filter(|charge| charge.order == order)
            .count())
    }

    fn statement(&self) -> Result<Vec<Charge>, BoxError> {
        let text = std::fs::read_to_string(&self.path)?;
        text.lines()
            .map(|line| Ok(serde_json::from_str(line)?))
            .collect()
    }
}
