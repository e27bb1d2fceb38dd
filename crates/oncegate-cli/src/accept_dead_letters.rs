//! `oncegate accept-dead-letters`: lets a consumer continue that has stopped at its dead-letter
//! limit.

use oncegate::admin;
use oncegate::core::key::Scope;
use oncegate::core::store::{DeadLetterStop, Store, StoreError};

use crate::accept::{self, AcceptArgs, Accepted, Obstacle, Words};
use crate::exit::{Exit, Problem};

/// Let a consumer continue that has stopped at its dead-letter limit
///
/// The stop outlives restarts: until a message succeeds, each process of the scope stops at the
/// first message that it would have to give up. This command shows when and why it stopped, and
/// lets the next process give up as many messages again. It is not needed when the cause is gone,
/// because the first message that succeeds ends the stop.
///
/// Exit code 1: no consumer of the scope has stopped so; nothing was changed.
#[derive(Debug, clap::Args)]
pub(crate) struct AcceptDeadLettersArgs {
    #[command(flatten)]
    args: AcceptArgs,
}

pub(crate) async fn run(args: &AcceptDeadLettersArgs) -> Result<Exit, Problem> {
    accept::run::<DeadLetterStop>(&args.args).await
}

impl Obstacle for DeadLetterStop {
    const WORDS: Words = Words {
        schema: "oncegate.accept-dead-letters/1",
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
