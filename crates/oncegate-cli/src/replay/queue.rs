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

use super::{ReplayArgs, changes, counts, examples};
use crate::args::within;
use crate::examined::ExaminedGate;
use crate::exit::{Exit, Problem, not_opened};
use crate::output::{self, Table, grouped};
use crate::sources::QueueBrokerFlags;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.replay.queue/1";

/// The queue counts as empty after this time without a message.
const QUIET: Duration = Duration::from_secs(6);
/// The number of messages that are requested at a time.
const RECEIVE_MOST: usize = 100;
/// The time limit for making all messages visible again.
const HAND_BACK_LIMIT: Duration = Duration::from_secs(60);

/// The queue that is examined in the place of topics.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "A queue in the place of topics")]
pub(super) struct QueueArgs {
    /// Examine the messages in this queue: its name, or the URL of one of SQS where region and
    /// account are not those of the environment
    #[arg(long = "queue", id = "queue", value_name = "QUEUE", conflicts_with_all = [
        "topics", "properties", "routes_from_headers", "partitions", "from_offset", "to_offset", "since", "until", "run",
    ])]
    pub(super) name: Option<String>,

    #[command(flatten)]
    broker: QueueBrokerFlags,

    /// Accept that one receive of each message in the queue is used up, and that consumers do not
    /// see them meanwhile
    #[arg(long, requires = "queue")]
    use_up_a_receive: bool,

    /// Read at most this many messages
    #[arg(long, value_name = "N", requires = "queue", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    most: u32,
}

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

impl QueueArgs {
    fn check(&self, queue: &str) -> Result<(), Problem> {
        if queue.ends_with(".fifo") {
            return Err(Problem::new(
                Exit::Usage,
                "--queue: a FIFO queue shows nothing behind the first messages of a group as long as those are held, \
                 so most of it would not be seen",
            ));
        }
        if !self.use_up_a_receive {
            return Err(Problem::new(
                Exit::Usage,
                "looking into a queue uses up one receive of each message, which counts for the redrive policy or the \
                 delivery limit of the queue, and hides the messages from consumers meanwhile: say --use-up-a-receive if that may be",
            ));
        }
        Ok(())
    }
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
            "Of {} messages, {parts}.",
            grouped(report.messages)
        ));
    }
    text
}
