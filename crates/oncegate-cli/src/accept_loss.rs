//! `oncegate accept-loss`: resumes a scope that was halted because its store has lost records.

use std::time::{Duration, SystemTime};

use oncegate::admin::{self, AcceptedLoss};
use oncegate::core::key::Scope;
use oncegate::core::store::Halt;
use oncegate::journal::JournalEntry;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::change::ChangeArgs;
use crate::exit::{Exit, Problem};
use crate::output;
use crate::store::StoreArgs;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.accept-loss/1";

/// Resume a scope that is halted because its store has lost records
///
/// Messages whose records are lost run again when they are delivered again; `oncegate replay` shows which ones. The
/// command first prints why the scope is halted. Every process of the scope resumes within seconds, without a restart.
///
/// Exit code 1: the scope is not halted, or was halted again meanwhile; nothing was changed.
#[derive(Debug, clap::Args)]
pub(crate) struct AcceptLossArgs {
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
struct AcceptLossDocument<'a> {
    schema: &'static str,
    scope: &'a str,
    /// Whether it was halted.
    halted: bool,
    /// The evidence of the loss.
    reason: Option<&'a str>,
    /// When the loss was detected, in milliseconds since the Unix epoch.
    noticed_at_ms: Option<u64>,
    /// Whether the loss was accepted now.
    done: bool,
}

pub(crate) async fn run(args: &AcceptLossArgs) -> Result<Exit, Problem> {
    let found = async {
        let store = args.store.open().await?;
        let halt = admin::halt_of(&*store, &args.scope).await?;
        Ok((store, halt))
    };
    let (store, halt) = within(args.answer.timeout, found).await?;
    let Some(halt) = halt else {
        tell(args, None, false)?;
        return Ok(Exit::No);
    };
    if !args.answer.json {
        output::answer(&words(args, &halt))?;
    }
    if args.change.dry_run {
        tell(args, Some(&halt), false)?;
        return Ok(Exit::Yes);
    }
    let question = "messages whose records are lost will run again: accept the loss?";
    let journal = args.change.begin(question, "accept the loss").await?;
    journal.note_now(JournalEntry::now("accept_loss_begins").key(&args.scope))?;
    let accept = async { Ok(admin::accept_loss(&*store, &args.scope, &halt).await?) };
    match within(args.answer.timeout, accept).await? {
        AcceptedLoss::Accepted(_) => {
            journal.note_now(JournalEntry::now("accept_loss").key(&args.scope))?;
            tell(args, Some(&halt), true)?;
            Ok(Exit::Yes)
        }
        AcceptedLoss::NotHalted => {
            tell(args, None, false)?;
            Ok(Exit::No)
        }
        AcceptedLoss::Changed(now) => {
            eprintln!("oncegate: the scope was halted for another reason meanwhile; nothing was changed");
            if !args.answer.json {
                output::answer(&words(args, &now))?;
            }
            tell(args, Some(&now), false)?;
            Ok(Exit::No)
        }
    }
}

fn words(args: &AcceptLossArgs, halt: &Halt) -> String {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(halt.at_ms);
    format!(
        "scope      {}\nhalted     {}\nreason     {}\n",
        args.scope,
        humantime::format_rfc3339_seconds(at),
        halt.reason
    )
}

fn tell(args: &AcceptLossArgs, halt: Option<&Halt>, done: bool) -> Result<(), Problem> {
    if args.answer.json {
        return output::answer_json(&AcceptLossDocument {
            schema: SCHEMA,
            scope: args.scope.as_str(),
            halted: halt.is_some(),
            reason: halt.map(|halt| halt.reason.as_str()),
            noticed_at_ms: halt.map(|halt| halt.at_ms),
            done,
        });
    }
    match (halt, done) {
        (_, true) => eprintln!("oncegate: the loss is accepted: the processes of scope {} go on", args.scope),
        (None, false) => eprintln!("oncegate: scope {} is not halted; nothing was changed", args.scope),
        (Some(_), false) if args.change.dry_run => eprintln!("oncegate: nothing was changed (--dry-run)"),
        (Some(_), false) => {}
    }
    Ok(())
}
