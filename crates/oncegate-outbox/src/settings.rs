//! The settings of a relay, and their check.

use std::time::Duration;

use oncegate_core::settings::Finding;
#[cfg(feature = "config")]
use oncegate_core::settings::{Size, Time};

use super::ReadLimits;

/// The settings of a [`Relay`](crate::Relay), besides its outbox and its publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct RelaySettings {
    /// The most messages that are read and in flight at a time.
    pub batch: u32,
    /// The most bytes of their payloads.
    ///
    /// A larger message is sent alone.
    #[cfg_attr(feature = "config", serde(with = "Size"))]
    pub batch_bytes: usize,
    /// The wait before the relay reads an empty outbox again.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub poll_interval: Duration,
    /// The lease of the leader: another relay waits for its end after the leader was killed.
    ///
    /// The leader renews it three times in that time.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub lease: Duration,
    /// The time that sent messages are kept in the table.
    ///
    /// They are there to look at, and are removed in small steps.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub retention: Duration,
    /// The time limit for messages in flight after a stop.
    ///
    /// Those that are not confirmed by then are published again by the next relay.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub stop_deadline: Duration,
}

impl RelaySettings {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        batch: 500,
        batch_bytes: 16 * 1024 * 1024,
        poll_interval: Duration::from_millis(100),
        lease: Duration::from_secs(10),
        retention: Duration::from_secs(86_400),
        stop_deadline: Duration::from_secs(10),
    };

    /// Returns what is wrong with these settings.
    pub fn check(&self) -> Vec<Finding> {
        let wrong = (self.batch == 0)
            .then(|| Finding::new("batch", "at least one message must be in flight"));
        wrong.into_iter().collect()
    }

    /// The limits of a read while nothing is in flight.
    pub(super) fn limits(&self) -> ReadLimits {
        ReadLimits {
            messages: self.batch,
            bytes: self.batch_bytes as u64,
        }
    }
}

impl Default for RelaySettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_of_no_message_is_refused() {
        assert_eq!(RelaySettings::DEFAULT.check(), []);
        let settings = RelaySettings {
            batch: 0,
            ..RelaySettings::DEFAULT
        };
        let findings = settings.check();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].setting, "batch");
    }
}
