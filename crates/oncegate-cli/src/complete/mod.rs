//! `oncegate complete`: writes that the effects of messages have happened.

use std::path::PathBuf;

use bytes::Bytes;
use oncegate::admin::Decision;
use oncegate::admin::audit::Audit;
use oncegate::codec::{Codec, ToStored as _};
use oncegate::core::key::StoreKey;
use serde_json::value::RawValue;

use crate::args::{AnswerArgs, read_file};
use crate::at::Position;
use crate::audit::effects::EffectsArgs;
use crate::change::ChangeArgs;
use crate::decide::{self, DecisionWords};
use crate::examined::ExaminedArgs;
use crate::exit::{Exit, Problem};
use crate::record::RecordArgs;

mod by_effects;

const WORDS: DecisionWords = DecisionWords {
    schema: "oncegate.complete/1",
    event: "complete",
    consequence: "the message counts as done: it runs no more, and duplicates get the result",
    change: "complete the record",
};

/// Say that the effect of a message has happened: its record becomes completed
///
/// It is for a message whose outcome is unknown (the cause outcome_unknown of a dead letter) and
/// whose effect is found downstream, and for work that was done by hand. With --at or --store-key
/// it first shows the record. Then the record becomes completed, unless an attempt runs just now.
/// Duplicates get the result of --result; a redrive of its dead letter runs nothing. If it has not
/// happened, redrive the dead letter instead.
///
/// With --effects it is for many messages: after a loss of the store, it completes the records of
/// those messages of a window whose idempotency keys are in the list of effects, as `oncegate
/// audit` compares them. A replay runs the others then. It first counts in a dry run, and asks. It
/// may be stopped at any moment; the same command continues.
///
/// Exit code 1: an attempt runs, it is completed already, or the record has changed meanwhile;
/// nothing was changed. With --effects: some messages were left alone, which it names.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["at", "store_key", "effects", "effects_command"])))]
pub(crate) struct CompleteArgs {
    /// The message at this position, as logs and dead letters write it: orders/0@703
    #[arg(long, value_name = "TOPIC/PARTITION@OFFSET", conflicts_with_all = ["topics", "route"])]
    at: Option<Position>,

    /// The store key of the message, as logs and dead letters write it:
    /// billing:eMT5oSC2v1zTz8Nw5IO50A
    #[arg(long, value_name = "SCOPE:DIGEST", conflicts_with_all = ["topics", "route"])]
    store_key: Option<StoreKey>,

    /// A file with the result that duplicates get, as JSON [default: an empty result]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["effects", "effects_command"])]
    result: Option<PathBuf>,

    #[command(flatten)]
    effects: EffectsArgs,

    /// The step of the idempotency keys: what a handler in Rust gives to `idempotency_key`
    #[arg(long, value_name = "NAME", default_value = Audit::DEFAULT_STEP)]
    step: String,

    #[command(flatten)]
    examined: ExaminedArgs,

    #[command(flatten)]
    change: ChangeArgs,

    #[command(flatten)]
    answer: AnswerArgs,
}

pub(crate) async fn run(args: &CompleteArgs) -> Result<Exit, Problem> {
    if args.effects.are_given() {
        return by_effects::run(args).await;
    }
    let record = RecordArgs::of(&args.examined, args.at.clone(), args.store_key.clone());
    let result = match &args.result {
        Some(path) => Some(stored(path.clone()).await?),
        None => None,
    };
    decide::run(&record, &args.change, &args.answer, &WORDS, |found, _| {
        let decision = match result {
            Some(stored) => Decision::with_result(stored),
            None => Decision::happened(),
        };
        decision
            .retention(found.terms.retention)
            .fingerprint(found.terms.fingerprint)
    })
    .await
}

/// The stored form of the result in a file.
async fn stored(path: PathBuf) -> Result<Bytes, Problem> {
    let text = read_file(Some(path.clone())).await?;
    let json: Box<RawValue> = serde_json::from_slice(&text).map_err(|error| {
        let text = format!("--result: {} is not JSON: {error}", path.display());
        Problem::new(Exit::BadData, text)
    })?;
    let stored = json.to_stored(Codec::Json).map_err(|error| {
        let text = format!("--result: {} cannot be stored: {error}", path.display());
        Problem::new(Exit::Bug, text)
    })?;
    let most = oncegate::GateSettings::DEFAULT.max_result_bytes;
    if stored.len() > most {
        let text = format!("--result: {} is larger than {most} bytes", path.display());
        return Err(Problem::new(Exit::BadData, text));
    }
    Ok(stored)
}
