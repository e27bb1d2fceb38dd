//! The output of a program: its progress, its proof, and the exit code.

use std::fmt::Display;
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};
use oncegate::BoxError;
use serde::Serialize;

/// Output options of every program.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Show {
    /// Print the proof as JSON.
    #[arg(long)]
    json: bool,
}

impl Show {
    /// A bar for people, and none beside JSON.
    pub fn stages(self) -> Stages {
        let bar = if self.json {
            ProgressBar::hidden()
        } else {
            ProgressBar::new(0)
        };
        let style = ProgressStyle::with_template("{msg:44} {bar:30} {pos}/{len} {elapsed}");
        Stages {
            bar: bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())),
        }
    }

    /// Prints the proof.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn proof(self, proof: &(impl Serialize + Display)) -> Result<(), BoxError> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(proof)?);
        } else {
            println!("{proof}");
        }
        Ok(())
    }
}

/// The stages of a program, one bar after another.
#[derive(Debug)]
pub struct Stages {
    bar: ProgressBar,
}

impl Stages {
    /// The next stage begins, of so many steps. Returns its bar.
    pub fn begin(&self, name: &'static str, steps: u64) -> &ProgressBar {
        self.bar.reset();
        self.bar.set_length(steps);
        self.bar.set_message(name);
        &self.bar
    }

    /// The last stage is over.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// Success if the proof holds, or if this was a worker that ended well.
pub fn exit_code(holds: Result<bool, BoxError>) -> ExitCode {
    match holds {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
