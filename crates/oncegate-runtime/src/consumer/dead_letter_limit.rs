//! Stops a consumer before it writes a whole topic to the dead letters.
//!
//! A supervisor starts it again. So the stop is kept in the descriptor of its scope, and a process
//! that finds it begins with the counts of the one that stopped: it stops again at the first
//! message that it would have to give up. When a message succeeds and the counts are below the
//! limit, the cause is gone, and so is the stop.

use std::collections::VecDeque;

use oncegate_core::store::DeadLetterStop;

use crate::health::Refusals;

/// The limit of given-up messages at which the consumer counts as faulty instead of the messages.
/// Examples: a typo in a key's path, a downstream that answers everything with "bad request".
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct DeadLetterLimit {
    /// This many messages in a row.
    pub in_a_row: u32,
    /// This share of the last 1,000 messages.
    pub share: f64,
}

impl DeadLetterLimit {
    /// 100 in a row, or half of the last 1,000 messages.
    pub const DEFAULT: Self = Self {
        in_a_row: 100,
        share: 0.5,
    };
    /// The share is taken over this many of the last messages; it is not applied before that many
    /// were seen.
    const WINDOW: usize = 1_000;
}

impl Default for DeadLetterLimit {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Counts the outcomes of the last messages.
#[derive(Debug)]
pub(super) struct DeadLetterGuard {
    limit: DeadLetterLimit,
    in_a_row: u32,
    window: VecDeque<bool>,
    given_up: usize,
    /// `true` while the descriptor holds a stop: that of an earlier process, or of this one.
    is_stop_kept: bool,
}

/// A message that must not be given up, because the limit is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) what: String,
    /// The stop to keep; `None` when one is kept already.
    pub(super) stop: Option<DeadLetterStop>,
}

impl DeadLetterGuard {
    /// Begins with the counts of an earlier process that has stopped at its limit.
    pub(super) fn new(limit: DeadLetterLimit, earlier: Option<&DeadLetterStop>) -> Self {
        let window = VecDeque::with_capacity(DeadLetterLimit::WINDOW);
        let mut guard = Self {
            limit,
            in_a_row: 0,
            window,
            given_up: 0,
            is_stop_kept: false,
        };
        let Some(stop) = earlier else { return guard };
        if stop.of_window > 0 {
            let given_up = usize::try_from(stop.of_window)
                .unwrap_or(usize::MAX)
                .min(DeadLetterLimit::WINDOW);
            (given_up..DeadLetterLimit::WINDOW).for_each(|_| guard.push(false));
            (0..given_up).for_each(|_| guard.push(true));
        }
        guard.in_a_row = stop.in_a_row;
        guard.is_stop_kept = true;
        guard
    }

    /// Counts a message that was handled, or was a duplicate. Returns whether the stop that is kept
    /// is to be removed.
    ///
    /// While one is kept, duplicates do not count: they do not show that what has changed helps.
    pub(super) fn passed(&mut self, is_duplicate: bool) -> bool {
        if self.is_stop_kept && is_duplicate {
            return false;
        }
        self.in_a_row = 0;
        self.push(false);
        let is_over = self.is_stop_kept && self.reached().is_none();
        self.is_stop_kept &= !is_over;
        is_over
    }

    /// Notes that the stop could not be removed: the next success is to try again.
    pub(super) fn still_kept(&mut self) {
        self.is_stop_kept = true;
    }

    /// Counts a message that is about to be given up; `Err` says why it must not be. `now_ms` is
    /// since the Unix epoch.
    pub(super) fn giving_up(&mut self, now_ms: u64) -> Result<(), Refusal> {
        if let Some((what, of_window)) = self.reached() {
            let stop = DeadLetterStop {
                at_ms: now_ms,
                what: what.clone(),
                in_a_row: self.in_a_row,
                of_window,
            };
            let stop = (!self.is_stop_kept).then_some(stop);
            self.is_stop_kept = true;
            return Err(Refusal { what, stop });
        }
        self.in_a_row += 1;
        self.push(true);
        Ok(())
    }

    /// The limit that is reached, in words, and how many of the window were given up if it is that
    /// of the window.
    fn reached(&self) -> Option<(String, u32)> {
        if self.in_a_row >= self.limit.in_a_row {
            return Some((
                format!("{} messages in a row were given up", self.in_a_row),
                0,
            ));
        }
        let full = self.window.len() >= DeadLetterLimit::WINDOW;
        #[expect(clippy::cast_precision_loss, reason = "both are at most the window")]
        let share = self.given_up as f64 / DeadLetterLimit::WINDOW as f64;
        (full && share >= self.limit.share).then(|| {
            let given_up = self.given_up;
            let window = DeadLetterLimit::WINDOW;
            let what = format!("{given_up} of the last {window} messages were given up");
            (what, u32::try_from(given_up).unwrap_or(u32::MAX))
        })
    }

    /// Returns the counts for the monitor.
    pub(super) fn refusals(&self) -> Refusals {
        Refusals {
            in_a_row: self.in_a_row,
            most_in_a_row: self.limit.in_a_row,
        }
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

    const NOW_MS: u64 = 7;

    fn refused(guard: &mut DeadLetterGuard) -> Refusal {
        guard.giving_up(NOW_MS).unwrap_err()
    }

    #[test]
    fn too_many_in_a_row_stop_it() {
        let mut guard = DeadLetterGuard::new(
            DeadLetterLimit {
                in_a_row: 3,
                share: 1.0,
            },
            None,
        );
        assert!((0..3).all(|_| guard.giving_up(NOW_MS).is_ok()));
        let refusal = refused(&mut guard);
        assert!(refusal.what.contains("3 messages in a row"));
        assert_eq!(
            refusal
                .stop
                .map(|stop| (stop.at_ms, stop.in_a_row, stop.of_window)),
            Some((NOW_MS, 3, 0))
        );
        assert_eq!(refused(&mut guard).stop, None, "it is kept once");
        assert!(guard.passed(false), "the stop is over");
        assert!(guard.giving_up(NOW_MS).is_ok());
    }

    #[test]
    fn too_large_a_share_stops_it_once_the_window_is_full() {
        let limit = DeadLetterLimit {
            in_a_row: 1_000,
            share: 0.25,
        };
        let mut guard = DeadLetterGuard::new(limit, None);
        for n in 0..DeadLetterLimit::WINDOW {
            if n % 4 == 0 {
                guard.giving_up(NOW_MS).unwrap();
            } else {
                guard.passed(false);
            }
        }
        let refusal = refused(&mut guard);
        assert!(refusal.what.contains("250 of the last 1000"));
        let stop = refusal.stop.unwrap();
        (0..DeadLetterLimit::WINDOW).for_each(|_| _ = guard.passed(false));
        assert!(guard.giving_up(NOW_MS).is_ok());

        let mut restarted = DeadLetterGuard::new(limit, Some(&stop));
        assert!(
            !restarted.passed(false),
            "one success is no proof of a share"
        );
        assert!(
            refused(&mut restarted)
                .what
                .contains("250 of the last 1000")
        );
        let over = (0..DeadLetterLimit::WINDOW)
            .filter(|_| restarted.passed(false))
            .count();
        assert_eq!(over, 1, "the stop ends once, when the share is lower");
        assert!(restarted.giving_up(NOW_MS).is_ok());
    }

    #[test]
    fn after_a_stop_nothing_is_given_up_before_a_success() {
        let stop = DeadLetterStop {
            at_ms: 1,
            what: "3 in a row".into(),
            in_a_row: 3,
            of_window: 0,
        };
        let limit = DeadLetterLimit {
            in_a_row: 3,
            share: 1.0,
        };
        let mut restarted = DeadLetterGuard::new(limit, Some(&stop));
        assert!(!restarted.passed(true), "a duplicate shows nothing");
        let refusal = refused(&mut restarted);
        assert_eq!(refusal.stop, None, "it is kept already");
        assert!(restarted.passed(false));
        restarted.still_kept();
        assert!(
            restarted.passed(false),
            "the next success tries to remove it again"
        );
        assert!(restarted.giving_up(NOW_MS).is_ok());

        let raised = DeadLetterLimit {
            in_a_row: 5,
            share: 1.0,
        };
        let mut restarted = DeadLetterGuard::new(raised, Some(&stop));
        assert!(
            (0..2).all(|_| restarted.giving_up(NOW_MS).is_ok()),
            "a higher limit leaves the difference"
        );
        assert!(refused(&mut restarted).what.contains("5 messages in a row"));
    }
}
