//! `oncegate outbox status`: what an outbox holds.

use std::time::Duration;

use oncegate::outbox::OutboxStatus;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::config::Loaded;
use crate::configured::{ConfigArgs, StoreFlag, missing};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table};
use crate::parse::duration;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.outbox_status/1";

/// Show how many messages of an outbox wait, since when, and whether a relay leads
///
/// Exit code 1: a message has waited for longer than --older-than, or nothing is known of such an
/// outbox: no message is in it, and no relay leads it.
#[derive(Debug, clap::Args)]
pub(crate) struct OutboxStatusArgs {
    #[command(flatten)]
    config: ConfigArgs,

    #[command(flatten)]
    store: StoreFlag,

    /// The outbox [default: the only one of the configuration]
    #[arg(long, value_name = "NAME")]
    outbox: Option<String>,

    /// How long a message may wait before the exit code is 1 [default: any time]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    older_than: Option<Duration>,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct StatusDocument<'a> {
    schema: &'static str,
    outbox: &'a str,
    unsent: u64,
    /// `null` when nothing waits.
    oldest_unsent_ms: Option<u64>,
    /// Sent, and kept until the retention is over.
    sent: u64,
    /// Unsent rows that are no messages.
    malformed: u64,
    led: bool,
}

pub(super) async fn run(args: &OutboxStatusArgs) -> Result<Exit, Problem> {
    let loaded = args.config.load(args.store.url.is_some())?;
    let name = &args.outbox(loaded.as_ref())?;
    let store = args.store.or_of(loaded.as_ref())?;
    let status = within(args.answer.timeout, async {
        let outbox = store.open_outbox(name).await?;
        outbox.check().await?;
        Ok(outbox.status().await?)
    });
    let OutboxStatus {
        unsent,
        oldest_unsent,
        sent,
        malformed,
        led,
    } = status.await?;
    let oldest_unsent_ms =
        oldest_unsent.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    if args.answer.json {
        output::answer_json(&StatusDocument {
            schema: SCHEMA,
            outbox: name,
            unsent,
            oldest_unsent_ms,
            sent,
            malformed,
            led,
        })?;
    } else {
        let mut table = Table::default();
        table.text("outbox", name);
        table.number("unsent", unsent);
        table.number("  the oldest, ms", oldest_unsent_ms.unwrap_or_default());
        if malformed > 0 {
            table.number("  no messages", malformed);
        }
        table.number("sent and kept", sent);
        table.text("a relay leads", if led { "yes" } else { "no" });
        output::answer(&table.render())?;
    }
    let is_unknown = unsent == 0 && sent == 0 && !led;
    if is_unknown {
        eprintln!(
            "oncegate: nothing is known of an outbox {name:?} here: it has no message, and no relay leads it; is it the right name?"
        );
    }
    if malformed > 0 {
        eprintln!(
            "oncegate: {malformed} rows of the outbox are no messages, and the later ones of their keys wait behind \
             them; the relay's log has the reasons, and docs/OUTBOX.md what a row must be"
        );
    }
    let is_late = args
        .older_than
        .is_some_and(|limit| oldest_unsent.is_some_and(|age| age > limit));
    Ok(if is_late || is_unknown {
        Exit::No
    } else {
        Exit::Yes
    })
}

impl OutboxStatusArgs {
    fn outbox(&self, loaded: Option<&Loaded>) -> Result<String, Problem> {
        if let Some(name) = &self.outbox {
            return Ok(name.clone());
        }
        let loaded = loaded.ok_or_else(|| missing("--outbox"))?;
        let names: Vec<&str> = loaded.config.outbox.keys().map(String::as_str).collect();
        match names.as_slice() {
            [only] => Ok((*only).to_owned()),
            [] => Err(Problem::configuration("the configuration has no outbox")),
            several => Err(Problem::configuration(format!(
                "which outbox of the configuration? Give --outbox with one of {}",
                several.join(", ")
            ))),
        }
    }
}
