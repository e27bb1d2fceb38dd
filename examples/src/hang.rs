//! The payment in the middle of which a worker is killed.
//!
//! A kill at some moment may find a worker with nothing in hand. So one worker stops in the middle
//! of one payment, and says so in a file.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use oncegate::BoxError;

/// The payment at which the first worker that comes to it stops.
#[derive(Clone, Debug, Args)]
pub struct Hang {
    /// The order in whose payment a worker stops until it is killed.
    #[arg(long)]
    slow_order: String,
    /// The file that tells the main process which worker that is.
    #[arg(long)]
    stopped: PathBuf,
}

impl Hang {
    /// In the main process: a worker stops in this order's payment, and says so in a file in
    /// `folder`.
    pub fn on(order: String, folder: &Path) -> Self {
        Self {
            slow_order: order,
            stopped: folder.join("stopped"),
        }
    }

    /// The order.
    pub fn order(&self) -> &str {
        &self.slow_order
    }

    /// The arguments that tell a worker.
    pub fn arguments(&self) -> [String; 4] {
        let stopped = self.stopped.display().to_string();
        [
            "--slow-order".to_owned(),
            self.slow_order.clone(),
            "--stopped".to_owned(),
            stopped,
        ]
    }

    /// The process that has stopped.
    pub fn who(&self) -> Option<u32> {
        fs::read_to_string(&self.stopped)
            .ok()?
            .strip_suffix('\n')?
            .parse()
            .ok()
    }

    /// In a worker: stops in the payment of that order, unless a worker has done so before.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub async fn here(&self, order: &str) -> Result<(), BoxError> {
        if order != self.slow_order {
            return Ok(());
        }
        match OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&self.stopped)
        {
            Ok(mut file) => writeln!(file, "{}", std::process::id())?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        std::future::pending().await
    }
}
