//! The steps that `oncegate complete` and `oncegate give-up` have in common: show the record, ask,
//! and record what the operator says.

use oncegate::admin::{self, Decided, Decision};
use oncegate::core::key::StoreKey;
use oncegate::core::record::State;
use oncegate::core::store::RecordSnapshot;
use oncegate::journal::JournalEntry;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::change::{ChangeArgs, Written};
use crate::exit::{Exit, Problem};
use crate::inspect;
use crate::output;
use crate::record::{Found, RecordArgs};

/// The words of one of the commands.
pub(crate) struct DecisionWords {
    /// The format of the `--json` document.
    pub(crate) schema: &'static str,
    /// The journal's event.
    pub(crate) event: &'static str,
    /// The consequence, for the question and the answer.
    pub(crate) consequence: &'static str,
    /// The change that needs the confirmation, for the error where there is no terminal.
    pub(crate) change: &'static str,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct DecidedDocument<'a> {
    schema: &'static str,
    key: &'a str,
    /// The state when the command ended, as `oncegate inspect` names it; after a change, the one
    /// that it had before.
    state: &'static str,
    /// `done`, `runs`, `final`, `changed` or `dry_run`.
    outcome: &'static str,
    /// `true` if the record was changed.
    done: bool,
}

pub(crate) async fn run(
    record: &RecordArgs,
    change: &ChangeArgs,
    answer: &AnswerArgs,
    words: &DecisionWords,
    decision: impl FnOnce(&Found, &Written) -> Decision + Send,
) -> Result<Exit, Problem> {
    let found = within(answer.timeout, Box::pin(record.find())).await?;
    let told = Told { answer, words };
    if !answer.json {
        let text = inspect::words(&found.key, found.record.as_ref());
        output::answer(&format!("{text}then       {}", words.consequence))?;
    }
    if change.dry_run {
        return told.tell(&found.key, found.record.as_ref(), "dry_run");
    }
    let question = format!("{}: change the record above?", words.consequence);
    let journal = change.begin(&question, words.change).await?;
    journal.note_now(entry(&found, &format!("{}_begins", words.event)))?;
    let decision = decision(&found, &journal);
    let deciding = decide(&found, &decision);
    let (outcome, record) = match within(answer.timeout, deciding).await? {
        Decided::Done => ("done", found.record.clone()),
        Decided::Runs(record) => ("runs", Some(record)),
        Decided::Final(record) => ("final", Some(record)),
        Decided::Changed(record) => ("changed", record),
    };
    let event = match outcome {
        "done" => words.event.to_owned(),
        _ => format!("{}_refused", words.event),
    };
    journal.note_now(entry(&found, &event))?;
    told.tell(&found.key, record.as_ref(), outcome)
}

fn entry(found: &Found, event: &str) -> JournalEntry {
    let entry = JournalEntry::now(event).key(&found.key);
    match &found.origin {
        Some(origin) => entry.origin(origin),
        None => entry,
    }
}

async fn decide(found: &Found, decision: &Decision) -> Result<Decided, Problem> {
    let seen = found.record.as_ref();
    Ok(admin::decide(&*found.opened.store, &found.key, seen, decision).await?)
}

struct Told<'a> {
    answer: &'a AnswerArgs,
    words: &'a DecisionWords,
}

impl Told<'_> {
    /// Tells the outcome, and returns the exit code.
    fn tell(
        &self,
        key: &StoreKey,
        record: Option<&RecordSnapshot>,
        outcome: &'static str,
    ) -> Result<Exit, Problem> {
        let done = outcome == "done";
        let exit = if done || outcome == "dry_run" {
            Exit::Yes
        } else {
            Exit::No
        };
        if self.answer.json {
            output::answer_json(&DecidedDocument {
                schema: self.words.schema,
                key: key.as_str(),
                state: inspect::state(record),
                outcome,
                done,
            })?;
            return Ok(exit);
        }
        let text = match outcome {
            "done" => self.words.consequence.to_owned(),
            "dry_run" => "nothing was changed (--dry-run)".to_owned(),
            "runs" => "nothing was changed: an attempt runs now, or its process has died and its lease is not over; \
                       wait for its end, and look again"
                .to_owned(),
            "final" => format!("nothing was changed: {}", finality(record)),
            _ => "nothing was changed: the record has changed meanwhile; it is now".to_owned(),
        };
        eprintln!("oncegate: {text}");
        if !matches!(outcome, "done" | "dry_run") {
            output::answer(&inspect::words(key, record))?;
        }
        Ok(exit)
    }
}

fn finality(record: Option<&RecordSnapshot>) -> &'static str {
    match record.map(|record| &record.record.state) {
        Some(State::Failed { .. }) => "it is given up already",
        _ => "it is completed already",
    }
}
