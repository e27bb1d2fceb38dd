//! `oncegate replay --queue`: reports what would happen to the messages in a queue.
//!
//! A queue cannot be read without receiving: that hides its messages for a while and uses up one
//! receive of each. Therefore it requires a flag that accepts this.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::Counters;
use oncegate::admin::dry_run::ReplayReport;
use oncegate::source::{AckHandle, Delivery, Source};
use serde::Serialize;

use super::args::ReplayArgs;
use super::report::{changes, counts, examples};
use crate::args::within;
use crate::examined::ExaminedGate;
use crate::exit::{Exit, Problem, not_opened};
use crate::output::{self, Table, counted, grouped};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.replay.queue/1";

/// The queue counts as empty after this time without a message.
const QUIET: Duration = Duration::from_secs(6);
/// The number of messages that are requested at a time.
const RECEIVE_MOST: usize = 100;
/// The time limit for making all messages visible again.
const HAND_BACK_LIMIT: Duration = Duration::from_secs(60);

/// The answer of `--json`.
#[derive(Serialize)]
struct QueueDocument<'a> {
    schema: &'static str,
    queue: &'a str,
    store: &'a str,
    scope: &'a str,
    /// `true` if the exit code is 0.
    passed: bool,
    /// `true` if all messages of the queue were examined.
    complete: bool,
    seconds: f64,
    #[serde(flatten)]
    report: &'a ReplayReport,
}

pub(super) async fn run(args: &ReplayArgs, queue: &str) -> Result<Exit, Problem> {
    let started = Instant::now();
    let examined = Box::pin(examine(args, queue));
    let (gate, report, complete) = within(args.answer.timeout, examined).await?;
    let took = started.elapsed();
    let passed = complete && args.passed(&report);
    if args.answer.json {
        output::answer_json(&QueueDocument {
            schema: SCHEMA,
            queue,
            store: &gate.store_name,
            scope: gate.scope.as_str(),
            passed,
            complete,
            seconds: took.as_secs_f64(),
            report: &report,
        })?;
    } else {
        let mut text = text(queue, &gate, &report);
        if !complete {
            text.push_str(&format!(
                "\nThe queue has more than the {} that were looked at.",
                args.queue.most
            ));
        }
        output::answer(&text)?;
        eprintln!("{} in {}", grouped(report.messages), output::span(took));
    }
    Ok(if passed { Exit::Yes } else { Exit::No })
}

/// Returns the gate, the report, and whether all messages of the queue were examined.
async fn examine(
    args: &ReplayArgs,
    queue: &str,
) -> Result<(ExaminedGate, ReplayReport, bool), Problem> {
    args.queue.check(queue)?;
    let loaded = args.examined.load()?;
    let consumer = match &loaded {
        Some(loaded) => Some(args.examined.choose(loaded)?.1),
        None => None,
    };
    let configured = consumer.and_then(|consumer| consumer.source.as_ref());
    let most = args.queue.most;
    let source = args.queue.broker.source(queue, most, configured)?;
    let gate = args.examined.gate(loaded.as_ref()).await?;
    let (report, complete) = hold(&*source, &gate, most as usize).await?;
    Ok((gate, report, complete))
}

/// Holds up to `most` messages while their records are read, and returns them to the queue.
async fn hold(
    source: &dyn Source,
    gate: &ExaminedGate,
    most: usize,
) -> Result<(ReplayReport, bool), Problem> {
    let mut examination = gate.dry_run().open().await?;
    gate.tell(examination.known());
    source
        .open(Arc::new(Counters::default()))
        .await
        .map_err(|error| not_opened(&error))?;
    let mut held: Vec<Arc<dyn AckHandle>> = Vec::new();
    let complete = loop {
        let room = most.saturating_sub(held.len());
        if room == 0 {
            break false;
        }
        // Dropping the wait loses no message: one that arrives later is returned with the rest.
        let received = tokio::time::timeout(QUIET, source.receive(room.min(RECEIVE_MOST))).await;
        let Ok(received) = received else { break true };
        let Some(deliveries) = received? else {
            break true;
        };
        let mut messages = Vec::with_capacity(deliveries.len());
        for Delivery {
            message,
            ack_handle,
        } in deliveries
        {
            held.push(ack_handle);
            messages.push(message);
        }
        examination.add(messages).await?;
    };
    let report = examination.finish().await;
    // An ack handle that is dropped without an ack returns its message to the queue.
    source.stop_receiving();
    drop(held);
    source.close(HAND_BACK_LIMIT).await?;
    Ok((report?, complete))
}

fn text(queue: &str, gate: &ExaminedGate, report: &ReplayReport) -> String {
    let mut table = Table::default();
    table.text("queue", queue);
    table.text("store", &gate.store_name);
    table.text("scope", gate.scope.as_str());
    counts(&mut table, report);
    let mut text = table.render();
    examples(&mut text, report);
    text.push('\n');
    let parts = changes(report);
    if parts.is_empty() {
        text.push_str("All of these messages are done: consuming them would change nothing.");
    } else {
        text.push_str(&format!(
            "Of {}, {parts}.",
            counted(report.messages, "message")
        ));
    }
    text
}
