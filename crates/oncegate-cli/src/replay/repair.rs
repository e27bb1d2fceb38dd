//! `oncegate replay --run`: runs exactly the messages that have no record through the worker of
//! their consumer.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use oncegate::admin::dry_run::ReplayReport;
use oncegate::journal::JournalEntry;
use oncegate::kafka::{TopicReader, TopicWindow, committed_offsets};
use oncegate::observe::{Event, Observer};
use oncegate::{Attempt, Message};
use oncegate_worker::BeforeRun;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::args::ReplayArgs;
use super::dry_run::examine;
use super::missing::{DeliveryCounts, Missing, ReplayLimits};
use crate::change::Written;
use crate::configured;
use crate::examined::Examined;
use crate::exit::{Exit, Problem, not_opened};
use crate::output::{self, Table, counted};
use crate::run::{self, Feed};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.replay.run/1";

/// The answer of `--json`.
#[derive(Debug, Serialize)]
struct RepairDocument<'a> {
    schema: &'static str,
    topics: &'a [String],
    store: &'a str,
    scope: &'a str,
    /// Messages that the dry run has examined.
    messages: u64,
    /// Messages of these without a record; with --overdue, also those that are overdue.
    missing: u64,
    /// Messages that were given to the consumer.
    delivered: u64,
    /// Delivered messages that the handler has completed.
    handled: u64,
    /// Delivered messages that became dead letters.
    dead_letters: u64,
    /// Delivered messages that a record has answered: another message of the same key was handled
    /// meanwhile.
    duplicates: u64,
    /// Delivered messages that are not finished.
    unfinished: u64,
    /// `true` if all that was missing is finished.
    complete: bool,
    seconds: f64,
}

/// Counts what becomes of the messages.
#[derive(Debug, Default)]
struct ReplayOutcomes {
    handled: AtomicU64,
    dead_letters: AtomicU64,
}

impl Observer for ReplayOutcomes {
    fn observe(&self, event: Event<'_>) {
        match event {
            Event::Completed { .. } => self.handled.fetch_add(1, Relaxed),
            Event::DeadLettered { .. } => self.dead_letters.fetch_add(1, Relaxed),
            _ => 0,
        };
    }
}

/// The offsets to read of each topic, by partition.
type Offsets = Vec<BTreeMap<i32, Range<i64>>>;

pub(super) async fn run(args: &ReplayArgs) -> Result<Exit, Problem> {
    let started = Instant::now();
    args.examined.check_unaltered()?;
    let planned = tokio::select! {
        biased;
        () = crate::signals::stop() => return Err(Problem::new(Exit::Interrupted, "interrupted: nothing was run")),
        planned = plan(args) => planned?,
    };
    let Some(Planned {
        examined,
        offsets,
        report,
        journal,
    }) = planned
    else {
        return Ok(Exit::Yes);
    };
    let missing = args.repair.missing(&report);
    let readers = open(&examined, &offsets).await?;
    let selector = examined
        .gate
        .dry_run()
        .selector(args.repair.which())
        .await?;
    let limits = ReplayLimits {
        messages: args.repair.limit,
        per_second: args.repair.rate,
    };
    let source = Missing::new(readers, selector, limits);
    let counts = source.counts();
    let outcomes = Arc::new(ReplayOutcomes::default());
    let stop = CancellationToken::new();
    let unwritten = CancellationToken::new();
    let feed = Feed {
        source: Arc::new(source),
        before: note_each_run(&examined, Arc::clone(&journal), &stop, &unwritten)?,
        observer: Arc::clone(&outcomes) as Arc<dyn Observer>,
    };
    let loaded = args
        .examined
        .load()?
        .ok_or_else(|| configured::missing("--config"))?;
    let (name, settings) = args.examined.choose(&loaded)?;
    let mut settings = settings.clone();
    if settings.runtime.fail_open_after.take().is_some() {
        warn!(
            "`fail_open_after` does not apply to a replay: without its record, a message may run twice"
        );
    }
    let running = run::feed(&loaded, name, &settings, feed, &stop);
    let ended = run::until_ended(running, &stop, || "running work".to_owned()).await;
    journal.note_now(JournalEntry::now("replay_ends").origin(examined.topics.join(", ")))?;
    ended?;
    if unwritten.is_cancelled() {
        return Err(Problem::new(
            Exit::Unreachable,
            "the journal can no longer be written, so the replay has stopped",
        ));
    }
    let document = document(&examined, &report, missing, &counts, &outcomes, started);
    answer(args, &document, &stop)
}

/// The messages that will be run.
struct Planned {
    examined: Examined,
    offsets: Offsets,
    report: ReplayReport,
    journal: Arc<Written>,
}

/// The dry run and the confirmation; `None` when nothing is missing.
async fn plan(args: &ReplayArgs) -> Result<Option<Planned>, Problem> {
    let examined = args.examined.open().await?;
    let offsets = acknowledged(args, &examined).await?;
    let readers = open(&examined, &offsets).await?;
    let (promise, _, report) = Box::pin(examine(&examined, readers)).await?;
    let missing = args.repair.missing(&report);
    let dry_run = args.text(&examined, &promise, &report);
    // With --json, standard output has the answer alone.
    if args.answer.json {
        eprintln!("{dry_run}");
    } else {
        output::answer(&dry_run)?;
    }
    if missing == 0 {
        eprintln!(
            "oncegate: nothing without a record, so nothing is run{}",
            args.repair.overdue_hint(&report)
        );
        if args.answer.json {
            output::answer_json(&RepairDocument::nothing(&examined, &report))?;
        }
        return Ok(None);
    }
    let scope = examined.gate.scope.as_str();
    let most = args
        .repair
        .limit
        .map_or(missing, |limit| limit.min(missing));
    let what = format!(
        "run {} through the handler of {scope}",
        counted(most, "message")
    );
    eprintln!("oncegate: this will {what}");
    let journal = args.repair.change().begin("go on?", &what).await?;
    journal.note_now(JournalEntry::now("replay_begins").origin(examined.topics.join(", ")))?;
    Ok(Some(Planned {
        examined,
        offsets,
        report,
        journal: Arc::new(journal),
    }))
}

/// The offsets of the window that the consumer group has acknowledged. The others will be delivered
/// to it. All of them, if the group has committed nothing.
async fn acknowledged(args: &ReplayArgs, examined: &Examined) -> Result<Offsets, Problem> {
    let Examined {
        brokers,
        group,
        properties,
        ..
    } = examined;
    let mut committed = Vec::new();
    for topic in &examined.topics {
        let offsets = committed_offsets(brokers, group, topic, properties).await;
        committed.push(offsets.map_err(|error| not_opened(&error))?);
    }
    let readers = examined.readers(&args.examined.window).await?;
    let windows = readers.iter().map(|reader| reader.offsets().clone());
    if committed.iter().all(BTreeMap::is_empty) {
        warn!(
            group,
            "the consumer group has committed nothing, so every message counts as acknowledged"
        );
        return Ok(windows.collect());
    }
    let acknowledged = windows.zip(&committed);
    Ok(acknowledged
        .map(|(window, committed)| cut(window, committed))
        .collect())
}

/// Leaves of each partition what is before its committed position.
fn cut(
    window: BTreeMap<i32, Range<i64>>,
    committed: &BTreeMap<i32, i64>,
) -> BTreeMap<i32, Range<i64>> {
    window
        .into_iter()
        .filter_map(|(partition, Range { start, end })| {
            let end = end.min(committed.get(&partition).copied().unwrap_or(start));
            (start < end).then_some((partition, start..end))
        })
        .collect()
}

/// Opens the topics at these offsets. A topic without any is left out.
async fn open(examined: &Examined, offsets: &Offsets) -> Result<Vec<TopicReader>, Problem> {
    let mut readers = Vec::new();
    for (topic, offsets) in examined
        .topics
        .iter()
        .zip(offsets)
        .filter(|(_, offsets)| !offsets.is_empty())
    {
        readers.push(
            examined
                .reader(topic, TopicWindow::exactly(offsets.clone()))
                .await?,
        );
    }
    Ok(readers)
}

/// Writes an entry before each run. A run that cannot be written to the journal does not happen,
/// and ends the replay.
fn note_each_run(
    examined: &Examined,
    journal: Arc<Written>,
    stop: &CancellationToken,
    unwritten: &CancellationToken,
) -> Result<BeforeRun, Problem> {
    let key = examined.gate.key.compile(&examined.gate.scope)?;
    let stop = stop.clone();
    let unwritten = unwritten.clone();
    Ok(BeforeRun::new(
        move |message: &Message, attempt: &Attempt| {
            let mut entry = JournalEntry::now("replayed")
                .origin(message.origin())
                .attempt(attempt.number());
            if let Ok(key) = key.derive(message.route(), message) {
                entry = entry.key(key);
            }
            journal.note(entry).map_err(|problem| {
                unwritten.cancel();
                stop.cancel();
                problem.to_string()
            })
        },
    ))
}

impl<'a> RepairDocument<'a> {
    fn nothing(examined: &'a Examined, report: &ReplayReport) -> Self {
        Self {
            schema: SCHEMA,
            topics: &examined.topics,
            store: &examined.gate.store_name,
            scope: examined.gate.scope.as_str(),
            messages: report.messages,
            missing: 0,
            delivered: 0,
            handled: 0,
            dead_letters: 0,
            duplicates: 0,
            unfinished: 0,
            complete: true,
            seconds: 0.0,
        }
    }
}

fn document<'a>(
    examined: &'a Examined,
    report: &ReplayReport,
    missing: u64,
    counts: &DeliveryCounts,
    outcomes: &ReplayOutcomes,
    started: Instant,
) -> RepairDocument<'a> {
    let [handled, dead_letters] =
        [&outcomes.handled, &outcomes.dead_letters].map(|count| count.load(Relaxed));
    let delivered = counts.delivered();
    let unfinished = counts.unfinished();
    RepairDocument {
        missing,
        delivered,
        handled,
        dead_letters,
        duplicates: (delivered - unfinished).saturating_sub(handled + dead_letters),
        unfinished,
        complete: unfinished == 0 && counts.is_at_end(),
        seconds: started.elapsed().as_secs_f64(),
        ..RepairDocument::nothing(examined, report)
    }
}

fn answer(
    args: &ReplayArgs,
    document: &RepairDocument<'_>,
    stop: &CancellationToken,
) -> Result<Exit, Problem> {
    if args.answer.json {
        output::answer_json(document)?;
    } else {
        let mut table = Table::default();
        table.number("delivered", document.delivered);
        table.number("handled", document.handled);
        table.noted(
            "duplicates",
            document.duplicates,
            "another message of the same key was handled meanwhile",
        );
        table.number("dead letters", document.dead_letters);
        table.number("unfinished", document.unfinished);
        output::answer(&table.render())?;
    }
    match (document.complete, stop.is_cancelled()) {
        (true, _) if document.dead_letters == 0 => Ok(Exit::Yes),
        (false, true) => Err(Problem::new(
            Exit::Interrupted,
            "stopped before the end; the same command continues",
        )),
        _ => Ok(Exit::No),
    }
}
