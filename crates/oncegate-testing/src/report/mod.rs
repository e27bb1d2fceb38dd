//! A [`Verdict`] as JSON, JUnit XML and HTML.
//!
//! The functions return text; none writes a file. No report has anything of a payload: samples are
//! named by their numbers, keys by digests.

mod html;
mod junit;
mod picture;
mod schema;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::fault::Fault;
use crate::verdict::{Finding, Verdict};

pub use html::{catalogue, html};
pub use junit::junit;
pub use schema::schema;

/// The format of the JSON document, in its member `schema`.
pub const SCHEMA: &str = "oncegate.prove/1";

/// The JSON document with the verdict of a trial.
#[derive(Serialize, JsonSchema)]
#[schemars(title = "The report of oncegate prove")]
struct VerdictDocument<'a> {
    /// The name of this format.
    #[schemars(extend("const" = SCHEMA))]
    schema: &'static str,
    /// `true` if nothing was found, and enough of the faults were tried.
    passed: bool,
    /// The seed of the trial.
    seed: u64,
    /// The time that the trial took.
    #[schemars(range(min = 0))]
    seconds: f64,
    /// The number of rounds that were played, the first one without faults among them.
    rounds: u64,
    /// The number of messages that were sent.
    messages: u64,
    /// The number of runs of a handler.
    runs: u64,
    /// The number of effects that happened.
    effects: u64,
    /// The number of calls that could not be assigned to a sample, and were not judged.
    unassigned: u64,
    /// The number of times that each fault has begun.
    #[schemars(extend(
        "propertyNames" = { "$ref": "#/$defs/Fault" },
        "additionalProperties" = { "type": "integer", "minimum": 1 },
    ))]
    faults: &'a BTreeMap<Fault, u64>,
    /// `true` if enough of the faults were tried for a trial that passes: three of four.
    complete: bool,
    /// The faults that were asked for and have not begun.
    untried: Vec<Fault>,
    /// One for each kind of defect, from the simplest round that shows it.
    findings: Vec<FindingDocument<'a>>,
}

/// A defect that was found, in the simplest round that shows it, with what it means.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Finding")]
struct FindingDocument<'a> {
    #[serde(flatten)]
    finding: &'a Finding,
    /// The meaning of the defect in production.
    meaning: &'static str,
    /// The usual way to mend the defect.
    remedy: &'static str,
    /// The command that plays the round again.
    repeat: String,
}

/// Returns the verdict as one JSON document. `docs/PROVE.md` describes its members, and [`schema`]
/// is its JSON schema. `repeat` returns the command or the settings that play a round again.
pub fn json(verdict: &Verdict, repeat: impl Fn(&Finding) -> String) -> serde_json::Value {
    let findings = verdict.findings.iter().map(|finding| FindingDocument {
        finding,
        meaning: finding.violation.defect.meaning(),
        remedy: finding.violation.defect.remedy(),
        repeat: repeat(finding),
    });
    let document = VerdictDocument {
        schema: SCHEMA,
        passed: verdict.is_clean() && verdict.is_complete(),
        seed: verdict.seed,
        seconds: verdict.took.as_secs_f64(),
        rounds: verdict.rounds,
        messages: verdict.messages,
        runs: verdict.runs,
        effects: verdict.effects,
        unassigned: verdict.unassigned,
        faults: &verdict.faults,
        complete: verdict.is_complete(),
        untried: verdict.untried(),
        findings: findings.collect(),
    };
    serde_json::to_value(document).expect("it has only texts, numbers, and maps with texts as keys")
}

/// The text with the characters replaced that mean something in XML and HTML, and without those
/// that XML forbids.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
