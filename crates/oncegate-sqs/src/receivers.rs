//! Decides how many receivers run, and how many messages each requests. Time is a parameter.

use std::time::Duration;

use tokio::time::Instant;

use super::outbox::BATCH_ENTRIES;
use oncegate_runtime::backoff::Backoff;

/// The most concurrent long polls.
const RECEIVERS_MOST: usize = 64;
/// The time that a receiver that would request fewer than ten messages waits for more free permits.
const LINGER: Duration = Duration::from_millis(20);
/// The delays after failed receives.
const FAILURE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));

/// The receivers of a queue: one while it is empty, and otherwise as many as the free permits
/// allow.
#[derive(Debug)]
pub(crate) struct Receivers {
    width: usize,
    under_way: usize,
    asked: usize,
    failures: u32,
    not_before: Option<Instant>,
    few_since: Option<Instant>,
    /// The time at which to start a receiver that was not started yet.
    wake_at: Option<Instant>,
}

impl Receivers {
    pub(crate) fn new() -> Self {
        Self {
            width: 1,
            under_way: 0,
            asked: 0,
            failures: 0,
            not_before: None,
            few_since: None,
            wake_at: None,
        }
    }

    /// Returns how many messages are requested and not answered yet.
    pub(crate) fn asked(&self) -> usize {
        self.asked
    }

    pub(crate) fn under_way(&self) -> usize {
        self.under_way
    }

    /// Returns how many messages another receiver should request now, when `free` more could run.
    /// `final_room` means that no message in hand will soon free more room.
    pub(crate) fn ask(&mut self, now: Instant, free: usize, final_room: bool) -> Option<usize> {
        self.wake_at = None;
        if free == 0 || free >= BATCH_ENTRIES || final_room {
            self.few_since = None;
        } else {
            self.few_since.get_or_insert(now);
        }
        if free == 0 || self.under_way >= self.width {
            return None;
        }
        let gathered_at = self.few_since.map(|since| since + LINGER);
        self.wake_at = gathered_at
            .into_iter()
            .chain(self.not_before)
            .filter(|at| *at > now)
            .max();
        if self.wake_at.is_some() {
            return None;
        }
        let ask = free.min(BATCH_ENTRIES);
        self.under_way += 1;
        self.asked += ask;
        self.few_since = None;
        Some(ask)
    }

    /// Records that a receiver requested `asked` messages and got `got`. Answers that are at least
    /// half full add receivers, and empty ones remove them. Returns `true` for the first answer
    /// after failures.
    pub(crate) fn answered(&mut self, asked: usize, got: usize) -> bool {
        self.ended(asked);
        let again = self.failures > 0;
        self.failures = 0;
        self.not_before = None;
        if got == 0 {
            self.width = (self.width / 2).max(1);
        } else if got * 2 >= asked {
            self.width = (self.width * 2).min(RECEIVERS_MOST);
        }
        again
    }

    /// Records a failed receive. Returns how many have failed in a row.
    pub(crate) fn failed(&mut self, now: Instant, asked: usize, fraction: f64) -> u32 {
        self.ended(asked);
        self.width = 1;
        self.failures += 1;
        self.not_before = Some(now + FAILURE_BACKOFF.wait(self.failures, fraction));
        self.failures
    }

    /// Returns whether the last receive has failed.
    pub(crate) fn is_failing(&self) -> bool {
        self.failures > 0
    }

    /// Returns when to ask again, if nothing happens before.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.wake_at
    }

    fn ended(&mut self, asked: usize) {
        self.under_way -= 1;
        self.asked -= asked;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks until no further receiver starts; `free` is how many messages could run, including
    /// those requested.
    fn asks(receivers: &mut Receivers, now: Instant, free: usize, final_room: bool) -> Vec<usize> {
        let next = || receivers.ask(now, free.saturating_sub(receivers.asked()), final_room);
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn an_empty_queue_has_one_receiver_and_a_full_one_many() {
        let mut receivers = Receivers::new();
        let now = Instant::now();
        assert_eq!(
            asks(&mut receivers, now, 64, true),
            [10],
            "one, until there is something"
        );
        receivers.answered(10, 10);
        assert_eq!(asks(&mut receivers, now, 64, true), [10, 10]);
        receivers.answered(10, 10);
        receivers.answered(10, 10);
        assert_eq!(
            asks(&mut receivers, now, 64, true),
            [10, 10, 10, 10, 10, 10, 4]
        );
        assert!((0..6).all(|_| !receivers.answered(10, 0)));
        receivers.answered(4, 0);
        assert_eq!(receivers.asked(), 0);
        assert_eq!(asks(&mut receivers, now, 64, true), [10]);
    }

    #[test]
    fn few_permits_wait_a_moment_for_more() {
        let mut receivers = Receivers::new();
        let now = Instant::now();
        assert_eq!(receivers.ask(now, 3, false), None);
        assert_eq!(receivers.next_wake(), Some(now + LINGER));
        assert_eq!(receivers.ask(now + LINGER, 4, false), Some(4));
        receivers.answered(4, 4);
        assert_eq!(
            receivers.ask(now + LINGER, 4, true),
            Some(4),
            "nothing will make it more"
        );
        assert_eq!(receivers.ask(now + LINGER, 0, true), None);
    }

    #[test]
    fn failures_back_off_and_leave_one_receiver() {
        let mut receivers = Receivers::new();
        let now = Instant::now();
        assert_eq!(receivers.ask(now, 10, true), Some(10));
        assert_eq!(receivers.failed(now, 10, 0.0), 1);
        assert_eq!(receivers.ask(now, 10, true), None);
        let again_at = receivers.next_wake().unwrap();
        assert!(again_at > now);
        assert_eq!(receivers.ask(again_at, 64, true), Some(10));
        assert_eq!(receivers.next_wake(), None, "one is under way");
        assert_eq!(receivers.failed(again_at, 10, 0.0), 2);
        assert_eq!(receivers.ask(again_at, 0, true), None);
        assert_eq!(receivers.next_wake(), None, "no receiver is due");
        assert_eq!(receivers.ask(again_at, 10, true), None);
        let later = receivers.next_wake().unwrap();
        assert!(
            receivers.next_wake().unwrap() - again_at > again_at - now,
            "longer each time"
        );
        assert_eq!(receivers.ask(later, 10, true), Some(10));
        assert!(receivers.answered(10, 10), "and the first answer is news");
    }
}
