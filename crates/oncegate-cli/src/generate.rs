//! `oncegate generate`: what is made from the commands and settings themselves.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::config::table;
use crate::exit::{Exit, Problem};
use crate::output;

/// Print shell completions, manual pages, JSON schemas, and the table of settings
#[derive(Debug, Subcommand)]
pub(crate) enum GenerateCommand {
    /// Print the completions for a shell
    ///
    /// For bash: oncegate generate completions bash > /etc/bash_completion.d/oncegate
    Completions {
        /// The shell
        #[arg(value_name = "SHELL")]
        shell: Shell,
    },

    /// Print the manual page, or write one for each command into a folder
    Man {
        /// The folder for the pages oncegate.1, oncegate-replay.1 and so on
        #[arg(long, value_name = "FOLDER")]
        folder: Option<PathBuf>,
    },

    /// Print a JSON schema
    Schema {
        /// The documents that it describes
        #[arg(value_name = "WHAT")]
        what: Described,
    },

    /// Print the table of all settings in Markdown
    Settings,
}

/// The documents that have a JSON schema.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Described {
    /// Configurations, for editors
    Config,
    /// The report of `oncegate prove`, report.json
    Prove,
}

/// Prints what is made, of these commands.
pub(crate) fn run(generate: &GenerateCommand, mut command: clap::Command) -> Result<Exit, Problem> {
    match generate {
        GenerateCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut command, "oncegate", &mut script);
            output::answer(&String::from_utf8_lossy(&script))?;
        }
        GenerateCommand::Man {
            folder: Some(folder),
        } => {
            std::fs::create_dir_all(folder).map_err(not_written)?;
            clap_mangen::generate_to(command, folder).map_err(not_written)?;
        }
        GenerateCommand::Man { folder: None } => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command)
                .render(&mut page)
                .map_err(not_written)?;
            output::answer(&String::from_utf8_lossy(&page))?;
        }
        GenerateCommand::Schema { what } => match what {
            Described::Config => output::answer_json(&table::schema())?,
            Described::Prove => output::answer_json(&oncegate_testing::report::schema())?,
        },
        GenerateCommand::Settings => output::answer(&table::markdown())?,
    }
    Ok(Exit::Yes)
}

fn not_written(error: std::io::Error) -> Problem {
    Problem::configuration(format!("--folder: the pages cannot be written: {error}"))
}
