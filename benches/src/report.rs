//! Prints the figures: one line each, or all as one JSON document.

use serde::Serialize;

use crate::figure::{Baseline, Bound, Figure, Summary};
use crate::machine::Machine;
use crate::rounds::Plan;

/// The version of the JSON document's schema.
const SCHEMA: &str = "oncegate-bench/1";

/// The figures of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: &'static str,
    machine: Machine,
    plan: Plan,
    benchmarks: Vec<Answered>,
}

#[derive(Debug, Serialize)]
struct Answered {
    name: &'static str,
    question: &'static str,
    figures: Vec<Figure>,
}

impl Report {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            schema: SCHEMA,
            machine: Machine::look(),
            plan,
            benchmarks: Vec::new(),
        }
    }

    /// The lines before the figures.
    pub(crate) fn head(&self) -> String {
        let names = line([
            "figure", "value", "unit", "baseline", "", "ratio", "spread", "target",
        ]);
        format!("{}\n\n{names}", self.machine)
    }

    /// Adds a benchmark's figures and returns them as lines.
    pub(crate) fn add(
        &mut self,
        name: &'static str,
        question: &'static str,
        figures: Vec<Figure>,
    ) -> String {
        let lines: Vec<String> = figures.iter().map(|figure| show(name, figure)).collect();
        self.benchmarks.push(Answered {
            name,
            question,
            figures,
        });
        lines.join("\n")
    }

    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers and texts can be written")
    }
}

fn show(benchmark: &str, figure: &Figure) -> String {
    let name = format!("{benchmark}: {}", figure.name);
    let value = number(figure.value.median);
    let unit = figure.unit.as_str();
    let target = figure.target.map_or_else(String::new, |target| {
        let (of, sign) = match target.bound {
            Bound::RatioAtLeast => ("", "≥"),
            Bound::RatioAtMost => ("", "≤"),
            Bound::ValueAtLeast => ("value ", "≥"),
            Bound::ValueAtMost => ("value ", "≤"),
        };
        format!(
            "{of}{sign} {} {}",
            target.limit,
            if target.met { "met" } else { "MISSED" }
        )
    });
    match &figure.baseline {
        Some(Baseline {
            name: baseline,
            value: theirs,
            ratio,
        }) => {
            let theirs = number(theirs.median);
            let ratio_text = format!("{:.2}", ratio.median);
            line([
                &name,
                &value,
                unit,
                baseline,
                &theirs,
                &ratio_text,
                &spread(*ratio, |n| format!("{n:.2}")),
                &target,
            ])
        }
        None => line([
            &name,
            &value,
            unit,
            "",
            "",
            "",
            &spread(figure.value, number),
            &target,
        ]),
    }
}

fn spread(summary: Summary, show: impl Fn(f64) -> String) -> String {
    format!("{}–{}", show(summary.min), show(summary.max))
}

/// The columns of a line. Only the last one may have any width.
fn line([name, value, unit, baseline, theirs, ratio, spread, target]: [&str; 8]) -> String {
    let line = format!(
        "{name:<42} {value:>9} {unit:<6}  {baseline:<28} {theirs:>9} {ratio:>6}  {spread:<15} {target}"
    );
    line.trim_end().to_owned()
}

/// Formats large numbers in groups of three digits, and small ones with two decimals.
fn number(value: f64) -> String {
    if value.abs() < 1_000.0 {
        return format!("{value:.2}");
    }
    let digits = format!("{value:.0}");
    let mut grouped = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}
