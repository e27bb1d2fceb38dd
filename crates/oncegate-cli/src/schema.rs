//! `oncegate sql` and `oncegate migrate`: the tables of a store in PostgreSQL.

use std::io::{BufRead, IsTerminal};
use std::time::Duration;

use oncegate::postgres::{PostgresStore, SchemaChange};
use serde::Serialize;

use crate::args::{duration, within};
use crate::exit::{Exit, Problem};
use crate::output;
use crate::store::StoreArgs;

/// Names the form of the document that `--json` prints.
const SCHEMA: &str = "oncegate.migrate/1";

/// Print the statements that make the tables of a store, for people to read and to run
///
/// It connects to nothing. SQLite files and Redis need no such statements.
#[derive(Debug, clap::Args)]
pub(crate) struct SqlArgs {
    /// The kind of the store
    #[arg(long = "store", value_name = "KIND", value_parser = ["postgres"])]
    _kind: String,

    /// Print too what this role must be granted to run consumers
    #[arg(long, value_name = "NAME")]
    role: Option<String>,
}

/// Make the tables of a store in PostgreSQL, or bring them to the format of this release
///
/// It first says what it would do, and does it in one transaction. When there is nothing to do, it needs no rights.
#[derive(Debug, clap::Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    store: StoreArgs,

    /// Only say what would be done. Exit code 1: there is something to do
    #[arg(long)]
    dry_run: bool,

    /// Do it without asking; needed where there is no terminal to ask on
    #[arg(long)]
    yes: bool,

    /// Print one JSON document instead of the statements
    #[arg(long)]
    json: bool,

    /// Give up after this time: 500ms, 30s, 5m [default: never]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    timeout: Option<Duration>,
}

/// The answer of `--json`.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: &'static str,
    /// The format that was found; `null` where there were no tables.
    from: Option<u32>,
    to: u32,
    sql: &'a str,
    /// Whether the statements were run.
    done: bool,
}

/// Prints statements.
pub(crate) fn sql(args: &SqlArgs) -> Result<Exit, Problem> {
    let grants = args.role.as_deref().map(PostgresStore::grant_sql).unwrap_or_default();
    output::answer(&[PostgresStore::schema_sql(), grants].join("\n"))?;
    Ok(Exit::Yes)
}

/// Makes tables.
pub(crate) async fn migrate(args: &MigrateArgs) -> Result<Exit, Problem> {
    let store = within(args.timeout, args.store.open_postgres()).await?;
    let change = within(args.timeout, async { Ok(store.schema_change().await?) }).await?;
    let pending = !change.sql.is_empty();
    if pending && !args.dry_run {
        if !args.json {
            output::answer(&change.sql)?;
        }
        confirm(args, &change).await?;
        within(args.timeout, async { Ok(store.create_schema().await?) }).await?;
    } else if pending && !args.json {
        output::answer(&change.sql)?;
    }
    let done = pending && !args.dry_run;
    if args.json {
        let SchemaChange { from, to, sql, .. } = &change;
        output::answer_json(&Document { schema: SCHEMA, from: *from, to: *to, sql, done })?;
    }
    eprintln!("oncegate: {}", words(args, &change));
    Ok(if pending && args.dry_run { Exit::No } else { Exit::Yes })
}

fn words(args: &MigrateArgs, change: &SchemaChange) -> String {
    let (store, to) = (args.store.redacted(), change.to);
    let before = change.from.map_or("no tables".to_owned(), |from| format!("tables of format {from}"));
    match (change.sql.is_empty(), args.dry_run) {
        (true, _) => format!("{store} has tables of format {to}; there is nothing to do"),
        (false, true) => format!("{store} has {before}; the statements would give it tables of format {to}"),
        (false, false) => format!("{store} had {before}, and has tables of format {to} now"),
    }
}

/// Asks on a terminal; elsewhere only `--yes` will do, so that no pipe ever waits.
async fn confirm(args: &MigrateArgs, change: &SchemaChange) -> Result<(), Problem> {
    if args.yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        let text = "it would run the statements above: say --yes, or --dry-run to see them alone";
        return Err(Problem::new(Exit::Usage, text));
    }
    eprint!("oncegate: run these statements at {} (format {})? [y/N] ", args.store.redacted(), change.to);
    let asked = tokio::task::spawn_blocking(|| {
        let mut answer = String::new();
        std::io::stdin().lock().read_line(&mut answer).map(|_| answer)
    });
    match asked.await {
        Ok(Ok(answer)) if matches!(answer.trim(), "y" | "Y" | "yes") => Ok(()),
        _ => Err(Problem::new(Exit::No, "nothing was changed")),
    }
}
