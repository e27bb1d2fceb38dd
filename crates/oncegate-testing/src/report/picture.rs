//! The timeline of a finding as an SVG picture: a lane for the broker, one for each process, one
//! for the effects.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::escaped;
use crate::history::{CallAnswer, Event, Form, Outcome, What};
use crate::verdict::Finding;

/// Sizes in pixels.
const LABEL_WIDTH: usize = 120;
const STEP: usize = 22;
const LANE_HEIGHT: usize = 46;
const TOP: usize = 28;
const RADIUS: usize = 6;

/// The lane of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    Broker,
    Process(u32),
    Downstream,
}

/// Returns the picture. Events stand in their order, each in a column of its own; the labels say
/// when they happened.
pub(super) fn picture(finding: &Finding) -> String {
    let lanes = lanes(&finding.timeline);
    let height = TOP + LANE_HEIGHT * lanes.len() + 24;
    let width = LABEL_WIDTH + STEP * (finding.timeline.len() + 1);
    let mut svg = String::new();
    // Writing to a string cannot fail.
    _ = writeln!(
        svg,
        "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"timeline\">"
    );
    for (lane, row) in &lanes {
        let y = y_of(*row);
        let name = match lane {
            Lane::Broker => "broker".to_owned(),
            Lane::Process(number) => format!("process {number}"),
            Lane::Downstream => "effects".to_owned(),
        };
        _ = writeln!(
            svg,
            "<text x=\"4\" y=\"{}\" class=\"lane\">{name}</text>",
            y + 4
        );
        _ = writeln!(
            svg,
            "<line x1=\"{LABEL_WIDTH}\" y1=\"{y}\" x2=\"{width}\" y2=\"{y}\" class=\"axis\"/>"
        );
    }
    runs(&mut svg, finding, &lanes);
    let mut last_label = None;
    for (place, event) in finding.timeline.iter().enumerate() {
        let Some(row) = lanes.get(&lane_of(event)) else {
            continue;
        };
        let x = x_of(place);
        let y = y_of(*row);
        if last_label.is_none_or(|(column, at_ms)| place >= column + 4 && event.at_ms != at_ms) {
            last_label = Some((place, event.at_ms));
            _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"14\" class=\"time\">{} ms</text>",
                event.at_ms
            );
            _ = writeln!(
                svg,
                "<line x1=\"{x}\" y1=\"18\" x2=\"{x}\" y2=\"{}\" class=\"grid\"/>",
                height - 24
            );
        }
        let marked = if finding.violation.events.contains(&place) {
            " marked"
        } else {
            ""
        };
        let title = escaped(&words(event));
        _ = writeln!(
            svg,
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"{RADIUS}\" class=\"{}{marked}\"><title>{} ms: {title}</title></circle>",
            class(event),
            event.at_ms
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Bars from the beginning of each run to its end.
fn runs(svg: &mut String, finding: &Finding, lanes: &BTreeMap<Lane, usize>) {
    let mut began: BTreeMap<u64, (usize, Lane)> = BTreeMap::new();
    for (place, event) in finding.timeline.iter().enumerate() {
        match event.what {
            What::Began { run, .. } => drop(began.insert(run, (place, lane_of(event)))),
            What::Ended { run, .. } => {
                if let Some((from, lane)) = began.remove(&run)
                    && let Some(row) = lanes.get(&lane)
                {
                    let x = x_of(from);
                    let y = y_of(*row) - 9;
                    let width = STEP * (place - from);
                    _ = writeln!(
                        svg,
                        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"18\" class=\"run\"/>"
                    );
                }
            }
            _ => {}
        }
    }
}

fn lanes(timeline: &[Event]) -> BTreeMap<Lane, usize> {
    let mut lanes: BTreeMap<Lane, usize> =
        timeline.iter().map(|event| (lane_of(event), 0)).collect();
    for (row, place) in lanes.values_mut().enumerate() {
        *place = row;
    }
    lanes
}

fn lane_of(event: &Event) -> Lane {
    match (&event.what, event.process) {
        (What::Performed { .. } | What::Repeated { .. } | What::Listed { .. }, _) => {
            Lane::Downstream
        }
        (_, Some(process)) => Lane::Process(process),
        (_, None) => Lane::Broker,
    }
}

fn x_of(place: usize) -> usize {
    LABEL_WIDTH + STEP * (place + 1) - STEP / 2
}

fn y_of(row: usize) -> usize {
    TOP + LANE_HEIGHT * row + LANE_HEIGHT / 2
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
pub(super) fn words(event: &Event) -> String {
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
