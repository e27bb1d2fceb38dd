//! `oncegate outbox status`: what an outbox holds.

use std::time::Duration;

use oncegate::outbox::{OutboxStatus, OutboxStore};
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table};
use crate::parse::duration;
use crate::store::{SqlStore, StoreArgs};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.outbox_status/1";

/// Show how many messages of an outbox wait, since when, and whether a relay leads
///
/// Exit code 1: a message has waited for longer than --older-than, or nothing is known of such an
/// outbox: no message is in it, and no relay leads it.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    store: StoreArgs,

    /// The outbox
    #[arg(long, value_name = "NAME")]
    outbox: String,

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
    led: bool,
}

pub(super) async fn run(args: &StatusArgs) -> Result<Exit, Problem> {
    let status = within(args.answer.timeout, async {
        let outbox: Box<dyn OutboxStore> = match args.store.open_sql().await? {
            SqlStore::Postgres(store) => Box::new(store.outbox(&args.outbox)?),
            SqlStore::Sqlite(store) => Box::new(store.outbox(&args.outbox).await?),
        };
        outbox.check().await?;
        Ok(outbox.status().await?)
    });
    let OutboxStatus {
        unsent,
        oldest_unsent,
        sent,
        led,
    } = status.await?;
    let oldest_unsent_ms =
        oldest_unsent.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    if args.answer.json {
        let outbox = &args.outbox;
        output::answer_json(&StatusDocument {
            schema: SCHEMA,
            outbox,
            unsent,
            oldest_unsent_ms,
            sent,
            led,
        })?;
    } else {
        let mut table = Table::default();
        table.text("outbox", &args.outbox);
        table.number("unsent", unsent);
        table.number("  the oldest, ms", oldest_unsent_ms.unwrap_or_default());
        table.number("sent and kept", sent);
        table.text("a relay leads", if led { "yes" } else { "no" });
        output::answer(&table.render())?;
    }
    let is_unknown = unsent == 0 && sent == 0 && !led;
    if is_unknown {
        eprintln!(
            "oncegate: nothing is known of an outbox {:?} here: it has no message, and no relay leads it; is it the right name?",
            args.outbox
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
