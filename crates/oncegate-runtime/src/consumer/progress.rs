//! The traces of earlier attempts of a message in this process that its record need not hold.

use std::sync::Arc;

use oncegate_core::key::StoreKey;
use oncegate_core::record::TokenTag;
use tokio::time::Instant;

use super::breaker::FailureCount;
use super::end::End;
use super::erased::TransactionEnd;
use super::retry_writes::UnwrittenRetry;
use super::watch::PastFailures;
use crate::failure::Failure;
use crate::transactional::Excuse;

/// The knowledge of a message's key beside its record. It decides how the next attempt begins.
#[derive(Debug, Default)]
pub(super) enum Progress {
    /// Nothing: a transactional handler may run without a claim.
    #[default]
    New,
    /// The key must be claimed before its handler runs: there is a record, or a process may have
    /// died with it.
    NeedsClaim,
    /// The transaction was rolled back because its handler has failed. The next claim records the
    /// failure.
    RolledBack(RolledBack),
    /// The commit of the transaction with this tag was not answered. The record decides.
    CommitUnanswered(TokenTag),
    /// The effect of an attempt may have happened. The record holds this too, unless it was lost
    /// since.
    EffectUnknown,
}

/// A failed run that left nothing in the store.
#[derive(Debug)]
pub(super) struct RolledBack {
    pub(super) failure: Failure,
    pub(super) count: FailureCount,
}

/// Returns what is known after an attempt that ended so.
pub(super) fn next(before: Progress, end: &End) -> Progress {
    match end {
        End::Lapsing { .. } | End::Discarded { .. } => Progress::EffectUnknown,
        // A record holds the failure.
        End::Retry { .. } | End::Later { .. } | End::GiveUp { .. } => before.claimed(),
        End::Completed
        | End::Duplicate
        | End::HandedOver
        | End::NotHandedOver { .. }
        | End::NotNow { .. }
        | End::NotDue { .. }
        | End::NoAnswer { .. } => before,
    }
}

/// Returns what is known after a transaction without a claim that ended so. A failure that is to be
/// recorded is no part of this: see [`Progress::RolledBack`].
pub(super) fn after_transaction(end: &TransactionEnd, tag: TokenTag) -> Progress {
    match end {
        TransactionEnd::RecordExists
        // Under a claim it is counted if it happens again: it may be the message's own doing.
        | TransactionEnd::Excused { excuse: Excuse::ConnectionLost, .. } => Progress::NeedsClaim,
        TransactionEnd::Unknown(_) => Progress::CommitUnanswered(tag),
        TransactionEnd::Committed
        | TransactionEnd::Held
        | TransactionEnd::NotBegun(_)
        | TransactionEnd::Excused { excuse: Excuse::Conflict, .. }
        | TransactionEnd::Failed { .. }
        | TransactionEnd::Discarded => Progress::New,
    }
}

impl Progress {
    /// Returns what is known once the key was claimed: the store has granted it, so no commit is in
    /// progress.
    pub(super) fn claimed(self) -> Self {
        match self {
            Self::EffectUnknown => Self::EffectUnknown,
            _ => Self::NeedsClaim,
        }
    }

    pub(super) fn is_new(&self) -> bool {
        matches!(self, Self::New)
    }

    pub(super) fn is_effect_unknown(&self) -> bool {
        matches!(self, Self::EffectUnknown)
    }

    pub(super) fn is_rolled_back(&self) -> bool {
        matches!(self, Self::RolledBack(_))
    }
}

/// A message's earlier attempts in this process: what is known of its key, and counts.
#[derive(Debug, Default)]
pub(super) struct Past {
    pub(super) progress: Progress,
    /// `true` if it must not be in a batch with others: it made a batch fail, or ended its process
    /// twice.
    pub(super) runs_alone: bool,
    /// The number of times in a row that its key was busy.
    pub(super) busy: u32,
    /// The number of times in a row that the store could not be asked about its key.
    pub(super) key_unavailable: u32,
    /// The number of attempts in a row that were not counted.
    pub(super) uncounted: u32,
    /// The failures, if it has failed.
    pub(super) failures: Option<Arc<PastFailures>>,
    /// The note that it waits in this process because its retry topic could not be written.
    pub(super) unwritten: Option<UnwrittenRetry>,
}

impl Past {
    /// Notes that the attempt of this number has failed at `now`.
    pub(super) fn failed(
        &mut self,
        now: Instant,
        attempt: u32,
        reason: String,
        key: Option<&StoreKey>,
    ) {
        let before = self.failures.as_deref();
        let times = before.map_or(0, |before| before.times).saturating_add(1);
        self.failures = Some(Arc::new(PastFailures {
            since: before.map_or(now, |before| before.since),
            times: times.max(attempt),
            reason: reason.into(),
            key: key.cloned(),
        }));
    }

    /// Notes that the store has granted the key. Returns the failure that must be recorded before
    /// its handler runs.
    pub(super) fn granted(&mut self) -> Option<RolledBack> {
        self.busy = 0;
        self.key_unavailable = 0;
        match std::mem::take(&mut self.progress) {
            Progress::RolledBack(rolled_back) => {
                self.progress = Progress::NeedsClaim;
                Some(rolled_back)
            }
            progress => {
                self.progress = progress.claimed();
                None
            }
        }
    }

    /// Notes the end of an attempt.
    pub(super) fn ended(&mut self, end: &End) {
        self.progress = next(std::mem::take(&mut self.progress), end);
    }

    /// The tag of a transaction whose commit was not answered.
    pub(super) fn unanswered_commit(&self) -> Option<TokenTag> {
        match self.progress {
            Progress::CommitUnanswered(tag) => Some(tag),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use oncegate_core::record::Token;
    use oncegate_core::store::StoreError;

    use super::*;
    use crate::health::WaitCause;
    use crate::observe::RunOutcome;

    fn tag() -> TokenTag {
        Token::from_bits(7).tag()
    }

    fn all() -> [Progress; 5] {
        let rolled_back = RolledBack {
            failure: Failure::retry("no"),
            count: FailureCount::Counted,
        };
        [
            Progress::New,
            Progress::NeedsClaim,
            Progress::RolledBack(rolled_back),
            Progress::CommitUnanswered(tag()),
            Progress::EffectUnknown,
        ]
    }

    fn name(progress: &Progress) -> &'static str {
        match progress {
            Progress::New => "new",
            Progress::NeedsClaim => "needs claim",
            Progress::RolledBack(_) => "rolled back",
            Progress::CommitUnanswered(_) => "commit unanswered",
            Progress::EffectUnknown => "effect unknown",
        }
    }

    /// The ends of attempts after which the message may come again, and what they make of each
    /// state.
    #[test]
    fn each_end_leads_where_the_table_says() {
        let unchanged = all().map(|progress| name(&progress));
        let wait = End::NotNow {
            ask_again_in: Duration::ZERO,
            cause: WaitCause::Busy,
        };
        let no_answer = End::NoAnswer {
            error: StoreError::unavailable("away"),
        };
        let not_due = End::NotDue {
            due_in: Duration::ZERO,
        };
        let unknown = End::Lapsing {
            attempt: 1,
            lasts: Duration::ZERO,
            reason: String::new(),
        };
        let rows = [
            (wait, unchanged),
            (no_answer, unchanged),
            (not_due, unchanged),
            (unknown, ["effect unknown"; 5]),
        ];
        for (end, expected) in rows {
            let found = all().map(|progress| name(&next(progress, &end)));
            assert_eq!(found, expected, "{end:?}");
        }
    }

    #[test]
    fn a_grant_takes_the_failure_and_keeps_an_unknown_effect() {
        let granted = all().map(|progress| {
            let mut past = Past {
                progress,
                busy: 3,
                ..Past::default()
            };
            let failure = past.granted();
            assert_eq!(past.busy, 0);
            (name(&past.progress), failure.is_some())
        });
        let claimed = ("needs claim", false);
        assert_eq!(
            granted,
            [
                claimed,
                claimed,
                ("needs claim", true),
                claimed,
                ("effect unknown", false)
            ]
        );
    }

    fn excused(excuse: Excuse) -> TransactionEnd {
        TransactionEnd::Excused {
            excuse,
            reason: String::new(),
        }
    }

    #[test]
    fn only_a_traceless_transaction_is_repeated_without_a_claim() {
        let failed = TransactionEnd::Failed {
            failure: Failure::retry("no"),
            outcome: RunOutcome::Failed,
        };
        let rows = [
            (TransactionEnd::Committed, "new"),
            (TransactionEnd::RecordExists, "needs claim"),
            (TransactionEnd::Held, "new"),
            (
                TransactionEnd::NotBegun(StoreError::unavailable("away")),
                "new",
            ),
            (excused(Excuse::Conflict), "new"),
            (excused(Excuse::ConnectionLost), "needs claim"),
            (failed, "new"),
            (TransactionEnd::Discarded, "new"),
            (
                TransactionEnd::Unknown(StoreError::unknown("no answer")),
                "commit unanswered",
            ),
        ];
        for (end, expected) in rows {
            assert_eq!(name(&after_transaction(&end, tag())), expected, "{end:?}");
        }
    }
}
