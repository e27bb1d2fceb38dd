//! The library's defaults, in the form of a configuration.

use std::time::Duration;

use oncegate::Consumer;
use oncegate::consumer::Breaker;

pub(super) const CONCURRENCY: u32 = Consumer::DEFAULT_CONCURRENCY;
pub(super) const IN_FLIGHT_MESSAGES: usize = Consumer::DEFAULT_IN_FLIGHT_MESSAGES;
pub(super) const IN_FLIGHT_BYTES: usize = Consumer::DEFAULT_IN_FLIGHT_BYTES;
pub(super) const BACKOFF_FIRST: Duration = Consumer::DEFAULT_BACKOFF.first();
pub(super) const BACKOFF_MOST: Duration = Consumer::DEFAULT_BACKOFF.most();
pub(super) const BREAKER_FIRST: Duration = Breaker::DEFAULT.pause.first();
pub(super) const BREAKER_MOST: Duration = Breaker::DEFAULT.pause.most();

/// The default address of the status page: only this machine can reach it.
pub(crate) const LISTEN: &str = "127.0.0.1:9464";

/// In the largest unit that needs no fraction.
pub(crate) fn time(time: Duration) -> String {
    let millis = time.as_millis();
    let units = [
        ("d", 86_400_000),
        ("h", 3_600_000),
        ("m", 60_000),
        ("s", 1_000),
        ("ms", 1),
    ];
    let unit = units
        .into_iter()
        .find(|(_, unit)| millis >= *unit && millis.is_multiple_of(*unit));
    unit.map_or_else(
        || format!("{millis}ms"),
        |(name, unit)| format!("{}{name}", millis / unit),
    )
}

/// In the largest unit that needs no fraction.
pub(super) fn size(bytes: usize) -> String {
    let units = [
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("B", 1),
    ];
    let unit = units
        .into_iter()
        .find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit));
    unit.map_or_else(
        || format!("{bytes}B"),
        |(name, unit)| format!("{}{name}", bytes / unit),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_they_are_read() {
        let seconds = [
            (1, "1s"),
            (90, "90s"),
            (7 * 86_400, "7d"),
            (900, "15m"),
            (7_200, "2h"),
        ];
        for (value, text) in seconds {
            assert_eq!(time(Duration::from_secs(value)), text);
        }
        assert_eq!(time(Duration::from_millis(100)), "100ms");
        assert_eq!(
            (size(64 << 10), size(8 << 20), size(1000)),
            ("64KiB".into(), "8MiB".into(), "1000B".into())
        );
    }
}
