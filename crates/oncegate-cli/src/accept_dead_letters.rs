//! `oncegate accept-dead-letters`: lets a consumer continue that has stopped at its dead-letter limit.

use std::time::{Duration, SystemTime};

use oncegate::admin;
use oncegate::core::key::Scope;
use oncegate::core::store::DeadLetterStop;
use oncegate::journal::JournalEntry;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::change::ChangeArgs;
use crate::exit::{Exit, Problem};
use crate::output;
use crate::store::StoreArgs;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.accept-dead-letters/1";

/// Let a consumer continue that has stopped at its dead-letter limit
///
/// The stop outlives restarts: until a message succeeds, each process of the scope stops at the first message that it
/// would have to give up. This command shows when and why it stopped, and lets the next process give up as many messages
/// again. It is not needed when the cause is gone, because the first message that succeeds ends the stop.
///
/// Exit code 1: no consumer of the scope has stopped so; nothing was changed.
#[derive(Debug, clap::Args)]
pub(crate) struct AcceptDeadLettersArgs {
    #[command(flatten)]
    store: StoreArgs,

    /// The scope of the consumer's gate
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Scope,

    #[command(flatten)]
    change: ChangeArgs,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct AcceptDeadLettersDocument<'a> {
    schema: &'static str,
    scope: &'a str,
    /// Whether a consumer has stopped.
    stopped: bool,
    /// Which limit was reached.
    reason: Option<&'a str>,
    /// When it stopped, in milliseconds since the Unix epoch.
    stopped_at_ms: Option<u64>,
    /// Whether the stop was accepted now.
    done: bool,
}

pub(crate) async fn run(args: &AcceptDeadLettersArgs) -> Result<Exit, Problem> {
    let found = async {
        let store = args.store.open().await?;
        let stop = admin::dead_letter_stop_of(&*store, &args.scope).await?;
        Ok((store, stop))
    };
    let (store, stop) = within(args.answer.timeout, found).await?;
    let Some(stop) = stop else {
        tell(args, None, false)?;
        return Ok(Exit::No);
    };
    if !args.answer.json {
        output::answer(&words(args, &stop))?;
    }
    if args.change.dry_run {
        tell(args, Some(&stop), false)?;
        return Ok(Exit::Yes);
    }
    let question = "as many messages may go to the dead letters again: accept that?";
    let journal = args.change.begin(question, "accept the dead letters").await?;
    journal.note_now(JournalEntry::now("accept_dead_letters_begins").key(&args.scope))?;
    let accept = async { Ok(admin::accept_dead_letters(&*store, &args.scope).await?) };
    let accepted = within(args.answer.timeout, accept).await?;
    if accepted.is_some() {
        journal.note_now(JournalEntry::now("accept_dead_letters").key(&args.scope))?;
    }
    tell(args, accepted.as_ref(), accepted.is_some())?;
    Ok(if accepted.is_some() { Exit::Yes } else { Exit::No })
}

fn words(args: &AcceptDeadLettersArgs, stop: &DeadLetterStop) -> String {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(stop.at_ms);
    let at = humantime::format_rfc3339_seconds(at);
    format!("scope      {}\nstopped    {at}\nreason     {}\n", args.scope, stop.what)
}

fn tell(args: &AcceptDeadLettersArgs, stop: Option<&DeadLetterStop>, done: bool) -> Result<(), Problem> {
    if args.answer.json {
        return output::answer_json(&AcceptDeadLettersDocument {
            schema: SCHEMA,
            scope: args.scope.as_str(),
            stopped: stop.is_some(),
            reason: stop.map(|stop| stop.what.as_str()),
            stopped_at_ms: stop.map(|stop| stop.at_ms),
            done,
        });
    }
    let scope = &args.scope;
    match (stop, done) {
        (_, true) => {
            eprintln!("oncegate: accepted: the next process of scope {scope} may give up as many again");
        }
        (None, false) => {
            eprintln!(
                "oncegate: no consumer of scope {scope} has stopped at its dead-letter limit; nothing was changed"
            );
        }
        (Some(_), false) if args.change.dry_run => eprintln!("oncegate: nothing was changed (--dry-run)"),
        (Some(_), false) => {}
    }
    Ok(())
}
