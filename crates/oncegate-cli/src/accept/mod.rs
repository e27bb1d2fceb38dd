//! `oncegate accept`: shows what stops a scope, asks, and lets the scope continue. `loss` and
//! `dead_letters` are what can stop one.

mod dead_letters;
mod loss;

use std::future::Future;
use std::time::{Duration, SystemTime};

use clap::Subcommand;
use oncegate::core::key::Scope;
use oncegate::core::store::{DeadLetterStop, Halt, Store, StoreError};
use oncegate::journal::JournalEntry;
use serde::ser::{Serialize, SerializeMap as _, Serializer};

use crate::args::{AnswerArgs, within};
use crate::change::ChangeArgs;
use crate::config::Loaded;
use crate::configured::{ConfigArgs, StoreFlag, choose, missing};
use crate::exit::{Exit, Problem};
use crate::output;

/// Let a scope continue that has stopped after a loss or at its dead-letter limit
#[derive(Debug, Subcommand)]
pub(crate) enum AcceptCommand {
    /// Resume a scope that is halted because its store has lost records
    ///
    /// Messages whose records are lost run again when they are delivered again; `oncegate replay`
    /// shows which ones. The command first prints why the scope is halted. Every process of the
    /// scope resumes within seconds, without a restart.
    ///
    /// Exit code 1: the scope is not halted, or was halted again meanwhile; nothing was changed.
    Loss(AcceptArgs),

    /// Let a consumer continue that has stopped at its dead-letter limit
    ///
    /// The stop outlives restarts: until a message succeeds, each process of the scope stops at the
    /// first message that it would have to give up. This command shows when and why it stopped, and
    /// lets the next process give up as many messages again. It is not needed when the cause is
    /// gone, because the first message that succeeds ends the stop.
    ///
    /// Exit code 1: no consumer of the scope has stopped so; nothing was changed.
    DeadLetters(AcceptArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct AcceptArgs {
    #[command(flatten)]
    config: ConfigArgs,

    #[command(flatten)]
    store: StoreFlag,

    /// The scope of the consumer's gate [default: the only consumer of the configuration]
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Option<Scope>,

    #[command(flatten)]
    change: ChangeArgs,

    #[command(flatten)]
    answer: AnswerArgs,
}

impl AcceptArgs {
    fn scope(&self, loaded: Option<&Loaded>) -> Result<Scope, Problem> {
        match (&self.scope, loaded) {
            (Some(scope), _) => Ok(scope.clone()),
            (None, Some(loaded)) => Ok(Scope::new(choose(loaded, None)?.0)?),
            (None, None) => Err(missing("--scope")),
        }
    }
}

/// A condition that stops a scope until an operator accepts it.
trait Obstacle: Sized + Send + Sync {
    const WORDS: Words;

    fn find(
        store: &dyn Store,
        scope: &Scope,
    ) -> impl Future<Output = Result<Option<Self>, StoreError>> + Send;

    /// Lets the scope continue, if this still stops it.
    fn accept(
        &self,
        store: &dyn Store,
        scope: &Scope,
    ) -> impl Future<Output = Result<Accepted<Self>, StoreError>> + Send;

    /// Returns the time of the stop, in milliseconds since the Unix epoch, and its reason.
    fn since_and_why(&self) -> (u64, &str);
}

/// The words in which a command speaks of its obstacle.
struct Words {
    /// The format of the `--json` document.
    schema: &'static str,
    /// The question to a terminal.
    question: &'static str,
    /// The change that needs the confirmation, for the error where there is no terminal.
    change: &'static str,
    /// The journal's event.
    event: &'static str,
    /// The state of the scope: `halted`. In the document, the name of a flag.
    state: &'static str,
    /// The document's name for the time of the stop.
    since: &'static str,
    /// The message that it was accepted, before and after the scope.
    accepted: [&'static str; 2],
    /// The message that nothing stops the scope, before and after the scope.
    not_found: [&'static str; 2],
}

/// The outcome of accepting an obstacle.
enum Accepted<T> {
    Yes(T),
    /// The obstacle was gone already.
    Gone,
    /// Something else stops the scope now.
    Changed(T),
}

pub(crate) async fn run(command: &AcceptCommand) -> Result<Exit, Problem> {
    match command {
        AcceptCommand::Loss(args) => accept::<Halt>(args).await,
        AcceptCommand::DeadLetters(args) => accept::<DeadLetterStop>(args).await,
    }
}

async fn accept<T: Obstacle>(args: &AcceptArgs) -> Result<Exit, Problem> {
    let loaded = args.config.load(args.store.url.is_some())?;
    let scope = &args.scope(loaded.as_ref())?;
    let store = args.store.or_of(loaded.as_ref())?;
    let found = async {
        let store = store.open().await?.store;
        let found = T::find(&*store, scope).await?;
        Ok((store, found))
    };
    let (store, found) = within(args.answer.timeout, found).await?;
    let Some(found) = found else {
        tell::<T>(args, scope, None, false)?;
        return Ok(Exit::No);
    };
    show(args, scope, &found)?;
    if args.change.dry_run {
        tell(args, scope, Some(&found), false)?;
        return Ok(Exit::Yes);
    }
    let Words {
        question,
        change,
        event,
        ..
    } = T::WORDS;
    let journal = args.change.begin(question, change).await?;
    journal.note_now(JournalEntry::now(format!("{event}_begins")).key(scope))?;
    let accept = async { Ok(found.accept(&*store, scope).await?) };
    match within(args.answer.timeout, accept).await? {
        Accepted::Yes(accepted) => {
            journal.note_now(JournalEntry::now(event).key(scope))?;
            tell(args, scope, Some(&accepted), true)?;
            Ok(Exit::Yes)
        }
        Accepted::Gone => {
            tell::<T>(args, scope, None, false)?;
            Ok(Exit::No)
        }
        Accepted::Changed(now) => {
            eprintln!("oncegate: the reason has changed meanwhile; nothing was changed");
            show(args, scope, &now)?;
            tell(args, scope, Some(&now), false)?;
            Ok(Exit::No)
        }
    }
}

/// Shows why and since when the scope is stopped.
fn show<T: Obstacle>(args: &AcceptArgs, scope: &Scope, found: &T) -> Result<(), Problem> {
    if args.answer.json {
        return Ok(());
    }
    let (since_ms, why) = found.since_and_why();
    let since =
        humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_millis(since_ms));
    let state = T::WORDS.state;
    output::answer(&format!(
        "scope      {scope}\n{state:<11}{since}\nreason     {why}\n"
    ))
}

fn tell<T: Obstacle>(
    args: &AcceptArgs,
    scope: &Scope,
    found: Option<&T>,
    done: bool,
) -> Result<(), Problem> {
    let words = T::WORDS;
    if args.answer.json {
        let found = found.map(Obstacle::since_and_why);
        return output::answer_json(&AcceptDocument {
            words,
            scope: scope.as_str(),
            found,
            done,
        });
    }
    match (found, done) {
        (_, true) => eprintln!("oncegate: {}", around(words.accepted, scope)),
        (None, false) => eprintln!(
            "oncegate: {}; nothing was changed",
            around(words.not_found, scope)
        ),
        (Some(_), false) if args.change.dry_run => {
            eprintln!("oncegate: nothing was changed (--dry-run)");
        }
        (Some(_), false) => {}
    }
    Ok(())
}

fn around([before, after]: [&str; 2], scope: &Scope) -> String {
    format!("{before}{scope}{after}")
}

/// The answer of `--json`.
struct AcceptDocument<'a> {
    words: Words,
    scope: &'a str,
    /// The time of the stop, in milliseconds since the Unix epoch, and its reason.
    found: Option<(u64, &'a str)>,
    /// `true` if it was accepted now.
    done: bool,
}

impl Serialize for AcceptDocument<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (since_ms, why) = self.found.unzip();
        let mut document = serializer.serialize_map(None)?;
        document.serialize_entry("schema", self.words.schema)?;
        document.serialize_entry("scope", self.scope)?;
        document.serialize_entry(self.words.state, &self.found.is_some())?;
        document.serialize_entry("reason", &why)?;
        document.serialize_entry(self.words.since, &since_ms)?;
        document.serialize_entry("done", &self.done)?;
        document.end()
    }
}
