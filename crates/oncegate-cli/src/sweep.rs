//! `oncegate sweep`: deletes large results whose records have expired.

use std::time::Duration;

use oncegate::Gate;
use oncegate::core::key::Scope;
use oncegate::results::{ObjectResults, ResultStore as _, Sweep, Swept};
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::configured::{ConfigArgs, choose, missing};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table};
use crate::parse::duration;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.sweep/1";

/// Delete the large results of a scope whose records have expired
///
/// Results older than --older-than are deleted, by the clock of the result store. Give it the
/// retention of the scope's gates plus two days: a younger result may belong to a record that a
/// duplicate can still read.
#[derive(Debug, clap::Args)]
pub(crate) struct SweepArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// Where the results are: a folder, or s3://bucket/prefix with credentials from the AWS
    /// variables [default: the folder of the configuration]
    #[arg(long, value_name = "PLACE", env = "ONCEGATE_RESULTS")]
    results: Option<String>,

    /// The scope of the consumer's gate [default: the only consumer of the configuration]
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Option<Scope>,

    /// The retention of the scope's gates plus two days: 9d [default: that of the configuration]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    older_than: Option<Duration>,

    /// Only count what would be deleted
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct SweepDocument<'a> {
    schema: &'static str,
    results: &'a str,
    scope: &'a str,
    dry_run: bool,
    /// Deleted, or to be deleted.
    over: u64,
    over_bytes: u64,
    kept: u64,
}

pub(crate) async fn run(args: &SweepArgs) -> Result<Exit, Problem> {
    let Expired {
        place,
        scope,
        older_than,
    } = args.expired()?;
    let results = open(&place)?;
    let sweep = if args.dry_run {
        Sweep::Count
    } else {
        Sweep::Delete
    };
    let sweeping = async {
        let swept = results.sweep(&scope, older_than, sweep).await;
        swept.map_err(|error| Problem::new(Exit::Unreachable, error.to_string()))
    };
    let Swept {
        kept,
        over,
        over_bytes,
    } = within(args.answer.timeout, sweeping).await?;
    if args.answer.json {
        output::answer_json(&SweepDocument {
            schema: SCHEMA,
            results: &place,
            scope: scope.as_str(),
            dry_run: args.dry_run,
            over,
            over_bytes,
            kept,
        })?;
    } else {
        let mut table = Table::default();
        table.text("results", &place);
        table.text("scope", scope.as_str());
        table.number(
            if args.dry_run {
                "would be deleted"
            } else {
                "deleted"
            },
            over,
        );
        table.number("  bytes", over_bytes);
        table.number("kept", kept);
        output::answer(&table.render())?;
    }
    Ok(Exit::Yes)
}

/// The results that are deleted.
struct Expired {
    place: String,
    scope: Scope,
    older_than: Duration,
}

impl SweepArgs {
    /// Returns the results that flags and configuration name.
    fn expired(&self) -> Result<Expired, Problem> {
        let loaded = self.config.load(self.results.is_some())?;
        let Some(loaded) = loaded else {
            return Ok(Expired {
                place: self.results.clone().ok_or_else(|| missing("--results"))?,
                scope: self.scope.clone().ok_or_else(|| missing("--scope"))?,
                older_than: self.older_than.ok_or_else(|| missing("--older-than"))?,
            });
        };
        let (name, consumer) = choose(&loaded, self.scope.as_ref().map(Scope::as_str))?;
        let folder = consumer.large_results.as_ref();
        let place = self
            .results
            .clone()
            .or_else(|| Some(folder?.display().to_string()));
        let place = place.ok_or_else(|| {
            Problem::configuration("it keeps no large results: give --results").of(name)
        })?;
        Ok(Expired {
            place,
            scope: Scope::new(name)?,
            older_than: self
                .older_than
                .unwrap_or(consumer.gate.retention + Gate::SWEEP_MARGIN),
        })
    }
}

fn open(place: &str) -> Result<ObjectResults, Problem> {
    #[cfg(feature = "s3")]
    if place.starts_with("s3://") {
        return ObjectResults::s3(place).map_err(|error| refused(&error.to_string()));
    }
    if place.contains("://") {
        let with_s3 = if cfg!(feature = "s3") {
            "s3://bucket/prefix"
        } else {
            "(with the feature `s3`) s3://bucket/prefix"
        };
        return Err(refused(&format!(
            "{place} is no place that this build knows; known are a folder, and {with_s3}"
        )));
    }
    // Opening would create the folder, and there would be nothing to delete.
    if !std::path::Path::new(place).is_dir() {
        return Err(Problem::new(
            Exit::Unreachable,
            format!("there is no folder {place}"),
        ));
    }
    ObjectResults::folder(place).map_err(|error| refused(&error.to_string()))
}

fn refused(why: &str) -> Problem {
    Problem::configuration(format!("--results: {why}"))
}
