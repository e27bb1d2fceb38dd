//! A halt of a scope because its store has lost records (`oncegate accept loss`).

use oncegate::admin::{self, AcceptedLoss};
use oncegate::core::key::Scope;
use oncegate::core::store::{Halt, Store, StoreError};

use super::{Accepted, Obstacle, Words};

impl Obstacle for Halt {
    const WORDS: Words = Words {
        schema: "oncegate.accept.loss/1",
        question: "messages whose records are lost will run again: accept the loss?",
        change: "accept the loss",
        event: "accept_loss",
        state: "halted",
        since: "noticed_at_ms",
        accepted: ["the loss is accepted: the processes of scope ", " go on"],
        not_found: ["scope ", " is not halted"],
    };

    async fn find(store: &dyn Store, scope: &Scope) -> Result<Option<Self>, StoreError> {
        admin::halt_of(store, scope).await
    }

    async fn accept(&self, store: &dyn Store, scope: &Scope) -> Result<Accepted<Self>, StoreError> {
        Ok(match admin::accept_loss(store, scope, self).await? {
            AcceptedLoss::Accepted(halt) => Accepted::Yes(halt),
            AcceptedLoss::NotHalted => Accepted::Gone,
            AcceptedLoss::Changed(halt) => Accepted::Changed(halt),
        })
    }

    fn since_and_why(&self) -> (u64, &str) {
        (self.at_ms, &self.reason)
    }
}
