//! Stops a consumer before it writes a whole topic to the dead letters.

use std::collections::VecDeque;

use crate::health::Refusals;

/// How many messages may be given up before the consumer counts as faulty instead of the messages. Examples: a typo in
/// a key's path, a downstream that answers everything with "bad request".
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeadLetterLimit {
    /// This many in a row. 100 by default.
    pub in_a_row: u32,
    /// This share of the last [`WINDOW`](Self::WINDOW) messages. 0.5 by default.
    pub share: f64,
}

impl DeadLetterLimit {
    /// The share is taken over this many of the last messages; it is not applied before that many were seen.
    pub const WINDOW: usize = 1_000;
}

impl Default for DeadLetterLimit {
    fn default() -> Self {
        Self { in_a_row: 100, share: 0.5 }
    }
}

/// Counts the outcomes of the last messages.
#[derive(Debug)]
pub(super) struct DeadLetterGuard {
    limit: DeadLetterLimit,
    in_a_row: u32,
    window: VecDeque<bool>,
    given_up: usize,
}

impl DeadLetterGuard {
    pub(super) fn new(limit: DeadLetterLimit) -> Self {
        Self { limit, in_a_row: 0, window: VecDeque::with_capacity(DeadLetterLimit::WINDOW), given_up: 0 }
    }

    /// Counts a message that was handled, or was a duplicate.
    pub(super) fn passed(&mut self) {
        self.in_a_row = 0;
        self.push(false);
    }

    /// Counts a message that is about to be given up; `Err` holds the reason why it must not be.
    pub(super) fn giving_up(&mut self) -> Result<(), String> {
        if self.in_a_row >= self.limit.in_a_row {
            return Err(format!("{} messages in a row were given up", self.in_a_row));
        }
        let full = self.window.len() >= DeadLetterLimit::WINDOW;
        #[expect(clippy::cast_precision_loss, reason = "both are at most the window")]
        let share = self.given_up as f64 / DeadLetterLimit::WINDOW as f64;
        if full && share >= self.limit.share {
            return Err(format!(
                "{} of the last {} messages were given up",
                self.given_up,
                DeadLetterLimit::WINDOW
            ));
        }
        self.in_a_row += 1;
        self.push(true);
        Ok(())
    }

    /// Returns the counts for the monitor.
    pub(super) fn refusals(&self) -> Refusals {
        Refusals { in_a_row: self.in_a_row, most_in_a_row: self.limit.in_a_row }
    }

    fn push(&mut self, given_up: bool) {
        if self.window.len() >= DeadLetterLimit::WINDOW && self.window.pop_front() == Some(true) {
            self.given_up -= 1;
        }
        self.window.push_back(given_up);
        self.given_up += usize::from(given_up);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_in_a_row_stop_it() {
        let mut guard = DeadLetterGuard::new(DeadLetterLimit { in_a_row: 3, share: 1.0 });
        assert!((0..3).all(|_| guard.giving_up().is_ok()));
        assert!(guard.giving_up().unwrap_err().contains("3 messages in a row"));
        guard.passed();
        assert!(guard.giving_up().is_ok());
    }

    #[test]
    fn too_large_a_share_stops_it_once_the_window_is_full() {
        let mut guard = DeadLetterGuard::new(DeadLetterLimit { in_a_row: 1_000, share: 0.25 });
        for n in 0..DeadLetterLimit::WINDOW {
            if n % 4 == 0 { guard.giving_up().unwrap() } else { guard.passed() }
        }
        assert!(guard.giving_up().unwrap_err().contains("250 of the last 1000"));
        (0..DeadLetterLimit::WINDOW).for_each(|_| guard.passed());
        assert!(guard.giving_up().is_ok());
    }
}
