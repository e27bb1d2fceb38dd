//! What came out of runs, in numbers and in a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::settings::StoreKind;

/// What came out of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What the run was made from.
    pub seed: u64,
    /// Which store.
    pub store: StoreKind,
    /// The faults, in their order.
    pub faults: Vec<String>,
    /// How many messages were produced.
    pub messages: u64,
    /// How many effects there were.
    pub effects: u64,
    /// How many of them were second ones, each explained.
    pub extra_effects: u64,
    /// How many commits the broker has taken.
    pub commits: u64,
    /// What was reached, and how often.
    pub reached: BTreeMap<String, u64>,
    /// How workers ended that were not asked to.
    pub surprises: Vec<String>,
    /// What did not hold.
    pub violations: Vec<String>,
    /// How long it took.
    pub seconds: u64,
}

impl Report {
    /// Whether it was reached at least once.
    #[must_use]
    pub fn has_reached(&self, what: &str) -> bool {
        self.reached.get(what).is_some_and(|count| *count > 0)
    }
}

/// What runs of every kind together must reach. No name has a comma, because commas separate them
/// in the report.
const REACHABLE: [&str; 23] = [
    "granted",
    "takeover",
    "completed",
    "busy",
    "failed",
    "mismatch",
    "held",
    "held after a loss of the claim",
    "lost lease",
    "unknown outcome",
    "store unavailable",
    "loss noticed",
    "duplicate",
    "handler succeeded",
    "handler failed",
    "handler gave_up",
    "handler dropped",
    "handler hung",
    "handler late",
    "run finished after a group signal",
    "dead letter bad_key",
    "dead letter mismatch",
    "dead letter permanent",
];

/// The runs of one kind, added up.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    rows: BTreeMap<(String, StoreKind), Row>,
    /// What was reached in all of them.
    pub reached: BTreeMap<String, u64>,
    /// What did not hold, with the seed.
    pub violations: Vec<String>,
}

#[derive(Clone, Debug, Default)]
struct Row {
    runs: u64,
    messages: u64,
    faults: u64,
    extra_effects: u64,
    violations: u64,
}

impl Summary {
    /// Adds a run to the row of this name.
    pub fn add(&mut self, name: &str, report: &Report) {
        let row = self
            .rows
            .entry((name.to_owned(), report.store))
            .or_default();
        row.runs += 1;
        row.messages += report.messages;
        row.faults += report.faults.len() as u64;
        row.extra_effects += report.extra_effects;
        row.violations += report.violations.len() as u64;
        for (what, count) in &report.reached {
            *self.reached.entry(what.clone()).or_default() += count;
        }
        let seed = report.seed;
        self.violations.extend(
            report
                .violations
                .iter()
                .map(|one| format!("seed {seed}: {one}")),
        );
    }

    /// What none of the runs has reached: about that they prove nothing.
    #[must_use]
    pub fn unreached(&self) -> Vec<&'static str> {
        REACHABLE
            .into_iter()
            .filter(|what| !self.reached.contains_key(*what))
            .collect()
    }

    /// What was reached, and how often, in Markdown: a run that did not meet its faults proves
    /// nothing.
    #[must_use]
    pub fn reached_table(&self) -> String {
        let reached = self
            .reached
            .iter()
            .map(|(what, count)| format!("{what} {count}"));
        let unreached = match self.unreached() {
            none if none.is_empty() => String::new(),
            some => format!(" Never reached: {}.", some.join(", ")),
        };
        format!(
            "Reached: {}.{unreached}\n",
            reached.collect::<Vec<_>>().join(", ")
        )
    }

    /// Its table, in Markdown.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table =
            "| fault | store | runs | times | messages | second effects, each explained | violations |\n\
                         |---|---|---:|---:|---:|---:|---:|\n"
                .to_owned();
        for ((name, store), row) in &self.rows {
            let Row {
                runs,
                messages,
                faults,
                extra_effects,
                violations,
            } = row;
            let store = format!("{store:?}").to_lowercase();
            // Writing into a text cannot fail.
            _ = writeln!(
                table,
                "| {name} | {store} | {runs} | {faults} | {messages} | {extra_effects} | {violations} |"
            );
        }
        table
    }
}
