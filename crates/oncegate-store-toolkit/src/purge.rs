//! The pace of a store's purge of expired records, and its backlog.
//!
//! Removing records uses the same disk and processors as claims do, so no fixed speed fits: what is
//! too slow for one store disturbs another for nothing. A purge scans all records, in small steps.
//! It adapts two times to what it finds:
//!
//! - **the interval between two scans**: as long as it takes for one record in twenty to expire, so
//!   that expired records take about a twentieth of the space, whatever the rate is;
//! - **the pause after a step**: four times as long as the step if nothing had expired, and none if
//!   much had. A purge that is behind works without pauses.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The share of all records that may have expired when a scan begins.
const WANTED_SHARE: f64 = 0.05;

/// A table with fewer records than this is treated as if it had this many: hurrying would cost more
/// than it frees.
const LEAST_RECORDS: f64 = 100_000.0;

/// The time from the start of a store to its first scan, when nothing is known yet.
const FIRST_INTERVAL: Duration = Duration::from_secs(5);

/// The shortest time between the beginnings of two scans, and the shortest rest.
const SHORTEST_REST: Duration = Duration::from_millis(10);

/// The longest pause after a step in which nothing had expired, as a multiple of the step.
const MOST_PAUSES: f64 = 4.0;

/// The result of a step or a scan of a purge.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PurgeStep {
    /// The duration.
    pub took: Duration,
    /// The number of records that were read, expired or not.
    pub met: u64,
    /// The number of expired ones among them.
    pub expired: u64,
}

/// Decides when a purge pauses, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// The longest time between the beginnings of two scans; the operator's setting.
    longest: Duration,
    /// The current interval between the beginnings of two scans.
    interval: Duration,
    /// The pause after a step in which nothing had expired, as a multiple of the step.
    pauses: f64,
}

impl Pace {
    /// A pace whose scans begin at most `longest` apart.
    pub fn new(longest: Duration) -> Self {
        let longest = longest.max(SHORTEST_REST);
        Self {
            longest,
            interval: FIRST_INTERVAL.min(longest),
            pauses: MOST_PAUSES,
        }
    }

    /// The interval between the beginnings of two scans.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Returns the rest after an error: at least `shortest`, but no longer than the longest
    /// interval between scans.
    pub fn after_error(&self, shortest: Duration) -> Duration {
        self.interval.max(shortest).min(self.longest)
    }

    /// Returns the pause after a step within a scan.
    pub fn pause(&self, step: PurgeStep) -> Duration {
        let share = if step.met == 0 {
            0.0
        } else {
            step.expired as f64 / step.met as f64
        };
        step.took
            .mul_f64(self.pauses * (1.0 - share / WANTED_SHARE).max(0.0))
    }

    /// Adapts to a scan of all records, and returns the rest before the next one.
    ///
    /// `since_last` is the time between its beginning and that of the previous scan: the records
    /// that it found have expired in that time.
    pub fn walked(&mut self, walk: PurgeStep, since_last: Duration) -> Duration {
        let share = walk.expired as f64 / (walk.met as f64).max(LEAST_RECORDS);
        let most = self.interval.saturating_mul(2);
        self.interval = match share {
            0.0 => most,
            // One scan that found a backlog is weak evidence of the rate: it shortens the interval
            // step by step.
            _ => seconds(since_last.as_secs_f64() * WANTED_SHARE / share)
                .clamp(self.interval / 4, most),
        };
        self.interval = self.interval.clamp(SHORTEST_REST, self.longest);
        // A scan that takes longer than its interval is behind: its pauses become shorter.
        self.pauses = match walk.took {
            took if took > self.interval => {
                if self.pauses < 0.25 {
                    0.0
                } else {
                    self.pauses / 2.0
                }
            }
            took if took < self.interval / 2 => (self.pauses * 2.0).clamp(0.25, MOST_PAUSES),
            _ => self.pauses,
        };
        self.interval.saturating_sub(walk.took).max(SHORTEST_REST)
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// The backlog of a purge: the time at which the oldest expired record that may still be in the
/// store expired.
#[derive(Debug, Default)]
pub struct Backlog {
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// No scan has read anything, or another process does the scans.
    #[default]
    Unknown,
    /// The last scan found nothing expired.
    None,
    /// The store may hold records that have expired since this time.
    Since(Instant),
}

impl Backlog {
    /// Returns the time since the oldest expired record that may still be in the store expired;
    /// zero when there is none, and `None` when this process does not know.
    pub fn age(&self) -> Option<Duration> {
        match *self.lock() {
            State::Unknown => None,
            State::None => Some(Duration::ZERO),
            State::Since(instant) => Some(instant.elapsed()),
        }
    }

    /// Notes that a step has read a record that expired `age` ago.
    pub fn met(&self, age: Duration) {
        let Some(expired_at) = Instant::now().checked_sub(age) else {
            return;
        };
        let mut state = self.lock();
        match *state {
            State::Since(earlier) if earlier <= expired_at => {}
            _ => *state = State::Since(expired_at),
        }
    }

    /// Notes the end of a scan. `began` is its beginning. `found` is `true` when it read anything
    /// expired. `left` is the time since the oldest record expired that it could not remove.
    pub fn walked(&self, began: Instant, found: bool, left: Option<Duration>) {
        *self.lock() = match left.and_then(|age| Instant::now().checked_sub(age)) {
            Some(left) => State::Since(left.min(began)),
            // Records that it had already passed may have expired in the meantime, and are still
            // there.
            None if found => State::Since(began),
            None => State::None,
        };
    }

    /// Notes that another process does the scans, and knows more.
    pub fn not_ours(&self) {
        *self.lock() = State::Unknown;
    }

    /// Locks the state. It is one value, so a panic elsewhere leaves it consistent.
    fn lock(&self) -> parking_lot::MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store that receives this many records a second, each kept for a while, and the cost of its
    /// steps.
    struct Model {
        rate: f64,
        retention: Duration,
        /// The seconds that a scan takes for a record that has not expired, and for one that it
        /// removes.
        look: f64,
        remove: f64,
    }

    impl Model {
        /// Scans for `time`; returns the largest share of expired records in its second half.
        fn worst_share(&self, longest: Duration, time: Duration) -> f64 {
            let mut pace = Pace::new(longest);
            let mut removed_until: f64 = 0.0;
            let mut last_began: f64 = 0.0;
            let retention = self.retention.as_secs_f64();
            let mut worst: f64 = 0.0;
            let mut now = pace.interval().as_secs_f64();
            while now < time.as_secs_f64() {
                let expired_until = (now - retention).max(0.0);
                let live = (now - expired_until) * self.rate;
                let expired = (expired_until - removed_until) * self.rate;
                if now > time.as_secs_f64() / 2.0 {
                    worst = worst.max(expired / live);
                }
                let began = now;
                // Records are stored in order of arrival: first the expired ones, then the others.
                for (met, expired) in [(expired, expired), (live, 0.0)] {
                    let took = seconds(met * self.look + expired * self.remove);
                    let step = PurgeStep {
                        took,
                        met: met as u64,
                        expired: expired as u64,
                    };
                    now += (took + pace.pause(step)).as_secs_f64();
                }
                removed_until = expired_until;
                let walk = PurgeStep {
                    took: seconds(now - began),
                    met: (live + expired) as u64,
                    expired: expired as u64,
                };
                now += pace.walked(walk, seconds(began - last_began)).as_secs_f64();
                last_began = began;
            }
            worst
        }
    }

    const MINUTE: Duration = Duration::from_secs(60);

    // invariant: purge-too-slow
    #[test]
    fn expired_records_take_little_room_at_any_rate_and_retention() {
        for rate in [500.0, 10_000.0, 60_000.0] {
            for retention in [MINUTE / 6, MINUTE * 10, MINUTE * 60 * 24] {
                let model = Model {
                    rate,
                    retention,
                    look: 0.000_000_3,
                    remove: 0.000_008,
                };
                let share = model.worst_share(MINUTE * 10, retention * 20 + MINUTE * 120);
                let few = rate * retention.as_secs_f64() < LEAST_RECORDS;
                let most = if few {
                    LEAST_RECORDS * 0.11 / (rate * retention.as_secs_f64())
                } else {
                    0.11
                };
                assert!(share <= most, "{share} at {rate}/s for {retention:?}");
            }
        }
    }

    #[test]
    fn a_purge_whose_walks_take_too_long_gives_up_its_pauses() {
        let mut pace = Pace::new(MINUTE);
        let clean = PurgeStep {
            took: Duration::from_millis(10),
            met: 1_000,
            expired: 0,
        };
        assert_eq!(pace.pause(clean), Duration::from_millis(40));
        assert_eq!(
            pace.pause(PurgeStep {
                expired: 100,
                ..clean
            }),
            Duration::ZERO
        );
        let walk = PurgeStep {
            took: MINUTE * 5,
            met: 1_000_000,
            expired: 300_000,
        };
        for _ in 0..8 {
            assert_eq!(pace.walked(walk, MINUTE), SHORTEST_REST);
        }
        assert_eq!(pace.pause(clean), Duration::ZERO);
        let idle = PurgeStep {
            took: Duration::from_millis(10),
            met: 1_000_000,
            expired: 0,
        };
        for _ in 0..20 {
            pace.walked(idle, MINUTE);
        }
        assert_eq!(
            pace.pause(clean),
            Duration::from_millis(40),
            "there is time for them again"
        );
        assert_eq!(pace.interval(), MINUTE);
    }

    #[test]
    fn a_few_expired_records_are_no_reason_to_hurry() {
        let mut pace = Pace::new(MINUTE);
        for _ in 0..20 {
            pace.walked(
                PurgeStep {
                    took: Duration::from_millis(1),
                    met: 10,
                    expired: 9,
                },
                MINUTE,
            );
        }
        assert_eq!(pace.interval(), MINUTE);
    }

    #[test]
    fn what_is_left_grows_older_until_it_is_removed() {
        const HOUR: Duration = Duration::from_secs(3_600);
        let backlog = Backlog::default();
        assert_eq!(backlog.age(), None);
        backlog.walked(Instant::now(), false, None);
        assert_eq!(backlog.age(), Some(Duration::ZERO));
        backlog.met(HOUR);
        backlog.met(HOUR / 2);
        assert!(
            backlog.age() >= Some(HOUR),
            "the oldest counts, also while a walk is under way"
        );
        backlog.walked(Instant::now(), true, Some(HOUR / 2));
        assert!(backlog.age() >= Some(HOUR / 2) && backlog.age() < Some(HOUR));
        backlog.walked(Instant::now(), true, None);
        assert!(backlog.age() < Some(HOUR / 2));
        backlog.not_ours();
        assert_eq!(backlog.age(), None);
    }
}
