//! A command of the user's that lists the effects of a round.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::BoxError;
use oncegate_testing::Witness;
use serde_json::Value;
use tokio::process::Command;

/// The variable with the folder of a round, for workers and for the command.
pub(super) const FOLDER: &str = "ONCEGATE_TRIAL_DIR";
/// The longest time that the command may take.
const LIMIT: Duration = Duration::from_secs(60);
/// The most bytes that it may print.
const OUTPUT_MAX_BYTES: usize = 64 * 1024 * 1024;
/// The most bytes of its standard error in an error.
const SHOWN_MAX_CHARS: usize = 300;

/// The command, and the folder in which each round has its own.
#[derive(Debug)]
pub(super) struct WitnessCommand {
    command: String,
    rounds: PathBuf,
}

impl WitnessCommand {
    /// `folder` is the one of the trial.
    pub(super) fn new(command: &str, folder: &Path) -> Self {
        Self {
            command: command.to_owned(),
            rounds: folder.join("rounds"),
        }
    }

    /// Returns whether each round has a list of its own, because the command reads it from the
    /// folder of the round.
    pub(super) fn is_of_round(command: &str) -> bool {
        command.contains(FOLDER)
    }

    /// The folder of a round, which is created.
    pub(super) fn folder(&self, round: &str) -> io::Result<PathBuf> {
        let folder = self.rounds.join(round);
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }
}

/// The command as a witness.
pub(super) struct SharedWitness(pub(super) Arc<WitnessCommand>);

#[async_trait]
impl Witness for SharedWitness {
    async fn effects(&self, round: &str) -> Result<Vec<Value>, BoxError> {
        let mut command = Command::new("sh");
        command
            .args(["-c", &self.0.command])
            .env(FOLDER, self.0.folder(round)?)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = tokio::time::timeout(LIMIT, command.output());
        let output = output
            .await
            .map_err(|_| format!("--witness-command does not end within {LIMIT:?}"))??;
        if !output.status.success() {
            let error: String = String::from_utf8_lossy(&output.stderr)
                .chars()
                .take(SHOWN_MAX_CHARS)
                .collect();
            let what = format!(
                "--witness-command failed ({}): {}; it must succeed with an empty list where nothing has happened",
                output.status,
                error.trim()
            );
            return Err(what.into());
        }
        if output.stdout.len() > OUTPUT_MAX_BYTES {
            return Err(
                format!("--witness-command prints more than {OUTPUT_MAX_BYTES} bytes").into(),
            );
        }
        read(&String::from_utf8_lossy(&output.stdout))
    }

    fn is_shared(&self) -> bool {
        !WitnessCommand::is_of_round(&self.0.command)
    }
}

/// Reads one JSON object a line.
fn read(text: &str) -> Result<Vec<Value>, BoxError> {
    (1..)
        .zip(text.lines())
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            let object = serde_json::from_str(line).ok().filter(Value::is_object);
            object.ok_or_else(|| {
                format!("line {number} of --witness-command is not a JSON object").into()
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_an_object() {
        assert_eq!(read("{\"order\":1}\n\n{\"order\":2}\n").unwrap().len(), 2);
        assert!(read("").unwrap().is_empty());
        for text in ["{\"order\":1}\n7", "{\"order\":1}\n{no"] {
            assert!(
                read(text).unwrap_err().to_string().contains("line 2"),
                "{text}"
            );
        }
    }
}
