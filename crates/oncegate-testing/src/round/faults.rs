//! The faults that begin with a call, a run or a completion.

use std::time::Duration;

use oncegate_core::key::StoreKey;
use parking_lot::MutexGuard;
use tokio::time::Instant;

use super::Round;
use super::process::Process;
use crate::fault::Fault;
use crate::history::What;
use crate::schedule::Strike;

/// The number of leases that a run waits at most for another one beside it.
const OVERLAP_LEASES: u32 = 2;

/// The fault of a call of the downstream service.
#[derive(Clone, Copy, Debug)]
pub(super) enum CallFault {
    Refuse,
    KillBefore,
    /// With the time after which a run is killed that makes no call.
    KillAfter(Duration),
    LoseAnswer,
    NoAnswer(Duration),
    Late(Duration),
    Freeze(Duration),
    /// The call goes on when another process runs the sample, too, or after this time.
    Overlap {
        sample: usize,
        at_most: Duration,
    },
}

/// The fault of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CompletionFault {
    KillBefore,
    KillAfter,
    Loss,
    Undecodable,
}

impl Round {
    /// Takes the first fault that waits for this sample and begins in this way.
    fn strike(&self, sample: usize, begins: impl Fn(Fault) -> bool) -> Option<Strike> {
        let mut strikes = self.strikes();
        let place = strikes
            .iter()
            .position(|strike| strike.sample == sample && begins(strike.fault))?;
        Some(strikes.swap_remove(place))
    }

    fn strikes(&self) -> MutexGuard<'_, Vec<Strike>> {
        self.strikes.lock()
    }

    /// Begins the fault of a call for this sample. Faults of the broker and the store begin here
    /// and let the call go on.
    pub(super) fn call_fault(&self, process: &Process, sample: Option<usize>) -> Option<CallFault> {
        self.begin_fault(process, sample?, |fault| {
            fault.strikes_a_call() && !self.begins_with_runs(fault)
        })
    }

    /// Begins the fault of a run for this sample that begins. Where a witness lists the effects,
    /// there may be no calls that faults can begin with.
    pub(super) fn run_fault(&self, process: &Process, sample: Option<usize>) -> Option<CallFault> {
        self.begin_fault(process, sample?, |fault| {
            fault.strikes_a_call() && self.begins_with_runs(fault)
        })
    }

    fn begins_with_runs(&self, fault: Fault) -> bool {
        self.settings.witness.is_some() && !fault.concerns_the_answer()
    }

    fn begin_fault(
        &self,
        process: &Process,
        sample: usize,
        begins: impl Fn(Fault) -> bool,
    ) -> Option<CallFault> {
        let Strike { fault, tenths, .. } = self.strike(sample, begins)?;
        let lease = self.settings.lease;
        let time = lease * tenths / 10;
        self.recorder.note(
            process.number,
            What::FaultBegan {
                fault,
                sample: Some(sample),
            },
        );
        match fault {
            Fault::Refused => Some(CallFault::Refuse),
            Fault::KillBeforeEffect => Some(CallFault::KillBefore),
            Fault::KillAfterEffect => Some(CallFault::KillAfter(time / 10)),
            Fault::KillThenDuplicate => {
                let message = self.active.message_of(process.number, sample);
                let of_sample =
                    (0..self.sent.len()).filter(|other| self.sample_of(*other) == Some(sample));
                if let Some(message) = message {
                    self.group
                        .hold_back(message, &of_sample.collect::<Vec<_>>());
                }
                // A run without calls is killed at its end: its effect is complete.
                Some(CallFault::KillAfter(Duration::MAX))
            }
            Fault::OverlappingRuns => {
                self.losses.lose_records();
                if let Some(message) = self.active.message_of(process.number, sample) {
                    self.group.copy_to_others(message, process.number);
                }
                Some(CallFault::Overlap {
                    sample,
                    at_most: lease * OVERLAP_LEASES,
                })
            }
            Fault::AnswerLost => Some(CallFault::LoseAnswer),
            Fault::NoAnswer => Some(CallFault::NoAnswer(time)),
            Fault::LateAnswer => Some(CallFault::Late(time)),
            Fault::Freeze => Some(CallFault::Freeze(time)),
            Fault::Rebalance => {
                self.group.rotate();
                Some(CallFault::Late(lease / 10))
            }
            Fault::TwoConsumers => {
                if let Some(message) = self
                    .sent
                    .iter()
                    .position(|sending| sending.sample == sample)
                {
                    self.group.copy_to_others(message, process.number);
                }
                Some(CallFault::Late(time))
            }
            Fault::StoreOutage => {
                let until = Instant::now() + time;
                *self.store_away_until.lock() = Some(until);
                None
            }
            _ => None,
        }
    }

    /// Begins the fault of the completion of this key.
    pub(super) fn completion_fault(&self, key: &StoreKey, process: u32) -> Option<CompletionFault> {
        let sample = self.sample_of(*self.by_key.get(key)?)?;
        let Strike { fault, .. } = self.strike(sample, Fault::strikes_a_completion)?;
        self.recorder.note(
            process,
            What::FaultBegan {
                fault,
                sample: Some(sample),
            },
        );
        match fault {
            Fault::KillBeforeCompleted => Some(CompletionFault::KillBefore),
            Fault::KillAfterCompleted => Some(CompletionFault::KillAfter),
            Fault::StoreLoss => Some(CompletionFault::Loss),
            Fault::UndecodableResults => Some(CompletionFault::Undecodable),
            _ => None,
        }
    }
}
