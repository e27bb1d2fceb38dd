//! The books: what the callers know from the replies they got, and what that obliges the rules to.

use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::Fingerprint;
use oncegate_core::record::{FencingToken, Record, Recovery, State, StoreTime, TAIL, Token};
use oncegate_core::rules::{Grant, Operation, ReleaseCause, Reply, Verdict};

const LEASE_MS: u64 = 2;
const RETENTION_MS: u64 = 3;

/// The promise that was broken, in words.
pub(crate) type Violation = &'static str;

/// What one attempt brings along.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    /// The specification and the content.
    pub(crate) fingerprint: Option<(u8, u8)>,
    pub(crate) fenced: bool,
}

/// Something that happens. Attempts are named by their number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    Tick,
    /// As long as a record outlives its lease.
    Sleep,
    Claim(usize),
    Extend(usize),
    Complete(usize),
    Release {
        by: usize,
        delay_ms: u64,
        end: ReleaseCause,
    },
    Fail(usize),
    HandOver(usize),
    Reopen,
    /// An operator has seen something else.
    ReopenAnother,
}

impl Step {
    /// All steps of so many attempts.
    pub(crate) fn all(attempts: usize) -> Vec<Self> {
        let mut steps = vec![Self::Tick, Self::Sleep, Self::Reopen, Self::ReopenAnother];
        for by in 0..attempts {
            steps.extend([
                Self::Claim(by),
                Self::Extend(by),
                Self::Complete(by),
                Self::Fail(by),
            ]);
            steps.push(Self::HandOver(by));
            for (delay_ms, end) in [
                (0, ReleaseCause::Failed),
                (2, ReleaseCause::Interrupted),
                (2, ReleaseCause::Failed),
                (0, ReleaseCause::NotStarted),
                (2, ReleaseCause::Discarded),
            ] {
                steps.push(Self::Release { by, delay_ms, end });
            }
        }
        steps
    }

    /// The operation of a step, if it can be made now: attempts come into play in their order, and
    /// only one that has asked can do anything else.
    pub(crate) fn operation(
        &self,
        attempts: &[Attempt],
        history: &History,
        record: Option<&Record>,
    ) -> Option<Operation> {
        let asked = |by: usize| by < history.asked;
        let lease = Duration::from_millis(LEASE_MS);
        let retention = Duration::from_millis(RETENTION_MS);
        let operation = match *self {
            Self::Tick | Self::Sleep => return None,
            Self::Claim(by) if by <= history.asked => {
                let Attempt { fenced, .. } = attempts[by];
                Operation::Claim {
                    token: token(by),
                    lease,
                    fingerprint: print(&attempts[by]),
                    fenced,
                    longest_lease: lease,
                }
            }
            Self::Extend(by) if asked(by) => Operation::Extend {
                token: token(by),
                lease,
            },
            Self::Complete(by) if asked(by) => {
                let fingerprint = print(&attempts[by]);
                Operation::Complete {
                    token: token(by),
                    fingerprint,
                    result: result(by),
                    retention,
                }
            }
            Self::Release { by, delay_ms, end } if asked(by) => {
                let delay = Duration::from_millis(delay_ms);
                Operation::Release {
                    token: token(by),
                    delay,
                    end,
                    reason: reason(by),
                }
            }
            Self::Fail(by) if asked(by) => Operation::Fail {
                token: token(by),
                reason: reason(by),
                retention,
            },
            Self::HandOver(by) if asked(by) => Operation::HandOver {
                by: token(by).tag(),
            },
            Self::Reopen => Operation::Reopen {
                expected: record?.clone(),
            },
            Self::ReopenAnother => {
                let state = State::Completed {
                    by: token(9).tag(),
                    result: Bytes::new(),
                };
                Operation::Reopen {
                    expected: Record {
                        state,
                        ..record?.clone()
                    },
                }
            }
            _ => return None,
        };
        Some(operation)
    }
}

fn token(by: usize) -> Token {
    Token::from_bits((by as u128 + 1) << 96)
}

fn print(attempt: &Attempt) -> Option<Fingerprint> {
    attempt.fingerprint.map(|(specification, content)| {
        Fingerprint::from_bytes([
            specification,
            content,
            content,
            content,
            content,
            content,
            content,
        ])
    })
}

fn result(by: usize) -> Bytes {
    Bytes::from(format!("result {by}"))
}

fn reason(by: usize) -> String {
    format!("reason {by}")
}

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

/// What the replies so far show.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct History {
    phase: Phase,
    /// How many attempts have asked at least once.
    asked: usize,
    /// When the lease or the delay ends.
    protected_until_ms: u64,
    /// When the record may be forgotten.
    kept_until_ms: u64,
    /// How many attempts count.
    counted: u8,
    /// Whether any attempt ended without an outcome.
    silent: bool,
    /// Whether the next attempt takes over from it, because the one that did so was not started.
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
            let (asked, highest_fencing_token) = (self.asked, self.highest_fencing_token);
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
            (step, Reply::NotOwner) => self.lost(step)?,
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
        let over = now.millis() > self.protected_until_ms;
        let recovery = match self.phase {
            Phase::Owned {
                by: owner,
                recovery,
                fencing_token,
            } if owner == by => {
                let same = Grant {
                    attempt: self.counted,
                    recovery,
                    fencing_token,
                    reopened: false,
                };
                return ensure(*grant == same, "the same token gets the same grant again");
            }
            Phase::Completed { .. } => return Err("no grant after completed (S5)"),
            Phase::Failed { .. } => return Err("no grant after given up"),
            Phase::Owned { .. } => {
                ensure(
                    over,
                    "a claim is not granted while another owner has the lease",
                )?;
                self.silent = true;
                Recovery::Takeover
            }
            Phase::Released { .. } => {
                ensure(over, "a claim is not granted before the retry is due")?;
                match (self.silent, self.untaken) {
                    (true, true) => Recovery::Takeover,
                    (true, false) => Recovery::Earlier,
                    (false, _) => Recovery::None,
                }
            }
            Phase::Absent => Recovery::None,
        };
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

    fn protect(&mut self, until_ms: u64) {
        self.protected_until_ms = until_ms;
        self.kept_until_ms = until_ms + u64::try_from(TAIL.as_millis()).expect("thirty days");
    }

    /// `NotOwner` is never the reply to an owner.
    fn lost(&self, step: Step) -> Result<(), Violation> {
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
            _ => false,
        };
        ensure(!entitled, "the owner of a claim does not get NotOwner")
    }

    /// Whether the attempt of a step has ended in the same way; a heartbeat goes with every end.
    fn ended_so(&self, step: Step) -> bool {
        let ended = match self.phase {
            Phase::Absent | Phase::Owned { .. } | Phase::Released { by: None } => return false,
            Phase::Released { by: Some(by) }
            | Phase::Completed { by }
            | Phase::Failed { by, .. } => by,
        };
        match (step, self.phase) {
            (Step::Extend(by), _)
            | (Step::Complete(by), Phase::Completed { .. })
            | (Step::Release { by, .. }, Phase::Released { .. })
            | (Step::Fail(by), Phase::Failed { .. }) => by == ended,
            _ => false,
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
                self.phase = Phase::Released { by: None };
                (self.counted, self.silent, self.untaken, self.fingerprint) =
                    (0, false, false, None);
                self.protect(now.millis() - 1);
                return Ok(());
            }
            Step::ReopenAnother => return Err("a reopen compares what the operator saw"),
            _ if self.ended_so(step) => return Ok(()),
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
        match step {
            Step::Extend(_) => self.protect(self.protected_until_ms.max(now.millis() + LEASE_MS)),
            Step::Release { by, delay_ms, end } => {
                let (counts, has_outcome) = match end {
                    ReleaseCause::Failed => (true, true),
                    ReleaseCause::Interrupted | ReleaseCause::NotStarted => (false, true),
                    ReleaseCause::Discarded => (true, false),
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
            Step::Complete(by) => {
                self.phase = Phase::Completed { by };
                self.kept_until_ms = now.millis() + RETENTION_MS;
            }
            Step::Fail(by) => {
                self.phase = Phase::Failed {
                    by,
                    handed_over: false,
                };
                self.kept_until_ms = now.millis() + RETENTION_MS;
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether the record agrees with this history.
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
