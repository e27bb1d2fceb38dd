//! The stop of a consumer at its dead-letter limit (`oncegate accept dead-letters`).

use oncegate::admin;
use oncegate::core::key::Scope;
use oncegate::core::store::{DeadLetterStop, Store, StoreError};

use super::{Accepted, Obstacle, Words};

impl Obstacle for DeadLetterStop {
    const WORDS: Words = Words {
        schema: "oncegate.accept.dead-letters/1",
        question: "as many messages may go to the dead letters again: accept that?",
        change: "accept the dead letters",
        event: "accept_dead_letters",
        state: "stopped",
        since: "stopped_at_ms",
        accepted: [
            "accepted: the next process of scope ",
            " may give up as many again",
        ],
        not_found: [
            "no consumer of scope ",
            " has stopped at its dead-letter limit",
        ],
    };

    async fn find(store: &dyn Store, scope: &Scope) -> Result<Option<Self>, StoreError> {
        admin::dead_letter_stop_of(store, scope).await
    }

    async fn accept(&self, store: &dyn Store, scope: &Scope) -> Result<Accepted<Self>, StoreError> {
        Ok(admin::accept_dead_letters(store, scope)
            .await?
            .map_or(Accepted::Gone, Accepted::Yes))
    }

    fn since_and_why(&self) -> (u64, &str) {
        (self.at_ms, &self.what)
    }
}
