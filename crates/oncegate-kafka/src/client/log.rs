//! Passes the client library's log lines to `tracing`, and says the same thing only once in a
//! while.
//!
//! A client without its broker reports each failed connection, and each start makes several
//! clients. Of lines that differ in nothing but times and counts, one is logged in each [`PERIOD`],
//! and it says how many were left out.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rdkafka::config::RDKafkaLogLevel;

/// The time in which the same line is logged once.
const PERIOD: Duration = Duration::from_secs(30);

/// The most different lines that are remembered. Beyond it, lines are logged as they come.
const LINES_MAX: usize = 256;

/// The lines that this process has logged: all clients are told of the same broker.
static LOGGED: Mutex<Option<Repeats>> = Mutex::new(None);

/// The number of lines that were left out; `None` if there were none.
type LeftOut = Option<u64>;

/// Returns how many lines like this one were left out since the last one that was logged; `None` to
/// leave it out, too.
pub(crate) fn worth_logging(line: &str) -> Option<LeftOut> {
    let mut logged = LOGGED.lock();
    let left_out = logged.get_or_insert_default().note(line, Instant::now())?;
    Some((left_out > 0).then_some(left_out))
}

/// Logs one of librdkafka's lines.
pub(crate) fn log(level: RDKafkaLogLevel, facility: &str, line: &str) {
    if matches!(level, RDKafkaLogLevel::Debug) {
        return tracing::debug!(target: "librdkafka", facility, "{line}");
    }
    let Some(left_out) = worth_logging(line) else {
        return;
    };
    match level {
        RDKafkaLogLevel::Emerg
        | RDKafkaLogLevel::Alert
        | RDKafkaLogLevel::Critical
        | RDKafkaLogLevel::Error => {
            tracing::error!(target: "librdkafka", facility, left_out, "{line}");
        }
        RDKafkaLogLevel::Warning => {
            tracing::warn!(target: "librdkafka", facility, left_out, "{line}");
        }
        _ => tracing::info!(target: "librdkafka", facility, left_out, "{line}"),
    }
}

/// Remembers which lines were logged, and when.
#[derive(Debug, Default)]
struct Repeats {
    lines: HashMap<String, LoggedLine>,
}

#[derive(Debug)]
struct LoggedLine {
    logged_at: Instant,
    left_out: u64,
}

impl Repeats {
    fn note(&mut self, line: &str, now: Instant) -> Option<u64> {
        let line = essence(line);
        if let Some(known) = self.lines.get_mut(line) {
            if now.saturating_duration_since(known.logged_at) < PERIOD {
                known.left_out += 1;
                return None;
            }
            known.logged_at = now;
            return Some(std::mem::take(&mut known.left_out));
        }
        if self.lines.len() >= LINES_MAX {
            self.lines
                .retain(|_, known| now.saturating_duration_since(known.logged_at) < PERIOD);
        }
        if self.lines.len() < LINES_MAX {
            self.lines.insert(
                line.to_owned(),
                LoggedLine {
                    logged_at: now,
                    left_out: 0,
                },
            );
        }
        Some(0)
    }
}

/// Returns the line without the times and counts at its end, as in `(after 3ms in state CONNECT)`.
fn essence(line: &str) -> &str {
    line.split_once(" (after ")
        .map_or(line, |(essence, _)| essence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_line_is_logged_once_in_a_period() {
        let mut repeats = Repeats::default();
        let start = Instant::now();
        assert_eq!(
            repeats.note(
                "a:1: Connection refused (after 0ms in state CONNECT)",
                start
            ),
            Some(0)
        );
        let again =
            "a:1: Connection refused (after 7ms in state CONNECT, 1 identical error(s) suppressed)";
        for second in 1..30 {
            assert_eq!(
                repeats.note(again, start + Duration::from_secs(second)),
                None
            );
        }
        assert_eq!(
            repeats.note("b:1: Connection refused (after 0ms)", start),
            Some(0),
            "another broker"
        );
        assert_eq!(
            repeats.note(again, start + PERIOD),
            Some(29),
            "it still is so"
        );
        assert_eq!(repeats.note(again, start + PERIOD), None);
    }

    #[test]
    fn memory_for_lines_is_bounded() {
        let mut repeats = Repeats::default();
        let start = Instant::now();
        for number in 0..LINES_MAX * 2 {
            assert_eq!(repeats.note(&number.to_string(), start), Some(0));
        }
        assert_eq!(repeats.lines.len(), LINES_MAX);
        assert_eq!(repeats.note("another", start + PERIOD), Some(0));
        assert_eq!(repeats.lines.len(), 1, "old lines are forgotten");
    }
}
