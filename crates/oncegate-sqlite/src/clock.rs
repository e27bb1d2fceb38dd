//! The store's clock: the machine's wall clock, but it never goes back.
//!
//! All processes on a file share the machine's wall clock, and the file stores the latest time.
//! When the wall clock is set back, the store's clock continues from there at the same pace: leases
//! end on time, and no key waits for the wall clock to catch up. When the wall clock is set
//! forward, leases end early, so running messages may run a second time, and records expire early.
//! So set the clock of a machine before you start its consumers.

use std::time::{SystemTime, UNIX_EPOCH};

use oncegate_core::record::StoreTime;

/// The advance of the clock after which the file must store it again: 1 s.
///
/// A step back of less than this may not be detected, and costs no more than this.
const REMEMBER_EVERY_US: i64 = 1_000_000;

/// The state of the clock in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remembered {
    /// The latest time of the store's clock, in microseconds.
    pub(super) reached_us: i64,
    /// The offset to add to the wall clock, in microseconds.
    pub(super) ahead_us: i64,
}

/// The wall clock, in microseconds since 1970.
pub(super) fn wall_us() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Returns the store's time, and the new state for the file if it must change.
pub(super) fn now(wall_us: i64, remembered: Remembered) -> (StoreTime, Option<Remembered>) {
    let Remembered {
        reached_us,
        ahead_us,
    } = remembered;
    let told_us = wall_us.saturating_add(ahead_us);
    if told_us < reached_us {
        let ahead_us = reached_us.saturating_sub(wall_us);
        return (
            time(reached_us),
            Some(Remembered {
                reached_us,
                ahead_us,
            }),
        );
    }
    let due = told_us.saturating_sub(reached_us) >= REMEMBER_EVERY_US;
    (
        time(told_us),
        due.then_some(Remembered {
            reached_us: told_us,
            ahead_us,
        }),
    )
}

fn time(micros: i64) -> StoreTime {
    StoreTime::from_micros(u64::try_from(micros).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;

    /// Returns the store's times for readings of the wall clock, all in seconds.
    fn store_times(wall_seconds: &[i64]) -> Vec<u64> {
        let mut remembered = Remembered {
            reached_us: 0,
            ahead_us: 0,
        };
        wall_seconds
            .iter()
            .map(|second| {
                let (now, change) = now(second * SECOND, remembered);
                remembered = change.unwrap_or(remembered);
                now.millis() / 1_000
            })
            .collect()
    }

    #[test]
    fn it_follows_the_wall_clock() {
        assert_eq!(store_times(&[100, 101, 105]), [100, 101, 105]);
    }

    #[test]
    fn it_goes_on_when_the_wall_clock_is_set_back() {
        assert_eq!(
            store_times(&[5_000, 1_400, 1_410, 1_430]),
            [5_000, 5_000, 5_010, 5_030]
        );
    }

    #[test]
    fn it_stays_ahead_when_the_wall_clock_strobes() {
        assert_eq!(
            store_times(&[100, 3_700, 100, 110, 3_710, 120]),
            [100, 3_700, 3_700, 3_710, 7_310, 7_310]
        );
    }

    #[test]
    fn it_writes_at_most_once_a_second() {
        let remembered = Remembered {
            reached_us: 10 * SECOND,
            ahead_us: 0,
        };
        assert_eq!(now(10 * SECOND + 999_999, remembered).1, None);
        assert!(now(11 * SECOND, remembered).1.is_some());
    }
}
