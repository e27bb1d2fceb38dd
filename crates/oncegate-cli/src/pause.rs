//! `oncegate pause` and `resume`: whether the consumers of a scope may begin anything, in every
//! process.

use std::time::SystemTime;

use oncegate::admin::{self, Paused, Resumed};
use oncegate::core::key::Scope;
use oncegate::core::store::{Pause, Store};
use oncegate::journal::JournalEntry;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::change::{ChangeArgs, Written};
use crate::configured::{ConfigArgs, StoreFlag, choose, missing};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table};

/// Pause the consumers of a scope in every process
///
/// They begin nothing, and what runs ends. The pause is in the store. Running consumers see it
/// within seconds, and those that start later obey it, until `oncegate resume`. They keep their
/// partitions and receive nothing more. HTTP endpoints are not paused.
///
/// Exit code 1: the scope was paused already; nothing was changed.
#[derive(Debug, clap::Args)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    scope: ScopeArgs,
}

/// Resume the consumers of a paused scope
///
/// The command shows who paused the scope, when and why. The consumers go on within seconds.
///
/// Exit code 1: the scope is not paused; nothing was changed.
#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    scope: ScopeArgs,
}

#[derive(Debug, clap::Args)]
struct ScopeArgs {
    #[command(flatten)]
    config: ConfigArgs,

    #[command(flatten)]
    store: StoreFlag,

    /// The scope of the consumers [default: the only consumer of the configuration]
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Option<Scope>,

    #[command(flatten)]
    change: ChangeArgs,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct PauseDocument<'a> {
    schema: &'static str,
    scope: &'a str,
    /// `true` if the scope is paused now.
    paused: bool,
    /// `true` if this command has changed that.
    done: bool,
    /// The pause that is in force, or was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause: Option<PauseOf<'a>>,
}

#[derive(Serialize)]
struct PauseOf<'a> {
    at_ms: u64,
    by: &'a str,
    reason: &'a str,
}

/// The change of a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Pause,
    Resume,
}

impl Verb {
    const fn schema(self) -> &'static str {
        match self {
            Self::Pause => "oncegate.pause/1",
            Self::Resume => "oncegate.resume/1",
        }
    }

    /// The state of a scope that needs no change.
    const fn is_state(self, is_paused: bool) -> bool {
        matches!(
            (self, is_paused),
            (Self::Pause, true) | (Self::Resume, false)
        )
    }
}

pub(crate) async fn pause(args: &PauseArgs) -> Result<Exit, Problem> {
    change(&args.scope, Verb::Pause).await
}

pub(crate) async fn resume(args: &ResumeArgs) -> Result<Exit, Problem> {
    change(&args.scope, Verb::Resume).await
}

async fn change(args: &ScopeArgs, verb: Verb) -> Result<Exit, Problem> {
    let loaded = args.config.load(args.store.url.is_some())?;
    let scope = match (&args.scope, &loaded) {
        (Some(scope), _) => scope.clone(),
        (None, Some(loaded)) => Scope::new(choose(loaded, None)?.0)?,
        (None, None) => return Err(missing("--scope")),
    };
    let store = args.store.or_of(loaded.as_ref())?;
    let found = async {
        let store = store.open().await?.store;
        let found = admin::pause_of(&*store, &scope).await?;
        Ok((store, found))
    };
    let (store, found) = within(args.answer.timeout, found).await?;
    let answer = Answer {
        args,
        verb,
        scope: &scope,
    };
    if verb.is_state(found.is_some()) {
        answer.tell(found.as_ref(), false)?;
        return Ok(Exit::No);
    }
    if args.change.dry_run {
        answer.tell(found.as_ref(), false)?;
        return Ok(Exit::Yes);
    }
    let (question, what) = match verb {
        Verb::Pause => (
            "all its consumers will begin nothing until it is resumed: pause the scope?",
            "pause the scope",
        ),
        Verb::Resume => (
            "its consumers will go on: resume the scope?",
            "resume the scope",
        ),
    };
    if !args.answer.json
        && let Some(pause) = &found
    {
        output::answer(&table(&scope, Some(pause)))?;
    }
    let journal = args.change.begin(question, what).await?;
    let changing = async {
        match verb {
            Verb::Pause => pause_scope(&*store, &scope, &journal).await,
            Verb::Resume => resume_scope(&*store, &scope, &journal).await,
        }
    };
    let changed = within(args.answer.timeout, changing).await?;
    match changed {
        Changed::Yes(pause) => {
            answer.tell(Some(&pause), true)?;
            Ok(Exit::Yes)
        }
        Changed::No(found) => {
            answer.tell(found.as_ref(), false)?;
            Ok(Exit::No)
        }
    }
}

/// The outcome of a pause or a resume.
pub(crate) enum Changed {
    /// The change was made; the pause that begins or is over.
    Yes(Pause),
    /// The scope was in that state already; the pause in force.
    No(Option<Pause>),
}

/// Pauses a scope, with who and why of the journal.
///
/// # Errors
/// When the store knows no such scope or does not answer, or the journal cannot be written.
pub(crate) async fn pause_scope(
    store: &dyn Store,
    scope: &Scope,
    journal: &Written,
) -> Result<Changed, Problem> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = u64::try_from(now.unwrap_or_default().as_millis()).unwrap_or(u64::MAX);
    let pause = Pause::new(now, journal.why(), journal.by());
    journal.note_now(JournalEntry::now("pause_begins").key(scope))?;
    match admin::pause(store, scope, &pause).await? {
        Paused::Yes => {
            journal.note_now(JournalEntry::now("pause").key(scope))?;
            Ok(Changed::Yes(pause))
        }
        Paused::Already(before) => Ok(Changed::No(Some(before))),
        Paused::UnknownScope => Err(unknown(scope)),
    }
}

/// Resumes a scope, with who and why of the journal.
///
/// # Errors
/// As [`pause_scope`].
pub(crate) async fn resume_scope(
    store: &dyn Store,
    scope: &Scope,
    journal: &Written,
) -> Result<Changed, Problem> {
    journal.note_now(JournalEntry::now("resume_begins").key(scope))?;
    match admin::resume(store, scope).await? {
        Resumed::Yes(before) => {
            journal.note_now(JournalEntry::now("resume").key(scope))?;
            Ok(Changed::Yes(before))
        }
        Resumed::NotPaused => Ok(Changed::No(None)),
        Resumed::UnknownScope => Err(unknown(scope)),
    }
}

fn unknown(scope: &Scope) -> Problem {
    Problem::configuration(format!(
        "the store knows no scope {scope}: no consumer of it has run with this store; check --scope and --store"
    ))
}

/// The answer about a scope.
struct Answer<'a> {
    args: &'a ScopeArgs,
    verb: Verb,
    scope: &'a Scope,
}

impl Answer<'_> {
    fn tell(&self, pause: Option<&Pause>, done: bool) -> Result<(), Problem> {
        let Self { args, verb, scope } = *self;
        if args.answer.json {
            let paused = if done {
                verb == Verb::Pause
            } else {
                pause.is_some()
            };
            return output::answer_json(&PauseDocument {
                schema: verb.schema(),
                scope: scope.as_str(),
                paused,
                done,
                pause: pause.map(|pause| PauseOf {
                    at_ms: pause.at_ms,
                    by: &pause.by,
                    reason: &pause.reason,
                }),
            });
        }
        match (verb, done) {
            (Verb::Pause, true) => eprintln!(
                "oncegate: scope {scope} is paused; its consumers stop beginning anything within seconds"
            ),
            (Verb::Resume, true) => {
                eprintln!("oncegate: scope {scope} is resumed; its consumers go on within seconds");
            }
            (_, false) if args.change.dry_run && !verb.is_state(pause.is_some()) => {
                output::answer(&table(scope, pause))?;
                eprintln!("oncegate: nothing was changed (--dry-run)");
            }
            (Verb::Pause, false) => {
                output::answer(&table(scope, pause))?;
                eprintln!("oncegate: scope {scope} was paused already; nothing was changed");
            }
            (Verb::Resume, false) => {
                eprintln!("oncegate: scope {scope} is not paused; nothing was changed");
            }
        }
        Ok(())
    }
}

fn table(scope: &Scope, pause: Option<&Pause>) -> String {
    let mut table = Table::default();
    table.text("scope", scope.as_str());
    match pause {
        None => table.text("paused", "no"),
        Some(pause) => {
            let at = std::time::Duration::from_millis(pause.at_ms);
            let at = SystemTime::UNIX_EPOCH.checked_add(at);
            table.optional("paused", at.map(output::time));
            table.text("by", &pause.by);
            table.text("why", &pause.reason);
        }
    }
    table.render()
}
