//! Changes by an operator: announced first, confirmed, and written to a journal with who and why.

use std::path::{Path, PathBuf};

use oncegate::journal::{JournalEntry, JournalFile};

use crate::confirm::confirm;
use crate::exit::{Exit, Problem};
use crate::parse;

/// The way a change is made.
#[derive(Debug, clap::Args)]
pub(crate) struct ChangeArgs {
    /// Only show what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Do it without confirmation; required where there is no terminal
    #[arg(long)]
    pub(crate) yes: bool,

    /// Why it is done, for the journal
    #[arg(long, value_name = "TEXT", required_unless_present = "dry_run", value_parser = parse::reason)]
    pub(crate) why: Option<String>,

    /// The journal, one JSON object per line: when, who, why and what [default:
    /// oncegate/journal.jsonl in $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, value_name = "FILE", env = "ONCEGATE_JOURNAL")]
    pub(crate) journal: Option<PathBuf>,

    /// Who does it, for the journal [default: the user's name, or number]
    #[arg(long, value_name = "NAME", env = "ONCEGATE_OPERATOR")]
    pub(crate) by: Option<String>,
}

impl ChangeArgs {
    /// Asks for confirmation, and opens the journal. A change that cannot be written to the journal
    /// is not made.
    pub(crate) async fn begin(&self, question: &str, what: &str) -> Result<Written, Problem> {
        confirm(question, what, self.yes).await?;
        let path = self.journal.clone().or_else(default_path);
        let path = path.ok_or_else(|| {
            Problem::configuration("there is no home directory for the journal: set --journal")
        })?;
        let by = self.by.clone().unwrap_or_else(user);
        Written::open(&path, by, self.why.clone().unwrap_or_default())
    }
}

/// A journal that is open for one command.
#[derive(Debug)]
pub(crate) struct Written {
    file: JournalFile,
    by: String,
    why: String,
}

impl Written {
    /// Opens the journal at this path for one change.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub(crate) fn open(path: &Path, by: String, why: String) -> Result<Self, Problem> {
        let file = JournalFile::open(path).map_err(|error| {
            Problem::configuration(format!(
                "nothing was changed, because the journal {} cannot be written: {error}",
                path.display()
            ))
        })?;
        Ok(Self { file, by, why })
    }

    /// The person who makes the change.
    pub(crate) fn by(&self) -> &str {
        &self.by
    }

    /// The reason of the change.
    pub(crate) fn why(&self) -> &str {
        &self.why
    }

    /// The reason and the name of the operator, for a record.
    pub(crate) fn words(&self) -> String {
        format!("{} by {}", self.why, self.by)
    }

    /// Writes an entry with who and why.
    pub(crate) fn note(&self, entry: JournalEntry) -> Result<(), Problem> {
        let entry = entry.by(self.by.as_str()).reason(&self.why);
        self.file
            .append(&entry)
            .map_err(|error| self.failed(&error))
    }

    /// Writes an entry, and waits until it is on the disk.
    pub(crate) fn note_now(&self, entry: JournalEntry) -> Result<(), Problem> {
        self.note(entry)?;
        self.file.sync().map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &std::io::Error) -> Problem {
        let path = self.file.path().display();
        Problem::new(
            Exit::Unreachable,
            format!("the journal {path} can no longer be written: {error}"),
        )
    }
}

/// The journal of changes where none is named.
pub(crate) fn default_path() -> Option<PathBuf> {
    let state =
        folder_of("XDG_STATE_HOME").or_else(|| Some(folder_of("HOME")?.join(".local/state")))?;
    Some(state.join("oncegate/journal.jsonl"))
}

fn folder_of(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

fn user() -> String {
    ["SUDO_USER", "USER", "LOGNAME"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|name| !name.is_empty()))
        // Services and containers often have none of these.
        .unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()))
}
