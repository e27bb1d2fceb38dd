//! The planted bugs: with the fault that shows a bug, and a few rounds, each is found, and the
//! catalogue has an entry of it.
//!
//! `ONCEGATE_PROVE_DEFAULTS=FILE` tries each bug at default settings instead (all faults, 60
//! seconds), and appends a line with the time until it was found to FILE; `scripts/prove-catalogue
//! --defaults` publishes them.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;

use serde_json::Value;

use super::catalogue::{self, Entry};
use super::{RIGHT_KEY, Stage, batch_flags, witness, worker};

/// How many rounds the trials of a bug have, until one finds it. What batches hold depends on what
/// comes at the same time.
const ROUNDS: [&str; 4] = ["4", "8", "16", "32"];

/// A worker that does something wrong.
pub(super) struct Planted {
    script: &'static str,
    bug: &'static str,
    key: &'static str,
    /// The faults that show the bug.
    faults: &'static str,
    /// The defects that may be named.
    pub(super) expected: &'static [&'static str],
}

/// What a bug may also be found as when other faults than its own happen: a message that has the
/// outcome of another has its result, too.
const ALSO: &[(&str, &str)] = &[("first_outcome_for_all", "different-results")];

type Row = (&'static str, &'static str, &'static [&'static str]);

const fn planted(script: &'static str, (bug, faults, expected): Row) -> Planted {
    Planted {
        script,
        bug,
        key: RIGHT_KEY,
        faults,
        expected,
    }
}

const fn python(
    bug: &'static str,
    faults: &'static str,
    expected: &'static [&'static str],
) -> Planted {
    planted("worker.py", (bug, faults, expected))
}

const fn node(
    bug: &'static str,
    faults: &'static str,
    expected: &'static [&'static str],
) -> Planted {
    planted("worker.js", (bug, faults, expected))
}

const PYTHON_KEYS: &[Planted] = &[
    python(
        "no_downstream_key",
        "kill-after-effect,answer-lost",
        &["no-downstream-key"],
    ),
    python(
        "key_with_attempt",
        "kill-after-effect",
        &["changing-downstream-key"],
    ),
    python("no_downstream_key", "store-loss", &["no-downstream-key"]),
    python("key_with_time", "answer-lost", &["changing-downstream-key"]),
    python(
        "random_key",
        "kill-before-completed",
        &["changing-downstream-key"],
    ),
    python("one_key_for_all", "redelivery", &["shared-downstream-key"]),
    python("retries_in_place", "answer-lost", &["no-downstream-key"]),
    python(
        "key_of_position",
        "kill-then-duplicate",
        &["changing-downstream-key"],
    ),
    python("body_with_attempt", "kill-after-effect", &["changing-body"]),
];

const PYTHON_LOSSES: &[Planted] = &[
    python("swallows_errors", "refused", &["swallowed-error"]),
    python("no_answer_is_success", "no-answer", &["swallowed-error"]),
    python("gives_up", "refused", &["gave-up"]),
    python("marks_before_effect", "refused", &["marked-before-effect"]),
    python(
        "answers_before_effect",
        "kill-after-completed",
        &["answered-too-early"],
    ),
    python(
        "message_before",
        "redelivery",
        &["lost-effect", "changing-downstream-key"],
    ),
    python("skips_older", "reordering", &["lost-effect"]),
];

const PYTHON_OTHERS: &[Planted] = &[
    python(
        "random_result",
        "kill-before-completed",
        &["different-results"],
    ),
    python("ignores_end_of_input", "redelivery", &["does-not-stop"]),
    planted(
        "table.py",
        (
            "without_unique_key",
            "kill-before-completed",
            &["repeated-effect"],
        ),
    ),
    planted(
        "file.py",
        (
            "checks_then_writes",
            "overlapping-runs",
            &["repeated-effect"],
        ),
    ),
];

const BATCHES: &[Planted] = &[
    planted(
        "batches.py",
        (
            "one_key_for_the_batch",
            "redelivery",
            &["shared-downstream-key"],
        ),
    ),
    planted(
        "batches.py",
        ("first_outcome_for_all", "refused", &["swallowed-error"]),
    ),
    planted(
        "batches.py",
        (
            "outcomes_in_order_of_completion",
            "refused",
            &["swallowed-error"],
        ),
    ),
    planted(
        "batches.py",
        (
            "whole_batch_again_without_keys",
            "refused",
            &["no-downstream-key"],
        ),
    ),
];

const NODE: &[Planted] = &[
    node(
        "noDownstreamKey",
        "kill-after-effect",
        &["no-downstream-key"],
    ),
    node("keyWithTime", "answer-lost", &["changing-downstream-key"]),
    node(
        "randomKey",
        "kill-before-completed",
        &["changing-downstream-key"],
    ),
    node(
        "oneKeyForTwoSteps",
        "redelivery",
        &["shared-downstream-key"],
    ),
    node(
        "forgetsToAwait",
        "kill-after-completed",
        &["answered-too-early"],
    ),
    node("ignoresTheStatus", "refused", &["swallowed-error"]),
    node(
        "chargesAfterCancel",
        "freeze",
        &["no-downstream-key", "effect-after-cancel"],
    ),
    node(
        "returnsTheTime",
        "kill-before-completed",
        &["different-results"],
    ),
];

const KEYS: &[Planted] = &[
    Planted {
        key: "order_id",
        ..python("right", "producer-duplicates", &["key-too-narrow"])
    },
    Planted {
        key: "order_id,currency,sent_at",
        ..python("right", "producer-duplicates", &["key-too-wide"])
    },
    Planted {
        key: "order_number",
        ..node("right", "producer-duplicates", &["no-key"])
    },
];

/// All of them, in the order of the catalogue.
pub(super) fn all() -> impl Iterator<Item = &'static Planted> {
    [
        PYTHON_KEYS,
        PYTHON_LOSSES,
        PYTHON_OTHERS,
        BATCHES,
        NODE,
        KEYS,
    ]
    .into_iter()
    .flatten()
}

impl Planted {
    /// The heading of its entry: "Python: no downstream key (kill-after-effect)".
    pub(super) fn title(&self) -> String {
        format!("{} ({})", self.name(), self.faults.replace(',', ", "))
    }

    /// "Python: no downstream key".
    fn name(&self) -> String {
        let language = if self.script.ends_with(".py") {
            "Python"
        } else {
            "Node"
        };
        let mut words = String::new();
        for c in self.bug.chars() {
            match c {
                '_' => words.push(' '),
                c if c.is_uppercase() => words.extend([' ', c.to_ascii_lowercase()]),
                c => words.push(c),
            }
        }
        let key = match self.key {
            RIGHT_KEY => String::new(),
            key => format!(" worker with the key {key}"),
        };
        format!("{language}: {words}{key}")
    }

    /// Runs trials, which must find the bug, and returns its entry of the catalogue.
    pub(super) async fn found(&self) -> Entry {
        let stage = Stage::new();
        let program = worker(self.script, self.bug);
        let list = witness::list_of(self.script);
        let mut flags = vec!["--handler-exec", &program, "--faults", self.faults];
        flags.extend(["--report", "report"]);
        flags.extend(batch_flags(self.script));
        if let Some(list) = &list {
            flags.extend(["--witness-command", list]);
        }
        let mut trials = ROUNDS.into_iter();
        let proved = loop {
            let Some(rounds) = trials.next() else {
                panic!("seed {}: {} is not found", stage.seed, self.title())
            };
            let proved = stage
                .prove(self.key, &[&flags[..], &["--rounds", rounds]].concat())
                .await;
            if !matches!(proved.code, Some(0 | 3)) {
                break proved;
            }
        };
        let defects = proved.ended(1).defects();
        let found = self.expected.iter().find(|defect| defects.contains(defect));
        let Some(found) = found else {
            panic!(
                "seed {}: {} must show {:?}\n{proved:?}",
                stage.seed,
                self.title(),
                self.expected
            )
        };
        let repeated = format!("--seed {} --round", stage.seed);
        assert!(
            proved.err.contains(&repeated),
            "how to repeat it: {}",
            proved.err
        );
        Entry::of_report(self.title(), found, &stage.read("report/report.html"))
    }
}

impl Planted {
    /// Runs a trial at default settings, which must find the bug, and appends how long that took to
    /// this file.
    async fn is_found_at_default_settings(&self, file: &Path) {
        let stage = Stage::new();
        let program = worker(self.script, self.bug);
        let list = witness::list_of(self.script);
        let mut flags = vec!["--handler-exec", &program, "--json"];
        flags.extend(batch_flags(self.script));
        if let Some(list) = &list {
            flags.extend(["--witness-command", list]);
        }
        let proved = stage.ended(stage.default_command(self.key, &flags)).await;
        let document = proved.ended(1).json();
        let findings = document["findings"].as_array().unwrap();
        let also = ALSO
            .iter()
            .filter(|(bug, _)| *bug == self.bug)
            .map(|(_, defect)| *defect);
        let expected: Vec<&str> = self.expected.iter().copied().chain(also).collect();
        let is_it = |finding: &&Value| {
            finding["defect"]
                .as_str()
                .is_some_and(|is| expected.contains(&is))
        };
        let first = findings
            .iter()
            .filter(is_it)
            .min_by(|one, other| seconds(one).total_cmp(&seconds(other)));
        let Some(first) = first else {
            panic!(
                "seed {}: {} is not found\n{proved:?}",
                stage.seed,
                self.name()
            )
        };
        let defect = first["defect"].as_str().unwrap();
        let line = format!(
            "| {} | `{defect}` | {:.0} s |\n",
            self.name(),
            seconds(first).ceil()
        );
        print!("{line}");
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(file)
            .unwrap();
        (&file).write_all(line.as_bytes()).unwrap();
    }
}

fn seconds(finding: &Value) -> f64 {
    finding["found_after_seconds"].as_f64().unwrap()
}

/// They take turns: each has processes of its own, and a machine has few cores.
async fn finds_each(planted: &[Planted]) {
    if let Some(file) = std::env::var_os("ONCEGATE_PROVE_DEFAULTS") {
        let mut tried = BTreeSet::new();
        for one in planted.iter().filter(|one| tried.insert(one.name())) {
            one.is_found_at_default_settings(Path::new(&file)).await;
        }
        return;
    }
    let page = catalogue::read();
    for one in planted {
        page.has(&one.found().await);
    }
}

// invariant: planted-bugs-found
#[tokio::test]
async fn missing_or_changing_downstream_keys_are_found_in_python() {
    finds_each(PYTHON_KEYS).await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn effects_that_are_lost_are_found_in_python() {
    finds_each(PYTHON_LOSSES).await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn other_bugs_are_found_in_python() {
    finds_each(PYTHON_OTHERS).await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn planted_bugs_of_batches_are_found() {
    finds_each(BATCHES).await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn planted_bugs_are_found_in_node() {
    finds_each(NODE).await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn keys_that_are_too_narrow_or_too_wide_are_found() {
    finds_each(KEYS).await;
}
