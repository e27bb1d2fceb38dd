//! The timeline of a finding as an SVG picture: a column for the broker, one for each process, one
//! for the effects. Time runs downwards, and each event has its words beside it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::escaped;
use crate::history::{CallAnswer, Event, Form, Outcome, What};
use crate::verdict::Finding;

/// Sizes in pixels.
const TIME_WIDTH: usize = 72;
const COLUMN_WIDTH: usize = 84;
const WORDS_WIDTH: usize = 620;
const ROW: usize = 22;
const TOP: usize = 40;
const RADIUS: usize = 6;

/// A participant of a trial, which has a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Participant {
    Broker,
    Process(u32),
    Downstream,
}

/// Returns the picture.
pub(super) fn picture(finding: &Finding) -> String {
    let columns = columns(&finding.timeline);
    let heights = heights(&finding.timeline);
    let height = heights.last().map_or(TOP, |last| last + ROW);
    let words_at = TIME_WIDTH + COLUMN_WIDTH * columns.len() + RADIUS * 2;
    let width = words_at + WORDS_WIDTH;
    let mut svg = String::new();
    // Writing to a string cannot fail.
    _ = writeln!(
        svg,
        "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"timeline\">"
    );
    for (participant, column) in &columns {
        let x = x_of(*column);
        let name = match participant {
            Participant::Broker => "broker".to_owned(),
            Participant::Process(number) => format!("process {number}"),
            Participant::Downstream => "effects".to_owned(),
        };
        _ = writeln!(
            svg,
            "<text x=\"{x}\" y=\"16\" class=\"lane\">{name}</text>\n\
             <line x1=\"{x}\" y1=\"24\" x2=\"{x}\" y2=\"{height}\" class=\"axis\"/>"
        );
    }
    runs(&mut svg, finding, &columns, &heights);
    let mut last_time = None;
    for (place, (event, y)) in finding.timeline.iter().zip(&heights).enumerate() {
        let Some(column) = columns.get(&participant_of(event)) else {
            continue;
        };
        let x = x_of(*column);
        let baseline = y + 4;
        let marked = if finding.violation.events.contains(&place) {
            let top = y - ROW / 2;
            _ = writeln!(
                svg,
                "<rect x=\"0\" y=\"{top}\" width=\"{width}\" height=\"{ROW}\" class=\"row\"/>"
            );
            " marked"
        } else {
            ""
        };
        if last_time.replace(event.at_ms) != Some(event.at_ms) {
            let ms = event.at_ms;
            _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{baseline}\" class=\"time\">{ms} ms</text>",
                TIME_WIDTH - 12
            );
        }
        _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{y}\" x2=\"{words_at}\" y2=\"{y}\" class=\"grid\"/>\n\
             <circle cx=\"{x}\" cy=\"{y}\" r=\"{RADIUS}\" class=\"{}{marked}\"/>\n\
             <text x=\"{}\" y=\"{baseline}\" class=\"words{marked}\">{}</text>",
            class(event),
            words_at + 4,
            escaped(&words(event))
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// The height of each event: that of its time, but below the event before it. So a time without
/// events is a gap, and events at one time stand below one another.
fn heights(timeline: &[Event]) -> Vec<usize> {
    let first = timeline.first().map_or(0, |event| event.at_ms);
    let lasts = timeline.last().map_or(0, |event| event.at_ms - first);
    let room = ROW * timeline.len();
    let mut next = TOP + ROW / 2;
    let mut heights = Vec::with_capacity(timeline.len());
    for event in timeline {
        let share = u128::from(event.at_ms - first) * room as u128 / u128::from(lasts.max(1));
        let by_time = TOP + ROW / 2 + usize::try_from(share).unwrap_or(room);
        heights.push(by_time.max(next));
        next = by_time.max(next) + ROW;
    }
    heights
}

/// Bars from the beginning of each run to its end.
fn runs(
    svg: &mut String,
    finding: &Finding,
    columns: &BTreeMap<Participant, usize>,
    heights: &[usize],
) {
    let mut began: BTreeMap<u64, (usize, Participant)> = BTreeMap::new();
    for (event, y) in finding.timeline.iter().zip(heights) {
        match event.what {
            What::Began { run, .. } => drop(began.insert(run, (*y, participant_of(event)))),
            What::Ended { run, .. } => {
                if let Some((from, participant)) = began.remove(&run)
                    && let Some(column) = columns.get(&participant)
                {
                    let x = x_of(*column) - 9;
                    let height = y - from;
                    _ = writeln!(
                        svg,
                        "<rect x=\"{x}\" y=\"{from}\" width=\"18\" height=\"{height}\" class=\"run\"/>"
                    );
                }
            }
            _ => {}
        }
    }
}

fn columns(timeline: &[Event]) -> BTreeMap<Participant, usize> {
    let mut columns: BTreeMap<Participant, usize> = timeline
        .iter()
        .map(|event| (participant_of(event), 0))
        .collect();
    for (column, place) in columns.values_mut().enumerate() {
        *place = column;
    }
    columns
}

fn participant_of(event: &Event) -> Participant {
    match (&event.what, event.process) {
        (What::Performed { .. } | What::Repeated { .. } | What::Listed { .. }, _) => {
            Participant::Downstream
        }
        (_, Some(process)) => Participant::Process(process),
        (_, None) => Participant::Broker,
    }
}

fn x_of(column: usize) -> usize {
    TIME_WIDTH + COLUMN_WIDTH * column + COLUMN_WIDTH / 2
}

fn class(event: &Event) -> &'static str {
    match &event.what {
        What::FaultBegan { .. } | What::Killed | What::Hung | What::ConsumerFailed { .. } => {
            "fault"
        }
        What::Performed { .. } | What::Listed { .. } => "effect",
        What::Repeated { .. } => "repeated",
        What::Called { .. } | What::Returned { .. } => "call",
        What::Claimed { .. } | What::Completed { .. } => "store",
        What::DeadLettered { .. } | What::Unfinished { .. } | What::Cancelled { .. } => "bad",
        _ => "other",
    }
}

/// An event in words.
fn words(event: &Event) -> String {
    match &event.what {
        What::Produced {
            message,
            sample,
            form,
            ..
        } => {
            let form = words_of_form(*form);
            format!("message {message} is sent: sample {sample}, {form}")
        }
        What::Started => "the process starts".to_owned(),
        What::Killed => "the process is killed".to_owned(),
        What::Stopping => "all processes are asked to stop".to_owned(),
        What::Stopped => "the process has stopped".to_owned(),
        What::Hung => "the process or its worker does not stop".to_owned(),
        What::ConsumerFailed { error } => format!("the consumer fails: {error}"),
        What::Delivered { message } => format!("message {message} is delivered"),
        What::Claimed { verdict, .. } => format!("claim: {verdict}"),
        What::Began {
            run,
            message,
            attempt,
            recovered,
            batch,
        } => {
            let recovered = if *recovered { ", recovered" } else { "" };
            let batch = batch
                .map(|messages| format!(" in a batch of {messages}"))
                .unwrap_or_default();
            format!("run {run} of message {message} begins{batch}: attempt {attempt}{recovered}")
        }
        What::Cancelled { run } => format!("run {run} is cancelled"),
        What::Ended { run, outcome, .. } => format!("run {run} {}", words_of_outcome(*outcome)),
        What::ToldOfDuplicate { message } => {
            format!("the handler is told that message {message} is a duplicate")
        }
        What::Called {
            call,
            step,
            idempotency_key,
            run,
            ..
        } => words_of_call(*call, step, idempotency_key.as_deref(), *run),
        What::Performed { call } => format!("call {call} has its effect"),
        What::Repeated {
            call,
            first,
            other_body,
        } => {
            let body = if *other_body {
                " with another body"
            } else {
                ""
            };
            format!("call {call} repeats call {first}{body}: no effect")
        }
        What::Returned { call, answer } => format!("call {call} {}", words_of_answer(*answer)),
        What::Completed { applied: true, .. } => "the store has the completion".to_owned(),
        What::Completed { applied: false, .. } => {
            "the store refuses the completion of a former owner".to_owned()
        }
        What::Acked { message, accepted } => words_of_ack(*message, *accepted),
        What::DeadLettered { message, cause } => {
            format!("message {message} becomes a dead letter: {cause}")
        }
        What::Listed { effect, step, .. } => words_of_listed(*effect, step),
        What::FaultBegan { fault, .. } => format!("fault: {fault}"),
        What::Unfinished { message } => format!("message {message} is not finished"),
    }
}

fn words_of_form(form: Form) -> &'static str {
    match form {
        Form::Original => "as it is",
        Form::Duplicate => "as a duplicate",
        Form::Poison => "spoilt",
        Form::Malformed => "malformed",
    }
}

fn words_of_call(call: u64, step: &str, idempotency_key: Option<&str>, run: Option<u64>) -> String {
    let key = idempotency_key.map_or("without a key".to_owned(), |key| format!("under key {key}"));
    let run = run.map_or("outside of any run".to_owned(), |run| {
        format!("in run {run}")
    });
    let step = if step.is_empty() {
        String::new()
    } else {
        format!(" of step {step:?}")
    };
    format!("call {call}{step} {key}, {run}")
}

fn words_of_ack(message: usize, is_accepted: bool) -> String {
    if is_accepted {
        format!("message {message} is acknowledged")
    } else {
        format!("the ack of message {message} has no effect: its partition is elsewhere")
    }
}

fn words_of_listed(effect: usize, step: &str) -> String {
    if step.is_empty() {
        format!("the witness lists effect {effect}")
    } else {
        format!("the witness lists effect {effect}: step {step:?}")
    }
}

fn words_of_answer(answer: CallAnswer) -> &'static str {
    match answer {
        CallAnswer::Answered => "is answered",
        CallAnswer::Refused => "is refused with status 500",
        CallAnswer::Lost => "gets no answer",
    }
}

fn words_of_outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "reports success",
        Outcome::Failed => "wants another attempt",
        Outcome::Later => "wants the message later",
        Outcome::GaveUp => "gives up",
        Outcome::Dropped => "is dropped",
    }
}
