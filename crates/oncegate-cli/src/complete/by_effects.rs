//! Completes the records of the messages of a window whose effects are in a list.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::GateSettings;
use oncegate::admin::complete::{CompleteEffects, CompletingEffects, CompletionReport, Effects};
use oncegate::journal::JournalEntry;
use serde::Serialize;

use super::CompleteArgs;
use crate::args::within;
use crate::examined::{Examined, progress};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table, counted, grouped};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.complete-effects/1";

/// The answer of `--json`.
#[derive(Serialize)]
struct EffectsDocument<'a> {
    schema: &'static str,
    topics: &'a [String],
    store: &'a str,
    scope: &'a str,
    /// `true` if nothing was changed, so that the counts are those of what would be.
    dry_run: bool,
    seconds: f64,
    #[serde(flatten)]
    report: &'a CompletionReport,
}

pub(super) async fn run(args: &CompleteArgs) -> Result<Exit, Problem> {
    args.effects.check()?;
    let loaded = args.examined.load()?;
    let retention = match &loaded {
        Some(loaded) => args.examined.choose(loaded)?.1.gate.retention,
        None => GateSettings::DEFAULT.retention,
    };
    let opening = Box::pin(args.examined.open());
    let examined = within(args.answer.timeout, opening).await?;
    let work = Work {
        args,
        examined: &examined,
        retention,
    };
    let dry = within(args.answer.timeout, Box::pin(work.pass(true))).await?;
    if args.change.dry_run || dry.completed == 0 {
        return work.tell(&dry, true, Duration::ZERO);
    }
    if !args.answer.json {
        output::answer(&work.text(&dry, true))?;
    }
    let question = format!(
        "{} will count as done, and never run again: complete their records?",
        counted(dry.completed, "message")
    );
    let journal = args.change.begin(&question, "complete the records").await?;
    let scope = examined.gate.scope.as_str();
    journal.note_now(entry("complete_effects_begins", scope, &dry))?;
    let started = Instant::now();
    let report = within(args.answer.timeout, Box::pin(work.pass(false))).await?;
    journal.note_now(entry("complete_effects", scope, &report))?;
    work.tell(&report, false, started.elapsed())
}

/// The entry of a journal about all messages of a window.
fn entry(event: &str, scope: &str, report: &CompletionReport) -> JournalEntry {
    let CompletionReport {
        completed,
        messages,
        ..
    } = report;
    JournalEntry::now(format!("{event}: {completed} of {messages} messages")).key(scope)
}

/// One pass over the window, or both.
struct Work<'a> {
    args: &'a CompleteArgs,
    examined: &'a Examined,
    retention: Duration,
}

impl Work<'_> {
    /// Reads the window and the effects, and completes what has happened, or only counts it.
    async fn pass(&self, is_dry: bool) -> Result<CompletionReport, Problem> {
        let mut completing = self.open(is_dry).await?;
        if is_dry {
            self.examined.gate.tell(completing.known());
        }
        let readers = self.examined.readers(&self.args.examined.window).await?;
        let bar = progress(readers.iter().map(|reader| reader.total()).sum());
        for mut reader in readers {
            let before = bar.position();
            while let Some(messages) = reader.next_batch().await? {
                completing.add(messages).await?;
                bar.set_position(before + reader.position());
            }
            bar.set_position(before + reader.total());
        }
        let report = completing.finish().await?;
        bar.finish_and_clear();
        Ok(report)
    }

    async fn open(&self, is_dry: bool) -> Result<CompletingEffects, Problem> {
        let gate = &self.examined.gate;
        let mut effects = Effects::default();
        let mut list = self.args.effects.open();
        while let Some(batch) = list.next_batch().await? {
            batch.iter().for_each(|key| effects.add(key));
        }
        let mut completing = CompleteEffects::new(
            gate.scope.as_str(),
            gate.key.clone(),
            Arc::clone(&gate.store),
        )
        .step(&self.args.step)
        .retention(self.retention);
        if let Some(fingerprint) = &gate.fingerprint {
            completing = completing.fingerprint(fingerprint.clone());
        }
        if is_dry {
            completing = completing.dry_run();
        }
        Ok(completing.open_with(effects).await?)
    }

    fn tell(
        &self,
        report: &CompletionReport,
        dry_run: bool,
        took: Duration,
    ) -> Result<Exit, Problem> {
        if self.args.answer.json {
            output::answer_json(&EffectsDocument {
                schema: SCHEMA,
                topics: &self.examined.topics,
                store: &self.examined.gate.store_name,
                scope: self.examined.gate.scope.as_str(),
                dry_run,
                seconds: took.as_secs_f64(),
                report,
            })?;
        } else {
            output::answer(&self.text(report, dry_run))?;
            if dry_run {
                eprintln!("oncegate: nothing was changed");
            }
        }
        let left = report.running + report.mismatched + report.unreadable;
        Ok(if left == 0 { Exit::Yes } else { Exit::No })
    }

    fn text(&self, report: &CompletionReport, dry_run: bool) -> String {
        let mut table = Table::default();
        table.text("topic", self.examined.topics.join(", "));
        table.text("store", &self.examined.gate.store_name);
        table.text("scope", self.examined.gate.scope.as_str());
        table.number("messages", report.messages);
        table.number("effects", report.effects);
        let completed = if dry_run { "to complete" } else { "completed" };
        let of_records = match report.of_records {
            0 => "their records were missing".to_owned(),
            some => format!("of these, {} had failed or waited", grouped(some)),
        };
        table.noted(completed, report.completed, &of_records);
        table.number("before", report.completed_before);
        table.noted(
            "without effect",
            report.without_effect,
            "left as they are: a replay runs those without a record",
        );
        for (name, count, why) in [
            ("running", report.running, "left alone: an attempt runs"),
            (
                "repeated",
                report.repeated,
                "other messages of the same keys",
            ),
            (
                "mismatched",
                report.mismatched,
                "their key has a record of other content",
            ),
            ("without key", report.without_key, "no key can be made"),
            (
                "unreadable",
                report.unreadable,
                "their records cannot be read",
            ),
            (
                "unexplained",
                report.unexplained,
                "effects of no message of the window",
            ),
        ] {
            if count > 0 {
                table.noted(name, count, why);
            }
        }
        let mut text = table.render();
        for origin in &report.examples {
            text.push_str(&format!("  {}\n", output::plain(origin)));
        }
        text
    }
}
