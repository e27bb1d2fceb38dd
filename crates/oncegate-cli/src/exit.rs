//! Exit codes, and problems that end a command.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use oncegate::BoxError;
use oncegate::admin::audit::AuditError;
use oncegate::admin::dry_run::DryRunError;
use oncegate::core::key::KeySpecError;
use oncegate::core::store::StoreError;
use oncegate::source::SourceError;
use oncegate_worker::WorkerError;

/// The exit codes, the same for every command. From 65 on they are those of BSD's `sysexits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Yes = 0,
    /// The question was answered, and the answer is no.
    No = 1,
    Usage = 2,
    /// The question could be answered only in part.
    Incomplete = 3,
    BadData = 65,
    Unreachable = 69,
    Bug = 70,
    /// A server cannot be reached; trying again may help.
    TimedOut = 75,
    Configuration = 78,
    Interrupted = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The reason why there is no answer, as text for the user.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    exit: Exit,
    text: String,
}

impl Problem {
    pub(crate) fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self {
            exit,
            text: text.into(),
        }
    }

    /// A problem with the configuration, or with a flag in its place.
    pub(crate) fn configuration(text: impl Into<String>) -> Self {
        Self::new(Exit::Configuration, text)
    }

    /// The exit code of the command.
    pub(crate) const fn exit(&self) -> Exit {
        self.exit
    }

    /// A problem with the error's whole chain of causes.
    pub(crate) fn caused(exit: Exit, error: &dyn Error) -> Self {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            // An error that repeats its cause in its own text is printed once.
            let words = error.to_string();
            if !text.contains(&words) {
                text = format!("{text}: {words}");
            }
            cause = error.source();
        }
        Self { exit, text }
    }

    /// The same problem, with the name of this consumer.
    pub(crate) fn of(self, consumer: &str) -> Self {
        Self {
            text: format!("{consumer}: {}", self.text),
            ..self
        }
    }

    /// The same problem, followed by the text of another one.
    pub(crate) fn and(self, other: &Self) -> Self {
        Self {
            text: format!("{}\n{}", self.text, other.text),
            ..self
        }
    }

    /// Prints the problem to standard error, and returns the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        eprintln!("oncegate: {}", self.text);
        self.exit.into()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A source that cannot be opened because of its settings or its topic has no cause; an error of
/// the broker or the network is a cause, or says that the broker is away.
pub(crate) fn not_opened(error: &SourceError) -> Problem {
    let exit = if error.is_away() || error.source().is_some() {
        Exit::Unreachable
    } else {
        Exit::Configuration
    };
    Problem::caused(exit, error)
}

/// As for a source; an error of another kind comes from the server.
pub(crate) fn dead_letters_not_opened(error: &BoxError) -> Problem {
    let problem = match error.downcast_ref::<SourceError>() {
        Some(error) => not_opened(error),
        None => Problem::caused(Exit::Unreachable, &**error),
    };
    problem.of("dead letters")
}

impl From<SourceError> for Problem {
    /// The problem of a source that was open.
    fn from(error: SourceError) -> Self {
        Self::caused(Exit::Unreachable, &error)
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let exit = match error {
            StoreError::Refused { .. } => Exit::Configuration,
            StoreError::Unreadable { .. } => Exit::BadData,
            _ => Exit::Unreachable,
        };
        Self::caused(exit, &error)
    }
}

impl From<KeySpecError> for Problem {
    fn from(error: KeySpecError) -> Self {
        Self::caused(Exit::Configuration, &error)
    }
}

impl From<DryRunError> for Problem {
    fn from(error: DryRunError) -> Self {
        match error {
            DryRunError::Store(error) => error.into(),
            error => Self::caused(Exit::Configuration, &error),
        }
    }
}

impl From<AuditError> for Problem {
    fn from(error: AuditError) -> Self {
        match error {
            AuditError::Records(error) => error.into(),
            error => Self::caused(Exit::Configuration, &error),
        }
    }
}

impl From<WorkerError> for Problem {
    fn from(error: WorkerError) -> Self {
        match error {
            WorkerError::CannotStart(_) => {
                Self::configuration(format!("{error}; change `handler.exec` (--handler-exec)"))
            }
            WorkerError::NotReady { patience, why } => Self::new(
                Exit::Unreachable,
                format!("the worker was not ready within {patience:?} (`start_patience`): {why}"),
            ),
            _ => Self::configuration(error.to_string()),
        }
    }
}
