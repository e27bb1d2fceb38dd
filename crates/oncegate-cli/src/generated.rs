//! `oncegate completions` and `oncegate man`: shell completions and manual pages, generated from
//! the commands.

use std::path::PathBuf;

use clap_complete::Shell;

use crate::exit::{Exit, Problem};
use crate::output;

/// Print the completions for a shell
///
/// For bash: oncegate completions bash > /etc/bash_completion.d/oncegate
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Print the manual page, or write one for each command into a folder
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// The folder for the pages oncegate.1, oncegate-replay.1 and so on
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

pub(crate) fn completions(
    args: &CompletionsArgs,
    mut command: clap::Command,
) -> Result<Exit, Problem> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "oncegate", &mut script);
    output::answer(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Yes)
}

pub(crate) fn man(args: &ManArgs, command: clap::Command) -> Result<Exit, Problem> {
    match &args.folder {
        Some(folder) => {
            std::fs::create_dir_all(folder).map_err(not_written)?;
            clap_mangen::generate_to(command, folder).map_err(not_written)?;
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command)
                .render(&mut page)
                .map_err(not_written)?;
            output::answer(&String::from_utf8_lossy(&page))?;
        }
    }
    Ok(Exit::Yes)
}

fn not_written(error: std::io::Error) -> Problem {
    Problem::configuration(format!("--folder: the pages cannot be written: {error}"))
}
