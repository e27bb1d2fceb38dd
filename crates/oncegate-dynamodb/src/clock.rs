//! The store's time: what the service's answers say of it, as an interval.
//!
//! DynamoDB lends no clock to a condition, so a writer has to bring an instant. If each brought its
//! machine's, a process whose clock is minutes ahead would take over claims that are alive. So no
//! machine's wall clock is used. Each answer of the service has its time in the header `Date`, in
//! whole seconds. An answer that was asked for at `sent` and came at `received`, both on the
//! process's monotonic clock, proves two things about the difference between the clocks:
//!
//! ```text
//! service − monotonic  ≥  Date − received              it was not later than Date when it answered
//! service − monotonic  ≤  Date + DATE_SPAN − sent      … nor older than DATE_SPAN
//! ```
//!
//! Each answer narrows the interval of that difference, and the drift of the two clocks widens it
//! again. Every decision is made with both ends of it:
//!
//! - a claim, a heartbeat and a retention are written from the **latest** instant: for others they
//!   end no earlier than for their owner, who measures its lease on its own monotonic clock from
//!   before it has sent the claim;
//! - a lease, a delay or a retention of another owner is over only when it is over at the
//!   **earliest** instant, too.
//!
//! So two processes may differ by the whole width of their intervals, and a lease is taken over too
//! late and never too early. The price: after a crash, a takeover is a second or two later.
//!
//! What is left is the time in the answers itself. A proxy that changes it would mislead a process.
//! So a process whose wall clock and answers differ by more than [`DISAGREEMENT_MOST`] gets no
//! claim: one of the two is wrong, and DynamoDB takes no signatures of such a wall clock either.
//! Answers that are falsified by less are not noticed.
//!
//! An answer that contradicts the interval, because the machine was suspended or another server of
//! the service has another clock, widens the interval to include both; later answers narrow it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate_core::record::StoreTime;
use parking_lot::Mutex;

/// The most by which the service's time may be ahead of the `Date` of an answer: one second of
/// resolution, and one for servers that renew the header's text once a second.
const DATE_SPAN_US: i64 = 2_000_000;

/// The drift of a machine's monotonic clock against the service's: one part in this many. Linux
/// changes the rate of its clock by at most one part in 2,000.
const DRIFT_DIVISOR: i64 = 1_000;

/// A wall clock that has advanced by so much more than the monotonic clock tells that the machine
/// was suspended.
const SUSPENDED_US: i64 = 1_000_000;

/// The most by which this machine's wall clock may differ from the time in the answers while claims
/// are made: that of signatures (AWS Signature Version 4).
pub(crate) const DISAGREEMENT_MOST: Duration = Duration::from_secs(300);

/// The earliest and the latest instant that it may be on the service's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Now {
    pub(crate) earliest: StoreTime,
    pub(crate) latest: StoreTime,
}

/// A reading of this process's clocks, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    monotonic_us: i64,
    /// Used only to notice that the machine was suspended.
    wall_us: i64,
}

/// The difference between the service's clock and the monotonic one, as it was at a reading.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    at: Reading,
    low_us: i64,
    high_us: i64,
}

/// The service's clock, as this process knows it.
#[derive(Debug)]
pub(crate) struct ServiceClock {
    origin: Instant,
    source: ClockSource,
    /// An error of the wall clock, for tests.
    wall_error_us: i64,
    bounds: Mutex<Option<Bounds>>,
}

/// The origin of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClockSource {
    /// The service's answers.
    Answers,
    /// The clock of this machine, which a test shares with its server.
    #[cfg(feature = "testing")]
    Machine,
}

impl ServiceClock {
    pub(crate) fn new(source: ClockSource, wall_error_us: i64) -> Self {
        Self {
            origin: Instant::now(),
            source,
            wall_error_us,
            bounds: Mutex::new(None),
        }
    }

    /// Reads the clocks of this process.
    pub(crate) fn reading(&self) -> Reading {
        Reading {
            monotonic_us: micros(self.origin.elapsed()),
            wall_us: wall_us().saturating_add(self.wall_error_us),
        }
    }

    /// Learns from an answer with this `Date`, in seconds since 1970.
    pub(crate) fn learn(&self, sent: Reading, received: Reading, date_s: i64) {
        let mut bounds = self.bounds.lock();
        let sample = Bounds::of_answer(sent, received, date_s);
        *bounds = Some(match *bounds {
            Some(known) => known.at(received).narrowed(sample),
            None => sample,
        });
    }

    /// The service's time now. `None` before the first answer.
    pub(crate) fn now(&self) -> Option<Now> {
        #[cfg(feature = "testing")]
        if self.source == ClockSource::Machine {
            let now = StoreTime::from_micros(u64::try_from(wall_us()).unwrap_or_default());
            return Some(Now {
                earliest: now,
                latest: now,
            });
        }
        let reading = self.reading();
        let bounds = (*self.bounds.lock())?;
        Some(bounds.at(reading).now())
    }

    /// Returns how far this machine's wall clock is from the service's time, at least; zero while
    /// that is within what is known of it.
    pub(crate) fn wall_error(&self) -> Duration {
        let reading = self.reading();
        let Some(bounds) = (*self.bounds.lock()).filter(|_| self.source == ClockSource::Answers)
        else {
            return Duration::ZERO;
        };
        let bounds = bounds.at(reading);
        let own_us = reading.wall_us - reading.monotonic_us;
        let error_us = (own_us - bounds.high_us).max(bounds.low_us - own_us).max(0);
        Duration::from_micros(error_us.unsigned_abs())
    }
}

impl Bounds {
    fn of_answer(sent: Reading, received: Reading, date_s: i64) -> Self {
        let date_us = date_s.saturating_mul(1_000_000);
        Self {
            at: received,
            low_us: date_us.saturating_sub(received.monotonic_us),
            high_us: date_us
                .saturating_add(DATE_SPAN_US)
                .saturating_sub(sent.monotonic_us),
        }
    }

    /// The bounds at a later reading: wider by the drift, and by the time of a suspension, which
    /// the monotonic clock does not count.
    fn at(self, reading: Reading) -> Self {
        let passed_us = (reading.monotonic_us - self.at.monotonic_us).max(0);
        let slept_us = reading.wall_us - self.at.wall_us - passed_us;
        let slept_us = if slept_us > SUSPENDED_US { slept_us } else { 0 };
        let drift_us = passed_us / DRIFT_DIVISOR;
        Self {
            at: reading,
            low_us: self.low_us.saturating_sub(drift_us),
            high_us: self
                .high_us
                .saturating_add(drift_us)
                .saturating_add(slept_us),
        }
    }

    fn narrowed(self, sample: Self) -> Self {
        let low_us = self.low_us.max(sample.low_us);
        let high_us = self.high_us.min(sample.high_us);
        if low_us <= high_us {
            return Self {
                low_us,
                high_us,
                ..sample
            };
        }
        Self {
            low_us: self.low_us.min(sample.low_us),
            high_us: self.high_us.max(sample.high_us),
            ..sample
        }
    }

    fn now(self) -> Now {
        Now {
            earliest: self.time(self.low_us),
            latest: self.time(self.high_us),
        }
    }

    /// The service's time by this difference.
    fn time(self, difference_us: i64) -> StoreTime {
        let micros = self.at.monotonic_us.saturating_add(difference_us);
        StoreTime::from_micros(u64::try_from(micros).unwrap_or_default())
    }
}

/// Seconds since 1970 of a header `Date`. `None` if it is none.
pub(crate) fn date_seconds(header: &str) -> Option<i64> {
    let date = httpdate::parse_http_date(header).ok()?;
    let since = date.duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

fn wall_us() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    micros(since)
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;

    /// A world with a true time; each machine has clocks of its own.
    struct Machine {
        /// The monotonic clock gains one microsecond in so many.
        gains_one_in: i64,
        monotonic_lag_us: i64,
        wall_error_us: i64,
        bounds: Option<Bounds>,
    }

    impl Machine {
        fn read(&self, true_us: i64) -> Reading {
            Reading {
                monotonic_us: true_us + true_us / self.gains_one_in - self.monotonic_lag_us,
                wall_us: true_us + self.wall_error_us,
            }
        }

        /// A call that takes this long there and back; the service makes its header in between,
        /// from a text that is `stale_us` old.
        fn call(&mut self, sent_us: i64, there_us: i64, back_us: i64, stale_us: i64) {
            let date_s = (sent_us + there_us - stale_us) / SECOND;
            let sent = self.read(sent_us);
            let received = self.read(sent_us + there_us + back_us);
            let sample = Bounds::of_answer(sent, received, date_s);
            self.bounds = Some(match self.bounds {
                Some(known) => known.at(received).narrowed(sample),
                None => sample,
            });
        }

        fn now(&self, true_us: i64) -> (i64, i64) {
            let now = self.bounds.unwrap().at(self.read(true_us)).now();
            (micros_of(now.earliest), micros_of(now.latest))
        }
    }

    fn micros_of(time: StoreTime) -> i64 {
        i64::try_from(time.micros()).unwrap()
    }

    fn machine(rng: &mut fastrand::Rng) -> Machine {
        let sign = if rng.bool() { 1 } else { -1 };
        Machine {
            gains_one_in: sign * rng.i64(2_000..1_000_000),
            monotonic_lag_us: rng.i64(0..500 * SECOND),
            // Minutes to hours, and it decides nothing.
            wall_error_us: rng.i64(-9_000 * SECOND..9_000 * SECOND),
            bounds: None,
        }
    }

    // invariant: store-time-bounds
    #[test]
    fn the_true_time_is_always_within_the_bounds() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..300 {
            let mut machine = machine(&mut rng);
            let mut at_us = 1_000 * SECOND;
            for _ in 0..100 {
                let there_us = rng.i64(0..SECOND / 2);
                let back_us = rng.i64(0..SECOND / 2);
                machine.call(at_us, there_us, back_us, rng.i64(0..SECOND));
                at_us += there_us + back_us + rng.i64(0..20 * SECOND);
                let (earliest, latest) = machine.now(at_us);
                assert!(
                    earliest <= at_us && at_us <= latest,
                    "seed {seed}: {earliest} {at_us} {latest}"
                );
            }
        }
    }

    // invariant: store-time-bounds
    #[test]
    fn a_lease_is_never_over_for_others_before_it_is_for_its_owner() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        let lease_us = 30 * SECOND;
        for _ in 0..2_000 {
            let mut owner = machine(&mut rng);
            let mut other = machine(&mut rng);
            let begin_us = 1_000 * SECOND;
            owner.call(begin_us, rng.i64(0..SECOND), rng.i64(0..SECOND), 0);
            let sent_us = begin_us + rng.i64(2 * SECOND..60 * SECOND);
            let end_us = owner.now(sent_us).1 + lease_us;
            // The owner stops when its monotonic clock says so, within the drift of that clock.
            let stops_us = sent_us + lease_us - lease_us / 1_000;
            other.call(
                stops_us - 3 * SECOND,
                100,
                rng.i64(0..SECOND),
                rng.i64(0..SECOND),
            );
            assert!(other.now(stops_us).0 <= end_us, "seed {seed}");
        }
    }

    #[test]
    fn answers_narrow_the_bounds_to_what_a_header_can_tell() {
        let mut machine = machine(&mut fastrand::Rng::with_seed(1));
        machine.gains_one_in = i64::MAX;
        for tenth in 0..20 {
            machine.call(1_000 * SECOND + tenth * SECOND / 10, 500, 500, 0);
        }
        let at_us = 1_002 * SECOND;
        let (earliest, latest) = machine.now(at_us);
        assert!(
            latest - earliest < SECOND + SECOND / 5,
            "{earliest} {latest}"
        );
    }

    #[test]
    fn a_suspended_machine_writes_no_lease_that_is_over_already() {
        let mut machine = machine(&mut fastrand::Rng::with_seed(2));
        machine.call(1_000 * SECOND, 500, 500, 0);
        // Ten minutes pass, and its monotonic clock has stood still.
        machine.monotonic_lag_us += 600 * SECOND;
        let at_us = 1_601 * SECOND;
        let (earliest, latest) = machine.now(at_us);
        assert!(earliest <= at_us && at_us <= latest);
        // Two answers later it knows the time again.
        machine.call(at_us, 500, 500, 0);
        machine.call(at_us + 1_000, 500, 500, 0);
        let (earliest, latest) = machine.now(at_us + 2_000);
        assert!(latest - earliest < 3 * SECOND, "{earliest} {latest}");
    }

    #[test]
    fn an_answer_that_contradicts_counts_as_well() {
        let mut machine = machine(&mut fastrand::Rng::with_seed(3));
        machine.call(1_000 * SECOND, 500, 500, 0);
        // A server whose clock is an hour behind.
        machine.call(1_001 * SECOND, 500, 500, 3_600 * SECOND);
        let (earliest, latest) = machine.now(1_001 * SECOND + 2_000);
        assert!(earliest <= 1_001 * SECOND && 1_001 * SECOND <= latest);
    }

    #[test]
    fn a_date_is_read() {
        assert_eq!(
            date_seconds("Tue, 01 Dec 2026 04:00:00 GMT"),
            Some(1_796_097_600)
        );
        assert_eq!(date_seconds("yesterday"), None);
    }
}
