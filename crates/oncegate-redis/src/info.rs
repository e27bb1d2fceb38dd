//! What a server says of itself: its answer to INFO.

use std::time::{Duration, SystemTime};

/// The answer to INFO.
pub(super) struct Info<'a>(pub(super) &'a str);

impl<'a> Info<'a> {
    pub(super) fn number(&self, field: &str) -> Option<u64> {
        self.get(field)?.parse().ok()
    }

    /// Returns whether the server has this version or a later one. Valkey reports the compatible
    /// Redis version.
    pub(super) fn is_at_least(&self, major: u32, minor: u32) -> bool {
        self.version("redis_version")
            .is_some_and(|version| version >= (major, minor))
    }

    /// The first two numbers of a version.
    pub(super) fn version(&self, field: &str) -> Option<(u32, u32)> {
        let mut parts = self
            .get(field)?
            .split('.')
            .map_while(|part| part.parse().ok());
        Some((parts.next()?, parts.next().unwrap_or(0)))
    }

    /// The server's time when it answered.
    pub(super) fn clock(&self) -> Option<SystemTime> {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(self.number("server_time_usec")?))
    }

    pub(super) fn is_replica(&self) -> bool {
        self.get("role") == Some("slave")
    }

    pub(super) fn get(&self, field: &str) -> Option<&'a str> {
        let lines = self.0.lines().filter_map(|line| line.split_once(':'));
        lines
            .filter(|(name, _)| *name == field)
            .map(|(_, value)| value.trim())
            .next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_the_servers_in_microseconds() {
        let clock = Info("uptime_in_seconds:7\r\nserver_time_usec:1795296867204884\r\n").clock();
        assert_eq!(
            clock,
            Some(SystemTime::UNIX_EPOCH + Duration::from_micros(1_795_296_867_204_884))
        );
        let without = Info("redis_version:7.0.15\r\n").clock();
        assert_eq!(without, None, "an INFO without a clock is valid");
    }
}
