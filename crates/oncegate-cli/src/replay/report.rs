//! The report of a replay as text.

use oncegate::admin::dry_run::{Example, ReplayReport};

use super::args::ReplayArgs;
use crate::examined::Examined;
use crate::output::{self, Table, counted, grouped};
use crate::promise::Promised;

impl ReplayArgs {
    pub(super) fn text(
        &self,
        examined: &Examined,
        promise: &Promised,
        report: &ReplayReport,
    ) -> String {
        let mut table = Table::default();
        table.text("topic", examined.topics.join(", "));
        table.text("store", &examined.gate.store_name);
        promise.tell(&mut table);
        table.text("scope", examined.gate.scope.as_str());
        counts(&mut table, report);
        if examined.gate.fingerprint.is_some() {
            table.number("mismatched", report.mismatched);
            table.noted("not compared", report.uncompared, "counted above as well");
        }
        let mut text = table.render();
        examples(&mut text, report);
        text.push('\n');
        text.push_str(&self.verdict(report));
        text
    }

    pub(super) fn verdict(&self, report: &ReplayReport) -> String {
        let parts = changes(report);
        let forgiven = if self.passed(report) {
            ", which is allowed"
        } else {
            ""
        };
        if parts.is_empty() {
            "A replay would change nothing.".to_owned()
        } else {
            format!(
                "Of {}, {parts}{forgiven}.",
                counted(report.messages, "message")
            )
        }
    }
}

/// Describes the messages that the store would not answer; empty when there are none.
pub(super) fn changes(report: &ReplayReport) -> String {
    let parts: Vec<String> = [
        (report.would_run_again, "would run again"),
        (report.in_progress, "are in progress"),
        (report.waiting, "wait for a retry"),
        (report.unreadable, "have an unreadable record"),
        (report.dead_letters(), "would go to the dead letters"),
    ]
    .into_iter()
    .filter(|(count, _)| *count > 0)
    .map(|(count, what)| format!("{} {what}", grouped(count)))
    .collect();
    parts.join(", ")
}

/// Adds the first messages of each kind of finding.
pub(super) fn examples(text: &mut String, report: &ReplayReport) {
    for (title, examples) in [
        ("would run again", &report.examples.would_run_again),
        (
            "failed, not in the dead letters",
            &report.examples.failed_not_handed_over,
        ),
        ("mismatched", &report.examples.mismatched),
        ("unreadable", &report.examples.unreadable),
        ("undecodable", &report.examples.undecodable),
    ] {
        list(text, title, examples);
    }
}

fn precision(exact: bool) -> &'static str {
    if exact {
        "counted one by one"
    } else {
        "estimated, standard error 0.81 %"
    }
}

pub(super) fn counts(table: &mut Table, report: &ReplayReport) {
    table.number("messages", report.messages);
    table.noted(
        "distinct keys",
        report.distinct_keys,
        precision(report.distinct_keys_exact),
    );
    table.number("completed", report.completed);
    table.number("would run again", report.would_run_again);
    if report.would_run_again > 0 {
        table.noted(
            "  keys",
            report.would_run_again_keys,
            precision(report.would_run_again_keys_exact),
        );
        table.noted(
            "  without a record",
            report.without_record,
            "never run, or forgotten after the retention",
        );
        table.noted(
            "  abandoned",
            report.abandoned,
            "ended without an outcome, and the lease is over",
        );
        table.noted("  retry is due", report.retry_due, "failed or interrupted");
    }
    table.number("in progress", report.in_progress);
    table.number("waiting for a retry", report.waiting);
    table.noted("failed", report.failed_handed_over, "in the dead letters");
    table.noted(
        "failed",
        report.failed_not_handed_over,
        "not known to be in the dead letters",
    );
    table.noted(
        "unreadable",
        report.unreadable,
        "the store holds something else under the key",
    );
    table.noted("undecodable", report.undecodable, "no key can be made");
    for (kind, count) in &report.undecodable_by_kind {
        table.number(&format!("  {kind}"), *count);
    }
}

fn list(text: &mut String, title: &str, examples: &[Example]) {
    if examples.is_empty() {
        return;
    }
    text.push_str(&format!("\n{title}, the first {}:\n", examples.len()));
    for Example { origin, key, why } in examples {
        let key = key
            .as_deref()
            .map(|key| format!("  {key}"))
            .unwrap_or_default();
        text.push_str(&format!(
            "  {}{key}  {}\n",
            output::plain(origin),
            output::plain(why)
        ));
    }
}
