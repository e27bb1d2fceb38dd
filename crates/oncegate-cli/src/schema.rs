//! `oncegate sql` and `oncegate migrate`: the tables of a store in PostgreSQL.

use oncegate::postgres::{PostgresStore, SchemaChange};
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::confirm::confirm;
use crate::exit::{Exit, Problem};
use crate::output;
use crate::store::StoreArgs;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.migrate/1";

/// Print the statements that create the tables of a store, to read or to run elsewhere
///
/// It connects to nothing. SQLite files and Redis need no such statements.
#[derive(Debug, clap::Args)]
pub(crate) struct SqlArgs {
    /// The kind of the store
    #[arg(long = "store", value_name = "KIND", value_parser = ["postgres"])]
    _kind: String,

    /// Also print the grants that this role needs to run consumers
    #[arg(long, value_name = "NAME")]
    role: Option<String>,

    /// Also print the statements for a journal: an entry for each change of state, in the same
    /// transaction
    #[arg(long)]
    journal: bool,
}

/// Create the tables of a store in PostgreSQL, or upgrade them to the format of this release
///
/// It first prints what it would do, and does it in one transaction. When there is nothing to do,
/// it needs no rights.
#[derive(Debug, clap::Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    store: StoreArgs,

    /// Also create a journal, unless there is one: an entry for each change of state, in the same
    /// transaction
    #[arg(long)]
    journal: bool,

    /// Only show what would be done. Exit code 1: there is something to do
    #[arg(long)]
    dry_run: bool,

    /// Do it without confirmation; required where there is no terminal
    #[arg(long)]
    yes: bool,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Debug, Serialize)]
struct MigrateDocument<'a> {
    schema: &'static str,
    /// The format that was found; `null` where there were no tables.
    from: Option<u32>,
    to: u32,
    sql: &'a str,
    /// `true` if the statements were run.
    done: bool,
}

/// Prints statements.
pub(crate) fn sql(args: &SqlArgs) -> Result<Exit, Problem> {
    let grants = args
        .role
        .as_deref()
        .map(PostgresStore::grant_sql)
        .unwrap_or_default();
    let journal = args
        .journal
        .then(PostgresStore::journal_sql)
        .unwrap_or_default();
    output::answer(&[PostgresStore::schema_sql(), journal, grants].join("\n"))?;
    Ok(Exit::Yes)
}

/// Creates or upgrades the tables.
pub(crate) async fn migrate(args: &MigrateArgs) -> Result<Exit, Problem> {
    let store = within(args.answer.timeout, args.store.open_postgres(args.journal)).await?;
    let change = within(args.answer.timeout, async {
        Ok(store.schema_change().await?)
    })
    .await?;
    let pending = !change.sql.is_empty();
    if pending && !args.dry_run {
        if !args.answer.json {
            output::answer(&change.sql)?;
        }
        let question = format!(
            "run these statements at {} (format {})?",
            args.store.redacted(),
            change.to
        );
        confirm(&question, "run the statements above", args.yes).await?;
        within(args.answer.timeout, async {
            Ok(store.create_schema().await?)
        })
        .await?;
    } else if pending && !args.answer.json {
        output::answer(&change.sql)?;
    }
    let done = pending && !args.dry_run;
    if args.answer.json {
        let SchemaChange { from, to, sql, .. } = &change;
        output::answer_json(&MigrateDocument {
            schema: SCHEMA,
            from: *from,
            to: *to,
            sql,
            done,
        })?;
    }
    eprintln!("oncegate: {}", words(args, &change));
    Ok(if pending && args.dry_run {
        Exit::No
    } else {
        Exit::Yes
    })
}

fn words(args: &MigrateArgs, change: &SchemaChange) -> String {
    let store = args.store.redacted();
    let to = change.to;
    let before = change.from.map_or("no tables".to_owned(), |from| {
        format!("tables of format {from}")
    });
    match (change.sql.is_empty(), args.dry_run) {
        (true, _) => format!("{store} has tables of format {to}; there is nothing to do"),
        (false, true) => {
            format!("{store} has {before}; the statements would give it tables of format {to}")
        }
        (false, false) => format!("{store} had {before}, and has tables of format {to} now"),
    }
}
