//! `oncegate replay`: reports what a replay of topics would run, without running or claiming
//! anything; with `--queue`, what the messages of a queue would (`queue`); with `--run`, runs what
//! is missing (`repair`, with the source `missing`).

use std::time::Instant;

use indicatif::ProgressBar;
use oncegate::admin::dry_run::{Examination, Example, Known, ReplayReport};
use oncegate::kafka::TopicReader;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::examined::{Examined, ExaminedArgs, progress};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table, grouped};
use crate::promise::Promised;

mod missing;
mod queue;
mod repair;

use queue::QueueArgs;
use repair::RepairArgs;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.replay/1";

/// Show what a replay of topics or of a queue would run, or run what is missing
///
/// It claims and changes nothing, unless --run says so. It reads each topic, or a window of it, to
/// the end it had at the start, derives the key of every message, and reads all records in the
/// store. It joins no consumer group, and may run beside the consumers.
///
/// Exit code 0: a replay would change nothing. No handler would run, none is running, and no
/// message would become a dead letter. A message without a derivable key counts as a dead letter,
/// so that a wrong --key does not look like a success. With --allow-dead-letters, dead letters are
/// reported and do not change the exit code.
///
/// With --run, the messages that the consumer group has acknowledged and that have no record go
/// through the gate and the handler of --config, after a confirmation. SIGTERM lets running work
/// end. Exit code 0: all of it is handled; 1: some became dead letters, or --limit left some; 130:
/// stopped before the end, and the same command continues.
///
/// With --queue, the messages that are in a queue of SQS or RabbitMQ now are examined: above all
/// dead letters before a redrive. It receives the messages, holds them meanwhile and returns them
/// to the queue at the end. So it uses up one receive of every message, which counts for a redrive
/// policy or the delivery limit of a quorum queue, and consumers do not see the messages while it
/// runs; therefore it requires --use-up-a-receive. It refuses FIFO queues, which deliver nothing
/// behind the first messages of a group while those are held. Exit code 0 also says that all
/// messages were seen.
#[derive(Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    examined: ExaminedArgs,

    /// Exit with 0 although messages would go to the dead letters, as long as no handler would run
    #[arg(long)]
    allow_dead_letters: bool,

    #[command(flatten)]
    answer: AnswerArgs,

    #[command(flatten)]
    queue: QueueArgs,

    #[command(flatten)]
    repair: RepairArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct ReplayDocument<'a> {
    schema: &'static str,
    topics: &'a [String],
    store: String,
    /// The promise of the store with its settings.
    promise: &'a Promised,
    scope: &'a str,
    /// `same`, `other_fingerprint` or `nothing`: what the store's descriptor of the scope says.
    known: &'static str,
    /// `true` if the exit code is 0.
    passed: bool,
    seconds: f64,
    #[serde(flatten)]
    report: &'a ReplayReport,
}

pub(crate) async fn run(args: &ReplayArgs) -> Result<Exit, Problem> {
    if args.repair.run {
        return Box::pin(repair::run(args)).await;
    }
    if let Some(name) = &args.queue.name {
        return Box::pin(queue::run(args, name)).await;
    }
    let started = Instant::now();
    let (examined, promise, known, report) =
        within(args.answer.timeout, Box::pin(dry_run(args))).await?;
    let took = started.elapsed();
    let passed = args.passed(&report);
    if args.answer.json {
        output::answer_json(&ReplayDocument {
            schema: SCHEMA,
            topics: &examined.topics,
            store: examined.gate.store_name.clone(),
            promise: &promise,
            scope: examined.gate.scope.as_str(),
            known: match known {
                Known::Same => "same",
                Known::OtherFingerprint => "other_fingerprint",
                Known::Nothing => "nothing",
            },
            passed,
            seconds: took.as_secs_f64(),
            report: &report,
        })?;
    } else {
        output::answer(&args.text(&examined, &promise, &report))?;
        let rate = report.messages as f64 / took.as_secs_f64();
        eprintln!(
            "{} in {}, {} messages/s",
            grouped(report.messages),
            output::span(took),
            grouped(rate as u64)
        );
    }
    Ok(if passed { Exit::Yes } else { Exit::No })
}

async fn dry_run(args: &ReplayArgs) -> Result<(Examined, Promised, Known, ReplayReport), Problem> {
    let examined = args.examined.open().await?;
    let readers = examined.readers(&args.examined.window).await?;
    let (promise, known, report) = examine(&examined, readers).await?;
    Ok((examined, promise, known, report))
}

async fn examine(
    examined: &Examined,
    readers: Vec<TopicReader>,
) -> Result<(Promised, Known, ReplayReport), Problem> {
    let promise = Promised::by(&*examined.gate.store).await;
    let mut examination = examined.gate.dry_run().open().await?;
    let known = examination.known();
    examined.gate.tell(known);
    let bar = progress(readers.iter().map(TopicReader::total).sum());
    for mut reader in readers {
        read(&mut reader, &mut examination, &bar).await?;
    }
    let report = examination.finish().await?;
    bar.finish_and_clear();
    Ok((promise, known, report))
}

async fn read(
    reader: &mut TopicReader,
    examination: &mut Examination,
    bar: &ProgressBar,
) -> Result<(), Problem> {
    let before = bar.position();
    while let Some(messages) = reader.next_batch().await? {
        examination.add(messages).await?;
        bar.set_position(before + reader.position());
    }
    bar.set_position(before + reader.total());
    Ok(())
}

impl ReplayArgs {
    /// Returns whether it runs messages, and stops cleanly at a signal.
    pub(crate) fn runs(&self) -> bool {
        self.repair.run
    }

    fn passed(&self, report: &ReplayReport) -> bool {
        let settled = report.handler_runs() + report.unreadable == 0;
        report.changes_nothing() || (self.allow_dead_letters && settled)
    }

    fn text(&self, examined: &Examined, promise: &Promised, report: &ReplayReport) -> String {
        let mut table = Table::default();
        table.text("topic", examined.topics.join(", "));
        table.text("store", &examined.gate.store_name);
        promise.tell(&mut table);
        table.text("scope", examined.gate.scope.as_str());
        counts(&mut table, report);
        if examined.gate.fingerprint.is_some() {
            table.number("mismatched", report.mismatched);
            table.noted("not compared", report.uncompared, "counted above as well");
        }
        let mut text = table.render();
        examples(&mut text, report);
        text.push('\n');
        text.push_str(&self.verdict(report));
        text
    }

    fn verdict(&self, report: &ReplayReport) -> String {
        let parts = changes(report);
        let forgiven = if self.passed(report) {
            ", which is allowed"
        } else {
            ""
        };
        if parts.is_empty() {
            "A replay would change nothing.".to_owned()
        } else {
            format!(
                "Of {} messages, {parts}{forgiven}.",
                grouped(report.messages)
            )
        }
    }
}

/// Describes the messages that the store would not answer; empty when there are none.
fn changes(report: &ReplayReport) -> String {
    let parts: Vec<String> = [
        (report.would_run_again, "would run again"),
        (report.in_progress, "are in progress"),
        (report.waiting, "wait for a retry"),
        (report.unreadable, "have an unreadable record"),
        (report.dead_letters(), "would go to the dead letters"),
    ]
    .into_iter()
    .filter(|(count, _)| *count > 0)
    .map(|(count, what)| format!("{} {what}", grouped(count)))
    .collect();
    parts.join(", ")
}

/// Adds the first messages of each kind of finding.
fn examples(text: &mut String, report: &ReplayReport) {
    for (title, examples) in [
        ("would run again", &report.examples.would_run_again),
        (
            "failed, not in the dead letters",
            &report.examples.failed_not_handed_over,
        ),
        ("mismatched", &report.examples.mismatched),
        ("unreadable", &report.examples.unreadable),
        ("undecodable", &report.examples.undecodable),
    ] {
        list(text, title, examples);
    }
}

fn counted(exact: bool) -> &'static str {
    if exact {
        "counted one by one"
    } else {
        "estimated, standard error 0.81 %"
    }
}

fn counts(table: &mut Table, report: &ReplayReport) {
    table.number("messages", report.messages);
    table.noted(
        "distinct keys",
        report.distinct_keys,
        counted(report.distinct_keys_exact),
    );
    table.number("completed", report.completed);
    table.number("would run again", report.would_run_again);
    if report.would_run_again > 0 {
        table.noted(
            "  keys",
            report.would_run_again_keys,
            counted(report.would_run_again_keys_exact),
        );
        table.noted(
            "  without a record",
            report.without_record,
            "never run, or forgotten after the retention",
        );
        table.noted(
            "  abandoned",
            report.abandoned,
            "ended without an outcome, and the lease is over",
        );
        table.noted("  retry is due", report.retry_due, "failed or interrupted");
    }
    table.number("in progress", report.in_progress);
    table.number("waiting for a retry", report.waiting);
    table.noted("failed", report.failed_handed_over, "in the dead letters");
    table.noted(
        "failed",
        report.failed_not_handed_over,
        "not known to be in the dead letters",
    );
    table.noted(
        "unreadable",
        report.unreadable,
        "the store holds something else under the key",
    );
    table.noted("undecodable", report.undecodable, "no key can be made");
    for (kind, count) in &report.undecodable_by_kind {
        table.number(&format!("  {kind}"), *count);
    }
}

fn list(text: &mut String, title: &str, examples: &[Example]) {
    if examples.is_empty() {
        return;
    }
    text.push_str(&format!("\n{title}, the first {}:\n", examples.len()));
    for Example { origin, key, why } in examples {
        let key = key
            .as_deref()
            .map(|key| format!("  {key}"))
            .unwrap_or_default();
        text.push_str(&format!(
            "  {}{key}  {}\n",
            output::plain(origin),
            output::plain(why)
        ));
    }
}
