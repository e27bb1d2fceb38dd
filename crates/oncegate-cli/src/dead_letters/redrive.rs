//! `oncegate dead-letters redrive`: sends messages back to their origins.

use oncegate::admin::dead_letter_reader::{DeadLetterReader, StoredDeadLetter};
use oncegate::admin::{Redrive, RedriveError, Redriven, Step};
use oncegate::journal::JournalEntry;
use serde::Serialize;

use super::filter::FilterArgs;
use super::place::PlaceArgs;
use crate::args::{AnswerArgs, within};
use crate::change::{ChangeArgs, Written};
use crate::configured::{NamedStore, StoreFlag};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table, grouped, plain};
use crate::sources::{LetterPlace, check_positions};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.dead-letters.redrive/1";

/// The most dead letters that could not be sent and are named in the answer.
const TROUBLES_NAMED_MOST: usize = 20;

/// Send the messages of dead letters back to their origins, through the gate
///
/// For each dead letter: read its record; skip it if the message was completed since, or is in
/// progress; reopen the record, unless it has changed; send the message, on its first route, and
/// wait until the broker has it. A message that is sent twice is answered by its record, so a
/// redrive may be interrupted and started again at any moment.
///
/// In a topic the dead letters stay. The progress of a redrive is kept as the offsets of a consumer
/// group, whose name is made of topic, filter and destination: the same command continues where the
/// last one ended. From a queue, dead letters that were sent are deleted.
///
/// A store that does not know the scope of the dead letters, or has no record of a message that has
/// failed there, is taken for the wrong one: consumers would acknowledge the messages as known
/// failures, and they would be lost.
///
/// Exit code 1: some dead letters could not be sent and need an operator. 78: the store does not
/// know the scope.
#[derive(Debug, clap::Args)]
pub(crate) struct RedriveArgs {
    #[command(flatten)]
    place: PlaceArgs,

    #[command(flatten)]
    filter: FilterArgs,

    #[command(flatten)]
    store: StoreFlag,

    /// Send all to this topic or queue, whose consumers must take routes from headers [default:
    /// each to its origin]
    #[arg(long, value_name = "NAME")]
    to: Option<String>,

    /// Send at most this many messages a second [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rate: Option<u32>,

    /// The consumer group that keeps the progress in a topic [default: made of topic, filter and
    /// destination]
    #[arg(long, value_name = "GROUP", conflicts_with = "queue")]
    progress: Option<String>,

    /// Also send messages whose records are missing from the store: only when they have expired or
    /// were lost there
    #[arg(long)]
    without_records: bool,

    /// Keep no progress, and begin at the first dead letter of the topic
    #[arg(long, conflicts_with_all = ["queue", "progress"])]
    no_progress: bool,

    #[command(flatten)]
    change: ChangeArgs,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct RedriveDocument<'a> {
    schema: &'static str,
    place: &'a str,
    store: String,
    dry_run: bool,
    /// The consumer group that keeps the progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<String>,
    #[serde(flatten)]
    redriven: Redriven,
    /// The first dead letters that could not be sent.
    troubles: &'a [Trouble],
}

/// A dead letter that could not be sent.
#[derive(Debug, Serialize)]
struct Trouble {
    at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    why: String,
}

/// A redrive, with its place and its store.
struct PlannedRedrive<'a> {
    args: &'a RedriveArgs,
    place: Box<dyn LetterPlace>,
    store: NamedStore,
}

pub(crate) async fn run(args: &RedriveArgs) -> Result<Exit, Problem> {
    let planned = PlannedRedrive::of(args)?;
    let mut troubles = Vec::new();
    let redriven = within(args.answer.timeout, async {
        let journal = if args.change.dry_run {
            None
        } else {
            Some(planned.begin().await?)
        };
        let mut letters = planned.place.open(planned.progress()).await?;
        let done = planned
            .redrive(&mut *letters, journal.as_ref(), &mut troubles)
            .await;
        // However the redrive ended: the progress is stored, and messages that were not sent are
        // returned.
        let closed = letters.close().await;
        let redriven = done?;
        closed?;
        Ok(redriven)
    })
    .await?;
    if args.answer.json {
        output::answer_json(&RedriveDocument {
            schema: SCHEMA,
            place: planned.place.name(),
            store: planned.store.redacted(),
            dry_run: args.change.dry_run,
            progress: planned.progress(),
            redriven,
            troubles: &troubles,
        })?;
    } else {
        output::answer(&planned.text(&redriven, &troubles))?;
    }
    Ok(if redriven.troubles() == 0 {
        Exit::Yes
    } else {
        Exit::No
    })
}

impl<'a> PlannedRedrive<'a> {
    fn of(args: &'a RedriveArgs) -> Result<Self, Problem> {
        let loaded = args.place.load(args.store.url.is_some())?;
        let place = args.place.find(loaded.as_ref(), args.filter.scope())?;
        check_positions(&*place, args.filter.positions())?;
        if args.progress.is_some() && !place.keeps_progress() {
            return Err(Problem::new(
                Exit::Usage,
                "--progress is for topics: a queue keeps no progress",
            ));
        }
        Ok(Self {
            args,
            place,
            store: args.store.or_of(loaded.as_ref())?,
        })
    }

    /// Prints what would be done, and asks for confirmation. A topic is counted first; a queue is
    /// not, because it would have to be received twice.
    async fn begin(&self) -> Result<Written, Problem> {
        let args = self.args;
        let place = self.place.name();
        let target = args.to.as_deref().unwrap_or("where they came from");
        let filter = args.filter.words();
        let filter = if filter.is_empty() {
            "all letters".to_owned()
        } else {
            format!("letters with {filter}")
        };
        let mut what = format!("send the messages of {filter} in {place} back to {target}");
        if self.place.keeps_progress() && !args.change.yes {
            let mut letters = self.place.open(self.progress()).await?;
            let dry = self.opened().await?.dry_run();
            let count = dry
                .run(&mut *letters, |stored| args.filter.judge(stored), |_| {})
                .await?;
            letters.close().await?;
            what = format!(
                "{what}: {} of {}",
                grouped(count.sent),
                grouped(count.wanted)
            );
        }
        eprintln!(
            "oncegate: this will {what}. Handlers run again, as attempt 1, for what is not completed"
        );
        let journal = args.change.begin("go on?", &what).await?;
        journal.note_now(JournalEntry::now("redrive_begins").origin(place))?;
        Ok(journal)
    }

    async fn redrive(
        &self,
        letters: &mut dyn DeadLetterReader,
        journal: Option<&Written>,
        troubles: &mut Vec<Trouble>,
    ) -> Result<Redriven, Problem> {
        let mut unwritten = None;
        let tell = |step: Step<'_>| {
            let Step {
                letter: stored,
                action,
            } = step;
            if action.is_trouble() && troubles.len() < TROUBLES_NAMED_MOST {
                troubles.push(trouble(stored, action));
            }
            if let (Some(journal), Some(_)) = (journal, action.to()) {
                let mut entry = JournalEntry::now("redriven").origin(&stored.place);
                if let Some(key) = stored.letter().and_then(|letter| letter.key.as_deref()) {
                    entry = entry.key(key);
                }
                unwritten = journal.note(entry).err().or(unwritten.take());
            }
        };
        let mut redrive = self.opened().await?;
        if self.args.change.dry_run {
            redrive = redrive.dry_run();
        }
        let redriven = redrive
            .run(letters, |stored| self.args.filter.judge(stored), tell)
            .await;
        if let Some(journal) = journal {
            journal.note_now(JournalEntry::now("redrive_ends").origin(self.place.name()))?;
        }
        let redriven = redriven?;
        unwritten.map_or(Ok(redriven), Err)
    }

    /// Connects to the store.
    async fn opened(&self) -> Result<Redrive, Problem> {
        let mut redrive = Redrive::new(self.store.open().await?.store);
        if let Some(to) = &self.args.to {
            redrive = redrive.to(to);
        }
        if self.args.without_records {
            redrive = redrive.without_records();
        }
        if let Some(rate) = self.args.rate {
            redrive = redrive.per_second(rate);
        }
        Ok(redrive)
    }

    /// Two redrives with different filters or destinations must not skip each other's dead letters.
    fn progress(&self) -> Option<String> {
        if !self.place.keeps_progress() || self.args.no_progress {
            return None;
        }
        if let Some(given) = &self.args.progress {
            return Some(given.clone());
        }
        let to = self.args.to.iter().map(|to| format!("to={to}")).collect();
        let words = [self.args.filter.words(), to]
            .join(" ")
            .trim()
            .replace(' ', ";");
        Some(if words.is_empty() {
            "oncegate-redrive".to_owned()
        } else {
            format!("oncegate-redrive;{words}")
        })
    }

    fn text(&self, redriven: &Redriven, troubles: &[Trouble]) -> String {
        let mut table = Table::default();
        table.text("dead letters", self.place.name());
        table.text("store", self.store.redacted());
        if let Some(progress) = self.progress() {
            table.text("progress", progress);
        }
        table.noted("seen", redriven.seen, "since the progress of this redrive");
        table.number("matching", redriven.wanted);
        let sent = if self.args.change.dry_run {
            "would be sent"
        } else {
            "sent"
        };
        table.noted(sent, redriven.sent, "");
        table.noted("  reopened", redriven.reopened, "their records said failed");
        table.noted("completed", redriven.completed, "passed over: done since");
        table.noted(
            "under way",
            redriven.under_way,
            "passed over: an attempt runs, or a retry waits",
        );
        table.noted(
            "sent already",
            redriven.sent_already,
            "passed over: another letter of the same message",
        );
        table.noted(
            "mismatched",
            redriven.mismatched,
            "their keys belong to messages with other content",
        );
        table.noted(
            "record missing",
            redriven.record_missing,
            "left: the store does not know that they failed",
        );
        table.noted(
            "unreadable",
            redriven.unreadable,
            "the store holds something else under the key",
        );
        table.noted("no way back", redriven.no_way_back, "see below");
        let mut text = table.render();
        for Trouble { at, key, why } in troubles {
            let key = key.as_deref().unwrap_or("-");
            text.push_str(&format!(
                "\n{}  {}\n  {}\n",
                plain(at),
                plain(key),
                plain(why)
            ));
        }
        text
    }
}

fn trouble(stored: &StoredDeadLetter, action: &oncegate::admin::RedriveAction) -> Trouble {
    use oncegate::admin::RedriveAction;
    let why = match action {
        RedriveAction::Unreadable(why) => format!("its record cannot be read: {why}"),
        RedriveAction::NoWayBack(why) => why.clone(),
        RedriveAction::RecordMissing => {
            "the store has no record of it, and is another one than its consumer's, or the record has expired there: name \
             the consumer's store, or send such messages with --without-records"
                .to_owned()
        }
        _ => "another message with other content has its key: reset that record first, if it may be lost"
            .to_owned(),
    };
    let key = stored.letter().and_then(|letter| letter.key.clone());
    Trouble {
        at: stored.place.to_string(),
        key,
        why,
    }
}

impl From<RedriveError> for Problem {
    fn from(error: RedriveError) -> Self {
        match error {
            RedriveError::Letters(error) => error.into(),
            RedriveError::Store(error) => error.into(),
            error @ RedriveError::UnknownScope(_) => Self::caused(Exit::Configuration, &error),
            error => Self::caused(Exit::Unreachable, &error),
        }
    }
}
