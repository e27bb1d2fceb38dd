//! The entries of a lease in its gate's journal.

use std::time::Duration;

use oncegate_core::record::Recovery;
use oncegate_core::rules::{Grant, REOPENED};

use super::journal::FAIL_OPEN;
use super::lease::Lease;
use crate::journal::{JournalEntry, TAKEOVER};

impl Lease {
    /// Notes that the lease was granted.
    pub(super) fn note_claimed(&self, grant: Grant) {
        let why = match grant.recovery {
            _ if grant.reopened => REOPENED,
            Recovery::Takeover => TAKEOVER,
            Recovery::None | Recovery::Earlier => "",
        };
        self.gate.notes.note(|| self.entry("claimed", why));
    }

    /// Notes how the lease ended.
    pub(super) fn note_ended(&self, event: &str, reason: &str) {
        self.gate.notes.note(|| JournalEntry {
            took_ms: Some(millis(self.granted_at.elapsed())),
            ..self.entry(event, reason)
        });
    }

    fn entry(&self, event: &str, reason: &str) -> JournalEntry {
        let fencing_token = self.attempt.fencing_token();
        let reason = if self.gate.is_fail_open && reason.is_empty() {
            FAIL_OPEN
        } else {
            reason
        };
        let entry = JournalEntry::now(event)
            .key(&self.identity.key)
            .attempt(self.attempt.number())
            .origin(self.message.origin());
        JournalEntry {
            fencing_token,
            ..entry.run(self.token.tag()).why(reason)
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
