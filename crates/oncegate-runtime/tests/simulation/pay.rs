//! The handler: how it treats each payment, and what its effects are.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use fastrand::Rng;
use futures_util::FutureExt;
use futures_util::future::join_all;
use oncegate::{
    Attempt, BatchHandler, BatchMessage, Failure, Handler, Message, TransactionalBatchHandler,
    TransactionalHandler,
};
use tokio::time::sleep;

use crate::given::Given;
use crate::ledger::Ledger;
use crate::till::Till;
use crate::witness::Witness;

/// How the handler treats a key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Behaviour {
    Quick,
    /// Holds its thread for so long in each poll, and gives it back in between without waiting for
    /// anything.
    Computes {
        polls: u32,
        ms: u64,
    },
    Slow {
        ms: u64,
    },
    FailsAtFirst {
        times: u32,
    },
    FailsAlways,
    GivesUp,
    /// Wants the message later, more often than it has attempts.
    WantsLater {
        times: u32,
    },
    PanicsAtFirst,
    /// Ignores its cancellation.
    Stubborn {
        ms: u64,
    },
    /// Never returns at its first attempt.
    Hangs,
    /// Charges in a transaction, after a while.
    Transacts {
        ms: u64,
        manner: Manner,
    },
}

/// What a handler makes of its transaction.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Manner {
    /// It passes on what the commit answers.
    Plain,
    /// It announces a completion at its first attempt, and drops the transaction.
    Forgets,
    /// It returns success, whatever the commit returns.
    Overlooks,
    /// It tries another transaction in the same run when the first one has failed.
    Insists,
    /// It fails when everything is committed.
    FailsAfterwards,
    /// It panics when everything is committed.
    PanicsAfterwards,
}

impl Behaviour {
    /// Whether its effects share a database with the records.
    pub(crate) fn transacts(self) -> bool {
        matches!(self, Self::Transacts { .. })
    }
}

pub(crate) fn behaviour(rng: &mut Rng) -> Behaviour {
    match rng.u32(..30) {
        0..7 => Behaviour::Quick,
        7 => computes(rng),
        8..11 => Behaviour::Slow {
            ms: rng.u64(1..400),
        },
        11 => Behaviour::Slow {
            ms: rng.u64(1_000..5_000),
        },
        12..14 => Behaviour::FailsAtFirst {
            times: rng.u32(1..4),
        },
        14 => Behaviour::FailsAlways,
        15 => Behaviour::GivesUp,
        16 => Behaviour::PanicsAtFirst,
        17 => Behaviour::Stubborn {
            ms: rng.u64(500..3_000),
        },
        18 => Behaviour::Hangs,
        19 => Behaviour::WantsLater {
            times: rng.u32(1..15),
        },
        _ => {
            use Manner::{FailsAfterwards, Forgets, Insists, Overlooks, PanicsAfterwards, Plain};
            let manners = [
                Plain,
                Forgets,
                Overlooks,
                Insists,
                FailsAfterwards,
                PanicsAfterwards,
            ];
            Behaviour::Transacts {
                ms: rng.u64(..1_500),
                manner: manners[rng.usize(..manners.len())],
            }
        }
    }
}

/// A handler that computes; each second one ends in its first poll.
pub(crate) fn computes(rng: &mut Rng) -> Behaviour {
    Behaviour::Computes {
        polls: if rng.bool() { 1 } else { rng.u32(2..20) },
        ms: rng.u64(..300),
    }
}

/// Uses time up without letting other tasks run, as a computing handler or a machine that stands
/// still does.
pub(crate) fn hold_the_thread(ms: u64) {
    let advance = std::pin::pin!(tokio::time::advance(Duration::from_millis(ms)));
    // It goes on at its first poll, and yields after that.
    let _yields = advance.poll(&mut Context::from_waker(Waker::noop()));
}

pub(crate) struct Pay {
    pub(crate) witness: Arc<Witness>,
    pub(crate) behaviours: Arc<Vec<Behaviour>>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) till: Arc<Till>,
}

#[derive(serde::Deserialize)]
pub(crate) struct Payment {
    pub(crate) id: u64,
}

impl Pay {
    fn charge(&self, id: u64) -> String {
        let mut effects = self.ledger.effects.lock().unwrap();
        let charges = effects.entry(id).or_default();
        *charges += 1;
        format!("charge {charges} of {id}")
    }
}

impl Pay {
    async fn transact(
        &self,
        attempt: &Attempt,
        id: u64,
        manner: Manner,
    ) -> Result<String, Failure> {
        let result = format!("attempt {} of {id}", attempt.number());
        if matches!(manner, Manner::Forgets) && attempt.number() == 1 {
            _ = attempt.completing(&result);
            return Ok(result);
        }
        let mut committed = attempt
            .commit_with(self.till.transaction(id), &result)
            .await;
        if committed.is_err() && matches!(manner, Manner::Insists) {
            committed = attempt
                .commit_with(self.till.transaction(id), &result)
                .await;
        }
        match manner {
            Manner::Overlooks => {}
            Manner::FailsAfterwards => return Err("failed afterwards".into()),
            Manner::PanicsAfterwards => panic!("simulated"),
            Manner::Plain | Manner::Forgets | Manner::Insists => committed?,
        }
        Ok(result)
    }
}

impl Handler for Pay {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        self.witness.begins(message, attempt);
        self.pay(message, attempt).await
    }

    async fn duplicate(&self, message: &Message, result: String) -> Result<(), Failure> {
        let id = message.json::<Payment>()?.id;
        self.witness.has_not_stopped();
        // A hook is as quick as its handler.
        match self.behaviours[usize::try_from(id).unwrap()] {
            Behaviour::Computes { ms, .. } => hold_the_thread(ms),
            Behaviour::Slow { ms } => sleep(Duration::from_millis(ms)).await,
            _ => {}
        }
        self.ledger
            .results
            .lock()
            .unwrap()
            .entry(id)
            .or_default()
            .push(result);
        Ok(())
    }
}

impl Pay {
    async fn pay(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let id = message.json::<Payment>()?.id;
        let behaviour = self.behaviours[usize::try_from(id).unwrap()];
        match behaviour {
            Behaviour::Quick => {}
            Behaviour::Computes { polls, ms } => {
                hold_the_thread(ms);
                for _ in 1..polls {
                    tokio::task::yield_now().await;
                    hold_the_thread(ms);
                }
            }
            Behaviour::Slow { ms } => {
                tokio::select! {
                    () = sleep(Duration::from_millis(ms)) => {}
                    () = attempt.cancelled() => return Err("cancelled".into()),
                }
            }
            Behaviour::FailsAtFirst { times } if attempt.number() <= times => {
                return Err("not yet".into());
            }
            Behaviour::FailsAlways => return Err("never".into()),
            Behaviour::GivesUp => return Err(Failure::permanent("rejected")),
            Behaviour::WantsLater { times } if self.ledger.note_later(id) <= times => {
                return Err(Failure::later(Duration::from_millis(300), "not ready"));
            }
            Behaviour::PanicsAtFirst if attempt.number() == 1 => panic!("simulated"),
            Behaviour::Hangs if attempt.number() == 1 => std::future::pending().await,
            Behaviour::Stubborn { ms } => {
                let result = self.charge(id);
                sleep(Duration::from_millis(ms)).await;
                return Ok(result);
            }
            Behaviour::Transacts { ms, manner } => {
                sleep(Duration::from_millis(ms)).await;
                return self.transact(attempt, id, manner).await;
            }
            Behaviour::FailsAtFirst { .. }
            | Behaviour::WantsLater { .. }
            | Behaviour::PanicsAtFirst
            | Behaviour::Hangs => {}
        }
        Ok(self.charge(id))
    }
}

/// The same handler for batches: what makes it fail as a whole is found before there is any effect,
/// as a transaction would be rolled back.
pub(crate) struct PayTogether(pub(crate) Pay);

impl BatchHandler for PayTogether {
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        for one in batch {
            self.0.witness.begins(one.message(), one.attempt());
        }
        for one in batch {
            let id = one.message().json::<Payment>()?.id;
            match self.0.behaviours[usize::try_from(id).unwrap()] {
                Behaviour::FailsAlways => return Err("never".into()),
                Behaviour::GivesUp => return Err(Failure::permanent("rejected")),
                Behaviour::PanicsAtFirst if one.attempt().number() == 1 => panic!("simulated"),
                _ => {}
            }
        }
        let handle = async |one: &BatchMessage| {
            let handled = self.0.pay(one.message(), one.attempt());
            let handled = AssertUnwindSafe(handled).catch_unwind().await;
            handled.unwrap_or_else(|_| Err("panicked afterwards".into()))
        };
        Ok(join_all(batch.iter().map(handle)).await)
    }

    async fn duplicate(&self, message: &Message, result: String) -> Result<(), Failure> {
        Handler::duplicate(&self.0, message, result).await
    }
}

/// The same handler for the transactions that it is given: whatever it charges is gone when it
/// fails.
pub(crate) struct PayGiven(pub(crate) Pay);

impl PayGiven {
    /// What follows the charge.
    async fn follow(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let id = message.json::<Payment>()?.id;
        match self.0.behaviours[usize::try_from(id).unwrap()] {
            Behaviour::Slow { ms }
            | Behaviour::Stubborn { ms }
            | Behaviour::Transacts { ms, .. } => {
                sleep(Duration::from_millis(ms)).await;
            }
            Behaviour::FailsAtFirst { times } if attempt.number() <= times => {
                return Err("not yet".into());
            }
            Behaviour::FailsAlways => return Err("never".into()),
            Behaviour::GivesUp => return Err(Failure::permanent("rejected")),
            Behaviour::WantsLater { times } if self.0.ledger.note_later(id) <= times => {
                return Err(Failure::later(Duration::from_millis(300), "not ready"));
            }
            Behaviour::PanicsAtFirst if attempt.number() == 1 => panic!("simulated"),
            Behaviour::Hangs if attempt.number() == 1 => std::future::pending().await,
            _ => {}
        }
        Ok(format!("attempt {} of {id}", attempt.number()))
    }
}

impl TransactionalHandler<Given> for PayGiven {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        given: &mut Given,
    ) -> Result<String, Failure> {
        self.0.witness.has_not_stopped();
        given.charge(message.json::<Payment>()?.id)?;
        self.follow(message, attempt).await
    }

    async fn duplicate(&self, message: &Message, result: String) -> Result<(), Failure> {
        Handler::duplicate(&self.0, message, result).await
    }
}

impl TransactionalBatchHandler<Given> for PayGiven {
    type Output = String;

    async fn handle(
        &self,
        batch: &[BatchMessage],
        given: &mut Given,
    ) -> Result<Vec<Result<String, Failure>>, Failure> {
        self.0.witness.has_not_stopped();
        for one in batch {
            given.charge(one.message().json::<Payment>()?.id)?;
        }
        let fails_all = |one: &BatchMessage| {
            let payment = one.message().json::<Payment>();
            let behaviour =
                payment.map(|payment| self.0.behaviours[usize::try_from(payment.id).unwrap()]);
            matches!(behaviour, Ok(Behaviour::FailsAlways))
        };
        // As a statement for all rows that fails because of one.
        if batch.iter().any(fails_all) {
            return Err("never".into());
        }
        let follow = async |one: &BatchMessage| self.follow(one.message(), one.attempt()).await;
        Ok(join_all(batch.iter().map(follow)).await)
    }

    async fn duplicate(&self, message: &Message, result: String) -> Result<(), Failure> {
        Handler::duplicate(&self.0, message, result).await
    }
}
