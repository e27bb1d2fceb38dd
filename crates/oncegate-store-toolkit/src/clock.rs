//! Compares a store's clock with this machine's.

use std::time::{Duration, SystemTime};

/// The most that two clocks may differ before a warning: far more than the time a busy machine
/// takes for an answer.
const TOLERANCE: Duration = Duration::from_secs(10);

/// Returns a warning for a server whose clock showed `server` between `asked` and `answered`, both
/// by this machine's clock; `None` when the clocks may agree.
pub fn warning(server: SystemTime, asked: SystemTime, answered: SystemTime) -> Option<String> {
    let (seconds, side) = match (
        seconds_apart(server, answered),
        seconds_apart(asked, server),
    ) {
        (Some(ahead), _) => (ahead, "ahead of"),
        (None, Some(behind)) => (behind, "behind"),
        (None, None) => return None,
    };
    Some(format!(
        "The server's clock is {seconds} s {side} this machine's. Leases and retention go by the server's alone; messages that \
         wait in retry topics, ages, and the runs that are counted by the age of their message go by this machine's. Set both \
         by NTP."
    ))
}

/// Returns the seconds that `late` is after `early`; `None` within the tolerance.
fn seconds_apart(late: SystemTime, early: SystemTime) -> Option<u64> {
    late.duration_since(early)
        .ok()
        .filter(|apart| *apart > TOLERANCE)
        .map(|apart| apart.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000 + seconds)
    }

    fn said(server: u64, asked: u64, answered: u64) -> Option<String> {
        warning(at(server), at(asked), at(answered))
    }

    #[test]
    fn only_clocks_that_cannot_agree_are_worth_a_word() {
        assert_eq!(said(110, 100, 100), None);
        assert_eq!(said(90, 100, 100), None);
        // The answer took a minute, and the clock may have been read at any time of it.
        assert_eq!(said(165, 100, 160), None);
        assert!(said(171, 100, 160).unwrap().contains("11 s ahead of"));
        assert!(said(60, 100, 160).unwrap().contains("40 s behind"));
    }
}
