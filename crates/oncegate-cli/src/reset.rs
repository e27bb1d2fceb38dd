//! `oncegate reset`: reopens one record, so that its message runs once more.

use oncegate::admin::{self, Reopened};
use oncegate::core::key::StoreKey;
use oncegate::core::record::State;
use oncegate::core::store::{RecordSnapshot, Store};
use oncegate::journal::JournalEntry;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::change::ChangeArgs;
use crate::exit::{Exit, Problem};
use crate::inspect;
use crate::output::{self, counted};
use crate::record::{Found, RecordArgs};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.reset/1";

/// Reopen one record: the next delivery of its message runs the handler as attempt 1
///
/// It first shows the record and which effect may repeat. Then it reopens the record, unless the
/// record has changed since. It delivers nothing: for a dead letter, use dead-letters redrive.
///
/// Exit code 1: there is no record, or it has changed meanwhile; nothing was changed.
#[derive(Debug, clap::Args)]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    record: RecordArgs,

    #[command(flatten)]
    change: ChangeArgs,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct ResetDocument<'a> {
    schema: &'static str,
    key: &'a str,
    /// The state before the reset, as `oncegate inspect` names it.
    state: &'static str,
    /// The effect that may repeat, as text.
    effect: &'a str,
    /// `true` if the record was reopened.
    done: bool,
    /// `true` if the record had changed meanwhile.
    changed: bool,
}

pub(crate) async fn run(args: &ResetArgs) -> Result<Exit, Problem> {
    let Found {
        opened,
        key,
        record: found,
        ..
    } = within(args.answer.timeout, Box::pin(args.record.find())).await?;
    let Some(found) = found else {
        tell(args, &key, None, false, false)?;
        return Ok(Exit::No);
    };
    if !args.answer.json {
        output::answer(&format!(
            "{}effect     {}",
            inspect::words(&key, Some(&found)),
            effect(&found)
        ))?;
    }
    if args.change.dry_run {
        tell(args, &key, Some(&found), false, false)?;
        return Ok(Exit::Yes);
    }
    let question = format!("{}: reopen the record above?", effect(&found));
    let journal = args.change.begin(&question, "reopen the record").await?;
    journal.note_now(JournalEntry::now("reset_begins").key(&key))?;
    match within(args.answer.timeout, open(&*opened.store, &key, &found)).await? {
        Reopened::Opened => {
            journal.note_now(JournalEntry::now("reset").key(&key))?;
            tell(args, &key, Some(&found), true, false)?;
            Ok(Exit::Yes)
        }
        Reopened::Changed(now) => {
            journal.note_now(JournalEntry::now("reset_refused").key(&key))?;
            tell(args, &key, now.as_ref(), false, true)?;
            Ok(Exit::No)
        }
    }
}

async fn open(
    store: &dyn Store,
    key: &StoreKey,
    found: &RecordSnapshot,
) -> Result<Reopened, Problem> {
    Ok(admin::reopen(store, key, &found.record).await?)
}

fn tell(
    args: &ResetArgs,
    key: &StoreKey,
    found: Option<&RecordSnapshot>,
    done: bool,
    changed: bool,
) -> Result<(), Problem> {
    let effect = found.map(effect).unwrap_or_default();
    if args.answer.json {
        let state = inspect::state(found);
        return output::answer_json(&ResetDocument {
            schema: SCHEMA,
            key: key.as_str(),
            state,
            effect: &effect,
            done,
            changed,
        });
    }
    match (done, changed, found) {
        (true, ..) => {
            eprintln!("oncegate: {key} is open: its next delivery runs the handler as attempt 1");
        }
        (_, true, found) => {
            eprintln!("oncegate: the record has changed meanwhile, and was left as it is now:");
            output::answer(&inspect::words(key, found))?;
        }
        (.., None) => output::answer(&inspect::words(key, None))?,
        (.., Some(_)) => eprintln!("oncegate: nothing was changed (--dry-run)"),
    }
    Ok(())
}

/// Returns which effect may repeat.
fn effect(found: &RecordSnapshot) -> String {
    let RecordSnapshot { now, record } = found;
    match &record.state {
        State::Completed { .. } => {
            "it has happened, and happens once more; the stored result is lost".to_owned()
        }
        State::Pending { attempt, .. } if record.protected_for(*now).is_some() => format!(
            "attempt {attempt} is running and loses its claim: its effect and that of the next attempt may both happen"
        ),
        State::Pending { attempt, .. } => {
            format!("attempt {attempt} ended without an outcome: its effect may happen once more")
        }
        State::Released { attempt, .. } => {
            format!(
                "failed in {}: partial effects may happen once more",
                counted(u64::from(*attempt), "attempt")
            )
        }
        State::Failed { attempt, .. } => {
            format!(
                "given up after {}: partial effects may happen once more",
                counted(u64::from(*attempt), "attempt")
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use oncegate::core::record::{Record, Recovery, StoreTime, TAIL, Token, TokenTag};

    use super::*;

    fn said(state: State, left: Duration) -> String {
        let now = StoreTime::from_millis(1_000_000);
        effect(&RecordSnapshot {
            now,
            record: Record {
                expires_at: now + left,
                fingerprint: None,
                state,
            },
        })
    }

    fn pending() -> State {
        State::Pending {
            token: Token::from_bits(1),
            attempt: 2,
            recovery: Recovery::None,
            fencing_token: None,
        }
    }

    #[test]
    fn each_state_says_which_effect_may_repeat() {
        let by = TokenTag([1; 4]);
        assert!(
            said(
                State::Completed {
                    by,
                    result: Vec::new().into()
                },
                TAIL
            )
            .contains("happens once more")
        );
        assert!(said(pending(), TAIL + Duration::from_secs(9)).contains("attempt 2 is running"));
        assert!(said(pending(), TAIL - Duration::from_secs(9)).contains("without an outcome"));
        let reason = String::new();
        let failed = State::Failed {
            by,
            attempt: 3,
            handed_over: true,
            reason,
        };
        assert!(said(failed, TAIL).contains("given up after 3 attempts"));
    }
}
