//! `oncegate give-up`: gives up one message, which becomes a dead letter.

use oncegate::admin::Decision;

use crate::args::AnswerArgs;
use crate::change::ChangeArgs;
use crate::decide::{self, DecisionWords};
use crate::exit::{Exit, Problem};
use crate::record::RecordArgs;

const WORDS: DecisionWords = DecisionWords {
    schema: "oncegate.give-up/1",
    event: "give_up",
    consequence: "the message runs no more; its consumer writes its dead letter when its next attempt is due",
    change: "give up the message",
};

/// Give up one message: it runs no more, and its consumer makes it a dead letter
///
/// It is for a message that is stuck: one that fails again and again while others wait behind it.
/// It first shows the record. Then the record becomes failed, with --why as its reason, unless an
/// attempt runs just now. The consumer writes the dead letter, with that reason, when it looks at
/// the message again: when its next attempt is due. A redrive runs it again.
///
/// Exit code 1: an attempt runs, it is completed or given up already, or the record has changed
/// meanwhile; nothing was changed.
#[derive(Debug, clap::Args)]
pub(crate) struct GiveUpArgs {
    #[command(flatten)]
    record: RecordArgs,

    #[command(flatten)]
    change: ChangeArgs,

    #[command(flatten)]
    answer: AnswerArgs,
}

pub(crate) async fn run(args: &GiveUpArgs) -> Result<Exit, Problem> {
    let GiveUpArgs {
        record,
        change,
        answer,
    } = args;
    decide::run(record, change, answer, &WORDS, |found, journal| {
        Decision::give_up(format!("given up by an operator: {}", journal.words()))
            .retention(found.terms.retention)
            .fingerprint(found.terms.fingerprint)
    })
    .await
}
