//! The books: what the callers know from the replies they got, and what that obliges the rules to.

use std::time::Duration;

use oncegate_core::key::Fingerprint;
use oncegate_core::record::{FencingToken, Record, Recovery, State, StoreTime, TAIL};
use oncegate_core::rules::{Grant, ReleaseCause, Reply, Verdict};

use crate::step::{Attempt, LEASE_MS, RETENTION_MS, Step, print, reason, result, token};

/// The promise that was broken, in words.
pub(crate) type Violation = &'static str;

/// The state of the key, as far as the replies show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    Absent,
    Owned {
        by: usize,
        recovery: Recovery,
        fencing_token: Option<FencingToken>,
    },
    /// `by` is `None` after a reopen.
    Released {
        by: Option<usize>,
    },
    Completed {
        by: usize,
    },
    Failed {
        by: usize,
        handed_over: bool,
    },
}

/// The facts that the replies so far show.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct History {
    phase: Phase,
    /// The number of attempts that have asked at least once.
    pub(crate) asked: usize,
    /// The end of the lease or the delay.
    protected_until_ms: u64,
    /// The time after which the record may be forgotten.
    kept_until_ms: u64,
    /// The number of attempts that count.
    counted: u8,
    /// `true` once any attempt has ended without an outcome.
    silent: bool,
    /// `true` if the next attempt takes over from it, because the one that did so was not started.
    untaken: bool,
    fingerprint: Option<Fingerprint>,
    highest_fencing_token: Option<FencingToken>,
}

fn ensure(kept: bool, promise: Violation) -> Result<(), Violation> {
    if kept { Ok(()) } else { Err(promise) }
}

impl History {
    /// The books of a record whose time is over start anew; fencing tokens grow over that.
    pub(crate) fn forget(&mut self, now_ms: u64) {
        if self.phase != Phase::Absent && now_ms > self.kept_until_ms {
            let asked = self.asked;
            let highest_fencing_token = self.highest_fencing_token;
            *self = Self {
                asked,
                highest_fencing_token,
                ..Self::default()
            };
        }
    }

    /// Judges one reply, and the change of the record that came with it; then enters both into the
    /// books.
    pub(crate) fn judge(
        &mut self,
        now: StoreTime,
        step: &Step,
        attempts: &[Attempt],
        before: Option<&Record>,
        after: Option<&Record>,
        reply: &Reply,
    ) -> Result<(), Violation> {
        let earlier = self.clone();
        match (*step, reply) {
            (
                Step::Claim(by),
                Reply::Verdict {
                    verdict,
                    uncompared,
                },
            ) => {
                self.asked = self.asked.max(by + 1);
                self.verdict(now, by, &attempts[by], verdict, *uncompared)?;
            }
            (Step::Claim(_), _) | (_, Reply::Verdict { .. }) => return Err("claims get verdicts"),
            (step, Reply::NotOwner) => self.lost(now, step)?,
            (step, Reply::Applied { recreated }) => self.held(now, step, attempts, *recreated)?,
        }
        let settled = Self {
            asked: earlier.asked,
            ..self.clone()
        } == earlier;
        ensure(
            !settled || before == after,
            "a reply that changes nothing leaves the record as it was",
        )?;
        self.agrees(after)
    }

    fn verdict(
        &mut self,
        now: StoreTime,
        by: usize,
        attempt: &Attempt,
        verdict: &Verdict,
        uncompared: bool,
    ) -> Result<(), Violation> {
        let ours = print(attempt);
        let known = self.phase != Phase::Absent && self.fingerprint != ours;
        let comparable = match (self.fingerprint, ours) {
            (Some(theirs), Some(ours)) => theirs.specification() == ours.specification(),
            _ => false,
        };
        let mismatch = *verdict == Verdict::Mismatch;
        ensure(
            mismatch == (known && comparable),
            "the same key with other content is a mismatch (S14)",
        )?;
        if mismatch {
            return ensure(!uncompared, "a mismatch has been compared");
        }
        ensure(
            uncompared == known,
            "what is not compared is said not to be",
        )?;
        match verdict {
            Verdict::Granted(grant) => self.granted(now, by, ours, attempt.fenced, grant),
            Verdict::Busy { retry_in } => {
                let waiting = match self.phase {
                    Phase::Owned { by: owner, .. } => owner != by,
                    Phase::Released { .. } => true,
                    _ => false,
                };
                let left_ms = (self.protected_until_ms + 1).saturating_sub(now.millis());
                ensure(
                    waiting && left_ms > 0,
                    "busy means that an owner works or a retry is due later",
                )?;
                let exact = *retry_in == Duration::from_millis(left_ms);
                ensure(exact, "busy has the exact wait")
            }
            Verdict::Completed { result: answer } => {
                let Phase::Completed { by } = self.phase else {
                    return Err("completed means completed (S3)");
                };
                ensure(
                    *answer == result(by),
                    "a duplicate gets the first result (S13)",
                )
            }
            Verdict::Failed {
                reason: answer,
                handed_over,
                by: failed_by,
            } => {
                let Phase::Failed {
                    by,
                    handed_over: handed,
                } = self.phase
                else {
                    return Err("failed means failed");
                };
                ensure(*answer == reason(by), "a failure keeps its reason")?;
                ensure(*failed_by == token(by).tag(), "a failure names its owner")?;
                ensure(*handed_over == handed, "a hand-over is remembered")
            }
            Verdict::Mismatch => Ok(()),
        }
    }

    fn granted(
        &mut self,
        now: StoreTime,
        by: usize,
        fingerprint: Option<Fingerprint>,
        fenced: bool,
        grant: &Grant,
    ) -> Result<(), Violation> {
        if let Phase::Owned {
            by: owner,
            recovery,
            fencing_token,
        } = self.phase
            && owner == by
        {
            let same = Grant {
                attempt: self.counted,
                recovery,
                fencing_token,
                reopened: false,
            };
            return ensure(*grant == same, "the same token gets the same grant again");
        }
        let recovery = self.recovery_of_next(now)?;
        let reopened = matches!(self.phase, Phase::Released { by: None });
        ensure(
            grant.reopened == reopened,
            "the first grant after a reopen reports it",
        )?;
        self.counted = self.counted.saturating_add(1);
        ensure(
            grant.attempt == self.counted,
            "attempts count failures and crashes, and nothing else (S18)",
        )?;
        ensure(
            grant.recovery == recovery,
            "a takeover is flagged, now and later",
        )?;
        ensure(
            grant.fencing_token.is_some() == fenced,
            "a grant has a fencing token if one was asked for",
        )?;
        ensure(
            !fenced || grant.fencing_token > self.highest_fencing_token,
            "fencing tokens grow (S6)",
        )?;
        self.highest_fencing_token = self.highest_fencing_token.max(grant.fencing_token);
        self.fingerprint = fingerprint;
        self.phase = Phase::Owned {
            by,
            recovery,
            fencing_token: grant.fencing_token,
        };
        self.protect(now.millis() + LEASE_MS);
        Ok(())
    }

    /// Returns the recovery that a grant to another owner must report, and notes a takeover.
    fn recovery_of_next(&mut self, now: StoreTime) -> Result<Recovery, Violation> {
        let over = now.millis() > self.protected_until_ms;
        match self.phase {
            Phase::Completed { .. } => Err("no grant after completed (S5)"),
            Phase::Failed { .. } => Err("no grant after given up"),
            Phase::Owned { .. } => {
                ensure(
                    over,
                    "a claim is not granted while another owner has the lease",
                )?;
                self.silent = true;
                Ok(Recovery::Takeover)
            }
            Phase::Released { .. } => {
                ensure(over, "a claim is not granted before the retry is due")?;
                Ok(match (self.silent, self.untaken) {
                    (true, true) => Recovery::Takeover,
                    (true, false) => Recovery::Earlier,
                    (false, _) => Recovery::None,
                })
            }
            Phase::Absent => Ok(Recovery::None),
        }
    }

    fn protect(&mut self, until_ms: u64) {
        self.protected_until_ms = until_ms;
        self.kept_until_ms = until_ms + u64::try_from(TAIL.as_millis()).expect("thirty days");
    }

    /// `NotOwner` is never the reply to an owner.
    fn lost(&self, now: StoreTime, step: Step) -> Result<(), Violation> {
        let entitled = match step {
            Step::Complete(_) if self.phase == Phase::Absent => true,
            Step::Extend(by) | Step::Complete(by) | Step::Release { by, .. } | Step::Fail(by) => {
                matches!(self.phase, Phase::Owned { by: owner, .. } if owner == by)
                    || self.ended_so(step)
            }
            Step::HandOver(by) => {
                matches!(self.phase, Phase::Failed { by: owner, .. } if owner == by)
            }
            Step::Reopen => true,
            // What runs is not resolved, nor what is completed, nor a failure as a failure.
            Step::ResolveCompleted(_) | Step::ResolveFailed(_) => {
                self.can_be_resolved(now, step) || self.ended_so(step)
            }
            _ => false,
        };
        ensure(!entitled, "the owner of a claim does not get NotOwner")
    }

    /// Returns whether the attempt of a step has ended in the same way; a heartbeat goes with every
    /// end.
    fn ended_so(&self, step: Step) -> bool {
        let ended = match self.phase {
            Phase::Absent | Phase::Owned { .. } | Phase::Released { by: None } => return false,
            Phase::Released { by: Some(by) }
            | Phase::Completed { by }
            | Phase::Failed { by, .. } => by,
        };
        match (step, self.phase) {
            (Step::Extend(by), _)
            | (Step::Complete(by) | Step::ResolveCompleted(by), Phase::Completed { .. })
            | (Step::Release { by, .. }, Phase::Released { .. })
            | (Step::Fail(by) | Step::ResolveFailed(by), Phase::Failed { .. }) => by == ended,
            _ => false,
        }
    }

    /// Returns whether an operator may end the record so: no attempt runs, and it is not final.
    fn can_be_resolved(&self, now: StoreTime, step: Step) -> bool {
        match self.phase {
            Phase::Owned { .. } => now.millis() > self.protected_until_ms,
            Phase::Released { .. } => true,
            Phase::Failed { .. } => matches!(step, Step::ResolveCompleted(_)),
            Phase::Completed { .. } | Phase::Absent => false,
        }
    }

    fn held(
        &mut self,
        now: StoreTime,
        step: Step,
        attempts: &[Attempt],
        recreated: bool,
    ) -> Result<(), Violation> {
        let absent = self.phase == Phase::Absent;
        let completes = matches!(step, Step::Complete(_));
        ensure(
            recreated == (absent && completes),
            "only a lost claim's completion recreates",
        )?;
        match step {
            Step::HandOver(by) => {
                let Phase::Failed {
                    by: owner,
                    handed_over,
                } = &mut self.phase
                else {
                    return Err("only what failed is handed over");
                };
                *handed_over = true;
                return ensure(
                    *owner == by,
                    "a hand-over marks only the failure that it is of",
                );
            }
            Step::Reopen => {
                self.reopened(now);
                return Ok(());
            }
            Step::ReopenAnother => return Err("a reopen compares what the operator saw"),
            Step::ResolveAnother => return Err("a resolve compares what the operator saw"),
            _ if self.ended_so(step) => return Ok(()),
            Step::ResolveCompleted(_) | Step::ResolveFailed(_) => ensure(
                self.can_be_resolved(now, step),
                "a resolve spares what runs, and what is final",
            )?,
            Step::Complete(by) if absent => self.fingerprint = print(&attempts[by]),
            Step::Extend(by) | Step::Complete(by) | Step::Release { by, .. } | Step::Fail(by) => {
                let owns = matches!(self.phase, Phase::Owned { by: owner, .. } if owner == by);
                ensure(
                    owns,
                    "only the last granted token's writes take effect (S4)",
                )?;
            }
            _ => return Err("only changes are held"),
        }
        self.changed(now, step);
        Ok(())
    }

    fn reopened(&mut self, now: StoreTime) {
        self.phase = Phase::Released { by: None };
        self.counted = 0;
        self.silent = false;
        self.untaken = false;
        self.fingerprint = None;
        self.protect(now.millis() - 1);
    }

    /// Enters a change by the owner.
    fn changed(&mut self, now: StoreTime, step: Step) {
        match step {
            Step::Extend(_) => self.protect(self.protected_until_ms.max(now.millis() + LEASE_MS)),
            Step::Release { by, delay_ms, end } => {
                let (counts, has_outcome) = match end {
                    ReleaseCause::Failed => (true, true),
                    ReleaseCause::Interrupted | ReleaseCause::NotStarted => (false, true),
                    ReleaseCause::Discarded => (true, false),
                    ReleaseCause::Abandoned => (false, false),
                };
                self.counted -= u8::from(!counts);
                self.silent |= !has_outcome;
                let took_over = matches!(
                    self.phase,
                    Phase::Owned {
                        recovery: Recovery::Takeover,
                        ..
                    }
                );
                self.untaken = took_over && end == ReleaseCause::NotStarted;
                self.phase = Phase::Released { by: Some(by) };
                self.protect(now.millis() + delay_ms);
            }
            Step::Complete(by) | Step::ResolveCompleted(by) => {
                self.phase = Phase::Completed { by };
                self.kept_until_ms = now.millis() + RETENTION_MS;
            }
            Step::Fail(by) | Step::ResolveFailed(by) => {
                self.phase = Phase::Failed {
                    by,
                    handed_over: false,
                };
                self.kept_until_ms = now.millis() + RETENTION_MS;
            }
            _ => {}
        }
    }

    /// Checks that the record agrees with this history.
    fn agrees(&self, record: Option<&Record>) -> Result<(), Violation> {
        let Some(record) = record else {
            return ensure(
                self.phase == Phase::Absent,
                "nothing that was promised is forgotten (S17)",
            );
        };
        ensure(self.phase != Phase::Absent, "nothing comes from nothing")?;
        ensure(
            record.expires_at.millis() == self.kept_until_ms,
            "every record expires, and when it should",
        )?;
        ensure(
            record.fingerprint == self.fingerprint,
            "a record keeps its fingerprint",
        )?;
        let agrees = match (&record.state, self.phase) {
            (State::Pending { token: owner, .. }, Phase::Owned { by, .. }) => *owner == token(by),
            (
                State::Released {
                    recovery, attempt, ..
                },
                Phase::Released { .. },
            ) => {
                let is_untaken = *recovery == Recovery::Takeover;
                recovery.recovered() == self.silent
                    && is_untaken == self.untaken
                    && *attempt == self.counted
            }
            (State::Completed { result: kept, .. }, Phase::Completed { by }) => *kept == result(by),
            (
                State::Failed {
                    handed_over,
                    attempt,
                    ..
                },
                Phase::Failed {
                    handed_over: handed,
                    ..
                },
            ) => *handed_over == handed && *attempt == self.counted,
            _ => false,
        };
        ensure(agrees, "the record agrees with the replies")
    }
}
