//! `oncegate inspect`: shows what the store holds for a key.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use oncegate::codec::describe_stored;
use oncegate::core::key::StoreKey;
use oncegate::core::record::{FencingToken, Recovery, State};
use oncegate::core::store::RecordSnapshot;
use oncegate::journal::{JournalEntry, JournalFile};
use serde::Serialize;
use tracing::warn;

use crate::args::{AnswerArgs, within};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table, plain, span};
use crate::promise::Promised;
use crate::record::{Found, RecordArgs};
use crate::stores::Opened;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.inspect/1";

/// The most entries of each journal that are shown.
const ENTRIES_MOST: u32 = 100;

/// Show what the store holds for one key, and what the next delivery would do
///
/// The key is given as it appears in logs and dead letters, or derived from a message. Exit code 1:
/// there is no record.
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    record: RecordArgs,

    /// Also show this journal's entries for the key, besides the journal that an SQL store may have
    #[arg(long, value_name = "FILE", env = "ONCEGATE_JOURNAL")]
    journal: Option<PathBuf>,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`. Times are in milliseconds from now, on the store's clock.
#[derive(Debug, Default, Serialize)]
struct InspectDocument {
    schema: &'static str,
    key: String,
    /// `absent`, `pending`, `released`, `completed` or `failed`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u8>,
    /// `true` if an attempt ever ended without an outcome.
    #[serde(skip_serializing_if = "Option::is_none")]
    recovered: Option<bool>,
    /// The time until the lease expires, or until the retry is due; 0 when that is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    protected_for_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fencing_token: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    handed_over: Option<bool>,
    fingerprinted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in_ms: Option<u64>,
    /// The promise of the store with its settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    promise: Option<Promised>,
    /// The journals' entries for the key, the oldest first.
    #[serde(skip_serializing_if = "Option::is_none")]
    journal: Option<Vec<JournalEntry>>,
}

pub(crate) async fn run(args: &InspectArgs) -> Result<Exit, Problem> {
    let (
        Found {
            opened,
            key,
            record: found,
            ..
        },
        promise,
    ) = within(args.answer.timeout, Box::pin(read(args))).await?;
    let of_store = within(args.answer.timeout, of_store(&opened, &key)).await?;
    let journal = told(
        args.journal
            .as_deref()
            .map(|path| entries(path, &key))
            .transpose()?,
        of_store,
    );
    if args.answer.json {
        let document = InspectDocument {
            promise: Some(promise),
            journal,
            ..document(&key, found.as_ref())
        };
        output::answer_json(&document)?;
    } else {
        let mut store = Table::default();
        promise.tell(&mut store);
        let history = journal.map(|entries| history(&entries)).unwrap_or_default();
        output::answer(&format!(
            "{}\n{}{history}",
            words(&key, found.as_ref()),
            store.render()
        ))?;
    }
    Ok(if found.is_some() { Exit::Yes } else { Exit::No })
}

async fn read(args: &InspectArgs) -> Result<(Found, Promised), Problem> {
    let found = args.record.find().await?;
    let promise = Promised::by(&*found.opened.store).await;
    Ok((found, promise))
}

pub(crate) fn words(key: &StoreKey, found: Option<&RecordSnapshot>) -> String {
    let mut table = Table::default();
    table.text("key", key);
    let Some(found @ RecordSnapshot { now, record }) = found else {
        table.text("state", "absent");
        table.text("next", "a delivery would run the handler, as attempt 1");
        return table.render();
    };
    let next = tell_state(&mut table, &record.state, record.protected_for(*now));
    table.text("next", next);
    table.text(
        "content",
        if record.fingerprint.is_some() {
            "compared by a fingerprint"
        } else {
            "not compared"
        },
    );
    table.text("forgotten", format!("in {}", span(left(found))));
    table.render()
}

/// Describes the state, and returns what a delivery would do. `protected` is the time for which the
/// record is claimed or waits.
fn tell_state(table: &mut Table, state: &State, protected: Option<Duration>) -> String {
    match state {
        State::Pending {
            token,
            attempt,
            recovery,
            fencing_token,
        } => {
            table.text("state", "pending: claimed, and not finished");
            table.text("attempt", format!("{attempt}{}", recovery_words(*recovery)));
            table.text("owner", format!("{:?}", token.tag()));
            fencing_token_words(table, *fencing_token);
            if let Some(left) = protected {
                let lease = format!("{} left, unless its owner extends it", span(left));
                table.text("lease", lease);
                format!("a delivery would wait, for at most {}", span(left))
            } else {
                table.text(
                    "lease",
                    "over: its owner has ended without an outcome, or lost the store",
                );
                next_attempt(*attempt)
            }
        }
        State::Released {
            attempt,
            recovery,
            fencing_token,
            reason,
            ..
        } => {
            table.text("state", "released: waiting for its next attempt");
            let earlier = if recovery.recovered() {
                ", one of which ended without an outcome"
            } else {
                ""
            };
            table.text("attempts", format!("{attempt} counted{earlier}"));
            fencing_token_words(table, *fencing_token);
            table.text("reason", reason_words(reason));
            match protected {
                Some(left) => format!("a delivery would run the handler after {}", span(left)),
                None => next_attempt(*attempt),
            }
        }
        State::Completed { by, result } => {
            table.text("state", "completed");
            table.text("result", describe_stored(result));
            table.text("owner", format!("{by:?}"));
            "a delivery would get that result, and run nothing".to_owned()
        }
        State::Failed {
            attempt,
            handed_over,
            reason,
            ..
        } => {
            table.text("state", "failed: given up");
            table.text("attempts", attempt.to_string());
            table.text("reason", reason_words(reason));
            let (letter, next) = if *handed_over {
                ("written", "write no second dead letter")
            } else {
                ("not known to be written", "write the dead letter")
            };
            table.text("dead letter", letter);
            format!("a delivery would run nothing, and {next}")
        }
    }
}

fn next_attempt(attempt: u8) -> String {
    let next = attempt.saturating_add(1);
    format!("a delivery would run the handler, as attempt {next}")
}

fn reason_words(reason: &str) -> &str {
    if reason.is_empty() {
        "none given"
    } else {
        reason
    }
}

fn recovery_words(recovery: Recovery) -> &'static str {
    match recovery {
        Recovery::None => "",
        Recovery::Earlier => {
            "; an earlier one ended without an outcome, so its effect may have happened"
        }
        Recovery::Takeover => {
            "; the one before ended without an outcome, so its effect may have happened"
        }
    }
}

fn fencing_token_words(table: &mut Table, fencing_token: Option<FencingToken>) {
    if let Some(FencingToken(number)) = fencing_token {
        table.text("fencing token", number.to_string());
    }
}

/// The last entries for the key in the store's own journal. A user without the right to read it
/// still sees the record.
async fn of_store(opened: &Opened, key: &StoreKey) -> Result<Vec<JournalEntry>, Problem> {
    match opened.history(key, ENTRIES_MOST).await {
        Err(problem) if problem.exit() == Exit::Configuration => {
            warn!("the store's journal is not shown: {problem}");
            Ok(Vec::new())
        }
        answer => answer,
    }
}

/// The entries of both journals in the order of time; `None` if there is no journal.
fn told(
    of_file: Option<Vec<JournalEntry>>,
    of_store: Vec<JournalEntry>,
) -> Option<Vec<JournalEntry>> {
    if of_file.is_none() && of_store.is_empty() {
        return None;
    }
    let mut told = of_store;
    told.extend(of_file.unwrap_or_default());
    told.sort_by_key(|entry| entry.at_ms);
    Some(told)
}

/// The last entries for the key in a journal file.
fn entries(path: &Path, key: &StoreKey) -> Result<Vec<JournalEntry>, Problem> {
    match JournalFile::about(path, key.as_str(), ENTRIES_MOST as usize) {
        // The environment may name a journal that does not exist yet.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => {
            let text = format!("--journal: {} cannot be read: {error}", path.display());
            Err(Problem::configuration(text))
        }
        Ok(entries) => Ok(entries),
    }
}

fn history(entries: &[JournalEntry]) -> String {
    let mut text = format!(
        "\njournal, the last {} entries (~: a best effort, others may be missing):\n",
        entries.len()
    );
    for JournalEntry {
        at_ms,
        event,
        attempt,
        run,
        origin,
        by,
        reason,
        best_effort,
        ..
    } in entries
    {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(*at_ms);
        let mark = if *best_effort { '~' } else { ' ' };
        text.push_str(&format!("{mark} {}  {}", output::time(at), plain(event)));
        let attempt = attempt.map(|attempt| format!("attempt {attempt}"));
        let run = run.as_ref().map(|run| format!("run {run}"));
        let by = by.as_ref().map(|by| format!("by {by}"));
        let words = [
            attempt.as_ref(),
            run.as_ref(),
            origin.as_ref(),
            by.as_ref(),
            reason.as_ref(),
        ];
        for word in words.into_iter().flatten() {
            text.push_str(&format!("  {}", plain(word)));
        }
        text.push('\n');
    }
    text
}

/// Adds how long the store keeps the record.
fn left(found: &RecordSnapshot) -> Duration {
    Duration::from_millis(
        found
            .record
            .expires_at
            .millis()
            .saturating_sub(found.now.millis()),
    )
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The state as `--json` names it.
pub(crate) fn state(found: Option<&RecordSnapshot>) -> &'static str {
    match found.map(|found| &found.record.state) {
        None => "absent",
        Some(State::Pending { .. }) => "pending",
        Some(State::Released { .. }) => "released",
        Some(State::Completed { .. }) => "completed",
        Some(State::Failed { .. }) => "failed",
    }
}

fn document(key: &StoreKey, found: Option<&RecordSnapshot>) -> InspectDocument {
    let base = InspectDocument {
        schema: SCHEMA,
        key: key.to_string(),
        state: state(found),
        ..InspectDocument::default()
    };
    let Some(found @ RecordSnapshot { now, record }) = found else {
        return base;
    };
    let base = InspectDocument {
        fingerprinted: record.fingerprint.is_some(),
        expires_in_ms: Some(millis(left(found))),
        ..base
    };
    let protected_for_ms = Some(record.protected_for(*now).map_or(0, millis));
    match &record.state {
        State::Pending {
            attempt,
            recovery,
            fencing_token,
            ..
        } => InspectDocument {
            attempt: Some(*attempt),
            recovered: Some(recovery.recovered()),
            fencing_token: fencing_token.map(|FencingToken(number)| number),
            protected_for_ms,
            ..base
        },
        State::Released {
            attempt,
            recovery,
            fencing_token,
            reason,
            ..
        } => InspectDocument {
            attempt: Some(*attempt),
            recovered: Some(recovery.recovered()),
            fencing_token: fencing_token.map(|FencingToken(number)| number),
            reason: Some(reason.clone()),
            protected_for_ms,
            ..base
        },
        State::Completed { result, .. } => InspectDocument {
            result: Some(describe_stored(result)),
            result_bytes: Some(result.len()),
            ..base
        },
        State::Failed {
            attempt,
            handed_over,
            reason,
            ..
        } => InspectDocument {
            attempt: Some(*attempt),
            handed_over: Some(*handed_over),
            reason: Some(reason.clone()),
            ..base
        },
    }
}

#[cfg(test)]
mod tests;
