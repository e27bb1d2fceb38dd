//! The clock of assignments.

use std::fmt;
use std::time::Instant;

/// The clock; a parameter, so that tests can reach any age.
pub(super) struct Clock(Box<dyn Fn() -> Instant + Send + Sync>);

impl Clock {
    pub(super) fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        Self(Box::new(now))
    }

    pub(super) fn now(&self) -> Instant {
        (self.0)()
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new(Instant::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}
