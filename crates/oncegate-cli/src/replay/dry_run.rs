//! Reports what a replay of topics would run.

use std::time::Instant;

use indicatif::ProgressBar;
use oncegate::admin::dry_run::{Examination, Known, ReplayReport};
use oncegate::kafka::TopicReader;
use serde::Serialize;

use super::args::ReplayArgs;
use crate::args::within;
use crate::examined::{Examined, progress};
use crate::exit::{Exit, Problem};
use crate::output::{self, grouped};
use crate::promise::Promised;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.replay/1";

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
    /// The offsets behind open transactions, which are not examined.
    withheld: u64,
    #[serde(flatten)]
    report: &'a ReplayReport,
}

pub(super) async fn run(args: &ReplayArgs) -> Result<Exit, Problem> {
    let started = Instant::now();
    let (examined, promise, known, (report, withheld)) =
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
            withheld,
            report: &report,
        })?;
    } else {
        let mut text = args.text(&examined, &promise, &report);
        if withheld > 0 {
            let withheld = grouped(withheld);
            text.push_str(&format!(
                "\n{withheld} offsets behind an open transaction are not examined."
            ));
        }
        output::answer(&text)?;
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

/// The report of a dry run, and the number of offsets that it did not examine.
type DryRunResult = (ReplayReport, u64);

async fn dry_run(args: &ReplayArgs) -> Result<(Examined, Promised, Known, DryRunResult), Problem> {
    let examined = args.examined.open().await?;
    let readers = examined.readers(&args.examined.window).await?;
    let withheld = readers.iter().map(TopicReader::withheld).sum();
    let (promise, known, report) = examine(&examined, readers).await?;
    Ok((examined, promise, known, (report, withheld)))
}

pub(super) async fn examine(
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
