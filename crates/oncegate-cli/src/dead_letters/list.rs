//! `oncegate dead-letters list`: lists dead letters with their causes and reasons.

use std::collections::BTreeMap;

use oncegate::admin::Wanted;
use serde::Serialize;

use super::filter::FilterArgs;
use super::place::PlaceArgs;
use super::show::Known;
use crate::args::{AnswerArgs, within};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table, grouped, plain};
use crate::sources::{LetterPlace, check_positions};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.dead-letters.list/1";

/// List the dead letters of a topic or queue: how many of each cause, and each with its reason
///
/// Nothing of a payload is printed. A topic is only read. A queue cannot be read without receiving,
/// so it requires --use-up-a-receive; its messages are visible again at the end.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    place: PlaceArgs,

    #[command(flatten)]
    filter: FilterArgs,

    /// List at most this many dead letters; all are counted
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(..=100_000))]
    most: u32,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Debug, Default, Serialize)]
struct ListDocument {
    schema: &'static str,
    place: String,
    /// The number of dead letters.
    seen: u64,
    /// The number of those that match the filter.
    matching: u64,
    /// The number of matching ones by cause; `foreign` counts messages that oncegate did not write.
    by_cause: BTreeMap<&'static str, u64>,
    /// The first of those that match.
    letters: Vec<Known>,
}

pub(crate) async fn run(args: &ListArgs) -> Result<Exit, Problem> {
    let loaded = args.place.load(false)?;
    let place = args.place.find(loaded.as_ref(), args.filter.scope())?;
    check_positions(&*place, args.filter.positions())?;
    let document = within(args.answer.timeout, read(args, &*place)).await?;
    if args.answer.json {
        output::answer_json(&document)?;
    } else {
        output::answer(&text(&document))?;
    }
    Ok(Exit::Yes)
}

async fn read(args: &ListArgs, place: &dyn LetterPlace) -> Result<ListDocument, Problem> {
    let mut document = ListDocument {
        schema: SCHEMA,
        place: place.name().to_owned(),
        ..ListDocument::default()
    };
    super::read(place, |stored| {
        document.seen += 1;
        if args.filter.judge(&stored) != Wanted::Yes {
            return;
        }
        document.matching += 1;
        let cause = stored
            .letter()
            .map_or("foreign", |letter| letter.cause.as_str());
        *document.by_cause.entry(cause).or_default() += 1;
        if document.letters.len() < args.most as usize {
            document.letters.push(Known::of(&stored));
        }
    })
    .await?;
    Ok(document)
}

fn word(value: Option<&str>) -> String {
    plain(value.unwrap_or("-"))
}

fn text(document: &ListDocument) -> String {
    let mut table = Table::default();
    table.text("dead letters", &document.place);
    table.number("seen", document.seen);
    table.number("matching", document.matching);
    for (cause, count) in &document.by_cause {
        table.number(&format!("  {cause}"), *count);
    }
    let mut text = table.render();
    for letter in &document.letters {
        text.push_str(&format!(
            "\n{}  {}  {}  from {}  {}\n  {}\n",
            plain(&letter.at),
            word(letter.failed_at.as_deref()),
            letter.cause.unwrap_or("foreign"),
            word(letter.origin.as_deref()),
            word(letter.key.as_deref()),
            word(letter.reason.as_deref()),
        ));
    }
    let rest = document.matching - document.letters.len() as u64;
    if rest > 0 {
        text.push_str(&format!("\n… and {} more (--most)\n", grouped(rest)));
    }
    text
}
