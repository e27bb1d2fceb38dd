//! `oncegate peek`: reports what would happen to the messages in a queue.
//!
//! A queue cannot be read without receiving: that hides its messages for a while and uses up one
//! receive of each. Therefore it is a command of its own beside `replay`, and requires a flag that
//! accepts this.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::admin::dry_run::{Known, ReplayReport};
use oncegate::source::{AckHandle, Delivery};
use oncegate::{Counters, Message};
use serde::Serialize;
use tracing::warn;

use crate::args::{AnswerArgs, GateArgs, within};
use crate::exit::{Exit, Problem, not_opened};
use crate::output::{self, Table, grouped};
use crate::replay::{changes, counts, examples};
use crate::sources::PeekFlags;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.peek/1";

/// The queue counts as empty after this time without a message.
const QUIET: Duration = Duration::from_secs(6);
/// The number of messages that are requested at a time.
const RECEIVE_MOST: usize = 100;
/// The time limit for making all messages visible again.
const HAND_BACK_LIMIT: Duration = Duration::from_secs(60);

/// Show what would happen to the messages in a queue of SQS or RabbitMQ, and return them to it
///
/// Use it above all for dead letters before a redrive. It receives the messages, reads their
/// records in the store as replay does, holds them meanwhile and returns them to the queue at the
/// end.
///
/// It uses up one receive of every message, which counts for a redrive policy or the delivery limit
/// of a quorum queue, and consumers do not see the messages while it runs. Therefore it requires
/// --use-up-a-receive. It refuses FIFO queues, which deliver nothing behind the first messages of a
/// group while those are held.
///
/// Exit code 0: none of the messages would run a handler or go to the dead letters, and all were
/// seen.
#[derive(Debug, clap::Args)]
pub(crate) struct PeekArgs {
    /// The queue: its name, or the URL of one of SQS where region and account are not those of the
    /// environment
    #[arg(long, value_name = "QUEUE")]
    queue: String,

    #[command(flatten)]
    broker: PeekFlags,

    /// Accept that one receive of each message is used up
    #[arg(long)]
    use_up_a_receive: bool,

    /// The route of the messages: the queue's name, unless they are dead letters of another one
    #[arg(long, value_name = "NAME")]
    route: Option<String>,

    /// Read at most this many messages
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    most: u32,

    #[command(flatten)]
    gate: GateArgs,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct PeekDocument<'a> {
    schema: &'static str,
    queue: &'a str,
    store: String,
    scope: &'a str,
    /// `true` if the exit code is 0.
    passed: bool,
    /// `true` if all messages of the queue were examined.
    complete: bool,
    seconds: f64,
    #[serde(flatten)]
    report: &'a ReplayReport,
}

pub(crate) async fn run(args: &PeekArgs) -> Result<Exit, Problem> {
    let started = Instant::now();
    let (report, complete) = within(args.answer.timeout, examine(args)).await?;
    let took = started.elapsed();
    let passed = complete && report.changes_nothing();
    if args.answer.json {
        output::answer_json(&PeekDocument {
            schema: SCHEMA,
            queue: &args.queue,
            store: args.gate.store.redacted(),
            scope: args.gate.scope.as_str(),
            passed,
            complete,
            seconds: took.as_secs_f64(),
            report: &report,
        })?;
    } else {
        output::answer(&args.text(&report, complete))?;
        eprintln!("{} in {}", grouped(report.messages), output::span(took));
    }
    Ok(if passed { Exit::Yes } else { Exit::No })
}

/// Returns the report, and whether all messages of the queue were examined.
async fn examine(args: &PeekArgs) -> Result<(ReplayReport, bool), Problem> {
    args.check()?;
    let source = args.broker.source(&args.queue, args.most)?;
    let mut examination = args
        .gate
        .proof(args.gate.store.open().await?)?
        .open()
        .await?;
    if examination.known() == Known::Nothing {
        warn!(scope = %args.gate.scope, "no gate has ever opened this scope in this store: is it the right scope, and the right store?");
    }
    source
        .open(Arc::new(Counters::default()))
        .await
        .map_err(|error| not_opened(&error))?;
    let mut held: Vec<Arc<dyn AckHandle>> = Vec::new();
    let complete = loop {
        let room = (args.most as usize).saturating_sub(held.len());
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
            messages.push(args.routed(message));
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

impl PeekArgs {
    fn check(&self) -> Result<(), Problem> {
        if self.queue.ends_with(".fifo") {
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

    /// The message on the requested route.
    fn routed(&self, message: Message) -> Message {
        let Some(route) = &self.route else {
            return message;
        };
        let mut routed = Message::new(
            route.as_str(),
            message.origin().clone(),
            message.payload_bytes(),
        );
        if let Some(key) = message.key_bytes() {
            routed = routed.with_key(key);
        }
        routed.with_headers(message.headers().to_vec())
    }

    fn text(&self, report: &ReplayReport, complete: bool) -> String {
        let mut table = Table::default();
        table.text("queue", self.queue.as_str());
        table.text("store", self.gate.store.redacted());
        table.text("scope", self.gate.scope.as_str());
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
        if !complete {
            text.push_str(&format!(
                "\nThe queue has more than the {} that were looked at.",
                self.most
            ));
        }
        text
    }
}
