//! A duration as text.

use std::fmt;
use std::time::Duration;

/// A duration in a readable unit.
pub(super) struct Words(pub(super) Duration);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0 => write!(f, "{} ms", self.0.as_millis()),
            1..=119 => write!(f, "{seconds} s"),
            120..=7_199 => write!(f, "{} min", seconds / 60),
            _ => write!(f, "{} h", seconds / 3_600),
        }
    }
}
