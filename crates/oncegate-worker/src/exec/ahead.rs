//! The lines that a process has: those that it has begun, and those that wait behind them because
//! it takes lines ahead. Pure: time is a parameter.
//!
//! A process that takes lines ahead begins them in their order, and each of them only when it has
//! written an earlier answer. So when it dies, the first ones are those that it may have begun, as
//! many as it handles at a time, and no other has begun.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::report::Capacity;

/// The longest time for which a line may wait in a process before it begins: then it is recalled,
/// for another process. A crash of oncegate lets what waits there count as recovered.
const AHEAD_WAIT_MOST: Duration = Duration::from_millis(5);
/// The wait that as many lines are sent ahead for as recent ones fill.
const AHEAD_FOR: Duration = Duration::from_millis(2);
/// The most lines that a process may take ahead.
const AHEAD_MOST: usize = 256;
/// The part that a new time has in the mean of recent times: one of this many.
const MEAN_OF: u32 = 8;

/// The lines of one process.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// The number of messages that it handles at a time.
    at_a_time: usize,
    /// The number of messages that it takes besides.
    ahead: usize,
    /// The messages that it may have begun, with the time from which on.
    begun: HashMap<u64, Instant>,
    /// The messages that it has not begun, in their order.
    waiting: VecDeque<WaitingLine>,
    /// The mean time of recent lines; `None` before the first answer.
    mean: Option<Duration>,
    /// Something was written that may have been an answer, so nothing is sure of those that wait.
    is_in_doubt: bool,
    /// Nothing more begins here.
    rests: bool,
}

#[derive(Debug)]
struct WaitingLine {
    line: u64,
    since: Instant,
    is_recalled: bool,
}

impl Lines {
    pub(super) fn new(at_a_time: usize, ahead: usize) -> Self {
        Self {
            at_a_time,
            ahead: ahead.min(AHEAD_MOST),
            ..Self::default()
        }
    }

    /// The number of messages that it handles at a time.
    pub(super) fn at_a_time(&self) -> usize {
        self.at_a_time
    }

    /// The lines that it has at most.
    pub(super) fn room(&self) -> Capacity {
        Capacity {
            at_a_time: u32::try_from(self.at_a_time).unwrap_or(u32::MAX),
            ahead: u32::try_from(self.ahead).unwrap_or(u32::MAX),
        }
    }

    /// Returns whether another line may be sent now.
    pub(super) fn has_room(&self) -> bool {
        !self.rests && self.begun.len() + self.waiting.len() < self.at_a_time + self.ahead_now()
    }

    /// The lines that may wait now: as many as are through within `AHEAD_FOR`.
    fn ahead_now(&self) -> usize {
        let Some(mean) = self.mean.filter(|_| !self.is_in_doubt) else {
            return 0;
        };
        let each = AHEAD_FOR.as_nanos() / mean.as_nanos().max(1);
        let through = usize::try_from(each)
            .unwrap_or(usize::MAX)
            .saturating_mul(self.at_a_time);
        through.min(self.ahead)
    }

    /// Notes that a line was sent.
    pub(super) fn sent(&mut self, line: u64, now: Instant) {
        if self.begun.len() < self.at_a_time {
            self.begun.insert(line, now);
        } else {
            self.waiting.push_back(WaitingLine {
                line,
                since: now,
                is_recalled: false,
            });
        }
    }

    /// Notes that a line is over: it is answered, or was taken back.
    pub(super) fn over(&mut self, line: u64, now: Instant) {
        if let Some(since) = self.begun.remove(&line) {
            let took = now.saturating_duration_since(since);
            self.mean = Some(
                self.mean
                    .map_or(took, |mean| (mean * (MEAN_OF - 1) + took) / MEAN_OF),
            );
            if let Some(next) = self.waiting.pop_front() {
                self.begun.insert(next.line, now);
            }
        } else {
            self.waiting.retain(|waiting| waiting.line != line);
        }
    }

    /// Returns whether the process has not begun this line, and that is sure.
    pub(super) fn waits(&self, line: u64) -> bool {
        !self.is_in_doubt && self.waiting.iter().any(|waiting| waiting.line == line)
    }

    /// Notes that an answer may have been missed.
    pub(super) fn doubt(&mut self) {
        self.is_in_doubt = true;
    }

    /// Lets nothing more begin. What waits is overdue from now on.
    pub(super) fn rest(&mut self) {
        self.rests = true;
    }

    pub(super) fn rests(&self) -> bool {
        self.rests
    }

    /// The time at which the next line has waited for too long.
    pub(super) fn overdue_at(&self) -> Option<Instant> {
        let next = self.waiting.iter().find(|waiting| !waiting.is_recalled)?;
        Some(if self.rests {
            next.since
        } else {
            next.since + AHEAD_WAIT_MOST
        })
    }

    /// Takes a line that has waited for too long, and is to be recalled.
    pub(super) fn overdue(&mut self, now: Instant) -> Option<u64> {
        let rests = self.rests;
        let mut waiting = self.waiting.iter_mut();
        let next = waiting.find(|waiting| !waiting.is_recalled)?;
        if !rests && now < next.since + AHEAD_WAIT_MOST {
            return None;
        }
        next.is_recalled = true;
        Some(next.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_micros(100);

    /// Sends lines from `first` on as long as there is room. Returns the next one.
    fn fill(lines: &mut Lines, mut next: u64, now: Instant) -> u64 {
        while lines.has_room() {
            lines.sent(next, now);
            next += 1;
        }
        next
    }

    #[test]
    fn as_many_are_ahead_as_are_through_in_time() {
        for (took, at_a_time, most) in [
            (QUICK, 1, 17),
            (QUICK, 4, 20),
            (Duration::from_micros(500), 1, 5),
            (Duration::from_millis(1), 2, 6),
            (Duration::from_millis(3), 2, 2),
            (Duration::from_secs(60), 1, 1),
        ] {
            let mut lines = Lines::new(at_a_time, 16);
            let now = Instant::now();
            assert_eq!(fill(&mut lines, 0, now), at_a_time as u64, "at first");
            lines.over(0, now + took);
            let next = fill(&mut lines, at_a_time as u64, now + took);
            assert_eq!(next, most + 1, "{took:?}");
        }
    }

    fn waiting(lines: &Lines) -> Vec<u64> {
        (0..5).filter(|line| lines.waits(*line)).collect()
    }

    #[test]
    fn a_line_begins_when_an_earlier_one_is_answered() {
        let mut lines = Lines::new(2, 16);
        let now = Instant::now();
        for line in 0..5 {
            lines.sent(line, now);
        }
        assert_eq!(waiting(&lines), [2, 3, 4]);
        lines.over(1, now + QUICK);
        assert_eq!(waiting(&lines), [3, 4]);
        // It was taken back.
        lines.over(3, now + QUICK);
        lines.over(0, now + QUICK);
        assert_eq!(waiting(&lines), [0; 0]);
        lines.sent(5, now);
        lines.doubt();
        assert!((0..=5).all(|line| !lines.waits(line)), "nothing is sure");
    }

    #[test]
    fn what_waits_for_too_long_is_recalled_once() {
        let mut lines = Lines::new(1, 16);
        let now = Instant::now();
        for line in 0..3 {
            lines.sent(line, now);
        }
        let at = lines.overdue_at().unwrap();
        assert_eq!(at, now + AHEAD_WAIT_MOST);
        assert_eq!(lines.overdue(now), None);
        assert_eq!([lines.overdue(at), lines.overdue(at)], [Some(1), Some(2)]);
        assert_eq!((lines.overdue(at), lines.overdue_at()), (None, None));
        lines.sent(3, at);
        lines.rest();
        assert_eq!(lines.overdue(at), Some(3), "at once");
        assert!(!lines.has_room());
    }
}
