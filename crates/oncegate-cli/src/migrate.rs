//! `oncegate migrate`: prints, creates and upgrades the tables of a store.

use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::configured::{ConfigArgs, NamedStore, StoreFlag};
use crate::confirm::confirm;
use crate::exit::{Exit, Problem};
use crate::output;
use crate::stores::{self, Statements, TableChange};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.migrate/1";

/// Create the tables of a store in PostgreSQL or DynamoDB, or upgrade or print them
///
/// It first prints what it would do, and does it: in PostgreSQL in one transaction. When there is
/// nothing to do, it needs no rights. With --print it connects to nothing, and prints the
/// statements to read or to run elsewhere: for dynamodb://table a template of CloudFormation, the
/// same for Terraform, and the policy of a consumer. SQLite files and Redis need no tables made by
/// a command.
#[derive(Debug, clap::Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    config: ConfigArgs,

    #[command(flatten)]
    store: StoreFlag,

    /// Only print the statements that create the tables, without connecting to the store
    #[arg(long, conflicts_with_all = ["dry_run", "yes", "json"])]
    print: bool,

    /// With --print: also the grants that this role needs to run consumers
    #[arg(long, value_name = "NAME", requires = "print")]
    role: Option<String>,

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

pub(crate) async fn run(args: &MigrateArgs) -> Result<Exit, Problem> {
    if args.print {
        return args.print();
    }
    // The parser does not ask for a flag that another one, such as --yes, excludes.
    if args.role.is_some() {
        return Err(Problem::new(
            Exit::Usage,
            "--role needs --print: the statements that grant rights are only printed",
        ));
    }
    let loaded = args.config.load(args.store.url.is_some())?;
    let store = args.store.or_of(loaded.as_ref())?;
    migrate(args, &store).await
}

/// Creates or upgrades the tables.
async fn migrate(args: &MigrateArgs, named: &NamedStore) -> Result<Exit, Problem> {
    let store = within(args.answer.timeout, named.open_tables(args.journal)).await?;
    let change = within(args.answer.timeout, store.table_change()).await?;
    let pending = !change.text.is_empty();
    if pending && !args.dry_run {
        if !args.answer.json {
            output::answer(&change.text)?;
        }
        let question = format!(
            "run these statements at {} (format {})?",
            named.redacted(),
            change.to
        );
        confirm(&question, "run the statements above", args.yes).await?;
        within(args.answer.timeout, store.make_tables()).await?;
    } else if pending && !args.answer.json {
        output::answer(&change.text)?;
    }
    let done = pending && !args.dry_run;
    if args.answer.json {
        let TableChange { from, to, text } = &change;
        output::answer_json(&MigrateDocument {
            schema: SCHEMA,
            from: *from,
            to: *to,
            sql: text,
            done,
        })?;
    }
    eprintln!("oncegate: {}", words(args, named, &change));
    Ok(if pending && args.dry_run {
        Exit::No
    } else {
        Exit::Yes
    })
}

impl MigrateArgs {
    /// Prints what makes tables that do not exist.
    fn print(&self) -> Result<Exit, Problem> {
        let asked = Statements {
            journal: self.journal,
            role: self.role.as_deref(),
        };
        output::answer(&stores::statements(self.store.url.as_deref(), &asked)?)?;
        Ok(Exit::Yes)
    }
}

fn words(args: &MigrateArgs, named: &NamedStore, change: &TableChange) -> String {
    let store = named.redacted();
    let to = change.to;
    let before = change.from.map_or("no tables".to_owned(), |from| {
        format!("tables of format {from}")
    });
    match (change.text.is_empty(), args.dry_run) {
        (true, _) => format!("{store} has tables of format {to}; there is nothing to do"),
        (false, true) => {
            format!("{store} has {before}; the statements would give it tables of format {to}")
        }
        (false, false) => format!("{store} had {before}, and has tables of format {to} now"),
    }
}
