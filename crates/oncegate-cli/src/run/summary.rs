//! The outcomes of the lines of standard input: the answer of `oncegate run` when their consumer
//! has ended.

use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use oncegate::Consumer;
use oncegate::dead_letters::DeadLetterCause;
use oncegate::observe::{Event, Observer};
use oncegate::telemetry::Telemetry;
use serde::Serialize;

use crate::exit::{Exit, Problem};
use crate::output::{self, counted};
use crate::sources::input::{Input, Progress};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.run/1";
/// The most ranges of lines that a text names.
const RANGES_MOST: usize = 20;

/// Counts what became of the messages of one consumer, and forwards its events.
#[derive(Debug)]
struct Tally {
    telemetry: Telemetry,
    handled: AtomicU64,
    dead_letters: AtomicU64,
    retries: AtomicU64,
    /// Messages whose key was found as given up.
    found_given_up: AtomicU64,
    /// Messages of these whose dead letter had to be written again.
    letters_again: AtomicU64,
}

impl Observer for Tally {
    fn observe(&self, event: Event<'_>) {
        let count = match event {
            Event::Completed { .. } => Some(&self.handled),
            Event::DeadLettered { .. } => Some(&self.dead_letters),
            Event::Retried { .. } => Some(&self.retries),
            Event::Claimed {
                verdict: "failed", ..
            } => Some(&self.found_given_up),
            _ => None,
        };
        if let Some(count) = count {
            count.fetch_add(1, Relaxed);
        }
        if let Event::DeadLettered {
            cause: DeadLetterCause::NotHandedOver,
            ..
        } = event
        {
            self.letters_again.fetch_add(1, Relaxed);
        }
        self.telemetry.observe(event);
    }
}

/// A consumer that reads standard input.
#[derive(Debug)]
pub(super) struct Account {
    consumer: String,
    input: Input,
    tally: Arc<Tally>,
}

impl Account {
    pub(super) fn of(consumer: &str, input: Input, telemetry: &Telemetry) -> Self {
        let tally = Tally {
            telemetry: telemetry.clone(),
            handled: AtomicU64::new(0),
            dead_letters: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            found_given_up: AtomicU64::new(0),
            letters_again: AtomicU64::new(0),
        };
        Self {
            consumer: consumer.to_owned(),
            input,
            tally: Arc::new(tally),
        }
    }

    /// The same consumer, whose events are counted.
    pub(super) fn watch(&self, consumer: Consumer) -> Consumer {
        consumer.observer(Arc::clone(&self.tally) as Arc<dyn Observer>)
    }

    pub(super) fn summary(&self) -> Summary {
        let progress = self.input.progress();
        let [handled, dead_letters, retries, found, again] = [
            &self.tally.handled,
            &self.tally.dead_letters,
            &self.tally.retries,
            &self.tally.found_given_up,
            &self.tally.letters_again,
        ]
        .map(|count| count.load(Relaxed));
        let counts = Counts {
            handled,
            dead_letters,
            retries,
            given_up_before: found.saturating_sub(again),
        };
        Summary::of(&self.consumer, &progress, counts)
    }
}

/// The counts of a run while it handled the lines.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    handled: u64,
    dead_letters: u64,
    retries: u64,
    given_up_before: u64,
}

/// The outcomes of the lines.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    consumer: String,
    /// `true` if every line of the input is finished.
    complete: bool,
    lines_read: u64,
    messages: u64,
    handled: u64,
    /// Messages whose key was finished before: the store answered them.
    duplicates: u64,
    dead_letters: u64,
    /// Messages whose key was given up before, and that are in the dead letters.
    given_up_before: u64,
    retries: u64,
    /// The first and the last line of each range.
    unfinished_lines: Vec<[u64; 2]>,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct RunDocument<'a> {
    schema: &'static str,
    consumers: &'a [Summary],
}

impl Summary {
    fn of(consumer: &str, progress: &Progress, counts: Counts) -> Self {
        let Counts {
            handled,
            dead_letters,
            retries,
            given_up_before,
        } = counts;
        let finished = progress.messages - progress.unfinished_messages();
        // A message that was asked for again may be counted twice.
        let answered = finished.saturating_sub(handled + dead_letters);
        let given_up_before = given_up_before.min(answered);
        Self {
            consumer: consumer.to_owned(),
            complete: progress.is_complete(),
            lines_read: progress.read,
            messages: progress.messages,
            handled,
            duplicates: answered - given_up_before,
            dead_letters,
            given_up_before,
            retries,
            unfinished_lines: progress
                .unfinished
                .iter()
                .map(|range| [*range.start(), *range.end()])
                .collect(),
        }
    }

    fn text(&self) -> String {
        let Self {
            consumer,
            messages,
            handled,
            ..
        } = self;
        let mut text = format!(
            "{consumer}: {}, {} handled, {}",
            counted(*messages, "message"),
            output::grouped(*handled),
            counted(self.duplicates, "duplicate"),
        );
        // Writing to a string cannot fail.
        if self.dead_letters > 0 {
            let _ = write!(text, ", {}", counted(self.dead_letters, "dead letter"));
        }
        if self.given_up_before > 0 {
            let before = output::grouped(self.given_up_before);
            let _ = write!(text, ", {before} given up before");
        }
        if self.unfinished() > 0 {
            let unfinished = counted(self.unfinished(), "unfinished message");
            let _ = write!(text, ", {unfinished}");
        }
        text
    }

    fn unfinished(&self) -> u64 {
        self.unfinished_lines
            .iter()
            .map(|[first, last]| last - first + 1)
            .sum()
    }

    /// Returns why the input is not finished, and what to do; `None` when it is.
    fn remainder(&self) -> Option<String> {
        if self.complete {
            return None;
        }
        let ranges = self
            .unfinished_lines
            .iter()
            .map(|[first, last]| *first..=*last);
        let unfinished = match self.unfinished_lines.len() {
            0 => String::new(),
            _ => format!(
                ", and of those {} unfinished",
                named(&ranges.collect::<Vec<_>>())
            ),
        };
        Some(format!(
            "{}: standard input is not finished: {} read{unfinished}; feed the same input again, and finished lines are \
             answered from the store",
            self.consumer,
            match self.lines_read {
                0 => "no line was".to_owned(),
                1 => "line 1 was".to_owned(),
                last => format!("lines 1 to {last} were"),
            },
        ))
    }
}

/// `line 3 is`, `lines 3, 5 to 9 are`
fn named(ranges: &[RangeInclusive<u64>]) -> String {
    let mut shown: Vec<String> = ranges
        .iter()
        .take(RANGES_MOST)
        .map(|range| match (range.start(), range.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first} to {last}"),
        })
        .collect();
    if ranges.len() > RANGES_MOST {
        shown.push("others".to_owned());
    }
    match ranges {
        [only] if only.start() == only.end() => format!("line {} is", shown.join("")),
        _ => format!("lines {} are", shown.join(", ")),
    }
}

/// Prints what became of the lines.
pub(super) fn answer(summaries: &[Summary], json: bool) -> Result<(), Problem> {
    if json {
        return output::answer_json(&RunDocument {
            schema: SCHEMA,
            consumers: summaries,
        });
    }
    summaries
        .iter()
        .try_for_each(|summary| output::answer(&summary.text()))
}

/// # Errors
/// When a line is not finished, or was not read: standard input cannot deliver it again.
pub(super) fn verdict(summaries: &[Summary]) -> Result<(), Problem> {
    let remainders: Vec<String> = summaries.iter().filter_map(Summary::remainder).collect();
    if remainders.is_empty() {
        return Ok(());
    }
    Err(Problem::new(Exit::Interrupted, remainders.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(messages: u64, unfinished: &[RangeInclusive<u64>], is_at_end: bool) -> Progress {
        Progress {
            read: messages,
            messages,
            unfinished: unfinished.to_vec(),
            is_at_end,
        }
    }

    #[test]
    fn what_is_neither_handled_nor_given_up_is_a_duplicate() {
        let summary = Summary::of(
            "billing",
            &progress(1_005, &[], true),
            Counts {
                handled: 1_000,
                dead_letters: 1,
                retries: 3,
                given_up_before: 0,
            },
        );
        assert_eq!(
            summary.text(),
            "billing: 1,005 messages, 1,000 handled, 4 duplicates, 1 dead letter"
        );
        assert_eq!(summary.remainder(), None);
        assert!(verdict(&[summary]).is_ok());
    }

    #[test]
    fn what_was_given_up_before_is_no_duplicate() {
        let counts = Counts {
            handled: 1,
            given_up_before: 2,
            ..Counts::default()
        };
        let summary = Summary::of("billing", &progress(4, &[], true), counts);
        assert_eq!(
            summary.text(),
            "billing: 4 messages, 1 handled, 1 duplicate, 2 given up before"
        );
    }

    #[test]
    fn unfinished_lines_are_named() {
        let counts = Counts {
            handled: 2,
            ..Counts::default()
        };
        let summary = Summary::of("billing", &progress(9, &[3..=3, 5..=9], false), counts);
        assert_eq!(
            summary.text(),
            "billing: 9 messages, 2 handled, 1 duplicate, 6 unfinished messages"
        );
        let problem = verdict(&[summary]).unwrap_err();
        let text = problem.to_string();
        assert_eq!(problem.exit(), Exit::Interrupted);
        assert!(
            text.contains("lines 1 to 9 were read, and of those lines 3, 5 to 9 are unfinished"),
            "{text}"
        );
    }

    #[test]
    fn an_input_of_which_nothing_was_read_is_not_finished() {
        let problem = verdict(&[Summary::of(
            "billing",
            &progress(0, &[], false),
            Counts::default(),
        )])
        .unwrap_err();
        assert!(
            problem.to_string().contains("no line was read"),
            "{problem}"
        );
    }
}
