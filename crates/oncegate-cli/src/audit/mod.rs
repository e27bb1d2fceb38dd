//! `oncegate audit`: finds messages that were lost, and effects that happened twice.

use std::sync::Arc;
use std::time::Instant;

use oncegate::admin::audit::{Audit, AuditFinding, AuditReport, AuditVerdict, OpenAudit};
use oncegate::admin::dead_letter_reader::DeadLetterReader as _;
use oncegate::kafka::{KafkaDeadLetterReader, TopicReader, committed_offsets};
use serde::Serialize;
use tracing::warn;

use crate::args::{AnswerArgs, within};
use crate::examined::{Examined, ExaminedArgs, progress};
use crate::exit::{Exit, Problem, not_opened};
use crate::output::{self, Table, counted, grouped, plain};

pub(crate) mod effects;
mod head;

use effects::EffectsArgs;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.audit/1";

/// Compare a topic with its records and effects: what was lost, what happened twice?
///
/// Reads the messages of the window, their records, the dead letters, and, if it is given, a list
/// of the effects that the downstream system has, by their idempotency keys. It claims and changes
/// nothing, joins no consumer group, and may run beside the consumers. docs/AUDIT.md explains each
/// finding and what to do about it.
///
/// Memory does not grow with the number of messages. A temporary file (in $TMPDIR) gets 48 bytes
/// for each message, dead letter and effect.
///
/// Exit code 0: nothing was found. 1: something was lost, happened twice, or needs a look.
#[derive(Debug, clap::Args)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    examined: ExaminedArgs,

    /// The consumer group: messages from its committed offsets on are in flight, and not lost
    /// [default: that of the configuration, or the scope]
    #[arg(long, value_name = "NAME")]
    group: Option<String>,

    /// The topic of the dead letters [default: that of the configuration]
    #[arg(long, value_name = "NAME")]
    dead_letters: Option<String>,

    #[command(flatten)]
    effects: EffectsArgs,

    /// The step of the idempotency keys: what a handler in Rust gives to `idempotency_key`
    #[arg(long, value_name = "NAME", default_value = Audit::DEFAULT_STEP)]
    step: String,

    /// Exit with 0 although there are effects that belong to no message of the window
    #[arg(long)]
    allow_unexplained: bool,

    /// How many findings of each kind are named
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(..=100_000))]
    most: u32,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct AuditDocument<'a> {
    schema: &'static str,
    topics: &'a [String],
    store: &'a str,
    scope: &'a str,
    group: &'a str,
    dead_letter_topic: Option<&'a str>,
    /// `true` if a list of effects was given.
    with_effects: bool,
    /// `true` if the exit code is 0.
    passed: bool,
    seconds: f64,
    /// The offsets behind open transactions, which are not examined.
    withheld: u64,
    #[serde(flatten)]
    report: &'a AuditReport,
}

pub(crate) async fn run(args: &AuditArgs) -> Result<Exit, Problem> {
    let started = Instant::now();
    let (examined, report, withheld) =
        within(args.answer.timeout, Box::pin(args.reconcile())).await?;
    let took = started.elapsed();
    let passed = args.passed(&report);
    if args.answer.json {
        output::answer_json(&AuditDocument {
            schema: SCHEMA,
            topics: &examined.topics,
            store: &examined.gate.store_name,
            scope: examined.gate.scope.as_str(),
            group: &examined.group,
            dead_letter_topic: examined.dead_letters.as_deref(),
            with_effects: args.effects.are_given(),
            passed,
            seconds: took.as_secs_f64(),
            withheld,
            report: &report,
        })?;
    } else {
        let mut text = args.text(&examined, &report);
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

impl AuditArgs {
    /// Reads in the order that makes a message safe to audit while it is handled: how far the group
    /// is, the messages with their records, the dead letters, the effects.
    async fn reconcile(&self) -> Result<(Examined, AuditReport, u64), Problem> {
        self.effects.check()?;
        let mut examined = self.examined.open().await?;
        examined.group = self.group.clone().unwrap_or(examined.group);
        examined.dead_letters = self.dead_letters.clone().or(examined.dead_letters);
        let mut audit = self.open(&examined).await?;
        examined.gate.tell(audit.known());
        if let Some(mut letters) = dead_letters(&examined) {
            // A wrong name is reported before the messages are read.
            letters.open().await.map_err(|error| not_opened(&error))?;
            letters.close().await?;
        }
        let withheld = read_messages(&examined, &self.examined, &mut audit).await?;
        if let Some(mut letters) = dead_letters(&examined) {
            // All records have been read before the end of the dead letters is taken, so a message
            // that a record calls a dead letter is among them.
            audit.add_dead_letters(Vec::new()).await?;
            letters.open().await.map_err(|error| not_opened(&error))?;
            while let Some(batch) = letters.next_batch().await? {
                audit.add_dead_letters(batch).await?;
            }
            letters.close().await?;
        }
        if self.effects.are_given() {
            audit.add_effects([]).await?;
            let mut effects = self.effects.open();
            while let Some(batch) = effects.next_batch().await? {
                audit.add_effects(batch.iter().map(String::as_str)).await?;
            }
        }
        let report = audit.finish().await?;
        Ok((examined, report, withheld))
    }

    async fn open(&self, examined: &Examined) -> Result<OpenAudit, Problem> {
        let Examined {
            brokers,
            group,
            properties,
            gate,
            ..
        } = examined;
        let store = Arc::clone(&gate.store);
        let mut audit = Audit::new(gate.scope.as_str(), gate.key.clone(), store)
            .step(&self.step)
            .findings_most(self.most as usize);
        if let Some(fingerprint) = &gate.fingerprint {
            audit = audit.fingerprint(fingerprint.clone());
        }
        let mut has_committed = false;
        for topic in &examined.topics {
            let committed = committed_offsets(brokers, group, topic, properties).await;
            for (partition, offset) in committed.map_err(|error| not_opened(&error))? {
                audit = audit.committed(topic, partition, offset);
                has_committed = true;
            }
        }
        if !has_committed {
            warn!(
                group,
                "the consumer group has committed nothing, so every message counts as acknowledged: is it the right \
                 --group?"
            );
        }
        let file = tempfile::tempfile().map_err(|error| {
            let folder = std::env::temp_dir();
            let text = format!(
                "no temporary file in {} (TMPDIR): {error}",
                folder.display()
            );
            Problem::configuration(text)
        })?;
        Ok(audit.open(file).await?)
    }

    fn passed(&self, report: &AuditReport) -> bool {
        let allowed = if self.allow_unexplained {
            report.unexplained
        } else {
            0
        };
        report.found() == allowed
    }

    fn text(&self, examined: &Examined, report: &AuditReport) -> String {
        let mut table = Table::default();
        table.text("topic", examined.topics.join(", "));
        table.text("store", &examined.gate.store_name);
        table.text("scope", examined.gate.scope.as_str());
        table.text("group", &examined.group);
        table.number("messages", report.messages);
        table.noted("events", report.events, "keys, and messages without one");
        if let Some(topic) = &examined.dead_letters {
            table.noted(
                "dead letters",
                report.dead_letters,
                &format!("of the scope, in {}", plain(topic)),
            );
        }
        let with_effects = self.effects.are_given();
        if with_effects {
            table.number("effects", report.effects);
        }
        table.number("ok", report.ok);
        if report.forgotten > 0 {
            table.noted(
                "  forgotten",
                report.forgotten,
                "the store has no record any more: a replay would run them",
            );
        }
        table.number("dead-lettered", report.dead_lettered);
        table.noted(
            "in flight",
            report.in_flight,
            "running, waiting for a retry, or not acknowledged yet",
        );
        let without = if with_effects {
            "no record, no dead letter, no effect"
        } else {
            "no record, no dead letter"
        };
        table.noted("lost", report.lost, without);
        if with_effects {
            table.noted("doubled", report.doubled, "more than one effect");
            table.noted(
                "without effect",
                report.without_effect,
                "the record says completed",
            );
            table.noted(
                "unexplained",
                report.unexplained,
                "effects of no message of the window, or of one given up",
            );
        }
        table.noted(
            "overdue",
            report.overdue,
            "an attempt failed or was killed, and no other has begun",
        );
        table.noted(
            "unreadable",
            report.unreadable,
            "the store holds something else under the key",
        );
        let mut text = table.render();
        list(&mut text, report);
        text.push('\n');
        text.push_str(&self.verdict(report));
        text
    }

    fn verdict(&self, report: &AuditReport) -> String {
        let mut parts = Vec::new();
        for (count, what) in counts(report).into_iter().filter(|(count, _)| *count > 0) {
            parts.push(format!("{} {what}", grouped(count)));
        }
        let allowed = if self.passed(report) {
            ", which is allowed"
        } else {
            ""
        };
        match parts.as_slice() {
            [] if report.messages == 0 => {
                "The window has no message, so nothing was compared: is it the right one?"
                    .to_owned()
            }
            [] => "Nothing was found.".to_owned(),
            _ => format!(
                "Of {}: {}{allowed}.",
                counted(report.events, "event"),
                parts.join(", ")
            ),
        }
    }
}

fn counts(report: &AuditReport) -> [(u64, &'static str); 6] {
    [
        (report.lost, "lost"),
        (report.doubled, "doubled"),
        (report.unexplained, "unexplained"),
        (report.without_effect, "without effect"),
        (report.overdue, "overdue"),
        (report.unreadable, "unreadable"),
    ]
}

fn dead_letters(examined: &Examined) -> Option<KafkaDeadLetterReader> {
    let mut letters =
        KafkaDeadLetterReader::new(examined.brokers.as_str(), examined.dead_letters.as_deref()?);
    for (name, value) in &examined.properties {
        letters = letters.property(name, value);
    }
    Some(letters)
}

/// Adds the messages of the topics. Returns how many offsets are not read, because they are behind
/// open transactions.
async fn read_messages(
    examined: &Examined,
    args: &ExaminedArgs,
    audit: &mut OpenAudit,
) -> Result<u64, Problem> {
    let readers = examined.readers(&args.window).await?;
    let withheld = readers.iter().map(TopicReader::withheld).sum();
    let bar = progress(readers.iter().map(TopicReader::total).sum());
    for mut reader in readers {
        let before = bar.position();
        while let Some(messages) = reader.next_batch().await? {
            audit.add_messages(messages).await?;
            bar.set_position(before + reader.position());
        }
        bar.set_position(before + reader.total());
    }
    bar.finish_and_clear();
    Ok(withheld)
}

/// Adds the findings, each in two lines.
fn list(text: &mut String, report: &AuditReport) {
    let mut last: Option<AuditVerdict> = None;
    for finding in &report.findings {
        let AuditFinding {
            verdict,
            origin,
            key,
            idempotency_key,
            messages,
            effects,
            why,
            ..
        } = finding;
        if last != Some(*verdict) {
            let kind = serde_json::to_value(verdict).ok();
            let kind = kind
                .as_ref()
                .and_then(|kind| kind.as_str())
                .unwrap_or_default()
                .replace('_', " ");
            let count = report
                .findings
                .iter()
                .filter(|other| other.verdict == *verdict)
                .count();
            text.push_str(&format!("\n{kind}, the first {count}:\n"));
            last = Some(*verdict);
        }
        let words = [key.as_deref(), idempotency_key.as_deref()]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
        text.push_str(&format!("  {}  {}\n", plain(origin), words.join("  ")));
        text.push_str(&format!(
            "    {why} ({}, {})\n",
            counted(*messages, "message"),
            counted(*effects, "effect")
        ));
    }
}
